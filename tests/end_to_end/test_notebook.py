"""The code blocks of docs/notebook.md run in order, and the launch file for editors starts a run."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.forked_commands import forked_commands
from tests.forkserver import ForkServer

DOCS = Path(__file__).parents[2] / "docs"
BLOCKS = re.findall(
    r"^```python\n(.*?)^```", (DOCS / "notebook.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
)


class Shown:
    """Replaces IPython's IFrame and keeps the page that it would display."""

    def __init__(self, path: str, **_: Any) -> None:
        self.page = Path(path).read_text(encoding="utf-8")


def with_small_model(block: str) -> str:
    """Return the block with a smaller model and fewer samples. The rest of the page does not depend on the size."""
    return block.replace('"task=gpt", ', '"task=gpt", "task.size=tiny", "micro_batch_size=4", "evaluate.samples=4", ')


@pytest.mark.slow
def test_code_blocks_run_in_order(server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    display = ModuleType("IPython.display")
    display.IFrame = Shown  # type: ignore[attr-defined]
    package = ModuleType("IPython")
    package.version_info, package.get_ipython = (9, 0), lambda: None  # type: ignore[attr-defined]  # for matplotlib
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    names: dict[str, Any] = {}
    for block in BLOCKS:
        for line in re.findall(r"^!accel-run (.*)$", block, re.MULTILINE):
            result = server.run(shlex.split(line), tmp_path)
            assert result.code == 0, (line, result.err)
        with forked_commands(server):
            exec(with_small_model(re.sub(r"^!.*$", "", block, flags=re.MULTILINE)), names)  # noqa: S102 - our own page
    assert len(BLOCKS) == 7
    assert all(loss > 0 for loss in names["losses"])
    assert names["summary"]
    assert "first" in Path("outputs/first/report.html").read_text(encoding="utf-8")


def test_the_launch_file_starts_and_resumes_a_run(server: ForkServer, tmp_path: Path) -> None:
    assert server.run(["new", "my_task.py"], tmp_path).code == 0
    file = json.loads((DOCS / "examples" / "launch.json").read_text(encoding="utf-8"))
    for configuration in file["configurations"]:
        assert (configuration["type"], configuration["module"]) == ("debugpy", "runner")
        args = [word.replace("${file}", str(tmp_path / "my_task.py")) for word in configuration["args"]]
        result = server.run(args, tmp_path)
        assert result.code == 0, result.err
