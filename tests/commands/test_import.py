"""Foreign files: what becomes of them, what is refused and in which words, and that a run begins with the product."""

from __future__ import annotations

import argparse
import os
import pickle
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.forkserver import ForkServer

# ruff: noqa: E501 - texts are compared to the letter

TASK = Path(__file__).parents[1] / "faults" / "task_to_attack.py"


def model(hidden: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(4, hidden), nn.Dropout(0.1), nn.ReLU(), nn.Linear(hidden, 2))


class Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch WAS_RUN",)


def prefixed(prefix: str, state: dict[str, Any]) -> dict[str, Any]:
    return {prefix + name: tensor for name, tensor in state.items()}


STATE = model().state_dict()
CODE = "have it saved as a plain mapping of names to tensors: torch.save(model.state_dict(), file)\n"
TAKEN: dict[str, tuple[Any, str]] = {
    "plain": (STATE, "4 tensors, 0.0 MiB"),
    "wrapped": (
        {"epoch": 3, "state_dict": prefixed("module.", STATE), "optimizer": {"lr": 0.1}},
        "4 tensors of state_dict, 0.0 MiB",
    ),
    "compiled": (prefixed("_orig_mod.module.", STATE), "4 tensors, 0.0 MiB"),
    "lightning": ({"state_dict": prefixed("model.", STATE), "hyper_parameters": {"a": 1}},
                  "4 tensors of state_dict, 0.0 MiB"),
    "with numbers": ({**STATE, "step": 3}, "4 tensors, 0.0 MiB; 1 entries that are no tensors were left out"),
}  # fmt: skip


@pytest.mark.parametrize("name", TAKEN)
def test_the_tensors_of_a_foreign_file_become_a_safetensors_file(server: ForkServer, tmp_path: Path, name: str) -> None:
    content, told = TAKEN[name]
    torch.save(content, tmp_path / "foreign.pt")
    ended = server.run("import foreign.pt", tmp_path)
    assert (ended.code, ended.err) == (0, "")
    assert (
        ended.out == f"wrote foreign.safetensors: {told}\nbegin with it: accel-run train weights=foreign.safetensors\n"
    )
    found = load_file(tmp_path / "foreign.safetensors")
    entry = content.get("state_dict", content)
    assert found.keys() == {key for key in entry if isinstance(entry[key], torch.Tensor)}
    assert all(torch.equal(found[key], entry[key]) for key in found)
    assert (tmp_path / "foreign.safetensors").stat().st_mode & 0o777 == 0o600


