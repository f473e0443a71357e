"""Importing a file that cannot be converted raises a specific error and leaves no output file."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from runner.base.errors import (
    AccelRunError,
    CannotCreate,
    ConfigError,
    DataError,
    HostMemoryError,
    SecurityRefusal,
)
from runner.durable import files
from runner.trained import pickle_import
from runner.trained.pickle_import import Imported, convert, limit_resources, publish, refuse_existing
from tests.faults.recording import Faults, Quick


class Runs:
    """Executes code when it is unpickled."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.made),)


STATE = {"weight": torch.arange(6.0).view(2, 3), "bias": torch.ones(2)}


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, tuple[int, int]]]:
    """Record resource limits, kind -> (soft, hard), instead of applying them to this process."""
    given = dict.fromkeys((resource.RLIMIT_AS, resource.RLIMIT_CPU), (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "getrlimit", given.__getitem__)
    monkeypatch.setattr(resource, "setrlimit", given.__setitem__)
    with files.use_system(Quick()):
        yield given


def save_content(folder: Path, content: Any, **options: Any) -> Path:
    torch.save(content, folder / "foreign.pt", **options)
    return folder / "foreign.pt"


def convert_content(
    folder: Path, content: Any, key: str | None = None, **options: Any
) -> tuple[Imported, dict[str, Tensor]]:
    """Import a file with this content; return the result and the tensors of the new file."""
    target = folder / "new.safetensors"
    imported = convert(save_content(folder, content, **options), target, key)
    assert target.stat().st_size == imported.num_bytes
    return imported, load_file(target)


def convert_refused(folder: Path, content: Any, key: str | None = None, **options: Any) -> AccelRunError:
    """Import a file with this content; return the error, which must leave no new file."""
    with pytest.raises(AccelRunError) as caught:
        convert(save_content(folder, content, **options), folder / "new.safetensors", key)
    assert [path.name for path in folder.iterdir()] == ["foreign.pt"]
    return caught.value


@pytest.mark.parametrize("is_new_format", [True, False])
@pytest.mark.parametrize(
    ("content", "key", "entry"),
    [
        (STATE, None, ""),
        ({"epoch": 3, "state_dict": STATE}, None, "state_dict"),
        ({"model": {"module": STATE}, "weights": {"other": torch.ones(1)}}, None, "model.module"),
        ({"step": torch.tensor(1), "net": STATE}, None, "net"),
        ({"ema": {"inner": STATE}, "model": {"other": torch.ones(1)}}, "ema.inner", "ema.inner"),
        ({"ema": {"weights": STATE}}, "ema", "ema.weights"),
        ({"model": {"model": {"model": {"model": {"model": STATE}}}}}, None, ".".join(["model"] * 5)),
    ],
)
def test_the_entry_with_the_weights_is_found_or_given(
    content: Any, key: str | None, entry: str, is_new_format: bool, tmp_path: Path
) -> None:
    imported, tensors = convert_content(tmp_path, content, key, _use_new_zipfile_serialization=is_new_format)
    assert (imported.entry, imported.num_tensors, imported.num_skipped) == (entry, 2, 0)
    assert tensors.keys() == STATE.keys()
    assert all(torch.equal(tensors[name], STATE[name]) for name in STATE)


def test_a_file_is_read_with_limited_memory(tmp_path: Path, limits: dict[int, tuple[int, int]]) -> None:
    convert_content(tmp_path, STATE)
    assert all(soft < hard or hard < 0 <= soft for soft, hard in limits.values())


def test_entries_that_are_not_tensors_are_counted(tmp_path: Path) -> None:
    imported, tensors = convert_content(tmp_path, {**STATE, "epoch": 3, "name": "a", 7: torch.zeros(1)})
    assert (imported.num_tensors, imported.num_skipped) == (3, 2)
    assert tensors.keys() == {*STATE, "7"}


@pytest.mark.parametrize(
    ("content", "key", "kind"),
    [
        ({"a": STATE}, "b", ConfigError),
        ({"a": STATE}, "a.weight.c", ConfigError),
        ({"a": 1}, None, ConfigError),
        ({}, None, ConfigError),
        ({"model": {"model": {"model": {"model": {"model": {"model": STATE}}}}}}, None, ConfigError),
        ([torch.ones(1)], None, DataError),
        (torch.ones(1), None, DataError),
        ({"a": STATE}, "a.weight", DataError),
        (nn.Linear(2, 2), None, SecurityRefusal),
        ({"model": STATE, "args": Path("x")}, None, SecurityRefusal),
        ({"w": torch.ones(2, device="meta")}, None, DataError),
        ({"w": torch.eye(2).to_sparse()}, None, DataError),
        ({"__metadata__": torch.ones(2)}, None, DataError),
        ({"w\udcff": torch.ones(2)}, None, DataError),
        ({1: torch.ones(2), "1": torch.zeros(2)}, None, DataError),
        ({"w": torch.ones(1).expand(1 << 25)}, None, DataError),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, (str, type)) else None,
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_unsupported_contents_are_refused_with_specific_errors(
    content: Any, key: str | None, kind: type[AccelRunError], tmp_path: Path
) -> None:
    assert type(convert_refused(tmp_path, content, key)) is kind


@pytest.mark.parametrize("is_new_format", [True, False])
def test_code_is_refused_and_not_executed_in_either_format(is_new_format: bool, tmp_path: Path) -> None:
    content = {"model": STATE, "x": Runs(tmp_path / "was run")}
    error = convert_refused(tmp_path, content, _use_new_zipfile_serialization=is_new_format)
    assert type(error) is SecurityRefusal
    assert "mkdir" in error.problems[0].what


def test_an_unknown_entry_is_reported_with_existing_entries(tmp_path: Path) -> None:
    content = {"average": STATE, "other": 1, **{f"entry{number}": number for number in range(9)}}
    (typo,) = convert_refused(tmp_path, content, "averag").problems
    assert ("average" in typo.fix, "other" in typo.fix) == (True, False)
    (unknown,) = convert_refused(tmp_path, content, "zzzzzz").problems
    assert all(name in unknown.fix for name in ("average", "other", "entry0"))
    assert "entry8" not in unknown.fix, "too many to list"
    (nothing,) = convert_refused(tmp_path, {"other": 1}).problems
    assert "other" in nothing.fix
    assert nothing.where == str(tmp_path / "foreign.pt")
    assert convert_refused(tmp_path, {}).problems[0].fix == ""


def test_memory_is_limited_to_a_multiple_of_the_file_size(limits: dict[int, tuple[int, int]]) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    in_use = pages * resource.getpagesize()
    for size in (0, 1 << 40):
        limit_resources(size)
        soft, hard = limits[resource.RLIMIT_AS]
        assert abs(soft - in_use - 4 * size - (1 << 30)) < 1 << 28  # this process may have grown in the meantime
        assert hard == resource.RLIM_INFINITY
    assert limits[resource.RLIMIT_CPU][0] > 0


@pytest.mark.parametrize(("hard", "is_lower"), [(1000, True), (1 << 60, False)])
def test_memory_limits_do_not_exceed_those_of_the_process(
    hard: int, is_lower: bool, limits: dict[int, tuple[int, int]]
) -> None:
    limits.update(dict.fromkeys(limits, (hard, hard)))
    limit_resources(1 << 20)
    assert all(ceiling == hard for _, ceiling in limits.values())
    assert (limits[resource.RLIMIT_AS][0] == hard) == is_lower


@pytest.mark.parametrize("content", [b"", b"\xba\xbe" * 500, b"\x80\x02}q\x00."])
def test_a_file_of_another_program_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "foreign.pt").write_bytes(content)
    with pytest.raises(DataError):
        convert(tmp_path / "foreign.pt", tmp_path / "new.safetensors", None)
    assert not (tmp_path / "new.safetensors").exists()


def test_all_refused_names_are_reported_together(tmp_path: Path) -> None:
    content = {name: torch.ones(2, device="meta") for name in ("one", "two")}
    (problem,) = convert_refused(tmp_path, content).problems
    assert all(word in problem.what for word in (*content, "meta"))


@pytest.mark.parametrize(
    ("raised", "kind"),
    [(MemoryError(), HostMemoryError), (PermissionError(errno.EACCES, "denied"), DataError)],
    ids=["memory", "permission"],
)
def test_memory_and_permission_errors_while_reading_are_distinguished(
    raised: Exception, kind: type[AccelRunError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: Any, **__: Any) -> Any:
        raise raised

    source = save_content(tmp_path, STATE)
    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(kind) as caught:
        convert(source, tmp_path / "new.safetensors", None)
    assert type(caught.value) is kind
    assert caught.value.__cause__ is raised


def test_a_file_that_exists_is_not_overwritten(tmp_path: Path) -> None:
    target = tmp_path / "new.safetensors"
    target.write_bytes(b"mine")
    acts = (lambda: convert(save_content(tmp_path, STATE), target, None), lambda: refuse_existing(target))
    reasons = []
    for act in (*acts, lambda: publish(tmp_path / "foreign.pt", target)):
        with pytest.raises(CannotCreate) as caught:
            act()
        reasons += caught.value.problems
    assert len(set(reasons)) == 1, "all three must report the same error"
    assert reasons[0].where == str(target)
    assert reasons[0].fix
    assert target.read_bytes() == b"mine"
    refuse_existing(tmp_path / "other")


def test_a_file_that_cannot_be_written_raises_cannot_create(tmp_path: Path) -> None:
    source = save_content(tmp_path, STATE)
    with Faults({0: "ENOSPC"}).active(), pytest.raises(CannotCreate) as caught:
        convert(source, tmp_path / "new.safetensors", None)
    assert caught.value.problems[0].where == str(tmp_path / "new.safetensors")
    assert caught.value.problems[0].fix
    assert [path.name for path in tmp_path.iterdir()] == ["foreign.pt"]


@pytest.mark.parametrize("is_taken", [True, False])
def test_publishing_without_hard_links_overwrites_nothing(
    is_taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*_: Any, **__: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, "no hard links")

    (tmp_path / "draft").write_bytes(b"new")
    monkeypatch.setattr(pickle_import.os, "link", link)
    if is_taken:
        (tmp_path / "name").write_bytes(b"mine")
        with pytest.raises(CannotCreate):
            publish(tmp_path / "draft", tmp_path / "name")
        assert (tmp_path / "name").read_bytes() == b"mine"
    else:
        publish(tmp_path / "draft", tmp_path / "name")
        assert (tmp_path / "name").read_bytes() == b"new"
        assert [path.name for path in tmp_path.iterdir()] == ["name"]


def test_publishing_uses_hard_links_where_possible(tmp_path: Path) -> None:
    """A rename could overwrite a file."""
    (tmp_path / "draft").write_bytes(b"new")
    with Faults().active() as faults:
        publish(tmp_path / "draft", tmp_path / "name")
    assert "rename" not in {operation for operation, _ in faults.trace}
    assert ("fsync", str(tmp_path)) in faults.trace, "the new name must be durable"


def test_publishing_does_not_follow_a_link(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"not imported")
    (tmp_path / "draft").symlink_to(tmp_path / "other")
    publish(tmp_path / "draft", tmp_path / "name")
    assert (tmp_path / "name").is_symlink()
