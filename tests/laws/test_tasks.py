"""The update of every shipped task does not depend on the division of its samples into micro-batches and ranks.

Everything is computed in float64, even if a task converts to float32. The remaining differences are rounding errors,
which are too small to hide an error in the mathematics.
"""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from runner import auto_parallelize
from runner.axes.dataloader import cache_samples
from runner.axes.optimizer import sgd
from runner.axes.parallelism import ddp, fsdp
from runner.axes.precision import fp32
from runner.axes.scheduler import constant
from runner.base import noise
from runner.base.batch import MicroBatch, are_equal, map_tensors
from runner.base.order import MicroBatchKey, Order
from runner.base.task import Context, Progress, Task
from runner.distributed.pipelined import Pipelined
from runner.distributed.world import World
from runner.engine.update.loop import Position, Training, train_updates
from runner.loading.fetcher import Fetcher
from tests.distributed.ranks import CPU, run_ranks
from tests.rounding import PROMISED, PROMISED_OF_TASKS

SAMPLES, SEED = 16, 3
OF_METRICS = PROMISED[torch.float32]  # some metrics add ratios in float32
WORDS = ("ash", "birch", "cedar", "elm", "fir", "hazel", "larch", "maple", "oak", "pine", "rowan", "willow", "yew")

Make = Callable[[Path], Task]


# ---------------------------------------------------------------- the tasks, with small data


def tractodiff(folder: Path, **options: Any) -> Task:
    """Waves through a ball of random coefficients. Some leave the ball, which the loss takes into account."""
    from runner.tasks.tractodiff import data
    from runner.tasks.tractodiff import task as module
    from runner.tasks.tractodiff.fields import NUM_CHANNELS
    from runner.tasks.tractodiff.sources import Subject

    rng, side = np.random.default_rng(0), 10
    field = rng.normal(0.0, 0.3, (side, side, side, NUM_CHANNELS)).astype(np.float32)
    field[..., -1] = np.linalg.norm(np.indices((side, side, side)) - (side - 1) / 2, axis=0) < 4
    along = np.linspace(0.0, 9.0, 30)
    starts = rng.uniform(2.0, 7.0, (40, 3)) * [0.1, 1.0, 1.0]
    waves = [start + np.stack([along, np.sin(along + start[1]), np.cos(along)], axis=1) for start in starts]
    split = ["train"] * 30 + ["val"] * 10
    small = {
        "encoder": (32, 16), "time": 8, "hidden": 16, "head": (8,), "channels": (8, 16, 16), "num_steps": 10
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "volume", lambda: [Subject("ball", field, np.eye(4), waves, split, ["ball"] * 40)])
        task = _with_small_shapes(module, small, Context(SEED, None, folder), step_mm=0.5, **options)
    mask = task.mask  # type: ignore[attr-defined]
    task.mask = replace(mask, values=mask.values.double(), to_voxel=mask.to_voxel.double())  # type: ignore[attr-defined]
    return task


def cape(folder: Path) -> Task:
    """Polygons with different numbers of corners, instead of letters."""
    pytest.importorskip("matplotlib")
    from runner.tasks.cape.glyphs import END, LINE, MOVE, Letter, write_glyphs
    from runner.tasks.cape.task import build

    def polygon(name: str, corners: int) -> Letter:
        angles = np.arange(corners + 1) * 2 * np.pi / corners
        outlines = {f"font{i}": 0.5 * np.stack([np.cos(angles), np.sin(angles + 0.1 * i)], axis=1) for i in range(6)}
        codes = (MOVE, *[LINE] * (corners - 1), END)
        return Letter(name, codes, outlines, tuple(range(corners)), tuple((i, i + 1) for i in range(corners - 1)))

    if not (folder / "glyphs").exists():
        splits = {"train": [polygon("A", 5), polygon("B", 8), polygon("C", 6)], "val": [polygon("D", 7)]}
        write_glyphs(folder / "glyphs", splits, image_size=32)
    return build(Context(SEED, folder / "glyphs", folder / "cache"), image_size=32, crop="image")


