"""Tuning finds the best settings within the budget, confirms them in new rounds, and keeps the mathematics."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.base.errors import AccelRunError
from runner.commands.tune import format_result, run
from runner.config.configuration import compose
from runner.config.request import Request
from runner.plan.inventory import GIB, Cpu, Device, Inventory
from runner.plan.planner import make_plan
from runner.records.evidence import Evidence
from runner.tools.measure import tune_axes as tuning_axes
from runner.tools.measure import tuner as tuning
from runner.tools.measure.compare import CompareLimits, Comparison
from runner.tools.measure.comparison_result import BASELINE_NAME as AS_IT_IS
from runner.tools.measure.comparison_result import (
    NO_TIME_LEFT,
    START_TIMED_OUT,
    Block,
    ComparisonResult,
    Startup,
    TrialOutcome,
    Variant,
    VariantResult,
)
from runner.tools.measure.facts import Facts
from runner.tools.measure.hardware_profile import write_profile
from runner.tools.measure.selection import Candidate, TriedCandidate
from runner.tools.measure.statistics import Ratio
from runner.tools.measure.tune_axes import AXES, Offer, Overrides, TuneTarget, is_mechanics
from runner.tools.measure.tuner import PROOF, TuneAxis, TuneReport, TuneResult, as_json, make_profile, search
from runner.tools.measure.variant_process import TrainingVariant as Live

PLANTED = Path(__file__).parent / "planted"
CPU = Cpu("a processor", 4, 8, 16 * GIB, flags=("avx512_bf16",))
A100 = Device("cuda", 0, "NVIDIA A100-SXM4-80GB", "GPU-0", 80 * GIB, capability=(8, 0))
T4 = Device("cuda", 0, "Tesla T4", "GPU-0", 15 * GIB, capability=(7, 5))
BASE_MS, BLOCK_S, LOOK_EVERY = 20.0, 0.4, 20


@dataclass
class FakeComparison:
    """A comparison of variants with known speeds on a virtual clock. It uses its budget like a real comparison.

    ms       milliseconds of an update with these overrides
    noise    standard deviation of the logarithm of a block
    fails    override -> reason why its variant fails
    wrong    overrides that change the losses
    """

    ms: Callable[[Overrides], float]
    noise: float = 0.0
    startup_s: float = 1.0
    fails: Mapping[str, str] = field(default_factory=dict)
    wrong: Sequence[str] = ()
    seed: int = 0
    updates: int = 10**6
    now: float = 0.0
    calls: list[list[Variant]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def clock(self) -> float:
        return self.now

    def compare(self, variants: Sequence[Variant], limits: CompareLimits) -> ComparisonResult:
        self.calls.append(list(variants))
        deadline, trials = self.now + limits.budget_s, ComparisonResult([], "interleaved")
        for cell in variants:
            opened = {"values": {}, "periods": {}, "updates": self.updates}
            measured = VariantResult(cell, startup=Startup(self.startup_s), opened=opened)
            trials.variants.append(measured)
            if deadline - self.now < limits.budget_s / 2 + self.startup_s and len(trials.variants) > 2:
                measured.why_not = NO_TIME_LEFT
                continue
            self.now += self.startup_s
            measured.why_not = next((self.fails[word] for word in cell.overrides if word in self.fails), "")
            loss = 2.0 if set(cell.overrides) & set(self.wrong) else 1.0
            measured.report = {"losses": [loss] * 8, "grad_norms": [loss]}
            if measured.why_not and cell is variants[0]:
                raise AccelRunError(measured.why_not)
        least, most = limits.rounds
        for number in range(most):
            for measured in trials.variants:
                if not measured.why_not:
                    self.now += BLOCK_S
                    measured.blocks[number] = Block(self.ms(measured.variant.overrides) * self._noisy())
            is_enough = number + 1 >= least and (number + 1 - least) % LOOK_EVERY == 0 and _are_narrow(trials)
            if is_enough or (number + 1 >= 3 and self.now > deadline):
                break
        return trials

    def _noisy(self) -> float:
        return float(2.718281828 ** self.random.gauss(0.0, self.noise))


def _are_narrow(trials: ComparisonResult) -> bool:
    ratios = [trials.ratio(measured) for measured in trials.variants[1:]]
    return all(ratio is None or ratio.is_narrow for ratio in ratios)


def speeds(**factors: float) -> Callable[[Overrides], float]:
    """Return a function from overrides to milliseconds, where each override multiplies the time by its factor."""

    def ms(args: Overrides) -> float:
        result = BASE_MS
        for word in args:
            result *= factors.get(word.replace("=", "_"), 1.0)
        return result

    return ms


def axis(name: str, *values: str, alone: bool = False) -> TuneAxis:
    candidates = tuple(Candidate((f"{name}={value}",)) for value in values)
    return TuneAxis(name, lambda _: Offer(candidates), fills_memory=alone)


THREE = [axis("a", "1", "2", "3", "4", "5"), axis("b", "1", "2"), axis("c", "1")]


def run_search(comparison: FakeComparison, axes: Sequence[TuneAxis], budget_s: float = 600.0) -> TuneResult:
    return search(axes, comparison.compare, budget_s, comparison.startup_s, lambda _: None, comparison.clock)


def test_the_best_of_every_axis_is_found() -> None:
    comparison = FakeComparison(speeds(a_2=0.9, a_4=0.7, a_5=0.8, b_1=1.5, b_2=0.95, c_1=1.2))

    result = run_search(comparison, THREE)

    assert result.overrides == ("a=4", "b=2")
    assert result.proof is not None
    assert result.proof.outcome.ratio is not None
    assert result.proof.outcome.ratio.middle == pytest.approx(1 / (0.7 * 0.95))
    assert [each.candidate.name for each in result.adopted] == ["a=4", "b=2"]
    assert {each.candidate.name for each in result.tried} == {"a=1", "a=2", "a=3", "a=4", "a=5", "b=1", "b=2", "c=1"}


@pytest.mark.slow
@settings(max_examples=40)
@given(
    st.lists(st.floats(0.5, 2.0), min_size=5, max_size=5),
    st.lists(st.floats(0.5, 2.0), min_size=2, max_size=2),
    st.floats(0.5, 2.0),
)
def test_without_noise_the_best_is_found(of_a: list[float], of_b: list[float], of_c: float) -> None:
    named = {f"a_{n}": value for n, value in enumerate(of_a, 1)} | {f"b_{n}": value for n, value in enumerate(of_b, 1)}
    ms = speeds(**named, c_1=of_c)

    result = run_search(FakeComparison(ms), THREE)

    best = BASE_MS * min(1.0, *of_a) * min(1.0, *of_b) * min(1.0, of_c)
    assert ms(result.overrides) <= best * 1.011**3
    assert ms(result.overrides) <= BASE_MS


@pytest.mark.slow
def test_noise_does_not_lead_to_slowdowns() -> None:
    helps, none = speeds(a_3=0.75, b_1=1.05), speeds(a_1=1.02, a_2=1.01, b_1=1.1)
    found_it = 0
    for seed in range(8):
        result = run_search(FakeComparison(helps, noise=0.08, seed=seed), THREE)
        assert helps(result.overrides) <= BASE_MS
        found_it += "a=3" in result.overrides
        assert none(run_search(FakeComparison(none, noise=0.08, seed=seed), THREE).overrides) <= BASE_MS
    assert found_it >= 7


def test_slower_combinations_are_not_chosen() -> None:
    def ms(args: Overrides) -> float:
        alone = {"a=1": 0.7, "b=1": 0.8}
        both = {"a=1", "b=1"} <= set(args)
        return BASE_MS * (1.3 if both else min([1.0, *(alone.get(word, 1.0) for word in args)]))

    assert run_search(FakeComparison(ms), [axis("a", "1"), axis("b", "1")]).overrides == ("a=1",)


def test_unverified_settings_are_not_in_the_profile() -> None:
    comparison = FakeComparison(lambda _: BASE_MS)
    comparison.ms = lambda args: BASE_MS * (0.5 if args and len(comparison.calls) < 2 else 1.0)

    result = run_search(comparison, [axis("a", "1")])

    assert [each.candidate.name for each in result.adopted] == ["a=1"]
    assert result.proof is not None
    assert result.overrides == ()
    assert "no clear change" in result.proof.outcome.reason


def test_the_best_settings_are_verified_in_separate_rounds() -> None:
    comparison = FakeComparison(speeds(a_4=0.7, b_2=0.8))

    run_search(comparison, THREE)

    assert [(cell.name, cell.overrides) for cell in comparison.calls[-1]] == [
        (AS_IT_IS, ()),
        ("a=4 b=2", ("a=4", "b=2")),
    ]


def test_the_best_candidate_of_an_axis_is_confirmed() -> None:
    """A candidate is adopted only if new rounds confirm it. A single candidate needs no second comparison."""
    comparison = FakeComparison(speeds(a_4=0.7, a_5=0.8, b_2=0.8))

    run_search(comparison, THREE)

    assert [len(variants) - 1 for variants in comparison.calls] == [5, 1, 2, 1, 1, 1]
    assert [variants[0].overrides for variants in comparison.calls] == [(), (), ("a=4",), ("a=4",), ("a=4", "b=2"), ()]


def test_failing_candidates_have_a_reason() -> None:
    comparison = FakeComparison(
        speeds(a_1=0.2, a_2=0.3, a_3=0.9), fails={"a=1": "CUDA out of memory", "c=1": "ended with 9"}, wrong=["a=2"]
    )

    result = run_search(comparison, THREE)

    reasons = {each.candidate.name: each.outcome.reason for each in result.tried}
    assert result.overrides == ("a=3",)
    assert (reasons["a=1"], reasons["c=1"]) == tuple(comparison.fails.values())
    assert "numerical results differ" in reasons["a=2"]


def test_settings_with_slow_starts_are_not_chosen() -> None:
    """An example is a compiled model in a short run."""
    comparison = FakeComparison(speeds(a_1=0.5), updates=100)
    measure = comparison.compare

    def slow_to_begin(variants: Sequence[Variant], limits: CompareLimits) -> ComparisonResult:
        trials = measure(variants, limits)
        for cell in trials.variants[1:]:
            cell.startup.start_s += 30.0
        return trials

    comparison.compare = slow_to_begin  # type: ignore[method-assign]
    result = run_search(comparison, [axis("a", "1")])

    assert result.overrides == ()
    assert "100 updates" in result.tried[0].outcome.reason


@pytest.mark.slow
@pytest.mark.parametrize("startup_s", [0.1, 2.0, 10.0])
@pytest.mark.parametrize("budget_s", [1.0, 20.0, 100.0, 600.0])
def test_the_budget_is_kept(budget_s: float, startup_s: float) -> None:
    many = [axis(name, *map(str, range(7))) for name in "abcdefgh"]
    comparison = FakeComparison(speeds(a_3=0.8, h_3=0.8), noise=0.05, startup_s=startup_s)

    run_search(comparison, many, budget_s)

    one_turn_more = 3 * 8 * BLOCK_S  # at least three rounds are measured
    assert comparison.now <= budget_s + one_turn_more


def test_spare_time_is_used_for_untried_candidates() -> None:
    """If there is nothing to verify, the time reserved for verification is released. It suffices for the last axis."""
    many = [axis("a", *map(str, range(7))), *(axis(name, "0") for name in "bcdefgh")]
    comparison = FakeComparison(speeds(h_0=0.6))

    result = run_search(comparison, many, budget_s=70.0)

    assert result.overrides == ("h=0",)
    assert comparison.now <= 70.0
    assert not [each for each in result.tried if each.outcome.is_untried]
    assert len({each.candidate.name for each in result.tried}) == len(result.tried) == 14


def test_the_search_ends_without_time_for_a_candidate() -> None:
    comparison = FakeComparison(speeds(), fails={"a=1": f"{START_TIMED_OUT}: not ready after 9 s"})

    result = run_search(comparison, [axis("a", "1"), axis("b", "1")])

    assert [each.candidate.name for each in result.tried if each.outcome.is_untried] == ["a=1"]
    assert len(comparison.calls) <= 4


def test_the_best_candidate_at_the_deadline_is_still_verified() -> None:
    """The verification decides, not the number of rounds against other candidates."""
    comparison = FakeComparison(speeds(a_3=0.5))
    measure = comparison.compare

    def long(variants: Sequence[Variant], limits: CompareLimits) -> ComparisonResult:
        trials = measure(variants, limits)
        comparison.now += 0.9 * limits.budget_s if len(variants) > 2 else 0.0
        return trials

    comparison.compare = long  # type: ignore[method-assign]
    result = run_search(comparison, [axis("a", "1", "2", "3")], budget_s=40.0)

    assert result.overrides == ("a=3",)


def test_an_error_does_not_end_the_search() -> None:
    comparison = FakeComparison(speeds(a_4=0.7, b_2=0.8))
    measure, killed = comparison.compare, "the process was killed"

    def once(variants: Sequence[Variant], limits: CompareLimits) -> ComparisonResult:
        if variants[-1].name.startswith("b"):
            raise AccelRunError(killed, fix="start it again")
        return measure(variants, limits)

    comparison.compare = once  # type: ignore[method-assign]
    result = run_search(comparison, THREE)

    assert result.overrides == ("a=4",)
    assert {each.candidate.name: each.outcome.why_not for each in result.tried}["b=1"].startswith(killed)


def test_variants_that_may_fill_memory_run_in_turn() -> None:
    comparison, together = FakeComparison(speeds(a_1=0.5)), []
    measure = comparison.compare

    def watched(variants: Sequence[Variant], limits: CompareLimits) -> ComparisonResult:
        together.append(limits.interleave)
        return measure(variants, limits)

    comparison.compare = watched  # type: ignore[method-assign]
    run_search(comparison, [axis("b", "1"), axis("a", "1", alone=True)])

    assert together == [True, False, False]


# ---------------------------------------------------------------- available candidates


def place(*args: str, gpu: Device | None = None, task_file: Path | None = None, **evidence: object) -> TuneTarget:
    request = Request(args, task_file)
    inventory = Inventory((gpu,) if gpu else (), CPU)
    plan = make_plan(compose(request), inventory)
    known = {
        "device": plan.device, "num_threads": 8, "num_samples": 1000, "epochs": 3.0, "updates": 100,
        "global_batch_size": plan.batch.global_batch_size, "micro_batch_size": plan.batch.micro_batch_size,
        "accumulation_steps": plan.batch.accumulation_steps, "parts_s": {"data": 1.0, "forward": 1.0},
    }  # fmt: skip
    probe = {"same_when_read_again": True, "sample_bytes": 100.0, "changes_with_epoch": False}
    facts = Facts(Evidence(**(known | evidence)), plan.values(), CPU, inventory.usable, gpu, probe)  # type: ignore[arg-type]
    return TuneTarget(request, compose(request), inventory, facts, "train", has_attention=True)


def find_offers(there: TuneTarget, args: Overrides = ()) -> dict[str, Offer]:
    return {name: there.offers(name)(args) for name in AXES}


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("gpu", [None, A100])
def test_no_candidate_changes_the_mathematics(gpu: Device | None) -> None:
    there = place("task=gpt", gpu=gpu)
    before = there.values(())

    offers = find_offers(there)

    for name, offer in offers.items():
        for candidate in offer.candidates:
            after = there.values(candidate.overrides)
            changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
            assert changed, candidate.name
            assert all(map(is_mechanics, changed)), (name, candidate.name, changed)
    for axis_here in ("kept samples", "readers", "precision", "micro-batch", "optimizer kernels", "compile"):
        assert offers[axis_here].candidates, axis_here
    assert bool(offers["threads"].candidates) == (gpu is None)
    assert bool(offers["copies"].candidates) == (gpu is not None)


def test_mechanics_are_distinguished_from_mathematics() -> None:
    kept = (
        "global_batch_size", "optimizer", "optimizer.lr", "phase.train.optimizer.lr", "epochs", "updates", "seed",
        "task.size", "dataloader.drop_last", "dataloader.bad_samples", "max_grad_norm", "scheduler", "parallelism",
        "evaluate.every", "device",
    )  # fmt: skip
    assert not any(map(is_mechanics, kept))
    assert all(map(is_mechanics, ("precision", "compile.dynamic", "phase.train.micro_batch_size", "optimizer.kernel")))


@pytest.mark.slow
def test_impossible_candidates_are_skipped_with_the_reason() -> None:
    on_t4, on_cpu = find_offers(place("task=gpt", gpu=T4)), find_offers(place("task=gpt"))

    assert "precision=fp32" in [each.name for each in on_t4["precision"].candidates]
    assert "capability 8.0" in on_t4["precision"].skipped["precision=tf32"]
    assert "capability 8.0" in on_t4["attention"].skipped["attention=flash"]
    assert [each.name for each in on_cpu["precision"].candidates] == ["precision=bf16"]
    assert "only GPU kernels" in on_cpu["attention"].skipped["attention=cudnn"]
    assert "no GPU" in on_cpu["copies"].skipped["copies"]


@pytest.mark.slow
def test_command_line_settings_are_kept() -> None:
    there = place("task=gpt", "precision=fp32", "dataloader.num_workers=0", "compile=off", gpu=A100)

    offers = find_offers(there)

    for name in ("precision", "readers", "compile"):
        assert not offers[name].candidates, name
        assert all("command line" in why for why in offers[name].skipped.values())


PHASES = """
SETTINGS = {"global_batch_size": 16, "micro_batch_size": 4, "phase.second.micro_batch_size": 8}
PHASES = {"first": {}, "second": {}}

