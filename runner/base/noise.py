"""Per-sample random draws: a function of (seed, epoch, sample index), independent of how an update is split.

A generator returns its next number to any caller, so its draws depend on micro-batches, ranks and retries. Here each
random number is a hash of what it is used for: the sample, the draw within the forward pass, the element. Each sample
has a key, a hash of seed, epoch, index, and the name and number of the call. Values that differ between batches, or
between layers that share code, are part of these keys, which are a tensor: torch.compile would recompile for each new
value of a Python number.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.base.accelerator import widest_dtype
from runner.base.batch import BatchSamples

EVALUATION = -1  # used as the epoch in evaluations: always the same draws, separate from training


class SampleNoise:
    """Draws for samples: each method returns a tensor (*rows, *shape), where each row depends on its key only.

    Draws are numbered from 0, so two draws of the same shape differ. An element depends on its position, not on
    the surrounding shape: draws for padded sequences agree where both have an element.
    Integers, booleans and uniform numbers are bitwise equal on every device; normal ones agree up to rounding.

    keys     (*rows) int64; usually one per sample of the batch
    samples  the samples from which `every` selects
    """

    def __init__(self, keys: Tensor, samples: _Positions | None = None) -> None:
        self.keys, self._samples = keys, samples
        self._next = 0

    def uniform(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return uniform numbers in [0, 1), as fine as torch.rand's: 53 bits in float64, the first 24 in float32."""
        dtype = dtype or torch.get_default_dtype()
        num_bits = _UNIFORM_BITS[dtype]
        return _high_bits(self._bits(shape), num_bits).to(dtype).mul_(2.0**-num_bits)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return numbers from N(0, 1), up to 6.7 in absolute value; computed in float64 if available, then rounded.

        Source: Box and Muller, A Note on the Generation of Random Normal Deviates, 1958, with 32 bits for each of two
        uniform numbers.
        """
        dtype = dtype or torch.get_default_dtype()
        wide = widest_dtype(self.keys.device)
        bits = self._bits(shape)
        share = _high_bits(bits, 32).add_(1).to(wide).mul_(2.0**-32)  # above 0, because log(0) is infinite
        angle = bits.bitwise_and_(_mask(32)).to(wide).mul_(2 * math.pi * 2.0**-32)
        return share.log_().mul_(-2).sqrt_().mul_(angle.cos_()).to(dtype)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Return integers from low to high - 1, int64. The deviation from uniform is below (high - low) / 2**63."""
        if high <= low:
            raise ValueError(f"integers(low, high) needs low < high, but got {low} and {high}")
        return _high_bits(self._bits(shape), 63).remainder_(high - low).add_(low)

    def bernoulli(self, p: float | Tensor, *shape: int) -> Tensor:
        """Return booleans that are True with probability p, to within 2**-24.

        p  a number, or a tensor that broadcasts against (*rows, *shape)
        """
        # No shortcut while compiling: p may be a symbol of the graph, and the compiler fuses the conversion to float32
        # anyway.
        rounded = 0.0 if isinstance(p, Tensor) or torch.compiler.is_compiling() else float(np.float32(p))
        if not 0 < rounded < 1:
            return self.uniform(*shape, dtype=torch.float32) < p
        # Same result as `uniform < p` in fewer steps: the highest 24 bits are below a limit exactly if all 64 bits are
        # below the limit followed by 40 zero bits.
        limit = math.ceil(rounded * 2**24) << 40
        # Flipping the highest bit maps the order of unsigned numbers to that of signed ones.
        return self._bits(shape, only_high_bits=True).bitwise_xor_(-(2**63)) <= limit - 1 - 2**63

    def dropout(self, x: Tensor, p: float) -> Tensor:
        """Return x (*rows, ...) with elements zeroed with probability p, and the others divided by 1 - p.

        For training only: `x = noise.dropout(x, 0.1) if self.training else x`.
        """
        if p == 0:
            return x
        noise = self if _replace_keys is None else self._copy_with_keys(_replace_keys(self.keys, x))
        dropped = noise.bernoulli(p, *x.shape[self.keys.dim() :])
        self._next = noise._next
        # Scale before masking: 1 / (1 - p) rounded to bfloat16 would be off by up to 0.4 %.
        return torch.where(dropped, 0.0, x * (1 / (1 - p) if p < 1 else 0.0))

    def rows(self, samples: Tensor, number: int | Tensor = 0) -> SampleNoise:
        """Return draws for parts of samples, with one key per element of `samples`.

        Use it for batches whose rows are not samples, such as several records per sample or several sequences per row.

        samples  int64, any shape: the sample of each part, as its position in the batch
        number   index of the part within its sample; an int, or int64 that broadcasts against `samples`
        """
        part = (
            _to_signed((number + 1) * _GOLDEN % 2**64)
            if isinstance(number, int)
            else (number + 1) * _to_signed(_GOLDEN)
        )
        return SampleNoise(_mix(self.keys[samples] + part))

    def named(self, name: str | int) -> SampleNoise:
        """Return separate draws for the same rows, numbered from 0, and determined by the name.

        Use it for parts of a model, so that the draws of one part do not depend on the number of draws of the others.
        """
        return SampleNoise(_mix(self.keys + _to_signed(_derive_salt(0, str(name)))), self._samples)

    def every(self, n: int) -> Tensor:
        """Return the positions in this batch of every n-th sample of the epoch, int64.

        A sample is selected if its position in the order of the epoch is a multiple of n, so the number of selected
        samples per batch varies by at most one.
        """
        places = () if self._samples is None else self._samples.places
        chosen = [row for row, place in enumerate(places) if place % n == 0]
        return _copy_to_device(torch.tensor(chosen, dtype=torch.int64, device="cpu"), self.keys.device)

    def _copy_with_keys(self, keys: Tensor) -> SampleNoise:
        copy = SampleNoise(keys, self._samples)
        copy._next = self._next
        return copy

    def _bits(self, shape: tuple[int, ...], *, only_high_bits: bool = False) -> Tensor:
        """Return 64 random bits per element, (*rows, *shape) int64; only_high_bits: only the highest 31 are used."""
        number, self._next = _number_draw(self._next)
        keys = self.keys
        if torch.compiler.is_compiling():
            elements = _hash_elements(shape, number, keys.device)
        else:
            elements = _hashed.get(shape, number, keys)
        return _mix(elements ^ keys.view(*keys.shape, *(1,) * len(shape)), only_high_bits=only_high_bits)