def test_the_format_of_old_is_read_too(server: ForkServer, tmp_path: Path) -> None:
    torch.save({"ema": {"model": STATE}}, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    assert server.run("import old.pth new.safetensors key=ema", tmp_path).code == 0
    assert load_file(tmp_path / "new.safetensors").keys() == STATE.keys()


def save(content: Any) -> Callable[[Path], None]:
    return lambda path: torch.save(content, path)


AGAIN = "\n           fetch it again, or name another file\n"
REFUSED: dict[str, tuple[Callable[[Path], None], int, str]] = {
    "code": (save({"state_dict": STATE, "x": Runs()}), 89, f"asks for posix.system, which is code and not a weight\n           {CODE}"),
    "a whole model": (save(model()), 89, f"asks for torch.nn.modules.container.Sequential, which is code and not a weight\n           {CODE}"),
    "arguments": (save({"args": argparse.Namespace(a=1), "model": STATE}), 89, f"asks for argparse.Namespace, which is code and not a weight\n           {CODE}"),
    "a bare pickle": (lambda path: path.write_bytes(pickle.dumps(Runs(), 2)) and None, 89, f"asks for posix.system, which is code and not a weight\n           {CODE}"),
    "noise": (lambda path: path.write_bytes(b"\xba\xbe" * 500) and None, 65, f"is not a file of torch.save, or damaged: Unsupported operand 186{AGAIN}"),
    "nothing in it": (lambda path: path.write_bytes(b"") and None, 65, f"is not a file of torch.save, or damaged: EOFError{AGAIN}"),
    "no tensors": (save({"a": {"b": 1}}), 78, "holds no tensors by name\n           say which entry with key=NAME; there are a\n"),
    "a list": (save([1, 2]), 65, "must hold a mapping of names to tensors, but holds list\n           have it saved as torch.save(model.state_dict(), file)\n"),
    "sparse": (save({"w": torch.eye(3).to_sparse()}), 65, "cannot be kept as safetensors: w: it is torch.sparse_coo and torch.float32\n           save it as plain tensors where it was made\n"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_is_more_than_tensors_is_refused_in_words(server: ForkServer, tmp_path: Path, name: str) -> None:
    make, code, told = REFUSED[name]
    make(tmp_path / "foreign.pt")
    ended = server.run("import foreign.pt", tmp_path)
    assert (ended.code, ended.out) == (code, "")
    assert ended.err == f"accel-run: {tmp_path}/foreign.pt: {told}"
    assert not (tmp_path / "WAS_RUN").exists()
    assert not (tmp_path / "foreign.safetensors").exists()
    for hint in ("weights_only", "add_safe_globals", "trust"):
        assert hint not in ended.err


SLIPS: dict[str, tuple[int, str]] = {
    "import": (78, "accel-run: import: needs the name of one file\n           say accel-run import model.pt\n"),
    "import a.pt b.safetensors c": (78, "accel-run: import: needs the name of one file\n           say accel-run import model.pt\n"),
    "import missing.pt": (66, "accel-run: missing.pt: there is no such file\n           say accel-run import model.pt\n"),
    "import there.safetensors": (78, "accel-run: there.safetensors: needs no import\n           say accel-run train weights=there.safetensors\n"),
    "import there.pt new.bin": (78, "accel-run: new.bin: must end with .safetensors\n           say new.safetensors\n"),
    "import there.pt": (73, "accel-run: there.safetensors: exists already, and is left as it is\n           give another name after FILE\n"),
    "import there.pt new.safetensors key=emma": (78, "accel-run: FOLDER/there.pt: key=emma: has no entry emma\n           did you mean ema?\n"),
}  # fmt: skip


@pytest.mark.parametrize("words", SLIPS)
def test_a_slip_is_answered_with_what_to_type(server: ForkServer, tmp_path: Path, words: str) -> None:
    torch.save({"ema": STATE}, tmp_path / "there.pt")
    (tmp_path / "there.safetensors").write_bytes(b"mine")
    ended = server.run(words, tmp_path)
    assert (ended.code, ended.err.replace(str(tmp_path), "FOLDER")) == SLIPS[words]
    assert (tmp_path / "there.safetensors").read_bytes() == b"mine"


def test_a_run_begins_with_weights_and_inference_predicts_with_them(server: ForkServer, tmp_path: Path) -> None:
    half = {name: tensor.half() for name, tensor in STATE.items()}
    torch.save(half, tmp_path / "foreign.pt")
    assert server.run("import foreign.pt", tmp_path).code == 0
    words = f"--task {TASK} device=cpu monitor=off weights=foreign.safetensors"
    ended = server.run(f"train {words} updates=1 optimizer.lr=1e-30 optimizer.weight_decay=0 run=mine", tmp_path)
    assert ended.code == 0, ended.err
    assert "begins with the 4 tensors of foreign.safetensors, 4 of them in another precision" in ended.out
    kept = load_file(next((tmp_path / "outputs" / "mine" / "checkpoints").glob("update-*")) / "model.safetensors")
    assert all(torch.equal(kept[name], tensor.float()) for name, tensor in half.items())
    ended = server.run(f"inference {words} run=guess", tmp_path)
    assert ended.code == 0, ended.err
    assert ended.out.startswith("guess: begins with the 4 tensors of foreign.safetensors")
    assert (tmp_path / "outputs" / "guess" / "predictions" / "answer-0.npy").is_file()


def test_both_predicts_with_what_was_trained_and_not_with_what_it_began_with(
    server: ForkServer, tmp_path: Path
) -> None:
    torch.save(STATE, tmp_path / "foreign.pt")
    assert server.run("import foreign.pt", tmp_path).code == 0
    ended = server.run(
        f"both --task {TASK} device=cpu monitor=off weights=foreign.safetensors updates=2 run=mine", tmp_path
    )
    assert ended.code == 0, ended.err
    assert "begins with the 4 tensors of foreign.safetensors\n" in ended.out
    assert "mine: update-0000000002, on cpu" in ended.out
    assert (tmp_path / "outputs" / "mine" / "predictions" / "answer-0.npy").is_file()


def test_weights_of_another_model_are_refused_with_a_list(server: ForkServer, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({**prefixed("x.", model(4).state_dict()), **model(4).state_dict()}, tmp_path / "other.safetensors")
    torch.save(STATE, tmp_path / "pickle.safetensors")
    (tmp_path / "noise.safetensors").write_bytes(b"\x01" * 100)
    for file, code, told in (
        ("other", 88, "these are weights of another model; 4 unexpected: x.0.bias, x.0.weight, x.3.bias, x.3.weight; 3 of another shape: 0.weight is (4, 4) float32, must be (8, 4) float32"),
        ("pickle", 89, "is a pickle, which may run code when it is read"),
        ("noise", 65, "is not in the safetensors format"),
        ("missing", 66, "does not exist"),
    ):  # fmt: skip
        ended = server.run(f"train --task {TASK} device=cpu updates=1 weights={file}.safetensors run={file}", tmp_path)
        assert ended.code == code, ended.err
        assert f"accel-run: weights={file}.safetensors: {told}" in ended.err
        assert not list((tmp_path / "outputs" / file / "checkpoints").glob("update-*"))
    for file, code in (("missing", 66), ("FOLDER", 66)):
        (tmp_path / "FOLDER.safetensors").mkdir(exist_ok=True)
        words = f"train --task {TASK} device=cpu updates=1 weights={file}.safetensors run=never"
        ended = server.run(words, tmp_path)
        assert (ended.code, "name a .safetensors file" in ended.err) == (code, True), ended
        assert not (tmp_path / "outputs" / "never").exists()


@pytest.mark.parametrize("prefix", ["model.", "module.", "_orig_mod.module.", "module.model."])
def test_a_run_takes_names_with_what_wrappers_put_before_them(server: ForkServer, tmp_path: Path, prefix: str) -> None:
    torch.save({"state_dict": prefixed(prefix, STATE)}, tmp_path / "foreign.pt")
    assert server.run("import foreign.pt", tmp_path).code == 0
    words = f"train --task {TASK} device=cpu monitor=off updates=1 weights=foreign.safetensors run=mine"
    ended = server.run(words, tmp_path)
    assert ended.code == 0, ended.err
    assert f"; {prefix} was taken off their names" in ended.out


def test_a_model_whose_own_names_begin_like_a_wrapper_takes_its_own_weights() -> None:
    from runner.engine.weights import _named_as

    own = prefixed("model.", STATE)
    assert _named_as(own, own.keys()) == (own, "")
    assert _named_as(prefixed("module.", own), own.keys())[1] == "module."
    assert _named_as(prefixed("x.", own), own.keys())[1] == ""


def test_no_length_of_a_header_makes_a_pickle_of_a_safetensors_file(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    from runner.engine.weights import _read

    firsts = set()
    for length in range(0, 1200, 8):
        save_file({"w": torch.ones(2)}, tmp_path / "w.safetensors", {"of": "x" * length})
        firsts.add((tmp_path / "w.safetensors").read_bytes()[:2])
        assert _read(tmp_path / "w.safetensors").keys() == {"w"}
    assert {b"\x80\x02", b"\x80\x03", b"\x80\x04"} <= firsts


ODD: dict[str, tuple[Any, str]] = {
    "meta": ({"w": torch.ones(2, device="meta")}, "w: it has no values, for it is on meta"),
    "endless": ({"w": torch.ones(1).expand(1 << 33)}, "which the file's size does not explain"),
    "surrogate": ({"w\udcff": torch.ones(2)}, "its name is no text that can be written"),
    "metadata": ({"__metadata__": torch.ones(2)}, "the format has another use for this name"),
    "twice": ({1: torch.ones(2), "1": torch.zeros(2)}, "1: it is there twice"),
}


@pytest.mark.parametrize("name", ODD)
def test_what_cannot_be_kept_is_told_and_leaves_nothing(server: ForkServer, tmp_path: Path, name: str) -> None:
    content, told = ODD[name]
    torch.save(content, tmp_path / "foreign.pt")
    ended = server.run("import foreign.pt", tmp_path)
    assert (ended.code, ended.out) == (65, ""), ended
    assert told in ended.err
    assert [path.name for path in tmp_path.iterdir() if path.name not in (".out", ".err")] == ["foreign.pt"]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_nested_tensor_is_told(server: ForkServer, tmp_path: Path) -> None:
    torch.save({"w": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])}, tmp_path / "foreign.pt")
    ended = server.run("import foreign.pt", tmp_path)
    assert ended.code in (65, 89), ended
    assert "Traceback" not in ended.err


def test_the_weights_of_a_checkpoint_are_taken_and_not_its_step(server: ForkServer, tmp_path: Path) -> None:
    torch.save({"step": torch.tensor(5), "state_dict": STATE}, tmp_path / "foreign.pt")
    assert "4 tensors of state_dict" in server.run("import foreign.pt", tmp_path).out
    assert load_file(tmp_path / "foreign.safetensors").keys() == STATE.keys()


@pytest.mark.parametrize("word", [".", "/", "", "..", "FOLDER"])
def test_a_folder_is_no_file_to_import(server: ForkServer, tmp_path: Path, word: str) -> None:
    (tmp_path / "FOLDER").mkdir()
    ended = server.run(["import", word], tmp_path)
    assert ended.code == 66, ended
    assert "there is no such file" in ended.err


def test_the_new_file_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    from runner.base.errors import CannotCreate
    from runner.engine.weights import settle

    (tmp_path / "half").write_bytes(b"new")
    (tmp_path / "taken").write_bytes(b"mine")
    with pytest.raises(CannotCreate):
        settle(tmp_path / "half", tmp_path / "taken")
    assert (tmp_path / "taken").read_bytes() == b"mine"
    settle(tmp_path / "half", tmp_path / "new")
    assert (tmp_path / "new").read_bytes() == b"new"


def test_an_import_that_is_stopped_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import runner.commands.import_ as command
    from runner.launch import apart

    def stopped(_: Any, __: Path, half: Path, ___: Any) -> None:
        assert half.parent == tmp_path
        assert half.name != "foreign.safetensors", "written to the final name"
        half.write_bytes(b"half")
        os.kill(os.getpid(), 15)

    torch.save(STATE, tmp_path / "foreign.pt")
    monkeypatch.setattr(apart, "apart", stopped)
    with pytest.raises(SystemExit):
        command.run([str(tmp_path / "foreign.pt")])
    assert [path.name for path in tmp_path.iterdir()] == ["foreign.pt"]


def test_the_process_that_reads_has_no_network_or_it_is_said(server: ForkServer, tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "foreign.pt")
    said = "this system did not let the process that read it go without a network"
    ended = server.run("import foreign.pt", tmp_path)
    assert _has_network() == (said in ended.out)
    refused = subprocess.run(["unshare", "--user", "--net", "true"], check=False, capture_output=True).returncode
    assert refused or not _has_network(), "this system lets a process go, and it was not"


def _has_network() -> bool:
    """Tell whether a process confined as that of an import has more than a loopback that is down."""
    from runner.launch.apart import apart

    return apart(_networks)


def _networks() -> bool:
    from runner.engine.weights import _confine

    here = str(Path("/proc/self/ns/net").readlink())
    _confine(0)
    return str(Path("/proc/self/ns/net").readlink()) == here
