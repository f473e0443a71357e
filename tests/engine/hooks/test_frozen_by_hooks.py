"""If a hook freezes or unfreezes parameters, a resumed run trains the same ones as an uninterrupted run, or warns."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.config.request import Request
from runner.engine.hooks.checkpointing import Checkpointing
from runner.engine.hooks.rank_sync import RankSync
from runner.engine.opening import open_phase

FREEZES = """
import runner
from tests.engine.task_of_averages import Regression

SETTINGS = {"updates": 6, "global_batch_size": 8, "scheduler": "constant", "optimizer.lr": 0.01}

class Freeze(runner.Hook):
    def begin(self):
        if FREEZES_FIRST:
            self.phase.model[0].requires_grad_(False)
    def after_update(self, step):
        if step.update == 2:
            self.phase.model[0].requires_grad_(FREEZES_FIRST)

HOOKS = [Freeze]

def build():
    return Regression()
"""


@pytest.mark.parametrize(("freezes_first", "is_equal"), [(False, True), (True, False)])
def test_a_resumed_run_trains_the_same_parameters_or_warns_about_the_hook(
    freezes_first: bool, is_equal: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A hook that freezes parameters whenever a process starts causes a warning, because the resumed run differs."""
    task = tmp_path / "own.py"
    task.write_text(FREEZES.replace("FREEZES_FIRST", str(freezes_first)))
    weights, outputs = {}, {}
    for name in ("straight", "stopped"):
        settings = ("device=cpu", "run=mine", "monitor=off", "backend.threads=1", "checkpoint=off")
        request = Request((*settings, f"output_root={tmp_path / name}"), task)
        if name == "stopped":
            with open_phase(request) as phase:
                for update in phase.updates():
                    if update == 4:
                        break
                phase.hook(RankSync).exchange.close()
                phase.hook(Checkpointing).save()
        capfd.readouterr()
        with open_phase(request) as phase:
            assert phase.run_updates() is None
            weights[name] = {key: weight.tolist() for key, weight in phase.run.parts.bare.named_parameters()}
        outputs[name] = "".join(capfd.readouterr())
    assert (weights["straight"] == weights["stopped"]) == is_equal
    assert [("requires_grad" in outputs[name]) for name in outputs] == [False, not is_equal]