def nmt(folder: Path, **options: Any) -> Task:
    """Sources and targets of many lengths, so that padding and packing depend on the micro-batch."""
    from runner.tasks.nmt import task as module

    small = {"num_layers": 2, "num_heads": 2, "width": 16, "feed_forward": 32, "initial_std": 0.3}
    context = Context(SEED, _pairs(folder), folder / "cache")
    return _with_small_shapes(module, small, context, vocab_size=300, **options)


def gpt(folder: Path, **options: Any) -> Task:
    from runner.tasks.gpt import task as module

    file = folder / "text.txt"
    if not file.exists():
        file.write_text(" ".join(random.Random(0).choices(WORDS, k=2000)))
    small = {"num_layers": 3, "num_heads": 2, "width": 16}
    context = Context(SEED, file, folder / "cache")
    return _with_small_shapes(module, small, context, vocab_size=256, block_size=16, **options)


def dynamo(folder: Path) -> Task:
    """Records of many lengths, so that padding depends on the micro-batch."""
    from runner.tasks.dynamo.task import SHAPES, DynamoTask, build
    from runner.tasks.dynamo.text import SPLITS

    generator = random.Random(0)
    texts = [" ".join(generator.choices(WORDS, k=generator.randint(1, 6))) for _ in range(40)]
    made: dict[str, list[Any]] = {
        "classification": [{"text": text, "label": ("tree", "wood")[i % 2]} for i, text in enumerate(texts)],
        "qa": [{"question": "how many?", "context": f"{text}: {i}2", "answer": f"{i}2", "start": len(text) + 2}
               for i, text in enumerate(texts[:30])],
        "summary": [{"source": text, "target": text.split()[0]} for text in texts],
        "code": [{"source": f"Find {text}", "target": f"def {text[:9]}():"} for text in texts[:25]],
        "translation": [{"source": f"{text} + b", "target": f"{text} b +"} for text in texts[:35]],
    }  # fmt: skip
    for task, records in made.items():
        (folder / "records" / task).mkdir(parents=True, exist_ok=True)
        for name in SPLITS.values():
            (folder / "records" / task / f"{name}.json").write_text(json.dumps(records))
    task = build(Context(SEED, folder / "records", folder / "cache"), vocab_size=320)
    assert isinstance(task, DynamoTask)
    shape = SHAPES["tiny"]
    small = type(shape)(2, 2, 32, 4, (12, 8), 1, shape.max_length, shape.max_target_length, 320, 2)
    task = DynamoTask(task.corpus, small, seed=SEED)
    for adapters in task.model.adapters:
        for adapter in adapters.values():  # type: ignore[operator]
            torch.nn.init.normal_(adapter.B, std=0.1)  # weights of zero would hide the dropout before them
    return task


def hyperspectral(folder: Path, head: str = "rx") -> Task:
    from runner.tasks.hyperspectral.task import build

    task = build(
        Context(SEED, None, folder), head=head, data="synthetic", num_cubes=40, height=12, width=12, channels=12  # type: ignore[arg-type]
    )  # fmt: skip
    fit, data = task.fits["fit"], task.dataset("train")
    state, _ = fit.add(task.model, fit.start(), data.__getitems__(range(20)))  # type: ignore[attr-defined]
    fit.finish(task.model, state)
    return task


def svdd(folder: Path) -> Task:
    return hyperspectral(folder, "svdd")


