"""Read and write YAML as OmegaConf does, but faster: with libyaml, and without OmegaConf's containers."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.base.paths import shipped_path


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """A loader based on libyaml for the shipped files: seven times faster than OmegaConf's.

    A test checks that both read these files alike. Other files are read by OmegaConf, which differs for unusual YAML.
    """

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [str(key.value) for key, _ in node.value]
        if len(set(keys)) < len(keys):
            raise yaml.YAMLError("a key occurs twice")
        return super().construct_mapping(node, deep=deep)


# As in OmegaConf, 1e-3 and 1.5e3 are numbers, and 2026-11-27 is text; in YAML 1.1, they are text and a date.
_FLOAT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789"))
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}

# Not libyaml's dumper, which refuses the surrogates that stand for undecodable bytes of a path.
_Dumper: Any = type("_Dumper", (yaml.SafeDumper,), {})


def read_mapping(text: str, file: str) -> dict[str, Any]:
    """Return the mapping in a file, with unresolved ${...}; empty if it cannot be read or is not a mapping."""
    try:
        content = OmegaConf.to_container(parse_config(text, file), resolve=False)
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, AssertionError, RecursionError):
        return {}
    return {str(key): value for key, value in content.items()} if isinstance(content, dict) else {}


class NamedText(io.StringIO):
    """A text stream with a name, so that YAML's messages contain its file."""

    def __init__(self, text: str, *parts: str) -> None:
        super().__init__(text)
        self.name = str(Path(*parts))


@lru_cache(maxsize=256)
def parse_config(text: str, file: str) -> DictConfig | ListConfig:
    """Parse the text of a file as OmegaConf does, once per process. The result must not be changed."""
    if Path(file).is_relative_to(shipped_path("conf")):
        try:
            return OmegaConf.create(_Loader(NamedText(text, file)).get_single_data() or {})
        except yaml.YAMLError:
            pass  # OmegaConf fails below, with a message that does not depend on libyaml
    return OmegaConf.load(NamedText(text, file))


def yaml_text(tree: Mapping[str, Any]) -> str:
    """Return a tree of dictionaries, lists and scalars as YAML that OmegaConf reads unchanged."""
    plain = _plain(tree)
    return str(yaml.dump(plain, Dumper=_Dumper, default_flow_style=False, allow_unicode=True, sort_keys=False))


def _plain(value: Any) -> Any:
    """Return a copy with new containers, because YAML writes an anchor for a container that occurs twice."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value


def _string(dumper: Any, text: str) -> Any:
    style = "'" if _is_read_otherwise(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _is_read_otherwise(text: str) -> bool:
    """Return whether OmegaConf would read a number or a boolean, as it does for `1e-3` and `y`, unlike PyYAML."""
    if text.lower() in ("y", "n"):
        return True
    try:
        float(text)
    except ValueError:
        return False
    return True


_Dumper.add_representer(str, _string)
