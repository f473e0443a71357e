"""Search for settings that make a run fit into memory, first one by one, then combined, by tracing each."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runner.base.errors import AccelRunError
from runner.config.configuration import Configuration, compose
from runner.config.options import find_signature
from runner.config.request import merge_overrides
from runner.config.schema import default_values
from runner.forecast.demand import is_traced, predict_needs
from runner.plan.inventory import Inventory
from runner.plan.memory_fit import MemoryNeeds, choose_micro_batch_size, largest_micro_batch, may_fit
from runner.plan.planner import make_plan
from runner.plan.prediction_text import FittingChange, format_size_setting, is_settable
from runner.plan.run_plan import Plan, rank_part
from runner.plan.update_time import find_rank_rates, predict_training_time

Overrides = tuple[str, ...]
MAX_CPU_S = 5.0  # CPU seconds; no trace is started that would exceed this if it took as long as the longest so far


def find_changes(
    configuration: Configuration,
    inventory: Inventory,
    plan: Plan,
    needs: MemoryNeeds,
    profiles: Sequence[Mapping[str, Any]],
) -> tuple[list[FittingChange], list[Overrides]]:
    """Return the settings that make the run fit, fastest first, and the settings not tried for lack of time.

    Tries each setting alone, then all together if none is enough. Call it in a subprocess, like `predict_needs`.

    profiles  measurements from hardware profiles, used to estimate times
    """
    trial = _Trial(configuration, inventory, plan, needs, profiles, _seconds(plan, needs, profiles))
    single = list(_candidates(configuration, inventory, plan, needs))
    changes: list[FittingChange] = []
    untried: list[Overrides] = []
    failed: set[Overrides] = set()
    impossible: set[Overrides] = set()
    began = time.process_time()
    longest = 0.0
    for settings in single:
        # BUDGET recomputes at most all blocks, so it saves no more memory than CHECKPOINT, which recomputes all.
        if not trial.may_help(settings) or (settings == BUDGET and CHECKPOINT in failed):
            failed.add(settings)
            continue
        before = time.process_time()
        if before + longest - began > MAX_CPU_S and not needs_no_trace(settings):
            untried.append(settings)
            continue
        try:
            if change := trial.try_settings(settings):
                changes.append(change)
            else:
                failed.add(settings)
        except AccelRunError:  # for example a missing package
            impossible.add(settings)
        longest = max(longest, time.process_time() - before)
    if not changes:
        possible = [settings for settings in single if settings not in impossible]
        together = tuple(
            setting for settings in possible for setting in settings if not setting.startswith("parallelism=")
        )
        together = tuple(setting for setting in together if (setting,) != BUDGET or CHECKPOINT not in single)
        changes = trial.try_most(together)
    return sorted(changes, key=lambda change: (change.factor is None, change.factor or 0.0, change.bytes)), untried


def needs_no_trace(settings: Overrides) -> bool:
    """Return True if the memory demand with these settings follows from existing traces."""
    keys = ("micro_batch_size", "cpu_micro_batch_size")
    return all(setting.partition("=")[0] in keys or setting == "parallelism=fsdp" for setting in settings)


def _candidates(
    configuration: Configuration, inventory: Inventory, plan: Plan, needs: MemoryNeeds
) -> Iterator[Overrides]:
    """Yield settings that reduce memory: first those that need no trace, then those with the largest effect."""
    if not any(rank.is_gpu for rank in plan.ranks):  # on a CPU, auto does not depend on memory
        if size := _find_fitting_size(plan, needs):
            yield (format_size_setting(plan, plan.batch, size),)
    elif any(phase.micro_batch_size != "auto" for phase in configuration.phases):
        yield ("micro_batch_size=auto",)
    gpus = [device for device in inventory.usable if device.kind == "cuda"]
    if len(gpus) > 1 and plan.choices["parallelism"].uses("single", "ddp"):
        yield ("parallelism=fsdp",)
    used = [gpu for gpu in gpus if gpu.torch_name in {rank.device for rank in plan.ranks}]
    if plan.choices["precision"].uses("fp32", "tf32") and used:
        if all(gpu.native_bf16 for gpu in used):
            yield ("precision=bf16",)
        elif all(gpu.formats.fp16 for gpu in used):
            yield ("precision=fp16",)
    keeps = plan.choices["memory"].uses("none", "selective")
    if keeps:
        yield CHECKPOINT
    if plan.choices["optimizer"].uses("adamw", "adam"):
        yield ("optimizer=adamw8bit",)
    if len(gpus) > 1 and plan.choices["parallelism"].uses("single", "ddp"):
        yield ("parallelism=pipeline",)  # a trace per stage, for each number of stages
    if keeps:
        yield BUDGET


def _find_fitting_size(plan: Plan, needs: MemoryNeeds) -> int:
    """Return a micro-batch size that fits on every rank in every phase; 0 if not even one sample does."""
    sizes = []
    for phase in plan.selected:
        part, share = rank_part(plan.choices["parallelism"], phase), max(phase.batch.shares)
        for demand in needs.select(phase.name):
            fit = min(
                largest_micro_batch(demand, rank, share, part.for_rank(number))
                for number, rank in enumerate(plan.ranks)
            )
            sizes.append(choose_micro_batch_size(share, fit) if fit else 0)
    return min(sizes, default=0)


CHECKPOINT, BUDGET = ("memory=checkpoint",), ("memory=budget",)


@dataclass(frozen=True)
class _Trial:
    """State of the search for a run that does not fit.

    before  estimated time without changes; None: unknown
    """

    configuration: Configuration
    inventory: Inventory
    plan: Plan
    needs: MemoryNeeds
    profiles: Sequence[Mapping[str, Any]]
    before: float | None

    def may_help(self, settings: Overrides) -> bool:
        return bool(settings) and all(may_fit(memory.prediction, settings) for memory in self.plan.memory)

    def keep_settings(self, settings: Overrides) -> Overrides:
        """Return the user's settings of replaced groups, such as memory.fraction, that the new option also accepts."""
        known = {
            f"{group}.{key}"
            for group, _, name in (setting.partition("=") for setting in settings)
            if group in self.plan.choices and (signature := find_signature(group, name))
            for key in default_values(signature.keys)
        }
        return tuple(setting for setting in self.configuration.request.overrides if setting.partition("=")[0] in known)

    def try_most(self, settings: Overrides) -> list[FittingChange]:
        """Return the change that applies all these settings, except the last ones if they are invalid.

        Returns an empty list if the run still does not fit.
        """
        while self.may_help(settings):
            try:
                return [change for change in [self.try_settings(settings)] if change]
            except AccelRunError:
                settings = settings[:-1]
        return []

    def try_settings(self, settings: Overrides) -> FittingChange | None:
        """Return the change that applies these settings, or None if the run still does not fit.

        Raises AccelRunError for invalid settings.
        """
        request = self.configuration.request
        overrides = (*merge_overrides(request.overrides, settings), *self.keep_settings(settings))
        changed = compose(dataclasses.replace(request, overrides=overrides))
        needs = self.needs if needs_no_trace(settings) else predict_needs(changed, self.inventory)
        plan = make_plan(changed, self.inventory, needs=needs)
        if needs_no_trace(settings) and not is_traced(plan, needs):
            needs = predict_needs(changed, self.inventory)
            plan = make_plan(changed, self.inventory, needs=needs)
        # If the prediction of the run itself is not exact, the result reports that anyway.
        is_rough = not all(memory.is_exact for memory in self.plan.memory)
        if not plan.memory or not all(
            memory.prediction.fits and (memory.is_exact or is_rough) for memory in plan.memory
        ):
            return None
        most = max(memory.prediction.total for memory in plan.memory)
        seconds = _seconds(plan, needs, self.profiles)
        factor = seconds / self.before if seconds and self.before else None
        return FittingChange(_resolve_auto(settings, plan), most, factor)


def _resolve_auto(settings: Overrides, plan: Plan) -> Overrides:
    size = f"micro_batch_size={plan.batch.micro_batch_size}"
    can_be = is_settable(plan, plan.batch, plan.batch.micro_batch_size)
    is_one = not plan.phase_keys and can_be  # phases have their own micro-batch sizes
    return tuple(size if setting == "micro_batch_size=auto" and is_one else setting for setting in settings)


def _seconds(plan: Plan, needs: MemoryNeeds, profiles: Sequence[Mapping[str, Any]]) -> float | None:
    time = predict_training_time(plan, needs, find_rank_rates(plan, profiles))
    return time.seconds if time else None
