"""Optimizers: the update rule, its parameter groups, and its state as named tensors."""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from runner.base.errors import ConfigError, IncompatibleResume, Problem
from runner.base.option_table import make
from runner.base.schema import did_you_mean
from runner.base.text import shortened
from runner.base.values import Factor, NonNegative, Positive

Parameters = Sequence[tuple[str, nn.Parameter]]  # as from model.named_parameters(), only those with requires_grad


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

    lr            learning rate at the peak of the schedule
    weight_decay  decoupled weight decay, multiplied by the learning rate
    betas         decay per update of the running means of the gradient and of its square
    eps           added to the root of the second mean
    kernel        fused: one kernel for the whole update; foreach: one per operation; for-loop: one per parameter and
                  operation; auto: fused where it works, else foreach
    decay_1d      also decay parameters of fewer than two dimensions (biases, norms)
    lr_scales     module or parameter name -> factor on its learning rate; the longest matching name counts
    Raises ConfigError if the kernel cannot be used or a name matches nothing.
    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, ICLR 2019.
    """
    groups = _groups(parameters, lr, weight_decay, decay_1d, lr_scales)
    flags = _kernel_flags(parameters, kernel)
    return torch.optim.AdamW(groups, lr=lr, betas=(betas[0], betas[1]), eps=eps, **flags)


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

    lr            learning rate at the peak of the schedule
    weight_decay  L2 penalty, added to the gradient
    betas         decay per update of the running means of the gradient and of its square
    eps           added to the root of the second mean
    kernel        fused: one kernel for the whole update; foreach: one per operation; for-loop: one per parameter and
                  operation; auto: fused where it works, else foreach
    decay_1d      also decay parameters of fewer than two dimensions (biases, norms)
    lr_scales     module or parameter name -> factor on its learning rate; the longest matching name counts
    Raises ConfigError if the kernel cannot be used or a name matches nothing.
    Source: Kingma and Ba, Adam: A Method for Stochastic Optimization, ICLR 2015.
    """
    groups = _groups(parameters, lr, weight_decay, decay_1d, lr_scales)
    flags = _kernel_flags(parameters, kernel)
    return torch.optim.Adam(groups, lr=lr, betas=(betas[0], betas[1]), eps=eps, **flags)


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

    lr            learning rate at the peak of the schedule
    momentum      momentum factor; 0: none
    nesterov      use Nesterov momentum
    weight_decay  L2 penalty, added to the gradient
    kernel        fused: one kernel for the whole update; foreach: one per operation; for-loop: one per parameter and
                  operation; auto: fused where it works, else foreach
    decay_1d      also decay parameters of fewer than two dimensions (biases, norms)
    lr_scales     module or parameter name -> factor on its learning rate; the longest matching name counts
    Raises ConfigError if the kernel cannot be used, a name matches nothing, or nesterov is set without momentum.
    Source: Sutskever et al., On the importance of initialization and momentum in deep learning, ICML 2013.
    """
    if nesterov and not momentum:
        raise ConfigError(Problem("must be above 0 with nesterov, but is 0", "optimizer.momentum"))
    groups = _groups(parameters, lr, weight_decay, decay_1d, lr_scales)
    flags = _kernel_flags(parameters, kernel, takes_shards=False)
    made = torch.optim.SGD(groups, lr=lr, momentum=momentum, nesterov=nesterov, **flags)
    # The fused kernel reads uninitialized memory as momentum if the first update is skipped for an overflow.
    for place in _places(made) if momentum else ():
        made.state[place.parameter] = _new_sgd_state(made, place)
    return made


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
    """AdamW with block-wise 8-bit quantization of its two running means.

    Parameters of fewer than 4096 values keep their means in float32.

    lr            learning rate at the peak of the schedule
    weight_decay  decoupled weight decay, multiplied by the learning rate
    betas         decay per update of the running means of the gradient and of its square
    eps           added to the root of the second mean
    library       kernel library; auto: bitsandbytes, else torchao, which compiles for seconds at its first update
    decay_1d      also decay parameters of fewer than two dimensions (biases, norms)
    lr_scales     module or parameter name -> factor on its learning rate; the longest matching name counts
    Raises ConfigError if no installed library supports it on this device, or a name matches nothing.
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
            f"no library for 8-bit states can be used ({'; '.join(refusals)})",
            "optimizer=adamw8bit",
            f"pip install {chosen[0]}, or use optimizer=adamw",
        )
    )


def must_be_installed(function: str, options: Mapping[str, Any], device: torch.device) -> None:
    """Raise ConfigError if the optimizer needs a library that is not installed; a no-op for the others."""
    if "library" in options:
        weight = nn.Parameter(torch.ones(1, device=device))
        make(OPTIMIZERS, function, [("weight", weight)], **{**options, "lr_scales": {}})


