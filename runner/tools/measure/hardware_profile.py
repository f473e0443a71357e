"""Write settings found by measurement to a hardware profile for `+hardware=NAME`, with the evidence as comments."""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from runner.base.errors import AccelRunError, ConfigError, Problem
from runner.base.paths import shipped_path
from runner.base.secret import sanitize
from runner.config.config_files import selected_options
from runner.config.configuration import compose
from runner.config.options import GROUPS
from runner.config.request import Request, merge_overrides, override_key
from runner.durable import files
from runner.durable.directory import check_run_name

HEADER = "# Written by accel-run"


@dataclass(frozen=True)
class Profile:
    """The content of a profile.

    overrides  settings such as `precision=bf16`; empty if no measured setting was better than the current one
    title      one line
    by         command that found the settings
    evidence   lines of text: task, machine, and the gain of each setting
    """

    overrides: tuple[str, ...]
    title: str
    by: str
    evidence: tuple[str, ...]


def write_profile(profile: Profile, request: Request, name: str) -> tuple[Path, str]:
    """Write a profile; return its path and a command that uses it.

    The file is written to the folder given by --config-dir, or to ./conf. Raises ConfigError if a file with that name
    exists and was not written by accel-run, or if other settings take precedence over those of the profile.
    """
    file = check_profile(request, name)
    folder = file.parents[1]
    for directory in (folder, folder / "hardware"):
        files.make_directory(directory)
    before = file.read_bytes() if file.exists() else None
    files.atomic_write(file, profile_text(profile, _overrides_in_use(request)))
    with_profile = _apply_profile(request, profile, name, folder)
    try:
        values = compose(with_profile).flat()
        for override in profile.overrides:
            key, _, value = override.partition("=")
            if str(values.get(key)).lower() != str(_parse_value(value)).lower():
                what = f"would still be {values.get(key)}, because another source sets it"
                raise ConfigError(Problem(what, f"{file}: {key}", f"use {override} on the command line"))
    except AccelRunError:
        if before is None:
            files.remove(file)
        else:
            files.atomic_write(file, before)
        raise
    return file, _format_command(with_profile, folder)


def check_profile(request: Request, name: str) -> Path:
    """Return the path of a profile. Raises ConfigError if the name is invalid or the file cannot be written."""
    try:
        check_run_name(name)
    except ConfigError as error:
        what = "must consist of letters, digits, '.', '_' and '-', and begin with a letter or digit; 'last' is reserved"
        raise ConfigError(Problem(what, f"profile={name}", "choose another name, such as profile=mine")) from error
    folder = request.config_dir or Path.cwd() / "conf"
    file = folder / "hardware" / f"{name}.yaml"
    if file.exists() and HEADER not in file.read_text(encoding="utf-8", errors="replace"):
        what = f"must be a new name, but {file} exists and was not written by accel-run"
        raise ConfigError(Problem(what, f"profile={name}", "choose another name"))
    existing = next(parent for parent in (file.parent, *file.parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        what = f"must be written to {file}, but {existing} is not a writable folder"
        raise ConfigError(Problem(what, f"profile={name}", "choose another folder with --config-dir"))
    return file


def profile_text(profile: Profile, before: tuple[str, ...] = ()) -> str:
    """Return the profile as YAML.

    before  settings of the current profile; they are kept unless the new profile sets them
    """
    options, keys = dict[str, str](), dict[str, Any]()
    for override in merge_overrides(before, profile.overrides):
        key, _, value = override.partition("=")
        if key in GROUPS:
            options[key] = value
        else:
            *groups, inner = key.split(".")
            node = keys
            for group in groups:
                node = node.setdefault(group, {})
            node[inner] = _parse_value(value)
    header = f"{HEADER} {profile.by} on {datetime.now(UTC):%Y-%m-%d}."
    lines = ["# @package _global_", header, *(f"# {sanitize(line)}" for line in profile.evidence)]
    if options:
        lines += [
            "defaults:",
            *(f"  - override /{group}: {json.dumps(option)}" for group, option in options.items()),
            "",
        ]
    lines += yaml.safe_dump(keys, sort_keys=False).splitlines() if keys else []
    lines += ["", "hardware:", f"  title: {json.dumps(profile.title)}", "  devices: []", ""]
    return "\n".join(line for number, line in enumerate(lines) if line or (number and lines[number - 1]))


def _overrides_in_use(request: Request) -> tuple[str, ...]:
    """Return the settings of the current profile as overrides."""
    composed = compose(request)
    selected = selected_options("hardware", composed.profile, request.config_dir)
    keys = {key for key, source in composed.sources.items() if source == f"profile {composed.profile}"} - {*GROUPS}
    values = composed.flat()
    return (
        *(f"{group}={option}" for group, option in selected.items()),
        *(f"{key}={json.dumps(values[key])}" for key in sorted(keys & values.keys())),
    )


def _apply_profile(request: Request, profile: Profile, name: str, folder: Path) -> Request:
    """Return the request with this profile selected, and without command-line overrides of the same settings."""
    replaced = [override.partition("=")[0] for override in profile.overrides]
    kept = [override for override in request.overrides if override_key(override) not in (*replaced, "hardware")]
    config_dir = None if folder == shipped_path("conf") else folder
    return replace(request, overrides=(*kept, f"hardware={name}"), config_dir=config_dir)


def _format_command(request: Request, folder: Path) -> str:
    overrides = [f"+{item}" if item.startswith("hardware=") else item for item in request.overrides]
    flags = [] if request.config_dir is None else ["--config-dir", _relative_to_cwd(folder)]
    flags = [*flags, "--task", str(request.task_file)] if request.task_file else flags
    return shlex.join(["accel-run", "train", *flags, *overrides])


def _relative_to_cwd(folder: Path) -> str:
    return str(folder.relative_to(Path.cwd())) if folder.is_relative_to(Path.cwd()) else str(folder)


def _parse_value(value: str) -> Any:
    """Parse a value as JSON; return it as text if it is not JSON."""
    try:
        return json.loads(value)
    except ValueError:
        return value
