"""The generated settings reference is complete and up to date, and its examples are accepted."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from runner.config.options import AXES, GROUPS, all_keys, list_options
from runner.config.override_grammar import parse_override
from runner.config.schema import describe_mismatch

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
SCHEMA = json.loads((ROOT / "conf" / "schema.json").read_text(encoding="utf-8"))
ROWS = dict(re.findall(r"^\| `([\w.]+)` \|.* `([\w.]+=.*)` \|$", PAGE, re.MULTILINE))


def test_the_generated_pages_are_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "generate.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_settings_page_lists_every_setting_and_option() -> None:
    assert set(all_keys()) <= set(ROWS)
    sections = set(re.findall(r"^### (\w+=[\w-]+)", PAGE, re.MULTILINE))
    assert sections == {f"{group}={option}" for group in AXES for option in list_options(group)}


@pytest.mark.slow
@pytest.mark.parametrize("key", [key for key in ROWS if key.partition(".")[0] not in {"task", "inference"} - {*AXES}])
def test_all_examples_on_the_settings_page_are_accepted(key: str) -> None:
    assert key not in GROUPS
    override = parse_override(ROWS[key].replace("\\|", "|"))
    assert override.key_or_group == key
    assert any(describe_mismatch(known.type, override.value()) is None for known in all_keys()[key]), ROWS[key]


@cache
def schema_validator(group: str) -> Any:
    """Return the JSON schema validator that editors use for files of a group, or for a complete configuration."""
    whole = {"$ref": f"#/definitions/{group}", "definitions": SCHEMA["definitions"]} if group in AXES else SCHEMA
    return jsonschema.Draft7Validator(whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    "file",
    [file for file in (ROOT / "conf").rglob("*.yaml") if file.parent.name not in ("task", "technique")],
    ids=lambda file: f"{file.parent.name}/{file.stem}",
)
def test_the_json_schema_accepts_shipped_files(file: Path) -> None:
    """Unknown keys are rejected."""
    content = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    schema_validator(file.parent.name).validate(content)
    assert not schema_validator(file.parent.name).is_valid({**content, "no_such_key": 1})


@pytest.mark.parametrize("content", [{"updates": 0}, {"seed": "x"}, {"optimizer": {"lr": -1.0}}, {"device": "gpu"}])
def test_the_json_schema_rejects_what_the_command_line_rejects(content: dict[str, object]) -> None:
    assert not schema_validator("").is_valid(content)


def test_the_json_schema_accepts_interpolations_and_short_forms() -> None:
    schema_validator("").validate({"seed": "${oc.env:SLURM_JOB_ID}", "weights": "first", "data": {"path": None}})
