"""Rules that resolve `auto` and replace unsupported options, one for each option group; `gpu` is None on a CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from runner.base.errors import Problem
from runner.base.text import format_bytes
from runner.config.configuration import Choice, Configuration
from runner.config.settings import EarlyStoppingSettings
from runner.plan.decisions import Decisions
from runner.plan.inventory import Device
from runner.plan.memory_fit import RankPart
from runner.plan.rank_devices import RankDevice, copy_sizes, ranks_per_machine
from runner.plan.run_plan import BestMetric
from runner.plan.strategy import MAX_MEMORY_RATIO

READ_MS = 1.0  # dataloader.workers_above_ms=auto, in ms per batch
MAX_WORKERS = 8  # per rank, for dataloader.num_workers=auto
SPLIT_MIB = 25  # compile.split_mib=auto: the size of a gradient bucket


def _precision(planner: Decisions, gpu: Device | None) -> None:
    name = planner.choices["precision"].function
    if name == "auto":
        planner.choose("precision", *_native_precision(gpu))
    elif name == "bf16" and gpu and not gpu.native_bf16 and gpu.kind != "mps":
        needed = "of CDNA 2 or RDNA 3 or above" if gpu.architecture else "of capability 8.0 or above"
        needed = "with XMX" if gpu.kind == "xpu" else needed
        why = f"needs a GPU {needed}; {gpu.name} has {gpu.generation} and only emulates bfloat16"
        instead = "fp16" if gpu.formats.fp16 else "fp32"
        planner.reject_or_replace("precision", why, instead, "no native bfloat16")
    elif name == "tf32" and not (gpu and gpu.formats.tf32):
        actual = f"{gpu.name} has {gpu.generation}" if gpu else "this is a CPU"
        why = f"needs a GPU of capability 8.0 or above; {actual}"
        planner.reject_or_replace("precision", why, "fp32", "no TF32 support")
    elif name == "fp16" and not gpu:
        planner.notes.append(
            "precision=fp16 on a CPU is emulated and slow (about 1 GFLOP/s per core); use it for tests only"
        )


def _native_precision(gpu: Device | None) -> tuple[str, str]:
    if gpu is None:
        return "fp32", "auto: on a CPU bfloat16 helps only large models; measure before using it"
    if gpu.native_bf16:
        return "bf16", f"auto: {gpu.name} ({gpu.generation}) supports bfloat16 natively"
    if gpu.formats.fp16:
        why = "has float16 tensor cores but only emulates bfloat16"
        return "fp16", f"auto: {gpu.name} ({gpu.generation}) {why}"
    return "fp32", f"auto: {gpu.name} has no tensor cores"


def _optimizer(planner: Decisions, gpu: Device | None) -> None:
    optimizer = planner.choices["optimizer"]
    if optimizer.options.get("kernel") == "auto":
        functions = planner.choices["parallelism"].function, optimizer.function
        planner.set("optimizer", "kernel", *optimizer_kernel(gpu, *functions))
    kernel = planner.choices["optimizer"].options.get("kernel")
    if _is_cuda(gpu) and planner.choices["precision"].uses("fp16") and kernel != "fused":
        # torch.amp.GradScaler.step reads found_inf on the host, unless the optimizer takes it as a tensor
        which = f"optimizer.kernel={kernel}" if kernel else f"optimizer={optimizer.name}"
        planner.notes.append(f"precision=fp16 with {which} waits for the GPU at every update; fused kernels do not")


def optimizer_kernel(gpu: Device | None, parallelism: str, optimizer: str) -> tuple[str, str]:
    """Return the kernel for `optimizer.kernel=auto` and the reason."""
    if parallelism == "fsdp" and optimizer == "sgd":
        return "foreach", "auto: torch has no fused SGD for sharded parameters"
    if gpu and gpu.kind in ("mps", "xpu"):
        return "foreach", "auto: one launch updates many tensors"
    return "fused", "auto: one kernel for the whole optimizer step, same results"


def _workers(planner: Decisions, gpu: Device | None) -> None:
    options = planner.choices["dataloader"].options
    if planner.choices["dataloader"].location:  # a loader that the task defines decides how it reads
        return
    cores = planner.inventory.cpu.logical_cores
    # Ranks on other machines do not share these cores.
    local = {device.uuid for device in planner.inventory.usable}
    on_machine = [rank for rank in planner.ranks if rank.machine == planner.ranks[0].machine]
    num_ranks = planner.num_sharing or max(1, sum(rank.uuid in local for rank in on_machine))
    workers = options.get("num_workers", 0)  # dataloader=thread has at most one
    if options.get("workers_above_ms") == "auto":
        limit, why = READ_MS, "auto: below this, receiving a batch from a worker takes longer than reading it"
        if workers != "auto":
            limit, why = 0.0, "auto: num_workers is set"
        elif options["start_method"] != "fork":
            limit, why = 0.0, "auto: spawned workers start slowly, so none is started just to measure"
        planner.set("dataloader", "workers_above_ms", limit, why)
    if workers == "auto":
        options = planner.choices["dataloader"].options
        cache, is_measured = options["cache"], options["workers_above_ms"] != 0
        if cache == "device" or (cache == "memory" and not is_measured):
            workers, why = 0, f"auto: nothing to read, because of dataloader.cache={cache}"
        elif _is_cuda(gpu):
            cores_per_rank = cores // num_ranks
            available = f"{cores_per_rank} of {cores} cores for each rank" if num_ranks > 1 else f"{cores} cores"
            workers = min(MAX_WORKERS, max(0, cores_per_rank - 1))
            why = f"auto: {available}, minus one for the main process, at most {MAX_WORKERS} workers"
            why += "; used only if assembling batches of cached samples is slow" * (cache == "memory")
        else:
            workers, why = 0, "auto: on a CPU, workers compete with the model for cores"
        planner.set("dataloader", "num_workers", workers, why)
    elif workers and options["cache"] == "device":
        what = "worker processes cannot access a device cache"
        planner.problems.append(Problem(what, "dataloader.cache=device", "use dataloader.num_workers=0"))
    elif workers > cores:
        planner.notes.append(f"dataloader.num_workers={workers} is more than the {cores} cores of this machine")


def _pin_memory(planner: Decisions, gpu: Device | None) -> None:
    pin_memory = planner.choices["dataloader"].options["pin_memory"]
    if pin_memory == "auto":
        why = "auto: copies from pinned memory can overlap with computation" if _is_cuda(gpu) else "auto: no GPU"
        planner.set("dataloader", "pin_memory", _is_cuda(gpu), why)
    elif pin_memory and not _is_cuda(gpu):
        planner.set("dataloader", "pin_memory", False, "no GPU")
        planner.notes.append("dataloader.pin_memory=true has no effect without a GPU and is disabled")


def _prefetch(planner: Decisions, gpu: Device | None) -> None:
    name = planner.choices["prefetch"].function
    if name == "auto" and _is_cuda(gpu):
        planner.choose("prefetch", "stream", "auto: copies overlap with computation")
    elif name == "auto":
        planner.choose("prefetch", "none", "auto: no GPU")
    elif name == "stream" and not _is_cuda(gpu):
        planner.choose("prefetch", "none", "no GPU")
        planner.notes.append("prefetch=stream has no effect without a GPU and is disabled")
    if planner.choices["prefetch"].uses("stream") and not planner.choices["dataloader"].options["pin_memory"]:
        why = "copies from pageable memory block the host and do not overlap with computation"
        planner.notes.append(f"prefetch=stream with dataloader.pin_memory=false: {why}; use dataloader.pin_memory=true")


def _attention(planner: Decisions, gpu: Device | None) -> None:
    name = planner.choices["attention"].function
    if name == "flash" and gpu and gpu.kind == "cuda" and not gpu.formats.flash:
        why = f"needs a GPU of capability 8.0 or above; {gpu.name} has {gpu.generation}"
        if gpu.architecture:
            why = f"torch has no flash kernels for {gpu.architecture} ({gpu.name})"
        planner.reject_or_replace("attention", why, "efficient", "no flash kernel")
    elif name in ("efficient", "cudnn") and not gpu:
        planner.reject_or_replace("attention", "has only GPU kernels", "auto", "no CPU kernel")


def _backend(planner: Decisions, gpu: Device | None) -> None:
    if planner.choices["backend"].uses("auto"):
        planner.choose("backend", *_choose_backend(planner, gpu))


def _choose_backend(planner: Decisions, gpu: Device | None) -> tuple[str, str]:
    if not _is_cuda(gpu):
        return "default", "auto: only GPUs have several kernels for a convolution"
    models = [demand.model for demand in planner.needs.demands.values()] if planner.needs else []
    count = max((model.num_convolutions for model in models), default=0)
    if models and not count:
        return "default", "auto: the model has no convolutions"
    if not models or any(model.shapes_repeat is None for model in models):
        return "default", "auto: the model was not traced"
    if not all(model.shapes_repeat for model in models):
        return "default", f"auto: input shapes of {count} convolutions vary, and each new shape would be autotuned"
    return "fast", f"auto: autotuning finds the fastest kernels of {count} convolutions, whose shapes repeat"


def _compile(planner: Decisions, gpu: Device | None) -> None:
    compiled = planner.choices["compile"]
    uses_inductor = not compiled.uses("off") and compiled.options.get("backend", "inductor") == "inductor"
    if uses_inductor and not compiled.location and (problem := planner.inventory.why_not_compiled(gpu)):
        planner.reject_or_replace("compile", problem.what, "off", "TorchInductor cannot compile here", problem.fix)
    if not planner.choices["compile"].uses("off") and not gpu:
        slow = "compile on a CPU has been slower than eager mode in every measurement so far"
        planner.notes.append(f"{slow}; measure before using it")
    if planner.choices["compile"].options.get("split_mib") == "auto":
        overlaps = planner.choices["parallelism"].uses("ddp") and len(planner.ranks) > 1
        why = (
            "auto: the all-reduce of one part overlaps with the backward pass of the next"
            if overlaps
            else "auto: one graph"
        )
        planner.set("compile", "split_mib", SPLIT_MIB if overlaps else 0, why)


def why_no_fsdp(torch_version: str) -> str:
    """Return why fsdp over several ranks cannot be used with this version of torch; empty if it can.

    torch_version  empty if unknown

    With torch 2.11 and 2.12, if ranks use different parameters in an update, gradients of different parameters are
    summed with each other: see tests/distributed/test_sharded.py.
    """
    if not torch_version or tuple(map(int, torch_version.split(".")[:2])) >= (2, 13):
        return ""
    return f"torch {torch_version} exchanges wrong gradients if ranks use different parameters"


def _parallelism(planner: Decisions, gpu: Device | None) -> None:
    choice, compiled = planner.choices["parallelism"], planner.choices["compile"]
    if choice.uses("pipeline") and not compiled.uses("off", "regional"):
        what = "compiles the whole model, but a pipeline rank holds only some of its layers"
        planner.problems.append(Problem(what, f"compile={compiled.name}", "use compile=regional, or compile=off"))
    if choice.uses("pipeline") and choice.options["stages"] == "auto":
        planner.set("parallelism", "stages", *_automatic_stages(planner))
    elif choice.uses("pipeline"):
        _check_copy_size(planner, "stages")
    if not choice.uses("fsdp"):
        return
    if len(planner.ranks) > 1 and (why_not := why_no_fsdp(planner.inventory.torch_version)):
        fix = 'pip install "torch>=2.13", or use parallelism=ddp or parallelism=pipeline'
        planner.problems.append(Problem(why_not, f"parallelism={choice.name}", fix))
    memories = [rank.capacity_bytes for rank in planner.ranks]
    if all(memories) and max(memories) > MAX_MEMORY_RATIO * min(memories):
        usable = (
            f"shards are equal, so no device can use more memory than the smallest has ({format_bytes(min(memories))})"
        )
        planner.notes.append(f"parallelism=fsdp: {usable}; parallelism=pipeline divides the layers by memory")
    communicated = {"bfloat16": "bf16", "float16": "fp16"}.get(str(choice.options["communicate"]))
    precision = planner.choices["precision"].function
    if communicated and communicated != precision:
        what = f"a 16-bit format must match precision, but precision is {precision}"
        fix = f"use precision={communicated}, or parallelism.communicate=float32"
        planner.problems.append(Problem(what, f"parallelism.communicate={choice.options['communicate']}", fix))
    if planner.choices["parallelism"].options["shard_size"] == "auto":
        machines = ranks_per_machine(planner.ranks)
        planner.set("parallelism", "shard_size", *_automatic_shard_size(planner, machines))
    else:
        _check_copy_size(planner, "shard_size")
    _evaluation_of_shards(planner)
    _gradient_shards(planner)
    if planner.choices["memory"].options.get("channels_last") == "auto":
        planner.set("memory", "channels_last", False, "fsdp shards parameters in memory order, row by row")
    if planner.choices["optimizer"].uses("adafactor", "muon"):
        what = "needs complete matrices, but parallelism=fsdp shards them"
        where = f"optimizer={planner.choices['optimizer'].name}"
        planner.problems.append(Problem(what, where, "use parallelism=ddp, or optimizer=adamw"))
    if planner.choices["optimizer"].uses("sgd") and planner.choices["optimizer"].options["kernel"] == "fused":
        what = "torch has no fused SGD for sharded parameters"
        planner.problems.append(Problem(what, "optimizer.kernel=fused", "use optimizer.kernel=foreach"))


def _check_copy_size(planner: Decisions, key: str) -> None:
    """Check the number of ranks per copy of the model, which must divide the number of all ranks."""
    size, count = planner.choices["parallelism"].options[key], len(planner.ranks)
    if not isinstance(size, int) or count == 1:
        return
    if size == 1 or count % size:
        sizes = ", ".join(map(str, copy_sizes(count)))
        fix = f"use {sizes}, or parallelism=ddp for a copy of the model on each rank"
        what = f"must divide the {count} ranks into groups of at least 2, each with a copy of the model"
        planner.problems.append(Problem(what, f"parallelism.{key}={size}", fix))
        return
    _note_mixed_groups(planner, key, size)


def _note_mixed_groups(planner: Decisions, key: str, size: int) -> None:
    """Add a note if a copy spans machines that other copies also use."""
    count = len(planner.ranks)
    groups = [{rank.machine for rank in planner.ranks[first : first + size]} for first in range(0, count, size)]
    if any(len(group) > 1 and any(group & other for other in groups if other is not group) for group in groups):
        what = (
            f"parallelism.{key}={size}: groups of {size} ranks span machines that other groups also use, and"
            " communicate over the network"
        )
        machines = ", ".join(map(str, ranks_per_machine(planner.ranks)))
        planner.notes.append(f"{what} ({machines} ranks per machine)")


def decide_stages(split: Sequence[int] | None, memory: Choice, ranks: Sequence[RankDevice]) -> tuple[int, str] | None:
    """Return the number that parallelism.stages=auto stands for, and the reason; None if it depends on traces."""
    count = len(ranks)
    if split and len(split) in copy_sizes(count):
        return len(split), "as many as in parallelism.split"
    if split or len(copy_sizes(count)) < 2:
        return count, "one pipeline"
    if not any(rank.is_gpu for rank in ranks):
        return count, "one pipeline on a CPU"
    if memory.uses("budget") and memory.options["recompute"] == "auto":
        return count, "one pipeline, for which memory=budget chooses the blocks to recompute"
    return None


def _automatic_stages(planner: Decisions) -> tuple[int | str, str]:
    """Return the fewest ranks that hold the layers of one copy of the model, and the reason.

    If larger numbers are possible too, the plan compares the predicted times.
    Source: Narayanan et al., Efficient Large-Scale Language Model Training, SC 2021, takeaway 2: a copy of the model
    uses as few devices as memory allows.
    """
    count, needs = len(planner.ranks), planner.needs
    by_stages = needs.by_stages if needs is not None else {}
    sizes = [size for size in copy_sizes(count) if size in by_stages]
    decided = decide_stages(planner.choices["parallelism"].options["split"], planner.choices["memory"], planner.ranks)
    if decided is not None:
        stages, reason = decided
    elif not sizes:
        is_other = needs is not None and needs.has_stages  # for example, after a rank was lost
        stages, reason = count, f"memory was {'traced with another number of ranks' if is_other else 'not traced'}"
    else:
        planner.copy_sizes = tuple(sizes)
        stages = planner.copy_size if isinstance(planner.copy_size, int) else sizes[0]
        planner.needs = by_stages[stages]
        is_known = planner.needs.has_stages
        reason = "the fewest ranks that hold the model" if is_known else "the stages could not be traced"
    if stages == count:
        return "all", f"auto: {reason}"
    _note_mixed_groups(planner, "stages", stages)
    return stages, f"auto: {reason}"


def _automatic_shard_size(planner: Decisions, machines: Sequence[int]) -> tuple[int | str, str]:
    """Return the number of ranks of a machine if machines are equal and a shard fits, else "all"; and the reason.

    If both fit, the plan compares their predicted times.
    """
    if planner.copy_size is not None:
        return planner.copy_size, "auto"
    if len(machines) == 1:
        return "all", "auto: all ranks are on one machine"
    size = machines[0]
    if len(set(machines)) > 1:
        return "all", f"auto: the machines are unequal ({', '.join(map(str, machines))} ranks)"
    if size == 1:
        return "all", "auto: one rank per machine"
    gathers_model = planner.choices["parallelism"].options["evaluation"] == "whole"
    part = dataclasses.replace(_part_of_shards(planner), shard_size=size, gathers_model=gathers_model)
    if not _shards_fit(planner, part):
        return "all", f"auto: 1/{size} of the model does not fit on a device"
    planner.copy_sizes = (size, "all")
    return (
        size,
        f"auto: parameters are gathered within each of {len(machines)} machines; only gradients cross the network",
    )


def _evaluation_of_shards(planner: Decisions) -> None:
    """Resolve parallelism.evaluation=auto.

    If evaluations gather the whole model, training may not fit at all, or only with sharded gradients. The result is
    `sharded` if that is the case, and sharded evaluations avoid it.
    """
    options = planner.choices["parallelism"].options
    if options["evaluation"] != "auto":
        return
    is_sharded = {"auto": (False, True), "full": (False,), "sharded": (True,)}[options["gradients"]]

    def index_of_first_fit(*, gathers_model: bool) -> int:
        """Return the index of the first entry of `is_sharded` that fits; the number of entries if none does."""
        part = dataclasses.replace(_part_of_shards(planner), gathers_model=gathers_model)
        fits = [_shards_fit(planner, dataclasses.replace(part, shards_gradients=shards)) for shards in is_sharded]
        return [*fits, True].index(True)

    whole, sharded = index_of_first_fit(gathers_model=True), index_of_first_fit(gathers_model=False)
    if sharded < whole and len(planner.ranks) > 1:
        reason = "auto: the whole model, which an evaluation would gather on each rank, does not fit on a device"
        planner.set("parallelism", "evaluation", "sharded", reason)
    else:
        fits = "the whole model fits on each device" if whole < len(is_sharded) else "neither the model nor shards fit"
        reason = "memory was not traced" if planner.needs is None else fits
        planner.set("parallelism", "evaluation", "whole", f"auto: {reason}")


def _part_of_shards(planner: Decisions) -> RankPart:
    count = len(planner.ranks)
    share = -(-planner.configuration.settings.global_batch_size // count)
    return RankPart.from_choice(planner.choices["parallelism"], count, share)


def _shards_fit(planner: Decisions, part: RankPart) -> bool:
    """Return whether a micro-batch fits; True if the memory was not traced.

    Its size is `micro_batch_size`. If that is not a number, a single sample or the rank's whole share must fit.
    """
    size = planner.configuration.settings.micro_batch_size
    micro = size if isinstance(size, int) else None
    sizes = {micro or 1, micro or part.share}
    return planner.needs is None or any(planner.needs.fits(planner.ranks, [n] * part.count, part) for n in sizes)


def _gradient_shards(planner: Decisions) -> None:
    if planner.choices["parallelism"].options["gradients"] != "auto":
        return
    if len(planner.ranks) == 1 or _shards_fit(planner, _part_of_shards(planner)):
        reason = "memory was not traced" if planner.needs is None else "unsharded gradients fit"
        planner.set("parallelism", "gradients", "full", f"auto: {reason}")
    else:
        reason = "auto: unsharded gradients, which are kept between micro-batches, do not fit"
        planner.set("parallelism", "gradients", "sharded", reason)


def _sharpness(planner: Decisions, gpu: Device | None) -> None:
    choice, parallelism = planner.choices["sharpness"], planner.choices["parallelism"]
    if not choice.uses("none") and parallelism.uses("fsdp", "pipeline"):
        what = f"needs whole parameters on each rank, but parallelism={parallelism.name} divides them"
        fix = "use parallelism=ddp or parallelism=single"
        planner.problems.append(Problem(what, f"sharpness={choice.name}", fix))


def _adapter(planner: Decisions, gpu: Device | None) -> None:
    choice, parallelism = planner.choices["adapter"], planner.choices["parallelism"]
    if not choice.uses("none") and parallelism.uses("pipeline"):
        what = "cannot be added to a model that parallelism=pipeline divides into layers"
        planner.problems.append(Problem(what, f"adapter={choice.name}", "use parallelism=ddp or parallelism=fsdp"))


def best_metric(configuration: Configuration, stopping: EarlyStoppingSettings) -> BestMetric:
    """Return the metric that ranks the checkpoints of a phase: the user's, or else that of its early stopping."""
    options = configuration.choices["checkpoint"].options
    is_chosen = not {"checkpoint.best", "checkpoint.best_is"}.isdisjoint(configuration.sources)
    if is_chosen or options["best"] is None or stopping.patience is None:
        return BestMetric(options["best"], options["best_is"], is_chosen=is_chosen)
    return BestMetric(stopping.metric, stopping.best_is, stops=True)


def _best_checkpoint(planner: Decisions, gpu: Device | None) -> None:
    """Show the metric that ranks the best checkpoints, if all phases that train have the same one."""
    settings = planner.configuration
    metrics = {best_metric(settings, phase.early_stopping) for phase in settings.phases if phase.kind == "train"}
    if len(metrics) != 1 or not next(iter(metrics)).stops:
        return
    (best,) = metrics
    for key, value in (("best", best.metric), ("best_is", best.best_is)):
        if planner.choices["checkpoint"].options[key] != value:
            planner.set("checkpoint", key, value, "as for early_stopping")


RULES = (
    _precision,
    _optimizer,
    _workers,
    _pin_memory,
    _prefetch,
    _attention,
    _backend,
    _compile,
    _parallelism,
    _sharpness,
    _adapter,
    _best_checkpoint,
)


def _is_cuda(gpu: Device | None) -> bool:
    return gpu is not None and gpu.kind == "cuda"
