"""Compare three real updates with their prediction, and store the corrections for later plans."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import UTC, datetime

from runner.base.errors import AccelRunError
from runner.base.text import sized
from runner.config.config_files import facts_of_profiles
from runner.config.configuration import compose
from runner.config.request import Request, merge_overrides
from runner.host.subprocesses import in_subprocess
from runner.launch.traced_demand import needs_in_subprocess
from runner.plan.corrections import Correction, corrections, keep
from runner.plan.estimate import peaks_of, update_seconds
from runner.plan.inventory import take_inventory
from runner.plan.memory_fit import GIB, predicted
from runner.plan.planner import allow_for, make_plan
from runner.tools.measure.compare import CompareLimits, Comparison
from runner.tools.measure.comparison_result import Variant
from runner.tools.measure.measuring_place import of_one_rank

UPDATES = 3


def probe(request: Request, say: Callable[[str], None]) -> list[str]:
    """Run three updates as one rank does; return the comparison as lines.

    Raises AccelRunError if the updates fail or nothing can be stored.
    """
    configuration = compose(request)
    allow_for(configuration)
    inventory = in_subprocess(take_inventory)
    request, cores, notes = of_one_rank(request, make_plan(configuration, inventory), inventory)
    configuration = compose(request)
    say("traces the model")
    needs = dataclasses.replace(needs_in_subprocess(configuration, inventory), corrections={})
    plan = make_plan(configuration, inventory, needs=needs)
    if not plan.memory:
        raise AccelRunError(f"nothing can be compared: {needs.why_not or 'no phase trains'}")
    own = () if plan.own_keys else (f"micro_batch_size={plan.batch.micro_batch_size}",)
    request = dataclasses.replace(request, overrides=merge_overrides(request.overrides, own))
    say(f"runs {UPDATES} updates")
    with Comparison(request, cores) as comparison, comparison.alone(Variant("probe"), CompareLimits()) as (ask, opened):
        made, report, there = ask({"do": "run", "updates": UPDATES}), ask({"do": "report"}), opened.opened
    demand, rank = needs.demands[there["phase"]], plan.ranks[0]
    prediction = predicted(demand, there["micro_batch_size"], dataclasses.replace(rank, unseen=0.0))
    tensors = sum(size for part, size in prediction.parts.items() if part != "libraries")
    is_gpu = "reserved_gib" in report
    held = round(report["reserved_gib" if is_gpu else "peak_host_gib"] * GIB)
    share, micro = there["global_batch_size"], there["micro_batch_size"]
    passes = [micro] * (share // micro) + ([share % micro] if share % micro else [])
    flops, seconds = sum(demand.at(size).work.flops for size in passes), made["seconds"] / UPDATES
    precision = plan.choices["precision"].name
    found = Correction(
        device=rank.name,
        task=plan.choices["task"].name,
        date=f"{datetime.now(UTC):%Y-%m-%d}",
        libraries=None if is_gpu else max(0, held - tensors),
        tensors=held / tensors if is_gpu else 1.0,
        flops_per_s={precision: flops / seconds} if flops else {},
    )
    before = corrections().get(rank.name)
    expected = tensors if is_gpu else prediction.total
    estimate = update_seconds(demand, passes, peaks_of(rank.name, precision, facts_of_profiles().values()))
    return [
        f"{UPDATES} updates of {found.task} on {rank.name}, micro-batches of {micro}",
        f"memory       measured {sized(held)}, predicted {sized(expected)} ({expected / held - 1:+.0%})"
        + (", of torch's allocator" if is_gpu else ", with libraries"),
        f"update time  measured {seconds * 1e3:,.3g} ms" + (f", estimated {estimate}" if estimate else ""),
        *([f"{'':<11}  replaces the correction by {before.task} of {before.date}"] if before else []),
        *notes,
        f"stored       {keep(found)}",
    ]
