"""Training with LoRA matches a plain loop with peft; checkpoints omit frozen weights, and exports merge the adapter."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from runner.base.errors import AccelRunError, ConfigError, IncompatibleResume
from runner.base.order import permutation
from runner.base.task import Task
from runner.config.configuration import compose
from runner.config.request import Request
from runner.config.schema import did_you_mean
from runner.distributed.world import World
from runner.durable import checkpoint
from runner.engine.contract.lora import lora, merge
from runner.engine.hooks.checkpointing import Checkpointing
from runner.engine.hooks.rank_sync import RankSync
from runner.engine.opening import open_phase
from runner.engine.parts.frozen_base import frozen_digest, load_weights
from runner.engine.update.objectives import parse_objectives
from runner.plan.planner import plan_this_process
from runner.records.events import Console
from runner.tensors.global_rng import seed_everything
from runner.trained.trained_run import open_trained
from tests.distributed.ranks import run_ranks
from tests.engine import task_of_averages
from tests.forkserver import ForkServer
from tests.rounding import PROMISED, distance

peft = pytest.importorskip("peft", reason="the package peft is not installed")

TASK = Path(task_of_averages.__file__)
UPDATES, SIZE = 6, 8
TOLERANCE = PROMISED[torch.float64]
LORA = ("adapter=lora", "adapter.target=[0]", "adapter.rank=2", "adapter.alpha=4")


def request_of(folder: Path, *args: str) -> Request:
    settings = (
        f"updates={UPDATES}", "device=cpu", "run=mine", "monitor=off", "backend.threads=1", "checkpoint=off",
        "optimizer=adam", "optimizer.lr=0.01", "optimizer.kernel=foreach", "max_grad_norm=null",
        f"output_root={folder}", "seed=7",
    )  # fmt: skip
    return Request((*settings, *LORA, *args), TASK)


def load_saved(folder: Path, stem: str = "model", update: int = UPDATES) -> dict[str, Tensor]:
    return dict(checkpoint.load(checkpoint.checkpoint_path(folder / "mine" / "checkpoints", update)).tensors(stem))


def run_training(folder: Path, *args: str, world: World | None = None) -> None:
    with open_phase(request_of(folder, *args), world) as phase:
        assert phase.run_updates() is None


def train_plain_loop(*, train: str = "") -> nn.Module:
    """Return the model of a plain loop with peft."""
    seed_everything(7)
    task = task_of_averages.build()
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules="0")
    model = peft.inject_adapter_in_model(config, task.model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name or bool(train and name.startswith(train)))
    optimizer = torch.optim.Adam([each for each in model.parameters() if each.requires_grad], lr=0.01)
    x, y = task.dataset("train").tensors
    for update in range(UPDATES):
        epoch, number = divmod(update, len(x) // SIZE)
        rows = permutation(7, epoch, len(x))[number * SIZE : (number + 1) * SIZE].tolist()
        loss, items = task.loss(model, (x[rows], y[rows]))
        optimizer.zero_grad()
        (loss / items).backward()
        optimizer.step()
    return model


def assert_close(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=tolerance)


@pytest.mark.parametrize("train", ["", "2"])
def test_only_trained_weights_are_saved_and_match_a_plain_loop(train: str, tmp_path: Path) -> None:
    expected = train_plain_loop(train=train)
    run_training(tmp_path, f"adapter.train=[{train}]")
    wanted = {name: weight.detach() for name, weight in expected.named_parameters() if weight.requires_grad}
    assert_close(load_saved(tmp_path), wanted, TOLERANCE)


def test_a_checkpoint_can_contain_the_complete_model(tmp_path: Path) -> None:
    run_training(tmp_path, "adapter.checkpoint=all")
    assert_close(load_saved(tmp_path), dict(train_plain_loop().state_dict()), TOLERANCE)


@pytest.mark.parametrize(("args", "world_size"), [("micro_batch_size=2", 1), ("ddp", 2), ("fsdp", 2)])
def test_neither_accumulation_nor_ranks_change_the_adapter(args: str, world_size: int, tmp_path: Path) -> None:
    if world_size == 1:
        run_training(tmp_path, args)
    else:
        ranks = (f"parallelism={args}", f"parallelism.world_size={world_size}")
        shares = ("parallelism.shares=[7,1]",) if args == "ddp" else ()
        run_ranks(lambda world: run_training(tmp_path, *ranks, *shares, world=world), world_size)
    wanted = {name: weight.detach() for name, weight in train_plain_loop().named_parameters() if weight.requires_grad}
    assert_close(load_saved(tmp_path), wanted, TOLERANCE)


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_a_resumed_adapter_is_bitwise_equal_to_an_uninterrupted_one(strategy: str, tmp_path: Path) -> None:
    args = (f"parallelism={strategy}", *([] if strategy == "single" else ["parallelism.world_size=2"]))

    def stop_after_three(world: World | None) -> None:
        with open_phase(request_of(tmp_path / "stopped", *args), world) as phase:
            for update in phase.updates():
                if update == 3:
                    break
            phase.hook(RankSync).exchange.close()
            phase.hook(Checkpointing).save()

    for act in (
        lambda world: run_training(tmp_path / "straight", *args, world=world),
        stop_after_three,
        lambda world: run_training(tmp_path / "stopped", *args, world=world),
    ):
        act(None) if strategy == "single" else run_ranks(act, 2)
    for stem in ("model", "optimizer"):
        assert_close(load_saved(tmp_path / "stopped", stem), load_saved(tmp_path / "straight", stem), 0.0)


def test_training_resume_inference_and_export_use_pretrained_weights(server: ForkServer, tmp_path: Path) -> None:
    settings = [word for word in request_of(tmp_path).overrides if not word.startswith(("output_root", "seed"))]
    train = ["train", "--task", str(TASK), *settings]
    base = ["train", "--task", str(TASK), "device=cpu", "updates=4", "run=base", "monitor=off", "seed=3"]
    assert server.run(base, tmp_path).code == 0
    assert server.run([*train, "weights=base", "updates=3"], tmp_path).code == 0
    longer = server.run([*train, "weights=base", "resume_allow=[updates]"], tmp_path)
    assert longer.code == 0, longer.err
    exported = server.run(["export", "mine", "format=safetensors"], tmp_path)
    assert exported.code == 0, exported.err
    from safetensors.torch import load_file

    merged = load_file(tmp_path / "outputs" / "mine" / "export" / "model.safetensors")
    result = json.loads((tmp_path / "outputs" / "mine" / "run.json").read_text())["metrics"]["val/loss"]
    task = task_of_averages.build()
    assert merged.keys() == task.model.state_dict().keys()
    task.model.load_state_dict(merged)
    total, items = task.loss(task.model, task.dataset("val").tensors)
    assert float(total.detach()) / items == pytest.approx(result, rel=TOLERANCE)
    with ExitStack() as stack:
        request = Request(("run=mine", f"output_root={tmp_path / 'outputs'}", f"weights={tmp_path / 'outputs/base'}"))
        with pytest.raises(ConfigError):
            open_trained(request, Console(), stack)
    evaluated = server.run(["evaluate", "mine", "--json"], tmp_path)
    assert json.loads(evaluated.out)["metrics"]["val/loss"] == pytest.approx(result, rel=TOLERANCE)
    refused = server.run(["train", "--task", str(TASK), "run=next", "weights=mine", "device=cpu"], tmp_path)
    assert refused.code == 78, "an adapter alone is not a model"
    assert not (tmp_path / "outputs" / "next").exists()


def test_loading_an_adapter_with_different_frozen_weights_is_rejected(tmp_path: Path) -> None:
    run_training(tmp_path, "updates=3", "scheduler=constant")
    more = request_of(tmp_path, "scheduler=constant", "resume_allow=[updates]")
    path = checkpoint.checkpoint_path(tmp_path / "mine" / "checkpoints", 3)
    with open_phase(more) as phase:
        parts = phase.run.parts
        load_weights(parts, checkpoint.load(path))
        digest = frozen_digest(parts)
        with torch.no_grad():
            next(parts.bare.parameters()).add_(1e-9)
        assert frozen_digest(parts) != digest
        with pytest.raises(IncompatibleResume):
            load_weights(parts, checkpoint.load(path))


def test_the_digest_of_frozen_weights_depends_on_values_and_shapes(tmp_path: Path) -> None:
    with open_phase(request_of(tmp_path)) as phase:
        parts = phase.run.parts
        frozen = [weight for weight in parts.bare.parameters() if not weight.requires_grad]
        digests = [frozen_digest(parts)]
        with torch.no_grad():
            for weight in frozen:
                weight.zero_()
        digests.append(frozen_digest(parts))
        matrix = next(weight for weight in frozen if weight.dim() == 2)
        matrix.data = matrix.data.reshape(-1, 1)  # the same bytes
        digests.append(frozen_digest(parts))
    assert None not in digests
    assert len(set(digests)) == 3


@pytest.mark.parametrize(
    ("args", "where"),
    [
        (["adapter.target=[missing]"], "adapter.target"),
        (["adapter.target=[1]"], "adapter.target"),
        (["adapter.train=[head]"], "adapter.train"),
    ],
)
def test_names_that_match_no_suitable_layer_are_rejected(args: list[str], where: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught, open_phase(request_of(tmp_path, *args)):
        pass
    assert [problem.where for problem in caught.value.problems] == [where]


class Adversarial(Task):
    """A generator and a discriminator, each with an objective."""

    objectives: ClassVar[Any] = {name: {"trains": [name]} for name in ("disc", "gen")}

    def __init__(self) -> None:
        self.model = nn.ModuleDict({name: nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for name in ("disc", "gen")})


def test_the_error_for_a_frozen_objective_suggests_adapter_train() -> None:
    phase: Any = plan_this_process(compose(Request(("device=cpu",), TASK)))[0].selected[0]
    task, frozen = Adversarial(), Adversarial()
    lora(target=["gen.0"]).add_to(frozen)
    with pytest.raises(ConfigError) as caught:
        parse_objectives(frozen, phase)
    (problem,) = caught.value.problems
    (setting,) = [word for word in problem.fix.split() if word.startswith("adapter.train=")]
    assert (problem.where, setting) == ("OBJECTIVES['disc']", "adapter.train=[disc]")
    lora(target=["gen.0"], train=["disc"]).add_to(task)
    trained = {spec.name: spec.select_parameters(task.model) for spec in parse_objectives(task, phase)}
    assert {name: len(weights) for name, weights in trained.items()} == {"disc": 2, "gen": 2}


class Convolution(Task):
    """Pixel regression with two convolutions."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Conv2d(1, 4, 3, stride=2), nn.Tanh(), nn.Conv2d(4, 1, 2, padding=1, bias=False)
        ).double()


