"""Resume matrix: a run that is interrupted at any point and resumed gives the same result as an uninterrupted run.

A cell is one combination of settings, interruptions and changes on resume (see tests/faults/cells.py). By default, the
tests run a few cells (one process, ddp, and one other strategy) and one seeded case of each parametrized test. With
ACCEL_RUN_FAULTS=long, 2,000 random combinations run, in two parts.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from runner.base.errors import Exit
from runner.durable.checkpoint import LoadedCheckpoint, load, newest_valid
from tests.faults.cells import AXES, Cell, cells_whose_readers_change, cover_pairs, draw_levels, pairs
from tests.faults.tallies import SEED, Tally
from tests.forkserver import CompletedCommand, ForkServer
from tests.rounding import PROMISED
from tests.waiting import wait_until

HERE = Path(__file__).parent
TASKS = {"one": HERE / "task_of_matrix.py", "three": HERE / "task_of_matrix_phases.py"}
TIMES = re.compile(r"perf/|rank\d+/|balance/|pipeline/|.*_ms$")
TOLERANCE = 10 * PROMISED[torch.float64]  # for about ten updates
EXIT_CODES = {"SIGKILL": -9, "SIGTERM": 75, "raise": 70, "rank": 84}
SHARES = (0.75, 0.5)  # minimum fractions of the cells: interrupted at all, and interrupted after a checkpoint was saved
MIN_CELLS = 20  # with fewer cells, SHARES are not checked
UPDATES_OF_EPOCH = {"whole": 3, "ragged": 4, "drop_last": 3, "bad": 4}


@dataclass(frozen=True)
class Result:
    """The result of a run: its last checkpoint, its metric rows without times, and the bad samples that it skipped."""

    last: LoadedCheckpoint
    tensors: dict[str, dict[str, torch.Tensor]]
    rows: list[dict[str, Any]]
    bad: list[tuple[str, int, int]]
    phases: dict[str, Any]


@pytest.fixture
def fast_disk() -> Iterator[Path]:
    """A folder in memory if possible, because these tests need no durability."""
    with tempfile.TemporaryDirectory(
        prefix="matrix-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    ) as folder:
        yield Path(folder)


class Matrix:
    """Runs cells, and caches the uninterrupted run of each course (the settings that determine the result)."""

    references: ClassVar[dict[tuple[str, ...], Result]] = {}

    def __init__(self, server: ForkServer, folder: Path, tally: Tally) -> None:
        self.server, self.folder, self.tally = server, folder, tally
        self.num_runs = self.num_interrupted = self.num_uninterrupted = self.num_folders = 0
        self.cells_interrupted: set[Cell] = set()  # at least one of their processes was interrupted
        self.cells_resumed: set[Cell] = set()  # a process was interrupted after a checkpoint was saved
        self.largest = 0.0

    def reference(self, cell: Cell) -> Result:
        """Return the result of an uninterrupted run of the cell's course."""
        key = (cell["phases"], *cell.course())
        if key not in self.references:
            folder = self.fresh()
            result = self.attempt(cell, folder, cell.course(), {})
            assert result.code == 0, f"the reference ended with {result.code}: {result.err}"
            self.references[key] = read_result(folder)
        return self.references[key]

    def check(self, cell: Cell, ends: Sequence[dict[str, Any]] | None = None, *, broken: str = "") -> None:
        """Assert that the run of a cell equals its reference and always resumes from the newest checkpoint.

        ends    the interruptions; None: those of the cell
        broken  bug to inject into the last process (a value of `at` in tests/faults/ending.py)
        """
        wanted = self.reference(cell)
        rng = random.Random(f"{SEED} {cell.number} {cell.levels}")
        folder = self.fresh()
        newest = ""
        for number, fault in enumerate(make_faults(cell, wanted.phases, rng) if ends is None else ends):
            num_events = len(events_of(folder))
            result = self.attempt(cell, folder, [*cell.course(), *cell.mechanics(number)], fault)
            newest = self.later(folder, newest, num_events)
            if result.code:
                self.num_interrupted += 1
                self.cells_interrupted.add(cell)
                self.cells_resumed |= {cell} if newest else set()
            else:
                self.num_uninterrupted += 1
            codes = (0, EXIT_CODES[fault["by"]])
            assert result.code in codes, f"{fault}: ended with {result.code}, not {codes}: {result.err}"
            # Orphaned workers may print tracebacks before they notice that their process was killed.
            assert fault["by"] in ("SIGKILL", "rank") or "Traceback" not in result.err, f"{fault}: {result.err}"
        args = replace_groups([*cell.course(), *cell.mechanics(9)], cell.changed_overrides())
        num_events = len(events_of(folder))
        result = self.attempt(cell, folder, args, {"at": broken} if broken else {})
        assert result.code == 0, f"the resumed run ended with {result.code}: {result.err}"
        self.later(folder, newest, num_events)
        actual = read_result(folder)
        if cell.is_exact:
            differences = list(find_differences(actual, wanted, keeps_best=cell.keeps_best))
        else:
            self.largest = max(self.largest, distance(actual, wanted))
            differences = [f"distance {distance(actual, wanted):.2g}"] if distance(actual, wanted) > TOLERANCE else []
        assert not differences, "; ".join(differences[: int(os.environ.get("ACCEL_RUN_SHOWN", "6"))])

    def later(self, folder: Path, newest: str, num_events: int) -> str:
        """Check the process that has just ended, and return the name of the newest checkpoint on disk ("" if none).

        Asserts that the process resumed from checkpoint `newest` or a later one, and that it left one at least as new.

        newest      name of the newest checkpoint before this process started
        num_events  number of rows that earlier processes wrote to events.jsonl
        """
        begun = [row for row in events_of(folder)[num_events:] if row["kind"] in ("start", "resume")]
        # A process that is killed early records nothing. Ranks may outlive their launcher and save another checkpoint.
        start = begun[0].get("checkpoint", "update 0") if begun else newest
        assert not newest or start >= newest, f"{newest} was on disk, but the run resumed from {start}"
        path = newest_valid(folder / "outputs" / "mine" / "checkpoints")
        result = path.name if path else ""
        assert result >= newest, f"{newest} was on disk, but now the newest is {result or 'none'}"
        return result

    def assert_enough_interruptions(self, num_cells: int) -> None:
        """Assert that enough cells were interrupted, and that enough of them resumed from a checkpoint.

        If there are only a few cells, one is enough, because a fraction would depend on chance.
        """
        interrupted, resumed = len(self.cells_interrupted), len(self.cells_resumed)
        min_interrupted, min_resumed = (share * num_cells if num_cells >= MIN_CELLS else 1 for share in SHARES)
        assert interrupted >= min_interrupted, f"only {interrupted} of {num_cells} cells were interrupted"
        assert resumed >= min_resumed, f"only {resumed} of {num_cells} cells resumed from a checkpoint"

    def attempt(self, cell: Cell, folder: Path, args: list[str], fault: dict[str, Any]) -> CompletedCommand:
        """Run the command; retry while ranks of the previous process still lock the run directory."""
        line = ["train", "--task", str(TASKS[cell["phases"]]), "run=mine", "device=cpu", "monitor=off", *args]
        env = {"IMPORT_FIRST": "tests.faults.ending", "FAULT": json.dumps(fault)}

        def free() -> CompletedCommand | None:
            self.num_runs += 1
            result = self.server.run(line, folder, env)
            return result if result.code != Exit.IN_USE else None

        return wait_until(free, "the ranks of the previous run have released its directory")  # type: ignore[return-value]

    def fresh(self) -> Path:
        """Return a new folder, and delete the previous one, even if a killed rank still writes there."""
        shutil.rmtree(self.folder / str(self.num_folders), ignore_errors=True)
        self.num_folders += 1
        folder = self.folder / str(self.num_folders)
        folder.mkdir()
        return folder


