"""The generated reference of settings is complete, current, and shows what the command line accepts."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from runner.config.options import AXES, GROUPS, all_keys, options_of
from runner.config.suggestions import is_valid_override

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
ROWS = dict(re.findall(r"^\| `([\w.]+)` \|.* `([\w.]+=.*)` \|$", PAGE, re.MULTILINE))


def test_the_page_is_what_the_script_writes() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "generate.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_page_has_every_setting_and_option() -> None:
    assert set(all_keys()) <= set(ROWS)
    sections = set(re.findall(r"^### (\w+=[\w-]+)", PAGE, re.MULTILINE))
    assert sections == {f"{group}={option}" for group in AXES for option in options_of(group)}


@pytest.mark.parametrize("key", [key for key in ROWS if key.partition(".")[0] not in {"task", "inference"} - {*AXES}])
def test_an_example_is_accepted(key: str) -> None:
    assert key not in GROUPS
    assert is_valid_override(ROWS[key].replace("\\|", "|")), ROWS[key]
