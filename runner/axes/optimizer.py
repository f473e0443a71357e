"""Optimizers: the update rule and its parameter groups.

Keys that several options share:

lr            learning rate at the peak of the schedule
weight_decay  decoupled weight decay, multiplied by the learning rate
betas         decay rates of the running averages of the gradient and its square
eps           added to the square root of the second moment
kernel        fused: one kernel for the whole update; foreach: one per operation; for-loop: one per parameter and
              operation; auto: fused if supported, else foreach
decay_1d      also decay parameters with fewer than two dimensions (biases, norms)
lr_scales     module or parameter name -> factor on its learning rate; the longest matching name applies
momentum      momentum factor; 0: none
nesterov      use Nesterov momentum
"""

from __future__ import annotations

import importlib
import inspect
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from runner.base.errors import ConfigError, Problem, TaskFault
from runner.base.packages import check_installed
from runner.base.text import dtype_name
from runner.base.values import AtLeastOne, Exponent, Factor, Iterations, NonNegative, NonPositive, Positive
from runner.config.module_names import longest_prefix, unmatched_problems
from runner.config.option_table import call_option
from runner.tensors.fused_adam import FusedAdam, FusedAdamW, skip_compiler_import
from runner.tensors.step_counters import keep_counters_in_state, remember_numbers

Parameters = Sequence[tuple[str, nn.Parameter]]  # names and parameters of the model, only those with requires_grad
KEYS_WITH_NAMES = ("lr_scales", "adamw_for")  # keys whose values contain names of modules or parameters


def adamw(
    parameters: Parameters,
    *,
    lr: Positive = 3e-4,
    weight_decay: NonNegative = 0.1,
    betas: tuple[Factor, Factor] = (0.9, 0.95),
    eps: Positive = 1e-8,
    kernel: Literal["auto", "fused", "foreach", "for-loop"] = "auto",
    decay_1d: bool = False,
    lr_scales: Mapping[str, NonNegative] = {},
) -> Optimizer:
    """Adam with decoupled weight decay.

    Raises ConfigError if the kernel cannot be used or a name in lr_scales matches no parameter.
    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, ICLR 2019.
    """
    groups = _groups(parameters, lr, weight_decay, decay_1d, lr_scales)
    flags = _kernel_flags(parameters, kernel)
    kind = FusedAdamW if flags["fused"] else torch.optim.AdamW
    return kind(groups, lr=lr, betas=(betas[0], betas[1]), eps=eps, **flags)


def adam(
    parameters: Parameters,
    *,
    lr: Positive = 1e-3,
    weight_decay: NonNegative = 0.0,
    betas: tuple[Factor, Factor] = (0.9, 0.999),
    eps: Positive = 1e-8,
    kernel: Literal["auto", "fused", "foreach", "for-loop"] = "auto",
    decay_1d: bool = False,
    lr_scales: Mapping[str, NonNegative] = {},
) -> Optimizer:
    """Adam; weight decay, if any, is added to the gradient (L2).

    weight_decay  L2 penalty, added to the gradient
    Raises ConfigError if the kernel cannot be used or a name in lr_scales matches no parameter.
    Source: Kingma and Ba, Adam: A Method for Stochastic Optimization, ICLR 2015.
    """
    groups = _groups(parameters, lr, weight_decay, decay_1d, lr_scales)
    flags = _kernel_flags(parameters, kernel)
    kind = FusedAdam if flags["fused"] else torch.optim.Adam
    return kind(groups, lr=lr, betas=(betas[0], betas[1]), eps=eps, **flags)


