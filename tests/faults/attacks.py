"""Attacks on a run folder: each has a name, and a function that changes the folder `run`."""

# ruff: noqa: E501 - tables of attacks

from __future__ import annotations

import json
import math
import os
import socket
import stat
import struct
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from runner.durable.checkpoint import MANIFEST, STATE
from runner.durable.manifest import serialize_manifest

Attack = Callable[[Path], None]

STRANGE: tuple[Any, ...] = (
    None, True, -1, 2**70, 1.5, math.inf, math.nan, "\x1b[31mred\x07", "", [], {}, [[[]]], {"a": {"b": None}}, "x" * 100_000,
    10**9,
)  # fmt: skip


def newest(run: Path) -> Path:
    return max((run / "checkpoints").glob("update-*"))


def reseal(folder: Path, change: Callable[[dict[str, Any]], None] = lambda _: None) -> None:
    """Recompute the file hashes in the manifest, apply `change`, and write the manifest with a valid hash."""
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest.pop("sha256")
    names = [entry["name"] for entry in manifest["files"]]
    manifest["files"] = [
        {
            "name": name,
            "size": (folder / name).stat().st_size,
            "sha256": sha256((folder / name).read_bytes()).hexdigest(),
        }
        for name in names
    ]
    change(manifest)
    (folder / MANIFEST).write_bytes(serialize_manifest(manifest))


def attacks(outside: Path) -> Iterator[tuple[str, Attack]]:
    """Yield all attacks. `outside` is a folder that must not change, with a file `canary`."""
    yield from _manifests()
    yield from _states()
    yield from _tensors()
    yield from _kinds_of_files(outside)
    yield from _records(outside)


def _manifests() -> Iterator[tuple[str, Attack]]:
    def entry(name: Any = "x", size: Any = 1, digest: Any = "0" * 64) -> dict[str, Any]:
        return {"name": name, "size": size, "sha256": digest}

    def with_entry(run: Path, added: Any) -> None:
        reseal(newest(run), lambda manifest: manifest["files"].append(added))

    def with_field(run: Path, key: str, value: Any) -> None:
        reseal(newest(run), lambda manifest: manifest.update({key: value}))

    def raw(run: Path, content: bytes) -> None:
        (newest(run) / MANIFEST).write_bytes(content)

    for name in (
        "../canary",
        "/etc/passwd",
        "a/b",
        "",
        ".",
        "..",
        "model.safetensors\x00",
        "m\u043edel.safetensors",
        "\u202egnp.x",
        "x" * 300,
        ".hidden",
        "-rf",
        "model.safetensors",
        MANIFEST,
        STATE,
        "~",
        "$HOME",
        "a b",
        7,
        None,
        ["a"],
    ):
        yield f"manifest names {name!r:.40}", partial(with_entry, added=entry(name))
    for size in (-1, 2**70, 1.5, "5", True, None, math.nan):
        yield f"manifest has size {size!r}", partial(with_entry, added=entry("x", size))
    for digest in (None, 5, "", "0" * 63, "g" * 64, ["0" * 64]):
        yield f"manifest has hash {digest!r:.20}", partial(with_entry, added=entry("x", 1, digest))
    for key in (
        "update",
        "format_version",
        "files",
        "metrics_bytes",
        "epoch",
        "samples",
        "phase",
        "world_size",
        "run_id",
        "run_uid",
        "wandb_id",
    ):
        for value in STRANGE:
            yield f"manifest's {key} is {value!r:.20}", partial(with_field, key=key, value=value)
    for title, content in {
        "empty": b"", "deep": b"[" * 200_000, "deep object": b'{"a":' * 100_000, "long number": b'{"update": ' + b"9" * 10_000 + b"}",
        "binary": os.urandom(1000), "utf-16": "{}".encode("utf-16"), "list": b"[]", "text": b'"x"', "nan": b'{"update": NaN}',
        "large": b" " * (17 << 20), "pickle": b"\x80\x04cposix\nsystem\n.",
    }.items():  # fmt: skip
        yield f"manifest is {title}", partial(raw, content=content)


