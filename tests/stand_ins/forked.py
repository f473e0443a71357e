"""Run commands and programs on simulated machines, as forks of a process that has imported torch with the stand-in."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.forkserver import CompletedCommand, ForkServer
from tests.stand_ins.cuda.devices import MACHINES, VARIABLE, encode
from tests.stand_ins.cuda.environment import environment
from tests.stand_ins.cuda.install import REPORT

DESCRIBE = "from tests.stand_ins.cuda.install import describe; describe()\n"
# Exit here, because the fork server would run a command of accel-run next. install.py makes os._exit write the counts.
END = "\nimport os, sys; sys.stdout.flush(); sys.stderr.flush(); os._exit(0)\n"


@dataclass(frozen=True)
class StandIn:
    """Run one program at a time."""

    server: ForkServer

    @classmethod
    @contextmanager
    def started(cls) -> Iterator[StandIn]:
        """Import torch and the runner once, without using a device."""
        with ForkServer.started(environment(MACHINES["t4"])) as server:
            yield cls(server)

    def command(
        self,
        machine: str,
        args: str,
        folder: Path,
        counted: Path | None = None,
        env: Mapping[str, str] | None = None,
        before: str = "",
    ) -> CompletedCommand:
        """Run accel-run in a folder.

        counted  folder in which each process writes its counts
        before   Python code that the process runs before the command
        """
        return self.server.run(args, folder, {**_env(machine, counted), **(env or {})}, DESCRIBE + before)

    def program(
        self, machine: str, text: str, env: Mapping[str, str] | None = None, counted: Path | None = None
    ) -> str:
        """Run a program that must succeed; return its output."""
        with tempfile.TemporaryDirectory() as folder:
            result = self.server.run([], Path(folder), {**_env(machine, counted), **(env or {})}, DESCRIBE + text + END)
        assert result.code == 0, result.out + result.err
        return result.out


def _env(machine: str, counted: Path | None) -> dict[str, str]:
    return {VARIABLE: encode(MACHINES[machine])} | ({REPORT: str(counted)} if counted else {})


def read(counted: Path) -> list[dict[str, Any]]:
    """Return the counts of each process that ran an operator."""
    return [json.loads(path.read_text()) for path in sorted(counted.iterdir())]