def sgd(
    parameters: Parameters,
    *,
    lr: Positive = 0.01,
    momentum: Factor = 0.9,
    nesterov: bool = False,
    weight_decay: NonNegative = 0.0,
    kernel: Literal["auto", "fused", "foreach", "for-loop"] = "auto",
    decay_1d: bool = False,
    lr_scales: Mapping[str, NonNegative] = {},
) -> Optimizer:
    """SGD with momentum.

    weight_decay  L2 penalty, added to the gradient
    Raises ConfigError if the kernel cannot be used, if a name in lr_scales matches no parameter, or if nesterov is set
    without momentum.
    Source: Sutskever et al., On the importance of initialization and momentum in deep learning, ICML 2013.
    """
    if nesterov and not momentum:
        raise ConfigError(Problem("must be above 0 with nesterov, but is 0", "optimizer.momentum"))
    groups = _groups(parameters, lr, weight_decay, decay_1d, lr_scales)
    flags = _kernel_flags(parameters, kernel, takes_shards=False)
    optimizer = torch.optim.SGD(groups, lr=lr, momentum=momentum, nesterov=nesterov, **flags)
    # The fused kernel reads uninitialized memory as momentum if the first update is skipped because of an overflow.
    for group in optimizer.param_groups if momentum else ():
        for weight in group["params"]:
            optimizer.state[weight] = {"momentum_buffer": torch.zeros_like(weight, requires_grad=False)}
    return optimizer


def adamw8bit(
    parameters: Parameters,
    *,
    lr: Positive = 3e-4,
    weight_decay: NonNegative = 0.1,
    betas: tuple[Factor, Factor] = (0.9, 0.95),
    eps: Positive = 1e-8,
    library: Literal["auto", "bitsandbytes", "torchao"] = "auto",
    decay_1d: bool = False,
    lr_scales: Mapping[str, NonNegative] = {},
) -> Optimizer:
    """AdamW with 8-bit optimizer state, quantized block by block; needs bitsandbytes or torchao.

    The state of parameters with fewer than 4096 values stays in float32.

    library       kernel library; auto: bitsandbytes, else torchao, which takes seconds to compile at its first update
    Raises ConfigError if no installed library supports it on this device, or a name in lr_scales matches no parameter.
    Source: Dettmers et al., 8-bit Optimizers via Block-wise Quantization, ICLR 2022.
    """
    groups = _groups(parameters, lr, weight_decay, decay_1d, lr_scales)
    builders = {"bitsandbytes": _bitsandbytes, "torchao": _torchao}
    chosen = [*builders] if library == "auto" else [library]
    refusals = []
    for name in chosen:
        try:
            return builders[name](groups, lr=lr, betas=(betas[0], betas[1]), eps=eps)
        except _Unusable as refusal:
            refusals.append(f"{name}: {refusal}")
    raise ConfigError(
        Problem(
            f"no library for 8-bit optimizer states can be used ({'; '.join(refusals)})",
            "optimizer=adamw8bit",
            f"run pip install {chosen[0]}, or use optimizer=adamw",
        )
    )


def nadam(
    parameters: Parameters,
    *,
    lr: Positive = 2e-3,
    weight_decay: NonNegative = 0.0,
    betas: tuple[Factor, Factor] = (0.9, 0.999),
    eps: Positive = 1e-8,
    momentum_decay: NonNegative = 4e-3,
    decoupled: bool = False,
    decay_1d: bool = False,
    lr_scales: Mapping[str, NonNegative] = {},
) -> Optimizer:
    """Adam with Nesterov momentum.

    weight_decay    L2 penalty, added to the gradient; with decoupled=true, decoupled weight decay instead
    momentum_decay  decay of the momentum schedule
    decoupled       decoupled weight decay, as in AdamW
    Raises ConfigError if a name in lr_scales matches no parameter.
    Source: Dozat, Incorporating Nesterov Momentum into Adam, ICLR workshop 2016.
    """
    groups = _groups(parameters, lr, weight_decay, decay_1d, lr_scales)
    options: dict[str, Any] = {"momentum_decay": momentum_decay, "decoupled_weight_decay": decoupled}
    return torch.optim.NAdam(groups, lr=lr, betas=(betas[0], betas[1]), eps=eps, **options)


