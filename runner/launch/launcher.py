"""Where a run takes place: here, or on machines that a scheduler gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from runner.base.choice import make
from runner.base.configuration import Configuration
from runner.base.values import Annotated, Auto, Count, Matches, PositiveInt
from runner.launch.slurm import Slurm


class Launcher:
    """Hands a run to somebody else; this one to nobody."""

    def launch(self, configuration: Configuration) -> int | None:
        """Return the exit code of the launch, or None where the run takes place in this process."""
        return None


class ToSlurm(Launcher):
    """Hands the run to SLURM."""

    def __init__(self, job: Slurm) -> None:
        self.job = job

    def launch(self, configuration: Configuration) -> int | None:
        return self.job.submit(configuration)


def launched(configuration: Configuration) -> int | None:
    """Return the exit code where the run was handed to a scheduler, None where it takes place in this process.

    Raises ConfigError where it cannot be handed over.
    """
    choice = configuration.choices["launcher"]
    return make(LAUNCHERS, choice.function, **choice.options).launch(configuration)


def local() -> Launcher:
    """Train here: in this process and those that it starts, or as the rank that torchrun or srun made of it."""
    return Launcher()


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
    """Submit a job to SLURM, which trains there and goes on by itself when it is preempted or its time is up.

    partition       where the job waits; null: the cluster's default
    nodes           machines
    gpus_per_node   GPUs of each machine
    tasks_per_node  ranks on each machine; auto: one for each GPU, and one where there is none
    cpus_per_task   CPU cores of each rank, for its data workers too; null: the cluster's default
    mem_gb          memory of each machine in GB; null: the cluster's default
    time_min        minutes until the job is stopped; it saves, and is queued again
    account         who pays; null: your default
    qos             quality of service; null: your default
    constraint      features that the machines must have; null: any
    exclusive       share the machines with no other job
    signal_s        seconds before the end of the time at which the run is told to save and leave
    requeue_times   how often the job is queued again at most
    """
    return ToSlurm(
        Slurm(
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
    )


LAUNCHERS: Mapping[str, Callable[..., Launcher]] = {"local": local, "slurm": slurm}
