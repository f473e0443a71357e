"""`suite=parallelism`: one rank, equal shares, measured shares, a pipeline; also with a slow rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from runner.base.errors import ConfigError, Problem
from runner.base.json_converter import encode
from runner.config.configuration import compose
from runner.config.request import Request, merge_overrides
from runner.host.subprocesses import run_in_subprocess
from runner.tools.measure.compare import Comparison, format_budget_hint
from runner.tools.measure.comparison_result import ComparisonResult, RankSetup, Variant, VariantResult
from runner.tools.measure.fork_server import budget_exhausted
from runner.tools.measure.measurement_context import plan_on_this_machine
from runner.tools.measure.suite import SuiteReport, SuiteRequest, format_gain, make_table, save_report


def run(suite_request: SuiteRequest) -> SuiteReport:
    """Compare forms of parallelism on CPU ranks over gloo, with the same number of threads per rank.

    Raises ConfigError for invalid numbers and fewer than two ranks, OutOfTime if there was no time for a block.
    """
    suite_request.refuse_positional()
    names = suite_request.parse_choices("forms", FORMS)
    ranks, updates = suite_request.parse_numbers("ranks", 2)[0], suite_request.parse_numbers("updates")[0]
    slow = _parse_factor(suite_request.options["slow"])
    configuration = compose(suite_request.request)
    plan, inventory = run_in_subprocess(plan_on_this_machine, configuration)
    cores = inventory.cpu.logical_cores
    threads = max(1, cores // ranks)
    phase = next(planned for planned in (*plan.selected, *plan.phases) if planned.kind == "train")
    samples = phase.batch.global_batch_size
    is_auto = configuration.settings.micro_batch_size == "auto"
    variants = _make_variants(names, ranks, slow, _pipeline_override(samples, ranks) if is_auto else ())
    limits = dataclasses.replace(suite_request.limits(), min_updates=updates)
    with Comparison(_make_request(suite_request.request, threads)) as comparison:
        result = comparison.compare(variants, limits, suite_request.log)
    if not result.baseline.blocks:
        raise budget_exhausted()
    threads_text = f"{threads} thread{'s' if threads > 1 else ''} each"
    notes = [f"CPU ranks over gloo, {threads_text}: gains on other devices depend on the links between them"]
    if ranks * threads > cores:
        notes.append(f"{ranks} ranks share {cores} core{'s' if cores > 1 else ''}: they slow each other down")
    if result.needs_s:
        notes.append(f"there was no time to try every form; {format_budget_hint(result.needs_s, result)}")
    skipped = result.skipped
    if slow > 1 and "pipeline" in names:
        skipped["pipeline, one slow"] = "a slow rank is simulated by sleeping for each of its samples, not for a stage"
    report = _make_report(plan.choices["task"].name, result, [*notes, *result.notes], skipped)
    return save_report(suite_request, "parallelism", report, result)


def _make_request(request: Request, threads: int) -> Request:
    """Return the request without settings for parallelism and length."""
    kept = [item for item in request.overrides if not item.lstrip("+").startswith(("parallelism", "epochs="))]
    fixed = ("evaluate.every=0", "evaluate.samples=32", "log_every=10000", "device=cpu", f"backend.threads={threads}",
           f"updates={UPDATES}")  # fmt: skip
    return dataclasses.replace(request, overrides=merge_overrides(kept, fixed))


def _parse_factor(text: str) -> float:
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not 1 <= factor <= MAX_SLOWDOWN:
        what = f"must be a number from 1 to {MAX_SLOWDOWN}, the slowdown factor of the last rank"
        raise ConfigError(Problem(what, f"slow={text}", "use slow=2"))
    return factor


def _pipeline_override(samples: int, ranks: int) -> tuple[str, ...]:
    """Return the override for a number of micro-batches that keeps all stages of a pipeline busy."""
    num = next(num for num in range(min(samples, MICRO_BATCHES_PER_STAGE * ranks), 0, -1) if samples % num == 0)
    return (f"micro_batch_size={samples // num}",)


def _make_variants(names: Sequence[str], ranks: int, slow: float, micro: tuple[str, ...]) -> list[Variant]:
    """Return the requested forms, and the forms with shares again with a slow rank."""
    ddp, shares = ("parallelism=ddp",), ("parallelism=ddp", "parallelism.shares=speed")
    forms = {
        "single": Variant("single", ("parallelism=single",), ranks=RankSetup(1)),
        "equal": Variant("equal", ddp, ranks=RankSetup(ranks)),
        "shares": Variant("shares", shares, ranks=RankSetup(ranks, settle=SETTLE_UPDATES)),
        "pipeline": Variant("pipeline", ("parallelism=pipeline", *micro), ranks=RankSetup(ranks)),
    }
    variants = [forms[name] for name in FORMS if name in names]
    for name in ("equal", "shares") if slow > 1 else ():
        if name in names:
            against = SLOW_EQUAL if name == "shares" and "equal" in names else ""
            setup = RankSetup(ranks, slow, SETTLE_UPDATES if name == "shares" else 0)
            variants.append(Variant(f"{name}, one slow", forms[name].overrides, against=against, ranks=setup))
    return variants


def _make_report(task: str, result: ComparisonResult, notes: list[str], skipped: dict[str, str]) -> SuiteReport:
    trials = [trial for trial in result.variants if trial.blocks]
    # A form with a slow rank is only compared with another form with a slow rank.
    compared = [trial for trial in trials if trial.variant.against or not _is_slow(trial)]
    ratios = {trial.name: ratio for trial in compared[1:] if (ratio := result.ratio(trial)) is not None}

    def against(trial: VariantResult) -> str | None:
        return result.against(trial).name if trial.name in ratios else None

    columns = {
        "form": lambda trial: trial.name,
        "ranks": lambda trial: trial.variant.num_ranks,
        "settings": lambda trial: " ".join(trial.variant.overrides),
        "update, ms": lambda trial: trial.median_ms,
        "against": against,
        "gain": lambda trial: format_gain(result, trial) if trial.name in ratios else "",
        "sure": lambda trial: ratios[trial.name].verdict if trial.name in ratios else "baseline",
    }
    sentences = [
        f"{trial.name} against {against(trial)}: "
        + ("no clear change" if ratios[trial.name].verdict == "no clear change" else str(ratios[trial.name]))
        for trial in compared
        if trial.name in ratios
    ]
    headline = "; ".join(sentences) or "nothing can be compared: fewer than two forms were measured"
    data = {"ratios": {name: encode(ratio) | {"verdict": ratio.verdict} for name, ratio in ratios.items()}}
    table = make_table(f"forms of parallelism, {task}", columns, trials)
    return SuiteReport(headline, (table,), notes, skipped, data)


def _is_slow(trial: VariantResult) -> bool:
    return trial.variant.ranks is not None and trial.variant.ranks.slow > 1


FORMS = ("single", "equal", "shares", "pipeline")
SLOW_EQUAL = "equal, one slow"
SETTLE_UPDATES = 80  # until shares by measured speed have settled
UPDATES = 10**6  # length of the training, more than any comparison runs
MICRO_BATCHES_PER_STAGE = 4  # with fewer, the stages of a pipeline idle most of the time
MAX_SLOWDOWN = 100
