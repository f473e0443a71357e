"""scripts/lint_tests.py reports each violation, and nothing in valid tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import lint_tests

DEADLINE = "until = time.monotonic() + {}"
PLANTED = {
    "sleep": [
        "import time\ntime.sleep(0.1)",
        "from time import sleep\ndef test():\n    sleep(1)",
        "async def test():\n    await asyncio.sleep(1)",
    ],
    "clock": [
        "def test():\n    assert time.monotonic() < 5",
        "def test():\n    began = time.perf_counter()\n    run()\n    assert time.perf_counter() - began < 5",
        "def test():\n    began = time.time()\n    took = now() - began\n    assert took < 5",
        "def timed():\n    return time.time() - began\ndef test():\n    assert timed() < 5",
        "def test():\n    if (began := time.process_time()):\n        assert began < 5",
    ],
    "measured": [
        "def test():\n    assert 0.8 < whole / summary['update_ms']['modules timed'] <= 1.0",
        "def test():\n    assert all(row['seconds'] < 5 for row in rows)",
        "def test():\n    assert report['speedup'] > 1.1",
    ],
    "timeout": [
        "process.wait(timeout=5)",
        "joined(member, timeout_s=0.2)",
        "@pytest.mark.timeout(10)\ndef test(): ...",
        "faulthandler.dump_traceback_later(3)",
        "released.wait(10)",
        "thread.join(2.5)",
        DEADLINE.format(20),
        f'PROGRAM = """\nimport time\n{DEADLINE.format(2.5)}\n"""',
    ],
    "private": [
        "from runner.base.text import _near",
        "from scripts.compare import _first",
        "local._REMINDER_S = 1",
        "monkeypatch.setattr(local, '_REMINDER_S', 1)",
        "monkeypatch.delattr(local, '_REMINDER_S')",
        "mock.patch.object(local, '_REMINDER_S')",
    ],
    "tolerance": [
        "def test():\n    assert one == pytest.approx(other, rel=1e-9)",
        "def test():\n    torch.testing.assert_close(one, other, rtol=0, atol=1e-6)",
        "LIMIT = 1e-6\ndef test():\n    np.testing.assert_allclose(one, other, rtol=LIMIT)",
        "def test():\n    assert (one - other).abs().max() < 1e-6 * scale",
        "def test():\n    assert low <= total <= bound * (1 + 1e-9)",
    ],
    "phrase": [
        "def test():\n    assert 'must be a number above 0' in text",
        "def test():\n    assert f'no such file as {name}' == text",
    ],
}
RIGHT = [
    "wait_until(path.exists)",
    "def test(clock):\n    clock.sleep(5)\n    assert clock.now == 5",
    "def test():\n    began = time.monotonic()\n    log(began)\n    assert run() == 0",
    "process.wait(timeout=60)\nprocess.wait()\nprocess.wait(timeout=limit_s)\nselect.poll(timeout=0)",
    f"thread.join(60)\n', '.join(['a'])\n{DEADLINE.format(60)}",
    "def test():\n    assert row['seconds'] > 0\n    assert row['items'] > 5\n    assert row['update_ms'] == 5",
    "def test():\n    assert share == pytest.approx(0.5, abs=0.01)\n    assert 1e-5 <= rate <= 0.1",
    "def test():\n    assert one == pytest.approx(other, rel=allowed(torch.float32, 8), abs=0)",
    "class Stub:\n    def __init__(self):\n        self._mine = 1",
    "os._exit(0)\nnamed._replace(x=1)\ntorch.cuda._sleep(5)\nobject.__dict__",
    "from tests.sweeps.stand_in import _own",
    "def test():\n    assert problem.where == 'optimizer.lr'\n    assert words == 'a b'",
    "def test():\n    assert code == 0, 'the run goes on after the kill'",
]


@pytest.mark.parametrize(("rule", "source"), [(rule, each) for rule, found in PLANTED.items() for each in found])
def test_each_violation_is_found(rule: str, source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "test_planted.py").write_text(source)
    assert lint_tests.main([str(tmp_path)]) == 1
    messages = {line.split(": ")[1] for line in capsys.readouterr().out.splitlines()}
    assert messages == {rule}


@pytest.mark.parametrize("source", RIGHT)
def test_correct_code_has_no_findings(source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "test_right.py").write_text(source)
    assert lint_tests.main([str(tmp_path / "test_right.py")]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("comment", "code"),
    [
        ("# lint-tests: sleep: a task that hangs on purpose", 0),
        ("# lint-tests: clock, sleep: a task that hangs on purpose", 0),
        ("# lint-tests: clock: another rule", 1),
        ("# lint-tests: sleep:", 1),
        ("# a comment", 1),
    ],
)
@pytest.mark.parametrize("above", [True, False])
def test_an_exception_must_name_its_rule_and_a_reason(comment: str, code: int, above: bool, tmp_path: Path) -> None:
    line = "time.sleep(60)"
    (tmp_path / "test_excused.py").write_text(f"{comment}\n{line}\n" if above else f"{line}  {comment}\n")
    assert lint_tests.main([str(tmp_path)]) == code


def test_each_documented_rule_is_tested() -> None:
    rules = [
        line.split()[0] for line in (lint_tests.__doc__ or "").partition("Rules:\n\n")[2].split("\n\n")[0].splitlines()
    ]
    assert set(PLANTED) == set(rules)
