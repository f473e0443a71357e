"""Hardware and versions, as they are kept beside what was trained or measured."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

from runner import __version__
from runner.plan.inventory import Inventory


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
    """Return commit and branch of the user's checkout, read from .git without starting git."""
    for parent in (folder, *folder.parents):
        head = parent / ".git" / "HEAD"
        try:
            text = head.read_text().strip()
            if not text.startswith("ref: "):
                return {"commit": text}
            reference = text[5:]
            loose = parent / ".git" / reference
            if loose.is_file():
                return {"branch": reference, "commit": loose.read_text().strip()}
            packed = (parent / ".git" / "packed-refs").read_text().splitlines()
            return {"branch": reference, "commit": next(line.split()[0] for line in packed if line.endswith(reference))}
        except (OSError, StopIteration):
            if head.exists():
                return None
    return None
