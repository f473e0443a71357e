"""Random draws for the samples of a batch: a function of (seed, epoch, sample index), not of how an update is cut.

A generator gives the next number to whoever asks next, so its draws depend on micro-batches, ranks and retries. Here a
number is the hash of what it is for: which sample, which draw of the forward pass, which element. Keys, one for each
sample, hash seed, epoch, index and the names of calls. What differs between batches or between layers that share their
code is in these tensors and in no Python number, because torch.compile would compile again for each value of a number.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.base.batch import Samples

EVALUATION = -1  # in place of an epoch: draws of an evaluation are always the same, and not those of training


class SampleNoise:
    """Draws for samples: each returns a tensor (*rows, *shape), whose part for a row depends on that row's key alone.

    Every draw has a number, from 0, so two draws of the same shape differ. An element depends on its position, not on
    the shape around it: draws for padded sequences agree where both have an element.
    Integers, booleans and uniform numbers are the same bits on every device; normal ones agree up to rounding.

    keys     (*rows) int64; usually one for each sample of the batch
    samples  what `every` chooses from
    """

    def __init__(self, keys: Tensor, samples: _Places | None = None) -> None:
        self.keys, self._samples = keys, samples
        self._next = 0

    def uniform(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return numbers from [0, 1), as fine as torch.rand's; float64 by 53 bits, float32 by the first 24 of them."""
        dtype = dtype or torch.get_default_dtype()
        num_bits = _UNIFORM_BITS[dtype]
        return _high(self._bits(shape), num_bits).to(dtype).mul_(2.0**-num_bits)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return numbers from N(0, 1), up to 6.7 in size; computed in float64 where the device has it, then rounded.

        Source: Box and Muller, A Note on the Generation of Random Normal Deviates, 1958, with 32 bits for each of two
        uniform numbers.
        """
        dtype = dtype or torch.get_default_dtype()
        wide = torch.float32 if self.keys.device.type == "mps" else torch.float64
        bits = self._bits(shape)
        share = _high(bits, 32).add_(1).to(wide).mul_(2.0**-32)  # above 0, whose logarithm is infinite
        angle = bits.bitwise_and_(_mask(32)).to(wide).mul_(2 * math.pi * 2.0**-32)
        return share.log_().mul_(-2).sqrt_().mul_(angle.cos_()).to(dtype)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Return whole numbers from low to high - 1, int64. The deviation from even is below (high - low) / 2**63."""
        if high <= low:
            raise ValueError(f"integers(low, high) needs low < high, but is given {low} and {high}")
        return _high(self._bits(shape), 63).remainder_(high - low).add_(low)

    def bernoulli(self, p: float | Tensor, *shape: int) -> Tensor:
        """Return booleans that are True with probability p, to within 2**-24.

        p  a number, or a tensor that broadcasts against (*rows, *shape)
        """
        return self.uniform(*shape, dtype=torch.float32) < p

    def dropout(self, x: Tensor, p: float) -> Tensor:
        """Return x (*rows, ...) with elements zeroed with probability p, the others divided by 1 - p; for training.

        Call it only in training: `x = noise.dropout(x, 0.1) if self.training else x`.
        """
        if p == 0:
            return x
        dropped = self.bernoulli(p, *x.shape[self.keys.dim() :])
        # Scaled before it is masked: 1 / (1 - p) rounded to bfloat16 would be off by up to 0.4 %.
        return torch.where(dropped, 0.0, x * (1 / (1 - p) if p < 1 else 0.0))

    def rows(self, samples: Tensor, number: int | Tensor = 0) -> SampleNoise:
        """Return draws for parts of samples, with a key for each element of `samples`.

        For batches whose rows are not samples: several records of a sample, several sequences in a row.

        samples  int64, of any shape: which sample of the batch each part belongs to, by its place in the batch
        number   which part of that sample it is; an int, or int64 that broadcasts against `samples`
        """
        part = _signed((number + 1) * _GOLDEN % 2**64) if isinstance(number, int) else (number + 1) * _signed(_GOLDEN)
        return SampleNoise(_mixed(self.keys[samples] + part))

    def named(self, name: str | int) -> SampleNoise:
        """Return other draws for the same rows, numbered from 0 again, the same for the same name.

        For parts of a model: what one part draws does not depend on how often others drew.
        """
        return SampleNoise(_mixed(self.keys + _signed(_salt(0, str(name)))), self._samples)

    def every(self, n: int) -> Tensor:
        """Return which samples of the batch are an n-th of their epoch: int64, by their place in the batch.

        Those whose place in the order of the epoch is a multiple of n. Their number in a batch is a constant up to one.
        """
        places = () if self._samples is None else self._samples.places
        chosen = [row for row, place in enumerate(places) if place % n == 0]
        return _on_device(torch.tensor(chosen, dtype=torch.int64, device="cpu"), self.keys.device)

    def _bits(self, shape: tuple[int, ...]) -> Tensor:
        """Return 64 random bits for each element, (*rows, *shape) int64."""
        number, self._next = _numbered(self._next)
        device, keys = self.keys.device, self.keys
        element = torch.zeros((1,) * len(shape), dtype=torch.int64, device=device)
        for axis, size in enumerate(shape):
            # A factor for each axis, not a running number: it would depend on the sizes of the axes behind.
            along = torch.arange(size, device=device) * _signed(_GOLDEN ** (2 * axis + 1) % 2**64)
            element = element + along.view(-1, *(1,) * (len(shape) - 1 - axis))
        element = _mixed(element + _signed(_salt(0, number)))
        return _mixed(element ^ keys.view(*keys.shape, *(1,) * len(shape)))


