"""`accel-run import FILE`: convert an untrusted .pt, .pth or .bin file to safetensors."""

from __future__ import annotations

import secrets
import shlex
import signal
import sys
from pathlib import Path

from runner.base.text import format_bytes
from runner.commands.arguments import parse_arguments, refuse_unknown_options
from runner.config.request import format_override

HELP = """usage: accel-run import FILE [NEW.safetensors] [key=ENTRY]

Converts a file written by torch.save to safetensors. torch.load reads it with weights_only=True, which creates only
tensors and plain data, in a subprocess with limited memory. A file that requests anything else is rejected, and the
message names what it requested.

  NEW.safetensors   the new file (default: FILE with that extension); existing files are not overwritten
  key=ENTRY         the entry that holds the weights, for example key=ema.model; common entries are found automatically

To start from these weights: accel-run train weights=NEW.safetensors

examples
  accel-run import model.pt
  accel-run import checkpoint.pth weights.safetensors key=ema
"""


def run(argv: list[str]) -> int:
    """Convert the file and print a summary."""
    from runner.base.errors import ConfigError, InputMissing, Problem

    arguments = parse_arguments(argv, positional=2, command_keys=["key"])
    refuse_unknown_options(arguments.request)
    overrides = arguments.request.overrides
    if not arguments.positional:
        raise ConfigError(Problem("needs a file", "import", _EXAMPLE))
    if unknown := [override for override in overrides if not override.startswith("key=")]:
        what = "is not a setting of import" if "=" in unknown[0] else "is an extra argument"
        raise ConfigError(Problem(what, unknown[0], "use accel-run import FILE [NEW.safetensors] [key=ENTRY]"))
    if len(overrides) > 1:
        raise ConfigError(Problem("is given more than once", "key", "remove one of them"))
    key = overrides[0].removeprefix("key=") if overrides else None
    source = Path(arguments.positional[0]).expanduser()
    if not source.is_file():
        raise InputMissing("file not found", where=arguments.positional[0] or "import", fix=_EXAMPLE)
    target = Path(arguments.positional[1]).expanduser() if arguments.positional[1:] else source.with_suffix(_ENDING)
    if source.suffix == _ENDING:
        raise ConfigError(
            Problem("is already a safetensors file", str(source), f"use accel-run train {_weights(source)}")
        )
    if target.suffix != _ENDING:
        raise ConfigError(Problem("must end with .safetensors", str(target), f"use {target.with_suffix(_ENDING)}"))
    from concurrent.futures.process import BrokenProcessPool

    from runner.base.errors import DataError
    from runner.durable import files
    from runner.host.subprocesses import run_in_subprocess
    from runner.trained.pickle_import import convert, publish, refuse_existing

    refuse_existing(target)
    temporary = target.absolute().with_name(f"{files.TEMPORARY}{target.name}-{secrets.token_hex(4)}")
    # On SIGTERM, exit through the `finally` below, which removes the temporary file.
    previous_handler = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        result = run_in_subprocess(convert, source.absolute(), temporary, key)
        publish(temporary, target.absolute())
    except BrokenProcessPool as error:
        raise DataError(
            "reading it crashed the reader process: the file is damaged or malicious",
            where=str(source),
            fix="get the file again from a source that you trust",
        ) from error
    finally:
        if files.exists(temporary):
            files.remove(temporary)
        signal.signal(signal.SIGTERM, previous_handler)
    entry = f" of {result.entry}" if result.entry else ""
    skipped = f"; skipped entries that are not tensors: {result.num_skipped}" if result.num_skipped else ""
    print(f"wrote {target}: {result.num_tensors} tensors{entry}, {format_bytes(result.num_bytes)}{skipped}")
    print(f"to start from it: accel-run train {_weights(target)}")
    return 0


def _weights(file: Path) -> str:
    return shlex.quote(format_override("weights", str(file)))


_EXAMPLE = "use accel-run import model.pt"
_ENDING = ".safetensors"
