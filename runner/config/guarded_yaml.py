"""Read untrusted configuration files: check their size and content before constructing anything.

Refuses files that expand when parsed (aliases), are too large or too deeply nested, construct objects (tags), call
code (resolvers, _target_), change Hydra's own settings, refer to files outside of their folder, or contain secrets.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.base.errors import ConfigError, Problem, SecurityRefusal
from runner.base.secret_refusal import secret_problems

if TYPE_CHECKING:
    from yaml.events import Event  # type: ignore[import-untyped]

MAX_BYTES = 64 << 10
MAX_DEPTH = 32
MAX_NODES = 3_000  # with aliases expanded; parsing more would take seconds
MAX_CHARACTERS = 1 << 20  # of all values, with every ${KEY} replaced

# Environment variables that a configuration may use: paths, and variables of schedulers. None of them is a secret.
ENVIRONMENT = (
    "HOME", "USER", "LOGNAME", "HOSTNAME", "TMPDIR", "SCRATCH", "WORK", "DATA", "XDG_CACHE_HOME", "XDG_DATA_HOME",
    "ACCEL_RUN_CACHE", "CUDA_VISIBLE_DEVICES",
    "SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_SUBMIT_DIR", "SLURM_TMPDIR",
    "SLURM_NNODES", "SLURM_NTASKS", "SLURM_CPUS_PER_TASK",
)  # fmt: skip


def read_guarded(file: Path, root: Path) -> str:
    """Return the text of a YAML file in the folder `root`, once it has been found safe to parse.

    Raises SecurityRefusal if the file would run code or refers to files outside of `root`, ConfigError for any other
    problem.
    """
    text = _read_text(file, root)
    _check_text(text, str(file))
    return text


@lru_cache(maxsize=256)
def _check_text(text: str, where: str) -> None:
    """Check the content of a file, once per process, because composing a configuration reads it several times."""
    tree = _parse(text, where)
    for key, value in _iterate_leaves(tree):
        refuse_calls(key, value, f"{where}: {key}")
    _refuse_foreign_references(tree, text, where)
    problems = secret_problems(tree, where)
    if problems:
        raise ConfigError(problems)


def refuse_calls(key: str, value: Any, where: str) -> None:
    """Raise SecurityRefusal if a value names code to call, or uses an environment variable that is not allowed."""
    if any(part in _CALL_KEYS for part in key.split(".")):
        raise SecurityRefusal("a configuration cannot import or call code by name", where=where, fix=_OPTIONS_ONLY)
    for text in (key, value):
        if isinstance(text, str) and "${" in text:
            _refuse_interpolation(text, where)


def refuse_growth(tree: Mapping[str, Any]) -> None:
    """Raise ConfigError if a tree would be too large with each ${KEY} replaced; computes the size without replacing."""
    sizes: dict[tuple[Any, ...], tuple[int, int]] = {}
    nodes, characters = _expanded_size(tree, tree, (), sizes, set())
    if nodes > 2 * MAX_NODES or characters > MAX_CHARACTERS:
        limits = f"{2 * MAX_NODES:,} values and {MAX_CHARACTERS:,} characters"
        what = f"must have at most {limits} after each ${{KEY}} is replaced"
        raise ConfigError(Problem(what, "the configuration", "write the values instead of references"))


def _expanded_size(
    value: Any,
    tree: Mapping[str, Any],
    path: tuple[Any, ...],
    sizes: dict[tuple[Any, ...], tuple[int, int]],
    ancestors: set[tuple[Any, ...]],
) -> tuple[int, int]:
    """Return the number of values and characters after expansion. OmegaConf later reports circular references."""
    if not isinstance(value, (str, Mapping, list)):
        return 1, 0
    if isinstance(value, str) and "${" not in value:
        return 1, len(value)
    if path in sizes:
        return sizes[path]
    if path in ancestors:
        return 0, 0
    ancestors.add(path)
    nodes, characters = 1, len(value) if isinstance(value, str) else 0
    children: Iterable[tuple[Any, tuple[Any, ...]]]
    if isinstance(value, Mapping):
        children = [(item, (*path, key)) for key, item in value.items()]
    elif isinstance(value, list):
        children = [(item, (*path, number)) for number, item in enumerate(value)]
    else:
        children = [_resolve_reference(name[1], tree, path) for name in _REFERENCE.finditer(value)]
    for item, child_path in children:
        child_size = _expanded_size(item, tree, child_path, sizes, ancestors)
        nodes, characters = nodes + child_size[0], characters + child_size[1]
    ancestors.discard(path)
    sizes[path] = nodes, characters
    return nodes, characters


def _resolve_reference(name: str, tree: Mapping[str, Any], path: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Return the value that ${name} at `path` refers to, and its path; None if there is no such value."""
    relative = name.lstrip(".")
    num_parents = len(name) - len(relative)
    location: tuple[Any, ...] = path[: len(path) - num_parents] if num_parents else ()
    parts = re.findall(r"[^.\[\]]+", relative)
    value: Any = tree
    for step in location:
        value = value[step]
    for _ in range(_MAX_STEPS):
        if isinstance(value, str) and parts and (match := _REFERENCE.fullmatch(value)):
            target = match[1].lstrip(".")  # the path leads through another reference
            num_up = len(match[1]) - len(target)
            location, value = (location[: len(location) - num_up] if num_up else ()), tree
            parts = [*re.findall(r"[^.\[\]]+", target), *parts]
            for step in location:
                value = value[step]
            continue
        if not parts:
            return value, location
        name_of_key: Any = parts.pop(0)
        index = int(name_of_key) if name_of_key.isdecimal() and len(name_of_key) < 10 else None
        candidates: list[Any]
        if isinstance(value, list):
            candidates = [index] if index is not None and index < len(value) else []
        else:
            candidates = [key for key in (name_of_key, index) if isinstance(value, Mapping) and key in value]
        if not candidates:
            return None, location
        location, value = (*location, candidates[0]), value[candidates[0]]
    raise ConfigError(Problem("has too many nested references", f"${{{name}}}", "write the value"))


