"""`accel-run advise` recommends only changes that were measured as faster, and the profile that it writes applies."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from runner.base.errors import ConfigError
from runner.base.json_converter import encode
from runner.cli import main
from runner.commands.advise import format_advice, run
from runner.config.configuration import compose
from runner.config.request import Request
from runner.durable.directory import RunDirectory
from runner.plan.inventory import Cpu
from runner.records.evidence import Evidence
from runner.records.phase_record import PhaseRecord
from runner.tools.measure.advisor import Advice, AdviceInputs, as_json
from runner.tools.measure.compare import CompareLimits
from runner.tools.measure.comparison_result import (
    ComparisonResult,
    Numerics,
    Startup,
    TrialOutcome,
    Variant,
    VariantResult,
)
from runner.tools.measure.facts import evaluate_criteria, read_monitor_summary
from runner.tools.measure.hardware_profile import Profile, write_profile
from runner.tools.measure.measurement_context import complete_evidence
from runner.tools.measure.rules import RuleFinding
from runner.tools.measure.selection import Candidate, TriedCandidate, judge_candidate
from runner.tools.measure.statistics import Ratio
from tests.forkserver import ForkServer
from tests.tools.measure.suites.asked import blocks

PLANTED = Path(__file__).parent / "planted"
CPU = Cpu("a processor", 2, 2, 2**33)


def make_trial(rule: str, args: str, gain: float, *, width: float = 0.02, differ: bool = False) -> TriedCandidate:
    numerics = Numerics(0.5 if differ else 0.0, 0.0, 0.0, tolerance=0.001)
    outcome = TrialOutcome(Ratio(gain, gain - width, gain + width, 12), numerics)
    return TriedCandidate(rule, Candidate(tuple(args.split())), outcome)


def advice(*trials: TriedCandidate, findings: tuple[RuleFinding, ...] = ()) -> Advice:
    seen = tuple(RuleFinding(each.rule, f"{each.rule}: 40 % of the time") for each in trials)
    ordered = tuple(sorted(trials, key=lambda each: -each.outcome.gain))
    return Advice("gpt", "a processor", 31.2, (*seen, *findings), ordered)


def first_of(result: Advice) -> str:
    return result.entries[0].finding.rule


WORKERS = make_trial("data wait", "dataloader.num_workers=2", 1.34)
MORE_WORKERS = make_trial("data wait", "dataloader.num_workers=1", 1.2)
THREADS = make_trial("too many threads", "backend.threads=1", 1.1)
NOTHING = make_trial("precision", "precision=bf16", 1.0)
WRONG = make_trial("tiny micro-batches", "micro_batch_size=8", 3.0, differ=True)


def test_only_clearly_faster_equivalent_settings_are_advised() -> None:
    result = advice(WORKERS, MORE_WORKERS, THREADS, NOTHING, WRONG)

    assert result.advised == [WORKERS, THREADS]
    assert first_of(result) == "data wait"


def test_untried_settings_are_not_advised() -> None:
    assert not TrialOutcome(why_not="out of memory").is_advised


def test_advice_is_one_list_sorted_by_gain(shown: Callable[..., None]) -> None:
    large = RuleFinding("varying shapes", "batches have 40 shapes", by_hand="round lengths up", at_most=1.73)
    small = RuleFinding("slow hooks", "11 % of the time", by_hand="look at begin_update", at_most=1.05)
    unknown = RuleFinding("odd sizes", "a matrix of 50257", by_hand="round these sizes up")
    result = advice(THREADS, NOTHING, findings=(unknown, small, large))

    shown("\n".join(format_advice(result)))
    advised = json.loads(json.dumps(as_json(result)))["advice"]
    assert [each["rule"] for each in advised] == ["varying shapes", "too many threads", "slow hooks", "odd sizes"]
    assert [each["gain"] for each in advised] == [1.73, 1.1, 1.05, None]
    low = [each["tried"] and each["tried"]["ratio"]["low"] for each in advised]
    assert low == [None, pytest.approx(1.08), None, None]


def test_manual_fixes_are_shown_if_no_setting_helps(shown: Callable[..., None]) -> None:
    waits = RuleFinding("varying shapes", "batches have 40 shapes", by_hand="round lengths up", at_most=1.5)

    shown("\n".join(format_advice(advice(NOTHING, findings=(waits,)))), name="by hand")
    shown("\n".join(format_advice(advice(NOTHING))), name="nothing")


def test_the_report_shows_gains_and_rejected_settings(shown: Callable[..., None]) -> None:
    lines = "\n".join(format_advice(advice(WORKERS, NOTHING, WRONG)))
    shown(lines)
    assert lines.isascii()


def test_advice_can_be_printed_as_json() -> None:
    result = json.loads(json.dumps(as_json(advice(WORKERS, NOTHING))))

    assert [each["what"] for each in result["advice"]] == ["dataloader.num_workers=2"]
    assert [(each["advised"], each["ratio"]["middle"]) for each in result["tried"]] == [(True, 1.34), (False, 1.0)]


# ---------------------------------------------------------------- evidence

NOW = Evidence(parts_s={"data": 1.0, "forward": 3.0}, updates=40, micro_batch_size=8)
RUN = Evidence(parts_s={"saving": 2.0, "forward": 1.0}, updates=10, micro_batch_size=4, num_threads=2)


def test_incomplete_timings_are_not_used() -> None:
    assert complete_evidence(RUN, NOW) == RUN
    for unmade in (replace(RUN, updates=0), replace(RUN, updates=None), replace(RUN, parts_s={})):
        assert complete_evidence(unmade, NOW) == replace(NOW, num_threads=2)


def test_the_measured_phase_determines_the_advice() -> None:
    phases = (PhaseRecord("train", "first"), PhaseRecord("train", "second"))

    assert complete_evidence(replace(RUN, phases=phases), NOW) == replace(NOW, num_threads=2)
    assert complete_evidence(replace(RUN, phases=phases[:1]), NOW).parts_s == RUN.parts_s


def test_a_failed_run_does_not_determine_the_training_length() -> None:
    assert complete_evidence(replace(RUN, epochs=0.4), replace(NOW, epochs=50.0)).epochs == 0.4
    assert complete_evidence(replace(RUN, epochs=0.4, unfinished=True), replace(NOW, epochs=50.0)).epochs == 50.0


def test_slow_starting_settings_are_advised_only_for_long_trainings(
    shown: Callable[..., None],
) -> None:
    short = replace(WORKERS, outcome=replace(WORKERS.outcome, later_s=4.0, pays_at=900, updates=100))
    long = replace(short, outcome=replace(short.outcome, updates=5000))

    assert not advice(short).advised
    assert advice(long).advised == [long]
    shown("\n".join(format_advice(advice(short))), name="short")
    shown("\n".join(format_advice(advice(long))), name="long")


def measured(
    name: str, block_ms: float, *, updates: int = 20, every: int | None = 100, start_s: float = 1.0
) -> VariantResult:
    return VariantResult(
        Variant(name),
        blocks([block_ms] * 6),
        Startup(start_s),
        updates=updates,
        opened={"periods": {"checkpoint": every, "log": 10}, "updates": 400},
    )


def test_rare_events_are_not_judged_by_short_blocks() -> None:
    """A trial without checkpoints cannot contradict a run that spent a third of its time on them."""
    saves = Candidate(("checkpoint.every=auto",))
    result = ComparisonResult([measured("as it is", 20.0), measured(saves.name, 20.0, every=None)], "interleaved")
    seen = ComparisonResult(
        [measured("as it is", 30.0, updates=200), measured(saves.name, 20.0, every=None)], "interleaved"
    )

    blind = judge_candidate(result, "checkpoints too often", saves, 1.41)

    assert blind.outcome.ratio is None
    assert "20 updates" in blind.outcome.why_not
    assert "+41 %" in blind.outcome.why_not
    assert judge_candidate(seen, "checkpoints too often", saves, 1.41).outcome.is_advised


def test_slower_starts_must_be_amortized() -> None:
    cache = Candidate(("dataloader.cache=memory",))
    result = ComparisonResult([measured("as it is", 30.0), measured(cache.name, 20.0, start_s=6.0)], "interleaved")

    outcome = judge_candidate(result, "data wait", cache).outcome

    assert outcome.later_s == pytest.approx(5.0)
    assert outcome.pays_at == 500
    assert not outcome.is_advised, "training ends after 400 updates"


# ---------------------------------------------------------------- the table of criteria


@pytest.mark.parametrize(
    ("shape", "channels", "side"),
    [([4, 200, 64, 64], 200, 64), ([4, 64, 64, 24], 24, 64), ([2, 3, 32, 48], 3, 32), ([2, 9, 9, 9, 4], 4, 9)],
)
def test_channels_are_recognized_in_either_memory_layout(shape: list[int], channels: int, side: int) -> None:
    rows = {row.name: row.value for row in evaluate_criteria(Evidence(), {"input_shape": shape})}

    assert (rows["channels"], rows["pixels per side"]) == (channels, side)


def test_device_criteria_skip_unknown_values() -> None:
    small = Evidence(num_samples=80, global_batch_size=4, epochs=20.0)
    batch = {"input_shape": (4, 200, 64, 64), "loss_terms": 1}

    rows = {row.name: (row.value, row.verdict) for row in evaluate_criteria(small, batch)}

    assert rows["training samples"] == (80, "CPU")
    assert rows["samples per update"] == (4, "CPU")
    assert rows["channels"] == (200.0, "GPU")
    assert rows["pixels per side"] == (64.0, "CPU")
    assert rows["epochs"] == (20.0, "GPU")
    assert rows["parameters"] == (None, "unknown")
    assert [result for name, result in rows.items() if "loss" in name] == [(1, "either")]


@pytest.mark.parametrize(("number", "verdict"), [(50_000, "CPU"), (500_000, "either"), (2_000_000, "GPU")])
def test_the_number_of_parameters_is_a_device_criterion(number: int, verdict: str) -> None:
    rows = {row.name: row for row in evaluate_criteria(Evidence(num_parameters=number), {})}
    assert (rows["parameters"].value, rows["parameters"].verdict) == (number, verdict)
    assert all(row.rule for row in rows.values())


def test_monitor_readings_are_read_back(tmp_path: Path) -> None:
    whole = {
        "metrics": {"gpu0/util": {"mean": 40.0, "min": 0.0, "max": 90.0, "seconds": 5.0}},
        "slowed": {"gpu0": {"thermal": 0.3}},
    }
    (tmp_path / "monitor.json").write_text(json.dumps({"whole": whole}))

    assert read_monitor_summary(tmp_path) == ({"gpu0/util": 40.0}, {"thermal": 0.3})
    assert read_monitor_summary(tmp_path / "nowhere") == ({}, {})


# ---------------------------------------------------------------- the profile


def profile_of(args: str, evidence: str = "data wait: 40 % of the time") -> Profile:
    return Profile(tuple(args.split()), "tuned for gpt", "tune", (evidence,))


@pytest.mark.slow
def test_a_written_profile_composes_and_applies_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    chosen = profile_of("precision=bf16 dataloader.num_workers=2 micro_batch_size=8 checkpoint.every=10min")
    request = Request(("task=gpt", "precision=fp32", "seed=3"))

    file, command = write_profile(chosen, request, "mine")

    assert file == tmp_path / "conf" / "hardware" / "mine.yaml"
    assert command.split() == ["accel-run", "train", "--config-dir", "conf", "task=gpt", "seed=3", "+hardware=mine"]
    composed = compose(Request(("task=gpt", "+hardware=mine"), config_dir=tmp_path / "conf")).flat()
    assert (composed["precision"], composed["dataloader.num_workers"]) == ("bf16", 2)
    assert (composed["micro_batch_size"], composed["checkpoint.every"]) == (8, "10min")
    assert "data wait: 40 % " in file.read_text()


@pytest.mark.slow
def test_a_profile_keeps_earlier_selections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    write_profile(profile_of("dataloader.num_workers=2"), Request(("hardware=t4",)), "mine")

    composed = compose(Request(("hardware=mine",), config_dir=tmp_path / "conf")).flat()
    assert (composed["precision"], composed["attention"], composed["dataloader.num_workers"]) == (
        "fp16",
        "efficient",
        2,
    )


@pytest.mark.slow
def test_only_generated_profiles_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file, _ = write_profile(profile_of("dataloader.num_workers=2"), Request(), "mine")
    write_profile(profile_of("backend.threads=1"), Request(), "mine")
    assert "backend" in file.read_text()
    file.write_text("# @package _global_\n")

    with pytest.raises(ConfigError, match="must be a new name"):
        write_profile(profile_of("dataloader.num_workers=2"), Request(), "mine")

    assert file.read_text() == "# @package _global_\n"


def test_a_profile_without_effect_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    task = tmp_path / "task.py"
    task.write_text("def build(*, a: int = 1):\n    pass\n")
    chosen = profile_of("epochs=2")  # overridden by `updates` on the command line

    with pytest.raises(ConfigError, match="another source sets it"):
        write_profile(chosen, Request(("updates=3",), task), "mine")

    assert not (tmp_path / "conf" / "hardware" / "mine.yaml").exists()


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        ("budget_s=0", 78, "must be a number of seconds above 0"),
        ("budget_s=soon", 78, "must be a number of seconds above 0"),
        ("run=nowhere", 66, "there is no run 'nowhere'"),
        ("", 66, "there is no run in outputs yet"),
        ("task=gtp", 78, "gpt"),
    ],
)
def test_typos_get_suggestions_before_measurements(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    args: str,
    code: int,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)

    assert main(["advise", *args.split()]) == code
    assert message in capsys.readouterr().err


def make_run(folder: Path, record: str, args: str = "", plan: str = "") -> RunDirectory:
    """Create a run directory with these files."""
    folder.mkdir(exist_ok=True)
    for name, text in (("run.json", record), ("overrides.yaml", args), ("plan.json", plan)):
        (folder / name).write_text(text)
    return RunDirectory.join(folder)


def test_measurements_of_a_failed_run_are_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[AdviceInputs] = []

    def noted(_request: Request, known: AdviceInputs, *_: object) -> Advice:
        seen.append(known)
        return advice(WORKERS)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("runner.tools.measure.advisor.advise", noted)
    (tmp_path / "outputs").mkdir()
    content = {"task": "gpt", "overrides": [], "evidence": encode(replace(RUN, unfinished=True))}
    make_run(tmp_path / "outputs" / "first", json.dumps(content))

    assert run(["run=first"]) == 0

    assert "note: run first " in capsys.readouterr().out
    assert seen[0].evidence is not None
    assert seen[0].evidence.updates == RUN.updates


@pytest.mark.slow
def test_a_planted_wait_is_found_and_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "runner.tools.measure.advisor.CompareLimits", partial(CompareLimits, block_s=0.05, rounds=(4, 6))
    )
    task = str(PLANTED / "far_away.py")
    args = ["--task", task, "task.pass_ms=4", "dataloader.num_workers=0", "backend.threads=1", "precision=fp32"]

    assert run([*args, "budget_s=40", "--json"]) == 0

    result = json.loads(capsys.readouterr().out)
    assert result["advice"][0]["rule"] == "data wait"
    best = next(each for each in result["tried"] if each["advised"])
    assert best["rule"] == "data wait"
    assert best["ratio"]["middle"] > 1.1  # lint-tests: measured: in virtual time
    assert best["numerics"]["differ"] is False
    assert not (tmp_path / "outputs").exists()


@pytest.mark.slow
def test_a_budget_without_time_for_trials_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    assert run(["--task", str(PLANTED / "far_away.py"), "dataloader.num_workers=0", "budget_s=1", "--json"]) == 0

    result = json.loads(capsys.readouterr().out)
    assert result["tried"]
    assert all("budget_s=1" in each["why_not"] for each in result["tried"])
    assert not any(each["tried"] for each in result["advice"])


@pytest.mark.slow
def test_advice_does_not_change_the_run(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    task = str(PLANTED / "layers.py")
    args = ["updates=10", "task.pass_ms=5", "global_batch_size=16", "micro_batch_size=1", "backend.threads=1"]
    assert server.run(["train", "--task", task, "run=first", *args], tmp_path).code == 0
    left = {path: path.read_bytes() for path in (tmp_path / "outputs" / "first").rglob("*") if path.is_file()}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "runner.tools.measure.advisor.CompareLimits", partial(CompareLimits, block_s=0.05, rounds=(4, 6))
    )

    assert run(["run=last", "budget_s=40", "--json"]) == 0

    result = json.loads(capsys.readouterr().out)
    assert result["advice"][0]["rule"] == "tiny micro-batches"
    assert next(each for each in result["tried"] if each["advised"])["overrides"] == ["micro_batch_size=16"]
    assert {path: path.read_bytes() for path in (tmp_path / "outputs" / "first").rglob("*") if path.is_file()} == left
