"""`accel-run import` converts files and explains why it rejects others; runs start from imported weights."""

from __future__ import annotations

import argparse
import os
import pickle
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from runner.tasks.cape.backbone import PretrainedResNet50
from runner.tasks.cape.glyphs import all_letters, write_glyphs
from safetensors.torch import load_file
from torch import nn

from tests.commands_here import run_here
from tests.faults.recording import Faults
from tests.suggestions import suggested

TASK = Path(__file__).parents[1] / "faults" / "task_to_attack.py"


def model(hidden: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(4, hidden), nn.Dropout(0.1), nn.ReLU(), nn.Linear(hidden, 2))


class Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch WAS_RUN",)


def add_prefix(prefix: str, state: dict[str, Any]) -> dict[str, Any]:
    return {prefix + name: tensor for name, tensor in state.items()}


torch.manual_seed(0)
STATE = model().state_dict()
TAKEN: dict[str, Any] = {
    "plain": STATE,
    "wrapped": {"epoch": 3, "state_dict": add_prefix("module.", STATE), "optimizer": {"lr": 0.1}},
    "compiled": add_prefix("_orig_mod.module.", STATE),
    "lightning": {"state_dict": add_prefix("model.", STATE), "hyper_parameters": {"a": 1}},
    "with numbers": {**STATE, "step": 3},
}


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("name", TAKEN)
def test_tensors_of_a_foreign_file_are_converted_to_safetensors(
    tmp_path: Path, name: str, screen: Callable[..., None]
) -> None:
    content = TAKEN[name]
    torch.save(content, tmp_path / "foreign.pt")
    result = run_here("import foreign.pt", tmp_path)
    assert (result.code, result.err) == (0, "")
    assert suggested(result.out.splitlines()[-1]) == ["weights=foreign.safetensors"]
    if name == "with numbers":
        screen(result.out)
    actual = load_file(tmp_path / "foreign.safetensors")
    entry = content.get("state_dict", content)
    assert actual.keys() == {key for key in entry if isinstance(entry[key], torch.Tensor)}
    assert all(torch.equal(actual[key], entry[key]) for key in actual)
    assert (tmp_path / "foreign.safetensors").stat().st_mode & 0o777 == 0o600


def test_the_printed_command_quotes_the_file(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "my model.pt")
    result = run_here(["import", "my model.pt"], tmp_path)
    assert (result.code, result.err) == (0, "")
    command = shlex.split(result.out.partition("start from it: accel-run ")[2])
    explained = run_here(["explain", "weights.source", *command[1:]], tmp_path)
    assert (explained.code, explained.err) == (0, "")
    assert "my model.safetensors" in explained.out


def test_file_names_may_contain_equals_signs(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(2)}, tmp_path / "epoch=3-step=10.ckpt")
    for name in ("epoch=3-step=10.ckpt", "./epoch=3-step=10.ckpt"):
        imported = run_here(["import", name], tmp_path)
        assert imported.code == 0, imported.err
        (tmp_path / "epoch=3-step=10.safetensors").unlink()