def per_sample_noise(batch: Any, name: str = "") -> SampleNoise:
    """Return the random draws for the samples of this batch; call it in `loss`, `evaluate` or in the model.

    Inside of a run they depend on seed, epoch and sample index, and on the number of this call in the forward pass.
    They do not depend on micro-batches, accumulation, ranks, shares, retries, recomputed activations, or on whether the
    run was resumed. In an evaluation they depend on seed and index. A row belongs to a sample, in the order in which
    `collate` was given them; where rows are other things, see `SampleNoise.rows`.

    Outside of a run, and in `predict`, the rows of the first tensor are taken for samples, and keys come from torch's
    global generator on the CPU: torch.manual_seed repeats them, and each call draws others.

    batch  the batch, or any tensor on its device
    name   calls are numbered by name. Inside of the model: the name of the layer, because a pipeline may run layers in
           different processes, whose calls cannot be counted together
    """
    return _made(batch, name)


def start_pass(samples: Samples | None) -> None:
    """Draws are for these samples from now on, None: for no known ones. The pass before is over, backward included."""
    _numbers.clear()
    switch_pass(samples)


def switch_pass(samples: Samples | None) -> None:
    """As `start_pass`, but backward passes of earlier ones are yet to come, as in a pipeline."""
    global _current
    _current = None if samples is None else _Pass(samples)


@contextmanager
def no_pass() -> Iterator[None]:
    """Draws within are for no known samples; afterwards for those of before."""
    global _current
    before, _current = _current, None
    try:
        yield
    finally:
        _current = before


def keep_out_of_graphs() -> None:
    """Let torch.compile call `per_sample_noise` instead of tracing it: its keys come from lists of numbers.

    A graph is interrupted there; the draws themselves are traced. Called where a model is compiled, because loading
    the compiler takes seconds.
    """
    global _made
    if not getattr(_made, "_torchdynamo_disable", False):
        _made = torch.compiler.disable(_made)  # type: ignore[no-untyped-call]


class _Places:
    """The place of each sample in the order of its epoch.

    An object, because torch.compile guards a range by its ends and would compile again for the next micro-batch.
    """

    def __init__(self, places: Sequence[int]) -> None:
        self.places = places


class _Pass:
    """One forward pass over known samples."""

    def __init__(self, samples: Samples) -> None:
        self.samples, self.places = samples, _Places(samples.places)
        self.calls: dict[str, int] = {}  # by name
        self._keys: dict[tuple[torch.device, int], Tensor] = {}

    def keys(self, device: torch.device, salt: int) -> Tensor:
        """Return a key for each sample, (B,) int64; computed on the host, so that the device is not waited for."""
        if (device, salt) not in self._keys:
            self._keys[device, salt] = _on_device(_mixed(self._numbers + _signed(salt)), device)
        return self._keys[device, salt]

    @cached_property
    def _numbers(self) -> Tensor:
        seed, epoch, indices, _ = self.samples
        sequence = np.random.SeedSequence(seed, spawn_key=(_KIND, epoch - EVALUATION))
        base = _signed(int(sequence.generate_state(1, np.uint64)[0]))
        return _mixed(torch.tensor(indices, dtype=torch.int64, device="cpu") * _signed(_GOLDEN) + base)