CASES: Mapping[str, tuple[Make, str]] = {
    "tractodiff": (tractodiff, "train"),
    "tractodiff unet": (partial(tractodiff, denoiser="unet"), "train"),
    "cape": (cape, "train"),
    "nmt packed": (partial(nmt, packed=True), "train"),
    "nmt padded": (partial(nmt, packed=False), "train"),
    "nmt packed, dropout": (partial(nmt, packed=True, dropout=0.2), "train"),
    "nmt padded, dropout": (partial(nmt, packed=False, dropout=0.2), "train"),
    "nmt packed, attention dropout": (partial(nmt, packed=True, dropout=0.2, attention_dropout=0.2), "train"),
    "nmt padded, attention dropout": (partial(nmt, packed=False, attention_dropout=0.2), "train"),
    "nmt full packed": (partial(nmt, size="full", packed=True), "train"),
    "nmt full padded": (partial(nmt, size="full", packed=False), "train"),
    "gpt": (gpt, "train"),
    "gpt, dropout": (partial(gpt, dropout=0.2), "train"),
    "gpt, attention dropout": (partial(gpt, attention_dropout=0.2), "train"),
    "gpt 124m, dropout": (partial(gpt, size="124m", dropout=0.1), "train"),
    "gpt 350m, dropout": (partial(gpt, size="350m", dropout=0.1, attention_dropout=0.1), "train"),
    "dynamo pretrain": (dynamo, "pretrain"),
    "dynamo lora": (dynamo, "lora"),
    "dynamo router": (dynamo, "router"),
    "dynamo joint": (dynamo, "joint"),
    "hyperspectral rx": (hyperspectral, "train"),
    "hyperspectral svdd": (svdd, "train"),
}
PIPELINED = (
    *("tractodiff", "tractodiff unet", "cape", "gpt", "gpt, dropout", "gpt 350m, dropout"),
    *("nmt packed", "nmt padded, dropout", "nmt packed, attention dropout"),
    *("hyperspectral rx", "hyperspectral svdd"),
)
READ = (  # one case for each dataset
    *("tractodiff", "cape", "nmt packed", "nmt padded", "gpt", "dynamo pretrain", "dynamo joint", "hyperspectral rx"),
)
DRAWS = (  # losses that draw random numbers
    *(
        "tractodiff",
        "tractodiff unet",
        "cape",
        "dynamo lora",
        "dynamo router",
        "dynamo joint",
        "nmt full packed",
        "nmt full padded",
    ),
    *(case for case in CASES if "dropout" in case),
)


def _with_small_shapes(module: Any, small: Mapping[str, Any], *given: Any, **options: Any) -> Task:
    """Build a task whose sizes differ from the published ones only in what makes them slow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SHAPES", {size: replace(shape, **small) for size, shape in module.SHAPES.items()})
        task: Task = module.build(*given, **options)
    return task


def _pairs(folder: Path) -> Path:
    generator = random.Random(0)
    file = folder / "pairs.tsv"
    if not file.exists():
        sides = ([" ".join(generator.choices(WORDS, k=generator.randint(1, 7))) for _ in range(200)] for _ in range(2))
        file.write_text("".join(f"{one}\t{other}\n" for one, other in zip(*sides, strict=True)))
    return file


# ---------------------------------------------------------------- one update


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    torch.set_num_threads(1)
    yield
    noise.start_pass(None)


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Task]:
    """Return a function that returns the task of a case, with the same weights in each call."""
    folder, built = tmp_path_factory.mktemp("data"), {}

    def task(case: str) -> Task:
        make, phase = CASES[case]
        if make not in built:
            torch.manual_seed(0)
            built[make] = make(folder)
            built[make].model.double().train()
        result = copy.deepcopy(built[make])
        result.begin_phase(phase)
        with float64():
            result.begin_update(Progress(phase, 0, 10, 0.0))
        return result

    return task


def wide(batch: Any) -> Any:
    return map_tensors(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor, batch)


@contextmanager
def float64() -> Iterator[None]:
    """Use float64 instead of float32, even for `.float()` and `log_softmax(dtype=torch.float32)`."""
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tensor, "float", Tensor.double)
            patch.setattr(F, "log_softmax", lambda x, dim, dtype: x.double().log_softmax(dim))
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def in_float64(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the loss or metrics function of a task, computed in float64."""

    def computed(model: Any, batch: Any) -> Any:
        with float64():
            return function(model, wide(batch))

    return computed


