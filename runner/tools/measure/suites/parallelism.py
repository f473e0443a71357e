"""`suite=parallelism`: compare one rank, ranks with equal shares or with shares by measured speed, and a pipeline."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from runner.base.json_converter import encode
from runner.config.configuration import compose
from runner.config.request import Request, merge_overrides
from runner.host.subprocesses import run_in_subprocess
from runner.tools.measure.compare import Comparison
from runner.tools.measure.comparison_result import ComparisonResult, RankSetup, Variant
from runner.tools.measure.fork_server import BudgetExhausted
from runner.tools.measure.measurement_context import plan_on_this_machine
from runner.tools.measure.suite import Columns, SuiteReport, SuiteRequest, format_gain, make_table, save_report


def run(suite_request: SuiteRequest) -> SuiteReport:
    """Compare forms of parallelism on CPU ranks over gloo, with the same number of threads per rank.

    Raises ConfigError for invalid numbers and fewer than two ranks, BudgetExhausted if there was no time for a block.
    """
    suite_request.refuse_positional()
    names = suite_request.parse_choices("forms", FORMS)
    ranks, updates = suite_request.parse_numbers("ranks", 2)[0], suite_request.parse_numbers("updates")[0]
    configuration = compose(suite_request.request)
    plan, inventory = run_in_subprocess(plan_on_this_machine, configuration)
    cores = inventory.cpu.logical_cores
    threads = max(1, cores // ranks)
    phase = next(planned for planned in (*plan.selected, *plan.phases) if planned.kind == "train")
    samples = phase.batch.global_batch_size
    is_auto = configuration.settings.micro_batch_size == "auto"
    variants = _make_variants(names, ranks, _pipeline_override(samples, ranks) if is_auto else ())
    limits = dataclasses.replace(suite_request.limits(), min_updates=updates)
    with Comparison(_make_request(suite_request.request, threads)) as comparison:
        result = comparison.compare(variants, limits, suite_request.log)
    if not result.baseline.blocks:
        raise BudgetExhausted
    threads_text = f"{threads} thread{'s' if threads > 1 else ''} each"
    notes = [f"CPU ranks over gloo, {threads_text}: gains on other devices depend on the links between them"]
    if ranks * threads > cores:
        notes.append(f"{ranks} ranks share {cores} core{'s' if cores > 1 else ''}: they slow each other down")
    report = _make_report(plan.choices["task"].name, result, [*notes, *result.notes])
    return save_report(suite_request, "parallelism", report, result)


def _make_request(request: Request, threads: int) -> Request:
    """Return the request without settings for parallelism and length."""
    kept = [item for item in request.overrides if not item.lstrip("+").startswith(("parallelism", "epochs="))]
    fixed = ("evaluate.every=0", "evaluate.samples=32", "log_every=10000", "device=cpu", f"backend.threads={threads}",
           f"updates={UPDATES}")  # fmt: skip
    return dataclasses.replace(request, overrides=merge_overrides(kept, fixed))


def _pipeline_override(samples: int, ranks: int) -> tuple[str, ...]:
    """Return the override for a number of micro-batches that keeps all stages of a pipeline busy."""
    num = next(num for num in range(min(samples, MICRO_BATCHES_PER_STAGE * ranks), 0, -1) if samples % num == 0)
    return (f"micro_batch_size={samples // num}",)


def _make_variants(names: Sequence[str], ranks: int, micro: tuple[str, ...]) -> list[Variant]:
    ddp, shares = ("parallelism=ddp",), ("parallelism=ddp", "parallelism.shares=speed")
    forms = {
        "single": Variant("single", ("parallelism=single",), ranks=RankSetup(1)),
        "equal": Variant("equal", ddp, ranks=RankSetup(ranks)),
        "shares": Variant("shares", shares, ranks=RankSetup(ranks, settle=SETTLE_UPDATES)),
        "pipeline": Variant("pipeline", ("parallelism=pipeline", *micro), ranks=RankSetup(ranks)),
    }
    return [forms[name] for name in FORMS if name in names]


def _make_report(task: str, result: ComparisonResult, notes: list[str]) -> SuiteReport:
    trials = [trial for trial in result.variants if trial.blocks]
    ratios = {trial.name: ratio for trial in trials[1:] if (ratio := result.ratio(trial)) is not None}
    columns: Columns = {
        "form": lambda trial: trial.name,
        "ranks": lambda trial: trial.variant.num_ranks,
        "settings": lambda trial: " ".join(trial.variant.overrides),
        "update, ms": lambda trial: trial.median_ms,
        "gain": lambda trial: format_gain(result, trial) if trial.name in ratios else "",
        "sure": lambda trial: ratios[trial.name].verdict if trial.name in ratios else "baseline",
    }
    sentences = [
        f"{name} against {result.baseline.name}: "
        + ("no clear change" if ratio.verdict == "no clear change" else str(ratio))
        for name, ratio in ratios.items()
    ]
    headline = "; ".join(sentences) or "nothing can be compared: fewer than two forms of parallelism were measured"
    data = {"ratios": {name: encode(ratio) | {"verdict": ratio.verdict} for name, ratio in ratios.items()}}
    table = make_table(f"forms of parallelism, {task}", columns, trials)
    return SuiteReport(headline, (table,), notes, result.skipped, data)


FORMS = ("single", "equal", "shares", "pipeline")
SETTLE_UPDATES = 80  # number of updates after which load balancing no longer changes the shares of the ranks
UPDATES = 10**6  # length of the run, more than any comparison needs
MICRO_BATCHES_PER_STAGE = 4  # the stages of a pipeline then idle less than 20 % of the time
