"""`accel-run both`: train, then predict with the trained model."""

from __future__ import annotations

from dataclasses import replace

from runner.commands.arguments import SETTINGS_HELP, parse_arguments

HELP = f"""usage: accel-run both [key=value ...]

Trains as `accel-run train` does, then predicts with the trained run as `accel-run inference` does.

{SETTINGS_HELP}
examples
  accel-run both
  accel-run both updates=100 inference.samples=1
"""


def run(argv: list[str]) -> int:
    """Train and predict; return the exit code of the first step that fails."""
    from runner.launch.start import start_training

    request = replace(parse_arguments(argv).request, command=("both", *argv))
    return int(start_training(request, then_infer=True))
