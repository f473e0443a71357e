"""A simulated wandb server, healthy or faulty, and the offline rows of a tracker."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil

from runner.trackers import tracker_process
from runner.trackers.tracker import Tracker

KEY = "0123456789abcdef0123456789abcdef01234567"  # well-formed, but not the key of any account
MARK = "ACCEL_RUN_TEST_MARK"  # an environment variable, inherited by every subprocess


def marked(mark: str) -> list[psutil.Process]:
    """Return all other processes with this mark."""
    result = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                result.append(process)
        except psutil.Error:  # already ended, of another user, or a zombie
            continue
    return result


def rows(first: int, last: int) -> list[dict[str, Any]]:
    return [{"update": n, "phase": "train", "train/loss": 1 / (n + 1), "val/loss": None} for n in range(first, last)]


def log_all(tracker: Tracker, given: list[dict[str, Any]]) -> float:
    """Log the rows and return the longest time that one of them took."""
    longest = 0.0
    for row in given:
        began = time.perf_counter()
        tracker.log(row)
        longest = max(longest, time.perf_counter() - began)
    return longest


def offline_rows(run_dir: Path, folders: str = "offline-run-*") -> list[tuple[int, dict[str, Any]]]:
    """Return (step, row) of all offline folders in chronological order, which is that of their names."""
    from wandb.proto.wandb_internal_pb2 import Record

    result = []
    for path in sorted(run_dir.glob(f"wandb/{folders}/*.wandb")):
        for data in tracker_process.records(path.read_bytes()):
            record = Record.FromString(data)
            if record.HasField("history"):
                row: dict[str, Any] = {}
                for item in record.history.item:
                    *outer, name = item.nested_key or [item.key]
                    inner = row
                    for key in outer:
                        inner = inner.setdefault(key, {})
                    inner[name] = json.loads(item.value_json)
                result.append((record.history.step.num, row))
    return result


class Server:
    """The part of a wandb server that one run needs. Keeps the received rows.

    delay_s    seconds before each response
    lives_for  number of requests after which it closes connections without a response; None: never
    mood       function that returns the status of the next response (0: close the connection) and its delay in seconds
    """

    def __init__(
        self,
        status: int = 200,
        *,
        delay_s: float = 0.0,
        lives_for: int | None = None,
        mood: Callable[[], tuple[int, float]] | None = None,
    ) -> None:
        self.history: list[str] = []
        self.requests = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                outer.requests += 1
                code, wait_s = mood() if mood else (status, delay_s)
                if not code or (lives_for is not None and outer.requests > lives_for):
                    self.close_connection = True
                    return
                time.sleep(wait_s)  # lint-tests: sleep: a slow network; nothing is ordered by it
                answer = json.dumps(outer.answer(self.path, body) if code == 200 or not mood else {}).encode()
                self.send_response(code)
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            do_PUT = do_GET = do_POST  # noqa: N815 - the names http.server calls

            def log_message(self, *arguments: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)

    def __enter__(self) -> Server:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def answer(self, path: str, body: bytes) -> Any:
        if path.endswith("file_stream"):
            if sent := json.loads(body).get("files", {}).get("wandb-history.jsonl"):
                self.history[sent["offset"] :] = sent["content"]
            return {"exitcode": None, "limits": {}}
        name = json.loads(body)["variables"].get("name") if path.endswith("graphql") else None
        project = {"id": "p", "name": "accel-run", "entity": {"id": "e", "name": "me"}}
        bucket: dict[str, Any] = {"id": "b", "name": name, "displayName": name, "config": "{}", "project": project}
        bucket |= {"historyLineCount": len(self.history), "eventsLineCount": 0, "logLineCount": 0}
        bucket |= {"summaryMetrics": "{}", "eventsTail": "[]", "tags": [], "wandbConfig": '{"t": {}}'}
        bucket |= {"historyTail": json.dumps(self.history[-1:])}
        data: dict[str, Any] = {"viewer": {"id": "v", "entity": "me", "flags": "{}", "teams": {"edges": []}}}
        data |= {"model": {**project, "bucket": bucket if self.history else None}}
        data |= {"upsertBucket": {"bucket": bucket, "inserted": not self.history}}
        data |= {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": []}}
        return {"data": data}

    @property
    def updates(self) -> list[int]:
        return [json.loads(row)["update"] for row in self.history]
