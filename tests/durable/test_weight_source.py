"""Files, folders, runs and checkpoints that `weights=` accepts, and the error for each that it rejects."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from runner.base.errors import AccelRunError, ConfigError, DataError, InputMissing, SecurityRefusal
from runner.config.configuration import compose
from runner.config.request import Request
from runner.durable import files
from runner.durable.checkpoint import checkpoint_path, load, save, save_part
from runner.durable.directory import RunDirectory
from runner.durable.weight_source import (
    WeightSource,
    averaged_stem,
    check_start,
    find_start,
    find_weights,
    resolve_run_names,
)
from tests.durable.parts import parts_of
from tests.faults.recording import Quick
from tests.faults.saver import snapshot

AVERAGE = {"averaging": {"weight": torch.ones(3)}}


def make_run(root: Path, *updates: int, values: dict[str, Any] | None = None, stems: Any = None) -> Path:
    """Create the run `mine` with these checkpoints, and return its folder."""
    with files.use_system(Quick()), RunDirectory.create_or_open(root, "mine") as run:
        run.write("run.json", "{}")
        for update in updates:
            given = snapshot(update)
            state = {**given.state, "values": values or {}}
            save(run.checkpoints, replace(given, state=state, tensors={**given.tensors, **(stems or {})}))
    return run.path


def fill(folder: Path, *names: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name in names:
        save_file({"weight": torch.ones(2)}, folder / name)
    return folder


def resolve(value: Any, root: Path) -> WeightSource:
    return find_weights(str(value), root)


def error_of(value: Any, root: Path) -> AccelRunError:
    with pytest.raises(AccelRunError) as caught:
        find_weights(str(value), root)
    assert str(value) in caught.value.problems[0].where + str(caught.value.problems[0].fix)
    return caught.value


# ---------------------------------------------------------------- runs and checkpoints


def test_a_run_can_be_named_by_name_path_or_last(tmp_path: Path) -> None:
    run = make_run(tmp_path, 3, 5)
    expected = checkpoint_path(run / "checkpoints", 5)
    for value in ("mine", "last", run):
        source = resolve(value, tmp_path)
        assert source.files == load(expected).file_paths("model")
        assert expected.name in source.shown
        assert {"mine", "last"} <= {*re.findall(r"\w+", source.shown)}
        assert (source.average, source.index, source.is_joined) == ((), None, False)


def test_a_checkpoint_is_found_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path, 3, 5)
    earlier = checkpoint_path(run / "checkpoints", 3)
    monkeypatch.chdir(earlier.parent)
    for value in (earlier, earlier.name):
        source = resolve(value, tmp_path)
        assert source.files == load(earlier).file_paths("model")
        assert earlier.name in source.shown


def test_files_of_a_sharded_checkpoint_are_joined(tmp_path: Path) -> None:
    first, *others = parts_of(snapshot(4))
    with files.use_system(Quick()):
        for other in others:
            save_part(tmp_path, other)
        save(tmp_path, first)
    source = resolve(checkpoint_path(tmp_path, 4), tmp_path)
    assert source.is_joined
    assert len(source.files) > 1


@pytest.mark.parametrize(
    ("values", "stem"),
    [
        ({"averaging.evaluate": True}, "averaging"),
        ({"averaging.evaluate": False}, "optimizer_average"),
        ({}, "optimizer_average"),
        ({"averaging.evaluate": "true"}, "optimizer_average"),
    ],
)
def test_weights_include_the_average_used_by_evaluation(values: dict[str, Any], stem: str, tmp_path: Path) -> None:
    run = make_run(tmp_path, 3, values=values, stems={**AVERAGE, "optimizer_average": AVERAGE["averaging"]})
    checkpoint = load(checkpoint_path(run / "checkpoints", 3))
    assert averaged_stem(checkpoint) == stem
    source = resolve("mine", tmp_path)
    assert source.average == checkpoint.file_paths(stem)
    assert source.files == checkpoint.file_paths("model")


@pytest.mark.parametrize("values", [{"averaging.evaluate": True}, {}, {"averaging.evaluate": False}])
def test_averages_unused_by_evaluation_are_ignored(values: dict[str, Any], tmp_path: Path) -> None:
    stems = AVERAGE if values != {"averaging.evaluate": True} else {}
    run = make_run(tmp_path, 3, values=values, stems=stems)
    assert averaged_stem(load(checkpoint_path(run / "checkpoints", 3))) is None
    assert resolve("mine", tmp_path).average == ()


@pytest.mark.parametrize(
    ("values", "is_refused"),
    [
        ({"adapter": "lora", "adapter.checkpoint": "adapter"}, True),
        ({"adapter": "lora", "adapter.checkpoint": "model"}, False),
        ({"adapter": "none", "adapter.checkpoint": "adapter"}, False),
        ({"adapter.checkpoint": "adapter"}, False),
    ],
)
def test_an_adapter_without_its_model_is_rejected(values: dict[str, Any], is_refused: bool, tmp_path: Path) -> None:
    make_run(tmp_path, 3, values=values)
    if is_refused:
        with pytest.raises(ConfigError):
            resolve("mine", tmp_path)
    else:
        assert resolve("mine", tmp_path).files


@pytest.mark.parametrize("value", ["last", "other", "./missing", "missing.safetensors", "no/such/folder"])
def test_a_missing_path_is_reported_as_a_missing_input(value: str, tmp_path: Path) -> None:
    with pytest.raises(InputMissing) as caught:
        resolve(value, tmp_path)
    assert caught.value.problems[0].where == f"weights={value}"


def test_an_unknown_name_lists_the_existing_runs(tmp_path: Path) -> None:
    make_run(tmp_path, 3)
    with pytest.raises(InputMissing) as caught:
        resolve("mien", tmp_path)
    assert "mine" in caught.value.problems[0].fix


# ---------------------------------------------------------------- files and folders


def test_a_file_can_be_a_source_of_weights(tmp_path: Path) -> None:
    folder = fill(tmp_path / "a", "one.safetensors", "model.safetensors")
    (tmp_path / "link").symlink_to(folder / "one.safetensors")
    source = resolve(tmp_path / "link", tmp_path)
    assert source == WeightSource(str(tmp_path / "link"), (folder / "one.safetensors",))


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["model.safetensors"], ["model.safetensors"]),
        (["other.safetensors"], ["other.safetensors"]),
        (["adapter.safetensors", "model.safetensors"], ["model.safetensors"]),
        (["model-00001-of-00002.safetensors", "model.safetensors"], ["model.safetensors"]),
        ([f"model-0000{n}-of-00003.safetensors" for n in (3, 1, 2)],
         [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]),
        (["x-1-of-1.safetensors"], ["x-1-of-1.safetensors"]),
    ],
)  # fmt: skip
def test_a_folder_means_its_model_file_or_all_shards(names: list[str], expected: list[str], tmp_path: Path) -> None:
    folder = fill(tmp_path / "a", *names)
    (folder / "README.md").write_text("")
    source = resolve(folder, tmp_path)
    assert source.files == tuple(folder / name for name in expected)
    assert str(folder) in source.shown
    assert source.index is None


@pytest.mark.parametrize(
    ("names", "kind", "mentions"),
    [
        (["a.safetensors", "b.safetensors"], ConfigError, ["a.safetensors", "b.safetensors"]),
        (["a.safetensors", "model-1-of-2.safetensors"], ConfigError, ["a.safetensors"]),
        (["model-1-of-3.safetensors", "model-3-of-3.safetensors"], DataError, ["1 of 3", "number 2"]),
        (["model-2-of-3.safetensors"], DataError, ["2 of 3", "1, 3"]),
        (["a-1-of-2.safetensors", "b-2-of-2.safetensors"], DataError, ["a-1-of-2", "b-2-of-2"]),
        (["a-1-of-2.safetensors", "a-2-of-3.safetensors"], DataError, ["a-1-of-2", "a-2-of-3"]),
        (["pytorch_model.bin"], SecurityRefusal, ["pytorch_model.bin"]),
        (["x.pt", "y.ckpt", "z.pth"], SecurityRefusal, ["x.pt", "y.ckpt", "z.pth"]),
        (["config.json"], ConfigError, []),
    ],
)
def test_ambiguous_or_incomplete_folders_are_rejected(
    names: list[str], kind: type[AccelRunError], mentions: list[str], tmp_path: Path
) -> None:
    folder = fill(tmp_path / "a", *names)
    error = error_of(folder, tmp_path)
    assert type(error) is kind
    assert all(word in error.problems[0].what for word in mentions), error
    if kind is not DataError:
        assert not mentions or names[0] in error.problems[0].fix


def with_index(folder: Path, content: Any, name: str = "model.safetensors.index.json") -> Path:
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


MAP = {"a": "two.safetensors", "b": "one.safetensors", "c": "two.safetensors"}


@pytest.mark.parametrize("names", [["model"], ["other"], ["another", "model"]])
def test_an_index_names_the_file_of_each_tensor(names: list[str], tmp_path: Path) -> None:
    folder = fill(tmp_path / "a", "one.safetensors", "two.safetensors", "three.safetensors")
    for name in names:
        content = {"weight_map": MAP if name == names[-1] else {"a": "three.safetensors"}}
        with_index(folder, content, f"{name}.safetensors.index.json")
    for value in (folder, folder / f"{names[-1]}.safetensors.index.json"):
        source = resolve(value, tmp_path)
        assert source.files == (folder / "one.safetensors", folder / "two.safetensors")
        assert source.index == MAP
        assert "2" in source.shown.removeprefix(str(folder))


def test_a_single_file_is_preferred_to_an_index(tmp_path: Path) -> None:
    """transformers does the same."""
    folder = with_index(
        fill(tmp_path / "a", "model.safetensors", "one.safetensors", "two.safetensors"), {"weight_map": MAP}
    )
    assert resolve(folder, tmp_path).files == (folder / "model.safetensors",)
    assert resolve(folder / "model.safetensors.index.json", tmp_path).index == MAP


@pytest.mark.parametrize(
    "content",
    ["", "[", "[]", {}, {"weight_map": []}, {"weight_map": {}}, {"weight_map": {"a": 1}}, "[" * 100_000],
    ids=range(8),
)
def test_a_file_with_other_content_is_not_an_index(content: Any, tmp_path: Path) -> None:
    folder = with_index(fill(tmp_path / "a"), content)
    assert type(error_of(folder, tmp_path)) is DataError


def test_an_unreadable_index_is_reported_as_unreadable(tmp_path: Path) -> None:
    folder = fill(tmp_path / "a")
    with (folder / "model.safetensors.index.json").open("wb") as file:
        file.truncate((64 << 20) + 1)
    with pytest.raises(AccelRunError) as caught:
        resolve(folder, tmp_path)
    assert not isinstance(caught.value.__cause__, ValueError), "the error must not be that of a file without an index"


@pytest.mark.parametrize("name", ["../one.safetensors", "/etc/passwd", "sub/one.safetensors", ".", ".."])
def test_an_index_cannot_refer_to_files_outside_its_folder(name: str, tmp_path: Path) -> None:
    folder = with_index(fill(tmp_path / "a", "one.safetensors"), {"weight_map": {**MAP, "z": name}})
    assert type(error_of(folder, tmp_path)) is SecurityRefusal


def test_files_in_an_index_must_exist(tmp_path: Path) -> None:
    folder = with_index(fill(tmp_path / "a", "one.safetensors"), {"weight_map": MAP})
    error = error_of(folder, tmp_path)
    assert type(error) is DataError
    assert "1 of 2" in error.problems[0].what
    assert "two.safetensors" in error.problems[0].what


# ---------------------------------------------------------------- the start of a run


def test_a_run_can_start_from_checkpoints_and_runs(tmp_path: Path) -> None:
    run = make_run(tmp_path, 3)
    path = checkpoint_path(run / "checkpoints", 3)
    assert find_start(str(path), tmp_path) == path
    found_run = find_start("mine", tmp_path)
    assert isinstance(found_run, RunDirectory)
    assert found_run.path == run
    with pytest.raises(InputMissing) as caught:
        find_start("other", tmp_path)
    assert caught.value.problems[0].where == "resume=other"


@pytest.mark.parametrize(
    ("override", "is_replaced"),
    [
        ("weights=mine", True),
        ("weights.source=mine", True),
        ("weights='mine'", True),
        ("weights=last", True),
        ("weights=other", False),
        ("weights=a/b", False),
        ("weights=here", False),
        ("task=mine", False),
        ("weights.allow=mine", False),
        ("resume=mine", True),
        ("resume=fresh", False),
    ],
)
def test_a_run_name_in_an_override_becomes_its_path(
    override: str, is_replaced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "outputs", 3)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    expected = f"{override.partition('=')[0]}={run}" if is_replaced else override
    assert resolve_run_names(["seed=1", override], Path("outputs")) == ("seed=1", expected)


def test_weights_of_a_new_run_are_checked_before_its_start(tmp_path: Path) -> None:
    def settings(*overrides: str) -> Any:
        return compose(Request((f"output_root={tmp_path}", *overrides))).settings

    make_run(tmp_path, 3)
    folder = fill(tmp_path / "a", "model-1-of-2.safetensors", "model-2-of-2.safetensors")
    for given in ((), (f"weights={folder}",), ("weights=mine",), ("resume=mine",), ("resume=fresh",)):
        check_start(settings(*given), "new")
    (folder / "model-2-of-2.safetensors").write_bytes(b"no header")
    with pytest.raises(AccelRunError) as caught:
        check_start(settings(f"weights={folder}"), "new")
    assert "model-2-of-2.safetensors" in str(caught.value)
    for missing in ("weights=other", "resume=other"):
        with pytest.raises(InputMissing):
            check_start(settings(missing), "new")
        check_start(settings(missing), "mine")  # a resumed run uses its own checkpoints
