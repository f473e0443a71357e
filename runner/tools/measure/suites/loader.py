"""`suite=loader`: data loaders by workers, prefetch, pinned memory and cache, with the data wait of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import NamedTuple

from runner.base.errors import ConfigError, Problem
from runner.tools.measure.comparison_result import BASELINE_NAME, ComparisonResult, Variant, VariantResult
from runner.tools.measure.measuring_place import MeasuringPlace
from runner.tools.measure.selection import Selection
from runner.tools.measure.suite import (
    Columns,
    SuiteReport,
    SuiteRequest,
    data_wait,
    gain_of,
    place_of,
    saved,
    selected,
    table_of,
    verdict_of,
)


class LoaderVariant(NamedTuple):
    """A loader: worker processes or `thread`; batches that each prefetches, 0: none; pinned memory; cache."""

    workers: int | str
    prefetch: int
    pin: bool
    cache: str

    def __str__(self) -> str:
        workers = self.workers if isinstance(self.workers, str) else f"{self.workers} workers"
        words = [workers, f"prefetch {self.prefetch}"] if self.prefetch else [workers]
        return ", ".join([*words, *(["pinned"] if self.pin else []), f"cache {self.cache}"])

    @property
    def overrides(self) -> tuple[str, ...]:
        rest = (f"dataloader.pin_memory={str(self.pin).lower()}", f"dataloader.cache={self.cache}")
        if self.workers == THREAD:
            return ("dataloader=thread", f"dataloader.depth={self.prefetch}", *rest)
        ahead = (f"dataloader.prefetch_factor={self.prefetch}",) if self.prefetch else ()
        return ("dataloader=default", f"dataloader.num_workers={self.workers}", *ahead, *rest)

    @property
    def effective(self) -> LoaderVariant:
        """The equivalent loader: a thread needs a cache, and a loader without workers prefetches nothing."""
        if self.workers == THREAD and self.cache == "none":
            return self._replace(workers=1)
        return self._replace(prefetch=self.prefetch if self.workers else 0)


def run(wanted: SuiteRequest) -> SuiteReport:
    """Return the loaders, the fastest first, and which one to use. Raises ConfigError for invalid values."""
    _requested(wanted, cores=1, has_gpu=False)
    with place_of(wanted) as place:
        loaders, skipped = _loaders(wanted, place)
        variants = [Variant(BASELINE_NAME), *(Variant(str(each), each.overrides) for each in loaders)]
        found = selected(place, variants, wanted)
    by_name = {str(each): each for each in loaders} | {BASELINE_NAME: _current(place)}
    return saved(wanted, "loader", _report(place, found, by_name, skipped), found.trials)


def _requested(wanted: SuiteRequest, cores: int, *, has_gpu: bool) -> Iterator[LoaderVariant]:
    """Return all combinations of the options. Raises ConfigError."""
    workers: tuple[int | str, ...] = (0, THREAD, *(number for number in (1, 2, 4, 8) if number <= cores))
    if wanted.options["workers"] != "auto":
        words = [word.strip() for word in wanted.options["workers"].strip("[]").split(",")]
        if not all(word == THREAD or (word.isascii() and word.isdigit()) for word in words):
            what = f"must be whole numbers from 0 on, or {THREAD}, with commas between them"
            raise ConfigError(Problem(what, f"workers={wanted.options['workers']}", f"use workers=0,2,{THREAD}"))
        workers = tuple(dict.fromkeys(word if word == THREAD else int(word) for word in words))
    pins: tuple[bool, ...] = (False, True) if has_gpu else (False,)
    if wanted.options["pin"] != "auto":
        pins = tuple(word == "true" for word in wanted.some_of("pin", ("false", "true")))
    caches = wanted.some_of("cache", ("none", "memory", "device"))
    return (LoaderVariant(*each).effective for each in product(workers, wanted.numbers("prefetch"), pins, caches))


def _current(place: MeasuringPlace) -> LoaderVariant:
    """Return the loader of the current settings."""
    options = place.plan.choices["dataloader"].options
    ahead = options.get("depth", options.get("prefetch_factor", 0))
    workers = options.get("num_workers", THREAD)
    return LoaderVariant(workers, int(ahead), options["pin_memory"] is True, options["cache"]).effective


def _loaders(wanted: SuiteRequest, place: MeasuringPlace) -> tuple[list[LoaderVariant], dict[str, str]]:
    """Return the loaders to measure besides the current one, and impossible ones with the reason."""
    has_gpu = str(place.plan.device).startswith("cuda")
    loaders: dict[LoaderVariant, None] = {}
    skipped: dict[str, str] = {}
    for loader in _requested(wanted, place.inventory.cpu.logical_cores, has_gpu=has_gpu):
        why = next(why_not(loader, has_gpu=has_gpu), "")
        if why:
            skipped[str(loader)] = why
        else:
            loaders[loader] = None
    loaders.pop(_current(place), None)
    return list(loaders), skipped


def why_not(loader: LoaderVariant, *, has_gpu: bool) -> Iterator[str]:
    """Yield why a loader is impossible, or the same as another."""
    if loader.pin and not has_gpu:
        yield "there is no GPU to copy to from page-locked memory"
    if loader.cache == "device" and not has_gpu:
        yield "the device is the CPU: the same as cache=memory"
    if loader.cache == "device" and loader.workers not in (0, THREAD):
        yield "worker processes cannot access a device cache"
    if loader.cache == "device" and loader.pin:
        yield "batches of a device cache are not copied"


def _columns(trials: ComparisonResult, loaders: Mapping[str, LoaderVariant]) -> Columns:
    def copies(each: VariantResult) -> float | None:
        transfer = each.parts_s.get("transfer")
        return 100 * transfer / sum(each.parts_s.values()) if transfer else None

    return {
        "loader": lambda each: each.name,
        "workers": lambda each: str(loaders[each.name].workers),
        "prefetch, batches": lambda each: loaders[each.name].prefetch or None,
        "pinned": lambda each: "yes" if loaders[each.name].pin else "no",
        "cache": lambda each: loaders[each.name].cache,
        "update, ms": lambda each: each.median_ms,
        "waits for data, %": data_wait,
        "copies, %": copies,
        "starts later, s": trials.later_s,
        "gain": lambda each: gain_of(trials, each),
        "sure": lambda each: verdict_of(trials, each),
    }


def _report(
    place: MeasuringPlace, found: Selection, loaders: Mapping[str, LoaderVariant], skipped: dict[str, str]
) -> SuiteReport:
    trials, best = found.trials, found.best
    rows = sorted((each for each in trials.variants if each.blocks), key=lambda each: each.median_ms)
    now = data_wait(trials.baseline)
    waited = "" if now is None else f"; {now:.0f} % of an update waits for data"
    headline = f"{found.no_better('the current loader')}{waited}"
    if best is not None:
        after = data_wait(best)
        waits = "" if after is None or now is None else f"; {after:.0f} % of it waits for data instead of {now:.0f} %"
        headline = f"{' '.join(best.variant.overrides)} makes an update faster: {found.outcome.ratio}{waits}"
    data = {"recommended": list(best.variant.overrides) if best else [], "is_clear": best is not None}
    table = table_of("loaders, the fastest first", _columns(trials, loaders), rows)
    return SuiteReport(headline, (table,), [*place.notes, *trials.notes], skipped | trials.skipped, data)


THREAD = "thread"
