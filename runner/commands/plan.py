"""`accel-run plan`: show the plan of a run with reasons, predicted memory and estimated time."""

from __future__ import annotations

import shlex
from functools import cache
from typing import TYPE_CHECKING

from runner.base.secret import sanitize
from runner.base.text import format_table, wrap_for_terminal
from runner.commands.arguments import SETTINGS_HELP, read, teller
from runner.config.config_files import facts_of_profiles
from runner.config.configuration import compose
from runner.config.request import merge_overrides

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from runner.config.configuration import Configuration
    from runner.plan.inventory import Inventory
    from runner.plan.memory_fit import Needs
    from runner.plan.prediction_text import FittingChange
    from runner.plan.run_plan import Plan

HELP = f"""usage: accel-run plan [key=value ...]

Shows every value of the run with its reason, the predicted memory, and the estimated time of an update, without
training. With a hardware profile it plans for that machine, even if it is not this one. If the run would not fit, it
lists settings that would. Exits with 78 and lists all problems if the configuration is invalid.

{SETTINGS_HELP}
examples
  accel-run plan
  accel-run plan +hardware=t4
  accel-run plan +hardware=t4 task.size=124m global_batch_size=256
"""


def run(argv: list[str]) -> int:
    """Print the plan."""
    from runner.plan.planner import LISTED, inventory_for, make_plan
    from runner.plan.run_plan import rank_table

    configuration = compose(read(argv).request)
    inventory, whose = inventory_for(configuration)
    make_plan(configuration, inventory)  # report invalid settings before importing torch for the trace
    tell = teller("plan")
    on_wait = cache(lambda: tell("tracing the model on fake tensors; a large model takes up to a minute"))
    needs = _needs(configuration, inventory, on_wait)
    plan = make_plan(configuration, inventory, needs=needs)
    memory, changes = _memory(configuration, inventory, plan, needs, on_wait)
    print(f"plan for {whose}: {plan.device_name}")
    parts = [
        "\n".join(map(str, plan.selected)) if plan.own_keys else str(plan.batch),
        "\n".join(rank_table(plan)) if plan.world_size > 1 else "",
        "\n".join(needs.layout) if plan.batch.stages > 1 else "",
        "\n".join(memory),
        table([(key, shown(value), plan.reason(key)) for key, value in plan.values().items()])
        + "".join(f"\nnote: {note.removesuffix(LISTED)}" for note in plan.notes),
        f"next: {command(configuration, changes[0].words if changes else ())}",
    ]
    print(wrap_for_terminal(sanitize("\n\n".join(filter(None, parts)))))
    return 0


def _needs(configuration: Configuration, inventory: Inventory, on_wait: Callable[[], object]) -> Needs:
    """Return the resource demand of the run, traced in a subprocess."""
    from runner.launch.traced_demand import needs_in_subprocess

    return needs_in_subprocess(configuration, inventory, alternatives=True, on_wait=on_wait)


def _memory(
    configuration: Configuration, inventory: Inventory, plan: Plan, needs: Needs, on_wait: Callable[[], object]
) -> tuple[list[str], Sequence[FittingChange]]:
    """Return the lines about memory and time, and changes that would fit if the plan does not."""
    from runner.plan.prediction_text import peaks_of_ranks, sheet

    profiles = [configuration.hardware, *facts_of_profiles(configuration.request.config_dir).values()]
    changes: Sequence[FittingChange] = ()
    untried: Sequence[tuple[str, ...]] = ()
    if not all(each.prediction.fits for each in plan.memory):
        from runner.forecast.remedies import find_changes
        from runner.host.subprocesses import run_in_subprocess

        changes, untried = run_in_subprocess(
            find_changes, configuration, inventory, plan, needs, profiles, on_wait=on_wait
        )
    return sheet(plan, needs, peaks_of_ranks(plan, profiles), changes, untried), changes


def command(configuration: Configuration, changes: Sequence[str] = ()) -> str:
    """Return the command that trains according to the plan, with these changes."""
    request = configuration.request
    argv = [arg for arg in merge_overrides(request.overrides, changes) if not arg.startswith("--")]
    if request.task_file:
        argv += ["--task", str(request.task_file)]
    if request.config_dir:
        argv += ["--config-dir", str(request.config_dir)]
    return shlex.join(["accel-run", "train", *argv])


def shown(value: object) -> str:
    """Return a value as it would be typed."""
    if value is None:
        return "null"
    return (
        str(value).lower()
        if isinstance(value, bool)
        else str(value).replace(" ", "")
        if isinstance(value, list)
        else str(value)
    )


def table(rows: list[tuple[str, str, str]]) -> str:
    """Return three aligned columns."""
    return "\n".join(format_table(rows, widest={1: 24}))
