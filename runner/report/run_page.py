"""The page itself: what stands where, and the HTML of it, in which nothing of a run is taken for markup."""

from __future__ import annotations

import base64
import io
import math
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from runner import __version__
from runner.base.errors import StorageError
from runner.base.json_numbers import NOT_MEASURED, metric_text
from runner.base.text import is_number, rate, sized, sized_gib
from runner.durable import files
from runner.durable.directory import is_name
from runner.durable.files import listed, mapped
from runner.measure.criteria import criteria, rule_of_thumb
from runner.measure.facts import Facts
from runner.observe import bottleneck
from runner.observe.health_rules import verdicts
from runner.observe.samples import Summary
from runner.plan.inventory import Cpu
from runner.report.charts import TIME, Chart, Missing, charts_of, kinds_of
from runner.report.run_data import Checkpoint, RunData, cut, fit, names_in, numbers

MARK = '<meta name="generator" content="accel-run '  # of a page of any version
MOST_BYTES = 500_000


@dataclass(frozen=True)
class Tile:
    """A figure that is looked at first."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class PageTable:
    """Rows of words; `folded` are those that stand in the place of the rows until somebody wants to see them."""

    id: str
    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    folded: str = ""


@dataclass(frozen=True)
class Picture:
    """A picture that the run has left, as a data URI."""

    name: str
    source: str
    width: int
    height: int


@dataclass(frozen=True)
class Text:
    """The beginning of a text that the run has left."""

    name: str
    content: str


@dataclass(frozen=True)
class Step:
    """A line to be pasted."""

    words: str
    line: str


@dataclass(frozen=True)
class Page:
    """What stands on the page, from the top."""

    kind: str
    name: str
    title: str
    badge: str = ""
    lines: Sequence[str] = ()
    command: str = ""
    problems: Sequence[str] = ()
    tiles: Sequence[Tile] = ()
    limited: str = ""
    time: Sequence[Chart] = ()
    parts: Sequence[str] = ()
    verdicts: Sequence[Any] = ()
    rules: Sequence[PageTable] = ()
    advice: str = ""
    first: Sequence[PageTable] = ()
    charts: Sequence[Chart] = ()
    pictures: Sequence[Picture] = ()
    texts: Sequence[Text] = ()
    predictions_note: str = ""
    tables: Sequence[PageTable] = ()
    repeat: Sequence[Step] = ()
    missing: Sequence[Missing] = field(default_factory=tuple)


def page_of(story: RunData, benchmarks: Path | None = None) -> Page:
    """Return the page about a run.

    benchmarks  folder with results of `accel-run benchmark` to be shown; None: those in the folder of the run, if any
    """
    time, no_time = charts_of(story, (TIME,))
    charts, no_charts = charts_of(story, kinds_of(benchmarks))
    pictures, texts, left_out = _predictions(story)
    tables = [_phases(story), *_configuration(story), _environment(story), _checkpoints(story), _events(story)]
    missing = [*no_time, *no_charts, *(Missing(_SUBJECTS.get(name, name), why) for name, why in _others(story).items())]
    missing += (
        []
        if pictures or texts
        else [Missing("Predictions", f"none yet; accel-run inference run={story.said} creates them")]
    )
    return Page(
        kind="accel-run report",
        name=story.name,
        title=f"{story.name} · accel-run report",
        badge=story.standing.word,
        lines=_lines(story),
        command=str(story.record.get("command") or ""),
        problems=_problems(story),
        tiles=_tiles(story),
        limited=_limited(story),
        time=time,
        parts=bottleneck.table(story.parts_s, story.total_s, (story.evidence.updates if story.evidence else None) or 0),
        verdicts=_verdicts(story),
        rules=_rules(story),
        advice=f"accel-run advise run={story.said} finds settings that make it faster",
        charts=charts,
        pictures=pictures,
        texts=texts,
        predictions_note=left_out,
        tables=[table for table in tables if table.rows],
        repeat=_repeat(story),
        missing=missing,
    )


def html_of(page: Page) -> str:
    """Return the page as HTML of less than MOST_BYTES; what has no room is left out, and the page says so."""
    while True:
        html = _rendered(page)
        if len(html.encode()) < MOST_BYTES:
            return html
        page = _smaller(page)


def _smaller(page: Page) -> Page:
    """Return the page with less on it: huge tables first, then pictures, charts, tables and at last the lists."""
    what = "the page would exceed 500 KB"
    if shorter := _with_a_shorter_table(page, _HUGE_TABLE):
        return shorter
    if page.pictures:
        largest = max(page.pictures, key=lambda picture: len(picture.source))
        kept = [picture for picture in page.pictures if picture is not largest]
        return replace(page, pictures=kept, missing=[*page.missing, Missing(largest.name, what)])
    if page.charts:
        chart = max(page.charts[1:] or page.charts, key=lambda each: len(each.svg))  # the first one is looked at first
        charts = [each for each in page.charts if each is not chart]
        return replace(page, charts=charts, missing=[*page.missing, Missing(chart.title, what)])
    if shorter := _with_a_shorter_table(page, 2 * _MOST_COLUMNS * _MOST_OF_A_CELL):
        return shorter
    lists: dict[str, Sequence[Any]] = {
        "problems": page.problems,
        "repeat": page.repeat,
        "missing": page.missing,
        "verdicts": page.verdicts,
    }
    name, longest = max(lists.items(), key=lambda each: len(each[1]))
    assert longest, "a page of nothing has room"
    cut_down: dict[str, Any] = {name: longest[: len(longest) // 2]}
    return replace(page, **cut_down)


def _with_a_shorter_table(page: Page, most: int) -> Page | None:
    """Return the page with half the rows of its longest table; None where that has at most so many letters.

    most  at least those of a head and a row of so many cells as are kept
    """
    longest = max((*page.first, *page.tables), key=_letters, default=None)
    if longest is None or _letters(longest) <= most:
        return None
    half = [longest.head, *longest.rows[: max(1, len(longest.rows) // 2)]]
    head, *rows = ([cut(cell, _MOST_OF_A_CELL) for cell in row[:_MOST_COLUMNS]] for row in half)
    shorter = replace(longest, head=head, rows=rows, note="the rest is omitted")
    first, tables = ([shorter if each is longest else each for each in kind] for kind in (page.first, page.tables))
    return replace(page, first=first, tables=tables)


def _letters(table: PageTable) -> int:
    return sum(len(cell) for row in (table.head, *table.rows) for cell in row)


def _rendered(page: Page) -> str:
    import jinja2

    folder = Path(__file__).parent
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        loader=jinja2.FileSystemLoader(folder),
        keep_trailing_newline=True,
    )
    style = (folder / "page.css").read_text(encoding="utf-8")
    made = f"{datetime.now().astimezone():%Y-%m-%d %H:%M}"
    template = environment.get_template("page.html.jinja")
    return template.render(page=page, style=style, version=__version__, made=made)


# ---------------------------------------------------------------- the top


def _lines(story: RunData) -> list[str]:
    inventory = mapped(story.environment.get("inventory"))
    versions = {
        "torch": inventory.get("torch_version"),
        "CUDA": inventory.get("cuda_version"),
        "accel-run": story.environment.get("accel-run"),
    }
    known = ", ".join(f"{name} {value}" for name, value in versions.items() if value)
    device = story.plan.get("device_name") or story.plan.get("device") or "device unknown"
    ranks = listed(story.plan.get("ranks"))
    several = f", {len(ranks)} ranks" if len(ranks) > 1 else ""
    names = ("precision", "optimizer", "parallelism", "compile")
    choices = mapped(story.plan.get("choices"))
    chosen = [f"{name} {choice['name']}" for name in names if (choice := mapped(choices.get(name))).get("name")]
    return [
        " · ".join(filter(None, (f"task {story.task}", str(device) + several, known))),
        " · ".join(filter(None, (", ".join(chosen), _when(story), story.shown))),
    ]


def _when(story: RunData) -> str:
    started = moment(story.record.get("started"))
    word = "started" if all(row.get("kind") != "resume" for row in story.events) else "resumed"
    return f"{word} {started:%Y-%m-%d %H:%M}" if started else ""


def moment(text: Any) -> datetime | None:
    """Return a time of a record in the time zone of this machine; None for all else."""
    try:
        return datetime.fromisoformat(text).astimezone()
    except (TypeError, ValueError, OverflowError):
        return None


def _problems(story: RunData) -> list[str]:
    """Return what a reader must know before any figure: the run goes on, was killed, failed, or files are damaged."""
    found = []
    if story.standing.word in ("running", "killed", "preempted", "interrupted"):
        found.append(f"This run is not finished: {story.standing.sentence}. This page shows the data so far.")
    if story.standing.word == "unknown":
        found.append(f"The state of this run is unknown: {story.missing.get('record', 'not recorded in run.json')}.")
    if story.standing.word == "failed" and story.error:
        where = f"{story.error['where']}: " if story.error.get("where") else ""
        fix = f"\n{story.error['fix']}" if story.error.get("fix") else ""
        found.append(f"{where}{story.error.get('cause', '')} (exit {story.error.get('exit_code')}){fix}")
    if story.curves.damaged:
        found.append(f"{story.missing['some metrics']}; the charts have gaps there.")
    return found


def _tiles(story: RunData) -> list[Tile]:
    return [tile for make in TILES for tile in make(story)]


def _loss_tile(story: RunData) -> Iterable[Tile]:
    last = story.curves.last("train/loss")
    if last is not None:
        of_rows = story.curves["train/loss"].y
        first = next((value for value in of_rows if math.isfinite(value)), last)
        note = f"initially {first:.4g}" if first != last else ""
        note = note if math.isfinite(of_rows[-1]) else f"previously {of_rows[-1]:g}"
        yield Tile("training loss", f"{last:.4g}", note)


def _metric_tiles(story: RunData) -> Iterable[Tile]:
    for name, value in list(story.metrics.items())[:_METRIC_TILES]:
        baseline = story.baselines.get(name)
        if value is None:
            yield Tile(name, NOT_MEASURED, "no items, or not finite, in the last evaluation")
            continue
        note = "" if baseline is None else f"a trivial model reaches {baseline:.4g}"
        yield Tile(name, f"{value:.4g}", note)


def _speed_tile(story: RunData) -> Iterable[Tile]:
    seen = story.evidence
    if story.throughput is not None:
        yield Tile("throughput", rate(story.throughput), "items per second, first update excluded")
    if seen is not None and seen.step_time_ms is not None:
        low, high = seen.step_time_low_ms, seen.step_time_high_ms
        note = f"median; {low:.4g} to {high:.4g} in 8 of 10 rows" if low is not None and high is not None else "median"
        yield Tile("update time", f"{seen.step_time_ms:.4g} ms", note)


def _memory_tile(story: RunData) -> Iterable[Tile]:
    seen = story.evidence
    if seen is None:
        return
    for name, peak, total in (
        ("device", seen.device_peak_gib, seen.device_total_gib),
        ("host", seen.host_peak_gib, seen.host_total_gib),
    ):
        if peak is not None:
            yield Tile(f"peak memory, {name}", sized_gib(peak), f"of {sized_gib(total)}" if total else "")


def _time_tile(story: RunData) -> Iterable[Tile]:
    told = mapped(story.record.get("phases"))
    of_phases = [numbers(phase).get("seconds", 0.0) for phase in told.values()]
    if sum(of_phases) > _SEVERAL_PROCESSES * story.total_s:  # what limited it is told of the last one
        yield Tile("time", duration(sum(of_phases)), f"of which {duration(story.total_s)} in the last process")
    elif story.total_s > 0:
        parts = story.parts_s
        start = parts.get("starting", 0.0) + parts.get("first_update", 0.0)
        yield Tile("time", duration(story.total_s), f"{start:.1f} s until the end of the first update" if start else "")


def _updates_tile(story: RunData) -> Iterable[Tile]:
    made = max((end for _, end in story.curves.phases.values()), default=None)
    if made is not None:
        wanted = story.plan.get("updates") if len(story.curves.phases) == 1 else None
        several = f"in {len(story.curves.phases)} phases" if len(story.curves.phases) > 1 else ""
        yield Tile("updates", f"{made:,}", f"of {wanted:,}" if isinstance(wanted, int) else several)


def _checkpoints_tile(story: RunData) -> Iterable[Tile]:
    known = [each for each in story.checkpoints if each.problems is not None]
    damaged = sum(bool(each.problems) for each in known)
    state = f"{damaged} damaged" if damaged else "all valid" if known else "not read here"
    size = sum(each.bytes for each in story.checkpoints)
    yield Tile("checkpoints", str(len(story.checkpoints)), f"{state}, {sized(size)}" if story.checkpoints else "none")


def _limited(story: RunData) -> str:
    busy = {}
    if story.samples is not None and not str(story.plan.get("device", "")).startswith("cpu"):
        means = Summary.of(story.samples).whole.metrics
        busy = {gpu: means[f"{gpu}/util"].mean for gpu in story.samples.devices if f"{gpu}/util" in means}
    said = bottleneck.limited_by(story.parts_s, story.total_s, busy)
    return said[:1].upper() + said[1:]


def _verdicts(story: RunData) -> list[Any]:
    if story.samples is None:
        return []
    on_gpu = not str(story.plan.get("device", "cpu")).startswith("cpu")
    return verdicts(Summary.of(story.samples), on_gpu=on_gpu)


def _rules(story: RunData) -> list[PageTable]:
    """Return the rules of thumb for GPU or CPU with the values of this run."""
    if story.evidence is None:
        return []
    rows = criteria(Facts(story.evidence, {}, Cpu("", 1, 1, 0)))
    cells = [
        (row.name, f"{row.value:,.6g}", row.rule or "-", row.verdict if row.rule else "-")
        for row in rows
        if row.value is not None
    ]
    if not cells:
        return []
    note = f"rule of thumb: {rule_of_thumb(rows) or 'unknown'}; accel-run benchmark suite=devices measures it"
    return [PageTable("rules", "GPU or CPU? The rules of thumb", ("", "here", "rule of thumb", "result"), cells, note)]


# ---------------------------------------------------------------- predictions


def _predictions(story: RunData) -> tuple[list[Picture], list[Text], str]:
    """Return pictures and texts that inference left, and in words what of it has no room."""
    pictures: list[Picture] = []
    texts: list[Text] = []
    left_out: list[str] = []
    room = _PICTURE_BYTES
    for folder in ("predictions", "plots"):
        if (story.path / folder).is_symlink():
            left_out.append(f"{folder}/ (a link, which is not followed)")
        for name in names_in(story.path / folder):
            path, shown = story.path / folder / name, fit(f"{folder}/{name}")
            if name.endswith(".png") and not _is_of_the_monitor(name):
                made = _picture(path, shown, room) if len(pictures) < _MOST_PICTURES else None
                room -= len(made.source) if made else 0
                pictures += [made] if made else []
                left_out += [] if made else [shown]
            elif name.endswith(".txt") and folder == "predictions" and name != "stacks.txt":
                text = _text(path, shown) if len(texts) < _MOST_TEXTS else None
                texts += [text] if text else []
                left_out += [] if text else [shown]
            elif folder == "predictions" and name not in _OF_INFERENCE:
                left_out.append(shown)
    more = f" and {len(left_out) - _NAMED} more" if len(left_out) > _NAMED else ""
    return pictures, texts, f"not shown here: {', '.join(left_out[:_NAMED])}{more}" if left_out else ""


def _is_of_the_monitor(name: str) -> bool:
    """Tell whether it is a picture of the machine, which is drawn anew here."""
    return re.fullmatch(r"(?:.*-)?(?:machine|gpus|gpu\d+)\.png", name) is not None


def _picture(path: Path, name: str, room: int) -> Picture | None:
    """Return the picture written anew, as small as it may be; None where it is none, or there is no room for it."""
    from PIL import Image  # here: matplotlib's, and few pages have pictures

    try:
        content = files.read(path, at_most=_MOST_PICTURE_BYTES)
        with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
            if math.prod(image.size) > _MOST_PIXELS:
                return None
            image.load()
            over = Image.new("RGBA", image.size, "white")
            over.alpha_composite(image.convert("RGBA"))
            over.thumbnail((_PICTURE_WIDTH, 4 * _PICTURE_WIDTH))
            buffer = io.BytesIO()
            over.convert("RGB").quantize(64).save(buffer, format="PNG", optimize=True)
    except Exception:  # a damaged file: Pillow raises what it likes
        return None
    source = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    return Picture(name, source, *over.size) if len(source) <= room else None


def _text(path: Path, name: str) -> Text | None:
    try:
        content = files.read(path, at_most=_MOST_TEXT_BYTES).decode(errors="replace")
    except StorageError:
        return None
    more = "\n…" if len(content) > _TEXT_LETTERS else ""
    return Text(name, fit(content[:_TEXT_LETTERS]) + more)


# ---------------------------------------------------------------- tables


def _phases(story: RunData) -> PageTable:
    rows = []
    for name, phase in mapped(story.record.get("phases")).items():
        if isinstance(phase, dict):
            made = f"{word_of(phase.get('updates'))} of {word_of(phase.get('total'))}" if phase.get("total") else "-"
            known = mapped(phase.get("metrics"))
            values = ", ".join(
                f"{key} {metric_text(value)}" for key, value in known.items() if value is None or is_number(value)
            )
            peaks = [
                f"{name} {value:.3g}"
                for name, key in (("device", "peak_device_gib"), ("host", "peak_host_gib"))
                if is_number(value := phase.get(key))
            ]
            took = duration(phase["seconds"]) if is_number(phase.get("seconds")) else "-"
            parts, seconds = numbers(phase.get("parts_s")), phase.get("seconds")
            mostly = bottleneck.mostly(parts, sum(parts.values())) if is_number(seconds) else ""
            state = "finished" if phase.get("finished") else "not finished"
            rows.append((name, word_of(phase.get("kind")), state, made, took, mostly, ", ".join(peaks), values))
    head = ("phase", "kind", "state", "updates", "time", "mostly", "peak GiB", "last metrics")
    if not rows:
        rows = [
            (name or "-", "-", "-", f"{end - begin:,}", "-", "-", "-", "-")
            for name, (begin, end) in story.curves.phases.items()
        ]
    return PageTable("phases", "Phases", head, rows)


def _configuration(story: RunData) -> list[PageTable]:
    """Return what differs from the defaults, and folded all of it with what was decided and why."""
    if not story.config:
        return []
    differs = [
        (key, word_of(value), word_of(story.defaults.get(key, "not there")))
        for key, value in story.config.items()
        if story.defaults and story.defaults.get(key, _ABSENT) != value
    ]
    title = "Configuration"
    tables = []
    if story.defaults:
        note = "" if differs else "no differences from the defaults of this task"
        rows = differs or [("-", "-", "-")]
        tables.append(
            PageTable("differences", f"{title}: differences from the defaults", ("key", "here", "default"), rows, note)
        )
    decided, reasons = _decided(story), mapped(story.plan.get("reasons"))
    every = [
        (key, word_of(value), word_of(decided.get(key, value)), word_of(reasons.get(key, "")))
        for key, value in story.config.items()
    ]
    head = ("key", "asked for", "used", "why")
    tables.append(PageTable("settings", "All settings", head, every, folded=f"{len(every)} keys"))
    return tables


def _decided(story: RunData) -> dict[str, Any]:
    """Return key -> the value that the plan decided on."""
    found: dict[str, Any] = {}
    for group, choice in mapped(story.plan.get("choices")).items():
        if isinstance(choice, dict) and isinstance(choice.get("options"), dict):
            found[group] = choice.get("name")
            found |= {f"{group}.{key}": value for key, value in choice["options"].items()}
    batch = mapped(story.plan.get("batch"))
    found |= {key: batch[key] for key in ("micro_batch_size",) if key in batch}
    found |= {"device": story.plan["device"]} if story.plan.get("device") else {}
    return found


def _environment(story: RunData) -> PageTable:
    known = dict(story.environment)
    inventory = dict(mapped(known.pop("inventory", None)))
    rows = [(key, "none" if value is None else word_of(value)) for key, value in known.items()]
    for each in listed(inventory.pop("devices", None)):
        if isinstance(each, dict):
            gib = f", {each['memory_bytes'] / 2**30:.1f} GiB" if is_number(each.get("memory_bytes")) else ""
            rows.append((f"{each.get('kind', 'device')} {each.get('index', '')}", f"{each.get('name', '')}{gib}"))
    told = listed(inventory.pop("notes", None))
    cpu = inventory.pop("cpu", None)
    if isinstance(cpu, dict):
        memory = f", {cpu['memory_bytes'] / 2**30:.1f} GiB" if is_number(cpu.get("memory_bytes")) else ""
        rows.append(("CPU", f"{cpu.get('name')}, {cpu.get('logical_cores')} of its threads for this run{memory}"))
    for key, value in inventory.items():
        in_words = sized(value) if key.endswith("_bytes") and is_number(value) else word_of(value)
        rows.append((key.removesuffix("_bytes").replace("_", " "), in_words if value is not None else "none"))
    rows += [("note", word_of(note)) for note in told]
    rows += [("host", word_of(story.record["host"]))] if story.record.get("host") else []
    return PageTable("environment", "Environment", ("", ""), rows)


def _checkpoints(story: RunData) -> PageTable:
    def state(each: Checkpoint) -> str:
        if each.problems is None:
            return f"not read here; accel-run status run={story.said}"
        return f"damaged: {'; '.join(each.problems)}" if each.problems else "whole"

    rows = [(each.name, sized(each.bytes), state(each)) for each in reversed(story.checkpoints)]
    return PageTable("checkpoints", "Checkpoints", ("checkpoint", "size", "state"), rows)


def _events(story: RunData) -> PageTable:
    rows = []
    for row in story.events:
        when = moment(row.get("time"))
        words = row.get("text") or row.get("reason") or row.get("cause")
        others = ", ".join(
            f"{key} {word_of(value)}" for key, value in row.items() if key not in ("time", "kind", "unix_s")
        )
        rows.append((f"{when:%m-%d %H:%M:%S}" if when else "-", word_of(row.get("kind")), str(words or others)[:400]))
    shown = rows[:_FIRST_EVENTS] + rows[-_LAST_EVENTS:] if len(rows) > _FIRST_EVENTS + _LAST_EVENTS else rows
    between = len(rows) - len(shown)
    note = f"{between:,} between the first {_FIRST_EVENTS} and these are in events.jsonl" if between else ""
    loud = sum(row[1] not in _QUIET for row in rows)
    folded = f"{len(rows):,} event{'s' * (len(rows) != 1)}" if not loud else ""
    return PageTable("events", "Events and warnings", ("time", "kind", "what"), shown, note, folded)


def _repeat(story: RunData) -> list[Step]:
    steps = []
    if story.record.get("command"):
        steps.append(Step("Original command:", str(story.record["command"])))
    if not files.is_plain_file(story.path / "command.sh"):
        return steps
    script = f"sh {fit(shlex.quote(str(story.path / 'command.sh')))}"
    is_named = is_name(story.path.name)
    if is_named and story.standing.word in _GOES_ON:
        steps.append(Step("Resume this run:", f"{script} run={story.name}"))
    again = f" run={story.name}-again" if is_named else ""
    steps.append(Step("Repeat as a new run, from any folder:", f"{script}{again}"))
    return steps


def _others(story: RunData) -> Mapping[str, str]:
    """Return what could not be read, but for what charts have said already."""
    return {name: why for name, why in story.missing.items() if name not in ("metrics", "machine")}


# ---------------------------------------------------------------- words


def duration(seconds: float) -> str:
    """Return seconds as people say them."""
    if not 0 <= seconds < 1e10:
        return "-"
    if seconds < 90:
        return f"{seconds:.1f} s"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours} h {minute} min" if hours else f"{minute} min {second} s"


def word_of(value: Any) -> str:
    """Return a value as it is typed on a command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(word_of, value))}]"
    if isinstance(value, dict):
        return ", ".join(f"{key} {word_of(item)}" for key, item in value.items()) or "{}"
    return f"{value:g}" if isinstance(value, float) else str(value)


