"""`accel-run export`: the model of a run in formats that other programs read."""

from __future__ import annotations

from runner.commands.arguments import read_of_a_run

HELP = """usage: accel-run export [last|NAME|DIR] [format=FORMAT,...] [output_root=DIR]

Writes export/ in the run's folder, and compares each file with the model: the same outputs, for a batch and one sample.

  safetensors   the weights alone
  program       a graph that torch.export.load runs without the model's code
  onnx          a graph for ONNX runtimes; needs the extra onnx

examples
  accel-run export
  accel-run export first format=onnx
"""


def run(words: list[str]) -> int:
    """Export; 0 when every file made gives the model's outputs."""
    formats = [name for word in words if word.startswith("format=") for name in word.partition("=")[2].split(",")]
    request = read_of_a_run([word for word in words if not word.startswith("format=")])
    from runner.engine.export import export

    return int(export(request, formats))
