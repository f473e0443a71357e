"""Overrides with several values: the values that they expand to, and the messages for invalid ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from runner.base.errors import ConfigError, Problem
from runner.config.request import Request
from runner.sweeps.sweep_syntax import MAX_TRIALS, SearchSpace, compose_all, expand_sweep, parse_search_space


@cache
def problems(*args: str, search: bool = False) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as raised:
        (parse_search_space if search else expand_sweep)(Request(args))
    return raised.value.problems


def describe_problems(lines: list[str], *, search: bool = False) -> str:
    """Return each line of overrides, followed by its problems."""
    result = [(args, problems(*args.split(), search=search)) for args in lines]
    return "\n\n".join("\n  ".join([args, *(str(problem) for problem in each)]) for args, each in result)


@pytest.mark.parametrize(
    ("word", "values"),
    [
        ("optimizer=glob(adam*)", "adam adamw adamw8bit"),
        ("optimizer=glob(adam*,exclude=adamw*)", "adam"),
        ("updates=range(10,31,10)", "10 20 30"),
        ("updates=range(3,0,-1)", "3 2 1"),
        ("optimizer.lr=range(0,0.5,0.25)", "0.0 0.25"),
        ("optimizer.betas=[0.9,0.99],[0.8,0.9]", "[0.9,0.99] [0.8,0.9]"),
    ],
)
def test_an_override_expands_to_its_values_in_order(word: str, values: str) -> None:
    result = [request.overrides[0].partition("=")[2] for request in expand_sweep(Request((word,)))]
    assert result == values.split()


TASK = Path(__file__).parent / "task_of_trials.py"


@pytest.mark.parametrize(
    ("word", "values"),
    [
        ("task.act=1e-3,2.50", "1e-3 2.50"),
        ("task.act=choice(x, 1e-3, 007)", "x 1e-3 007"),
        ("task.act=sort(2.50,1e-3)", "1e-3 2.50"),
        ("task.act=7,007,1e-3", "7 007 1e-3"),
        ("optimizer.lr=1e-3,2.50", "0.001 2.5"),
        ("optimizer.lr=1e-3,-1", "0.001 -1"),
    ],
)
def test_numbers_for_a_string_setting_stay_as_typed(word: str, values: str) -> None:
    """Numbers of other settings also keep their notation, because it identifies trials."""
    texts = [request.overrides[0].partition("=")[2] for request in expand_sweep(Request((word, "seed=1,2"), TASK))]
    assert texts[::2] == texts[1::2] == values.split()


def test_numbers_for_string_settings_of_a_search_stay_as_typed() -> None:
    space = ("task.act=1e-3,2.50", "optimizer.lr=1e-3,2.50", "updates=range(1,9)")
    _, (text, number, _) = parse_search_space(Request(space, TASK))
    assert text.values == ("task.act=1e-3", "task.act=2.50")
    assert number.values == ("optimizer.lr=0.001", "optimizer.lr=2.5")


SWEEPS = [
    "seed=1,2 seed=4",
    "seed=1,",
    "seed=choice()",
    "seed=1,1",
    "seed=range(4,1)",
    "seed=range(0,inf)",
    "seed=range(0,9,0)",
    "seed=range(0,9999999999)",
    "seed=range(1,3),7",
    "seed=range(99) updates=range(1,99)",
    "optimizer=glob(x*)",
    "data.path=glob(*)",
    "seed=interval(1,3)",
    "run=a,b",
    "seed=1,2 resume=fresh",
]


def test_an_invalid_sweep_gets_a_suggestion(screen: Callable[..., None]) -> None:
    screen(describe_problems(SWEEPS))


@pytest.mark.parametrize("args", SWEEPS)
def test_an_invalid_sweep_is_reported_once_with_its_key(args: str) -> None:
    (result,) = problems(*args.split())
    assert result.where.partition("=")[0] in {word.partition("=")[0] for word in args.split()}


def test_a_glob_matches_options_of_the_task_file(tmp_path: Path) -> None:
    task = tmp_path / "own.py"
    task.write_text("def slow(parameters, *, lr: float = 0.1): ...\n\n\nOPTIMIZERS = {'adam_of_mine': slow}\n")
    overrides = [request.overrides for request in expand_sweep(Request(("optimizer=glob(adam*)",), task))]
    assert ("optimizer=adam_of_mine",) in overrides


def test_the_maximum_number_of_trials_is_accepted() -> None:
    assert len(expand_sweep(Request((f"seed=range({MAX_TRIALS})",)))) == MAX_TRIALS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "axis"),
    [
        ("optimizer.lr=log(1e-4,1e-2)", SearchSpace("optimizer.lr", (), 1e-4, 1e-2, is_log=True)),
        ("optimizer.lr=tag(log, interval(1e-4, 1e-2))", SearchSpace("optimizer.lr", (), 1e-4, 1e-2, is_log=True)),
        ("optimizer.weight_decay=interval(0,1)", SearchSpace("optimizer.weight_decay", (), 0.0, 1.0)),
        ("global_batch_size=interval(8,64)", SearchSpace("global_batch_size", (), 8.0, 64.0, is_integer=True)),
        ("updates=int(log(10,100))", SearchSpace("updates", (), 10.0, 100.0, is_log=True, is_integer=True)),
        ("updates=range(10,101,20)", SearchSpace("updates", (), 10.0, 90.0, 20.0, is_integer=True)),
        ("optimizer=adamw,sgd", SearchSpace("optimizer", ("optimizer=adamw", "optimizer=sgd"))),
        ("updates=range(1,2)", SearchSpace("updates", ("updates=1",))),
    ],
)
def test_search_ranges_use_hydra_syntax(word: str, axis: SearchSpace) -> None:
    """For integer keys, they are ranges of integers."""
    fixed, result = parse_search_space(Request(("seed=3", word)))
    assert fixed.overrides == ("seed=3",)
    assert result == (axis,)


@pytest.mark.parametrize(
    ("word", "size"),
    [
        ("optimizer=adamw,sgd", 2),
        ("updates=range(10,101,20)", 5),
        ("updates=range(1,4)", 3),
        ("optimizer.lr=range(0.1,0.5,0.1)", 4),
        ("updates=int(interval(3,7))", 5),
        ("optimizer.lr=log(1e-4,1)", math.inf),
    ],
)
def test_the_size_of_a_search_axis_is_its_number_of_values(word: str, size: float) -> None:
    _, (axis,) = parse_search_space(Request((word,)))
    assert axis.size == size


SEARCHES = [
    "seed=1",
    "optimizer.lr=log(0,1)",
    "optimizer.lr=log(-5,-1)",
    "optimizer.lr=interval(2,1)",
    "optimizer.lr=interval(0,inf)",
    "optimizer.lr=interval(-1,1)",
    "precision=fp32,bf17",
    "optimizer.lr=log(1e-4,1e-2) optimizer.lr=0.1",
]


def test_an_invalid_search_gets_a_suggestion(screen: Callable[..., None]) -> None:
    screen(describe_problems(SEARCHES, search=True))


def test_an_unknown_key_is_reported_once_with_a_suggestion() -> None:
    (result,) = problems("optimizer.lrr=log(1e-4,1e-2)", search=True)
    assert result.where == "optimizer.lrr=0.0001"
    assert result.fix.endswith(" optimizer.lr?")


@pytest.mark.slow
def test_common_settings_compose_as_in_each_combination() -> None:
    requests = expand_sweep(Request(("optimizer=adamw,sgd", "seed=1,2", "hardware=t4")))
    together, alone = compose_all(requests), [compose_all([request])[0] for request in requests]
    assert [each.flat() for each in together] == [each.flat() for each in alone]
    assert [each.sources for each in together] == [each.sources for each in alone]
