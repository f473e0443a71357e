"""Object storage for copies of checkpoints: a folder behind a URL such as s3://bucket/folder, through fsspec.

Other modules see names relative to the folder of the run, and one kind of error. fsspec comes with torch; the package
for a protocol (s3fs, gcsfs, adlfs) is installed by the user, who also passes credentials as that package expects them:
in environment variables, files of the cloud's own tools, or the identity of the machine. They never pass through
accel-run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from runner.base.errors import AccelRunError, Exit, MissingPackage
from runner.base.packages import require
from runner.base.secret import redact_message
from runner.base.text import error_line


class MirrorError(AccelRunError):
    """The mirror cannot be read or written."""

    exit_code = Exit.INPUT_OUTPUT


class MirrorStore:
    """The folder `name` below a URL. Thread-safe if the file system is.

    shown  its URL, which holds no secret: `checkpoint.mirror` does not accept user, password or query
    """

    def __init__(self, url: str, name: str) -> None:
        """Raises MissingPackage if the package for the protocol is missing, and MirrorError if the URL is invalid."""
        self.shown = f"{url.rstrip('/')}/{name}"
        core = require("fsspec.core", "mirror")
        # Other processes write there too, so listings must not be cached. The task's code must not share the instance.
        options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
        if url.startswith(("file:", "local:")):
            options["auto_mkdir"] = True
        try:
            with self._convert_errors("open"):
                self._fs, root = core.url_to_fs(url, **options)
        except MirrorError as error:
            if isinstance(error.__cause__, (ImportError, ValueError)):
                fix = "install the package for the protocol: pip install s3fs (s3://), gcsfs (gs://) or adlfs (abfs://)"
                raise MissingPackage(error.problems[0].what, where="checkpoint.mirror", fix=fix) from error.__cause__
            raise
        if type(self._fs).__module__.startswith("gcsfs."):
            # gcsfs logs a traceback for errors that it also raises, and that `_convert_errors` reports in one line.
            logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
        self._root = f"{root.rstrip('/')}/{name}"

    def names(self, folder: str = "") -> list[str]:
        """Return the sorted names in a folder; empty if it does not exist."""
        with self._convert_errors("list", folder):
            try:
                paths = self._fs.ls(self._path(folder), detail=False)
            except FileNotFoundError:
                return []
        folder_name = self._path(folder).rstrip("/").rpartition("/")[2]
        return sorted({path.rstrip("/").rpartition("/")[2] for path in paths} - {folder_name, ""})

    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes, None if it does not exist."""
        with self._convert_errors("read", name):
            try:
                return int(self._fs.info(self._path(name))["size"])
            except FileNotFoundError:
                return None

    def read(self, name: str, at_most: int) -> bytes | None:
        """Return the content of a small file, None if it does not exist."""
        size = self.size(name)
        if size is None:
            return None
        if size > at_most:
            raise MirrorError(f"{name} must be at most {at_most:,} bytes, but is {size:,}", where=self.shown)
        return b"".join(self.chunks(name))

    def chunks(self, name: str) -> Iterator[bytes]:
        """Yield the content of a file in pieces of a few megabytes."""
        with self._convert_errors("read", name), self._open(name) as file:
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk

    def write(self, name: str, data: bytes) -> None:
        """Write a small file, replacing an existing one."""
        with self._convert_errors("write", name):
            self._fs.pipe_file(self._path(name), data)

    def upload(self, path: Path, name: str) -> None:
        """Copy the local file `path`, in parts that the file system chooses."""
        with self._convert_errors("write", name):
            self._fs.put_file(str(path), self._path(name))

    def remove(self, name: str) -> None:
        """Remove a file or a folder with its content; a no-op if it does not exist."""
        with self._convert_errors("remove", name):
            try:
                self._fs.rm(self._path(name), recursive=True)
            except FileNotFoundError:
                return

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    @contextmanager
    def _open(self, name: str) -> Iterator[Any]:
        # Without a read-ahead cache: the file is read once, from its beginning to its end.
        with self._fs.open(self._path(name), "rb", block_size=_CHUNK_BYTES, cache_type="none") as file:
            yield file

    @contextmanager
    def _convert_errors(self, action: str, name: str = "") -> Iterator[None]:
        """Convert any error of the file system, whose message may repeat a secret, into a MirrorError."""
        try:
            yield
        except AccelRunError:
            raise
        except Exception as error:  # from a third-party package or the network
            what = f"cannot {action} {name}".rstrip() + f": {redact_message(error_line(error))}"
            mirror_error = MirrorError(what, where=self.shown)
            if _is_permission_error(error):
                mirror_error.exit_code = Exit.PERMISSION
            raise mirror_error from error


def _is_permission_error(error: BaseException) -> bool:
    """Return whether credentials are missing, wrong or insufficient; packages report it in different ways."""
    kind = type(error).__name__
    if isinstance(error, PermissionError) or any(word in kind for word in ("Credential", "Authentication", "Auth")):
        return True
    statuses = (getattr(error, "status_code", None), getattr(error, "code", None))  # of azure-core, of gcsfs
    if any(status in (401, 403) for status in statuses):
        return True
    # A key of google-auth that cannot be used raises RefreshError; gcsfs converts status 403 to an OSError.
    return kind == "RefreshError" or str(error).startswith("Forbidden: ")


_CHUNK_BYTES = 8 << 20
