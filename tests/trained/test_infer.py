"""Inference: latency covers only model calls, throughput uses wall-clock time, and predictions are batched on disk."""

from __future__ import annotations

import errno
import inspect
import io
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from runner.base import stopwatch
from runner.base.errors import Exit, StorageError
from runner.base.task import Prediction, Task
from runner.cli import main
from runner.distributed.world import World
from runner.durable import files
from runner.durable.directory import RunDirectory
from runner.engine.contract.contract_checks import validate_prediction
from runner.launch import trained_ranks
from runner.trained import infer as module
from runner.trained.infer import MAX_QUEUED_FILES, PredictionSummary, PredictionWriter, time_calls
from tests.commands_here import run_here
from tests.faults.recording import Faults, Quick

CPU = torch.device("cpu")
TASK = Path(__file__).parents[1] / "end_to_end" / "task_with_everything.py"


class Time:
    """A clock that advances only when the test sets it."""

    now = 100.0

    def perf_counter(self) -> float:
        return self.now

    monotonic = perf_counter


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    stopped = Time()
    monkeypatch.setattr(stopwatch, "time", stopped)
    monkeypatch.setattr(module, "time", stopped)
    return stopped


class Slow(nn.Module):
    """A model that takes a second per sample, and can call itself or raise an error."""

    def __init__(self, time: Time) -> None:
        super().__init__()
        self.time = time

    def forward(self, x: Tensor, *, again: bool = False, fails: bool = False) -> Tensor:
        self.time.now += len(x)
        if fails:
            raise ValueError("refused")
        return self(x) if again else x


def test_latency_covers_only_calls_of_the_model(time: Time) -> None:
    model = Slow(time)
    with time_calls(model, CPU) as calls:
        for samples in (4, 1, 2):
            time.now += 100.0  # reading
            model(torch.zeros(samples, 3))
            time.now += 1000.0  # plotting and writing
    model(torch.zeros(9, 3))

    assert (calls.seconds, calls.samples) == ([4.0, 1.0, 2.0], [4, 1, 2])


def test_nested_calls_count_once_and_failed_calls_are_timed(time: Time) -> None:
    model = Slow(time)
    with time_calls(model, CPU) as calls:
        model(torch.zeros(2, 3), again=True)
        with pytest.raises(ValueError, match="refused"):
            model(torch.zeros(3, 3), fails=True)
        model(torch.zeros(1, 3))

    assert calls.samples == [2, 3, 1]
    assert calls.seconds == [4.0, 3.0, 1.0]


