"""Each of 22 typical projects trains like its plain PyTorch loop, resumes after a kill, and runs on several ranks.

A project is a task file; `plain_loops.py` has its loop without the runner. Both use the same initial weights, the same
samples in each update and the same random numbers for each sample.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import random
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from runner.axes.sampler import TrainingSamples, length_buckets
from runner.base import noise
from runner.base.batch import BatchSamples
from runner.base.order import Sampler, permutation
from runner.base.sample_rng import seeded_generators
from runner.base.task import Context, Task
from runner.durable.checkpoint import load, newest_valid
from runner.tensors.global_rng import seed_everything
from tests.forkserver import ForkServer
from tests.projects import local_files, plain_loops
from tests.rounding import ADAPTIVE, PROMISED, distance

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
SEED = 3
COMMON = f"run=mine device=cpu monitor=off seed={SEED} dataloader.num_workers=0 log_every=1 checkpoint.every=2"
TWO = "parallelism=ddp parallelism.world_size=2"
KILLED = {"at": "save", "save": 2, "number": 5, "by": "SIGKILL"}  # during the second save
TOLERANCE = ADAPTIVE
OF_FLOAT32 = dict.fromkeys(("hf_gpt2", "hf_bert"), PROMISED[torch.float32])  # transformers computes losses in float32

ADAPTED = ("lora_classifier",)  # the checkpoint contains only the adapter

# project: required packages
PROJECTS: dict[str, tuple[str, ...]] = {
    "nano_gpt": (),
    "hf_gpt2": ("transformers",),
    "hf_bert": ("transformers",),
    "vit_mixup": (),
    "resnet_augmented": (),
    "timm_resnet": ("timm", "torchvision"),
    "unet_diffusion": (),
    "vae": (),
    "dcgan": (),
    "clip": (),
    "simclr": (),
    "moco": (),
    "triplets": (),
    "actor_critic": (),
    "lora_classifier": ("peft",),
    "distillation": (),
    "speech_ctc": (),
    "tabular": ("torchmetrics",),
    "streaming_text": (),
    "webdataset_images": ("webdataset",),
    "lightning_module": (),
    "graph_network": (),
}
# Batch norm depends on the samples of a forward pass. Results are exact only without micro-batches, and if batch norms
# are synchronized over ranks.
OF_RANKS = dict.fromkeys(("resnet_augmented", "timm_resnet", "dcgan"), "parallelism.batch_norm=sync")


@pytest.fixture(autouse=True)
def _files_left_open() -> Iterator[None]:
    """webdataset leaves closing files to the garbage collector."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield
        gc.collect()


@contextlib.contextmanager
def float64() -> Iterator[None]:
    """Set the default type to float64, and restore the global generators afterwards."""
    state, numpy_state, python_state = torch.get_rng_state(), np.random.get_state(), random.getstate()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_rng_state(state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)
        noise.start_pass(None)