TILES: tuple[Callable[[RunData], Iterable[Tile]], ...] = (
    _loss_tile,
    _metric_tiles,
    _speed_tile,
    _memory_tile,
    _time_tile,
    _updates_tile,
    _checkpoints_tile,
)
_ABSENT = object()
_METRIC_TILES = 3
_SEVERAL_PROCESSES = 1.1  # times as long as the last process took
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
_QUIET = ("start", "phase", "first update", "end", "saving", "saved", "machine")
_GOES_ON = ("preempted", "interrupted", "failed", "killed")
_HUGE_TABLE, _MOST_OF_A_CELL, _MOST_COLUMNS = 60_000, 240, 16  # letters, letters, cells
_FIRST_EVENTS, _LAST_EVENTS = 10, 30
_OF_INFERENCE = ("summary.json", "gpu.csv", "monitor.json", "stacks.txt")
_MOST_PICTURES, _MOST_TEXTS, _NAMED = 6, 6, 8
_PICTURE_BYTES = 190_000  # of all pictures, as they stand in the page
_PICTURE_WIDTH = 760  # pixels
_MOST_PIXELS = 40_000_000
_MOST_PICTURE_BYTES, _MOST_TEXT_BYTES, _TEXT_LETTERS = 16 << 20, 1 << 20, 1500