def in_context(context: Callable[[], Any], function: Callable[..., Any]) -> Callable[..., Any]:
    def computed(*args: Any) -> Any:
        with context():
            return function(*args)

    return computed


def fetcher_of(task: Task, split: str = "train") -> Fetcher:
    return Fetcher(task.dataset(split), task.collate, bad_samples="stop")


def read(fetcher: Fetcher, keys: Iterable[MicroBatchKey]) -> Iterator[MicroBatch]:
    for key in keys:
        micro = fetcher[key]
        noise.start_pass(micro.samples)
        yield micro


def cut(key: MicroBatchKey, sizes: tuple[int, ...]) -> Iterator[MicroBatchKey]:
    """Split an update into micro-batches of these sizes."""
    start = 0
    for size in sizes:
        stop = start + size
        yield key._replace(indices=key.indices[start:stop], last=stop == len(key.indices), first=key.first + start)
        start = stop


def updated(
    world: World, task: Task, sizes: tuple[int, ...] = (), strategy: Any = ddp, shares: tuple[int, ...] = ()
) -> Updated:
    """Return the loss and items of one update, and the change of the weights."""
    fetcher, parallel = fetcher_of(task), strategy(world)
    order = Order(
        len(fetcher), SAMPLES, SAMPLES if sizes else 5, SEED, shares=shares,
        rank=world.rank if shares else 0, is_lockstep=parallel.is_lockstep,
    )  # fmt: skip
    keys = [part for key in order.micro_batches(0) for part in (cut(key, sizes) if sizes else [key])]
    before = {name: weight.detach().clone() for name, weight in task.model.named_parameters()}
    model = parallel.wrap(task.model, task.layers, list(task.blocks()))
    if isinstance(parallel, Pipelined):  # pipelines compute their stage outside of the loss
        parallel.stage.compute = in_context(float64, parallel.stage.compute)  # type: ignore[method-assign]
    named = parallel.owned_parameters(dict(model.named_parameters()))
    parallel.begin(list(named.values()))
    run = Training(
        position=Position(task.phase), model=model, loss=in_float64(task.losses.get(task.phase, task.loss)),
        parameters=list(named.values()), optimizer=sgd(list(named.items()), lr=0.1, momentum=0.0, kernel="foreach"),
        schedule=constant(10), precision=fp32(world, model), parallel=parallel,
        per_item=1 / (SAMPLES * task.items_per_sample), max_grad_norm=None,
    )  # fmt: skip
    (step,) = train_updates(run, read(fetcher, keys), 1)
    assert step.loss_sum is not None
    weights = parallel.gather_full(named)  # None except on rank 0
    moved = torch.cat([(weights[name] - before[name]).flatten() for name in before]) if weights else None
    return Updated(float(step.loss_sum), float(step.items), moved)


@dataclass(frozen=True)
class Updated:
    loss: float
    items: float
    moved: Tensor | None

    def check_is(self, other: Updated) -> None:
        """Compare sums of about 10,000 terms in different orders. Each rounds to 2e-16; the model magnifies errors."""
        assert self.items == other.items
        assert self.loss == pytest.approx(other.loss, rel=PROMISED_OF_TASKS)
        if self.moved is not None and other.moved is not None:
            scale = float(other.moved.abs().max())
            assert scale > 1e-6
            assert float((self.moved - other.moved).abs().max()) < PROMISED_OF_TASKS * scale