def rmsprop(
    parameters: Parameters,
    *,
    lr: Positive = 0.01,
    weight_decay: NonNegative = 0.0,
    alpha: Factor = 0.99,
    eps: Positive = 1e-8,
    momentum: Factor = 0.0,
    centered: bool = False,
    decay_1d: bool = False,
    lr_scales: Mapping[str, NonNegative] = {},
) -> Optimizer:
    """RMSprop: divides the gradient by the root mean square of recent gradients.

    weight_decay  L2 penalty, added to the gradient
    alpha         decay rate of the running average of the squared gradient
    eps           added to the square root of the running average
    centered      normalize by an estimate of the gradient's variance
    Raises ConfigError if a name in lr_scales matches no parameter.
    Source: Hinton, Neural Networks for Machine Learning, lecture 6, 2012.
    """
    groups = _groups(parameters, lr, weight_decay, decay_1d, lr_scales)
    return torch.optim.RMSprop(groups, lr=lr, alpha=alpha, eps=eps, momentum=momentum, centered=centered)


def adafactor(
    parameters: Parameters,
    *,
    lr: Positive = 0.01,
    weight_decay: NonNegative = 0.0,
    beta2_decay: NonPositive = -0.8,
    eps: Positive = 1e-3,
    max_update: AtLeastOne = 1.0,
    decay_1d: bool = False,
    lr_scales: Mapping[str, NonNegative] = {},
) -> Optimizer:
    """Adafactor: the second moment of a matrix is stored as one row and one column, so the state needs little memory.

    lr            upper bound of the relative step size
    beta2_decay   exponent of the update number in the decay of the running mean of the squared gradient
    eps           lower bound of the parameter scale that multiplies the learning rate
    max_update    root mean square above which an update is scaled down
    Raises ConfigError if a name in lr_scales matches no parameter, or the parameters are sharded.
    Source: Shazeer and Stern, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost, ICML 2018.
    """
    _refuse_shards(parameters, "adafactor")
    groups = _groups(parameters, lr, weight_decay, decay_1d, lr_scales)
    return torch.optim.Adafactor(groups, lr=lr, beta2_decay=beta2_decay, eps=(None, eps), d=max_update)


def lion(
    parameters: Parameters,
    *,
    lr: Positive = 1e-4,
    weight_decay: NonNegative = 0.3,
    betas: tuple[Factor, Factor] = (0.9, 0.99),
    decay_1d: bool = False,
    lr_scales: Mapping[str, NonNegative] = {},
) -> Optimizer:
    """Lion: changes each weight by the learning rate times the sign of its momentum; needs half the state of AdamW.

    lr            learning rate at the peak of the schedule; a third to a tenth of that of AdamW
    weight_decay  decoupled weight decay, multiplied by the learning rate; three to ten times that of AdamW
    betas         weight of the momentum in the update, and decay rate of the momentum
    Raises ConfigError if a name in lr_scales matches no parameter.
    Source: Chen et al., Symbolic Discovery of Optimization Algorithms, NeurIPS 2023, program 1.
    """
    return Lion(_groups(parameters, lr, weight_decay, decay_1d, lr_scales), betas=(betas[0], betas[1]))


def muon(
    parameters: Parameters,
    *,
    lr: Positive = 3e-4,
    weight_decay: NonNegative = 0.1,
    momentum: Factor = 0.95,
    nesterov: bool = True,
    ns_steps: Iterations = 5,
    adamw_for: list[str] = [],  # noqa: B006 - read as schema
    betas: tuple[Factor, Factor] = (0.9, 0.95),
    eps: Positive = 1e-8,
    decay_1d: bool = False,
    lr_scales: Mapping[str, NonNegative] = {},
) -> Optimizer:
    """Muon, which orthogonalizes the momentum of matrices; other parameters use AdamW with the same learning rate.

    The update of a matrix is scaled to the root mean square of AdamW's updates.

    momentum      momentum factor of the matrices
    ns_steps      Newton-Schulz iterations that orthogonalize the momentum
    adamw_for     modules or parameters whose matrices use AdamW instead: embeddings and the output layer
    betas         AdamW: decay rates of the running averages of the gradient and its square
    eps           AdamW: added to the square root of the second moment
    Raises ConfigError if a name in lr_scales or adamw_for matches no parameter, or the parameters are sharded.
    Source: Jordan et al., Muon, 2024; Liu et al., Muon is Scalable for LLM Training, 2025, for the scale.
    """
    _refuse_shards(parameters, "muon")
    if problems := unmatched_problems(adamw_for, [name for name, _ in parameters], "optimizer.adamw_for"):
        raise ConfigError(problems)

    def rule(name: str, parameter: nn.Parameter) -> str:
        return "muon" if parameter.dim() == 2 and longest_prefix([name], adamw_for) is None else "adamw"

    groups = _groups(parameters, lr, weight_decay, decay_1d, lr_scales, rule=rule)
    muon_options = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps}
    adamw_options = {"lr": lr, "betas": (betas[0], betas[1]), "eps": eps, **_kernel_flags(parameters, "auto")}
    return MuonWithAdamW(groups, muon_options, adamw_options)