def make_faults(cell: Cell, phases: dict[str, Any], rng: random.Random) -> list[dict[str, Any]]:
    """Return the interruptions of a cell, one per process before the last."""
    lengths = {name: int(phase["updates"]) for name, phase in phases.items()}
    has_saved_after = {"1": 2, "2": 3, "end": 99}[cell["saves"]]

    def update(by: str = "SIGKILL", at: str = "", number: int | None = None) -> dict[str, Any]:
        phase = rng.choice(list(lengths))
        number = rng.randrange(lengths[phase]) if number is None else number
        is_waited_for = phase != next(iter(lengths)) or number >= has_saved_after
        fault = {"at": at or rng.choice(["update", "update", "begin"]), "number": number, "phase": phase, "by": by}
        if by == "raise":
            fault["at"] = "update"  # exceptions in begin_update are not part of the matrix
        return {**fault, "wait": is_waited_for and rng.random() < 0.8, "rank": rng.randrange(cell.world_size)}

    def boundary() -> dict[str, Any]:
        of_epoch = UPDATES_OF_EPOCH[cell["data"]]
        return update(number=of_epoch * rng.randint(1, 2) - rng.choice([0, 0, 1]))

    def late() -> dict[str, Any]:
        phase, length = rng.choice([*lengths.items()])
        return {"at": "begin", "number": length, "phase": phase, "by": "SIGKILL"}

    def save(by: str = "SIGKILL") -> dict[str, Any]:
        few = cell["saves"] == "end" and len(lengths) == 1
        return {"at": "save", "save": 1 if few else rng.randint(1, 3), "number": rng.randint(0, 30), "by": by}

    def evaluation(by: str = "SIGKILL") -> dict[str, Any]:
        return {"at": "evaluation", "number": rng.randint(1, 4), "by": by}

    def recovery() -> dict[str, Any]:
        return {"at": "recovery", "number": rng.randint(1, 25), "by": "SIGKILL"}

    def start() -> dict[str, Any]:
        return {"at": "build", "number": 0, "by": "SIGKILL"}

    def rank() -> dict[str, Any]:
        return update("rank", "update")

    makers: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "update": lambda: [update()],
        "boundary": lambda: [boundary()],
        "late": lambda: [late()],
        "evaluation": lambda: [evaluation()],
        "save": lambda: [save()],
        "SIGTERM": lambda: [update("SIGTERM")],
        "SIGTERM in evaluation": lambda: [evaluation("SIGTERM")],
        "SIGTERM in save": lambda: [save("SIGTERM")],
        "raise": lambda: [update("raise")],
        "rank": lambda: [rank()],
        "resuming": lambda: [update(), rng.choice([start, save, evaluation])()],
        "recovery": lambda: [update(), recovery()],
        "thrice": lambda: [rng.choice([update, save, evaluation, late, recovery])() for _ in range(3)],
    }
    return makers[cell["end"]]()


