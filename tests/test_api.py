"""The Python API: same results as the command line, and no side effects in the calling process."""

from __future__ import annotations

import gc
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

import runner
from runner import Run, evaluate, open_run, train
from runner.base.errors import AccelRunError, ConfigError, InputMissing, TaskFault
from runner.durable.checkpoint import checkpoint_path, load
from runner.host import command_process
from runner.host.parent_death import child_command
from tests.forked_commands import forked_commands
from tests.forkserver import ForkServer
from tests.waiting import wait_until

ROOT = Path(__file__).parents[1]
TASK = ROOT / "tests" / "engine" / "task_of_averages.py"
WORDS = ("--task", str(TASK), "updates=6", "device=cpu", "monitor=off", "backend.threads=1")
SETTINGS: dict[str, Any] = {"optimizer__lr": 0.02, "evaluate__every": 2, "checkpoint__best": "val/loss", "seed": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("api")


@pytest.fixture(scope="module")
def run(folder: Path, server: ForkServer) -> Run:
    with forked_commands(server):
        return train(*WORDS, run="first", output_root=folder, **SETTINGS)


@pytest.fixture(autouse=True)
def _forked_commands(server: ForkServer) -> Iterator[None]:
    with forked_commands(server):
        yield


def handlers() -> list[Any]:
    return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)]


def files_of(directory: Path) -> set[str]:
    """Return the files that training wrote, without the evaluations of the shared run by other tests."""
    files = {file.relative_to(directory) for file in directory.rglob("*")}
    return {str(file) for file in files if file.parts[0] != "evaluations"}


def test_train_equals_the_command_bit_for_bit(run: Run, folder: Path, server: ForkServer) -> None:
    typed = ("run=typed", f"output_root={folder}", "optimizer.lr=0.02", "evaluate.every=2", "seed=3")
    assert server.run(["train", *WORDS, *typed], folder).code == 0
    bits = [
        (checkpoint_path(folder / name / "checkpoints", 6) / f"{stem}.safetensors").read_bytes()
        for stem in ("model", "optimizer")
        for name in ("first", "typed")
    ]
    assert bits[0] == bits[1]
    assert bits[2] == bits[3]
    assert files_of(folder / "first") == files_of(folder / "typed")


def test_run_properties_match_the_files(run: Run, folder: Path) -> None:
    assert run.state == "finished"
    losses = {row["update"]: row["val/loss"] for row in run.history() if "val/loss" in row}
    assert list(losses) == [2, 4, 6]
    assert run.metrics["val/loss"] == losses[6]
    before = torch.get_rng_state()
    model = run.model("last")
    assert torch.equal(torch.get_rng_state(), before)
    assert not model.training
    for name, tensor in load(checkpoint_path(folder / "first" / "checkpoints", 6)).tensors("model").items():
        assert torch.equal(model.state_dict()[name], tensor)
    (axes,) = run.plot("val/loss").axes
    assert list(axes.lines[0].get_ydata()) == list(losses.values())
    with pytest.raises(ConfigError):
        run.plot("val/nothing")
    with pytest.raises(InputMissing):
        run.model(5)


