"""Run wandb or TensorBoard in a separate process, so that training neither waits for it nor fails with it.

runner.trackers.tracker starts this file as a script with the file descriptor of a socket. Requests and responses are
lines of JSON: the first request opens a sink, further ones log rows, and the last one finishes. This file imports
nothing from the runner.
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import io
import itertools
import json
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

Row = Mapping[str, Any]


class Sink(Protocol):
    """Destination of rows. `opened`, its folder and URL, is sent to the run."""

    opened: dict[str, Any]

    def log(self, row: Row) -> None:
        """Log one row."""

    def finish(self, exit_code: int) -> None:
        """Store or upload all remaining rows."""

    def close(self) -> None:
        """Stop helper processes."""


class Wandb:
    """A new or resumed wandb run; rows that it already has are not logged again."""

    def __init__(self, *, mode: str, init_timeout_s: float, run_dir: str, **options: Any) -> None:
        import wandb  # noqa: TID251 - the other half of runner/trackers/tracker.py

        settings: dict[str, Any] = {
            "console": "off",
            "silent": True,
            "quiet": True,
            "show_info": False,
            "disable_git": True,
            "disable_code": True,
            "x_disable_stats": True,  # the runner's own monitor measures the machine
            "x_disable_meta": True,  # do not upload the command line and the program's path
            "x_save_requirements": False,
            "symlink": False,
            "x_disable_machine_info": True,
            "x_transaction_log_flush_interval": 1.0,  # default 15 s, which a SIGKILL would lose
            "init_timeout": init_timeout_s,
            "stop_fn": lambda: None,  # the stop button in the browser must not end the training
        }
        known = getattr(wandb.Settings, "model_fields", {})  # older versions refuse unknown settings
        # Offline, only the earlier folders of this run show which rows it already has.
        last_stored_step = _last_step(Path(run_dir), options["id"]) if mode == "offline" else -1
        self._run = wandb.init(
            mode=mode,  # type: ignore[arg-type]  # checked where the option is declared
            dir=run_dir,
            resume="allow",
            settings=wandb.Settings(**{name: value for name, value in settings.items() if name in known}),
            **options,
        )
        self._run.define_metric("update")
        self._run.define_metric("*", step_metric="update")
        self._first = max(last_stored_step + 1, self._run.starting_step)
        self._phase: Any = None
        self._base = 0  # added to `update`: a phase that counts from 0 again continues after the previous one
        self._step = 0
        url = self._run.url if mode == "online" else None  # offline, wandb would print a warning
        self.opened: dict[str, Any] = {"folder": self._run.settings.sync_dir, "url": url}

    def log(self, row: Row) -> None:
        update = row.get("update")
        if isinstance(update, int):
            if row.get("phase") != self._phase and self._base + update < self._step:
                self._base = self._step + 1
            self._phase = row.get("phase")
            self._step = max(self._base + update, self._step)  # wandb drops decreasing steps
        if self._step >= self._first:
            values = {name: wandb_value(value) for name, value in row.items() if value is not None}
            self._run.log(values, step=self._step)

    def finish(self, exit_code: int) -> None:
        self._run.finish(exit_code=exit_code)

    def close(self) -> None:
        # Waits for its service process, so that no zombie remains in a container.
        importlib.import_module("wandb").teardown()


def wandb_value(value: Any) -> Any:
    """Return what wandb logs for a value of a row; runner/engine/evaluation/media.py encodes images and histograms."""
    import wandb  # noqa: TID251 - as above

    if not isinstance(value, dict):
        return value
    if value["kind"] == "images":
        opened = importlib.import_module("PIL.Image").open
        return [wandb.Image(opened(io.BytesIO(base64.b64decode(image)))) for image in value["png"]]
    if value["kind"] == "histogram":
        return wandb.Histogram(np_histogram=(value["counts"], value["edges"]))
    return value["text"]


class TensorBoard:
    """Event files in `run_dir`/tensorboard, written without TensorFlow and without torch."""

    def __init__(self, *, run_dir: str, flush_s: float) -> None:
        folder = Path(run_dir) / "tensorboard"
        writer = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self._events = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summaries = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        self._resumed = folder.is_dir() and any(folder.iterdir())
        self._writer = writer.EventFileWriter(str(folder), flush_secs=flush_s)
        self.opened: dict[str, Any] = {"folder": str(folder), "url": None}

    def log(self, row: Row) -> None:
        step = row.get("update")
        if not isinstance(step, int):
            return
        if self._resumed:  # TensorBoard ignores rows of earlier files from this step on, so nothing appears twice
            session_start = self._events.SessionLog(status=self._events.SessionLog.START)
            self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, session_log=session_start))
            self._resumed = False
        values = [
            self._summaries.Summary.Value(tag=name, simple_value=value)
            for name, value in row.items()
            if isinstance(value, (int, float)) and name != "update"
        ]
        values += [
            media for name, value in row.items() if isinstance(value, dict) for media in self._media(name, value)
        ]
        summary = self._summaries.Summary(value=values)
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, summary=summary))

    def _media(self, name: str, value: Mapping[str, Any]) -> Iterator[Any]:
        """Yield the values of a summary for images, a text or a histogram."""
        make = self._summaries.Summary.Value
        for number, image in enumerate(value.get("png", ())):
            data = base64.b64decode(image)
            width, height = struct.unpack(">II", data[16:24])  # of the PNG header
            content = {"height": height, "width": width, "colorspace": 3 if data[25] else 1}
            yield make(
                tag=f"{name}/{number}", image=self._summaries.Summary.Image(encoded_image_string=data, **content)
            )
        if value["kind"] == "text":
            tensor = importlib.import_module("tensorboard.util.tensor_util").make_tensor_proto([value["text"]])
            plugin = self._summaries.SummaryMetadata.PluginData(plugin_name="text")
            yield make(
                tag=f"{name}/text_summary",
                metadata=self._summaries.SummaryMetadata(plugin_data=plugin),
                tensor=tensor,
            )
        if value["kind"] == "histogram":
            edges, counts = value["edges"], value["counts"]
            middle = [(low + high) / 2 for low, high in itertools.pairwise(edges)]
            total = sum(at * count for at, count in zip(middle, counts, strict=True))
            squares = sum(at * at * count for at, count in zip(middle, counts, strict=True))
            proto = self._summaries.HistogramProto(
                min=edges[0], max=edges[-1], num=sum(counts), sum=total, sum_squares=squares,
                bucket_limit=edges[1:], bucket=counts,
            )  # fmt: skip
            yield make(tag=name, histo=proto)

    def finish(self, exit_code: int) -> None:
        self._writer.close()

    def close(self) -> None:
        pass


def serve(connection: socket.socket) -> None:
    """Handle requests from `connection` until the last one, including those that an exited run has sent.

    The process exits `linger_s` seconds (see the first request) after the run has closed the connection, even if
    blocked.
    """

    def answer(**fields: Any) -> None:
        with contextlib.suppress(OSError):  # the run has exited
            connection.sendall(json.dumps(fields).encode() + b"\n")

    requests = connection.makefile("r", encoding="utf-8")
    try:
        opening = json.loads(requests.readline())
        threading.Thread(target=_exit_after, args=(connection, opening.pop("linger_s")), daemon=True).start()
        for name in ("wandb", ".wandb", "tensorboard"):
            if (Path(opening["run_dir"]) / name).is_symlink():
                raise OSError(f"{name} in the run directory must be a folder, but is a link")
        sink = SINKS[opening.pop("sink")](**opening)
        answer(opened=sink.opened)
        while (text := requests.readline()).endswith("\n"):
            request = json.loads(text)
            if "finish" in request:
                sink.finish(request["finish"])
                answer(finished=True)
                sink.close()
                return
            for row in request["rows"]:
                sink.log(row)
            answer(logged=len(request["rows"]))
        sink.finish(1)
    except BaseException as error:  # wandb raises SystemExit and KeyboardInterrupt too
        answer(failed=_format_error(error))


def _exit_after(connection: socket.socket, linger_s: float) -> None:
    """Exit `linger_s` seconds after the run has closed its end of the connection."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    poll.poll()
    time.sleep(linger_s)
    os._exit(1)


