"""Model of torch's CUDA caching allocator: the memory it reserves for a sequence of allocations.

It models rounding, segments, splits and merges. Source: c10/cuda/CUDACachingAllocator.cpp (round_size,
get_allocation_size, get_free_block, should_split, free_block, release_available_cached_blocks, release_cached_blocks,
find_expandable_block)
and c10/core/AllocatorConfig.h of torch 2.13. `scripts/first_contact.sh hollow` compares it with torch 2.14. One stream
is assumed. Limitations: a list in `roundup_power2_divisions` is approximated by its coarsest entry,
`garbage_collection_threshold` is ignored, and `backend:cudaMallocAsync` is not modelled.
"""

from __future__ import annotations

import re
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field

from runner.plan.memory_trace import Event

MIB = 2**20
BLOCK = 512  # bytes; sizes are rounded up to a multiple
SMALL = MIB  # allocations up to this size use separate segments
SMALL_SEGMENT = 2 * MIB
LARGE = 10 * MIB  # from this size on, a segment is created for one allocation
ROUNDING = 2 * MIB  # size of such a segment is rounded up to a multiple


@dataclass(frozen=True)
class Allocator:
    """Settings of torch's allocator that affect reserved memory, in bytes.

    expandable  one segment that grows by pages instead of many of fixed size
    max_split   larger blocks are not split; None: all are
    segment     size of the segments for allocations of 1 to 10 MiB
    rounding    maximum excess size of a block that is used without splitting
    divisions   number of steps between powers of 2 to which sizes are rounded up; 0: to BLOCK only
    fraction    fraction of the GPU's memory that the process may use
    is_known    False for backend:cudaMallocAsync, the driver's allocator, which is not modelled
    """

    expandable: bool = False
    max_split: int | None = None
    segment: int = 20 * MIB
    rounding: int = 20 * MIB
    divisions: int = 0
    fraction: float = 1.0
    is_known: bool = True

    @staticmethod
    def of(text: str | None) -> Allocator:
        """Parse `memory.allocator`, such as "expandable_segments:True,max_split_size_mb:256"."""
        said = {
            name.strip(): value.strip()
            for name, _, value in (part.partition(":") for part in re.split(r",(?![^\[]*\])", text or ""))
        }
        steps = [int(step) for step in re.findall(r"(?:^|:)\s*(\d+)", said.get("roundup_power2_divisions", ""))]
        return Allocator(
            expandable=said.get("expandable_segments", "").lower() == "true",
            max_split=int(said["max_split_size_mb"]) * MIB if "max_split_size_mb" in said else None,
            segment=int(said.get("large_segment_size_mb", 20)) * MIB,
            rounding=int(said.get("max_non_split_rounding_mb", 20)) * MIB,
            divisions=min((step for step in steps if step > 1), default=0),
            fraction=float(said.get("per_process_memory_fraction", 1.0)),
            is_known=said.get("backend") != "cudaMallocAsync",
        )

    def rounded(self, size: int) -> int:
        """Return the minimum block size for an allocation of `size` bytes."""
        if size < BLOCK:
            return BLOCK
        if self.divisions and size > BLOCK * self.divisions:
            below = 1 << (size.bit_length() - 1)
            step = below // self.divisions
            return size if size == below else -(-size // step) * step
        return _up(size, BLOCK)


@dataclass(frozen=True)
class PeakHeld:
    """Peak memory in bytes.

    live       requested
    allocated  requested and rounded (torch's max_memory_allocated)
    reserved   obtained from the driver (torch's max_memory_reserved)
    retries    how often cached segments were released to the driver to make room (num_alloc_retries)
    fits       False if the limit was too small nevertheless
    """

    live: int
    allocated: int
    reserved: int
    retries: int = 0
    fits: bool = True


def replay(events: Iterable[Event], allocator: Allocator | None = None, limit: int | None = None) -> PeakHeld:
    """Return the peak memory of a sequence of allocations and frees.

    events  (block, bytes) for an allocation, (block, 0) for a free; frees of unknown blocks are ignored
    limit   memory of the driver in bytes; None: unlimited. Events after the first failed allocation are ignored
    """
    device = _Device(allocator or Allocator(), limit)
    held: dict[int, tuple[int, _Block]] = {}
    live = most_live = most_allocated = most_reserved = allocated = 0
    for number, size in events:
        if number in held:
            asked, block = held.pop(number)
            live, allocated = live - asked, allocated - block.size
            device.free(block)
        if not size:
            continue
        taken = device.take(size)
        if taken is None:
            return PeakHeld(most_live, most_allocated, most_reserved, device.retries, fits=False)
        held[number] = (size, taken)
        live, allocated = live + size, allocated + taken.size
        most_live, most_allocated = max(most_live, live), max(most_allocated, allocated)
        most_reserved = max(most_reserved, device.reserved)
    return PeakHeld(most_live, most_allocated, most_reserved, device.retries)


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
    at: dict[int, _Block] = field(default_factory=dict)
    last: _Block | None = None

    def put(self, block: _Block) -> None:
        block.is_free = True
        insort(self.free, (block.size, block.start))
        self.at[block.start] = block

    def remove(self, block: _Block) -> None:
        block.is_free = False
        del self.free[bisect_left(self.free, (block.size, block.start))]
        del self.at[block.start]


class _Device:
    def __init__(self, allocator: Allocator, limit: int | None) -> None:
        self.allocator, self.limit = allocator, limit
        self.small, self.large = _Pool(SMALL_SEGMENT), _Pool(allocator.segment)
        self.reserved = self.retries = 0
        self.next_address = 0

    def take(self, size: int) -> _Block | None:
        """Allocate a block of `size` bytes; return None if the driver is out of memory."""
        size = self.allocator.rounded(size)
        pool = self.small if size <= SMALL else self.large
        block = self._found(pool, size) or self._new(pool, size)
        return None if block is None else self._split(block, size)

    def free(self, block: _Block) -> None:
        """Free the block and merge it with its free neighbors."""
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
        pool.put(block)

    def _found(self, pool: _Pool, size: int) -> _Block | None:
        """Remove and return the smallest free block that is large enough."""
        place = bisect_left(pool.free, (size, -1))
        if self.allocator.expandable and place < len(pool.free) and pool.at[pool.free[place][1]] is pool.last:
            place += place + 1 < len(pool.free)  # the end can grow, so it counts as the largest
        if place == len(pool.free):
            return None
        block = pool.at[pool.free[place][1]]
        limit = self.allocator.max_split
        if limit is not None and not self.allocator.expandable:
            if size < limit <= block.size:
                return None
            if size >= limit and block.size >= size + self.allocator.rounding:
                return None
        pool.remove(block)
        return block

    def _new(self, pool: _Pool, size: int) -> _Block | None:
        """Return a block of new memory from the driver."""
        if self.allocator.expandable:
            return self._grown(pool, size)
        if pool is self.small:
            needed = SMALL_SEGMENT
        else:
            needed = self.allocator.segment if size < LARGE else _up(size, ROUNDING)
        if not self._has_room(needed, pool, size):
            return None
        block = _Block(self.next_address, needed, pool)
        self.next_address += needed + BLOCK  # segments do not merge
        self.reserved += needed
        return block

    def _grown(self, pool: _Pool, size: int) -> _Block | None:
        """Grow the segment by the missing pages and return its end."""
        end = pool.last
        there = end.size if end is not None and end.is_free else 0
        missing = _up(size - there, pool.page)
        if not self._has_room(missing, pool, size):
            return None
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
        if pool is self.small or self.allocator.expandable:
            is_split = rest >= BLOCK
        else:
            is_split = rest > SMALL and (self.allocator.max_split is None or size < self.allocator.max_split)
        if not is_split:
            return block
        left = _Block(block.start + size, rest, pool, block, block.after)
        if block.after:
            block.after.before = left
        if pool.last is block:
            pool.last = left
        block.after, block.size = left, size
        pool.put(left)
        return block

    def _is_free(self, more: int) -> bool:
        return self.limit is None or self.reserved + more <= self.limit

    def _release_large(self, pool: _Pool, size: int) -> bool:
        """Release unsplit blocks to the driver, only as many as `size` needs; return False if they do not suffice.

        This does not count as a retry.
        """
        if self.allocator.max_split is None or self.allocator.expandable:
            return False
        wanted = max(size, self.allocator.max_split)
        place = bisect_left(pool.free, (wanted, -1))
        if place < len(pool.free):
            self._release(pool, pool.at[pool.free[place][1]])
            return True
        released = 0
        while released < wanted and pool.free and pool.free[-1][0] >= self.allocator.max_split:
            released += pool.free[-1][0]
            self._release(pool, pool.at[pool.free[-1][1]])
        return released >= wanted

    def _has_room(self, more: int, pool: _Pool, size: int) -> bool:
        """Return whether the driver has `more` bytes, after cached memory is released if necessary."""
        if self._is_free(more) or (self._release_large(pool, size) and self._is_free(more)):
            return True
        self.retries += 1
        for each in (self.small, self.large):
            for block in list(each.at.values()):
                self._release(each, block)
        return self._is_free(more)

    def _release(self, pool: _Pool, block: _Block) -> None:
        """Release a segment that is entirely free; of an expandable one, the free pages at its end."""
        if self.allocator.expandable:
            if block is not pool.last:
                return
            pages = block.size // pool.page * pool.page
            pool.remove(block)
            block.size -= pages
            self.reserved -= pages
            if block.size:
                pool.put(block)
            else:
                pool.last = block.before
                if block.before:
                    block.before.after = None
        elif block.before is None and block.after is None:
            pool.remove(block)
            self.reserved -= block.size


def _up(size: int, step: int) -> int:
    return -(-size // step) * step
