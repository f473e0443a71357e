"""A configuration file that a stranger may have written: measured before it is built, and nothing but data.

Refused are files that grow when they are built (aliases), that are too large or too deep, that build objects (tags),
call something (resolvers, _target_), reach into Hydra's own settings or out of their folder, or hold secrets.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.base.errors import ConfigError, Problem, SecurityRefusal
from runner.base.secret import secret_problems

if TYPE_CHECKING:
    from yaml.events import Event  # type: ignore[import-untyped]

MAX_BYTES = 64 << 10
MAX_DEPTH = 32
MAX_NODES = 3_000  # after every alias was replaced by what it stands for; more would take seconds
MAX_CHARACTERS = 1 << 20  # of all values, after every ${KEY} was replaced

# Variables whose value a configuration may take: places, and what a scheduler says. None of them is a secret.
ENVIRONMENT = (
    "HOME", "USER", "LOGNAME", "HOSTNAME", "TMPDIR", "SCRATCH", "WORK", "DATA", "XDG_CACHE_HOME", "XDG_DATA_HOME",
    "ACCEL_RUN_CACHE", "CUDA_VISIBLE_DEVICES",
    "SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_SUBMIT_DIR", "SLURM_TMPDIR",
    "SLURM_NNODES", "SLURM_NTASKS", "SLURM_CPUS_PER_TASK",
)  # fmt: skip


def read_guarded(file: Path, root: Path) -> str:
    """Return the text of a YAML file in the folder `root`, which is safe to build.

    Raises SecurityRefusal where it would run something or leave the folder, ConfigError for everything else.
    """
    where = str(file)
    text = _text(file, root)
    tree = _built(text, where)
    for key, value in _leaves(tree):
        refuse_calls(key, value, f"{where}: {key}")
    _refuse_reaching_out(tree, text, where)
    problems = secret_problems(tree, where)
    if problems:
        raise ConfigError(problems)
    return text


def refuse_calls(key: str, value: Any, where: str) -> None:
    """Raise SecurityRefusal where a value names something to be called, or takes what is not for configurations."""
    if any(part in _CALLING for part in key.split(".")):
        raise SecurityRefusal("nothing is imported or called by its name", where=where, fix=_OPTIONS_ONLY)
    for text in (key, value):
        if isinstance(text, str) and "${" in text:
            _refuse_interpolation(text, where)


def refuse_growth(tree: Mapping[str, Any]) -> None:
    """Raise ConfigError where a tree would be large once each ${KEY} stands for its value; nothing is built."""
    sizes: dict[tuple[Any, ...], tuple[int, int]] = {}
    nodes, characters = _grown(tree, tree, (), sizes, set())
    if nodes > 2 * MAX_NODES or characters > MAX_CHARACTERS:
        limits = f"{2 * MAX_NODES:,} values and {MAX_CHARACTERS:,} characters"
        what = f"must hold at most {limits} once each ${{KEY}} is replaced"
        raise ConfigError(Problem(what, "the configuration", "write the values themselves"))


def _grown(
    value: Any,
    tree: Mapping[str, Any],
    way: tuple[Any, ...],
    sizes: dict[tuple[Any, ...], tuple[int, int]],
    around: set[tuple[Any, ...]],
) -> tuple[int, int]:
    """Return how many values and characters a value stands for; what leads back to itself is said by OmegaConf."""
    if not isinstance(value, (str, Mapping, list)):
        return 1, 0
    if isinstance(value, str) and "${" not in value:
        return 1, len(value)
    if way in sizes:
        return sizes[way]
    if way in around:
        return 0, 0
    around.add(way)
    nodes, characters = 1, len(value) if isinstance(value, str) else 0
    inner: Iterable[tuple[Any, tuple[Any, ...]]]
    if isinstance(value, Mapping):
        inner = [(item, (*way, key)) for key, item in value.items()]
    elif isinstance(value, list):
        inner = [(item, (*way, number)) for number, item in enumerate(value)]
    else:
        inner = [_meant(name[1], tree, way) for name in _REFERENCE.finditer(value)]
    for item, place in inner:
        more = _grown(item, tree, place, sizes, around)
        nodes, characters = nodes + more[0], characters + more[1]
    around.discard(way)
    sizes[way] = nodes, characters
    return nodes, characters


def _meant(name: str, tree: Mapping[str, Any], way: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Return the value that ${name} at the place `way` stands for, and its place; None where there is none."""
    plain = name.lstrip(".")
    up = len(name) - len(plain)
    place: tuple[Any, ...] = way[: len(way) - up] if up else ()
    rest = re.findall(r"[^.\[\]]+", plain)
    value: Any = tree
    for part in place:
        value = value[part]
    for _ in range(_MAX_STEPS):
        if isinstance(value, str) and rest and (whole := _REFERENCE.fullmatch(value)):
            other = whole[1].lstrip(".")  # the way leads through another reference
            back = len(whole[1]) - len(other)
            place, value = (place[: len(place) - back] if back else ()), tree
            rest = [*re.findall(r"[^.\[\]]+", other), *rest]
            for part in place:
                value = value[part]
            continue
        if not rest:
            return value, place
        name_of_key: Any = rest.pop(0)
        number = int(name_of_key) if name_of_key.isdecimal() and len(name_of_key) < 10 else None
        known: list[Any]
        if isinstance(value, list):
            known = [number] if number is not None and number < len(value) else []
        else:
            known = [key for key in (name_of_key, number) if isinstance(value, Mapping) and key in value]
        if not known:
            return None, place
        place, value = (*place, known[0]), value[known[0]]
    raise ConfigError(Problem("leads through too many others", f"${{{name}}}", "write the value"))


