"""Compared variants are interleaved, report their actual settings, and fail independently."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import psutil
import pytest
import torch

from runner.base.errors import AccelRunError
from runner.config.request import Request
from runner.distributed.layer_placement import device_bytes
from runner.host import resources as host
from runner.host import stacks
from runner.tools.measure import compare
from runner.tools.measure.compare import (
    MIN_ROUNDS,
    SHORT_BUDGET,
    CompareLimits,
    Comparison,
    choose_block_updates,
    leave_out,
)
from runner.tools.measure.comparison_result import (
    NO_TIME_LEFT,
    START_TIMED_OUT,
    Block,
    ComparisonResult,
    Variant,
    VariantResult,
    as_json,
    describe_disturbances,
)
from runner.tools.measure.fork_server import ReplyTimeout, VariantProcess
from runner.tools.measure.statistics import PRIOR_SPREAD
from runner.tools.measure.variant_process import MAX_TIMED_UPDATES
from tests.tools.measure.shared_virtual_time import SharedVirtualTime
from tests.tools.measure.suites.asked import blocks
from tests.waiting import wait_until

TASK = Path(__file__).parent / "task_to_measure.py"
LIMITS = CompareLimits(budget_s=60, rounds=(3, 4), block_s=0.05)
SETTINGS = ("updates=100", "global_batch_size=16", "device=cpu", "backend.threads=1")


@pytest.fixture(scope="module")
def comparison() -> Iterator[Comparison]:
    with Comparison(Request(SETTINGS, TASK)) as made:
        yield made


@pytest.fixture(scope="module")
def trials(comparison: Comparison) -> ComparisonResult:
    variants = [
        Variant("as it is"),
        Variant("quick", ("task.sleep_ms=0",)),
        Variant("wrong", ("task.scale=3.0",)),
        Variant("unknown", ("nonsense=1",)),
        Variant("dies", ("task.dies_at=4",)),
        Variant("raises", ("task.raises_at=4",)),
    ]
    return comparison.compare(variants, LIMITS, lambda _: None)


def test_a_faster_technique_is_found(trials: ComparisonResult) -> None:
    ratio = trials.ratio(trials.of("quick"))

    assert ratio is not None
    assert ratio.verdict == "better"
    assert ratio.low > 1.1, "each update sleeps for 4 ms, and computes for less"


def test_running_variants_run_in_every_round(trials: ComparisonResult) -> None:
    assert trials.mode == "interleaved"
    rounds = set(trials.baseline.blocks)
    assert len(rounds) >= 3
    assert set(trials.of("wrong").blocks) <= rounds


def test_all_variants_use_the_same_weights_and_samples(trials: ComparisonResult) -> None:
    numerics = trials.numerics(trials.of("quick"))

    assert numerics is not None
    assert (numerics.loss, numerics.grad_norm, numerics.later) == (0.0, 0.0, 0.0)
    assert not numerics.differ


def test_a_variant_with_different_results_is_flagged(trials: ComparisonResult) -> None:
    numerics = trials.numerics(trials.of("wrong"))

    assert numerics is not None
    assert numerics.differ


OTHERS = {
    "as quick": ("optimizer.kernel=fused", "task.sleep_ms=0"),
    "other rate": ("optimizer.lr=0.003",),
    "other rule": ("optimizer=sgd",),
    "opposite": ("task.gradient=-1.0",),
}


@pytest.mark.slow
def test_different_weights_are_flagged_despite_equal_losses(comparison: Comparison) -> None:
    """During warm-up, the losses of the first updates do not show the effect of the optimizer."""
    variants = [Variant("as it is"), *(Variant(name, args) for name, args in OTHERS.items())]

    actual = comparison.compare(variants, LIMITS, lambda _: None)

    off = {name: actual.numerics(actual.of(name)) for name in OTHERS}
    assert {name for name, numerics in off.items() if numerics is not None and numerics.differ} == {*OTHERS} - {
        "as quick"
    }
    assert all(numerics is not None and numerics.moved is not None for numerics in off.values())
    assert off["other rate"].loss == 0.0  # type: ignore[union-attr]
    assert off["other rate"].moved == pytest.approx(9.0, rel=0.01)  # type: ignore[union-attr]
    assert off["opposite"].moved > 1.5  # type: ignore[union-attr, operator]
    assert off["as quick"].moved < 0.01  # type: ignore[union-attr, operator]
    assert f"{off['opposite'].moved:.1%}" in str(off["opposite"])  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "reason"), [("unknown", "nonsense=1: unknown key"), ("dies", "exit code 9"), ("raises", "as planned")]
)
def test_a_failed_variant_has_a_reason(trials: ComparisonResult, name: str, reason: str) -> None:
    assert reason in trials.of(name).why_not
    assert trials.ratio(trials.of("quick")) is not None


def test_start_first_update_and_warm_up_are_separated(trials: ComparisonResult) -> None:
    quick = trials.of("quick")

    assert quick.startup.start_s > 0
    assert 0 < quick.startup.first_update_s < quick.startup.start_s
    assert quick.startup.warm_up_s >= LIMITS.block_s


def test_variants_report_their_usage(trials: ComparisonResult) -> None:
    opened, report = trials.baseline.opened, trials.baseline.report

    assert opened["values"]["precision"] == "fp32"
    assert opened["threads"] == 1
    assert opened["parameters"] == 8 * 8 + 8
    assert report["peak_host_gib"] > 0.05
    assert len(report["losses"]) == 8


def test_comparisons_leave_no_processes_or_files(trials: ComparisonResult, comparison: Comparison) -> None:
    fork_servers = [fork_server for server in psutil.Process().children() for fork_server in server.children()]
    assert fork_servers
    assert [child for fork_server in fork_servers for child in fork_server.children()] == []
    left = list(comparison.folder.rglob("*.safetensors"))
    assert left == []
    assert not Path("outputs").exists() or not list(Path("outputs").glob("variant*"))


def test_update_times_add_up_to_the_block(trials: ComparisonResult) -> None:
    """Updates are timed separately."""
    for variant in (trials.baseline, trials.of("quick")):
        for block in variant.blocks.values():
            assert len(block.updates_ms) == min(variant.updates, MAX_TIMED_UPDATES)
            if len(block.updates_ms) == variant.updates:
                lasted_ms = block.ms * variant.updates + 1e3 * block.run_queue_wait_s
                assert sum(block.updates_ms) == pytest.approx(lasted_ms, rel=0.02)


def test_disturbances_are_reported() -> None:
    calm = VariantResult(Variant("as it is"), blocks([1.0] * 8))
    throttled = VariantResult(Variant("hot"), blocks([1.0] * 8), throttled=Counter({"heat": 3}))
    uneven = VariantResult(Variant("as it is"), blocks([1.0, 2.0] * 4))

    assert list(describe_disturbances(ComparisonResult([calm], "interleaved", busy_cores=[0.0, 0.1]))) == []
    assert "use 1.0 of" in next(describe_disturbances(ComparisonResult([calm], "interleaved", busy_cores=[0.9, 1.1])))
    behind = dataclasses.replace(calm, updates=1000, blocks={at: Block(1.0, 1.0) for at in range(8)})
    assert " 50% " in next(describe_disturbances(ComparisonResult([behind], "interleaved")))
    assert "heat, in 3 of 16" in next(describe_disturbances(ComparisonResult([calm, throttled], "interleaved")))
    assert "noisy" in next(describe_disturbances(ComparisonResult([uneven], "interleaved")))


@pytest.mark.slow
def test_every_variant_compiles_once_and_restarts_use_the_cache(comparison: Comparison) -> None:
    names = [Variant("as it is"), Variant("quick", ("task.sleep_ms=0",))]
    comparison.compare(names, CompareLimits(budget_s=60, rounds=(3, 3), block_s=0.03, interleave=False), lambda _: None)

    folders = [comparison.compiled_folder(variant) for variant in (*names, *names)]
    assert len(set(folders)) == 2
    assert all(folder.parent == comparison.folder for folder in folders)


def test_results_can_be_written_as_json(trials: ComparisonResult) -> None:
    rows = as_json(trials)["variants"]

    assert [row["variant"]["name"] for row in rows][:2] == ["as it is", "quick"]
    assert rows[1]["ratio"]["verdict"] == "better"
    assert rows[3]["median_ms"] is None


@pytest.mark.slow
def test_variants_run_in_turn_if_memory_is_short(comparison: Comparison) -> None:
    limits = CompareLimits(budget_s=60, rounds=(3, 3), block_s=0.03, interleave=False)

    actual = comparison.compare([Variant("as it is"), Variant("quick", ("task.sleep_ms=0",))], limits, lambda _: None)

    assert actual.mode == "restarted"
    assert len(actual.of("quick").blocks) == 3
    ratio = actual.ratio(actual.of("quick"))
    assert ratio is not None
    assert ratio.middle > 1.1


@pytest.mark.slow
def test_variants_restart_between_blocks(comparison: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    """Restarts reveal differences between processes that run the same code."""
    monkeypatch.setattr(compare, "leave_out", lambda *_, **__: None)
    before, folders = comparison.num_started, set(comparison.folder.glob("variant-*"))

    limits = dataclasses.replace(LIMITS, rounds=(3, 40), block_s=0.1)
    actual = comparison.compare([Variant("as it is"), Variant("wrong", ("task.scale=3.0",))], limits, lambda _: None)

    assert comparison.num_started - before >= 4
    for variant in actual.variants:
        order = [block.process for block in variant.blocks.values()]
        assert order == sorted(order), "an ended process runs no more blocks"
        assert len(set(order)) >= 2
        assert all(order.count(process) >= 3 for process in set(order) - {order[-1]})
    left = set(comparison.folder.glob("variant-*")) - folders
    assert len(left) <= 2, "files of replaced processes are deleted"
    assert actual.spread.freedom > PRIOR_SPREAD.freedom
    assert comparison.prior_spread.freedom >= actual.spread.freedom, "the next comparison uses the estimate"
    numerics = actual.numerics(actual.of("wrong"))
    assert numerics is not None
    assert numerics.differ
    assert as_json(actual)["between_processes"]["sigma"] == actual.spread.sigma


def test_an_unmeasurable_baseline_is_an_error(comparison: Comparison) -> None:
    with pytest.raises(AccelRunError, match="as planned"):
        comparison.compare([Variant("as it is", ("task.raises_at=1",))], LIMITS, lambda _: None)


def test_a_suspended_variant_computes_nothing(comparison: Comparison) -> None:
    """Neither the variant nor its data workers run while another variant is measured."""
    with comparison.open_variant(Variant("workers", ("dataloader.num_workers=1",)), LIMITS) as (ask, _):
        process = ask.__self__  # type: ignore[attr-defined]
        process.pause()
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        assert len(family) > 1
        wait_until(lambda: {each.status() for each in family} == {psutil.STATUS_STOPPED}, "all processes are stopped")
        process.resume()
        assert ask({"do": "run", "updates": 1})["updates"] == 1


@pytest.mark.usefixtures("real_time")
def test_variants_exit_with_their_parent(tmp_path: Path) -> None:
    """The kernel ends the variants, because a killed process runs no handlers."""
    ready, started = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.environ["TMPDIR"] = str(tmp_path)
            with (
                Comparison(Request(SETTINGS, TASK)) as made,
                made.open_variant(Variant("as it is"), LIMITS) as (ask, _),
            ):
                os.write(started, f"{ask.__self__.pid}\n".encode())  # type: ignore[attr-defined]
                signal.pause()
        finally:
            os._exit(1)
    os.close(started)
    with os.fdopen(ready) as pipe:
        variant = int(pipe.readline())
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    wait_until(lambda: not psutil.pid_exists(variant), "the end of the variant")


def test_the_probe_measures_samples_and_shapes(comparison: Comparison) -> None:
    variant = Variant("look", ("task.sleep_ms=0", "task.sample_ms=3.0", "task.items=50"))

    with comparison.open_variant(variant, LIMITS) as (ask, _):
        actual, batch = ask({"do": "probe"}), ask({"do": "batch"})

    assert batch["loss_terms"] == 2
    assert actual["sample_bytes"] == 8 * 4
    assert actual["same_when_read_again"]
    assert actual["num_shapes"] == 1


def test_blocks_of_all_variants_have_similar_duration(trials: ComparisonResult) -> None:
    """Blocks of much faster variants have more updates, so that wake-up time does not dominate."""
    quick, slow = trials.of("quick"), trials.baseline

    assert quick.updates > slow.updates
    assert quick.updates * quick.median_ms > 0.3 * slow.updates * slow.median_ms


@pytest.mark.slow
def test_updates_with_prefetched_batches_are_untimed(
    comparison: Comparison, virtual_time: SharedVirtualTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Disk and network requests continue while a process is suspended, so updates with their results are untimed."""
    far = ("task.sample_ms=3.0", "global_batch_size=8")  # 24 ms of waiting, 4 ms of computing
    variants = [Variant("as it is", far), Variant("a worker", (*far, "dataloader.num_workers=1"))]

    monkeypatch.setattr(virtual_time, "worker_sleep_fraction", 1.0)

    actual = comparison.compare(variants, CompareLimits(budget_s=600, rounds=(3, 3), block_s=0.03), lambda _: None)

    reader, ratio = actual.of("a worker"), actual.ratio(actual.of("a worker"))
    assert reader.untimed > reader.opened["ahead"] > 0
    assert reader.updates >= 4 * reader.opened["ahead"]
    assert ratio is not None
    assert ratio.middle < 28 / 24 * 1.1, "only computation can be hidden"


