"""Cells of the resume matrix: what a run computes, how it is interrupted, and what changes on resume.

A cell is one level on each axis. Its course consists of the levels that define what the run computes; each course needs
an uninterrupted reference run. `draw_levels` returns a random cell. `cover_pairs` greedily selects cells of a few
courses that cover as many pairs of levels as possible.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

# What a run computes. A combination of these levels is a course.
COURSE_AXES: dict[str, dict[str, str]] = {
    "precision": {
        "fp32": "precision=fp32",
        "bf16": "precision=bf16",
        "fp16": "precision=fp16",
        # overflows repeatedly: every second update, the scale grows until it is too large
        "fp16 overflowing": "precision=fp16 precision.init_scale=524288 precision.growth_interval=2",
    },
    "ranks": {
        "one": "parallelism=single",
        "ddp 2": "parallelism=ddp parallelism.world_size=2",
        "ddp 5+3": "parallelism=ddp parallelism.world_size=2 parallelism.shares=[5,3]",
        "ddp 5+2+1": "parallelism=ddp parallelism.world_size=3 parallelism.shares=[5,2,1]",
        "fsdp 2": "parallelism=fsdp parallelism.world_size=2",
        "fsdp 5+3": "parallelism=fsdp parallelism.world_size=2 parallelism.shares=[5,3]",
        "pipeline 2": "parallelism=pipeline parallelism.world_size=2",
    },
    "accumulation": {"1": "", "2": ""},
    "phases": {"one": "", "three": ""},
    "optimizer": {
        "adamw cosine": "optimizer=adamw scheduler=cosine updates=11",
        "sgd plateau": "optimizer=sgd optimizer.momentum=0.9 scheduler=plateau scheduler.patience=0"
        " scheduler.threshold=0.2 scheduler.cooldown=1 updates=12 evaluate.every=2",
        "adam one_cycle": "optimizer=adam scheduler=one_cycle epochs=3",
        "adamw early stop": "optimizer=adamw scheduler=warm_restarts updates=14 early_stopping.patience=1"
        " early_stopping.min_delta=0.05 evaluate.every=2",
        "sgd multistep": "optimizer=sgd scheduler=multistep max_grad_norm=null updates=9 log_every=3",
    },
    "data": {
        "whole": "task.samples=24",
        "ragged": "task.samples=26",
        "drop_last": "task.samples=27 dataloader.drop_last=true",
        "bad": "task.samples=26 task.bad=true dataloader.bad_samples=skip",
    },
    "keeps": {
        "layer norm": "",
        "batch norm": "task.batch_norm=true",
        "own generator": "task.own=true",
        "moving average": "task.average=true",
    },
}
# What may differ between attempts, and how a run is interrupted.
MECHANICS = {
    "workers": {
        "0": "dataloader.num_workers=0",
        "1": "dataloader.num_workers=1",
        "2": "dataloader.num_workers=2 dataloader.start_method=fork",
        "3": "dataloader.num_workers=3 dataloader.prefetch_factor=1",
        "thread": "dataloader=thread",
        "spawn": "dataloader.num_workers=1 dataloader.start_method=spawn",
    },
    "saves": {"1": "checkpoint.every=1", "2": "checkpoint.every=2 checkpoint.keep_best=2", "end": "checkpoint=off"},
    "end": dict.fromkeys(
        [
            "update", "boundary", "late", "evaluation", "save", "SIGTERM", "SIGTERM in evaluation", "SIGTERM in save",
            "raise", "rank", "resuming", "recovery", "thrice",
        ],
        "",
    ),
    "change": {"none": "", "workers": "", "saves": "", "micro": "", "ranks": ""},
}  # fmt: skip
AXES = {**COURSE_AXES, **MECHANICS}
Levels = tuple[str, ...]  # one level of each axis, in the order of AXES


@dataclass(frozen=True)
class Cell:
    """One level on each axis; `number` seeds the random choices within the cell."""

    levels: Levels
    number: int

    def __getitem__(self, axis: str) -> str:
        return self.levels[list(AXES).index(axis)]

    @property
    def world_size(self) -> int:
        return {"one": 1, "ddp 5+2+1": 3}.get(self["ranks"], 2)

    @property
    def is_exact(self) -> bool:
        """True unless the cell changes the order in which floating-point numbers are added."""
        return self["change"] not in ("micro", "ranks")

    @property
    def keeps_best(self) -> bool:
        """True if every attempt keeps the best checkpoints, like the reference."""
        return self["saves"] != "end" and self["change"] != "saves"

    def course(self) -> list[str]:
        """Return the overrides that define what is computed."""
        args = ["phases=[statistics,body,head]"] if self["phases"] == "three" else []
        for axis in COURSE_AXES:
            args += AXES[axis][self[axis]].split()
        args += self.micro(int(self["accumulation"]))
        if self["phases"] == "three":  # the task sets the lengths of phases
            args = [word for word in args if not word.startswith(("updates=", "epochs="))]
        if not self.is_exact:
            args += ["task.dropout=0", "task.noise=0", "task.double=true"]
        return args

    def micro(self, accumulation: int) -> list[str]:
        """Return the override for this number of micro-batches per update, on the rank with the largest share."""
        largest = {"ddp 2": 4, "fsdp 2": 4, "ddp 5+3": 5, "fsdp 5+3": 5, "ddp 5+2+1": 5}.get(self["ranks"], 8)
        return [f"micro_batch_size={-(-largest // accumulation)}"]

    def mechanics(self, attempt: int) -> list[str]:
        """Return the overrides that do not affect any result; they may differ between attempts."""
        workers, saves = (list(AXES[axis]) for axis in ("workers", "saves"))
        worker, save = self["workers"], self["saves"]
        if self["change"] == "workers":
            readers = [name for name in workers if name != "spawn" or worker == "spawn"]
            worker = readers[(attempt + self.number) % len(readers)]
        if self["change"] == "saves":
            save = saves[(attempt + self.number) % 3]
        args = [*AXES["workers"][worker].split(), *AXES["saves"][save].split()]
        if self["ranks"] != "one" and self["end"] == "rank":
            args.append("parallelism.restarts=0")
        return args

    def changed_overrides(self) -> list[str]:
        """Return the overrides that change the micro-batches or ranks on resume; they replace those of the course."""
        if self["change"] == "micro":
            return self.micro(1 if self["accumulation"] == "2" else 2)
        if self["change"] == "ranks":
            others = [args for name, args in AXES["ranks"].items() if name != self["ranks"]]
            return [*others[self.number % len(others)].split(), "micro_batch_size=4"]
        return []


def can_be_combined(levels: Levels) -> bool:
    """Return whether the levels can be combined."""
    cell = Cell(levels, 0)
    if cell["keeps"] == "own generator" and cell["ranks"].startswith("pipeline"):
        return False  # the loss draws from a buffer of the first layer, which is on another rank
    if cell["keeps"] == "batch norm" and cell["ranks"] != "one" and (cell["data"] != "whole" or "+1" in cell["ranks"]):
        return False  # batch norm cannot train on a micro-batch of one sample
    if cell["end"] == "rank" and cell["ranks"] == "one":
        return False
    if not cell.is_exact and (cell["precision"] != "fp32" or cell["keeps"] != "layer norm"):
        return False  # float16 and bfloat16 round more than a different order of additions does
    return cell.is_exact or cell["data"] != "bad"


def pairs(levels: Levels) -> Iterator[tuple[int, str, int, str]]:
    """Yield every pair of levels in a cell."""
    for (one, left), (other, right) in itertools.combinations(enumerate(levels), 2):
        yield one, left, other, right


def draw_levels(rng: random.Random, course: Levels = (), rare: float = 0.05) -> Levels:
    """Return a random cell, of the given course if any.

    `rare` is the probability of spawned workers, which take seconds to start.
    """
    while True:
        levels = list(course)
        for axis in list(AXES)[len(course) :]:
            choices = list(AXES[axis])
            if axis == "workers" and rng.random() >= rare:
                choices.remove("spawn")
            levels.append(rng.choice(choices))
        if can_be_combined(tuple(levels)):
            return tuple(levels)


def cover_pairs(rng: random.Random, count: int, num_courses: int) -> list[Cell]:
    """Return `count` cells of `num_courses` courses, chosen greedily to cover many pairs of levels.

    Gains are divided by the cost of a run, so few cells have many ranks.
    """
    seen: set[tuple[int, str, int, str]] = set()

    def gain(levels: Levels) -> float:
        return len(set(pairs(levels)) - seen) / COST[levels[1].partition(" ")[0]]

    def best(candidates: list[Levels]) -> Levels:
        result = max(candidates, key=gain)
        seen.update(pairs(result))
        return result

    width = len(COURSE_AXES)
    ranks = ranks_of(rng, num_courses)
    courses = [best([levels[:width] for levels in draw_some(rng, rank)]) for rank in ranks]
    cells = [
        Cell(best([draw_levels(rng, course, rare=0.0) for _ in range(40)]), number)
        for number, course in enumerate(courses)
    ]
    while len(cells) < count:
        rare = 1.0 if len(cells) == num_courses else 0.0  # spawned workers in one cell only
        candidates = [draw_levels(rng, course, rare) for course in courses for _ in range(15)]
        cells.append(Cell(best(candidates), len(cells)))
    return cells[:count]


def ranks_of(rng: random.Random, num_courses: int) -> list[str]:
    """Return the ranks of each course: all levels in turn, or for few courses one process, ddp and another level."""
    levels = list(COURSE_AXES["ranks"])
    if num_courses >= len(levels):
        return [levels[number % len(levels)] for number in range(num_courses)]
    replicated = [level for level in levels if level.startswith("ddp")]
    others = [level for level in levels if not level.startswith(("one", "ddp"))]
    return ["one", rng.choice(replicated), rng.choice(others)][:num_courses]


def cells_whose_readers_change(rng: random.Random, count: int) -> list[Cell]:
    """Return cells of few courses, on one and two ranks, that are killed and resume with different data workers."""
    courses = [
        dict(zip(AXES, ("fp32", ranks, accumulation, "one", "adamw cosine", data, "layer norm"), strict=False))
        for ranks, accumulation, data in (
            ("one", "1", "ragged"), ("one", "2", "bad"), ("ddp 2", "2", "ragged"), ("ddp 5+3", "1", "bad"),
        )
    ]  # fmt: skip
    kills = ["update", "boundary", "late", "evaluation", "save", "SIGTERM", "resuming", "recovery", "thrice"]
    result = []
    for number in range(count):
        levels = courses[number % len(courses)] | {
            "workers": "spawn" if rng.random() < 0.01 else "0",
            "saves": rng.choice(["1", "2"]),
            "end": rng.choice(kills),
            "change": "workers",
        }
        result.append(Cell(tuple(levels[axis] for axis in AXES), rng.randrange(1000)))
    return result


COST = {"one": 1.0, "ddp": 1.5, "fsdp": 2.0, "pipeline": 3.0}  # approximate cost of a run, relative to one process


def draw_some(rng: random.Random, ranks: str) -> list[Levels]:
    """Return a few cells of these ranks at random."""
    result: list[Levels] = []
    while len(result) < 30:
        levels = draw_levels(rng)
        result += [levels] if levels[1] == ranks else []
    return result
