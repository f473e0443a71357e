"""What training a task takes, and which layers a pipeline would put where: found on the CPU, for any machine."""

from __future__ import annotations

import dataclasses
import warnings
from contextlib import ExitStack, suppress

from torch import Tensor

from runner.axes.optimizer import OPTIMIZERS, expected_state_bytes, is_under
from runner.base import partition
from runner.base.batch import map_tensors
from runner.base.choice import make
from runner.base.configuration import Choice, Configuration
from runner.base.order import Micro
from runner.distributed.layers import measured, noting_kept, weighed
from runner.distributed.placing import Placement, Wanted, placement
from runner.engine.assemble import assemble
from runner.engine.tasks import explained
from runner.plan.inventory import Inventory
from runner.plan.plan import Plan, make_plan
from runner.plan.strategy import Footprint

SAMPLES = 2


def footprint(configuration: Configuration, inventory: Inventory) -> Footprint:
    """Return what the first phase that trains takes in float32; half formats take less.

    Builds the task and computes, so it belongs into a process of its own. Raises what the task raises.
    """
    plan = make_plan(_alone(configuration), dataclasses.replace(inventory, devices=()))
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parts = assemble(plan, stack)
        phase = next((phase for phase in plan.selected if phase.kind == "train"), None)
        model = parts.bare
        weights = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
        if phase is None:
            return Footprint(weights, 0, 0, 0)
        parts.task.begin_phase(phase.name)
        trained = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
        if phase.trains is not None:
            trained = [pair for pair in trained if any(is_under(pair[0], prefix) for prefix in phase.trains)]
        optimizer = make(OPTIMIZERS, phase.optimizer.function, trained, **phase.optimizer.options)
        fetcher = parts.fetcher("train")
        count = min(SAMPLES, len(fetcher))
        batch = fetcher[Micro(0, list(range(count)), last=True)].batch
        lasting: list[Tensor] = [*model.parameters(), *model.buffers()]
        map_tensors(lasting.append, batch)
        loss = parts.task.losses.get(phase.name, parts.task.loss)
        with (
            explained(parts.source, "finding out what the model takes"),
            noting_kept(lasting) as kept,
            parts.precision.forward(),
        ):
            total, _ = loss(parts.model, batch)
        del total
        try:
            num_layers: int | None = len(parts.task.layers())
        except NotImplementedError:
            num_layers = None
        blocks = [sum(weight.nbytes for weight in block.parameters()) for block in parts.task.blocks()]
        return Footprint(
            weights=weights,
            gradients=sum(weight.nbytes for _, weight in trained),
            state=expected_state_bytes(optimizer),
            activations=sum(kept.values()) // count,
            largest=max(blocks, default=weights),
            num_layers=num_layers,
        )


def layout(configuration: Configuration, inventory: Inventory, plan: Plan) -> Placement:
    """Return which layers a pipeline would put on which device of the plan, measured on the CPU.

    Raises ConfigError where the layers do not fit, TaskFault where the task does not tell them.
    """
    options = plan.choices["parallelism"].options
    count = plan.world_size
    chunks = int(options["chunks"]) if options["schedule"] == "interleaved" else 1
    micro = plan.batch.micro_batch_size
    wanted = Wanted(
        options["schedule"], plan.batch.accumulation_steps, options["split"], options["balance"], chunks, samples=micro
    )
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parts = assemble(make_plan(_alone(configuration), dataclasses.replace(inventory, devices=())), stack)
        with explained(parts.source, "layers"):
            layers = parts.task.layers()
        costs = weighed(parts.bare, layers)
        with suppress(NotImplementedError):
            inputs = parts.task.example()
            costs = measured(parts.bare, layers, inputs, scale=micro / max(1, len(inputs[0])), repeats=1)
    devices = [
        partition.Device(rank.memory_bytes // chunks, 1.0, f"rank {number} ({rank.device})")
        for number, rank in enumerate(plan.ranks)
    ]
    return placement(costs, devices * chunks, wanted, count)


def _alone(configuration: Configuration) -> Configuration:
    """Return the configuration of one process on the CPU."""
    choices = {**configuration.choices, "parallelism": Choice("single", "single", {})}
    settings = dataclasses.replace(configuration.settings, device="cpu", micro_batch_size="auto")
    return dataclasses.replace(configuration, choices=choices, settings=settings, sources={})
