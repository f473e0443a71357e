"""`accel-run export`: export the model of a run to standard formats."""

from __future__ import annotations

from runner.commands.arguments import CHECKPOINT_HELP, parse_run_request, pop_checkpoint_choice

HELP = f"""usage: accel-run export [last|NAME|DIR] [format=FORMAT,...] [checkpoint=best|last|N] [output_root=DIR]

Exports the model of a run to export/ in the run's folder. Each file is verified to give the model's outputs, for a full
batch and for one sample.

  safetensors   only the weights; those of a sharded checkpoint are copied and compared without loading the model
  program       a graph that torch.export.load runs without the model's code
  onnx          a graph for ONNX runtimes; requires the extra onnx

program and onnx need the task's example(), and accept any batch size from 1 to 4096; the other dimensions of their
inputs, such as a sequence length, are those of the example. Without example(), only safetensors is written, and its
weights are compared with the checkpoint bit for bit.

{CHECKPOINT_HELP}

examples
  accel-run export
  accel-run export first format=onnx
"""


def run(argv: list[str]) -> int:
    """Export; return 0 if every file gives the model's outputs."""
    formats = [name for arg in argv if arg.startswith("format=") for name in arg.partition("=")[2].split(",")]
    checkpoint, rest = pop_checkpoint_choice(argv)
    request = parse_run_request([arg for arg in rest if not arg.startswith("format=")])
    from runner.trained.export_model import export

    return int(export(request, formats, checkpoint))
