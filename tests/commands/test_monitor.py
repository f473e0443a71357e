"""`accel-run monitor` writes to terminals, pipes and files, with stub GPUs and without GPUs."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from runner.cli import main
from runner.durable.directory import RunDirectory
from runner.engine.process.run_screen import Screen
from runner.monitor import machine_display
from runner.monitor.alerts import Alert
from runner.monitor.machine_screen import View
from runner.monitor.samples import COLUMNS
from tests.forkserver import CompletedCommand, ForkServer
from tests.nvml_stub import GIB, PAIR, T4, NvmlStub
from tests.suggestions import suggested
from tests.waiting import wait_until

COMMAND = [sys.executable, "-m", "runner", "monitor"]
VIRTUAL = "tests.commands.virtual_monitor"  # each sample advances the clock
LINE = r"GPU: 8\.0/15\.0GB \(53%\) \| Util: 85% \| CPU: [\d.]+% \| RAM: [\d.]+%"
SHORT = ("seconds=0.1", "interval_s=0.05", "log_dir=null")
TEN: dict[str, object] = T4 | {"0.processes": ",".join(f"{4_000_001 + pid}:{(pid + 1) * GIB}" for pid in range(10))}


LIMITED = """
import resource, sys
import tests.commands.virtual_monitor
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
from runner.cli import main
sys.exit(main(["monitor", *sys.argv[2:]]))
"""


Watch = Callable[..., CompletedCommand]


@pytest.fixture
def monitor(server: ForkServer, nvml_stub: NvmlStub, tmp_path: Path) -> Watch:
    """Return a function that runs the monitor on stub GPUs in a given state, or without GPUs if the state is None."""

    def watch(state: Any, *args: str, **variables: str) -> CompletedCommand:
        # in a new process, because the dynamic linker reads LD_LIBRARY_PATH only when a process starts
        if state is None:
            run = f"import sys, {VIRTUAL}; from runner.cli import main; sys.exit(main(['monitor', *sys.argv[1:]]))"
            done = subprocess.run(
                [sys.executable, "-c", run, *args],
                env=nvml_stub.environment(None),
                cwd=tmp_path,
                capture_output=True,
                text=True,
                check=False,
            )
            return CompletedCommand(done.returncode, done.stdout, done.stderr)
        driver = f"import ctypes; ctypes.CDLL({str(nvml_stub.folder / 'new' / 'libnvidia-ml.so.1')!r})\n"
        environment = {"NVML_STUB": str(nvml_stub.write(state)), "IMPORT_FIRST": VIRTUAL, **variables}
        return server.run(["monitor", *args], tmp_path, environment, driver)

    return watch


def only_folder(folder: Path) -> Path:
    (made,) = (folder / "gpu_logs").iterdir()
    return made


# ---------------------------------------------------------------- on a pipe


def test_monitoring_on_a_pipe_prints_samples_and_a_summary(monitor: Watch, tmp_path: Path) -> None:
    """On a pipe, monitoring also writes files."""
    done = monitor(T4, "seconds=0.5", "interval_s=0.1")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    samples = [line for line in lines if re.fullmatch(LINE, line)]
    assert len(samples) >= 5
    assert lines[: len(samples)] == samples
    count = int(re.search(r"monitored for [\d.]+ s, (\d+) samples", done.out)[1])  # type: ignore[index]
    assert len(samples) <= count, "more lines than samples"
    assert re.search(r"utilization +% +85 +85 +85\n", done.out)
    assert "good  GPU 0 utilization: " in done.out
    assert re.search(r"power limit.* 100 %.* 61 °C", done.out)
    made = only_folder(tmp_path)
    assert {path.name for path in made.iterdir()} == {"gpu.csv", "monitor.json", "gpu0.png", "machine.png"}
    rows = (made / "gpu.csv").read_text().splitlines()
    assert rows[0] == ",".join(COLUMNS)
    assert len(rows) == 1 + count
    summary = json.loads((made / "monitor.json").read_text())
    assert summary["whole"]["metrics"]["gpu0/util"]["mean"] == 85
    assert summary["devices"]["gpu0"]["name"] == "Tesla T4"


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("room", [700, 1_500])
def test_incomplete_files_are_named_and_exit_code_is_74(nvml_stub: NvmlStub, tmp_path: Path, room: int) -> None:
    """A file size limit simulates a full disk: both gpu.csv and monitor.json exceed it, or only monitor.json does."""
    command = [sys.executable, "-c", LIMITED, str(room), "seconds=1.5", "interval_s=0.05", "log_dir=mine"]
    # The limit does not apply to pipes.
    result = subprocess.run(
        command, env=nvml_stub.environment(T4), cwd=tmp_path, capture_output=True, text=True, check=False
    )
    done = CompletedCommand(result.returncode, result.stdout, result.stderr)
    (made,) = (tmp_path / "mine").iterdir()

    assert done.code == 74, done.err
    assert "monitored for" in done.out, "the summary must include all samples"
    assert done.err.count("File too large") >= 1
    for name in ("gpu.csv", "monitor.json"):
        assert name in done.err
    assert "resumes" not in done.out + done.err
    assert "Traceback" not in done.err
    assert [path.name for path in made.iterdir()] == ["gpu.csv"]


@pytest.mark.slow
def test_two_monitors_write_to_two_folders(monitor: Watch, tmp_path: Path) -> None:
    for _ in range(2):
        assert monitor(T4, "seconds=0.1", "log_dir=mine").code == 0
    assert len(list((tmp_path / "mine").iterdir())) == 2


def test_json_output_has_one_object_per_sample(monitor: Watch, tmp_path: Path) -> None:
    """Messages go to stderr."""
    done = monitor(TEN, "seconds=0.3", "interval_s=0.1", "--json", "log_dir=null")
    assert done.code == 0, done.err
    result = [json.loads(line) for line in done.out.splitlines()]
    assert len(result) >= 3
    assert all(sample["readings"]["gpu0/util"] == 85 for sample in result)
    assert len(result[0]["gpus"][0]["processes"]) == 10
    assert "utilization" in done.err
    assert not (tmp_path / "gpu_logs").exists()


def test_only_gpus_in_cuda_visible_devices_are_monitored(monitor: Watch, tmp_path: Path) -> None:
    def names(**variables: str) -> list[str]:
        sample, *_ = monitor(PAIR, "--json", *SHORT, **variables).out.splitlines()
        return [gpu["name"] for gpu in json.loads(sample)["gpus"]]

    assert names() == [PAIR["0.name"], PAIR["1.name"]]
    assert names(CUDA_VISIBLE_DEVICES="GPU-3070") == [PAIR["1.name"]]


def test_gpu_errors_are_printed_before_advice_on_a_pipe(monitor: Watch, tmp_path: Path) -> None:
    state = T4 | {"event_types": 11, "events": "0:8:48", "0.throttle": 0}
    done = monitor(state, "seconds=0.3", "interval_s=0.1", "log_dir=null")
    assert done.err.count("XID 48") == 1
    messages = [line for line in done.out.splitlines() if line.startswith(("high ", "low ", "note ", "good "))]
    assert re.match(r"high  GPU 0 .*XID 48, ", messages[0])
    assert done.out.count("XID 48") == 1


def test_hiding_all_gpus_by_cuda_visible_devices_is_noted(monitor: Watch, tmp_path: Path) -> None:
    done = monitor(PAIR, *SHORT, CUDA_VISIBLE_DEVICES="")
    assert done.code == 0
    assert re.search(r"CUDA_VISIBLE_DEVICES=\s+hides\s+2", done.err)


def test_unsupported_readings_are_absent(monitor: Watch, tmp_path: Path) -> None:
    sample, *_ = monitor(T4 | {"0.err.power": 3, "0.err.util": 3}, "--json", *SHORT).out.splitlines()
    readings = json.loads(sample)["readings"]
    assert "gpu0/memory_gib" in readings
    assert not {"gpu0/power_w", "gpu0/util"} & set(readings)


@pytest.mark.slow
def test_without_a_gpu_cpu_and_ram_are_shown(monitor: Watch, tmp_path: Path) -> None:
    live = monitor(None, "seconds=0.2", "interval_s=0.1")
    assert live.code == 0
    assert re.match(r"CPU: [\d.]+% \| RAM: [\d.]+%\n", live.out)
    assert "no NVIDIA driver" in live.err
    assert {path.name for path in only_folder(tmp_path).iterdir()} == {"gpu.csv", "monitor.json", "machine.png"}


def test_monitoring_continues_without_permission_or_a_gpu(monitor: Watch, tmp_path: Path) -> None:
    denied = monitor(T4 | {"err.init": 4}, *SHORT)
    assert denied.code == 0
    assert "no permission" in denied.err
    lost = {f"0.err.{name}": 15 for name in ("util", "memory", "temperature", "power", "sm_clock", "throttle")}
    done = monitor(T4 | lost, *SHORT)
    assert done.code == 0
    assert re.search(r"gpu0 .* lost", done.err)
    assert "CPU" in done.out


@pytest.mark.slow
def test_files_are_written_when_the_pipe_reader_exits(nvml_stub: NvmlStub, tmp_path: Path) -> None:
    with subprocess.Popen(
        [*COMMAND, "interval_s=0.1"], env=nvml_stub.environment(T4), cwd=tmp_path,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=60) == 0
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()
    assert (only_folder(tmp_path) / "monitor.json").is_file()


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_monitoring_writes_summary_and_files_after_a_signal(nvml_stub: NvmlStub, tmp_path: Path, number: int) -> None:
    environment = nvml_stub.environment(T4)
    with subprocess.Popen(
        [*COMMAND, "interval_s=0.1"], env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(number)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "utilization" in out
    assert (only_folder(tmp_path) / "monitor.json").is_file()


def test_stop_requests_are_handled_until_the_display_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the display opens and after it closes, a signal ends the process immediately."""
    make_display = machine_display.make_display
    outside, inside = [], []

    def note_handlers(*args: Any, as_json: bool) -> machine_display.MachineDisplay:
        outside.append(signal.getsignal(signal.SIGTERM))
        display = make_display(*args, as_json=as_json)
        for name in ("sample", "draw", "close"):
            monkeypatch.setattr(display, name, partial(note_and_call, getattr(display, name)))
        return display

    def note_and_call(method: Callable[..., None], *args: View) -> None:
        inside.append(signal.getsignal(signal.SIGTERM))
        method(*args)

    monkeypatch.setattr(machine_display, "make_display", note_handlers)
    assert main(["monitor", *SHORT]) == 0
    assert len(inside) > 1
    assert all(handler == inside[0] for handler in inside)
    assert outside[0] != inside[0]


