"""`suite=parallelism`: one rank, equal shares, measured shares, a pipeline; and shares beside a slow rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from runner.base.errors import ConfigError, Problem
from runner.base.json_converter import encode
from runner.config.configuration import compose
from runner.config.request import Request, merge_overrides
from runner.host.subprocesses import run_in_subprocess
from runner.tools.measure.compare import Comparison, enough
from runner.tools.measure.comparison_result import ComparisonResult, RankSetup, Variant, VariantResult
from runner.tools.measure.fork_server import out_of_time
from runner.tools.measure.measuring_place import planned
from runner.tools.measure.suite import SuiteReport, SuiteRequest, gain_of, saved, table_of


def run(wanted: SuiteRequest) -> SuiteReport:
    """Compare forms of parallelism on CPU ranks over gloo; every rank has as many threads as the single one.

    Raises ConfigError for invalid numbers and fewer than two ranks, OutOfTime if there was no time for a block.
    """
    wanted.refuse_words()
    names = wanted.some_of("forms", FORMS)
    ranks, updates = wanted.numbers("ranks", 2)[0], wanted.numbers("updates")[0]
    slow = _factor(wanted.options["slow"])
    configuration = compose(wanted.request)
    plan, inventory = run_in_subprocess(planned, configuration)
    cores = inventory.cpu.logical_cores
    threads = max(1, cores // ranks)
    samples = next(each for each in (*plan.selected, *plan.phases) if each.kind == "train").batch.global_batch_size
    is_auto = configuration.settings.micro_batch_size == "auto"
    variants = _variants(names, ranks, slow, _micro_batches(samples, ranks) if is_auto else ())
    limits = dataclasses.replace(wanted.limits(), min_updates=updates)
    with Comparison(_request(wanted.request, threads)) as comparison:
        trials = comparison.compare(variants, limits, wanted.say)
    if not trials.baseline.blocks:
        raise out_of_time()
    each = f"{threads} thread{'s' if threads > 1 else ''} each"
    notes = [f"CPU ranks over gloo, {each}: gains on other devices depend on the links between them"]
    if ranks * threads > cores:
        notes.append(f"{ranks} ranks share {cores} core{'s' if cores > 1 else ''}: they slow each other down")
    if trials.needs_s:
        notes.append(f"there was no time to try every form; {enough(trials.needs_s, trials)}")
    skipped = trials.skipped
    if slow > 1 and "pipeline" in names:
        skipped["pipeline, one slow"] = "a slow rank is simulated by its samples, and a stage has all of them"
    report = _report(plan.choices["task"].name, trials, [*notes, *trials.notes], skipped)
    return saved(wanted, "parallelism", report, trials)


def _request(request: Request, threads: int) -> Request:
    """Return the request without its own ranks and length."""
    kept = [word for word in request.overrides if not word.lstrip("+").startswith(("parallelism", "epochs="))]
    own = ("evaluate.every=0", "evaluate.samples=32", "log_every=10000", "device=cpu", f"backend.threads={threads}",
           f"updates={UPDATES}")  # fmt: skip
    return dataclasses.replace(request, overrides=merge_overrides(kept, own))


def _factor(text: str) -> float:
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not 1 <= factor <= MOST_SLOW:
        what = f"must be a number from 1 to {MOST_SLOW}: how many times as long a sample takes on the slow rank"
        raise ConfigError(Problem(what, f"slow={text}", "use slow=2"))
    return factor


def _micro_batches(samples: int, ranks: int) -> tuple[str, ...]:
    """Return the override for enough micro-batches to keep all stages of a pipeline busy."""
    num = next(num for num in range(min(samples, PER_STAGE * ranks), 0, -1) if samples % num == 0)
    return (f"micro_batch_size={samples // num}",)


def _variants(names: Sequence[str], ranks: int, slow: float, micro: tuple[str, ...]) -> list[Variant]:
    """Return the forms, compared with the first of them, and those with shares again beside a slow rank."""
    ddp, shares = ("parallelism=ddp",), ("parallelism=ddp", "parallelism.shares=speed")
    forms = {
        "single": Variant("single", ("parallelism=single",), ranks=RankSetup(1)),
        "equal": Variant("equal", ddp, ranks=RankSetup(ranks)),
        "shares": Variant("shares", shares, ranks=RankSetup(ranks, settle=SETTLE)),
        "pipeline": Variant("pipeline", ("parallelism=pipeline", *micro), ranks=RankSetup(ranks)),
    }
    variants = [forms[name] for name in FORMS if name in names]
    for name in ("equal", "shares") if slow > 1 else ():
        if name in names:
            against = SLOW_EQUAL if name == "shares" and "equal" in names else ""
            setup = RankSetup(ranks, slow, SETTLE if name == "shares" else 0)
            variants.append(Variant(f"{name}, one slow", forms[name].overrides, against=against, ranks=setup))
    return variants


def _report(task: str, trials: ComparisonResult, notes: list[str], skipped: dict[str, str]) -> SuiteReport:
    measured = [each for each in trials.variants if each.blocks]
    # Forms with a slow rank are compared only with each other.
    compared = [each for each in measured if each.variant.against or not _is_slow(each)]
    ratios = {each.name: ratio for each in compared[1:] if (ratio := trials.ratio(each)) is not None}

    def against(each: VariantResult) -> str | None:
        return trials.against(each).name if each.name in ratios else None

    columns = {
        "form": lambda each: each.name,
        "ranks": lambda each: each.variant.num_ranks,
        "settings": lambda each: " ".join(each.variant.overrides),
        "update, ms": lambda each: each.median_ms,
        "against": against,
        "gain": lambda each: gain_of(trials, each) if each.name in ratios else "",
        "sure": lambda each: ratios[each.name].verdict if each.name in ratios else "baseline",
    }
    sentences = [
        f"{each.name} against {against(each)}: "
        + ("no clear change" if ratios[each.name].verdict == "no clear change" else str(ratios[each.name]))
        for each in compared
        if each.name in ratios
    ]
    headline = "; ".join(sentences) or "nothing can be compared: fewer than two forms were measured"
    data = {"ratios": {name: encode(ratio) | {"verdict": ratio.verdict} for name, ratio in ratios.items()}}
    table = table_of(f"forms of parallelism, {task}", columns, measured)
    return SuiteReport(headline, (table,), notes, skipped, data)


def _is_slow(each: VariantResult) -> bool:
    return each.variant.ranks is not None and each.variant.ranks.slow > 1


FORMS = ("single", "equal", "shares", "pipeline")
SLOW_EQUAL = "equal, one slow"
SETTLE = 80  # updates until measured shares have settled
UPDATES = 10**6  # of the training: more than run
PER_STAGE = 4  # micro-batches: with fewer, stages of a pipeline idle most of the time
MOST_SLOW = 100
