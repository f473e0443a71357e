"""Types of settings: the values allowed in YAML files and on the command line.

The annotations of an option's keyword-only parameters are its schema, and use the types defined here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

__all__ = [
    "Annotated",
    "Any",
    "AtLeastOne",
    "Auto",
    "Count",
    "DeviceName",
    "Every",
    "Exponent",
    "Factor",
    "Fraction",
    "Interval",
    "Iterations",
    "Literal",
    "LocalPath",
    "Mapping",
    "Matches",
    "MirrorURL",
    "NonNegative",
    "NonPositive",
    "Part",
    "Positive",
    "PositiveFraction",
    "PositiveInt",
    "Range",
    "RunsFolder",
    "Seed",
    "Threads",
]


@dataclass(frozen=True)
class Range:
    """The range of a number, with its description."""

    description: str
    low: float = float("-inf")
    high: float = float("inf")
    low_allowed: bool = True
    high_allowed: bool = True

    def allows(self, value: float) -> bool:
        """Return whether `value` is within the range."""
        above = value >= self.low if self.low_allowed else value > self.low
        below = value <= self.high if self.high_allowed else value < self.high
        return above and below


@dataclass(frozen=True)
class Matches:
    """A pattern for strings, with its description."""

    description: str
    pattern: str

    def allows(self, value: str) -> bool:
        """Return whether the whole of `value` matches."""
        return re.fullmatch(self.pattern, value) is not None


Auto = Literal["auto"]
Positive = Annotated[float, Range("a number above 0", low=0.0, low_allowed=False)]
NonNegative = Annotated[float, Range("a number of at least 0", low=0.0)]
Fraction = Annotated[float, Range("a number between 0 and 1", low=0.0, high=1.0)]
PositiveFraction = Annotated[float, Range("a number above 0 and at most 1", low=0.0, high=1.0, low_allowed=False)]
Part = Annotated[float, Range("a number above 0 and below 1", 0.0, 1.0, low_allowed=False, high_allowed=False)]
Factor = Annotated[float, Range("a number of at least 0 and below 1", low=0.0, high=1.0, high_allowed=False)]
NonPositive = Annotated[float, Range("a number of at most 0", high=0.0)]
Exponent = Annotated[float, Range("a number from 0 to 10", low=0.0, high=10.0)]  # larger powers overflow
AtLeastOne = Annotated[float, Range("a number of at least 1", low=1.0)]
Count = Annotated[int, Range("an integer of at least 0", low=0)]
Seed = Annotated[int, Range("an integer from 0 to 2**64 - 1", low=0, high=2**64, high_allowed=False)]
Interval = Annotated[float, Range("a number of seconds from 0.01 to 3600", low=0.01, high=3600.0)]
PositiveInt = Annotated[int, Range("an integer of at least 1", low=1)]
Iterations = Annotated[int, Range("an integer from 1 to 99", low=1, high=99)]
MAX_THREADS = 1024  # with several thousand, systems refuse to create threads, and torch crashes
Threads = Annotated[int, Range(f"an integer from 1 to {MAX_THREADS}", low=1, high=MAX_THREADS)]
DeviceName = Annotated[str, Matches("auto, cpu, cuda, cuda:N, mps or xpu", r"auto|cpu|(cuda|xpu)(:\d+)?|mps")]
# s3://bucket/x is a valid local path, in folder `s3:`, but never intended: files are read and written locally only.
URL = r"[A-Za-z][A-Za-z0-9+.-]*://"
# A URL whose two slashes pathlib or a shell has collapsed to one. Such a folder name is never intended.
_ONE_SLASH = r"(?i:s3a?|gs|gcs|hf|https?|ftp|hdfs|abfss?|az|file):/"
LOCAL_PATH = "a local path (not a URL such as s3://) without line breaks or control characters"
# Paths are passed to scripts line by line, and to terminals: no newlines, control or invisible characters.
_LOCAL = rf"(?!{URL}|{_ONE_SLASH})[^\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]*"
LocalPath = Annotated[str, Matches(LOCAL_PATH, _LOCAL)]
# Locks and atomic renames need a local file system.
RunsFolder = Annotated[
    str,
    Matches(
        "a local path without line breaks or control characters (for object storage, use checkpoint.mirror=URL)",
        _LOCAL,
    ),
]
# No user, password, query or fragment: the value is written to files. In Azure URLs, the container precedes an @.
_NAMED_IN_URL = r"[^@?#\s\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]+"
MirrorURL = Annotated[
    str,
    Matches(
        "a URL such as s3://bucket/folder (without user, password, query and fragment)",
        rf"(?!.*::)(?:abfss?://[a-z0-9-]+@|{URL}){_NAMED_IN_URL}",
    ),
]
EvaluationInterval = Annotated[str, Matches("200updates, 2epochs, auto", r"auto|(?=\d*[1-9])\d+\s*(updates?|epochs?)")]
Every = Annotated[
    str,
    Matches(
        "200updates, 2epochs, 10min, auto",
        r"auto|(?=[\d.]*[1-9])(\d+\s*(updates?|epochs?)|(\d+\.?\d*|\.\d+)\s*min(utes?)?)",
    ),
]
