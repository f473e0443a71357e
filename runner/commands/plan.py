"""`accel-run plan`: show the plan of a run with reasons, predicted memory and time."""

from __future__ import annotations

import shlex
from functools import cache
from typing import TYPE_CHECKING

from runner.base.secret import sanitize
from runner.base.text import format_table, wrap_for_terminal
from runner.commands.arguments import SETTINGS_HELP, parse_arguments, progress_printer
from runner.config.config_files import profile_facts
from runner.config.configuration import compose
from runner.config.request import format_value, merge_overrides

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from runner.config.configuration import Configuration
    from runner.plan.inventory import Inventory
    from runner.plan.memory_fit import MemoryNeeds
    from runner.plan.prediction_text import FittingChange
    from runner.plan.run_plan import Plan

HELP = f"""usage: accel-run plan [key=value ...]

Shows every value of the run with its reason, the predicted memory, and the predicted time of an update, without
training. With a hardware profile it plans for that machine, even if it is not this one. If the run would not fit, it
lists settings that would. To predict memory and time, it runs the task's code on fake tensors. Exits with 78 and lists
all problems if the configuration is invalid.

{SETTINGS_HELP}
examples
  accel-run plan
  accel-run plan +hardware=t4
  accel-run plan +hardware=t4 task.size=124m global_batch_size=256
"""


def run(argv: list[str]) -> int:
    from runner.plan.planner import SEE_PLAN, make_plan, planning_inventory
    from runner.plan.run_plan import format_rank_table

    configuration = compose(parse_arguments(argv).request)
    inventory, machine = planning_inventory(configuration)
    make_plan(configuration, inventory)  # report invalid settings before importing torch for the trace
    from runner.forecast.demand import trace_memory_needs

    print_progress = progress_printer("plan")
    on_wait = cache(lambda: print_progress("tracing the model on fake tensors; a large model takes up to a minute"))
    demand = trace_memory_needs(configuration, inventory, alternatives=True, on_wait=on_wait)
    plan = make_plan(configuration, inventory, needs=demand)
    memory_lines, changes = _predict_memory(configuration, inventory, plan, demand, on_wait)
    title = f"plan for {machine}: {plan.device_name}"
    rows = [(key, format_value(value), plan.reason(key)) for key, value in plan.values().items()]
    batches = "\n".join(map(str, plan.selected)) if plan.phase_keys else str(plan.batch)
    sections = [
        f"{title}\n{batches}",
        "\n".join(format_rank_table(plan)) if plan.world_size > 1 else "",
        "\n".join(demand.layout) if plan.batch.stages > 1 else "",
        "\n".join(memory_lines),
        "\n".join(format_table(rows, widest={1: 24}))
        + "".join(f"\nnote: {note.removesuffix(SEE_PLAN)}" for note in plan.notes),
        f"next: {train_command(configuration, changes[0].overrides if changes else ())}",
    ]
    print(wrap_for_terminal(sanitize("\n\n".join(filter(None, sections)))))
    return 0


def _predict_memory(
    configuration: Configuration, inventory: Inventory, plan: Plan, demand: MemoryNeeds, on_wait: Callable[[], object]
) -> tuple[list[str], Sequence[FittingChange]]:
    from runner.plan.prediction_text import format_prediction
    from runner.plan.update_time import find_rank_rates

    profiles = [configuration.hardware, *profile_facts(configuration.request.config_dir).values()]
    changes: Sequence[FittingChange] = ()
    untried: Sequence[tuple[str, ...]] = ()
    if not all(rank.prediction.fits for rank in plan.memory):
        from runner.forecast.remedies import find_changes
        from runner.host.subprocesses import run_in_subprocess

        changes, untried = run_in_subprocess(
            find_changes, configuration, inventory, plan, demand, profiles, on_wait=on_wait
        )
    return format_prediction(plan, demand, find_rank_rates(plan, profiles), changes, untried), changes


def train_command(configuration: Configuration, changes: Sequence[str] = ()) -> str:
    """Return the command that trains with this configuration and these additional overrides."""
    request = configuration.request
    argv = [arg for arg in merge_overrides(request.overrides, changes) if not arg.startswith("--")]
    if request.task_file:
        argv += ["--task", str(request.task_file)]
    if request.config_dir:
        argv += ["--config-dir", str(request.config_dir)]
    return shlex.join(["accel-run", "train", *argv])