def _draws_of(batch: Any, name: str) -> SampleNoise:
    like = _first_tensor(batch)
    if _current is None:
        (base,) = torch.randint(2**62, (1,), device="cpu")
        numbers = _mixed(torch.arange(len(like), device="cpu") * _signed(_GOLDEN) + base)
        keys = _mixed(numbers + _signed(_salt(0, name)))
        return SampleNoise(_on_device(keys, like.device), _Places(range(len(like))))
    now, number = _call(_current, name)
    return SampleNoise(now.keys(like.device, _salt(_salt(0, name), number)), now.places)


def _call(now: _Pass, name: str) -> tuple[_Pass, int]:
    """Return the pass that this call belongs to, and the number of the call."""
    number = now.calls.get(name, 0)
    tag = _tag()
    known: tuple[_Pass, int] | None = _numbers.get(tag)
    if known is not None:  # computed again for a backward pass
        return known
    now.calls[name] = number + 1
    _remember(tag, (now, number))
    return now, number


def _numbered(following: int) -> tuple[int, int]:
    """Return the number of a draw, and that of the one after it, where `following` would be next."""
    if torch.compiler.is_compiling():  # a graph computes activations again by itself
        return following, following + 1
    tag = _tag()
    known = _numbers.get(tag)
    if known is not None:
        return known, following
    _remember(tag, following)
    return following, following + 1


# Activation checkpointing calls a part of the model again, in any order, and nothing tells that part which call it
# repeats. But it puts torch's generator of the CPU back to where it was at the first call. So each draw takes a number
# from that generator as its tag: a tag that was seen before is a repeated draw, and has the number of the first one.
_numbers: OrderedDict[int | None, Any] = OrderedDict()
_MOST_TAGS = 1 << 16  # outside of a run nothing tells when a pass is over


def _tag() -> int | None:
    drawn = torch.randint(2**62, (), device="cpu")
    return int(drawn) if type(drawn) is Tensor else None  # a tensor without content, where memory is predicted


def _remember(tag: int | None, value: Any) -> None:
    if tag is not None:
        _numbers[tag] = value
        if len(_numbers) > _MOST_TAGS:
            _numbers.popitem(last=False)


def _mixed(x: Tensor) -> Tensor:
    """Return 64-bit numbers of which each bit depends on all bits of x; int64 stands for 64 bits without a sign.

    In the memory of x: new memory for each step would take longer than the arithmetic.
    Source: Steele et al., Fast Splittable Pseudorandom Number Generators, OOPSLA 2014; constants are variant 13 of
    Stafford, Better Bit Mixing, 2011.
    """
    x = x.bitwise_xor_(_high(x, 34)).mul_(_signed(0xBF58476D1CE4E5B9))
    x = x.bitwise_xor_(_high(x, 37)).mul_(_signed(0x94D049BB133111EB))
    return x.bitwise_xor_(_high(x, 33))


def _high(x: Tensor, num_bits: int) -> Tensor:
    """Return the highest bits as a number that is not negative; torch's shift repeats the sign."""
    return (x >> (64 - num_bits)).bitwise_and_(_mask(num_bits))


def _mask(num_bits: int) -> int:
    return (1 << num_bits) - 1


def _signed(x: int) -> int:
    """Return the int64 with the same 64 bits."""
    return x - 2**64 if x >= 2**63 else x


def _salt(salt: int, what: str | int) -> int:
    """Return another salt for each name and number: `_mixed` for Python's integers, which torch.compile can follow."""
    for part in (what,) if isinstance(what, int) else (-len(what) - 1, *map(ord, what)):
        x = (salt + (part + 1) * _GOLDEN) % 2**64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        salt = x ^ x >> 31
    return salt


def _on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy from page-locked memory: from other memory the host would wait for the device."""
    if device.type == "cuda" and type(tensor) is Tensor:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _first_tensor(batch: Any) -> Tensor:
    found = batch
    while not isinstance(found, Tensor):
        values = found.values() if isinstance(found, Mapping) else found if isinstance(found, (tuple, list)) else ()
        found = next((value for value in values if isinstance(value, (Tensor, tuple, list, Mapping))), None)
        if found is None:
            raise TypeError(
                f"per_sample_noise(batch) needs a batch that holds a tensor, but {type(batch).__name__} holds none"
            )
    return found


_GOLDEN = 0x9E3779B97F4A7C15  # odd; 2**64 divided by the golden ratio
_KIND = 0x6E6F6973  # apart from the order of the samples, and from what data sets draw
_UNIFORM_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
_current: _Pass | None = None
_made = _draws_of
