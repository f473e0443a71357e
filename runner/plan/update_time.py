"""Predict the time of an update by part, from its traced operators and the facts of hardware profiles.

**Computation** follows a roofline model with two classes of operators (Williams et al., Roofline, CACM 2009): matrix
products, convolutions and attention take the time of their operations or that of their memory accesses, whichever is
longer; all others take the time of their memory accesses. Bytes are counted per operator, without caches. Compiled code
fuses operators of the second class, so it accesses fewer bytes.

**Communication** is modeled as a ring over the slowest link between the ranks. Only time that does
not overlap with computation is added: `ddp` reduces buckets during the last backward pass, and `fsdp` gathers a block
while the previous one computes.

**Data loading** adds the time in which the device waits for samples; the time to read one is measured on this machine.

**Bubble**: the idle time of `pipeline` comes from the simulation of its schedule (runner/workload/partition.py).

docs/update-time.md compares predictions with measurements, and lists the measurement behind each calibrated constant.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runner.base.text import format_bytes
from runner.plan.memory_fit import Demand, MemoryNeeds
from runner.plan.memory_trace import ComputeCost, ModelSizes
from runner.plan.rank_devices import RankDevice
from runner.plan.run_plan import PhasePlan, Plan
from runner.workload import partition

# Fraction of the peak rate that matrix products reach, by compute capability, in 16-bit formats and in fp32. Calibrated
# with rows of docs/update-time.md. Other devices and formats are assumed to reach one half (Chowdhery et al., PaLM,
# 2022, table 3: 46 %; Korthikanti et al., 2022, table 5: 42 to 57 %).
PRODUCT_EFFICIENCY = {(8, 0): 0.75, (9, 0): 0.57}
FP32_PRODUCT_EFFICIENCY = {(9, 0): 0.76}
LIMITED_PRODUCT_EFFICIENCY = {"tesla t4": 0.28}  # in 16-bit formats, by name: its power limit of 70 W lowers its clock
DEFAULT_PRODUCT_EFFICIENCY = 0.5
MEMORY_EFFICIENCY = 0.8  # fraction of the bandwidth of device memory that the STREAM benchmark reaches on GPUs
FUSED_BYTES = 0.6  # bytes of compiled operators other than products, relative to eager ones
LINK_EFFICIENCY = 0.8  # NCCL's protocol needs about 20 % of a link (NVIDIA/nccl-tests issue 212)
UPDATE_HOST_S = 2e-3  # host time of an update besides the time of its operators
LAUNCH_S = 24e-6  # host time per eager operator
# With memory=selective, launches are slower, because torch runs each operator through a dispatch mode in Python.
SELECTIVE_LAUNCH_S = 89e-6
BACKWARD_FRACTION = 2 / 3  # share of the backward pass in the time of both passes
# Latency of NCCL's rings, in s: of a collective, and of each step inside and between machines. Source: NCCL 2.8,
# src/graph/tuning.cc, baseLat and hwLat of Ring with protocol Simple; PCIe for links inside a machine.
BASE_LATENCY_S, LINK_LATENCY_S, NETWORK_LATENCY_S = 8.4e-6, 5.7e-6, 9.6e-6

# Names of the parts of an update.
PRODUCTS, OTHERS, OPTIMIZER = "matrix products", "other operators", "optimizer"
LAUNCHES, COMMUNICATION, BUBBLE = "kernel launches", "communication", "pipeline bubble"
LOADING = "data loading"

PEAK_KEYS = {"fp32": "fp32_tflops", "tf32": "tf32_tflops", "bf16": "bf16_tensor_tflops", "fp16": "fp16_tensor_tflops"}


@dataclass(frozen=True)
class DeviceRates:
    """Rates of a device, from its hardware profile; None: unknown.

    flops_per_s         peak of matrix products in the format of the run
    bytes_per_s         peak of device memory
    product_efficiency  fraction of flops_per_s that matrix products reach
    link_bytes_per_s    rate to the other devices of its machine, in one direction
    network_bytes_per_s  rate from its machine to others, in one direction, over all of its network adapters
    per_machine         devices of a machine; None: all ranks are in one
    """

    flops_per_s: float | None = None
    bytes_per_s: float | None = None
    product_efficiency: float = DEFAULT_PRODUCT_EFFICIENCY
    link_bytes_per_s: float | None = None
    network_bytes_per_s: float | None = None
    per_machine: int | None = None

    @property
    def is_known(self) -> bool:
        """Return whether the time of computation can be predicted."""
        return bool(self.flops_per_s and self.bytes_per_s)

    def access_time(self, nbytes: float) -> float:
        """Return the seconds to read or write this many bytes of device memory."""
        assert self.bytes_per_s, "rates are known"
        return nbytes / (self.bytes_per_s * MEMORY_EFFICIENCY)

    def product_time(self, work: ComputeCost) -> float:
        """Return the seconds of matrix products, convolutions and attention."""
        assert self.flops_per_s, "rates are known"
        compute = work.flops / (self.flops_per_s * self.product_efficiency)
        return max(compute, self.access_time(work.product_bytes))


def find_rates(name: str, precision: str, profiles: Iterable[Mapping[str, Any]]) -> DeviceRates:
    """Return the rates of the device of this name, from the first of the profiles that lists it."""
    for facts in profiles:
        for device in facts.get("devices") or ():
            if str(device.get("name", "")).lower() == name.lower():
                return _read_rates(device, precision)
    return DeviceRates()


def find_rank_rates(plan: Plan, profiles: Sequence[Mapping[str, Any]]) -> dict[str, DeviceRates]:
    """Return the rates of each device of the plan by name, in the plan's number format."""
    precision = plan.choices["precision"].function
    return {name: find_rates(name, precision, profiles) for name in {rank.name for rank in plan.ranks}}


