"""The planner's decisions so far, and the methods with which rules change them."""

from __future__ import annotations

import dataclasses
from typing import Any

from runner.base.errors import Problem
from runner.config.configuration import Choice, Configuration
from runner.config.options import find_signature
from runner.config.schema import default_values
from runner.plan.inventory import Inventory
from runner.plan.memory_fit import MemoryNeeds
from runner.plan.rank_devices import RankDevice


class Decisions:
    """The decisions so far, with reasons; rules read and change them.

    needs     memory demand of training; None if it was not traced
    num_sharing  number of ranks that share the cores of the inventory; None: the ranks whose GPUs it contains
    copy_size    the value for parallelism.shard_size=auto or stages=auto; None: a rule chooses it
    copy_sizes   possible values of copy_size whose predicted times are compared, ascending; the rule chose the first
    choices   group -> choice; `choose` and `set` replace `auto`
    problems  reported together at the end
    """

    def __init__(self, configuration: Configuration, inventory: Inventory, needs: MemoryNeeds | None) -> None:
        self.configuration = configuration
        self.inventory = inventory
        self.needs = needs if needs is not None and needs.demands else None
        self.ranks: tuple[RankDevice, ...] = ()
        self.num_sharing: int | None = None
        self.copy_size: int | str | None = None
        self.copy_sizes: tuple[int | str, ...] = ()
        self.choices = dict(configuration.choices)
        self.reasons = {key: source for key, source in configuration.sources.items() if key != "hardware"}
        self.notes = [f"memory is not predicted: {needs.why_not}"] if needs is not None and needs.why_not else []
        self.problems: list[Problem] = []

    def choose(self, group: str, name: str, reason: str) -> None:
        """Replace `auto` or an unsupported option with `name`; keys set by the user are kept."""
        signature = find_signature(group, name)
        options = default_values(signature.keys) if signature else {}
        for_auto = self.configuration.for_auto
        options |= {key: for_auto[f"{group}.{key}"] for key in options if f"{group}.{key}" in for_auto}
        for key, value in self.choices[group].options.items():
            if f"{group}.{key}" not in self.configuration.sources:
                continue
            if key in options:
                options[key] = value
            else:
                self.notes.append(f"{group}.{key}={value} has no effect with {group}={name}")
        self.choices[group] = Choice(name, name, options)
        self.reasons[group] = reason

    def set(self, group: str, key: str, value: Any, reason: str) -> None:
        """Resolve one key of a choice."""
        choice = self.choices[group]
        self.choices[group] = dataclasses.replace(choice, options={**choice.options, key: value})
        self.reasons[f"{group}.{key}"] = reason

    def reject_or_replace(self, group: str, why: str, instead: str, reason: str, fix: str = "") -> None:
        """Record a problem if the user has set the option; otherwise replace it with `instead` and add a note.

        why     why the option is not supported
        reason  shown as the reason of `instead`
        fix     fix for the problem; empty: suggest `instead` or auto
        """
        name = self.choices[group].name
        if self.configuration.is_set_by_user(group):
            alternatives = dict.fromkeys((instead, "auto"))
            fix = fix or "use " + ", or ".join(f"{group}={alternative}" for alternative in alternatives)
            self.problems.append(Problem(why, f"{group}={name}", fix))
        else:
            self.notes.append(f"{group}={name}: {why}; using {instead}")
            self.choose(group, instead, reason)
