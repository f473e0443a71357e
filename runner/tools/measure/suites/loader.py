"""Which loader: workers, batches read ahead, page-locked memory and cache, and how much of an update waits for data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from runner.base.errors import ConfigError, Problem
from runner.tools.measure.comparison_result import Variant, VariantResult
from runner.tools.measure.measuring_place import MeasuringPlace
from runner.tools.measure.suite import SuiteReport, SuiteRequest, SuiteTable, Value
from runner.tools.measure.suite_common import (
    SuiteComparison,
    contest,
    kept,
    place_of,
    skipped_of,
    some_of,
    verdict_of,
    waits,
    whole_numbers,
)

# workers: worker processes, as 0,2,4, and thread for dataloader=thread (without a cache one worker); auto: by the cores
# prefetch: batches that each of them reads ahead
# pin: copy batches to page-locked memory or not; auto: both with a GPU
# cache: where every sample is kept once it is read
OPTIONS: dict[str, str] = {"workers": "auto", "prefetch": "2,4", "pin": "auto", "cache": "none,memory,device"}


class LoaderVariant(NamedTuple):
    """A loader: workers, or `thread`; batches that each reads ahead, 0 where nobody does; page-locked; cache."""

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
        """The words of the configuration that choose it."""
        rest = (f"dataloader.pin_memory={str(self.pin).lower()}", f"dataloader.cache={self.cache}")
        if self.workers == THREAD:
            return ("dataloader=thread", f"dataloader.depth={self.prefetch}", *rest)
        ahead = (f"dataloader.prefetch_factor={self.prefetch}",) if self.prefetch else ()
        return ("dataloader=default", f"dataloader.num_workers={self.workers}", *ahead, *rest)


def run(wanted: SuiteRequest) -> SuiteReport:
    """Return the loaders, the fastest first, and which one to take.

    Raises ConfigError for values that no loader has.
    """
    some_of(wanted.options, "cache", CACHES)
    whole_numbers(wanted.options, "prefetch")
    for key, reads in (("workers", _workers), ("pin", _pins)):
        if wanted.options[key] != "auto":
            reads(wanted.options)
    with place_of(wanted) as place:
        readers, skipped = _readers(wanted.options, place)
        cells = [Variant(AS_IT_IS), *(Variant(str(reader), reader.overrides) for reader in readers)]
        found = contest(place, cells, wanted)
    by_name = {str(reader): reader for reader in readers} | {AS_IT_IS: _reader_of(place)}
    return kept(wanted, "loader", _report(place, found, by_name, skipped), found.trials)


def _workers(options: Mapping[str, str]) -> tuple[int | str, ...]:
    """Return the readers of `workers=`: numbers, and `thread`. Raises ConfigError."""
    words = [word.strip() for word in options["workers"].strip("[]").split(",")]
    if not all(word == THREAD or (word.isascii() and word.isdigit()) for word in words):
        what = f"must be whole numbers from 0 on, or {THREAD}, with commas between them"
        raise ConfigError(Problem(what, f"workers={options['workers']}", f"use workers=0,2,{THREAD}"))
    return tuple(dict.fromkeys(word if word == THREAD else int(word) for word in words))


def _pins(options: Mapping[str, str]) -> tuple[bool, ...]:
    return tuple(word == "true" for word in some_of(options, "pin", ("false", "true")))


def _reader_of(place: MeasuringPlace) -> LoaderVariant:
    """Return the loader of the settings as they are."""
    options = place.plan.choices["dataloader"].options
    workers = options.get("num_workers", THREAD)
    ahead = options.get("depth", options.get("prefetch_factor", 0))
    return _effective(LoaderVariant(workers, int(ahead), options["pin_memory"] is True, options["cache"]))


def _effective(reader: LoaderVariant) -> LoaderVariant:
    """Return the equivalent loader: a thread needs a cache, and a loader without workers prefetches nothing."""
    if reader.workers == THREAD and reader.cache == "none":
        return reader._replace(workers=1)
    return reader._replace(prefetch=reader.prefetch if reader.workers else 0)


def _readers(options: Mapping[str, str], place: MeasuringPlace) -> tuple[list[LoaderVariant], dict[str, str]]:
    """Return the loaders to measure beside the one of the settings, and those that cannot be, with why."""
    has_gpu = str(place.plan.device).startswith("cuda")
    cores = place.inventory.cpu.logical_cores
    workers = _some_workers(cores) if options["workers"] == "auto" else _workers(options)
    pins = ((False, True) if has_gpu else (False,)) if options["pin"] == "auto" else _pins(options)
    caches = some_of(options, "cache", CACHES)
    readers: dict[LoaderVariant, None] = {}
    skipped: dict[str, str] = {}
    for each in product(workers, whole_numbers(options, "prefetch"), pins, caches):
        reader = _effective(LoaderVariant(*each))
        why = next(why_not(reader, has_gpu=has_gpu), "")
        if why:
            skipped[str(reader)] = why
        else:
            readers[reader] = None
    readers.pop(_reader_of(place), None)
    return list(readers), skipped


def why_not(reader: LoaderVariant, *, has_gpu: bool) -> Iterator[str]:
    """Yield why a loader cannot be, or is another one by another name."""
    if reader.pin and not has_gpu:
        yield "there is no GPU to copy to from page-locked memory"
    if reader.cache == "device" and not has_gpu:
        yield "the device is the CPU: the same as cache=memory"
    if reader.cache == "device" and reader.workers not in (0, THREAD):
        yield "worker processes cannot access a device cache"
    if reader.cache == "device" and reader.pin:
        yield "what is on the device is not copied to it"


def _some_workers(cores: int) -> tuple[int | str, ...]:
    """Return what is tried when nobody says: none, a thread, and doublings up to the cores."""
    numbers = [number for number in (1, 2, 4, 8) if number <= cores]
    return (0, THREAD, *numbers)


def _report(
    place: MeasuringPlace, found: SuiteComparison, readers: Mapping[str, LoaderVariant], skipped: dict[str, str]
) -> SuiteReport:
    trials, best = found.trials, found.best
    measured = sorted((cell for cell in trials.cells if cell.blocks_ms), key=lambda cell: cell.median_ms)
    columns = (
        "loader", "workers", "prefetch, batches", "pinned", "cache", "update, ms", "waits for data, %", "copies, %",
        "begins later, s", "gain", "sure",
    )  # fmt: skip
    rows = [_row(found, cell, readers[cell.cell.name]) for cell in measured]
    now = waits(trials.baseline)
    waited = "" if now is None else f"; {100 * now:.0f} % of an update waits for data"
    if best is None:
        headline = f"{found.as_good_as_any('the loader as it is')}{waited}"
    else:
        left = waits(best)
        after = (
            ""
            if left is None or now is None
            else f"; data is waited for {100 * left:.0f} % instead of {100 * now:.0f} %"
        )
        headline = f"{' '.join(best.cell.overrides)} makes updates faster: {found.gain}{after}"
    return SuiteReport(
        headline,
        (SuiteTable("loaders, the fastest first", columns, rows),),
        [*place.notes, *trials.notes],
        skipped | skipped_of(trials),
        {"recommended": list(best.cell.overrides) if best else [], "is_clear": best is not None},
    )


def _row(found: SuiteComparison, cell: VariantResult, reader: LoaderVariant) -> Sequence[Value]:
    ratio = None if cell is found.trials.baseline else found.trials.ratio(cell)
    share, seconds = waits(cell), sum(cell.parts_s.values())
    return (
        cell.cell.name, str(reader.workers), reader.prefetch or None, "yes" if reader.pin else "no", reader.cache,
        cell.median_ms, None if share is None else 100 * share,
        100 * cell.parts_s["transfer"] / seconds if cell.parts_s.get("transfer") else None,
        found.trials.more_to_open_s(cell), "" if ratio is None else str(ratio),
        verdict_of(found.trials, cell, ratio),
    )  # fmt: skip


AS_IT_IS = "as it is"
THREAD = "thread"
CACHES = ("none", "memory", "device")
