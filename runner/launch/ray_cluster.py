"""Run on a Ray cluster: actors start the ranks on the nodes of a placement group; a lost rank or node restarts the run.

Ray only allocates and supervises: the ranks are processes of `accel-run train`, which rendezvous as with torchrun.
The process groups, checkpoints and messages of a run are the same as with every other launcher.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.base.errors import ConfigError, Exit, Problem, RankLost, SystemLimit
from runner.base.packages import require
from runner.config.configuration import Configuration
from runner.durable.signals import StopRequest
from runner.engine.process.job import choose_run_name
from runner.host.parent_death import child_command
from runner.plan.rank_devices import find_wrong_world_size
from runner.records.events import Console


@dataclass(frozen=True)
class RayCluster:
    """Resources requested from the cluster; documented at the options of `launcher=ray`."""

    address: str
    nodes: int
    ranks_per_node: int
    gpus_per_node: int
    cpus_per_rank: int

    @property
    def world_size(self) -> int:
        """Total number of ranks."""
        return self.nodes * self.ranks_per_node

    @property
    def bundle(self) -> dict[str, float]:
        """Resources that are requested of each node."""
        resources = {"CPU": float(self.ranks_per_node * self.cpus_per_rank), "GPU": float(self.gpus_per_node)}
        return {name: amount for name, amount in resources.items() if amount}

    def launch(self, configuration: Configuration) -> int:
        """Train on the cluster and return the exit code.

        Raises ConfigError, MissingPackage without Ray, SystemLimit if ranks cannot be started, and RankLost.
        """
        if self.world_size > 1 and configuration.choices["parallelism"].uses("single"):
            what = f"parallelism=single uses one process, but the launcher starts {self.world_size} ranks"
            raise ConfigError(Problem(what, "parallelism", "use parallelism=ddp"))
        if problem := find_wrong_world_size(configuration.choices["parallelism"], self.world_size):
            raise ConfigError(problem)
        if self.gpus_per_node > self.ranks_per_node and self.gpus_per_node % self.ranks_per_node:
            what = f"{self.ranks_per_node} ranks cannot share {self.gpus_per_node} GPUs evenly"
            raise ConfigError(Problem(what, "launcher.ranks_per_node", "use launcher.ranks_per_node=auto"))
        name = choose_run_name(configuration)
        for variable, number in _CONNECT_LIMITS.items():
            os.environ.setdefault(variable, number)  # before Ray is imported, because it reads them then
        ray = require("ray", "ray")
        restarts = int(configuration.choices["parallelism"].options.get("restarts", DEFAULT_RESTARTS))
        try:
            ray.init(address=self.address, log_to_driver=True)
        except (ConnectionError, RuntimeError, ValueError) as error:  # no cluster, another version, or not an address
            fix = "start one with `ray start --head`, or set launcher.address"
            raise SystemLimit(f"cannot use a Ray cluster: {error}", where="launcher=ray", fix=fix) from error
        try:
            with StopRequest() as stop:  # after ray.init, which installs another handler
                command = configuration.request.train_arguments(["launcher=local", f"run={name}"])
                return self._train(ray, command, restarts, stop)
        finally:
            ray.shutdown()

    def _train(self, ray: Any, command: Sequence[str], restarts: int, stop: StopRequest) -> int:
        attempt = 0
        while True:
            try:
                return self._attempt(ray, command, attempt, stop)
            except RankLost as error:
                if stop.requested:  # a rank died before it could handle the signal, or while saving
                    return int(Exit.PREEMPTED)
                if attempt == restarts:
                    raise
                attempt += 1
                what = error.problems[0].what
                Console().warning(f"{what}; restart {attempt} of {restarts} from the last checkpoint")

    def _attempt(self, ray: Any, command: Sequence[str], attempt: int, stop: StopRequest) -> int:
        """Run all ranks once and return the exit code. Raises RankLost, and SystemLimit if ranks cannot be started."""
        group = ray.util.placement_group([self.bundle] * self.nodes, strategy="STRICT_SPREAD")
        try:
            if not self._wait_for_nodes(ray, group, stop):
                return int(Exit.INTERRUPTED)
            gpus = self.gpus_per_node / self.ranks_per_node
            # Two threads: `stop` is called while `run` waits for the process.
            actor = ray.remote(num_cpus=self.cpus_per_rank, num_gpus=gpus, max_concurrency=2, max_restarts=0)(_Rank)
            scheduling = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
            actors = [
                actor.options(scheduling_strategy=scheduling(group, rank // self.ranks_per_node)).remote()
                for rank in range(self.world_size)
            ]
            places = [actor.place.remote() for actor in actors]
            if not _wait_for_all(ray, places, stop):
                return int(Exit.INTERRUPTED)
            environments = self._environments(ray, ray.get(places), attempt)
            return _supervise(ray, actors, command, environments, stop)
        except ray.exceptions.RayTaskError as error:  # raised by the actor itself
            fix = "make sure that the current folder and the Python interpreter exist on all nodes"
            raise SystemLimit(f"cannot start a rank: {error.cause}", where="launcher=ray", fix=fix) from error
        except ray.exceptions.RayError as error:
            what = f"a node or rank was lost: {(str(error).strip() or repr(error)).splitlines()[0]}"
            raise RankLost(what, where="launcher=ray", fix=_LOST_FIX) from error
        finally:
            with suppress(ray.exceptions.RayError):
                ray.util.remove_placement_group(group)  # also kills its actors, and thereby their ranks

    def _wait_for_nodes(self, ray: Any, group: Any, stop: StopRequest) -> bool:
        ready = group.ready()
        if not ray.wait([ready], timeout=POLL_S)[0]:
            amounts = " and ".join(f"{amount:g} {name}" for name, amount in self.bundle.items())
            Console().info(f"waiting for {self.nodes} nodes of the Ray cluster with {amounts} each")
        return _wait_for_all(ray, [ready], stop)

    def _environments(self, ray: Any, places: Sequence[_Place], attempt: int) -> list[dict[str, str]]:
        """Return the variables that torchrun would set, for each rank; all ranks of a node see all its GPUs."""
        environments = []
        for rank in range(self.world_size):
            node, local_rank = divmod(rank, self.ranks_per_node)
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(local_rank),
                "WORLD_SIZE": str(self.world_size),
                "LOCAL_WORLD_SIZE": str(self.ranks_per_node),
                "MASTER_ADDR": places[0].host,
                "MASTER_PORT": str(places[0].port),
                "TORCHELASTIC_RESTART_COUNT": str(attempt),
                "RAY_JOB_ID": ray.get_runtime_context().get_job_id(),  # for launcher_id
            }
            if self.gpus_per_node:
                first = node * self.ranks_per_node
                gpus = [gpu for place in places[first : first + self.ranks_per_node] for gpu in place.gpus]
                environment["CUDA_VISIBLE_DEVICES"] = ",".join(dict.fromkeys(gpus))
            environments.append(environment)
        return environments


@dataclass(frozen=True)
class _Place:
    """Where a rank runs: the address of its node, a free port there, and the GPUs that Ray reserved for it."""

    host: str
    port: int
    gpus: tuple[str, ...]


class _Rank:
    """The actor of a rank: starts its process, which dies with the actor."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.is_stopped = False
        self.lock = threading.Lock()

    def place(self) -> _Place:
        ray = require("ray", "ray")
        with socket.socket() as probe:
            # The port is reserved only until the socket is closed. If another program takes it before rank 0 listens on
            # it, the start fails.
            probe.bind(("", 0))
            port = int(probe.getsockname()[1])
        return _Place(ray.util.get_node_ip_address(), port, tuple(map(str, ray.get_gpu_ids())))

    def run(self, command: list[str], environment: dict[str, str], folder: str) -> int:
        """Run the process to its end; return its exit code, or minus the signal that ended it."""
        with self.lock:
            if self.is_stopped:
                return int(Exit.PREEMPTED)
            words = child_command(command, signal.SIGKILL)
            self.process = subprocess.Popen(words, env={**os.environ, **environment}, cwd=folder)
        return self.process.wait()

    def stop(self) -> None:
        with self.lock:
            self.is_stopped = True
            if self.process is not None:
                self.process.send_signal(signal.SIGUSR1)


