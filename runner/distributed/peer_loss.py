"""Recognize errors that are only a consequence of the loss of another rank."""

from __future__ import annotations

import re
import traceback

from runner.base.errors import AccelRunError, Exit, exception_chain
from runner.base.text import error_message


def is_peer_loss(error: BaseException) -> bool:
    """Return whether the root cause is the loss of another rank, however the error was wrapped."""
    *_, error = exception_chain(error)
    text = error_message(error)
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if kinds & {"DistNetworkError", "DistStoreError"}:
        return True
    if isinstance(error, AccelRunError):
        return error.exit_code == Exit.RANK_LOST
    return bool(_PEER_LOSS_MESSAGE.search(text)) and (
        "DistError" in kinds or (isinstance(error, RuntimeError) and ("gloo" in text or _is_raised_by_torch(error)))
    )


def _is_raised_by_torch(error: BaseException) -> bool:
    """Return whether torch.distributed raised the error; data workers raise errors with similar messages."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and "/torch/distributed/" in frames[-1].filename


# Messages of gloo, NCCL and the stores about a lost peer, in torch 2.11 and 2.13.
_PEER_LOSS_MESSAGE = re.compile(
    r"connection (closed|reset|refused|was)|socket (closed|timeout|is not connected)|broken pipe|timed out|timeout"
    r"|remote process exited|ncclRemoteError|communicator was aborted|recv, got 0 bytes",
    re.IGNORECASE,
)
