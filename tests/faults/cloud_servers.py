"""Servers of the three kinds of object storage that mirrors support, each with an empty bucket, on this machine.

s3     moto (see s3_server.py): pip install s3fs 'moto[server]'
gs     gcp-storage-emulator: pip install gcsfs gcp-storage-emulator
abfs   Azurite: pip install adlfs; npm install --global azurite
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import pytest

from tests.faults import s3_server

# Azurite's documented account. Its key is public, but a run must not write it anywhere.
AZURE = "AZURE_STORAGE_CONNECTION_STRING"  # read by adlfs
ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@dataclass(frozen=True)
class CloudServer:
    """A server with the bucket `bucket`; `secrets` are the credentials in the environment."""

    scheme: str
    secrets: tuple[str, ...]

    def url(self, bucket: str = "bucket") -> str:
        return f"{self.scheme}://{bucket}/runs"


def reason_to_skip(scheme: str) -> str:
    """Return what must be installed for a server, or "" if everything is installed."""
    packages = {"s3": ("s3fs", "moto"), "gs": ("gcsfs", "gcp_storage_emulator"), "abfs": ("adlfs",)}[scheme]
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if scheme == "abfs" and shutil.which("azurite-blob") is None:
        missing.append("azurite")
    return f"needs {', '.join(missing)}" if missing else ""


def start_server(scheme: str, monkeypatch: pytest.MonkeyPatch) -> AbstractContextManager[CloudServer]:
    """Start a server, and set its address and credentials in the environment."""
    servers: dict[str, Callable[[pytest.MonkeyPatch], AbstractContextManager[CloudServer]]] = {
        "s3": _s3, "gs": _google, "abfs": _azure,
    }  # fmt: skip
    return servers[scheme](monkeypatch)


@contextmanager
def _s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[CloudServer]:
    with s3_server.with_bucket(monkeypatch):
        yield CloudServer("s3", (s3_server.SECRET, s3_server.KEY_ID))


@contextmanager
def _google(monkeypatch: pytest.MonkeyPatch) -> Iterator[CloudServer]:
    from gcp_storage_emulator.server import create_server  # type: ignore[import-not-found]

    port = _free_port()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://localhost:{port}")
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # uses gRPC, which the emulator does not have
    with create_server("localhost", port, in_memory=True, default_bucket="bucket"):
        yield CloudServer("gs", ())


@contextmanager
def _azure(monkeypatch: pytest.MonkeyPatch) -> Iterator[CloudServer]:
    import adlfs  # type: ignore[import-not-found]

    port = _free_port()
    line = ["azurite-blob", "--blobPort", str(port), "--inMemoryPersistence", "--disableTelemetry"]
    line += ["--skipApiVersionCheck", "--silent"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert any("successfully listens" in line for line in process.stdout), "Azurite did not start"
            endpoint = f"BlobEndpoint=http://127.0.0.1:{port}/{ACCOUNT};"
            account = f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={ACCOUNT_KEY};"
            monkeypatch.setenv(AZURE, account + endpoint)
            adlfs.AzureBlobFileSystem(skip_instance_cache=True).mkdir("bucket")
            yield CloudServer("abfs", (ACCOUNT_KEY,))
        finally:
            process.terminate()


def replace_azure_key(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    """Replace the correct key in the environment."""
    monkeypatch.setenv(AZURE, os.environ[AZURE].replace(ACCOUNT_KEY, key))


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
