"""Check commit messages: a subject of at most 72 characters, and a body that gives the reason.

    python scripts/lint_commits.py                 # commits after the one that added this script
    python scripts/lint_commits.py origin/main..   # a range of git log

A commit that changes only tests or documentation needs no body. Exit 0: nothing found. 1: findings.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAX_SUBJECT = 72
WITHOUT_REASON = ("tests/", "docs/", "changelog.d/", "README.md", "CONTRIBUTING.md", "CHANGELOG.md")


def problems_of(message: str, files: Sequence[str]) -> Iterator[str]:
    """Yield the problems in the message of a commit that changes these files."""
    lines = [line.rstrip() for line in message.splitlines() if not line.startswith("#")]
    while lines and not lines[0]:
        lines.pop(0)
    subject = lines[0] if lines else ""
    if not subject:
        yield "has no subject"
        return
    if len(subject) > MAX_SUBJECT:
        yield f"subject has {len(subject)} characters; at most {MAX_SUBJECT} are allowed"
    if subject.endswith("."):
        yield "subject ends with a period"
    if len(lines) > 1 and lines[1]:
        yield "the second line is not empty"
    needs_reason = any(not file.startswith(WITHOUT_REASON) for file in files)
    if needs_reason and not any(lines[1:]):
        yield "has no body; state why, what behaves differently, and how it was checked"


def main(words: Sequence[str]) -> int:
    """Print the findings and return the exit code."""
    found = list(_findings(words[0] if words else _default_range()))
    print("\n".join([*found, f"lint of commits: {len(found)} findings"]))
    return 1 if found else 0


def _findings(commits: str) -> Iterator[str]:
    for commit in _git("rev-list", "--no-merges", commits).split():
        files = _git("diff-tree", "--no-commit-id", "--name-only", "-r", "--root", commit).splitlines()
        for problem in problems_of(_git("log", "-1", "--format=%B", commit), files):
            yield f"{commit[:10]}: {problem}"


def _default_range() -> str:
    """Return the commits after the one that added this script; none in a shallow clone that lacks it."""
    added = _git("log", "--diff-filter=A", "--format=%H", "--", "scripts/lint_commits.py").split()
    return f"{added[-1]}..HEAD" if added else "HEAD..HEAD"


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
