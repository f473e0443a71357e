"""Place layers on ranks: measure them, split them into stages, free those of other ranks, and find shared parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runner.base.accelerator import get_accelerator
from runner.base.batch import count_samples, map_tensors
from runner.base.errors import ConfigError, Problem, TaskFault
from runner.distributed.agreement import catch_exception, raise_on_all_ranks
from runner.distributed.layer_costs import LayerCost, estimate_costs, measure_costs, parameter_names
from runner.distributed.rank_grid import RankGrid, new_groups
from runner.distributed.world import World
from runner.host.resources import memory_bytes
from runner.workload import partition

Example = Callable[[], Sequence[Any]]
Weights = Callable[[nn.Module], AbstractContextManager[Any]]


@dataclass(frozen=True)
class PlacementRequest:
    """Constraints for placing layers; see Pipelined.

    samples  samples per micro-batch, to scale costs measured on the example; None: as many as in the example
    """

    schedule: partition.Schedule = "1f1b"
    num_microbatches: int | None = None
    split: Sequence[int] | None = None
    balance: partition.Balance = "memory"
    samples: int | None = None


@dataclass(frozen=True)
class Placement:
    """Assignment of layers to stages; stage s is on rank s.

    devices  device of each stage
    """

    split: partition.Split
    costs: Sequence[LayerCost]
    devices: Sequence[partition.StageDevice]

    def __str__(self) -> str:
        return partition.format_split(
            self.split,
            [cost.name for cost in self.costs],
            [f"{device.name}, {partition.format_mib(device.memory_bytes)}" for device in self.devices],
            [cost.state_bytes() for cost in self.costs],
            [cost.seconds for cost in self.costs],
        )


def place_layers(
    grid: RankGrid,
    model: nn.Module,
    layers: Sequence[nn.Module],
    request: PlacementRequest,
    example: Example | None,
    weights: Weights | None = None,
) -> Placement:
    """Compute the placement, the same on all ranks, from the layer costs of rank 0 and all devices' memory and speed.

    With several copies of the model, a stage has the smallest memory and the lowest speed of its devices.

    weights  context in which a layer has its weights on the CPU, if they are not allocated yet

    Raises ConfigError, on all ranks, if no placement fits.
    """
    costs: list[LayerCost] = []
    world, size = grid.world, grid.copy.world_size
    usable = example if len(layers) >= size else None  # no split exists for fewer layers than stages
    raise_on_all_ranks(
        catch_exception(lambda: costs.extend(_costs(world, model, layers, request, usable, weights))),
        world,
        WHERE,
    )
    mine = {
        "memory": device_bytes(world.device) // (1 if world.device.type == "cuda" else world.num_local_ranks),
        "seconds": math.fsum(cost.seconds for cost in costs),
        "device": str(world.device),
        "costs": [vars(cost) for cost in costs],
    }
    per_rank = world.gather(mine)
    costs = [LayerCost(**cost) for cost in per_rank[0]["costs"]]
    devices = []
    for stage in range(size):
        copies = per_rank[stage::size]
        smallest = min(copies, key=lambda of_rank: of_rank["memory"])
        name = format_stage_device(range(stage, len(per_rank), size), smallest["device"])
        speed = _speed(per_rank[0]["seconds"], max(of_rank["seconds"] for of_rank in copies))
        devices.append(partition.StageDevice(smallest["memory"], speed, name))
    return plan_placement(costs, devices, request)


def format_stage_device(ranks: Sequence[int], device: str) -> str:
    """Return the name of the device of a stage: `rank 0 (cuda:0)`, or with several pipelines `ranks 0, 2 (cuda:0)`."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} ({device})"


def plan_placement(
    costs: Sequence[LayerCost], devices: Sequence[partition.StageDevice], request: PlacementRequest
) -> Placement:
    """Return the placement of layers with these costs on the devices of all stages. Raises ConfigError if none fits."""
    options: dict[str, Any] = {
        "costs": [cost.seconds for cost in costs],
        "memory_bytes": [cost.state_bytes() for cost in costs],
        "devices": devices,
        "activation_bytes": [cost.activation_bytes for cost in costs],
        "in_flight": partition.max_in_flight(request.schedule, len(devices), request.num_microbatches),
    }
    if request.split is not None:
        split = partition.split_from_sizes(request.split, **options)
    else:
        split = partition.split(**options, balance=request.balance)
    if isinstance(split, Problem):
        raise ConfigError(split)
    return Placement(split, costs, devices)


@dataclass(frozen=True)
class Tie:
    """A parameter shared by several stages; only the first of them counts its gradient in the norm."""

    weight: nn.Parameter
    group: Any
    counts_here: bool

    def add(self) -> None:
        """All-reduce the gradient over the ranks that share the parameter, so that their updates stay equal."""
        if self.weight.requires_grad:
            if self.weight.grad is None:
                self.weight.grad = torch.zeros_like(self.weight)
            dist.all_reduce(self.weight.grad, group=self.group)


