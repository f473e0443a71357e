"""Multi-device training from Python: `auto_parallelize` selects a strategy, `PipelineParallel` splits a model.

Both work in the calling process, and start no other processes. `accel-run train parallelism=...` starts one process per
device.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist  # noqa: TID251 - to detect an initialized process group
from torch import Tensor, nn

from runner.base.accelerator import current_device, device_count
from runner.base.batch import map_tensors
from runner.base.errors import ConfigError, Problem
from runner.distributed.layer_costs import ADAMW_BYTES, LayerCost, estimate_costs, measure_costs
from runner.distributed.layer_placement import check_layers, device_bytes
from runner.workload import partition

DeviceLike = str | torch.device
Strategy = Literal["single", "replicated", "pipeline"]


@dataclass(frozen=True)
class ParallelChoice:
    """The selected strategy with its reason; `model` is ready to use.

    table  device and memory of each layer of a pipeline; empty for the other strategies
    """

    model: nn.Module
    strategy: Strategy
    reason: str
    table: str = ""

    def __str__(self) -> str:
        return f"{self.strategy}: {self.reason}" + (f"\n{self.table}" if self.table else "")


def auto_parallelize(
    model: nn.Module,
    devices: Sequence[DeviceLike] | None = None,
    *,
    layers: Sequence[nn.Module] | None = None,
    example: Sequence[Any] | None = None,
    capacities: Sequence[int] | None = None,
    num_microbatches: int = 8,
    bytes_per_parameter: float = ADAMW_BYTES,
    headroom: float = 0.1,
    say: Callable[[str], object] = print,
    model_size_mb: float | None = None,
) -> ParallelChoice:
    """Place the model on the available devices, and report the strategy and the reason.

    single: the model fits on one device. replicated: torch.distributed is initialized with several processes; the model
    is wrapped in DistributedDataParallel, and must fit on the device of each process. pipeline: the devices of one
    process are too small for the model, or unequal; the layers are split over them.

    devices              None: all GPUs, or the CPU if there are none. If torch.distributed is initialized, None is the
                         GPU of this process: the device bound to its process group, else torch's current device, else
                         the one with the index LOCAL_RANK
    layers               modules whose composition is the model; None: the children of an nn.Sequential
    example              inputs of one call of the model, from which the memory of activations is measured; None:
                         activations are not included
    capacities           memory of each device in bytes; None: all of it
    bytes_per_parameter  size of a parameter with its gradient and optimizer state; 16: float32 with AdamW
    headroom             fraction of each device's memory that is left free
    model_size_mb        not supported, because the size is computed from the model
    Raises ConfigError if the model does not fit, with the needed and available memory.
    """
    if model_size_mb is not None:
        what = "is computed from the parameters of the model and bytes_per_parameter, so it cannot be passed"
        raise ConfigError(Problem(what, "model_size_mb", "leave it out; to include activations, pass example=(x,)"))
    has_joined = dist.is_available() and dist.is_initialized()
    places = _resolve_devices(_current_rank_device() if devices is None and has_joined else devices)
    limits = [int(size * (1 - headroom)) for size in _capacities(places, capacities)]
    parts = _layers(model, layers)
    need = _needed_bytes(model, example, bytes_per_parameter)
    largest = limits.index(max(limits))
    if has_joined and dist.get_world_size() > 1:
        choice = _replicated_choice(model, places[largest], need, limits[largest])
    elif need <= max(limits) and (parts is None or max(limits) <= 1.1 * min(limits)):
        reason = (
            f"the model needs {_format_size(need)}, and {places[largest]} has {_format_size(limits[largest])} available"
        )
        if len(places) > 1:
            reason += f"; {len(places)} processes, one per device, could each train a replica: use torchrun"
        choice = ParallelChoice(model.to(places[largest]), "single", reason)
    elif len(places) > 1 and parts is not None:
        piped = PipelineParallel(
            model,
            num_microbatches,
            places,
            limits,
            layers=parts,
            example=example,
            bytes_per_parameter=bytes_per_parameter,
        )
        choice = _pipeline_choice(piped, limits, need)
    else:
        raise ConfigError(_does_not_fit(model, places, limits, need, parts))
    say(str(choice))
    return choice


class PipelineParallel(nn.Module):
    """Split the layers of a model over the devices of one process; the output equals that of the unsplit model.

    A batch is split into exactly `num_microbatches` parts along its first dimension, so that devices compute on
    different parts at the same time. The backward pass runs through the devices in reverse order. Pass `parameters()`
    to the optimizer as usual. Layers that depend on the whole batch, such as batch norms, see one part at a time.

    devices    None: all GPUs, or the CPU; a device may be named more than once
    capacities memory of each device in bytes; None: all of it
    layers     modules whose composition is the model; None: the children of an nn.Sequential
    split      number of layers on each device; None: by `balance`
    balance    memory: use an equal fraction of each device's memory; time: minimize the time of the slowest device;
               this requires `example`
    example    inputs of one call with a complete batch, to measure the layers
    Raises ConfigError if there are fewer layers than devices, if the layers do not fit, or for balance='time' with
    neither `split` nor `example`.
    Source: Huang et al., GPipe, NeurIPS 2019.
    """

    def __init__(
        self,
        model: nn.Module,
        num_microbatches: int = 8,
        devices: Sequence[DeviceLike] | None = None,
        capacities: Sequence[int] | None = None,
        *,
        layers: Sequence[nn.Module] | None = None,
        split: Sequence[int] | None = None,
        balance: partition.Balance = "memory",
        example: Sequence[Any] | None = None,
        bytes_per_parameter: float = ADAMW_BYTES,
    ) -> None:
        super().__init__()
        if num_microbatches < 1:
            raise ConfigError(Problem(f"must be at least 1, but is {num_microbatches}", "num_microbatches"))
        self.model = model
        self.num_microbatches = num_microbatches
        self.devices = _resolve_devices(devices)
        self.bytes_per_parameter = bytes_per_parameter
        if balance == "time" and split is None and example is None:
            what = "is required for balance='time', which times the layers with it"
            raise ConfigError(
                Problem(what, "example", "pass example=(x,) with a complete batch, or use balance='memory'")
            )
        parts = _layers(model, layers)
        if parts is None:
            raise ConfigError(_unknown_layers(model))
        check_layers(model, parts)
        self.costs = _costs(model, parts, example, 1 / num_microbatches)
        self.split = self._split(split, balance, _capacities(self.devices, capacities))
        self._stages = [
            DeviceStage([parts[layer] for layer in numbers], device)
            for numbers, device in zip(self.split.ranges, self.devices, strict=True)
        ]
        self._place()
        inner = set(model.modules())
        self._helpers = [layer for layer in parts if layer not in inner]

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return the output of the unsplit model.

        Raises ConfigError if the batch has fewer samples than parts, if the inputs have different numbers of samples,
        or if a tensor of the output has no dimension.
        """
        sizes: list[int] = []
        map_tensors(lambda tensor: sizes.append(tensor.shape[0] if tensor.dim() else 0), [inputs, named])
        size = sizes[0] if sizes else 0
        if size < self.num_microbatches or len(set(sizes)) > 1:
            what = f"needs at least num_microbatches ({self.num_microbatches}) samples, but got {size}"
            fix = f"use num_microbatches={size}" if size else "pass a batch"
            if len(set(sizes)) > 1:
                what = f"needs tensors with the same number of samples, but got {', '.join(map(str, sizes))}"
                fix = "pass tensors with the same first dimension"
            raise ConfigError(Problem(what, "PipelineParallel", fix))
        stops = [size * number // self.num_microbatches for number in range(self.num_microbatches + 1)]
        calls = [_slice_samples(slice(start, stop), inputs, named) for start, stop in pairwise(stops)]
        values: list[Any] = [None] * len(calls)
        # Each tick runs a different micro-batch on each device. GPUs compute while kernels are launched on the others.
        for tick in range(len(calls) + len(self._stages) - 1):
            for number in reversed(range(len(self._stages))):
                part = tick - number
                if 0 <= part < len(calls):
                    inputs, named = calls[part] if number == 0 else ((values[part],), {})
                    values[part] = self._stages[number](inputs, named)
        return _concatenate(values)

    def train(self, mode: bool = True) -> PipelineParallel:
        super().train(mode)
        for helper in self._helpers:
            helper.train(mode)
        return self

    def table(self) -> str:
        """Return a table of the layers: device, bytes with gradients and optimizer state, fraction of the time."""
        limits = [partition.format_mib(size) for size in self.split.memory_bytes]
        return partition.format_split(
            self.split,
            [cost.name for cost in self.costs],
            [f"{device}, {limit}" for device, limit in zip(self.devices, limits, strict=True)],
            [cost.state_bytes(self.bytes_per_parameter) for cost in self.costs],
            [cost.seconds for cost in self.costs],
        )

    def _split(
        self, sizes: Sequence[int] | None, balance: partition.Balance, capacities: Sequence[int]
    ) -> partition.Split:
        options: dict[str, Any] = {
            "costs": [cost.seconds for cost in self.costs],
            "memory_bytes": [cost.state_bytes(self.bytes_per_parameter) for cost in self.costs],
            "devices": [partition.StageDevice(size) for size in capacities],
            "activation_bytes": [cost.activation_bytes for cost in self.costs],
            "in_flight": [self.num_microbatches] * len(capacities),
        }
        if sizes is not None:
            split = partition.split_from_sizes(sizes, **options, where="split")
        else:
            split = partition.split(**options, balance=balance)
        if isinstance(split, Problem):
            raise ConfigError(split)
        return split

    def _place(self) -> None:
        """Move each layer to its device; a shared parameter stays on the device of the first stage that uses it."""
        placed: set[nn.Parameter] = set()
        for stage in self._stages:
            stage.move(placed)
            placed |= stage.parameters


def _slice_samples(
    rows: slice, inputs: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    part: tuple[tuple[Any, ...], dict[str, Any]] = map_tensors(lambda tensor: tensor[rows], (inputs, named))
    return part


class DeviceStage:
    """Layers on one device."""

    def __init__(self, layers: Sequence[nn.Module], device: torch.device) -> None:
        self.layers, self.device = layers, device
        self.borrowed: list[dict[str, nn.Parameter]] = [{} for _ in layers]

    @property
    def parameters(self) -> set[nn.Parameter]:
        """Return the parameters of the layers of this stage."""
        return {weight for layer in self.layers for weight in layer.parameters()}

    def move(self, placed: set[nn.Parameter]) -> None:
        """Move parameters and buffers to the device; parameters placed elsewhere are copied for each micro-batch."""
        for weight in self.parameters - placed:
            weight.data = weight.data.to(self.device)
        for module in (module for layer in self.layers for module in layer.modules()):
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(self.device)
        self.borrowed = [
            {
                name: weight
                for name, weight in layer.named_parameters()
                if weight in placed and weight.device != self.device
            }
            for layer in self.layers
        ]

    def __call__(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        inputs, named = map_tensors(lambda tensor: tensor.to(self.device, non_blocking=True), (inputs, named))
        value: Any = None
        for number, (layer, borrowed) in enumerate(zip(self.layers, self.borrowed, strict=True)):
            args, kwargs = (inputs, named) if number == 0 else ((value,), {})
            if borrowed:
                copies = {name: weight.to(self.device, non_blocking=True) for name, weight in borrowed.items()}
                value = torch.func.functional_call(layer, copies, args, kwargs)
            else:
                value = layer(*args, **kwargs)
        return value


def _concatenate(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, Tensor):
        if not first.dim():
            what = "the output must have the samples along its first dimension, but one of its tensors is a scalar"
            fix = "let the last layer return a value per sample, and sum or average over the batch outside of the model"
            raise ConfigError(Problem(what, "PipelineParallel", fix))
        return torch.cat(list(values))
    if isinstance(first, (tuple, list)):
        joined = [_concatenate(column) for column in zip(*values, strict=True)]
        return type(first)(*joined) if hasattr(first, "_fields") else type(first)(joined)
    if isinstance(first, dict):
        return {key: _concatenate([value[key] for value in values]) for key in first}
    return first


def _current_rank_device() -> list[torch.device]:
    """Return the GPU of this process in the process group, or the CPU."""
    count = device_count()
    if not count:
        return [torch.device("cpu")]
    bound = getattr(dist.group.WORLD, "bound_device_id", None)
    if bound is not None and bound.type == "cuda":
        return [bound]
    # torch's current device is also 0 in a process that has not set one. All such processes would use the same GPU,
    # so LOCAL_RANK decides.
    number = current_device().index or int(os.environ.get("LOCAL_RANK", "0")) % count
    return [torch.device("cuda", number)]


def _resolve_devices(devices: Sequence[DeviceLike] | None) -> list[torch.device]:
    if devices is None:
        devices = [f"cuda:{number}" for number in range(device_count())] or ["cpu"]
    resolved = [torch.device(device) for device in devices]
    if not resolved:
        raise ConfigError(Problem("must name at least one device, but is []", "devices"))
    return [current_device() if str(place) == "cuda" else place for place in resolved]


def _capacities(places: Sequence[torch.device], capacities: Sequence[int] | None) -> list[int]:
    if capacities is not None:
        if len(capacities) != len(places):
            what = f"must have one size for each of the {len(places)} devices, but has {len(capacities)}"
            raise ConfigError(Problem(what, "capacities"))
        return list(capacities)
    return [device_bytes(place) // places.count(place) for place in places]


def _layers(model: nn.Module, layers: Sequence[nn.Module] | None) -> list[nn.Module] | None:
    if layers is not None:
        return list(layers)
    return list(model) if isinstance(model, nn.Sequential) else None


def _costs(
    model: nn.Module, layers: Sequence[nn.Module], example: Sequence[Any] | None, scale: float
) -> list[LayerCost]:
    if example is None:
        return estimate_costs(model, layers)
    place = next(model.parameters(), torch.empty(0)).device
    return measure_costs(model, layers, map_tensors(lambda tensor: tensor.to(place), tuple(example)), scale=scale)


def _needed_bytes(model: nn.Module, example: Sequence[Any] | None, bytes_per_parameter: float) -> int:
    cost = _costs(model, [model], example, 1.0)[0]
    return cost.state_bytes(bytes_per_parameter) + cost.activation_bytes


def _replicated_choice(model: nn.Module, place: torch.device, need: int, limit: int) -> ParallelChoice:
    if need > limit:
        what = f"the model needs {_format_size(need)}, but {place} has {_format_size(limit)} available"
        raise ConfigError(Problem(what, "", "train with accel-run and parallelism=pipeline or parallelism=fsdp"))
    wrapped = nn.parallel.DistributedDataParallel(model.to(place))
    memory = f"the model needs {_format_size(need)}, and {place} has {_format_size(limit)} available"
    reason = f"{dist.get_world_size()} processes; {memory}"
    return ParallelChoice(wrapped, "replicated", reason)


def _pipeline_choice(piped: PipelineParallel, limits: Sequence[int], need: int) -> ParallelChoice:
    rooms = ", ".join(_format_size(limit) for limit in limits)
    why = "it does not fit on a single device" if need > max(limits) else "the devices are unequal"
    reason = f"the model needs {_format_size(need)}, and {why} ({rooms}): layers are split {piped.split}"
    return ParallelChoice(piped, "pipeline", reason, piped.table())


def _does_not_fit(
    model: nn.Module,
    places: Sequence[torch.device],
    limits: Sequence[int],
    need: int,
    layers: Sequence[nn.Module] | None,
) -> Problem:
    if len(places) > 1 and layers is None:
        return _unknown_layers(model)
    what = f"the model needs {_format_size(need)}, but {places[0]} has {_format_size(limits[0])} available"
    return Problem(what, "auto_parallelize", "use more devices, or a smaller model")


def _unknown_layers(model: nn.Module) -> Problem:
    return Problem(
        f"the layers of a {type(model).__name__} are unknown; only nn.Sequential is split automatically",
        "layers",
        "pass layers=[...], the modules in the order in which they are applied",
    )


def _format_size(size: int) -> str:
    return f"{size / 2**30:,.2f} GiB" if size >= 2**30 else partition.format_mib(size)
