"""A task whose settings tell a stand-in what to do (tests/sweeps/stand_in.py); it is read and never run."""

from runner import Task

SETTINGS = {"updates": 3, "optimizer.lr": 0.001}


def build(*, act: str = "", hidden: int = 8, seconds: float = 0.1) -> Task:
    raise NotImplementedError
