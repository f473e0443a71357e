"""Validation of values, the messages about invalid ones, and signatures that are read without running code."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.base.values import (
    Auto,
    Count,
    DeviceName,
    Every,
    Factor,
    Fraction,
    NonNegative,
    Positive,
    PositiveInt,
    Range,
    Seed,
)
from runner.config.inference_keys import inference_keys
from runner.config.schema import (
    REQUIRED,
    Expression,
    default_values,
    describe_mismatch,
    describe_type,
    did_you_mean,
    find_nearest,
    read_functions,
    settings_keys,
)
from runner.config.settings import EvaluateSettings, Settings

# type, description, valid values, invalid values
TYPES: list[tuple[Any, str, list[Any], list[Any]]] = [
    (int, "an integer", [0, -3, 10**30], [1.0, True, "1", None, [1]]),
    (float, "a number", [0, 1, -2.5, 1e308], [math.nan, math.inf, -math.inf, 10**400, True, "1.0", None]),
    (str, "a string", ["", "1"], [1, None, True, ["a"]]),
    (bool, "true or false", [True, False], [0, 1, "true", None]),
    (type(None), "null", [None], [0, "", False]),
    (Any, "anything", [None, 1, "a", [1]], []),
    (Positive, "a number above 0", [1e-9, 3], [0, 0.0, -1, math.nan, math.inf, True]),
    (NonNegative, "a number of at least 0", [0, 0.5], [-1e-9, math.nan]),
    (Fraction, "a number between 0 and 1", [0, 0.5, 1], [-0.1, 1.1]),
    (Factor, "a number of at least 0 and below 1", [0, 0.999], [1, -0.1]),
    (Count, "an integer of at least 0", [0, 7], [-1, 1.0, True]),
    (Seed, "an integer from 0 to 2**64 - 1", [0, 2**32, 2**64 - 1], [-1, 2**64, 1.0]),
    (PositiveInt, "an integer of at least 1", [1], [0, -1, 1.5, False]),
    (Annotated[float, Range("a number above 1", low=1.0, low_allowed=False)], "a number above 1", [1.1], [1.0, 1]),
    (
        DeviceName,
        "auto, cpu, cuda, cuda:N, mps or xpu",
        ["auto", "cuda", "cuda:12", "mps", "xpu:1"],
        ["gpu", "cuda:", "cuda:x", "mps:0", 0],
    ),
    (Auto, "auto", ["auto"], ["Auto", None]),
    (Literal["a", "b", "c"], "a, b or c", ["a", "c"], ["d", "A", 1]),
    (Literal[1, True], "1 or true", [1, True], [0, False, "1"]),
    (Literal[1], "1", [1], [True]),
    (bool | Auto, "true or false or auto", [True, "auto"], [1, "on"]),
    (PositiveInt | None, "an integer of at least 1 or null", [1, None], [0, "null"]),
    (Count | Auto | None, "an integer of at least 0, auto or null", [0, "auto", None], [-1, "none"]),
    (list[str], "a list of strings", [[], ["a"]], ["a", [1], ("a",), None]),
    (list[int], "a list of integers", [[1, 2]], [[1, True], [1.0]]),
    (list, "a list", [[1, "a"]], ["a"]),
    (tuple[Factor, Factor], "a list of 2 values", [[0.9, 0.95], (0, 0.5)], [[0.9], [0.9, 1.0], [0.1, 0.2, 0.3], 0.9]),
    (tuple[int, ...], "a list of integers", [[], [1, 2, 3]], [[1, "a"], 1]),
    (Mapping[str, NonNegative], "a mapping", [{}, {"a": 0}], [{"a": -1}, {1: 1}, [], "a"]),
    (dict, "a mapping", [{1: 2}], [[]]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "description", "good", "bad"), TYPES, ids=[text for _, text, _, _ in TYPES])
def test_values_are_checked_against_each_type(kind: Any, description: str, good: list[Any], bad: list[Any]) -> None:
    assert describe_type(kind) == description
    assert [value for value in good if describe_mismatch(kind, value) is not None] == []
    assert [value for value in bad if describe_mismatch(kind, value) is None] == []


@pytest.mark.parametrize("value", [0, -5, 1.5, "x"])
def test_the_error_names_the_invalid_entry_of_a_mapping(value: object) -> None:
    found = describe_mismatch(Mapping[str, PositiveInt], {"code": 1, "qa": value})
    assert found is not None
    assert found.startswith("qa must be ")
    assert describe_type(PositiveInt) in found
    assert str(value) in found


@pytest.mark.parametrize(
    ("value", "shown"), [("x", '"x"'), (None, "null"), (True, "true"), (math.nan, "nan"), ([1], "[1]"), (-1, "-1")]
)
def test_an_error_states_expected_and_actual_value(value: Any, shown: str) -> None:
    assert describe_mismatch(Positive, value) == f"must be {describe_type(Positive)}, but is {shown}"


@given(st.floats() | st.integers())
def test_positive_accepts_only_finite_numbers_above_zero(value: float) -> None:
    above = math.isfinite(value) and value > 0 if isinstance(value, float) else 0 < value <= sys.float_info.max
    assert (describe_mismatch(Positive, value) is None) == above


@given(st.integers(-5, 5), st.booleans(), st.booleans())
def test_bounds_of_a_range_are_inclusive_or_exclusive(value: int, low: bool, high: bool) -> None:
    allowed = set(range(-1, 2)) | ({-2} if low else set()) | ({2} if high else set())
    assert Range("", -2, 2, low_allowed=low, high_allowed=high).allows(value) == (value in allowed)


@pytest.mark.parametrize(
    "text", ["auto", "200updates", "1update", "2epochs", "2 epochs", "10min", "0.5min", ".5min", "10.0min", "3 minutes"]
)
def test_valid_checkpoint_intervals_are_accepted(text: str) -> None:
    assert describe_mismatch(Every, text) is None


@pytest.mark.parametrize(
    "text", ["", "0updates", "0min", "0.0min", ".min", "1.5epochs", "5days", "-1min", "200", "min"]
)
def test_invalid_checkpoint_intervals_are_rejected(text: str) -> None:
    assert describe_mismatch(Every, text) == f'must be {describe_type(Every)}, but is "{text}"'


HELP_OF_LR = "how fast, in words that take two lines"
SAMPLE = '''
"""A file that must not be run."""
raise SystemExit("this file was run")

SIZE = 3


def first(world, model, *, lr: Positive = 1e-3, names: list[str] = ["a"], size: "Literal['s', 'm']" = "s", must: int):
    """Does a thing.

    lr     how fast, in words that
           take two lines
    names  which ones
    size   how large
    Raises ValueError  where it cannot.
    """


def second(*, own: OurOwn = None, computed: int = 2 * SIZE, negative: float = -1.5, pair: tuple[int, int] = (1, 2)):
    pass


class Model:
    def predict(self, model, generator, *, samples: PositiveInt = 3):
        """Guess.

        samples  how many
        """

    async def ignored(self): ...
'''


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    file = tmp_path / "sample.py"
    file.write_text(SAMPLE)
    return file


def test_signatures_are_read_without_executing_the_file(sample: Path) -> None:
    functions = read_functions(sample)

    assert list(functions) == ["first", "second", "Model.predict"]
    first = functions["first"]
    assert (first.name, first.runner, first.summary) == ("first", ("world", "model"), "Does a thing.")
    assert {name: (key.type, key.default) for name, key in first.keys.items()} == {
        "lr": (Positive, 1e-3),
        "names": (list[str], ["a"]),
        "size": (Literal["s", "m"], "s"),
        "must": (int, REQUIRED),
    }
    assert functions["Model.predict"].runner == ("self", "model", "generator")
    assert functions["Model.predict"].keys["samples"].default == 3


BATCHED = {"split", "samples", "batch_size", "shard", "num_shards"}
TASK, BATCH_TASK = (f"class Own(Task):\n    def {head}, *, a: int = 1): ...\n" for head in (
    "predict(self, model, generator", "predict_batch(self, model, batch"
))  # fmt: skip
LIGHTNING = "from runner.adapters.lightning import LightningTask\n"
NET = "class Base(nn.Module): ...\n\nclass Net(Base):\n    def {}(self, x, *, b: int = 1): ...\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (TASK, {"a"}),
        (BATCH_TASK, {"a", *BATCHED}),
        (NET.format("predict_batch") + TASK, {"a"}),
        (TASK + "    def predict_batch(self, model, batch, *, c: int = 1): ...\n", {"a"}),  # this method calls predict
        (NET.format("predict") + BATCH_TASK, {"a", *BATCHED}),
        (
            TASK.replace(", *, a: int = 1", "") + "    def predict_batch(self, model, batch, *, c: int = 1): ...\n",
            set(),
        ),
        (f"{LIGHTNING}def build():\n    return LightningTask(imported.Net())", BATCHED),
        (
            "from runner.adapters import lightning as pl\n"
            + NET.format("predict")
            + "def build():\n    return pl.LightningTask(Net())",
            BATCHED,
        ),
        (f"{LIGHTNING}{TASK.replace('(Task', '(LightningTask')}", {"a"}),
        (f"{LIGHTNING}class Own(LightningTask): ...\n", BATCHED),
        ("from base_task import Base\nclass Own(Base): ...\n", {"d", *BATCHED}),
        ("import base_task as b\nclass Own(b.Base): ...\n", {"d", *BATCHED}),
        ("from .base_task import Base as B\ndef build():\n    return B()\n", {"d", *BATCHED}),
        ("from . import base_task\ndef build():\n    return base_task.Base()\n", {"d", *BATCHED}),
        ("from package.inner import Deep\nclass Own(Deep): ...\n", {"d", *BATCHED}),
        ("from base_task import Base\nclass Own(Base):\n    def predict_batch(self, model, batch): ...\n", BATCHED),
        ("from base_task import Net\ndef build():\n    return Own(Net())\n", set()),
        ("from base_task import Missing\nfrom broken import Base\nclass Own(Base, Missing): ...\n", set()),
        ("from task import Own as Base\nclass Own(Base): ...\nclass Loop(Loop): ...\n", set()),
    ],
)
def test_inference_has_the_keys_of_its_method(text: str, expected: set[str], tmp_path: Path) -> None:
    base = BATCH_TASK.replace("a:", "d:").replace("Own", "Base") + NET.format("predict").replace("Base", "Module")
    package = tmp_path / "package" / "inner"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from ...base_task import Base\nclass Deep(Base): ...\n", encoding="utf-8")
    for name, content in (("task", text), ("base_task", base), ("broken", "class Base(:")):
        (tmp_path / f"{name}.py").write_text(content, encoding="utf-8")
    assert {*inference_keys(tmp_path / "task.py")} == expected


def test_help_includes_continuation_lines_of_the_docstring(sample: Path) -> None:
    first = read_functions(sample)["first"]
    helps = {name: key.help for name, key in first.keys.items()}

    assert helps == {
        "lr": HELP_OF_LR,
        "names": "which ones",
        "size": "how large",
        "must": "",
    }


def test_values_that_need_execution_are_kept_as_text(sample: Path) -> None:
    keys = read_functions(sample)["second"].keys

    assert keys["own"].type is Any, "values of a type defined in the file must not be checked"
    assert keys["computed"].default == Expression("2 * SIZE")
    assert (keys["negative"].default, keys["pair"].default) == (-1.5, (1, 2))


def test_mutable_defaults_are_not_shared(sample: Path) -> None:
    functions = read_functions(sample)
    taken = default_values(functions["first"].keys)
    taken["names"].append("b")

    assert default_values(functions["first"].keys) == {"lr": 1e-3, "names": ["a"], "size": "s"}
    assert default_values(functions["second"].keys)["pair"] == [1, 2]


def test_the_syntax_error_of_a_file_names_the_line(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("x = 1\ndef build(\n")
    with pytest.raises(SyntaxError) as caught:
        read_functions(tmp_path / "broken.py")
    assert caught.value.lineno == 2


def test_settings_are_flat_keys_with_their_help() -> None:
    keys = settings_keys(Settings)

    assert f"samples  {keys['evaluate.samples'].help}" in str(EvaluateSettings.__doc__)
    assert keys["resume_allow"].default == []
    assert [name for name, key in keys.items() if not key.help] == []
    assert [name for name, key in keys.items() if describe_mismatch(key.type, key.default)] == []


KNOWN = ["optimizer.lr", "optimizer.weight_decay", "scheduler.warmup", "global_batch_size", "seed", "lr_scales"]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("optimizer.lrr", "optimizer.lr"),
        ("lrr", "optimizer.lr"),
        ("warmup", "scheduler.warmup"),
        ("SEED", "seed"),
        ("sead", "seed"),
        ("global_batchsize", "global_batch_size"),
        ("xyzzy", None),
        ("", None),
    ],
)
def test_the_nearest_name_is_suggested(typed: str, meant: str | None) -> None:
    assert find_nearest(typed, KNOWN) == meant
    assert did_you_mean(typed, KNOWN) == (f"did you mean {meant}?" if meant else "")


def test_a_short_name_matches_with_one_wrong_letter() -> None:
    assert find_nearest("t5", ["a100", "t4", "rtx_mid"]) == "t4"
    assert find_nearest("x9", ["a100", "t4", "rtx_mid"]) is None


@given(st.sampled_from(KNOWN))
def test_the_nearest_name_of_a_known_name_is_itself(word: str) -> None:
    assert find_nearest(word, KNOWN) == word


def test_without_known_names_there_is_no_nearest_name() -> None:
    assert find_nearest("lr", []) is None