# ---------------------------------------------------------------- samples of a run


@pytest.fixture
def run_of_a_pair(tmp_path: Path) -> Path:
    """A run with a gpu.csv of two phases on two GPUs; GPU 1 is mostly idle, and another process uses it."""
    run = tmp_path / "outputs" / "first"
    run.mkdir(parents=True)
    (run / "run.json").write_text('{"state": "done"}')
    rows = [",".join(COLUMNS)]
    for second in range(20):
        for gpu in range(2):
            cells = {
                "timestamp": 1.7e9 + second, "phase": "lora" if second < 10 else "router", "device": f"gpu{gpu}",
                "uuid": f"GPU-{gpu}", "name": "A card", "span_s": 1.0, "util_percent": 90 - 60 * gpu,
                "memory_used_gib": 6, "memory_total_gib": 8, "other_processes": gpu, "cpu_percent": 20,
            }  # fmt: skip
            rows.append(",".join(str(cells.get(column, "")) for column in COLUMNS))
    (run / "gpu.csv").write_text("\n".join(rows) + "\n")
    return tmp_path


@pytest.mark.slow
def test_samples_of_a_run_are_summarized_and_plotted(
    server: ForkServer, run_of_a_pair: Path, screen: Callable[..., None]
) -> None:
    done = server.run("monitor run=last", run_of_a_pair)
    assert done.code == 0, done.err
    screen(done.out)
    plots = run_of_a_pair / "outputs" / "first" / "plots"
    assert {path.name for path in plots.iterdir()} == {"gpu0.png", "gpu1.png", "gpus.png", "machine.png"}
    assert not (run_of_a_pair / "gpu_logs").exists()


