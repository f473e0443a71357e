"""Which layers a pipeline would put where: found on the CPU, for any machine."""

from __future__ import annotations

import dataclasses
import warnings
from contextlib import ExitStack, suppress

from runner.base import partition
from runner.base.configuration import Choice, Configuration
from runner.distributed.layers import measured, weighed
from runner.distributed.placing import Placement, Wanted, placement
from runner.engine.assemble import assemble
from runner.engine.tasks import explained
from runner.plan.inventory import Inventory
from runner.plan.plan import Plan, make_plan


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
