"""What every rank of a run needs before joining the process group, and what it returns."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from runner.base.errors import Exit
from runner.config.configuration import Configuration
from runner.config.request import Request
from runner.durable.directory import check_name, default_name
from runner.plan.inventory import Inventory
from runner.plan.memory_fit import Needs
from runner.plan.run_plan import Plan


@dataclass(frozen=True)
class Job:
    """Settings that every rank needs before joining the process group, decided once.

    predicts  the same command runs inference afterwards
    """

    request: Request
    configuration: Configuration
    plan: Plan
    inventory: Inventory
    name: str
    needs: Needs | None = None
    predicts: bool = False

    @property
    def folder(self) -> Path:
        """Return the run directory."""
        return self.configuration.settings.root / self.name


@dataclass(frozen=True)
class SessionEnd:
    """Result of a rank's part of a run; identical on all ranks.

    asked_to_stop  a stop was requested, perhaps only during the last update
    dropped        ranks without which the run is faster: it was saved and restarts without them
    """

    code: Exit
    asked_to_stop: bool = False
    dropped: tuple[int, ...] = ()


def name_of(configuration: Configuration) -> str:
    """Return the name of the run. Raises ConfigError for an invalid name."""
    name = configuration.settings.run or default_name(configuration.choices["task"].name)
    check_name(name)
    return name