@pytest.mark.slow
def test_a_cpu_run_gets_no_advice_about_gpus(server: ForkServer, run_of_a_pair: Path) -> None:
    (run_of_a_pair / "outputs" / "first" / "plan.json").write_text('{"device": "cpu"}')
    done = server.run("monitor run=first", run_of_a_pair)
    assert "note  GPUs: " in done.out
    assert not any(args in done.out for args in ("GPU 0 utilization", "GPU 1 memory", "GPU 1 processes"))


@pytest.mark.slow
def test_a_lost_gpu_comes_first_in_the_summary(server: ForkServer, run_of_a_pair: Path) -> None:
    row = {"kind": "machine", "what": "lost", "device": "gpu1", "uuid": "GPU-1", "text": "gpu1 (A card) is lost: gone"}
    (run_of_a_pair / "outputs" / "first" / "events.jsonl").write_text(json.dumps(row) + "\n")
    done = server.run("monitor run=first", run_of_a_pair)
    messages = [line for line in done.out.splitlines() if line.startswith(("high ", "low ", "note ", "good "))]
    assert messages[0].split() == ["high", "GPU", "1", "lost:", "gone"]
    assert not any("GPU 1" in line for line in messages[1:])


@pytest.mark.slow
def test_all_machines_of_a_run_are_summarized_and_plotted(server: ForkServer, run_of_a_pair: Path) -> None:
    run = run_of_a_pair / "outputs" / "first"
    shutil.copy(run / "gpu.csv", run / "gpu-rank8.csv")
    row = {"kind": "machine", "what": "lost", "device": "gpu1", "uuid": "GPU-1", "text": "gpu1 (A card) is lost: gone"}
    (run / "events-rank8.jsonl").write_text(json.dumps(row) + "\n")
    done = server.run("monitor run=first", run_of_a_pair)
    assert done.code == 0, done.err
    first, second = done.out.split("machine of rank 8: outputs/first/gpu-rank8.csv\n")
    assert "GPU 1 lost" not in first
    assert "GPU 1 lost" in second
    assert {"gpu0.png", "machine.png", "rank8-gpu0.png", "rank8-machine.png"} <= {
        path.name for path in (run / "plots").iterdir()
    }
    as_json = json.loads(server.run("monitor run=first --json", run_of_a_pair).out)
    assert as_json["machines"]["rank8"]["whole"]["metrics"]["gpu1/util"]["mean"] == 30


