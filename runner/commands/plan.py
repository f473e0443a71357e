"""`accel-run plan`: what would be done here, or on the machine of a profile, and why."""

from __future__ import annotations

from runner.base.secret import fit_to_show
from runner.commands.arguments import SETTINGS_HELP, read

HELP = f"""usage: accel-run plan [key=value ...]

Shows every value of the run with its reason, and stops. With a hardware profile it plans for that machine,
also when it is not here; without one, for this machine. Exit 78 with all problems when something cannot be.

{SETTINGS_HELP}
examples
  accel-run plan
  accel-run plan +hardware=t4
  accel-run plan global_batch_size=64 micro_batch_size=16
"""


def run(words: list[str]) -> int:
    """Print the plan."""
    from runner.base.configuration import compose
    from runner.plan.plan import inventory_for, make_plan, rank_table, wants_footprint

    configuration = compose(read(words).request)
    inventory, whose = inventory_for(configuration)
    need = None
    if wants_footprint(configuration, inventory):
        from runner.engine.footprint import footprint

        need = footprint(configuration, inventory)
    plan = make_plan(configuration, inventory, footprint=need)
    print(f"plan for {whose}: {plan.device_name}")
    print("\n".join(map(str, plan.selected)) if plan.own_keys else str(plan.batch), end="\n\n")
    if plan.world_size > 1:
        print("\n".join(rank_table(plan)), end="\n\n")
    if plan.batch.stages > 1:
        from runner.engine.footprint import layout

        print(layout(configuration, inventory, plan), end="\n\n")
    print(fit_to_show(table([(key, shown(value), plan.reason(key)) for key, value in plan.values().items()])))
    for note in plan.notes:
        print(fit_to_show(f"note: {note}"))
    return 0


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
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    return "\n".join(f"{key:<{widths[0]}}  {value:<{min(widths[1], 24)}}  {why}".rstrip() for key, value, why in rows)
