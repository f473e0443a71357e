"""The report of a run is a self-contained page without scripts. It shows all data, or lists what is missing."""

# ruff: noqa: E501 - tables

from __future__ import annotations

import html
import http.server
import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runner.base.text import NOT_MEASURED, format_rate
from runner.cli import main
from runner.durable.directory import RunDirectory
from runner.monitor.health_rules import assess_health
from runner.monitor.samples import SampledGpu, Stat, Summary, SummaryPart
from runner.tools.report.chart_parts import Drawing, bin_curve, smooth
from runner.tools.report.charts import gradient_norm, loss
from runner.tools.report.page import Page as PageContent
from runner.tools.report.page import render_html
from runner.tools.report.page_tiles import make_tiles
from runner.tools.report.run_data import MACHINE_METRICS, Curve, flatten, read_run_data
from runner.tools.report.watch import Content, watch
from tests.tools.report.runs import full_run, make_run, plan, record, rows, watched

matplotlib = pytest.importorskip("matplotlib")
pytest.importorskip("PIL.Image")

CHARTS = {"loss", "metrics", "throughput", "steps", "lr", "norm", "memory", "ranks", "machine", "gpus"}
TAGS = {
    "html", "head", "meta", "title", "style", "body", "header", "main", "footer", "section", "div", "span", "p", "h1", "h2", "pre", "code",
    "figure", "figcaption", "table", "thead", "tbody", "tr", "th", "td", "ul", "li", "b", "dl", "dt", "dd", "details", "summary", "img",
    "svg", "g", "path", "text", "tspan", "defs", "use", "clippath", "rect", "pattern", "desc", "image",
}  # fmt: skip