def _states() -> Iterator[tuple[str, Attack]]:
    keys = ("phase", "phase_update", "epoch", "updates_before", "total", "early_stopping", "records", "closed", "ended", "kept",
            "precision", "meter", "random", "random_of_ranks", "saving", "shares", "bests", "evaluated_at", "skipped_before", "metrics", "values",
            "optimizer", "schedule")  # fmt: skip

    def change_state(run: Path, change: Callable[[dict[str, Any]], None]) -> None:
        folder = newest(run)
        state = json.loads((folder / STATE).read_text())
        change(state)
        (folder / STATE).write_text(json.dumps(state))
        reseal(folder)

    def raw(run: Path, content: bytes) -> None:
        (newest(run) / STATE).write_bytes(content)
        reseal(newest(run))

    def inner(state: dict[str, Any], path: tuple[Any, ...], value: Any) -> None:
        for part in path[:-1]:
            state = state[part]
        state[path[-1]] = value

    for key in keys:
        yield f"state lacks {key}", partial(change_state, change=partial(lambda state, key: state.pop(key), key=key))
        for value in STRANGE:
            yield (
                f"state's {key} is {value!r:.20}",
                partial(
                    change_state,
                    change=partial(lambda state, key, value: state.update({key: value}), key=key, value=value),
                ),
            )
    paths: tuple[tuple[Any, ...], ...] = (
        ("random", "numpy", 0), ("random", "numpy", 1), ("random", "numpy", 2), ("random", "python", 0), ("random", "python", 1),
        ("early_stopping", "num_bad"), ("early_stopping", "best"), ("meter", "losses"), ("meter", "update"), ("meter", "items_seen"),
        ("optimizer", "numbers"), ("optimizer", "optimizer"), ("records", "train"), ("records", "train", "finished"),
        ("records", "train", "metrics"), ("records", "train", "seconds"), ("values", "optimizer.lr"), ("values", "task"),
    )  # fmt: skip
    for path in paths:
        for value in STRANGE:
            yield (
                f"state's {path} is {value!r:.20}",
                partial(change_state, change=partial(inner, path=path, value=value)),
            )
    yield (
        "numpy reads beyond its state",
        partial(change_state, change=partial(inner, path=("random", "numpy", 2), value=10**6)),
    )
    yield (
        "python reads beyond its state",
        partial(change_state, change=lambda state: inner(state, ("random", "python", 1, -1), 10**6)),
    )
    for title, content in {
        "empty": b"",
        "deep": b"[" * 200_000,
        "list": b"[1]",
        "null": b"null",
        "binary": b"\xff" * 100,
    }.items():
        yield f"state is {title}", partial(raw, content=content)


def _tensors() -> Iterator[tuple[str, Attack]]:
    def rewrite_tensors(run: Path, stem: str, change: Callable[[dict[str, Any], bytes], tuple[Any, bytes]]) -> None:
        file = newest(run) / f"{stem}.safetensors"
        content = file.read_bytes()
        length = struct.unpack("<Q", content[:8])[0]
        header, data = change(json.loads(content[8 : 8 + length]), content[8 + length :])
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        file.write_bytes(struct.pack("<Q", len(text)) + text + data)
        reseal(newest(run))

    def raw(run: Path, stem: str, content: bytes) -> None:
        (newest(run) / f"{stem}.safetensors").write_bytes(content)
        reseal(newest(run))

    def change_first_tensor(
        change: Callable[[dict[str, Any]], None],
    ) -> Callable[[dict[str, Any], bytes], tuple[Any, bytes]]:
        def rewrite(header: dict[str, Any], data: bytes) -> tuple[Any, bytes]:
            change(header[next(name for name in header if name != "__metadata__")])
            return header, data

        return rewrite

    for stem in ("model", "optimizer", "random"):
        for title, content in {
            "empty": b"", "zip": b"PK\x03\x04" + b"\x00" * 100, "pickle": b"\x80\x04cposix\nsystem\n(S'touch /tmp/x'\ntR.",
            "a header of 2**63 bytes": struct.pack("<Q", 2**63) + b"{}", "a header of 0 bytes": struct.pack("<Q", 0), "short": b"\x01",
            "not JSON": struct.pack("<Q", 3) + b"abc", "deep": struct.pack("<Q", 100_000) + b"[" * 100_000,
        }.items():  # fmt: skip
            yield f"{stem} is {title}", partial(raw, stem=stem, content=content)
        for title, change in {
            "negative shape": change_first_tensor(lambda one: one.update(shape=[-1])), "giant shape": change_first_tensor(lambda one: one.update(shape=[2**62, 2**62])),
            "overlap": change_first_tensor(lambda one: one.update(data_offsets=[0, 4])), "offsets beyond": change_first_tensor(lambda one: one.update(data_offsets=[0, 2**60])),
            "reversed offsets": change_first_tensor(lambda one: one.update(data_offsets=[8, 0])), "other dtype": change_first_tensor(lambda one: one.update(dtype="F64")),
            "unknown dtype": change_first_tensor(lambda one: one.update(dtype="EVIL")), "text for a shape": change_first_tensor(lambda one: one.update(shape="4")),
            "no tensors": lambda header, data: ({}, b""), "one tensor less": lambda header, data: ({name: header[name] for name in list(header)[1:]}, data),
            "another name": lambda header, data: ({f"\x1b[2J{name}": value for name, value in header.items()}, data),
        }.items():  # fmt: skip
            yield f"{stem} has {title}", partial(rewrite_tensors, stem=stem, change=change)