def build(*, a: int = 1):
    pass
"""


@pytest.mark.slow
def test_settings_of_a_task_are_tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a phase sets its own size, the sizes of other phases do not change."""
    monkeypatch.chdir(tmp_path)
    task = tmp_path / "two.py"
    task.write_text(PHASES)
    of_file = replace(
        place(task_file=task, global_batch_size=16, micro_batch_size=8, accumulation_steps=2), phase="second"
    )
    for there, wanted in (
        (place("task=gpt", "task.size=124m", "global_batch_size=16"), "micro_batch_size=4"),
        (of_file, "phase.second.micro_batch_size=16"),
    ):
        (best,) = [each for each in there.offers("micro-batch")(()).candidates if each.name == wanted]

        write_profile(make_profile(make_report(tried(PROOF, best.name, 1.5))), there.request, "mine")

        request = replace(
            there.request, overrides=(*there.request.overrides, "+hardware=mine"), config_dir=tmp_path / "conf"
        )
        plain, result = compose(there.request).flat(), compose(request).flat()
        key, _, value = wanted.partition("=")
        assert {key for key in result if plain.get(key) != result[key]} == {"hardware", key}
        assert result[key] == int(value)


def test_batch_norm_fixes_the_micro_batch_size() -> None:
    there = place("task=gpt")
    with_norms = replace(there, facts=replace(there.facts, probe={**there.facts.probe, "has_batch_norm": True}))

    assert "batch norms" in with_norms.offers("micro-batch")(()).skipped["micro-batch"]


