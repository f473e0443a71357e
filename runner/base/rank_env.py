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
    because srun may start one torchrun per machine. Raises ConfigError for an invalid variable.
    """
    if "RANK" in environment:
        return _read_torchrun(environment)
    return _read_srun(environment) if _is_srun_task(environment) else None


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


def _read_torchrun(environment: Mapping[str, str]) -> RankInfo:
    world_size = _number(environment, "WORLD_SIZE", least=1)
    num_local_ranks = _number(environment, "LOCAL_WORLD_SIZE", least=1, most=world_size)
    return RankInfo(
        _number(environment, "RANK", most=world_size - 1),
        _number(environment, "LOCAL_RANK", most=num_local_ranks - 1),
        world_size,
        num_local_ranks,
        f"tcp://{_text(environment, 'MASTER_ADDR')}:{_number(environment, 'MASTER_PORT', least=1, most=_MAX_PORT)}",
        _number(environment, "TORCHELASTIC_RESTART_COUNT", default=0),
    )


def _read_srun(environment: Mapping[str, str]) -> RankInfo | None:
    """Return the rank of a SLURM task; variables of the step take precedence over those of the job."""
    world_size = _number(environment, _first(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), least=1)
    if world_size == 1:
        return None
    port = 20000 + _number(environment, "SLURM_JOB_ID") % 20000
    port = _number(environment, "MASTER_PORT", default=port, least=1, most=_MAX_PORT)
    num_local_ranks = _num_local_tasks(environment, world_size)
    return RankInfo(
        _number(environment, "SLURM_PROCID", most=world_size - 1),
        _number(environment, "SLURM_LOCALID", most=num_local_ranks - 1),
        world_size,
        num_local_ranks,
        f"tcp://{_first_host(environment)}:{port}",
        _number(environment, "SLURM_RESTART_COUNT", default=0),
    )


def _is_srun_task(environment: Mapping[str, str]) -> bool:
    """Return whether srun started this process: batch scripts and salloc shells have no step, or a reserved number."""
    step = environment.get("SLURM_STEP_ID", "")
    is_special = step.isdecimal() and int(step) >= _FIRST_SPECIAL_STEP
    return "SLURM_JOB_ID" in environment and "SLURM_PROCID" in environment and step != "" and not is_special


def _num_local_tasks(environment: Mapping[str, str], world_size: int) -> int:
    """Return the number of tasks on this machine; the last machine may have fewer."""
    name = _first(environment, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")
    try:
        counts = expand_tasks(_text(environment, name))
    except ValueError:
        raise _invalid(environment, name, "must be like 2(x3),1") from None
    if name == "SLURM_NTASKS_PER_NODE":
        return min(counts[0], world_size)
    if sum(counts) != world_size:
        raise _invalid(environment, name, f"must be {world_size} tasks in all")
    return counts[_number(environment, "SLURM_NODEID", default=0, most=len(counts) - 1)]


def _first_host(environment: Mapping[str, str]) -> str:
    """Return the host of rank 0, which `MASTER_ADDR` may override."""
    if environment.get("MASTER_ADDR"):
        return environment["MASTER_ADDR"]
    name = _first(environment, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    try:
        return expand_hosts(_text(environment, name))[0]
    except ValueError:
        raise _invalid(environment, name, "must be a list of machines such as n[1-2,5]") from None


# ---------------------------------------------------------------- variables


def _first(environment: Mapping[str, str], *names: str) -> str:
    """Return the first name that is set, or the last one if none is."""
    return next((name for name in names if environment.get(name)), names[-1])


def _text(environment: Mapping[str, str], name: str) -> str:
    if not environment.get(name):
        raise _invalid(environment, name, "must be set")
    return environment[name]


def _number(
    environment: Mapping[str, str], name: str, *, default: int | None = None, least: int = 0, most: int = 10**18
) -> int:
    if default is not None and not environment.get(name):
        return default
    text = _text(environment, name)
    if re.fullmatch(r"\d{1,18}", text) is None or not least <= int(text) <= most:
        limit = f"from {least} to {most}" if most < 10**18 else f"of at least {least}"
        raise _invalid(environment, name, f"must be an integer {limit}")
    return int(text)


def _invalid(environment: Mapping[str, str], name: str, what: str) -> ConfigError:
    fix = "start the ranks with torchrun, or with srun and one task per rank; unset RANK to train alone"
    return ConfigError(Problem(f"{what}, but is {environment.get(name) or 'not set'}", name, fix))


_MAX_PORT = 2**16 - 1
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