def schedulefree(
    parameters: Parameters,
    *,
    lr: Positive = 2.5e-3,
    weight_decay: NonNegative = 0.0,
    betas: tuple[Positive, Factor] = (0.9, 0.999),
    eps: Positive = 1e-8,
    r: Exponent = 0.0,
    weight_lr_power: Exponent = 2.0,
    decay_1d: bool = False,
    lr_scales: Mapping[str, NonNegative] = {},
) -> Optimizer:
    """Schedule-free AdamW: averages the weights instead of decaying the learning rate; needs the package schedulefree.

    Use scheduler=constant with a warm-up; the optimizer requires both.

    lr               learning rate after the warm-up; two to ten times that of AdamW with a schedule
    betas            weight of the average when it is interpolated with the last weights; decay rate of the running
                     average of the squared gradients
    r                the weight of update n in the average is proportional to n to the power of r
    weight_lr_power  the weight is also proportional to the largest learning rate so far, to this power
    Raises MissingPackage if schedulefree is not installed, ConfigError if a name in lr_scales matches no parameter.
    Source: Defazio et al., The Road Less Scheduled, NeurIPS 2024.
    """
    check_installed("schedulefree", "schedulefree")
    groups = _groups(parameters, lr, weight_decay, decay_1d, lr_scales)
    options = {"betas": (betas[0], betas[1]), "eps": eps, "r": r, "weight_lr_power": weight_lr_power}
    return keep_counters_in_state(_import_quietly("schedulefree").AdamWScheduleFree(groups, lr=lr, **options))