@pytest.mark.slow
def test_a_block_includes_periodic_work_if_there_is_time(comparison: Comparison) -> None:
    rare = ("task.sleep_ms=1", "checkpoint.every=100")  # the period is fifty times as long as a block
    rarer = ("task.sleep_ms=1", "checkpoint.every=100000")
    variants = [
        Variant("as it is", rare),
        Variant("rarer", rarer),
        Variant("by the clock", ("checkpoint.every=10min",)),
    ]

    actual = comparison.compare(variants, CompareLimits(budget_s=20, rounds=(3, 3), block_s=0.01), lambda _: None)

    assert actual.baseline.updates % 100 == 0
    assert [variant.covers("checkpoint") for variant in actual.variants] == [True, False, False]


def test_too_slow_updates_are_not_started(comparison: Comparison) -> None:
    """A block of such updates would take longer than the budget, so none is started."""
    slow = ("task.sleep_ms=1000", "dataloader.num_workers=4")
    budget_s = 20.0

    actual = comparison.compare(
        [Variant("as it is", slow), Variant("other", (*slow, "seed=1"))], CompareLimits(budget_s), lambda _: None
    )

    assert actual.seconds < budget_s + 1.0
    assert actual.of("other").why_not == NO_TIME_LEFT
    assert SHORT_BUDGET in actual.notes