@pytest.mark.slow_beyond(6)  # a sample of six cases contains one of each task
@pytest.mark.sampled(7)
@pytest.mark.parametrize(("task", "case"), [(re.split("[ ,]", case)[0], case) for case in CASES])
def test_micro_batches_and_ranks_do_not_change_the_update(task: str, case: str, fresh: Callable[[str], Task]) -> None:
    assert case.startswith(task)
    whole = updated(World(CPU), fresh(case), (16,))
    for sizes in ((8, 8), (5, 11)):
        updated(World(CPU), fresh(case), sizes).check_is(whole)
    run_ranks(lambda world: updated(world, fresh(case), shares=(9, 7)).check_is(whole), 2)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", ["tractodiff", "dynamo joint"])
def test_sharding_the_model_does_not_change_the_update(case: str, fresh: Callable[[str], Task]) -> None:
    whole = updated(World(CPU), fresh(case), (16,))
    run_ranks(lambda world: updated(world, fresh(case), strategy=fsdp, shares=(9, 7)).check_is(whole), 2)


def test_sharding_does_not_change_the_center_of_svdd() -> None:
    """`begin_update` calls the network outside of a forward pass, where each rank has only a part of the weights."""
    from runner.tasks.hyperspectral.model import DeepSVDD

    def center(world: World) -> list[float]:
        torch.manual_seed(0)
        model = DeepSVDD(5)
        model.reference.normal_()
        fsdp(world).wrap(model, (), [])
        model.begin_update(Progress("train", 1, 9, 0.0))
        values: list[float] = model.centre.tolist()
        return values

    (whole,) = run_ranks(center, 1)
    for sharded in run_ranks(center, 2):
        assert sharded == pytest.approx(whole)
    assert whole != pytest.approx([32**-0.5] * 32)  # the center has moved


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", PIPELINED)
def test_stages_do_not_change_the_update(case: str, fresh: Callable[[str], Task]) -> None:
    whole = updated(World(CPU), fresh(case), (16,))
    run_ranks(lambda world: updated(world, fresh(case), (5, 11), strategy=Pipelined).check_is(whole), 2)


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "case", ["cape", "nmt packed", "nmt padded", "tractodiff unet", "hyperspectral rx", "hyperspectral svdd"]
)
def test_a_pipeline_has_the_metrics_of_the_unsplit_model(case: str, fresh: Callable[[str], Task]) -> None:
    """This includes metrics that decode step by step, where each step is a pass through all stages."""

    def measured(world: World, parallel: Any) -> dict[str, tuple[float, float]]:
        task = fresh(case)
        task.model.eval()
        model = parallel.wrap(task.model, task.layers, [])
        key = MicroBatchKey(noise.EVALUATION, list(range(4)), last=True, seed=SEED)
        (micro,) = read(fetcher_of(task, "val"), [key])
        with torch.no_grad():
            metrics = in_float64(task.evaluate)(model, micro.batch)
        return {name: (float(total), float(count)) for name, (total, count) in metrics.items()}

    alone = measured(World(CPU), ddp(World(CPU)))
    for of_rank in run_ranks(lambda world: measured(world, Pipelined(world)), 2):
        for name, pair in alone.items():
            assert of_rank[name] == pytest.approx(pair, rel=OF_METRICS, abs=OF_METRICS), name


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize(
    "case",
    [
        *("tractodiff", "tractodiff unet", "cape", "gpt", "nmt padded", "nmt packed"),
        *("hyperspectral rx", "hyperspectral svdd"),
    ],
)
def test_splitting_a_model_over_devices_does_not_change_results(case: str, fresh: Callable[[str], Task]) -> None:
    task = fresh(case)
    task.model.eval()
    calls: list[tuple[Any, Any]] = []

    def record(*inputs: Any, **named: Any) -> Any:
        calls.append((inputs, named))
        return task.model(*inputs, **named)

    batch = next(read(fetcher_of(task), [MicroBatchKey(0, list(range(8)), last=True, seed=SEED)])).batch
    in_float64(task.loss)(record, batch)
    ((inputs, named),) = calls
    num_bytes = 16 * sum(weight.numel() for weight in task.model.parameters())
    with float64():
        expected = task.model(*inputs, **named)
        choice = auto_parallelize(
            task.model, ["cpu", "cpu"], layers=task.layers(), capacities=[11 * num_bytes, 8 * num_bytes],
            num_microbatches=2, say=lambda _: None,
        )  # fmt: skip
        assert choice.strategy == "pipeline"
        found = choice.model(*inputs, **named)
    tensors: tuple[list[Tensor], list[Tensor]] = ([], [])
    map_tensors(tensors[0].append, found)
    map_tensors(tensors[1].append, expected)
    for one, other in zip(*tensors, strict=True):
        torch.testing.assert_close(one, other, rtol=PROMISED_OF_TASKS, atol=PROMISED_OF_TASKS)


