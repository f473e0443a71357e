"""Run a command on the stand-in: `python -m tests.stand_ins.cuda t4 accel-run train device=cuda`.

`python -m tests.stand_ins.cuda build` only compiles the stand-in, and prints how long that took. The exit code is 69 if
it cannot be compiled here.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from typing import NoReturn

from tests.stand_ins.cuda.build import CannotBuildError, built
from tests.stand_ins.cuda.devices import MACHINES
from tests.stand_ins.cuda.environment import environment


def main(args: list[str]) -> NoReturn:
    try:
        if args == ["build"]:
            _build()
            sys.exit(0)
        if len(args) < 2 or args[0] not in MACHINES:
            sys.stderr.write(f"usage: python -m tests.stand_ins.cuda build | {'|'.join(MACHINES)} COMMAND...\n")
            sys.exit(64)
        machine, *command = args
        os.execvpe(command[0], command, environment(MACHINES[machine]))
    except CannotBuildError as reason:
        sys.stderr.write(f"{reason}\n")
        sys.exit(69)


def _build() -> None:
    began = time.monotonic()
    folder = built()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{folder}: {time.monotonic() - began:.0f} s, {used.ru_utime + used.ru_stime:.0f} s of CPU time")


if __name__ == "__main__":
    main(sys.argv[1:])
