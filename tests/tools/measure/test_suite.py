"""The tables that a suite prints."""

from __future__ import annotations

from runner.tools.measure.suite import SuiteReport, SuiteTable, screen

TABLE = SuiteTable("speed", ("variant", "update, ms", "verdict"), [["plain", 12.5, "baseline"], ["bf16", 10, "faster"]])


def test_a_table_wider_than_the_terminal_is_printed_in_parts_with_the_first_column() -> None:
    report = SuiteReport("", tables=[TABLE])
    assert screen(report) == screen(report, 80) == [
        "speed",
        "  variant  update, ms  verdict",
        "  plain          12.5  baseline",
        "  bf16             10  faster",
        "",
    ]  # fmt: skip
    assert screen(report, 24) == [
        "speed",
        "  variant  update, ms",
        "  plain          12.5",
        "  bf16             10",
        "",
        "speed (continued)",
        "  variant  verdict",
        "  plain    baseline",
        "  bf16     faster",
        "",
    ]