def _read_text(file: Path, root: Path) -> str:
    """Return the text of the file, after checking its location, type and size."""
    resolved = file.resolve()
    if not resolved.is_relative_to(root.resolve()):
        raise SecurityRefusal(f"is outside of {root}", where=str(file), fix="copy the file into this folder")
    try:
        descriptor = os.open(resolved, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as stream:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ConfigError(Problem("must be a plain file", str(file)))
            content = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(Problem(f"must be readable: {error.strerror}", str(file))) from error
    if len(content) > MAX_BYTES:
        raise ConfigError(Problem(f"must be at most {MAX_BYTES >> 10} KiB", str(file)))
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(Problem(f"must be UTF-8 text: {error.reason} at byte {error.start}", str(file))) from error


def _parse(text: str, where: str) -> Any:
    """Parse the file. Raises ConfigError and SecurityRefusal before anything large is constructed."""
    import yaml  # type: ignore[import-untyped]

    try:
        _check_size(yaml.parse(text, Loader=yaml.SafeLoader), where)
        return yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(Problem(f"must be valid YAML: {error.problem}", f"{where}{line}")) from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a number of 5,000 digits, the 30th of February
        raise ConfigError(Problem(f"must be valid YAML: {str(error).splitlines()[0]}", where)) from error


def _check_size(events: Iterable[Event], where: str) -> None:
    """Raise if a file is too large or too deeply nested, or has tags. Only reads the events of the parser."""
    depth = nodes = documents = 0
    sizes: dict[str, int] = {}  # anchor -> number of nodes that an alias of it stands for
    ancestors: list[tuple[str | None, int]] = []  # enclosing collections: (anchor, number of nodes before it)
    for event in events:
        _refuse_tag(event, where)
        kind, anchor = type(event).__name__, getattr(event, "anchor", None)
        if kind == "DocumentStartEvent":
            documents += 1
        elif kind == "AliasEvent":
            nodes += sizes.get(anchor or "", 1)
        elif kind in ("MappingStartEvent", "SequenceStartEvent"):
            ancestors.append((anchor, nodes))
            depth, nodes = depth + 1, nodes + 1
            sizes |= {anchor: MAX_NODES} if anchor else {}  # an alias of an enclosing node would expand forever
        elif kind in ("MappingEndEvent", "SequenceEndEvent"):
            depth -= 1
            name, before = ancestors.pop()
            sizes |= {name: nodes - before} if name else {}
        elif kind == "ScalarEvent":
            nodes += 1
            sizes |= {anchor: 1} if anchor else {}
        if depth > MAX_DEPTH:
            raise ConfigError(Problem(f"must be nested at most {MAX_DEPTH} levels deep", where))
        if nodes > MAX_NODES:
            raise ConfigError(Problem(f"must have at most {MAX_NODES} values after aliases are expanded", where))
        if documents > 1:
            raise ConfigError(Problem("must contain only one YAML document, but another follows after ---", where))


def _refuse_tag(event: Event, where: str) -> None:
    tag = getattr(event, "tag", None)
    if tag is None or tag in _PLAIN_TAGS:
        return
    line = f"{where}:{event.start_mark.line + 1}"
    if "python" in tag:
        raise SecurityRefusal("a configuration cannot construct objects", where=line, fix=f"remove the tag {tag}")
    raise ConfigError(Problem(f"the tag {tag} is not supported", line, "write the plain value"))


def _refuse_interpolation(text: str, where: str) -> None:
    for match in _INTERPOLATION.finditer(text):
        name = match["variable"]
        if name is not None and name not in ENVIRONMENT:
            raise SecurityRefusal(
                f"a configuration cannot use the environment variable {name}",
                where=where,
                fix=f"use one of {', '.join(ENVIRONMENT)}",
            )
    if "${" in _INTERPOLATION.sub("", text):
        what = "a configuration cannot call resolvers other than oc.env"
        raise SecurityRefusal(what, where=where, fix="use ${KEY} or ${oc.env:NAME}")


def _refuse_foreign_references(tree: Any, text: str, where: str) -> None:
    """Raise if the file sets Hydra's own keys, or its defaults list names anything but options."""
    heads = [_PACKAGE.match(line.strip()) for line in text.splitlines()]  # like Hydra: U+2028 ends a line
    for package in [head[1] for head in heads if head]:
        if package not in _PACKAGES:
            raise SecurityRefusal(
                f"the package {package} is not allowed", where=where, fix=f"use one of {', '.join(_PACKAGES)}"
            )
    if not isinstance(tree, Mapping):
        return
    entries = list(_defaults_entries(tree.get("defaults")))
    if any(re.split(r"[./@]", name.lstrip("/"))[0] == "hydra" for name in (*map(str, tree), *entries)):
        raise SecurityRefusal("configuration files cannot change Hydra's settings", where=where, fix=_NO_HYDRA)
    for entry in entries:
        name, _, package = entry.partition("@")
        if ".." in entry or name.startswith(("//", "~")) or ":" in name or package not in ("", *_PACKAGES):
            raise SecurityRefusal(f"{entry} is not an option of a group", where=f"{where}: defaults", fix=_OPTIONS_ONLY)


def _defaults_entries(entries: Any) -> Iterator[str]:
    """Yield the groups and options that a defaults list names."""
    listed = entries if isinstance(entries, (list, tuple)) else [entries] if entries else []
    for entry in listed:
        if isinstance(entry, Mapping):
            for key, value in entry.items():
                yield re.sub(r"^((optional|override)\s+)+", "", str(key))
                for option in map(str, value if isinstance(value, (list, tuple)) else [value]):
                    yield (
                        f"/{option}" if option.startswith("/") else option
                    )  # keep //, which is not the name of a group
        else:
            yield str(entry)


def _iterate_leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every key of a mapping, and every value, with its dotted name."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            name = f"{prefix}.{key}" if prefix else str(key)
            yield name, None
            yield from _iterate_leaves(value, name)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _iterate_leaves(value, prefix)
    else:
        yield prefix, tree


_CALL_KEYS = frozenset({"_target_", "_partial_", "_recursive_", "_convert_", "_args_"})
_PLAIN_TAGS = frozenset(
    {"!", *(f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null", "seq", "map"))}
)
_INTERPOLATION = re.compile(
    r"\$\{(?:oc\.env:\s*(?P<variable>[A-Za-z_][A-Za-z0-9_]*)\s*(?:,[^${}]*)?|\.*[A-Za-z_][\w.-]*(?:\[\w+\])*)\}"
)
_PACKAGE = re.compile(r"#\s*@\s*package\s+(\S+)")
_REFERENCE = re.compile(r"\$\{(\.*[A-Za-z_][\w.-]*(?:\[\w+\])*)\}")
_MAX_STEPS = 200  # maximum number of keys to follow for one reference
_PACKAGES = ("_global_", "_group_", "_here_")
_OPTIONS_ONLY = "choose an option of a group; pass your own code with --task FILE"
_NO_HYDRA = "remove it; accel-run plan shows the settings"