def per_sample_noise(batch: Any, name: str = "") -> SampleNoise:
    """Return the random draws for the samples of this batch; call it in `loss`, `evaluate` or in the model.

    Inside a run they depend on seed, epoch and sample index, and on the number of this call in the forward pass.
    They do not depend on micro-batches, accumulation, ranks, shares, retries, recomputed activations, or resuming.
    In an evaluation they depend on seed and index. Each row belongs to a sample, in the order in which
    `collate` received them; for other kinds of rows, see `SampleNoise.rows`.

    Outside a run, and in `predict`, the rows of the first tensor are used as samples, with keys from torch's
    global CPU generator: torch.manual_seed makes them reproducible, and each call draws different numbers.

    batch  the batch, or any tensor on its device
    name   calls are numbered per name. In a model, pass the name of the layer, because a pipeline may run layers in
           different processes, which cannot count calls together
    """
    return _noise_of_batch(batch, name)


def start_pass(samples: BatchSamples | None) -> None:
    """Start a pass over these samples (None: unknown). The previous pass, including backward, must be complete."""
    _numbers.clear()
    _hashed.clear()
    switch_pass(samples)


def switch_pass(samples: BatchSamples | None) -> None:
    """Like `start_pass`, but earlier passes may still have to run backward, as in a pipeline."""
    global _current
    _current = None if samples is None else _Pass(samples)


@contextmanager
def without_samples() -> Iterator[None]:
    """Treat the samples as unknown inside the context; restore the previous pass on exit."""
    global _current
    before, _current = _current, None
    try:
        yield
    finally:
        _current = before


@contextmanager
def replace_dropout_keys(replace: Callable[[Tensor, Tensor], Tensor]) -> Iterator[None]:
    """Within the context, `dropout` of x draws with the keys `replace(keys, x)`, such as fake keys for a fake x."""
    global _replace_keys
    before, _replace_keys = _replace_keys, replace
    try:
        yield
    finally:
        _replace_keys = before


