"""Run a command on the stand-in: `python -m tests.stand_ins.cuda t4 accel-run train device=cuda`.

`python -m tests.stand_ins.cuda build` only compiles the stand-in. The exit code is 69 if it cannot be compiled here.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from tests.stand_ins.cuda.build import CannotBuildError, built
from tests.stand_ins.cuda.devices import MACHINES
from tests.stand_ins.cuda.environment import environment


def main(args: list[str]) -> NoReturn:
    try:
        if args == ["build"]:
            built()
            sys.exit(0)
        if len(args) < 2 or args[0] not in MACHINES:
            sys.stderr.write(f"usage: python -m tests.stand_ins.cuda build | {'|'.join(MACHINES)} COMMAND...\n")
            sys.exit(64)
        machine, *command = args
        os.execvpe(command[0], command, environment(MACHINES[machine]))
    except CannotBuildError as reason:
        sys.stderr.write(f"{reason}\n")
        sys.exit(69)


if __name__ == "__main__":
    main(sys.argv[1:])