def test_micro_batches_divide_an_update() -> None:
    there = place("task=gpt", "global_batch_size=24", gpu=A100)

    sizes = [int(each.name.partition("=")[2]) for each in there.offers("micro-batch")(()).candidates]

    assert set(sizes) == {12, 6, 3, 1}


def test_samples_that_change_are_not_cached() -> None:
    there = place("task=gpt")
    for change in ({"same_when_read_again": False}, {"changes_with_epoch": True}, {"sample_bytes": 1e12}):
        other = replace(there, facts=replace(there.facts, probe={**there.facts.probe, **change}))
        assert not other.offers("kept samples")(()).candidates, change


def test_loader_candidates_depend_on_earlier_results() -> None:
    there = place("task=gpt")

    assert "samples are cached" in there.offers("readers")(("dataloader.cache=memory",)).skipped["readers"]
    assert there.offers("read ahead")(()).skipped == {"read ahead": "nothing is prefetched"} or (
        "dataloader.depth" not in str(there.offers("read ahead")(()))
    )
    more = there.offers("read ahead")(("dataloader=thread",)).candidates
    assert [each.name for each in more] == ["dataloader.depth=4", "dataloader.depth=8"]


@pytest.mark.slow
def test_a_loader_thread_without_a_cache_equals_one_worker() -> None:
    there = place("task=gpt")
    names = {each.name for each in there.offers("readers")(()).candidates}
    assert "dataloader.num_workers=1" in names
    assert "dataloader=thread" not in names

    threaded = {each.name for each in there.offers("readers")(("dataloader=thread",)).candidates}
    workers = {each.split()[-1] for each in threaded if each.startswith("dataloader=default ")}
    assert "dataloader.num_workers=2" in workers
    assert "dataloader.num_workers=1" not in workers


