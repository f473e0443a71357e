"""Connect a run to the mirror of its checkpoints: download before it starts, copy while it trains, wait at its end."""

from __future__ import annotations

import threading
import time

from runner.base.world import World
from runner.config.option_table import make
from runner.durable.checkpoint import newest
from runner.durable.directory import RunDirectory
from runner.durable.mirror import Mirror, fetch
from runner.durable.mirror_store import MirrorError, MirrorStore
from runner.durable.mirror_thread import MirrorThread
from runner.engine.run import TrainingRun
from runner.engine.run_screen import Screen
from runner.engine.save_policy import CHECKPOINTS, SavePolicy
from runner.engine.watchdog import END, START, ProgressMark
from runner.plan.run_plan import Plan


def policy_of(plan: Plan) -> SavePolicy:
    """Return the settings of the group `checkpoint`."""
    choice = plan.choices["checkpoint"]
    return make(CHECKPOINTS, choice.function, **choice.options)


def download(plan: Plan, world: World, directory: RunDirectory, screen: Screen, pulse: ProgressMark) -> Mirror | None:
    """Download what the run resumes from, on rank 0, and return the mirror; None without one.

    A download may take longer than the timeouts of a collective and of the watchdog, so both are kept informed.
    Raises what `fetch` raises. If there are checkpoints here, an unreachable mirror is only a warning.
    """
    url = policy_of(plan).mirror
    if url is None or not _is_used(plan):
        return None
    mirror = Mirror(MirrorStore(url, directory.name))
    if plan.settings.resume == "fresh":
        return mirror
    failed: list[BaseException] = []
    thread = threading.Thread(target=_fetch, args=(mirror, directory, screen, failed), name="mirror", daemon=True)
    thread.start()
    is_loading = True
    while is_loading:
        thread.join(_BEAT_S)
        pulse.now = (START, 0)
        is_loading = world.broadcast(thread.is_alive())  # at least once: the other ranks wait for it
    if not failed:
        return mirror
    if not isinstance(failed[0], MirrorError) or newest(directory.checkpoints) is None:
        raise failed[0]
    screen.warn(f"mirror: {failed[0].problems[0].what}; the run resumes from its local checkpoints")
    return mirror


def _fetch(mirror: Mirror, directory: RunDirectory, screen: Screen, failed: list[BaseException]) -> None:
    try:
        fetch(mirror, directory, screen.say, screen.warn)
    except BaseException as error:  # raised in the main thread
        failed.append(error)


def await_download(plan: Plan, world: World) -> None:
    """Wait on another rank until `download` is done."""
    if _is_used(plan) and plan.settings.resume != "fresh":
        while world.broadcast(None):
            pass


def begin_copies(run: TrainingRun, mirror: Mirror | None, *, resumes: bool) -> None:
    """Copy the checkpoints of the run from now on. Raises MirrorError if a new run cannot write to its mirror.

    resumes  the run has checkpoints here, so that it can start without the mirror
    """
    uid = run.provenance.uid
    if mirror is None or uid is None:
        return
    keep, warn = policy_of(run.plan).keep, run.observers.screen.warn
    thread = MirrorThread(mirror, run.directory, uid, keep_last=keep, warn=warn)
    thread.start(must_work=not resumes)
    run.mirror = thread


def end_copies(run: TrainingRun, *, waits: bool) -> None:
    """Wait for the copies, at most as long as `mirror_wait_s` and the time before the kill allow, and report them.

    waits  False: do not wait
    """
    policy, asked_at = policy_of(run.plan), run.stop.requested_at
    seconds = policy.mirror_wait_s if waits else 0.0
    if policy.grace_s is not None and asked_at is not None:
        seconds = max(0.0, min(seconds, asked_at + policy.grace_s - time.monotonic() - _RESERVE_S))

    def beat() -> None:
        run.pulse.now = (END, run.pulse.now[1])

    line = run.mirror.finish(seconds, beat)
    if line:
        run.observers.screen.say(line)


def _is_used(plan: Plan) -> bool:
    return policy_of(plan).mirror is not None and not plan.choices["profiler"].options.get("only")


_BEAT_S = 5.0  # far below the timeouts of a collective and of the watchdog
_RESERVE_S = 1.0  # to end the process before it is killed