def exclude_from_graphs() -> None:
    """Exclude `per_sample_noise` from torch.compile graphs: it computes keys from Python lists.

    This breaks the graph; the draws themselves are traced. Called only where a model is compiled, because importing
    the compiler takes seconds.
    """
    global _noise_of_batch
    if not getattr(_noise_of_batch, "_torchdynamo_disable", False):
        _noise_of_batch = torch.compiler.disable(_noise_of_batch)  # type: ignore[no-untyped-call]


class _Positions:
    """The position of each sample in the order of its epoch.

    A class, because torch.compile guards on the start and stop of a range, and would recompile for the next
    micro-batch.
    """

    def __init__(self, places: Sequence[int]) -> None:
        self.places = places


class _Pass:
    """One forward pass over known samples."""

    def __init__(self, samples: BatchSamples) -> None:
        self.samples, self.places = samples, _Positions(samples.places)
        self.calls: dict[str, int] = {}  # name -> number of calls
        self._keys: dict[tuple[torch.device, int], Tensor] = {}

    def keys(self, device: torch.device, salt: int) -> Tensor:
        """Return a key per sample, (B,) int64; computed on the host to avoid a device synchronization."""
        if (device, salt) not in self._keys:
            self._keys[device, salt] = _copy_to_device(_mix(self._numbers + _to_signed(salt)), device)
        return self._keys[device, salt]

    @cached_property
    def _numbers(self) -> Tensor:
        seed, epoch, indices, _ = self.samples
        sequence = np.random.SeedSequence(seed, spawn_key=(_STREAM, epoch - EVALUATION))
        base = _to_signed(int(sequence.generate_state(1, np.uint64)[0]))
        return _mix(torch.tensor(indices, dtype=torch.int64, device="cpu") * _to_signed(_GOLDEN) + base)


def _new_noise(batch: Any, name: str) -> SampleNoise:
    tensor: Any = batch
    while not isinstance(tensor, Tensor):
        parts: Iterable[Any] = tensor if isinstance(tensor, (tuple, list)) else ()
        if isinstance(tensor, Mapping):
            parts = tensor.values()
        tensor = next((part for part in parts if isinstance(part, (Tensor, tuple, list, Mapping))), None)
        if tensor is None:
            raise TypeError(f"per_sample_noise(batch) needs a batch with a tensor, but {type(batch).__name__} has none")
    if _current is None:
        (base,) = torch.randint(2**62, (1,), device="cpu")
        numbers = _mix(torch.arange(len(tensor), device="cpu") * _to_signed(_GOLDEN) + base)
        keys = _mix(numbers + _to_signed(_derive_salt(0, name)))
        return SampleNoise(_copy_to_device(keys, tensor.device), _Positions(range(len(tensor))))
    forward_pass, number = _number_call(_current, name)
    return SampleNoise(
        forward_pass.keys(tensor.device, _derive_salt(_derive_salt(0, name), number)), forward_pass.places
    )


def _number_call(current: _Pass, name: str) -> tuple[_Pass, int]:
    number = current.calls.get(name, 0)
    tag = _tag()
    first_call: tuple[_Pass, int] | None = _numbers.get(tag)
    if first_call is not None:  # recomputation in a backward pass
        return first_call
    current.calls[name] = number + 1
    _remember(tag, (current, number))
    return current, number


def _number_draw(following: int) -> tuple[int, int]:
    if torch.compiler.is_compiling():  # compiled graphs handle recomputation themselves
        return following, following + 1
    tag = _tag()
    first_number = _numbers.get(tag)
    if first_number is not None:
        return first_number, following
    _remember(tag, following)
    return following, following + 1


# Activation checkpointing repeats calls of parts of the model in any order and does not identify the repeated
# call. But it restores torch's CPU generator to its state at the first call. So each draw takes a number
# from that generator as its tag: a tag that was seen before marks a repeated draw, which gets the number of the first
# one.
_numbers: OrderedDict[int | None, Any] = OrderedDict()
_MAX_TAGS = 1 << 16  # outside a run, no pass ends, so old tags are dropped


def _tag() -> int | None:
    drawn = torch.randint(2**62, (), device="cpu")
    return int(drawn) if type(drawn) is Tensor else None  # a fake tensor, when memory is predicted


