"""Detect a hanging rank from the heartbeats of all local ranks and the process states of the system.

A rank that waits for another one is not the cause while that one is busy within its own limit, for example writing a
checkpoint. Only a supervisor of all ranks can tell.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.base import stacks
from runner.base.errors import AccelRunError, Hang
from runner.base.heartbeat import Heartbeat, HeartbeatTable
from runner.base.process_tree import descendants, state_of
from runner.engine.watchdog import LEAST_S, WORKER, hang, way_out

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

    sign: Heartbeat
    stopped_s: float = 0.0
    silent_s: float = 0.0
    is_traced: bool = False

    @property
    def is_silent(self) -> bool:
        """True if the process runs but its watchdog does not: C code holds the GIL."""
        return self.silent_s > self.sign.limit_s and not self.stopped_s


def odd_one(states: Mapping[int, RankState]) -> int | None:
    """Return the blocking rank; None if no rank exceeds its limit, or a debugger is attached to one."""
    if any(state.is_traced for state in states.values()):
        return None
    watched = {rank: state for rank, state in states.items() if state.sign.ticks}
    # What a stopped rank shows may be older than what it did last: the others are the measure, too.
    stopped_s = min([LEAST_S, *(state.sign.limit_s for state in watched.values())])
    for rank, state in states.items():  # also one that was stopped before its watchdog looked for the first time
        if watched and state.stopped_s > stopped_s:
            return rank
    for rank, state in watched.items():
        if state.is_silent:
            return rank
    overdue = [rank for rank, state in watched.items() if state.sign.is_overdue]
    idle = [rank for rank in overdue if not watched[rank].sign.waits]
    if not idle and (len(watched) < len(states) or not all(state.sign.waits for state in states.values())):
        return None
    # On a GPU who waits for others is not always seen to: it stands wherever the device is waited for. As long as
    # another one is busy and may be, all may be waiting for that.
    if any(not state.sign.waits and not state.sign.is_overdue for state in watched.values()):
        return None
    signs = {rank: watched[rank].sign for rank in idle or overdue}
    return min(signs, key=lambda rank: (signs[rank].update, -signs[rank].waited_s, rank), default=None)


class Hangs:
    """Looks at the ranks from time to time; by its own count, so that a machine that slept does not matter.

    clock   seconds, of which only differences count
    states  what was seen of each rank at the last look
    """

    def __init__(self, folder: Path, pids: Mapping[int, int], clock: Callable[[], float] = time.monotonic) -> None:
        self.folder, self.pids, self._clock = folder, pids, clock
        self._looked = clock()
        self._boards = {rank: HeartbeatTable(folder, rank) for rank in pids}
        self.states = {rank: RankState(Heartbeat()) for rank in pids}
        self._suspected: int | None = None

    def look(self, living: Sequence[int]) -> HangReport | None:
        """Return a hang of the living ranks; to be called every TICK_S seconds, more often does no harm."""
        if self._clock() - self._looked < TICK_S:
            return None
        self._looked = self._clock()
        self.states = {rank: self._state(rank) for rank in living}
        odd = odd_one(self.states)
        suspected, self._suspected = self._suspected, odd
        if odd is None or odd != suspected:  # a sign may be half written: what holds must hold twice
            return None
        return self._told(odd)

    def made(self) -> int:
        """Return the number of updates of the ranks when they ended, or now."""
        return max(int(board.made().value) for board in self._boards.values())

    def place(self, rank: int) -> dict[str, Any]:
        """Return where a rank is, or was when it ended, as far as it has shown that."""
        sign = self._boards[rank].read()
        known = {"phase": sign.phase, "update": sign.update} if sign.phase else {}
        return {"rank": rank, **known}

    def is_ending(self) -> bool:
        """Tell whether training is over, by rank 0, which records how the run ended."""
        return self._boards[0].ending().value

    def _state(self, rank: int) -> RankState:
        sign, before = self._boards[rank].read(), self.states[rank]
        state = state_of(self.pids[rank])
        is_stopped, is_traced = state == "T", state == "t"
        moves = sign.ticks != before.sign.ticks or is_traced
        return RankState(
            sign,
            before.stopped_s + TICK_S if is_stopped else 0.0,
            0.0 if moves else before.silent_s + TICK_S,
            is_traced,
        )

    def _told(self, odd: int) -> HangReport:
        """Return what is to be said, with the stacks of all ranks that answer."""
        numbers = {pid: rank for rank, pid in self.pids.items() if rank in self.states}
        states = {pid: state_of(pid) for pid in numbers}
        workers = {child: (pid, state) for pid in numbers for child, state in descendants(pid).items()}
        answers: dict[int, str] = {}
        with suppress(OSError):
            answers = stacks.asked(self.folder, states | {child: state for child, (_, state) in workers.items()})
        named = {self._name(rank): answers.get(pid, "does not respond") for pid, rank in numbers.items()}
        own = self._name(odd)
        named = {own: named.pop(own), **named}
        named |= {
            f"{WORKER} {child} of rank {numbers[pid]}": answers[child]
            for child, (pid, _) in workers.items()
            if child in answers
        }
        return HangReport(odd, self._error(odd, named), stacks.together(named))

    def _error(self, odd: int, named: Mapping[str, str]) -> AccelRunError:
        state, who = self.states[odd], self._name(odd)
        sign = state.sign
        # What the odd one shows may be older than what it did last: all are in about the same update.
        newest = max(
            (state.sign for state in self.states.values()), key=lambda there: (there.phase != "", there.update)
        )
        doing = f"in update {newest.update} of phase {newest.phase}" if newest.phase else "before the first phase"
        if state.stopped_s:
            what = f"{who} {stacks.STOPPED} {doing} for {state.stopped_s:.0f} s, and the other ranks wait for it"
            fix = "`kill -CONT` in time lets it continue"
            return Hang(what, fix=f"{fix}\n{way_out(named)}")
        if state.is_silent:
            what = f"{who} has not run Python code {doing} for {state.silent_s:.0f} s"
            return Hang(what, fix=way_out(named))
        if sign.waits:
            who = f"{who} and all other ranks wait for each other (deadlock)"
        return hang(sign, odd, who, named)

    def _name(self, rank: int) -> str:
        return f"rank {rank} of {len(self.pids)}"