def test_the_legacy_torch_save_format_is_read(tmp_path: Path) -> None:
    torch.save({"ema": {"model": STATE}}, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    result = run_here(["import", "old.pth", "new.safetensors", "key=ema"], tmp_path)
    assert result.code == 0, result.err
    assert load_file(tmp_path / "new.safetensors").keys() == STATE.keys()


def test_all_entries_listed_in_the_error_can_be_imported(tmp_path: Path) -> None:
    torch.save({"epoch": 1, "net": {"ema": STATE, "raw.1": STATE, 0: STATE}}, tmp_path / "nested.pt")
    refused = run_here(["import", "nested.pt"], tmp_path)
    assert refused.code == 78
    listed = refused.err.rpartition("available:")[2].replace(",", " ").split()
    assert len(listed) == 3
    for key in listed:
        imported = run_here(["import", "nested.pt", f"{key}.safetensors", f"key={key}"], tmp_path)
        assert imported.code == 0, imported.err


def save(content: Any) -> Callable[[Path], None]:
    return lambda path: torch.save(content, path)


REFUSED: dict[str, tuple[Callable[[Path], Any], int]] = {
    "code": (save({"state_dict": STATE, "x": Runs()}), 89),
    "a whole model": (save(model()), 89),
    "arguments": (save({"args": argparse.Namespace(a=1), "model": STATE}), 89),
    "a bare pickle": (lambda path: path.write_bytes(pickle.dumps(Runs(), 2)), 89),
    "noise": (lambda path: path.write_bytes(b"\xba\xbe" * 500), 65),
    "nothing in it": (lambda path: path.write_bytes(b""), 65),
    "no tensors": (save({"a": {"b": 1}}), 78),
    "a list": (save([1, 2]), 65),
    "sparse": (save({"w": torch.eye(3).to_sparse()}), 65),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_files_with_other_objects_than_tensors_are_rejected(tmp_path: Path, screen: Callable[..., None]) -> None:
    messages = []
    for name, (make, code) in REFUSED.items():
        make(tmp_path / "foreign.pt")
        result = run_here("import foreign.pt", tmp_path)
        assert (result.code, result.out) == (code, ""), name
        assert not (tmp_path / "WAS_RUN").exists(), name
        assert not (tmp_path / "foreign.safetensors").exists(), name
        for hint in ("weights_only", "add_safe_globals", "trust"):
            assert hint not in result.err, name
        messages.append(f"{name}\n{result.err}")
    screen("\n".join(messages))


SLIPS = {
    "import": 78,
    "import a.pt b.safetensors c": 78,
    "import there.pt new.safetensors foo=1": 78,
    "import there.pt key=a key=b": 78,
    "import missing.pt": 66,
    "import there.safetensors": 78,
    "import there.pt new.bin": 78,
    "import there.pt": 73,
    "import there.pt new.safetensors key=emma": 78,
}


def test_a_typo_gets_a_suggestion(tmp_path: Path, screen: Callable[..., None]) -> None:
    torch.save({"ema": STATE}, tmp_path / "there.pt")
    (tmp_path / "there.safetensors").write_bytes(b"mine")
    messages = []
    for args, code in SLIPS.items():
        result = run_here(args, tmp_path)
        assert result.code == code, args
        assert (tmp_path / "there.safetensors").read_bytes() == b"mine"
        messages.append(f"$ accel-run {args}\n{result.err}")
    screen("\n".join(messages))


def test_training_and_inference_start_from_imported_weights(tmp_path: Path) -> None:
    half = {name: tensor.half() for name, tensor in STATE.items()}
    torch.save(half, tmp_path / "foreign.pt")
    assert run_here("import foreign.pt", tmp_path).code == 0
    args = f"--task {TASK} device=cpu monitor=off weights=foreign.safetensors"
    result = run_here(f"train {args} updates=1 optimizer.lr=1e-30 optimizer.weight_decay=0 run=mine", tmp_path)
    assert result.code == 0, result.err
    assert re.search(r" 4 .* foreign\.safetensors, 4 ", result.out)
    kept = load_file(next((tmp_path / "outputs" / "mine" / "checkpoints").glob("update-*")) / "model.safetensors")
    assert all(torch.equal(kept[name], tensor.float()) for name, tensor in half.items())
    result = run_here(f"inference {args} run=guess", tmp_path)
    assert result.code == 0, result.err
    assert re.match(r"guess: .* 4 .* foreign\.safetensors", result.out)
    assert (tmp_path / "outputs" / "guess" / "predictions" / "answer-0.npy").is_file()


def test_the_both_command_predicts_with_trained_weights(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "foreign.pt")
    assert run_here("import foreign.pt", tmp_path).code == 0
    result = run_here(
        f"both --task {TASK} device=cpu monitor=off weights=foreign.safetensors updates=2 run=mine", tmp_path
    )
    assert result.code == 0, result.err
    assert " of foreign.safetensors\n" in result.out
    assert "mine: update-0000000002 (" in result.out
    assert (tmp_path / "outputs" / "mine" / "predictions" / "answer-0.npy").is_file()


@pytest.mark.slow
def test_differences_to_weights_of_another_model_are_listed(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({**add_prefix("x.", model(4).state_dict()), **model(4).state_dict()}, tmp_path / "other.safetensors")
    torch.save(STATE, tmp_path / "pickle.safetensors")
    (tmp_path / "noise.safetensors").write_bytes(b"\x01" * 100)
    for file, code, messages in (
        ("other", 88, "x.0.bias"),
        ("pickle", 89, "pickle"),
        ("noise", 65, ""),
        ("missing", 66, ""),
    ):
        result = run_here(f"train --task {TASK} device=cpu updates=1 weights={file}.safetensors run={file}", tmp_path)
        assert result.code == code, result.err
        assert f"accel-run: weights={file}.safetensors: " in result.err
        assert messages in result.err
        assert not list((tmp_path / "outputs" / file / "checkpoints").glob("update-*"))
    for file, code in (("missing", 66), ("FOLDER", 78)):
        (tmp_path / "FOLDER.safetensors").mkdir(exist_ok=True)
        args = f"train --task {TASK} device=cpu updates=1 weights={file}.safetensors run=never"
        result = run_here(args, tmp_path)
        assert (result.code, "model.safetensors" in result.err) == (code, True), result
        assert not (tmp_path / "outputs" / "never").exists()


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["model.", "module.", "_orig_mod.module.", "module.model."])
def test_wrapper_prefixes_are_removed_from_names(tmp_path: Path, prefix: str) -> None:
    torch.save({"state_dict": add_prefix(prefix, STATE)}, tmp_path / "foreign.pt")
    assert run_here("import foreign.pt", tmp_path).code == 0
    args = f"train --task {TASK} device=cpu monitor=off updates=1 weights=foreign.safetensors run=mine"
    result = run_here(args, tmp_path)
    assert result.code == 0, result.err
    assert f" {prefix} " in result.out


def test_model_names_like_wrapper_prefixes_are_kept() -> None:
    from runner.engine.parts.weights import strip_prefixes

    own = add_prefix("model.", STATE)
    assert strip_prefixes(own, own.keys()) == (own, "")
    assert strip_prefixes(add_prefix("module.", own), own.keys())[1] == "module."
    assert strip_prefixes(add_prefix("x.", own), own.keys())[1] == ""


def test_safetensors_files_are_never_read_as_pickle(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    from runner.engine.parts.weights import read_weights

    firsts = set()
    for length in range(0, 1200, 8):
        save_file({"w": torch.ones(2)}, tmp_path / "w.safetensors", {"of": "x" * length})
        firsts.add((tmp_path / "w.safetensors").read_bytes()[:2])
        assert read_weights(tmp_path / "w.safetensors").keys() == {"w"}
    assert {b"\x80\x02", b"\x80\x03", b"\x80\x04"} <= firsts


ODD: dict[str, tuple[Any, str]] = {
    "meta": ({"w": torch.ones(2, device="meta")}, "w: "),
    "endless": ({"w": torch.ones(1).expand(1 << 33)}, "GiB"),
    "surrogate": ({"w\udcff": torch.ones(2)}, "name"),
    "metadata": ({"__metadata__": torch.ones(2)}, "__metadata__"),
    "twice": ({1: torch.ones(2), "1": torch.zeros(2)}, "1: "),
}


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("name", ODD)
def test_unsupported_tensors_are_reported_without_writing_a_file(tmp_path: Path, name: str) -> None:
    content, messages = ODD[name]
    torch.save(content, tmp_path / "foreign.pt")
    result = run_here("import foreign.pt", tmp_path)
    assert (result.code, result.out) == (65, ""), result
    assert messages in result.err
    assert [path.name for path in tmp_path.iterdir() if path.name not in (".out", ".err")] == ["foreign.pt"]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_nested_tensor_is_reported(tmp_path: Path) -> None:
    torch.save({"w": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])}, tmp_path / "foreign.pt")
    result = run_here("import foreign.pt", tmp_path)
    assert result.code in (65, 89), result
    assert "Traceback" not in result.err


def test_only_weights_of_a_foreign_checkpoint_are_imported(tmp_path: Path) -> None:
    torch.save({"step": torch.tensor(5), "state_dict": STATE}, tmp_path / "foreign.pt")
    assert "of state_dict" in run_here("import foreign.pt", tmp_path).out
    assert load_file(tmp_path / "foreign.safetensors").keys() == STATE.keys()


@pytest.mark.parametrize("word", [".", "/", "", "..", "FOLDER"])
def test_a_folder_cannot_be_imported(tmp_path: Path, word: str) -> None:
    (tmp_path / "FOLDER").mkdir()
    result = run_here(["import", word], tmp_path)
    assert result.code == 66, result
    assert "accel-run import" in result.err


def test_a_failed_import_keeps_an_existing_file(tmp_path: Path) -> None:
    from runner.base.errors import CannotCreate
    from runner.trained.pickle_import import publish

    (tmp_path / "half").write_bytes(b"new")
    (tmp_path / "taken").write_bytes(b"mine")
    with pytest.raises(CannotCreate):
        publish(tmp_path / "half", tmp_path / "taken")
    assert (tmp_path / "taken").read_bytes() == b"mine"
    faults = Faults()
    with faults.active():
        publish(tmp_path / "half", tmp_path / "new")
    assert (tmp_path / "new").read_bytes() == b"new"
    assert ("fsync", str(tmp_path)) in faults.trace, "the folder must be synced to disk"


def test_an_interrupted_import_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import runner.commands.import_ as command
    from runner.host import subprocesses

    def stop_halfway(_: Any, __: Path, half: Path, ___: Any) -> None:
        assert half.parent == tmp_path
        assert half.name != "foreign.safetensors", "the import writes to the final name"
        half.write_bytes(b"half")
        os.kill(os.getpid(), 15)

    torch.save(STATE, tmp_path / "foreign.pt")
    monkeypatch.setattr(subprocesses, "run_in_subprocess", stop_halfway)
    with pytest.raises(SystemExit):
        command.run([str(tmp_path / "foreign.pt")])
    assert [path.name for path in tmp_path.iterdir()] == ["foreign.pt"]


@pytest.mark.slow
def test_documented_commands_load_a_resnet_50_into_cape(tmp_path: Path) -> None:
    torch.manual_seed(0)
    backbone = PretrainedResNet50(1).state_dict()
    for tensor in backbone.values():
        if tensor.dim() == 1:  # for norms, values that differ from the initial ones, but keep the loss finite
            tensor.uniform_(0.5, 1.0)
    counts = {name.replace("running_mean", "num_batches_tracked"): torch.tensor(7) for name in backbone}
    classifier = {"fc.weight": torch.zeros(1000, 2048), "fc.bias": torch.zeros(1000)}
    torch.save({**counts, **backbone, **classifier}, tmp_path / "resnet50.pth")  # the names that torchvision uses
    letters = all_letters()[:9]
    splits = {"train": letters[:4], "val": letters[4:7], "test": letters[7:]}
    write_glyphs(tmp_path / "glyphs", splits, image_size=32)
    page = (Path(__file__).parents[2] / "docs/tasks/cape.md").read_text().replace("\\\n", "")
    commands = re.findall(r"^accel-run ((?:import|train).*resnet50\.safetensors.*)$", page, re.MULTILINE)
    assert [command.split()[0] for command in commands] == ["import", "train"]
    small = (
        "task.size=tiny task.image_size=32 data.path=glyphs updates=1 optimizer.lr=1e-30 evaluate.every=0 run=cape"
        " global_batch_size=2 device=cpu monitor=off"
    )
    for command in (commands[0], f"{commands[1]} {small}"):
        result = run_here(shlex.split(command), tmp_path)
        assert result.code == 0, result.err
    (saved,) = (tmp_path / "outputs/cape/checkpoints").glob("update-*/model.safetensors")
    trained = load_file(saved)
    for name, tensor in backbone.items():
        assert torch.equal(trained[f"backbone.{name}"], tensor), name