def replace_groups(args: list[str], new: list[str]) -> list[str]:
    """Return the arguments and those of `new`, without earlier arguments for the groups that `new` sets."""
    roots = {word.partition("=")[0].partition(".")[0] for word in new}
    return [*(arg for arg in args if arg.partition("=")[0].partition(".")[0] not in roots), *new]


def read_result(folder: Path) -> Result:
    """Read the result of a finished run."""
    run = folder / "outputs" / "mine"
    record = json.loads((run / "run.json").read_text())
    assert record["state"] == "done", record["state"]
    path = newest_valid(run / "checkpoints")
    assert path is not None
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [{key: value for key, value in row.items() if not TIMES.match(key)} for row in rows]
    last = load(path)
    tensors = {stem: last.tensors(stem) for stem in last.stems}
    return Result(last, tensors, rows, bad_samples(run / "events.jsonl"), record["phases"])


def events_of(folder: Path) -> list[dict[str, Any]]:
    """Return the complete rows of events.jsonl; [] if the run does not exist yet."""
    events = folder / "outputs" / "mine" / "events.jsonl"
    lines = events.read_text().splitlines(keepends=True) if events.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}\n")]


def bad_samples(events: Path) -> list[tuple[str, int, int]]:
    """Return (phase, update, index) of each skipped sample. If an update was repeated, only the last time counts."""
    result: list[tuple[str, int, int]] = []
    phase = ""
    for line in events.read_text().splitlines():
        event = json.loads(line)
        if event["kind"] == "start":
            result.clear()
        elif event["kind"] == "phase":
            phase, update = event["phase"], event["update"]
            result = [row for row in result if row[0] != phase or row[1] <= update]
        elif event["kind"] == "bad sample":
            result.append((phase, event["update"], event["index"]))
    return sorted(result)