def _kinds_of_files(outside: Path) -> Iterator[tuple[str, Attack]]:
    def pipe(path: Path) -> None:
        os.mkfifo(path)

    def device(path: Path) -> None:
        if os.geteuid():
            raise PermissionError("only root makes devices")
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))

    def bind_socket(path: Path) -> None:
        with socket.socket(socket.AF_UNIX) as one:
            before = Path.cwd()
            os.chdir(path.parent)
            try:
                one.bind(path.name)
            finally:
                os.chdir(before)

    def replace_file(run: Path, name: str, make: Callable[[Path], None]) -> None:
        path = newest(run) / name.removeprefix("checkpoint/") if name.startswith("checkpoint/") else run / name
        if path.is_dir() and not path.is_symlink():
            path.rename(path.with_name(f"was-{path.name}"))
        else:
            path.unlink(missing_ok=True)
        make(path)

    kinds: dict[str, Callable[[Path], None]] = {
        "a link to a file": lambda path: path.symlink_to(outside / "canary"),
        "a link to a folder": lambda path: path.symlink_to(outside),
        "a link to nowhere": lambda path: path.symlink_to(outside / "new"),
        "a link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
        "a link to itself": lambda path: path.symlink_to(path.name),
        "a hard link": lambda path: path.hardlink_to(outside / "canary"),
        "a pipe": pipe,
        "a socket": bind_socket,
        "a device": device,
        "a folder": lambda path: path.mkdir(),
    }
    for name in ("checkpoint/model.safetensors", f"checkpoint/{MANIFEST}", f"checkpoint/{STATE}", "metrics.jsonl", "run.json",
                 "console.log", "events.jsonl", "gpu.csv", "error.json", "plan.json", ".lock", "config.yaml", "report.html", "predictions",
                 "plots", "export", "checkpoints", "profile"):  # fmt: skip
        for title, make in kinds.items():
            yield f"{name} is {title}", partial(replace_file, name=name, make=make)


def _records(outside: Path) -> Iterator[tuple[str, Attack]]:
    def change_record(run: Path, key: str, value: Any) -> None:
        record = json.loads((run / "run.json").read_text())
        (run / "run.json").write_text(json.dumps({**record, key: value}))

    def append_line(run: Path, name: str, line: bytes) -> None:
        with (run / name).open("ab") as file:
            file.write(line + b"\n")

    def code(run: Path) -> None:
        evil = run / "evil.py"
        evil.write_text(
            f"from pathlib import Path\nPath({str(outside)!r}, 'was-run').touch()\nfrom runner import Task\n\ndef build(): ...\n"
        )
        change_record(run, "task_file", str(evil))

    yield "run.json names code in the run", code
    for key in (
        "task_file",
        "config_dir",
        "overrides",
        "state",
        "pid",
        "host",
        "started",
        "phases",
        "task",
        "command",
        "exit_code",
        "metrics",
        "tracker_id",
        "uid",
        "adopted",
    ):
        for value in (
            *STRANGE,
            "/etc/passwd",
            ["hydra.run.dir=/tmp", "data.path=/etc"],
            ["api_key=hunter2hunter2"],
            ["task=../../x"],
        ):
            yield f"run.json's {key} is {value!r:.20}", partial(change_record, key=key, value=value)
    for line in (
        b"[" * 100_000,
        b"null",
        b'{"update": "\x1b[31m", "phase": "train", "train/loss": "x"}',
        b"\xff\xfe",
        b'{"phase": {"a": 1}, "update": null}',
        b'{"update": 1e999, "phase": "\\u001b]0;evil\\u0007", "train/loss": 1e999}',
        b"9" * 10_000,
    ):
        for name in ("metrics.jsonl", "events.jsonl", "run.json", "error.json", "plan.json"):
            yield f"{name} ends with {line!r:.20}", partial(append_line, name=name, line=line)
