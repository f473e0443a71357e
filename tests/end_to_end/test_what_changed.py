"""A resumed run detects changed data, changed code, and checkpoints of other runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from runner.durable.checkpoint import newest_valid
from tests.forkserver import CompletedCommand, ForkServer

TASK = """
import os
import numpy as np
import torch
from torch import nn
from runner import Task
from helpers.scale import SCALE
from draws import draw

def build(context):
    return Mine(context.data_path)

class Samples:
    def __init__(self, values):
        self.values = values
    def __len__(self):
        return len(self.values)
    def __getitem__(self, index):
        return torch.tensor([self.values[index], draw()]) * SCALE

class Mine(Task):
    def __init__(self, path):
        self.model = nn.Linear(2, 1)
        self.values = [float(line) for line in open(path)]
    def dataset(self, split):
        return Samples(self.values if split == "train" else self.values[:20])
    def loss(self, model, batch):
        return model(batch).square().sum(), len(batch)
"""
FILES = {
    "mine.py": TASK,
    "helpers/__init__.py": "",
    "helpers/scale.py": "from .unit import UNIT\nSCALE = 1.0 * UNIT\n",
    "helpers/unit.py": "UNIT = 1.0\n",
    "helpers/unused.py": "",
    "draws.py": "def draw():\n    return 0.0\n",
    "data.txt": "\n".join(str(0.01 * number) for number in range(101)) + "\n",
}
WORDS = "train --task mine.py data.path=data.txt run=mine device=cpu monitor=off global_batch_size=10 updates=30"
DRAWS = {
    "global": "import random\nimport numpy as np\nimport torch\n"
    "def draw():\n    return random.random() + np.random.rand() + float(torch.rand(()))\n",
    "own": "import numpy as np\ndef draw():\n    return np.random.default_rng().random()\n",
}


def write(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def record(folder: Path) -> dict[str, Any]:
    result = json.loads((folder / "outputs" / "mine" / "run.json").read_text())
    assert isinstance(result, dict)
    return result


def resumed(
    server: ForkServer, folder: Path, args: str = "resume mine updates=40 resume_allow=[updates]"
) -> CompletedCommand:
    return server.run(args, folder)


def files_of_run(folder: Path) -> Iterator[tuple[str, bytes]]:
    for name in ("config.yaml", "overrides.yaml", "command.sh", "plan.json", "environment.json", "run.json"):
        yield name, (folder / "outputs" / "mine" / name).read_bytes()


@pytest.fixture(scope="module")
def trained(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that maps a kind of random draws in the dataset to the folder of a finished run."""

    @cache
    def of_draws(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        write(folder, {**FILES, "draws.py": {"never": FILES["draws.py"], **DRAWS}[name]})
        result = server.run(WORDS, folder)
        assert result.code == 0, result.err
        return folder

    return of_draws


@pytest.fixture
def copied(trained: Callable[[str], Path], tmp_path: Path) -> Path:
    return of(trained("never"), tmp_path)


def of(trained: Path, folder: Path) -> Path:
    shutil.copytree(trained, folder, dirs_exist_ok=True)
    path = folder / "outputs" / "mine" / "run.json"
    moved = path.read_text().replace(str(trained), str(folder))
    path.write_text(moved)
    return folder


def changes(folder: Path) -> list[tuple[int, list[str], list[str]]]:
    return [(each["update"], each["files"], each["samples"]) for each in record(folder)["changes"]]


@pytest.mark.slow
@pytest.mark.parametrize("draws", ["never", *DRAWS])
def test_equal_code_and_data_are_not_reported(
    server: ForkServer, trained: Callable[[str], Path], tmp_path: Path, draws: str
) -> None:
    folder = of(trained(draws), tmp_path)
    write(folder, {"helpers/unused.py": "edited = 1"})
    result = resumed(server, folder)
    assert result.code == 0, result.err
    assert "changed" not in result.err
    assert changes(folder) == []
    assert ("sample_rng" in result.err) == (draws == "own"), "only a generator of the task causes a warning"


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("lines", [90, 102])
def test_a_dataset_of_different_length_is_rejected(server: ForkServer, copied: Path, lines: int) -> None:
    write(copied, {"data.txt": "\n".join(str(0.01 * number) for number in range(lines))})
    before = dict(files_of_run(copied))
    result = resumed(server, copied)
    assert result.code == 88, result.err
    assert "101" in result.err
    assert str(lines) in result.err
    assert dict(files_of_run(copied)) == before
    assert json.loads((copied / "outputs" / "mine" / "error.json").read_text())["exit_code"] == 88
    used = server.run("inference mine", copied)
    assert used.code != 88, "a run can be used without its data"
    write(copied, {"data.txt": FILES["data.txt"]})
    assert resumed(server, copied).code == 0


def test_changed_data_does_not_affect_a_finished_run(server: ForkServer, copied: Path) -> None:
    write(copied, {"data.txt": "1.0\n" * 90})
    before = newest_valid(copied / "outputs/mine/checkpoints")
    assert before is not None
    at_start = before.stat()
    assert resumed(server, copied, "resume mine").code == 0
    assert newest_valid(copied / "outputs/mine/checkpoints") == before
    assert before.stat().st_ino == at_start.st_ino, "the last checkpoint is not rewritten"


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("draws", ["never", "global"])
def test_changed_samples_are_reported_and_recorded(
    server: ForkServer, trained: Callable[[str], Path], tmp_path: Path, draws: str
) -> None:
    folder = of(trained(draws), tmp_path)
    lines = FILES["data.txt"].splitlines()
    lines[50] = "7.5"
    write(folder, {"data.txt": "\n".join(lines)})
    result = resumed(server, folder)
    assert result.code == 0, result.err
    assert "train sample 50" in result.err
    assert changes(folder) == [(30, [], ["train sample 50"])]
    again = resumed(server, folder, "resume mine updates=50 resume_allow=[updates]")
    assert again.code == 0, again.err
    assert changes(folder) == [(30, [], ["train sample 50"])], "the change is kept and not reported again"
    state = json.loads((folder / "outputs/mine/checkpoints/update-0000000050/state.json").read_text())
    assert [each["samples"] for each in state["changes"]] == [["train sample 50"]], "checkpoints also record the change"


def test_changed_task_code_is_reported_and_recorded(server: ForkServer, copied: Path) -> None:
    write(copied, {"helpers/unit.py": "UNIT = 2.0\n", "mine.py": TASK + "\n# edited\n"})
    result = resumed(server, copied)
    assert result.code == 0, result.err
    assert "helpers/unit.py" in result.err
    assert [files for _, files, _ in changes(copied)] == [["helpers/unit.py", "mine.py"]]
    state = json.loads((copied / "outputs/mine/checkpoints/update-0000000040/state.json").read_text())
    below = [name for name in sorted(state["code"]) if not name.startswith("..")]  # without modules of the tests
    assert below == [
        "draws.py",
        "helpers/__init__.py",
        "helpers/scale.py",
        "helpers/unit.py",
        "mine.py",
    ]
    assert len(state["changes"]) == 1, "the checkpoint also records the change"


@pytest.mark.slow
def test_code_is_recorded_at_the_start_of_the_run(server: ForkServer, tmp_path: Path) -> None:
    """The run does not use edits of a file during training."""
    edits = "from pathlib import Path\ndef draw():\n    Path(__file__).write_text('def draw():\\n    return 0.0')\n"
    edits += "    return 0.0\n"
    write(tmp_path, {**FILES, "draws.py": edits})
    result = server.run(WORDS, tmp_path)
    assert result.code == 0, result.err
    result = resumed(server, tmp_path)
    assert result.code == 0, result.err
    assert changes(tmp_path) == [(30, ["draws.py"], [])]


@pytest.mark.slow
def test_code_changes_between_phases_are_recorded(server: ForkServer, tmp_path: Path) -> None:
    phases = "PHASES = {'one': {'updates': 10}, 'two': {'updates': 10}}\n"
    write(tmp_path, {**FILES, "mine.py": TASK + phases})
    args = WORDS.replace(" updates=30", "")
    result = server.run(f"{args} phases=[one]", tmp_path)
    assert result.code == 0, result.err
    write(tmp_path, {"mine.py": TASK + phases + "# edited"})
    result = server.run(args, tmp_path)
    assert result.code == 0, result.err
    assert [(each["phase"], each["files"]) for each in record(tmp_path)["changes"]] == [("two", ["mine.py"])]


def test_checkpoints_without_code_records_can_be_resumed(server: ForkServer, copied: Path) -> None:
    """Earlier versions did not record code and data."""
    from runner.durable import checkpoint as checkpoints

    folder = copied / "outputs" / "mine" / "checkpoints"
    for path in folder.iterdir():
        shutil.rmtree(path) if path.name != "update-0000000030" else None
    actual = checkpoints.load(folder / "update-0000000030")
    state = {key: value for key, value in actual.state.items() if key not in ("data", "code", "changes")}
    facts = {
        key: value
        for key, value in actual.manifest.items()
        if key not in ("sha256", "format_version", "update", "files", "run_uid")
    }
    snapshot = checkpoints.Snapshot(30, {stem: actual.tensors(stem) for stem in actual.stems}, state, facts)
    shutil.rmtree(actual.path)
    checkpoints.save(folder, snapshot)
    run_json = copied / "outputs" / "mine" / "run.json"
    old = {key: value for key, value in record(copied).items() if key not in ("names", "changes", "uid", "adopted")}
    run_json.write_text(json.dumps(old))
    write(copied, {"mine.py": TASK + "\n# edited\n"})
    result = resumed(server, copied)
    assert result.code == 0, result.err
    assert changes(copied) == []


@pytest.mark.slow
def test_a_checkpoint_of_another_run_is_skipped(server: ForkServer, copied: Path) -> None:
    other = server.run(
        WORDS.replace("run=mine updates=30", "run=other").replace("run=mine", "run=other") + " updates=60", copied
    )
    assert other.code == 0, other.err
    mine = copied / "outputs" / "mine" / "checkpoints"
    shutil.copytree(copied / "outputs/other/checkpoints/update-0000000060", mine / "update-0000000060")
    used = server.run("inference mine", copied)
    assert "update-0000000060" in used.err, used.err
    shown = server.run("status mine", copied)
    assert any("update-0000000060" in line and "other" in line for line in shown.out.splitlines())
    result = resumed(server, copied)
    assert result.code == 0, result.err
    assert "update-0000000060" in result.err
    assert (mine / "foreign-update-0000000060-1").is_dir()
    assert (mine / "update-0000000040").is_dir()


@pytest.mark.slow
def test_a_folder_with_only_foreign_checkpoints_is_rejected(server: ForkServer, copied: Path) -> None:
    mine = copied / "outputs" / "mine" / "checkpoints"
    other = server.run(WORDS.replace("run=mine", "run=other"), copied)
    assert other.code == 0, other.err
    shutil.rmtree(mine)
    shutil.copytree(copied / "outputs" / "other" / "checkpoints", mine)
    for _ in range(2):
        assert resumed(server, copied).code == 65


def test_a_renamed_run_can_be_resumed_repeatedly(server: ForkServer, copied: Path) -> None:
    (copied / "outputs" / "mine").rename(copied / "outputs" / "renamed")
    for updates in (40, 50):
        result = resumed(server, copied, f"resume renamed updates={updates} resume_allow=[updates]")
        assert result.code == 0, result.err
        assert not list((copied / "outputs" / "renamed" / "checkpoints").glob("foreign-*"))


@pytest.fixture
def elsewhere(server: ForkServer, copied: Path) -> Path:
    """A later checkpoint of a run with the same name and settings in another output_root."""
    result = server.run(WORDS + " updates=60 output_root=others", copied)
    assert result.code == 0, result.err
    return copied / "others" / "mine" / "checkpoints" / "update-0000000060"


@pytest.mark.slow
def test_foreign_checkpoints_of_the_same_name_are_rejected(server: ForkServer, copied: Path, elsewhere: Path) -> None:
    there = copied / "outputs" / "mine" / "checkpoints" / elsewhere.name
    shutil.copytree(elsewhere, there)
    before = dict(files_of_run(copied))
    for _ in range(2):
        result = resumed(server, copied, "resume mine")
        assert result.code == 88, result.err
        assert elsewhere.name in result.err
        assert "resume_allow=[run]" in result.err
        assert dict(files_of_run(copied)) == before
        assert there.is_dir()
    used = server.run("inference mine", copied)
    assert elsewhere.name in used.err, "the checkpoint is skipped with a message"
    shown = server.run("status mine", copied)
    assert any(elsewhere.name in line and "another run" in line for line in shown.out.splitlines())
    there.rename(copied / "out-of-the-way")
    assert resumed(server, copied).code == 0


@pytest.mark.slow
def test_foreign_checkpoints_are_accepted_if_allowed(server: ForkServer, copied: Path, elsewhere: Path) -> None:
    shutil.copytree(elsewhere, copied / "outputs" / "mine" / "checkpoints" / elsewhere.name)
    own = record(copied)["uid"]
    result = resumed(server, copied, "resume mine updates=70 resume_allow=[updates,run]")
    assert result.code == 0, result.err
    assert elsewhere.name in result.err
    assert "resumes after update 60" in result.out
    actual = record(copied)
    assert actual["uid"] == own
    (adopted,) = actual["adopted"]
    assert (adopted["uid"], adopted["checkpoint"]) == (uid_of(elsewhere), elsewhere.name)
    assert uid_of(copied / "outputs/mine/checkpoints/update-0000000070") == own
    result = server.run(
        WORDS + " updates=80 resume_allow=[updates]", copied
    )  # the adopted checkpoint now belongs to this run
    assert result.code == 0, result.err
    assert record(copied)["adopted"] == [adopted]
    assert uid_of(elsewhere) not in server.run("status mine", copied).out


def uid_of(checkpoint: Path) -> str:
    result = json.loads((checkpoint / "MANIFEST.json").read_text())["run_uid"]
    assert isinstance(result, str)
    return result


@pytest.mark.slow
def test_a_moved_or_copied_run_folder_can_be_resumed(server: ForkServer, copied: Path) -> None:
    shutil.copytree(copied / "outputs", copied / "copy")
    (copied / "outputs").rename(copied / "moved")
    for root in ("copy", "moved"):
        result = server.run(f"{WORDS} updates=40 resume_allow=[updates] output_root={root}", copied)
        assert result.code == 0, result.err
        assert "resumes after update 30" in result.out


def test_checkpoints_moved_without_their_run_can_be_resumed(server: ForkServer, copied: Path) -> None:
    uid = record(copied)["uid"]
    (copied / "new" / "mine").mkdir(parents=True)
    shutil.move(copied / "outputs/mine/checkpoints", copied / "new" / "mine")
    result = server.run(f"{WORDS} updates=40 resume_allow=[updates] output_root=new", copied)
    assert result.code == 0, result.err
    assert "resumes after update 30" in result.out
    assert json.loads((copied / "new/mine/run.json").read_text())["uid"] == uid


def _flipped(uid: str) -> str:
    return uid[:3] + ("0" if uid[3] != "0" else "1") + uid[4:]


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "damage", [lambda uid: None, lambda uid: 7, lambda uid: [uid], lambda uid: {}, lambda uid: "", _flipped, str.upper]
)
def test_a_damaged_uid_is_restored_from_checkpoints(
    server: ForkServer, copied: Path, damage: Callable[[str], Any]
) -> None:
    actual = record(copied)
    path = copied / "outputs" / "mine" / "run.json"
    path.write_text(json.dumps({**actual, "uid": damage(actual["uid"]), "adopted": damage(actual["uid"])}))
    assert "valid" in server.run("status mine", copied).out
    result = resumed(server, copied)
    assert result.code == 0, result.err
    assert record(copied)["uid"] == actual["uid"]


@pytest.mark.slow
def test_starting_from_another_run_creates_a_new_run(server: ForkServer, copied: Path) -> None:
    uids = [record(copied)["uid"]]
    result = server.run(
        WORDS.replace("run=mine", "run=next") + " updates=40 resume=mine resume_allow=[updates]", copied
    )
    assert result.code == 0, result.err
    uids.append(json.loads((copied / "outputs/next/run.json").read_text())["uid"])
    assert server.run(WORDS.replace("run=mine", "run=next") + " updates=40", copied).code == 0
    result = server.run(WORDS + " resume=fresh", copied)
    assert result.code == 0, result.err
    uids.append(record(copied)["uid"])
    assert len(set(uids)) == 3
