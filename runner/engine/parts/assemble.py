"""Build the objects of a run from its plan: process group, task, model and the options of all groups."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from runner.axes.attention import ATTENTIONS, Attention
from runner.axes.backend import BACKENDS
from runner.axes.compile import COMPILES
from runner.axes.memory import MEMORIES
from runner.axes.parallelism import PARALLELISMS
from runner.axes.precision import PRECISIONS, Precision
from runner.axes.prefetch import PREFETCHES, Prefetch
from runner.base.errors import ConfigError, Problem, TaskFault
from runner.base.order import rank_seed
from runner.base.task import Task
from runner.base.text import abbreviate
from runner.config.chosen_option import make_chosen, own_function
from runner.config.configuration import Choice
from runner.config.options import task_source
from runner.distributed.batch_norm import synchronize_batch_norms
from runner.distributed.parallel import Parallel
from runner.distributed.reducer import CustomSum
from runner.distributed.replicated import Replicated
from runner.distributed.world import World
from runner.durable.safetensors_writer import unsupported_reason
from runner.engine.contract.contract_checks import validate_example, validate_modules
from runner.engine.contract.task_loading import build_task, task_errors
from runner.engine.sources.splits import Splits
from runner.engine.update.coupled import check_strategy, is_coupled
from runner.engine.update.objectives import parse_objectives, unsupported_error
from runner.host.scratch import check_compile_cache, private_compile_cache
from runner.plan.run_plan import Plan
from runner.tensors.global_rng import seed_everything


@dataclass(frozen=True)
class Parts:
    """Objects shared by training and inference.

    splits  the datasets and streams of the task
    bare    the task's model on the device; checkpoints use its parameter names
    model   the module to call in forward passes: `bare`, or its wrapper from the parallel strategy
    notes   what the options have changed, for the start report
    """

    plan: Plan
    world: World
    task: Task
    source: Path
    splits: Splits
    bare: nn.Module
    model: nn.Module
    precision: Precision
    parallel: Parallel
    prefetch: Prefetch
    attention: Attention
    notes: tuple[str, ...]


def assemble(
    plan: Plan, stack: ExitStack, world: World | None = None, *, loaded: Collection[str] = frozenset()
) -> Parts:
    """Build everything a run needs; torch's global settings are restored when `stack` closes.

    world   the ranks that train together; None: only this process, on the device of rank 0
    loaded  names of the model's tensors that a checkpoint will replace, so they need no initial values
    """
    choices = plan.choices
    _check_compile_caches(plan)
    stack.enter_context(private_compile_cache())
    world = world or World(torch.device(plan.device))
    stack.enter_context(make_chosen(BACKENDS, choices["backend"], world.num_sharing or world.num_local_ranks))
    attention: Attention = make_chosen(ATTENTIONS, choices["attention"], world.device)
    # For the whole run, because activation checkpointing recomputes forward passes in backward.
    stack.enter_context(attention.context())
    parallel = _make_parallel(choices["parallelism"], world)
    task, build_notes = build_task(plan, parallel, world, loaded)
    source = task_source(choices["task"].name, Path(plan.task_file) if plan.task_file else None)
    _check_state(task.model, source)
    _check_losses(plan, task, parallel)
    with parallel.deferred.recording if parallel.deferred else nullcontext():
        with task_errors(source, f"moving the model to {world.device}"):
            is_placed = parallel.places_model or parallel.deferred or _is_on_device(world.device, task.model)
            bare = task.model if is_placed else task.model.to(world.device)
        if choices["parallelism"].options.get("batch_norm") == "sync" and world.world_size > 1:
            bare = synchronize_batch_norms(bare, world)
        precision, blocks, notes = _adapt_model(bare, plan, task, source, world, stack)
    prefetch = make_chosen(PREFETCHES, choices["prefetch"], world.device)
    parallel.expect_inputs(
        lambda: validate_example(task.example(), task.example, source),
        plan.batch.micro_batch_size,
        plan.batch.accumulation_steps,
    )
    with task_errors(source, "distributing the model"):
        model = parallel.wrap(bare, lambda: validate_modules(task.layers(), task.layers, source), blocks)
    notes += build_notes + parallel.describe_placement()
    if not world.is_first:  # every rank initialized the same weights; later random numbers differ by rank
        seed_everything(rank_seed(plan.settings.seed, world.rank))
    splits = Splits(plan, world, task, source, bare)
    return Parts(plan, world, task, source, splits, bare, model, precision, parallel, prefetch, attention, tuple(notes))


def _check_compile_caches(plan: Plan) -> None:
    """Check the caches of Inductor and Triton; called before anything imports Inductor, which reads them on import."""
    choice = plan.choices["compile"]
    if not choice.uses("off") and choice.options.get("backend", "inductor") == "inductor":
        check_compile_cache("TORCHINDUCTOR_CACHE_DIR")
        if plan.device.startswith("cuda"):
            check_compile_cache("TRITON_CACHE_DIR")


def _make_parallel(choice: Choice, world: World) -> Parallel:
    parallel: Parallel = make_chosen(PARALLELISMS, choice, world)
    if choice.location and isinstance(parallel, Replicated):
        parallel.make_sum = partial(CustomSum, own_function(choice), world, choice.name, choice.location)
    return parallel


def _has_coupled_phase(plan: Plan, task: Task) -> bool:
    return any(phase.kind == "train" and is_coupled(task, phase.name) for phase in plan.selected)


def _check_losses(plan: Plan, task: Task, parallel: Parallel) -> None:
    """Raise ConfigError if the strategy does not support losses over the global batch, or several objectives."""
    choice = plan.choices["parallelism"]
    if _has_coupled_phase(plan, task):
        check_strategy(parallel, choice)
    for phase in plan.selected:
        if phase.kind == "train" and parse_objectives(task, phase) and not parallel.supports_groups:
            raise unsupported_error(choice.name)


def _adapt_model(
    bare: nn.Module, plan: Plan, task: Task, source: Path, world: World, stack: ExitStack
) -> tuple[Precision, Sequence[nn.Module], list[str]]:
    """Apply precision, memory and compile to the model; return the precision, the blocks of the model, and notes."""
    choices = plan.choices
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        context = None
        if choices["precision"].location:  # first, because it may replace modules, blocks included
            context = _change_model(bare, choices)
            _check_state(bare, source)
        with task_errors(source, "blocks()"):
            blocks = validate_modules(task.blocks(), task.blocks, source)
        notes = list(make_chosen(MEMORIES, choices["memory"], bare, blocks, world.device))
        precision: Precision = make_chosen(PRECISIONS, choices["precision"], world, bare)
        if context:
            precision.add_context(context)
        stack.enter_context(precision.flags)
        begin_forward = make_chosen(COMPILES, choices["compile"], bare, blocks, world.device)
    # Not for a loss over the global batch: several forward passes run before the first backward pass, and their outputs
    # must not be overwritten.
    if begin_forward and not _has_coupled_phase(plan, task):
        precision.before_forward(begin_forward)
    notes += [str(warning.message) for warning in caught if str(warning.message) not in notes]
    notes += find_odd_sizes(bare, world.device) if choices["precision"].uses("bf16", "fp16") else []
    return precision, blocks, notes


def _is_on_device(device: torch.device, model: nn.Module) -> bool:
    """Return True if the model is on the device. Weights on the meta device, as in a forecast, cannot be moved."""
    return all(tensor.device == device for tensor in (*model.parameters(), *model.buffers()))


def _check_state(model: nn.Module, source: Path) -> None:
    """Raise TaskFault before training if the model holds state that a checkpoint cannot store."""
    for name, value in model.state_dict().items():
        if not isinstance(value, torch.Tensor):
            raise TaskFault(
                f"the model's state contains {name}, a {type(value).__name__}: a checkpoint can store only tensors",
                where=str(source),
                fix='keep it in a buffer: self.register_buffer("count", torch.zeros(()))',
            )
        reason = unsupported_reason(value)
        if reason:
            raise TaskFault(
                f"the model's state contains {name}, which a checkpoint cannot store: {reason}",
                where=str(source),
                fix="compute it in __init__ and register it with persistent=False, or store dense real tensors",
            )
    uninitialized = [name for name, weight in model.named_parameters() if isinstance(weight, UninitializedParameter)]
    if uninitialized:
        raise TaskFault(
            f"the model has parameters without a shape, such as those of lazy modules: {abbreviate(uninitialized)}",
            where=str(source),
            fix="call the model once in build with a batch of the right shape, such as model(torch.zeros(2, 10))",
        )
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    missing = sorted(trained - model.state_dict().keys())
    if missing:
        raise TaskFault(
            f"the model's state_dict omits or renames {abbreviate(missing)}: a checkpoint could not store them",
            where=str(source),
            fix="remove the hook of state_dict, or its override",
        )


def _change_model(model: nn.Module, choices: Mapping[str, Choice]) -> Callable[[], AbstractContextManager[Any]] | None:
    """Let the precision of a task file or a package change the model; return the contexts of its forward passes."""
    choice, memory = choices["precision"], choices["memory"]
    make = own_function(choice)(model)
    if make is None or make is model:  # the function may end with `return model`
        return None
    if not callable(make) or isinstance(make, nn.Module):  # a copy of the model would not be trained
        raise _wrong_result(choice, f"returned {type(make).__name__}")
    if not memory.uses("none"):  # the backward pass would recompute activations outside of the context
        what = f"does not work with precision={choice.name}, whose context is not active during recomputation"
        raise ConfigError(Problem(what, f"memory={memory.name}", "use memory=none, or another precision"))

    def make_context() -> AbstractContextManager[Any]:
        try:
            context = make()
        except Exception as error:
            raise _wrong_result(choice, f"that function raised {type(error).__name__}: {error}") from error
        if not isinstance(context, AbstractContextManager):
            raise _wrong_result(choice, f"that function returned {type(context).__name__}")
        return context

    return make_context


def _wrong_result(choice: Choice, what: str) -> TaskFault:
    return TaskFault(
        f"precision={choice.name} must return None or a function that returns a context, but {what}",
        where=choice.location,
        fix="change the model in place, and return None or functools.partial(context, ...) for each forward pass",
    )


def find_odd_sizes(model: nn.Module, device: torch.device) -> list[str]:
    """Return a line for each distinct size of weight matrices that tensor cores use inefficiently in half precision.

    Source: NVIDIA, Matrix Multiplication Background User's Guide, section on dimension quantization: sizes in
    multiples of 16 bytes, which is 8 numbers of 16 bits.
    """
    if device.type != "cuda":
        return []
    lines = {}
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            odd = [size for size in module.weight.shape if size % _FAST_MULTIPLE]
            if odd:
                better = ", ".join(f"{size} -> {-(-size // _FAST_MULTIPLE) * _FAST_MULTIPLE}" for size in odd)
                lines[tuple(odd)] = (
                    f"{name or 'the model'}: sizes in multiples of {_FAST_MULTIPLE} are faster on a GPU: {better}"
                )
    return list(lines.values())


_FAST_MULTIPLE = 8  # sizes of matrices in half precision should be multiples of it


def begin_earlier_phases(parts: Parts, phases: Iterable[str], current: str) -> None:
    """Call `begin_phase` for the phases before the current one, in the order in which they ran.

    What it changes, such as `requires_grad` or the modules of the model, lasts beyond the phase, and checkpoints do not
    contain it. Call this before loading weights, because they include those of added modules.
    """
    for phase in phases:
        if phase != current and parts.plan.phase(phase):  # PHASES may have changed since an earlier phase ran
            with task_errors(parts.source, "begin_phase()"):
                parts.task.begin_phase(phase)
