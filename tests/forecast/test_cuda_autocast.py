"""Fake tensors on a CPU are cast to the same dtypes as under CUDA autocast."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from runner.forecast.cuda_autocast import CudaAutocastMode
from runner.forecast.fake_mode import AllocationRecorder, FakeRun

HALF = torch.bfloat16


def without_autocast(x, weight):
    with torch.autocast(x.device.type, enabled=False):
        return x @ weight


@pytest.fixture
def run():
    run = FakeRun(AllocationRecorder())
    with run, torch.no_grad():
        yield run


def make_weight(run, dtype=torch.float32):
    with run.fake_parameters():
        return nn.Linear(8, 8, bias=False, dtype=dtype).weight


@pytest.mark.parametrize(
    ("call", "dtype"),
    [
        pytest.param(F.linear, HALF, id="linear"),
        pytest.param(lambda x, weight: F.relu(x @ weight), HALF, id="dtype of the input"),
        pytest.param(lambda x, weight: F.layer_norm(x @ weight, (8,)), torch.float32, id="norm"),
        pytest.param(lambda x, weight: F.softmax(x @ weight, -1), torch.float32, id="softmax"),
        pytest.param(lambda x, weight: (x @ weight).sum(0), torch.float32, id="sum"),
        pytest.param(lambda x, weight: (x @ weight).sum(0, dtype=torch.float64), torch.float64, id="requested dtype"),
        pytest.param(lambda x, weight: x.double() @ weight.double(), torch.float64, id="float64"),
        pytest.param(without_autocast, torch.float32, id="disabled"),
    ],
)
def test_results_have_the_dtype_of_cuda_autocast(run, call, dtype):
    x, weight = torch.ones(4, 8), make_weight(run)
    with CudaAutocastMode(), torch.autocast("cpu", HALF):
        result = call(x, weight)
    assert run.is_fake(result)
    assert result.dtype == dtype


@pytest.mark.parametrize("dtype", [None, torch.float32])
@pytest.mark.parametrize("of_module", [torch, F, torch.Tensor])
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize(("half", "num_copies"), [(torch.float16, 0), (torch.bfloat16, 1)])
def test_softmax_copies_bfloat16_but_not_float16(run, name, of_module, dtype, half, num_copies):
    x = make_weight(run, half)
    run.recorder = AllocationRecorder()
    with CudaAutocastMode(), torch.autocast("cpu", half):
        result = getattr(of_module, name)(x, dim=-1, dtype=dtype)
    assert result.dtype == torch.float32
    assert [block.size for block in run.recorder.blocks] == [result.nbytes] * (1 + num_copies)


def test_softmax_has_the_requested_dtype(run):
    with CudaAutocastMode(), torch.autocast("cpu", torch.float16):
        assert F.log_softmax(make_weight(run, torch.float16), -1, dtype=torch.float64).dtype == torch.float64
