"""The page about a run: its sections in order."""

from __future__ import annotations

import shlex

from runner.base.json_values import as_dict
from runner.console import bottleneck
from runner.durable import files
from runner.durable.directory import is_run_name
from runner.monitor.health_rules import HealthVerdict, assess_health
from runner.tools.report.chart_parts import MissingPart
from runner.tools.report.charts import CHARTS, draw_charts
from runner.tools.report.page import Limits, Page, PageHead, Step
from runner.tools.report.page_tables import checkpoints, configuration, environment, events, parse_time, phases
from runner.tools.report.page_tiles import make_tiles
from runner.tools.report.predictions import read_predictions
from runner.tools.report.run_data import RunData, make_printable


def make_run_page(run: RunData) -> Page:
    """Make the page about a run."""
    charts, no_charts = draw_charts(run, CHARTS)
    predicted = read_predictions(run)
    tables = [phases(run), configuration(run), environment(run), checkpoints(run), events(run)]
    missing = list(no_charts)
    for name, reason in run.missing.items():
        if name not in ("metrics", "machine"):  # charts report these
            missing.append(MissingPart(_SUBJECTS.get(name, name), reason))
    if not (predicted.pictures or predicted.texts):
        missing.append(MissingPart("Predictions", f"none yet; accel-run inference run={run.reference} creates them"))
    return Page(
        head=PageHead(
            name=run.name,
            title=f"{run.name} · accel-run report",
            badge=run.state.word,
            lines=_make_lines(run),
            command=run.record.origin.command or "",
        ),
        problems=_find_problems(run),
        tiles=list(make_tiles(run)),
        limits=Limits(
            sentence=_describe_limit(run),
            parts=bottleneck.format_time_table(
                run.parts_s, run.total_s, (run.evidence.updates if run.evidence else None) or 0
            ),
            verdicts=_judge_health(run),
            advice=f"accel-run advise run={run.reference} finds settings that make it faster",
        ),
        charts=charts,
        predicted=predicted,
        tables=[table for table in tables if table.rows],
        repeat=_make_steps(run),
        missing=missing,
    )


# ---------------------------------------------------------------- the top


def _make_lines(run: RunData) -> list[str]:
    inventory = as_dict(run.environment.get("inventory"))
    versions = {
        "torch": inventory.get("torch_version"),
        "CUDA": inventory.get("cuda_version"),
        "accel-run": run.environment.get("accel-run"),
    }
    known = ", ".join(f"{name} {value}" for name, value in versions.items() if value)
    device = run.plan.device_name or run.plan.device or "device unknown"
    ranks = run.plan.ranks
    several = f", {len(ranks)} ranks" if len(ranks) > 1 else ""
    names = ("precision", "optimizer", "parallelism", "compile")
    chosen = [f"{name} {choice.name}" for name in names if (choice := run.plan.choice(name)).name]
    return [
        " · ".join(filter(None, (f"task {run.task}", str(device) + several, known))),
        " · ".join(filter(None, (", ".join(chosen), _format_start(run), run.display_path))),
    ]


def _format_start(run: RunData) -> str:
    started = parse_time(run.record.process.started)
    word = "started" if all(row.get("kind") != "resume" for row in run.events) else "resumed"
    return f"{word} {started:%Y-%m-%d %H:%M}" if started else ""


def _find_problems(run: RunData) -> list[str]:
    """Return warnings for the top of the page: the run is not finished, failed, or has damaged files."""
    found = []
    if run.state.word in ("running", "killed", "preempted", "interrupted"):
        found.append(f"This run is not finished: {run.state.sentence}. This page shows the data so far.")
    if run.state.word == "unknown":
        found.append(f"The state of this run is unknown: {run.missing.get('record', 'not recorded in run.json')}.")
    if run.state.word == "failed" and run.error:
        where = f"{run.error.where}: " if run.error.where else ""
        fix = f"\n{run.error.fix}" if run.error.fix else ""
        found.append(f"{where}{run.error.cause} (exit {run.error.exit_code}){fix}")
    if run.curves.damaged:
        found.append(f"{run.missing['some metrics']}; the charts have gaps there.")
    return found


def _describe_limit(run: RunData) -> str:
    busy = {}
    if run.samples is not None and not run.plan.device.startswith("cpu"):
        means = run.samples.summary.whole.metrics
        busy = {gpu: means[f"{gpu}/util"].mean for gpu in run.samples.devices if f"{gpu}/util" in means}
    sentence = bottleneck.describe_bottleneck(run.parts_s, run.total_s, busy)
    return sentence[:1].upper() + sentence[1:]


def _judge_health(run: RunData) -> list[HealthVerdict]:
    if run.samples is None:
        return []
    on_gpu = not (run.plan.device or "cpu").startswith("cpu")
    return assess_health(run.samples.summary, on_gpu=on_gpu)


def _make_steps(run: RunData) -> list[Step]:
    steps = []
    if run.record.origin.command:
        steps.append(Step("Original command:", run.record.origin.command))
    if not files.is_plain_file(run.path / "command.sh"):
        return steps
    script = f"sh {make_printable(shlex.quote(str(run.path / 'command.sh')))}"
    is_named = is_run_name(run.path.name)
    if is_named and run.state.word in _RESUMABLE_STATES:
        steps.append(Step("Resume this run:", f"{script} run={run.name}"))
    again = f" run={run.name}-again" if is_named else ""
    steps.append(Step("Repeat as a new run, from any folder:", f"{script}{again}"))
    return steps


_SUBJECTS = {
    "record": "Record of the run",
    "plan": "Plan",
    "environment": "Environment",
    "configuration": "Configuration",
    "events": "Events",
    "checkpoints": "Checkpoints",
    "some metrics": "Some rows",
}
_RESUMABLE_STATES = ("preempted", "interrupted", "failed", "killed")
