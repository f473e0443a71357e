"""Configuration files: find, check and read the YAML of an option, and list the keys that it sets."""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from runner.base.paths import shipped_path
from runner.config.guarded_yaml import read_guarded
from runner.config.options import AXES, GROUPS, find_signature, list_options

GLOBAL = "# @package _global_"  # for Hydra: this file contains top-level keys


_cache: MutableMapping[Any, Any] | None = None


@contextmanager
def cache_config_files() -> Iterator[None]:
    """Cache composed and parsed options inside the context, in which no configuration file may change."""
    global _cache
    before = _cache
    _cache = {} if before is None else before
    try:
        yield
    finally:
        _cache = before


def cached_config(key: tuple[Any, ...], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the result of `make`; inside `cache_config_files`, a copy of the cached result for this key."""
    if _cache is None:
        return make()
    if key not in _cache:
        _cache[key] = make()
    return copy.deepcopy(dict(_cache[key]))


def base_option(group: str, option: str, config_dir: Path | None) -> str:
    """Return the shipped option that a file extends through its defaults list; the option itself if it extends none."""
    visited: list[str] = []
    while find_signature(group, option) is None and option not in visited:
        visited.append(option)
        entries = _defaults_list(group, option, config_dir)
        bases = [entry for entry in entries if isinstance(entry, str) and entry != "_self_"]
        option = bases[0].rpartition("/")[2].partition("@")[0] if bases else option
    return option if find_signature(group, option) else (visited or [option])[0]


def selected_options(group: str, option: str, config_dir: Path | None = None) -> dict[str, str]:
    """Return group -> option selected by the defaults list of a file, or of the files it extends."""
    chosen: dict[str, str] = {}
    pending, visited = [(group, option)], set()
    while pending:
        current = pending.pop()
        if current in visited:
            continue  # a cycle, which Hydra reports
        visited.add(current)
        for entry in _defaults_list(*current, config_dir):
            if isinstance(entry, str) and entry != "_self_":
                base, _, name = entry.partition("@")[0].rpartition("/")
                pending.append((base.lstrip("/") or current[0], name))
            elif isinstance(entry, dict):
                selected = {_entry_group(key): str(value) for key, value in entry.items()}
                chosen = {**{key: value for key, value in selected.items() if key in GROUPS}, **chosen}
    return chosen


def shipped_options() -> dict[str, str]:
    """Return group -> option of the shipped defaults list."""
    return selected_options("", "config", None)


def _defaults_list(group: str, option: str, config_dir: Path | None) -> list[Any]:
    entries = load_file(group, option, config_dir).get("defaults")
    return entries if isinstance(entries, list) else []


def _entry_group(key: object) -> str:
    """Return the group in an entry of a defaults list, such as `override /precision`."""
    return str(key).split()[-1].lstrip("/")


def overridden_keys(config_dir: Path | None, known_keys: Container[str]) -> dict[str, str]:
    """Return key of a group in the user's config.yaml -> its group, if the group's option overrides the file.

    Hydra merges a file at the position of _self_ in its defaults list, so options that follow override it.
    """
    entries = _defaults_list("", "config", config_dir)
    later = entries[entries.index("_self_") + 1 :] if "_self_" in entries else []
    groups = {_entry_group(key) for entry in later if isinstance(entry, dict) for key in entry}
    keys = {key: key.partition(".")[0] for key in file_keys("", "config", config_dir, known_keys)}
    return {key: group for key, group in keys.items() if group in groups and group in AXES and key != group}


def user_profile_file(profile: str, config_dir: Path | None) -> Path | None:
    """Return the file of a hardware profile in the user's folder; None if the profile is shipped."""
    file = find_config_file("hardware", profile, config_dir)
    return file if file and config_dir and file.is_relative_to(config_dir) else None


def profile_facts(config_dir: Path | None = None) -> dict[str, dict[str, Any]]:
    """Return profile -> hardware facts, for every profile."""
    profiles = {
        name: load_file("hardware", name, config_dir).get("hardware") for name in list_options("hardware", config_dir)
    }
    return {name: facts for name, facts in profiles.items() if isinstance(facts, dict)}


def file_keys(group: str, option: str, config_dir: Path | None, known_keys: Container[str]) -> list[str]:
    """Return the keys that an option's file sets, named as on the command line."""
    content = {key: value for key, value in load_file(group, option, config_dir).items() if key != "defaults"}
    file = find_config_file(group, option, config_dir)
    is_global = not group or (file is not None and GLOBAL in read_config_text(file, config_dir))
    keys = [key for key, _ in flatten(content, "" if is_global else f"{group}.", known_keys)]
    return [key for key in keys if group != "hardware" or not key.startswith("hardware.")]  # facts, not settings


def option_values(group: str, option: str, config_dir: Path | None) -> dict[str, Any]:
    """Return key -> value set by the file of an option, or by a file that it extends."""
    content = load_file(group, option, config_dir)
    entries = _defaults_list(group, option, config_dir)
    bases = [entry for entry in entries if isinstance(entry, str) and entry != "_self_"]
    layers = [option_values(group, base.rpartition("/")[2].partition("@")[0], config_dir) for base in bases]
    layers.insert(entries.index("_self_") if "_self_" in entries else len(layers), content)
    return {key: value for values in layers for key, value in values.items() if key != "defaults"}


def load_file(group: str, option: str, config_dir: Path | None) -> dict[str, Any]:
    """Return the content of an option's file; the user's file takes precedence. Empty if there is none."""
    return cached_config(("file", group, option, config_dir), partial(_load_uncached, group, option, config_dir))


def _load_uncached(group: str, option: str, config_dir: Path | None) -> dict[str, Any]:
    file = find_config_file(group, option, config_dir)
    return read_config_mapping(file, config_dir) if file else {}  # Hydra reports what cannot be read


def find_config_file(group: str, option: str, config_dir: Path | None) -> Path | None:
    """Return the file of an option; the user's file takes precedence over the shipped one."""
    if Path(option).is_absolute():  # an absolute path would replace the folder
        return None
    files = [folder / group / f"{option}.yaml" for folder in (config_dir, shipped_path("conf")) if folder]
    return next((file for file in files if file.is_file()), None)


def read_config_mapping(file: Path, config_dir: Path | None) -> dict[str, Any]:
    """Return the mapping in a configuration file; empty if it cannot be parsed or is not a mapping."""
    from runner.config.yaml_text import read_mapping  # OmegaConf is slow to import

    text = read_config_text(file, config_dir)
    return read_mapping(text, str(file)) if text else {}


def read_config_text(file: Path, config_dir: Path | None) -> str:
    """Return the text of a configuration file; files that are not shipped are checked."""
    if config_dir is not None and file.is_relative_to(config_dir):
        return read_guarded(file, config_dir)
    return file.read_text(encoding="utf-8")


def shadowing_notes(config_dir: Path | None) -> Iterator[str]:
    """Yield a message for each file of the user's folder that replaces a shipped one."""
    if config_dir is None:
        return
    for file in sorted(config_dir.rglob("*.yaml")):
        inner = file.relative_to(config_dir)
        if (shipped_path("conf") / inner).is_file():
            yield f"{file} is used instead of the shipped {inner}"


def flatten(tree: Mapping[str, Any], prefix: str = "", stop: Container[str] = ()) -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) of each leaf; keys in `stop` are leaves, and groups without content are left out."""
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and name not in stop:
            yield from flatten(value, f"{name}.", stop)
        elif value is not None or name not in GROUPS:
            yield name, value