@pytest.mark.slow
def test_blocks_that_would_miss_the_deadline_are_not_started(comparison: Comparison) -> None:
    variants = [Variant("as it is", ("task.sleep_ms=200",)), Variant("quick", ("task.sleep_ms=100",))]
    limits = CompareLimits(budget_s=15, rounds=(60, 60), block_s=0.5)

    actual = comparison.compare(variants, limits, lambda _: None)

    assert actual.seconds < limits.budget_s + 0.2
    assert actual.of("quick").why_not == NO_TIME_LEFT or len(actual.baseline.blocks) >= MIN_ROUNDS


@pytest.mark.slow
def test_variants_that_start_too_slowly_are_ended(comparison: Comparison) -> None:
    variants = [Variant("as it is"), Variant("slow", ("task.start_s=60",))]

    actual = comparison.compare(variants, CompareLimits(budget_s=5, rounds=(3, 3), block_s=0.05), lambda _: None)

    assert actual.seconds <= 5
    assert actual.of("slow").why_not.startswith(START_TIMED_OUT)
    assert len(actual.baseline.blocks) == 3


@pytest.mark.slow
def test_resources_are_limited_by_affinity_and_cgroup(
    comparison: Comparison, trials: ComparisonResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container with little memory, variants are not interleaved, whatever the memory of the machine."""
    assert 0 < trials.num_cores <= psutil.cpu_count()
    monkeypatch.setattr(
        host, "cgroup_memory_limit", lambda _: SimpleNamespace(amount=2.0**27, memory_bytes=lambda: 2**26)
    )

    variants = [Variant("as it is"), Variant("quick", ("task.sleep_ms=0",))]
    actual = comparison.compare(variants, CompareLimits(budget_s=30, rounds=(1, 1), block_s=0.03), lambda _: None)

    assert actual.mode == "restarted"
    assert host.free_memory_bytes() == 2**26
    assert host.memory_bytes() == device_bytes(torch.device("cpu")) == 2**27


def test_variants_are_bound_to_their_share_of_cores() -> None:
    with Comparison(Request(SETTINGS, TASK), cores=1) as made:
        workers = Variant("workers", ("dataloader.num_workers=1",))
        with made.open_variant(workers, LIMITS) as (ask, _):
            process = psutil.Process(ask.__self__.pid)  # type: ignore[attr-defined]
            assert [len(each.cpu_affinity()) for each in (process, *process.children())] == [1, 1]


def result(name: str, ms: Sequence[float], against: str = "") -> VariantResult:
    return VariantResult(Variant(name, against=against), blocks(ms))


def test_compared_variants_run_until_the_result_is_clear() -> None:
    """A size that is ten times slower than the first one is left out only after the comparison with its rival."""
    noisy, even = [80.0, 120.0] * 4, [100.0] * 8
    first, rival, second, other = (
        result("small a", [10.0] * 8),
        result("small b", [10.0] * 8, "small a"),
        result("large a", even),
        result("large b", noisy, "large a"),
    )
    trials = ComparisonResult([first, rival, second, other], "interleaved")

    leave_out(trials, 60)
    assert [variant.is_out for variant in trials.variants] == [False, True, False, False]
    assert trials.ratio(other) == trials.ratio(other, second)

    other.blocks = blocks(even)
    leave_out(trials, 60)
    assert [variant.is_out for variant in trials.variants] == [False, True, True, True]

    other.is_out, second.why_not = False, "out of memory"
    leave_out(trials, 60)
    assert other.is_out


def test_a_zero_reading_does_not_cause_long_blocks() -> None:
    """On a busy machine, a short update may consist only of run-queue wait, and so seem to take no time."""
    made: list[int] = []

    def make(updates: int, _: float) -> float:
        made.append(updates)
        return 0.0 if len(made) == 1 else 0.003 * updates

    measured = VariantResult(Variant("as it is"), opened={"periods": {}, "readers": 0})
    num = choose_block_updates(SimpleNamespace(run=make), measured, CompareLimits(block_s=0.4), 1.0)  # type: ignore[arg-type]

    assert num == round(0.4 / 0.003)
    assert max(made) <= 2 * num


class HangingServer:
    """Replaces the fork server. Its process blocks until the test closes the pipe."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reads, self.writes = os.pipe()

    def fork(self, connection: Connection, errors: IO[bytes], ranks: int) -> int:
        ready, is_ready = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.setsid()  # like a variant, which is killed with its session
            os.close(self.writes)
            stacks.dump_on_signal(self.folder)
            os.write(is_ready, b"x")
            self.block()
        os.read(ready, 1)
        for descriptor in (ready, is_ready, self.reads):
            os.close(descriptor)
        return pid

    def block(self) -> None:
        os.read(self.reads, 1)
        os._exit(0)

    def wait(self, pid: int) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.usefixtures("real_time")
def test_reply_timeouts_name_the_command(tmp_path: Path) -> None:
    server = HangingServer(tmp_path)
    try:
        process = VariantProcess(server, 1, time.monotonic, math.inf)  # type: ignore[arg-type]
        with pytest.raises(ReplyTimeout) as caught:
            process.call({"do": "begin"}, timeout_s=0.0)
        process.end()
    finally:
        os.close(server.writes)
    assert "`begin`" in str(caught.value)
