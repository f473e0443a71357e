"""Rank and world size of a process, read from the environment before process groups exist."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from runner.base.errors import ConfigError, Problem


@dataclass(frozen=True)
class RankInfo:
    """One rank of a run.

    rank        rank among all processes; rank 0 writes and prints
    local_rank  rank among the processes of this machine
    store       rendezvous store: file:///path on one machine, tcp://host:port for several; empty: single process
    attempt     number of previous starts; ranks of other attempts must not join
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    num_local_ranks: int = 1
    store: str = ""
    attempt: int = 0


def detect_rank(environment: Mapping[str, str]) -> RankInfo | None:
    """Return the rank that torchrun or srun assigned to this process; None if none did.

    Neither the shell of a batch script nor a step with a single task is a rank. torchrun takes precedence over srun,
    because srun may start one torchrun per machine. Raises ConfigError with all invalid variables.
    """
    if "RANK" in environment:
        return _read_torchrun(_Variables(environment))
    if _is_srun_task(environment):
        return _read_srun(_Variables(environment))
    return None


def launcher_id() -> str:
    """Return an identifier of the launcher, which also restarts this process: a SLURM or Ray job, or the parent."""
    for variable, kind in (("SLURM_JOB_ID", "job"), ("RAY_JOB_ID", "Ray job")):
        if job := os.environ.get(variable):
            return f"{kind} {job}"
    return f"process {os.getppid()}"


def expand_hosts(nodelist: str) -> list[str]:
    """Expand a SLURM node list: `n[01-03,7],login` is n01, n02, n03, n7 and login.

    Raises ValueError if the list is malformed.
    """
    hosts: list[str] = []
    for group in re.findall(_GROUP, nodelist):
        names = [""]
        for plain, numbers in re.findall(r"([^\[\],]+)|\[([^\[\]]*)\]", group):
            names = [name + end for name in names for end in ([plain] if plain else _expand_ranges(numbers))]
        hosts += names
    if not hosts or re.fullmatch(rf"{_GROUP}(,{_GROUP})*", nodelist) is None:
        raise ValueError(nodelist)
    return hosts


def expand_tasks(tasks_per_node: str) -> list[int]:
    """Return the number of tasks per machine: `2(x3),1` is 2, 2, 2 and 1.

    Raises ValueError if the list is malformed.
    """
    counts: list[int] = []
    for group in tasks_per_node.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", group)
        if match is None:
            raise ValueError(tasks_per_node)
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


# ---------------------------------------------------------------- torchrun and srun


def _read_torchrun(variables: _Variables) -> RankInfo:
    world_size = variables.number("WORLD_SIZE", at_least=1)
    num_local_ranks = variables.number("LOCAL_WORLD_SIZE", at_least=1)
    rank_info = RankInfo(
        variables.number("RANK", below=world_size, of="WORLD_SIZE"),
        variables.number("LOCAL_RANK", below=num_local_ranks, of="LOCAL_WORLD_SIZE"),
        world_size,
        num_local_ranks,
        f"tcp://{variables.text('MASTER_ADDR')}:{variables.port('MASTER_PORT')}",
        variables.number("TORCHELASTIC_RESTART_COUNT", default=0),
    )
    if not variables.is_wrong("WORLD_SIZE"):
        variables.expect(
            num_local_ranks <= world_size, "LOCAL_WORLD_SIZE", f"must be at most WORLD_SIZE ({world_size})"
        )
    variables.raise_problems("start the ranks with torchrun, or unset RANK to train alone")
    return rank_info


