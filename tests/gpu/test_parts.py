"""The parts of a run on a GPU, told by the marks on its timeline, add up to the run, and nobody waits for them."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from runner.base.stopwatch import PARTS, DeviceStopwatch, between
from runner.engine.evidence import read_evidence

pytestmark = pytest.mark.gpu
GPT = (
    "train task=gpt task.size=tiny updates=60 global_batch_size=32 log_every=10 evaluate.every=20 evaluate.samples=32"
    " precision=fp32 device=cuda:0"
)


@pytest.mark.parametrize("words", ["prefetch=none", "prefetch=stream", "dataloader.num_workers=2", "precision=fp16"])
def test_the_parts_of_a_run_add_up_to_it(words: str, tmp_path: Path) -> None:
    line = [sys.executable, "-m", "runner", *f"{GPT} run=r {words}".split()]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = read_evidence(tmp_path / "outputs/r")
    assert found is not None
    (phase,) = found.phases
    assert phase.seconds is not None
    assert sum(phase.parts_s.values()) == pytest.approx(phase.seconds, rel=0.02)
    for part in ("transfer", "forward", "backward", "optimizer", "evaluation", "saving"):
        assert found.parts_s[part] > 0, part
    assert found.device_total_gib
    assert found.device_peak_gib
    assert found.num_alloc_retries == 0


def test_marks_cost_no_wait_and_tell_what_the_device_did() -> None:
    device = torch.device("cuda")
    matrix = torch.randn(8192, 8192, device=device)
    torch.mm(matrix, matrix)
    torch.cuda.synchronize()
    watch = DeviceStopwatch(device)
    began = time.perf_counter()
    for update in range(1, 11):
        watch.lap("hooks")
        for _ in range(10):
            torch.mm(matrix, matrix)
        watch.lap("forward")
        watch.stop(update)
    bookmark = watch.bookmark()
    asked = time.perf_counter() - began
    torch.cuda.synchronize()
    done = time.perf_counter() - began
    assert asked < 0.5 * done, "the host has asked for all of it long before it is done"
    spent = watch.finish()
    assert spent["forward"] == pytest.approx(done, rel=0.1)
    assert sum(between({}, bookmark()).get(part, 0.0) for part in PARTS) == pytest.approx(spent["forward"])
