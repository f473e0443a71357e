"""Laws of the files of results: what was measured is never lost, and what is damaged is said and left alone."""

from __future__ import annotations

import csv
import errno
import json
import multiprocessing
import tempfile
from collections.abc import Iterator
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
from runner.tools.measure.results import Results
from runner.tools.measure.suites import machine
from runner.tools.measure.technique import is_name

COLUMNS = {"baseline": [12.5, 12.25, 12.0], "bf16": [7.0, 6.125]}
FACTS = {name: {"median_ms": column[0]} for name, column in COLUMNS.items()}
HARDWARE = {"python": "3", "inventory": {}}

names = st.text(min_size=1, max_size=12).filter(is_name)
times = st.lists(st.floats(0, 1e9, exclude_min=True), max_size=6)
tables = st.dictionaries(names, times, max_size=5)


@pytest.fixture(autouse=True)
def one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "hardware", lambda: HARDWARE)


@pytest.fixture
def results(tmp_path: Path) -> Results:
    made = Results(tmp_path, "nmt-")
    made.put(COLUMNS, FACTS)
    return made


@pytest.fixture
def fresh() -> Iterator[Any]:
    """Give a function that returns results in a new folder: hypothesis keeps the fixtures of the first example."""
    with tempfile.TemporaryDirectory() as folder:
        count = iter(range(10**6))
        yield lambda: Results(Path(folder) / str(next(count)))


# ---------------------------------------------------------------- what is put is there


def test_what_is_put_is_read_again(fresh: Any) -> None:
    @settings(deadline=None)
    @given(tables)
    def law(columns: dict[str, list[float]]) -> None:
        results = fresh()
        results.put(columns, {name: {"median_ms": 1.5} for name in columns})

        assert results.columns() == columns
        assert list(results.columns()) == list(columns)
        assert results.facts()["techniques"].keys() == columns.keys()

    law()


def test_a_technique_that_is_measured_again_takes_its_own_place_only(fresh: Any) -> None:
    @settings(deadline=None)
    @given(tables, tables)
    def law(first: dict[str, list[float]], second: dict[str, list[float]]) -> None:
        results = fresh()
        results.put(first, {name: {"by": "first"} for name in first})
        results.put(second, {name: {"by": "second"} for name in second})

        assert results.columns() == first | second
        assert list(results.columns()) == list(first | second)
        told = results.facts()["techniques"]
        assert {name: each["by"] for name, each in told.items()} == {
            name: "second" if name in second else "first" for name in first | second
        }

    law()


def test_the_csv_has_a_row_for_each_step_and_a_column_for_each_technique(results: Results) -> None:
    with results.csv.open(newline="", encoding="utf-8") as file:
        assert list(csv.reader(file)) == [
            ["step", "baseline", "bf16"], ["1", "12.5", "7.0"], ["2", "12.25", "6.125"], ["3", "12.0", ""],
        ]  # fmt: skip


def test_each_technique_keeps_the_day_and_the_machine_it_was_measured_on(
    results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "hardware", lambda: {"python": "4"})
    results.put({"bf16": [5.0]}, {"bf16": {"median_ms": 5.0}})

    facts = results.facts()

    assert facts["hardware"] == facts["techniques"]["bf16"]["hardware"] == {"python": "4"}
    assert facts["techniques"]["baseline"]["hardware"] == HARDWARE
    assert facts["date"] == facts["techniques"]["bf16"]["date"]


def test_hardware_names_machine_and_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()

    found = module.hardware()

    assert {"accel-run", "python", "platform", "git", "inventory"} == found.keys()
    assert found["inventory"]["torch_version"]
    assert json.loads(json.dumps(found)) == found


def test_the_json_is_strict_where_an_interval_has_no_end(results: Results) -> None:
    results.put({"two": [1.0]}, {"two": {"ratio": {"low": 0.0, "high": float("inf"), "each": (float("nan"),)}}})

    def refuse(word: str) -> None:
        raise AssertionError(word)

    json.loads(results.json.read_text(encoding="utf-8"), parse_constant=refuse)
    assert results.facts()["techniques"]["two"]["ratio"] == {"low": 0.0, "high": None, "each": [None]}


def test_facts_are_not_told_of_a_column_that_has_changed_since(results: Results) -> None:
    results.csv.write_text(results.csv.read_text(encoding="utf-8").replace("6.125", "5.125"), encoding="utf-8")

    assert results.facts()["techniques"].keys() == {"baseline"}
    results.put({"flash": [1.0]}, {})
    assert results.columns()["bf16"] == [7.0, 5.125]