def test_a_convolution_adapter_adds_the_scaled_product_of_its_factors() -> None:
    task, original = Convolution(), Convolution()
    lora(target=["0", "2"], rank=2, alpha=6).add_to(task)
    weights = dict(task.model.named_parameters())
    added = {name: weight for name, weight in weights.items() if weight.requires_grad}
    assert {name.split(".")[1] for name in added} == {"lora_A", "lora_B"}
    with torch.no_grad():
        for weight in added.values():
            nn.init.normal_(weight)
        for layer in ("0", "2"):
            first, second = (weights[f"{layer}.lora_{factor}.default.weight"] for factor in "AB")
            product = torch.einsum("orxy,rixy->oixy", second.expand(-1, -1, *first.shape[2:]), first)
            original.model.get_submodule(layer).weight += 6 / 2 * product
    x = torch.randn(3, 1, 9, 9, dtype=torch.float64)
    loss, expected = task.model(x).square().sum(), original.model(x).square().sum()
    assert distance(loss, expected) <= TOLERANCE
    loss.backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in added.values())
    merge(task.model)
    assert task.model.state_dict().keys() == original.model.state_dict().keys()
    assert distance(task.model.state_dict(), original.model.state_dict()) <= TOLERANCE


class Tied(Task):
    """The output layer shares its weight with the embedding, as in most language models."""

    def __init__(self) -> None:
        self.model = nn.Module()
        self.model.embedding = nn.Embedding(7, 4)
        self.model.body = nn.Linear(4, 4)
        self.model.head = nn.Linear(4, 7, bias=False)
        self.model.head.weight = self.model.embedding.weight


