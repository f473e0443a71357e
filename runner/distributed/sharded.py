"""Sharded data parallelism: every rank keeps a shard of each parameter, its gradient and its optimizer state.

The ranks form a mesh (replicas, shards): each group of `shard_size` consecutive ranks holds one copy of the model, and
gradients are reduced within the group, then summed over the groups. One group of all ranks is the default.

Built on torch's fully_shard. Its collectives run inside forward and backward, so all ranks run the same number of
micro-batches; ranks with less work run dummy ones. Gradients are summed over the ranks, and the loop divides them by
the total number of items, so they are exact for shares of any size and micro-batches of any length.
Source: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020, section 5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, TypeGuard

import torch
import torch._dynamo  # imported once before the ranks are forked, because DTensors import it at their first use
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate

from runner.base.batch import MicroBatch, map_tensors
from runner.base.errors import ConfigError, Problem, TaskFault
from runner.base.order import MicroBatchKey
from runner.base.task import State, Sum
from runner.base.text import abbreviate, dtype_name
from runner.distributed.agreement import broadcast_model, merge_states
from runner.distributed.buffer_sync import BufferSync
from runner.distributed.dummy_pass import without_side_effects
from runner.distributed.parallel import Copy, ForwardPasses, ModelInit, Parallel, Sums, copy_to_host
from runner.distributed.rank_grid import split_ranks
from runner.distributed.shared_calls import SharedCalls, parts_of
from runner.distributed.world import World
from runner.tensors.optimizer_state import copy_values, is_split_by_rows
from runner.tensors.stored_tensor import Saved

CommunicationDtype = Literal["float32", "bfloat16", "float16"]


class Sharded(Parallel):
    """Data parallelism with equal shards of all state, whose size is limited by the smallest device.

    reshard_after_forward  True: gather the blocks again for the backward pass; False: keep them, which needs the
                           memory of the whole model and saves a third of the communication
    communicate            dtype in which parameters are gathered and used; gradients are summed in float32, or in the
                           parameters' dtype if that is wider. A 16-bit dtype requires a precision of the same dtype,
                           because activations between blocks have this dtype too. Outputs of the model are float32
    shards_gradients       reduce gradients after every micro-batch; False: after the last one of an update, which needs
                           memory for unsharded gradients of all parameters until then
    saves_parts            each rank of the first group writes its shards of a checkpoint; False: rank 0 gathers and
                           writes all
    gathers_model          gather all parameters before an evaluation; False: gather one block after another in each
                           call of the model
    init                   how the model is built, see Parallel
    shard_size             number of ranks that together hold one copy of the model; None: all ranks
    """

    is_lockstep = True
    supports_groups = False

    def __init__(
        self,
        world: World,
        *,
        reshard_after_forward: bool = True,
        communicate: CommunicationDtype = "float32",
        shards_gradients: bool = False,
        saves_parts: bool = False,
        gathers_model: bool = True,
        init: ModelInit = "auto",
        shard_size: int | None = None,
    ) -> None:
        super().__init__(world)
        self.shard_size = shard_size or world.world_size
        self.num_parts = self.shard_size if saves_parts else 1
        self.gathers_model = gathers_model
        self.init = init
        self.reshard_after_forward = reshard_after_forward
        self.communicate = communicate
        self.shards_gradients = shards_gradients
        self._root: FSDPModule | None = None
        self._num_blocks = 0
        self._buffers: BufferSync
        self._calls: SharedCalls | None = None  # for evaluations that do not gather the whole model
        self._scalars: dict[nn.Parameter, _Scalar] = {}
        self._used: dict[nn.Parameter, bool] = {}  # whether a counted pass gave it a gradient in this update
        self._is_counted = True
        self._watched: set[nn.Module] = set()  # parts whose gathered parameters have hooks in this phase
        self._hooked: set[Tensor] = set()
        self._is_gathered = self._has_gathered = False
        self._trained: list[nn.Parameter] = []
        self._scalar_gradients: list[Tensor] = []

    # ------------------------------------------------------------ the model

    def wrap(
        self, model: nn.Module, layers: Callable[[], Sequence[nn.Module]], blocks: Sequence[nn.Module]
    ) -> nn.Module:
        """Shard the model in place; its new class gathers and frees parameters around `forward`.

        Raises ConfigError or TaskFault with all parts of the model that cannot be sharded.
        """
        units = [block for block in dict.fromkeys(blocks) if block is not model]
        self._num_blocks = len(units)
        _check_shardable(model, units, self.communicate)
        shards = self.deferred.prepare(model, self.world.device) if self.deferred else None
        broadcast_model(model, self.world)
        mesh = self._make_mesh()
        scalars = {weight for weight in model.parameters() if weight.dim() == 0}
        for module in units:
            self._shard(module, mesh, scalars, self.reshard_after_forward, {})
        # The root's own parameters are used first and last, so they stay gathered between forward and backward pass.
        half = {} if self.communicate == "float32" else {"output_dtype": torch.float32}
        self._shard(model, mesh, scalars, False, half)
        if shards:
            shards.materialize(model)
        assert isinstance(model, FSDPModule)
        for part in parts_of(model):
            part.set_gradient_divide_factor(1.0)  # sums: the default is a mean over the ranks
            part.set_force_sum_reduction_for_comms(True)  # gloo supports only sums
            # Older versions of torch lack this method; with them, all ranks must use the same parameters.
            if hasattr(part, "set_reduce_scatter_unused_params"):
                part.set_reduce_scatter_unused_params(True)
        # fully_shard derives the dtypes of gradients only from parameters that require gradients, at the first forward
        # pass (private, torch 2.13). Do it now, while all trained parameters require them: a phase may freeze some.
        model._get_fsdp_state()._lazy_init()
        self._root = model
        for part in parts_of(model):
            assert isinstance(part, nn.Module)
            part.register_forward_pre_hook(self._watch_gradients)  # after torch's own, which gathers the parameters
        self._replicate_scalars(model, mesh)
        model.register_forward_hook(self._free_without_backward)
        self._buffers = BufferSync(model, self.world)
        if not self.gathers_model:
            reshards = self.reshard_after_forward
            self._calls = SharedCalls(self.world, model, self._free_gathered, reshards=reshards)
        return model

    def describe_placement(self) -> list[str]:
        if self._num_blocks:
            return []
        return ["parallelism=fsdp gathers all parameters of the model at once, because the task defines no blocks"]

    def _make_mesh(self) -> DeviceMesh:
        """Return a mesh of all ranks, or of (groups, ranks of a group). A collective, because it creates groups."""
        kind, count, size = self.world.device.type, self.world.world_size, self.shard_size
        if size == count:
            return init_device_mesh(kind, (count,))
        ranks = torch.arange(count).view(-1, size)
        grid = split_ranks(self.world, size)  # init_device_mesh sets no timeout for its groups
        groups = [grid.replicas.group, grid.copy.group]
        return DeviceMesh.from_group(groups, kind, ranks, mesh_dim_names=("replicas", "shards"))

    def _shard(
        self, module: nn.Module, mesh: DeviceMesh, ignored: set[nn.Parameter], reshard: bool, more: dict[str, Any]
    ) -> None:
        policy = MixedPrecisionPolicy()
        if self.communicate != "float32":
            half = getattr(torch, self.communicate)
            policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32, **more)
        module.register_forward_hook(_clone_views)  # before torch's own, which marks the outputs
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy, ignored_params=ignored)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _watch_gradients(self, part: nn.Module, *_: Any) -> None:
        """Zero the gradients of dummy passes, and record which parameters get gradients in all other passes.

        The hooks are registered in the first forward pass of a phase, because the gathered parameters, on which they
        are registered, do not exist earlier.
        """
        if part in self._watched or not torch.is_grad_enabled():
            return
        self._watched.add(part)
        assert isinstance(part, FSDPModule)
        # Private, checked on torch 2.13: hooks on the gathered parameters have no public equivalent.
        sharded = [param for group in part._get_fsdp_state()._fsdp_param_groups for param in group.fsdp_params]
        for param in sharded:
            gathered = param.unsharded_param
            if gathered.requires_grad and gathered not in self._hooked:
                self._hooked.add(gathered)
                gathered.register_hook(self._use_recorder(param.sharded_param))  # type: ignore[no-untyped-call]

    def _replicate_scalars(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Replicate scalar parameters, which cannot be sharded, on every rank; optimizers see DTensors."""
        tied: dict[nn.Parameter, _Scalar] = {}
        for module in model.modules():
            for name, weight in list(module.named_parameters(recurse=False)):
                if not isinstance(weight, DTensor):
                    if weight not in tied:
                        tied[weight] = scalar = _Scalar(weight, mesh)
                        if weight.requires_grad:
                            weight.register_hook(self._use_recorder(scalar.dtensor))  # type: ignore[no-untyped-call]
                    tied[weight].places.append((module, name))
        self._scalars = {scalar.dtensor: scalar for scalar in tied.values()}
        self._swap_scalars(plain=False)
        if self._scalars:
            model.register_forward_pre_hook(lambda *_: self._swap_scalars(plain=True))

    def _free_without_backward(self, model: nn.Module, *_: Any) -> None:
        """Free the gathered parameters after a forward pass without gradients: no backward pass will free them."""
        if not torch.is_grad_enabled() and not self._is_gathered:
            self._free_gathered(model)

    def _free_gathered(self, model: nn.Module) -> None:
        self._swap_scalars(plain=False)
        for part in parts_of(model):
            part.reshard()

    def _swap_scalars(self, *, plain: bool) -> None:
        for scalar in self._scalars.values():
            scalar.use(plain=plain)

    def _use_recorder(self, weight: nn.Parameter) -> Callable[[Tensor], Tensor | None]:
        def note(gradient: Tensor) -> Tensor | None:
            if self._is_counted:
                self._used[weight] = True
                return None
            return torch.zeros_like(gradient)  # not a product with zero: the gradient may be infinite

        return note

    # ------------------------------------------------------------ an update

    def begin(self, parameters: Sequence[nn.Parameter]) -> None:
        self._trained = list(parameters)
        self._used.clear()
        self._watched.clear()
        self._buffers.begin_phase()

    def accumulate(self, passes: ForwardPasses, batches: Iterator[MicroBatch]) -> Sums:
        assert self._root is not None, "wrap comes first"
        self._buffers.begin_update()
        stopwatch, device = self.stopwatch, self.world.device
        loss_sum, items = self.world.zeros(), self.world.zeros()
        bad: tuple[tuple[int, str], ...] = ()
        last, is_first = False, True
        while not last:
            batch, last, skipped, is_counted, *_ = next(batches)
            stopwatch.lap("data")
            reduces = last or self.shards_gradients
            if reduces and not (is_first or self.shards_gradients):
                _unify_dtypes(passes.model)
            is_first = False
            self._root.set_requires_gradient_sync(reduces)
            self._root.set_is_last_backward(reduces)
            self._is_counted = is_counted
            with nullcontext() if is_counted else without_side_effects(passes.model):
                with passes.forward():
                    loss, count = _compute_loss(passes, batch)
                stopwatch.lap("forward")
                passes.backward(loss)
                stopwatch.lap("backward")
            if is_counted:
                loss_sum += loss.detach()
                items += count.to(device) if isinstance(count, Tensor) else count
                bad += skipped
        self._is_counted = True
        self._swap_scalars(plain=False)
        return Sums(loss_sum, items, bad)

    def reduce(self, sums: Sums) -> Sums:
        """All-reduce the gradients of scalars, and set gradients of parameters that no rank used to None.

        The other gradients have already been reduced in the backward pass.
        """
        assert isinstance(sums.items, Tensor)
        used = torch.tensor([float(self._used.get(weight, False)) for weight in self._trained])
        num_trained = len(used)
        used = torch.cat([used, self._buffers.flags()])
        pending = dist.all_reduce(used, async_op=True)  # gloo, on the host: no device synchronization
        for weight in self._trained:
            if weight in self._scalars:
                self._scalars[weight].reduce()
        loss_sum, items = self.world.sum(torch.stack([sums.loss_sum, sums.items]))
        pending.wait()
        for weight, times in zip(self._trained, used[:num_trained].tolist(), strict=True):
            if not times:
                weight.grad = None
        self._used.clear()
        self._buffers.apply(used[num_trained:])
        self.stopwatch.lap("wait")
        return Sums(loss_sum, items, sums.bad)

    def gradients(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        updated = [weight for weight in parameters if weight.grad is not None]
        self._scalar_gradients = [_local(weight.grad) for weight in updated if weight in self._scalars]
        return [_local(weight.grad) for weight in updated]

    def global_norm(self, local: Tensor) -> Tensor:
        """Return the norm over all shards; replicated parameters count once.

        All ranks of all groups take part, so that the norm, and therefore the weights, are bit-identical in all groups.
        """
        square = local.to(self.world.widest).square()
        if self.world.rank >= self.shard_size:
            square = torch.zeros_like(square)  # the first group counts its shards
        elif not self.world.is_first:
            for gradient in self._scalar_gradients:
                square = square - gradient.to(self.world.widest).square().sum()
        return self.world.sum(square).sqrt().to(local.dtype)

    def any_overflow(self, overflow: Tensor) -> Tensor:
        return self.world.max(overflow)

    # ------------------------------------------------------------ between updates

    def buffer_update(self) -> AbstractContextManager[None]:
        return self._buffers.update()

    def check_buffers(self) -> None:
        self._buffers.check()

    def gather_full(self, tensors: Mapping[str, Tensor], copy: Copy = copy_to_host) -> dict[str, Tensor]:
        """Gather one tensor at a time: the device needs memory only for the largest one."""
        result: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if self.world.is_first:
                result[name] = copy(full)
        return result

    def checkpoint_tensors(self, tensors: Mapping[str, Tensor], copy: Copy = copy_to_host) -> dict[str, Tensor]:
        if self.num_parts == 1:
            return self.gather_full(tensors, copy)
        result: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            if _is_row_sharded(tensor):
                if self.world.rank < self.num_parts:
                    result[name] = copy(tensor.to_local())
            else:
                result |= self.gather_full({name: tensor}, copy)
        return result

    def checkpoint_bytes(self, tensors: Iterable[Tensor]) -> int:
        if self.num_parts == 1:
            return super().checkpoint_bytes(tensors)
        has_rows, is_first = self.world.rank < self.num_parts, self.world.is_first  # rank 0 saves all other tensors
        return sum(
            has_rows * tensor.to_local().nbytes if _is_row_sharded(tensor) else is_first * tensor.nbytes
            for tensor in tensors
        )

    def load(self, model: nn.Module, saved: Saved) -> None:
        """Load this rank's shards of the full tensors; only these rows are read from tensors in files."""
        for name, tensor in model.state_dict().items():
            if name in saved:
                copy_values(tensor, saved[name])

    def merge_state(self, merge: Callable[[State, State], State], state: State) -> State:
        return merge_states(merge, state, self.world)

    # ------------------------------------------------------------ evaluation

    def gather_parameters(self, model: nn.Module) -> AbstractContextManager[None]:
        return self._gather_all(model) if self.gathers_model else self._share_calls(model)

    @contextmanager
    def _share_calls(self, model: nn.Module) -> Iterator[None]:
        """Let each rank call the model any number of times; each call gathers one block after another.

        Those gathers are collectives, so before a call the ranks exchange whether any of them still calls the model. A
        rank that has finished takes part in the gathers of the others until all have finished.
        """
        self._allocate_gathered(model)
        calls = self._calls
        assert calls is not None, "the model is wrapped"
        try:
            with calls.watched():
                yield
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            raise calls.outside_error() from error

    def _allocate_gathered(self, model: nn.Module) -> None:
        """Gather each part once: in torch.inference_mode, a first gather would create tensors unusable in training."""
        if not self._has_gathered:
            self._has_gathered = True
            for part in parts_of(model):
                part.unshard()
                part.reshard()

    @contextmanager
    def _gather_all(self, model: nn.Module) -> Iterator[None]:
        """Gather all parameters on every rank inside the context, for any number of passes without gradients per rank.

        Any method of the model can be called, not only `forward`. Each device needs memory for all parameters.
        """
        self._is_gathered = True
        self._swap_scalars(plain=True)
        for part in parts_of(model):
            part.set_reshard_after_forward(False, recurse=False)
            part.unshard()
        try:
            yield
        finally:
            self._is_gathered = False
            self._swap_scalars(plain=False)
            for part in parts_of(model):
                part.set_reshard_after_forward(part is not self._root and self.reshard_after_forward, recurse=False)
                part.reshard()

    @contextmanager
    def edit_parameters(self, model: nn.Module) -> Iterator[None]:
        """Gather all parameters on every rank inside the context; changes are kept."""
        saved_names = model.state_dict().keys()
        with self._gather_all(model):
            yield
            named = [*model.named_parameters(), *model.named_buffers()]
            edited = {name: tensor.detach().clone() for name, tensor in named if name in saved_names}
        self.load(model, edited)

    def evaluation_batches(self, keys: Sequence[MicroBatchKey]) -> list[MicroBatchKey]:
        """Give every rank the same number of batches, filled up with dummy ones."""
        mine = list(keys[self.world.rank :: self.world.world_size])
        count = -(-len(keys) // self.world.world_size)
        return mine if len(mine) == count else [*mine, keys[-1]._replace(is_counted=False)]


class _Scalar:
    """A replicated scalar parameter.

    dtensor  for optimizers and checkpoints, which do not mix DTensors and plain tensors
    plain    for forward and backward passes: a plain tensor in the same memory
    places   (module, name) of each use
    """

    def __init__(self, weight: nn.Parameter, mesh: DeviceMesh) -> None:
        self.plain = weight
        self.mesh = mesh
        self.dtensor = nn.Parameter(self._replicated(weight.detach()), requires_grad=weight.requires_grad)
        self.places: list[tuple[nn.Module, str]] = []

    def use(self, *, plain: bool) -> None:
        """Make the modules use the plain tensor, or the DTensor."""
        if plain:
            self.plain.requires_grad_(self.dtensor.requires_grad)  # phases freeze the DTensor
        for module, name in self.places:
            module._parameters[name] = self.plain if plain else self.dtensor

    def reduce(self) -> None:
        """All-reduce its gradient."""
        gradient = torch.zeros_like(self.plain) if self.plain.grad is None else self.plain.grad
        dist.all_reduce(gradient)
        self.dtensor.grad = self._replicated(gradient)
        self.plain.grad = None
        # The hooks of the phase are registered on the DTensor, but autograd accumulates into the plain tensor and does
        # not call them. The attribute is private.
        for hook in (self.dtensor._post_accumulate_grad_hooks or {}).values():
            hook(self.dtensor)

    def _replicated(self, tensor: Tensor) -> DTensor:
        return DTensor.from_local(tensor, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)


def _unify_dtypes(root: nn.Module) -> None:
    """Give all gradients of a communication group the dtype of the accumulated ones, by adding zeros for missing ones.

    Otherwise torch creates 16-bit zeros for unused parameters, and then rejects the mixed dtypes. The groups are
    private; checked on torch 2.13.
    """
    for part in parts_of(root):
        for group in part._get_fsdp_state()._fsdp_param_groups:
            for fsdp_param in group.fsdp_params:
                if (
                    fsdp_param.reduce_dtype
                    and fsdp_param.sharded_param.requires_grad
                    and fsdp_param.unsharded_accumulated_grad is None
                ):
                    fsdp_param.unsharded_accumulated_grad = torch.zeros(
                        fsdp_param.sharded_param.shape, dtype=fsdp_param.reduce_dtype, device=group.device
                    )


def _is_row_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Return whether each rank of a group holds some rows of the tensor, in the order of the ranks."""
    return isinstance(tensor, DTensor) and is_split_by_rows(tensor)


def _local(gradient: Tensor | None) -> Tensor:
    """Return this rank's shard; in-place changes apply to the gradient."""
    assert gradient is not None
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _clone_views(module: nn.Module, inputs: Any, output: Any) -> Any:
    """Copy outputs that are views: an in-place operation on one, such as `x += y`, would lose torch's backward hook."""
    return map_tensors(lambda tensor: tensor.clone() if tensor._is_view() and tensor.requires_grad else tensor, output)


def _compute_loss(passes: ForwardPasses, batch: Any) -> Sum:
    try:
        return passes.loss(passes.model, batch)
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise TaskFault(
            "the loss uses a part of the model outside of model(...), where its parameters are not gathered",
            where="parallelism=fsdp",
            fix="call model(...) in the loss, or return that part from blocks(), or use parallelism=ddp",
        ) from error


def _check_shardable(model: nn.Module, units: Sequence[nn.Module], communicate: str) -> None:
    """Raise ConfigError with all parts of the model that cannot be sharded."""
    problems = []
    named = dict(model.named_parameters())
    strided = [name for name, weight in named.items() if not weight.is_contiguous()]
    if strided:
        problems.append(
            Problem(
                f"parameters must be stored in row-major order to be sharded, but {abbreviate(strided)} are not",
                "parallelism=fsdp",
                "use memory.channels_last=false",
            )
        )
    groups = _communication_groups(model, units)
    for where, names in groups.items():
        formats = {dtype_name(named[name].dtype) for name in names if named[name].requires_grad}
        if len(formats) > 1:
            problems.append(
                Problem(
                    f"parameters that are communicated together must have one dtype, but those of {where} have "
                    + " and ".join(sorted(formats)),
                    "parallelism=fsdp",
                    "give them one dtype in the task, or use parallelism=ddp",
                )
            )
    shared = _names_in_several_groups(model, units)
    if shared:
        problems.append(
            Problem(
                f"a parameter must belong to one block, but {abbreviate(shared)} is in several blocks, or also outside"
                " of blocks",
                "parallelism=fsdp",
                "remove the blocks that contain it from blocks(), or use parallelism=ddp",
            )
        )
    if communicate != "float32" and any(
        isinstance(module, nn.modules.batchnorm._NormBase) for module in model.modules()
    ):
        problems.append(
            Problem(
                "must be float32 for a model with batch norms, because their statistics are float32, but is"
                f" {communicate}",
                "parallelism.communicate",
            )
        )
    if problems:
        raise ConfigError(problems)


def _communication_groups(model: nn.Module, units: Sequence[nn.Module]) -> dict[str, list[str]]:
    """Return the names of parameters that are communicated together, by block; the rest as "the rest of the model"."""
    block_of = _block_finder(model, units)
    groups: dict[str, list[str]] = {}
    for name in dict(model.named_parameters()):
        groups.setdefault(block_of(name), []).append(name)
    return groups


def _names_in_several_groups(model: nn.Module, units: Sequence[nn.Module]) -> list[str]:
    block_of = _block_finder(model, units)
    holders: dict[int, set[str]] = {}
    names: dict[int, str] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        if weight.dim():
            names.setdefault(id(weight), name)
            holders.setdefault(id(weight), set()).add(block_of(name))
    return [names[key] for key, places in holders.items() if len(places) > 1]


def _block_finder(model: nn.Module, units: Sequence[nn.Module]) -> Callable[[str], str]:
    """Return a function from a parameter's name to its innermost block, or "the rest of the model"."""
    paths = {id(module): path for path, module in model.named_modules()}
    blocks = sorted((paths[id(unit)] for unit in units), key=len, reverse=True)

    def block_of(name: str) -> str:
        return next((block for block in blocks if name.startswith(f"{block}.")), "the rest of the model")

    return block_of
