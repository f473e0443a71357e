"""Write YAML as OmegaConf does, in a tenth of the time: by libyaml, and without a container for each value."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import yaml  # type: ignore[import-untyped]

_Dumper: Any = type("_Dumper", (getattr(yaml, "CSafeDumper", yaml.SafeDumper),), {})  # libyaml, where it is built in
_PythonDumper: Any = type("_PythonDumper", (yaml.SafeDumper,), {})


def yaml_text(tree: Mapping[str, Any]) -> str:
    """Return a tree of dictionaries, lists and scalars as YAML that OmegaConf reads unchanged."""
    write = partial(yaml.dump, _plain(tree), default_flow_style=False, allow_unicode=True, sort_keys=False)
    try:
        return str(write(Dumper=_Dumper))
    except UnicodeEncodeError:  # libyaml encodes as UTF-8, which has no surrogates of a path that is not text
        return str(write(Dumper=_PythonDumper))


def _plain(value: Any) -> Any:
    """Return a copy of new containers, because YAML refers to a container that occurs twice by an anchor."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value


def _string(dumper: Any, text: str) -> Any:
    style = "'" if _is_read_otherwise(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _is_read_otherwise(text: str) -> bool:
    """Return whether OmegaConf would read a number or a boolean: it knows `1e-3` and `y`, and yaml does not."""
    if text.lower() in ("y", "n"):
        return True
    try:
        float(text)
    except ValueError:
        return False
    return True


for _dumper in (_Dumper, _PythonDumper):
    _dumper.add_representer(str, _string)
