"""Connect a run to the mirror of its checkpoints: download before it starts, copy while it trains, wait at its end."""

from __future__ import annotations

import threading
import time

from runner.config.chosen_option import make_chosen
from runner.distributed.world import World
from runner.durable.checkpoint import newest_name
from runner.durable.directory import RunDirectory
from runner.durable.mirror import Mirror, fetch_checkpoints
from runner.durable.mirror_store import MirrorError, MirrorStore
from runner.durable.mirror_thread import MirrorThread
from runner.engine.checkpoints.save_policy import CHECKPOINTS, SavePolicy
from runner.engine.process.run_screen import Screen
from runner.engine.process.watchdog import END, START, ProgressMark
from runner.engine.run import TrainingRun
from runner.plan.run_plan import Plan


def checkpoint_policy(plan: Plan) -> SavePolicy:
    """Return the settings of the group `checkpoint`."""
    choice = plan.choices["checkpoint"]
    return make_chosen(CHECKPOINTS, choice)


def download_checkpoints(
    plan: Plan, world: World, directory: RunDirectory, screen: Screen, progress_mark: ProgressMark
) -> Mirror | None:
    """On rank 0, download the checkpoints from which the run can resume; return the mirror, or None.

    A download may take longer than the timeouts of collectives and of the watchdog, so progress is reported to both.
    Raises the errors of `fetch_checkpoints`. If the run has local checkpoints, an unreachable mirror is only a warning.
    """
    url = checkpoint_policy(plan).mirror
    if url is None or not _is_used(plan):
        return None
    mirror = Mirror(MirrorStore(url, directory.name))
    if plan.settings.resume == "fresh":
        return mirror
    errors: list[BaseException] = []
    thread = threading.Thread(
        target=_fetch_in_thread, args=(mirror, directory, screen, errors), name="mirror", daemon=True
    )
    thread.start()
    is_downloading = True
    while is_downloading:
        thread.join(_PROGRESS_INTERVAL_S)
        progress_mark.advance(START, 0)
        is_downloading = world.broadcast(thread.is_alive())  # at least once: the other ranks wait for False
    if not errors:
        return mirror
    if not isinstance(errors[0], MirrorError) or newest_name(directory.checkpoints) is None:
        raise errors[0]
    screen.warn(f"mirror: {errors[0].problems[0].what}; the run resumes from its local checkpoints")
    return mirror


def _fetch_in_thread(mirror: Mirror, directory: RunDirectory, screen: Screen, errors: list[BaseException]) -> None:
    try:
        fetch_checkpoints(mirror, directory, screen.info, screen.warn)
    except BaseException as error:  # raised in the main thread
        errors.append(error)


def wait_for_download(plan: Plan, world: World) -> None:
    """On a rank other than 0, receive the broadcasts of `download_checkpoints` until it has returned on rank 0."""
    if _is_used(plan) and plan.settings.resume != "fresh":
        while world.broadcast(None):
            pass


def start_mirroring(run: TrainingRun, mirror: Mirror | None, *, resumes: bool) -> None:
    """Start a thread that copies the checkpoints. Raises MirrorError if a new run cannot write to its mirror.

    resumes  the run has local checkpoints, so it can start even if it cannot write to the mirror
    """
    uid = run.provenance.uid
    if mirror is None or uid is None:
        return
    keep, warn = checkpoint_policy(run.plan).keep, run.observers.screen.warn
    thread = MirrorThread(mirror, run.directory, uid, keep_last=keep, warn=warn)
    thread.start(is_required=not resumes)
    run.mirror = thread


def finish_mirroring(run: TrainingRun, *, should_wait: bool) -> None:
    """Wait for the copies, for at most `mirror_wait_s` seconds and not beyond the kill deadline; print a summary.

    should_wait  False: stop copying at once
    """
    policy, requested_at = checkpoint_policy(run.plan), run.stop.requested_at
    seconds = policy.mirror_wait_s if should_wait else 0.0
    if policy.grace_s is not None and requested_at is not None:
        seconds = max(0.0, min(seconds, requested_at + policy.grace_s - time.monotonic() - _EXIT_RESERVE_S))
    line = run.mirror.finish(seconds, lambda: run.progress_mark.advance(END, run.progress_mark.now[1]))
    if line:
        run.observers.screen.info(line)


def _is_used(plan: Plan) -> bool:
    return checkpoint_policy(plan).mirror is not None and not plan.choices["profiler"].options.get("only")


_PROGRESS_INTERVAL_S = 5.0  # far below the timeouts of collectives and of the watchdog
_EXIT_RESERVE_S = 1.0  # seconds reserved for ending the process before it is killed
