"""Number format of the forward pass, and loss scaling where gradients would underflow."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward  # private, checked on torch 2.13

from runner.base.batch import map_tensors
from runner.base.errors import ConfigError, NumericError, Problem
from runner.base.values import Annotated, Factor, Positive, PositiveInt, Range
from runner.config.schema import did_you_mean
from runner.distributed.world import World
from runner.tensors.async_copy import PendingCopy, start_copy
from runner.tensors.tf32 import Level, float32_matmul


class NotFinite(NumericError):
    """The loss or the gradients of an update are not finite; the caller adds the number of the update.

    late  whether the value belongs to the previous update and was read asynchronously
    """

    def __init__(self, what: str, *, late: bool, fix: str = "") -> None:
        super().__init__(what, fix=fix)
        self.late = late


class _Nested:
    """A context that enters `outer`, and then the context that `make` returns."""

    def __init__(self, outer: AbstractContextManager[Any], make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._outer, self._make = outer, make
        self._open: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(self._outer)
            stack.enter_context(self._make())
            self._open.append(stack.pop_all())

    def __exit__(self, *error: Any) -> bool | None:
        return self._open.pop().__exit__(*error)


def _local_flag(flag: Tensor) -> Tensor:
    return flag


class Precision:
    """Interface of a precision; this base class implements float32.

    flags  context that sets torch's global flags during the run

    On the CPU, the loss and the gradient norm are checked before the update is applied, so that weights stay finite. On
    a GPU, they are copied asynchronously and checked one update later, without synchronization; fused optimizer kernels
    skip an update that is not finite.
    """

    def __init__(self, world: World, *, dtype: torch.dtype | None = None, matmul: Level = "highest") -> None:
        self.device = world.device
        self.dtype = dtype or torch.float32
        self.flags: AbstractContextManager[None] = float32_matmul(matmul, cudnn=matmul != "highest")
        # Reused, because creating a context costs more than entering one.
        self._forward: AbstractContextManager[Any] = (
            torch.autocast(self.device.type, dtype=dtype) if dtype else nullcontext()
        )
        # On a GPU, values are checked in the next step, because an immediate check would synchronize.
        self.checks_immediately = self.device.type == "cpu"
        self._pending_values: PendingCopy | None = None
        self._output_gradient: Tensor | None = None  # reused while `_output_like` is the same
        self._output_like: tuple[object, ...] = ()  # factor, shape, dtype, device and type of the last loss
        self._one: Tensor | None = None  # the number 1, on the device of the checked values

    def forward(self) -> AbstractContextManager[Any]:
        """Return the context for a forward pass."""
        return self._forward

    def before_forward(self, begin: Callable[[], None]) -> None:
        """Call `begin` at the start of each forward pass."""

        def make() -> AbstractContextManager[Any]:
            begin()
            return nullcontext()

        self.add_context(make)

    def add_context(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        """Enter the context that `make` returns in each forward pass."""
        self._forward = _Nested(self._forward, make)

    def backward(self, loss: Tensor, factor: float = 1.0) -> None:
        """Accumulate the gradients of `loss * factor`, scaled if the format needs it."""
        self._run_backward(loss, factor)

    def _run_backward(self, loss: Tensor, factor: float) -> None:
        # The factor is passed as the gradient of the loss: multiplying the loss by it would take two more operations
        # with a bit-identical result. The engine is called directly, because torch.autograd.backward also checks its
        # arguments in Python, which takes a noticeable fraction of a small update.
        like = factor, loss.shape, loss.dtype, loss.device, type(loss)
        if self._output_gradient is None or self._output_like != like:
            self._output_gradient, self._output_like = torch.full_like(loss, factor, requires_grad=False), like
        _engine_run_backward(
            (loss,), (self._output_gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True
        )

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return `loss` scaled for the backward pass."""
        return loss

    def unscale(self, optimizer: torch.optim.Optimizer, overflow: Callable[[Tensor], Tensor] = _local_flag) -> None:
        """Undo the scaling of the gradients; call it once per update, after the last backward pass.

        overflow  function that combines the overflow flags of all ranks, so that all skip the update or none does
        """

    def step(
        self, optimizer: torch.optim.Optimizer, loss: Tensor | None = None, grad_norm: Tensor | None = None
    ) -> None:
        """Apply the gradients, unless they overflowed. Raises NotFinite if a value of the update is not finite.

        loss, grad_norm  loss and gradient norm of the update, over all ranks; None: unknown
        """
        if self.checks_immediately:
            _raise_if_not_finite(loss, grad_norm)
            optimizer.step()
            return
        self._check_pending()
        values = [number.detach().float().reshape(()) for number in (loss, grad_norm) if number is not None]
        numbers = torch.stack(values) if values else None
        if numbers is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
            # the interface that GradScaler uses with fused kernels
            optimizer.grad_scale = None  # type: ignore[attr-defined]
            # float32, like `numbers`: the kernel accepts no other dtype, and a task may set another default dtype
            found = torch.zeros((), dtype=torch.float32, device=numbers.device)
            if self._one is None or self._one.device != numbers.device:
                self._one = torch.ones((), dtype=torch.float32, device=numbers.device)
            # GradScaler's kernel (private) checks without synchronizing; it also multiplies the numbers by one.
            torch._amp_foreach_non_finite_check_and_unscale_([numbers], found, self._one)
            optimizer.found_inf = found  # type: ignore[attr-defined]
            optimizer.step()
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
        else:
            optimizer.step()
        if numbers is not None:  # last, so that a failed step leaves no pending copy
            self._pending_values = start_copy(numbers)  # read one update later, without synchronization

    def discard(self) -> None:
        """Discard the pending values of the current update, and keep those of the previous one."""

    def fork(self, model: nn.Module) -> Precision:
        """Return the same number format with separate checks and a separate loss scale, for another optimizer."""
        forked = copy.copy(self)
        forked._pending_values = None
        return forked

    def num_skipped(self) -> int:
        """Return the number of skipped updates; may wait for the previous update, but not for the current one.

        Raises NotFinite if a value of that update is not finite.
        """
        self._check_pending()
        return 0

    def total_skipped(self) -> int:
        """Return `num_skipped`, plus the skipped updates of all forks."""
        return self.num_skipped()

    def values(self) -> dict[str, float]:
        """Return values to log; may wait for the current update, so call it only when rows are written."""
        return {}

    def state(self) -> dict[str, Any]:
        """Return the checkpoint state, JSON-serializable. Raises NotFinite as `num_skipped` does."""
        self._check_pending()
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""

    def _check_pending(self) -> None:
        """Raise NotFinite if the last copied values are not finite."""
        if self._pending_values is not None:
            numbers, self._pending_values = self._pending_values, None
            _raise_if_not_finite(*numbers.read().unbind(), late=True)


