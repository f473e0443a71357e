"""Run accel-run as a rank of torchrun with gloo in place of NCCL, which refuses two ranks on one GPU."""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist

from runner.cli import main

init_process_group = dist.init_process_group


def init_over_gloo(backend: str, **options: Any) -> None:
    del backend
    init_process_group("gloo", **{**options, "device_id": None})


if __name__ == "__main__":
    dist.init_process_group = init_over_gloo  # type: ignore[assignment]
    sys.exit(main(sys.argv[1:]))
