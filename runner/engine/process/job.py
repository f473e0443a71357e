"""The inputs of every rank of a run, decided before the ranks join the process group, and what a rank returns."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from runner.base.errors import Exit
from runner.config.configuration import Configuration
from runner.config.request import Request
from runner.durable.directory import check_run_name, generate_run_name
from runner.plan.inventory import Inventory
from runner.plan.memory_fit import MemoryNeeds
from runner.plan.run_plan import Plan


@dataclass(frozen=True)
class Job:
    """Inputs of every rank of a run.

    runs_inference  the command runs inference after training
    """

    request: Request
    configuration: Configuration
    plan: Plan
    inventory: Inventory
    name: str
    needs: MemoryNeeds | None = None
    runs_inference: bool = False

    @property
    def folder(self) -> Path:
        """Return the run directory."""
        return self.configuration.settings.root / self.name


@dataclass(frozen=True)
class SessionEnd:
    """Result of a rank's part of a run; identical on all ranks.

    is_stop_requested  a stop was requested, perhaps only during the last update
    """

    code: Exit
    is_stop_requested: bool = False


def choose_run_name(configuration: Configuration) -> str:
    """Return the name of the run. Raises ConfigError for an invalid name."""
    name = configuration.settings.run or generate_run_name(configuration.choices["task"].name)
    check_run_name(name)
    return name