# ---------------------------------------------------------------- the profile


def tried(name: str, args: str, gain: float, width: float = 0.02) -> TriedCandidate:
    return TriedCandidate(
        name, Candidate(tuple(args.split())), TrialOutcome(Ratio(gain, gain - width, gain + width, 12))
    )


WORKERS = tried("readers", "dataloader.num_workers=2", 1.3)
FORMAT = tried("precision", "precision=bf16", 1.2)
SLOWER = tried("compile", "compile=default", 0.5)
BOTH = tried(PROOF, "dataloader.num_workers=2 precision=bf16", 1.5)


def make_report(proof: TriedCandidate | None) -> TuneReport:
    adopted = (WORKERS, FORMAT) if proof else ()
    result = TuneResult((WORKERS, FORMAT, SLOWER), {"tf32": "no GPU"}, adopted, proof)
    return TuneReport("gpt", "a processor", "train", 31.2, result)


@pytest.mark.slow
def test_a_profile_contains_exactly_the_best_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    file, command = write_profile(make_profile(make_report(BOTH)), Request(("task=gpt", "seed=3")), "mine")

    assert command.split() == ["accel-run", "train", "--config-dir", "conf", "task=gpt", "seed=3", "+hardware=mine"]
    plain = compose(Request(("task=gpt",))).flat()
    composed = compose(Request(("task=gpt", "+hardware=mine"), config_dir=tmp_path / "conf")).flat()
    changed = {key: value for key, value in composed.items() if plain.get(key) != value}
    assert changed == {"dataloader.num_workers": 2, "precision": "bf16", "precision.keep_fp32": [], "hardware": "mine"}
    text = file.read_text()
    for expected in (
        "accel-run tune on 20",
        "a processor",
        "+50 % [48, 52], 12 interleaved blocks",
        "compile=default: worse: -50 %",
    ):
        assert expected in text


