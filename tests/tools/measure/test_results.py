"""Result files never lose measurements; damaged results are reported and not changed."""

from __future__ import annotations

import csv
import errno
import json
import multiprocessing
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.base.errors import ConfigError, DataError, Exit, InputMissing, RunInUse, StorageError
from runner.commands.benchmark import run as benchmark
from runner.durable import files
from runner.durable.system import System
from runner.tools.measure import results as module
from runner.tools.measure.comparison_result import Numerics, TrialOutcome
from runner.tools.measure.results import LadderRow, Results, Usage
from runner.tools.measure.statistics import Ratio
from runner.tools.measure.suites import machine
from runner.tools.measure.technique import is_valid_name

COLUMNS = {"baseline": [12.5, 12.25, 12.0], "bf16": [7.0, 6.125]}
HARDWARE = {"python": "3", "inventory": {}}

names = st.from_regex(r"(up to )?[A-Za-z0-9][A-Za-z0-9_.-]{0,8}", fullmatch=True).filter(is_valid_name)
times = st.lists(st.floats(0, 1e9, exclude_min=True), min_size=1, max_size=6)
tables = st.dictionaries(names, times, max_size=5)


def rows(columns: Mapping[str, Sequence[float]], mode: str = "") -> dict[str, LadderRow]:
    return {name: LadderRow(mode, updates_ms=tuple(column)) for name, column in columns.items()}


def columns(results: Results) -> dict[str, list[float]]:
    return {name: list(row.updates_ms) for name, row in results.rows().items()}


@pytest.fixture(autouse=True)
def one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "hardware", lambda: HARDWARE)


@pytest.fixture
def results(tmp_path: Path) -> Results:
    made = Results(tmp_path, "nmt-")
    made.put(rows(COLUMNS))
    return made


@pytest.fixture
def fresh() -> Iterator[Any]:
    """Yield a function that returns results in a new folder, because Hypothesis shares fixtures between examples."""
    with tempfile.TemporaryDirectory() as folder:
        count = iter(range(10**6))
        yield lambda: Results(Path(folder) / str(next(count)))


# ---------------------------------------------------------------- storing and reading


@pytest.mark.slow
def test_stored_results_are_read_back(fresh: Any) -> None:
    @given(tables)
    def law(table: dict[str, list[float]]) -> None:
        results = fresh()
        results.put(rows(table))

        assert columns(results) == table
        assert list(columns(results)) == list(table)

    law()


def test_every_field_of_a_stored_row_is_read_back(results: Results) -> None:
    row = LadderRow(
        "cumulative", ("tf32", "bf16"), 2.5,
        TrialOutcome(Ratio(1.2, 1.1, 1.3, 9), Numerics(0.1, 0.2, 0.3, 0.4, 0.5, 0.6), "", 3.0, 70, 800),
        Ratio(1.1, 1.0, 1.2, 8), 1.5, 0.5, Usage(0.25, 12.0, "flash", "cuda:0", "a card"), (2.5, 2.25), "nmt",
    )  # fmt: skip

    results.put({"up to bf16": row})

    result = results.rows()["up to bf16"]
    assert result == LadderRow(**{**vars(row), "session": 2, "date": result.date, "hardware": HARDWARE})


@pytest.mark.slow
def test_a_remeasured_technique_replaces_only_its_column(fresh: Any) -> None:
    @given(tables, tables)
    def law(first: dict[str, list[float]], second: dict[str, list[float]]) -> None:
        results = fresh()
        results.put(rows(first, "first"))
        results.put(rows(second, "second"))

        assert columns(results) == first | second
        assert list(columns(results)) == list(first | second)
        assert {name: row.mode for name, row in results.rows().items()} == {
            name: "second" if name in second else "first" for name in first | second
        }

    law()


def test_csv_rows_are_steps_and_columns_are_techniques(results: Results) -> None:
    with results.csv.open(newline="", encoding="utf-8") as file:
        assert list(csv.reader(file)) == [
            ["step", "baseline", "bf16"], ["1", "12.5", "7.0"], ["2", "12.25", "6.125"], ["3", "12.0", ""],
        ]  # fmt: skip


