"""`accel-run import FILE`: a weights file of ours from a .pt, .pth or .bin file of somebody else."""

from __future__ import annotations

import secrets
import signal
import sys
from pathlib import Path

from runner.commands.arguments import read

HELP = """usage: accel-run import FILE [NEW.safetensors] [key=ENTRY]

Makes a safetensors file of what torch.save wrote elsewhere, in a process apart that has no network, starts nothing
and builds nothing but tensors and plain data: a file that asks for more is refused, and says what it asks for.

  NEW.safetensors   the new file (default: FILE with that ending); never over another one
  key=ENTRY         which entry holds the weights, e.g. key=ema.model; found by itself in the usual ones

Then begin with it:  accel-run train weights=NEW.safetensors

examples
  accel-run import model.pt
  accel-run import checkpoint.pth weights.safetensors key=ema
"""


def run(words: list[str]) -> int:
    """Make the file, and say what it holds."""
    from runner.base.errors import ConfigError, InputMissing, Problem

    arguments = read(words, positional=2)
    keys = [word.partition("=")[2] for word in arguments.request.overrides if word.startswith("key=")]
    if not arguments.positional or len(keys) < len(arguments.request.overrides) or len(keys) > 1:
        raise ConfigError(Problem("needs the name of one file", "import", _EXAMPLE))
    source = Path(arguments.positional[0]).expanduser()
    if not source.is_file():
        raise InputMissing("there is no such file", where=arguments.positional[0] or "import", fix=_EXAMPLE)
    target = Path(arguments.positional[1]).expanduser() if arguments.positional[1:] else source.with_suffix(_ENDING)
    if source.suffix == _ENDING:
        raise ConfigError(Problem("needs no import", str(source), f"use accel-run train weights={source}"))
    if target.suffix != _ENDING:
        raise ConfigError(Problem("must end with .safetensors", str(target), f"use {target.with_suffix(_ENDING)}"))
    from concurrent.futures.process import BrokenProcessPool

    from runner.base.errors import DataError
    from runner.base.subprocesses import in_subprocess
    from runner.durable import files
    from runner.engine.weights import convert, refuse_taken, settle

    refuse_taken(target)
    temporary = target.absolute().with_name(f"{files.TEMPORARY}{target.name}-{secrets.token_hex(4)}")
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that nothing is left behind
    try:
        made = in_subprocess(convert, source.absolute(), temporary, keys[0] if keys else None)
        settle(temporary, target.absolute())
    except BrokenProcessPool as error:
        raise DataError("ended the process that read it", where=str(source), fix="it is damaged, or hostile") from error
    finally:
        if files.exists(temporary):
            files.remove(temporary)
        signal.signal(signal.SIGTERM, before)
    entry = f" of {made.entry}" if made.entry else ""
    left_out = f"; {made.left_out} entries that are no tensors were left out" if made.left_out else ""
    print(f"wrote {target}: {made.num_tensors} tensors{entry}, {made.num_bytes / 2**20:.1f} MiB{left_out}")
    if made.had_network:
        print("this system did not let the process that read it go without a network")
    print(f"begin with it: accel-run train weights={target}")
    return 0


_EXAMPLE = "use accel-run import model.pt"
_ENDING = ".safetensors"
