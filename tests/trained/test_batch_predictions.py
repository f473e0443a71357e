"""`predict_batch` fills a table with a row per sample of a split, identical for any loader and number of ranks."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch

from runner.base.errors import Exit
from runner.durable.checkpoint import load, newest_valid
from tests.commands_here import run_here
from tests.rounding import allowed, distance
from tests.trained.task_with_tables import SIZES, TEXTS, Samples, build

TASK = Path(__file__).with_name("task_with_tables.py")
RUN = "outputs/one"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tables")
    result = run_here(f"train --task {TASK} run=one dataloader.bad_samples=skip", folder)
    assert result.code == 0, result.err
    assert "accel-run inference" in result.out
    return folder


def predict(folder: Path, args: str = "", file: str = "val.csv") -> list[dict[str, str]]:
    result = run_here(f"inference one {args}", folder)
    assert result.code == 0, result.err
    assert file in result.out
    with (folder / RUN / "predictions" / file).open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def text_of(folder: Path, file: str = "val.csv") -> bytes:
    return (folder / RUN / "predictions" / file).read_bytes()


def test_the_table_contains_the_predictions_of_a_plain_loop(trained: Path) -> None:
    rows = predict(trained, "inference.split=test inference.scale=2.0", "test.csv")

    model = build().model.eval()
    newest = newest_valid(trained / RUN / "checkpoints")
    assert newest is not None
    model.load_state_dict(load(newest).tensors("model"))
    samples = Samples("test", bad=False)
    with torch.no_grad():
        scores = model(samples.points)
    assert [int(row["index"]) for row in rows] == [*range(SIZES["test"])]
    assert [row["name"] for row in rows] == [samples[index][2] for index in range(SIZES["test"])]
    assert [int(row["label"]) for row in rows] == scores.argmax(-1).tolist()
    right = [str(samples[index][1] == label) for index, label in enumerate(scores.argmax(-1).tolist())]
    assert [row["right"] for row in rows] == right
    written = torch.tensor([[float(row["score.0"]), float(row["score.1"])] for row in rows])
    assert distance((2 * scores).numpy(), written.numpy()) <= allowed(torch.float32, terms=8)
    halves = torch.tensor([float(row["half"]) for row in rows])
    assert torch.equal(halves, halves.bfloat16().float())


def test_loaders_and_ranks_do_not_change_the_table(trained: Path) -> None:
    predict(trained, "dataloader.num_workers=0")
    alone = text_of(trained)
    for args in (
        "dataloader.num_workers=1", "dataloader=thread",
        "parallelism=ddp parallelism.world_size=2", "parallelism=ddp parallelism.world_size=2 dataloader.num_workers=1",
    ):  # fmt: skip
        predict(trained, args)
        assert text_of(trained) == alone, args


def test_ranks_divide_the_batches_if_weights_are_given(trained: Path) -> None:
    tables = []
    for world_size in (1, 2):
        args = f"--task {TASK} weights=outputs/one run=given parallelism=ddp parallelism.world_size={world_size}"
        result = run_here(f"inference {args}", trained)
        assert result.code == 0, result.err
        folder = trained / "outputs" / "given" / "predictions"
        assert json.loads((folder / "summary.json").read_text(encoding="utf-8"))["world_size"] == world_size
        tables.append((folder / "val.csv").read_bytes())
    assert tables[0] == tables[1]


def test_draws_depend_only_on_the_sample_and_the_seed(trained: Path) -> None:
    draws = [row["draw"] for row in predict(trained)]
    assert len({*draws}) == SIZES["val"]
    assert [row["draw"] for row in predict(trained, "inference.batch_size=5")] == draws
    assert [row["draw"] for row in predict(trained, "inference.seed=1")] != draws


def test_shards_of_separate_commands_are_separate_files(trained: Path) -> None:
    whole = [row["index"] for row in predict(trained, "inference.batch_size=4")]
    parts = [
        predict(trained, f"inference.batch_size=4 inference.shard={part} inference.num_shards=2", name)
        for part, name in enumerate(("val-0-of-2.csv", "val-1-of-2.csv"))
    ]
    assert sorted(int(row["index"]) for part in parts for row in part) == [int(index) for index in whole]
    assert all(parts)


def test_a_limited_number_of_samples_is_spread_over_the_split(trained: Path) -> None:
    rows = predict(trained, "inference.samples=3")
    assert [row["index"] for row in rows] == ["0", "7", "14"]


def test_samples_that_cannot_be_read_have_no_row(trained: Path) -> None:
    rows = predict(trained, "task.bad=true")
    assert {str(index) for index in range(SIZES["val"])} - {row["index"] for row in rows} == {"3", "17"}


@pytest.mark.parametrize(
    "returned",
    ["tensor", "nothing", "short", "index", "pictures", "objects", "ragged", "changing", "no_elements", "two_columns",
     "nested", "sparse", "float8"],
)  # fmt: skip
@pytest.mark.slow_beyond(3)
def test_invalid_results_of_predict_batch_are_task_errors(returned: str, trained: Path) -> None:
    (trained / RUN / "predictions" / "val.csv").unlink(missing_ok=True)
    result = run_here(f"inference one task.returned={returned}", trained)
    assert result.code == Exit.SOFTWARE
    assert "task_with_tables.py" in result.err
    assert "predict_batch" in result.err
    assert "Traceback" not in result.err
    assert not (trained / RUN / "predictions" / "val.csv").exists()


def test_a_missing_split_is_refused(trained: Path) -> None:
    result = run_here("inference one inference.split=rare", trained)
    assert result.code == Exit.CONFIG
    assert "inference.split=rare" in result.err


def test_predictions_that_run_out_of_memory_continue_in_smaller_batches(trained: Path) -> None:
    unpacked = "        x, label, names = batch\n"
    refused = f"{unpacked}        if len(label) > 3:\n            raise MemoryError('planted')\n"
    text = TASK.read_text(encoding="utf-8").replace(unpacked, refused)
    (trained / "small_task.py").write_text(text, encoding="utf-8")
    result = run_here("inference --task small_task.py run=one inference.split=test", trained)
    assert result.code == 0, result.err
    assert "batch_size=2" in result.err + result.out
    assert len(text_of(trained, "test.csv").splitlines()) == SIZES["test"] + 1


def test_an_out_of_memory_error_on_one_rank_loses_no_sample(trained: Path) -> None:
    unpacked = "        x, label, names = batch\n"
    refused = (
        f"{unpacked}        if len(label) > 3 and 'name, \"0\"' in names:\n            raise MemoryError('planted')\n"
    )
    text = TASK.read_text(encoding="utf-8").replace(unpacked, refused)
    (trained / "small_task.py").write_text(text, encoding="utf-8")
    args = "--task small_task.py inference.batch_size=4 parallelism=ddp parallelism.world_size=2"
    rows = predict(trained, args)
    assert [int(row["index"]) for row in rows] == [*range(SIZES["val"])]


def test_predicted_text_can_be_read_back_from_the_table(trained: Path) -> None:
    result = run_here("inference one task.returned=texts task.item=token", trained)
    assert result.code == 0, result.err
    assert max(map(len, result.out.splitlines())) < 1000, "long rows are not printed"
    with (trained / RUN / "predictions" / "val.csv").open(encoding="utf-8", newline="") as lines:
        rows = [*csv.DictReader(lines)]
    texts = [row["text"] for row in rows]
    assert [row["objects"] for row in rows] == [f'name, "{index}"' for index in range(SIZES["val"])]
    assert texts[: len(TEXTS)] == [*TEXTS[:-1], "\\udc80"]
    summary = json.loads((trained / RUN / "predictions" / "summary.json").read_text(encoding="utf-8"))
    assert (summary["item"], summary["items"]) == ("sample", SIZES["val"])


def test_secrets_are_redacted_in_each_cell(trained: Path) -> None:
    """If the cells of a row were joined first, the three others would look like a URL with a password."""
    env = {"MY_TOKEN": 'k7"Qx,29\nvZ4'}
    result = run_here("inference one task.returned=secrets", trained, env)
    assert result.code == 0, result.err
    with (trained / RUN / "predictions" / "val.csv").open(encoding="utf-8", newline="") as lines:
        rows = [*csv.DictReader(lines)]
    expected = {"url": "http://host", "time": "12:30", "mail": "me@example.org", "key": "(MY_TOKEN)"}
    assert [{name: row[name] for name in expected} for row in rows] == [expected] * SIZES["val"]


def test_each_task_of_a_file_receives_its_own_options(trained: Path) -> None:
    text = TASK.read_text(encoding="utf-8").replace("return Tables(", 'return (Other if item == "other" else Tables)(')
    text = text.replace("scale: float = 1.0", "scale: float = 1.0, limits: tuple[float, ...] = (0.0, 1.0)")
    other = "class Other(Tables):\n    def predict_batch(self, model, batch, *, add: float = 0.0):\n"
    other += '        return {"sum": model(batch[0]).sum(-1) + add}\n'
    (trained / "two_tasks.py").write_text(f"{text}\n\n{other}", encoding="utf-8")
    sums = [
        [float(row["sum"]) for row in predict(trained, f"--task two_tasks.py task.item=other inference.add={add}")]
        for add in (0, 64)
    ]
    assert all(after > before + 32 for before, after in zip(*sums, strict=True))
    predict(trained, "--task two_tasks.py inference.scale=2.0")
    result = run_here("inference --task two_tasks.py run=one inference.add=1", trained)
    assert result.code == Exit.CONFIG
    assert "inference.add=1" in result.err


def test_a_shard_without_batches_is_refused(trained: Path) -> None:
    result = run_here("inference one inference.batch_size=11 inference.shard=2 inference.num_shards=3", trained)
    assert result.code == Exit.CONFIG
    assert "inference.shard=2" in result.err


def test_a_shard_that_does_not_exist_is_refused(trained: Path) -> None:
    result = run_here("inference one inference.shard=2 inference.num_shards=2", trained)
    assert result.code == Exit.CONFIG
    assert "inference.shard" in result.err


@pytest.mark.slow
def test_a_checkpoint_of_an_unknown_phase_is_refused(trained: Path) -> None:
    text = TASK.read_text(encoding="utf-8") + '\n\nPHASES = {"other": {"kind": "train"}}\n'
    (trained / "phase_task.py").write_text(text, encoding="utf-8")
    result = run_here("inference --task phase_task.py run=one", trained)
    assert result.code == Exit.INCOMPATIBLE_RESUME
    assert "PHASES" in result.err


def test_a_predict_method_with_a_batch_argument_is_refused(tmp_path: Path) -> None:
    text = TASK.read_text(encoding="utf-8").replace("def predict_batch(", "def predict(")
    (tmp_path / "old_task.py").write_text(text, encoding="utf-8")
    result = run_here("train --task old_task.py", tmp_path)
    assert result.code == Exit.CONFIG
    assert "predict_batch" in result.err