def test_a_csv_that_a_spreadsheet_has_saved_is_read(results: Results) -> None:
    text = results.csv.read_text(encoding="utf-8")
    results.csv.write_bytes(b"\xef\xbb\xbf" + text.replace("12.0,", '"12",').replace("\n", "\r\n").encode())

    assert results.columns() == COLUMNS
    assert results.facts()["techniques"].keys() == COLUMNS.keys()


def test_times_without_the_json_are_results(results: Results) -> None:
    results.json.unlink()

    assert results.columns() == COLUMNS
    assert results.facts() == {"techniques": {}}


# ---------------------------------------------------------------- init, reset, clean


def test_init_makes_a_csv_with_the_column_step(tmp_path: Path) -> None:
    results = Results(tmp_path / "new" / "folder")

    results.init()
    results.init()  # nothing is lost by a second one

    assert results.csv.read_text(encoding="utf-8") == "step\n"
    assert results.columns() == {}
    assert results.facts()["techniques"] == {}


def test_init_keeps_results_and_says_what_loses_them(results: Results) -> None:
    before = results.csv.read_bytes()

    with pytest.raises(ConfigError, match=r"has results already: baseline, bf16\n.*reset"):
        results.init()

    assert results.csv.read_bytes() == before


@pytest.mark.parametrize("content", [b"step,a\n1,2\n", b"\x00\xff", b""])
def test_reset_begins_anew_whatever_there_was(results: Results, content: bytes) -> None:
    results.csv.write_bytes(content)
    results.json.write_text("{", encoding="utf-8")

    results.reset()

    assert results.columns() == {}
    assert results.facts()["techniques"] == {}


def test_clean_removes_what_was_written_here_and_nothing_else(results: Results) -> None:
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


def test_clean_makes_no_folder(tmp_path: Path) -> None:
    assert Results(tmp_path / "none").clean() == []
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("word", ["folder=taken", "prefix=a/b"])
def test_where_results_cannot_lie_is_said_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").touch()
    monkeypatch.setattr(machine, "in_subprocess", lambda *_: pytest.fail("it was begun"))

    with pytest.raises(ConfigError, match=word.partition("=")[0]):
        benchmark(["suite=machine", "disk", word])


@pytest.mark.parametrize("prefix", ["../", "a/b", "/", "sub/"])
def test_a_prefix_does_not_leave_the_folder(tmp_path: Path, prefix: str) -> None:
    with pytest.raises(ConfigError, match="prefix="):
        Results(tmp_path, prefix)


# ---------------------------------------------------------------- what is damaged, or not there


def test_no_results_yet_is_said_with_what_makes_them(tmp_path: Path) -> None:
    for ask in (Results(tmp_path).columns, Results(tmp_path).facts):
        with pytest.raises(InputMissing, match="run the techniques first: accel-run benchmark") as told:
            ask()
        assert told.value.exit_code == Exit.NO_INPUT


DAMAGED = {
    b"": ("line 1", "must begin with step"),
    b"\n1,2\n": ("line 1", "must begin with step"),
    b"baseline\n1.0\n": ("line 1", "must be step, but is baseline"),
    b"step;baseline\n1;2\n": ("line 1", "must be step, but is step;baseline"),
    b"step,a,a\n1,2,3\n": ("line 1, column a", "is there 2 times"),
    b"step,a,step\n1,2,3\n": ("line 1, column step", "name of a technique"),
    b"step,a,\n1,2,3\n": ("line 1, column without a name", "name of a technique"),
    b"step,a\n1,2\n2,fast\n": ("line 3, column a", "must be milliseconds above 0, but is fast"),
    b"step,a,b\n1,2,nan\n": ("line 2, column b", "but is nan"),
    b"step,a\n1,inf\n": ("line 2, column a", "but is inf"),
    b"step,a\n1,1e999\n": ("line 2, column a", "but is 1e999"),
    b"step,a\n1,-3\n": ("line 2, column a", "but is -3"),
    b"step,a\n1,0\n": ("line 2, column a", "but is 0"),
    b'step,a\n1,"2,5"\n': ("line 2, column a", "but is 2,5"),
    b"step,a,b\n1,2,3\n2,2\n": ("line 3", "must have 3 cells, but has 2"),
    b"step,a\n1,2,5\n": ("line 2", "must have 2 cells, but has 3"),
    b"step,a,b\n1,2,3\n2,,3\n3,4,3\n": ("line 4, column a", "must be empty"),
    b"step,a\n1,2\n3,2\n": ("line 3, column step", "must be 2, but is 3"),
    b"step,a\n,2\n": ("line 2, column step", "must be 1, but is empty"),
    b"step,a\n1,\xff\xfe\n": ("line 2", "must be text in UTF-8"),
    b"\x89PNG\r\n\x1a\n\x00\x00": ("line 1", "must be text in UTF-8"),
    b'step,a\n1,"2\n': ("line 2", "cannot be read as CSV"),
    b"step,a\n1,\x00\n": ("line 2, column a", "but is"),
}