def set_learning_rate(optimizer: Optimizer, factor: float) -> float:
    """Set each group's learning rate to its base rate times `factor`; return the rate of a group with lr_scale 1."""
    for group in optimizer.param_groups:
        rate = group["base_lr"] * group["lr_scale"] * factor
        if isinstance(group["lr"], Tensor):  # torchao's compiled step reads the tensor it was compiled with
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
    return float(optimizer.param_groups[0]["base_lr"] * factor)


class Steps:
    """Detect whether a failed step changed anything, and remove the state that it initialized.

    Adam's kernels increment the step count first, and torch versions that tensor; fused kernels
    change parameters without incrementing versions, and other libraries bypass them entirely.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        is_adam = _kind(optimizer) in ("torch.AdamW", "torch.Adam")
        is_plain = _kind(optimizer) == "torch.SGD" and not optimizer.defaults.get("fused")
        self._counted = self._counts_of_steps if is_adam else self._counts_of_all if is_plain else None

    def begin(self) -> None:
        """Start a step."""
        self._known = len(self.optimizer.state)
        self._before = self._counted() if self._counted is not None else []

    def is_as_before(self) -> bool:
        """Return whether the failed step has changed nothing; False if that cannot be determined."""
        state = self.optimizer.state
        fresh = list(state)[self._known :]
        if self._counted is None or any(float(state[place].get("step", 0.0)) for place in fresh):
            return False
        for place in fresh:
            del state[place]
        return self._counted() == self._before

    def _counts_of_steps(self) -> list[int]:
        return [state["step"]._version for state in self.optimizer.state.values()]

    def _counts_of_all(self) -> list[int]:
        held = [value for state in self.optimizer.state.values() for value in state.values()]
        weights = [weight for group in self.optimizer.param_groups for weight in group["params"]]
        return [tensor._version for tensor in (*weights, *held) if isinstance(tensor, Tensor)]


def state_bytes(optimizer: Optimizer) -> int:
    """Return the memory of this rank's state tensors in bytes; 0 before the first update."""
    parts = {id(part): part.numel() * part.element_size() for part in state_tensors(optimizer)}
    return sum(parts.values())


def state_tensors(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield the plain tensors of this rank's state; a shared one once per use."""
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor):
                yield from (part for _, part in _parts(value, into_shards=True))


def expected_state_bytes(optimizer: Optimizer) -> int:
    """Return the expected size of the state in bytes, if the rule keeps it in the parameters' own precision."""
    total = 0
    for group in optimizer.param_groups:
        adam_like = "betas" in group
        copies = 2 if adam_like else int(group["momentum"] > 0)
        for parameter in group["params"]:
            total += 4 * adam_like  # the step count
            total += copies * sum(p.numel() * p.element_size() for _, p in _parts(parameter, into_shards=True))
    return total


