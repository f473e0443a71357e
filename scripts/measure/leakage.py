"""Print which fraction of the validation and test data of each task is also in its training data.

Items are equal if they are identical: the same characters, pixel values or coordinates. The built-in data of gpt, nmt
and dynamo depends on the version of Python.
Run: python scripts/measure/leakage.py [TASK [DATA]]      DATA: data.path; default: the built-in data
"""

from __future__ import annotations

import importlib
import json
import platform
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from runner.tasks.cape.data import read_crop
from runner.tasks.dynamo.data import source_text
from runner.tasks.dynamo.text import TASKS as TEXT_TASKS
from runner.tasks.tractodiff.lines import voxels

from runner.base.paths import cache_folder
from runner.base.task import Context

HELD_OUT = ("val", "test")
ItemsOf = Callable[[str], Iterable[Hashable]]  # split -> items to compare
Row = tuple[str, Mapping[str, str]]  # what is compared, split -> result


def main() -> None:
    data = Path(sys.argv[2]) if len(sys.argv) > 2 else None
    print(f"{data or 'built-in data, Python ' + platform.python_version()}\n")
    print("| task | compared | val | test |\n|---|---|---|---|")
    for name, options in VARIANTS:
        if sys.argv[1:] and (name != sys.argv[1] or (data is not None and options)):
            continue
        task = importlib.import_module(f"runner.tasks.{name}.task").build(Context(0, data, cache_folder()), **options)
        title = " ".join([name, *(f"task.{key}={value}" for key, value in options.items())])
        for compared, results in ROWS[name](task):
            print(f"| {title} | {compared} | {' | '.join(results.get(split, '') for split in HELD_OUT)} |", flush=True)


def compare(name: str, items_of: ItemsOf, splits: Iterable[str] = HELD_OUT) -> Row:
    """Return the fraction of the items of each split that are also items of training."""
    known = set(items_of("train"))
    results = {}
    for split in splits:
        found = [item in known for item in items_of(split)]
        results[split] = f"{sum(found) / len(found):.3%} of {len(found):,}"
    return name, results


def gpt_rows(task: Any) -> Iterator[Row]:
    """Compare blocks of five lines that are not blank, without their indentation."""
    leakage = json.loads((task.corpus.cache / "leakage.json").read_text())
    for name, part in {"blocks of five lines, before removal": "of_documents", "after removal": "of_text"}.items():
        yield name, {split: f"{leakage[part][split]:.3%}" for split in HELD_OUT}


def tractodiff_rows(task: Any) -> Iterator[Row]:
    """Compare segments of 16 points with the point before them, in both directions, and voxels."""
    tracts = task.tracts
    splits = [split for split in HELD_OUT if tracts.subjects(split)]

    def lines_of(split: str) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
        for subject in tracts.subjects(split):
            yield from ((subject, line.numpy()) for line in tracts.streamlines(split, subject))

    def segments_of(split: str) -> Iterator[bytes]:
        for _, line in lines_of(split):
            for points in (line, line[::-1]):
                for first in range(len(points) - 16):
                    yield points[first : first + 17].tobytes()

    def voxels_of(split: str) -> set[Hashable]:
        return {
            (subject, *voxel)
            for subject in tracts.subjects(split)
            for voxel in voxels([line.numpy() for line in tracts.streamlines(split, subject)], tracts.affines[subject])
        }

    yield compare("segments of 16 points", segments_of, splits)
    yield compare("voxels of streamlines, by subject", voxels_of, splits)
    yield compare("subjects", tracts.subjects, splits)


def cape_rows(task: Any) -> Iterator[Row]:
    """Compare the pixels of objects, as cropped and scaled for the model, and categories."""
    splits = [split for split in HELD_OUT if split in task.sets]

    def pictures_of(split: str) -> Iterator[bytes]:
        episodes = task.dataset(split)
        for annotation in task.sets[split].annotations:
            yield read_crop(annotation, episodes.crop, episodes.image_size).numpy().tobytes()

    yield compare("pictures", pictures_of, splits)
    yield compare("categories", lambda split: [category.name for category in task.sets[split].categories], splits)


def nmt_rows(task: Any) -> Iterator[Row]:
    """Compare the tokens of sources and targets."""
    corpus = task.corpus
    splits = [split for split in HELD_OUT if split in corpus.sources]

    def texts(sequences: Any) -> Iterator[bytes]:
        return (sequences[number].tobytes() for number in range(len(sequences.lengths)))

    def pairs_of(split: str) -> Iterator[Hashable]:
        return zip(texts(corpus.sources[split]), texts(corpus.targets[split]), strict=True)

    yield compare("sources", lambda split: texts(corpus.sources[split]), splits)
    yield compare("targets", lambda split: texts(corpus.targets[split]), splits)
    yield compare("pairs of source and target", pairs_of, splits)


def hyperspectral_rows(task: Any) -> Iterator[Row]:
    """Compare cubes, and the photographs or files from which they are cropped."""

    def cubes_of(split: str) -> Iterator[bytes]:
        cubes = task.dataset(split)
        return (cubes[index]["cube"].numpy().tobytes() for index in range(len(cubes)))

    yield compare("cubes", cubes_of)
    yield compare("photographs or files", lambda split: {file.resolve() for file in task.dataset(split).files})


def dynamo_rows(task: Any) -> Iterator[Row]:
    """Compare the texts that the encoder reads, with and without their first line, the request."""
    for text_task in TEXT_TASKS:

        def inputs_of(split: str, text_task: str = text_task) -> Iterator[str]:
            return (source_text(record, text_task) for record in task.corpus.records(split, text_task))

        def contents_of(split: str, text_task: str = text_task) -> Iterator[str]:
            for record in task.corpus.records(split, text_task):
                first, _, rest = source_text(record, text_task).partition("\n")
                yield rest or first

        yield compare(f"{text_task}: inputs", inputs_of)
        yield compare(f"{text_task}: inputs without the first line", contents_of)


ROWS: Mapping[str, Callable[[Any], Iterator[Row]]] = {
    "gpt": gpt_rows,
    "tractodiff": tractodiff_rows,
    "cape": cape_rows,
    "nmt": nmt_rows,
    "hyperspectral": hyperspectral_rows,
    "dynamo": dynamo_rows,
}
VARIANTS: tuple[tuple[str, Mapping[str, str]], ...] = (
    ("gpt", {}),
    ("tractodiff", {}),
    ("tractodiff", {"data": "bundles"}),
    ("cape", {}),
    ("nmt", {}),
    ("hyperspectral", {}),
    ("dynamo", {}),
    ("dynamo", {"requests": "held_out"}),
)


if __name__ == "__main__":
    main()