@pytest.mark.slow
def test_a_profile_without_verified_settings_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plain = compose(Request(("task=gpt",))).flat()
    for proof in (None, replace(BOTH, outcome=TrialOutcome(Ratio(1.1, 0.9, 1.3, 12)))):
        file, _ = write_profile(make_profile(make_report(proof)), Request(("task=gpt",)), "mine")

        composed = compose(Request(("task=gpt", "+hardware=mine"), config_dir=tmp_path / "conf")).flat()
        assert composed == plain | {"hardware": "mine"}
        assert "# No settings: " in file.read_text()
        assert "profile is empty" in "\n".join(format_result(make_report(proof)))


@pytest.mark.slow
def test_a_profile_in_use_is_extended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_profile(make_profile(make_report(BOTH)), Request(), "first")
    thread = tried(PROOF, "dataloader=thread backend.threads=1", 1.5)
    before = Request(("+hardware=first",), config_dir=tmp_path / "conf")

    write_profile(make_profile(make_report(thread)), before, "second")

    result = compose(Request(("+hardware=second",), config_dir=tmp_path / "conf")).flat()
    assert (result["precision"], result["dataloader"], result["backend.threads"]) == ("bf16", "thread", 1)


def test_an_earlier_profile_is_kept_without_trials(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    shown: Callable[..., None],
) -> None:
    monkeypatch.chdir(tmp_path)
    file, _ = write_profile(make_profile(make_report(BOTH)), Request(), "good")
    before = file.read_bytes()
    late = TriedCandidate("threads", Candidate(("backend.threads=1",)), TrialOutcome(why_not=NO_TIME_LEFT))
    nothing = replace(make_report(None), result=TuneResult((late,)))
    monkeypatch.setattr(tuning, "tune", lambda *_: nothing)

    assert run(["profile=good"]) == 0

    out = capsys.readouterr().out
    assert file.read_bytes() == before
    shown(out)


