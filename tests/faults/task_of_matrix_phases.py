"""The task of task_of_matrix.py in three phases: statistics, all parameters, only the head."""

from runner import Task
from tests.faults.task_of_matrix import Mean, Points

SETTINGS = {"global_batch_size": 8, "evaluate.every": 3, "log_every": 2, "optimizer.lr": 0.02}
PHASES = {
    "statistics": {"kind": "fit"},
    "body": {"needs": ["statistics"], "updates": 7},
    "head": {"needs": ["body"], "trains": ["5"], "updates": 5},
}


class Phased(Points):
    @property
    def fits(self):
        return {"statistics": Mean(self)}


def build(
    *,
    samples: int = 26,
    dropout: float = 0.2,
    noise: float = 0.1,
    batch_norm: bool = False,
    bad: bool = False,
    own: bool = False,
    average: bool = False,
    double: bool = False,
) -> Task:
    return Phased(samples, dropout, noise, batch_norm, bad, own, average, double)
