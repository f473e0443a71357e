"""Model of torch's CUDA caching allocator: the memory it reserves for a sequence of allocations.

It models rounding, segments, splits and merges. Source: c10/cuda/CUDACachingAllocator.cpp (round_size,
get_allocation_size, get_free_block, should_split, free_block, find_expandable_block) of torch 2.13.
`scripts/first_contact.sh hollow` compares the model with torch 2.14. One stream and enough memory are assumed.
"""

from __future__ import annotations

import re
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field

from runner.plan.memory_trace import Event

MIB = 2**20
BLOCK = 512  # bytes; sizes are rounded up to a multiple of this
SMALL = MIB  # allocations up to this size use the small pool, larger ones the large pool
SMALL_SEGMENT = 2 * MIB
LARGE = 10 * MIB  # from this size on, a segment is created for one allocation
LARGE_SEGMENT = 20 * MIB
ROUNDING = 2 * MIB  # the size of a segment for one allocation is rounded up to a multiple of this
NOT_MODELLED = {
    "max_split_size_mb", "large_segment_size_mb", "max_non_split_rounding_mb", "roundup_power2_divisions",
}  # fmt: skip


@dataclass(frozen=True)
class AllocatorSettings:
    """Settings of torch's allocator that affect reserved memory.

    expandable   each pool has one segment, which grows by pages, instead of many segments of fixed size
    fraction     fraction of the GPU's memory that the process may use
    is_modelled  whether the model covers all settings that affect reserved memory
    """

    expandable: bool = False
    fraction: float = 1.0
    is_modelled: bool = True

    @staticmethod
    def parse(text: str | None) -> AllocatorSettings:
        """Parse `memory.allocator`, such as "expandable_segments:True,per_process_memory_fraction:0.9"."""
        settings = {
            name.strip(): value.strip()
            for name, _, value in (part.partition(":") for part in re.split(r",(?![^\[]*\])", text or ""))
        }
        return AllocatorSettings(
            expandable=settings.get("expandable_segments", "").lower() == "true",
            fraction=float(settings.get("per_process_memory_fraction", 1.0)),
            is_modelled=NOT_MODELLED.isdisjoint(settings) and settings.get("backend") != "cudaMallocAsync",
        )


@dataclass(frozen=True)
class PeakMemory:
    """Peak memory in bytes.

    live       requested
    allocated  requested and rounded (torch's max_memory_allocated)
    reserved   obtained from the driver (torch's max_memory_reserved)
    """

    live: int
    allocated: int
    reserved: int


def replay(events: Iterable[Event], allocator: AllocatorSettings | None = None) -> PeakMemory:
    """Return the peak memory of a sequence of allocations and frees.

    events  (block, bytes) for an allocation, (block, 0) for a free; frees of unknown blocks are ignored
    """
    device = _Device(allocator or AllocatorSettings())
    blocks: dict[int, tuple[int, _Block]] = {}
    live = peak_live = peak_allocated = peak_reserved = allocated = 0
    for number, size in events:
        if number in blocks:
            requested, block = blocks.pop(number)
            live, allocated = live - requested, allocated - block.size
            device.free(block)
        if not size:
            continue
        new_block = device.allocate(size)
        blocks[number] = (size, new_block)
        live, allocated = live + size, allocated + new_block.size
        peak_live, peak_allocated = max(peak_live, live), max(peak_allocated, allocated)
        peak_reserved = max(peak_reserved, device.reserved)
    return PeakMemory(peak_live, peak_allocated, peak_reserved)


@dataclass(eq=False)
class _Block:
    start: int
    size: int
    pool: _Pool
    before: _Block | None = None
    after: _Block | None = None
    is_free: bool = False


@dataclass(eq=False)
class _Pool:
    """Free blocks by size, then by address; with expandable segments, also the end of the segment."""

    page: int
    free: list[tuple[int, int]] = field(default_factory=list)
    by_address: dict[int, _Block] = field(default_factory=dict)
    last: _Block | None = None

    def add(self, block: _Block) -> None:
        block.is_free = True
        insort(self.free, (block.size, block.start))
        self.by_address[block.start] = block

    def remove(self, block: _Block) -> None:
        block.is_free = False
        del self.free[bisect_left(self.free, (block.size, block.start))]
        del self.by_address[block.start]


class _Device:
    def __init__(self, allocator: AllocatorSettings) -> None:
        self.allocator = allocator
        self.small, self.large = _Pool(SMALL_SEGMENT), _Pool(LARGE_SEGMENT)
        self.reserved = 0
        self.next_address = 0

    def allocate(self, size: int) -> _Block:
        size = _round_up(size, BLOCK)
        pool = self.small if size <= SMALL else self.large
        return self._split(self._take_free_block(pool, size) or self._allocate_segment(pool, size), size)

    def free(self, block: _Block) -> None:
        pool = block.pool
        for other in (block.before, block.after):
            if other is None or not other.is_free:
                continue
            pool.remove(other)
            if other is block.before:
                block.start, block.before = other.start, other.before
                if other.before:
                    other.before.after = block
            else:
                block.after = other.after
                if other.after:
                    other.after.before = block
                if pool.last is other:
                    pool.last = block
            block.size += other.size
        pool.add(block)

    def _take_free_block(self, pool: _Pool, size: int) -> _Block | None:
        index = bisect_left(pool.free, (size, -1))
        if self.allocator.expandable and index < len(pool.free) and pool.by_address[pool.free[index][1]] is pool.last:
            index += index + 1 < len(pool.free)  # the last block can grow, so it counts as the largest
        if index == len(pool.free):
            return None
        block = pool.by_address[pool.free[index][1]]
        pool.remove(block)
        return block

    def _allocate_segment(self, pool: _Pool, size: int) -> _Block:
        if self.allocator.expandable:
            return self._grow_segment(pool, size)
        needed = pool.page if size < LARGE else _round_up(size, ROUNDING)
        block = _Block(self.next_address, needed, pool)
        self.next_address += needed + BLOCK  # a gap, because blocks of different segments do not merge
        self.reserved += needed
        return block

    def _grow_segment(self, pool: _Pool, size: int) -> _Block:
        end = pool.last
        available = end.size if end is not None and end.is_free else 0
        missing = _round_up(size - available, pool.page)
        self.reserved += missing
        if end is not None and end.is_free:
            pool.remove(end)
            end.size += missing
            return end
        start = 0 if end is None else end.start + end.size
        block = _Block(start, missing, pool, before=end)
        if end is not None:
            end.after = block
        pool.last = block
        return block

    def _split(self, block: _Block, size: int) -> _Block:
        rest, pool = block.size - size, block.pool
        if rest < BLOCK or (rest <= SMALL and pool is self.large and not self.allocator.expandable):
            return block
        left = _Block(block.start + size, rest, pool, block, block.after)
        if block.after:
            block.after.before = left
        if pool.last is block:
            pool.last = left
        block.after, block.size = left, size
        pool.add(left)
        return block


def _round_up(size: int, step: int) -> int:
    return -(-size // step) * step