def test_each_technique_keeps_its_date_and_machine(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "hardware", lambda: {"python": "4"})
    results.put(rows({"bf16": [5.0]}))

    result = results.rows()

    assert result["bf16"].hardware == {"python": "4"}
    assert result["baseline"].hardware == HARDWARE
    assert result["bf16"].date >= result["baseline"].date > ""


def test_hardware_names_machine_and_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()

    result = module.hardware()

    assert {"accel-run", "python", "platform", "git", "inventory"} == result.keys()
    assert result["inventory"]["torch_version"]
    assert json.loads(json.dumps(result)) == result


def test_the_json_is_strict_for_infinite_intervals(results: Results) -> None:
    results.put({"two": LadderRow(outcome=TrialOutcome(Ratio(2.0)), updates_ms=(1.0,))})

    def refuse(word: str) -> None:
        raise AssertionError(word)

    json.loads(results.json.read_text(encoding="utf-8"), parse_constant=refuse)
    assert results.rows()["two"].outcome.ratio == Ratio(2.0, 0.0, float("inf"), 0)


def test_the_csv_is_only_written_and_never_read(results: Results) -> None:
    results.csv.write_bytes(b"\x00")

    assert columns(results) == COLUMNS
    results.put(rows({"flash": [1.0]}))
    header, *_ = results.csv.read_text().splitlines()
    assert [name.partition(" ")[0] for name in header.split(",")] == ["step", *COLUMNS, "flash"]


# ---------------------------------------------------------------- init, reset, clean


def test_init_creates_a_csv_with_the_column_step(tmp_path: Path) -> None:
    results = Results(tmp_path / "new" / "folder")

    results.init()
    results.init()  # the second call changes nothing

    assert results.csv.read_text(encoding="utf-8") == "step\n"
    assert results.rows() == {}


def test_init_keeps_existing_results(results: Results) -> None:
    before = results.csv.read_bytes()

    with pytest.raises(ConfigError, match=r"already has results: baseline, bf16\n.*reset"):
        results.init()

    assert results.csv.read_bytes() == before


@pytest.mark.parametrize("content", [b"{}", b"\x00\xff", b""])
def test_reset_always_empties_the_table(results: Results, content: bytes) -> None:
    results.json.write_bytes(content)

    results.reset()

    assert results.rows() == {}


def test_clean_removes_only_generated_files(results: Results) -> None:
    others = [results.folder / name for name in ("results.csv", "nmt-notes.txt", "steps.png", "nmt-steps.png.old")]
    for path in others:
        path.write_text("mine", encoding="utf-8")
    pictures = [results.file(name) for name in module.PICTURES]
    torn = results.folder / f"{files.TEMPORARY}{results.csv.name}-0123abcd"
    for path in (*pictures, torn):
        path.write_text("picture", encoding="utf-8")

    gone = results.clean()

    assert sorted(results.folder.iterdir()) == sorted(others)
    assert sorted(gone) == sorted([results.csv, results.json, torn, *pictures])
    assert results.clean() == []


def test_clean_creates_no_folder(tmp_path: Path) -> None:
    assert Results(tmp_path / "none").clean() == []
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("word", ["folder=taken", "prefix=a/b"])
def test_unwritable_folders_are_reported_before_measurements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").touch()
    monkeypatch.setattr(machine, "run_in_subprocess", lambda *_: pytest.fail("the benchmark must not start"))

    with pytest.raises(ConfigError, match=word.partition("=")[0]):
        benchmark(["suite=machine", "disk", word])


@pytest.mark.parametrize("prefix", ["../", "a/b", "/", "sub/"])
def test_a_prefix_cannot_escape_the_folder(tmp_path: Path, prefix: str) -> None:
    with pytest.raises(ConfigError, match="prefix="):
        Results(tmp_path, prefix)


# ---------------------------------------------------------------- damaged or missing results


def test_missing_results_suggest_the_benchmark_command(tmp_path: Path) -> None:
    with pytest.raises(InputMissing, match="accel-run benchmark") as caught:
        Results(tmp_path).rows()
    assert caught.value.exit_code == Exit.NO_INPUT


