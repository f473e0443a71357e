"""environment.json records the branch and the commit of the checkout, and no other text."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from runner.plan.environment import collect_environment
from runner.plan.inventory import take_inventory

COMMIT, OTHER = "0123456789abcdef" * 2 + "01234567", "89" * 20


@pytest.fixture
def git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The .git folder of a checkout that is the working directory."""
    folder = tmp_path / "checkout" / ".git"
    (folder / "refs" / "heads").mkdir(parents=True)
    (folder / "HEAD").write_text("ref: refs/heads/main\n")
    (folder / "refs" / "heads" / "main").write_text(f"{COMMIT}\n")
    (tmp_path / "secret").write_text("hunter2\n")
    monkeypatch.chdir(folder.parent)
    return folder


def recorded() -> Any:
    return collect_environment(take_inventory())["git"]


def test_branch_and_commit_are_recorded(git: Path) -> None:
    assert recorded() == {"branch": "refs/heads/main", "commit": COMMIT}
    (git / "packed-refs").write_text(f"# pack-refs with: peeled\n{OTHER} refs/heads/main-2\n{OTHER} refs/heads/main\n")
    assert recorded()["commit"] == COMMIT
    (git / "refs" / "heads" / "main").unlink()
    assert recorded() == {"branch": "refs/heads/main", "commit": OTHER}
    (git / "HEAD").write_text(f"{COMMIT}\n")
    assert recorded() == {"commit": COMMIT}


@pytest.mark.parametrize(
    "head",
    ["ref: ../../secret", "ref: refs/../../../secret", "ref: /etc/passwd", "ref: refs/heads/secret", "hunter2", "ref: ",
     "ref: refs/heads/link", "ref: refs/heads", "ref: refs/heads/large", f"{COMMIT}0", "ref: refs/heads/main\nhunter2"],
)  # fmt: skip
def test_outside_files_are_not_recorded(git: Path, head: str) -> None:
    (git / "HEAD").write_text(f"{head}\n")
    (git / "refs" / "heads" / "secret").write_text("hunter2\n")
    (git / "refs" / "heads" / "link").symlink_to(git.parent.parent / "secret")
    (git / "refs" / "heads" / "large").write_text(COMMIT + "\n" * 5000)
    assert recorded() is None


def test_a_linked_head_is_not_followed(git: Path) -> None:
    (git / "HEAD").unlink()
    (git / "HEAD").symlink_to(git / "refs" / "heads" / "main")
    assert recorded() is None


@pytest.mark.parametrize("inner", ["file", "empty folder", "broken symlink"])
def test_an_outer_repository_is_not_recorded(inner: str, git: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The `.git` of a worktree or submodule is a file."""
    folder = git.parent / "submodule"
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert recorded() == {"branch": "refs/heads/main", "commit": COMMIT}
    if inner == "file":
        (folder / ".git").write_text("gitdir: ../.git/modules/submodule\n")
    elif inner == "empty folder":
        (folder / ".git").mkdir()
    else:
        (folder / ".git").symlink_to("missing")
    assert recorded() is None


@pytest.mark.parametrize("name", ["HEAD", "refs/heads/main", "packed-refs"])
def test_a_named_pipe_does_not_block_the_start(git: Path, name: str) -> None:
    for path in {git / name, git / "refs" / "heads" / "main"}:
        path.unlink(missing_ok=True)
    os.mkfifo(git / name)
    assert recorded() is None