class Page(HTMLParser):
    """The page as a browser parses it: its tags with their attributes, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.texts: dict[str, str] = {}  # id -> text directly in the element
        self._id: str | None = None
        self.text = text
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._id = dict(attrs).get("id")

    def handle_data(self, data: str) -> None:
        self.words += data
        if self._id:
            self.texts[self._id] = self.texts.get(self._id, "") + data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag]


def assert_is_sound(page: Page) -> None:
    """Assert that the page is small and self-contained, runs no scripts, and has unique IDs."""
    assert len(page.text.encode()) < 500_000
    assert {tag for tag, _ in page.tags} <= TAGS
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    for tag, attrs in page.tags:
        assert not [key for key in attrs if key.startswith("on")], (tag, attrs)
        for key in ("src", "href", "xlink:href", "action", "data", "srcset"):
            target = attrs.get(key) or ""
            assert not target or target[1:] in ids or target.startswith("data:image/png;base64,"), (tag, attrs)
        for target in re.findall(r"url\(([^)]*)\)", " ".join(str(value) for value in attrs.values())):
            assert target.startswith("#")
            assert target[1:] in ids
    (style,) = re.findall(r"<style>(.*?)</style>", page.text, re.DOTALL)
    assert "url(" not in style
    assert "@import" not in style
    first, second, *_ = page.all("meta")
    assert first == {"charset": "utf-8"}
    assert second["http-equiv"] == "Content-Security-Policy"
    assert "default-src 'none'" in str(second["content"])
    assert "script" not in str(second["content"])


def labelled(page: Page) -> dict[str, str]:
    """Return chart ID -> description for screen readers."""
    result = {}
    for attrs in page.all("svg"):
        title, described = str(attrs["aria-labelledby"]).split()
        assert attrs["role"] == "img"
        assert page.texts[title].strip()
        result[str(attrs["id"])] = page.texts[described].strip()
    assert all(result.values())
    return result


def report(folder: Path, *args: str) -> Page:
    """Return the page that the command writes with these arguments."""
    out = folder / "page.html"
    assert main(["report", *args, f"output_root={folder}", f"out={out}"]) == 0
    page = Page(out.read_text())
    assert_is_sound(page)
    return page


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Page:
    """The page of a run with all files."""
    folder = tmp_path_factory.mktemp("full")
    path = full_run(folder)
    from PIL import Image

    (path / "plots").mkdir()
    Image.linear_gradient("L").resize((900, 500)).save(path / "plots" / "maps.png")
    (path / "plots" / "gpu0.png").write_bytes(b"drawn anew")
    (path / "plots" / "broken.png").write_bytes(b"\x89PNG none")
    (path / "predictions").mkdir()
    (path / "predictions" / "sample.txt").write_text("to be & not to be <b>")
    return report(folder, "full")


def test_settings_have_command_line_names_and_rates_no_exponent() -> None:
    tree = {"updates": 3, "precision": {"option": "bf16", "keep_fp32": []}}
    assert dict(flatten(tree)) == {"updates": 3, "precision": "bf16", "precision.keep_fp32": []}
    assert [format_rate(36_450.4), format_rate(3.14159)] == ["36,450", "3.14"]


@pytest.mark.parametrize(
    ("limit", "note"),
    [
        (0.8, "dashed: max_grad_norm=0.8, the gradients of 50% of the rows were clipped to it"),
        (1.2, "dashed: max_grad_norm=1.2, the gradients of 0% of the rows were clipped to it"),
        (50.0, "no gradient norm is close to max_grad_norm=50: nothing was clipped"),
    ],
)
def test_the_clipping_norm_is_drawn_if_visible(limit: float, note: str, tmp_path: Path) -> None:
    updates = [{"update": update, "phase": "train", "train/grad_norm": norm} for update, norm in ((1, 0.5), (3, 1.0))]
    make_run(tmp_path, "mine", metrics__jsonl=updates, config__yaml=f"max_grad_norm: {limit}\n")
    drawn = gradient_norm(read_run_data(RunDirectory.find(tmp_path, "mine")))
    assert isinstance(drawn, Drawing)
    assert drawn.note == note
    axes = drawn.figure.axes[0]
    assert ("dashed" in note) == (len(axes.lines) == 2)
    assert axes.get_ylim()[1] < 2.0
    assert all(float(tick).is_integer() for tick in axes.get_xticks())
    if "dashed" in note:
        assert limit < axes.get_ylim()[1]


@pytest.mark.parametrize(("norms", "is_drawn"), [((0.8, 0.8), True), ((0.8, 0.9), False), ((0.8, None), False)])
def test_the_clipping_norm_must_be_equal_in_all_phases(
    norms: tuple[float, float | None], is_drawn: bool, tmp_path: Path
) -> None:
    updates = [{"update": 1, "phase": phase, "train/grad_norm": 1.0} for phase in ("base", "tune")]
    phases = {name: {"max_grad_norm": norm} for name, norm in zip(("base", "tune"), norms, strict=True)}
    config = json.dumps({"max_grad_norm": 0.7, "phase": phases | {"skipped": {"max_grad_norm": 0.6}}})
    make_run(tmp_path, "mine", metrics__jsonl=updates, config__yaml=config)
    drawn = gradient_norm(read_run_data(RunDirectory.find(tmp_path, "mine")))
    assert isinstance(drawn, Drawing)
    assert ("max_grad_norm=0.8" in drawn.note) == is_drawn
    assert "max_grad_norm=0.7" not in drawn.note


def test_the_page_shows_all_data_of_a_run(full: Page, screen: Callable[..., None]) -> None:
    page = full
    charts = labelled(page)
    assert charts.keys() == CHARTS
    screen("\n\n".join(f"{name}\n{text}" for name, text in charts.items()))
    assert "2.54 at update 10" in charts["loss"]
    assert "3 GiB of 16 GiB" in page.words
    assert "rank 1 waited 20%" in charts["ranks"]
    assert "gpu1 utilization 50 %" in charts["gpus"]
    for expected in (
        "accel-run train task=gpt run=full", "finished", "trivial model reaches 0.25", "hatched: not monitored (1 time)", "to be & not to be <b>", "rank 0 slows down the others",
        "update-0000000300", "accel-run status run=", "optimizer.lr", "auto: native", "sh ", "plots/broken.png", "Compute: 78% of the time after the first update (7.0 of 9.0 s)",
    ):  # fmt: skip
        assert expected in page.words, expected
    (picture,) = page.all("img")
    assert "plots/maps.png" in str(picture["alt"])


def test_missing_parts_are_listed_with_the_reason(tmp_path: Path) -> None:
    make_run(tmp_path, "bare", run__json={"state": "failed", "exit_code": 70, "task": "gpt"})
    (tmp_path / "bare" / "error.json").write_text(
        json.dumps({"cause": "it raised", "where": "mine.py:3", "exit_code": 70})
    )
    (tmp_path / "bare" / "command.sh").write_text("#!/bin/sh\n")
    page = report(tmp_path, "bare")
    assert not page.all("svg")
    missing = page.text[page.text.index('id="missing"') :]
    for expected in ("metrics.jsonl is missing", "gpu.csv: there is no such file", "plan.json is missing", "environment.json is missing", "config.yaml:",
                  "no checkpoints"):  # fmt: skip
        assert expected in missing, expected
    assert "(exit 70)" in page.words
    assert "mine.py:3" in page.words
    for name in ("bare", "bare-again"):
        assert f"sh {tmp_path / 'bare' / 'command.sh'} run={name}\n" in f"{page.words}\n".replace("\n\n", "\n")


@pytest.mark.usefixtures("undrawn")
def test_missing_metrics_do_not_show_earlier_values(tmp_path: Path) -> None:
    last = {"val/loss": 2.1, "val/accuracy": None, "val/rare": None}
    for name in ("one", "other"):
        make_run(tmp_path, name, run__json=record(name, metrics=last), metrics__jsonl=list(rows(20)))
    for page in (report(tmp_path, "one"), report(tmp_path, "one", "other")):
        for metric in ("val/accuracy", "val/rare"):
            assert f"{metric}{NOT_MEASURED}" in page.words.replace(f"{metric}\n", metric)


EARLIER = {"attempt": "2026-01-30T10:00:00.000+00:00", "parts_s": {"forward": 99.0}, "seconds": 99.0}


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("evidence", [None, EARLIER], ids=["first process", "resumed"])
def test_a_running_run_and_damaged_lines_are_reported(tmp_path: Path, evidence: dict[str, Any] | None) -> None:
    path = make_run(
        tmp_path, "mine", run__json=record("mine", state="running", host="elsewhere", evidence=evidence, metrics=None)
    )
    good = [json.dumps(row) for row in rows(20)]
    (path / "metrics.jsonl").write_text("\n".join([*good[:9], "{torn", "[]", *good[9:], '{"update": 210, "half']))
    page = report(tmp_path, "mine")
    assert "running on elsewhere" in page.words
    assert "2 lines of" in page.words
    assert "to 2.02 at update 200" in labelled(page)["loss"], "an incomplete last line is not damaged"
    assert "(1.2 of 2.1 s)" in page.words, "without evidence of this process, the rows show where the time goes"


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(("reached", "is_shown"), [(0, True), (200, True), (201, False)])
def test_earlier_measurements_are_shown_without_new_updates(tmp_path: Path, reached: int, is_shown: bool) -> None:
    phases = [{"name": "train", "kind": "train", "updates": 200}]
    content = record("mine", state="failed", exit_code=70, evidence=EARLIER | {"phases": phases}, metrics=None)
    path = make_run(tmp_path, "mine", run__json=content)
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(20)))
    (path / "error.json").write_text(json.dumps({"cause": "killed", "reached": reached}))
    assert ("of 99.0 s)" in report(tmp_path, "mine").words) == is_shown


@pytest.mark.parametrize("is_finished", [True, False])
def test_the_updates_of_all_phases_are_summed(is_finished: bool, tmp_path: Path) -> None:
    content = [{"update": at, "phase": phase, "train/loss": 1.0} for phase in ("base", "tune") for at in (10, 20)]
    phases = {name: {"kind": "train", "updates": 23, "total": 23} for name in ("base", "tune")}
    made = record("mine", phases=phases if is_finished else {})
    make_run(tmp_path, "mine", metrics__jsonl=content, run__json=made)
    tiles = {tile.label: tile.value for tile in make_tiles(read_run_data(RunDirectory.find(tmp_path, "mine")))}
    assert tiles["updates"] == ("46" if is_finished else "40")


def test_non_finite_last_values_are_reported(tmp_path: Path) -> None:
    """In metrics.jsonl, non-finite values are null."""
    content = [
        {"update": at, "phase": "train", "train/loss": loss, "val/loss": loss, "val/f1": None, "train/grad_norm": norm}
        for at, loss, norm in ((1, 2.0, 9.0), (2, 1.5, 1.0), (3, None, None))
    ]
    made = record("mine", state="running", metrics={})
    make_run(tmp_path, "mine", metrics__jsonl=content, run__json=made, config__yaml="max_grad_norm: 5.0\n")
    run = read_run_data(RunDirectory.find(tmp_path, "mine"))
    tiles = {tile.label: tile for tile in make_tiles(run)}
    assert tiles["training loss"].value == "1.5"
    assert "nan" in tiles["training loss"].note
    assert tiles["val/loss"].value == NOT_MEASURED
    assert "val/f1" not in run.curves.of
    for draw, figure in ((loss, "(1)"), (gradient_norm, "50%")):
        drawing = draw(run)
        assert isinstance(drawing, Drawing)
        assert figure in drawing.note


def test_missing_throughput_is_not_reported_as_non_finite(tmp_path: Path) -> None:
    """The first update of a process is not timed, so its throughput is null."""
    content = [
        {"update": at, "phase": "train", "perf/items_per_s": rate} for at, rate in ((1, None), (2, 9.0), (3, None))
    ]
    make_run(tmp_path, "mine", metrics__jsonl=content)
    assert [*read_run_data(RunDirectory.find(tmp_path, "mine")).curves["perf/items_per_s"].y] == [9.0]


@pytest.mark.parametrize("every", [1, 10])
def test_the_page_notes_that_rows_are_means_of_updates(every: int, tmp_path: Path) -> None:
    path = make_run(tmp_path, "mine")
    content = [{"update": number * every, "phase": "train", "train/loss": 1.0} for number in (1, 2, 3)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    drawing = loss(read_run_data(RunDirectory.find(tmp_path, "mine")))
    assert isinstance(drawing, Drawing)
    assert bool(drawing.note) == (every > 1)


@pytest.mark.slow
def test_a_page_of_100_000_rows_is_small(tmp_path: Path) -> None:
    path = full_run(tmp_path)
    (path / "plan.json").write_text(json.dumps(plan("ddp")))
    row = ', "phase": "train", "lr": 0.1, "train/loss": 2.%d, "train/grad_norm": 1.%d, "perf/items_per_s": 9%d, "perf/forward_ms": 1.%d}\n'
    lines = [f'{{"update": {number}{row % ((number % 97,) * 4)}' for number in range(1, 100_001)]
    (path / "metrics.jsonl").write_text(
        "".join([*lines, '{"update": 100000, "phase": "train", "val/loss": 2, "val/f1": 1}\n'])
    )
    charts = labelled(report(tmp_path, "full"))
    assert charts.keys() == CHARTS - {"memory"}, "no row has memory values"


@pytest.mark.slow
def test_untrusted_text_is_escaped_and_secrets_are_redacted(tmp_path: Path) -> None:
    evil = "</title><script>alert(1)</script><img src=x onerror=alert(1)>\x1b[31m$\\frac{\udc80\x00&amp;\ufffe'\""
    token = "hf_" + "a1B2" * 10
    strange = plan("ddp") | {"device_name": evil, "reasons": {"optimizer.lr": token}}
    path = make_run(
        tmp_path, "hostile",
        run__json=record("hostile", command=f"{evil} {token}", task=evil, metrics={f"val/{evil}": 1.0}, phases={evil: {"kind": evil}}, api_key="hunter2hunter2"),
        plan__json=strange, environment__json={"git": {"commit": evil, "db_password": "hunter2hunter2"}, "inventory": {"devices": [{"name": evil}]}},
        metrics__jsonl=[row | {f"val/{evil}": 1.0, "phase": f"{row['phase']}{evil}"} for row in rows(12)],
        events__jsonl=[{"time": evil, "kind": evil, "text": f"{evil} {token}"}],
        config__yaml=f"optimizer:\n  lr: {json.dumps(evil.replace(chr(0xdc80), ''))}\n", gpu__csv=watched(10).replace("Card", "<b onclick=x>"),
    )  # fmt: skip
    (path / "predictions").mkdir()
    (path / "predictions" / "<script>x.txt").write_text(evil.replace("\udc80", "") + token)
    page = report(tmp_path, "hostile")
    assert len(labelled(page)) >= 8
    assert "alert(1)" in page.words, "the text is shown escaped"
    for secret in (token, "hunter2hunter2"):
        assert secret not in page.text
    assert "\x1b" not in page.text
    assert "\x00" not in page.text


@pytest.mark.slow
def test_invalid_files_do_not_break_the_page(tmp_path: Path) -> None:
    wrong: Any = {"phases": 3, "evidence": {"seconds": "x", "parts_s": {"forward": "y"}, "ranks_s": 7}, "metrics": [1], "baselines": 4, "started": 5,
                  "command": ["a"], "overrides": 3, "task": {"x": 1}, "state": []}  # fmt: skip
    odd = {"choices": {"parallelism": {"function": "pipeline", "options": {"schedule": "x"}}}, "batch": {"shares": "x", "micro_batch_size": 0},
           "ranks": 3, "reasons": []}  # fmt: skip
    lines = [
        {"update": 1, "train/loss": math_nan}, {"update": -1}, {"update": True}, {"update": 5, "lr": 10**400, "val/x": "a"},
        {"update": 5, "phase": ["x"], "perf/forward_ms": -3.0, "balance/shares": ["a"]}, {"update": 1e400}, {"no": 1},
    ]  # fmt: skip
    path = make_run(tmp_path, "odd", run__json=wrong, plan__json=odd, environment__json={"inventory": {"devices": 3, "cpu": []}}, metrics__jsonl=lines,
                    config__yaml="a: &a [*a]\n", gpu__csv="a,b\n1,2\n", events__jsonl=[{"kind": [1]}])  # fmt: skip
    (path / "checkpoints" / "update-0000000001").write_text("a file")
    report(tmp_path, "odd")
    shutil.copytree(path, tmp_path / "odder")
    report(tmp_path, "odd", str(tmp_path / "odder"))


math_nan = float("nan")


@pytest.mark.slow
def test_invalid_numbers_do_not_break_other_charts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        {
            "update": at,
            "phase": "train",
            "lr": 0.5,
            "train/loss": (-1) ** at * 1.7e308,
            "train/grad_norm": math_nan,
            "memory/peak_gib": math_nan,
        }
        for at in range(1, 5)
    ]
    lines += [
        {"update": 5, "phase": "train", "train/loss": 3.0, "balance/shares": [16]},
        {"update": 6, "phase": "train", "train/loss": math_nan},
    ]
    evidence = record("x")["evidence"] | {"seconds": 10**400, "step_time_ms": math_nan, "device_peak_gib": math_nan}
    odd = plan() | {"batch": {"global_batch_size": float("inf"), "micro_batch_size": 4}}
    for name in ("one", "two"):
        make_run(
            tmp_path,
            name,
            run__json=record(name, evidence=evidence, overrides=3),
            plan__json=odd,
            metrics__jsonl=lines,
            config__yaml="seed: 1\n",
        )
    page = report(tmp_path, "one")
    assert labelled(page).keys() >= {"loss", "lr", "ranks"}
    assert re.search(r"3the last .*nan", page.words.replace("\n", ""))
    page = report(tmp_path, "one", "two")
    assert labelled(page).keys() == {"chart0", "chart2"}
    assert ": one, two" in page.words
    assert "Warning" not in capsys.readouterr().err


def bands(page: Page, chart: str) -> list[str]:
    """Return the tooltips of a chart's bands, from left to right."""
    svg = page.text[page.text.index(f'id="{chart}"') :]
    return re.findall(r"<title>([^<]*)</title></rect>", svg[: svg.index("</svg>")])


