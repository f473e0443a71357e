"""Fixtures and pytest hooks for all tests."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# Tests run in parallel. Without this, a command would choose the policy by the load and print a message.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# in a background job of a shell script, where commands would ignore SIGINT
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
pytest.register_assert_rewrite("tests.screens")  # so that its assertion shows a diff

from runner.base import noise
from tests.coarse_pictures import at_full_resolution
from tests.commands_here import unload_task_files
from tests.composed import composed, folder_for_all
from tests.cpu_time import used_cpu_s
from tests.faults import tallies
from tests.forkserver import ROOT, ForkServer
from tests.nvml_stub import NvmlStub, build_stub
from tests.screens import screen_of
from tests.warm import freeze, import_all
from tests.workers import SERVER, run_all

# The slowest files, slowest first: if one of them started last, the other workers would be idle while it runs.
LONGEST = (
    "stand_ins/test_ranks_over_nccl.py", "stand_ins/test_cuda_paths.py", "stand_ins/test_gpu_tests.py",
    "end_to_end/test_ranks.py", "faults/test_environment.py", "trackers/test_trackers.py",
    "distributed/test_sharded.py", "sweeps/test_sweeps.py", "faults/test_resume_matrix.py", "faults/test_secrets.py",
    "tasks/test_tractodiff_model.py", "tools/measure/test_tuner.py", "launch/test_two_nodes.py",
    "commands/test_plan_of_ranks.py", "tools/measure/test_compare.py", "faults/test_signals_of_runs.py",
    "tools/measure/suites/test_parallelism.py", "tools/report/test_report.py",
    "tools/measure/suites/test_before_after.py", "end_to_end/test_phases_as_data.py",
    "end_to_end/test_contributing.py", "commands/test_monitor.py", "stand_ins/test_no_hazards.py",
    "tools/measure/suites/test_ladder.py", "end_to_end/test_packaging.py", "faults/test_configuration_fuzz.py",
    "tools/measure/test_advisor.py", "axes/test_dataloader.py", "forecast/test_forecast.py",
    "end_to_end/test_streams.py", "launch/test_local.py", "stand_ins/test_nvml_beside_torch.py",
    "faults/test_out_of_memory.py", "durable/test_checkpoint.py", "distributed/test_pipelined.py",
    "laws/test_tasks.py", "monitor/test_monitor_thread.py", "engine/process/test_watchdog.py",
    "distributed/test_batch_norm.py", "config/test_configuration.py", "stand_ins/test_cuda_stand_in.py",
)  # fmt: skip

MANY = 10  # number of tests from which it pays to import everything up front
THREAD_ENDS_S = 30  # time for threads to exit after their test
YOUNG_OBJECTS = 20_000  # number of new objects before a garbage collection; with 700, they take 2 % of the time
FILE_BUDGET_S = 10  # of CPU time; reported, never asserted


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=0, help="run tests in N forked processes; default: in this one")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the tests in worker processes if --workers is given and collection succeeded."""
    if not session.config.option.workers or session.testsfailed or session.config.option.collectonly:
        return None
    run_all(session, session.config.option.workers)
    return True


def pytest_configure(config: pytest.Config) -> None:
    """Set up Hypothesis and the cache of compositions."""
    # No deadline, because a busy machine exceeds any; always the same examples, except with --all.
    hypothesis.settings.register_profile("accel-run", deadline=None, derandomize=not tallies.IS_LONG)
    hypothesis.settings.load_profile("accel-run")
    _compose_once(config)
    if config.option.workers and not config.option.collectonly:
        while_collecting = ExitStack()
        config.add_cleanup(while_collecting.close)
        config.stash[SERVER] = while_collecting.enter_context(ForkServer.started())  # imports torch
        build = [sys.executable, "-m", "tests.stand_ins.cuda", "build"]  # if it is missing or stale, in 30 s
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        while_collecting.enter_context(subprocess.Popen(build, cwd=ROOT, **quiet))


