"""Write measured settings as a hardware profile for `+hardware=NAME`, with the evidence in comments."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from runner.base.errors import AccelRunError, ConfigError, Problem
from runner.base.paths import shipped_path
from runner.base.secret import sanitize
from runner.config.config_files import selected_options
from runner.config.configuration import compose
from runner.config.options import GROUPS
from runner.config.request import Request, merge_overrides, override_key
from runner.durable import files
from runner.durable.directory import check_run_name

MARK = "# Written by accel-run"


@dataclass(frozen=True)
class Profile:
    """Settings with their evidence.

    words     overrides; none: nothing is better than the current settings
    title     one line
    by        the command that found them
    evidence  lines of text: where they were tried, and the gain of each
    """

    words: tuple[str, ...]
    title: str
    by: str
    evidence: tuple[str, ...]


def write_profile(profile: Profile, request: Request, name: str) -> tuple[Path, str]:
    """Write a profile of that name; return its file, and the command that uses it.

    The file is in the folder of --config-dir, else in ./conf. Raises ConfigError if accel-run did not write an existing
    file of that name, or if the profile would not have its effect.
    """
    file = check_profile(request, name)
    folder = file.parents[1]
    for place in (folder, folder / "hardware"):
        files.make_directory(place)
    before = file.read_bytes() if file.exists() else None
    files.atomic_write(file, profile_text(profile, _of_the_one_before(request)))
    taken = _with_profile(request, profile, name, folder)
    try:
        _must_have_effect(taken, profile, file)
    except AccelRunError:
        if before is None:
            files.remove(file)
        else:
            files.atomic_write(file, before)
        raise
    return file, _command(taken, folder)


def check_profile(request: Request, name: str) -> Path:
    """Return the file of a profile of that name. Raises ConfigError if it cannot be written."""
    try:
        check_run_name(name)
    except ConfigError as error:
        what = "must be letters, digits, '.', '_' and '-', and begin with a letter or digit; 'last' is taken"
        raise ConfigError(Problem(what, f"profile={name}", "choose another name, as profile=mine")) from error
    folder = request.config_dir or Path.cwd() / "conf"
    file = folder / "hardware" / f"{name}.yaml"
    if file.exists() and MARK not in file.read_text(encoding="utf-8", errors="replace"):
        what = f"must be a new name, but {file} is there and was not written by accel-run"
        raise ConfigError(Problem(what, f"profile={name}", "choose another name"))
    there = next(place for place in (file.parent, *file.parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        what = f"must be written to {file}, but {there} is not a folder in which you may write"
        raise ConfigError(Problem(what, f"profile={name}", "choose another folder with --config-dir"))
    return file


def profile_text(profile: Profile, before: tuple[str, ...] = ()) -> str:
    """Return the profile.

    before  settings of the profile in use, which the new one replaces
    """
    options, keys = dict[str, str](), dict[str, Any]()
    for word in merge_overrides(before, profile.words):
        key, _, value = word.partition("=")
        if key in GROUPS:
            options[key] = value
        else:
            *groups, inner = key.split(".")
            place = keys
            for group in groups:
                place = place.setdefault(group, {})
            place[inner] = _literal(value)
    written = f"{MARK} {profile.by} on {datetime.now(UTC):%Y-%m-%d}."
    lines = ["# @package _global_", written, *(f"# {sanitize(line)}" for line in profile.evidence)]
    if options:
        lines += [
            "defaults:",
            *(f"  - override /{group}: {json.dumps(option)}" for group, option in options.items()),
            "",
        ]
    lines += _written(keys)
    lines += ["", "hardware:", f"  title: {json.dumps(profile.title)}", "  devices: []", ""]
    return "\n".join(line for number, line in enumerate(lines) if line or (number and lines[number - 1]))


def _written(keys: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """Yield keys and values as YAML."""
    for key, value in keys.items():
        if isinstance(value, dict) and value:
            yield f"{indent}{key}:"
            yield from _written(value, f"{indent}  ")
        else:
            yield f"{indent}{key}: {json.dumps(value)}"


def _of_the_one_before(request: Request) -> tuple[str, ...]:
    """Return the overrides that the profile in use amounts to."""
    composed = compose(request)
    selected = selected_options("hardware", composed.profile, request.config_dir)
    own = {key for key, source in composed.sources.items() if source == f"profile {composed.profile}"} - {*GROUPS}
    values = composed.flat()
    return (
        *(f"{group}={option}" for group, option in selected.items()),
        *(f"{key}={json.dumps(values[key])}" for key in sorted(own & values.keys())),
    )


def _with_profile(request: Request, profile: Profile, name: str, folder: Path) -> Request:
    """Return the request with the profile, without overrides of its settings."""
    set_by_it = [word.partition("=")[0] for word in profile.words]
    words = [word for word in request.overrides if override_key(word) not in (*set_by_it, "hardware")]
    own = None if folder == shipped_path("conf") else folder
    return replace(request, overrides=(*words, f"hardware={name}"), config_dir=own)


def _must_have_effect(request: Request, profile: Profile, file: Path) -> None:
    """Raise ConfigError if a value of the profile is not in the composed configuration."""
    found = compose(request).flat()
    for word in profile.words:
        key, _, value = word.partition("=")
        if str(found.get(key)).lower() != str(_literal(value)).lower():
            what = f"would still be {found.get(key)}: something else sets it"
            raise ConfigError(Problem(what, f"{file}: {key}", f"use {word} on the command line"))


def _command(request: Request, folder: Path) -> str:
    words = [f"+{word}" if word.startswith("hardware=") else word for word in request.overrides]
    flags = [] if request.config_dir is None else ["--config-dir", _shown(folder)]
    flags = [*flags, "--task", str(request.task_file)] if request.task_file else flags
    return shlex.join(["accel-run", "train", *flags, *words])


def _shown(folder: Path) -> str:
    return str(folder.relative_to(Path.cwd())) if folder.is_relative_to(Path.cwd()) else str(folder)


def _literal(value: str) -> Any:
    """Return a value of the command line as YAML reads it."""
    try:
        return json.loads(value)
    except ValueError:
        return value