def test_charts_show_values_in_tooltips(full: Page) -> None:
    (*_, last) = bands(full, "loss")
    assert last.splitlines()[0] == "update 400"
    assert dict(line.split(": ") for line in last.splitlines()[1:])["validation"] == "2.1"
    parts = [line.split(": ")[0] for line in bands(full, "steps")[0].splitlines()[1:]]
    assert set(parts) == {"data", "forward", "backward", "optimizer", "wait"}
    assert {"GPU 0", "GPU 1"} <= {line.split(": ")[0] for line in bands(full, "machine")[0].splitlines()[1:]}
    for chart in CHARTS:
        assert len(bands(full, chart)) >= 1, chart


class Interval:
    """Replaces the wait between two pages; the n-th wait calls the n-th action."""

    def __init__(self, *actions: Callable[[], None]) -> None:
        self.actions = list(actions)

    def __call__(self, seconds: float) -> None:
        self.actions.pop(0)()


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("ends", "is_interrupted"), [([False, False], False), ([], True)], ids=["training ends", "Ctrl-C"]
)
def test_a_watched_page_reloads_until_training_ends(ends: list[bool], is_interrupted: bool) -> None:
    live = [True, *ends]
    written: list[tuple[bool, float | None]] = []

    def read() -> Content:
        return Content(PageContent(), (), is_live=live.pop(0) if len(live) > 1 else live[0])

    def write(content: Content, refresh_s: float | None = None) -> int:
        written.append((content.is_live, refresh_s))
        return 1

    nothing: Callable[[], None] = lambda: None  # noqa: E731
    waits = Interval(interrupt) if is_interrupted else Interval(nothing, nothing)
    content, size = watch(read, write, 5.0, waits)
    assert size == 1
    assert written[0] == (True, 5.0)
    assert written[-1] == (content.is_live, None), "the last page does not reload"
    assert [refresh for _, refresh in written[:-1]] == [5.0] * (len(written) - 1)
    assert not waits.actions


