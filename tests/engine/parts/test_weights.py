"""Initial weights: matching tensors equal those of the source bit for bit, and the others are reported."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from runner.base.errors import AccelRunError, ConfigError, DataError, Exit, IncompatibleResume, SecurityRefusal
from runner.config.configuration import compose
from runner.config.request import Request
from runner.config.settings import Settings, WeightsSettings
from runner.distributed.parallel import Parallel
from runner.distributed.world import World
from runner.durable.checkpoint import checkpoint_path, load
from runner.engine.opening import open_phase
from runner.engine.parts.weights import load_initial_weights
from tests.forkserver import ForkServer

TASK = Path(__file__).parents[1] / "task_of_averages.py"
ALONE = Parallel(World(torch.device("cpu")))


class Net(nn.Module):
    """A backbone and a head; `tied` shares the head's weight with the backbone."""

    def __init__(self, classes: int = 3, *, tied: bool = False) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.head = nn.Linear(4, 4 if tied else classes, bias=not tied)
        if tied:
            self.head.weight = self.backbone[0].weight


def source() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {name: tensor.clone() for name, tensor in Net().state_dict().items()}


def load_weights(model: nn.Module, path: Path, **options: object) -> str:
    settings = Settings(weights=WeightsSettings(source=str(path), **options), output_root=str(path.parent))  # type: ignore[arg-type]
    return load_initial_weights(settings, model, ALONE)


