"""Typical projects, with their own losses, optimizers, streams and hooks, train on a GPU like their plain loops."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.base.loaded_torch import is_stand_in
from tests.forkserver import ForkServer
from tests.projects import local_files
from tests.projects.test_projects import (
    ADAPTED,
    OF_FLOAT32,
    PROJECTS,
    TOLERANCE,
    distance_of_metrics,
    distance_of_weights,
    missing_packages,
    missing_weights,
    run_plain_loop,
    train_project,
)

pytestmark = pytest.mark.gpu
WITHOUT_KERNELS = ("speech_ctc", "streaming_text")  # the stand-in has no kernels for CTC and LSTM
INSTALLED = [
    name for name in PROJECTS if not missing_packages(name) and not (is_stand_in() and name in WITHOUT_KERNELS)
]


@pytest.mark.parametrize("name", INSTALLED)
def test_a_project_on_a_gpu_matches_its_plain_loop(
    name: str, server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop runs on the CPU."""
    (tmp_path / "data").mkdir()
    if (prepare := getattr(local_files, name, None)) is not None:
        prepare(tmp_path)
    monkeypatch.chdir(tmp_path)
    wanted, metrics = run_plain_loop(name, tmp_path / "data")
    result, measured, _ = train_project(server, tmp_path, name, "device=cuda:0")
    tolerance = OF_FLOAT32.get(name, TOLERANCE)
    assert not missing_weights(result, wanted) or name in ADAPTED
    assert distance_of_weights(result, wanted) <= tolerance
    assert distance_of_metrics(measured, metrics) <= tolerance