def export_state(optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the state as tensors by "<parameter name>.<key>" and a JSON-serializable rest.

    The tensors are the optimizer's own, not copies; sharded parameters give DTensors. Learning rates and other options
    are not state: they come from the configuration.
    """
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, float] = {}
    seen: set[int] = set()
    for place in _places(optimizer):
        state = optimizer.state.get(place.parameter, {})
        numbers |= {f"{place.name}.{key}": value for key, value in state.items() if not isinstance(value, Tensor)}
        for key, part in _flat(state):
            # bitsandbytes shares one table among all parameters; safetensors requires separate memory per tensor
            tensors[f"{place.name}.{key}"] = part.detach().clone() if id(part) in seen else part.detach()
            seen.add(id(part))
    return tensors, {"optimizer": _kind(optimizer), "numbers": numbers}


def import_state(optimizer: Optimizer, tensors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> None:
    """Restore, bit for bit, the state returned by `export_state`.

    Memory layout and device follow the parameters of this optimizer, so kernels may differ from those it was saved
    with. A parameter may have no state (not updated yet), but not a partial one. Sharded parameters accept
    full tensors or DTensors. Raises IncompatibleResume, with nothing changed, if names, shapes or types differ.
    """
    if rest["optimizer"] != _kind(optimizer):
        raise IncompatibleResume(
            f"the checkpoint's optimizer is {rest['optimizer']}, but this run's is {_kind(optimizer)}",
            where="optimizer",
            fix="resume with the optimizer it was saved with, or use resume=fresh",
        )
    numbers: Mapping[str, float] = rest["numbers"]
    unused = {*tensors, *numbers}
    problems: list[str] = []
    restored: dict[Tensor, dict[str, Any]] = {}
    for place in _places(optimizer):
        state = _NEW_STATES[_kind(optimizer)](optimizer, place)
        parts = {f"{place.name}.{key}": part for key, part in _flat(state)}
        counts = {f"{place.name}.{key}": key for key, value in state.items() if not isinstance(value, Tensor)}
        if unused.isdisjoint({*parts, *counts}):
            continue
        for full_name, part in parts.items():
            problems += _differences(full_name, part, tensors.get(full_name))
        problems += [f"{full_name} is missing" for full_name in counts if full_name not in numbers]
        unused -= {*parts, *counts}
        if not problems:
            for full_name, part in parts.items():
                copy_values(part, tensors[full_name])
            state.update({key: numbers[full_name] for full_name, key in counts.items()})
            restored[place.parameter] = state
    problems += [f"{full_name} belongs to no parameter of this optimizer" for full_name in sorted(unused)]
    if problems:
        raise IncompatibleResume(
            f"the checkpoint's optimizer state does not fit: {shortened(problems, 3, '; ')}",
            where="optimizer",
            fix="resume with the model and optimizer it was saved with, or use resume=fresh",
        )
    optimizer.state.clear()
    optimizer.state.update(restored)


# Groups and kernels


def _groups(
    parameters: Parameters, lr: float, weight_decay: float, decay_1d: bool, lr_scales: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Group the parameters by learning rate factor and decay, in the order given."""
    names = [name for name, _ in parameters]
    assert len(set(names)) == len(names), "each parameter has one name"
    problems = [
        Problem(
            f"no parameter's name starts with {prefix}", "optimizer.lr_scales", did_you_mean(prefix, prefixes(names))
        )
        for prefix in lr_scales
        if not any(is_under(name, prefix) for name in names)
    ]
    if not parameters:
        problems.append(
            Problem("there must be a parameter to train, but all are frozen", "optimizer", "let one want a gradient")
        )
    if problems:
        raise ConfigError(problems)
    groups: dict[tuple[float, bool], dict[str, Any]] = {}
    for name, parameter in parameters:
        matching = [prefix for prefix in lr_scales if is_under(name, prefix)]
        scale = float(lr_scales[max(matching, key=len)]) if matching else 1.0
        decays = decay_1d or parameter.dim() >= 2
        group = groups.setdefault(
            (scale, decays),
            {
                "params": [],
                "names": [],
                "base_lr": lr,
                "lr_scale": scale,
                "lr": lr * scale,
                "weight_decay": weight_decay if decays else 0.0,
            },
        )
        group["params"].append(parameter)
        group["names"].append(name)
    return list(groups.values())


def is_under(name: str, prefix: str) -> bool:
    """Return whether `prefix` is the name or a module that contains it: blocks.1 does not contain blocks.10.weight."""
    return name == prefix or name.startswith(prefix.removesuffix(".") + ".")


def prefixes(names: Sequence[str]) -> list[str]:
    """Return the names, and those of all modules that contain them."""
    return list({name.rsplit(".", cut)[0]: None for name in names for cut in range(name.count(".") + 1)})


def _kernel_flags(parameters: Parameters, kernel: str, *, takes_shards: bool = True) -> dict[str, bool]:
    """Return torch's kernel flags: the requested kernel, or the best available one.

    takes_shards  torch has a sharding strategy for the fused kernel: 2.13 has one for Adam and AdamW, none for SGD
    """
    obstacle = _fused_obstacle(parameters, takes_shards=takes_shards)
    if kernel == "fused" and obstacle:
        raise ConfigError(
            Problem(f"the fused kernel cannot work: {obstacle}", "optimizer.kernel", "use optimizer.kernel=auto")
        )
    if kernel == "auto":
        kernel = "foreach" if obstacle else "fused"
    return {"fused": kernel == "fused", "foreach": kernel == "foreach"}  # mutually exclusive in torch


def _fused_obstacle(parameters: Parameters, *, takes_shards: bool) -> str:
    """Return why one fused kernel cannot update all parameters, or an empty string."""
    for name, parameter in parameters:
        if parameter.device.type not in ("cpu", "cuda"):
            return f"{name} is on {parameter.device}, and the kernel exists for cpu and cuda"
        if not parameter.is_floating_point():
            return f"{name} is {str(parameter.dtype).removeprefix('torch.')}, and the kernel takes real numbers"
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
        raise _Unusable(f"0.50 or newer is needed on the CPU, but {library.__version__} is installed")
    strided = [parameter for parameter in parameters if not parameter.is_contiguous()]
    if strided:
        # bitsandbytes does this at its first step, after it has allocated the state for the old strides
        warnings.warn(
            f"bitsandbytes keeps parameters contiguous: channels_last is undone for {len(strided)} of them; "
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
    """Import a library that prints about kernels for other machines; raise _Unusable if the import fails."""
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


# State


class _Place(NamedTuple):
    """A parameter and its position in an optimizer."""

    name: str
    parameter: nn.Parameter
    group: Mapping[str, Any]
    group_index: int
    position: int


def _places(optimizer: Optimizer) -> Iterator[_Place]:
    for group_index, group in enumerate(optimizer.param_groups):
        for position, (name, parameter) in enumerate(zip(group["names"], group["params"], strict=True)):
            yield _Place(name, parameter, group, group_index, position)


def _kind(optimizer: Optimizer) -> str:
    """Return library and class: bitsandbytes.AdamW8bit and torchao.AdamW8bit keep different states."""
    return f"{type(optimizer).__module__.partition('.')[0]}.{type(optimizer).__name__}"


def _parts(tensor: Tensor, *, into_shards: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield the plain tensors inside a tensor subclass with their name suffixes; inside DTensors only if requested."""
    if not hasattr(tensor, "__tensor_flatten__") or (hasattr(tensor, "device_mesh") and not into_shards):
        yield "", tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        inner = getattr(tensor, name)
        if isinstance(inner, Tensor):  # a DTensor also lists its mesh
            yield from ((f".{name}{suffix}", part) for suffix, part in _parts(inner, into_shards=into_shards))


def _flat(state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for key, value in state.items():
        if isinstance(value, Tensor):
            yield from ((f"{key}{suffix}", part) for suffix, part in _parts(value))


def _differences(name: str, part: Tensor, saved: Tensor | None) -> list[str]:
    if saved is None:
        return [f"{name} is missing"]
    return [
        f"{name} must be {_plain(wanted)}, but is {_plain(found)}"
        for wanted, found in ((tuple(part.shape), tuple(saved.shape)), (part.dtype, saved.dtype))
        if wanted != found
    ]


def _plain(value: object) -> str:
    return str(value).removeprefix("torch.")


def copy_values(part: Tensor, saved: Tensor) -> None:
    """Copy the values of a full tensor into one that may be sharded.

    Never the layout: fused kernels read raw memory, so the state must have the layout of its parameter.
    """
    mesh = getattr(part, "device_mesh", None)
    with torch.no_grad():
        if mesh is not None and not hasattr(saved, "device_mesh"):
            from torch.distributed.tensor import distribute_tensor  # noqa: TID251 - a kind of tensor, not a talk of ranks

            saved = distribute_tensor(saved.to(part.device), mesh, part.placements, src_data_rank=None)  # type: ignore[attr-defined]
        part.copy_(saved)


# Initial state of a parameter at its first step; the optimizer is not modified.


def _new_adam_state(optimizer: Optimizer, place: _Place) -> dict[str, Any]:
    # fused kernels count steps on the device; the others on the host, where reading needs no synchronization
    fused = place.group["fused"]
    wide = torch.get_default_dtype() == torch.float64 and not fused
    return {
        "step": torch.zeros(
            (), dtype=torch.float64 if wide else torch.float32, device=place.parameter.device if fused else "cpu"
        ),
        "exp_avg": torch.zeros_like(place.parameter, requires_grad=False),
        "exp_avg_sq": torch.zeros_like(place.parameter, requires_grad=False),
    }


def _new_sgd_state(optimizer: Optimizer, place: _Place) -> dict[str, Any]:
    if not place.group["momentum"]:
        return {}
    return {"momentum_buffer": torch.zeros_like(place.parameter, requires_grad=False)}


def _new_bitsandbytes_state(optimizer: Any, place: _Place) -> dict[str, Any]:
    kept = optimizer.state.pop(place.parameter, None)
    optimizer.init_state(place.group, place.parameter, place.group_index, place.position)
    state: dict[str, Any] = optimizer.state.pop(place.parameter)
    if kept is not None:
        optimizer.state[place.parameter] = kept
    return state


def _new_torchao_state(optimizer: Any, place: _Place) -> dict[str, Any]:
    return {
        "step": torch.tensor(0.0),
        "exp_avg": optimizer._new_buffer(place.parameter, True),  # signed
        "exp_avg_sq": optimizer._new_buffer(place.parameter, False),
    }


_NEW_STATES: Mapping[str, Callable[[Any, _Place], dict[str, Any]]] = {
    "torch.AdamW": _new_adam_state,
    "torch.Adam": _new_adam_state,
    "torch.SGD": _new_sgd_state,
    "bitsandbytes.AdamW8bit": _new_bitsandbytes_state,
    "torchao.AdamW8bit": _new_torchao_state,
}

OPTIMIZERS: Mapping[str, Callable[..., Optimizer]] = {
    "adamw": adamw,
    "adam": adam,
    "sgd": sgd,
    "adamw8bit": adamw8bit,
}