def _read_srun(variables: _Variables) -> RankInfo | None:
    """Return the rank of a SLURM task; variables of the step take precedence over those of the job."""
    num_tasks = variables.first("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    world_size = variables.number(num_tasks, at_least=1)
    if world_size == 1 and not variables.is_wrong(num_tasks):
        return None
    job_id = variables.number("SLURM_JOB_ID")
    num_local_ranks = _num_local_tasks(variables, world_size)
    rank_info = RankInfo(
        variables.number("SLURM_PROCID", below=world_size, of=num_tasks),
        variables.number("SLURM_LOCALID", below=num_local_ranks, of="the tasks of this machine"),
        world_size,
        num_local_ranks,
        f"tcp://{_first_host(variables)}:{variables.port('MASTER_PORT', default=20000 + job_id % 20000)}",
        variables.number("SLURM_RESTART_COUNT", default=0),
    )
    variables.raise_problems("start the ranks with srun, one task per rank")
    return rank_info


def _is_srun_task(environment: Mapping[str, str]) -> bool:
    """Return whether srun started this process: batch scripts and salloc shells have no step, or a reserved number."""
    step = environment.get("SLURM_STEP_ID", "")
    is_special = step.isdecimal() and int(step) >= _FIRST_SPECIAL_STEP
    return "SLURM_JOB_ID" in environment and "SLURM_PROCID" in environment and step != "" and not is_special


def _num_local_tasks(variables: _Variables, world_size: int) -> int:
    """Return the number of tasks on this machine; the last machine may have fewer."""
    name = variables.first("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")
    try:
        counts = expand_tasks(variables.text(name))
    except ValueError:
        variables.expect(not variables.has(name), name, "must be like 2(x3),1")
        return world_size
    if name == "SLURM_NTASKS_PER_NODE":
        return min(counts[0], world_size)
    node = variables.number(
        "SLURM_NODEID", default=0, below=len(counts), of=f"the machines in {name}={variables.text(name)}"
    )
    if not variables.is_wrong(variables.first("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")):
        variables.expect(sum(counts) == world_size, name, f"must be {world_size} tasks in all")
    return counts[node] if node < len(counts) else world_size


def _first_host(variables: _Variables) -> str:
    """Return the host of rank 0, which `MASTER_ADDR` may override."""
    if variables.has("MASTER_ADDR"):
        return variables.text("MASTER_ADDR")
    name = variables.first("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    nodelist = variables.text(name)
    try:
        return expand_hosts(nodelist)[0]
    except ValueError:
        variables.expect(not variables.has(name), name, "must be a list of machines such as n[1-2,5]")
        return ""


# ---------------------------------------------------------------- variables


class _Variables:
    """Reader of environment variables that collects all problems."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self.problems: list[Problem] = []

    def has(self, name: str) -> bool:
        return bool(self._environment.get(name))

    def first(self, *names: str) -> str:
        """Return the first name that is set, or the last one if none is."""
        return next((name for name in names if self.has(name)), names[-1])

    def is_wrong(self, name: str) -> bool:
        return any(problem.where == name for problem in self.problems)

    def expect(self, holds: bool, name: str, what: str) -> None:
        if not holds:
            self.problems.append(Problem(f"{what}, but is {self._environment.get(name)}", name))

    def text(self, name: str) -> str:
        if not self.has(name):
            self.problems.append(Problem("must be set, but is not", name))
        return self._environment.get(name, "")

    def number(
        self, name: str, *, default: int | None = None, at_least: int = 0, below: int | None = None, of: str = ""
    ) -> int:
        """Return an integer within its limits; the default, or the lower limit, if it is not set."""
        if not self.has(name) and default is not None:
            return default
        text = self.text(name)
        if not text:
            return at_least
        if re.fullmatch(r"\d{1,18}", text) is None:
            self.problems.append(Problem(f"must be an integer of at least {at_least}, but is {text!r}", name))
            return at_least
        number = int(text)
        self.expect(number >= at_least, name, f"must be at least {at_least}")
        if below is not None and not self.is_wrong(of):
            self.expect(number < below, name, f"must be below {of} ({below})")
        return number

    def port(self, name: str, *, default: int | None = None) -> int:
        port = self.number(name, default=default, at_least=1)
        self.expect(port < 2**16, name, f"must be a port, below {2**16}")
        return port

    def raise_problems(self, fix: str) -> None:
        if self.problems:
            *others, last = dict.fromkeys(self.problems)
            raise ConfigError([*others, Problem(last.what, last.where, fix)])


_FIRST_SPECIAL_STEP = 0xFFFFFFF0  # SLURM numbers batch scripts and interactive shells from here on
_GROUP = r"(?:[A-Za-z0-9_.-]+|\[\d[\d,-]*\])+"


def _expand_ranges(ranges: str) -> list[str]:
    """Expand ranges such as `01-03,7`, keeping leading zeros. Raises ValueError if there are none."""
    numbers: list[str] = []
    for part in ranges.split(","):
        low, _, high = part.partition("-")
        numbers += [f"{number:0{len(low)}d}" for number in range(int(low), int(high or low) + 1)]
    if not numbers:
        raise ValueError(ranges)
    return numbers
