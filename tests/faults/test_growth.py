"""Small files that expand when resolved, parse slowly or refer to other folders are rejected at a bounded cost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.base.errors import AccelRunError
from runner.config.configuration import compose
from runner.config.request import Request
from tests.faults.steps import calls
from tests.faults.tallies import Tally
from tests.forkserver import ForkServer

TASK = Path(__file__).with_name("task_to_attack.py")
HEAD = "# @package _global_\nhardware: {title: x, devices: []}\n"


MAX_CALLS = 20_000_000  # unbounded growth takes billions


def files() -> Iterator[tuple[str, str, int, str]]:
    """Yield (name, content of a hardware profile, exit code, text of the message)."""
    chain = "\n".join(f"x{number}: '${{x{number - 1}}}${{x{number - 1}}}'" for number in range(1, 60))
    yield "texts that double", f"{HEAD}x0: aaaaaaaaaa\n{chain}\n", 78, "characters after each"
    chain = "\n".join(f"x{number}: {{a: '${{x{number - 1}}}', b: '${{x{number - 1}}}'}}" for number in range(1, 60))
    yield "mappings that double", f"{HEAD}x0: {{a: 1}}\n{chain}\n", 78, "values"
    chain = "\n".join(f"  x{number}: ['${{..x{number - 1}}}', '${{..x{number - 1}}}']" for number in range(1, 60))
    yield "relative references that double", f"{HEAD}y:\n  x0: [1]\n{chain}\n", 78, "values"
    chain = "\n".join(f"  x{number}: '${{z.x{number - 1}}}${{z.x{number - 1}}}'" for number in range(1, 60))
    yield (
        "references through another name",
        f"{HEAD}z: ${{y}}\ny:\n  x0: aaaaaaaa\n{chain}\n",
        78,
        "characters after each",
    )
    yield "a repeated long text", f"{HEAD}x: {'a' * 30_000}\ny: '{'${x}' * 8_000}'\n", 78, "characters after each"
    chain = "\n".join(f"x{number}: ${{x{number + 1}}}" for number in range(2_000))
    yield "a long chain", f"{HEAD}{chain}\n", 78, ""
    yield "a cycle", f"{HEAD}x: ${{y}}\ny: ${{x}}\n", 78, ""
    yield "empty lines", HEAD + "\n" * 65_000, 0, ""
    yield "a Unicode line end", f"{HEAD}#\u2028# @package hydra\n", 89, "the package hydra is not allowed"


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "content", "code", "messages"), list(files()), ids=[name for name, *_ in files()])
def test_the_cost_of_a_small_file_is_bounded(
    tmp_path: Path, name: str, content: str, code: int, messages: str, tally: Tally
) -> None:
    (tmp_path / "hardware").mkdir()
    (tmp_path / "hardware" / "mine.yaml").write_text(content, encoding="utf-8")
    compose(Request(("seed=1",)))  # warm up imports
    caught: list[AccelRunError] = []

    def act() -> None:
        try:
            compose(Request(("hardware=mine",), None, tmp_path))
        except AccelRunError as error:
            caught.append(error)

    calls(act, MAX_CALLS)  # raises if exceeded
    output, result = (str(caught[0]), caught[0].exit_code) if caught else ("", 0)
    assert result == code, output
    assert messages in output
    assert len(output) < 10_000
    tally.tried += 1


def test_an_option_cannot_refer_to_a_file_outside_its_folder(tmp_path: Path) -> None:
    (tmp_path / "evil.yaml").write_text("option: fp32\n_target_: os.system\n")
    folder = tmp_path / "conf"
    folder.mkdir()
    shipped = (Path(__file__).parents[2] / "conf" / "config.yaml").read_text()
    for option in (tmp_path / "evil", f"[{tmp_path / 'evil'}]"):
        (folder / "config.yaml").write_text(shipped.replace("- precision: auto", f"- precision: {option}"))
        assert str(tmp_path) in (folder / "config.yaml").read_text()
        with pytest.raises(AccelRunError) as caught:
            compose(Request((), None, folder))
        assert caught.value.exit_code == 89


def test_references_on_the_command_line_are_rejected(tmp_path: Path) -> None:
    for word in ("data.path='${oc.env:HOME}'", 'data.path="${seed}"', "data.path=${seed}", "data={path:'${seed}'}"):
        with pytest.raises(AccelRunError) as caught:
            compose(Request((word,)))
        assert caught.value.exit_code == 78


def test_a_deeply_nested_task_file_is_reported(server: ForkServer, tmp_path: Path) -> None:
    for name, line in (("minus", f"x = {'-' * 100_000}1\n"), ("lists", f"x = {'[' * 5_000}{']' * 5_000}\n")):
        (tmp_path / "mine.py").write_text(TASK.read_text() + line)
        result = server.run("plan --task mine.py", tmp_path)
        assert (result.code, "Traceback" in result.err) == (78, False), (name, result.err)


def test_status_shows_rows_with_numbers_of_any_size(server: ForkServer, tmp_path: Path) -> None:
    run = tmp_path / "outputs" / "a"
    run.mkdir(parents=True)
    (run / "run.json").write_text('{"state": "done"}')
    (run / "metrics.jsonl").write_text('{"phase": "train", "update": 1, "loss": 1' + "0" * 400 + "}\n")
    result = server.run("status a", tmp_path)
    assert (result.code, result.err) == (0, "")