def test_a_compiled_model_stays_one_graph_while_it_is_timed() -> None:
    class Doubling(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    model = Doubling()
    model.compile(backend="eager", fullgraph=True)
    with time_calls(model, CPU) as calls:
        model(torch.zeros(4, 3))
        model(torch.zeros(4, 3))
    model(torch.zeros(4, 3))

    assert calls.samples == [4, 4]
    assert len(calls.seconds) == 2


def test_the_summary_separates_wall_clock_and_model_time(time: Time) -> None:
    with time_calls(model := Slow(time), CPU) as calls:
        for samples in (10, *[2] * 150):
            model(torch.zeros(samples, 1))
    result = module.summarize_predictions(PredictionSummary(num=3, items=900, seconds=1000.0, calls=calls), "row", 7)

    assert (result["seconds"], result["items_per_s"]) == (1000.0, 0.9)
    assert result["model"] == {
        "calls": 151, "seconds": 310.0, "samples_per_call": 310 / 151, "ms_per_sample": 1000.0, "first_call_ms": 1e4,
    }  # fmt: skip
    assert result["latency_ms"] == {"mean": 2000.0, "median": 2000.0, "p95": 2000.0, "p99": 2000.0}
    assert json.loads(json.dumps(result)) == result


def test_latency_excludes_the_first_call_of_each_rank() -> None:
    calls = module.PredictCalls(seconds=[9.0, 5.0, 1.0, 3.0], samples=[1, 1, 1, 1], num_first=2)
    result = module.summarize_predictions(PredictionSummary(4, 4, 1.0, calls), "row", 0)
    assert (result["latency_ms"]["mean"], result["model"]["first_call_ms"]) == (2000.0, 9000.0)


@pytest.mark.parametrize(("calls", "known"), [(0, 0), (1, 2), (20, 2), (21, 3), (100, 3), (101, 4)])
def test_a_percentile_is_reported_only_with_enough_values(time: Time, calls: int, known: int) -> None:
    with time_calls(model := Slow(time), CPU) as made:
        for _ in range(calls):
            model(torch.zeros(1, 1))
    result = module.summarize_predictions(PredictionSummary(calls, calls, 1.0, made), "row", 0)["latency_ms"]

    assert sum(value is not None for value in result.values()) == known


def test_only_the_first_predictions_and_tables_are_printed() -> None:
    predictions = [Prediction({f"{number}.txt": "x"}, f"text {number}") for number in range(1, 12)]
    table = Prediction({"table.txt": "x"}, "table", items=0)
    texts = [module.printed_text(prediction, number) for number, prediction in enumerate(predictions, 1)]

    assert [f"text {number}" in text for number, text in enumerate(texts, 1)] == [True] * 8 + [False] * 3
    assert [bool(text) for text in texts] == [True] * 9 + [False] * 2, "one line replaces all others"
    assert module.printed_text(table, 11) == "\n--- table.txt\ntable"
    assert module.printed_text(Prediction({"a.txt": "x"}), 1) == ""


# ---------------------------------------------------------------- on disk


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    with RunDirectory.create_or_open(tmp_path / "outputs", "one") as directory:
        yield directory


def syncs(faults: Faults) -> int:
    return sum(operation in ("fsync", "sync_file_system") for operation, _ in faults.trace)


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("refusal", [None, "ENOSYS"])
def test_a_thousand_small_predictions_are_synced_a_few_times(
    run: RunDirectory, time: Time, refusal: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults()
    if refusal:  # a system without syncfs: each file is synced, with the same guarantees
        monkeypatch.setattr(type(faults.inner), "sync_file_system", _refuse)
    with files.use_system(faults), PredictionWriter(run, print) as writer:
        for number in range(1000):
            writer.put({f"predictions/{number}.txt": b"x", f"plots/{number}.png": b"y"})

    batches = -(-2000 // MAX_QUEUED_FILES)
    assert len(list(run.predictions.iterdir())) == len(list(run.plots.iterdir())) == 1000
    assert batches <= syncs(faults) <= (8 * batches if refusal is None else 2000 + 8 * batches)


@pytest.mark.parametrize(("count", "size"), [(MAX_QUEUED_FILES, 1), (2, module.MAX_QUEUED_BYTES // 2)])
def test_many_or_large_predictions_are_written_before_the_maximum_delay(
    count: int, size: int, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_WRITE_DELAY_S", float("inf"))
    content = bytes(size)
    with files.use_system(Quick()), PredictionWriter(run, print) as writer:
        for number in range(count - 1):
            writer.put({f"predictions/{number}.bin": content})
        assert list(run.predictions.glob("*")) == []
        writer.put({f"predictions/{count - 1}.bin": content})
        assert len(list(run.predictions.glob("*"))) == count


def _refuse(*_: Any) -> None:
    raise OSError(38, "Function not implemented")


def test_completed_predictions_are_written_when_a_later_one_fails(run: RunDirectory) -> None:
    with pytest.raises(ZeroDivisionError), PredictionWriter(run, print) as writer:
        writer.put({"predictions/a.txt": b"x"})
        assert not (run.predictions / "a.txt").exists()
        _ = 1 / 0
    assert (run.predictions / "a.txt").exists()


def test_prediction_text_is_shown_once_its_files_are_on_disk(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_WRITE_DELAY_S", 0.0)
    result: list[tuple[str, bool]] = []
    with PredictionWriter(run, lambda text: result.append((text, (run.predictions / "a.txt").exists()))) as writer:
        writer.put({"predictions/a.txt": b"x"}, "a")
        assert result == [("a", True)]  # nothing else is queued or written
    assert result == [("a", True)]


def test_validating_a_prediction_reads_the_source_only_for_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finding the line of `predict`, which only errors name, takes longer than a small prediction."""
    monkeypatch.setattr(inspect, "getsourcelines", lambda *_: pytest.fail("source was read"))
    prediction = Prediction({"a.txt": "text"})
    assert validate_prediction(prediction, Task.predict, Path("task.py")) is prediction


def test_the_text_of_an_unwritten_prediction_is_not_shown(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    def write(name: str, data: bytes) -> None:
        raise StorageError(f"cannot write {name}")

    monkeypatch.setattr(run, "write_all", lambda contents: write(*next(iter(contents.items()))))
    monkeypatch.setattr(run, "write", write)
    with pytest.raises(StorageError), PredictionWriter(run, shown.append) as writer:
        writer.put({"predictions/a.txt": b"x"}, "a")
    assert shown == []


class Full(Quick):
    """A disk that has space only for small files."""

    def write(self, descriptor: int, data: memoryview) -> int:
        if len(data) > 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(descriptor, data)


def test_a_disk_that_fills_up_keeps_the_predictions_that_fit(run: RunDirectory) -> None:
    """The files of a batch that precede the first one that does not fit are written."""
    with pytest.raises(StorageError), files.use_system(Full()), PredictionWriter(run, print) as writer:
        for number in range(8):
            writer.put({f"predictions/{number}.txt": b"x" * number})
    assert sorted(path.name for path in run.predictions.iterdir()) == [f"{number}.txt" for number in range(5)]


def test_few_files_are_synced_individually(run: RunDirectory) -> None:
    """A sync of the file system would also wait for the writes of all other programs."""
    faults = Faults()
    with files.use_system(faults), PredictionWriter(run, print) as writer:
        writer.put({"predictions/a.txt": b"x", "plots/a.png": b"y"})
    assert "sync_file_system" not in [operation for operation, _ in faults.trace]


# ---------------------------------------------------------------- out of memory


def test_predictions_are_recomputed_with_half_the_batch_size_until_they_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With on_oom=stop, or if the size cannot be halved further, the error ends the command."""
    predict = """
    def predict(self, model, generator, *, batch_size: int = 8, limit: int = 2):
        if batch_size > limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        yield Prediction({"size.txt": str(batch_size)})
"""
    head, _, _ = SHARDED.partition("    def predict(")
    (tmp_path / "mine.py").write_text(head.rstrip() + predict)
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--task", "mine.py", "run=first", "device=cpu", "monitor=off"]) == 0
    written = tmp_path / "outputs/first/predictions/size.txt"
    assert main(["inference", "first"]) == 0
    assert written.read_text() == "2"
    assert re.search(r"[\d.,]+ \w+/s", capsys.readouterr().out), "the throughput must be printed"
    written.unlink()
    for setting in ("on_oom=stop", "inference.limit=0"):
        assert main(["inference", "first", setting]) == Exit.GPU_MEMORY
        assert not written.exists()


# ---------------------------------------------------------------- on several ranks

SHARDED = """
import json
import torch
from torch import nn
from runner import Prediction, Task

SETTINGS = {"updates": 1}

def build():
    return Mine()

class Mine(Task):
    def __init__(self):
        self.model = nn.Linear(4, 2)
    def dataset(self, split):
        return torch.utils.data.TensorDataset(torch.randn(32, 4, generator=torch.Generator().manual_seed(0)))
    def loss(self, model, batch):
        return model(batch[0]).square().sum(), len(batch[0])
    def predict(self, model, generator, *, shard: int = 0, num_shards: int = 1, same: bool = False):
        for number in range(shard, 9, num_shards):
            x = torch.full((1, 4), float(number), device=generator.device)
            name = "same" if same else f"{number}"
            drawn = torch.rand(1, 2, device=generator.device)
            files = {f"{name}.npy": torch.cat([model(x), drawn]).cpu().numpy()}
            yield Prediction(files, items=2, part=None if number == 4 else {"number": number})
    def combine_predictions(self, parts):
        numbers = [part["number"] for part in parts]
        yield Prediction({"numbers.json": json.dumps(numbers)}, f"combined {numbers}", items=0)
"""


def test_ranks_share_the_predictions_and_each_is_computed_once(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SHARDED)
    trained = run_here(["train", "--task", "mine.py", "run=first", "device=cpu", "monitor=off"], tmp_path)
    assert trained.code == 0, trained.err
    folder = tmp_path / "outputs" / "first" / "predictions"
    actual, summaries = [], []
    for args in ([], ["parallelism=ddp", "parallelism.world_size=2"]):
        result = run_here(["inference", "first", *args], tmp_path)
        assert result.code == 0, result.err
        actual.append({path.name: path.read_bytes() for path in folder.glob("*.npy")})
        summaries.append(json.loads((folder / "summary.json").read_text()))
        assert json.loads((folder / "numbers.json").read_text()) == [0, 1, 2, 3, 5, 6, 7, 8]
        assert result.out.count("combined [0, 1, 2, 3, 5, 6, 7, 8]") == 1
        (folder / "numbers.json").unlink()
        for path in folder.glob("*.npy"):
            path.unlink()
    assert len(actual[0]) == 9
    assert actual[0] == actual[1]
    drawn = {np.load(io.BytesIO(content))[-1].tobytes() for content in actual[0].values()}
    assert len(drawn) == 9, "each prediction draws different random numbers"
    assert [summary["world_size"] for summary in summaries] == [1, 2]
    for summary in summaries:
        assert (summary["predictions"], summary["items"], summary["model"]["calls"]) == (9, 18, 9)
        assert summary["items_per_s"] == 18 / summary["seconds"]
    twice = run_here(["inference", "first", "inference.same=true", *args], tmp_path)
    assert twice.code == 70
    assert "same.npy" in twice.err
    alone = run_here(["inference", "first", "inference.same=true"], tmp_path)
    assert alone.code == 70, "one prediction would replace the others"
    assert "same.npy" in alone.err
    (folder / "old.npy").touch()
    part = run_here(["inference", "first", "inference.shard=1", "inference.num_shards=4", *args], tmp_path)
    assert part.code == 0, part.err
    assert sorted(path.name for path in folder.glob("[0-9].npy")) == ["1.npy", "5.npy"]
    assert {path.name: path.read_bytes() for path in folder.glob("[0-9].npy")}.items() <= actual[0].items()
    assert not (folder / "numbers.json").exists(), "a part of the predictions must not be combined"
    assert "old.npy" not in part.out, "other shards write other files"
    assert "old.npy" in run_here(["inference", "first"], tmp_path).out


def test_waiting_for_other_ranks_does_not_trigger_the_watchdog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that waits for a rank with a larger shard predicts nothing for a long time, but does not hang."""
    is_watched, seen = [False], []
    watch = module.run_watchdog

    @contextmanager
    def record_watch(*args: Any) -> Iterator[Any]:
        with watch(*args) as progress_mark:
            is_watched[0] = True
            try:
                yield progress_mark
            finally:
                is_watched[0] = False

    class Waiting(World):
        def gather(self, value: Any) -> list[Any]:
            seen.append(is_watched[0])
            return super().gather(value)

    monkeypatch.setattr(module, "run_watchdog", record_watch)
    monkeypatch.setattr(trained_ranks, "World", Waiting)
    (tmp_path / "shards.py").write_text(SHARDED)
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--task", "shards.py", "run=first", "device=cpu", "monitor=off"]) == 0
    assert main(["inference", "first"]) == 0
    assert seen == [False, False]
