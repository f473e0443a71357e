"""Words with several values: which values they stand for, and what is answered where they are wrong."""

# ruff: noqa: E501 - tables

from __future__ import annotations

import pytest

from runner.base.configuration import Request
from runner.base.errors import ConfigError
from runner.base.sweeps import MAX_TRIALS, Axis, composed, expand_sweep, read_space


def refused(*words: str, search: bool = False) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        (read_space if search else expand_sweep)(Request(words))
    return [f"{problem.where}: {problem.what} | {problem.fix}" for problem in raised.value.problems]


@pytest.mark.parametrize(
    ("word", "values"),
    [
        ("optimizer=glob(adam*)", "adam adamw adamw8bit"),
        ("optimizer=glob(*,exclude=adam*)", "sgd"),
        ("updates=range(10,31,10)", "10 20 30"),
        ("updates=range(3,0,-1)", "3 2 1"),
        ("optimizer.lr=range(0,0.5,0.25)", "0.0 0.25"),
        ("optimizer.betas=[0.9,0.99],[0.8,0.9]", "[0.9,0.99] [0.8,0.9]"),
    ],
)
def test_a_word_stands_for_its_values_in_order(word: str, values: str) -> None:
    found = [request.overrides[0].partition("=")[2] for request in expand_sweep(Request((word,)))]
    assert found == values.split()


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("seed=1,2 seed=4", "seed=1,2: seed is given twice, here and by seed=4 | give one of them"),
        ("seed=1,", "seed=1,: has nothing where a value of its list should be | say key=1,2, or choice(1,2)"),
        ("seed=choice()", "seed=choice(): has nothing where a value of its list should be | say key=1,2, or choice(1,2)"),
        ("seed=1,1", "seed=1,1: lists 1 twice | leave one of them out"),
        ("seed=range(4,1)", "seed=range(4,1): has no value | say range(1,4): the second number is the first one left out"),
        ("seed=range(0,inf)", "seed=range(0,inf): has no end | say range(1,5), or range(1,9,2)"),
        ("seed=range(0,9,0)", "seed=range(0,9,0): has no end: its step is 0 | say range(1,5), or range(1,9,2)"),
        ("seed=range(0,9999999999)", "seed=range(0,9999999999): has 9,999,999,999 values; a sweep has at most 1,000 | say a larger step: range(a,b,step)"),
        ("seed=range(1,3),7", "seed=range(1,3),7: has a range among its values | list all of them: key=1,2,3,8"),
        ("seed=range(99) updates=range(1,99)", "seed=range(99) updates=range(1,99): are 9,702 combinations; a sweep has at most 1,000 | list fewer, or try some of them: accel-run search with the same words"),
        ("optimizer=glob(x*)", "optimizer=glob(x*): must match an option of optimizer: adam, adamw, adamw8bit, sgd | "),
        ("data.path=glob(*)", "data.path=glob(*): does not say which values | list them, or say range(a,b)"),
        ("seed=interval(1,3)", "seed=interval(1,3): does not say which values | list them, or say range(a,b); accel-run search finds the best between two numbers"),
        ("run=a,b", "run: names the sweep, so it has one value | say run=NAME"),
        ("seed=1,2 resume=fresh", "resume=fresh: every trial would begin anew each time the command is given | take another run=NAME, or remove the folder of this one"),
    ],
)  # fmt: skip
def test_a_sweep_that_cannot_be_is_answered_with_what_to_say(words: str, answer: str) -> None:
    assert refused(*words.split()) == [answer]


def test_as_many_trials_as_a_sweep_may_have_are_had() -> None:
    assert len(expand_sweep(Request((f"seed=range({MAX_TRIALS})",)))) == MAX_TRIALS


@pytest.mark.parametrize(
    ("word", "axis"),
    [
        ("optimizer.lr=log(1e-4,1e-2)", Axis("optimizer.lr", (), 1e-4, 1e-2, is_log=True)),
        ("optimizer.lr=tag(log, interval(1e-4, 1e-2))", Axis("optimizer.lr", (), 1e-4, 1e-2, is_log=True)),
        ("optimizer.weight_decay=interval(0,1)", Axis("optimizer.weight_decay", (), 0.0, 1.0)),
        ("global_batch_size=interval(8,64)", Axis("global_batch_size", (), 8.0, 64.0, is_whole=True)),
        ("updates=int(log(10,100))", Axis("updates", (), 10.0, 100.0, is_log=True, is_whole=True)),
        ("updates=range(10,101,20)", Axis("updates", (), 10.0, 90.0, 20.0, is_whole=True)),
        ("optimizer=adamw,sgd", Axis("optimizer", ("optimizer=adamw", "optimizer=sgd"))),
        ("updates=range(1,2)", Axis("updates", ("updates=1",))),
    ],
)
def test_a_range_of_a_search_is_what_hydra_calls_it_and_whole_where_its_key_is(word: str, axis: Axis) -> None:
    fixed, found = read_space(Request(("seed=3", word)))
    assert fixed.overrides == ("seed=3",)
    assert found == (axis,)


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("seed=1", "search: nothing to search: no key has a range or several values | say for example: accel-run search 'optimizer.lr=log(1e-4,1e-2)'"),
        ("optimizer.lr=log(0,1)", "optimizer.lr=tag(log,interval(0,1)): a log scale begins above 0 | say log(0.001,1)"),
        ("optimizer.lr=interval(2,1)", "optimizer.lr=interval(2,1): must begin below its end | say interval(1,2)"),
        ("optimizer.lr=interval(0,inf)", "optimizer.lr=interval(0,inf): has no end | say between which numbers"),
        ("optimizer.lr=interval(-1,1)", "optimizer.lr=-1: must be a number above 0, but is -1 | say optimizer.lr=0.0003, the default"),
        ("precision=fp32,bf17", "precision=bf17: unknown precision; must be one of auto, bf16, fp16, fp32, tf32 | did you mean bf16?"),
        ("optimizer.lr=log(1e-4,1e-2) optimizer.lr=0.1", "optimizer.lr=tag(log,interval(1e-4,1e-2)): optimizer.lr is given twice, here and by optimizer.lr=0.1 | give one of them"),
    ],
)  # fmt: skip
def test_a_search_that_cannot_be_is_answered_with_what_to_say(words: str, answer: str) -> None:
    assert refused(*words.split(), search=True) == [answer]


def test_an_unknown_key_is_said_once_with_its_near_name() -> None:
    (answer,) = refused("optimizer.lrr=log(1e-4,1e-2)", search=True)
    assert answer.startswith("optimizer.lrr=0.0001: unknown key of optimizer=adamw; known: ")
    assert answer.endswith(" | did you mean optimizer.lr?")


def test_what_all_combinations_share_is_composed_as_each_of_them_alone() -> None:
    requests = expand_sweep(Request(("optimizer=adamw,sgd", "seed=1,2", "hardware=t4,auto")))
    together = composed(requests)
    assert [each.flat() for each in together] == [composed([request])[0].flat() for request in requests]
    assert [each.sources for each in together] == [composed([request])[0].sources for request in requests]