def find_differences(actual: Result, wanted: Result, *, keeps_best: bool = False) -> Iterator[str]:
    """Yield a description of each difference between two results that must be bitwise equal."""
    if actual.last.update != wanted.last.update:
        yield f"ended at update {actual.last.update}, not {wanted.last.update}"
    if set(actual.last.stems) != set(wanted.last.stems):
        yield f"files {actual.last.stems}, not {wanted.last.stems}"
        return
    for stem in wanted.last.stems:
        mine, theirs = actual.tensors[stem], wanted.tensors[stem]
        if mine.keys() != theirs.keys():
            yield f"{stem} has {sorted(mine.keys() ^ theirs.keys())} on one side only"
            continue
        for name, tensor in theirs.items():
            if not torch.equal(mine[name], tensor):
                yield f"{stem}/{name} differs"
    mine_state, their_state = (comparable(result.last.state, keeps_best=keeps_best) for result in (actual, wanted))
    mine_state["data"], their_state["data"] = with_common_hashes({**mine_state["data"]}, {**their_state["data"]})
    for key in sorted(mine_state.keys() | their_state.keys()):
        if mine_state.get(key) != their_state.get(key):
            yield f"state {describe_difference(key, mine_state.get(key), their_state.get(key))}"
    if [*updates_of(actual.rows)] != [*updates_of(wanted.rows)]:
        yield f"rows of {[*updates_of(actual.rows)]}, not {[*updates_of(wanted.rows)]}"
    for mine_row, their_row in zip(actual.rows, wanted.rows, strict=False):
        for key in mine_row.keys() | their_row.keys():
            if mine_row.get(key) != their_row.get(key):
                yield f"row of update {their_row['update']}: {key} {mine_row.get(key)}, not {their_row.get(key)}"
    if actual.bad != wanted.bad:
        yield f"bad samples {actual.bad}, not {wanted.bad}"