def assert_has(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    state = model.state_dict()
    for name, tensor in tensors.items():
        assert torch.equal(state[name], tensor), name


def write_shards(folder: Path, tensors: dict[str, Tensor], *, index: bool = True) -> list[Path]:
    folder.mkdir()
    halves = [dict(list(tensors.items())[:3]), dict(list(tensors.items())[3:])]
    names = [f"model-{number:05}-of-00002.safetensors" for number in (1, 2)]
    for name, half in zip(names, halves, strict=True):
        save_file(half, folder / name)
    if index:
        weight_map = {tensor: name for name, half in zip(names, halves, strict=True) for tensor in half}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return [folder / name for name in names]


def test_single_files_shards_and_hugging_face_folders_give_the_same_weights(tmp_path: Path) -> None:
    save_file(source(), tmp_path / "w.safetensors")
    folder = tmp_path / "hf"
    folder.mkdir()
    save_file(source(), folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    write_shards(tmp_path / "shards", source())
    write_shards(tmp_path / "plain", source(), index=False)
    for name, files in (("single", ["any.safetensors"]), ("beside", ["adapter.safetensors", "model.safetensors"])):
        (tmp_path / name).mkdir()
        for file in files:
            save_file(source() if file != "adapter.safetensors" else {}, tmp_path / name / file)
    places = ["w.safetensors", "hf", "shards", "plain", "single", "beside", "shards/model.safetensors.index.json"]
    for place in places:
        model = Net()
        load_weights(model, tmp_path / place)
        assert_has(model, source())


SMALL = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


@pytest.mark.parametrize("shard_size", [10_000_000, 4000], ids=["one file", "shards"])
def test_a_folder_saved_by_transformers_is_loaded(shard_size: int, tmp_path: Path) -> None:
    """Load GPT-2 with tied weights, and BERT without its head and with renamed tensors."""
    transformers = pytest.importorskip("transformers", reason="the package transformers is not installed")
    config = transformers.AutoConfig.for_model("gpt2", **SMALL, bos_token_id=None, eos_token_id=None)
    saved, model = (transformers.AutoModelForCausalLM.from_config(config) for _ in range(2))
    saved.save_pretrained(tmp_path / "gpt2", max_shard_size=shard_size)
    assert (len(list((tmp_path / "gpt2").glob("*.safetensors"))) > 1) == (shard_size < 10_000)
    load_weights(model, tmp_path / "gpt2")
    assert_has(model, saved.state_dict())

    config = transformers.AutoConfig.for_model("bert", **SMALL, num_labels=3)
    body = transformers.AutoModel.from_config(config)
    body.save_pretrained(tmp_path / "bert", max_shard_size=shard_size)
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    head = {name: tensor.clone() for name, tensor in model.classifier.state_dict(prefix="classifier.").items()}
    rename = {name: f"bert.{name}" for name in ("embeddings", "encoder", "pooler")}
    shown = load_weights(model, tmp_path / "bert", rename=rename, only=["bert"])
    assert_has(model, {f"bert.{name}": tensor for name, tensor in body.state_dict().items()} | head)
    assert "classifier.weight" not in shown
    assert f"bert ({len(body.state_dict())})" in load_weights(model, tmp_path / "bert", rename=rename, strict=False)


def test_links_of_a_hugging_face_cache_are_followed(tmp_path: Path) -> None:
    save_file(source(), tmp_path / "blob")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model.safetensors").symlink_to(tmp_path / "blob")
    load_weights(model := Net(), tmp_path / "snapshot")
    assert_has(model, source())


def test_a_tied_weight_stored_once_is_not_missing(tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in source().items() if name.startswith("backbone")}
    save_file(tensors, tmp_path / "w.safetensors")
    shown = load_weights(model := Net(tied=True), tmp_path / "w.safetensors")
    assert_has(model, tensors | {"head.weight": tensors["backbone.0.weight"]})
    assert f" {len(model.state_dict())} tensors of " in shown


def test_a_new_head_keeps_its_initialization(tmp_path: Path) -> None:
    save_file(source(), tmp_path / "w.safetensors")
    for options in ({"only": ["backbone"]}, {"strict": False}):
        model = Net(classes=7)
        before = {name: tensor.clone() for name, tensor in model.head.state_dict(prefix="head.").items()}
        shown = load_weights(model, tmp_path / "w.safetensors", **options)
        assert_has(model, before)
        assert_has(model, {name: tensor for name, tensor in source().items() if name.startswith("backbone")})
        assert "backbone (4)" in shown
        assert "head.weight" in shown
    with pytest.raises(IncompatibleResume):
        load_weights(Net(classes=7), tmp_path / "w.safetensors")


def test_renamed_tensors_are_loaded_under_their_new_names(tmp_path: Path) -> None:
    tensors = {
        f"encoder.{name.removeprefix('backbone.')}": tensor for name, tensor in source().items() if "backbone" in name
    }
    save_file(
        tensors | {"fc.weight": source()["head.weight"], "fc.bias": source()["head.bias"]}, tmp_path / "w.safetensors"
    )
    load_weights(model := Net(), tmp_path / "w.safetensors", rename={"encoder": "backbone", "fc": "head"})
    assert_has(model, source())


@pytest.mark.parametrize("tensors", [{}, {"extra": torch.zeros(1)}])
def test_without_strict_missing_and_ignored_tensors_are_listed(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    lacking = {name: tensor for name, tensor in source().items() if name != "head.bias"}
    save_file(lacking | tensors, tmp_path / "w.safetensors")
    shown = load_weights(Net(), tmp_path / "w.safetensors", strict=False)
    assert "head.bias" in shown
    assert all(name in shown for name in tensors)


def load_rejected(model: nn.Module, path: Path, **options: object) -> AccelRunError:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(AccelRunError) as caught:
        load_weights(model, path, **options)
    assert_has(model, before)
    return caught.value


def test_unusable_weights_are_rejected_and_nothing_is_loaded(tmp_path: Path) -> None:
    save_file(source(), tmp_path / "w.safetensors")
    unknown = load_rejected(Net(), tmp_path / "w.safetensors", only=["bakbone"])
    assert isinstance(unknown, ConfigError)
    assert " backbone?" in str(unknown)
    assert isinstance(load_rejected(Net(), tmp_path / "w.safetensors", rename={"encoder": "backbone"}), ConfigError)
    assert isinstance(load_rejected(Net(), tmp_path / "w.safetensors", rename={"head": "backbone.0"}), ConfigError)
    save_file({"x": torch.zeros(2)}, tmp_path / "other.safetensors")
    assert isinstance(load_rejected(Net(), tmp_path / "other.safetensors", strict=False), IncompatibleResume)
    (tmp_path / "empty").mkdir()
    assert load_rejected(Net(), tmp_path / "empty").exit_code == Exit.CONFIG
    (tmp_path / "pickles").mkdir()
    (tmp_path / "pickles" / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    assert isinstance(load_rejected(Net(), tmp_path / "pickles"), SecurityRefusal)
    assert load_rejected(Net(), tmp_path / "nothing").exit_code == Exit.NO_INPUT


@pytest.mark.parametrize("prefix", ["net", "true", "null", "0"])
@pytest.mark.parametrize("is_longer", [True, False])
@pytest.mark.parametrize("has_more", [True, False])
def test_the_error_suggests_the_rename_that_loads_the_weights(
    prefix: str, is_longer: bool, has_more: bool, tmp_path: Path
) -> None:
    """Names may have a prefix in the source, as in a Lightning checkpoint, or in the model."""
    tensors = {f"{prefix}.{name}" if is_longer else name: tensor for name, tensor in source().items()}
    save_file(tensors | ({"loss.weight": torch.ones(1)} if has_more else {}), tmp_path / "w.safetensors")
    model = Net() if is_longer else nn.ModuleDict({prefix: Net()})
    (problem,) = load_rejected(model, tmp_path / "w.safetensors").problems
    settings = shlex.split(problem.fix)[1:]
    weights = compose(Request(tuple(settings), TASK)).settings.weights
    load_weights(model, tmp_path / "w.safetensors", rename=weights.rename, strict=weights.strict)
    assert_has(model if is_longer else model[prefix], source())  # type: ignore[index]
    assert weights.strict != has_more


def test_no_rename_is_suggested_for_unrelated_weights(tmp_path: Path) -> None:
    save_file({"net.head.bias": torch.zeros(3), "x": torch.zeros(2)}, tmp_path / "w.safetensors")
    (problem,) = load_rejected(Net(), tmp_path / "w.safetensors").problems
    assert "net" not in problem.fix


def test_a_suggested_rename_keeps_matches_and_loads_most_missing_tensors(tmp_path: Path) -> None:
    tensors = {name: torch.ones(1, 1) for name in ("net.x.weight", "a.weight", "b.weight", "own.c.weight")}
    save_file(tensors, tmp_path / "w.safetensors")

    def linears(*names: str) -> nn.ModuleDict:
        return nn.ModuleDict({name: nn.Linear(1, 1, bias=False) for name in names})

    both = nn.ModuleDict({**linears("x"), "net": linears("a", "b"), "own": linears("c")})
    (problem,) = load_rejected(both, tmp_path / "w.safetensors").problems
    weights = compose(Request(tuple(shlex.split(problem.fix)[1:]), TASK)).settings.weights
    load_weights(both, tmp_path / "w.safetensors", rename=weights.rename, strict=weights.strict)
    assert [name for name, weight in both.named_parameters() if not weight.eq(1).all()] == ["x.weight"]

    moved = nn.ModuleDict({"own": linears("c"), "new": nn.ModuleDict({"own": linears("d")})})
    save_file({"own.c.weight": torch.ones(1, 1), "own.d.weight": torch.ones(1, 1)}, tmp_path / "w.safetensors")
    (problem,) = load_rejected(moved, tmp_path / "w.safetensors").problems
    assert "new.own" not in problem.fix, "own.c.weight would no longer match"


def test_unselected_tensors_are_not_listed_as_unused(tmp_path: Path) -> None:
    save_file(source() | {"extra": torch.zeros(1)}, tmp_path / "w.safetensors")
    rows = load_weights(Net(), tmp_path / "w.safetensors", only=["backbone"]).splitlines()
    (unused,) = (row for row in rows if "extra" in row)
    (excluded,) = (row for row in rows if "head.bias" in row)
    assert unused != excluded


def test_missing_duplicate_and_outside_shards_are_rejected(tmp_path: Path) -> None:
    for name, index in (("index", True), ("names", False)):
        write_shards(tmp_path / name, source(), index=index)[1].unlink()
        missing = load_rejected(Net(), tmp_path / name)
        assert isinstance(missing, DataError)
        assert "2" in str(missing)
    first, second = write_shards(tmp_path / "twice", source())
    second.write_bytes(first.read_bytes())
    assert isinstance(load_rejected(Net(), tmp_path / "twice"), DataError)
    write_shards(tmp_path / "lacking", source())
    index = tmp_path / "lacking" / "model.safetensors.index.json"
    index.write_text(
        index.read_text().replace('"weight_map": {', '"weight_map": {"more": "model-00002-of-00002.safetensors", ')
    )
    assert isinstance(load_rejected(Net(), tmp_path / "lacking"), DataError), (
        "a tensor missing from its shard is an error even if the model does not need it"
    )
    write_shards(tmp_path / "outside", source())
    index = tmp_path / "outside" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "../w.safetensors"}}))
    assert isinstance(load_rejected(Net(), tmp_path / "outside"), SecurityRefusal)
    for content in ("[", "{}", '{"weight_map": []}', '{"weight_map": {"x": 1}}'):
        index.write_text(content)
        assert isinstance(load_rejected(Net(), tmp_path / "outside"), DataError)


