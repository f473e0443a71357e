"""Find the checkpoint that a run resumes from."""

from __future__ import annotations

from pathlib import Path

from runner.base.errors import InputMissing
from runner.durable.checkpoint import MANIFEST, Loaded, load, load_newest, recover, set_aside
from runner.durable.directory import RunDirectory
from runner.durable.files import AppendLog, read_rows
from runner.durable.run_identity import uid_of
from runner.engine import oom_history
from runner.engine.checkpoint_state import check_state
from runner.engine.run_screen import Screen
from runner.engine.training import check_resume, phases_to_walk
from runner.plan.run_plan import Plan


def resume_point(plan: Plan, directory: RunDirectory, screen: Screen, metrics: AppendLog) -> Loaded | None:
    """Return the checkpoint to resume from, or None; metrics.jsonl is truncated to its length."""
    wanted = plan.settings.resume
    if wanted == "fresh":
        phases_to_walk(plan, None, directory)  # raises before anything is renamed
        if set_aside(directory.checkpoints):
            screen.say("resume=fresh: earlier checkpoints were renamed to checkpoints/earlier-*")
        _put_aside(directory, metrics)
        oom_history.forget(directory)
        return None
    run, allows_others = directory.owner, _ANOTHER_RUN in plan.settings.resume_allow
    found = recover(directory.checkpoints, run, allows_others=allows_others)
    for name, reasons in found.skipped:
        screen.warn(f"checkpoint {name} was skipped: {'; '.join(reasons)}")
    start = found.checkpoint
    if start is None and wanted != "auto":
        start = check_state(_checkpoint_of(wanted, plan))
        screen.say(f"starts from {start.path}")
        check_resume(plan, start, screen.say)
        phases_to_walk(plan, start, directory)
        metrics.cut(0)
        return start
    if start is None:
        phases_to_walk(plan, None, directory)
        metrics.cut(0)
        return None
    if wanted != "auto":
        screen.say(f"resume={wanted} has no effect: this run already has checkpoints")
    check_resume(plan, check_state(start), screen.say)
    phases_to_walk(plan, start, directory)
    if run.has_other_uid(start.manifest):
        screen.warn(f"{start.path.name} belongs to another run, {uid_of(start.manifest)}; this run continues from it")
    known = int(start.manifest["metrics_bytes"])
    if metrics.length < known:  # the weights are valid: rows lost in a power failure do not prevent resuming
        screen.warn(f"metrics.jsonl has lost its last rows: {metrics.length} of {known} bytes remain")
    repeated = _updates_in(directory.metrics) - int(start.state["phase_update"])
    metrics.cut(known)
    lost = f"; {repeated} updates after it are repeated" if repeated > 0 else ""
    screen.say(f"resumes at update {start.state['phase_update']} from {start.path.name}{lost}")
    return start


def _checkpoint_of(wanted: str, plan: Plan) -> Loaded:
    """Return the checkpoint selected by resume=: the given folder, or the newest valid one of a run."""
    given = Path(wanted).expanduser()
    if (given / MANIFEST).is_file():
        return load(given.absolute())
    other = RunDirectory.find(plan.settings.root, wanted)
    found = load_newest(other.checkpoints, other.owner)
    if found is None:
        fix = f"accel-run status {other.name} shows its checkpoints; accel-run runs lists other runs"
        raise InputMissing(f"run {other.name} has no valid checkpoint", where=f"resume={wanted}", fix=fix)
    return found


def _put_aside(directory: RunDirectory, metrics: AppendLog) -> None:
    """Rename the metrics of a run that is restarted from scratch."""
    if metrics.length:
        number = 1
        while (directory.path / f"metrics-earlier-{number}.jsonl").exists():
            number += 1
        directory.write(f"metrics-earlier-{number}.jsonl", directory.metrics.read_bytes())
        metrics.cut(0)


def _updates_in(metrics: Path) -> int:
    """Return the update number of the last readable row."""
    updates = (row.get("update") for row in read_rows(metrics))
    return max((update for update in updates if isinstance(update, int)), default=0)


_ANOTHER_RUN = "run"  # in resume_allow: accept a checkpoint of another run