def shared_parameters(
    grid: RankGrid, model: nn.Module, layers: Sequence[nn.Module], split: partition.Split
) -> list[Tie]:
    """Return the parameters of this stage that other stages share; collective, because it creates groups."""
    holders: dict[str, set[int]] = {}
    weights = dict(model.named_parameters())
    for number, stage in enumerate(split.ranges):
        for layer in stage:
            for name in parameter_names(model, layers[layer]):
                holders.setdefault(name, set()).add(number)
    groups: dict[tuple[int, ...], Any] = {}
    ties = []
    rank, size = grid.copy.rank, grid.copy.world_size
    for name in sorted(name for name, stages in holders.items() if len(stages) > 1):
        stages = tuple(sorted(holders[name]))
        if stages not in groups:
            rows = [[first + stage for stage in stages] for first in range(0, grid.world.world_size, size)]
            groups[stages] = new_groups(rows, grid.world.timeout_s)
        if rank in stages:
            ties.append(Tie(weights[name], groups[stages], rank == stages[0]))
    return ties


def shared_modules(model: nn.Module, layers: Sequence[nn.Module], split: partition.Split) -> list[nn.Module]:
    """Return the modules that belong to layers of several stages, in model order."""
    holders: dict[nn.Module, set[int]] = {}
    for number, stage in enumerate(split.ranges):
        for layer in stage:
            for module in layers[layer].modules():
                holders.setdefault(module, set()).add(number)
    return [module for module in model.modules() if len(holders.get(module, ())) > 1]


def layers_on_all_ranks(world: World, model: nn.Module, layers: Callable[[], Sequence[nn.Module]]) -> list[nn.Module]:
    """Return the layers; raises the same error on all ranks if they are invalid on any rank."""
    result: list[nn.Module] = []
    failure = catch_exception(lambda: result.extend(layers()))
    if isinstance(failure, NotImplementedError):
        failure = TaskFault(str(failure), where=WHERE, fix="use parallelism=fsdp, or define layers() in the task")
    failure = failure or catch_exception(lambda: check_layers(model, result))
    raise_on_all_ranks(failure, world, WHERE)
    return result


def check_layers(model: nn.Module, layers: Sequence[nn.Module]) -> None:
    """Raise if the layers do not cover the model's parameters, or if the model is compiled as a whole."""
    inner = {weight for layer in layers for weight in layer.parameters()}
    lost = [name for name, weight in model.named_parameters() if weight not in inner]
    foreign = inner - set(model.parameters())
    if lost or foreign:
        what = f"lacks {', '.join(lost[:3])}" if lost else f"has {len(foreign)} parameters that the model does not have"
        raise TaskFault(
            f"layers() must contain exactly the parameters of the model, but {what}",
            where=WHERE,
            fix="build the layers from the model's own modules and parameters, not from copies; leave no parameter out",
        )
    if getattr(model, "_compiled_call_impl", None) is not None:
        what = "the whole model cannot be compiled in a pipeline, because each rank calls only some layers"
        raise ConfigError(Problem(what, "compile=default", "use compile=regional or compile=off"))


def free_layers(
    model: nn.Module, own_modules: set[nn.Module], own_parameters: set[nn.Parameter], layer_modules: set[nn.Module]
) -> None:
    """Replace parameters and buffers of other ranks' layers with meta tensors, which frees their memory."""
    meta_weights: dict[Tensor, nn.Parameter] = {}
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None and weight not in own_parameters:
                if weight not in meta_weights:
                    meta_weights[weight] = nn.Parameter(weight.detach().to("meta"), requires_grad=weight.requires_grad)
                module._parameters[name] = meta_weights[weight]
        if module in layer_modules and module not in own_modules:
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to("meta")


def move_buffers(model: nn.Module, layer_modules: set[nn.Module], device: torch.device) -> None:
    """Move the buffers outside of the layers to this rank's device: the loss and predictions may use them."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            # A buffer that is already there is left alone, because fake tensors cannot be moved.
            if module not in layer_modules and buffer is not None and buffer.device != device:
                module._buffers[name] = buffer.to(device)


WHERE = "parallelism=pipeline"


def _costs(
    world: World,
    model: nn.Module,
    layers: Sequence[nn.Module],
    request: PlacementRequest,
    example: Example | None,
    weights: Weights | None,
) -> list[LayerCost]:
    """Measure the layers if possible, else estimate costs from their parameters."""
    place = torch.device("cpu") if weights else next(iter(model.parameters())).device
    if example is None or place != world.device:
        return estimate_costs(model, layers)
    try:
        inputs = map_tensors(lambda tensor: tensor.to(place), tuple(example()))
    except NotImplementedError:
        return estimate_costs(model, layers)
    size = count_samples(inputs)
    scale = (request.samples or size) / max(1, size)
    repeats = 3 if request.balance == "time" else 1
    return measure_costs(
        model,
        layers,
        inputs,
        scale=scale,
        repeats=repeats,
        synchronize=world.synchronize,
        weights=weights or nullcontext,
    )


def _speed(first: float, seconds: float) -> float:
    """Return the speed relative to rank 0; differences up to 10 % are treated as noise."""
    speed = first / seconds if seconds > 0 and first > 0 else 1.0
    return 1.0 if 1 / 1.1 < speed < 1.1 else speed


def device_bytes(device: torch.device) -> int:
    """Return the memory of a torch device in bytes; host memory for the CPU."""
    found = get_accelerator(device).free_memory()
    return memory_bytes() if found is None else found.total
