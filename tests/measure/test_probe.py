"""Laws of the look at a task's code: what a line computes is not what reading a number of it costs."""

from __future__ import annotations

from pathlib import Path

import torch

from runner.measure.probe import _Reads


def test_what_a_line_computes_is_told_from_what_it_reads() -> None:
    rows = torch.ones(256, 256)

    with _Reads(Path(__file__).parent) as reads:
        (rows @ rows).sum().item()
        [row.item() for row in rows[0]]

    (computes, once), (views, often) = sorted(reads.found.items())
    assert (once, often) == (1, 256)
    assert reads.computing_s[computes] > 0
    assert views not in reads.computing_s
