"""Find the checkpoint that a run resumes from."""

from __future__ import annotations

from pathlib import Path

from runner.base.errors import InputMissing
from runner.durable.checkpoint import MANIFEST, LoadedCheckpoint, load, load_newest, recover, set_aside
from runner.durable.directory import RunDirectory
from runner.durable.files import AppendLog, read_rows
from runner.durable.run_identity import manifest_uid
from runner.engine import oom_history
from runner.engine.checkpoint_state import check_state
from runner.engine.run_screen import Screen
from runner.engine.training import check_resume, phases_to_run
from runner.plan.run_plan import Plan


def find_resume_point(
    plan: Plan, directory: RunDirectory, screen: Screen, metrics: AppendLog
) -> LoadedCheckpoint | None:
    """Return the checkpoint to resume from, or None; metrics.jsonl is truncated to the rows before it."""
    requested = plan.settings.resume
    if requested == "fresh":
        phases_to_run(plan, None, directory)  # raises before anything is renamed
        if set_aside(directory.checkpoints):
            screen.info("resume=fresh: earlier checkpoints were renamed to checkpoints/earlier-*")
        _archive_metrics(directory, metrics)
        oom_history.remove_reductions(directory)
        return None
    run, allows_others = directory.owner, _ANOTHER_RUN in plan.settings.resume_allow
    recovered = recover(directory.checkpoints, run, allows_others=allows_others)
    for name, reasons in recovered.skipped:
        screen.warn(f"checkpoint {name} was skipped: {'; '.join(reasons)}")
    start = recovered.checkpoint
    if start is None and requested != "auto":
        start = check_state(_load_requested(requested, plan))
        screen.info(f"starts from {start.path}")
        check_resume(plan, start, screen.info)
        phases_to_run(plan, start, directory)
        metrics.cut(0)
        return start
    if start is None:
        phases_to_run(plan, None, directory)
        metrics.cut(0)
        return None
    if requested != "auto":
        screen.info(f"resume={requested} has no effect: this run already has checkpoints")
    check_resume(plan, check_state(start), screen.info)
    phases_to_run(plan, start, directory)
    if run.has_other_uid(start.manifest):
        screen.warn(
            f"{start.path.name} belongs to another run, {manifest_uid(start.manifest)}; this run continues from it"
        )
    expected_bytes = int(start.manifest["metrics_bytes"])
    if metrics.length < expected_bytes:  # the weights are valid: rows lost in a power failure do not prevent resuming
        screen.warn(f"metrics.jsonl has lost its last rows: {metrics.length} of {expected_bytes} bytes remain")
    repeated = _last_update(directory.metrics) - int(start.state["phase_update"])
    metrics.cut(expected_bytes)
    note = f"; {repeated} updates after it are repeated" if repeated > 0 else ""
    screen.info(f"resumes at update {start.state['phase_update']} from {start.path.name}{note}")
    return start


def _load_requested(requested: str, plan: Plan) -> LoadedCheckpoint:
    """Return the checkpoint selected by resume=: that folder, or the newest valid one of a run."""
    path = Path(requested).expanduser()
    if (path / MANIFEST).is_file():
        return load(path.absolute())
    other = RunDirectory.find(plan.settings.root, requested)
    recovered = load_newest(other.checkpoints, other.owner)
    if recovered is None:
        fix = f"accel-run status {other.name} shows its checkpoints; accel-run runs lists other runs"
        raise InputMissing(f"run {other.name} has no valid checkpoint", where=f"resume={requested}", fix=fix)
    return recovered


def _archive_metrics(directory: RunDirectory, metrics: AppendLog) -> None:
    """Rename the metrics of a run that is restarted from scratch."""
    if metrics.length:
        number = 1
        while (directory.path / f"metrics-earlier-{number}.jsonl").exists():
            number += 1
        directory.write(f"metrics-earlier-{number}.jsonl", directory.metrics.read_bytes())
        metrics.cut(0)


def _last_update(metrics: Path) -> int:
    """Return the highest update number in the readable rows."""
    updates = (row.get("update") for row in read_rows(metrics))
    return max((update for update in updates if isinstance(update, int)), default=0)


_ANOTHER_RUN = "run"  # in resume_allow: accept a checkpoint of another run
