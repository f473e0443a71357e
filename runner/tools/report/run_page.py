"""The page about a run: what is on it, and in which order."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from runner.base.json_values import as_dict
from runner.console import bottleneck
from runner.durable import files
from runner.durable.directory import is_run_name
from runner.monitor.health_rules import HealthVerdict, verdicts
from runner.monitor.samples import Summary
from runner.tools.report.chart_parts import Missing
from runner.tools.report.charts import CHARTS, TIME, charts_of
from runner.tools.report.page import Limits, Page, PageHead, Step, Tile
from runner.tools.report.page_tables import checkpoints, configuration, environment, events, moment, phases
from runner.tools.report.page_tiles import TILES
from runner.tools.report.predictions import predictions
from runner.tools.report.run_data import RunData, fit


def page_of(story: RunData) -> Page:
    """Return the page about a run."""
    time, no_time = charts_of(story, (TIME,))
    charts, no_charts = charts_of(story, CHARTS)
    predicted = predictions(story)
    tables = [phases(story), *configuration(story), environment(story), checkpoints(story), events(story)]
    missing = [*no_time, *no_charts, *(Missing(_SUBJECTS.get(name, name), why) for name, why in _others(story).items())]
    missing += (
        []
        if predicted.pictures or predicted.texts
        else [Missing("Predictions", f"none yet; accel-run inference run={story.said} creates them")]
    )
    return Page(
        head=PageHead(
            name=story.name,
            title=f"{story.name} · accel-run report",
            badge=story.standing.word,
            lines=_lines(story),
            command=story.record.origin.command or "",
        ),
        problems=_problems(story),
        tiles=_tiles(story),
        limits=Limits(
            sentence=_limited(story),
            time=time,
            parts=bottleneck.format_time_table(
                story.parts_s, story.total_s, (story.evidence.updates if story.evidence else None) or 0
            ),
            verdicts=_verdicts(story),
            advice=f"accel-run advise run={story.said} finds settings that make it faster",
        ),
        charts=charts,
        predicted=predicted,
        tables=[table for table in tables if table.rows],
        repeat=_repeat(story),
        missing=missing,
    )


# ---------------------------------------------------------------- the top


def _lines(story: RunData) -> list[str]:
    inventory = as_dict(story.environment.get("inventory"))
    versions = {
        "torch": inventory.get("torch_version"),
        "CUDA": inventory.get("cuda_version"),
        "accel-run": story.environment.get("accel-run"),
    }
    known = ", ".join(f"{name} {value}" for name, value in versions.items() if value)
    device = story.plan.device_name or story.plan.device or "device unknown"
    ranks = story.plan.ranks
    several = f", {len(ranks)} ranks" if len(ranks) > 1 else ""
    names = ("precision", "optimizer", "parallelism", "compile")
    chosen = [f"{name} {choice.name}" for name in names if (choice := story.plan.choice(name)).name]
    return [
        " · ".join(filter(None, (f"task {story.task}", str(device) + several, known))),
        " · ".join(filter(None, (", ".join(chosen), _when(story), story.shown))),
    ]


def _when(story: RunData) -> str:
    started = moment(story.record.process.started)
    word = "started" if all(row.get("kind") != "resume" for row in story.events) else "resumed"
    return f"{word} {started:%Y-%m-%d %H:%M}" if started else ""


def _problems(story: RunData) -> list[str]:
    """Return warnings above all figures: the run is still running, was killed or failed, or files are damaged."""
    found = []
    if story.standing.word in ("running", "killed", "preempted", "interrupted"):
        found.append(f"This run is not finished: {story.standing.sentence}. This page shows the data so far.")
    if story.standing.word == "unknown":
        found.append(f"The state of this run is unknown: {story.missing.get('record', 'not recorded in run.json')}.")
    if story.standing.word == "failed" and story.error:
        where = f"{story.error.where}: " if story.error.where else ""
        fix = f"\n{story.error.fix}" if story.error.fix else ""
        found.append(f"{where}{story.error.cause} (exit {story.error.exit_code}){fix}")
    if story.curves.damaged:
        found.append(f"{story.missing['some metrics']}; the charts have gaps there.")
    return found


def _tiles(story: RunData) -> list[Tile]:
    return [tile for make in TILES for tile in make(story)]


def _limited(story: RunData) -> str:
    busy = {}
    if story.samples is not None and not story.plan.device.startswith("cpu"):
        means = Summary.of(story.samples).whole.metrics
        busy = {gpu: means[f"{gpu}/util"].mean for gpu in story.samples.devices if f"{gpu}/util" in means}
    said = bottleneck.describe_bottleneck(story.parts_s, story.total_s, busy)
    return said[:1].upper() + said[1:]


def _verdicts(story: RunData) -> list[HealthVerdict]:
    if story.samples is None:
        return []
    on_gpu = not (story.plan.device or "cpu").startswith("cpu")
    return verdicts(Summary.of(story.samples), on_gpu=on_gpu)


def _repeat(story: RunData) -> list[Step]:
    steps = []
    if story.record.origin.command:
        steps.append(Step("Original command:", story.record.origin.command))
    if not files.is_plain_file(story.path / "command.sh"):
        return steps
    script = f"sh {fit(shlex.quote(str(story.path / 'command.sh')))}"
    is_named = is_run_name(story.path.name)
    if is_named and story.standing.word in _GOES_ON:
        steps.append(Step("Resume this run:", f"{script} run={story.name}"))
    again = f" run={story.name}-again" if is_named else ""
    steps.append(Step("Repeat as a new run, from any folder:", f"{script}{again}"))
    return steps


def _others(story: RunData) -> Mapping[str, str]:
    """Return what could not be read, but for what charts have said already."""
    return {name: why for name, why in story.missing.items() if name not in ("metrics", "machine")}


_SUBJECTS = {
    "record": "Record of the run",
    "plan": "Plan",
    "environment": "Environment",
    "configuration": "Configuration",
    "defaults": "Differences from the defaults",
    "events": "Events",
    "checkpoints": "Checkpoints",
    "some metrics": "Some rows",
}
_GOES_ON = ("preempted", "interrupted", "failed", "killed")
