"""Run the requested checks one after the other, and clean up whatever happens."""

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

from runner.base.errors import AccelRunError, Exit
from runner.host.process_tree import subreaper
from runner.host.scratch import private_folder
from runner.plan.inventory import Inventory, read_cpu
from runner.tools.doctor.checks import CHECKS
from runner.tools.doctor.findings import CheckContext, CheckResult, DoctorCheck, skip
from runner.tools.doctor.isolated_check import end_all, run_check
from runner.tools.doctor.storage import remove_trials

Watch = Callable[[str, str, float], None]  # (check, subject, seconds so far)


class Examination:
    """The checks of these names and those they need; `inventory` is set by the check of GPUs.

    device, clock  as in CheckContext
    root           folder of the runs
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
        self.names = _with_needed(set(names), checks)
        self.inventory: Inventory | None = None
        self._checks, self._device, self._root, self._clock = checks, device, root, clock
        self._answers: dict[str, str] = {}

    def findings(self, watch: Watch) -> Iterator[CheckResult]:
        """Yield the findings as they arrive. Raises CannotCreate if there is no temporary folder.

        A signal that ends this process also ends the checks and removes their files.
        """
        with private_folder() as scratch, subreaper(), _cleanup(scratch, self._root):
            for name in self.names:
                yield from self._run(name, CheckContext(self._root, scratch, self._device, clock=self._clock), watch)

    def _run(self, name: str, context: CheckContext, watch: Watch) -> Iterator[CheckResult]:
        check = self._checks[name]
        if check.needs:
            if "torch" not in self._answers:
                yield replace(skip("", "torch cannot be imported, see above"), check=name, why=check.why)
                return
            import torch  # noqa: F401 - forked checks inherit it
        if check.needs == "gpus":
            self.inventory = self.inventory or self._inventory()
            context = replace(context, inventory=self.inventory)
        yield from run_check(name, check, context, lambda subject, took_s: watch(name, subject, took_s), self._answers)

    def _inventory(self) -> Inventory:
        """Return the inventory of the check of GPUs, or one without GPUs if it failed."""
        found = self._answers.get("gpus")
        return Inventory.from_json(found) if found else Inventory((), read_cpu()[0])


def _with_needed(names: set[str], checks: Mapping[str, DoctorCheck]) -> list[str]:
    """Return the names with those they need, in the order of the table."""
    while missing := {checks[name].needs for name in names if checks[name].needs} - names:
        names = names | missing
    return [name for name in checks if name in names]


@contextmanager
def _cleanup(scratch: Path, root: Path) -> Iterator[None]:
    """Remove files and processes of the checks at the end, and at a signal that ends this process.

    The handler exits instead of raising: during the import of torch an exception may be lost or printed.
    """
    pid = os.getpid()

    def clear() -> None:
        end_all()
        with suppress(OSError, AccelRunError):
            remove_trials(root, pid)

    def leave(number: int, _: FrameType | None) -> None:
        if os.getpid() != pid:  # a child that has not reset its handlers yet
            os._exit(128 + number)
        for each in previous:
            signal.signal(each, signal.SIG_IGN)
        clear()
        shutil.rmtree(scratch, ignore_errors=True)
        with suppress(Exception):
            sys.stdout.flush()
        with suppress(OSError):
            os.write(2, b"\naccel-run: interrupted\n")
        os._exit(Exit.INTERRUPTED if number == signal.SIGINT else 128 + number)

    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    previous = {number: before for number, before in previous.items() if before != signal.SIG_IGN}  # as under nohup
    for number in previous:
        signal.signal(number, leave)
    try:
        yield
    finally:
        clear()
        for number, before in previous.items():
            signal.signal(number, before if before is not None else signal.SIG_DFL)
