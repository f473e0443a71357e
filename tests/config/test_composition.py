"""Composing option files gives the same result as Hydra, and parses each file once per process."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from runner.base.errors import AccelRunError
from runner.base.paths import shipped_path
from runner.config import composition
from runner.config.composition import compose_groups, version_base
from runner.config.configuration import compose, to_yaml
from runner.config.options import GROUPS, list_options
from runner.config.request import Request
from runner.config.yaml_text import parse_config
from tests.faults.tallies import IS_LONG, SEED
from tests.faults.test_configuration_fuzz import Case, cases

CONF = shipped_path("conf")
NUM_CASES = 100 if IS_LONG else 5
# a word to misspell
KNOWN = {"optimizer.lr": "0.001", "updates": "300", "checkpoint.keep": "1", "scheduler.warmup": "0"}


def composed_by_hydra(groups: dict[str, str]) -> dict[str, Any]:
    """Return the tree that Hydra composes with its own file reader and all of its own settings."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), **version_base()):
        composed = hydra_compose("config", overrides=[f"{group}={option}" for group, option in groups.items()])
    tree = OmegaConf.to_container(composed, resolve=False)
    assert isinstance(tree, dict)
    return {str(key): value for key, value in tree.items()}


@pytest.mark.slow
@pytest.mark.parametrize("number", range(NUM_CASES))
def test_composition_gives_the_same_result_as_hydra(number: int, tmp_path: Path) -> None:
    rng = random.Random(f"composition {SEED} {number}")
    groups = {group: rng.choice(list_options(group)) for group in rng.sample(GROUPS, rng.randint(0, len(GROUPS)))}
    composed = compose_groups(groups, Request(config_dir=tmp_path), [])
    choices = composed.pop("hydra_choices")
    assert repr(composed) == repr(composed_by_hydra(groups)), f"ACCEL_RUN_SEED={SEED}: {groups}"  # types and order too
    assert {group: choices[group] for group in groups} == groups
    assert set(choices) == set(GROUPS)


def uncached_request(folder: Path) -> Request:
    """Return a request whose composition no other test has cached: its content includes the name of the folder."""
    (folder / "own").write_text(str(folder))
    return Request(config_dir=folder)


def test_concurrent_compositions_run_one_after_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = uncached_request(tmp_path)
    errors: list[BaseException] = []
    groups = {group: list_options(group)[0] for group in GROUPS if list_options(group)}

    def compose_other() -> None:
        try:
            compose_groups(groups, request, [])
        except BaseException as error:
            errors.append(error)

    other = threading.Thread(target=compose_other)

    def compose_beside_other(*args: Any, **keywords: Any) -> Any:
        monkeypatch.setattr(composition, "hydra_compose", hydra_compose)
        other.start()
        other.join(1.0)  # lint-tests: timeout: without waiting for the first composition, this one fails in that time
        return hydra_compose(*args, **keywords)

    monkeypatch.setattr(composition, "hydra_compose", compose_beside_other)
    compose_groups(groups, request, [])
    other.join()
    assert errors == []


def test_composing_does_not_change_the_callers_hydra_state(tmp_path: Path) -> None:
    with initialize_config_dir(str(shipped_path("conf")), **version_base()):
        wanted = GlobalHydra.instance().hydra
        compose_groups({group: list_options(group)[0] for group in GROUPS}, uncached_request(tmp_path), [])
        assert GlobalHydra.instance().hydra is wanted
        hydra_compose("config", overrides=[])


@pytest.mark.slow
def test_libyaml_parses_shipped_files_like_omegaconf() -> None:
    for file in sorted(CONF.rglob("*.yaml")):
        parsed = OmegaConf.to_container(parse_config(file.read_text(), str(file)))
        assert repr(parsed) == repr(OmegaConf.to_container(OmegaConf.load(file))), file


def test_messages_about_invalid_yaml_do_not_depend_on_the_file(tmp_path: Path) -> None:
    """Shipped files are parsed by libyaml."""
    for text in ("a: [1,\nb: 2\n", "a: 1\na: 2\n", "\t- x", "a: *b\n"):
        messages = []
        for file in (CONF / "x.yaml", tmp_path / "x.yaml"):
            with pytest.raises(yaml.YAMLError) as error:
                parse_config(text, str(file))
            messages.append(str(error.value).replace(str(file), "x.yaml"))
        assert messages[0] == messages[1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer" / "mine.yaml").write_text("defaults:\n  - adamw\nlr: 0.5\n")
    return tmp_path


def outcome(case: Case, folder: Path) -> str:
    """Return the configuration or the problems. The files of a case are always written to the same folder."""
    for name, content in case.files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    try:
        configuration = compose(Request(tuple(case.words), None, folder))
    except AccelRunError as error:
        return "\n".join(map(repr, error.problems))
    return f"{configuration.flat()!r}\n{to_yaml(configuration)}"


@pytest.mark.slow
def test_cached_parsing_does_not_change_results_or_messages(tmp_path: Path) -> None:
    for number, case in enumerate(cases(KNOWN, 30 * NUM_CASES if IS_LONG else NUM_CASES)):
        folder = tmp_path / str(number)
        folder.mkdir()
        parse_config.cache_clear()
        first = outcome(case, folder)
        assert outcome(case, folder) == first, f"ACCEL_RUN_SEED={SEED}: {case}"


@pytest.mark.slow
def test_each_file_is_parsed_once_per_process(folder: Path) -> None:
    def count_parsed(*words: str) -> int:
        """Return the number of files that composing has parsed."""
        before = parse_config.cache_info().misses
        compose(Request(words, config_dir=folder))
        return parse_config.cache_info().misses - before

    parse_config.cache_clear()
    assert count_parsed("optimizer=mine") >= len(GROUPS)
    assert count_parsed("optimizer=mine", "updates=7") == 0
    assert count_parsed("optimizer=mine", "updates=7", "precision=fp16") == 1


@pytest.mark.slow
def test_a_modified_file_is_parsed_again(folder: Path) -> None:
    request = Request(("optimizer=mine",), config_dir=folder)
    assert compose(request).flat()["optimizer.lr"] == 0.5
    (folder / "optimizer" / "mine.yaml").write_text("defaults:\n  - adamw\nlr: 0.7\n")
    assert compose(request).flat()["optimizer.lr"] == 0.7
