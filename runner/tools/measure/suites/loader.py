"""`suite=loader`: compare settings of the data loader: number of workers, prefetching, pinned memory and cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import NamedTuple

from runner.base.errors import ConfigError, Problem
from runner.tools.measure.comparison_result import BASELINE_NAME, ComparisonResult, Variant, VariantResult
from runner.tools.measure.measurement_context import MeasurementContext
from runner.tools.measure.selection import Selection
from runner.tools.measure.suite import (
    Columns,
    SuiteReport,
    SuiteRequest,
    data_wait_percent,
    format_gain,
    format_verdict,
    make_table,
    open_suite_context,
    save_report,
    select_variant,
)


class LoaderVariant(NamedTuple):
    """Settings of a data loader.

    workers   number of worker processes, or `thread`
    prefetch  number of batches that each worker prefetches
    """

    workers: int | str
    prefetch: int
    pin: bool
    cache: str

    def __str__(self) -> str:
        workers = self.workers if isinstance(self.workers, str) else f"{self.workers} workers"
        parts = [workers, f"prefetch {self.prefetch}"] if self.prefetch else [workers]
        return ", ".join([*parts, *(["pinned"] if self.pin else []), f"cache {self.cache}"])

    @property
    def overrides(self) -> tuple[str, ...]:
        common = (f"dataloader.pin_memory={str(self.pin).lower()}", f"dataloader.cache={self.cache}")
        if self.workers == THREAD:
            return ("dataloader=thread", f"dataloader.depth={self.prefetch}", *common)
        prefetch = (f"dataloader.prefetch_factor={self.prefetch}",) if self.prefetch else ()
        return ("dataloader=default", f"dataloader.num_workers={self.workers}", *prefetch, *common)

    @property
    def effective(self) -> LoaderVariant:
        """The settings that take effect.

        Without a cache, `dataloader=thread` uses one worker process; without workers, nothing is prefetched.
        """
        if self.workers == THREAD and self.cache == "none":
            return self._replace(workers=1)
        return self._replace(prefetch=self.prefetch if self.workers else 0)


def run(suite_request: SuiteRequest) -> SuiteReport:
    """Measure data loader settings and recommend the fastest. Raises ConfigError for invalid values."""
    _parse_loaders(suite_request, cores=1, has_gpu=False)
    with open_suite_context(suite_request) as context:
        loaders, skipped = _select_loaders(suite_request, context)
        variants = [Variant(BASELINE_NAME), *(Variant(str(each), each.overrides) for each in loaders)]
        selection = select_variant(context, variants, suite_request)
    by_name = {str(each): each for each in loaders} | {BASELINE_NAME: _current_loader(context)}
    return save_report(suite_request, "loader", _make_report(context, selection, by_name, skipped), selection.result)


def _parse_loaders(suite_request: SuiteRequest, cores: int, *, has_gpu: bool) -> Iterator[LoaderVariant]:
    """Return all combinations of the options. Raises ConfigError."""
    workers: tuple[int | str, ...] = (0, THREAD, *(number for number in (1, 2, 4, 8) if number <= cores))
    if suite_request.options["workers"] != "auto":
        values = [value.strip() for value in suite_request.options["workers"].strip("[]").split(",")]
        if not all(value == THREAD or (value.isascii() and value.isdigit()) for value in values):
            what = f"must be integers of at least 0, or {THREAD}, separated by commas"
            raise ConfigError(Problem(what, f"workers={suite_request.options['workers']}", f"use workers=0,2,{THREAD}"))
        workers = tuple(dict.fromkeys(value if value == THREAD else int(value) for value in values))
    pins: tuple[bool, ...] = (False, True) if has_gpu else (False,)
    if suite_request.options["pin"] != "auto":
        pins = tuple(value == "true" for value in suite_request.parse_choices("pin", ("false", "true")))
    caches = suite_request.parse_choices("cache", ("none", "memory", "device"))
    return (
        LoaderVariant(*each).effective
        for each in product(workers, suite_request.parse_numbers("prefetch"), pins, caches)
    )


def _current_loader(context: MeasurementContext) -> LoaderVariant:
    choice = context.plan.choices["dataloader"]
    if choice.location:
        what = "suite=loader compares only settings of the built-in data loaders"
        raise ConfigError(Problem(what, f"dataloader={choice.name}", "use dataloader=default"))
    options = choice.options
    prefetch = options.get("depth", options.get("prefetch_factor", 0))
    workers = options.get("num_workers", THREAD)
    return LoaderVariant(workers, int(prefetch), options["pin_memory"] is True, options["cache"]).effective


def _select_loaders(
    suite_request: SuiteRequest, context: MeasurementContext
) -> tuple[list[LoaderVariant], dict[str, str]]:
    """Return the loaders to measure besides the current one, and impossible ones with the reason."""
    has_gpu = str(context.plan.device).startswith("cuda")
    loaders: dict[LoaderVariant, None] = {}
    skipped: dict[str, str] = {}
    for loader in _parse_loaders(suite_request, context.inventory.cpu.logical_cores, has_gpu=has_gpu):
        why = next(why_not(loader, has_gpu=has_gpu), "")
        if why:
            skipped[str(loader)] = why
        else:
            loaders[loader] = None
    loaders.pop(_current_loader(context), None)
    return list(loaders), skipped


def why_not(loader: LoaderVariant, *, has_gpu: bool) -> Iterator[str]:
    """Yield the reasons why the settings are impossible, or equivalent to others."""
    if loader.pin and not has_gpu:
        yield "pinned memory speeds up only copies to a GPU, and there is no GPU"
    if loader.cache == "device" and not has_gpu:
        yield "equivalent to cache=memory, because the device is the CPU"
    if loader.cache == "device" and loader.workers not in (0, THREAD):
        yield "worker processes cannot access a device cache"
    if loader.cache == "device" and loader.pin:
        yield "pinned memory has no effect, because batches of a device cache are not copied from the host"


def _columns(result: ComparisonResult, loaders: Mapping[str, LoaderVariant]) -> Columns:
    def copies(trial: VariantResult) -> float | None:
        transfer = trial.parts_s.get("transfer")
        return 100 * transfer / sum(trial.parts_s.values()) if transfer else None

    return {
        "loader": lambda trial: trial.name,
        "workers": lambda trial: str(loaders[trial.name].workers),
        "prefetch, batches": lambda trial: loaders[trial.name].prefetch or None,
        "pinned": lambda trial: "yes" if loaders[trial.name].pin else "no",
        "cache": lambda trial: loaders[trial.name].cache,
        "update, ms": lambda trial: trial.median_ms,
        "waits for data, %": data_wait_percent,
        "copies, %": copies,
        "extra start-up, s": result.later_s,
        "gain": lambda trial: format_gain(result, trial),
        "sure": lambda trial: format_verdict(result, trial),
    }


def _make_report(
    context: MeasurementContext, selection: Selection, loaders: Mapping[str, LoaderVariant], skipped: dict[str, str]
) -> SuiteReport:
    result, best = selection.result, selection.best
    rows = sorted((each for each in result.variants if each.blocks), key=lambda each: each.median_ms)
    now = data_wait_percent(result.baseline)
    waited = "" if now is None else f"; waits for data: {now:.0f} % of an update"
    headline = f"{selection.describe_no_gain('the current loader')}{waited}"
    if best is not None:
        after = data_wait_percent(best)
        waits = (
            ""
            if after is None or now is None
            else f"; waits for data: {after:.0f} % of an update instead of {now:.0f} %"
        )
        headline = f"{' '.join(best.variant.overrides)} makes an update faster: {selection.outcome.ratio}{waits}"
    data = {"recommended": list(best.variant.overrides) if best else [], "is_clear": best is not None}
    table = make_table("loaders, the fastest first", _columns(result, loaders), rows)
    return SuiteReport(headline, (table,), [*context.notes, *result.notes], skipped | result.skipped, data)


THREAD = "thread"