def _compose_once(config: pytest.Config) -> None:
    """Cache Hydra's compositions of the shipped files for all tests, which otherwise take half of the time."""
    with suppress(ImportError):  # an optional dependency
        import tqdm  # type: ignore[import-untyped]

        tqdm.tqdm.monitor_interval = 0  # the first progress bar would start a thread that never ends
    shared = ExitStack()
    shared.enter_context(folder_for_all())
    config.add_cleanup(shared.close)
    composed()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run the slowest files first, sample large matrices, and skip GPU tests on machines without a GPU."""
    here = Path(__file__).parent
    places = {here / name: place for place, name in enumerate(LONGEST)}
    assert all(path.is_file() for path in places)
    items.sort(key=lambda item: places.get(item.path, len(places)))
    if not tallies.IS_LONG:
        left_out = _left_out(items)
        if left_out:
            config.hook.pytest_deselected(items=[item for item in items if item in left_out])
            items[:] = [item for item in items if item not in left_out]
    for item in _outside_samples(items, "slow_beyond"):
        item.add_marker(pytest.mark.slow)
    of_gpus = [item for item in items if item.get_closest_marker("gpu")]
    if of_gpus and not _has_gpu():
        for item in of_gpus:
            item.add_marker(pytest.mark.skip(reason="no CUDA device here"))


def _has_gpu() -> bool:
    """Return whether torch sees a GPU. Does not initialize CUDA, because forked workers could not use it afterwards."""
    import torch

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        return torch.cuda.is_available()


def _left_out(items: list[pytest.Item]) -> set[pytest.Item]:
    """Return the cases that only --all runs: those marked long, and sampled ones that the seed does not select."""
    return {item for item in items if item.get_closest_marker("long") and len(items) > 1} | _outside_samples(
        items, "sampled"
    )


def _outside_samples(items: list[pytest.Item], name: str) -> set[pytest.Item]:
    """Return the cases of tests with the marker `name(count)` that the seed does not select."""
    result: set[pytest.Item] = set()
    cases = defaultdict(list)
    for item in items:
        if marker := item.get_closest_marker(name):
            cases[item.nodeid.partition("[")[0], marker.args[0]].append(item)
    for (test, count), each in cases.items():
        kept = _chosen(each, count, random.Random(f"{tallies.SEED} {test}"))
        result.update(item for item in each if item not in kept)
    return result


def _chosen(cases: list[pytest.Item], count: int, rng: random.Random) -> list[pytest.Item]:
    """Return `count` random cases that together cover as many parameter values as possible."""
    left, kept = rng.sample(cases, len(cases)), []
    seen: set[tuple[str, int | str]] = set()
    while left and len(kept) < count:
        best = max(left, key=lambda item: len(_values(item) - seen))
        left.remove(best)
        kept.append(best)
        seen |= _values(best)
    return kept


def _values(item: Any) -> set[tuple[str, int | str]]:
    # Not every value is hashable; equal strings may be different objects.
    return {(name, value if isinstance(value, str) else id(value)) for name, value in item.callspec.params.items()}


def pytest_report_header() -> str:
    """Report the seed of the sampling, so that a failure can be reproduced."""
    return "all cases" if tallies.IS_LONG else f"cases of sampled tests: ACCEL_RUN_SEED={tallies.SEED}"


def pytest_collection_finish(session: pytest.Session) -> None:
    """Freeze imported objects, so that garbage collections neither scan them nor copy their pages in forks.

    A session of many tests first imports what commands need, because every forked command would import it again.
    """
    if len(session.items) > MANY:
        import_all()
    freeze()
    gc.set_threshold(YOUNG_OBJECTS)


@pytest.fixture(scope="session")
def server(pytestconfig: pytest.Config) -> Iterator[ForkServer]:
    """A fork server that runs accel-run in separate processes without importing torch each time."""
    if SERVER in pytestconfig.stash:
        yield pytestconfig.stash[SERVER]
        return
    with ForkServer.started() as made:
        yield made


@pytest.fixture(scope="session")
def nvml_stub(tmp_path_factory: pytest.TempPathFactory) -> NvmlStub:
    """Compile the NVML stub once."""
    return build_stub(tmp_path_factory.mktemp("nvml_stub"))


@pytest.fixture(scope="session", autouse=True)
def _autograd_has_no_threads() -> None:
    """Run a backward pass before any test, so that forks of this process can run backward passes.

    The first backward pass starts a thread per device, after which torch's engine refuses to run in forks. Without a
    GPU, it starts none, unless fake tensors have registered a device, as they do with a CUDA build of torch.
    """
    if torch := sys.modules.get("torch"):
        torch.ones(1, requires_grad=True).sum().backward()


@pytest.fixture(autouse=True)
def _forgets_task_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Unload the modules that a test loads from its folder, so that others of the same name are accepted."""
    with unload_task_files(tmp_path_factory.getbasetemp()):
        yield


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    """Fail a test that leaks a thread, because later tests fork ranks from this process.

    Threads of fixtures with a wider scope may keep running. Also reset the current forward pass: if a test runs one
    outside of a phase, its samples would determine the random draws of the next test.
    """
    before = set(threading.enumerate())
    yield
    noise.start_pass(None)
    left = set(threading.enumerate()) - before
    if left:
        gc.collect()  # a data loader's threads end with its iterator, which a traceback may keep alive
    for thread in left:
        thread.join(THREAD_ENDS_S)
        assert not thread.is_alive(), f"this test leaves the thread {thread.name} behind"