def _read_rates(device: Mapping[str, Any], precision: str) -> DeviceRates:
    def scaled(key: str, factor: float = 1e9) -> float | None:
        value = device.get(key)
        return value * factor if value else None

    is_half = precision in ("bf16", "fp16") and device.get(PEAK_KEYS[precision])
    known = PRODUCT_EFFICIENCY if is_half else FP32_PRODUCT_EFFICIENCY if precision == "fp32" else {}
    efficiency = known.get(tuple(device.get("capability") or ()), DEFAULT_PRODUCT_EFFICIENCY)
    if is_half:
        efficiency = LIMITED_PRODUCT_EFFICIENCY.get(str(device.get("name", "")).lower(), efficiency)
    return DeviceRates(
        scaled(PEAK_KEYS.get(precision, ""), 1e12) or scaled("fp32_tflops", 1e12),
        scaled("memory_bandwidth_gb_s"),
        efficiency,
        scaled("link_gb_s"),
        scaled("network_gb_s"),
        device.get("gpus_per_machine"),
    )


# ---------------------------------------------------------------- communication


@dataclass(frozen=True)
class Ring:
    """A ring through all ranks.

    bytes_per_s  achieved rate at which each rank sends and receives
    steps_s      latency of `count - 1` steps
    uses_network  some ranks are on different machines
    """

    count: int
    bytes_per_s: float
    steps_s: float
    uses_network: bool = False

    def gather(self, nbytes: float) -> float:
        """Return the seconds to all-gather or reduce-scatter tensors of this many bytes in total."""
        if self.count == 1 or not nbytes:
            return 0.0
        return nbytes * (self.count - 1) / self.count / self.bytes_per_s + self.steps_s + BASE_LATENCY_S

    def reduce(self, nbytes: float) -> float:
        """Return the seconds to all-reduce a tensor: a reduce-scatter and an all-gather in one call."""
        return max(0.0, 2 * self.gather(nbytes) - BASE_LATENCY_S)

    def send(self, nbytes: float) -> float:
        """Return the seconds to send a tensor to the next rank."""
        if self.count == 1 or not nbytes:
            return 0.0
        return nbytes / self.bytes_per_s + self.steps_s / (self.count - 1) + BASE_LATENCY_S


