"""Memory of a process on a device besides its tensors: reads overhead.yaml for one device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

MIB = 2**20


@dataclass(frozen=True)
class Overhead:
    """Memory of libraries in bytes; estimates include a margin.

    libraries      context, kernels and workspaces; on a CPU the interpreter and its modules
    communication  buffers for communication with other ranks, if any
    unseen         workspaces of GPU kernels, which a trace on a CPU does not see, as a fraction of the tensors
    """

    libraries: int = 0
    communication: int = 0
    unseen: float = 0.0


def get_overhead(kind: str, capability: tuple[int, int] | None) -> Overhead:
    """Return the overhead on a device of this kind and compute capability; if unknown, that of the newest GPUs."""
    if kind == "cpu":
        return Overhead(libraries=round(_read_figure("host", (0, 0)) * MIB))
    capability_or_newest = capability or (99, 0)
    return Overhead(
        libraries=round(_read_figure("context", capability_or_newest) * MIB) + cublas_workspace(capability_or_newest),
        communication=round(_read_figure("communication", capability_or_newest) * MIB),
        unseen=_read_figure("unseen", capability_or_newest),
    )


def cublas_workspace(capability: tuple[int, int]) -> int:
    """Return the bytes of cuBLAS's workspace, which torch takes from its allocator at the first matrix product."""
    return round(_read_figure("workspace", capability) * MIB)


def _read_figure(name: str, capability: tuple[int, int]) -> float:
    """Return the value of the highest capability up to this one, or else of the lowest, multiplied by its margin."""
    facts = _load_figures()[name]
    figures = {tuple(map(int, key.split("."))): value for key, value in facts.items() if key[0].isdigit()}
    below = [known for known in figures if known <= capability]
    return float(figures[max(below) if below else min(figures)] * facts["margin"])


@cache
def _load_figures() -> dict[str, Any]:
    figures: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return figures
