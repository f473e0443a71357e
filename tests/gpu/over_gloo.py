"""Import this module to use gloo instead of NCCL, which refuses two ranks on one GPU."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

init_process_group = dist.init_process_group


def init_over_gloo(backend: str, **options: Any) -> None:
    del backend
    init_process_group("gloo", **{**options, "device_id": None})


dist.init_process_group = init_over_gloo  # type: ignore[assignment]
