"""A run resumes from its mirror on an empty machine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.cli import main
from runner.durable.checkpoint import checkpoint_path, load, newest_first
from tests.durable.faulty_storage import FaultyStorage
from tests.faults import cloud_servers, s3_server
from tests.faults.cloud_servers import CloudServer

TASK = Path(__file__).with_name("task_with_everything.py")
WORDS = ["train", "--task", str(TASK), "run=mine", "device=cpu", "monitor=off", "updates=6", "checkpoint.every=2"]


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with one folder per machine. The working directory is the folder of machine a."""
    FaultyStorage.reset()
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    yield tmp_path
    FaultyStorage.reset()


def tensors(folder: Path, update: int) -> dict[str, torch.Tensor]:
    result = load(checkpoint_path(folder / "outputs" / "mine" / "checkpoints", update))
    return {f"{stem}/{name}": tensor for stem in result.stems for name, tensor in result.tensors(stem).items()}


def rows(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "outputs" / "mine" / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if not key.startswith("perf/")} for line in lines]


def uid(folder: Path) -> str:
    return str(json.loads((folder / "outputs" / "mine" / "run.json").read_text())["uid"])


def files_with(folder: Path, *secrets: str) -> Iterator[Path]:
    """Yield the files that contain one of the secrets."""
    for file in folder.rglob("*"):
        if file.is_file() and any(secret.encode() in file.read_bytes() for secret in secrets):
            yield file


def copies(folder: Path) -> list[Path]:
    return sorted(folder.glob("mirror/mine/*/update-*"))


def test_resume_from_the_mirror_is_bitwise_equal(
    machines: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = [*WORDS, f"checkpoint.mirror=file://{machines}/mirror"]
    assert main(args) == 0
    local = {path.name for path in newest_first(machines / "a" / "outputs" / "mine" / "checkpoints")}
    assert {path.name.rpartition("-")[0] for path in copies(machines)} == local
    capsys.readouterr()
    assert main(["status", "mine"]) == 0
    assert f"file://{machines}/mirror/mine" in capsys.readouterr().out
    for path in copies(machines):
        if "update-0000000006" in path.name:  # so that the run seems to have been killed before the last update
            shutil.rmtree(path)
    newest = max(path.name for path in copies(machines))
    (machines / "b").mkdir()
    monkeypatch.chdir(machines / "b")
    assert main(args) == 0
    assert newest.rpartition("-")[0] in capsys.readouterr().out
    mine, theirs = tensors(machines / "b", 6), tensors(machines / "a", 6)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert rows(machines / "b") == rows(machines / "a")
    assert uid(machines / "a") == uid(machines / "b")
    monkeypatch.chdir(machines)
    assert main([*args, "resume=fresh", "updates=2"]) == 0  # a new run is mirrored beside the old one
    assert len(list(machines.glob("mirror/mine/*/"))) == 2


@pytest.mark.slow
def test_training_continues_while_the_mirror_fails(machines: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = [*WORDS, "checkpoint.mirror=faulty://bucket", "checkpoint.mirror_wait_s=0"]

    def cut(operation: str, path: str) -> None:
        if path.endswith("model.safetensors"):
            raise ConnectionResetError("cut")

    FaultyStorage.fault = staticmethod(cut)
    assert main(args) == 0
    assert tensors(machines / "a", 6)
    FaultyStorage.fault = staticmethod(lambda *_: None)
    assert main([*args, "checkpoint.mirror_wait_s=60"]) == 0  # training has finished; only the copy is missing
    assert any("update-0000000006" in path and path.endswith("MANIFEST.json") for path in FaultyStorage.store)
    assert "mirror" in capsys.readouterr().out


def test_a_new_run_needs_a_usable_mirror(machines: Path) -> None:
    def denied(operation: str, path: str) -> None:
        raise PermissionError("Access Denied")

    FaultyStorage.fault = staticmethod(denied)
    assert main([*WORDS, "checkpoint.mirror=faulty://bucket"]) == 77
    assert not list(machines.rglob("*.safetensors"))


# ---------------------------------------------------------------- servers of object storage


@pytest.fixture(scope="module")
def storage_threads() -> None:
    s3_server.start_storage_threads()


def _param(scheme: str) -> Any:
    reason = cloud_servers.reason_to_skip(scheme)
    # A mark skips the test before its fixtures start threads, after which ranks cannot be forked.
    return pytest.param(scheme, marks=pytest.mark.skipif(bool(reason), reason=reason or "-"))


@pytest.fixture(params=[_param(scheme) for scheme in ("s3", "gs", "abfs")])
def cloud(
    request: pytest.FixtureRequest, storage_threads: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[CloudServer]:
    with cloud_servers.start_server(request.param, monkeypatch) as result:
        yield result


@pytest.mark.filterwarnings("ignore")
def test_resume_from_object_storage_writes_no_credentials(
    cloud: CloudServer, machines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = [*WORDS, f"checkpoint.mirror={cloud.url()}"]
    assert main(args) == 0
    (machines / "b").mkdir()
    monkeypatch.chdir(machines / "b")
    assert main(args) == 0
    assert all(
        torch.equal(tensor, tensors(machines / "a", 6)[name]) for name, tensor in tensors(machines / "b", 6).items()
    )
    assert rows(machines / "b") == rows(machines / "a")
    assert uid(machines / "b") == uid(machines / "a"), "the run was downloaded, not trained again"
    assert not [*files_with(machines, *cloud.secrets)]


@pytest.mark.filterwarnings("ignore")
def test_a_missing_bucket_is_reported_before_training(
    cloud: CloudServer, machines: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*WORDS, f"checkpoint.mirror={cloud.url('nosuchbucket')}"]) in (74, 77)
    assert not list(machines.rglob("*.safetensors"))
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(bool(cloud_servers.reason_to_skip("abfs")), reason=cloud_servers.reason_to_skip("abfs") or "-")
def test_a_wrong_azure_key_is_reported_before_training(
    storage_threads: None, machines: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    wrong = cloud_servers.ACCOUNT_KEY[::-1].lstrip("=") + "=="
    with cloud_servers.start_server("abfs", monkeypatch) as server:
        cloud_servers.replace_azure_key(monkeypatch, wrong)
        assert main([*WORDS, f"checkpoint.mirror={server.url()}"]) == 77
    assert not list(machines.rglob("*.safetensors"))
    assert wrong not in capfd.readouterr().err
    assert not [*files_with(machines, wrong)]


@pytest.mark.skipif(bool(cloud_servers.reason_to_skip("s3")), reason=cloud_servers.reason_to_skip("s3") or "-")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_throttled_requests_are_retried(storage_threads: None, machines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mirror is complete although every fourth request is throttled."""
    count = [0]

    def fourth(method: str, path: str) -> bool:
        count[0] += 1
        return count[0] % 4 == 0

    with s3_server.with_bucket(monkeypatch) as server:
        server.throttles = fourth
        args = [*WORDS, "checkpoint.mirror=s3://bucket/runs"]
        assert main(args) == 0
        assert server.num_throttled > 0
        (machines / "b").mkdir()
        monkeypatch.chdir(machines / "b")
        assert main(args) == 0
        assert all(
            torch.equal(tensor, tensors(machines / "a", 6)[name]) for name, tensor in tensors(machines / "b", 6).items()
        )
        assert rows(machines / "b") == rows(machines / "a")
        assert uid(machines / "b") == uid(machines / "a"), "the run was downloaded, not trained again"
