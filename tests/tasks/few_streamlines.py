"""Trace fewer streamlines in dipy's volume, because tracing all of them would dominate the time of these tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def few_streamlines() -> Iterator[None]:
    """Trace from 8 seeds per voxel instead of 64."""
    from dipy.tracking import utils

    seeds_from_mask = utils.seeds_from_mask

    def fewer(mask: Any, affine: Any, density: int) -> Any:
        return seeds_from_mask(mask, affine, density=density // 2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "seeds_from_mask", fewer)
        yield