@pytest.fixture
def screen(snapshot: Any, tmp_path: Path) -> Callable[..., None]:
    """Compare a text with this test's snapshot: `screen(text)`, see tests/screens.py."""
    return screen_of(snapshot, tmp_path)


@pytest.fixture
def full_resolution() -> Iterator[None]:
    """Draw pictures at full resolution, for tests of the pictures themselves."""
    with at_full_resolution():
        yield


@pytest.fixture
def short() -> Iterator[Path]:
    """A short path for TMPDIR: data workers create sockets there, whose paths are limited to 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="test-") as name:
        yield Path(name)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Measure the CPU time of each test, in this process and in its children."""
    stash = item.session.stash
    stash[_SHARED_CPU] = 0.0
    if _CPU_BEFORE not in stash:
        stash[_CPU_BEFORE] = used_cpu_s() + ForkServer.cpu_s
    yield


@pytest.hookimpl(hookwrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> Iterator[None]:
    """Measure the setup of session fixtures separately, so that it is not attributed to their first test."""
    before = used_cpu_s() if fixturedef.scope == "session" else 0.0
    yield
    if fixturedef.scope == "session":
        request.session.stash[_SHARED_CPU] += used_cpu_s() - before


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Attach the CPU time to the last report of a test: workers send reports to the session."""
    if call.when == "teardown":
        stash, now = item.session.stash, used_cpu_s() + ForkServer.cpu_s
        shared = stash[_SHARED_CPU]
        item.user_properties += [("cpu_s", now - stash[_CPU_BEFORE] - shared), ("shared_cpu_s", shared)]
        stash[_CPU_BEFORE] = now
    yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show the injected faults of the fault suites, and the test files that exceed the budget of CPU time."""
    if tallies.TALLIES:
        terminalreporter.section("faults injected")
        tallies.show(terminalreporter.write_line)
    cpu_s: dict[str, float] = defaultdict(float)
    shared_s = 0.0
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport) and report.when == "teardown":
                used = {str(name): float(str(value)) for name, value in report.user_properties if "cpu_s" in str(name)}
                cpu_s[report.nodeid.partition("::")[0]] += used.get("cpu_s", 0.0)
                shared_s += used.get("shared_cpu_s", 0.0)
    over = sorted((total, name) for name, total in cpu_s.items() if total > FILE_BUDGET_S)
    if over:
        terminalreporter.section(f"files over their budget of {FILE_BUDGET_S} s of CPU time")
        for total, name in reversed(over):
            terminalreporter.write_line(f"{total:6.0f} s  {name}")
    terminalreporter.write_line(
        f"{sum(cpu_s.values()):.0f} s of CPU time in {len(cpu_s)} files, {shared_s:.0f} s in fixtures of the session"
    )


_CPU_BEFORE: pytest.StashKey[float] = pytest.StashKey()  # at the end of the previous test
_SHARED_CPU: pytest.StashKey[float] = pytest.StashKey()
