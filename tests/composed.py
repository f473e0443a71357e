"""Hydra composes the same groups of the shipped files once in a process and its forks: it takes half of a short run.

A fork server keeps what it composed for all its forks. What a fork lacks it composes itself, and asks for: it writes
the groups into memory that it shares with all that fork, each of which composes them before its next fork. Files of a
user's folder (--config-dir) are read each time.
"""

from __future__ import annotations

import copy
import json
import mmap
import os
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from runner.base import configuration as configurations
from runner.base.configuration import Request
from runner.base.paths import shipped

SIZE = 1 << 18


class Composed:
    """Takes the place of what composes groups and reads an option's file."""

    def __init__(self) -> None:
        self._asked = mmap.mmap(-1, SIZE)  # by forks: lines of JSON
        self._answered = 0  # bytes of them, by this process
        self._trees: dict[tuple[Any, ...], Any] = {}
        self._files: dict[tuple[Any, ...], Any] = {}
        # files_unchanged, the seam that the product has, begins with nothing each time.
        self._real = configurations._compose_groups, configurations._load  # lint-tests: private: see above
        for name, mine in (("_compose_groups", self._groups), ("_load", self._file)):
            setattr(configurations, name, mine)

    def answer(self) -> None:
        """Compose and read what forks have asked for."""
        asked_for = self._asked[self._answered : self._asked.rfind(b"\n") + 1]
        self._answered += len(asked_for)
        lines = asked_for.splitlines()
        for line in lines:
            with suppress(ValueError):  # two forks of one command wrote at the same time
                asked = json.loads(line)
                if "groups" in asked:
                    self._groups(asked["groups"], Request((), Path("task.py") if asked["has_task_file"] else None), [])
                else:
                    self._file(asked["group"], asked["option"], None)

    def answer_before_forks(self) -> None:
        """Let this process, but none of its forks, compose what was asked for whenever it forks."""
        mine = os.getpid()

        def answer() -> None:
            if os.getpid() == mine:
                self.answer()

        os.register_at_fork(before=answer)

    def _groups(self, groups: Mapping[str, str], request: Request, problems: list[Any]) -> Any:
        compose, _ = self._real
        if request.config_dir:
            return compose(groups, request, problems)
        key = (*sorted(groups.items()), bool(request.task_file), shipped("conf"))
        if key not in self._trees:
            self._trees[key] = compose(groups, request, problems)
            self._ask({"groups": dict(groups), "has_task_file": bool(request.task_file)})
        return copy.deepcopy(self._trees[key])

    def _file(self, group: str, option: str, config_dir: Path | None) -> Any:
        _, load = self._real
        if config_dir:
            return load(group, option, config_dir)
        key = (group, option, shipped("conf"))
        if key not in self._files:
            self._files[key] = load(group, option, None)
            self._ask({"group": group, "option": option})
        return copy.deepcopy(self._files[key])

    def _ask(self, what: Mapping[str, Any]) -> None:
        begin = self._asked.rfind(b"\n") + 1
        line = json.dumps(what).encode() + b"\n"
        if begin + len(line) <= SIZE:
            self._asked[begin : begin + len(line)] = line


@cache
def composed() -> Composed:
    """Return what is composed in this process; from the first call on it is kept."""
    return Composed()
