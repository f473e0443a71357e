"""The plan of a run: all derived values, each with its reason."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from runner.base.json_converter import decode_valid, encode
from runner.base.shares import format_lines, rank_shares
from runner.config.configuration import Choice, PhaseSettings
from runner.config.custom_tables import HOOK
from runner.config.objective_keys import flatten_objectives
from runner.config.phases import PHASE_GROUPS
from runner.config.settings import Settings
from runner.plan.memory_fit import RankMemory, RankPart
from runner.plan.rank_devices import RankDevice
from runner.workload.division import Batch


@dataclass(frozen=True)
class BestMetric:
    """The metric that ranks the best checkpoints of a phase.

    metric     name; None: no best checkpoints are kept
    best_is    min or max: whether lower or higher values are better
    is_chosen  the user set checkpoint.best or checkpoint.best_is
    stops      it is the metric of the phase's early stopping, although the user did not choose it
    """

    metric: str | None
    best_is: Literal["min", "max"]
    is_chosen: bool = False
    stops: bool = False


@dataclass(frozen=True)
class PhasePlan(PhaseSettings):
    """The plan of one phase: its settings, with `auto` resolved in its optimizer, and its batch divided.

    objectives  objective -> the keys that the user sets, which replace declared ones
    """

    batch: Batch
    best: BestMetric = BestMetric(None, "min")  # unknown in the plan of an earlier version
    objectives: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def deciding_metrics(self) -> tuple[str, ...]:
        """Return the metrics that select the best checkpoint and end the phase early."""
        stopping = (self.early_stopping.metric,) if self.early_stopping.patience is not None else ()
        return (*((self.best.metric,) if self.best.metric else ()), *stopping)

    def __str__(self) -> str:
        parts = [f"{self.name} ({self.kind})"]
        if self.kind == "train":
            length = f"{self.updates} updates" if self.updates is not None else f"{self.epochs:g} epochs"
            parts += [length, f"{self.optimizer.name}, {self.scheduler.name}"]
        else:
            parts.append("one pass over the training data")
        batch = self.batch
        product = f"{batch.micro_batch_size} x {batch.accumulation_steps} x {batch.num_shares}"
        is_even = batch.micro_batch_size * batch.accumulation_steps * batch.num_shares == batch.global_batch_size
        product = product if is_even else " + ".join(map(str, batch.shares))
        parts.append(f"{batch.global_batch_size} samples per update ({product})")
        parts += [f"trains {', '.join(self.trains)}"] if self.trains is not None else []
        parts += [f"best checkpoint by {self.best.metric}, as for early_stopping"] if self.best.stops else []
        parts += [f"needs {', '.join(self.needs)}"] if self.needs else []
        return "; ".join(parts)


@dataclass(frozen=True)
class Plan:
    """All values of a run; `auto` remains only where the option's own function resolves it.

    ranks       the device of each rank; one process is one rank
    choices     group -> choice; `task` among them
    reasons     key -> reason for its value
    notes       notes for the user: options that were replaced or have no effect
    phases      all phases of the task, in order; `selected` names those that run
    phase_keys  keys of the phases if the task declares any, as in the configuration
    config_dir  the user's configuration folder, None if there is none
    memory      predicted memory of each rank in each phase; empty if nothing was traced
    hooks       enabled hooks of the task file and of packages
    """

    ranks: tuple[RankDevice, ...]
    choices: Mapping[str, Choice]
    task_file: str | None
    batch: Batch
    settings: Settings
    inference: Mapping[str, Any]
    profile: str
    reasons: Mapping[str, str]
    notes: tuple[str, ...]
    phases: tuple[PhasePlan, ...]
    phase_keys: Mapping[str, Any]
    config_dir: str | None = None
    memory: tuple[RankMemory, ...] = ()
    hooks: tuple[Choice, ...] = ()

    @property
    def device(self) -> str:
        """Return torch's name of the device of rank 0, such as cuda:0."""
        return self.ranks[0].device

    @property
    def device_name(self) -> str:
        """Return the product name of the device of rank 0."""
        return self.ranks[0].name

    @property
    def device_uuid(self) -> str:
        """Return the UUID of the GPU of rank 0, empty for a CPU."""
        return self.ranks[0].uuid

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    @property
    def num_workers(self) -> int:
        """Return the number of data workers of each rank."""
        loader = self.choices["dataloader"]
        if loader.uses("thread"):  # load_fixed, which is unknown here, also needs a worker process
            return int(loader.options["cache"] == "none")
        return int(loader.options.get("num_workers", 0))

    @property
    def selected(self) -> tuple[PhasePlan, ...]:
        """Return the phases to run: those named in `phases`, or all; with epochs=0 only those without gradients."""
        requested = self.settings.phases
        phases = [phase for phase in self.phases if requested is None or phase.name in requested]
        return tuple(phase for phase in phases if phase.kind != "train" or phase.epochs != 0)

    def phase(self, name: str) -> PhasePlan | None:
        """Return the phase of this name, None if the task has none."""
        return next((phase for phase in self.phases if phase.name == name), None)

    def values(self) -> dict[str, Any]:
        """Return all keys with their values, in display order.

        If the task declares phases, keys of a phase belong to the phase and not to the run.
        """
        values: dict[str, Any] = {"device": self.device}
        updates, epochs = self.settings.updates, self.settings.epochs
        values |= {"updates": updates} if updates is not None else {"epochs": epochs}
        values |= {
            "global_batch_size": self.batch.global_batch_size,
            "micro_batch_size": self.batch.micro_batch_size,
            "accumulation_steps": self.batch.accumulation_steps,
        }
        values |= {"shares": list(self.batch.shares)} if len(self.batch.shares) > 1 else {}
        for group, choice in self.choices.items():
            values[group] = choice.name
            values |= {f"{group}.{key}": value for key, value in choice.options.items()}
        values |= {f"{HOOK}.{hook.name}.{key}": value for hook in self.hooks for key, value in hook.options.items()}
        for phase in self.phases:  # all phases have the same objectives
            values |= flatten_objectives(phase.objectives)
        values |= self.phase_keys
        settings = dataclasses.asdict(self.settings)
        nested = {key: value for key, value in settings.items() if isinstance(value, dict)}
        for key, value in settings.items():
            if key not in values and key not in nested and key not in ("updates", "epochs"):
                values[key] = value
        for name, inner in nested.items():
            values |= {f"{name}.{key}": value for key, value in inner.items()}
        replaced = {key.split(".", 2)[2] for key in self.phase_keys}
        groups = PHASE_GROUPS if self.phase_keys else ()
        return {
            key: value for key, value in values.items() if key not in replaced and key.partition(".")[0] not in groups
        }

    def reason(self, key: str) -> str:
        return self.reasons.get(key, "default")

    def to_json(self) -> str:
        """Return the plan as JSON, for the run directory, including derived values."""
        derived = {"device": self.device, "device_name": self.device_name, "device_uuid": self.device_uuid}
        length = {"updates": self.settings.updates, "epochs": self.settings.epochs}
        content = derived | length | encode(self)
        content["own_keys"] = content["phase_keys"]  # its name in version 0.1, written for one more release
        return json.dumps(content, indent=2) + "\n"

    @staticmethod
    def from_json(text: str) -> Plan:
        """Return the plan written by `to_json`. Raises ValueError, KeyError or TypeError if the text is not a plan."""
        tree = json.loads(text)
        settings, phases = tree["settings"], tree["phases"]
        if not isinstance(settings["weights"], dict):  # earlier versions wrote the source alone
            settings = {**settings, "weights": {"source": settings["weights"]}}
        sizes = ("global_batch_size", "micro_batch_size")  # earlier versions wrote them only in the batch
        phases = [{**{name: phase["batch"][name] for name in sizes}, **phase} for phase in phases]
        phase_keys = tree.get("phase_keys", tree.get("own_keys"))
        return decode_valid(Plan, {**tree, "settings": settings, "phases": phases, "phase_keys": phase_keys})


