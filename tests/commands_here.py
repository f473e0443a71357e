"""Run accel-run commands in the test process, which takes half the CPU time of a fork.

Commands that are killed, or that start with other limits or patched modules, must be forks of the server.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from runner.cli import main
from tests.forkserver import CompletedCommand

TESTS = f"{Path(__file__).parent}{os.sep}"


def run_here(args: str | list[str], folder: Path, env: Mapping[str, str] | None = None) -> CompletedCommand:
    """Run a command to completion, as `ForkServer.run` does."""
    out, err = folder / ".out", folder / ".err"
    words = args.split() if isinstance(args, str) else args
    with pytest.MonkeyPatch.context() as patch, unload_task_files(folder):
        patch.chdir(folder)
        before = dict(os.environ)
        os.environ.update(env or {})
        try:
            with out.open("w") as stdout, err.open("w") as stderr, redirect_stdout(stdout), redirect_stderr(stderr):
                code = main(words)
        finally:
            os.environ.clear()
            os.environ.update(before)
    return CompletedCommand(code, out.read_text(errors="replace"), err.read_text(errors="replace"))


@contextmanager
def unload_task_files(folder: Path) -> Iterator[None]:
    """Unload the task files in `folder` and `tests/` that the block imports, so that their names are free again."""
    newest, path = next(reversed(sys.modules)), list(sys.path)
    yield
    # Only modules imported in the block, which are the last ones: checking thousands of older modules would take
    # longer.
    for name in list(itertools.takewhile(lambda name: name != newest, reversed(sys.modules))):
        file = getattr(sys.modules[name], "__file__", None) or ""
        if file.startswith(f"{folder}{os.sep}") or ("." not in name and file.startswith(TESTS)):
            del sys.modules[name]
    sys.path[:] = path
