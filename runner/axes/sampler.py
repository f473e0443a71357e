"""Samplers select the samples of each update, as a function of the seed, the epoch and the position in the epoch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from runner.base.errors import ConfigError, DataError, Problem, TaskFault
from runner.base.order import EvenUpdates, Indices, IntArray, Sampler, order_rng, shuffled_sampler
from runner.base.text import abbreviate
from runner.base.values import PositiveInt

FloatArray = np.ndarray[tuple[int], np.dtype[np.float64]]


@dataclass(frozen=True)
class TrainingSamples:
    """Properties of the training samples that samplers use.

    weights           () -> weight of each sample, (num_samples,)
    lengths           () -> length of each sample, (num_samples,)
    sizes             () -> number of samples of each concatenated dataset
    uses_array_order  the run was started before `KeyedPermutation` existed, so its order is drawn as an array
    """

    num_samples: int
    global_batch_size: int
    drop_last: bool
    weights: Callable[[], FloatArray]
    lengths: Callable[[], IntArray]
    sizes: Callable[[], Sequence[int]]
    uses_array_order: bool = False

    def in_order(
        self, order: Callable[[int, int], IntArray], num_samples: int | None = None, content: Sequence[Any] = ()
    ) -> Sampler:
        """Return a sampler that takes the next `global_batch_size` samples of an order in each update.

        order        (seed, epoch) -> the samples of the epoch, (num_samples,); it must depend on nothing else
        num_samples  samples in an epoch; None: as many as the dataset has
        content      arrays that the order depends on; they must be the same in a resumed run
        Raises TaskFault if the order of an epoch has a different length or contains indices outside of the dataset; the
        order is checked when the epoch is drawn.
        """
        count = self.num_samples if num_samples is None else num_samples

        def checked(seed: int, epoch: int) -> IntArray:
            return _check_order(order(seed, epoch), count, self.num_samples, epoch)

        return self.in_numbered_order(checked, count, content)

    def in_numbered_order(
        self, order: Callable[[int, int], IntArray], count: int, content: Sequence[Any] = ()
    ) -> Sampler:
        """Like `in_order`, but unchecked; the order already adds `self.num_samples` for each repetition of a sample."""
        sampler = EvenUpdates(count, self.global_batch_size, order, drop_last=self.drop_last)
        sampler.content = _hash(*content) if len(content) else ""
        return sampler


def shuffle(samples: TrainingSamples) -> Sampler:
    """Draw each sample once per epoch, in random order."""
    return shuffled_sampler(
        samples.num_samples,
        samples.global_batch_size,
        drop_last=samples.drop_last,
        uses_array_order=samples.uses_array_order,
    )


def sequential(samples: TrainingSamples) -> Sampler:
    """Draw each sample once per epoch, in the order of the dataset."""
    order: IntArray = np.arange(samples.num_samples)
    return samples.in_order(lambda seed, epoch: order)


def weighted(samples: TrainingSamples, *, replacement: bool = True, num_samples: PositiveInt | None = None) -> Sampler:
    """Draw samples with probabilities proportional to the task's `sample_weights`.

    replacement  allow a sample to be drawn more than once in an epoch
    num_samples  samples drawn in an epoch; null: as many as the dataset has
    Source: Efraimidis and Spirakis, Weighted random sampling with a reservoir, 2006 (without replacement).
    """
    weights = samples.weights()
    if not (np.isfinite(weights).all() and (weights >= 0).all() and weights.any()):
        raise DataError(
            "the weights of samples must be finite, at least 0, and not all 0",
            where="sample_weights",
            fix="return one weight per sample, such as 1 / (number of samples of its class)",
        )
    count, size = num_samples or samples.num_samples, samples.num_samples
    if not replacement and count > np.count_nonzero(weights):
        what = f"cannot draw {count:,} different samples: only {np.count_nonzero(weights):,} have a weight above 0"
        raise _option_error("replacement=false", what, f"use sampler.num_samples={np.count_nonzero(weights)}")
    bounds, last = np.cumsum(weights / weights.sum()), int(np.flatnonzero(weights)[-1])

    def draw_epoch(seed: int, epoch: int) -> IntArray:
        rng = order_rng(seed, epoch)
        if replacement:
            numbers = np.sort(rng.random(count)) * bounds[-1]  # sorting makes the look-up ten times as fast
            indices = np.searchsorted(bounds, numbers, side="right")
            # A number may be rounded up to the last bound.
            return rng.permutation(_offset_repeats(np.minimum(indices, last), size))
        with np.errstate(divide="ignore"):
            # Samples in the order of independent exponential arrival times.
            times = rng.exponential(size=size) / weights
        return np.argsort(times, kind="stable")[:count]

    return samples.in_numbered_order(draw_epoch, count, [weights])


def mixture(
    samples: TrainingSamples,
    *,
    weights: list[float] = [],  # noqa: B006 - read as schema
    num_samples: PositiveInt | None = None,
) -> Sampler:
    """Draw from several datasets with weights. The task's `dataset` returns a `torch.utils.data.ConcatDataset` of them.

    Each dataset is shuffled and read completely before its samples are repeated. The proportions in each update match
    the weights to within a few samples.

    weights      weight of each dataset, e.g. [0.7, 0.3]; []: the same for all
    num_samples  samples drawn in an epoch; null: as many as the datasets have
    """
    sizes = samples.sizes()
    shares = np.asarray(weights or [1.0] * len(sizes), dtype=np.float64)
    if len(shares) != len(sizes):
        what = f"has {len(shares)} weights, but the training data consists of {len(sizes)} datasets"
        raise _option_error(f"weights={weights}", what, "give one weight per dataset")
    if not (np.isfinite(shares).all() and (shares >= 0).all() and shares.any()):
        raise _option_error(f"weights={weights}", "weights must be finite and >= 0, not all 0", "use e.g. [0.7, 0.3]")
    empty = [number for number, size in enumerate(sizes) if not size and shares[number] > 0]
    if empty:
        raise DataError(
            f"the mixture contains empty datasets, at indices {abbreviate(empty)}",
            where="sampler=mixture",
            fix="remove them from the ConcatDataset, or set their sampler.weights to 0",
        )
    shares = shares / shares.sum()
    count, starts = num_samples or samples.num_samples, np.cumsum([0, *sizes[:-1]])
    per_epoch = _quotas(shares, count)
    unused = [number for number, quota in enumerate(per_epoch.tolist()) if not quota and shares[number] > 0]
    if unused:  # unused in every epoch, because each draws the same number of samples from a dataset
        what = f"an epoch of {count:,} samples contains no sample of the datasets at indices {abbreviate(unused)}"
        needed = int(np.ceil(1 / shares[unused].min()))
        fix = f"use sampler.num_samples={needed} or more, or larger weights"
        raise _option_error(f"weights={weights}", what, fix)

    def draw_epoch(seed: int, epoch: int) -> IntArray:
        rng = order_rng(seed, epoch)
        parts, times = [], []
        for source, number in enumerate(per_epoch.tolist()):
            draws = range(epoch * number, (epoch + 1) * number)
            parts.append(_draw_passes(seed, source, sizes[source], draws, samples.num_samples) + starts[source])
            times.append((np.arange(number) + rng.random(number)) / max(number, 1))
        order = np.argsort(np.concatenate(times), kind="stable")
        return np.concatenate(parts)[order]

    return samples.in_numbered_order(draw_epoch, count, [np.asarray(sizes), shares])


def length_buckets(samples: TrainingSamples, *, bucket: PositiveInt = 8) -> Sampler:
    """Put samples of similar length, as returned by the task's `sample_lengths`, into the same update.

    Each sample is drawn once per epoch. The updates come in random order.

    bucket  lengths are rounded up to a multiple of this; samples of the same rounded length are shuffled
    """
    size, batch = samples.num_samples, samples.global_batch_size
    rounded = _round_lengths(samples.lengths(), bucket)

    def draw_epoch(seed: int, epoch: int) -> IntArray:
        rng = order_rng(seed, epoch)
        order = np.lexsort((rng.random(size), rounded))  # the last key is the primary one
        num_full, rest = divmod(size, batch)
        starts = np.arange(num_full) * batch
        if rest:  # cut the incomplete update at a random place, or drop_last would always drop the longest samples
            cut = int(rng.integers(num_full + 1))
            starts[cut:] += rest
            last = order[cut * batch : cut * batch + rest]
        else:
            last = order[:0]
        rows = rng.permutation(starts)[:, None] + np.arange(batch)
        return np.concatenate([order[rows.reshape(-1)], last])

    return samples.in_order(draw_epoch, content=[rounded])


def token_budget(
    samples: TrainingSamples,
    *,
    tokens: PositiveInt = 4096,
    micro_tokens: PositiveInt | None = None,
    bucket: PositiveInt = 8,
) -> Sampler:
    """Put samples of similar length into each update, at most `tokens` tokens and `global_batch_size` samples.

    Padding counts: an update has (longest length) x (number of samples) tokens. Each sample is drawn once per epoch.
    The task returns the lengths from `sample_lengths`.

    tokens        maximum number of tokens in an update, including padding
    micro_tokens  maximum number of tokens in a micro-batch; null: only micro_batch_size limits it
    bucket        lengths are rounded up to a multiple of this; samples of the same rounded length are shuffled
    """
    if samples.drop_last:
        raise ConfigError(
            Problem(
                "is not supported with a token budget, which has no incomplete updates",
                "dataloader.drop_last=true",
                "use dataloader.drop_last=false",
            )
        )
    if micro_tokens is not None and micro_tokens > tokens:
        raise _option_error(
            f"micro_tokens={micro_tokens}",
            f"must be at most sampler.tokens={tokens}",
            f"use sampler.micro_tokens={tokens} or less",
        )
    lengths = samples.lengths()
    for limit, key in ((tokens, "tokens"), (micro_tokens or tokens, "micro_tokens")):
        if lengths.max() > limit:
            longer = np.flatnonzero(lengths > limit).tolist()
            raise DataError(
                f"samples longer than {limit} tokens: {len(longer)} ({abbreviate(longer)})",
                where=f"sampler.{key}={limit}",
                fix=f"use sampler.{key}={int(lengths.max())} or more, or truncate the samples",
            )
    return TokenBudget(lengths, samples.global_batch_size, tokens, micro_tokens, bucket)


class TokenBudget(Sampler):
    """Updates whose number of samples varies; each epoch has updates of the same sizes, in a different order.

    The samples, sorted by rounded length, are divided into updates once. In each epoch, samples of the same rounded
    length exchange positions at random, so no update exceeds the budget, and all epochs have equally many updates.
    """

    def __init__(self, lengths: IntArray, max_samples: int, tokens: int, micro_tokens: int | None, bucket: int) -> None:
        self._lengths, self._micro_tokens = lengths, micro_tokens
        self._round_lengths = np.minimum(_round_lengths(lengths, bucket), tokens)
        self._cuts = np.asarray(_cuts(np.sort(self._round_lengths).tolist(), max_samples, tokens))
        self.num_samples, self.updates_per_epoch = len(lengths), len(self._cuts) - 1
        self.content = _hash(self._round_lengths)
        self._epoch = lru_cache(maxsize=2)(self._draw_epoch)

    def start(self, seed: int, epoch: int, window: int) -> int:
        return int(self._epoch(seed, epoch)[1][window])

    def draw(self, seed: int, epoch: int, window: int) -> Indices:
        order, starts = self._epoch(seed, epoch)
        indices: Indices = order[starts[window] : starts[window + 1]].tolist()
        return indices

    def split(self, indices: Indices, size: int) -> list[Indices]:
        if self._micro_tokens is None:
            return super().split(indices, size)
        cuts = _cuts([int(self._lengths[index]) for index in indices], size, self._micro_tokens)
        return [indices[first:stop] for first, stop in pairwise(cuts)]

    def _draw_epoch(self, seed: int, epoch: int) -> tuple[IntArray, IntArray]:
        """Return the samples of an epoch, and the start of each update among them."""
        rng = order_rng(seed, epoch)
        order = np.lexsort((rng.random(self.num_samples), self._round_lengths))
        chosen = rng.permutation(self.updates_per_epoch)
        firsts, sizes = self._cuts[:-1][chosen], np.diff(self._cuts)[chosen]
        starts = np.concatenate([[0], np.cumsum(sizes)])
        return order[np.repeat(firsts - starts[:-1], sizes) + np.arange(self.num_samples)], starts


def _cuts(lengths: Sequence[int], max_samples: int, tokens: int) -> list[int]:
    """Return the bounds of consecutive batches that are as long as both limits allow."""
    cuts, longest = [0], 0
    for place, length in enumerate(lengths):
        longest = max(longest, length)
        count = place + 1 - cuts[-1]
        if count > 1 and (count > max_samples or count * longest > tokens):
            cuts.append(place)
            longest = length
    return [*cuts, len(lengths)] if lengths else [0]


def _hash(*content: np.ndarray[Any, Any]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for array in content:
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _check_order(order: Any, count: int, size: int, epoch: int) -> IntArray:
    """Return the order of an epoch as an array in which each repetition of a sample has `size` added."""
    indices: Any = np.asarray(order)
    fix = "return the indices of all samples of an epoch: samples.in_order(f, num_samples=N) with f(seed, epoch)"
    if indices.shape != (count,) or (count and indices.dtype.kind not in "iu"):
        found = f"shape {indices.shape} and type {indices.dtype}"
        what = f"the order of epoch {epoch} must be {count:,} integers, but has {found}"
        raise TaskFault(what, where="samples.in_order", fix=fix)
    if count and not 0 <= indices.min() <= indices.max() < size:
        what = (
            f"the order of epoch {epoch} contains {indices.min():,} to {indices.max():,}, outside of 0 to {size - 1:,}"
        )
        raise TaskFault(what, where="samples.in_order", fix="return indices of training samples")
    drawn: IntArray = indices.astype(np.int64)
    if not count or np.bincount(drawn).max() == 1:  # counting is much faster than sorting
        return drawn
    places = np.argsort(drawn, kind="stable")
    drawn[places] = _offset_repeats(drawn[places], size)
    return drawn


def _offset_repeats(drawn: IntArray, size: int) -> IntArray:
    """Add `size` to the second draw of a sample, 2 * `size` to the third and so on.

    Each draw of a sample then seeds different random numbers.

    drawn  indices of the drawn samples, sorted
    """
    places = np.arange(len(drawn))
    is_first = np.concatenate([[True], drawn[1:] != drawn[:-1]])
    return drawn + (places - np.maximum.accumulate(np.where(is_first, places, 0))) * size


def _draw_passes(seed: int, source: int, size: int, draws: range, offset: int) -> IntArray:
    """Return these draws from a dataset of `size` samples, which is shuffled in each pass.

    offset  added once in the second pass, twice in the third and so on, so that each repetition of a sample seeds
            different random numbers
    """
    if not draws:
        return np.arange(0)
    begin, end = draws.start // size, -(-draws.stop // size)
    shuffles = [
        order_rng(seed, _MIXTURE_STREAM, source, number).permutation(size) + (number - begin) * offset
        for number in range(begin, end)
    ]
    return np.concatenate(shuffles)[draws.start - begin * size :][: len(draws)]


def _quotas(shares: FloatArray, count: int) -> IntArray:
    """Return how many of `count` draws each dataset gets, by largest remainders."""
    quotas = np.floor(shares * count).astype(np.int64)
    rest = count - int(quotas.sum())
    quotas[np.argsort(quotas - shares * count, kind="stable")[:rest]] += 1
    return quotas


def _round_lengths(lengths: IntArray, bucket: int) -> IntArray:
    if not len(lengths) or lengths.min() < 1:
        empty = np.flatnonzero(lengths < 1).tolist()
        raise DataError(
            f"samples must have at least 1 token, but these have none: {abbreviate(empty)}",
            where="sample_lengths",
            fix="return the number of tokens of each sample, and remove empty samples from the dataset",
        )
    return -(-lengths // bucket) * bucket


def _option_error(key: str, what: str, fix: str) -> ConfigError:
    return ConfigError(Problem(what, f"sampler.{key}", fix))


_MIXTURE_STREAM = 0x6D697874  # random stream of the mixture sampler, separate from the orders of epochs
SAMPLERS: Mapping[str, Callable[..., Sampler]] = {
    "shuffle": shuffle,
    "sequential": sequential,
    "weighted": weighted,
    "mixture": mixture,
    "length_buckets": length_buckets,
    "token_budget": token_budget,
}
