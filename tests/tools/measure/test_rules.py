"""Each rule of `advise` fires in its case, proposes the expected change, and does not fire without its data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from runner.base import stopwatch
from runner.config.configuration import compose
from runner.config.request import Request
from runner.plan.inventory import Cpu, Device
from runner.records.evidence import Evidence
from runner.records.phase_record import PhaseRecord
from runner.tools.measure.facts import Facts
from runner.tools.measure.rules import RULES, findings

CPU = Cpu("a processor", 8, 8, 32 * 2**30)
H100 = Device("cuda", 0, "NVIDIA H100", memory_bytes=80 * 2**30, capability=(9, 0))
T4 = Device("cuda", 0, "Tesla T4", memory_bytes=15 * 2**30, capability=(7, 5))
VALUES: Mapping[str, Any] = {
    "dataloader": "default", "dataloader.num_workers": 4, "dataloader.pin_memory": True, "dataloader.cache": "none",
    "dataloader.prefetch_factor": 2, "backend": "default", "compile": "off", "memory": "none", "precision": "bf16",
    "log_every": 10, "tracker": "none", "checkpoint.every": "auto",
}  # fmt: skip
PARTS = {
    "forward": 3.0, "backward": 6.0, "optimizer": 0.5, "data": 0.1, "transfer": 0.1, "logging": 0.1, "saving": 0.1,
    "evaluation": 0.1,
}  # fmt: skip


def facts(
    parts: Mapping[str, float] | None = None,
    values: Mapping[str, Any] | None = None,
    gpu: Device | None = H100,
    cpu: Cpu = CPU,
    probe: Mapping[str, Any] | None = None,
    monitor: Mapping[str, float] | None = None,
    throttled: Mapping[str, float] | None = None,
    gpus: tuple[Device, ...] | None = None,
    **evidence: Any,
) -> Facts:
    """Return the facts of a healthy run on a GPU, except for those given."""
    known: dict[str, Any] = {
        "device": "cuda:0" if gpu else "cpu", "updates": 100, "num_samples": 10_000, "global_batch_size": 64,
        "micro_batch_size": 64, "accumulation_steps": 1, "num_threads": 8, "parts_s": {**PARTS, **(parts or {})},
    }  # fmt: skip
    return Facts(
        Evidence(**{**known, **evidence}),
        {**VALUES, **(values or {})},
        cpu,
        gpus if gpus is not None else ((gpu,) if gpu else ()),
        gpu,
        probe or {},
        {"gpu0/util": 95.0, **(monitor or {})} if gpu else {},
        throttled or {},
    )


# case -> (facts, first rule, a required override or text of the proposal)
CASES: Mapping[str, tuple[Facts, str, str]] = {
    "workers 0": (facts({"data": 8.0}, {"dataloader.num_workers": 0}), "data wait", "dataloader.num_workers=4"),
    "few workers": (facts({"data": 8.0}, {"dataloader.num_workers": 1}), "data wait", "dataloader.num_workers=4"),
    "a thread": (
        facts({"data": 8.0}, {"dataloader": "thread"}), "data wait", "dataloader=default dataloader.num_workers=4",
    ),
    "a cache": (
        facts({"data": 8.0}, {"dataloader.num_workers": 0}, probe={"same_when_read_again": True, "sample_bytes": 1024}),
        "data wait",
        "dataloader.cache=memory",
    ),
    "unpinned": (facts({"transfer": 4.0}, {"dataloader.pin_memory": False}), "unpinned", "dataloader.pin_memory=true"),
    "varying shapes": (facts(values={"backend": "fast"}, num_batch_shapes=40), "varying shapes", "backend=default"),
    "compiled shapes": (facts(values={"compile": "default"}, num_batch_shapes=40), "varying shapes", "compile=off"),
    "saves": (facts({"saving": 5.0}, {"checkpoint.every": 1}), "checkpoints too often", "checkpoint.every=auto"),
    "rows": (facts({"logging": 5.0}, {"log_every": 1}), "logs too often", "log_every=50"),
    "evaluations": (facts({"evaluation": 9.0}, num_evaluations=50), "evaluates too often", "evaluate.every=10"),
    "hooks": (facts({"hooks": 5.0}, has_begin_update=True), "slow hooks", "begin_update"),
    "tiny micro-batches": (
        facts(micro_batch_size=2, accumulation_steps=32),
        "tiny micro-batches",
        "micro_batch_size=64",
    ),
    "memory left": (
        facts(values={"memory": "checkpoint"}, device_peak_reserved_gib=10.0, device_total_gib=80.0),
        "memory left",
        "memory=none",
    ),
    "fp32 on an H100": (facts(values={"precision": "fp32"}), "precision", "precision=bf16"),
    "fp32 on a T4": (facts(values={"precision": "fp32"}, gpu=T4), "precision", "precision=fp16"),
    "bf16 on a T4": (facts(values={"precision": "bf16"}, gpu=T4), "precision", "precision=fp16"),
    "fp32 on a CPU with bf16": (
        facts(values={"precision": "fp32"}, gpu=None, cpu=dataclasses.replace(CPU, flags=("amx_bf16",))),
        "precision",
        "precision=bf16",
    ),
    "bf16 emulated": (facts(values={"precision": "bf16"}, gpu=None), "precision", "precision=fp32"),
    "odd sizes": (facts(odd_sizes=("head: 50257 -> 50264",)), "odd sizes", "round these sizes up"),
    "idle GPU": (facts(monitor={"gpu0/util": 30.0}), "idle GPU", "compile=reduce-overhead"),
    "threads": (
        facts(values={"precision": "fp32"}, gpu=None, num_threads=32),
        "too many threads",
        "backend.threads=8",
    ),
    "small": (
        facts({**dict.fromkeys(PARTS, 0.001), "forward": 0.1}, monitor={"gpu0/util": 9.0}),
        "idle GPU",
        "compile=default",
    ),
    "hot": (facts(throttled={"thermal": 0.5}), "throttling", "cooling"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_largest_bottleneck_is_listed_first(case: str) -> None:
    given, rule, expected = CASES[case]

    result = findings(given)

    assert result, "no rule has fired"
    assert result[0].rule == rule, [finding.rule for finding in result]
    proposed = [candidate.name for candidate in result[0].candidates]
    assert any(expected in text for text in (*proposed, result[0].by_hand)), proposed


def test_a_healthy_run_has_no_findings() -> None:
    assert findings(facts()) == []


def test_missing_data_causes_no_findings() -> None:
    """If facts of a case are removed, the rules that need them do not fire, and no rule raises an exception."""
    unknown = Facts(Evidence(), {}, CPU)
    assert findings(unknown) == []
    for case, (given, rule, _) in CASES.items():
        bare = dataclasses.replace(given, evidence=Evidence(), probe={}, monitor={}, throttled={})
        assert not any(finding.at_most for finding in findings(bare)), case
        without = dataclasses.replace(given, values={})
        assert rule not in {"precision", "unpinned", "varying shapes", "memory left"} or rule not in {
            finding.rule for finding in findings(without)
        }, case
        for part in PARTS:
            less = {name: value for name, value in given.evidence.parts_s.items() if name != part}
            findings(dataclasses.replace(given, evidence=dataclasses.replace(given.evidence, parts_s=less)))


def test_an_unmeasured_part_is_not_zero() -> None:
    parts = {name: value for name, value in PARTS.items() if name != "data"}
    unmeasured = facts()
    unmeasured = dataclasses.replace(unmeasured, evidence=dataclasses.replace(unmeasured.evidence, parts_s=parts))

    assert unmeasured.share("data") is None
    assert unmeasured.share("saving") is not None


@pytest.mark.parametrize("case", CASES)
def test_evidence_of_every_finding_contains_a_number(case: str) -> None:
    given, _, _ = CASES[case]

    assert all(any(char.isdigit() for char in finding.evidence) for finding in findings(given))


@pytest.mark.slow
def test_every_proposal_is_a_valid_override() -> None:
    proposed = {
        candidate.overrides
        for given, _, _ in CASES.values()
        for finding in findings(given)
        for candidate in finding.candidates
    }
    rest = sorted(overrides for overrides in proposed if not overrides[0].startswith("device="))  # no such device
    while rest:  # compose as many non-conflicting overrides at once as possible, because composing is slow
        taken: dict[str, str] = {"global_batch_size": "global_batch_size=64"}
        for overrides in list(rest):
            keys = [word.partition("=")[0] for word in overrides]
            if not any(key.partition(".")[0] in (other.partition(".")[0] for other in taken) for key in keys):
                taken |= dict(zip(keys, overrides, strict=True))
                rest.remove(overrides)
        compose(Request(tuple(taken.values())))


def test_no_candidate_changes_the_math() -> None:
    """Changes to the math are left to the user, so `advise` never tries them."""
    mechanics = (
        "dataloader", "prefetch", "backend", "compile", "micro_batch_size", "memory", "precision", "checkpoint.every",
        "log_every", "device",
    )  # fmt: skip
    for given, _, _ in CASES.values():
        for finding in findings(given):
            for candidate in finding.candidates:
                assert all(word.startswith(mechanics) for word in candidate.overrides), candidate


def test_findings_are_sorted_by_largest_possible_gain() -> None:
    both = facts({"data": 6.0, "saving": 2.0}, {"dataloader.num_workers": 0, "checkpoint.every": 1})

    assert [finding.rule for finding in findings(both)][:2] == ["data wait", "checkpoints too often"]


def test_samples_that_change_are_not_cached() -> None:
    for probe in ({"same_when_read_again": False}, {"same_when_read_again": True, "changes_with_epoch": True}):
        given = facts({"data": 8.0}, {"dataloader.num_workers": 0}, probe={"sample_bytes": 1024, **probe})
        assert "dataloader.cache=memory" not in [candidate.name for candidate in findings(given)[0].candidates]


def test_each_finding_has_the_name_of_its_rule() -> None:
    for given, _, _ in CASES.values():
        for name, rule in RULES.items():
            result = rule(given)
            assert result is None or name in {finding.rule for finding in findings(given)}


def test_rules_use_only_measured_parts() -> None:
    assert set(PARTS) <= {*stopwatch.PARTS, *stopwatch.BETWEEN}


def test_checkpoints_at_the_end_of_phases_cause_no_finding() -> None:
    phases = tuple(PhaseRecord("train", f"phase {number}") for number in range(4))
    every = {"checkpoint.every": 100}

    assert findings(facts({"saving": 5.0}, every, num_saves=4, phases=phases)) == []
    (result,) = findings(facts({"saving": 5.0}, every, num_saves=8, phases=phases))
    share = 5.0 / (sum(PARTS.values()) - PARTS["saving"] + 5.0)
    assert result.at_most == pytest.approx(1 / (1 - share / 2))


def test_gain_of_time_based_checkpoints_is_computed() -> None:
    every = {"checkpoint.every": "1min"}

    (result,) = findings(facts({"saving": 5.0}, every, num_saves=10))

    assert "10 checkpoints of 0.5 s" in result.evidence
    share = 5.0 / (sum(PARTS.values()) - PARTS["saving"] + 5.0)
    assert result.at_most == pytest.approx(1 / ((1 - share) * (1 + 0.5 / 60))), "auto would save every 60 s"
    assert not result.candidates
    assert "checkpoint.every=auto" in result.by_hand
    assert findings(facts({"saving": 5.0}, every)) == [], "their number is unknown"


def test_more_frequent_checkpoints_are_never_proposed() -> None:
    """Here, `auto` would save more often: it limits the work at risk to ten minutes, however long a save takes."""
    parts = {"forward": 10_800.0, "saving": 1_200.0}

    assert findings(facts(parts, {"checkpoint.every": "30min"}, num_saves=6)) == []


def test_checkpoint_interval_auto_causes_no_finding() -> None:
    assert findings(facts({"saving": 5.0}, {"checkpoint.every": "auto"}, num_saves=9)) == []


def test_begin_update_is_named_only_if_defined() -> None:
    (result,) = findings(facts({"hooks": 5.0}, has_begin_update=False))

    assert "begin_update" not in result.by_hand
    assert findings(facts({"hooks": 5.0})) == [], "its cause is unknown"


def test_a_single_worker_is_described_in_the_singular() -> None:
    (result,) = findings(facts({"data": 8.0}, {"dataloader.num_workers": 1}))

    assert "1 worker reads, 8 cores" in result.evidence


@pytest.mark.parametrize(
    ("values", "absent"),
    [
        ({"dataloader.num_workers": 0}, "dataloader=thread"),
        ({"dataloader": "thread"}, "dataloader=default dataloader.num_workers=1"),
    ],
)
def test_an_uncached_loader_thread_is_one_worker(values: Mapping[str, Any], absent: str) -> None:
    for cache, is_there in (("none", False), ("memory", True)):
        (result,) = findings(facts({"data": 8.0}, {**values, "dataloader.cache": cache}))
        assert (absent in {each.name for each in result.candidates}) is is_there, cache


def test_samples_read_once_are_not_cached() -> None:
    """A cache would read all samples before the first update and never use them again."""
    same = {"same_when_read_again": True, "sample_bytes": 1024}
    once, twice = (facts({"data": 8.0}, probe=same, epochs=epochs) for epochs in (1.0, 2.0))

    proposed = [[each.name for result in findings(given) for each in result.candidates] for given in (once, twice)]

    assert ["dataloader.cache=memory" in names for names in proposed] == [False, True]


@pytest.mark.parametrize(("cores", "busy", "first"), [(2, 0.9, 2), (2, 0.1, 4), (8, 0.9, 7), (8, 0.1, 8)])
def test_the_most_promising_number_of_workers_is_tried_first(cores: int, busy: float, first: int) -> None:
    given = facts(
        {"data": 8.0}, {"dataloader.num_workers": 0}, cpu=Cpu("a processor", cores, cores, 2**33),
        probe={"sample_busy": busy},
    )  # fmt: skip

    assert findings(given)[0].candidates[0].name == f"dataloader.num_workers={first}"


def test_batch_norm_prevents_micro_batch_proposals() -> None:
    for probe, is_proposed in (({}, True), ({"has_batch_norm": True}, False)):
        small = facts(micro_batch_size=2, accumulation_steps=32, probe=probe)
        args = {word for finding in findings(small) for each in finding.candidates for word in each.overrides}
        assert any(word.startswith("micro_batch_size=") for word in args) == is_proposed