@pytest.mark.slow
def test_loading_a_model_has_no_side_effects(run: Run, folder: Path) -> None:
    """Random states and the environment stay the same. A new process, because imported modules may draw random
    numbers.
    """
    program = (
        "import os, random; from runner import open_run\n"
        "def state(): return random.getstate(), dict(os.environ)\n"
        f"before = state(); open_run({str(run.path)!r}, task={str(TASK)!r}).model(); assert state() == before"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_settings_of_a_run_are_a_plain_nested_dictionary(run: Run, tmp_path: Path) -> None:
    settings = run.settings
    assert (settings["seed"], settings["evaluate"]["every"], settings["optimizer"]["lr"]) == (3, 2, 0.02)
    assert settings["optimizer"]["option"] == "adamw"
    assert json.loads(json.dumps(settings)) == settings
    settings.clear()
    assert run.settings["seed"] == 3
    (tmp_path / "waiting").mkdir()
    (tmp_path / "waiting" / "run.json").write_text('{"state": "submitted"}\n')
    with pytest.raises(InputMissing):
        _ = open_run("waiting", output_root=tmp_path).settings


def test_train_requires_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for settings in ({}, {"updates": 1}):
        with pytest.raises(ConfigError) as caught:
            train(**settings)
        assert [problem.where for problem in caught.value.problems] == ["task"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("key", ["optimizer", "task"])
def test_the_keys_of_an_option_are_not_passed_as_a_dictionary(key: str, server: ForkServer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        train("updates=1", **{key: {"lr": 0.1}})
    assert f"{key}__lr=0.1" in caught.value.problems[0].fix
    typed = server.run(["plan", f"{key}={{lr:0.1}}"], tmp_path)
    assert f"{key}.lr=0.1" in typed.err


def test_evaluate_returns_the_metrics_of_the_run(run: Run, folder: Path) -> None:
    result = evaluate("first", f"output_root={folder}", split="val", checkpoint="last")
    assert result == run.metrics


def test_a_run_is_opened_by_name_and_by_directory(run: Run, folder: Path) -> None:
    assert open_run("first", output_root=folder).metrics == run.metrics
    assert open_run(str(folder / "first")).name == "first"
    with pytest.raises(InputMissing):
        open_run("nothing", output_root=folder)


def test_functions_raise_the_errors_of_the_command(folder: Path, server: ForkServer) -> None:
    for args, kind in ((["no_such_key=1"], ConfigError), (["resume=nowhere", "run=new"], InputMissing)):
        typed = server.run(["train", *WORDS, f"output_root={folder}", *args], folder)
        with pytest.raises(kind) as caught:
            train(*WORDS, *args, output_root=folder)
        assert caught.value.exit_code == typed.code
        assert all(problem.what in typed.err for problem in caught.value.problems)


def test_a_task_error_names_file_and_line(tmp_path: Path) -> None:
    text = TASK.read_text().replace("        x, y = batch\n", "        raise ValueError('broken')\n")
    (tmp_path / "broken.py").write_text(text)
    with pytest.raises(TaskFault) as caught:
        train("--task", str(tmp_path / "broken.py"), *WORDS[2:], run="broken", output_root=tmp_path)
    assert "broken.py" in str(caught.value)
    with pytest.warns(RuntimeWarning, match=r"run broken .*ValueError: broken") as warned:
        assert open_run("broken", output_root=tmp_path).state == "failed"
    assert [warning.filename for warning in warned] == [__file__]


def test_open_run_warns_about_skipped_newer_runs(tmp_path: Path) -> None:
    for name, files in (("first", ("run.json", "metrics.jsonl")), ("broken", ("run.json",))):
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).write_text('{"update": 1, "state": "failed"}\n')
    os.utime(tmp_path / "first" / "run.json", (1, 1))
    os.utime(tmp_path / "first" / "metrics.jsonl", (1, 1))
    with pytest.warns(RuntimeWarning, match="broken"):
        assert open_run(output_root=tmp_path).name == "first"


def test_open_run_does_not_warn_about_an_unfinished_run(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    (tmp_path / "waiting").mkdir()
    (tmp_path / "waiting" / "run.json").write_text('{"state": "submitted"}\n')
    assert open_run("waiting", output_root=tmp_path).state == "submitted"
    assert not recwarn.list


def global_state() -> list[Any]:
    mask = os.umask(0o22)
    os.umask(mask)
    return [handlers(), threading.active_count(), torch.are_deterministic_algorithms_enabled(), sys.stdout, mask]


@pytest.mark.slow
def test_the_calling_process_stays_unchanged(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = global_state()
    train(*WORDS, "backend=deterministic", run="quiet", output_root=tmp_path)
    with pytest.raises(AccelRunError):
        train(*WORDS, "weights=nowhere", run="never", output_root=tmp_path)
    assert global_state() == before
    out, err = capfd.readouterr()
    assert "quiet" in out
    assert not err


def test_redirected_output_is_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without flushing, the progress of a run would appear in a file in blocks of 8 KB.

    The command runs in a new interpreter, as it does for users.
    """
    monkeypatch.setattr(command_process, "subprocess", subprocess)
    with (tmp_path / "log").open("w") as log:
        monkeypatch.setattr(sys, "stdout", log)
        command_process.run_command(["--help"])
        assert (tmp_path / "log").read_text().strip()


def test_stdout_needs_only_a_write_method(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=written.append))
    assert command_process.run_command(["--help"]).code == 0
    assert "".join(written)


def test_train_without_output_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert command_process.run_command(["--help"]).code == 0


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Handle SIGINT, which a background job of a shell ignores."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_keyboard_interrupt_saves_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interrupt is also raised. The run may ignore SIGINT, as in a background job of a shell script."""

    def child_that_ignores_sigint(*args: Any) -> list[str]:
        python, *flags, program, parent = (command := child_command(*args))[:5]
        ignore = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
        return [python, *flags, ignore + program, parent, *command[5:]]

    monkeypatch.setattr(command_process, "child_command", child_that_ignores_sigint)
    args = (*WORDS, "updates=1000000", "evaluate.every=0", "log_every=1", "run=stopped", f"output_root={tmp_path}")
    args = tuple(word for word in args if word != "updates=6")
    metrics = tmp_path / "stopped" / "metrics.jsonl"

    def interrupt() -> None:
        wait_until(lambda: metrics.exists() and metrics.stat().st_size > 0)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        train(*args)
    thread.join()
    assert open_run("stopped", output_root=tmp_path).state == "preempted"


@pytest.mark.slow
def test_optuna_study_trains_one_run_per_trial(tmp_path: Path, server: ForkServer) -> None:
    optuna = pytest.importorskip("optuna", reason="optuna is not installed")
    optuna.logging.set_verbosity(optuna.logging.ERROR)

    def objective(trial: Any) -> float:
        rate = trial.suggest_float("lr", 1e-3, 1e-1, log=True)
        run = train(*WORDS, optimizer__lr=rate, run=f"trial-{trial.number}", output_root=tmp_path)
        return run.metrics["val/loss"]

    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    study.optimize(objective, n_trials=2)
    values = [trial.value for trial in study.trials]
    assert values == [open_run(f"trial-{number}", output_root=tmp_path).metrics["val/loss"] for number in (0, 1)]
    assert len(set(values)) == 2
    rate = f"optimizer.lr={study.trials[0].params['lr']!r}"
    assert server.run(["train", *WORDS, rate, "run=typed", f"output_root={tmp_path}"], tmp_path).code == 0
    one, other = (checkpoint_path(tmp_path / name / "checkpoints", 6) for name in ("trial-0", "typed"))
    assert (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    assert files_of(tmp_path / "trial-0") == files_of(tmp_path / "typed")


RAY_TUNE = """
import json, sys
import ray
from ray import tune

words, settings, folder = json.loads(sys.argv[1])


def objective(config):
    from runner import train

    run = train(*words, run="in-ray", output_root=folder, **{**settings, **config})
    return {"loss": run.metrics["val/loss"]}


ray.init(address="local", num_cpus=1, include_dashboard=False)
place = tune.RunConfig(storage_path=f"{folder}/ray", verbose=0)
found = tune.Tuner(objective, param_space={"optimizer__lr": tune.grid_search([0.02])}, run_config=place).fit()
assert not found.errors, found.errors
print(json.dumps([each.metrics["loss"] for each in found]))
"""


@pytest.mark.long
def test_ray_tune_trial_equals_a_run_bit_for_bit(run: Run, folder: Path) -> None:
    pytest.importorskip("ray.tune", reason="the package ray is not installed", exc_type=ImportError)
    given = json.dumps([WORDS, SETTINGS, str(folder)])
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(folder), "RAY_AUTH_MODE": "disabled"}
    result = subprocess.run(
        [sys.executable, "-c", RAY_TUNE, given], capture_output=True, text=True, env=env, check=False
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1]) == [run.metrics["val/loss"]]
    first, other = (
        checkpoint_path(folder / name / "checkpoints", 6) / "model.safetensors" for name in ("first", "in-ray")
    )
    assert first.read_bytes() == other.read_bytes()
    assert files_of(folder / "first") == files_of(folder / "in-ray")


def test_importing_the_functions_loads_neither_torch_nor_hydra() -> None:
    program = "import sys; from runner import train, evaluate, open_run; print({'torch', 'hydra'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


def test_keywords_become_equivalent_overrides(tmp_path: Path) -> None:
    from runner.api import build_argv
    from runner.config.configuration import compose
    from runner.config.request import Request

    given: dict[str, Any] = {
        "updates": 7, "optimizer__lr": 3e-4, "epochs": None, "weights__strict": False, "weights__only": ["a.b", "c"],
        "weights__rename": {"enc.0": "backbone"}, "output_root": tmp_path / "a b", "scheduler": "constant",
    }  # fmt: skip
    settings = compose(Request(tuple(build_argv((), given)))).settings
    assert (settings.updates, settings.epochs, settings.output_root) == (7, None, str(tmp_path / "a b"))
    assert (settings.weights.strict, settings.weights.only, settings.weights.rename) == (
        False, ["a.b", "c"], {"enc.0": "backbone"},
    )  # fmt: skip


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("kind", [str, Path])
def test_task_accepts_a_file_path(kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(TASK, tmp_path / "mine.py")
    monkeypatch.chdir(tmp_path)
    run = train(*WORDS[3:], "updates=1", task=kind("mine.py"), run="a")
    assert run.state == "finished"
    elsewhere = run.path.rename(tmp_path / "elsewhere")
    assert "val/loss" in evaluate(str(elsewhere), task=kind("mine.py"))
    assert open_run(str(elsewhere), task=kind("mine.py")).model() is not None


def test_a_task_file_may_be_edited_between_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "edited.py"
    shutil.copy(TASK, file)
    run = train(*WORDS[3:], "updates=1", task=file, run="a")
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace("def build()", "def build(*, added: int = 1)"), encoding="utf-8")
    assert train(*WORDS[3:], "updates=1", task=file, run="b", task__added=2).state == "finished"
    file.write_text(text, encoding="utf-8")
    assert run.model() is not None
    assert open_run("a").model() is not None


def test_the_package_exports_the_functions() -> None:
    assert {"train", "evaluate", "open_run"} <= set(runner.__all__) <= set(dir(runner))


@pytest.mark.slow
def test_a_notebook_shows_progress_and_plots_inline(tmp_path: Path, server: ForkServer) -> None:
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    from nbformat.v4 import new_code_cell, new_notebook

    cells = [
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\nfrom runner import open_run, train",
        f"run = train(*{WORDS!r}, run='cell', evaluate__every=2)",
        "run.plot()",
        "sorted(run.metrics)",
        "train('no_such_key=1')",
    ]
    book = new_notebook(cells=[new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(
        book, timeout=300, allow_errors=True, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    trained, plotted, metrics, refused = (cell.outputs for cell in book.cells[1:])
    assert "cell" in "".join(output.text for output in trained if output.output_type == "stream")
    assert any("image/png" in output.get("data", {}) for output in plotted)
    assert metrics[0].data["text/plain"] == "['val/loss']"
    assert refused[-1].ename == "ConfigError"
    assert server.run(["train", *WORDS, "run=typed", "evaluate.every=2"], tmp_path).code == 0
    one, other = (checkpoint_path(tmp_path / "outputs" / name / "checkpoints", 6) for name in ("cell", "typed"))
    assert (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()


def reply_to(client: Any, request: str) -> dict[str, Any]:
    """Return the reply of a Jupyter kernel to a request."""
    while (message := client.get_shell_msg(timeout=300))["parent_header"]["msg_id"] != request:
        pass
    content: dict[str, Any] = message["content"]
    return content


@pytest.mark.slow
def test_interrupted_notebook_cell_saves_a_resumable_run(tmp_path: Path) -> None:
    jupyter_client = pytest.importorskip("jupyter_client", reason="jupyter_client is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    words = tuple(word for word in WORDS if not word.startswith("updates="))
    call = f"train(*{words!r}, run='cell', evaluate__every=0, log_every=1, global_batch_size=8, updates=UPDATES)"
    folder = tmp_path / "outputs" / "cell"
    manager, client = jupyter_client.manager.start_new_kernel(cwd=str(tmp_path))
    try:
        start = f"import sys; sys.path.insert(0, {str(ROOT)!r})\nfrom runner import train\n"
        running = client.execute(start + call.replace("UPDATES", "10**6"))
        wait_until(lambda: (folder / "metrics.jsonl").exists() and (folder / "metrics.jsonl").stat().st_size > 0)
        manager.interrupt_kernel()
        assert reply_to(client, running)["ename"] == "KeyboardInterrupt"
        assert open_run("cell", output_root=tmp_path / "outputs").state == "preempted"
        saved = [path.name for path in (folder / "checkpoints").glob("update-*")]
        assert saved
        end = int(max(saved).partition("-")[2]) + 3
        resumed = client.execute(call.replace("UPDATES", f"{end}, resume_allow=['updates']"))
        content = reply_to(client, resumed)
        assert content["status"] == "ok", content
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    assert open_run("cell", output_root=tmp_path / "outputs").state == "finished"


def test_metrics_come_from_the_last_evaluation(run: Run, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "first", tmp_path / "first")
    rows = [
        {"update": 2, "val/loss": 3.0, "val/accuracy": 0.5},
        {"update": 4, "val/loss": 2.0},
        {"update": 5, "loss": 1.0},
    ]
    (tmp_path / "first" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert open_run("first", output_root=tmp_path).metrics == {"val/loss": 2.0}


POINTS = """
import torch
from torch import nn
from runner import Task


def build() -> Task:
    return Points()


class Points(Task):
    def __init__(self):
        torch.set_default_dtype(torch.float64)
        self.model = nn.Linear(3, 1)

    def dataset(self, split):
        return torch.utils.data.TensorDataset(torch.ones(8, 3))

    def loss(self, model, batch):
        return model(batch[0]).square().sum(), len(batch[0])
"""


def test_loading_a_model_restores_process_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "points.py").write_text(POINTS)
    run = train("--task", Path("points.py"), "backend.threads=1", updates=1, device="cpu", monitor="off", run="r")
    gc.disable()
    try:
        for _ in range(2):
            assert next(run.model().parameters()).dtype == torch.float64
        assert not gc.isenabled()
    finally:
        gc.enable()
    assert torch.get_default_dtype() == torch.float32
    folders = [entry for entry in sys.path if entry.startswith(str(tmp_path))]
    assert len(folders) == len(set(folders))


def test_loading_a_model_keeps_imported_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing a module again would create new classes, of which the program's existing objects are not instances."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "points_to_keep.py").write_text(POINTS)
    (tmp_path / "tools_of_program.py").write_text("class Result: pass\n")
    run = train("--task", Path("points_to_keep.py"), updates=1, device="cpu", monitor="off", run="r")
    run.model()
    tools = importlib.import_module("tools_of_program")
    run.model()
    assert sys.modules.get("tools_of_program") is tools


def test_a_run_survives_a_change_of_working_directory(
    run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    opened = open_run("first", output_root=folder.name)
    monkeypatch.chdir(tmp_path)
    for other in (run, opened):
        assert other.state == "finished"
        assert torch.equal(next(other.model().parameters()), next(run.model().parameters()))


def test_open_run_accepts_a_path(run: Run, folder: Path) -> None:
    assert open_run(folder / "first").path == run.path


def test_train_rejects_invalid_positional_arguments() -> None:
    for wrong in ({"updates": 3}, 3, None):
        with pytest.raises(ConfigError, match="updates=200"):
            train(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [{1}, object(), Run, np.longdouble(0.5)])
def test_invalid_keyword_values_are_rejected(value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        train(max_grad_norm=value)
    assert [problem.where for problem in caught.value.problems] == ["max_grad_norm"]


def test_train_rejects_a_run_as_a_positional_argument(run: Run) -> None:
    with pytest.raises(ConfigError):
        train(run, updates=4)


def test_a_task_file_may_open_a_run_on_import(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "opens_its_run.py"
    opened = f"from runner.api import open_run\nTEACHER = open_run({str(run.path)!r}, task=__file__)\n"
    file.write_text(f"{TASK.read_text(encoding='utf-8')}\n{opened}")
    assert train(*WORDS[2:], "updates=1", task=file, output_root=tmp_path).state == "finished"


def test_a_task_object_is_rejected() -> None:
    for task in (runner.Task(), runner.Task):
        with pytest.raises(ConfigError) as caught:
            train(task=task)
        assert [problem.where for problem in caught.value.problems] == ["task"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        *((text, text) for text in ("null", "True", "nan", "-inf", "a b", "007")),
        (["null", "x"], ["null", "x"]), (np.array([19, 13]), [19, 13]),
        (OmegaConf.create([1, 2]), [1, 2]), (torch.tensor(3), 3), (np.bool_(True), True),
    ],
)  # fmt: skip
def test_keywords_keep_strings_and_convert_arrays(given: Any, expected: object) -> None:
    from runner.api import build_argv
    from runner.config.override_grammar import parse_override

    (argument,) = build_argv((), {"key": given})
    assert parse_override(argument).value() == expected


def test_functions_accept_a_run_instead_of_its_name(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert evaluate(run, split="val", checkpoint="last") == run.metrics
    assert open_run(run).path == run.path
    tuned = train(*WORDS, "updates=1", output_root=tmp_path, weights=run, optimizer__lr=1e-30)
    assert torch.allclose(next(tuned.model().parameters()), next(run.model().parameters()))
    last = open_run(output_root=".")
    train(*WORDS, "updates=1", output_root=tmp_path)
    assert open_run(last).path == tuned.path


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("call", ["train(task=__file__)", "evaluate('last')"], ids=["train", "evaluate"])
def test_a_task_file_that_trains_on_import_is_rejected(call: str, tmp_path: Path) -> None:
    file = tmp_path / "trains_itself.py"
    again = "import os\nassert not os.environ.get('AGAIN')\nos.environ['AGAIN'] = '1'\n"
    calls = f"from runner.api import evaluate, train\n{call}\n"
    file.write_text(f"{TASK.read_text(encoding='utf-8')}\n{again}{calls}")
    with pytest.raises(ConfigError) as caught:
        train(task=file, output_root=tmp_path)
    assert [problem.where for problem in caught.value.problems] == [str(file)]
