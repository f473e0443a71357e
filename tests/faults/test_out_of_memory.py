"""An update that runs out of memory is repeated with smaller micro-batches and equals that of a run that uses them.

By default, a seed selects one case of each test; with ACCEL_RUN_FAULTS=long, all combinations run.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
import random
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # before any fork
from torch.distributed.tensor import DTensor

from runner.base.errors import AccelRunError, Exit
from runner.base.oom_errors import halve
from runner.config.configuration import Configuration, compose
from runner.config.request import Request
from runner.distributed.world import World
from runner.engine import opening
from runner.engine.checkpoints import oom_history
from runner.engine.checkpoints.oom_history import ReducedMicroBatch
from runner.engine.hooks.rank_sync import RankSync
from tests.distributed.ranks import run_ranks
from tests.faults.shortages import Limited, Shortage, plant
from tests.faults.tallies import IS_LONG, SEED, Tally
from tests.forkserver import ForkServer
from tests.rounding import PROMISED
from tests.warm import IMPORTED

TASK = Path(__file__).with_name("task_of_memory.py")
UPDATES, MICRO = 5, 8


@dataclass(frozen=True)
class Course:
    """The settings of a run."""

    ranks: int = 1
    accumulation: int = 1
    precision: str = "fp32"
    is_compiled: bool = False
    micro: int = MICRO
    more: tuple[str, ...] = ()
    strategy: str = ""
    backend: str = "eager"

    def words(self) -> tuple[str, ...]:
        size = MICRO * self.accumulation * self.ranks
        strategy = self.strategy or ("ddp" if self.ranks > 1 else "single")
        of_compile = ("compile=default", f"compile.backend={self.backend}") if self.is_compiled else ("compile=off",)
        return (
            "run=mine", "device=cpu", "monitor=off", "watchdog=off", "tracker=none", f"updates={UPDATES}",
            "phases=[train]", f"global_batch_size={size}", f"micro_batch_size={self.micro}",
            f"precision={self.precision}", f"parallelism={strategy}", "dataloader.num_workers=0",
            *of_compile, *self.more,
        )  # fmt: skip


@lru_cache(maxsize=64)
def compose_cached(args: tuple[str, ...]) -> Configuration:
    for name in IMPORTED:  # once, before any fork
        importlib.import_module(name)
    return compose(Request(args, TASK))


def run_course(
    course: Course, *shortages: Shortage, begins_with: tuple[ReducedMicroBatch, ...] = (), more: tuple[str, ...] = ()
) -> list[dict[str, Any]]:
    """Train, and return for each rank digests of its state, its rows, its messages and the reduced micro-batches."""
    args = (*course.words(), *more)
    configuration = compose_cached(args)

    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "outputs" / "mine"
        if begins_with:
            run.mkdir(parents=True)
            run.joinpath(oom_history.FILE).write_text(json.dumps({"smaller": [vars(row) for row in begins_with]}))

        def one(world: World) -> dict[str, Any]:
            opening.compose = lambda _: replace(  # type: ignore[assignment]
                configuration, settings=replace(configuration.settings, output_root=f"{folder}/outputs")
            )
            with plant(*shortages), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The .grad attribute", UserWarning)  # dynamo reads this attribute
                warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)  # from an import of inductor
                return _train_rank(Request(args, TASK), world, run, shortages)

        return run_ranks(one, course.ranks, limit_s=120.0)


def _train_rank(request: Request, world: World, run: Path, shortages: tuple[Shortage, ...]) -> dict[str, Any]:
    error, laps = None, list[str]()
    with opening.open_phase(request, world if world.world_size > 1 else None) as phase:
        lap = phase.stopwatch.lap
        phase.stopwatch.lap = lambda part: (laps.append(part), lap(part))[1]  # type: ignore[method-assign,func-returns-value]
        try:
            for _ in phase.updates():
                if phase.is_over:
                    break
            if phase.is_over:
                phase.close()
        except AccelRunError as raised:
            error = raised
        except Exception as raised:
            error = phase.translate_error(raised)
        phase.hook(RankSync).exchange.close()
        state = {name: digest(tensor) for name, tensor in phase.run.parts.bare.state_dict().items()}
        optimizer = phase.work.training.optimizer  # type: ignore[attr-defined]
        for number, kept in enumerate(optimizer.state.values()):
            state |= {f"{number}.{key}": digest(value) for key, value in kept.items()}
        state["torch"] = digest(torch.get_rng_state())
        state["scaler"] = json.dumps(phase.run.parts.precision.state())
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] if world.is_first else []
    return {
        "state": state,
        "update": phase.position.update,
        "rows": [(row["update"], row.get("train/loss")) for row in rows if "train/loss" in row],
        "metrics": [{key: row[key] for key in row if key.startswith("val/")} for row in rows if "val/loss" in row],
        "messages": (run / "console.log").read_text() if world.is_first else "",
        "remembered": [vars(row) for row in oom_history.read_reductions(run)],
        "files": sorted(path.name for path in run.glob("memory*.txt")),
        "struck": [each.struck for each in shortages],
        "laps": laps,
        "error": None if error is None else [type(error).__name__, getattr(error, "exit_code", None), str(error)],
        "problem": vars(error.problems[0]) if isinstance(error, AccelRunError) else None,
    }


def digest(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        value = value.to_local() if isinstance(value, DTensor) else value
        return hashlib.sha256(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
    return repr(value)


def halved_to(limit: int, size: int) -> int:
    """Return the first micro-batch size of at most `limit` that halving reaches from `size`."""
    while size > limit:
        size = halve(size) or 1
    return size


def initial_reduction(course: Course, shortage: Shortage, size: int) -> tuple[ReducedMicroBatch, ...]:
    return (ReducedMicroBatch("train", shortage.at, shortage.rank, size, course.micro, course.ranks),)


@dataclass(frozen=True)
class Cell:
    course: Course
    shortage: Shortage

    def __str__(self) -> str:
        course, there = self.course, self.shortage
        args = [there.place, f"above {there.limit}", f"at {there.at}", course.precision, f"x{course.accumulation}"]
        args += [f"rank {there.rank} of {course.ranks}"] if course.ranks > 1 else []
        return " ".join([*args, *(["compiled"] if course.is_compiled else []), *(["host"] if there.on_host else [])])


def cells() -> Iterator[Cell]:
    """Yield every combination that can be repeated in place."""
    for ranks, accumulation, precision, compiled in itertools.product((1, 2), (1, 4), ("fp32", "fp16"), (False, True)):
        course = Course(ranks, accumulation, precision, compiled)
        places = [
            "forward",
            "backward",
            "reading",
            *(["compile"] if compiled else []),
            *(["optimizer"] if ranks == 1 else []),
        ]
        for place, limit, at, rank in itertools.product(places, (4, 2, 1), (0, 2), range(ranks)):
            if place != "compile" or at == 0:
                yield Cell(course, Shortage(place, limit, at, rank, on_host=place == "reading"))


def choose_cells() -> list[Cell]:
    """With ACCEL_RUN_FAULTS=long, return all cells, otherwise one for each place and number of ranks."""
    every = list(cells())
    if IS_LONG:
        return every
    by_place: dict[tuple[str, int], list[Cell]] = {}
    for cell in every:
        to_compile = cell.shortage.place == "compile"
        if cell.course.is_compiled == to_compile and cell.shortage.rank == cell.course.ranks - 1:
            by_place.setdefault((cell.shortage.place, cell.course.ranks), []).append(cell)
    return [random.Random(f"{SEED} {number}").choice(group) for number, group in enumerate(by_place.values())]


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("cell", choose_cells(), ids=str)
def test_the_repeated_update_equals_one_with_smaller_micro_batches(cell: Cell, tally: Tally) -> None:
    tally.tried += 1
    shortage = replace(cell.shortage, struck=[])
    result = run_course(cell.course, shortage)
    struck = result[shortage.rank]["struck"][0]
    assert struck, f"the fault did not occur; {result[shortage.rank]['error']}"
    size = halved_to(shortage.limit, struck[0])  # on two ranks, the third update is smaller
    wanted = run_course(cell.course, begins_with=initial_reduction(cell.course, shortage, size))
    for rank, (there, reference) in enumerate(zip(result, wanted, strict=True)):
        assert there["error"] is None, (rank, there["error"])
        assert there["state"] == reference["state"], rank
        assert there["rows"] == reference["rows"]
    assert [update for update, _ in result[0]["rows"]] == [1, 2, 3, 4, 5], "each update once"
    rows = [row for row in result[0]["remembered"] if row["use"] == "training"]  # an evaluation is compiled, too
    (last,) = rows[-1:]
    assert (last["size"], last["update"], last["rank"]) == (size, shortage.at, shortage.rank)
    assert result[0]["messages"].count(f"in update {shortage.at + 1}") == len(rows)
    assert result[0]["files"] == ["memory.txt" if cell.course.ranks == 1 else f"memory-rank{shortage.rank}.txt"]


# ---------------------------------------------------------------- tests with one cell each


@pytest.mark.slow
def test_a_remembered_size_gives_the_results_of_that_micro_batch_size() -> None:
    """The reference of the other tests equals a run with this micro_batch_size."""
    configured = run_course(Course(micro=4))
    remembered = run_course(Course(), begins_with=(ReducedMicroBatch("train", 0, 0, 4, MICRO, 1),))
    assert remembered[0]["state"] == configured[0]["state"]
    assert "4 samples instead of 8" in remembered[0]["messages"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "row",
    [
        ReducedMicroBatch("train", 0, 0, 4, 6, 1), ReducedMicroBatch("train", 0, 0, 4, MICRO, 2),
        ReducedMicroBatch("mean", 0, 0, 4, MICRO, 1),
        ReducedMicroBatch("train", 0, 0, 4, MICRO, 1, "evaluation"), ReducedMicroBatch("train", 0, 1, 4, MICRO, 1),
    ],
    ids=["configured for another size", "of other ranks", "of another phase", "of evaluations", "of another rank"],
)  # fmt: skip
def test_sizes_remembered_for_other_settings_are_ignored(row: ReducedMicroBatch) -> None:
    assert undisturbed()[0]["state"] == run_course(Course(), begins_with=(row,))[0]["state"]


DAMAGED = (
    "", "{", "[]", "null", '{"smaller": 3}', '{"smaller": [3, null, [], {}]}', '{"smaller": {"size": 4}}',
    *(
        json.dumps({"smaller": [{**vars(ReducedMicroBatch("train", 0, 0, 4, MICRO, 1)), **changed}]})
        for changed in (
            {"size": 0}, {"size": -4}, {"size": True}, {"size": 2.5}, {"size": "4"}, {"update": -1}, {"rank": "0"},
            {"use": "both"}, {"phase": None}, {"in_place": 1}, {"more": 1},
        )
    ),
)  # fmt: skip


@pytest.mark.parametrize("text", DAMAGED)
def test_invalid_remembered_sizes_are_ignored(text: str, tmp_path: Path) -> None:
    (tmp_path / oom_history.FILE).write_text(text)
    assert oom_history.read_reductions(tmp_path) == []


@lru_cache(maxsize=1)
def undisturbed() -> list[dict[str, Any]]:
    return run_course(Course())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kernel", ["fused", "foreach", "for-loop"])
def test_a_failed_step_without_changes_is_repeated(kernel: str) -> None:
    """Memory is available again once caches are released: no rank reduces its micro-batches."""
    course = Course(2, more=(f"optimizer.kernel={kernel}",))
    result = run_course(course, Shortage("optimizer", 4, at=1, rank=1, times=1))
    wanted = run_course(course)
    assert [there["state"] for there in result] == [there["state"] for there in wanted]
    assert result[1]["struck"] == [[MICRO]]
    assert not result[0]["remembered"]


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_two_ranks_can_be_out_of_memory_in_one_update(where: str) -> None:
    course = Course(2, accumulation=4)
    result = run_course(course, Shortage(where, 4, rank=0), Shortage("forward", 2, rank=1))
    rows = (ReducedMicroBatch("train", 0, 0, 4, MICRO, 2), ReducedMicroBatch("train", 0, 1, 2, MICRO, 2))
    assert [there["state"] for there in result] == [there["state"] for there in run_course(course, begins_with=rows)]


def test_a_rank_can_run_out_of_memory_while_another_is_one_update_behind() -> None:
    """Shares are unequal: micro-batches of 6 are halved to 3, those of 10 are not changed."""
    course = Course(2, micro=10, more=("parallelism.shares=[10,6]",))
    result = run_course(course, Shortage("backward", 4, at=3, rank=1), Shortage("optimizer", 4, at=2, rank=0, times=1))
    wanted = run_course(course, begins_with=(ReducedMicroBatch("train", 3, 1, 3, 10, 2),))
    assert [there["state"] for there in result] == [there["state"] for there in wanted]
    assert [there["struck"] for there in result] == [[[], [8]], [[6], []]]


@pytest.mark.slow
def test_ranks_that_need_equal_micro_batch_counts_use_the_smallest_size() -> None:
    """A rank ran out of memory with ddp. After a resume with fsdp, all ranks need equal numbers of micro-batches."""
    course = Course(2, strategy="fsdp", more=("parallelism.timeout_s=60",))
    of_one = (
        ReducedMicroBatch("train", 0, 1, 4, MICRO, 2),
        ReducedMicroBatch("train", 0, 1, 4, MICRO, 2, "evaluation"),
    )
    of_all = tuple(replace(row, rank=None) for row in of_one)
    result, wanted = run_course(course, begins_with=of_one), run_course(course, begins_with=of_all)
    assert [there["error"] for there in result] == [None, None]
    assert [there["state"] for there in result] == [there["state"] for there in wanted]


def test_a_model_with_constant_buffers_continues_with_smaller_micro_batches() -> None:
    """As in most models, the first update shows that buffers are constant, and no copies of them are kept."""
    course, shortage = Course(more=("task.plain=true",)), Shortage("backward", 4, at=3)
    (result,) = run_course(course, shortage)
    (wanted,) = run_course(course, begins_with=initial_reduction(course, shortage, 4))
    assert (result["error"], result["state"]) == (None, wanted["state"])


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("library", "wanted"), [("torch", "8 GiB"), ("numpy", "16 GiB"), ("Python", "MemoryError")])
def test_allocation_failures_are_recognized_by_their_messages(library: str, wanted: str) -> None:
    (result,) = run_course(Course(), Limited("backward", 4, at=2, library=library))
    assert (result["error"], result["state"]) == (None, with_micro_batches_of_4()[0]["state"])
    assert f"update 3 (backward): {wanted}" in result["messages"]


@lru_cache(maxsize=1)
def with_micro_batches_of_4() -> list[dict[str, Any]]:
    return run_course(Course(), begins_with=(ReducedMicroBatch("train", 2, 0, 4, MICRO, 1),))


@pytest.mark.skipif(not IS_LONG, reason="C++ is compiled for some seconds")
@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_compiled_code_repeats_an_update_with_equal_results(ranks: int, where: str, at: int, tally: Tally) -> None:
    course, shortage = Course(ranks, is_compiled=True, backend="inductor"), Shortage(where, 4, at, ranks - 1)
    result = run_course(course, shortage)
    size = halved_to(4, result[ranks - 1]["struck"][0][0])  # on two ranks, the third update is smaller
    wanted = run_course(course, begins_with=initial_reduction(course, shortage, size))
    tally.tried += 1
    assert [there["state"] for there in result] == [there["state"] for there in wanted]


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_single_sample_that_does_not_fit_ends_all_ranks(ranks: int) -> None:
    result = run_course(Course(ranks), Shortage("backward", 0, at=1, rank=ranks - 1))
    error = result[-1]["error"]
    assert error[:2] == ["DeviceMemoryError", 80]
    for args in ("1.00 MiB requested", "for a micro-batch of 1 sample", "update 2 of phase train, backward", "1. "):
        assert args.replace("1.00", "1") in error[2], error[2]
    assert result[-1]["files"] == ["memory.txt" if ranks == 1 else "memory-rank1.txt"]
    assert [there["update"] for there in result] == [1] * ranks
    assert not result[-1]["remembered"], "smaller micro-batches did not help, so the next start uses the original size"
    if ranks == 2:
        assert result[0]["error"][0] == "RankLost"
        assert "rank 1" in result[0]["error"][2]


def test_retries_do_not_count_as_waiting_for_data() -> None:
    laps = run_course(Course(), Shortage("forward", 4, at=1))[0]["laps"]
    assert "data data" not in " ".join(laps)
    assert " ".join(laps).count("data hooks data") == 1


def test_exit_code_is_81_if_the_host_is_out_of_memory() -> None:
    error = run_course(Course(), Shortage("forward", 0, on_host=True))[0]["error"]
    assert error[:2] == ["HostMemoryError", 81]


def test_the_setting_on_oom_stop_ends_the_run(server: ForkServer, tmp_path: Path) -> None:
    result = run_course(Course(more=("on_oom=stop",)), Shortage("forward", 4))
    assert result[0]["error"][:2] == ["DeviceMemoryError", 80]
    assert result[0]["struck"] == [[MICRO]]
    assert "micro_batch_size=4" in result[0]["error"][2]
    assert not result[0]["remembered"]
    code, _, messages = whole(server, tmp_path, "on_oom=stop", "optimizer=adamw", place="optimizer", limit=4, at=3)
    assert code == Exit.GPU_MEMORY, messages
    listed = (tmp_path / "outputs/mine/memory.txt").read_text()
    for name in ("gradient of 0.weight", "exp_avg of 0.weight"):
        assert name in listed, "the report must list memory before it is freed"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("what", ["weight", "buffer"])
def test_unrestorable_state_is_reported_and_the_run_returns_to_its_checkpoint(what: str) -> None:
    """A forward pass changes state that no earlier one changed, so the update cannot be repeated in place."""
    result = run_course(Course(more=(f"task.changes={what}",)), Shortage("backward", 4, at=3))[0]
    assert result["error"][:2] == ["DeviceMemoryError", 80]
    assert "micro-batches of 4" in result["error"][2]
    assert result["remembered"] == [vars(ReducedMicroBatch("train", 3, 0, 4, MICRO, 1, in_place=False))]


def test_unrecoverable_out_of_memory_errors_name_the_task_line() -> None:
    result = run_course(Course(more=("task.changes=weight",)), Shortage("forward", 4, at=3))[0]
    assert result["error"][:2] == ["DeviceMemoryError", 80]
    assert "raise torch.OutOfMemoryError" in result["problem"]["fix"].splitlines()[-1]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_evaluation_out_of_memory_continues_with_smaller_batches(ranks: int) -> None:
    result = run_course(Course(ranks), Shortage("evaluation", 4, rank=ranks - 1))
    wanted = run_course(Course(ranks))
    assert [there["state"] for there in result] == [there["state"] for there in wanted]
    assert result[0]["metrics"][0]["val/loss"] == pytest.approx(
        wanted[0]["metrics"][0]["val/loss"], rel=PROMISED[torch.float32]
    )
    row = vars(ReducedMicroBatch("train", UPDATES, ranks - 1, 4, MICRO, ranks, "evaluation"))
    assert result[0]["remembered"] == [row]
    assert "4 samples instead of 8" in result[0]["messages"]


# ---------------------------------------------------------------- complete runs that resume from a checkpoint

WHOLE = (
    "train", "--task", str(TASK), "run=mine", "device=cpu", "monitor=off", "phases=[train]", "updates=6",
    "global_batch_size=16", "checkpoint.every=2",
)  # fmt: skip
PLANT = """
import tests.faults.shortages as there
there.kept = there.plant(there.Shortage(**{fields}))  # as long as the process lives
there.kept.__enter__()
"""


def whole(
    server: ForkServer, folder: Path, *args: str, before: Callable[[], str] = lambda: "", **fields: Any
) -> tuple[int, str, str]:
    plant = PLANT.format(fields=fields) if fields else ""
    result = server.run([*WHOLE, *args], folder, before=plant + before())
    return result.code, result.out, result.err


def final_weights(folder: Path) -> bytes:
    newest = max((folder / "outputs/mine/checkpoints").glob("update-*"))
    return (newest / "model.safetensors").read_bytes()


def updates_in(folder: Path) -> list[int]:
    rows = [json.loads(line) for line in (folder / "outputs/mine/metrics.jsonl").read_text().splitlines()]
    return [row["update"] for row in rows if "train/loss" in row]


def kinds_in(folder: Path) -> list[str]:
    return [json.loads(line)["kind"] for line in (folder / "outputs/mine/events.jsonl").read_text().splitlines()]


STRATEGIES = {
    "fsdp": ("parallelism=fsdp", "parallelism.world_size=2", "micro_batch_size=8"),
    "synchronized norms": (
        "parallelism=ddp",
        "parallelism.world_size=2",
        "parallelism.batch_norm=sync",
        "micro_batch_size=8",
    ),
    "pipeline": ("parallelism=pipeline", "parallelism.world_size=2", "micro_batch_size=8"),
    "the step of one rank": ("parallelism=ddp", "parallelism.world_size=2", "micro_batch_size=8"),
}


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", STRATEGIES)
def test_ranks_that_cannot_agree_restart_with_smaller_micro_batches(
    name: str, server: ForkServer, tmp_path: Path
) -> None:
    """Collectives run inside of forward passes, or other ranks have already applied the update."""
    place = "optimizer" if name == "the step of one rank" else "forward"
    code, _, messages = whole(server, tmp_path, *STRATEGIES[name], place=place, limit=4, at=3, rank=1)
    assert code == 0, messages
    assert kinds_in(tmp_path).count("resume") == 1
    assert "8 MiB" in messages or place == "optimizer"
    assert updates_in(tmp_path) == [1, 2, 3, 4, 5, 6]
    (row,) = oom_history.read_reductions(tmp_path / "outputs/mine")
    assert (row.size, row.update, row.rank) == (4, 3, 1 if place == "optimizer" else None)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "code_at_end", "updates"), [("SIGTERM", 75, [1, 2, 3]), ("SIGKILL", -9, [1, 2])])
def test_the_same_command_resumes_with_smaller_micro_batches_and_reports_it(
    name: str, code_at_end: int, updates: list[int], server: ForkServer, tmp_path: Path
) -> None:
    """The run is stopped during the repeated update. The resumed run has the same limit and does not reach it."""
    kill = "import os, signal, tests.faults.shortages as s; begins = s.begin_update\n"
    kill += "def again(update):\n    begins(update)\n"
    kill += "    if any(each.struck for each in s.planted):\n        s.begin_update = begins\n"
    kill += f"        os.kill(os.getpid(), signal.{name})\ns.begin_update = again\n"
    code, out, messages = whole(
        server, tmp_path, "micro_batch_size=8", place="backward", limit=4, at=2, before=lambda: kill
    )
    assert code == code_at_end, messages
    assert updates_in(tmp_path) == updates
    known = oom_history.read_reductions(tmp_path / "outputs/mine")
    assert [row.size for row in known] == [4]
    code, out, messages = whole(server, tmp_path, "micro_batch_size=8", place="backward", limit=4, at=2)
    assert code == 0, messages
    assert "4 samples instead of 8" in out
    assert oom_history.read_reductions(tmp_path / "outputs/mine") == known, "there must be no other out-of-memory error"
    other = tmp_path / "other"
    other.mkdir()
    assert whole(server, other, "micro_batch_size=8", place="backward", limit=4, at=2)[0] == 0
    assert final_weights(tmp_path) == final_weights(other)


@pytest.mark.slow
def test_a_data_worker_out_of_memory_gets_smaller_batches(server: ForkServer, tmp_path: Path) -> None:
    fields = {"place": "reading", "limit": 4, "at": 0, "on_host": True}
    code, out, messages = whole(server, tmp_path, "micro_batch_size=8", "dataloader.num_workers=1", **fields)
    assert code == 0, messages
    assert "update 1 (reading): " in out
    assert "4 micro-batches of 4" in out
    assert updates_in(tmp_path) == [1, 2, 3, 4, 5, 6]


def test_a_fit_out_of_memory_is_repeated_with_smaller_batches(server: ForkServer, tmp_path: Path) -> None:
    code, _, messages = whole(server, tmp_path, "micro_batch_size=8", "phases=[train,mean]", place="fit", limit=4, at=0)
    assert code == 0, messages
    assert [row.phase for row in oom_history.read_reductions(tmp_path / "outputs/mine")] == ["mean"]


@pytest.mark.slow
def test_predictions_out_of_memory_are_computed_in_smaller_batches(server: ForkServer, tmp_path: Path) -> None:
    assert whole(server, tmp_path)[0] == 0
    plant = PLANT.format(fields={"place": "predict", "limit": 2})
    result = server.run("inference run=mine device=cpu monitor=off", tmp_path, before=plant)
    assert result.code == 0, result.err
    assert "batch_size=3" in result.err
    assert len(list((tmp_path / "outputs/mine/predictions").glob("[0-9].txt"))) == 6
