"""Run a command on the stand-in: `python -m tests.stand_ins.cuda t4 accel-run train device=cuda`."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from tests.stand_ins.cuda.devices import MACHINES
from tests.stand_ins.cuda.environment import environment


def main(args: list[str]) -> NoReturn:
    if len(args) < 2 or args[0] not in MACHINES:
        sys.stderr.write(f"usage: python -m tests.stand_ins.cuda {'|'.join(MACHINES)} COMMAND...\n")
        sys.exit(64)
    machine, *command = args
    os.execvpe(command[0], command, environment(MACHINES[machine]))


if __name__ == "__main__":
    main(sys.argv[1:])
