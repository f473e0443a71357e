"""Predicted memory equals that of the real run, to the byte, without allocating it."""

import gc
import importlib.util
import resource
import sys
import weakref
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter

from runner.base.batch import map_tensors
from runner.base.order import Order
from runner.config.configuration import compose
from runner.config.request import Request
from runner.engine.parts.assemble import assemble
from runner.engine.parts.phase_kinds import LossPhase
from runner.engine.update.loop import Position, train_updates
from runner.forecast import phase_tracer
from runner.forecast.demand import predict_needs
from runner.forecast.fake_mode import NotTraceable
from runner.forecast.memory_forecast import NUM_MEASURED, forecast
from runner.host.subprocesses import run_in_subprocess
from runner.plan.cuda_allocator import AllocatorSettings
from runner.plan.inventory import Device
from runner.plan.memory_fit import Demand, predict_memory
from runner.plan.planner import make_plan
from runner.plan.rank_devices import RankDevice
from runner.plan.run_plan import rank_part
from tests.distributed.ranks import run_ranks

SCRIPT = Path(__file__).parents[2] / "scripts" / "measure" / "memory.py"
UNTRACEABLE = """
import torch
from torch import nn

from runner import Task


class Above(Task):
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 1))

    def loss(self, model, batch):
        (x,) = batch
        out = model(x)
        return out[out > out.mean().item()].square().sum(), len(x)

    def dataset(self, split):
        return torch.utils.data.TensorDataset(torch.randn(64, 8))


def build():
    return Above()
"""
STACKED = """
import torch
from torch import nn

from runner import Task


class Stacked(Task):
    def __init__(self):
        body = [nn.Sequential(nn.Linear(8, 256), nn.GELU(), nn.Linear(256, 8)) for _ in range(4)]
        self.model = nn.Sequential(*body, nn.Linear(8, 1))

    def blocks(self):
        return list(self.model)[:4]

    def loss(self, model, batch):
        (x,) = batch
        return model(x).square().sum(), x.numel()

    def dataset(self, split):
        return torch.utils.data.TensorDataset(torch.randn(64, 128, 8))


def build():
    return Stacked()
"""
WIDE = """
import torch
from torch import nn

from runner import Task


class Wide(Task):
    def __init__(self, blocks):
        self.named = blocks
        body = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
        self.model = nn.Sequential(nn.Linear(64, 64), *body, nn.Linear(64, 63))

    def blocks(self):
        return list(self.model)[1:5] if self.named else []

    def loss(self, model, batch):
        (x,) = batch
        return model(x).square().sum(), x.numel()

    def dataset(self, split):
        return torch.utils.data.TensorDataset(torch.randn(64, 16, 64))


def build(*, blocks: bool = True):
    return Wide(blocks)
"""
PIPED = WIDE.replace(
    "    def loss(self",
    """    def layers(self):
        return list(self.model)

    def example(self):
        return (torch.zeros(2, 16, 64),)

    def loss(self""",
)
NORMED = """
import torch
from torch import nn

from runner import Task


class Normed(Task):
    def __init__(self):
        self.model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.GroupNorm(2, 8), nn.Conv2d(8, 1, 1))

    def loss(self, model, batch):
        (x,) = batch
        return model(x).float().square().sum(), x.numel()

    def dataset(self, split):
        return torch.utils.data.TensorDataset(torch.randn(64, 3, 32, 32))


def build():
    return Normed()
"""
KEEPING = UNTRACEABLE.replace(
    "return out[out > out.mean().item()].square()",
    "self.kept = [*vars(self).get('kept', []), out.detach()]\n        return out.square()",
).replace("nn.Linear(512, 1)", "nn.Linear(512, 128)")
RECURRENT = (
    UNTRACEABLE.replace("nn.Sequential(nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 1))", "nn.LSTM(8, 64)")
    .replace("model(x)", "model(x)[0]")
    .replace("out[out > out.mean().item()]", "out")
)
CATCHING = UNTRACEABLE.replace(
    "        return out[out > out.mean().item()].square()",
    """        try:
            out = out * out.mean().item()
        except Exception:
            pass
        return out.square()""",
)
UNEVEN = UNTRACEABLE.replace("out[out > out.mean().item()]", "out").replace(
    "    def dataset",
    """    def collate(self, samples):
        return (torch.ones(len(samples), 1 + int(100 * samples[0][0].abs().sum()), 8),)

    def dataset""",
)
DATA_DEPENDENT = UNTRACEABLE.replace("out[out > out.mean().item()]", "out[x[:, 0] > x.mean().item()]")


