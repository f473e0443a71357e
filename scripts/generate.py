"""Generate files from the signatures of the settings and from the table of commands.

    python scripts/generate.py            # write
    python scripts/generate.py --check    # exit 1 if something is stale

docs/settings.md is the reference of all settings. Editors check and complete configuration files with conf/schema.json.
The commands in scripts/run.sh are those of the table in runner/cli.py. The file of an option in conf/ has the keys of
its function, their defaults and what the docstring says about them.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from config_schema import config_schema  # noqa: E402

from runner.base.paths import shipped_path  # noqa: E402
from runner.cli import COMMANDS  # noqa: E402
from runner.config.config_files import shipped_options  # noqa: E402
from runner.config.inference_keys import inference_keys  # noqa: E402
from runner.config.options import AXES, find_signature, list_options, task_source  # noqa: E402
from runner.config.request import format_value  # noqa: E402
from runner.config.schema import (  # noqa: E402
    Key,
    Signature,
    describe_mismatch,
    describe_type,
    literal_choices,
    read_functions,
    settings_keys,
)
from runner.config.settings import Settings  # noqa: E402

PAGE = ROOT / "docs" / "settings.md"
SCHEMA = ROOT / "conf" / "schema.json"
INTRODUCTION = """\
# Settings

Every setting with its type, default, meaning and an example. `accel-run plan` prints the settings of a run with their
values; `accel-run explain KEY` shows where a value comes from. [configuration.md](configuration.md) explains groups and
precedence. This page is generated from the signatures of the code by `scripts/generate.py`.
"""


def page() -> str:
    """Return the text of the page."""
    return "\n".join([INTRODUCTION, *_general(), *_groups(), *_tasks()])


def _general() -> Iterator[str]:
    yield "## Run\n"
    yield from _table(settings_keys(Settings))


def _groups() -> Iterator[str]:
    usual = shipped_options()
    for group in AXES:
        yield f"## {group}\n"
        order = sorted(list_options(group), key=lambda option: (option != usual[group], option))
        for option in order:
            signature = find_signature(group, option)
            by_default = ", the default" if option == usual[group] else ""
            summary = (
                signature.summary if signature else "The plan selects one of the other options and gives the reason."
            )
            yield f"### {group}={option}{by_default}\n\n{summary}\n"
            if signature and signature.keys:
                yield from _table({f"{group}.{name}": key for name, key in signature.keys.items()})


def _tasks() -> Iterator[str]:
    for task in sorted(file.stem for file in (shipped_path("conf") / "task").glob("*.yaml")):
        source = task_source(task, None)
        functions = read_functions(source)
        keys = {f"task.{name}": key for name, key in functions["build"].keys.items()}
        keys |= {f"inference.{name}": key for name, key in inference_keys(source).items()}
        yield f"## task={task}\n\n{functions['build'].summary}\n"
        yield from _table(keys)


def _table(keys: Mapping[str, Key]) -> Iterator[str]:
    yield "| setting | type | default | meaning | example |"
    yield "|---|---|---|---|---|"
    for name, key in keys.items():
        default, example = format_value(key.default), _example(name, key)
        cells = (f"`{name}`", describe_type(key.type), f"`{default}`", key.help, f"`{example}`")
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
    yield ""


def _example(name: str, key: Key) -> str:
    """Return an override that the key accepts: a value that its description names, or one other than the default."""
    named = re.search(r"(?:such as|e\.g\.) (\[[^\]]*\]|\{[^}]*\}|[^\s;,]+)", key.help)
    if named and (named[1][0] not in "[{" or not isinstance(key.default, (str, int, float))):
        return f"{name}={named[1]}"
    valid = [value for value in _candidates(key) if describe_mismatch(key.type, value) is None]
    other = [value for value in valid if value != key.default or isinstance(value, str)]
    return f"{name}={_typed((other or valid)[0])}"


def _typed(value: Any) -> str:
    """Return a value as typed on a command line."""
    pairs = value.items() if isinstance(value, dict) else ()
    return f"{{{','.join(f'{key}:{item}' for key, item in pairs)}}}" if pairs else format_value(value)


def _candidates(key: Key) -> Iterable[Any]:
    yield from sorted(literal_choices(key.type) - {"auto", str(key.default)})
    if isinstance(key.default, bool):
        yield not key.default
    elif isinstance(key.default, str) and key.default and key.default != "auto":
        yield key.default
    elif isinstance(key.default, (int, float)):
        yield from (key.default * 2, key.default / 2)
    yield from (1, 100, 0.5, ["name"], {"name": 0.5}, {"name": "other"}, "name", [0.5, 0.9], "100steps", key.default)


def commands_in(script: str) -> str:
    """Return the text of scripts/run.sh with the commands of accel-run and their meanings between the two markers."""
    rows = {name: summary for name, (_, summary) in COMMANDS.items() if summary}
    table = [f"modes=({' '.join(rows)})", "declare -A meaning=("]
    table += [f"    [{name}]={_quoted(summary)}" for name, summary in rows.items()] + [")"]
    return re.sub(
        r"(# commands: begin.*\n)[^#]*(# commands: end)", lambda ends: ends[1] + "\n".join([*table, ends[2]]), script
    )


def option_files() -> dict[Path, str]:
    """Return the files of the shipped options and tasks in conf/. Options without a function are written by hand."""
    functions = {(group, file.stem): find_signature(group, file.stem) for group in AXES for file in _files_of(group)}
    functions |= {
        ("task", file.stem): read_functions(task_source(file.stem, None))["build"] for file in _files_of("task")
    }
    return {
        ROOT / "conf" / group / f"{name}.yaml": _option_file(signature)
        for (group, name), signature in functions.items()
        if signature is not None
    }


def _files_of(group: str) -> list[Path]:
    return sorted((ROOT / "conf" / group).glob("*.yaml"))


def _option_file(signature: Signature) -> str:
    lines = [f"{name}: {_yaml_value(key.default)}  # {key.help}" for name, key in signature.keys.items()]
    return "\n".join([f"# {signature.summary}", *(lines or ["{}"]), ""])


def _yaml_value(value: Any) -> str:
    """Return a value as YAML on one line."""
    plain = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(plain, default_flow_style=True, width=sys.maxsize).removesuffix("\n...\n").rstrip("\n")


def _quoted(text: str) -> str:
    assert not set(text) & set('"$`\\'), "would need quoting in a shell"
    return f'"{text}"'


def main(words: list[str]) -> int:
    """Write or check the files; return the exit code."""
    script = ROOT / "scripts" / "run.sh"
    wanted = {
        **option_files(),
        PAGE: page().rstrip() + "\n",
        SCHEMA: json.dumps(config_schema(), indent=1) + "\n",
        script: commands_in(script.read_text(encoding="utf-8")),
    }
    stale = [file for file, text in wanted.items() if not file.is_file() or file.read_text(encoding="utf-8") != text]
    if words == ["--check"]:
        for file in stale:
            print(f"{file.relative_to(ROOT)} is stale; run: python scripts/generate.py")
        return int(bool(stale))
    for file in stale:
        file.write_text(wanted[file], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
