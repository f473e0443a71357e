"""scripts/lint_commits.py."""

from __future__ import annotations

import pytest

from scripts.lint_commits import problems_of


@pytest.mark.parametrize(
    ("message", "files", "num_problems"),
    [
        ("Add NAdam\n\nIt converges faster on gpt.\n", ["runner/axes/optimizer.py"], 0),
        ("Test NAdam\n", ["tests/axes/test_optimizer.py", "docs/settings.md"], 0),
        ("Add NAdam\n", ["runner/axes/optimizer.py", "tests/axes/test_optimizer.py"], 1),
        ("Add NAdam\n\n# a comment of the template\n", ["runner/axes/optimizer.py"], 1),
        ("A" * 73 + "\n\nWhy\n", ["runner/cli.py"], 1),
        ("A" * 72 + "\n\nWhy\n", ["runner/cli.py"], 0),
        ("Add NAdam.\n\nWhy\n", ["runner/cli.py"], 1),
        ("Add NAdam\nWhy\n", ["runner/cli.py"], 1),
        ("# only comments\n", ["runner/cli.py"], 1),
        ("", [], 1),
    ],
)
def test_a_message_has_a_short_subject_and_a_reason(message: str, files: list[str], num_problems: int) -> None:
    assert len(list(problems_of(message, files))) == num_problems
