"""The ladder reports techniques without effect, and never reports techniques that change the results as a gain."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import statistics
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from runner.base.errors import ConfigError, DataError, InputMissing, Problem
from runner.base.json_values import replace_nonfinite
from runner.commands.benchmark import run as benchmark
from runner.config.configuration import compose
from runner.config.custom_tables import RESERVED_TECHNIQUES
from runner.config.request import Request
from runner.tools.measure import suite
from runner.tools.measure.compare import Comparison
from runner.tools.measure.comparison_result import ComparisonResult, TrialOutcome, Variant, VariantResult
from runner.tools.measure.measurement_context import MeasurementContext
from runner.tools.measure.results import LadderRow, Results, session_baseline
from runner.tools.measure.statistics import Ratio
from runner.tools.measure.suite import SuiteReport, SuiteRequest, screen
from runner.tools.measure.suites import ladder
from runner.tools.measure.suites.ladder import run
from runner.tools.measure.technique import (
    BASELINE,
    SHIPPED_ORDER,
    Technique,
    load_techniques,
    select_techniques,
    stack_overrides,
)
from tests.tools.measure.suites.asked import asked

TASK = Path(__file__).parents[1] / "task_to_measure.py"
SETTINGS = ("updates=100", "global_batch_size=16", "device=cpu", "backend.threads=1", "task.sleep_ms=8")
STEPS = 12
# name -> file of a user-defined technique
PLANTED = {
    "nothing": "overrides: [task.dies_at=0]",
    "slow": "overrides: [task.sleep_ms=9.2]",
    "quick": "overrides: [task.sleep_ms=6]",
    "quick_and_wrong": "overrides: [task.sleep_ms=1, task.gradient=3.0]",
    "impossible": "overrides: [nonsense=1]",
    "of_sgd": "overrides: [optimizer.lr=0.1]\nneeds: {optimizer: sgd}",
}


@pytest.fixture(scope="module")
def config_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mine")
    (folder / "benchmark" / "technique").mkdir(parents=True)
    for name, text in PLANTED.items():
        (folder / "benchmark" / "technique" / f"{name}.yaml").write_text(f"# planted\n{text}\n")
    return folder


def wanted_in(folder: Path, config_dir: Path, *args: str, **options: str) -> SuiteRequest:
    wanted = asked("ladder", folder, TASK, *SETTINGS, **({"steps": str(STEPS), "rounds": "8"} | options))
    return replace(wanted, positional=args, request=replace(wanted.request, config_dir=config_dir), budget_s=120.0)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, config_dir: Path) -> tuple[SuiteReport, Path]:
    """The complete ladder of the planted techniques, measured once."""
    folder = tmp_path_factory.mktemp("benchmarks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suite, "BLOCK_S", 0.05)
        return run(wanted_in(folder, config_dir, techniques=f"[{','.join(PLANTED)},tf32]")), folder


@pytest.fixture(scope="module")
def rows(measured: tuple[SuiteReport, Path]) -> dict[str, dict[str, object]]:
    return {row["variant"]: row for row in measured[0].data["rows"]}


def columns_of(folder: Path) -> dict[str, list[float]]:
    return {name: list(row.updates_ms) for name, row in Results(folder).rows().items()}


# ---------------------------------------------------------------- measurements


@pytest.mark.slow
def test_a_technique_without_effect_shows_no_clear_change(rows: dict[str, dict[str, object]]) -> None:
    assert rows["nothing"]["verdict"] == "no clear change"


@pytest.mark.slow
def test_a_technique_that_is_10_percent_slower_is_worse(rows: dict[str, dict[str, object]]) -> None:
    assert rows["slow"]["verdict"] == "worse"


@pytest.mark.slow
def test_a_faster_technique_is_found(rows: dict[str, dict[str, object]]) -> None:
    assert rows["quick"]["verdict"] == "better"
    assert not rows["quick"]["is_wrong"]


@pytest.mark.slow
def test_techniques_that_change_gradients_are_not_combined(rows: dict[str, dict[str, object]]) -> None:
    assert rows["quick_and_wrong"]["verdict"] == "better, but wrong"
    for row in rows.values():
        assert row["mode"] == "isolated" or "quick_and_wrong" not in row["members"]  # type: ignore[operator]


@pytest.mark.parametrize(("word", "fix"), [("rounds", "rounds=60"), ("modes", "modes=NAME"), ("suite", "suite=ladder")])
def test_a_key_without_a_value_is_rejected(word: str, fix: str) -> None:
    with pytest.raises(ConfigError, match="needs a value") as raised:
        benchmark([word, "task=gpt"])

    assert raised.value.problems == (Problem("needs a value", word, f"use {fix}"),)


@pytest.mark.slow
def test_unmeasurable_techniques_are_listed_with_the_reason(measured: tuple[SuiteReport, Path]) -> None:
    skipped = measured[0].skipped

    assert skipped["impossible"].startswith("nonsense=1: unknown key")
    assert {"optimizer=sgd,", "optimizer=adamw"} <= set(skipped["of_sgd"].split())
    assert "needs a GPU" in skipped["tf32"]
    assert all(reason in "\n".join(screen(measured[0])) for reason in skipped.values())


@pytest.mark.slow
def test_the_fastest_of_exclusive_techniques_is_combined(
    measured: tuple[SuiteReport, Path], rows: dict[str, dict[str, object]]
) -> None:
    """Both techniques set task.sleep_ms."""
    assert any(note.startswith("slow and quick ") for note in measured[0].notes)
    assert not any(name.endswith(" slow") for name in rows)


@pytest.mark.slow
def test_techniques_are_stacked_in_order(
    measured: tuple[SuiteReport, Path], rows: dict[str, dict[str, object]]
) -> None:
    assert rows["up to nothing"]["members"] == ["nothing"]
    assert rows["up to quick"]["members"] == ["nothing", "quick"]
    own = rows["up to quick"]["own"]
    assert isinstance(own, dict)
    assert own["middle"] > 1.05, "faster than the previous stack"  # lint-tests: measured: in virtual time
    assert "quick" in measured[0].headline


@pytest.mark.slow
def test_start_time_compile_time_memory_and_kernels_are_reported(
    rows: dict[str, dict[str, object]],
) -> None:
    for name in (BASELINE, "quick"):
        row = rows[name]
        assert isinstance(row["start_s"], float)
        assert row["start_s"] > 0
        assert isinstance(row["compile_s"], float)
        assert isinstance(row["peak_gib"], float)
        assert row["optimizer_mib"] == pytest.approx(2 * (8 * 8 + 8) * 4 / 2**20, rel=0.1)
        assert row["device"] == "cpu"


# ---------------------------------------------------------------- stored results


@pytest.mark.slow
def test_columns_are_variants_and_rows_are_steps(measured: tuple[SuiteReport, Path]) -> None:
    report, folder = measured
    columns = columns_of(folder)

    assert set(columns) == {row["variant"] for row in report.data["rows"] if row["update_ms"]}
    assert {len(column) for column in columns.values()} == {STEPS}
    assert statistics.median(columns["quick"]) < statistics.median(columns[BASELINE])


@pytest.mark.slow
def test_stored_columns_equal_reported_ones(measured: tuple[SuiteReport, Path]) -> None:
    report, folder = measured
    rows = Results(folder).rows()

    assert rows["quick"].task == "task_to_measure"
    assert rows["quick"].verdict == "better"
    assert rows["quick_and_wrong"].outcome.is_wrong
    json.dumps(dict(report.data), allow_nan=False)


@pytest.mark.slow
def test_the_baseline_can_be_measured_alone(tmp_path: Path, config_dir: Path) -> None:
    results = Results(tmp_path)
    results.put({BASELINE: LadderRow(updates_ms=(1.0, 1.0)), "bf16": LadderRow(updates_ms=(2.0,))})

    report = run(wanted_in(tmp_path, config_dir, BASELINE, steps="4", rounds="3"))

    assert [row["variant"] for row in report.data["rows"]] == [BASELINE]
    columns = columns_of(tmp_path)
    assert (columns["bf16"], columns[session_baseline(1)]) == ([2.0], [1.0, 1.0])
    assert len(columns[BASELINE]) == 4


@pytest.mark.slow
def test_the_stack_can_be_measured_alone(tmp_path: Path, config_dir: Path) -> None:
    wanted = wanted_in(tmp_path, config_dir, techniques="[nothing,quick]", modes="cumulative", steps="4", rounds="4")

    report = run(wanted)

    assert [row["variant"] for row in report.data["rows"]] == [BASELINE, "up to nothing", "up to quick"]
    assert set(columns_of(tmp_path)) == {BASELINE, "up to nothing", "up to quick"}


def place_on(device: str, comparison: object = None) -> MeasurementContext:
    return SimpleNamespace(notes=[], plan=SimpleNamespace(device=device), comparison=comparison)  # type: ignore[return-value]


def test_float16_starts_last_on_a_cpu(tmp_path: Path, config_dir: Path) -> None:
    """float16 updates take ten times as long on a CPU, so an earlier start would use the time of other techniques."""
    asked = ladder.parse_request(wanted_in(tmp_path, config_dir, techniques="[fp16,nothing,fused]"))
    begun: list[str] = []

    class Begun(Exception):
        pass

    class Told:
        def compare(self, variants: list[Variant], *_: object) -> None:
            begun.extend(variant.name for variant in variants)
            raise Begun

    for device in ("cpu", "cuda:0"):
        climbing = ladder.Ladder(asked, wanted_in(tmp_path, config_dir), place_on(device, Told()), lambda _: None)
        with pytest.raises(Begun):
            climbing.measure_isolated(asked.members)

    assert begun == [BASELINE, "nothing", "fused", "fp16", BASELINE, "fp16", "nothing", "fused"]


@pytest.mark.slow
def test_an_interrupted_benchmark_keeps_its_measurements(
    tmp_path: Path, config_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal arrives while blocks are measured. Afterwards, the signal handler is restored."""
    monkeypatch.setattr(suite, "BLOCK_S", 0.05)
    turn, made, handler = Comparison.run_block, [], signal.getsignal(signal.SIGTERM)

    def stopped(comparison: Comparison, trials: ComparisonResult, measured: VariantResult, number: int) -> None:
        turn(comparison, trials, measured, number)
        made.append(number)
        if len(made) == 10:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Comparison, "run_block", stopped)
    wanted = wanted_in(tmp_path, config_dir, techniques="[nothing,quick]", rounds="30")

    with pytest.raises(KeyboardInterrupt):
        run(wanted)

    assert set(columns_of(tmp_path)) == {BASELINE, "nothing", "quick"}
    quick = Results(tmp_path).rows()["quick"]
    assert quick.outcome.ratio is not None
    assert quick.outcome.ratio.num == 3
    assert (quick.usage.peak_gib or 0) > 0, "the report must not use the interrupted block"
    assert signal.getsignal(signal.SIGTERM) == handler