def _supervise(
    ray: Any,
    actors: Sequence[Any],
    command: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    stop: StopRequest,
) -> int:
    """Start the ranks and wait for all; return the exit code. Raises RankLost if one was killed or cannot be reached.

    After the first failure, the other ranks have GRACE_S seconds to exit; the caller then kills them.
    """
    running = [
        actor.run.remote(list(command), environment, str(Path.cwd()))
        for actor, environment in zip(actors, environments, strict=True)
    ]
    codes: list[int] = []
    is_signalled, deadline = False, float("inf")
    while running and time.monotonic() < deadline:
        done, running = ray.wait(running, timeout=POLL_S)
        codes += ray.get(done)
        if killed := [-code for code in codes if code < 0]:
            what = f"a rank was ended by {signal.Signals(killed[0]).name}"
            raise RankLost(what, where="launcher=ray", fix=_LOST_FIX)
        if any(code not in _NO_FAILURE for code in codes):
            deadline = min(deadline, time.monotonic() + GRACE_S)
        if stop.requested and not is_signalled:
            is_signalled = True
            for actor in actors:
                actor.stop.remote()  # if an actor is lost, its `run` reports that
    causes = [code for code in codes if code not in _NO_FAILURE]
    if not causes and Exit.RANK_LOST in codes:
        raise RankLost("ranks can no longer reach each other", where="launcher=ray", fix=_LOST_FIX)
    return causes[0] if causes else max(codes)


def _wait_for_all(ray: Any, refs: Sequence[Any], stop: StopRequest) -> bool:
    while not stop.requested:
        if len(ray.wait(refs, num_returns=len(refs), timeout=POLL_S)[0]) == len(refs):
            return True
    return False


_LOST_FIX = "run the command again to resume from the last checkpoint"
# By default, Ray tries an address without a cluster 20 times, about 40 s each; here twice, 15 s each (Ray 2.60).
_CONNECT_LIMITS = {"RAY_NUM_REDIS_GET_RETRIES": "2", "RAY_py_gcs_connect_timeout_s": "5"}
DEFAULT_RESTARTS = (
    3  # for parallelism=single and auto, which have no key `restarts`; the default of the other strategies
)
POLL_S = 0.5
GRACE_S = 30.0
_NO_FAILURE = (Exit.DONE, Exit.PREEMPTED, Exit.RANK_LOST)  # RANK_LOST: a consequence of what happened to another rank
