"""The line that describes an out-of-memory error contains every number that is known."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from runner.base.oom_errors import OomCause
from runner.base.text import format_bytes
from runner.config.configuration import Choice
from runner.engine.update import oom_report
from runner.engine.update.oom_report import MemoryAccount, MemoryHolder, format_report, measure_memory, suggest_settings

GIB = 2**30
CAUSE = OomCause("device", "out of memory", 2 * GIB, "forward")
ACCOUNT = MemoryAccount(
    CAUSE, samples=8, shape="3x4", free_bytes=GIB, total_bytes=80 * GIB, held_bytes=70 * GIB, in_tensors_bytes=60 * GIB,
    others=(MemoryHolder(4711, "first", 5 * GIB), MemoryHolder(4712, "second", None)),
)  # fmt: skip


def test_the_line_contains_exactly_the_known_numbers() -> None:
    numbers = {
        "free_bytes": format_bytes(GIB),
        "total_bytes": format_bytes(80 * GIB),
        "held_bytes": format_bytes(70 * GIB),
        "in_tensors_bytes": format_bytes(60 * GIB),
    }
    line = str(ACCOUNT)
    assert all(number in line for number in (*numbers.values(), format_bytes(2 * GIB), "3x4"))
    assert all(text in line for text in ("first", "4711", format_bytes(5 * GIB), "second", "4712"))
    for field, number in numbers.items():
        unknown: dict[str, Any] = {field: None}
        assert number not in str(dataclasses.replace(ACCOUNT, **unknown)), field
    assert "4711" not in str(dataclasses.replace(ACCOUNT, others=()))


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, True),
        ({"in_tensors_bytes": 68 * GIB}, False),
        ({"in_tensors_bytes": 68 * GIB - 1}, True),
        ({"in_tensors_bytes": None}, False),
        ({"held_bytes": None}, False),
        ({"shortage": dataclasses.replace(CAUSE, requested_bytes=None)}, False),
    ],
)
def test_memory_is_fragmented_if_more_is_cached_than_was_requested(changed: dict[str, Any], expected: bool) -> None:
    assert dataclasses.replace(ACCOUNT, **changed).is_fragmented == expected


def plan_of(device: str, num_workers: int, **choices: Any) -> Any:
    """Return a plan with these options, each a name or a pair of name and options."""
    names: dict[str, Any] = {"precision": "bf16", "memory": "checkpoint", "optimizer": "sgd", "parallelism": "fsdp",
                             "dataloader": "default"} | choices  # fmt: skip
    pairs = {group: (name, {}) if isinstance(name, str) else name for group, name in names.items()}
    selected = {group: Choice(f"my {name}", name, options) for group, (name, options) in pairs.items()}
    return SimpleNamespace(device=device, num_workers=num_workers, choices=selected)


def settings_of(lines: list[str]) -> list[str]:
    """Return the settings at the start of the lines, without the general advice at the end."""
    return [line.split(" (")[0] for line in lines[:-2]]


HOST = dataclasses.replace(ACCOUNT, shortage=dataclasses.replace(CAUSE, side="host"))
READING = dataclasses.replace(HOST, shortage=dataclasses.replace(HOST.shortage, place="reading"))
ALONE = dataclasses.replace(ACCOUNT, others=(), in_tensors_bytes=69 * GIB)
OTHERS = "end other processes on this GPU: first"


@pytest.mark.parametrize(
    ("found", "samples", "plan", "expected"),
    [
        (ALONE, 1, plan_of("cuda:0", 2), []),
        (ALONE, 2, plan_of("cuda:0", 2), ["micro_batch_size=1"]),
        (ALONE, 8, plan_of("cuda:0", 2), ["micro_batch_size=4"]),
        (None, 1, plan_of("cuda:0", 2, memory="none"), ["memory=checkpoint"]),
        (None, 1, plan_of("cuda:0", 2, optimizer="adamw"), ["optimizer=adamw8bit"]),
        (None, 1, plan_of("cuda:0", 2, optimizer="adam"), ["optimizer=adamw8bit"]),
        (None, 1, plan_of("cuda:0", 2, parallelism="ddp"), ["parallelism=fsdp"]),
        (None, 1, plan_of("cuda:0", 2, precision="fp32"), ["precision=auto"]),
        (None, 1, plan_of("cuda:0", 2, precision="tf32"), ["precision=auto"]),
        (None, 1, plan_of("xpu:0", 2, precision="fp32"), []),
        (ACCOUNT, 1, plan_of("cuda:0", 2), [OTHERS, "memory.allocator=expandable_segments:True"]),
        (ACCOUNT, 1, plan_of("cuda:0", 2, memory=("checkpoint", {"allocator": "cudaMallocAsync"})), [OTHERS]),
        (HOST, 1, plan_of("cpu", 0, memory="none"), ["memory=checkpoint"]),
        (HOST, 1, plan_of("cuda:0", 0, memory="none", precision="fp32", optimizer="adamw"), []),
        (HOST, 1, plan_of("cpu", 0, parallelism="ddp"), []),
        (HOST, 4, plan_of("cpu", 3), ["micro_batch_size=2", "dataloader=default dataloader.num_workers=0"]),
        (HOST, 1, plan_of("cpu", 3, dataloader=("default", {"num_workers": 3})), ["dataloader.num_workers=0"]),
        (HOST, 1, plan_of("cpu", 0, dataloader=("default", {"cache": "memory"})), ["dataloader.cache=none"]),
        (HOST, 1, plan_of("cpu", 0, dataloader=("default", {"cache": "none"})), []),
        (READING, 1, plan_of("cpu", 0), ["dataloader.bad_samples=skip"]),
    ],
)  # fmt: skip
def test_only_settings_with_an_effect_are_suggested(
    found: MemoryAccount | None, samples: int, plan: Any, expected: list[str]
) -> None:
    lines = suggest_settings(plan, found, samples)
    assert settings_of(lines) == expected
    assert "accel-run plan" in lines[-2]


def test_a_report_names_each_tensor_once_with_its_size_and_owner() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(4096, 64))
    model.register_buffer("table", torch.zeros(2048, 64))
    model.weight.grad = torch.ones(4096, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.step()
    lines = format_report(ACCOUNT, model, optimizer, torch.device("cpu")).splitlines()
    assert lines[:3] == [CAUSE.text, str(ACCOUNT), "in forward"]
    rows = [tuple(line.split(maxsplit=1)) for line in lines[5:]]
    sizes = {what.split("  ")[-1].rpartition(") ")[2].strip(): int(size.replace(",", "")) for size, what in rows}
    of_weight = [size for name, size in sizes.items() if name.endswith("weight")]
    assert of_weight == [4096 * 64 * 4] * 3, "the weight, its gradient and its momentum"
    assert sizes["table"] == 2048 * 64 * 4
    numbers = [int(size.replace(",", "")) for size, what in rows if "tensors that have" not in what]
    assert sum(numbers) == int(rows[-1][0].replace(",", ""))
    listed = [number for (_, what), number in zip(rows, numbers, strict=False) if "more" not in what]
    assert listed == sorted(listed, reverse=True)


CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("limit", "used", "free", "total"),
    [
        (None, None, 6 * GIB, 16 * GIB),
        (16 * GIB, 16 * GIB, 6 * GIB, 16 * GIB),  # the limit is not below the memory of the machine
        (8 * GIB, 3 * GIB, 5 * GIB, 8 * GIB),
        (8 * GIB, 1 * GIB, 6 * GIB, 8 * GIB),
        (8 * GIB, 9 * GIB, 0, 8 * GIB),
        (8 * GIB, None, 6 * GIB, 8 * GIB),
    ],
)
def test_host_memory_is_limited_by_the_machine_or_the_cgroup(
    limit: int | None, used: int | None, free: int, total: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    grant = None if limit is None else SimpleNamespace(amount=limit, memory_bytes=lambda: used)
    monkeypatch.setattr(oom_report, "cgroup_memory_limit", lambda: grant)
    machine = SimpleNamespace(
        virtual_memory=lambda: SimpleNamespace(available=6 * GIB, total=16 * GIB),
        Process=lambda: SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=GIB)),
    )
    monkeypatch.setattr(oom_report, "psutil", machine)
    found = measure_memory(HOST.shortage, CPU, "", 4, "2x2")
    assert (found.free_bytes, found.total_bytes, found.held_bytes) == (free, total, GIB)
    assert (found.shortage, found.samples, found.shape) == (HOST.shortage, 4, "2x2")
    assert (found.in_tensors_bytes, found.others) == (None, ())


class Driver:
    """A driver with one GPU, whose memory is used by these processes."""

    def __init__(self, processes: list[tuple[int, int | None]] | None) -> None:
        self.listed = processes

    def find(self, uuid: str) -> str | None:
        return "gpu" if uuid == "GPU-1" else None

    def processes(self, gpu: str) -> Any:
        assert gpu == "gpu"
        return self.listed and [SimpleNamespace(pid=pid, used_bytes=used) for pid, used in self.listed]


def measure_on_gpu(
    monkeypatch: pytest.MonkeyPatch, driver: Driver, *, uuid: str = "GPU-1", side: str = "device"
) -> MemoryAccount:
    @contextmanager
    def open_driver() -> Iterator[Driver]:
        yield driver

    accelerator = SimpleNamespace(
        free_memory=lambda: (GIB, 80 * GIB),
        current_memory=lambda: SimpleNamespace(reserved=70 * GIB, allocated=60 * GIB),
    )
    monkeypatch.setattr(oom_report, "open_driver", open_driver)
    monkeypatch.setattr(oom_report, "get_accelerator", lambda device: accelerator)
    return measure_memory(dataclasses.replace(CAUSE, side=side), CPU, uuid, 4, "2x2")


def test_gpu_memory_is_attributed_to_this_process_and_the_largest_others(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = 2**22 + 7  # above the largest PID of Linux
    others = [(absent + number, None if number == 3 else number * GIB) for number in range(8)]
    found = measure_on_gpu(monkeypatch, Driver([(os.getpid(), 99 * GIB), (os.getppid(), 20 * GIB), *others]))
    assert (found.free_bytes, found.total_bytes) == (GIB, 80 * GIB)
    assert (found.held_bytes, found.in_tensors_bytes) == (70 * GIB, 60 * GIB)
    assert [holder.pid for holder in found.others] == [os.getppid(), *(absent + number for number in (7, 6, 5, 4))]
    assert [holder.held_bytes for holder in found.others] == [number * GIB for number in (20, 7, 6, 5, 4)]
    assert found.others[0].name != found.others[1].name == found.others[2].name


@pytest.mark.parametrize(("listed", "uuid"), [(None, "GPU-1"), ([], "GPU-1"), ([(1, GIB)], ""), ([(1, GIB)], "GPU-2")])
def test_without_a_process_list_no_other_processes_are_reported(
    listed: list[tuple[int, int | None]] | None, uuid: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert measure_on_gpu(monkeypatch, Driver(listed), uuid=uuid).others == ()


def test_an_error_on_the_host_is_described_with_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measure_on_gpu(monkeypatch, Driver([(1, GIB)]), side="host")
    assert found.total_bytes != 80 * GIB
    assert found.others == ()


@pytest.mark.parametrize(("samples", "text"), [(0, None), (1, "1 sample 3x4"), (2, "2 samples 3x4")])
def test_the_line_counts_the_samples(samples: int, text: str | None) -> None:
    line = str(dataclasses.replace(ACCOUNT, samples=samples))
    assert (text in line) if text else ("sample" not in line)
