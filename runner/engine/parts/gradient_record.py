"""Record which parameters of a phase receive gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from torch import nn
from torch.utils.hooks import RemovableHandle

from runner.distributed.parallel import dense_gradient

_GradHook = Callable[[nn.Parameter], None]


class GradientRecord:
    """Names of the parameters that have received a gradient, separately for those that the phase trains and the others.

    The hooks of trained parameters are removed after the first update, because they run in each backward pass. Those
    of the other parameters run only if a task enables their gradients during the phase.

    trained    names of trained parameters of this rank that have received a gradient
    untrained  names of parameters that have received a gradient, but that no optimizer updates
    """

    def __init__(self, model: nn.Module, trained: Collection[str], owned: Mapping[str, nn.Parameter]) -> None:
        self.trained: set[str] = set()
        self.untrained: list[str] = []
        self._of_trained = [_add_hook(weight, self._record_trained(name)) for name, weight in owned.items()]
        self._of_untrained = [
            _add_hook(weight, self._record_untrained(name))
            for name, weight in model.named_parameters()
            if name not in trained and (weight.is_floating_point() or weight.is_complex())
        ]

    def stop_recording_trained(self) -> None:
        """Remove the hooks of the trained parameters."""
        _remove(self._of_trained)

    def close(self) -> None:
        """Remove all hooks."""
        _remove(self._of_trained)
        _remove(self._of_untrained)

    def _record_trained(self, name: str) -> _GradHook:
        def record(weight: nn.Parameter) -> None:
            self.trained.add(name)
            dense_gradient(weight, name)

        return record

    def _record_untrained(self, name: str) -> _GradHook:
        def record(weight: nn.Parameter) -> None:
            if name not in self.untrained:
                self.untrained.append(name)

        return record


def _add_hook(weight: nn.Parameter, hook: _GradHook) -> RemovableHandle:
    """Add a hook that runs after a gradient is accumulated; torch rejects it while gradients are disabled."""
    requires_grad = weight.requires_grad
    handle: RemovableHandle = weight.requires_grad_().register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    weight.requires_grad_(requires_grad)
    return handle


def _remove(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()
