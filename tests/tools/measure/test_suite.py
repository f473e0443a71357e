"""The tables that a suite prints."""

from __future__ import annotations

from runner.tools.measure.suite import SuiteReport, SuiteTable, screen

TABLE = SuiteTable("speed", ("variant", "ms", "verdict"), [["plain", 12.5, "baseline"], ["bf16", 10, "faster"]])


def test_wide_tables_are_printed_in_parts() -> None:
    report = SuiteReport("", tables=[TABLE])
    complete, parts = screen(report, 80), screen(report, 20)
    assert complete == screen(report)
    assert [line.split() for line in complete[1:4]] == [
        ["variant", "ms", "verdict"], ["plain", "12.5", "baseline"], ["bf16", "10", "faster"]
    ]  # fmt: skip
    assert max(map(len, parts)) <= 20
    assert [line.split() for line in parts[1:4]] == [["variant", "ms"], ["plain", "12.5"], ["bf16", "10"]]
    assert [line.split() for line in parts[6:9]] == [["variant", "verdict"], ["plain", "baseline"], ["bf16", "faster"]]
