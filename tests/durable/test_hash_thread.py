"""The blocks in which a file is written and hashed."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from runner.durable.hash_thread import BLOCK, MERGED, split_into_blocks


@pytest.mark.parametrize("seed", range(3))
def test_blocks_contain_all_bytes_in_order(seed: int) -> None:
    generator = random.Random(seed)
    sizes = [generator.choice([0, 1, 1000, MERGED // 3, MERGED - 1, MERGED, MERGED + 1, BLOCK + 5]) for _ in range(8)]
    views = [memoryview(generator.randbytes(size)) for size in sizes]
    blocks = [bytes(block) for block in split_into_blocks(views)]
    assert b"".join(blocks) == b"".join(views)
    assert all(0 < len(block) <= BLOCK for block in blocks)


def test_merging_small_views_needs_only_one_buffer() -> None:
    views = [memoryview(bytes(MERGED // 3))] * 40
    tracemalloc.start()
    try:
        assert sum(map(len, split_into_blocks(views))) == sum(map(len, views))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert MERGED <= peak < MERGED + 100_000
