"""Compose the options of all groups with Hydra."""

from __future__ import annotations

import copy
import errno
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import NoneType
from typing import Any

import hydra
import yaml  # type: ignore[import-untyped]
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.conf import HydraConf
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.base.errors import ConfigError, Problem
from runner.base.paths import shipped_path
from runner.base.secret_refusal import secret_problems
from runner.base.text import first_line
from runner.config.config_files import GLOBAL, cached_config, find_config_file, read_config_text
from runner.config.guarded_yaml import refuse_growth
from runner.config.options import GROUPS, list_options
from runner.config.request import Request
from runner.config.schema import did_you_mean
from runner.config.yaml_text import parse_config


def compose_groups(groups: Mapping[str, str], request: Request, problems: list[Problem]) -> dict[str, Any]:
    """Compose with Hydra; return the tree with the chosen options under `hydra_choices`. Raises ConfigError."""
    key = ("groups", tuple(sorted(groups.items())), request.task_file is not None, request.config_dir)
    return cached_config(key, partial(_compose_with_hydra, groups, request, problems))


def _compose_with_hydra(groups: Mapping[str, str], request: Request, problems: list[Problem]) -> dict[str, Any]:
    # an option of a task file or a package has no file: Hydra composes without the group
    without_file = {
        group: option for group, option in groups.items() if find_config_file(group, option, request.config_dir) is None
    }
    overrides = [f"~{group}" if group in without_file else f"{group}={option}" for group, option in groups.items()]
    if request.task_file:
        overrides.append("~task")
    overrides += [f"~hydra/{group}" for group in _hydra_groups()]  # never read; they would take a third of the time
    profile = find_config_file("hardware", groups.get("hardware", ""), request.config_dir)
    if profile and not read_config_text(profile, request.config_dir).startswith(GLOBAL):
        raise ConfigError([*problems, Problem(f"must begin with the line {GLOBAL}", str(profile))])
    with (
        _own_hydra(),
        _convert_errors(groups, request.config_dir, problems),
        _search_config_files(request.config_dir),
        initialize_config_dir(str(shipped_path("conf")), **version_base()),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("error", ".*missing `_self_`")
        composed = hydra_compose("config", overrides=overrides, return_hydra_config=True)
    choices = OmegaConf.to_container(composed.hydra.runtime.choices)
    assert isinstance(choices, dict)
    choices |= without_file
    missing = [group for group in GROUPS if not choices.get(group) and (group != "task" or not request.task_file)]
    if missing:  # possible only for a config.yaml in the user's folder
        problem = Problem(
            f"must choose an option of every group, but has none for {', '.join(missing)}",
            f"{request.config_dir}/config.yaml",
            f"start from a copy of {shipped_path('conf')}/config.yaml, or rename the file",
        )
        raise ConfigError([*problems, problem])
    tree = {str(key): composed._get_node(key) for key in composed if key != "hydra"}
    container = OmegaConf.to_container(OmegaConf.create(tree), resolve=False)
    assert isinstance(container, dict)
    not_mappings = [
        Problem("must be a mapping of keys to values", f"{group}/{choices[group]}.yaml")
        for group in GROUPS
        if not isinstance(container.get(group, {}), (dict, NoneType))
    ]
    if not_mappings:
        raise ConfigError(not_mappings)  # without `problems`, which may report the same about these files
    selected = {str(group): str(option) for group, option in choices.items() if option is not None}
    return {**container, "hydra_choices": {"task": "", **selected}}


@contextmanager
def _own_hydra() -> Iterator[None]:
    """Use Hydra's global state in one thread at a time, and restore it: the calling program may also use Hydra."""
    with _HYDRA_LOCK:
        previous = GlobalHydra.instance().hydra
        GlobalHydra.instance().clear()
        try:
            yield
        finally:
            GlobalHydra.instance().hydra = previous


@contextmanager
def _convert_errors(groups: Mapping[str, str], config_dir: Path | None, problems: Sequence[Problem]) -> Iterator[None]:
    """Convert an error of Hydra, OmegaConf or a file to a ConfigError that also has the earlier `problems`."""
    try:
        yield
    except yaml.MarkedYAMLError as error:
        where = f"{error.problem_mark.name}:{error.problem_mark.line + 1}" if error.problem_mark else "conf"
        raise ConfigError([*problems, Problem(f"must be valid YAML: {error.problem}", where)]) from error
    except UserWarning as error:  # possible only for a config.yaml in the user's folder
        what = "must have _self_ in its defaults list, at the position where its values are merged"
        fix = "start the list with `- _self_`, like the shipped file"
        raise ConfigError([*problems, Problem(what, f"{config_dir}/config.yaml", fix)]) from error
    except RecursionError as error:
        files = ", ".join(f"{group}/{option}.yaml" for group, option in groups.items())
        what = "a defaults list must not include its own file"
        raise ConfigError([*problems, Problem(what, files)]) from error
    except (HydraException, OmegaConfBaseException, OSError, ValueError, AssertionError, yaml.YAMLError) as error:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise  # a system limit, not a faulty file
        raise ConfigError([*problems, _composition_problem(error, groups, config_dir)]) from error


def _composition_problem(error: Exception, groups: Mapping[str, str], config_dir: Path | None) -> Problem:
    """Convert an error of Hydra to a problem with the user's files that may cause it, and the available options."""
    files = [(config_dir or Path()) / group / f"{option}.yaml" for group, option in (("", "config"), *groups.items())]
    where = ", ".join(str(file) for file in files if config_dir and file.is_file()) or str(config_dir or "conf")
    what = first_line(str(error) or type(error).__name__).rstrip(".")
    if "Invalid loaded object type" in what:
        return Problem("must be a mapping of keys to values", where)
    missing = re.search(r"'([a-z]+)/([^']+)'$", what)
    options = list_options(missing[1], config_dir) if missing else []
    if missing is None or not options:
        return Problem(what, where, "fix the file, or do not select the option")
    return Problem(f"{what}; must be one of {', '.join(options)}", where, did_you_mean(missing[2], options))


def version_base() -> dict[str, Any]:
    """Return arguments for Hydra: 1.3 warns if version_base is missing, 1.4 if it is given."""
    return {"version_base": "1.3"} if tuple(map(int, hydra.__version__.split(".")[:2])) < (1, 4) else {}


@cache
def _hydra_groups() -> tuple[str, ...]:
    defaults = [entry for entry in HydraConf().defaults if isinstance(entry, dict)]
    return tuple(group for entry in defaults for group, option in entry.items() if option is not None)


_folders: tuple[tuple[str, Path], ...] = ()  # providers and folders of the files to compose; the first one wins


@contextmanager
def _search_config_files(config_dir: Path | None) -> Iterator[None]:
    global _folders
    _register_source()
    _folders = (*([("user", config_dir.resolve())] if config_dir else []), ("shipped", shipped_path("conf")))
    try:
        yield
    finally:
        _folders = ()


@cache
def _register_source() -> None:
    class OptionSource(FileConfigSource):
        """Reads the files of options; the user's files are checked by `read_guarded` before they are parsed."""

        @staticmethod
        def scheme() -> str:
            return "option"

        def load_config(self, config_path: str) -> ConfigResult:
            file = Path(self.path) / self._normalize_file_name(config_path)
            text = read_config_text(file, Path(self.path) if self.provider == "user" else None)
            return ConfigResult(
                config=copy.deepcopy(parse_config(text, str(file))),
                path=self.full_path(),
                provider=self.provider,
                header=ConfigSource._get_header_dict(text[:512]),
            )

    class OptionFolders(SearchPathPlugin):
        def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
            for provider, folder in reversed(_folders):
                search_path.prepend(provider, f"option://{folder}")

    Plugins.instance().register(OptionSource)
    Plugins.instance().register(OptionFolders)


def resolve_references(
    composed: Mapping[str, Any], file_of_key: Callable[[str], Path | None], problems: list[Problem]
) -> Mapping[str, Any]:
    """Return the tree with each ${...} replaced by its value.

    Raises ConfigError if a resolved value is a secret.
    """
    values = composed
    try:
        if _has_reference(composed):
            refuse_growth(composed)
            values = OmegaConf.to_container(OmegaConf.create(dict(composed)), resolve=True)  # type: ignore[assignment]
    except RecursionError:
        problems.append(
            Problem("too many nested ${KEY} references", "the configuration", "write the values instead of references")
        )
        return {}
    except OmegaConfBaseException as error:
        key = str(getattr(error, "full_key", None) or "conf")
        file = file_of_key(key)
        fix = "write the value, or use ${KEY} with a key of the configuration files"
        problems.append(Problem(first_line(str(error)), f"{file}: {key}" if file else key, fix))
    if secrets := secret_problems(values, "the configuration after substitution of ${...}"):
        raise ConfigError(secrets)
    return values


def _has_reference(value: Any) -> bool:
    """Return whether a value contains ${...}; if none does, OmegaConf need not construct the tree, which is slow."""
    if isinstance(value, Mapping):
        return any(_has_reference(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return any(_has_reference(item) for item in value)
    return isinstance(value, str) and "${" in value


_HYDRA_LOCK = threading.Lock()