def with_common_hashes(mine: dict[str, Any], theirs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return both, with the hashes of samples that both have: a busy machine reads fewer samples at the start."""
    for split in mine.keys() & theirs.keys():
        pair = [data[split]["hashes"] for data in (mine, theirs)]
        common = pair[0].keys() & pair[1].keys()
        assert common or not any(pair), f"no sample of {split} was hashed by both"
        for data, hashes in zip((mine, theirs), pair, strict=True):
            data[split] = {**data[split], "hashes": {index: hashes[index] for index in sorted(common)}}
    return mine, theirs


def describe_difference(name: str, mine: Any, theirs: Any) -> str:
    """Describe the innermost difference of two JSON values."""
    if isinstance(mine, dict) and isinstance(theirs, dict) and mine.keys() == theirs.keys():
        key = next(key for key in mine if mine[key] != theirs[key])
        return describe_difference(f"{name}.{key}", mine[key], theirs[key])
    if isinstance(mine, list) and isinstance(theirs, list) and len(mine) == len(theirs):
        index = next(index for index in range(len(mine)) if mine[index] != theirs[index])
        return describe_difference(f"{name}[{index}]", mine[index], theirs[index])
    return f"{name} is {mine!s:.80}, not {theirs!s:.80}"


def updates_of(rows: list[dict[str, Any]]) -> Iterator[tuple[str, int]]:
    return ((row["phase"], row["update"]) for row in rows)


def comparable(state: Any, *, keeps_best: bool = False) -> dict[str, Any]:
    """Return the state of a checkpoint without times, memory and settings, which may differ between attempts.

    keeps_best  include the best checkpoint; the number of others may differ
    """
    kept = {
        key: value
        for key, value in state.items()
        if key not in ("values", "records", "shares", "saving", "kept", "bests")
    }
    timed = ("seconds", "parts_s", "peak_host_gib", "peak_device_gib", "peak_reserved_gib")
    kept["records"] = {
        name: {key: value for key, value in record.items() if key not in timed}
        for name, record in state["records"].items()
    }
    if keeps_best:
        kept["bests"] = state["bests"][:1]
    return kept


def distance(result: Result, wanted: Result) -> float:
    """Return the largest relative difference between two results, over all weights and metric values."""
    far = 0.0 if result.last.update == wanted.last.update else math.inf
    mine, theirs = result.tensors["model"], wanted.tensors["model"]
    for name, tensor in theirs.items():
        scale = float(tensor.double().abs().max()) or 1.0
        far = max(far, float((mine[name].double() - tensor.double()).abs().max()) / scale)
    if [*updates_of(result.rows)] != [*updates_of(wanted.rows)]:
        return math.inf
    for mine_row, their_row in zip(result.rows, wanted.rows, strict=True):
        for key, value in their_row.items():
            if isinstance(value, float):
                far = max(far, abs(mine_row[key] - value) / max(abs(value), 1e-3))
    return far


def format_command(cell: Cell) -> str:
    """Return a shell command that reruns one cell."""
    named = shlex.quote(f"{cell.number}:{'|'.join(cell.levels)}")
    test = "tests/faults/test_resume_matrix.py::test_every_interrupted_run_equals_an_uninterrupted_run[0]"
    return f"ACCEL_RUN_SEED={SEED} ACCEL_RUN_CELL={named} python -m pytest '{test}'"


def cells(count: int, part: int, is_covering: bool) -> list[Cell]:
    """Return the cell named by ACCEL_RUN_CELL, a few cells that cover many pairs of levels, or many random cells."""
    named = os.environ.get("ACCEL_RUN_CELL")
    if named:
        number, _, levels = named.partition(":")
        return [Cell(tuple(levels.split("|")), int(number))]
    rng = random.Random(f"matrix {SEED} {part}")
    if is_covering:
        return cover_pairs(rng, count, num_courses=min(count, 12) if count >= MIN_CELLS else 3)
    # sorted, so that cells with the same course are adjacent
    return sorted((Cell(draw_levels(rng), number) for number in range(count)), key=lambda cell: cell.course())


@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_every_interrupted_run_equals_an_uninterrupted_run(
    part: int, server: ForkServer, fast_disk: Path, amount: Callable[[int, int], int], tally: Tally
) -> None:
    matrix = Matrix(server, fast_disk, tally)
    count = amount(3, 1000)
    chosen = cells(count, part, is_covering=count <= 60)
    bad = []
    for cell in chosen:
        try:
            matrix.check(cell)
        except (AssertionError, OSError) as error:
            bad.append(f"{format_command(cell)}\n    {error}")
        tally.tried += 1
    seen = {pair for cell in chosen for pair in pairs(cell.levels)}
    tally.notes["pairs of levels"] = len(seen)
    tally.notes["references"] = len(matrix.references)
    tally.notes["runs"] = matrix.num_runs
    tally.notes["interrupted"] = matrix.num_interrupted
    tally.notes["finished before the interruption"] = matrix.num_uninterrupted
    tally.notes["cells interrupted"] = len(matrix.cells_interrupted)
    tally.notes["cells resumed from a checkpoint"] = len(matrix.cells_resumed)
    tally.notes["largest distance after other micro-batches or ranks"] = f"{matrix.largest:.1e}"
    tally.skip("precision=tf32: no GPU that has it", int(not torch.cuda.is_available()))
    assert not bad, f"{len(bad)} of {len(chosen)} cells differ:\n" + "\n".join(bad)
    if len(chosen) > 1:
        matrix.assert_enough_interruptions(len(chosen))


def test_drawing_runs_do_not_depend_on_data_workers_or_kills(
    server: ForkServer, fast_disk: Path, amount: Callable[[int, int], int], tally: Tally
) -> None:
    """Samples use random numbers from all global generators.

    To kill 300 runs: `scripts/faults.sh --count 300 --seed N drawing_runs`.
    """
    matrix = Matrix(server, fast_disk, tally)
    chosen = cells_whose_readers_change(random.Random(f"draws {SEED}"), amount(2, 300))
    bad = []
    for cell in chosen:
        try:
            matrix.check(cell)
        except (AssertionError, OSError) as error:
            bad.append(f"{format_command(cell)}\n    {error}")
        tally.tried += 1
    tally.notes["processes"] = matrix.num_runs
    tally.notes["interrupted"] = matrix.num_interrupted
    tally.notes["runs that differ"] = len(bad)
    assert not bad, f"{len(bad)} of {len(chosen)} runs differ:\n" + "\n".join(bad)
    if len(chosen) > 1:
        matrix.assert_enough_interruptions(len(chosen))


READERS = {name: overrides for name, overrides in AXES["workers"].items() if name in ("1", "3", "thread")}


def test_random_numbers_of_samples_do_not_depend_on_data_workers_or_ranks(
    server: ForkServer, fast_disk: Path, seed: int, amount: Callable[[int, int], int], tally: Tally
) -> None:
    dice = random.Random(f"{seed} readers")
    readers = dice.sample(list(READERS), min(amount(1, 3), 3))
    matrix = Matrix(server, fast_disk, tally)

    def train(cell: Cell, *args: str) -> Result:
        folder = matrix.fresh()
        result = matrix.attempt(cell, folder, [*cell.course(), *args], {})
        assert result.code == 0, result.err
        return read_result(folder)

    wanted = train(plain(), "dataloader.num_workers=0")
    for name in readers:
        actual = train(plain(), *READERS[name].split(), "prefetch=stream")
        assert list(find_differences(actual, wanted)) == [], name
    # Gradients are summed in a different order. The model must not use random numbers, because they depend on the rank.
    cell = plain(change="ranks")
    alone = train(cell)
    for ranks in dice.sample(["ddp 2", "ddp 5+3"], min(amount(1, 2), 2)):
        assert distance(train(plain(ranks=ranks, change="ranks"), "dataloader.num_workers=1"), alone) < TOLERANCE
    tally.tried += matrix.num_runs


def plain(**levels: str) -> Cell:
    """Return the cell with the given levels, and with the first level on all other axes."""
    return Cell(tuple(({axis: next(iter(table)) for axis, table in AXES.items()} | levels).values()), 0)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("drops state", "differs"),
        ("restarts", "on disk, but the run resumed from update 0"),
        ("resumes older", "on disk, but the run resumed from update"),
    ],
)
def test_the_matrix_detects_an_incorrect_resume(
    broken: str, message: str, server: ForkServer, fast_disk: Path, tally: Tally
) -> None:
    matrix = Matrix(server, fast_disk, tally)
    end = {"at": "update", "number": 6, "by": "SIGKILL", "wait": 6}
    matrix.check(plain(saves="1"), [end])
    with pytest.raises(AssertionError, match=message):
        matrix.check(plain(saves="1"), [end], broken=broken)
    matrix.assert_enough_interruptions(1)
    tally.tried += 1


def test_a_run_stopped_in_its_last_evaluation_resumes_and_finishes(
    server: ForkServer, fast_disk: Path, tally: Tally
) -> None:
    matrix = Matrix(server, fast_disk, tally)
    matrix.check(plain(), [{"at": "evaluation", "number": 4, "by": "SIGTERM"}])
    matrix.assert_enough_interruptions(1)
    tally.tried += 1


def test_an_evaluation_stopped_twice_runs_before_the_next_update(
    server: ForkServer, fast_disk: Path, tally: Tally
) -> None:
    """The second process is stopped while it repeats the evaluation of the first, before its first update."""
    matrix = Matrix(server, fast_disk, tally)
    matrix.check(plain(), [{"at": "evaluation", "number": number, "by": "SIGTERM"} for number in (2, 1)])
    matrix.assert_enough_interruptions(1)
    tally.tried += 1


def test_the_matrix_detects_that_no_run_was_interrupted(server: ForkServer, fast_disk: Path, tally: Tally) -> None:
    matrix = Matrix(server, fast_disk, tally)
    matrix.check(plain(), [{"at": "nowhere", "by": "SIGKILL"}])
    with pytest.raises(AssertionError, match="0 of 1 cells were interrupted"):
        matrix.assert_enough_interruptions(1)
    tally.tried += 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize("keeps", ["batch norm", "moving average"])
@pytest.mark.parametrize("ranks", ["ddp 2", "fsdp 2"])
def test_buffers_that_differ_between_ranks_are_restored_exactly(
    ranks: str, keeps: str, server: ForkServer, fast_disk: Path, tally: Tally
) -> None:
    """Ranks see different samples, so buffers must be synchronized, whether checkpoints are saved on the way or not.

    The reference saves only at its end.
    """
    matrix = Matrix(server, fast_disk, tally)
    end = {"at": "update", "number": 6, "by": "SIGTERM"}
    matrix.check(plain(ranks=ranks, keeps=keeps, saves="2"), [end])
    matrix.assert_enough_interruptions(1)
    tally.tried += 1