def _remember(tag: int | None, value: Any) -> None:
    if tag is not None:
        _numbers[tag] = value
        if len(_numbers) > _MAX_TAGS:
            _numbers.popitem(last=False)


class _HashedElements:
    """Cache of `_hash_elements`, shared by draws with equal shape and number; the most recently used are kept."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Any, Tensor] = OrderedDict()

    def clear(self) -> None:
        self._kept.clear()

    def get(self, shape: tuple[int, ...], number: int, keys: Tensor) -> Tensor:
        """Return `_hash_elements` for draws with these keys."""
        # Fake tensors of different modes cannot be combined, nor can inference tensors be used outside of inference
        # mode.
        kind = (shape, number, keys.device, getattr(keys, "fake_mode", None), torch.is_inference_mode_enabled())
        elements = self._kept.pop(kind, None)
        if elements is None:
            elements = _hash_elements(shape, number, keys.device)
        if elements.numel() <= _MAX_KEPT_ELEMENTS:
            self._kept[kind] = elements
            while len(self._kept) > _MAX_KEPT or sum(kept.numel() for kept in self._kept.values()) > _MAX_KEPT_ELEMENTS:
                self._kept.popitem(last=False)
        return elements


def _hash_elements(shape: tuple[int, ...], number: int, device: torch.device) -> Tensor:
    """Return a number for each position of a draw, int64 of this shape."""
    elements = torch.zeros((1,) * len(shape), dtype=torch.int64, device=device)
    for axis, size in enumerate(shape):
        # A factor per axis, not a flat index, which would depend on the sizes of later axes.
        along = torch.arange(size, device=device) * _to_signed(_GOLDEN ** (2 * axis + 1) % 2**64)
        elements = elements + along.view(-1, *(1,) * (len(shape) - 1 - axis))
    return _mix(elements + _to_signed(_derive_salt(0, number)))


def _mix(x: Tensor, *, only_high_bits: bool = False) -> Tensor:
    """Mix 64-bit numbers so that each output bit depends on all input bits; int64 represents unsigned 64 bits.

    Operates in place: allocating memory for each step would take longer than the arithmetic.
    only_high_bits: without the last step, which changes only the lowest 33 bits.
    Source: Steele et al., Fast Splittable Pseudorandom Number Generators, OOPSLA 2014; constants are variant 13 of
    Stafford, Better Bit Mixing, 2011.
    """
    x = x.bitwise_xor_(_high_bits(x, 34)).mul_(_to_signed(0xBF58476D1CE4E5B9))
    x = x.bitwise_xor_(_high_bits(x, 37)).mul_(_to_signed(0x94D049BB133111EB))
    return x if only_high_bits else x.bitwise_xor_(_high_bits(x, 33))


def _high_bits(x: Tensor, num_bits: int) -> Tensor:
    """Return the highest bits as a nonnegative number; the mask is needed because torch's shift is arithmetic."""
    return (x >> (64 - num_bits)).bitwise_and_(_mask(num_bits))


def _mask(num_bits: int) -> int:
    return (1 << num_bits) - 1


def _to_signed(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x


def _derive_salt(salt: int, what: str | int) -> int:
    """Derive a salt from a name or number: `_mix` for Python integers, which torch.compile can trace."""
    for part in (what,) if isinstance(what, int) else (-len(what) - 1, *map(ord, what)):
        x = (salt + (part + 1) * _GOLDEN) % 2**64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        salt = x ^ x >> 31
    return salt


def _copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy through page-locked memory: a copy from pageable memory would synchronize."""
    if device.type == "cuda" and type(tensor) is Tensor:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


_MAX_KEPT, _MAX_KEPT_ELEMENTS = 32, 1 << 20  # 8 MiB
_GOLDEN = 0x9E3779B97F4A7C15  # odd; 2**64 divided by the golden ratio
_STREAM = 0x6E6F6973  # separate from the order of the samples and the draws of datasets
_UNIFORM_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
_hashed = _HashedElements()
_current: _Pass | None = None
_replace_keys: Callable[[Tensor, Tensor], Tensor] | None = None
_noise_of_batch = _new_noise
