"""Settings of the caching allocator, which torch reads from the environment when it is imported."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from runner.base.errors import ConfigError, Problem
from runner.config.schema import did_you_mean


def allocator_environment(text: str | None) -> dict[str, str]:
    """Return the environment variables for these allocator settings; set them before torch is loaded.

    text  comma-separated name:value, such as "expandable_segments:True,max_split_size_mb:256"; None: no settings
    Raises ConfigError with all settings that torch does not know and all values of a wrong type.
    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf
    """
    if not text:
        return {}
    problems, settings = [], []
    for part in re.split(r",(?![^\[]*\])", text):  # not the commas inside [256:1,512:2]
        name, _, value = (piece.strip() for piece in part.partition(":"))
        kind = _ALLOCATOR_SETTINGS.get(name)
        if kind is None:
            problems.append(
                Problem(
                    f"torch's allocator has no setting {name or 'without a name'}",
                    "memory.allocator",
                    did_you_mean(name, _ALLOCATOR_SETTINGS) or f"use one of {', '.join(_ALLOCATOR_SETTINGS)}",
                )
            )
        elif not re.fullmatch(kind.pattern, value):
            problems.append(
                Problem(f"{name} must be {kind.description}, but is {value or 'empty'}", "memory.allocator")
            )
        else:
            # torch accepts only this spelling of True and False
            settings.append(f"{name}:{value.capitalize() if kind is _FLAG else value.replace(' ', '')}")
    if problems:
        raise ConfigError(problems)
    return {ALLOCATOR_VARIABLE: ",".join(settings)}


@dataclass(frozen=True)
class _Kind:
    description: str
    pattern: str


_FLAG = _Kind("True or False", "(?i:true|false)")
_INTEGER = _Kind("an integer", r"\d+")
_FRACTION = _Kind("a number above 0 and below 1", r"0?\.\d*[1-9]\d*")
_POWER = "(1|2|4|8|16|32|64)"
_DIVISIONS = _Kind(
    "a power of 2 or a list of them such as [256:1,512:2,>:4]",
    rf"{_POWER}|\[\s*(\d+|>)\s*:\s*{_POWER}\s*(,\s*(\d+|>)\s*:\s*{_POWER}\s*)*\]",
)

ALLOCATOR_VARIABLE = "PYTORCH_ALLOC_CONF"  # torch >= 2.9; it has priority over PYTORCH_CUDA_ALLOC_CONF
_ALLOCATOR_SETTINGS: Mapping[str, _Kind] = {
    "backend": _Kind("native or cudaMallocAsync", "native|cudaMallocAsync"),
    "expandable_segments": _FLAG,
    "garbage_collection_threshold": _FRACTION,
    "graph_capture_record_stream_reuse": _FLAG,
    "large_segment_size_mb": _INTEGER,
    "max_non_split_rounding_mb": _INTEGER,
    "max_split_size_mb": _Kind("an integer of at least 20", r"[2-9]\d|[1-9]\d{2,}"),
    "per_process_memory_fraction": _Kind("a number above 0 and at most 1", rf"1(\.0*)?|{_FRACTION.pattern}"),
    "pinned_max_cached_size_mb": _INTEGER,
    "pinned_max_round_threshold_mb": _INTEGER,
    "pinned_num_register_threads": _INTEGER,
    "pinned_reserve_segment_size_mb": _INTEGER,
    "pinned_use_background_threads": _FLAG,
    "pinned_use_cuda_host_register": _FLAG,
    "release_lock_on_cudamalloc": _FLAG,
    "roundup_power2_divisions": _DIVISIONS,
    "throw_on_cudamalloc_oom": _FLAG,
}
