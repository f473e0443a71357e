"""Dataclasses are encoded as JSON and decoded to the same values; no input raises an error."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from runner.base.json_converter import INLINE, NOT_STORED, decode, encode
from runner.base.json_values import parse_object, to_json


@dataclass(frozen=True, kw_only=True)
class Place:
    city: str
    size: float | None = None


@dataclass(frozen=True, kw_only=True)
class Inner:
    count: int | None = None
    words: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Outer:
    name: str | None = None
    is_done: bool = False
    figures: Mapping[str, float | None] = field(default_factory=dict)
    places: tuple[Place, ...] = ()
    inner: Inner = field(default_factory=Inner, metadata=INLINE)
    free: tuple[Mapping[str, Any], ...] = ()
    note: str = field(default="", metadata=NOT_STORED)


FULL = Outer(
    name="a",
    is_done=True,
    figures={"x": 1.5, "y": None},
    places=(Place(city="b", size=2.0), Place(city="c")),
    inner=Inner(count=3, words=("d", "e")),
    free=({"f": [1]},),
)


def test_an_object_round_trips() -> None:
    result = decode(Outer, json.loads(to_json(encode(FULL))))
    assert result.value == FULL
    assert result.wrong == ()


def test_nonfinite_numbers_become_null_at_any_depth() -> None:
    row = {"a": math.nan, "b": [-math.inf, 1.5], "c": {"d": (math.inf, 3, True)}, "e": "x", "f": None}
    assert json.loads(to_json(row)) == {"a": None, "b": [None, 1.5], "c": {"d": [None, 3, True]}, "e": "x", "f": None}


def test_inline_fields_are_merged_and_excluded_fields_omitted() -> None:
    assert encode(FULL).keys() == {"name", "is_done", "figures", "places", "count", "words", "free"}


def test_unknown_keys_are_ignored_and_missing_ones_have_defaults() -> None:
    assert decode(Outer, {"name": "a", "later": 1}).value == Outer(name="a")
    assert decode(Outer, {"later": 1}).wrong == ()


@pytest.mark.parametrize("value", ["1", True, 1.5, [], {}, 10**400, math.nan])
def test_values_of_wrong_type_are_replaced_by_defaults(value: Any) -> None:
    """The wrong values are reported."""
    result = decode(Outer, {"count": value, "name": "a"})
    assert result.value == Outer(name="a")
    assert result.wrong == ("count",)


def test_invalid_entries_are_dropped_but_string_lists_entirely() -> None:
    """Entries of dictionaries and rows are dropped one by one."""
    tree = {"figures": {"x": 1, "y": "2"}, "places": [{"city": "b"}, {"size": 1}, 3], "words": ["d", 4]}
    result = decode(Outer, tree)
    assert result.value == Outer(figures={"x": 1.0}, places=(Place(city="b"),))
    assert set(result.wrong) >= {"figures.y", "places.1", "places.2"}
    assert any(name.startswith("words") for name in result.wrong)


@pytest.mark.parametrize("text", ["", "[1]", "3", '{"a": ', "[" * 100_000, "\udcff"])
def test_text_that_is_not_a_json_object_decodes_to_none(text: str) -> None:
    assert parse_object(text) is None
