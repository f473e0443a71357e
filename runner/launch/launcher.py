"""Launchers: run on this machine, on a Ray cluster, or submit to a scheduler."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from runner.base.values import Annotated, Auto, Count, Matches, PositiveInt
from runner.config.chosen_option import make_chosen
from runner.config.configuration import Configuration
from runner.launch.ray_cluster import RayCluster
from runner.launch.slurm import Slurm

Launcher = Slurm | RayCluster | None  # None: on this machine


def slurm_resources(configuration: Configuration) -> Slurm | None:
    """Return the SLURM launcher of the run, or None if the run uses another launcher."""
    launcher = _make_launcher(configuration)
    return launcher if isinstance(launcher, Slurm) else None


def submit(configuration: Configuration) -> int | None:
    """Run with the configured launcher; return the exit code, or None to run in this process.

    Raises ConfigError if the run cannot be submitted.
    """
    launcher = _make_launcher(configuration)
    return None if launcher is None else launcher.launch(configuration)


def _make_launcher(configuration: Configuration) -> Launcher:
    choice = configuration.choices["launcher"]
    return make_chosen(LAUNCHERS, choice)


def local() -> None:
    """Train on this machine: in this process and its children, or as a rank started by torchrun or srun."""


def slurm(
    *,
    partition: Annotated[str, Matches("a name without spaces", r"[\w.:@+,-]+")] | None = None,
    nodes: PositiveInt = 1,
    gpus_per_node: Count = 0,
    tasks_per_node: PositiveInt | Auto = "auto",
    cpus_per_task: PositiveInt | None = None,
    mem_gb: PositiveInt | None = None,
    time_min: PositiveInt = 60,
    account: Annotated[str, Matches("a name without spaces", r"[\w.:@+,-]+")] | None = None,
    qos: Annotated[str, Matches("a name without spaces", r"[\w.:@+,-]+")] | None = None,
    constraint: Annotated[str, Matches("features of nodes, such as a100|h100", r"[\w.:@+,&|*()\[\]-]+")] | None = None,
    exclusive: bool = False,
    signal_s: PositiveInt = 120,
    requeue_times: Count = 20,
) -> Launcher:
    """Submit the run as a SLURM job, which is requeued and resumes after preemption or its time limit.

    partition       partition; null: the cluster's default
    nodes           number of machines
    gpus_per_node   GPUs per node
    tasks_per_node  ranks per node; auto: one per GPU, one if there are no GPUs
    cpus_per_task   CPU cores per rank, including its data workers; null: the cluster's default
    mem_gb          memory per node in GB; null: the cluster's default
    time_min        time limit in minutes; the job then saves and is requeued
    account         account to charge; null: your default
    qos             quality of service; null: your default
    constraint      features that the machines must have, such as a100|h100; null: any
    exclusive       do not share the nodes with other jobs
    signal_s        seconds before the time limit at which the run is signalled to save and exit
    requeue_times   maximum number of requeues
    """
    return Slurm(
        partition=partition,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        tasks_per_node=max(gpus_per_node, 1) if tasks_per_node == "auto" else tasks_per_node,
        cpus_per_task=cpus_per_task,
        mem_gb=mem_gb,
        time_min=time_min,
        account=account,
        qos=qos,
        constraint=constraint,
        exclusive=exclusive,
        signal_s=signal_s,
        requeue_times=requeue_times,
    )


def ray(
    *,
    address: Annotated[str, Matches("auto, or host:port", r"[\w.:/\[\]-]+")] = "auto",
    nodes: PositiveInt = 1,
    gpus_per_node: Count = 0,
    ranks_per_node: PositiveInt | Auto = "auto",
    cpus_per_rank: PositiveInt = 1,
) -> Launcher:
    """Run the ranks on a Ray cluster and wait for them; after the loss of a node, they resume from a checkpoint.

    address         address of the cluster, such as head:6379; auto: the cluster of this machine
    nodes           number of machines
    gpus_per_node   GPUs per node
    ranks_per_node  ranks per node; auto: one per GPU, one if there are no GPUs
    cpus_per_rank   CPU cores per rank, including its data workers
    """
    per_node = max(gpus_per_node, 1) if ranks_per_node == "auto" else ranks_per_node
    return RayCluster(address, nodes, per_node, gpus_per_node, cpus_per_rank)


LAUNCHERS: Mapping[str, Callable[..., Launcher]] = {"local": local, "slurm": slurm, "ray": ray}