def test_the_first_rank_of_another_machine_reports_its_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    what = "gpu1 (A card) is lost"
    with RunDirectory.create_or_open(tmp_path, "mine") as directory:
        with Screen(directory, speaks=False, machine="rank8") as screen:
            screen.info("what only rank 0 says")
            screen.show_alerts([Alert("lost", what, "warning", {"device": "gpu1"})])
        (row,) = map(json.loads, (directory.path / "events-rank8.jsonl").read_text().splitlines())
        assert (row["kind"], row["what"], row["device"]) == ("machine", "lost", "gpu1")
        with Screen(directory, speaks=False) as screen:
            screen.show_alerts([Alert("lost", "gpu2 is lost", "warning")])
    messages = capsys.readouterr()
    assert messages.out == ""
    assert messages.err.startswith("warning: ")
    assert messages.err.endswith(f": {what}\n")


def test_json_of_a_run_prints_the_summary_without_files(server: ForkServer, run_of_a_pair: Path) -> None:
    done = server.run("monitor run=first --json", run_of_a_pair)
    assert json.loads(done.out)["whole"]["metrics"]["gpu0/util"]["mean"] == 90
    assert not (run_of_a_pair / "outputs" / "first" / "plots").exists()


def test_a_run_without_samples_is_reported_with_the_reason(server: ForkServer, tmp_path: Path) -> None:
    assert server.run("monitor run=last", tmp_path).code == 66
    (tmp_path / "outputs" / "first").mkdir(parents=True)
    (tmp_path / "outputs" / "first" / "run.json").write_text("{}")
    done = server.run("monitor run=first", tmp_path)
    assert done.code == 66
    assert "gpu.csv" in done.err
    assert "Traceback" not in done.err
    (tmp_path / "outputs" / "first" / "gpu.csv").write_text(",".join(COLUMNS) + "\n")
    assert server.run("monitor run=first", tmp_path).code == 66


# ---------------------------------------------------------------- invalid arguments

SLIPS = [
    "30",
    "last",
    "--seconds=3",
    "--jso",
    "secs=3",
    "interval_s=0",
    "seconds=abc",
    "run=",
    "run=last seconds=3",
]


def test_a_typo_gets_a_suggestion(capsys: pytest.CaptureFixture[str], screen: Callable[..., None]) -> None:
    messages = []
    for args in SLIPS:
        assert main(["monitor", *args.split()]) == 78, args
        messages.append(f"$ accel-run monitor {args}\n{capsys.readouterr().err}")
    screen("\n".join(messages))


def test_monitor_flags_given_to_train_produce_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--monitor-only"]) == 78
    assert suggested(capsys.readouterr().err)[-1] == "seconds=30"


def test_a_failure_to_create_log_dir_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpu_logs").write_text("a file")
    assert main(["monitor", "log_dir=gpu_logs", "seconds=0.1"]) == 73
    assert "log_dir" in capsys.readouterr().err
    assert main(["monitor", "seconds=0.1", "interval_s=0.05"]) == 0, "viewing must not need write permission"
    shown = capsys.readouterr()
    assert "gpu_logs: " in shown.err
    assert "CPU: " in shown.out


@pytest.mark.slow
def test_monitor_imports_few_modules_and_not_torch(nvml_stub: NvmlStub) -> None:
    code = "import json, sys, runner.cli; runner.cli.main(['monitor', *{!r}]); print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code.format(["--help"])], capture_output=True, text=True, check=True)
    loaded = set(json.loads(done.stdout.splitlines()[-1]))
    assert not {"torch", "numpy", "rich", "psutil", "pynvml", "hydra", "matplotlib"} & loaded
    watched = subprocess.run([sys.executable, "-c", code.format(SHORT)], capture_output=True, text=True, check=True)
    assert not {"torch", "hydra", "matplotlib"} & set(json.loads(watched.stdout.splitlines()[-1]))


