"""Typical projects, with their own losses, optimizers, streams and hooks, train on a GPU like their plain loops."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from runner.base.loaded_torch import is_stand_in
from tests.forkserver import ForkServer
from tests.projects import local_files
from tests.projects.test_projects import OF_FLOAT32, PROJECTS, TOLERANCE, assert_equal, by_hand, trained

pytestmark = pytest.mark.gpu
WITHOUT_KERNELS = ("speech_ctc", "streaming_text")  # the stand-in lacks those of CTC and LSTM
INSTALLED = [
    name
    for name, packages in PROJECTS.items()
    if all(map(find_spec, packages)) and not (is_stand_in() and name in WITHOUT_KERNELS)
]


@pytest.mark.parametrize("name", INSTALLED)
def test_a_project_on_a_gpu_equals_its_plain_loop_on_the_cpu(
    name: str, server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    if (prepare := getattr(local_files, name, None)) is not None:
        prepare(tmp_path)
    monkeypatch.chdir(tmp_path)
    wanted, metrics = by_hand(name, tmp_path / "data")
    result, measured, _ = trained(server, tmp_path, name, "device=cuda:0")
    tolerance = OF_FLOAT32.get(name, TOLERANCE)
    assert_equal(result, wanted, tolerance)
    assert {key: measured[key] for key in metrics} == pytest.approx(metrics, rel=tolerance)
