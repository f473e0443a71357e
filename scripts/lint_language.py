"""Find phrases that the project replaces with standard terms, and fail if a package exceeds its limit of such phrases.

    python scripts/lint_language.py            # packages above their limit, with each place: exit code 1
    python scripts/lint_language.py --all      # every place

LIMITS only go down: a change that lowers the count of a package lowers its limit.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACES = ("runner", "tasks", "scripts", "conf", "docs", "changelog.d", "README.md", "CONTRIBUTING.md")
SUFFIXES = (".py", ".md", ".yaml", ".toml", ".sh")
RAW = ("docs/results/",)  # output of earlier versions, quoted as it was

REPLACED = {
    r"go(es|ing)? on|went on": "continue, resume",
    r"anew": "again, from scratch",
    r"begun": "started",
    r"mend(s|ed|ing)?": "fix",
    r"(is|are|be) told": "is reported, is passed",
    r"of (its|their|his|one's) own": "separate",
    r"in the place of": "instead of",
    r"(holds?|held) (up|training up)": "block",
    r"in vain": "dummy, unused",
    r"for want of": "without, out of",
    r"as it was asked for|what was asked for": "as requested",
    r"stands? (in|at|beside|below|above|there)": "is in, is below",
    r"lies? (in|at|beside|below|there)": "is stored in, is located in",
    r"nobody|somebody": "no process, another process, the user",
    r"people": "users",
    r"words? of (a|the) command": "arguments",
    r"made (again|smaller|whole)": "repeated, reduced, completed",
    r"at hand": "available, this machine",
    r"tells? whether": "return whether",
    r"puts? back": "restore",
    r"given back": "released",
    r"for ever": "forever",
    r"whoever": "the process that, the user",
    r"(none|empty|nothing|false|raises?|error) where": "None if",
    r"looks? at|looked at": "checks, reads",
    r"asked for": "requested",
    r"so many": "this number of",
    r"(is|are|be|was|were) said": "is reported",
    r"passed over|put aside": "skipped, renamed",
    r"under way": "current, running",
    r"what (is|was) (there|seen|known|taken|done|left|tried)": "the existing, known, tried ...",
    r"tells": "returns, reports",
}
PATTERN = re.compile(rf"\b({'|'.join(f'({phrase})' for phrase in REPLACED)})\b", re.IGNORECASE)
LIMITS: dict[str, int] = {}


def places() -> Iterator[tuple[str, str, int, str]]:
    """Yield (package, file, line, phrase) for all tracked files."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", *PLACES], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if path.suffix not in SUFFIXES or name.startswith(RAW) or path == Path(__file__) or not path.exists():
            continue
        parts = name.split("/")
        depth = 3 if parts[1:2] == ["tools"] else 2
        package = "/".join(parts[:depth]) if parts[0] == "runner" and len(parts) > depth else parts[0]
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            for found in PATTERN.finditer(line):
                yield package, name, number, found.group(0)


def better(phrase: str) -> str:
    """Return a replacement for the phrase."""
    return next(new for old, new in REPLACED.items() if re.fullmatch(old, phrase, re.IGNORECASE))


def main() -> int:
    """Print the packages above their limits."""
    found: dict[str, list[str]] = defaultdict(list)
    for package, name, number, phrase in places():
        found[package].append(f"{name}:{number}: {phrase} -> {better(phrase)}")
    above = {package: rows for package, rows in found.items() if len(rows) > LIMITS.get(package, 0)}
    for package, rows in sorted(found.items()):
        if "--all" in sys.argv[1:] or package in above:
            print("\n".join(rows))
    for package, rows in sorted(above.items()):
        print(f"{package}: {len(rows)} phrases, at most {LIMITS.get(package, 0)} are allowed")
    print(f"lint of language: {sum(map(len, found.values()))} phrases, {sum(LIMITS.values())} allowed")
    return int(bool(above))


if __name__ == "__main__":
    sys.exit(main())
