"""Hardware and versions, as they are kept beside what was trained or measured."""

from __future__ import annotations

import json
import os
import platform
import re
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

from runner.plan.inventory import Inventory
from runner.version import __version__


def environment(inventory: Inventory) -> dict[str, Any]:
    """Return versions of what runs here, the state of the user's checkout, and the machine, JSON-able."""
    return {
        "accel-run": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "git": _git_state(Path.cwd()),
        "inventory": json.loads(inventory.to_json()),
    }


def _git_state(folder: Path) -> dict[str, str] | None:
    """Return commit and branch of the user's checkout, read from .git without starting git.

    The folder may be another user's, such as /tmp: only names below refs/ and hashes are taken from regular files, so
    that neither a link nor a HEAD that names another file brings that file's text into a run.
    """
    for parent in (folder, *folder.parents):
        root = parent / ".git"
        head = _text_of(root / "HEAD").strip()
        if not head:
            continue
        if _COMMIT.fullmatch(head):
            return {"commit": head}
        branch = head.removeprefix("ref: ")
        if _BRANCH.fullmatch(branch) is None or ".." in branch:
            return None
        packed = re.search(
            rf"^([0-9a-f]+) {re.escape(branch)}$", _text_of(root / "packed-refs", _MOST_REFS), re.MULTILINE
        )
        commit = _text_of(root / branch).strip() or (packed[1] if packed else "")
        return {"branch": branch, "commit": commit} if _COMMIT.fullmatch(commit) else None
    return None


def _text_of(path: Path, limit: int = 4096) -> str:
    """Return the text of a regular file of at most `limit` bytes, empty for anything else."""
    with suppress(OSError, UnicodeDecodeError):
        # O_NONBLOCK: opening a named pipe would wait for a writer. A folder on the way may still be a link.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if stat.S_ISREG(status.st_mode) and status.st_size <= limit:
                return os.read(descriptor, limit).decode("ascii")
        finally:
            os.close(descriptor)
    return ""


_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_BRANCH = re.compile(r"refs/[\w./@+-]{1,200}", re.ASCII)
_MOST_REFS = 4 << 20  # bytes of packed-refs, which has a line for each branch and tag
