"""Configuration files: find, read and guard the YAML of an option, and list the keys that it sets."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Container, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from runner.base.paths import shipped_path
from runner.config.guarded_yaml import read_guarded
from runner.config.options import GROUPS, function_of, options_of

GLOBAL = "# @package _global_"  # Hydra: the keys of this file are those of the whole configuration


_kept: MutableMapping[Any, Any] | None = None


@contextmanager
def files_unchanged() -> Iterator[None]:
    """Cache composed and parsed options inside the context, in which no configuration file may change."""
    global _kept
    before = _kept
    _kept = {} if before is None else before
    try:
        yield
    finally:
        _kept = before


def kept_while_unchanged(key: tuple[Any, ...], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what `make` returns; inside `files_unchanged`, a copy of its cached result for this key."""
    if _kept is None:
        return make()
    if key not in _kept:
        _kept[key] = make()
    return copy.deepcopy(dict(_kept[key]))


def variant_of(group: str, option: str, config_dir: Path | None) -> str:
    """Return the shipped option that a file extends through its defaults list; its own name if there is none."""
    seen: list[str] = []
    while function_of(group, option) is None and option not in seen:
        seen.append(option)
        entries = _defaults_list(group, option, config_dir)
        bases = [entry for entry in entries if isinstance(entry, str) and entry != "_self_"]
        option = bases[0].rpartition("/")[2].partition("@")[0] if bases else option
    return option if function_of(group, option) else (seen or [option])[0]


def selected_options(group: str, option: str, config_dir: Path | None = None) -> dict[str, str]:
    """Return group -> option selected by the defaults list of a file, or of the files it extends."""
    chosen: dict[str, str] = {}
    rest, seen = [(group, option)], set()
    while rest:
        here = rest.pop()
        if here in seen:
            continue  # a cycle, which Hydra reports
        seen.add(here)
        for entry in _defaults_list(*here, config_dir):
            if isinstance(entry, str) and entry != "_self_":
                base, _, name = entry.partition("@")[0].rpartition("/")
                rest.append((base.lstrip("/") or here[0], name))
            elif isinstance(entry, dict):
                selected = {str(key).split()[-1].lstrip("/"): str(value) for key, value in entry.items()}
                chosen = {**{key: value for key, value in selected.items() if key in GROUPS}, **chosen}
    return chosen


def shipped_options() -> dict[str, str]:
    """Return group -> option of the shipped defaults list."""
    return selected_options("", "config", None)


def _defaults_list(group: str, option: str, config_dir: Path | None) -> list[Any]:
    entries = load_file(group, option, config_dir).get("defaults")
    return entries if isinstance(entries, list) else []


def own_profile(profile: str, config_dir: Path | None) -> Path | None:
    """Return the file of a hardware profile in the user's folder; None if the profile is shipped."""
    file = file_of("hardware", profile, config_dir)
    return file if file and config_dir and file.is_relative_to(config_dir) else None


def facts_of_profiles(config_dir: Path | None = None) -> dict[str, dict[str, Any]]:
    """Return profile -> hardware facts, for every profile."""
    found = {
        name: load_file("hardware", name, config_dir).get("hardware") for name in options_of("hardware", config_dir)
    }
    return {name: facts for name, facts in found.items() if isinstance(facts, dict)}


def file_keys(group: str, option: str, config_dir: Path | None, known: Container[str]) -> list[str]:
    """Return the keys that an option's file sets, as on the command line."""
    content = {key: value for key, value in load_file(group, option, config_dir).items() if key != "defaults"}
    file = file_of(group, option, config_dir)
    is_global = not group or (file is not None and GLOBAL in text_of_file(file, config_dir))
    keys = [key for key, _ in flatten(content, "" if is_global else f"{group}.", known)]
    return [key for key in keys if group != "hardware" or not key.startswith("hardware.")]  # facts are not settings


def option_values(group: str, option: str, config_dir: Path | None) -> dict[str, Any]:
    """Return key -> value set by the file of an option, or by a file that it extends."""
    content = load_file(group, option, config_dir)
    entries = _defaults_list(group, option, config_dir)
    bases = [entry for entry in entries if isinstance(entry, str) and entry != "_self_"]
    found = [option_values(group, base.rpartition("/")[2].partition("@")[0], config_dir) for base in bases]
    found.insert(entries.index("_self_") if "_self_" in entries else len(found), content)
    return {key: value for values in found for key, value in values.items() if key != "defaults"}


def load_file(group: str, option: str, config_dir: Path | None) -> dict[str, Any]:
    """Return the content of an option's file; the user's file takes precedence. Empty if there is none."""
    return kept_while_unchanged(("file", group, option, config_dir), partial(_loaded, group, option, config_dir))


def _loaded(group: str, option: str, config_dir: Path | None) -> dict[str, Any]:
    import yaml  # type: ignore[import-untyped]
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    file = file_of(group, option, config_dir)
    text = text_of_file(file, config_dir) if file else ""
    try:
        content = OmegaConf.to_container(OmegaConf.load(NamedText(text, str(file))), resolve=False) if text else None
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, AssertionError, RecursionError):
        content = None  # Hydra reports it when it composes the file
    return {str(key): value for key, value in content.items()} if isinstance(content, dict) else {}


def file_of(group: str, option: str, config_dir: Path | None) -> Path | None:
    """Return the file of an option; the user's file takes precedence over the shipped one."""
    if Path(option).is_absolute():  # an absolute path would replace the folder
        return None
    files = [folder / group / f"{option}.yaml" for folder in (config_dir, shipped_path("conf")) if folder]
    return next((file for file in files if file.is_file()), None)


class NamedText(io.StringIO):
    """A text stream with a name, so that YAML's messages contain its file."""

    def __init__(self, text: str, *parts: str) -> None:
        super().__init__(text)
        self.name = str(Path(*parts))


def text_of_file(file: Path, config_dir: Path | None) -> str:
    """Return the text of a configuration file; files that are not shipped are guarded."""
    if config_dir is not None and file.is_relative_to(config_dir):
        return read_guarded(file, config_dir)
    return file.read_text(encoding="utf-8")


def shadows(config_dir: Path | None) -> Iterator[str]:
    if config_dir is None:
        return
    for file in sorted(config_dir.rglob("*.yaml")):
        inner = file.relative_to(config_dir)
        if (shipped_path("conf") / inner).is_file():
            yield f"{file} is used instead of the shipped {inner}"


def flatten(tree: Mapping[str, Any], prefix: str = "", stop: Container[str] = ()) -> Iterator[tuple[str, Any]]:
    """Yield the leaves with dotted names. Keys in `stop` are leaves; an empty group has none."""
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and name not in stop:
            yield from flatten(value, f"{name}.", stop)
        elif value is not None or name not in GROUPS:
            yield name, value
