"""Run the requested checks one after the other, and clean up at the end and on signals."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType

from runner.base.errors import Exit
from runner.durable.signals import install_handler, restore_handlers
from runner.host.process_tree import subreaper
from runner.host.scratch import private_folder
from runner.plan.inventory import Inventory, read_cpu
from runner.tools.doctor.checks import CHECKS
from runner.tools.doctor.findings import CheckContext, CheckResult, DoctorCheck, skip
from runner.tools.doctor.isolated_check import kill_all_checks, run_check

Watch = Callable[[str, str, float], None]  # (check, subject, seconds so far)


class Examination:
    """The requested checks and their dependencies.

    device, clock  as in CheckContext
    root           folder of the runs
    inventory      devices found by the check `gpus`; None until a check needs them
    """

    def __init__(
        self,
        names: Iterable[str],
        device: str,
        root: Path,
        *,
        checks: Mapping[str, DoctorCheck] = CHECKS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.names = _add_dependencies(set(names), checks)
        self.inventory: Inventory | None = None
        self._checks, self._device, self._root, self._clock = checks, device, root, clock
        self._shared_results: dict[str, str] = {}

    def findings(self, watch: Watch) -> Iterator[CheckResult]:
        """Yield the findings as they arrive. Raises CannotCreate if no temporary folder can be created.

        A signal that ends this process also ends the checks and removes their files.
        """
        with private_folder() as scratch, subreaper(), _cleanup(scratch):
            for name in self.names:
                yield from self._run(name, CheckContext(self._root, scratch, self._device, clock=self._clock), watch)

    def _run(self, name: str, context: CheckContext, watch: Watch) -> Iterator[CheckResult]:
        check = self._checks[name]
        if check.needs:
            if "torch" not in self._shared_results:
                yield replace(skip("", "torch cannot be imported, see above"), check=name, why=check.why)
                return
            import torch  # noqa: F401 - forked checks inherit it
        if check.needs == "gpus":
            self.inventory = self.inventory or self._inventory()
            context = replace(context, inventory=self.inventory)
        yield from run_check(
            name, check, context, lambda subject, took_s: watch(name, subject, took_s), self._shared_results
        )

    def _inventory(self) -> Inventory:
        """Return the inventory from the `gpus` check, or one without GPUs if the check failed."""
        shared = self._shared_results.get("gpus")
        return Inventory.from_json(shared) if shared else Inventory((), read_cpu()[0])


def _add_dependencies(names: set[str], checks: Mapping[str, DoctorCheck]) -> list[str]:
    """Return the names with their dependencies, in the order of `checks`."""
    while missing := {checks[name].needs for name in names if checks[name].needs} - names:
        names = names | missing
    return [name for name in checks if name in names]


@contextmanager
def _cleanup(scratch: Path) -> Iterator[None]:
    """Remove files and processes of the checks at the end, and on a signal that ends this process.

    The handler exits instead of raising, because an exception during the import of torch may be swallowed or printed.
    """
    pid = os.getpid()

    def leave(number: int, _: FrameType | None) -> None:
        if os.getpid() != pid:  # a child that has not reset its handlers yet
            os._exit(128 + number)
        for handled in _ENDING_SIGNALS:
            signal.signal(handled, signal.SIG_IGN)
        kill_all_checks()
        shutil.rmtree(scratch, ignore_errors=True)
        with suppress(Exception):
            sys.stdout.flush()
        with suppress(OSError):
            os.write(2, b"\naccel-run: interrupted\n")
        os._exit(Exit.INTERRUPTED if number == signal.SIGINT else 128 + number)

    previous = install_handler(_ENDING_SIGNALS, leave)
    try:
        yield
    finally:
        kill_all_checks()
        restore_handlers(previous)


_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