def test_slow_techniques_without_gain_are_not_stacked(tmp_path: Path, config_dir: Path) -> None:
    asked = ladder.parse_request(wanted_in(tmp_path, config_dir, techniques="[nothing,quick,slow]"))
    climbing = ladder.Ladder(asked, wanted_in(tmp_path, config_dir), place_on("cpu"), lambda _: None)
    better, worse = Ratio(1.2, 1.15, 1.25, 9), Ratio(0.9, 0.88, 0.92, 9)
    for name, ratio, seconds in (("nothing", worse, 1.0), ("quick", better, 100.0), ("slow", worse, 100.0)):
        climbing.rows[name] = LadderRow("isolated", (name,), 1.0, TrialOutcome(ratio), start_s=0.5, compile_s=seconds)

    assert [each.name for each in climbing.drop_slow_starters(asked.members)] == ["nothing", "quick"]
    assert "302 s" in climbing.skipped["up to slow"]


@pytest.mark.slow
def test_remeasuring_a_technique_keeps_other_columns(tmp_path: Path, config_dir: Path) -> None:
    results = Results(tmp_path)
    times = {BASELINE: (1.0, 1.0), "bf16": (2.0,), "nothing": (3.0,)}
    results.put({name: LadderRow(updates_ms=ms) for name, ms in times.items()})

    run(wanted_in(tmp_path, config_dir, "nothing", steps="4", rounds="3"))

    columns = columns_of(tmp_path)
    assert (columns[BASELINE], columns["bf16"]) == ([1.0, 1.0], [2.0])
    assert len(columns["nothing"]) == 4
    assert columns["nothing"] != [3.0]
    own, sessions = columns[session_baseline(2)], {name: row.session for name, row in results.rows().items()}
    assert len(own) == 4, "the baseline is measured again"
    assert sessions == {BASELINE: 1, "bf16": 1, "nothing": 2, session_baseline(2): 2}


