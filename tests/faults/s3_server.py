"""An S3 server (moto) that throttles requests, behind a TCP proxy that cuts connections."""

from __future__ import annotations

import asyncio
import select
import socket
import socketserver
import struct
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import pytest

KEY_ID, SECRET = "AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER: send RST, as a lost connection does


class S3Server:
    """Faults of the server and of the connection to it.

    throttles  (method, path) -> answer this request with 503 SlowDown
    cut_after  number of bytes, in both directions together, after which the connection that sends more is reset;
               None: never. Later connections work again unless `stays_cut`
    """

    def __init__(self) -> None:
        self.throttles: Callable[[str, str], bool] = lambda method, path: False
        self.cut_after: int | None = None
        self.stays_cut = False
        self.url = ""
        self.num_bytes = self.num_cuts = self.num_throttled = 0
        self._guard = threading.Lock()

    def allow(self, size: int) -> int:
        """Return how many of `size` bytes may pass; fewer if the connection is to be reset after them."""
        with self._guard:
            self.num_bytes += size
            if self.cut_after is None or size <= self.cut_after:
                self.cut_after = None if self.cut_after is None else self.cut_after - size
                return size
            allowed, self.cut_after = self.cut_after, 0 if self.stays_cut else None
            self.num_cuts += 1
            return allowed

    def check_signatures(self, *, after_requests: str) -> None:
        """Reject all requests after this number, because the server knows no user; inf: accept all."""
        self.post("reset-auth", after_requests)

    def post(self, command: str, content: str = "") -> None:
        """Send a command to moto."""
        headers = {"Content-Type": "text/plain"}
        request = urllib.request.Request(f"{self.url}/moto-api/{command}", content.encode(), headers, method="POST")
        urllib.request.urlopen(request).close()

    def answer(self, application: Any, environ: dict[str, Any], start_response: Any) -> Any:
        """Throttle a request, or pass it to the application (WSGI)."""
        if not self.throttles(environ["REQUEST_METHOD"], environ["PATH_INFO"]):
            return application(environ, start_response)
        with self._guard:
            self.num_throttled += 1
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        content = b"" if environ["REQUEST_METHOD"] == "HEAD" else SLOW_DOWN
        start_response("503 Slow Down", [("Content-Type", "application/xml"), ("Content-Length", str(len(content)))])
        return [content]


def start_storage_threads() -> None:
    """Start the threads that run until the process ends: two of fsspec for asynchronous storage, and one of gcsfs."""
    from fsspec.asyn import get_loop

    with suppress(ImportError, AttributeError):  # not installed, or a version without this thread
        from gcsfs import core

        core._start_deferred_close_worker()  # lint-tests: private: of gcsfs

    loop = get_loop()
    loop.set_default_executor(ThreadPoolExecutor(max_workers=1))
    asyncio.run_coroutine_threadsafe(asyncio.to_thread(int), loop).result()


@contextmanager
def with_bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """Yield a server with an empty bucket, `s3://bucket`, and set its address and credentials in the environment."""
    import s3fs

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with run_server() as result:
        result.post("reset")  # moto keeps what is stored in this process, not in the server
        monkeypatch.setenv("AWS_ENDPOINT_URL", result.url)
        s3fs.S3FileSystem(skip_instance_cache=True).makedirs("bucket", exist_ok=True)
        yield result


@contextmanager
def run_server() -> Iterator[S3Server]:
    """Yield an S3 server without buckets."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        def log(self, *_: Any, **__: Any) -> None:
            pass

    server, application = S3Server(), DomainDispatcherApplication(create_backend_app)
    answer = partial(server.answer, application)
    storage = make_server("127.0.0.1", 0, answer, threaded=True, request_handler=Quiet)
    proxy = _Proxy(server, storage.server_port)
    server.url = f"http://127.0.0.1:{proxy.server_address[1]}"
    threads = [threading.Thread(target=each.serve_forever) for each in (storage, proxy)]
    for thread in threads:
        thread.start()
    try:
        yield server
    finally:
        for each in (proxy, storage):
            each.shutdown()
            each.server_close()
        for thread in threads:
            thread.join()


class _Proxy(socketserver.ThreadingTCPServer):
    def __init__(self, server: S3Server, port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        self.s3, self.port = server, port
        self.ended, self._end = socket.socketpair()

    def server_close(self) -> None:
        self._end.close()  # wakes every connection
        super().server_close()  # joins their threads
        self.ended.close()


class _Connection(socketserver.BaseRequestHandler):
    """Forward bytes in both directions until one side closes, or the connection is cut."""

    def handle(self) -> None:
        proxy: Any = self.server
        with socket.create_connection(("127.0.0.1", proxy.port)) as storage, suppress(OSError):
            others = {self.request: storage, storage: self.request}
            while True:
                ready, _, _ = select.select([*others, proxy.ended], [], [])
                if proxy.ended in ready:
                    return
                for source in ready:
                    data = source.recv(1 << 16)
                    allowed = proxy.s3.allow(len(data))
                    others[source].sendall(data[:allowed])
                    if allowed < len(data):
                        for end in others:
                            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
                    if not data or allowed < len(data):
                        return