def _text(file: Path, root: Path) -> str:
    """Return the file's text, after asking where and what it is, and how large."""
    real = file.resolve()
    if not real.is_relative_to(root.resolve()):
        raise SecurityRefusal(f"lies outside of {root}", where=str(file), fix="copy the file into the folder")
    try:
        descriptor = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as opened:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ConfigError(Problem("must be a plain file", str(file)))
            content = opened.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(Problem(f"must be readable: {error.strerror}", str(file))) from error
    if len(content) > MAX_BYTES:
        raise ConfigError(Problem(f"must have at most {MAX_BYTES >> 10} KiB", str(file)))
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(Problem(f"must be UTF-8 text: {error.reason} at byte {error.start}", str(file))) from error


def _built(text: str, where: str) -> Any:
    """Return what the file holds. Raises ConfigError and SecurityRefusal before anything large is built."""
    import yaml  # type: ignore[import-untyped]

    try:
        _measure(yaml.parse(text, Loader=yaml.SafeLoader), where)
        return yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(Problem(f"must be YAML: {error.problem}", f"{where}{line}")) from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a number of 5,000 digits, the 30th of February
        raise ConfigError(Problem(f"must be YAML: {str(error).splitlines()[0]}", where)) from error


def _measure(events: Iterable[Event], where: str) -> None:
    """Raise where the file is more than data of a reasonable size; it is scanned, nothing is built."""
    depth = nodes = documents = 0
    sizes: dict[str, int] = {}  # anchor -> nodes it stands for
    around: list[tuple[str | None, int]] = []  # the collections around: anchor, and the count before it
    for event in events:
        _refuse_tag(event, where)
        kind, anchor = type(event).__name__, getattr(event, "anchor", None)
        if kind == "DocumentStartEvent":
            documents += 1
        elif kind == "AliasEvent":
            nodes += sizes.get(anchor or "", 1)
        elif kind in ("MappingStartEvent", "SequenceStartEvent"):
            around.append((anchor, nodes))
            depth, nodes = depth + 1, nodes + 1
            sizes |= {anchor: MAX_NODES} if anchor else {}  # inside of itself it never ends
        elif kind in ("MappingEndEvent", "SequenceEndEvent"):
            depth -= 1
            name, before = around.pop()
            sizes |= {name: nodes - before} if name else {}
        elif kind == "ScalarEvent":
            nodes += 1
            sizes |= {anchor: 1} if anchor else {}
        if depth > MAX_DEPTH:
            raise ConfigError(Problem(f"must be nested at most {MAX_DEPTH} deep", where))
        if nodes > MAX_NODES:
            raise ConfigError(Problem(f"must hold at most {MAX_NODES} values, aliases counted in full", where))
        if documents > 1:
            raise ConfigError(Problem("must hold one document, without another after ---", where))