def format_rank_table(plan: Plan) -> list[str]:
    """Return the ranks as lines of text: device, memory, share of an update, and micro-batches."""
    if plan.batch.stages > 1:
        sizes = [f", {rank.memory_bytes / 2**30:.1f} GiB" if rank.memory_bytes else "" for rank in plan.ranks]
        pipelines = plan.batch.num_shares > 1
        return [
            f"rank {number}: {rank.device}: {rank.name}{size}"
            + (f", stage {number % plan.batch.stages} of pipeline {number // plan.batch.stages}" if pipelines else "")
            for number, (rank, size) in enumerate(zip(plan.ranks, sizes, strict=True))
        ]
    return format_lines(
        rank_shares(
            plan.batch.shares,
            [f"{rank.device}: {rank.name}" for rank in plan.ranks],
            [rank.memory_bytes or None for rank in plan.ranks],
            [plan.batch.max_micro_batch_size] * plan.world_size,
        )
    )


def rank_part(parallelism: Choice, phase: PhasePlan) -> RankPart:
    """Return the part of the model and of the batch on each rank in this phase.

    A phase that fits statistics reads one micro-batch at a time, even in a pipeline.
    """
    batch = phase.batch
    passes = batch.accumulation_steps if phase.kind == "train" else 1
    return RankPart.from_choice(parallelism, len(batch.shares) * batch.stages, max(batch.shares), passes)