# ---------------------------------------------------------------- requests


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        (("bf61",), {}, "must be a technique"),
        ((), {"techniques": "[nothing,bf61]"}, "must be a technique"),
        ((), {"steps": "0"}, "must be an integer above 0"),
        ((), {"steps": "many"}, "must be an integer above 0"),
        ((), {"rounds": "-1"}, "must be an integer above 0"),
        ((), {"batch": "0"}, "must be an integer above 0"),
        ((), {"modes": "alone"}, "alone is not one of them"),
        ((), {"techniques": "[]"}, "must contain a technique"),
        (("all", "plots"), {}, "plots: must be the only argument, but there is also all"),
        (("reset", "nothing"), {}, "must be the only argument"),
        (("impossible",), {}, "nonsense"),
        (("nothing",), {"techniques": "[slow]"}, "which also select techniques"),
    ],
)
def test_contradictory_arguments_are_rejected(
    tmp_path: Path, config_dir: Path, args: tuple[str, ...], options: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run(wanted_in(tmp_path, config_dir, *args, **options))
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_table_is_reported_before_measurements(tmp_path: Path, config_dir: Path) -> None:
    results = Results(tmp_path)
    results.put({"nothing": LadderRow(updates_ms=(1.0,))})
    results.json.write_text('{"techniques": {')

    with pytest.raises(DataError):
        run(wanted_in(tmp_path, config_dir, "nothing"))

    assert results.json.read_text() == '{"techniques": {'


def test_columns_of_different_tasks_are_not_mixed(tmp_path: Path, config_dir: Path) -> None:
    results = Results(tmp_path)
    results.put({"nothing": LadderRow(updates_ms=(1.0,), task="another")})

    with pytest.raises(ConfigError, match="contains measurements of task another, but this is task task_to_measure"):
        run(wanted_in(tmp_path, config_dir, "nothing"))


def test_the_table_is_created_emptied_and_removed(tmp_path: Path, config_dir: Path) -> None:
    results = Results(tmp_path)

    run(wanted_in(tmp_path, config_dir, "init"))
    assert results.rows() == {}
    results.put({"bf16": LadderRow(updates_ms=(2.0,))})
    run(wanted_in(tmp_path, config_dir, "reset"))
    assert results.rows() == {}
    run(wanted_in(tmp_path, config_dir, "clean"))
    with pytest.raises(InputMissing):
        results.rows()


@pytest.mark.slow
def test_results_are_plotted_if_there_are_any(
    measured: tuple[SuiteReport, Path], tmp_path: Path, config_dir: Path
) -> None:
    drawn = run(wanted_in(measured[1], config_dir, "plots")).files

    assert {"steps.png", "speedup.png"} <= {file.name for file in drawn}
    assert all(file.stat().st_size > 1000 for file in drawn)
    with pytest.raises(InputMissing, match="no results yet"):
        run(wanted_in(tmp_path, config_dir, "plots"))


def test_the_batch_size_is_that_of_an_update(tmp_path: Path, config_dir: Path) -> None:
    wanted = wanted_in(tmp_path, config_dir, "nothing", batch="8")

    assert ladder.parse_request(wanted).configuration.settings.global_batch_size == 8


# ---------------------------------------------------------------- techniques


@pytest.mark.slow
def test_every_shipped_technique_composes() -> None:
    known = load_techniques(None)

    assert tuple(known) == SHIPPED_ORDER
    for technique in select_techniques(known, known):
        configuration = compose(Request())
        compose(Request(stack_overrides([technique], known[BASELINE], configuration)))


@pytest.mark.slow
def test_the_baseline_disables_every_technique() -> None:
    known = load_techniques(None)
    plain = compose(Request(known[BASELINE].overrides)).flat()

    for technique in select_techniques(known, known):
        changed = compose(Request(stack_overrides([technique], known[BASELINE], compose(Request())))).flat()
        assert any(plain.get(word.partition("=")[0]) != changed[word.partition("=")[0]] for word in technique.overrides)


def test_gpu_techniques_are_skipped_on_a_cpu() -> None:
    configuration, known = compose(Request()), load_techniques(None)
    skipped = {name for name, each in known.items() if each.why_not(configuration, "cpu")}
    assert skipped == {"autotune", "non_blocking", "prefetch"}
    assert not any(each.why_not(configuration, "cuda:0") for each in known.values())


def test_a_users_technique_replaces_a_shipped_one(tmp_path: Path) -> None:
    (tmp_path / "benchmark" / "technique").mkdir(parents=True)
    (tmp_path / "benchmark" / "technique" / "bf16.yaml").write_text("overrides: [precision=bf16, compile=regional]")

    assert load_techniques(tmp_path)["bf16"].overrides == ("precision=bf16", "compile=regional")


@pytest.mark.parametrize(
    "text",
    ["precision=bf16", "overrides: precision=bf16", "overrides: [bf16]", "override: []", "overrides: []\nneeds: x"],
)
def test_invalid_technique_files_are_rejected(tmp_path: Path, text: str) -> None:
    (tmp_path / "benchmark" / "technique").mkdir(parents=True)
    (tmp_path / "benchmark" / "technique" / "mine.yaml").write_text(text)

    with pytest.raises(ConfigError, match=r"mine\.yaml"):
        load_techniques(tmp_path)


@pytest.mark.parametrize("name", ["step", "all", "plots"])
def test_reserved_names_are_rejected(tmp_path: Path, name: str) -> None:
    (tmp_path / "benchmark" / "technique").mkdir(parents=True)
    (tmp_path / "benchmark" / "technique" / f"{name}.yaml").write_text("overrides: [precision=bf16]")

    with pytest.raises(ConfigError, match="cannot be the name of a technique"):
        load_techniques(tmp_path)


def test_every_argument_of_the_ladder_is_accepted() -> None:
    assert {*ladder.ACTIONS, "all"} <= set(RESERVED_TECHNIQUES)


@pytest.mark.slow
def test_another_optimizer_keeps_its_hyperparameters() -> None:
    """A comparison of optimizers must not also compare different learning rates."""
    given = ("task=nmt", "optimizer.weight_decay=0.03", "optimizer.lr_scales={encoder: 0.5}")
    configuration = compose(Request(given))
    args = stack_overrides(
        [Technique("8bit", ("optimizer=adamw8bit",))],
        Technique(BASELINE, ("optimizer.kernel=for-loop",)),
        configuration,
    )

    used = compose(Request(("task=nmt", *args))).choices["optimizer"]

    assert used.name == "adamw8bit"
    before = configuration.choices["optimizer"].options
    assert {key: used.options[key] for key in before if key in used.options} == {
        key: value for key, value in before.items() if key in used.options
    }
    assert used.options["weight_decay"] == 0.03


PHASES = """
PHASES = {"first": {"optimizer.lr": 0.01, "optimizer.weight_decay": 0.0}, "second": {"needs": ["first"]}}
SETTINGS = {"optimizer.lr": 0.005, "updates": 10}
def build(*, width: int = 3): ...
"""


@pytest.mark.slow
@pytest.mark.parametrize("given", [(), ("phase.second.optimizer.betas=[0.8,0.9]",), ("optimizer.lr=0.5",)])
def test_another_optimizer_keeps_the_hyperparameters_of_each_phase(tmp_path: Path, given: tuple[str, ...]) -> None:
    task = tmp_path / "phased.py"
    task.write_text(PHASES)
    before = compose(Request(given, task))
    known = load_techniques(None)

    after = compose(Request((*given, *stack_overrides([known["8bit"]], known[BASELINE], before)), task))

    for ours, theirs in zip(before.phases, after.phases, strict=True):
        assert theirs.optimizer.name == "adamw8bit"
        shared = ours.optimizer.options.keys() & theirs.optimizer.options.keys()
        assert {"lr", "weight_decay", "betas"} <= shared
        assert all(ours.optimizer.options[key] == theirs.optimizer.options[key] for key in shared)
    assert known["8bit"].why_not(before, "cpu") == ""
    other = compose(Request(("phase.first.optimizer=sgd",), task))
    assert {"optimizer=adamw,", "optimizer=sgd"} <= set(known["8bit"].why_not(other, "cpu").split())


def test_a_later_technique_overrides_an_earlier_one() -> None:
    base, configuration = Technique(BASELINE, ("precision=fp32", "compile=off")), compose(Request())
    members = [
        Technique("bf16", ("precision=bf16",)),
        Technique("compile", ("compile=default",)),
        Technique("fp16", ("precision=fp16",)),
    ]

    assert stack_overrides(members, base, configuration) == ("compile=default", "precision=fp16")


# ---------------------------------------------------------------- reports


def test_unknown_numbers_are_null_in_json() -> None:
    row = LadderRow("isolated", ("bf16",), outcome=TrialOutcome(why_not="no room"))

    assert replace_nonfinite(row.as_json())["update_ms"] is None
    assert math.isnan(row.update_ms)


@pytest.mark.parametrize(
    ("num", "kept"), [(3, (0.0, 2.0, 4.0)), (6, (0.0, 1.0, 2.0, 3.0, 4.0, 5.0)), (9, (0.0, 1.0, 2.0, 3.0, 4.0, 5.0))]
)
def test_steps_are_sampled_evenly_from_beginning_to_end(num: int, kept: tuple[float, ...]) -> None:
    assert ladder.take_evenly_spaced([0.0, 1.0, 2.0, 3.0, 4.0, 5.0], num) == kept


@pytest.mark.slow
def test_techniques_without_time_are_untried(tmp_path: Path, config_dir: Path) -> None:
    """This is not an error, because a larger budget would try them."""
    (config_dir / "benchmark" / "technique" / "late.yaml").write_text("overrides: [task.start_s=300]\n")
    wanted = replace(wanted_in(tmp_path, config_dir, "late", steps="4", rounds="3"), budget_s=12.0)

    report = run(wanted)

    assert report.skipped["late"].startswith("not tried")
    assert set(columns_of(tmp_path)) == {BASELINE}


def test_the_benchmark_page_describes_every_column() -> None:
    page = (Path(__file__).parents[4] / "docs" / "benchmark.md").read_text(encoding="utf-8")
    table = page.partition("### Columns")[2].partition("\n\n`")[0]
    described = {
        name for row in re.findall(r"^\| (`.+?) \|", table, re.MULTILINE) for name in re.findall(r"`(.+?)`", row)
    }
    assert described == {*ladder.SPEED_COLUMNS, *ladder.COST_COLUMNS}