class Lion(Optimizer):
    """Optimizer of `lion`."""

    def __init__(self, groups: list[dict[str, Any]], *, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"betas": betas})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            update_decay, momentum_decay = group["betas"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["exp_avg"] = torch.zeros_like(weight)
                momentum = state["exp_avg"]
                # The momentum changes last, because the update uses its old value.
                weight.mul_(1.0 - group["lr"] * group["weight_decay"])
                weight.add_(momentum.lerp(weight.grad, 1.0 - update_decay).sign_(), alpha=-group["lr"])
                momentum.lerp_(weight.grad, 1.0 - momentum_decay)


class MuonWithAdamW(Optimizer):
    """Two torch optimizers behind one interface, with common groups and state.

    torch.optim.Muon accepts matrices only. Checkpoints, schedules and the float16 scaler expect one optimizer.

    groups  parameter groups, each with a key "rule": muon or adamw
    """

    def __init__(
        self, groups: list[dict[str, Any]], muon_options: dict[str, Any], adamw_options: dict[str, Any]
    ) -> None:
        super().__init__(groups, {})
        by_rule = {name: [group for group in self.param_groups if group["rule"] == name] for name in ("muon", "adamw")}
        self.rules: list[Optimizer] = []
        if by_rule["muon"]:
            self.rules.append(torch.optim.Muon(by_rule["muon"], adjust_lr_fn="match_rms_adamw", **muon_options))
        if by_rule["adamw"]:
            self.rules.append(torch.optim.AdamW(by_rule["adamw"], **adamw_options))
        for rule in self.rules:
            rule.state = self.state  # so that state_dict() contains the state of both

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for rule in self.rules:
            rule.step()


def build_optimizer(function: str, parameters: Parameters, options: Mapping[str, Any]) -> Optimizer:
    """Build the optimizer of an option, which a task may have defined.

    Adds parameter names (for checkpoints) and base learning rates to its groups. Raises TaskFault if the option does
    not return an optimizer of exactly these parameters.
    """
    skip_compiler_import()
    optimizer: object = call_option(OPTIMIZERS, function, parameters, **options)
    if not isinstance(optimizer, Optimizer):
        what = f"must return a torch.optim.Optimizer, but returned {type(optimizer).__name__}"
        raise TaskFault(what, where=function, fix="return an optimizer, such as torch.optim.SGD(parameters, lr=lr)")
    if any(parameter.default is parameter.empty for parameter in _step_parameters(optimizer)):
        what = f"{type(optimizer).__name__}.step needs a closure to recompute the loss, which is not supported"
        raise TaskFault(what, where=function, fix="use an optimizer whose step needs no arguments")
    names = {id(parameter): name for name, parameter in parameters}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if sorted(map(id, held)) != sorted(names):
        what = f"must hold each of the {len(names)} parameters exactly once, and no others; it holds {len(held)}"
        raise TaskFault(what, where=function, fix="pass all parameters to the optimizer, in groups if settings differ")
    if any("lr" not in group for group in optimizer.param_groups):
        raise TaskFault(
            "a group of the optimizer has no lr",
            where=function,
            fix='give it a default lr: super().__init__(params, {"lr": lr})',
        )
    for group in optimizer.param_groups:
        # Checkpoints store optimizer state by parameter name (tensors/optimizer_state.py).
        group["names"] = [names[id(parameter)] for parameter in group["params"]]
        group.setdefault("lr_scale", 1.0)
        if "base_lr" not in group:  # with an lr_scale of 0, any finite base_lr results in a rate of 0
            group["base_lr"] = float(group["lr"]) / (group["lr_scale"] or 1.0)
    if function not in OPTIMIZERS:
        remember_numbers(optimizer)
    return optimizer


def _step_parameters(optimizer: Optimizer) -> list[inspect.Parameter]:
    named = inspect.signature(optimizer.step).parameters.values()
    return [each for each in named if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]


def check_library(function: str, options: Mapping[str, Any], device: torch.device) -> None:
    """Raise ConfigError if the optimizer needs a library that is not installed; a no-op for other optimizers."""
    if function in ("adamw8bit", "schedulefree"):
        weight = nn.Parameter(torch.ones(1, device=device))
        call_option(OPTIMIZERS, function, [("weight", weight)], **{**options, "lr_scales": {}})


def set_learning_rate(optimizer: Optimizer, factor: float) -> float:
    """Set each group's learning rate to base rate x lr_scale x `factor`; return the rate without lr_scale."""
    for group in optimizer.param_groups:
        rate = group["base_lr"] * group["lr_scale"] * factor
        if isinstance(group["lr"], Tensor):  # torchao's compiled step reads the tensor it was compiled with
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
    return float(optimizer.param_groups[0]["base_lr"] * factor)


# Groups and kernels


def _groups(
    parameters: Parameters,
    lr: float,
    weight_decay: float,
    decay_1d: bool,
    lr_scales: Mapping[str, float],
    *,
    rule: Callable[[str, nn.Parameter], str] | None = None,
) -> list[dict[str, Any]]:
    names = [name for name, _ in parameters]
    assert len(set(names)) == len(names), "each parameter has one name"
    problems = unmatched_problems(lr_scales, names, "optimizer.lr_scales")
    if not parameters:
        what = "the model has no parameter to train, because all are frozen"
        problems.append(Problem(what, "optimizer", "set requires_grad=True for at least one"))
    if problems:
        raise ConfigError(problems)
    # As few groups as possible: foreach and fused kernels run once per group.
    groups: dict[tuple[float, bool, str], dict[str, Any]] = {}
    for name, parameter in parameters:
        prefix = longest_prefix([name], lr_scales)
        scale = 1.0 if prefix is None else float(lr_scales[prefix])
        decays = decay_1d or parameter.dim() >= 2
        updated_by = rule(name, parameter) if rule else ""
        group = groups.setdefault(
            (scale, decays, updated_by),
            {
                "params": [],
                "names": [],
                "base_lr": lr,
                "lr_scale": scale,
                "lr": lr * scale,
                "weight_decay": weight_decay if decays else 0.0,
                **({"rule": updated_by} if rule else {}),
            },
        )
        group["params"].append(parameter)
        group["names"].append(name)
    return list(groups.values())


def _refuse_shards(parameters: Parameters, option: str) -> None:
    """Raise ConfigError for sharded parameters: the rule needs complete matrices."""
    if any(hasattr(parameter, "device_mesh") for _, parameter in parameters):  # a DTensor
        fix = "use parallelism=ddp, or optimizer=adamw"
        what = "needs complete matrices, but parallelism=fsdp shards them"
        raise ConfigError(Problem(what, f"optimizer={option}", fix))


def _kernel_flags(parameters: Parameters, kernel: str, *, takes_shards: bool = True) -> dict[str, bool]:
    """Return torch's kernel flags: the requested kernel, or the best available one.

    takes_shards  whether torch has a sharding strategy for the fused kernel; 2.13 has one for Adam and AdamW only
    """
    obstacle = _fused_obstacle(parameters, takes_shards=takes_shards)
    if kernel == "fused" and obstacle:
        raise ConfigError(
            Problem(
                f"the fused kernel is not available: {obstacle}", "optimizer.kernel", "use optimizer.kernel=foreach"
            )
        )
    if kernel == "auto":
        kernel = "foreach" if obstacle else "fused"
    return {"fused": kernel == "fused", "foreach": kernel == "foreach"}  # mutually exclusive in torch


def _fused_obstacle(parameters: Parameters, *, takes_shards: bool) -> str:
    for name, parameter in parameters:
        if parameter.device.type not in ("cpu", "cuda"):
            return f"{name} is on {parameter.device}, but the kernel exists only for cpu and cuda"
        if not parameter.is_floating_point():
            return f"{name} is {dtype_name(parameter.dtype)}, but the kernel supports real numbers only"
        if not takes_shards and hasattr(parameter, "device_mesh"):  # a DTensor
            return f"{name} is sharded, and torch has no fused SGD for sharded parameters"
    return ""


# 8-bit libraries


class _Unusable(Exception):
    """The library is not installed or does not support this device."""


def _bitsandbytes(groups: list[dict[str, Any]], **options: Any) -> Optimizer:
    library = _import_quietly("bitsandbytes")
    parameters = [parameter for group in groups for parameter in group["params"]]
    version = tuple(int(part) for part in library.__version__.split(".")[:2])
    if any(parameter.device.type == "cpu" for parameter in parameters) and version < (0, 50):
        raise _Unusable(f"the CPU needs 0.50 or newer, but {library.__version__} is installed")
    strided = [parameter for parameter in parameters if not parameter.is_contiguous()]
    if strided:
        # bitsandbytes would do so only at its first step, after it has allocated the state for the old strides.
        warnings.warn(
            f"bitsandbytes makes parameters contiguous, which undoes channels_last for {len(strided)} of them; "
            "use memory.channels_last=false",
            stacklevel=3,
        )
        for parameter in strided:
            parameter.data = parameter.data.contiguous()
    optimizer: Optimizer = library.optim.AdamW8bit(groups, **options)
    return optimizer


def _torchao(groups: list[dict[str, Any]], **options: Any) -> Optimizer:
    optimizer: Optimizer = _import_quietly("torchao.optim").AdamW8bit(groups, **options)
    return optimizer


def _import_quietly(name: str) -> Any:
    """Import a library without its log messages about missing kernels; raise _Unusable if the import fails."""
    logger = logging.getLogger(name.partition(".")[0])
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise _Unusable("not installed" if error.name == logger.name else str(error)) from error
    except (ImportError, OSError, RuntimeError) as error:  # installed, but not for this machine
        raise _Unusable(str(error).split("\n", 1)[0]) from error
    finally:
        logger.setLevel(level)


OPTIMIZERS: Mapping[str, Callable[..., Optimizer]] = {
    "adamw": adamw,
    "adam": adam,
    "sgd": sgd,
    "adamw8bit": adamw8bit,
    "nadam": nadam,
    "rmsprop": rmsprop,
    "adafactor": adafactor,
    "lion": lion,
    "muon": muon,
    "schedulefree": schedulefree,
}