ALONE = Ring(1, 1.0, 0.0)


def make_ring(ranks: Sequence[DeviceRates]) -> Ring | None:
    """Return the ring through the devices of all ranks; None if a link is unknown.

    NCCL uses as many rings as a machine has network adapters, and each ring leaves the machine through a different
    adapter. So a rank's rate is limited by all adapters of its machine together.
    """
    count = len(ranks)
    if count == 1:
        return ALONE
    machines = max(-(-count // (rank.per_machine or count)) for rank in ranks)
    speeds = [rank.link_bytes_per_s for rank in ranks]
    speeds += [rank.network_bytes_per_s for rank in ranks] if machines > 1 else []
    known = [speed for speed in speeds if speed]
    if len(known) < len(speeds):
        return None
    between = machines - 1
    latency = (count - 1 - between) * LINK_LATENCY_S + between * NETWORK_LATENCY_S
    return Ring(count, min(known) * LINK_EFFICIENCY, latency, between > 0)


def make_ring_across(ranks: Sequence[DeviceRates], shard_size: int) -> Ring | None:
    """Return the ring through the ranks with the same shard, one in each group of `shard_size` ranks; None if unknown.

    The rings of all shards share the network adapters of a machine.
    """
    ring, groups = make_ring(ranks), len(ranks) // shard_size
    if ring is None or groups == 1:
        return ring and ALONE
    crosses = all(rank.per_machine and len(ranks) > rank.per_machine for rank in ranks)
    step = NETWORK_LATENCY_S if crosses else LINK_LATENCY_S
    sharing = min(shard_size, *(rank.per_machine or 1 for rank in ranks)) if crosses else 1
    return Ring(groups, ring.bytes_per_s / sharing, (groups - 1) * step, crosses)


@dataclass(frozen=True)
class Traffic:
    """Communication of an update: its total seconds, and the exposed seconds, in which computation waits for it."""

    total: float = 0.0
    exposed: float = 0.0


def reduce_buckets(buckets: Sequence[int], backward: float, ring: Ring) -> Traffic:
    """Return the traffic of `ddp`, which all-reduces buckets one after another during a backward pass.

    buckets   bytes of each, in the order of arrival; gradients arrive at a constant rate in bytes per second
    backward  seconds of the last backward pass
    """
    total = sum(buckets)
    busy = end = 0.0
    arrived = 0
    for nbytes in buckets:
        arrived += nbytes
        seconds = ring.reduce(nbytes)
        busy += seconds
        end = max(end, backward * arrived / total) + seconds
    return Traffic(busy, max(0.0, end - backward))


@dataclass(frozen=True)
class Shards:
    """Bytes that `fsdp` communicates: gathered parameters and reduced gradients, for a block and outside of blocks.

    count     number of blocks
    reshards  blocks are gathered again for the backward pass
    reduces_each  gradients are reduced after each micro-batch instead of once per update
    """

    count: int
    block: float
    outside: float
    block_gradients: float
    outside_gradients: float
    reshards: bool
    reduces_each: bool = False

    @staticmethod
    def of(model: ModelSizes, parameters: int, options: Mapping[str, Any]) -> Shards:
        """Return the shards of a model; `options` are those of `parallelism=fsdp`."""
        size = 1.0 if options.get("communicate", "float32") == "float32" else 0.5
        gradients = model.trained / max(1, parameters)
        outside = model.outside if model.block else parameters
        count = round((parameters - outside) / model.block) if model.block else 0
        block = (parameters - outside) / max(1, count)
        reshards = bool(options.get("reshard_after_forward", True))
        reduces_each = options.get("gradients") == "sharded"
        sent = (block * gradients, outside * gradients)
        return Shards(count, block * size, outside * size, *sent, reshards, reduces_each)

    def traffic(self, passes: int, forward: float, backward: float, ring: Ring, across: Ring = ALONE) -> Traffic:
        """Return the traffic of an update with `passes` micro-batches of `forward` and `backward` seconds each.

        The first block is gathered before computation starts, and the last gradients are reduced after it ends. In
        between, a block's communication overlaps with the computation of another. fully_shard sums gradients across
        groups on a separate stream. If only these sums use the network, they also overlap with the communication of
        another block inside the groups.

        ring    ranks that hold a copy of the model together; across: ranks with the same shard, which sum gradients
        """
        count = max(1, self.count)
        gather, outside = ring.gather(self.block), ring.gather(self.outside)
        sums = across.reduce(self.block_gradients / ring.count)
        scatter = ring.gather(self.block_gradients) + sums
        last = ring.gather(self.outside_gradients) + across.reduce(self.outside_gradients / ring.count)
        again = gather if self.reshards else 0.0
        is_concurrent = across.uses_network and not ring.uses_network
        backward_s = max(again + scatter - sums, sums) if is_concurrent else again + scatter
        reductions = passes if self.reduces_each else 1
        overlapped = (count - 1) * (
            passes * max(0.0, gather - forward / count)
            + (passes - reductions) * max(0.0, again - backward / count)
            + reductions * max(0.0, backward_s - backward / count)
        )
        total = passes * (outside + self.count * (gather + again)) + reductions * (self.count * scatter + last)
        return Traffic(total, passes * (outside + gather) + overlapped + reductions * (scatter + last))

    def copied_bytes(self, passes: int) -> float:
        """Return the bytes that are read and written to copy data into and out of the buffers of collectives."""
        gathered = passes * (self.outside + self.count * self.block * (1 + self.reshards))
        reductions = passes if self.reduces_each else 1
        return 2 * (gathered + reductions * (self.outside_gradients + self.count * self.block_gradients))


# ---------------------------------------------------------------- an update


@dataclass(frozen=True)
class Part:
    """A part of an update: seconds, None if unknown, and how they were computed."""

    name: str
    seconds: float | None
    how: str


@dataclass(frozen=True)
class UpdateTime:
    """Predicted time of an update on the slowest rank."""

    parts: tuple[Part, ...]

    @property
    def seconds(self) -> float:
        """Return the sum of the known parts."""
        return sum(part.seconds or 0.0 for part in self.parts)

    @property
    def is_complete(self) -> bool:
        """Return whether all parts are known."""
        return all(part.seconds is not None for part in self.parts)

    def part(self, name: str) -> float:
        """Return the seconds of a part; 0 if the update has no such part."""
        return sum(part.seconds or 0.0 for part in self.parts if part.name == name)

    def __str__(self) -> str:
        return ("" if self.is_complete else "at least ") + format_seconds(self.seconds)


def predict_phase_time(
    plan: Plan, phase: PhasePlan, demand: Demand, rates: Mapping[str, DeviceRates]
) -> UpdateTime | None:
    """Return the predicted time of an update of this phase; None if a device's rates or the operators are unknown."""
    devices = _find_devices(plan.ranks, rates)
    if not all(device.is_known for device in devices) or not demand.points[-1].work.moved_bytes:
        return None
    update = _Update(plan, phase, demand, devices)
    if phase.batch.stages > 1:
        return update.predict_pipeline()
    # One rank of each kind: ranks with the same device and share take the same time.
    kinds = {
        (rank.name, share): number
        for number, (rank, share) in enumerate(zip(plan.ranks, phase.batch.shares, strict=True))
    }
    return max(map(update.predict_rank, kinds.values()), key=lambda time: time.seconds)


def predict_training_time(plan: Plan, needs: MemoryNeeds, rates: Mapping[str, DeviceRates]) -> UpdateTime | None:
    """Return the predicted total time of one update of each phase that trains; None if one of them is unknown."""
    times = [
        predict_phase_time(plan, phase, needs.demands[phase.name], rates)
        for phase in plan.selected
        if phase.name in needs.demands and phase.kind == "train"
    ]
    known = [time for time in times if time]
    return (
        UpdateTime(tuple(part for time in known for part in time.parts)) if known and len(known) == len(times) else None
    )


def _find_devices(ranks: Sequence[RankDevice], rates: Mapping[str, DeviceRates]) -> list[DeviceRates]:
    """Return the rates of each rank's device. A run may use fewer devices of a machine than the profile describes."""
    devices = [rates.get(rank.name, DeviceRates()) for rank in ranks]
    counts = Counter(rank.machine for rank in ranks)
    if len(counts) == 1:
        return devices
    return [
        dataclasses.replace(device, per_machine=counts[rank.machine])
        for device, rank in zip(devices, ranks, strict=True)
    ]


@dataclass(frozen=True)
class _Update:
    """An update of a phase, whose ranks are on `devices`."""

    plan: Plan
    phase: PhasePlan
    demand: Demand
    devices: Sequence[DeviceRates]

    @property
    def memory_factor(self) -> float:
        return 1.0 if self.plan.choices["compile"].uses("off") else FUSED_BYTES

    @property
    def shard_size(self) -> int:
        """Return the number of ranks that hold a copy of the model together."""
        choice, count = self.plan.choices["parallelism"], len(self.devices)
        if not choice.uses("fsdp"):
            return 1
        size = choice.options.get("shard_size")
        return size if isinstance(size, int) else count

    def pass_time(self, work: ComputeCost, device: DeviceRates) -> float:
        others = device.access_time(work.moved_bytes - work.product_bytes)
        return device.product_time(work) + others * self.memory_factor

    def predict_rank(self, rank: int) -> UpdateTime:
        device, batch = self.devices[rank], self.phase.batch
        sizes = _split_share(batch.shares[rank], batch.micro_batch_size)
        work = sum((self.demand.at(size).work for size in sizes), ComputeCost())
        step = self.demand.step.scale(1 / self.shard_size)
        parts = self._compute_parts(work, step, device, rank)
        parts += [self._communicate(rank, sizes)] if len(self.devices) > 1 else []
        return self._with_loading(parts, batch.shares[rank], self._host_time(work, step, rank))

    def predict_pipeline(self) -> UpdateTime:
        batch = self.phase.batch
        count, copies = batch.stages, batch.num_shares
        sizes = _split_share(max(batch.shares), batch.micro_batch_size)
        stages, share = (self.demand.stages, 1.0) if self.demand.stages else ((self.demand,) * count, 1 / count)
        passes = [stage.at(sizes[0]).work.scale(share) for stage in stages]
        weakest = [
            max(self.devices[stage::count], key=lambda device, work=work: self.pass_time(work, device))  # type: ignore[misc]
            for stage, work in enumerate(passes)
        ]
        seconds = [self.pass_time(work, device) for work, device in zip(passes, weakest, strict=True)]
        slowest = max(range(count), key=lambda rank: seconds[rank])
        work = sum(passes[slowest : slowest + 1] * len(sizes), ComputeCost())
        parts = self._compute_parts(work, stages[slowest].step.scale(share), weakest[slowest], slowest)
        schedule = self.plan.choices["parallelism"].options["schedule"]
        busy = _simulate_schedule(schedule, seconds, len(sizes), 0.0)
        bubble = max(0.0, busy - seconds[slowest] * len(sizes))
        parts.append(Part(BUBBLE, bubble, f"{schedule}, {len(sizes)} micro-batches, {count} stages"))
        parts.append(self._exchange_activations(schedule, seconds, passes, len(sizes)))
        if copies > 1:
            parts.append(self._reduce_over_copies(stages, seconds, share))
        return self._with_loading(parts, max(batch.shares), self._host_time(work, stages[slowest].step, slowest))

    def _with_loading(self, parts: Sequence[Part], samples: int, host_s: float) -> UpdateTime:
        """Add the time in which the device waits for data, if it is known how long reading takes.

        Workers read while the device computes. The training process itself cannot read and launch kernels at once.
        """
        time, read_s = UpdateTime(tuple(parts)), self.demand.read_s
        choice, workers = self.plan.choices["dataloader"], self.plan.num_workers
        options = choice.options
        if read_s is None or choice.location or options.get("cache", "none") != "none":  # custom loaders differ
            return time
        above_ms = options.get("workers_above_ms", 0)
        if 1e3 * read_s * self.phase.batch.micro_batch_size < (0 if above_ms == "auto" else above_ms):
            workers = 0
        reading = read_s * samples / max(1, workers)
        hidden = min(reading, max(0.0, time.seconds - (0.0 if workers else host_s)))
        readers = f"{workers} data worker{'s' * (workers > 1)}" if workers else "the training process"
        how = (
            f"reading takes {format_seconds(reading)} in {readers}, as measured on this machine;"
            f" {format_seconds(hidden)} overlap with computation"
        )
        return UpdateTime((*time.parts, Part(LOADING, reading - hidden, how)))

    def _host_time(self, work: ComputeCost, step: ComputeCost, rank: int) -> float:
        """Return the seconds that the host takes to launch kernels; 0 with `compile`: their number is unknown."""
        if not self.plan.ranks[rank].is_gpu or self.memory_factor != 1.0:
            return 0.0
        return UPDATE_HOST_S + (work.launches + step.launches) * self._launch_s

    @property
    def _launch_s(self) -> float:
        return SELECTIVE_LAUNCH_S if self.plan.choices["memory"].uses("selective") else LAUNCH_S

    def _reduce_over_copies(self, stages: Sequence[Demand], seconds: Sequence[float], fraction: float) -> Part:
        """Return the time of the slowest stage to all-reduce its gradients over the copies of the model."""
        ring = make_ring_across(self.devices, len(stages))
        if ring is None:
            return Part(COMMUNICATION, None, "the link rate of a device is not in any hardware profile")
        traffic = max(
            (
                reduce_buckets([round(size * fraction) for size in stage.model.buckets], each * BACKWARD_FRACTION, ring)
                for stage, each in zip(stages, seconds, strict=True)
            ),
            key=lambda traffic: traffic.exposed,
        )
        how = f"gradients over {ring.count} pipelines, {format_seconds(traffic.total)} in total"
        return Part(COMMUNICATION, traffic.exposed, how)

    def _exchange_activations(
        self, schedule: partition.Schedule, seconds: Sequence[float], passes: Sequence[ComputeCost], num_passes: int
    ) -> Part:
        size = self.phase.batch.stages
        # Each pipeline has its own ring; the slowest one determines the update.
        rings = [make_ring(self.devices[first : first + size]) for first in range(0, len(self.devices), size)]
        received = max(work.received for work in passes)
        sends = [ring.send(received) for ring in rings if ring is not None]
        if len(sends) < len(rings) or not self.demand.stages:
            return Part(COMMUNICATION, None, "the link rate or the size of the messages between stages is unknown")
        busy, total = (_simulate_schedule(schedule, seconds, num_passes, each) for each in (0.0, max(sends)))
        return Part(COMMUNICATION, total - busy, f"messages of {format_bytes(received)} between stages, not overlapped")

    def _compute_parts(self, work: ComputeCost, step: ComputeCost, device: DeviceRates, rank: int) -> list[Part]:
        others = work.moved_bytes - work.product_bytes
        assert device.flops_per_s, "rates are known"
        assert device.bytes_per_s, "rates are known"
        memory = f"at {MEMORY_EFFICIENCY:.0%} of {_format_si(device.bytes_per_s)}B/s"
        parts = [
            Part(
                PRODUCTS,
                device.product_time(work),
                f"{_format_si(work.flops)}FLOP at {device.product_efficiency:.0%} of"
                f" {_format_si(device.flops_per_s)}FLOP/s",
            ),
            Part(
                OTHERS,
                device.access_time(others) * self.memory_factor,
                f"{_format_si(others * self.memory_factor)}B {memory}",
            ),
            Part(OPTIMIZER, device.access_time(step.moved_bytes), f"{_format_si(step.moved_bytes)}B {memory}"),
        ]
        host_s = self._host_time(work, step, rank)
        waiting = host_s - sum(part.seconds or 0.0 for part in parts)
        if waiting > 0:
            how = (
                f"the device waits for the host, which needs {UPDATE_HOST_S * 1e3:g} ms, and"
                f" {self._launch_s * 1e6:g} us for each of {work.launches + step.launches:,} operators"
            )
            parts.append(Part(LAUNCHES, waiting, how))
        return parts

    def _communicate(self, rank: int, sizes: Sequence[int]) -> Part:
        ring, device, choice = make_ring(self.devices), self.devices[rank], self.plan.choices["parallelism"]
        if ring is None:
            return Part(COMMUNICATION, None, "the link rate of a device is not in any hardware profile")
        seconds = [self.pass_time(self.demand.at(size).work, device) for size in sizes]
        link = f"{ring.count} ranks {_format_rate(ring)}"
        if choice.uses("fsdp"):
            mean = sum(seconds) / max(1, len(seconds))
            group = make_ring(self.devices[: self.shard_size])
            across = make_ring_across(self.devices, self.shard_size)
            assert group is not None, "all links are known"
            assert across is not None, "all links are known"
            shards = Shards.of(self.demand.model, self.demand.points[-1].peak.parameters, choice.options)
            forward, backward = mean * (1 - BACKWARD_FRACTION), mean * BACKWARD_FRACTION
            traffic = shards.traffic(len(sizes), forward, backward, group, across)
            copies = device.access_time(shards.copied_bytes(len(sizes)))
            if across.count > 1:
                link = (
                    f"{group.count} ranks {_format_rate(group)}, {across.count} groups {_format_rate(across)} per rank"
                )
        else:
            buckets = self.demand.model.buckets
            traffic = reduce_buckets(buckets, (seconds or [0.0])[-1] * BACKWARD_FRACTION, ring)
            copies = device.access_time(2 * sum(buckets))
        how = (
            f"{format_seconds(traffic.exposed)} of {format_seconds(traffic.total)} do not overlap, {link};"
            f" {format_seconds(copies)} to copy buffers"
        )
        return Part(COMMUNICATION, traffic.exposed + copies, how)


def _simulate_schedule(
    schedule: partition.Schedule, seconds: Sequence[float], num_passes: int, message: float
) -> float:
    """Return the seconds of all micro-batches, if each stage waits `message` seconds before each of its passes."""
    forward = [each * (1 - BACKWARD_FRACTION) + message for each in seconds]
    backward = [each * BACKWARD_FRACTION + message for each in seconds]
    return partition.simulated_seconds(schedule, forward, backward, num_passes)


def _split_share(share: int, micro_batch_size: int) -> list[int]:
    size = max(1, min(share, micro_batch_size))
    whole, rest = divmod(share, size)
    return [size] * whole + ([rest] if rest else [])


def format_seconds(seconds: float) -> str:
    """Format seconds with three digits: `1.43 s`, `14.3 ms`."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _format_rate(ring: Ring) -> str:
    return f"at {LINK_EFFICIENCY:.0%} of {_format_si(ring.bytes_per_s / LINK_EFFICIENCY)}B/s"


def _format_si(value: float) -> str:
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= size:
            return f"{value / size:.3g} {prefix}"
    return f"{value:.3g} "
