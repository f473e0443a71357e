"""Rank and world size of a process, read from the environment before process groups exist."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from runner.base.errors import ConfigError, Problem, RepeatedConfigError

_UNKNOWN = 10**18  # stands for an invalid number; larger than any valid one


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
    because srun may start one torchrun per machine. Raises ConfigError with all invalid variables, or
    RepeatedConfigError on every rank of a machine except the first.
    """
    if "RANK" in environment:
        return _read_torchrun(environment)
    return _read_srun(environment) if _is_srun_task(environment) else None


def remove_default_threads() -> None:
    """Unset OMP_NUM_THREADS if torchrun chose it, so that this rank uses its share of the cores.

    If the user has not set it, torchrun exports 1 to its ranks. The environment in which torchrun itself was started
    then lacks the variable. Must be called before torch is loaded, because OpenMP reads the variable only once.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get("OMP_NUM_THREADS") != "1":
        return
    try:
        given = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
    except OSError:  # the parent has exited or belongs to another user
        return
    if not any(variable.startswith(b"OMP_NUM_THREADS=") for variable in given):
        del os.environ["OMP_NUM_THREADS"]


def launcher_id() -> str:
    """Identify what started this process and would restart it: a SLURM or Ray job, or the parent process."""
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
    variables = _Variables(environment)
    world_size = variables.number("WORLD_SIZE", least=1)
    num_local_ranks = variables.number("LOCAL_WORLD_SIZE", least=1, most=world_size)
    rank = RankInfo(
        variables.number("RANK", most=world_size - 1),
        local_rank := variables.number("LOCAL_RANK", most=num_local_ranks - 1),
        world_size,
        num_local_ranks,
        f"tcp://{variables.text('MASTER_ADDR')}:{variables.number('MASTER_PORT', least=1, most=_MAX_PORT)}",
        variables.number("TORCHELASTIC_RESTART_COUNT", default=0),
    )
    variables.raise_problems(local_rank)
    return rank


def _read_srun(environment: Mapping[str, str]) -> RankInfo | None:
    """Return the rank of a SLURM task; variables of the step take precedence over those of the job."""
    variables = _Variables(environment)
    world_size = variables.number(variables.first("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), least=1)
    if world_size == 1:
        return None
    port = 20000 + variables.number("SLURM_JOB_ID") % 20000  # a port per job: jobs may share a machine
    port = variables.number("MASTER_PORT", default=port, least=1, most=_MAX_PORT)
    num_local_ranks = _num_local_tasks(variables, world_size)
    rank = RankInfo(
        variables.number("SLURM_PROCID", most=world_size - 1),
        local_rank := variables.number("SLURM_LOCALID", most=num_local_ranks - 1),
        world_size,
        num_local_ranks,
        f"tcp://{_first_host(variables)}:{port}",
        variables.number("SLURM_RESTART_COUNT", default=0),
    )
    variables.raise_problems(local_rank)
    return rank


def _is_srun_task(environment: Mapping[str, str]) -> bool:
    """Return whether srun started this process: batch scripts and salloc shells have no step ID, or a special one."""
    step = environment.get("SLURM_STEP_ID", "")
    is_special = step.isdecimal() and int(step) >= _FIRST_SPECIAL_STEP
    return "SLURM_JOB_ID" in environment and "SLURM_PROCID" in environment and step != "" and not is_special


def _num_local_tasks(variables: _Variables, world_size: int) -> int:
    """Return the number of tasks on this machine; the last machine may have fewer."""
    name = variables.first("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")
    text = variables.text(name)
    try:
        counts = expand_tasks(text)
    except ValueError:
        return variables.reject(name, "must have the form 2(x3),1")
    if name == "SLURM_NTASKS_PER_NODE":
        return min(counts[0], world_size)
    if world_size != _UNKNOWN and sum(counts) != world_size:
        return variables.reject(name, f"must add up to {world_size} tasks")
    node = variables.number("SLURM_NODEID", default=0, most=len(counts) - 1)
    return _UNKNOWN if node == _UNKNOWN else counts[node]


def _first_host(variables: _Variables) -> str:
    """Return the host of rank 0, which `MASTER_ADDR` may override."""
    if address := variables.environment.get("MASTER_ADDR"):
        return address
    name = variables.first("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    text = variables.text(name)
    try:
        return expand_hosts(text)[0]
    except ValueError:
        variables.reject(name, "must be a list of machines such as n[1-2,5]")
        return ""


# ---------------------------------------------------------------- variables


class _Variables:
    """Reads environment variables, and collects all that are invalid."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment
        self._problems: dict[str, str] = {}  # name -> what is wrong with it

    def first(self, *names: str) -> str:
        """Return the first name that is set, or the last one if none is."""
        return next((name for name in names if self.environment.get(name)), names[-1])

    def text(self, name: str) -> str:
        """Return the value; empty if it is not set, which is recorded as a problem."""
        value = self.environment.get(name, "")
        if not value:
            self.reject(name, "")
        return value

    def number(self, name: str, *, default: int | None = None, least: int = 0, most: int = _UNKNOWN) -> int:
        """Return the value as an integer; _UNKNOWN if it is invalid, so that no variable is rejected because of it."""
        if default is not None and not self.environment.get(name):
            return default
        text = self.text(name)
        if re.fullmatch(r"\d{1,18}", text) is None or not least <= int(text) <= most:
            # The limit may be _UNKNOWN - 1, if the world size is invalid.
            limit = f"from {least} to {most}" if most < _UNKNOWN - 1 else f"of at least {least}"
            return self.reject(name, f"must be an integer {limit}")
        return int(text)

    def reject(self, name: str, expected: str) -> int:
        """Record that the variable is invalid or not set; return _UNKNOWN."""
        value = self.environment.get(name)
        self._problems[name] = f"{expected}, but is {value}" if value else "not set"
        return _UNKNOWN

    def raise_problems(self, local_rank: int) -> None:
        """Raise ConfigError if a variable is invalid; variables with the same problem are listed together.

        Ranks cannot communicate yet. Under torchrun and srun, all ranks of a machine have the same variables except
        for their rank numbers, so only the first rank reports a problem that all of them have.
        """
        names: dict[str, list[str]] = {}
        for name, what in self._problems.items():
            names.setdefault(what, []).append(name)
        if names:
            problems = [Problem(what, ", ".join(invalid), _FIX) for what, invalid in names.items()]
            problems = [*(replace(problem, fix="") for problem in problems[:-1]), problems[-1]]  # one common fix
            is_started_together = any(name in self.environment for name in ("TORCHELASTIC_RUN_ID", "SLURM_STEP_ID"))
            if is_started_together and 0 < local_rank < _UNKNOWN and not _OWN_VARIABLES & self._problems.keys():
                raise RepeatedConfigError(problems)
            raise ConfigError(problems)


_FIX = "start the ranks with torchrun, or with srun and one task per rank; unset RANK to train in a single process"
_OWN_VARIABLES = {"RANK", "LOCAL_RANK", "SLURM_PROCID", "SLURM_LOCALID"}  # differ between the ranks of a machine
_MAX_PORT = 2**16 - 1
_FIRST_SPECIAL_STEP = 0xFFFFFFF0  # SLURM numbers batch scripts and interactive shells from here on
_GROUP = r"(?:[A-Za-z0-9_.-]+|\[\d[\d,-]*\])+"


def _expand_ranges(ranges: str) -> list[str]:
    """Expand ranges such as `01-03,7`, keeping leading zeros. Raises ValueError if there is no number."""
    numbers: list[str] = []
    for part in ranges.split(","):
        low, _, high = part.partition("-")
        numbers += [f"{number:0{len(low)}d}" for number in range(int(low), int(high or low) + 1)]
    if not numbers:
        raise ValueError(ranges)
    return numbers


@contextmanager
def patched_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside the context."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
