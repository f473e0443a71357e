"""Predicted memory is that of the real run, to the byte, and costs none."""

import importlib.util
import resource
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from runner.base.configuration import Request, compose
from runner.engine.forecast import FEW, forecast
from runner.launch.apart import apart
from runner.plan.ranks import RankDevice

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
DATA_DEPENDENT = UNTRACEABLE.replace("out[out > out.mean().item()]", "out[x[:, 0] > x.mean().item()]")


@pytest.fixture(scope="module")
def script():
    """Return scripts/measure/memory.py, whose count of the real run knows nothing of the prediction."""
    spec = importlib.util.spec_from_file_location("measure_memory", SCRIPT)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def composed(*words: str, micro: int = 4, file: Path | None = None):
    sizes = (f"micro_batch_size={micro}", f"global_batch_size={2 * micro}")
    return compose(Request((*words, *sizes, "device=cpu"), file))


def test_a_budget_is_kept_with_no_more_blocks_than_it_takes(script, tmp_path):
    file = tmp_path / "stacked.py"
    file.write_text(STACKED)

    def traced(*words: str):
        return forecast(composed(*words, file=file), script.HERE, [4])[0]

    beside = RankDevice.of(None, script.HERE).overhead_bytes  # what is not tensors
    most, least = traced("memory=none").peak.total, traced("memory=checkpoint").peak.total
    counts = []
    for limit in (most, (most + least) // 2, least):
        found = traced("memory=budget", f"memory.limit_gib={(limit + beside) / 2**30!r}")
        assert found.peak.total <= limit
        counts.append(len(found.recompute))
        again = traced("memory=budget", f"memory.recompute={[*found.recompute]}".replace(" ", ""))
        assert again.peak == found.peak
    assert counts[0] == 0 < counts[1] < counts[2] <= 4


@pytest.mark.parametrize(
    "words",
    [
        ("task=gpt", "precision=bf16", "memory=checkpoint"),
        ("task=nmt", "precision=fp32", "optimizer=sgd"),
    ],
    ids=" ".join,
)
def test_prediction_is_the_count_of_the_real_run(script, words):
    configuration = composed(*words)
    (traced,) = forecast(configuration, script.HERE, [4])
    assert traced.is_exact
    assert {(traced.phase, 4): traced.peak.total} == apart(script.counted, configuration, [4])


def test_shapes_that_depend_on_data_alone_are_followed(script, tmp_path):
    file = tmp_path / "above_data.py"
    file.write_text(DATA_DEPENDENT)
    configuration = composed(file=file)
    (traced,) = forecast(configuration, script.HERE, [4])
    assert traced.is_exact
    assert traced.peak.total == script.counted(configuration, [4])["train", 4]


def test_what_depends_on_weights_is_measured_and_says_so(script, tmp_path):
    file = tmp_path / "above.py"
    file.write_text(UNTRACEABLE)
    configuration = composed(file=file, micro=FEW)
    (few,) = forecast(configuration, script.HERE, [FEW])
    line = 1 + UNTRACEABLE.splitlines().index("        return out[out > out.mean().item()].square().sum(), len(x)")
    assert few.why_not.startswith(f"above.py:{line}: aten._local_scalar_dense")
    assert not few.is_exact
    assert few.peak.total == script.counted(configuration, [FEW])["train", FEW]
    (many,) = forecast(configuration, script.HERE, [100 * FEW])
    assert many.peak.inputs == 100 * few.peak.inputs
    assert many.peak.parameters == few.peak.parameters


def test_of_a_model_too_large_to_be_measured_the_parameters_are_known(script, tmp_path, monkeypatch):
    monkeypatch.setattr("runner.engine.forecast.has_room", lambda model: False)
    file = tmp_path / "above_large.py"
    file.write_text(UNTRACEABLE)
    (traced,) = forecast(composed(file=file), script.HERE, [4])
    assert not traced.is_exact
    assert "activations are not counted" in traced.why_not
    weights = 4 * (8 * 512 + 512 + 512 + 1)
    assert (traced.peak.parameters, traced.peak.gradients) == (weights, weights)
    assert traced.peak.total == sum(size for _, size in traced.events) == 4 * weights + 4 * 4


def test_nothing_is_allocated_for_a_model_of_124_million_parameters(script):
    configuration = composed("task=gpt", "task.size=124m", micro=1)
    (traced,), grown = apart(_with_memory, configuration, script.HERE)
    assert traced.peak.parameters == 4 * 124_475_904
    assert traced.peak.optimizer >= 2 * traced.peak.gradients == 2 * traced.peak.parameters
    assert grown < 0.4 * traced.peak.parameters
    assert sum(block.activations for block in traced.blocks) < sum(layer.activations for layer in traced.layers)


def test_peak_is_that_of_the_events(script):
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
    found = forecast(configuration, inventory, [1])
    return found, 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