def test_only_watched_pages_reload(full: Page) -> None:
    def reloads(text: str) -> list[str | None]:
        return [attrs["content"] for attrs in Page(text).all("meta") if attrs.get("http-equiv") == "refresh"]

    assert reloads(full.text) == []
    assert reloads(render_html(PageContent(), 2.5)) == ["2.5"]


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_watching_a_finished_run_returns(
    tmp_path: Path,
) -> None:
    path = full_run(tmp_path)
    assert main(["report", "full", "--watch", f"output_root={tmp_path}"]) == 0
    page = Page((path / "report.html").read_text())
    assert_is_sound(page)
    assert not [attrs for attrs in page.all("meta") if attrs.get("http-equiv") == "refresh"]
    assert main(["report", "full", "--watch", "every_s=0", f"output_root={tmp_path}"]) == 78


@pytest.mark.usefixtures("undrawn")
def test_links_out_of_the_run_are_not_followed(tmp_path: Path) -> None:
    path = make_run(tmp_path, "mine", run__json=record("mine"))
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "diary.txt").write_text("dear diary")
    (path / "predictions").symlink_to(tmp_path / "private")
    os.mkfifo(path / "gpu.csv")  # opening it would block until there is a writer
    page = report(tmp_path, "mine")
    assert "diary" not in page.words
    assert re.search(r"gpu\.csv\b.* regular", page.words)


