"""Measure the peak host memory of each rank while a sharded model is built, saved, loaded and exported, on the CPU.

The model is a GPT with float32 weights. Peaks are those of resident memory (VmHWM, reset before each step) above its
value before the step, so that imports and existing tensors do not count.

Before the first step, a tiny model is built in the same way, which loads modules of torch; `constant` is its peak.

full    each rank builds the complete model, then shards it (parallelism.init=full)
meta    each rank builds the model on the meta device, then initializes its shards (parallelism.init=meta)
save    a sharded checkpoint: weights, and two tensors of optimizer state for each; divided by the size of the part
load    the weights of that checkpoint: each rank loads its rows; divided by the size of the rank's shards
export  one file from the parts, on rank 0, tensor by tensor

Run: python scripts/measure/sharded_memory.py --ranks 2,4 --layers 8 --width 768
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

MIB = 1 << 20


def resident(field: str) -> int:
    """Return a field of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{field}:")))


def peak_of(step: Callable[[], Any]) -> tuple[Any, int]:
    """Return the result of a step and the peak of resident memory above its value before."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = resident("VmRSS")
    result = step()
    return result, resident("VmHWM") - before


def make_gpt(layers: int, width: int, vocabulary: int) -> nn.Module:
    from runner.tasks.gpt.model import Shape, Transformer

    torch.manual_seed(0)
    return Transformer(Shape(layers, width // 64, width, 256, vocabulary))


def measure_rank(options: argparse.Namespace) -> dict[str, Any]:
    """Measure one rank."""
    from runner.base.rank_env import RankInfo
    from runner.distributed.deferred_init import DeferredInit
    from runner.distributed.join import join_process_group
    from runner.distributed.shard_init import DeferredModel
    from runner.distributed.sharded import Sharded
    from runner.durable.checkpoint import Snapshot, checkpoint_path, load, save, save_part
    from runner.durable.checkpoint_parts import CheckpointPart
    from runner.durable.files import write_stream
    from runner.durable.safetensors_writer import HostBuffer, serialize_header, stream_tensors, view_bytes

    ranks, rank, folder = int(options.ranks), options.rank, Path(options.folder)
    member = RankInfo(rank, rank, ranks, ranks, f"file://{folder}/store")
    torch.set_num_threads(1)
    with join_process_group(member, torch.device("cpu")) as world:

        def build(*sizes: int) -> tuple[Sharded, nn.Module]:
            parallel = Sharded(world, saves_parts=True)
            if options.init == "full":
                model = make_gpt(*sizes)
            else:
                with DeferredInit() as recording:
                    model = make_gpt(*sizes)
                parallel.deferred = DeferredModel(recording)
            return parallel, parallel.wrap(model, list, list(model.blocks))  # type: ignore[arg-type]

        _, constant = peak_of(lambda: build(1, 64, 512))  # imports and caches of torch
        (parallel, model), built = peak_of(lambda: build(options.layers, options.width, options.vocabulary))
        shards = parallel_bytes(model)
        result = {"shards": shards, "build": built, "constant": constant}
        if options.init == "full":
            return result
        state: dict[str, Tensor] = dict(model.state_dict())
        moments = {f"{name}.{key}": torch.ones_like(weight) for name, weight in state.items() for key in ("m", "v")}
        buffer = HostBuffer()

        def write() -> int:
            files = {"model": parallel.checkpoint_tensors(state, buffer.copy),
                     "optimizer": parallel.checkpoint_tensors(moments, buffer.copy)}  # fmt: skip
            snapshot = Snapshot(1, files, {}, {"world_size": ranks}, CheckpointPart(rank, ranks, "0"))
            (save if world.is_first else save_part)(folder, snapshot)
            return sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values())

        part, saved = peak_of(write)
        world.gather(0)
        checkpoint = load(checkpoint_path(folder, 1))
        _, loaded = peak_of(lambda: parallel.load(model, checkpoint.stored("model")))
        result |= {"part": part, "save": saved, "load": loaded}
        if world.is_first:
            stored = checkpoint.stored("model")
            chunks = (view_bytes(rows) for _, _, rows in stream_tensors(stored))
            content = (chunk for part in ([serialize_header(stored)], chunks) for chunk in part)
            result["largest"] = max(tensor.nbytes for tensor in stored.values())
            _, result["export"] = peak_of(lambda: write_stream(folder / "whole.safetensors", content))
        return result


def parallel_bytes(model: nn.Module) -> int:
    """Return the bytes of this rank's shards."""
    return sum(weight.to_local().nbytes for weight in model.parameters())  # type: ignore[operator]


def measure(options: argparse.Namespace, ranks: int, init: str) -> list[dict[str, Any]]:
    """Run all ranks as separate processes; return their results."""
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"layers": options.layers, "width": options.width, "vocabulary": options.vocabulary}
        arguments = {**sizes, "ranks": ranks, "init": init, "folder": folder}
        command = [sys.executable, __file__, *(f"--{name}={value}" for name, value in arguments.items())]
        processes = [
            subprocess.Popen([*command, "--rank", str(rank)], stdout=subprocess.PIPE, text=True)
            for rank in range(ranks)
        ]
        return [json.loads(process.communicate()[0].splitlines()[-1]) for process in processes]


def main() -> None:
    """Print a table, or measure one rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--init", default="meta")
    parser.add_argument("--folder")
    options = parser.parse_args()
    if options.rank is not None:
        print(json.dumps(measure_rank(options)))
        return
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}; MiB, the largest of all ranks")
    print("ranks  shards  full  meta  constant   save  of part   load  of shards  export  largest tensor")
    for ranks in map(int, options.ranks.split(",")):
        full, meta = measure(options, ranks, "full"), measure(options, ranks, "meta")
        top = {key: max(rank[key] for rank in meta) / MIB for key in ("shards", "build", "constant", "save", "load")}
        saved, loaded = (max(rank[one] / rank[other] for rank in meta) for one, other in _RATIOS)
        print(
            f"{ranks:5}  {top['shards']:6.0f}  {max(rank['build'] for rank in full) / MIB:4.0f}  {top['build']:4.0f}"
            f"  {top['constant']:8.0f}  {top['save']:5.0f}  {saved:7.2f}  {top['load']:5.0f}  {loaded:9.2f}"
            f"  {meta[0]['export'] / MIB:6.0f}  {meta[0]['largest'] / MIB:14.0f}"
        )


_RATIOS = (("save", "part"), ("load", "shards"))


if __name__ == "__main__":
    main()
