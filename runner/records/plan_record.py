"""Read the part of plan.json that later commands use; `runner.plan.run_plan.Plan` writes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from runner.base.json_converter import NOT_STORED, decode
from runner.base.json_values import parse_object


@dataclass(frozen=True, kw_only=True)
class PlannedChoice:
    """The option chosen for a group: its name, the function that implements it, and the values of its keys."""

    name: str = ""
    function: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PlannedBatch:
    """How a global batch is divided."""

    global_batch_size: int | None = None
    micro_batch_size: int | None = None
    shares: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PlannedPhase:
    """The length of a phase; `updates` is None if it is given in epochs."""

    name: str = ""
    updates: int | None = None


@dataclass(frozen=True, kw_only=True)
class PlannedRank:
    """The device of a rank."""

    device: str = ""
    name: str = ""


@dataclass(frozen=True, kw_only=True)
class PlanRecord:
    """A plan read from plan.json; None or an empty value means unknown.

    choices  group -> choice
    reasons  key -> why it has its value
    problem  why the file could not be read completely; empty if it could
    wrong    dotted names of values with the wrong type
    """

    device: str = ""
    device_name: str = ""
    updates: int | None = None
    task_file: str | None = None
    config_dir: str | None = None
    folder: str | None = None
    choices: Mapping[str, PlannedChoice] = field(default_factory=dict)
    batch: PlannedBatch = field(default_factory=PlannedBatch)
    phases: tuple[PlannedPhase, ...] = ()
    ranks: tuple[PlannedRank, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    problem: str = field(default="", compare=False, metadata=NOT_STORED)
    wrong: tuple[str, ...] = field(default=(), compare=False, metadata=NOT_STORED)

    @classmethod
    def decode(cls, content: bytes | None, clean: Callable[[Any], Any] | None = None) -> PlanRecord:
        """Parse a plan.json. Never raises.

        content  content of the file, None if it does not exist
        clean    applied to the JSON object first, for example to redact it
        """
        tree = parse_object(content) if content is not None else None
        if not tree:
            return cls(problem="is missing" if content is None else "is damaged")
        decoded = decode(cls, clean(tree) if clean else tree)
        problem = f"has unreadable values: {', '.join(decoded.wrong[:4])}" if decoded.wrong else ""
        return replace(decoded.value, problem=problem, wrong=decoded.wrong)

    @property
    def is_known(self) -> bool:
        """Whether anything could be read."""
        return not self.problem or self != PlanRecord()

    def choice(self, group: str) -> PlannedChoice:
        """Return the choice of a group; an empty one if unknown."""
        return self.choices.get(group, PlannedChoice())