@pytest.mark.slow
def test_many_runs_share_a_legend(tmp_path: Path) -> None:
    names = [f"gpt-20260131-14253{number}-ab12cd" for number in range(7)]
    for number, name in enumerate(names):
        make_run(tmp_path, name, run__json=record(name), metrics__jsonl=list(rows(3)), config__yaml=f"seed: {number}\n")
    page = report(tmp_path, *names)
    for name in names:
        assert page.text.count(f"<tr><td>{name}</td>") == 2, "in the tables of figures and of differing settings"
        assert len(re.findall(rf"<text[^>]*>{name}</text>", page.text)) == 1
    assert page.words.count("first chart") == len(page.all("svg")) - 1


@pytest.mark.usefixtures("undrawn")
def test_runs_are_compared_by_curves_metrics_and_differing_settings(tmp_path: Path) -> None:
    for name, lr in (("one", "0.5"), ("two", "0.25")):
        make_run(
            tmp_path, name, run__json=record(name), plan__json=plan("ddp"), metrics__jsonl=list(rows(20)),
            config__yaml=f"run: {name}\nseed: 3\noptimizer:\n  lr: {lr}\n",
        )  # fmt: skip
    page = report(tmp_path, "one", "two")
    charts = labelled(page)
    assert len(charts) == 6
    assert all("one ends at" in text and "two ends at" in text for text in charts.values())
    differ = page.text[page.text.index('id="differences"') : page.text.index('id="charts"')]
    assert "<td>optimizer.lr</td><td>0.5</td><td>0.25</td>" in differ
    assert "seed" not in differ


