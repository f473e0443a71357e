"""accel-run under Ray: Ray allocates whole machines, torchrun starts one rank per GPU.

    pip install ray
    python ray_train.py --machines 2 --gpus 4 -- task=gpt parallelism=ddp run=first output_root=/shared/outputs

The tests do not run it: Ray and its dependencies take half a gigabyte.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
from pathlib import Path

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

WAIT_S = 600.0  # timeout for the machines


@ray.remote(max_restarts=0)
class Machine:
    """One machine of the run; `torchrun` on it is a child of this process."""

    def address(self) -> tuple[str, int]:
        """Return the address of this machine and a port that is currently free."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), int(probe.getsockname()[1])

    def train(self, words: list[str], folder: str) -> int:
        """Run torchrun for the ranks of this machine; return its exit code."""
        command = [sys.executable, "-m", "torch.distributed.run", *words]
        return subprocess.run(command, cwd=folder, check=False).returncode


def run(machines: int, gpus: int, words: list[str]) -> int:
    """Start torchrun on each machine and wait for all; return the first non-zero exit code."""
    ray.init()
    share = {"CPU": float(max(gpus, 1)), **({"GPU": float(gpus)} if gpus else {})}
    group = placement_group([share] * machines, strategy="STRICT_SPREAD")
    ray.get(group.ready(), timeout=WAIT_S)
    actors = [
        Machine.options(
            num_cpus=share["CPU"],
            num_gpus=gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number),
        ).remote()
        for number in range(machines)
    ]
    host, port = ray.get(actors[0].address.remote())
    common = [
        f"--nnodes={machines}",
        f"--nproc-per-node={max(gpus, 1)}",
        f"--master-addr={host}",
        f"--master-port={port}",
    ]
    started = [
        actor.train.remote([*common, f"--node-rank={number}", "-m", "runner", "train", *words], str(Path.cwd()))
        for number, actor in enumerate(actors)
    ]
    return next((code for code in ray.get(started) if code), 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--machines", type=int, default=1)
    parser.add_argument("--gpus", type=int, default=0, help="GPUs per machine; 0: one rank on its CPU")
    parser.add_argument("words", nargs="+", help="settings of accel-run train, after --")
    given = parser.parse_args()
    sys.exit(run(given.machines, given.gpus, given.words))