@pytest.mark.parametrize("layer", ["head", "embedding"])
def test_a_target_layer_with_a_shared_weight_is_rejected(layer: str) -> None:
    with pytest.raises(ConfigError) as caught:
        lora(target=[layer, "body"]).add_to(Tied())
    assert [problem.where for problem in caught.value.problems] == ["adapter.target"]


@pytest.mark.parametrize(
    ("target", "suggestion"),
    [("q_prj", "q_proj"), ("blocks.1.q_prj", "blocks.1.q_proj")],
    ids=["last component", "full name"],
)
def test_full_layer_names_are_suggested_only_for_full_names(target: str, suggestion: str) -> None:
    blocks = nn.ModuleList(nn.ModuleDict({"q_proj": nn.Linear(2, 2)}) for _ in range(2))
    task = Tied()
    task.model.blocks = blocks
    with pytest.raises(ConfigError) as caught:
        lora(target=[target]).add_to(task)
    assert caught.value.problems[0].fix == did_you_mean(target, [suggestion])


def test_a_layer_with_a_shared_weight_is_not_adapted_by_default() -> None:
    task = Tied()
    lora().add_to(task)
    assert {name.split(".")[0] for name, weight in task.model.named_parameters() if weight.requires_grad} == {"body"}


@pytest.mark.parametrize("name", ["head", "embedding"])
def test_a_trained_shared_weight_is_saved_under_all_its_names(name: str) -> None:
    task, adapter = Tied(), lora(train=[name])
    adapter.add_to(task)
    parameters = dict(task.model.named_parameters(remove_duplicate=False))
    saved = adapter.select_saved(task.model.state_dict(), parameters)
    assert {each for each in saved if "lora_" not in each} == {"head.weight", "embedding.weight"}
    assert all(parameters[each].requires_grad for each in saved)


def test_all_linear_layers_are_adapted_by_default(tmp_path: Path) -> None:
    with open_phase(request_of(tmp_path, "adapter.target=[]")) as phase:
        assert sorted(name for name in phase.work.owned if "lora_A" in name) == [
            f"{layer}.lora_A.default.weight" for layer in (0, 2)
        ]


def test_lora_with_a_pipeline_is_rejected() -> None:
    with pytest.raises(AccelRunError) as caught:
        plan_this_process(compose(Request(("adapter=lora", "parallelism=pipeline", "device=cpu"))))
    assert [problem.where for problem in caught.value.problems] == ["adapter=lora"]
