"""Single operations on a GPU: memory, generators, copies, attention kernels and data workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from runner.axes.attention import refusal_reason
from runner.axes.prefetch import none, stream
from runner.base.accelerator import get_accelerator, torch_devices
from runner.base.batch import MicroBatch
from runner.base.loaded_torch import cuda_is_initialized, is_stand_in, torch_uuids
from runner.base.oom_errors import find_oom_cause
from runner.base.sample_rng import seeded_generators
from runner.durable.safetensors_writer import HostBuffer
from runner.engine.update.oom_report import measure_memory
from runner.engine.update.oom_retry import UpdateSnapshot
from runner.monitor.gpu_driver import open_driver
from runner.monitor.nvml import strip_uuid_prefix
from runner.tensors.async_copy import start_copy
from runner.tensors.global_rng import random_state, restore_random_state
from runner.tools.doctor.contact_checks import KERNELS, output_and_gradients

pytestmark = pytest.mark.gpu
MIB = 2**20
DEVICES = range(torch.cuda.device_count())


@pytest.fixture(params=DEVICES or [0])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Each GPU in turn, as the current device."""
    with torch.cuda.device(request.param):
        yield torch.device("cuda", request.param)


# ---------------------------------------------------------------- memory


def test_memory_in_use_equals_the_size_of_the_tensors(device: torch.device) -> None:
    accelerator = get_accelerator(device)
    accelerator.empty_cache()
    accelerator.reset_peak_memory()
    before, memory = accelerator.current_memory(), accelerator.free_memory()
    assert before is not None
    assert memory is not None
    tensor = torch.empty(64 * MIB, dtype=torch.uint8, device=device)
    now, left = accelerator.current_memory(), accelerator.free_memory()
    assert now is not None
    assert left is not None
    assert now.allocated - before.allocated == tensor.nbytes
    assert now.reserved >= now.allocated
    assert memory.free - left.free == now.reserved - before.reserved
    del tensor
    accelerator.empty_cache()
    assert accelerator.current_memory() == before
    assert accelerator.peak_memory() == now
    accelerator.reset_peak_memory()
    assert accelerator.peak_memory() == before


def test_total_memory_matches_the_driver(device: torch.device) -> None:
    accelerator = get_accelerator(device)
    memory, total = accelerator.free_memory(), accelerator.total_bytes()
    assert memory is not None
    assert total is not None
    assert memory.total == pytest.approx(total, rel=0.02)
    assert accelerator.memory_stats()["reserved_bytes.all.current"] >= 0
    assert "memory" in accelerator.memory_table().lower()


def test_a_memory_limit_is_enforced(device: torch.device) -> None:
    accelerator, total = get_accelerator(device), torch.cuda.get_device_properties(device).total_memory
    try:
        assert accelerator.limit_memory(0.1)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(total // 5, dtype=torch.uint8, device=device)
    finally:
        accelerator.limit_memory(1.0)


def test_out_of_memory_is_detected_and_explained(device: torch.device) -> None:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(1 << 44, dtype=torch.uint8, device=device)
    shortage = find_oom_cause(caught.value)
    assert shortage is not None
    assert shortage.side == "device"
    result = measure_memory(shortage, device, "", 4, "")
    memory = get_accelerator(device).free_memory()
    assert memory is not None
    assert result.total_bytes == memory.total


def test_device_properties_match_those_of_torch() -> None:
    for index, known in enumerate(torch_devices()):
        accelerator = get_accelerator(torch.device("cuda", index))
        assert accelerator.name() == known.name
        assert accelerator.uuid() == known.uuid
        assert accelerator.capability() == known.capability
    assert torch_uuids() == [known.uuid for known in torch_devices()]
    assert cuda_is_initialized()


def test_the_driver_and_torch_report_the_same_properties(device: torch.device) -> None:
    """Compare NVML, which the monitor and the plan read, with torch: name, memory, UUID, capability and PCI address."""
    known = list(torch_devices())[device.index]
    properties: Any = torch.cuda.get_device_properties(device)
    nvml = pytest.importorskip("pynvml")
    with open_driver() as driver:
        if not driver.gpus:
            pytest.skip(driver.why_not)
        gpu = driver.find_torch_device(known.uuid)
        assert gpu is not None
        assert strip_uuid_prefix(gpu.uuid) == known.uuid
        assert (gpu.name, gpu.capability) == (known.name, known.capability)
        # lint-tests: measured: the driver reserves some memory
        assert gpu.memory_bytes == pytest.approx(known.memory_bytes, rel=0.02)
        address = nvml.nvmlDeviceGetPciInfo(nvml.nvmlDeviceGetHandleByIndex(gpu.index)).busId  # 00000000:01:00.0
        domain, bus = (int(number, 16) for number in address.split(":")[:2])
        assert (domain, bus) == (properties.pci_domain_id, properties.pci_bus_id)


# ---------------------------------------------------------------- random numbers


def test_the_state_of_generators_is_restored(device: torch.device) -> None:
    tensors, rest = random_state(device)
    first = torch.randn(100, device=device)
    restore_random_state(tensors, rest, device)
    assert torch.equal(torch.randn(100, device=device), first)


def test_seeded_draws_do_not_advance_the_gpu_generator(device: torch.device) -> None:
    accelerator = get_accelerator(device)
    before = accelerator.generator_state()
    assert before is not None
    drawn = []
    for _ in range(2):
        with seeded_generators(1, "sample"):
            drawn.append(torch.randn(8, device=device))
    after = accelerator.generator_state()
    assert after is not None
    assert torch.equal(*drawn)
    assert torch.equal(before, after)


def test_a_repeated_update_draws_the_same_random_numbers(device: torch.device) -> None:
    norm: Any = torch.nn.BatchNorm1d(4)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), norm).to(device)
    beginning = UpdateSnapshot(model, device)
    inputs = torch.randn(8, 4, device=device)
    for _ in range(2):
        beginning.begin()
        model(inputs)
        beginning.check_weights()
        beginning.finish()
    beginning.begin()
    mean = norm.running_mean.clone()
    first = model(inputs), torch.rand(8, device=device)
    assert not beginning.restore()
    assert torch.equal(norm.running_mean, mean)
    assert torch.equal(torch.rand(8, device=device), first[1])


