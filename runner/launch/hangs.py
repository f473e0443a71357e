"""Detect a hanging rank from the heartbeats of all local ranks and the states of their processes in /proc.

A rank may wait longer than its limit while another rank is busy within its own limit, for example writing a checkpoint.
Only a process that observes all ranks can tell which rank blocks the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.base.errors import AccelRunError, Hang
from runner.engine.process.watchdog import BEFORE_UPDATE, MIN_TIMEOUT_S, WORKER, format_hang, hang_error
from runner.host import stacks
from runner.host.heartbeat import Heartbeat, HeartbeatTable
from runner.host.process_tree import descendants_of, process_state

TICK_S = 0.5


@dataclass(frozen=True)
class HangReport:
    """A hang: the blocking rank, the error, and the stacks of all ranks."""

    rank: int
    error: AccelRunError
    stacks: str


@dataclass(frozen=True)
class RankState:
    """State of a rank, observed from outside.

    stopped_s  seconds since it was stopped (SIGSTOP)
    silent_s   seconds since the last heartbeat of its watchdog
    is_traced  a debugger is attached
    """

    heartbeat: Heartbeat
    stopped_s: float = 0.0
    silent_s: float = 0.0
    is_traced: bool = False

    @property
    def is_silent(self) -> bool:
        """True if the process runs but its watchdog does not: C code holds the GIL."""
        return self.silent_s > self.heartbeat.limit_s and not self.stopped_s


def blocking_rank(states: Mapping[int, RankState]) -> int | None:
    """Return the blocking rank; None if no rank exceeds its limit, or a debugger is attached to one."""
    if any(state.is_traced for state in states.values()):
        return None
    watched = {rank: state for rank, state in states.items() if state.heartbeat.ticks}
    # The heartbeat of a stopped rank may be stale, so the limits of the other ranks apply, too.
    stopped_s = min([MIN_TIMEOUT_S, *(state.heartbeat.limit_s for state in watched.values())])
    for rank, state in states.items():  # including one that was stopped before its first heartbeat
        if watched and state.stopped_s > stopped_s:
            return rank
    for rank, state in watched.items():
        if state.is_silent:
            return rank
    overdue = [rank for rank, state in watched.items() if state.heartbeat.is_overdue]
    idle = [rank for rank in overdue if not watched[rank].heartbeat.is_waiting]
    if not idle and (len(watched) < len(states) or not all(state.heartbeat.is_waiting for state in states.values())):
        return None
    # On a GPU, a rank that waits for others may not report this, because its host blocks wherever it synchronizes with
    # the GPU. While another rank is busy within its limit, all may be waiting for that rank.
    if any(not state.heartbeat.is_waiting and not state.heartbeat.is_overdue for state in watched.values()):
        return None
    heartbeats = {rank: watched[rank].heartbeat for rank in idle or overdue}
    return min(heartbeats, key=lambda rank: (heartbeats[rank].update, -heartbeats[rank].waited_s, rank), default=None)


class HangDetector:
    """Check the ranks periodically, counting checks instead of time, so that a suspended machine causes no alarm.

    clock   returns the time in seconds
    states  state of each rank at the last check
    """

    def __init__(self, folder: Path, pids: Mapping[int, int], clock: Callable[[], float] = time.monotonic) -> None:
        self.folder, self.pids, self._clock = folder, pids, clock
        self._checked_at = clock()
        self._tables = {rank: HeartbeatTable(folder, rank) for rank in pids}
        self.states = {rank: RankState(Heartbeat()) for rank in pids}
        self._suspected: int | None = None

    def check(self, living: Sequence[int]) -> HangReport | None:
        """Return a hang of the living ranks, if any. Must be called every TICK_S seconds or more often."""
        if self._clock() - self._checked_at < TICK_S:
            return None
        self._checked_at = self._clock()
        self.states = {rank: self._state(rank) for rank in living}
        blocking = blocking_rank(self.states)
        suspected, self._suspected = self._suspected, blocking
        if blocking is None or blocking != suspected:  # a heartbeat may be partially written, so two checks must agree
            return None
        return self._report(blocking)

    def report_stopped(self, living: Sequence[int]) -> HangReport | None:
        """Return a report that names the first of the living ranks that is stopped (SIGSTOP), if any."""
        self.states = {rank: self.states[rank] for rank in living}
        stopped = next((rank for rank, state in self.states.items() if state.stopped_s), None)
        return None if stopped is None else self._report(stopped)

    def num_updates(self) -> int:
        """Return the number of completed updates, even after the ranks have exited."""
        return max(int(table.num_updates().value) for table in self._tables.values())

    def last_place(self, rank: int) -> dict[str, Any]:
        """Return the phase and update of a rank at its last heartbeat, if it had any."""
        heartbeat = self._tables[rank].read()
        place = {"phase": heartbeat.phase, "update": heartbeat.update} if heartbeat.phase else {}
        return {"rank": rank, **place}

    def is_ending(self) -> bool:
        """Return whether training is over on rank 0, which records how the run ended."""
        return self._tables[0].is_ending().value

    def has_nothing_to_save(self) -> bool:
        """Return whether no rank has completed an update, and none is writing a checkpoint or evaluating."""
        kinds = {state.heartbeat.kind for state in self.states.values()}
        return not self.num_updates() and not self.is_ending() and kinds <= {Heartbeat().kind, *BEFORE_UPDATE}

    def _state(self, rank: int) -> RankState:
        heartbeat, previous = self._tables[rank].read(), self.states[rank]
        state = process_state(self.pids[rank])
        is_stopped, is_traced = state == "T", state == "t"
        is_alive = heartbeat.ticks != previous.heartbeat.ticks or is_traced
        return RankState(
            heartbeat,
            previous.stopped_s + TICK_S if is_stopped else 0.0,
            0.0 if is_alive else previous.silent_s + TICK_S,
            is_traced,
        )

    def _report(self, blocking: int) -> HangReport:
        rank_by_pid = {pid: rank for rank, pid in self.pids.items() if rank in self.states}
        states = {pid: process_state(pid) for pid in rank_by_pid}
        trees = descendants_of(rank_by_pid)
        workers = {child: (pid, state) for pid, tree in trees.items() for child, state in tree.items()}
        stacks_by_pid: dict[int, str] = {}
        with suppress(OSError):
            stacks_by_pid = stacks.request_stacks(
                self.folder, states | {child: state for child, (_, state) in workers.items()}
            )
        stacks_by_name = {
            self._name(rank): stacks_by_pid.get(pid, "does not respond") for pid, rank in rank_by_pid.items()
        }
        first = self._name(blocking)
        stacks_by_name = {first: stacks_by_name.pop(first), **stacks_by_name}
        stacks_by_name |= {
            f"{WORKER} {child} of rank {rank_by_pid[pid]}": stacks_by_pid[child]
            for child, (pid, _) in workers.items()
            if child in stacks_by_pid
        }
        return HangReport(blocking, self._error(blocking, stacks_by_name), stacks.join_stacks(stacks_by_name))

    def _error(self, blocking: int, stacks_by_name: Mapping[str, str]) -> AccelRunError:
        state, subject = self.states[blocking], self._name(blocking)
        heartbeat = state.heartbeat
        # The heartbeat of the blocking rank may be stale. All ranks are in about the same update, so the newest
        # heartbeat of any rank is used.
        newest = max(
            (state.heartbeat for state in self.states.values()), key=lambda beat: (beat.phase != "", beat.update)
        )
        doing = f"in update {newest.update} of phase {newest.phase}" if newest.phase else "before the first phase"
        if state.stopped_s:
            what = f"{subject} {stacks.STOPPED} {doing} for {state.stopped_s:.0f} s, and the other ranks wait for it"
            fix = "if the process was stopped on purpose, continue it sooner (kill -CONT PID)"
            return Hang(what, fix=f"{fix}\n{format_hang(stacks_by_name)}")
        if state.is_silent:
            what = f"{subject} has executed no Python code for {state.silent_s:.0f} s, {doing}"
            return Hang(what, fix=format_hang(stacks_by_name))
        if heartbeat.is_waiting:
            subject = f"{subject} and all other ranks wait for each other (deadlock)"
        return hang_error(heartbeat, blocking, subject, stacks_by_name)

    def _name(self, rank: int) -> str:
        return f"rank {rank} of {len(self.pids)}"