@pytest.mark.parametrize("count", [2, 12])
@pytest.mark.usefixtures("undrawn")
def test_equal_settings_are_not_listed(count: int, tmp_path: Path) -> None:
    names = [f"run{number}" for number in range(count)]
    for name in names:
        make_run(tmp_path, name, run__json=record(name), config__yaml=f"run: {name}\nseed: 3\n")
    page = report(tmp_path, *names)
    differ = page.text[page.text.index('id="differences"') :]
    differ = differ[: differ.index("</section>")]
    assert "<td" not in differ
    assert "<th" not in differ


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_the_page_overwrites_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_run(tmp_path, "mine", run__json=record("mine", phases={"train": {"seconds": 100.0}}))
    for _ in range(2):
        assert main(["report", "run=mine", f"output_root={tmp_path}"]) == 0
    page = (path / "report.html").read_text()
    assert "1 min 40 s</span>" in page
    assert "of which 10.0 s" in page
    assert (path / "report.html").stat().st_mode & 0o777 == 0o600
    monkeypatch.chdir(path / "checkpoints")
    assert report(tmp_path, "..").words.strip().startswith("mine ")
    (tmp_path / "work.html").write_text("<p>mine")
    with (tmp_path / "large.html").open("wb") as file:
        file.truncate(1 << 30)
    ways = {
        f"out={tmp_path}/work.html": 78, "out=page.txt": 78, f"out={tmp_path}/no/page.html": 73, "nowhere": 66, "--fast": 78, "outt=x": 78,
        "run=other": 78, str(tmp_path): 66,
        "mine": 78, str(path): 78, f"out={tmp_path}/large.html": 78, "out=/proc/page.html": 74,
    }  # fmt: skip
    for word, code in ways.items():
        assert main(["report", "mine", word, f"output_root={tmp_path}"]) == code, word
        messages = capsys.readouterr().err
        assert "Traceback" not in messages
        assert ".tmp-" not in messages, "the name of the temporary file is not informative"
    assert (tmp_path / "work.html").read_text() == "<p>mine"