def _format_error(error: BaseException) -> str:
    """Return an error as one line without the API key."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    key = os.environ.get("WANDB_API_KEY")
    return text.replace(key, "(key)") if key else text


def _last_step(run_dir: Path, run_id: str) -> int:
    """Return the last step in the folders of this run; -1 if there is none, or they cannot be read."""
    last = -1
    with contextlib.suppress(Exception):  # the format is private to wandb: rows may then appear twice, but none is lost
        record_type = importlib.import_module("wandb.proto.wandb_internal_pb2").Record
        for path in run_dir.glob(f"*wandb/*run-*-{run_id}/run-{run_id}.wandb"):
            for data in records(path.read_bytes()):
                record = record_type.FromString(data)
                if record.HasField("history"):
                    last = max(last, record.history.step.num)
    return last


def records(log: bytes) -> Iterator[bytes]:
    """Yield the records of a wandb file: a LevelDB log after a header of 7 bytes, in blocks of 32 KiB.

    Source: https://github.com/google/leveldb/blob/main/doc/log_format.md
    """
    at, parts = 7, b""
    while at + 7 <= len(log):
        if (left := 32768 - at % 32768) < 7:  # too short for a record header: padding
            at += left
            continue
        size, kind = int.from_bytes(log[at + 4 : at + 6], "little"), log[at + 6]
        parts += log[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a complete record, or its last part
            yield parts
            parts = b""


def main() -> None:
    """Serve until the request to finish. Signals are ignored: this process ends when the run does."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.umask(0o077)
    os.nice(5)  # leave the cores to the training
    serve(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)  # skips wandb's exit handlers, which would wait for the network; its service ends with this process


SINKS: Mapping[str, Callable[..., Sink]] = {"wandb": Wandb, "tensorboard": TensorBoard}

if __name__ == "__main__":
    main()
