"""The YAML of a configuration is written as OmegaConf writes it, and is read back with the same values."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from omegaconf import OmegaConf

from runner.config.yaml_text import yaml_text

WORDS = (
    "y",
    "N",
    "yes",
    "off",
    "true",
    "null",
    "~",
    "1",
    "1e-3",
    "1_000",
    "0x1f",
    "inf",
    ".nan",
    "a: b",
    "#c",
    "",
    " a ",
)
TEXTS = some.sampled_from(WORDS) | some.text(some.characters(exclude_categories=("Cs", "Cc")), max_size=20)
VALUES = some.none() | some.booleans() | some.integers(-(2**40), 2**40) | some.floats(allow_nan=False) | TEXTS
TREES = some.dictionaries(
    some.from_regex(r"[a-z_]{1,8}", fullmatch=True),
    some.recursive(VALUES, lambda inner: some.lists(inner, max_size=3) | some.dictionaries(some.just("key"), inner)),
    max_size=4,
)


@pytest.mark.slow
@settings(max_examples=60)
@given(tree=TREES.filter(lambda tree: "${" not in str(tree)))
def test_written_yaml_round_trips_through_omegaconf(tree: dict[str, Any]) -> None:
    assert OmegaConf.to_container(OmegaConf.create(yaml_text(tree) if tree else "{}")) == tree


@pytest.mark.parametrize("word", [*WORDS, "two words", "ünï", "long words " * 30, "b\udcff"])
def test_strings_are_written_as_omegaconf_writes_them(word: str) -> None:
    tree = {"key": word, "inner": {"list": [word, 1, 0.001, None, True]}}
    try:
        expected = OmegaConf.to_yaml(OmegaConf.create(tree))
    except UnicodeEncodeError:
        pytest.skip("this version of OmegaConf cannot write text that is not valid Unicode")
    assert yaml_text(tree) == expected


def test_repeated_objects_are_written_without_yaml_anchors() -> None:
    part = {"lr": 0.1}
    assert "&" not in yaml_text({"one": part, "two": part})
