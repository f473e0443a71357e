"""How to use ranks: one, equal shares, measured shares or a pipeline; and what shares bring beside a slow rank."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import psutil  # type: ignore[import-untyped]

from runner.base.errors import AccelRunError, ConfigError, Problem
from runner.config.configuration import compose
from runner.config.request import Request, merge_overrides
from runner.host.scratch import private_folder
from runner.host.subprocesses import in_subprocess
from runner.profiling.peak_memory import host_peak_gib
from runner.tools.measure.compare import LEAST_ROUNDS, QUIET, ROOM
from runner.tools.measure.comparison_result import UNTRIED
from runner.tools.measure.forked_ranks import StandingRanks, ms_per_update, opened
from runner.tools.measure.measuring_place import planned
from runner.tools.measure.statistics import ONE_EACH, Ratio, paired
from runner.tools.measure.suite import ROUNDS, SuiteReport, SuiteRequest, SuiteTable, Value, saved


def run(wanted: SuiteRequest) -> SuiteReport:
    """Return what an update takes in each form, on ranks of the CPU over gloo.

    All forms are there at once and take turns in an order that is drawn; every rank has as many threads as the single
    one, as devices would. Raises ConfigError for numbers that are none and fewer than two ranks.
    """
    wanted.refuse_words()
    names = wanted.some_of("forms", FORMS)
    ranks, updates = (wanted.numbers(key, least)[0] for key, least in (("ranks", 2), ("updates", 1)))
    slow = _factor(wanted.options["slow"])
    configuration = compose(wanted.request)
    plan, inventory = in_subprocess(planned, configuration)
    cores = inventory.cpu.logical_cores
    threads = max(1, cores // ranks)
    samples = next(each for each in (*plan.selected, *plan.phases) if each.kind == "train").batch.global_batch_size
    asked_micro = configuration.settings.micro_batch_size
    forms = _forms(names, ranks, slow, _passes(samples, ranks) if asked_micro == "auto" else ())
    played = _Played(wanted, updates, threads, samples)
    played.play(forms)
    if slow > 1 and "pipeline" in names:
        played.skipped["pipeline, one slow"] = "a slow rank is simulated by its samples, and a stage has all of them"
    each = f"{threads} thread{'s' if threads > 1 else ''} each"
    notes = [f"ranks of the CPU over gloo, {each}: what devices gain among each other depends on their links"]
    if ranks * threads > cores:
        notes.append(f"{ranks} ranks share {cores} core{'s' if cores > 1 else ''}: they slow each other down")
    notes += played.notes
    task = plan.choices["task"].name
    return saved(wanted, "parallelism", _report(task, forms, played.blocks, played.skipped, notes))


# ---------------------------------------------------------------- what is measured


@dataclasses.dataclass(frozen=True)
class Form:
    """A way to use ranks: how many, its words, what it is compared with, and how slow the last one is."""

    name: str
    ranks: int
    words: tuple[str, ...]
    against: str
    slow: float = 1.0
    settles: int = 0


def _factor(text: str) -> float:
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not 1 <= factor <= MOST_SLOW:
        what = f"must be a number from 1 to {MOST_SLOW}: how many times as long a sample takes on the slow rank"
        raise ConfigError(Problem(what, f"slow={text}", "use slow=2"))
    return factor


def _passes(samples: int, ranks: int) -> tuple[str, ...]:
    """Return the words of an update in enough passes for all stages of a pipeline to have something to do."""
    for passes in range(min(samples, PASSES * ranks), 0, -1):
        if samples % passes == 0:
            return (f"micro_batch_size={samples // passes}",)
    raise AssertionError("one pass is always possible")


def _forms(names: Sequence[str], ranks: int, slow: float, passes: tuple[str, ...]) -> list[Form]:
    """Return the forms, each after the one that it is compared with: the single rank, or what there is in its place."""
    ddp, shares = ("parallelism=ddp",), ("parallelism=ddp", "parallelism.shares=speed")
    forms = [
        Form("single", 1, ("parallelism=single",), ""),
        Form("equal", ranks, ddp, ""),
        Form("shares", ranks, shares, "", settles=SETTLES),
        Form("pipeline", ranks, ("parallelism=pipeline", *passes), ""),
    ]
    forms = [form for form in forms if form.name in names]
    forms = [dataclasses.replace(form, against=forms[0].name if number else "") for number, form in enumerate(forms)]
    if slow > 1:
        both = [
            Form("equal, one slow", ranks, ddp, "", slow),
            Form("shares, one slow", ranks, shares, "equal, one slow", slow, SETTLES),
        ]
        forms += [form for form in both if form.name.partition(",")[0] in names]
    return forms


class _Played:
    """Forms that take turns in blocks of updates, all there at once and stopped meanwhile.

    blocks   form -> round -> milliseconds of an update
    skipped  forms that cannot be -> why
    """

    def __init__(self, wanted: SuiteRequest, updates: int, threads: int, samples: int) -> None:
        self.wanted, self.updates, self.threads, self.samples = wanted, updates, threads, samples
        self.blocks: dict[str, dict[int, float]] = {}
        self.skipped: dict[str, str] = {}
        self.notes: list[str] = []
        self.sample_s = 0.0  # that a sample takes where no rank is slower

    def play(self, forms: Sequence[Form]) -> None:
        """Make rounds until all gains are known well enough, or the time is over."""
        began = time.monotonic()
        until = began + self.wanted.budget_s
        self.blocks = {form.name: {} for form in forms}
        with ExitStack() as stack:
            standing = dict[str, StandingRanks]()
            together = True
            for number, form in enumerate(forms):
                if number > 1 and time.monotonic() - began > self.wanted.budget_s / 2:
                    self.skipped[form.name] = UNTRIED
                    continue
                if not together:
                    continue
                self.wanted.say(f"starts {form.name}")
                try:
                    standing[form.name] = self._started(stack, form)
                    if number == 0:
                        together = self._fit_together(standing[form.name], forms)
                except AccelRunError as error:
                    self.skipped[form.name] = error.problems[0].what
            if not together:
                self.notes.append("the memory does not hold all forms at once: each is started again for each block")
                stack.close()
                standing.clear()
            order = random.Random(0)
            for number in range(ROUNDS[1]):
                since = time.monotonic()
                playing = [form for form in forms if form.name not in self.skipped]
                order.shuffle(playing)
                for form in playing:
                    try:
                        self._turn(form, standing.get(form.name), number)
                    except AccelRunError as error:
                        self.skipped[form.name] = error.problems[0].what
                now = time.monotonic()
                if number + 1 >= LEAST_ROUNDS and now + (now - since) > until:
                    return
                if number + 1 >= ROUNDS[0] and self._are_narrow(forms):
                    return

    def _started(self, stack: ExitStack, form: Form) -> StandingRanks:
        """Return a form that has warmed up, with its slow rank and its shares at rest, and is stopped."""
        folder = stack.enter_context(private_folder())
        begin = _begin(self.wanted.request, form, self.threads, folder)
        ranks = stack.enter_context(StandingRanks(begin, form.ranks, self.threads, PATIENCE_S))
        if form.slow > 1:
            if not self.sample_s:
                self.sample_s = ranks.ask(PATIENCE_S, updates=self.updates) / 1e3 / (self.samples / form.ranks)
            ranks.ask(PATIENCE_S, updates=1, more_s=self.sample_s * (form.slow - 1))
        if form.settles:
            ranks.ask(PATIENCE_S, updates=form.settles)
        ranks.pause()
        return ranks

    def _turn(self, form: Form, ranks: StandingRanks | None, number: int) -> None:
        with ExitStack() as stack:
            ranks = ranks or self._started(stack, form)
            self.blocks[form.name][number] = ranks.ask(PATIENCE_S, updates=self.updates)
            ranks.pause()

    def _fit_together(self, first: StandingRanks, forms: Sequence[Form]) -> bool:
        """Tell whether the memory holds the ranks of all forms, if each takes what the first one takes."""
        needed = ROOM * first.ask(PATIENCE_S, updates=0) * 2**30 * sum(form.ranks for form in forms[1:])
        first.pause()
        return bool(needed <= psutil.virtual_memory().available)

    def _are_narrow(self, forms: Sequence[Form]) -> bool:
        ratios = [_ratio(self.blocks.get(form.against, {}), self.blocks[form.name]) for form in forms]
        return all(ratio is None or ratio.is_narrow for ratio in ratios)


def _begin(
    request: Request, form: Form, threads: int, folder: Path
) -> Callable[[Any, ExitStack], Callable[[Mapping[str, Any]], float]]:
    """Return what a rank does: open the form, warm up, and answer with the milliseconds of an update of each block.

    An order for no updates is answered with the GiB that a rank takes; `more_s` is what a sample takes longer from then
    on, on the last rank.
    """
    own = (*QUIET, f"output_root={folder}", "evaluate.every=0", "evaluate.samples=32", "log_every=10000",
           "device=cpu", f"backend.threads={threads}", f"updates={UPDATES}", *form.words)  # fmt: skip
    given = dataclasses.replace(request, overrides=merge_overrides(_without_ranks(request.overrides), own))

    def begin(world: Any, stack: ExitStack) -> Callable[[Mapping[str, Any]], float]:
        phase = opened(world, stack, given)
        more = _slowed(phase) if form.slow > 1 and world.rank == world.world_size - 1 else {}
        made = phase.updates()
        ms_per_update(made, WARM)
        ahead = -(-(phase.loader.ahead + 1) // phase.planned.batch.accumulation_steps) if phase.loader.ahead else 0

        def answer(order: Mapping[str, Any]) -> float:
            if not order["updates"]:
                return float(max(world.gather(host_peak_gib())))
            more["s"] = order.get("more_s", more.get("s", 0.0))
            for _ in range(ahead):  # their batches may have become ready while the ranks were stopped
                next(made)
            return ms_per_update(made, int(order["updates"]))

        return answer

    return begin


def _without_ranks(overrides: Sequence[str]) -> tuple[str, ...]:
    """Return the words without those that say how many ranks there are, and how long it is trained."""
    return tuple(word for word in overrides if not word.lstrip("+").startswith(("parallelism", "epochs=")))


def _slowed(phase: Any) -> dict[str, float]:
    """Let this rank take longer for each sample, as a slower device would: `s` seconds of what is returned."""
    from runner.base.batch import map_tensors

    training, more = phase.work.training, {"s": 0.0}

    def loss(model: Any, batch: Any) -> Any:
        sizes: list[int] = []

        def size(tensor: Any) -> Any:
            sizes.append(len(tensor))
            return tensor

        map_tensors(size, batch)
        time.sleep(more["s"] * max(sizes, default=0))
        return training.loss(model, batch)

    phase.work.training = dataclasses.replace(training, loss=loss)
    return more


# ---------------------------------------------------------------- what is said


def _report(
    task: str,
    forms: Sequence[Form],
    found: Mapping[str, Mapping[int, float]],
    skipped: dict[str, str],
    notes: list[str],
) -> SuiteReport:
    rows: list[tuple[Value, ...]] = []
    said: list[str] = []
    ratios: dict[str, Ratio] = {}
    for form in forms:
        blocks = found[form.name]
        if not blocks:
            continue
        ratio = _ratio(found.get(form.against, {}), blocks)
        if ratio is not None:
            ratios[form.name] = ratio
            said.append(f"{form.name} against {form.against}: {_in_words(ratio)}")
        words = " ".join(form.words)
        rows.append(
            (form.name, form.ranks, words, median(blocks.values()), form.against or None,
             "" if ratio is None else str(ratio), "baseline" if ratio is None else ratio.verdict)
        )  # fmt: skip
    columns = ("form", "ranks", "settings", "update, ms", "against", "gain", "sure")
    headline = "; ".join(said) or "nothing can be compared: fewer than two forms were measured"
    data = {
        "blocks_ms": {name: dict(blocks) for name, blocks in found.items()},
        "ratios": {name: dataclasses.asdict(ratio) | {"verdict": ratio.verdict} for name, ratio in ratios.items()},
    }
    return SuiteReport(headline, (SuiteTable(f"forms of parallelism, {task}", columns, rows),), notes, skipped, data)


def _ratio(before: Mapping[int, float], after: Mapping[int, float]) -> Ratio | None:
    rounds = sorted(before.keys() & after.keys())
    if not rounds:
        return None
    return paired([before[each] for each in rounds], [after[each] for each in rounds], half=ONE_EACH)


def _in_words(ratio: Ratio) -> str:
    return "no clear change" if ratio.verdict == "no clear change" else str(ratio)


FORMS = ("single", "equal", "shares", "pipeline")
WARM = 10  # updates
SETTLES = 80  # updates in which measured shares come to rest
UPDATES = 10**6  # of the training: more than are made
PASSES = 4  # for each stage of a pipeline: with fewer it stands idle most of the time
PATIENCE_S = 600.0  # for a form to begin, or to make a block
MOST_SLOW = 100