def test_results_can_be_printed_as_json_and_as_ascii() -> None:
    result = json.loads(json.dumps(as_json(make_report(BOTH))))

    assert result["settings"] == ["dataloader.num_workers=2", "precision=bf16"]
    assert result["proof"]["ratio"]["middle"] == 1.5
    assert as_json(make_report(None))["settings"] == []
    assert "\n".join(format_result(make_report(BOTH))).isascii()


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("budget_s=0", "must be a number of seconds above 0"),
        ("budget_s=soon", "must be a number of seconds above 0"),
        ("task=gtp", "gpt"),
        ("profile=../x", "profile=../x"),
        ("profile=theirs", "must be a new name"),
        ("nonsense=1", "unknown key"),
        ("profile=mine --config-dir /dev/null", "is not a folder"),
    ],
)
def test_typos_get_suggestions_before_measurements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: str, message: str
) -> None:
    def measured(*_: object) -> None:
        raise AssertionError("measured")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("runner.tools.measure.tuner.tune", measured)
    (tmp_path / "conf" / "hardware").mkdir(parents=True)
    (tmp_path / "conf" / "hardware" / "theirs.yaml").write_text("# @package _global_\n")

    with pytest.raises(AccelRunError, match=message):
        run(args.split())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "axes", "args", "wins"),
    [
        # pass_ms limits the number of micro-batches in a block after the data wait is removed
        ("far_away.py", ["readers"], ["micro_batch_size=16", "task.pass_ms=4"], "dataloader."),
        ("small_passes.py", ["micro-batch", "optimizer kernels"], [], "micro_batch_size="),
    ],
)
def test_tuning_removes_planted_slowdowns(
    task: str,
    axes: Sequence[str],
    args: Sequence[str],
    wins: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Uses short blocks and one candidate per axis, because the slowdowns are far above the noise.

    The profile overrides the small micro-batches in the settings of the task. The optimizer step of the only, small
    layer takes less than 1 % of an update, so its kernel does not matter.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tuning, "AXES", {name: AXES[name] for name in axes})
    monkeypatch.setattr(tuning_axes, "MAX_CANDIDATES", 1)
    monkeypatch.setattr(tuning, "PROOF_ROUNDS", (6, 8))
    monkeypatch.setattr(tuning, "CompareLimits", partial(CompareLimits, block_s=0.1))
    quiet = ["backend.threads=1", "log_every=10000", "checkpoint=off"]  # rows and checkpoints lengthen blocks
    overrides = ["device=cpu", *quiet, *args]

    assert run(["--task", str(PLANTED / task), *overrides, "budget_s=240", "profile=mine", "--json"]) == 0

    result = json.loads(capsys.readouterr().out)
    plain, tuned_to = (
        compose(Request((*overrides, *more), PLANTED / task, folder)).flat()
        for more, folder in (((), None), (("+hardware=mine",), tmp_path / "conf"))
    )
    changed = [f"{key}={value}" for key, value in tuned_to.items() if plain.get(key) != value and key != "hardware"]
    assert result["settings"], result
    assert all(word.startswith(wins) for word in (*result["settings"], *changed)), result
    assert changed
    assert result["proof"]["ratio"]["low"] > 1.0  # lint-tests: measured: in virtual time
    assert not (tmp_path / "outputs").exists()


