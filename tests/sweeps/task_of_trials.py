"""A task whose settings control the stand-in for training (tests/sweeps/stand_in.py); it never runs."""

from runner import Task

SETTINGS = {"updates": 3, "optimizer.lr": 0.001}


def build(*, act: str = "", hidden: int = 8, fold: int = 1, folds: int = 2, seconds: float = 0.1) -> Task:
    raise NotImplementedError