EARLIER = b'{"techniques": {"bf16": {"mode": "isolated", "sha256": "0"}}}'
DAMAGED = [
    b"", b"{", b"[]", b"{}", b'{"techniques": []}', b'{"techniques": {"a": 1}}', b"\xff", b"[" * 100_000, EARLIER,
    b'{"techniques": {"a": {"updates_ms": []}}}', b'{"techniques": {"a": {"updates_ms": [1, "2"]}}}',
    b'{"techniques": {"a": {"updates_ms": [0.0]}}}', b'{"techniques": {"a": {"updates_ms": [-3]}}}',
    b'{"techniques": {"a": {"updates_ms": [1e999]}}}', b'{"techniques": {"step": {"updates_ms": [1]}}}',
]  # fmt: skip


@pytest.mark.parametrize("content", DAMAGED, ids=repr)
def test_damaged_results_are_rejected_and_kept(results: Results, content: bytes) -> None:
    results.json.write_bytes(content)
    before = results.csv.read_bytes()

    for ask in (results.rows, results.init, lambda: results.put(rows({"flash": [1.0]}))):
        with pytest.raises(DataError, match="reset") as refused:
            ask()
        assert refused.value.problems[0].where == str(results.json)
        assert refused.value.exit_code == Exit.BAD_DATA

    assert (results.csv.read_bytes(), results.json.read_bytes()) == (before, content)


@pytest.mark.slow
def test_any_json_is_read_or_rejected(fresh: Any) -> None:
    leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
    keys = st.sampled_from(["techniques", "a", "updates_ms", "ratio", "middle", "numerics", "members", "session"])
    values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4))

    @settings(max_examples=300)
    @given(values)
    def law(row: Any) -> None:
        results = fresh()
        results.init()
        results.json.write_text(json.dumps({"techniques": {"a": row}}))
        try:
            result = results.rows()
        except DataError:
            return
        results.put({})
        assert results.rows() == result

    law()


def test_symbolic_links_are_rejected(results: Results) -> None:
    results.json.unlink()
    results.json.symlink_to(results.folder / "elsewhere")

    for ask in (results.rows, lambda: results.put(rows(COLUMNS))):
        with pytest.raises(StorageError, match="link"):
            ask()


# ---------------------------------------------------------------- faults


class Failing:
    """Makes a system call fail from its n-th use on."""

    def __init__(self, patch: pytest.MonkeyPatch, call: str, at: int) -> None:
        self.has_failed = False
        calls, real = count(), getattr(System, call)

        def failing(system: System, *given: Any) -> Any:
            if next(calls) >= at:
                self.has_failed = True
                raise OSError(errno.ENOSPC, "no space")
            return real(system, *given)

        patch.setattr(System, call, failing)


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("call", ["open", "write", "fsync", "rename"])
def test_a_failing_disk_leaves_a_complete_column(
    results: Results, monkeypatch: pytest.MonkeyPatch, call: str, at: int
) -> None:
    before = columns(results)
    with monkeypatch.context() as patched:
        failing, is_full = Failing(patched, call, at), False
        try:
            results.put(rows({"bf16": [3.0], "flash": [4.0]}, "again"))
        except StorageError as error:
            is_full = "full" in str(error)
        assert is_full == failing.has_failed

    result = columns(results)
    assert result in (before, before | {"bf16": [3.0], "flash": [4.0]})
    assert (results.rows()["bf16"].mode == "again") == (result != before)
    results.put(rows({"bf16": [3.0]}))
    assert columns(results)["baseline"] == COLUMNS["baseline"]


def _put_many(folder: Path, name: str) -> None:
    module.hardware = lambda: HARDWARE  # type: ignore[assignment]
    for number in range(10):
        Results(folder).put(rows({f"{name}{number}": [1.0 + number]}))


@pytest.mark.slow
def test_concurrent_writers_lose_no_column(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_put_many, args=(tmp_path, name)) for name in "abcd"]
    for each in writers:
        each.start()
    for each in writers:
        each.join()

    assert [each.exitcode for each in writers] == [0] * 4
    expected = {f"{name}{number}": [1.0 + number] for name in "abcd" for number in range(10)}
    assert columns(Results(tmp_path)) == expected


def test_a_held_lock_is_reported(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOCK_TIMEOUT_S", 0.1)
    lock = files.Lock(results.folder / ".nmt-results.lock", "4711 note")
    try:
        with pytest.raises(RunInUse, match="process 4711 is still changing"):
            results.put(rows({"flash": [1.0]}))
    finally:
        lock.release()

    results.put(rows({"flash": [1.0]}))
    assert columns(results) == COLUMNS | {"flash": [1.0]}