class ScaledHalf(Precision):
    """float16 with a loss scale that is reduced at each overflow; the update with the overflow is skipped.

    Batch norm statistics are then reset to their values before the update, because the overflow may have made them
    infinite.
    """

    def __init__(
        self, world: World, model: nn.Module, scaler: torch.amp.GradScaler, *, min_scale: float, max_skips: int
    ) -> None:
        super().__init__(world, dtype=torch.float16)
        assert scaler.is_enabled(), "torch disabled the scaler: the device cannot do float16"
        # Creates the scale now, because a rank without samples unscales although it has scaled no loss.
        scaler.scale(torch.zeros(1, device=world.device))
        self.scaler = scaler
        self.min_scale, self.max_skips = min_scale, max_skips
        self._skipped = self._consecutive_skips = 0
        self._pending: PendingCopy | None = None
        self._scale: float | None = None  # None: not read since the scaler was created or restored
        self._statistics = _SavedStatistics(model)
        self._forks: list[Precision] = []
        self._skipped_by_others = 0  # by forks in phases that ended before this process started

    def forward(self) -> AbstractContextManager[Any]:
        self._statistics.keep()
        return self._forward

    def backward(self, loss: Tensor, factor: float = 1.0) -> None:
        self._run_backward(self.scale_loss(loss * factor), 1.0)

    def scale_loss(self, loss: Tensor) -> Tensor:
        scaled: Tensor = self.scaler.scale(loss)
        return scaled

    def unscale(self, optimizer: torch.optim.Optimizer, overflow: Callable[[Tensor], Tensor] = _local_flag) -> None:
        self.scaler.unscale_(optimizer)
        # Private, checked on torch 2.13: GradScaler has no public way to share its flag between ranks.
        flags: Any = self.scaler._found_inf_per_device(optimizer)
        if not flags:  # no gradients, as on a pipeline stage with unused parameters; other ranks wait for the flag
            flags[self.device] = torch.zeros((), dtype=torch.float32, device=self.device)
        for flag in flags.values():
            flag.copy_(overflow(flag))

    def step(
        self, optimizer: torch.optim.Optimizer, loss: Tensor | None = None, grad_norm: Tensor | None = None
    ) -> None:
        self.num_skipped()  # reads the results of the previous update
        overflow = sum(self.scaler._found_inf_per_device(optimizer).values())
        assert isinstance(overflow, Tensor)
        self.scaler.step(optimizer)
        self._statistics.restore_if_overflowed(overflow)
        self.scaler.update()
        scale = self.scaler._get_scale_async()  # private, checked on torch 2.13; get_scale would wait for the device
        assert scale is not None, "unscale has created it"
        self._pending = start_copy(torch.stack([overflow, scale]))

    def fork(self, model: nn.Module) -> Precision:
        forked = copy.copy(self)
        forked._pending_values = forked._pending = forked._scale = None
        forked._skipped = forked._consecutive_skips = forked._skipped_by_others = 0
        forked.scaler, forked._statistics = copy.deepcopy(self.scaler), _SavedStatistics(model)
        forked._forks = []
        self._forks.append(forked)
        return forked

    def discard(self) -> None:
        self._statistics.discard()
        # Private, checked on torch 2.13. These states record whether gradients were unscaled and overflowed. The next
        # `unscale_` raises an error unless they are cleared. The public `update` would also change the scale.
        self.scaler._per_optimizer_states.clear()

    def num_skipped(self) -> int:
        if self._pending is not None:
            pending, self._pending = self._pending, None
            overflow, self._scale = pending.read().tolist()
            overflowed = int(overflow > 0)
            self._skipped += overflowed
            self._consecutive_skips = (self._consecutive_skips + 1) * overflowed
            if self._consecutive_skips >= self.max_skips:
                raise NotFinite(
                    f"{self._consecutive_skips} consecutive updates were skipped because float16 overflowed: the loss"
                    f" scale is {self.scaler.get_scale():g}, and the gradients are not finite",
                    late=True,
                    fix="use precision=fp32 or bf16, lower optimizer.lr, or raise precision.max_skips",
                )
        return self._skipped

    def total_skipped(self) -> int:
        return self.num_skipped() + self._skipped_by_others + self._skipped_by_forks()

    def _skipped_by_forks(self) -> int:
        return sum(forked.total_skipped() for forked in self._forks)

    def values(self) -> dict[str, float]:
        skipped = self.num_skipped()  # reads the scale too
        scale = self.scaler.get_scale() if self._scale is None else self._scale
        if scale < self.min_scale:
            low = f"the loss scale fell to {scale:g}, below min_scale {self.min_scale:g}"
            raise NumericError(
                f"{low}: gradients overflow at every scale",
                where="precision=fp16",
                fix="use precision=fp32 or bf16, or lower optimizer.lr",
            )
        return {"precision/loss_scale": scale, "precision/skipped_updates": float(skipped)}

    def state(self) -> dict[str, Any]:
        skipped = self.num_skipped()
        return {
            "scaler": self.scaler.state_dict(),
            "skipped": skipped,
            "skipped_in_a_row": self._consecutive_skips,
            "total_skipped": self.total_skipped(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned; the forks of the current phase must be restored first."""
        if state:  # empty if the checkpoint was written with another precision
            self.scaler.load_state_dict(dict(state["scaler"]))
            self._scale = None
            self._skipped, self._consecutive_skips = int(state["skipped"]), int(state.get("skipped_in_a_row", 0))
            total = int(state.get("total_skipped", self._skipped))  # earlier versions did not save it
            self._skipped_by_others = max(0, total - self._skipped - self._skipped_by_forks())


class _SavedStatistics:
    """A copy of the running statistics of the model's batch norms before the current update."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._buffers: list[Tensor] | None = None
        self._saved: list[Tensor] = []

    def keep(self) -> None:
        """Copy the statistics once per update, but not in an evaluation, which does not change them."""
        if self._saved or not torch.is_grad_enabled():
            return
        if self._buffers is None:  # not in __init__, because strategies replace modules later
            modules = [module for module in self._model.modules() if getattr(module, "running_mean", None) is not None]
            self._buffers = [
                buffer for module in modules for buffer in module.buffers(recurse=False) if not buffer.is_meta
            ]
        self._saved = [buffer.clone() for buffer in self._buffers]

    def discard(self) -> None:
        """Drop the copies, because the statistics were restored elsewhere."""
        self._saved = []

    def restore_if_overflowed(self, overflowed: Tensor) -> None:
        """Restore the copies if `overflowed` is above 0, without synchronization."""
        if not self._saved:  # this rank had no samples in the update
            return
        for buffer, before in zip(self._buffers or (), self._saved, strict=True):
            buffer.copy_(torch.where(overflowed.to(buffer.device) > 0, before, buffer))
        self._saved = []


def _raise_if_not_finite(loss: Tensor | None, grad_norm: Tensor | None = None, *, late: bool = False) -> None:
    """Raise NotFinite for the first value of an update that is not finite."""
    if loss is not None and not math.isfinite(loss.item()):
        raise NotFinite("the loss is not finite", late=late)
    if grad_norm is not None and not math.isfinite(grad_norm.item()):
        raise NotFinite("the gradients are not finite", late=late)


def fp32(world: World, model: nn.Module) -> Precision:
    """Compute in float32, including matrix products."""
    return Precision(world)


def tf32(world: World, model: nn.Module, *, level: Literal["high", "medium"] = "high") -> Precision:
    """Compute in float32, but round the inputs of matrix products and convolutions to TensorFloat-32.

    level  high: TF32 (10 bits of mantissa); medium: bfloat16 products if torch supports them
    Source: torch.set_float32_matmul_precision.
    """
    return Precision(world, matmul=level)


def bf16(world: World, model: nn.Module, *, keep_fp32: list[str] = []) -> Precision:  # noqa: B006 - read as schema
    """Autocast to bfloat16: the range of float32, 7 bits of mantissa, no loss scale needed.

    keep_fp32  names of modules that are kept in float32
    """
    _keep_float32(model, keep_fp32, world.device)
    return Precision(world, dtype=torch.bfloat16)


def fp16(
    world: World,
    model: nn.Module,
    *,
    init_scale: Positive = 65536.0,
    growth_factor: Annotated[float, Range("a number above 1", low=1.0, low_allowed=False)] = 2.0,
    backoff_factor: Factor = 0.5,
    growth_interval: PositiveInt = 2000,
    min_scale: Positive = 1e-4,
    max_skips: PositiveInt = 20,
    keep_fp32: list[str] = [],  # noqa: B006 - read as schema
) -> Precision:
    """Autocast to float16 with dynamic loss scaling.

    init_scale       initial loss scale
    growth_factor    factor applied to the scale after growth_interval updates without overflow
    backoff_factor   factor applied to the scale at an overflow; that update is skipped
    growth_interval  updates without overflow before the scale grows
    min_scale        end the run if the scale falls below this, because gradients then overflow at any scale
    max_skips        number of consecutive skipped updates that ends the run; 20 skips reduce a scale of 65536 to
                     1/16
    keep_fp32        names of modules that are kept in float32
    Source: Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.2.
    """
    _keep_float32(model, keep_fp32, world.device)
    scaler = torch.amp.GradScaler(
        world.device.type,
        init_scale=init_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
    )
    return ScaledHalf(world, model, scaler, min_scale=min_scale, max_skips=max_skips)


def _keep_float32(model: nn.Module, names: Sequence[str], device: torch.device) -> None:
    """Make the named modules run outside autocast, with float32 inputs."""
    modules = dict(model.named_modules())
    unknown = [name for name in names if name not in modules]
    if unknown:
        raise ConfigError(
            Problem(f"the model has no module {name}", "precision.keep_fp32", did_you_mean(name, modules))
            for name in unknown
        )
    for name in names:
        module = modules[name]
        module.forward = _wrap_in_float32(module.forward, device.type)


def _wrap_in_float32(forward: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    def run(*inputs: Any, **named: Any) -> Any:
        with torch.autocast(device_type, enabled=False):
            return forward(*map_tensors(_to_float, inputs), **map_tensors(_to_float, named))

    return run


def _to_float(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


PRECISIONS: Mapping[str, Callable[..., Precision]] = {
    "fp32": fp32,
    "tf32": tf32,
    "bf16": bf16,
    "fp16": fp16,
}
