"""Check a stream, and save and restore the position in each shard."""

from __future__ import annotations

import itertools
from typing import Any

from runner.base.batch import ShardMark
from runner.base.text import format_duration
from runner.engine.hooks.hook import Hook, PhaseView
from runner.engine.stream_check import StreamCheck, check_stream, raise_if_invalid
from runner.engine.stream_reader import StreamFetcher
from runner.engine.train_order import describe_reading
from runner.engine.watchdog import DATA


class StreamPosition(Hook):
    """Tracks how far the completed updates have read the shards of a stream; inactive for other data sets.

    A checkpoint has the position of the rank that is furthest in each shard, because any rank may read it after a
    resume.
    """

    name = "stream"

    def __init__(self, phase: PhaseView) -> None:
        super().__init__(phase)
        self._marks: dict[int, ShardMark] = {}
        self._printed_notes: set[str] = set()
        self._is_replayed = False  # the stream has no state, or its state does not restore the position

    @property
    def _fetcher(self) -> StreamFetcher | None:
        fetcher = self.phase.loader.fetcher
        return fetcher if isinstance(fetcher, StreamFetcher) else None

    def seek(self) -> None:
        """Make the loader start after the samples of the completed updates."""
        if self._fetcher is not None:
            self._fetcher.dataset.start_from(self._marks)

    def begin(self) -> None:
        fetcher = self._fetcher
        if fetcher is None or self.phase.is_over:
            return
        for text in describe_reading(self.phase.order, fetcher.dataset, self.phase.parts.plan):
            self.phase.run.observers.screen.info(text)
        if self._marks:
            self._report_replay()
        elif self.phase.run.provenance.is_compared and self.phase.start is None:
            self._check_stream(fetcher)

    def after_update(self, step: Any) -> None:
        feed = self.phase.feed
        if not feed.marks:
            return
        self._marks.update(feed.marks)
        for note in {mark.note for mark in feed.marks.values()} - self._printed_notes - {""}:
            self._printed_notes.add(note)
            self.phase.run.observers.screen.warn(note)
        feed.marks = {}

    def state_dict(self) -> dict[str, Any] | None:
        if self._fetcher is None:
            return None
        furthest: dict[int, list[Any]] = {}
        marks = [[shard, *mark._replace(note="")] for shard, mark in self._marks.items()]
        for shard, *mark in itertools.chain.from_iterable(self.phase.parts.world.gather(marks)):
            furthest[shard] = max(furthest.get(shard, mark), mark, key=_mark_order)
        return {"shards": [[shard, *mark] for shard, mark in furthest.items()], "replays": self._is_replayed}

    def load_state_dict(self, state: Any) -> None:
        if not state:
            return
        self._is_replayed = bool(state["replays"])
        for shard, *values in state["shards"]:
            mark = ShardMark(*values)
            self._marks[int(shard)] = mark._replace(state=None) if self._is_replayed else mark

    def _check_stream(self, fetcher: StreamFetcher) -> None:
        phase, world = self.phase, self.phase.parts.world
        verdict_fields: list[Any] | None = None
        if world.is_first:
            phase.progress_mark.now = (DATA, phase.position.update + 1)
            verdict_fields = [*check_stream(fetcher, phase.loader)]
        result = StreamCheck(*world.broadcast(verdict_fields))
        raise_if_invalid(result, fetcher.dataset.source.num_shards)
        self._is_replayed = bool(result.restore_error)
        if result.restore_error:
            phase.run.observers.screen.warn(
                f"{result.restore_error}: a resumed run reads the stream from its beginning to where it was"
            )

    def _report_replay(self) -> None:
        """Print how many samples are read again."""
        replayed = [mark for mark in self._marks.values() if mark.state is None]
        samples = sum(mark.item - mark.passed for mark in replayed)
        if samples:
            seconds = sum((mark.item - mark.passed) * mark.sample_s for mark in replayed)
            reason = "its state cannot be used" if self._is_replayed else "it has no state_dict"
            self.phase.run.observers.screen.info(
                f"the stream is read from its beginning to where it was, because {reason}:"
                f" {samples:,} samples, about {format_duration(seconds)} if one process reads them"
            )


def _mark_order(mark: list[Any]) -> tuple[int, int]:
    """Return the sort key of the fields of a mark: epoch and item."""
    return int(mark[1]), int(mark[0])
