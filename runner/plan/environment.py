"""Hardware and versions, recorded with each training run and measurement."""

from __future__ import annotations

import json
import os
import platform
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from runner.base.errors import StorageError
from runner.durable import files
from runner.plan.inventory import Inventory
from runner.version import __version__


def collect_environment(inventory: Inventory) -> dict[str, Any]:
    """Return software versions, the git state of the user's checkout, and the machine; JSON-serializable."""
    return {
        "accel-run": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "git": _git_state(Path.cwd()),
        "inventory": json.loads(inventory.to_json()),
    }


def _git_state(folder: Path) -> dict[str, str] | None:
    """Return commit and branch of the user's checkout; None in a worktree or submodule, whose .git is a file.

    Does not start git, which may be missing, and which runs commands that a repository's configuration names. The
    folder may be writable by other users, as /tmp is. Reads only regular files, and accepts only hashes and names
    under refs/, so that a symlink or a crafted HEAD cannot leak the content of another file into the run.
    """
    for parent in (folder, *folder.parents):
        root = parent / ".git"
        head = _read_text(root / "HEAD").strip()
        if not head:
            if os.path.lexists(root):
                return None  # .git is a file, or HEAD is not valid: do not use a repository in a parent folder
            continue
        if _COMMIT.fullmatch(head):
            return {"commit": head}
        branch = head.removeprefix("ref: ")
        if _BRANCH.fullmatch(branch) is None or ".." in branch:
            return None
        packed = re.search(
            rf"^([0-9a-f]+) {re.escape(branch)}$",
            _read_text(root / "packed-refs", _MAX_PACKED_REFS_BYTES),
            re.MULTILINE,
        )
        commit = _read_text(root / branch).strip() or (packed[1] if packed else "")
        return {"branch": branch, "commit": commit} if _COMMIT.fullmatch(commit) else None
    return None


def _read_text(path: Path, limit: int = 4096) -> str:
    with suppress(StorageError, UnicodeDecodeError):
        return files.read(path, at_most=limit).decode("ascii")
    return ""


_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_BRANCH = re.compile(r"refs/[\w./@+-]{1,200}", re.ASCII)
_MAX_PACKED_REFS_BYTES = 4 << 20  # bytes of packed-refs, which has a line for each branch and tag
