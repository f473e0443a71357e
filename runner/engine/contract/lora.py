"""Adapters: add a few trainable weights to a model and freeze the model's own weights."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from runner.base.errors import ConfigError, Problem, TaskFault
from runner.base.packages import require
from runner.base.task import Task
from runner.base.text import abbreviate
from runner.base.values import Factor, Positive, PositiveInt
from runner.config.chosen_option import make_chosen
from runner.config.configuration import Choice
from runner.config.module_names import is_under, unmatched_problems
from runner.config.schema import did_you_mean

_BASE_LAYER = ".base_layer."  # peft's name for the adapted layer inside its adapter
TIED_FIX = "remove it from adapter.target; to train a shared weight in full, use adapter.train=[NAME]"
_TORCH_TYPES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding)


@dataclass(frozen=True)
class Adapter:
    """Weights added to a model; the base class adds none.

    saves_adapter_only  checkpoints leave out the frozen weights of the model
    """

    saves_adapter_only: bool = False

    def add_to(self, task: Task) -> None:
        """Add the weights to the task's model, in place, and freeze the model's own."""

    def base_name(self, name: str) -> str | None:
        """Return the name of a tensor in the model without adapter; None for a tensor of the adapter."""
        return name

    def select_saved(self, state: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """Return the tensors for a checkpoint.

        state       state_dict of the model
        parameters  parameters of the model; tied ones are listed under each of their names

        Buffers are always included.
        """
        return dict(state)


def none() -> Adapter:
    """Train the model's own weights."""
    return Adapter()


def lora(
    *,
    target: list[str] = [],  # noqa: B006 - read as schema
    rank: PositiveInt = 8,
    alpha: Positive = 16.0,
    dropout: Factor = 0.0,
    train: list[str] = [],  # noqa: B006 - likewise
    checkpoint: Literal["adapter", "all"] = "adapter",
) -> Adapter:
    """Low-rank adaptation: train small matrices added to layers, whose own weights stay frozen; needs peft.

    target      names of linear, convolution or embedding layers, or suffixes of names, such as [q_proj,v_proj];
                []: all linear layers without a shared weight
    rank        rank of the added weight, the product of two small matrices
    alpha       the added weight is multiplied by alpha / rank
    dropout     dropout probability of the inputs of the small matrices
    train       additional modules or parameters that are trained in full, such as [head]
    checkpoint  adapter: checkpoints leave out the frozen weights, which are restored from `weights` or the seed; all:
                they contain the entire model
    Raises ConfigError for names that the model lacks, MissingPackage without peft.
    Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, ICLR 2022.
    """
    options = {"r": rank, "lora_alpha": alpha, "lora_dropout": dropout}
    return LoraAdapter(checkpoint == "adapter", tuple(target), tuple(train), options)


ADAPTERS: Mapping[str, Callable[..., Adapter]] = {"none": none, "lora": lora}


def make_adapter(choice: Choice) -> Adapter:
    """Return the adapter that the option selects."""
    return make_chosen(ADAPTERS, choice)


@dataclass(frozen=True)
class LoraAdapter(Adapter):
    """LoRA through peft.

    target   names of layers or their last parts; (): all linear layers
    train    modules or parameters that are trained in full
    options  arguments of peft.LoraConfig
    """

    target: tuple[str, ...] = ()
    train: tuple[str, ...] = ()
    options: Mapping[str, Any] | None = None

    def add_to(self, task: Task) -> None:
        model = task.model
        layers = self._select_layers(model)
        names_by_id = {id(model.get_submodule(name)): name for name in layers}
        config = require("peft", "lora").LoraConfig(
            target_modules="|".join(re.escape(name) for name in layers), **(self.options or {})
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft warns about models of transformers
            require("peft", "lora").inject_adapter_in_model(config, model)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if any(is_under(self.base_name(name) or "", prefix) for prefix in self.train):
                parameter.requires_grad_(True)
        for name, value in vars(task).items():
            if isinstance(value, nn.Module) and id(value) in names_by_id:  # its calls would bypass the adapter
                layer = names_by_id[id(value)]
                what = f"{type(task).__name__}.{name} still refers to the layer {layer}, which an adapter now wraps"
                raise TaskFault(what, fix=f"access it through the model: self.model.{layer}")

    def base_name(self, name: str) -> str | None:
        return None if _is_adapter_weight(name) else f".{name}".replace(_BASE_LAYER, ".").removeprefix(".")

    def select_saved(self, state: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        if not self.saves_adapter_only:
            return dict(state)
        trained = {id(weight) for name, weight in parameters.items() if self._is_trained(name)}
        frozen = {name for name, weight in parameters.items() if id(weight) not in trained}
        return {name: tensor for name, tensor in state.items() if name not in frozen}

    def _is_trained(self, name: str) -> bool:
        return _is_adapter_weight(name) or any(is_under(self.base_name(name) or "", prefix) for prefix in self.train)

    def _select_layers(self, model: nn.Module) -> list[str]:
        """Return the names of the layers to adapt. Raises ConfigError for unknown names and tied layers."""
        layers = {
            name: module for name, module in model.named_modules() if name and isinstance(module, _adaptable_types())
        }
        tied = _find_tied_layers(model, layers)
        selected = [
            name
            for name, module in layers.items()
            if (not self.target and isinstance(module, nn.Linear) and name not in tied)
            or any(_has_suffix(name, target) for target in self.target)
        ]
        ends = sorted({name.rpartition(".")[2] for name in layers})
        available = f"the model has {abbreviate(ends, 8) or 'none'}"
        problems = [
            Problem(
                f"no layer is called {target}; {available}",
                "adapter.target",
                did_you_mean(target, layers if "." in target else ends),  # a full name selects only one of the layers
            )
            for target in self.target
            if not any(_has_suffix(name, target) for name in layers)
        ]
        names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        problems += unmatched_problems(self.train, names, "adapter.train", "parameter")
        problems += [
            Problem(
                f"the weight of {name} is shared with {tied[name]}, which has no adapter", "adapter.target", TIED_FIX
            )
            for name in selected
            if name in tied
        ]
        if not selected and not problems:
            problems = [Problem("the model contains no linear layer", "adapter.target", "list the layers to adapt")]
        if problems:
            raise ConfigError(problems)
        return selected


def _find_tied_layers(model: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, str]:
    """Map each layer that shares a parameter with another module to the name of the parameter in that module.

    Merging an adapter into a shared weight would change the other module as well.
    """
    names: dict[int, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(weight), []).append(name)
    tied = {}
    for layer, module in layers.items():
        for weight in module.parameters():
            others = [name for name in names[id(weight)] if not is_under(name, layer)]
            if others:
                tied[layer] = others[0]
    return tied


def merge(model: nn.Module) -> None:
    """Merge the adapters into the weights of their layers in place, and remove them."""
    adapter_layer_class = require("peft.tuners.tuners_utils", "lora").BaseTunerLayer
    for name, module in list(model.named_modules()):
        if isinstance(module, adapter_layer_class):
            module.merge()
            model.set_submodule(name, module.get_base_layer())


def _adaptable_types() -> tuple[type[nn.Module], ...]:
    return (*_TORCH_TYPES, require("peft.tuners.lora.layer", "lora").Conv1D)  # the linear layer of transformers' GPT-2


def _has_suffix(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")


def _is_adapter_weight(name: str) -> bool:
    return any(part.startswith("lora_") for part in name.split("."))
