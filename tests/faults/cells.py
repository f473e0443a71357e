"""The cells of the resume matrix: what a run computes, how it is ended, and what is changed when it goes on.

A cell is a choice of a level on each axis. `drawn` gives cells at random from the whole product; `covering` picks few
that hold as many pairs of levels as they can, over few courses, because a course must also run once uninterrupted.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

# What a run computes: one reference, never interrupted, for each combination.
COURSE_AXES: dict[str, dict[str, str]] = {
    "precision": {
        "fp32": "precision=fp32",
        "bf16": "precision=bf16",
        "fp16": "precision=fp16",
        # overflows again and again: every second update the scale grows until it is too much
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
# What may be otherwise each time the run goes on, and how it is ended.
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
Levels = tuple[str, ...]  # one of each axis, in the order of AXES


@dataclass(frozen=True)
class Cell:
    """A choice on each axis; `number` begins the random choices within it."""

    levels: Levels
    number: int

    def __getitem__(self, axis: str) -> str:
        return self.levels[list(AXES).index(axis)]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return {"one": 1, "ddp 5+2+1": 3}.get(self["ranks"], 2)

    @property
    def is_exact(self) -> bool:
        """True where nothing changes that would add numbers in another order."""
        return self["change"] not in ("micro", "ranks")

    @property
    def keeps_best(self) -> bool:
        """True where the best checkpoints are kept in each attempt, as they are in the reference."""
        return self["saves"] != "end" and self["change"] != "saves"

    def course(self) -> list[str]:
        """Return the words of what is computed."""
        words = ["phases=[statistics,body,head]"] if self["phases"] == "three" else []
        for axis in COURSE_AXES:
            words += AXES[axis][self[axis]].split()
        words += self.micro(int(self["accumulation"]))
        if self["phases"] == "three":  # the lengths of phases are the task's
            words = [word for word in words if not word.startswith(("updates=", "epochs="))]
        if not self.is_exact:
            words += ["task.dropout=0", "task.noise=0", "task.double=true"]
        return words

    def micro(self, accumulation: int) -> list[str]:
        """Return the word for so many micro-batches in an update, at least on the rank with the largest share."""
        largest = {"ddp 2": 4, "fsdp 2": 4, "ddp 5+3": 5, "fsdp 5+3": 5, "ddp 5+2+1": 5}.get(self["ranks"], 8)
        return [f"micro_batch_size={-(-largest // accumulation)}"]

    def mechanics(self, attempt: int) -> list[str]:
        """Return the words that no number follows from; they may differ from attempt to attempt."""
        workers, saves = (list(AXES[axis]) for axis in ("workers", "saves"))
        worker, save = self["workers"], self["saves"]
        if self["change"] == "workers":
            readers = [name for name in workers if name != "spawn" or worker == "spawn"]
            worker = readers[(attempt + self.number) % len(readers)]
        if self["change"] == "saves":
            save = saves[(attempt + self.number) % 3]
        words = [*AXES["workers"][worker].split(), *AXES["saves"][save].split()]
        if self["ranks"] != "one" and self["end"] == "rank":
            words.append("parallelism.restarts=0")
        return words

    def changed(self) -> list[str]:
        """Return the words that go on with other micro-batches or ranks, in the place of those of the course."""
        if self["change"] == "micro":
            return self.micro(1 if self["accumulation"] == "2" else 2)
        if self["change"] == "ranks":
            others = [words for name, words in AXES["ranks"].items() if name != self["ranks"]]
            return [*others[self.number % len(others)].split(), "micro_batch_size=4"]
        return []


def can_be(levels: Levels) -> bool:
    """Tell whether a cell of these levels means something."""
    cell = Cell(levels, 0)
    if cell["keeps"] == "own generator" and cell["ranks"].startswith("pipeline"):
        return False  # its loss draws from a buffer of the first layer, which is on another rank
    if cell["keeps"] == "batch norm" and cell["ranks"] != "one" and (cell["data"] != "whole" or "+1" in cell["ranks"]):
        return False  # it cannot train on a micro-batch of one sample
    if cell["end"] == "rank" and cell["ranks"] == "one":
        return False
    if not cell.is_exact and (cell["precision"] != "fp32" or cell["keeps"] != "layer norm"):
        return False  # a half format rounds more than another order of sums does
    return cell.is_exact or cell["data"] != "bad"


def pairs(levels: Levels) -> Iterator[tuple[int, str, int, str]]:
    """Yield every pair of levels in a cell."""
    for (one, left), (other, right) in itertools.combinations(enumerate(levels), 2):
        yield one, left, other, right


def drawn(rng: random.Random, course: Levels = (), rare: float = 0.05) -> Levels:
    """Return a cell at random; of the given course where there is one. Spawned workers cost seconds and are `rare`."""
    while True:
        levels = list(course)
        for axis in list(AXES)[len(course) :]:
            choices = list(AXES[axis])
            if axis == "workers" and rng.random() >= rare:
                choices.remove("spawn")
            levels.append(rng.choice(choices))
        if can_be(tuple(levels)):
            return tuple(levels)


def covering(rng: random.Random, count: int, num_courses: int) -> list[Cell]:
    """Return `count` cells of `num_courses` courses that hold as many pairs of levels as a greedy choice finds.

    What a run of ranks costs counts: those cells are fewer.
    """
    seen: set[tuple[int, str, int, str]] = set()

    def gain(levels: Levels) -> float:
        return len(set(pairs(levels)) - seen) / COST[levels[1].partition(" ")[0]]

    def best(candidates: list[Levels]) -> Levels:
        found = max(candidates, key=gain)
        seen.update(pairs(found))
        return found

    width = len(COURSE_AXES)
    ranks = ranks_of(rng, num_courses)
    courses = [best([levels[:width] for levels in some(rng, rank)]) for rank in ranks]
    cells = [
        Cell(best([drawn(rng, course, rare=0.0) for _ in range(40)]), number) for number, course in enumerate(courses)
    ]
    while len(cells) < count:
        rare = 1.0 if len(cells) == num_courses else 0.0  # spawned workers once
        candidates = [drawn(rng, course, rare) for course in courses for _ in range(15)]
        cells.append(Cell(best(candidates), len(cells)))
    return cells[:count]


def ranks_of(rng: random.Random, num_courses: int) -> list[str]:
    """Return the ranks of each course: in turn, or one process, replicated ranks and one more where there are few."""
    levels = list(COURSE_AXES["ranks"])
    if num_courses >= len(levels):
        return [levels[number % len(levels)] for number in range(num_courses)]
    replicated = [level for level in levels if level.startswith("ddp")]
    others = [level for level in levels if not level.startswith(("one", "ddp"))]
    return ["one", rng.choice(replicated), rng.choice(others)][:num_courses]


def cells_whose_readers_change(rng: random.Random, count: int) -> list[Cell]:
    """Return cells of few courses, on one and two ranks, that are killed and resumed with another reader each time."""
    courses = [
        dict(zip(AXES, ("fp32", ranks, accumulation, "one", "adamw cosine", data, "layer norm"), strict=False))
        for ranks, accumulation, data in (
            ("one", "1", "ragged"), ("one", "2", "bad"), ("ddp 2", "2", "ragged"), ("ddp 5+3", "1", "bad"),
        )
    ]  # fmt: skip
    kills = ["update", "boundary", "late", "evaluation", "save", "SIGTERM", "resuming", "recovery", "thrice"]
    found = []
    for number in range(count):
        levels = courses[number % len(courses)] | {
            "workers": "spawn" if rng.random() < 0.01 else "0",
            "saves": rng.choice(["1", "2"]),
            "end": rng.choice(kills),
            "change": "workers",
        }
        found.append(Cell(tuple(levels[axis] for axis in AXES), rng.randrange(1000)))
    return found


COST = {"one": 1.0, "ddp": 1.5, "fsdp": 2.0, "pipeline": 3.0}  # seconds of a run, about, over those of one process


def some(rng: random.Random, ranks: str) -> list[Levels]:
    """Return a few cells of these ranks at random."""
    found: list[Levels] = []
    while len(found) < 30:
        levels = drawn(rng)
        found += [levels] if levels[1] == ranks else []
    return found