@pytest.mark.parametrize("content", DAMAGED, ids=repr)
def test_a_damaged_csv_is_refused_with_its_place_and_left_as_it_is(results: Results, content: bytes) -> None:
    where, what = DAMAGED[content]
    results.csv.write_bytes(content)
    told = results.json.read_bytes()

    for ask in (results.columns, results.facts, results.init, lambda: results.put({"flash": [1.0]}, {})):
        with pytest.raises(DataError) as refused:
            ask()
        problem = refused.value.problems[0]
        assert refused.value.exit_code == Exit.BAD_DATA
        assert what in problem.what
        assert problem.where == f"{results.csv}, {where}"
        assert "editor" in problem.fix
        assert "reset" in problem.fix

    assert results.csv.read_bytes() == content
    assert results.json.read_bytes() == told


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"{}", b'{"techniques": []}', b'{"techniques": {"a": 1}}', b"\xff", b"[" * 100_000]
)
def test_a_damaged_json_is_refused_and_nothing_is_changed(results: Results, content: bytes) -> None:
    results.json.write_bytes(content)
    before = results.csv.read_bytes()

    for ask in (results.facts, lambda: results.put({"flash": [1.0]}, {})):
        with pytest.raises(DataError, match="remove it") as refused:
            ask()
        assert refused.value.problems[0].where == str(results.json)

    assert results.columns() == COLUMNS
    assert (results.csv.read_bytes(), results.json.read_bytes()) == (before, content)


def test_any_bytes_are_read_or_refused_in_words(fresh: Any) -> None:
    cells = st.sampled_from(
        [b"step", b"a", b"1", b"2", b",", b"\n", b"\r", b'"', b"", b"1.5", b"-", b"nan", b"\x00", b"\xff"]
    )

    @settings(deadline=None, max_examples=300)
    @given(st.lists(cells | st.binary(max_size=3), max_size=20).map(b"".join))
    def law(content: bytes) -> None:
        results = fresh()
        results.init()
        results.csv.write_bytes(content)
        try:
            columns = results.columns()
        except DataError:
            return
        results.put({}, {})
        assert results.columns() == columns

    law()


def test_what_is_no_file_is_refused_in_words(results: Results) -> None:
    results.csv.unlink()
    results.csv.symlink_to(results.folder / "elsewhere")

    for ask in (results.columns, lambda: results.put(COLUMNS, FACTS)):
        with pytest.raises(StorageError, match="link"):
            ask()


# ---------------------------------------------------------------- faults


class Failing:
    """What the n-th call of one kind on the file system, and those after it, are answered with."""

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
def test_a_disk_that_fails_leaves_the_old_column_or_the_new(
    results: Results, monkeypatch: pytest.MonkeyPatch, call: str, at: int
) -> None:
    before = results.columns()
    with monkeypatch.context() as patched:
        failing, is_full = Failing(patched, call, at), False
        try:
            results.put({"bf16": [3.0], "flash": [4.0]}, {"bf16": {"median_ms": 3.0}})
        except StorageError as error:
            is_full = "full" in str(error)
        assert is_full == failing.has_failed

    columns, told = results.columns(), results.facts()["techniques"]
    assert columns in (before, before | {"bf16": [3.0], "flash": [4.0]})
    assert told["baseline"]["median_ms"] == 12.5
    assert told.get("bf16", {}).get("median_ms", columns["bf16"][0]) == columns["bf16"][0]
    results.put({"bf16": [3.0]}, {})
    assert results.columns()["baseline"] == COLUMNS["baseline"]


def _put_many(folder: Path, name: str) -> None:
    module.hardware = lambda: HARDWARE  # type: ignore[assignment]
    for number in range(10):
        Results(folder).put({f"{name}{number}": [1.0 + number]}, {f"{name}{number}": {"of": name}})


def test_processes_that_write_at_once_lose_no_column(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_put_many, args=(tmp_path, name)) for name in "abcd"]
    for each in writers:
        each.start()
    for each in writers:
        each.join()

    assert [each.exitcode for each in writers] == [0] * 4
    expected = {f"{name}{number}": [1.0 + number] for name in "abcd" for number in range(10)}
    assert Results(tmp_path).columns() == expected
    assert Results(tmp_path).facts()["techniques"].keys() == expected.keys()


def test_a_lock_that_is_not_given_back_is_said(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.1)
    lock = files.Lock(results.folder / ".nmt-results.lock", "4711 note")
    try:
        with pytest.raises(RunInUse, match="process 4711 is changing them"):
            results.put({"flash": [1.0]}, {})
    finally:
        lock.release()

    results.put({"flash": [1.0]}, {})
    assert results.columns() == COLUMNS | {"flash": [1.0]}