# ---------------------------------------------------------------- on a terminal


class Tmux:
    """A terminal in which the command runs."""

    def __init__(self, nvml_stub: NvmlStub, folder: Path, columns: int, rows: int) -> None:
        self.socket, self.stub, self.folder = folder / "tmux", nvml_stub, folder
        self.size = ("-x", str(columns), "-y", str(rows))

    def run(self, *args: str) -> str:
        done = subprocess.run(["tmux", "-S", str(self.socket), *args], capture_output=True, text=True, check=True)
        return done.stdout

    def start(self, state: Any, *args: str, **variables: str) -> None:
        environment = self.stub.environment(state, **variables)
        names = ("LD_LIBRARY_PATH", "NVML_STUB", "PYTHONPATH", *variables)
        given = [f"{name}={environment[name]}" for name in names] + ["LC_ALL=C.UTF-8", "PS1=$ "]
        self.run("-f", "/dev/null", "new-session", "-d", *self.size, "-c", str(self.folder), "env", *given, "sh")
        command = " ".join([*COMMAND, "interval_s=0.1", *args])
        self.run("send-keys", "-l", command)
        self.run("send-keys", "Enter")

    def screen(self) -> str:
        return self.run("capture-pane", "-p")

    def until(self, seen: Callable[[str], Any]) -> str:
        """Wait until `seen` is true for the screen, and return the screen."""
        return wait_until(lambda: screen if seen(screen := self.screen()) else "", self.screen())


@pytest.fixture
def tmux(nvml_stub: NvmlStub, tmp_path: Path) -> Iterator[Callable[[int, int], Tmux]]:
    """Return a function that opens a terminal with the given number of columns and rows."""
    if not shutil.which("tmux"):
        pytest.skip("needs tmux, which is not installed")
    made: list[Tmux] = []

    def make(columns: int, rows: int) -> Tmux:
        made.append(Tmux(nvml_stub, tmp_path, columns, rows))
        return made[-1]

    yield make
    for each in made:
        subprocess.run(["tmux", "-S", str(each.socket), "kill-server"], capture_output=True, check=False)


def test_the_live_screen_adapts_to_the_terminal_size(tmux: Callable[[int, int], Tmux], nvml_stub: NvmlStub) -> None:
    seen = tmux(100, 24)
    seen.start(T4)
    screen = seen.until(lambda text: "▇▇▇▇" in text)
    assert re.search(r"^GPU 0  Tesla T4 +85% +▇+ .* 61 °C", screen, re.MULTILINE)
    assert re.search(r"^throttled: ", screen, re.MULTILINE)
    assert "4242" in screen
    nvml_stub.write(T4 | {"0.util": 10, "0.throttle": 0})
    screen = seen.until(lambda text: re.search(r"▇▁", text))
    assert "throttled" not in screen

    seen.run("resize-window", "-x", "50", "-y", "9")
    screen = seen.until(lambda text: text.startswith("accel-run") and max(map(len, text.splitlines())) < 50)
    assert "more processes" in screen or "4242" in screen
    seen.run("resize-window", "-x", "110", "-y", "50")
    seen.run("send-keys", "C-c")
    # The earlier contents of the terminal are restored, above the summary.
    screen = seen.until(lambda text: "written to gpu_logs/" in text and "runner monitor interval_s=0.1" in text[:200])
    assert "Ctrl-C to stop" not in screen
    assert re.search(r"utilization +% +10 +", screen)


def test_no_color_and_term_dumb_are_respected(tmux: Callable[[int, int], Tmux]) -> None:
    seen = tmux(100, 24)
    seen.start(T4, "log_dir=null", TERM="dumb")
    screen = seen.until(lambda text: len(re.findall(LINE, text)) >= 2)
    assert "accel-run monitor  " not in screen
    seen.run("send-keys", "C-c")
    seen.until(lambda text: "good  GPU 0 memory" in text)


def test_the_screen_shows_when_monitoring_ends(tmux: Callable[[int, int], Tmux]) -> None:
    seen = tmux(80, 20)
    seen.start(None, "seconds=600", "log_dir=null")
    screen = seen.until(lambda text: "no NVIDIA driver" in " ".join(text.split()))
    assert re.search(r" ends in \d+ (s|min)\b", screen.splitlines()[0])
    seen.run("send-keys", "C-c")
    assert "ends in" not in seen.until(lambda text: "lowest" in text)