def test_clock_readings_do_not_drop_a_candidate() -> None:
    """An axis with one candidate gets exactly the time that it needs, from which nothing must be subtracted."""
    comparison = FakeComparison(speeds(a_1=0.5), startup_s=2.0)
    looks = count()

    result = search(
        [axis("a", "1"), *(axis(name, "1") for name in "bcdefghi")], comparison.compare, 60.0, comparison.startup_s,
        lambda _: None, lambda: comparison.now + 1e-4 * next(looks),
    )  # fmt: skip

    assert result.overrides == ("a=1",)


# ---------------------------------------------------------------- start-up times


def test_trials_include_the_first_evaluation() -> None:
    comparison, seen = FakeComparison(speeds(a_1=0.5)), list[CompareLimits]()

    def measure(variants: Sequence[Variant], limits: CompareLimits) -> ComparisonResult:
        seen.append(limits)
        return comparison.compare(variants, limits)

    result = search([axis("a", "1")], measure, 600.0, comparison.startup_s, lambda _: None, comparison.clock)

    assert result.overrides == ("a=1",)
    assert len(seen) == 2
    assert all(limits.time_first_evaluation for limits in seen)


@pytest.mark.slow
def test_recompilation_for_evaluation_counts_as_start_time() -> None:
    settings_ = ("updates=100", "global_batch_size=24", "device=cpu", "backend.threads=1")
    limits = CompareLimits(budget_s=60, rounds=(1, 1), block_s=0.02, time_first_evaluation=True)
    with Comparison(Request(settings_, Path(__file__).parent / "task_of_sizes.py")) as comparison:
        args = ("compile=default", "compile.backend=eager", "task.first_ms=50")
        result = comparison.compare([Variant(AS_IT_IS), Variant("compiled", args)], limits, lambda _: None)

    before, compiled = result.variants
    assert (before.startup.evaluation_s, compiled.why_not) == (0.0, "")
    assert compiled.startup.evaluation_s == pytest.approx(0.05)  # by the virtual clock
    assert compiled.startup_s > compiled.startup.start_s + compiled.startup.evaluation_s


def test_the_timed_evaluation_includes_every_batch_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """256 samples in batches of 24 leave 16 for the last batch. A new batch size takes 50 ms."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # restored after the test, because the variant sets it
    args = [f"output_root={tmp_path}", "device=cpu", "global_batch_size=24", "tracker=none", "monitor=off"]
    args.append("task.first_ms=50")
    with ExitStack() as stack:
        cell = Live(stack)
        task = str(Path(__file__).parent / "task_of_sizes.py")
        cell.begin(args, task, None, str(tmp_path / "compiled"), None, run_evaluations=False)
        more_s = cell.evaluate()["more_s"]
        sizes = cell.run.parts.task.evaluated  # type: ignore[attr-defined]

    assert sizes == [24, 16] * 2
    assert more_s > 0.05
