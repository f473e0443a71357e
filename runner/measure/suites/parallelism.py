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

from torch import Tensor

from runner.base.batch import map_tensors
from runner.base.configuration import Request, compose, merge_overrides
from runner.base.errors import AccelRunError, ConfigError, Problem
from runner.base.scratch import private_folder
from runner.launch.apart import apart
from runner.measure.advise import planned
from runner.measure.contest import ROUNDS, kept, refuse_words, some_of, whole_numbers
from runner.measure.ranks import ms_per_update, on_ranks, opened
from runner.measure.results import Results
from runner.measure.statistics import Ratio, paired
from runner.measure.suite import Report, Table, Value, Wanted
from runner.measure.trial import QUIET

# forms: which are measured
# ranks: how many there are
# slow: how many times as long the last rank takes for a sample, for the forms with shares; 1: none is slower
# updates: of a block
OPTIONS: dict[str, str] = {"forms": "single,equal,shares,pipeline", "ranks": "2", "slow": "2", "updates": "20"}


def run(wanted: Wanted) -> Report:
    """Return what an update takes in each form, on ranks of the CPU over gloo.

    Each form is started anew for each of its blocks, in an order that is drawn; every rank has as many threads as the
    single one, as devices would. Raises ConfigError for numbers that are none and fewer than two ranks.
    """
    refuse_words(wanted, OPTIONS)
    names = some_of(wanted.options, "forms", FORMS)
    ranks, updates = (whole_numbers(wanted.options, key, least)[0] for key, least in (("ranks", 2), ("updates", 1)))
    slow = _factor(wanted.options["slow"])
    Results(wanted.folder, wanted.prefix)  # a prefix that cannot be is said before anything is measured
    plan, inventory = apart(planned, compose(wanted.request))
    threads = max(1, inventory.cpu.logical_cores // ranks)
    forms = _forms(names, ranks, slow)
    samples = plan.batch.global_batch_size
    found, skipped = _measured(wanted, forms, samples, updates, threads)
    if slow > 1 and "pipeline" in names:
        skipped["pipeline, one slow"] = "a slow rank is simulated by its samples, and a stage has all of them"
    each = f"{threads} thread{'s' if threads > 1 else ''} each"
    notes = [f"ranks of the CPU over gloo, {each}: what devices gain among each other depends on their links"]
    if ranks * threads > inventory.cpu.logical_cores:
        notes.append(f"{ranks} ranks share {inventory.cpu.logical_cores} cores: they slow each other down")
    return kept(wanted, "parallelism", _report(plan.choices["task"].name, forms, found, skipped, notes))


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
        raise ConfigError(Problem(what, f"slow={text}", "say slow=2"))
    return factor


def _forms(names: Sequence[str], ranks: int, slow: float) -> list[Form]:
    """Return the forms, each after the one that it is compared with."""
    ddp, shares = ("parallelism=ddp",), ("parallelism=ddp", "parallelism.shares=speed")
    forms = [
        Form("single", 1, ("parallelism=single",), ""),
        Form("equal", ranks, ddp, "single"),
        Form("shares", ranks, shares, "single", settles=SETTLES),
        Form("pipeline", ranks, ("parallelism=pipeline",), "single"),
    ]
    forms = [form for form in forms if form.name in names]
    if slow > 1:
        both = [
            Form("equal, one slow", ranks, ddp, "", slow),
            Form("shares, one slow", ranks, shares, "equal, one slow", slow, SETTLES),
        ]
        forms += [form for form in both if form.name.partition(",")[0] in names]
    return forms


def _measured(
    wanted: Wanted, forms: Sequence[Form], samples: int, updates: int, threads: int
) -> tuple[dict[str, dict[int, float]], dict[str, str]]:
    """Return form -> round -> milliseconds of an update, and the forms that cannot be, with why."""
    until, least, order = time.monotonic() + wanted.budget_s, min(ROUNDS[0], LEAST_ROUNDS), random.Random(0)
    blocks: dict[str, dict[int, float]] = {form.name: {} for form in forms}
    skipped: dict[str, str] = {}
    each_s = 0.0  # that a sample takes where no rank is slower
    slow = next((form for form in forms if form.slow > 1), None)
    if slow is not None:
        wanted.say("measures what a sample takes")
        ms = _timed(wanted, dataclasses.replace(slow, slow=1.0, settles=0), updates, threads, 0.0)
        each_s = ms / 1e3 / (samples / slow.ranks)
    for number in range(MOST_ROUNDS):
        playing = [form for form in forms if form.name not in skipped]
        order.shuffle(playing)
        wanted.say(f"round {number + 1}: {', '.join(form.name for form in playing)}")
        for form in playing:
            try:
                blocks[form.name][number] = _timed(wanted, form, updates, threads, each_s * (form.slow - 1))
            except AccelRunError as error:
                skipped[form.name] = error.problems[0].what
        if time.monotonic() > until and number + 1 >= least:
            break
    return blocks, skipped


def _timed(wanted: Wanted, form: Form, updates: int, threads: int, more_s: float) -> float:
    """Return the milliseconds of an update of a form that is started for it; the last rank takes more per sample."""
    with private_folder() as folder:
        block = _block(wanted.request, form, updates, threads, folder, more_s)
        return float(on_ranks(block, form.ranks, threads))


def _block(
    request: Request, form: Form, updates: int, threads: int, folder: Path, more_s: float
) -> Callable[[Any], float]:
    """Return what a rank does: open the form, warm up, settle, and time a block."""
    own = (*QUIET, f"output_root={folder}", "evaluate.every=0", "evaluate.samples=32", "log_every=10000",
           "device=cpu", f"backend.threads={threads}", f"updates={UPDATES}", *form.words)  # fmt: skip
    given = dataclasses.replace(request, overrides=merge_overrides(_without_ranks(request.overrides), own))

    def measure(world: Any) -> float:
        with ExitStack() as stack:
            phase = opened(world, stack, given)
            if more_s and world.rank == world.world_size - 1:
                _slow_down(phase, more_s)
            made = phase.updates()
            ms_per_update(made, WARM + form.settles)
            return ms_per_update(made, updates)

    return measure


def _without_ranks(overrides: Sequence[str]) -> tuple[str, ...]:
    """Return the words without those that say how many ranks there are, and how long it is trained."""
    return tuple(word for word in overrides if not word.lstrip("+").startswith(("parallelism", "epochs=")))


def _slow_down(phase: Any, each_s: float) -> None:
    """Let this rank take so much longer for each sample, as a slower device would."""
    training = phase.work.training

    def loss(model: Any, batch: Any) -> Any:
        sizes: list[int] = []

        def size(tensor: Tensor) -> Tensor:
            sizes.append(len(tensor))
            return tensor

        map_tensors(size, batch)
        time.sleep(each_s * max(sizes, default=0))
        return training.loss(model, batch)

    phase.work.training = dataclasses.replace(training, loss=loss)


# ---------------------------------------------------------------- what is said


def _report(
    task: str,
    forms: Sequence[Form],
    found: Mapping[str, Mapping[int, float]],
    skipped: dict[str, str],
    notes: list[str],
) -> Report:
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
    return Report(headline, (Table(f"forms of parallelism, {task}", columns, rows),), notes, skipped, data)


def _ratio(before: Mapping[int, float], after: Mapping[int, float]) -> Ratio | None:
    rounds = sorted(before.keys() & after.keys())
    return paired([before[each] for each in rounds], [after[each] for each in rounds]) if rounds else None


def _in_words(ratio: Ratio) -> str:
    return "no clear change" if ratio.verdict == "no clear change" else str(ratio)


FORMS = ("single", "equal", "shares", "pipeline")
WARM = 10  # updates
SETTLES = 80  # updates in which measured shares come to rest
UPDATES = 10**6  # of the training: more than are made
LEAST_ROUNDS, MOST_ROUNDS = 4, 10
MOST_SLOW = 100