CONVOLVING = """
import torch
from torch import nn
from runner import Task

class Waves:
    lengths = LENGTHS
    def __len__(self):
        return len(self.lengths)
    def __getitem__(self, index):
        return torch.ones(1, self.lengths[index])

class Convolving(Task):
    def __init__(self):
        self.model = nn.Sequential(nn.Conv1d(1, 4, 3), nn.ReLU(), nn.ConvTranspose1d(4, 1, 3))
    def dataset(self, split):
        return Waves()
    def collate(self, samples):
        longest = max(sample.shape[1] for sample in samples)
        return torch.stack([nn.functional.pad(sample, (0, longest - sample.shape[1])) for sample in samples])
    def loss(self, model, batch):
        return model(batch).square().sum(), len(batch)

def build():
    return Convolving()
"""


@pytest.fixture(scope="module")
def script():
    """Return scripts/measure/memory.py, which counts the memory of real runs independently of the prediction.

    One thread, because its runs are forks of this process, which would wait forever for missing OpenMP threads.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location("measure_memory", SCRIPT)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]
    torch.set_num_threads(num_threads)


def composed(*args: str, micro: int = 4, file: Path | None = None):
    sizes = (f"micro_batch_size={micro}", f"global_batch_size={2 * micro}")
    return compose(Request((*sizes, *args, "device=cpu"), file))


@pytest.mark.slow
def test_a_budget_recomputes_the_fewest_blocks(script, tmp_path):
    file = tmp_path / "stacked.py"
    file.write_text(STACKED)

    def traced(*args: str):
        return forecast(composed(*args, file=file), script.HERE, [4])[0]

    beside = RankDevice.of(None, script.HERE).overhead_bytes  # memory of libraries, in addition to tensors
    most, least = traced("memory=none").peak.total, traced("memory=checkpoint").peak.total
    counts = []
    for limit in (most, (most + least) // 2, least):
        result = traced("memory=budget", f"memory.limit_gib={(limit + beside) / 2**30!r}")
        assert result.peak.total <= limit
        counts.append(len(result.recompute))
        if limit not in (most, least):
            again = traced("memory=budget", f"memory.recompute={[*result.recompute]}".replace(" ", ""))
            assert again.peak == result.peak
    assert counts[0] == 0 < counts[1] < counts[2] <= 4
    ranks = traced("memory=budget", f"memory.limit_gib={2 * (most + beside) / 2**30!r}", "parallelism=ddp")
    assert len(ranks.recompute) == 1, "gradient buckets also need memory"


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", ["single", "ddp", "fsdp parallelism.evaluation=sharded parallelism.gradients=full"]
)
def test_blocks_are_recomputed_only_if_needed(script, tmp_path, strategy):
    file = tmp_path / "stacked.py"
    file.write_text(STACKED)
    gpus = tuple(Device("cuda", index, "a GPU", f"GPU-{index}", 2**34, capability=(9, 0)) for index in range(4))
    here = replace(script.HERE, devices=gpus)
    args = ("micro_batch_size=4", "global_batch_size=32", "precision=fp32", *f"parallelism={strategy}".split())
    needs = run_in_subprocess(predict_needs, compose(Request(args, file)), here)
    total = make_plan(compose(Request(args, file)), here, needs=needs).memory[0].prediction.total

    def num_recomputed(limit: int) -> int:
        budget = ("memory=budget", f"memory.limit_gib={limit / 2**30!r}")
        (traced,) = forecast(compose(Request((*args, *budget), file)), here, [4])
        return len(traced.recompute)

    assert num_recomputed(total) == 0 < num_recomputed(total - 2**10)


@pytest.mark.slow
def test_checkpointed_blocks_free_converted_weights(script, tmp_path):
    file = tmp_path / "converting.py"
    file.write_text(STACKED)

    def held(*args: str) -> int:
        (traced,) = forecast(composed(*args, "memory=checkpoint", file=file), script.HERE, [4])
        return sum(layer.activations for layer in traced.layers)

    assert held("precision=bf16") <= held("precision=fp32")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "args",
    [
        ("task=gpt", "precision=bf16", "memory=checkpoint"),
        ("task=nmt", "precision=fp32", "optimizer=sgd"),
        ("task=nmt", "task.dropout=0.1", "task.attention_dropout=0.1", "precision=bf16", "memory=checkpoint"),
    ],
    ids=" ".join,
)
def test_predicted_memory_equals_that_of_a_real_run(script, args):
    configuration = composed(*args)
    (traced,) = forecast(configuration, script.HERE, [4])
    assert traced.is_exact
    assert {(traced.phase, 4): traced.peak.total} == run_in_subprocess(script.counted, configuration, [4])


@pytest.mark.slow
def test_predicted_memory_of_a_statistics_phase_is_exact(script):
    configuration = composed(file=SCRIPT.parents[2] / "tests" / "stand_ins" / "task_of_fits.py")
    found = forecast(configuration, script.HERE, [4])
    assert all(traced.is_exact for traced in found)
    real = run_in_subprocess(script.counted, configuration, [4])
    real.pop(("selection", 4))  # depends on the order of the samples, which the script does not shuffle
    assert {(traced.phase, 4): traced.peak.total for traced in found if traced.phase != "selection"} == real


@pytest.mark.parametrize(
    ("device", "precision"), [("cpu", "fp32"), ("cuda", "fp32"), ("cuda", "bf16"), ("cuda", "fp16")]
)
def test_models_that_need_real_weights_are_measured(script, device, precision):
    file = Path(__file__).with_name("task_that_needs_real_weights.py")
    gpu = Device("cuda", 0, "a GPU", "GPU-0", 2**34, capability=(8, 0))
    args = (f"precision={precision}", f"micro_batch_size={NUM_MEASURED}", "global_batch_size=4", "prefetch=none")
    configuration = compose(Request((*args, f"device={device}"), file))
    statistics, first = forecast(configuration, replace(script.HERE, devices=(gpu,)), [NUM_MEASURED])
    assert (statistics.phase, statistics.is_exact) == ("statistics", device == "cpu")
    line = 1 + [text.endswith("# needs real weights") for text in file.read_text().splitlines()].index(True)
    assert (first.phase, first.is_exact) == ("first", False)
    assert first.why_not.startswith(f"{file.name}:{line}: ")
    if device == "cpu":
        real = script.counted(configuration, [NUM_MEASURED])
        assert real == {(traced.phase, NUM_MEASURED): traced.peak.total for traced in (statistics, first)}


def test_the_time_per_sample_excludes_the_first_read(script, tmp_path, monkeypatch):
    file = tmp_path / "read.py"
    file.write_text(STACKED)
    durations, now = chain([100.0, 12.0], repeat(8.0)), [0.0]

    def clock():
        now[0] += next(durations) if clock.is_reading else 0.0
        clock.is_reading = not clock.is_reading
        return now[0]

    clock.is_reading = False
    monkeypatch.setattr(phase_tracer, "time", SimpleNamespace(perf_counter=clock))
    (traced,) = forecast(composed(file=file), script.HERE, [4])
    assert traced.read_s == 2.0
    assert Demand.from_traces([traced], AllocatorSettings()).read_s == 2.0


@pytest.mark.slow
def test_a_coupled_loss_keeps_all_micro_batches(script):
    """The prediction includes the inputs and embeddings of the whole update."""
    file = SCRIPT.parents[2] / "docs" / "examples" / "own_clip.py"
    configuration = composed(file=file)
    (two,) = forecast(configuration, script.HERE, [4])
    assert two.is_exact
    assert {(two.phase, 4): two.peak.total} == run_in_subprocess(script.counted, configuration, [4])
    (eight,) = forecast(composed("global_batch_size=32", file=file), script.HERE, [4])
    assert eight.accumulation_steps == 8
    assert eight.peak.total > two.peak.total


@pytest.mark.slow
def test_predicted_memory_of_several_objectives_is_exact(script):
    file = SCRIPT.parents[2] / "docs" / "examples" / "own_gan.py"
    configuration = composed(file=file)
    (traced,) = forecast(configuration, script.HERE, [4])
    assert {(traced.phase, 4): traced.peak.total} == run_in_subprocess(script.counted, configuration, [4])


@pytest.mark.slow
def test_averaged_weights_need_the_memory_of_weights(script, tmp_path):
    file = tmp_path / "averaged.py"
    file.write_text(STACKED)
    without, averaged = (
        forecast(composed(f"averaging={option}", file=file), script.HERE, [4])[0].peak for option in ("none", "ema")
    )
    assert averaged.optimizer - without.optimizer == without.parameters
    assert averaged.total - without.total == without.parameters


def test_data_dependent_shapes_are_traced_exactly(script, tmp_path):
    file = tmp_path / "above_data.py"
    file.write_text(DATA_DEPENDENT)
    configuration = composed(file=file)
    (traced,) = forecast(configuration, script.HERE, [4])
    assert traced.is_exact
    assert traced.peak.total == script.counted(configuration, [4])["train", 4]


def test_weight_dependent_memory_is_marked_as_inexact(script, tmp_path):
    file = tmp_path / "above.py"
    file.write_text(UNTRACEABLE)
    configuration = composed(file=file, micro=NUM_MEASURED)
    (few,) = forecast(configuration, script.HERE, [NUM_MEASURED])
    line = 1 + UNTRACEABLE.splitlines().index("        return out[out > out.mean().item()].square().sum(), len(x)")
    assert few.why_not.startswith(f"above.py:{line}: aten.")
    assert not few.is_exact
    assert few.peak.total == script.counted(configuration, [NUM_MEASURED])["train", NUM_MEASURED]
    (many,) = forecast(configuration, script.HERE, [100 * NUM_MEASURED])
    assert many.peak.inputs == 100 * few.peak.inputs
    assert many.peak.parameters == few.peak.parameters


def test_retained_tensors_make_the_forecast_inexact(script, tmp_path):
    file = tmp_path / "keeping.py"
    file.write_text(KEEPING)
    (traced,) = forecast(composed(file=file, micro=16), script.HERE, [16])
    assert not traced.is_exact
    assert "keeps 16 KiB" in traced.why_not  # 2 passes of 16 x 128 values


def test_batches_of_different_lengths_are_inexact(script, tmp_path):
    """Only the first batches of a run are traced, and later ones may be longer."""
    file = tmp_path / "uneven.py"
    file.write_text(UNEVEN)
    (traced,) = forecast(composed(file=file, micro=4), script.HERE, [4])
    assert not traced.is_exact
    assert traced.why_not.startswith("batches of 4 take ")


@pytest.mark.parametrize(("name", "lengths", "repeat"), [("same", "[8] * 16", True), ("other", "range(8, 24)", False)])
def test_convolutions_with_repeated_shapes_are_recognized(script, tmp_path, name, lengths, repeat):
    file = tmp_path / f"convolving_{name}_lengths.py"
    file.write_text(CONVOLVING.replace("LENGTHS", lengths))
    (traced,) = forecast(composed(file=file, micro=2), script.HERE, [2])
    assert (traced.model.num_convolutions, traced.model.shapes_repeat) == (2, repeat)


@pytest.mark.parametrize(
    ("name", "task", "why_not"),
    [
        ("catching", CATCHING, "_local_scalar_dense"),  # the operation that cannot be traced
        ("recurrent", RECURRENT, "an LSTM uses a different kernel"),  # torch uses it only for real weights
    ],
)
def test_data_dependent_control_flow_is_measured(script, tmp_path, name, task, why_not):
    file = tmp_path / f"{name}.py"
    file.write_text(task)
    configuration = composed(file=file, micro=NUM_MEASURED)
    (traced,) = forecast(configuration, script.HERE, [NUM_MEASURED])
    assert not traced.is_exact
    assert why_not in traced.why_not
    assert traced.peak.total == script.counted(configuration, [NUM_MEASURED])["train", NUM_MEASURED]


def test_a_model_too_large_to_measure_is_not_predicted(script, tmp_path, monkeypatch):
    monkeypatch.setattr("runner.forecast.memory_forecast.has_room", lambda model: False)
    file = tmp_path / "above_large.py"
    file.write_text(UNTRACEABLE)
    with pytest.raises(NotTraceable):
        forecast(composed(file=file), script.HERE, [4])
    needs = predict_needs(composed(file=file), script.HERE)
    assert needs.demands == {}
    assert needs.why_not


@pytest.mark.slow
def test_tracing_a_large_model_allocates_nothing(script):
    configuration = composed("task=gpt", "task.size=124m", micro=1)
    (traced,), grown = run_in_subprocess(_with_memory, configuration, script.HERE)
    assert traced.peak.parameters == 4 * 124_475_904
    assert traced.peak.optimizer >= 2 * traced.peak.gradients == 2 * traced.peak.parameters
    assert grown < 0.4 * traced.peak.parameters
    assert sum(block.activations for block in traced.blocks) < sum(layer.activations for layer in traced.layers)


@pytest.mark.slow
def test_norms_on_gpus_save_float32_inputs(script, tmp_path):
    """CPU autocast would keep the input, 4 samples of 8 channels of 32 x 32 pixels, in half precision."""
    file = tmp_path / "normed.py"
    file.write_text(NORMED)
    gpu = Device("cuda", 0, "a GPU", "GPU-0", 2**34, capability=(8, 0))
    args = ("precision=bf16", "micro_batch_size=4", "global_batch_size=8", "prefetch=none")
    with_gpu = replace(script.HERE, devices=(gpu,))
    on_gpu, on_cpu = (
        run_in_subprocess(forecast, compose(Request((*args, f"device={device}"), file)), with_gpu, [4])
        for device in ("cuda", "cpu")
    )
    more = sum(layer.activations for layer in on_gpu[0].layers) - sum(layer.activations for layer in on_cpu[0].layers)
    assert more == 2 * 4 * 8 * 32 * 32


class BytesInUse(TorchDispatchMode):
    """Measures the size of all storages after each operation; fsdp frees memory by resizing storages."""

    def __init__(self) -> None:
        super().__init__()
        self.most, self.known = 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # the operation is dispatched again for the local part of this rank
        result = func(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, Tensor) and not isinstance(value, FakeTensor):
                self.add(value)
        there = [storage for known in [*self.known.values()] if (storage := known()) is not None]
        self.most = max(self.most, sum(storage.nbytes() for storage in there))
        return result

    def add(self, tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata  # lint-tests: private: torch has no public identity of a storage
        if key not in self.known:
            self.known[key] = weakref.ref(storage, lambda _: self.known.pop(key, None))


def peak_bytes_of_rank(plan, world) -> int:
    """Return the peak bytes of this rank in two real updates and one gathering of parameters."""
    with ExitStack() as stack:
        parts = assemble(plan, stack, world)
        (phase,) = plan.selected
        fetcher, batch = parts.splits.fetcher("train"), phase.batch
        order = Order(
            64,
            batch.global_batch_size,
            batch.micro_batch_size,
            0,
            shares=batch.shares,
            rank=world.rank % len(batch.shares),
        )
        count = BytesInUse()

        def batches():
            for key in order.from_update(0):
                gc.collect()  # otherwise, uncollected tensors of the last pass may remain
                with _disable_current_modes():  # the dataset is not part of the prediction
                    item = fetcher[key]
                map_tensors(count.add, item.batch)
                yield item

        for weight in parts.bare.parameters():
            if not weight.is_meta:
                count.add(weight.to_local() if isinstance(weight, DTensor) else weight)
        with count:
            work = LossPhase(replace(phase, updates=2, epochs=None), parts, order, Position(phase.name))
            handed = batches()
            for update in (1, 2):
                next(train_updates(work.training, handed, update))
            with parts.parallel.gather_parameters(parts.bare):
                pass
        work.release()
        return count.most


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("strategy", "micro", "steps", "blocks", "above"),
    [
        ("ddp", 4, 1, "true", 1.001),
        ("ddp", 2, 3, "true", 1.001),
        ("fsdp", 4, 1, "true", 1.3),
        ("fsdp", 2, 3, "true", 1.3),
        ("fsdp", 4, 1, "false", 1.3),
        ("fsdp parallelism.gradients=sharded", 2, 3, "true", 1.3),
        ("fsdp parallelism.gradients=sharded parallelism.communicate=bfloat16 precision=bf16", 2, 3, "true", 1.3),
    ],
)
def test_ddp_and_fsdp_need_at_most_the_predicted_memory(script, tmp_path, strategy, micro, steps, blocks, above):
    """The prediction includes buckets, gathered blocks, unsharded gradients and accumulated gradients.

    The prediction is exact for ddp and an upper bound for fsdp, whose peaks do not all coincide.
    """
    file = tmp_path / "wide.py"
    file.write_text(WIDE)
    sizes = (f"micro_batch_size={micro}", f"global_batch_size={2 * micro * steps}", f"task.blocks={blocks}")
    args = (*sizes, "device=cpu", *f"parallelism={strategy} parallelism.world_size=2".split())
    configuration = compose(Request(args, file))
    plan = make_plan(configuration, script.HERE)
    demand = Demand.from_traces(run_in_subprocess(forecast, configuration, script.HERE, [micro]), AllocatorSettings())
    part = rank_part(plan.choices["parallelism"], plan.selected[0])
    thought = predict_memory(demand, micro, replace(plan.ranks[0], overhead_bytes=0), part)
    most = max(run_ranks(lambda world: peak_bytes_of_rank(plan, world), 2))
    assert most <= thought.total + 1024, (most, thought)  # scalars such as the item count are not predicted
    assert thought.total <= above * most, (most, thought)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("micro", "steps", "args"),
    [
        (4, 4, ()),
        (4, 1, ()),  # fewer micro-batches than stages
        (2, 7, ("parallelism.schedule=gpipe",)),
        (4, 4, ("parallelism.split=[5,1]", "precision=bf16")),
    ],
)
def test_pipeline_ranks_need_the_predicted_memory(script, tmp_path, micro, steps, args):
    """These are weights, gradients, states, activations of micro-batches in flight, and received tensors."""
    file = tmp_path / "piped.py"
    file.write_text(PIPED)
    sizes = (f"micro_batch_size={micro}", f"global_batch_size={micro * steps}", "device=cpu")
    configuration = compose(Request((*sizes, "parallelism=pipeline", "parallelism.world_size=2", *args), file))
    needs = run_in_subprocess(predict_needs, configuration, script.HERE)
    plan = make_plan(configuration, script.HERE, needs=needs)
    assert all(each.is_exact for each in plan.memory)
    first, last = (stage.at(micro).work.received for stage in needs.demands["train"].stages)
    assert first == last > 0, "activations of the micro-batch in one direction, their gradients in the other"
    thought = [each.prediction.total - each.prediction.parts["libraries"] for each in plan.memory]
    counted = run_ranks(lambda world: peak_bytes_of_rank(plan, world), 2)
    assert thought == [pytest.approx(most, rel=0.02) for most in counted]
    if "parallelism.split=[5,1]" in args:
        assert thought[0] > 2 * thought[1], "not an equal part of the model"


@pytest.mark.slow
def test_a_pipeline_has_a_stage_for_each_started_rank(script, tmp_path):
    file = tmp_path / "piped.py"
    file.write_text(PIPED)
    configuration = compose(Request(("global_batch_size=8", "device=cpu", "parallelism=pipeline"), file))
    ranks = [RankDevice.of(None, script.HERE)] * 3
    needs = run_in_subprocess(predict_needs, configuration, script.HERE, False, ranks)
    assert len(needs.demands["train"].stages) == 3
    assert all(each.is_exact for each in make_plan(configuration, script.HERE, ranks, needs).memory)


@pytest.mark.slow
def test_interpolated_memory_is_an_upper_bound(script, tmp_path):
    """Accumulated gradients need no memory if the whole share is one micro-batch."""
    file = tmp_path / "wide.py"
    file.write_text(WIDE)
    configuration = compose(Request(("micro_batch_size=auto", "global_batch_size=32", "device=cpu"), file))
    small, middle, whole = forecast(configuration, script.HERE, [1, 12, 32])
    assert (small.accumulation_steps, middle.accumulation_steps, whole.accumulation_steps) == (2, 2, 1)
    thought = Demand.from_traces([small, whole], AllocatorSettings()).at(12).peak.total
    assert middle.peak.total <= thought <= 1.2 * middle.peak.total
    assert Demand.from_traces([whole], AllocatorSettings()).at(12).peak.total >= middle.peak.total


@pytest.mark.parametrize("length", ["updates=500", "epochs=1"])
def test_a_scheduler_longer_than_the_trace_is_supported(script, tmp_path, length):
    file = tmp_path / "wide.py"
    file.write_text(WIDE)
    schedule = ("scheduler=linear", "scheduler.warmup=4", length)
    (constant,) = forecast(composed(*schedule[2:], "scheduler=constant", file=file), script.HERE, [4])
    (traced,) = forecast(composed(*schedule, file=file), script.HERE, [4])
    assert traced.peak == constant.peak


@pytest.mark.slow
def test_only_kernel_launches_are_counted(script, tmp_path):
    """Four blocks of two linear layers and a GELU, a last layer, a square and two sums, on 3-dimensional batches."""
    file = tmp_path / "counted.py"
    file.write_text(STACKED)
    args = ("micro_batch_size=4", "global_batch_size=8", "device=cpu", "optimizer.kernel=fused", "precision=fp32")
    (traced,) = forecast(compose(Request(args, file)), script.HERE, [4])
    (single,) = forecast(compose(Request((*args, "global_batch_size=4"), file)), script.HERE, [4])
    forward = 4 * 3 + 1 + 3
    assert 3 * forward - 9 <= traced.work.launches <= 4 * forward, (
        "the backward pass of a linear layer has two products, and sums"
    )
    of_two = 2 * single.work.launches + 18  # the second pass adds to 18 gradients
    assert traced.work.launches == of_two // 2, "average number of kernels of a pass"
    assert 1 <= traced.step.launches < 18, "a fused optimizer launches one kernel, besides those of the norm"


@pytest.mark.slow
def test_the_peak_equals_the_maximum_of_the_events(script):
    (traced,) = forecast(composed("task=gpt"), script.HERE, [2])
    alive, now, most = {}, 0, 0
    for block, size in traced.events:
        now += size or -alive.pop(block)
        alive |= {block: size} if size else {}
        most = max(most, now)
    assert most == traced.peak.total
    assert replace(traced.peak, activations=0).total == most - traced.peak.activations


def _with_memory(configuration, inventory):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = forecast(configuration, inventory, [1])
    return result, 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
