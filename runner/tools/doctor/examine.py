"""All checks that were asked for, one after the other, and nothing of them left behind, whatever happens."""

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
from runner.tools.doctor.isolated_check import end_all, tried
from runner.tools.doctor.storage import remove_trials

Watch = Callable[[str, str, float], None]  # (check, subject, seconds so far)


class Examination:
    """The checks of these names, and those they need; `inventory` is what the machine turned out to have.

    device  as in Context
    root    where runs are written
    clock   as in Context
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
        """Yield what is found, as it is found. Raises CannotCreate where no temporary folder can be made.

        Signals that end a process end this one at once, with all that it started and wrote.
        """
        with private_folder() as scratch, subreaper(), _leaving_nothing(scratch, self._root):
            for name in self.names:
                yield from self._made(name, CheckContext(self._root, scratch, self._device, clock=self._clock), watch)

    def _made(self, name: str, context: CheckContext, watch: Watch) -> Iterator[CheckResult]:
        check = self._checks[name]
        if check.needs:
            if "torch" not in self._answers:
                yield replace(skip("", "torch cannot be imported, see above"), check=name, why=check.why)
                return
            import torch  # noqa: F401 - here, so that each check is forked with it, instead of importing it again
        if check.needs == "gpus":
            self.inventory = self.inventory or self._inventory()
            context = replace(context, inventory=self.inventory)
        yield from tried(name, check, context, lambda subject, took_s: watch(name, subject, took_s), self._answers)

    def _inventory(self) -> Inventory:
        """Return what the check of GPUs found; where it came to no end, there are none to work with."""
        told = self._answers.get("gpus")
        return Inventory.from_json(told) if told else Inventory((), read_cpu()[0])


def _with_needed(names: set[str], checks: Mapping[str, DoctorCheck]) -> list[str]:
    """Return the names with those they need, in the order of the table."""
    while missing := {checks[name].needs for name in names if checks[name].needs} - names:
        names = names | missing
    return [name for name in checks if name in names]


@contextmanager
def _leaving_nothing(scratch: Path, root: Path) -> Iterator[None]:
    """Inside, a signal that ends this process leaves neither files nor processes of the checks; nor does the end.

    No exception: it may come in the middle of the import of torch, where one is lost or printed.
    """
    pid = os.getpid()

    def clear() -> None:
        end_all()
        with suppress(OSError, AccelRunError):
            remove_trials(root, pid)

    def leave(number: int, _: FrameType | None) -> None:
        if os.getpid() != pid:  # a process of a check, which has not settled in yet
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