def test_runs_and_checkpoints_are_sources_of_weights(server: ForkServer, tmp_path: Path) -> None:
    args = ["train", "--task", str(TASK), "device=cpu", "monitor=off"]
    assert server.run([*args, "updates=4", "averaging=ema", "run=first"], tmp_path).code == 0
    checkpoint = load(checkpoint_path(tmp_path / "outputs/first/checkpoints", 4))
    wanted = checkpoint.tensors("model") | checkpoint.tensors("averaging")
    frozen = ["updates=1", "optimizer.lr=1e-30", "optimizer.weight_decay=0"]
    for number, value in enumerate(("first", "outputs/first", str(checkpoint.path), "last")):
        result = server.run([*args, *frozen, f"weights={value}", f"run=begun-{number}"], tmp_path)
        assert result.code == 0, result.err
        actual = load_file(checkpoint_path(tmp_path / f"outputs/begun-{number}/checkpoints", 1) / "model.safetensors")
        assert all(torch.equal(actual[name], tensor) for name, tensor in wanted.items()), value


def test_a_rename_of_unknown_tensors_leaves_no_run_folder(server: ForkServer, tmp_path: Path) -> None:
    save_file(source(), tmp_path / "w.safetensors")
    args = ["train", "--task", str(TASK), "device=cpu", "run=mine", "weights=w.safetensors"]
    result = server.run([*args, "weights.rename={bakbone: body}"], tmp_path)
    assert result.code == 78
    assert " backbone?" in result.err
    assert not (tmp_path / "outputs").exists()