@pytest.mark.slow_beyond(3)
@pytest.mark.parametrize("case", DRAWS)
def test_random_draws_change_the_loss(case: str, fresh: Callable[[str], Task]) -> None:
    """Otherwise, the comparison above would not test random numbers."""
    task = fresh(case)
    losses = []
    for seed in (1, 2):
        for micro in read(fetcher_of(task), [MicroBatchKey(0, list(range(8)), last=True, seed=seed)]):
            loss, _ = in_float64(task.losses.get(task.phase, task.loss))(task.model, micro.batch)
            losses.append(float(loss.detach()))
    assert losses[0] != pytest.approx(losses[1], rel=PROMISED[torch.float32])


@pytest.mark.slow_beyond(3)
@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("case", READ)
def test_cached_batches_equal_read_batches(case: str, split: str, fresh: Callable[[str], Task]) -> None:
    task = fresh(case)
    dataset: Any = task.dataset(split)
    name = "load_fixed" if hasattr(dataset, "load_fixed") else "__getitems__"
    load, calls = getattr(dataset, name), []

    def counted(indices: Any) -> Any:
        calls.append(len(indices))
        return load(indices)

    setattr(dataset, name, counted)
    cached = cache_samples(Fetcher(dataset, task.collate, bad_samples="stop", split=split), "memory", CPU)
    delattr(dataset, name)
    num_samples = len(dataset)
    assert sum(calls) == num_samples  # each sample is read once
    keys = [
        key
        for epoch in (0, 1)
        for key in islice(Order(num_samples, 8, 8, SEED).from_update(epoch * -(-num_samples // 8)), 4)
    ]
    setattr(dataset, name, counted)
    found = [cached[key] for key in keys]
    delattr(dataset, name)
    assert sum(calls) == num_samples
    plain = Fetcher(dataset, task.collate, bad_samples="stop", split=split)
    for key, micro in zip(keys, found, strict=True):
        expected = plain[key]
        assert micro.samples == expected.samples
        assert type(micro.batch) is type(expected.batch)
        assert are_equal(micro.batch, expected.batch)


@pytest.mark.slow_beyond(2)
@pytest.mark.sampled(7)
@pytest.mark.parametrize("case", CASES)
def test_metrics_do_not_depend_on_batches(case: str, fresh: Callable[[str], Task]) -> None:
    task = fresh(case)
    task.model.eval()
    fetcher = fetcher_of(task, "val")
    count = min(12, len(fetcher))

    def measured(*sizes: int) -> dict[str, tuple[float, float]]:
        sums: dict[str, tuple[float, float]] = {}
        key = MicroBatchKey(noise.EVALUATION, list(range(count)), last=True, seed=SEED)
        for micro in read(fetcher, cut(key, sizes)):
            for name, (total, number) in in_float64(task.evaluate)(task.model, micro.batch).items():
                before = sums.get(name, (0.0, 0.0))
                sums[name] = (before[0] + float(total), before[1] + float(number))
        return sums

    with torch.no_grad():
        whole, parts = measured(count), measured(count // 3, count - count // 3)
    for name, pair in whole.items():
        assert parts[name] == pytest.approx(pair, rel=OF_METRICS, abs=OF_METRICS), name