def _refuse_tag(event: Event, where: str) -> None:
    tag = getattr(event, "tag", None)
    if tag is None or tag in _PLAIN_TAGS:
        return
    line = f"{where}:{event.start_mark.line + 1}"
    if "python" in tag:
        raise SecurityRefusal("a configuration builds no objects", where=line, fix=f"take the tag {tag} out")
    raise ConfigError(Problem(f"tags are not understood here, as {tag}", line, "write the plain value"))


def _refuse_interpolation(text: str, where: str) -> None:
    for match in _INTERPOLATION.finditer(text):
        name = match["variable"]
        if name is not None and name not in ENVIRONMENT:
            raise SecurityRefusal(
                f"the environment variable {name} is not for configurations",
                where=where,
                fix=f"those that are: {', '.join(ENVIRONMENT)}",
            )
    if "${" in _INTERPOLATION.sub("", text):
        raise SecurityRefusal(
            "a configuration calls nothing", where=where, fix="what there is: ${KEY} and ${oc.env:NAME}"
        )


def _refuse_reaching_out(tree: Any, text: str, where: str) -> None:
    """Raise where the file sets Hydra's own keys, or its defaults list leads anywhere but to options."""
    heads = [_PACKAGE.match(line.strip()) for line in text.splitlines()]  # as Hydra divides it: U+2028 ends a line
    for package in [head[1] for head in heads if head]:
        if package not in _PACKAGES:
            raise SecurityRefusal(
                f"the package {package} is not for configurations", where=where, fix=f"known: {', '.join(_PACKAGES)}"
            )
    if not isinstance(tree, Mapping):
        return
    words = list(_words_of_defaults(tree.get("defaults")))
    if any(re.split(r"[./@]", name.lstrip("/"))[0] == "hydra" for name in (*map(str, tree), *words)):
        raise SecurityRefusal("Hydra only composes here, its settings are not for files", where=where, fix=_NO_HYDRA)
    for word in words:
        name, _, package = word.partition("@")
        if ".." in word or name.startswith(("//", "~")) or ":" in name or package not in ("", *_PACKAGES):
            raise SecurityRefusal(f"{word} leads out of the groups", where=f"{where}: defaults", fix=_OPTIONS_ONLY)


def _words_of_defaults(entries: Any) -> Iterator[str]:
    """Yield the groups and options that a defaults list names."""
    listed = entries if isinstance(entries, (list, tuple)) else [entries] if entries else []
    for entry in listed:
        if isinstance(entry, Mapping):
            for key, value in entry.items():
                yield re.sub(r"^((optional|override)\s+)+", "", str(key))
                for option in map(str, value if isinstance(value, (list, tuple)) else [value]):
                    yield f"/{option}" if option.startswith("/") else option  # // leads out: it is no group's name
        else:
            yield str(entry)


def _leaves(tree: Any, lead: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every mapping's key and every value, with its dotted name."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            name = f"{lead}.{key}" if lead else str(key)
            yield name, None
            yield from _leaves(value, name)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _leaves(value, lead)
    else:
        yield lead, tree


_CALLING = frozenset({"_target_", "_partial_", "_recursive_", "_convert_", "_args_"})
_PLAIN_TAGS = frozenset(
    {"!", *(f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null", "seq", "map"))}
)
_INTERPOLATION = re.compile(
    r"\$\{(?:oc\.env:\s*(?P<variable>[A-Za-z_][A-Za-z0-9_]*)\s*(?:,[^${}]*)?|\.*[A-Za-z_][\w.-]*(?:\[\w+\])*)\}"
)
_PACKAGE = re.compile(r"#\s*@\s*package\s+(\S+)")
_REFERENCE = re.compile(r"\$\{(\.*[A-Za-z_][\w.-]*(?:\[\w+\])*)\}")
_MAX_STEPS = 200  # from key to key until a reference is found
_PACKAGES = ("_global_", "_group_", "_here_")
_OPTIONS_ONLY = "choose an option of a group; code of your own comes by --task FILE"
_NO_HYDRA = "take it out; accel-run --help tells what can be set"