# ---------------------------------------------------------------- copies and data workers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_host_buffer_copies_are_exact(dtype: torch.dtype, device: torch.device) -> None:
    buffer = HostBuffer()
    for shape in ((3,), (17, 5), (1024, 1024)):
        tensor = torch.randint(0, 2, shape, device=device).to(dtype)
        assert torch.equal(buffer.copy(tensor), tensor.cpu())


def test_async_copies_have_the_values_at_the_call(device: torch.device) -> None:
    numbers = torch.arange(4.0, device=device)
    pending = start_copy(numbers)
    numbers += 1
    assert pending.read().tolist() == [0.0, 1.0, 2.0, 3.0]
    assert pending.is_complete()


@pytest.mark.parametrize("prefetch", [none, stream])
def test_a_batch_of_any_structure_is_copied_unchanged(prefetch: Any, device: torch.device) -> None:
    batches = [{"x": (torch.full((5,), number), ["name", 3]), "y": torch.tensor(number)} for number in range(4)]
    result = list(prefetch(device)(iter([MicroBatch(batch, last=True) for batch in batches])))
    for number, item in enumerate(result):
        assert item.batch["x"][0].device == device
        assert item.batch["x"][0].tolist() == [number] * 5
        assert item.batch["x"][1] == ["name", 3]
        assert int(item.batch["y"]) == number


class Numbers(Dataset[Tensor]):
    """Numbers created on the host, or on the GPU, which a forked worker cannot use."""

    def __init__(self, device: str) -> None:
        self.device = device

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((3,), float(index), device=self.device)


@pytest.mark.parametrize("pins", [False, True])
def test_a_worker_forked_after_cuda_initialization_reads_cpu_data(pins: bool, device: torch.device) -> None:
    torch.ones(1, device=device)
    loader = DataLoader(Numbers("cpu"), batch_size=2, num_workers=1, multiprocessing_context="fork", pin_memory=pins)
    read = torch.cat([batch.to(device, non_blocking=pins) for batch in loader])
    assert read[:, 0].tolist() == list(range(8))


def test_a_forked_worker_cannot_use_the_gpu(device: torch.device) -> None:
    """The error gives advice."""
    torch.ones(1, device=device)
    loader = DataLoader(Numbers("cuda"), num_workers=1, multiprocessing_context="fork")
    batches: Any = iter(loader)
    with pytest.raises(RuntimeError, match="forked subprocess"):
        next(batches)
    # lint-tests: private: the traceback keeps the iterator alive, and collecting it waits 5 s
    batches._shutdown_workers()


# ---------------------------------------------------------------- attention


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kernel", sorted(KERNELS, key=lambda name: name != "math"))
def test_attention_kernels_run_unless_there_is_a_refusal_reason(kernel: str, dtype: torch.dtype) -> None:
    where, shape = torch.device("cuda", 0), (1, 2, 64, 64)
    if is_stand_in() and kernel != "math":
        assert isinstance(refusal_reason(kernel, dtype, where), str)
        return  # the stand-in would compute with the math kernel
    inputs = [torch.randn(shape, device=where).to(dtype) for _ in range(3)]
    refuses = ""
    try:
        output_and_gradients(kernel, inputs)
    except RuntimeError as error:
        refuses = str(error)
    assert bool(refuses) == bool(refusal_reason(kernel, dtype, where)), refuses