def test_unusable_weights_are_rejected_before_torch_is_imported(server: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "short.safetensors").write_bytes(b"\0" * 7)
    torch.save({}, tmp_path / "model.pt")
    args = ["train", "--task", str(TASK), "device=cpu", "run=mine"]
    for setting, code in (
        ("weights=short.safetensors", 65), ("weights=model.pt", 89), ("weights=nowhere", 66), ("resume=nowhere", 66),
    ):  # fmt: skip
        result = server.run([*args, setting], tmp_path)
        assert result.code == code, result.err
        assert setting in result.err
        assert "loading PyTorch" not in result.out, "this is printed just before torch is imported"
    assert not (tmp_path / "outputs").exists()


def test_weights_and_weights_source_are_equivalent(server: ForkServer, tmp_path: Path) -> None:
    missing = [server.run(f"train task=gpt {key}=nowhere", tmp_path) for key in ("weights", "weights.source")]
    assert [result.code for result in missing] == [66, 66]
    assert missing[0].err == missing[1].err


@pytest.mark.slow
def test_sweep_trials_can_start_from_weights_of_the_last_run(server: ForkServer, tmp_path: Path) -> None:
    common = ["train", "--task", str(TASK), "updates=1", "device=cpu", "monitor=off", "backend.threads=1"]
    assert server.run([*common, "run=first"], tmp_path).code == 0
    forked = {"IMPORT_FIRST": "tests.forked_trials"}
    assert server.run([*common, "-m", "weights=last", "seed=1,2", "run=sweep"], tmp_path, forked).code == 0
    for number in (1, 2):
        log = (tmp_path / "outputs" / "sweep" / f"sweep-{number}" / "console.log").read_text()
        assert "run first," in log


def test_a_run_opens_even_if_its_source_of_weights_was_deleted(tmp_path: Path) -> None:
    args = ("weights=gone.safetensors", "device=cpu", "monitor=off", f"output_root={tmp_path}", "run=mine")
    with open_phase(Request(args, TASK)) as phase:
        assert phase.planned.name == "train"


def test_numbered_modules_need_no_quotes() -> None:
    weights = compose(Request(("weights.only=[0,head]", "weights.rename={0: 5}"), TASK)).settings.weights
    assert (weights.only, weights.rename) == (["0", "head"], {"0": "5"})