def module_of(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def task_of(name: str, data: Path) -> Any:
    """Return the task with the initial weights of a run."""
    build = module_of(name).build
    seed_everything(SEED)
    return build(*([Context(SEED, data, data)] if "context" in build.__code__.co_varnames else []))


def read(task: Any, dataset: Any, split: str, epoch: int, indices: list[int], first: int) -> Any:
    """Read these samples, each with its random numbers, collate them, and start their forward pass."""
    samples = []
    for index in indices:
        with seeded_generators(SEED, split, "sample", epoch, index):
            samples.append(dataset[index])
    of_pass = noise.EVALUATION if split == "val" else epoch
    noise.start_pass(BatchSamples(SEED, of_pass, indices, range(first, first + len(indices))))
    return task.collate(samples)


def draw_order(sampler: Sampler, epoch: int) -> list[int]:
    return [index for update in range(sampler.updates_per_epoch) for index in sampler.draw(SEED, epoch, update)]


def order_of(dataset: Any, settings: dict[str, Any]) -> Callable[[int], Any]:
    """Return a function from an epoch to the indices of its samples."""
    if settings.get("sampler") != "length_buckets":
        return partial(permutation, SEED, num_samples=len(dataset))
    facts = TrainingSamples(
        num_samples=len(dataset), global_batch_size=settings["global_batch_size"], drop_last=False,
        weights=list, lengths=lambda: np.asarray(dataset.lengths), sizes=list,
    )  # fmt: skip
    return partial(draw_order, length_buckets(facts, bucket=settings["sampler.bucket"]))


def batches_of_data_set(task: Any, settings: dict[str, Any]) -> Iterator[Any]:
    dataset, size = task.dataset("train"), settings["global_batch_size"]
    total, order = len(dataset), order_of(dataset, settings)
    for update in range(settings["updates"]):
        epoch, number = divmod(update, total // size)
        indices = [int(index) for index in order(epoch)[number * size : (number + 1) * size]]
        yield read(task, dataset, "train", epoch, indices, number * size)


def batches_of_stream(task: Any, settings: dict[str, Any]) -> Iterator[Any]:
    """Take samples from the shards in turn."""
    number = settings.get("data.shards", 1)
    has_stream = type(task).stream is not Task.stream
    shards = [
        iter(task.stream("train", each, number) if has_stream else task.dataset("train")) for each in range(number)
    ]
    size = settings["global_batch_size"]
    for update in range(settings["updates"]):
        samples = []
        for place in range(update * size, (update + 1) * size):
            with seeded_generators(SEED, "train", "sample", 0, place):
                samples.append(next(shards[place % number]))
        yield task.collate(samples)


def run_plain_loop(name: str, data: Path, **changes: Any) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return the weights and metrics of the plain loop. `changes` override the settings of the project."""
    with float64():
        task = task_of(name, data)

        def held() -> Any:
            dataset = task.dataset("val")
            return read(task, dataset, "val", 0, list(range(len(dataset))), 0)

        is_stream = name in ("streaming_text", "webdataset_images")
        batches = batches_of_stream if is_stream else batches_of_data_set
        settings = {**module_of(name).SETTINGS, **changes}
        loop = plain_loops.Loop(task, task.model, settings["updates"], lambda: batches(task, settings), held)
        metrics = dict(getattr(plain_loops, name)(loop))
        return {key: tensor.detach() for key, tensor in task.model.state_dict().items()}, metrics


def train_project(
    server: ForkServer, folder: Path, name: str, args: str = "", fault: dict[str, Any] | None = None
) -> tuple[dict[str, Tensor], dict[str, float], str]:
    """Train a project; return its weights, its metrics, and what the command printed."""
    env = {"IMPORT_FIRST": "tests.projects.in_float64 tests.faults.ending", "FAULT": json.dumps(fault or {})}
    result = server.run(f"train --task {HERE / name}.py {COMMON} data.path=data {args}", folder, env)
    if fault:
        assert result.code == -9, result.err
        return {}, {}, result.out
    assert result.code == 0, result.err
    directory = folder / "outputs" / "mine"
    path = newest_valid(directory / "checkpoints")
    assert path is not None
    metrics = json.loads((directory / "run.json").read_text())["metrics"]
    return dict(load(path).tensors("model")), metrics, result.out + result.err


def resumed_at(folder: Path) -> list[int]:
    """Return the updates at which processes of the run have resumed it."""
    lines = (folder / "outputs" / "mine" / "events.jsonl").read_text().splitlines()
    return [event["update"] for event in map(json.loads, lines) if event["kind"] == "resume"]


def distance_of_weights(result: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Return the distance relative to the largest weight, because gradients of key biases are only noise."""
    one, other = ({name: tensors[name].tolist() for name in result} for tensors in (wanted, result))
    return distance(one, other)


def distance_of_metrics(result: dict[str, float], wanted: dict[str, float]) -> float:
    """Return the largest distance between a metric of the run and of the plain loop."""
    return max((distance(value, result[name]) for name, value in wanted.items()), default=0.0)


def missing_weights(saved: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
    """Return the names of weights that a checkpoint lacks, except those tied to a saved weight."""
    places = {wanted[name].data_ptr() for name in saved}
    return [name for name, weight in wanted.items() if name not in saved and weight.data_ptr() not in places]


def missing_packages(name: str) -> list[str]:
    """Return the packages of a project that are not installed."""
    return [package for package in PROJECTS[name] if not importlib.util.find_spec(package)]


class Comparison(NamedTuple):
    """Distances of the runs of a project from its plain loop.

    loop, ranks    of the weights and metrics, in one process and on two ranks with unequal shares
    missing        weights that the checkpoint lacks
    resumed_at     update from which the killed run was resumed
    total          number of updates
    resumed        distance of its weights from those of an uninterrupted run
    """

    loop: tuple[float, float]
    ranks: tuple[float, float]
    missing: list[str]
    resumed_at: int
    total: int
    resumed: float


def compare(name: str, server: ForkServer, parent: Path) -> Comparison:
    """Train a project in one process, after a kill, and on two ranks with unequal shares; compare the results."""
    prepare = getattr(local_files, name, None)
    folders = [parent / each for each in ("whole", "killed", "ranks")]
    for folder in folders:
        folder.mkdir()
        (folder / "data").mkdir()
        if prepare is not None:
            prepare(folder)
    with contextlib.chdir(folders[0]):
        wanted, metrics = run_plain_loop(name, folders[0] / "data")
    whole, result, _ = train_project(server, folders[0], name)

    train_project(server, folders[1], name, fault=KILLED)
    resumed, _, _ = train_project(server, folders[1], name)
    (start,) = resumed_at(folders[1])

    settings = module_of(name).SETTINGS
    args = f"parallelism.shares=[{settings['global_batch_size'] - 3},3] {OF_RANKS.get(name, 'micro_batch_size=2')}"
    on_ranks, result_of_ranks, _ = train_project(server, folders[2], name, f"{TWO} {args}")
    return Comparison(
        (distance_of_weights(whole, wanted), distance_of_metrics(result, metrics)),
        (distance_of_weights(on_ranks, wanted), distance_of_metrics(result_of_ranks, metrics)),
        missing_weights(whole, wanted), start, settings["updates"], distance_of_weights(resumed, whole),
    )  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", PROJECTS)
def test_a_project_matches_its_plain_loop(name: str, server: ForkServer, tmp_path: Path) -> None:
    """This holds in one process, after a kill (bitwise), and on two ranks with unequal shares."""
    if missing := missing_packages(name):
        pytest.skip(f"{', '.join(missing)} is not installed")
    result = compare(name, server, tmp_path)
    tolerance = OF_FLOAT32.get(name, TOLERANCE)
    assert max(result.loop) <= tolerance
    assert max(result.ranks) <= tolerance
    assert not result.missing or name in ADAPTED
    assert 0 < result.resumed_at < result.total, "the run must resume from a checkpoint, not start from scratch"
    assert result.resumed == 0.0
