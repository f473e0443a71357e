"""Record the attention calls of a training pass: arguments, the kernel that ran, and whether flash could run."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from runner.axes.attention import AttentionCall, record_calls, refusal_reason
from runner.base.picture import encode_png, new_figure
from runner.base.task import Task

from .data import Batch
from .model import Rows


@dataclass(frozen=True)
class NamedCall:
    """An attention call and its place in the model, such as "decoder 1 cross".

    flash_on_gpu  why the flash kernel would reject it in bfloat16 on a GPU of capability 8.0, or empty
    """

    name: str
    call: AttentionCall
    flash_on_gpu: str


def record_training_calls(
    task: Task, model: nn.Module, batch: Batch, *, num_layers: int, device: torch.device
) -> list[NamedCall]:
    """Return the attention calls of one training pass over a batch; the mode of the model is restored."""
    source, target = (Rows(*(field.to(device) for field in rows)) for rows in (batch.source, batch.target))
    moved = Batch(source, target, batch.labels.to(device), batch.places.to(device))
    was_training = model.training
    model.train()
    try:
        with torch.enable_grad():
            calls = record_calls(lambda: task.loss(model, moved))
    finally:
        model.train(was_training)
    numbers = range(1, num_layers + 1)
    names = [f"encoder {number} self" for number in numbers]
    names += [f"decoder {number} {kind}" for number in numbers for kind in ("self", "cross")]
    return [NamedCall(name, call, _flash_on_gpu(call)) for name, call in zip(names, calls, strict=True)]


def to_json(calls: Sequence[NamedCall], *, packed: bool) -> str:
    """Return the calls as a JSON object."""
    rows = [
        {"name": each.name, **asdict(each.call), "dtype": _name(each.call), "flash_on_gpu": each.flash_on_gpu}
        for each in calls
    ]
    masked = _count_masked(calls)
    return json.dumps({"packed": packed, "calls": len(calls), "with_mask": masked, "rows": rows}, indent=1) + "\n"


def format_summary(calls: Sequence[NamedCall]) -> str:
    """Return one line with the number of calls with a mask, and the kernels that ran."""
    kernels = ", ".join(sorted({each.call.kernel for each in calls}))
    open_to_flash = sum(not each.flash_on_gpu for each in calls)
    return (
        f"attention in training: {_count_masked(calls)} of {len(calls)} calls have a mask; kernel here: {kernels};"
        f" flash supports {open_to_flash} of {len(calls)} on a GPU in bfloat16"
    )


def picture(calls: Sequence[NamedCall], *, packed: bool) -> bytes:
    """Return a table of the calls as PNG."""
    figure = new_figure(10.0, 1.4 + 0.5 * len(calls))
    axes = figure.subplots()
    axes.axis("off")
    axes.set_xlim(0, sum(COLUMNS.values()))
    axes.set_ylim(len(calls) + 0.6, -1.5)
    figure.suptitle(
        f"Attention calls of one training pass, {'packed' if packed else 'padded'} rows", x=0.003, ha="left"
    )
    axes.set_title(f"{_count_masked(calls)} of {len(calls)} have a mask", loc="left", fontsize=10)
    _draw_row(axes, -1, [(name, WHITE) for name in COLUMNS], fontsize=9.0, weight="bold")
    for number, each in enumerate(calls):
        _draw_row(axes, number, _cells(each), fontsize=8.0)
    axes.text(0.05, len(calls) + 0.35, KEY, fontsize=8, color="#555555", va="center")
    return encode_png(figure)


def _cells(each: NamedCall) -> list[tuple[str, str]]:
    """Return text and color of each column."""
    call = each.call
    mask = ("given", ORANGE) if call.masked else ("none", GREEN)
    on_gpu = (each.flash_on_gpu, ORANGE) if each.flash_on_gpu else ("can run", GREEN)
    facts = [
        each.name,
        " x ".join(map(str, call.shape)),
        str(call.num_keys),
        _name(call),
        "yes" if call.causal else "no",
    ]
    return [*((fact, WHITE) for fact in facts), mask, (call.kernel, GREEN), on_gpu]


def _draw_row(axes: Any, row: int, cells: Sequence[tuple[str, str]], **font: Any) -> None:
    left = 0.0
    for (text, colour), width in zip(cells, COLUMNS.values(), strict=True):
        axes.barh(row, width - 0.03, left=left, height=0.94, color=colour)
        axes.text(left + 0.06, row, textwrap.fill(text, int(13 * width)), va="center", linespacing=1.1, **font)
        left += width


def _flash_on_gpu(call: AttentionCall) -> str:
    device, capability = torch.device("cuda"), (8, 0)
    return refusal_reason(
        "flash", torch.bfloat16, device, masked=call.masked, head_size=call.shape[-1], capability=capability
    )


def _count_masked(calls: Sequence[NamedCall]) -> int:
    return sum(each.call.masked for each in calls)


def _name(call: AttentionCall) -> str:
    return str(call.dtype).removeprefix("torch.")


WHITE, GREEN, ORANGE = "#ffffff", "#cdebd0", "#fbd5ae"
KEY = "green: ran, can run, or no mask     orange: a mask is given, or flash refuses"
# title -> width; 1 is about 13 characters
COLUMNS = {
    "call": 1.3,
    "batch x heads x queries x size": 1.5,
    "keys": 0.5,
    "type": 0.75,
    "causal": 0.6,
    "mask": 0.6,
    "kernel": 1.2,
    "flash on a GPU in bfloat16": 1.9,
}
