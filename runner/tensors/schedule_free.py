"""Keep the counters of a schedule-free optimizer in its state, where checkpoints find them.

The package keeps them in the parameter groups, beside the settings, which checkpoints leave to the configuration.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

COUNTERS = ("k", "weight_sum", "lr_max")  # schedulefree 1.4


def keep_counters_in_state(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer in training mode, with its counters in the state of each parameter."""
    for group in optimizer.param_groups:
        group["train_mode"] = True  # `train()` would also create an empty state for each parameter
    optimizer.register_step_pre_hook(_load_counters)
    optimizer.register_step_post_hook(_store_counters)
    return optimizer


def _load_counters(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        states = (optimizer.state[weight] for weight in group["params"] if weight in optimizer.state)
        counters = next((state for state in states if COUNTERS[0] in state), None)
        group.update({name: counters[name] for name in COUNTERS} if counters else {})


def _store_counters(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for weight in group["params"]:
            if optimizer.state.get(weight):
                optimizer.state[weight].update({name: group[name] for name in COUNTERS})