@pytest.mark.parametrize("count", [1, 7, 319, 321, 5000])
def test_binned_curves_keep_extremes_means_and_gaps(count: int) -> None:
    generator = np.random.default_rng(count)
    y = generator.normal(size=count)
    y[count // 2 :: 50] = np.nan
    line = bin_curve(Curve(list(range(count)), y.tolist()))
    assert len(line.x) <= 320
    assert np.nanmin(line.low, initial=9) == np.nanmin(y, initial=9)
    assert np.nanmax(line.high, initial=-9) == np.nanmax(y, initial=-9)
    assert np.isnan(line.mean).any() == (np.isnan(y).any() and count <= 320)
    assert np.allclose(smooth(Curve(list(range(count)), [3.0] * count)).y, 3.0)


# ---------------------------------------------------------------- in a browser

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTHS = (390, 1280)
# Shows the page in two frames of these widths. A script of the outer page, not of the report, returns what is visible.
AROUND = """<!doctype html><meta charset="utf-8"><body style="margin:0; white-space:nowrap">FRAMES<script>
window.onload = () => {
  const seen = [...document.querySelectorAll("iframe")].map(frame => {
    const page = frame.contentDocument, root = page.documentElement;
    const charts = [...page.querySelectorAll("svg")].map(chart => [chart.id, chart.getBoundingClientRect()]);
    return {
      width: root.clientWidth, needs: root.scrollWidth, back: frame.contentWindow.getComputedStyle(page.body).backgroundColor,
      small: charts.filter(([, box]) => box.width < 250 || box.height < 60).map(([id]) => id), charts: charts.length,
      ink: frame.contentWindow.getComputedStyle(page.querySelector("svg text")).fill,
      filter: frame.contentWindow.getComputedStyle(page.querySelector("svg")).filter,
    };
  });
  document.body.insertAdjacentHTML("beforeend", "<pre id=seen>" + JSON.stringify(seen) + "</pre>");
};
</script>"""


@pytest.fixture
def asked() -> Iterator[tuple[str, list[str]]]:
    """The address of a local server and the list of paths requested from it."""
    paths: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", paths
    server.shutdown()
    server.server_close()


def show_in_browser(text: str, folder: Path, *, dark: bool) -> tuple[list[dict[str, Any]], list[str], Path]:
    """Return what a browser shows at each width, its console messages, and a screenshot."""
    (folder / "page.html").write_text(text)
    frames = "".join(
        f'<iframe src="page.html" width="{width}" height="2400" style="border:0"></iframe>' for width in WIDTHS
    )
    (folder / "around.html").write_text(AROUND.replace("FRAMES", frames))
    picture = folder / "picture.png"
    args = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking",
        "--disable-component-update", "--disable-sync", "--enable-logging=stderr", "--hide-scrollbars",
        "--allow-file-access-from-files", f"--user-data-dir={folder / 'profile'}",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}", f"--window-size={sum(WIDTHS)},2400", f"--screenshot={picture}", "--dump-dom",
        (folder / "around.html").as_uri(),
    ]  # fmt: skip
    done = subprocess.run(args, capture_output=True, text=True, timeout=240, check=True)
    (result,) = re.findall(r'<pre id="seen">(.*?)</pre>', done.stdout)
    return json.loads(html.unescape(result)), re.findall(r"CONSOLE.*", done.stderr), picture


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_browser_shows_the_page_without_requests(
    full: Page, asked: tuple[str, list[str]], tmp_path: Path, dark: bool
) -> None:
    from PIL import Image

    address, paths = asked
    intruder = (
        f"<img src='{address}/image'><script src='{address}/script'></script><script>document.body.remove()</script>"
    )
    intruder += f"<link rel=stylesheet href='{address}/style'><iframe src='{address}/frame'></iframe>"
    text = full.text.replace("</main>", f"{intruder}</main>") if dark else full.text
    seen, console, picture = show_in_browser(text, tmp_path, dark=dark)
    assert paths == []
    assert all("Content Security Policy" in line for line in console), console
    assert bool(console) == dark, "the policy reports blocked content"
    assert [frame["width"] for frame in seen] == list(WIDTHS)
    for frame in seen:
        assert frame["needs"] <= frame["width"], "nothing must overflow the window"
        assert frame["charts"] == len(CHARTS)
        assert frame["small"] == []
        lights = [sum(map(int, re.findall(r"\d+", frame[key])[:3])) / 3 for key in ("back", "ink")]
        lights[1] = 255 - lights[1] if frame["filter"].startswith("invert(1)") else lights[1]
        assert (lights[0] < 60 and lights[1] > 180) if dark else (lights[0] > 230 and lights[1] < 60), frame
    with Image.open(picture) as image:
        assert len(image.convert("RGB").getcolors(1 << 24) or ()) > 500, "charts must be visible"


def test_reports_read_all_metrics_of_health_rules() -> None:
    used = set()

    class Metrics(dict[str, Stat]):
        def get(self, name: str, default: Any = None) -> Any:
            device, _, metric = name.partition("/")
            used.add(metric if device == "gpu0" else name)
            return Stat(99.0, 99.0, 99.0, 10.0)

    metrics = Metrics({"gpu0/util": Stat(99.0, 99.0, 99.0, 10.0)})
    assess_health(Summary(SummaryPart(10.0, 10, metrics), {}, {"gpu0": SampledGpu("a GPU", "GPU-0")}))
    assert "util" in used
    assert used <= {*MACHINE_METRICS}
