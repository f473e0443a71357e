"""Checkpoints: a folder appears under its name only when it is whole, and is believed only after it is checked.

    update-0000001200/  model.safetensors  optimizer.safetensors  random.safetensors  state.json  MANIFEST.json

Tensors are safetensors, all else is JSON, nothing is pickled. MANIFEST.json is written last and holds its own hash
and those of every other file. There is no pointer to the latest checkpoint: the newest valid one is the one.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.base.errors import DataError, StorageError
from runner.durable import files

if TYPE_CHECKING:  # to tell valid from damaged, as `status` does, takes no torch
    from torch import Tensor

FORMAT_VERSION = 1
MANIFEST = "MANIFEST.json"
STATE = "state.json"


@dataclass(frozen=True)
class Snapshot:
    """A run at an update boundary, in host memory; nothing that training goes on to change."""

    update: int
    tensors: Mapping[str, Mapping[str, Tensor]]  # file stem -> name -> CPU tensor
    state: Mapping[str, Any]  # JSON; becomes state.json
    facts: Mapping[str, Any]  # JSON; go into the manifest: epoch, samples, phase, world_size, run_id, ...


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that was found valid; its tensors are read when asked for."""

    path: Path
    manifest: Mapping[str, Any]
    state: Mapping[str, Any]

    @property
    def update(self) -> int:
        """The number of optimizer steps behind it."""
        return int(self.manifest["update"])

    @property
    def stems(self) -> tuple[str, ...]:
        """What `tensors` can be asked for: "model", "optimizer", "random", ..."""
        names = (entry["name"] for entry in self.manifest["files"])
        return tuple(name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX))

    def tensors(self, stem: str) -> dict[str, Tensor]:
        """Return the CPU tensors of one file by name; what is returned is what was hashed.

        Raises DataError where there is no such file, or where it changed since it was checked.
        """
        from safetensors.torch import load as load_tensors

        name = stem + _SUFFIX
        recorded = {entry["name"]: entry for entry in self.manifest["files"]}
        if name not in recorded:
            raise DataError(f"the checkpoint has no {name}; it has {', '.join(self.stems)}", where=str(self.path))
        content = files.read(self.path / name)
        if hashlib.sha256(content).hexdigest() != recorded[name]["sha256"]:
            raise DataError(f"{name} changed since it was checked", where=str(self.path))
        try:
            return load_tensors(content)
        except Exception as error:  # hashes agree, so a stranger wrote it; the reader promises no class of error
            raise DataError(f"{name} is not in the safetensors format: {error}", where=str(self.path)) from error


@dataclass(frozen=True)
class Recovery:
    """Where to go on from, and what was passed over on the way: (name, reasons), the newest first."""

    checkpoint: Loaded | None
    skipped: tuple[tuple[str, tuple[str, ...]], ...] = ()


def path_of(directory: Path, update: int) -> Path:
    """Return where the checkpoint of `update` lies in `directory`."""
    assert 0 <= update < 10**_NUM_DIGITS
    return directory / f"update-{update:0{_NUM_DIGITS}}"


def rank_stem(stem: str, rank: int) -> str:
    """Return the file stem for what every rank has its own of, such as the random state."""
    return f"{stem}-rank{rank:05}"


def snapshot_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies in host memory, which later updates do not change."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def save(directory: Path, snapshot: Snapshot) -> Path:
    """The checkpoint of `snapshot.update` is whole and on disk; returns its path.

    One that is there already and valid is kept; a damaged one is moved aside.
    Raises StorageError for whatever goes wrong on the way, which leaves the older checkpoints as they were, and
    TypeError or ValueError, before anything is written, where the snapshot holds what the format cannot.
    """
    _check(snapshot)
    target = path_of(directory, snapshot.update)
    try:
        files.make_directory(directory)
        if files.exists(target):
            if not verify(target):
                files.fsync_directory(directory)
                return target
            _move_aside(target, "damaged")
        temporary = directory / f"{files.TEMPORARY}{target.name}-{secrets.token_hex(4)}"
        try:
            _write(temporary, snapshot)
            files.rename(temporary, target)
            files.fsync_directory(directory)
        except Exception:
            with suppress(Exception):  # what cannot be removed now is swept when the run is opened again
                _discard(temporary, target)
            raise
    except StorageError:
        raise
    except Exception as error:
        raise StorageError(f"cannot save the checkpoint: {error}", where=str(target)) from error
    return target


def load(path: Path) -> Loaded:
    """Return the checkpoint at `path` after checking all of it.

    Raises DataError where it is damaged, StorageError where it cannot be read.
    """
    try:
        return _examine(path)
    except _Damaged as damage:
        raise DataError(f"the checkpoint is damaged: {damage}", where=str(path)) from None


def verify(path: Path) -> list[str]:
    """Return what is wrong with the checkpoint at `path`; nothing where it is valid."""
    try:
        _examine(path)
    except _Damaged as damage:
        return list(damage.reasons)
    except StorageError as error:
        return [error.problems[0].what]
    return []


def recover(directory: Path) -> Recovery:
    """The newest valid checkpoint is found, half written ones are swept, damaged newer ones moved aside.

    To be called by who holds the lock of the run. What cannot be read is passed over but stays where it is: its
    content may be good. Raises DataError where there are checkpoints and none is valid, on every call, so that a run
    never starts again at 0 in silence; see `set_aside`.
    """
    unswept = [(name, (f"cannot be removed: {reason}",)) for name, reason in files.sweep(directory)]
    passed_over: list[tuple[str, tuple[str, ...]]] = []
    for path in _newest_first(directory):
        try:
            return Recovery(_examine(path), (*passed_over, *unswept))
        except StorageError as error:
            passed_over.append((path.name, (error.problems[0].what,)))
        except _Damaged as damage:
            passed_over.append((path.name, damage.reasons))
            try:
                _move_aside(path, "damaged")
            except StorageError as error:
                passed_over.append((path.name, (error.problems[0].what,)))
    damaged = [name for name in files.names(directory) if name.startswith("damaged-")]
    if passed_over or damaged:
        raise _none_valid(directory, passed_over, damaged)
    return Recovery(None, tuple(unswept))


def newest_valid(directory: Path) -> Path | None:
    """Return the newest valid checkpoint, None where there is none; changes nothing, so it needs no lock."""
    return next((path for path in _newest_first(directory) if not verify(path)), None)


def set_aside(directory: Path) -> int:
    """No checkpoint is left for `recover` to find, damaged or not; returns how many there were.

    For a run that is told to start afresh (resume=fresh). The folders stay, named `earlier-...`.
    """
    found = [name for name in files.names(directory) if _NAME.fullmatch(name) or name.startswith("damaged-")]
    for name in found:
        _move_aside(directory / name, "earlier")
    return len(found)


def retain(directory: Path, keep_last: int, best: Path | Collection[Path] | None = None) -> None:
    """The newest `keep_last` checkpoints and the `best` ones are left, and never fewer than two valid ones.

    A crash at any moment leaves each checkpoint whole or out of sight. Raises StorageError.
    """
    for name in files.names(directory):
        if name.startswith(_OUTGOING):
            files.remove(directory / name)
    kept = {path.name for path in ((best,) if isinstance(best, Path) else best or ())}
    outgoing = [path for path in _superfluous(directory, keep_last) if path.name not in kept]
    for path in outgoing:
        hidden = directory / f"{_OUTGOING}{path.name}-{secrets.token_hex(4)}"
        files.rename(path, hidden)
        files.fsync_directory(directory)  # else a power cut may leave the name with half of its files
        files.remove(hidden)


class Writer:
    """Saves snapshots on a thread of its own, one at a time, so that training goes on.

    A save that fails is told to `on_failure`, and training goes on; after three in a row `submit` and `wait` raise.
    Both callbacks run on the writer's thread. Anything but a StorageError is a fault of the program and is raised
    from the next `submit` or `wait`.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep_last: int = 2,
        on_saved: Callable[[Path], None] = lambda _: None,
        on_failure: Callable[[StorageError], None] = lambda _: None,
    ) -> None:
        self.directory = directory
        self.keep_last = keep_last
        self.acknowledged: int | None = None  # the last update that is on disk
        self.failures: list[StorageError] = []  # all of them, those of retention too
        self._in_a_row = 0
        self._on_saved = on_saved
        self._on_failure = on_failure
        self._fault: BaseException | None = None
        self._thread: threading.Thread | None = None

    def submit(self, snapshot: Snapshot, *, best: Collection[Path] = ()) -> None:
        """`snapshot` is being saved; waits only where the one before it is still being written.

        best  checkpoints that are kept whatever their age; the new one may be among them

        Raises StorageError where the last three saves failed; `snapshot` is then not saved.
        """
        self.wait()
        self._thread = threading.Thread(target=self._work, args=(snapshot, best), name="checkpoint-writer")
        self._thread.start()

    def wait(self) -> int | None:
        """Nothing is being written any more; returns the last update on disk. Raises as `submit` does."""
        self.close()
        if self._fault is not None:
            fault, self._fault = self._fault, None
            raise fault
        if self._in_a_row >= _NUM_FAILURES:
            last = self.failures[-1].problems[0]
            raise StorageError(
                f"{self._in_a_row} saves in a row failed, the last one: {last.what}",
                where=last.where,
                fix=last.fix or "see that the disk can be written, then run the same command again",
            )
        return self.acknowledged

    def close(self) -> None:
        """The thread has ended. Raises nothing, so that it can be called while another error is on its way."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.wait()
        self.close()

    def _work(self, snapshot: Snapshot, best: Collection[Path]) -> None:
        try:
            try:
                path = save(self.directory, snapshot)
            except StorageError as error:
                self._in_a_row += 1
                self._report(error)
                return
            self._in_a_row = 0
            self.acknowledged = snapshot.update
            self._on_saved(path)
            try:
                retain(self.directory, self.keep_last, best)
            except StorageError as error:  # too many checkpoints are no reason to stop saving
                self._report(error)
        except BaseException as fault:  # carried to the thread that trains
            self._fault = fault

    def _report(self, error: StorageError) -> None:
        self.failures.append(error)
        self._on_failure(error)


class NoWriter:
    """Saves nothing: what a rank has in the place of a Writer where another one writes."""

    failures: tuple[StorageError, ...] = ()

    def __init__(self) -> None:
        self._last: int | None = None

    def submit(self, snapshot: Snapshot, *, best: Collection[Path] = ()) -> None:
        """Take the snapshot for saved."""
        self._last = snapshot.update

    def wait(self) -> int | None:
        """Return the last update that was submitted."""
        return self._last

    def close(self) -> None:
        """Do nothing."""


def _check(snapshot: Snapshot) -> None:
    """Raise TypeError or ValueError where the format cannot hold the snapshot."""
    json.dumps([snapshot.state, snapshot.facts])
    taken = _OWN_KEYS & snapshot.facts.keys()
    assert not taken, f"the manifest has its own {', '.join(sorted(taken))}"
    for stem, tensors in snapshot.tensors.items():
        assert _SAFE_NAME.fullmatch(stem), f"must be a plain file stem, but is {stem!r}"
        for name, tensor in tensors.items():
            if str(tensor.layout) != "torch.strided" or str(tensor.dtype).removeprefix("torch.") not in _DTYPES:
                raise TypeError(f"{stem}: {name} cannot be saved: it is {tensor.layout} and {tensor.dtype}")


def _write(temporary: Path, snapshot: Snapshot) -> None:
    """The folder `temporary` is whole and on disk, except for its own name."""
    files.make_directory(temporary)
    entries = []
    for name, content in _contents(snapshot):
        size, sha256 = files.write_new(temporary / name, [content])
        entries.append({"name": name, "size": size, "sha256": sha256})
    manifest = {"format_version": FORMAT_VERSION, "update": snapshot.update, **snapshot.facts, "files": entries}
    files.write_new(temporary / MANIFEST, [_sealed(manifest)])
    files.fsync_directory(temporary)


def _discard(temporary: Path, target: Path) -> None:
    """A save that failed is gone; from under the final name it goes first, in one step."""
    if files.exists(target):
        files.rename(target, temporary)
    files.remove(temporary)


def _contents(snapshot: Snapshot) -> Iterator[tuple[str, bytes]]:
    """Yield the files before the manifest; one at a time, for each is a second copy of its tensors."""
    from safetensors.torch import save as bytes_of

    for stem, tensors in snapshot.tensors.items():
        yield stem + _SUFFIX, bytes_of(_packed(tensors))
    yield STATE, json.dumps(snapshot.state, indent=1).encode()


def _packed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors as safetensors wants them: dense, in order, and no two in the same memory."""
    packed: dict[str, Tensor] = {}
    seen = set()
    for name, tensor in tensors.items():
        # safetensors 0.8 writes the memory of a conjugated view as it is, without the conjugation.
        dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
        storage = dense.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() != dense.nbytes:
            dense = dense.clone()
        seen.add(dense.untyped_storage().data_ptr())
        packed[name] = dense
    return packed


def _sealed(manifest: Mapping[str, Any]) -> bytes:
    """Return the text of a manifest, its first key the hash of all the rest in canonical JSON."""
    rest = json.loads(json.dumps(manifest))  # as a reader will see it: keys are text, tuples are lists
    canonical = json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()
    return json.dumps({"sha256": hashlib.sha256(canonical).hexdigest(), **rest}, indent=1).encode() + b"\n"


class _Damaged(Exception):
    """What is wrong with a checkpoint that can be read."""

    def __init__(self, *reasons: str) -> None:
        super().__init__("; ".join(reasons))
        self.reasons = reasons


def _must(holds: bool, otherwise: str) -> None:
    if not holds:
        raise _Damaged(otherwise)


def _examine(path: Path) -> Loaded:
    """Return the checkpoint at `path`. Raises _Damaged, and StorageError where it cannot be read."""
    _must(files.is_plain_directory(path), "it must be a folder, but is a link, a file or not there")
    present = files.names(path)
    for name in present:
        _must(files.is_plain_file(path / name), f"{name} must be a plain file")
    _must(MANIFEST in present, f"{MANIFEST} is missing")
    manifest = _read_manifest(path / MANIFEST)
    named = _NAME.fullmatch(path.name)
    _must(not named or int(named[1]) == manifest["update"], f"{MANIFEST} is that of update {manifest['update']}")
    problems = tuple(_file_problems(path, manifest["files"], set(present)))
    if problems:
        raise _Damaged(*problems)
    state = _parse(files.read(path / STATE))
    _must(isinstance(state, dict), f"{STATE} does not hold a JSON object")
    return Loaded(path, manifest, state)


def _read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest, every field of which can be relied on. Raises _Damaged."""
    _must(files.size_of(path) <= _MANIFEST_BYTES, f"{MANIFEST} must have at most {_MANIFEST_BYTES} bytes")
    text = files.read(path, at_most=_MANIFEST_BYTES)
    manifest = _parse(text)
    if not isinstance(manifest, dict):
        raise _Damaged(f"{MANIFEST} does not hold a JSON object")
    _must(_is_sealed(manifest, text), f"{MANIFEST} does not agree with its own hash")
    version, update, entries = (manifest.get(key) for key in ("format_version", "update", "files"))
    _must(version == FORMAT_VERSION, f"format_version must be {FORMAT_VERSION}, but is {version!r}")
    _must(
        type(update) is int and 0 <= update < 10**_NUM_DIGITS,
        f"update must be a whole number of at most {_NUM_DIGITS} digits, but is {update!r}",
    )
    if not isinstance(entries, list) or not all(_is_entry(entry) for entry in entries):
        raise _Damaged("files must be a list of plain names, sizes and hashes")
    listed = [entry["name"] for entry in entries]
    _must(
        STATE in listed and MANIFEST not in listed and len(set(listed)) == len(listed),
        f"files must name {STATE}, not {MANIFEST}, and each file once",
    )
    return manifest


def _is_sealed(manifest: Mapping[str, Any], text: bytes) -> bool:
    """Tell whether `text` is, byte for byte, what `_sealed` makes of it: even a changed space is noticed."""
    try:
        return _sealed({key: value for key, value in manifest.items() if key != "sha256"}) == text
    except RecursionError:
        return False


def _is_entry(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and entry.keys() == {"name", "size", "sha256"}
        and isinstance(entry["name"], str)
        and _SAFE_NAME.fullmatch(entry["name"]) is not None
        and type(entry["size"]) is int
        and isinstance(entry["sha256"], str)
    )


def _file_problems(path: Path, entries: list[dict[str, Any]], present: set[str]) -> Iterator[str]:
    listed = {entry["name"] for entry in entries}
    for name in sorted(present - listed - {MANIFEST}):
        yield f"{name} is there but not in {MANIFEST}"
    for entry in entries:
        name = entry["name"]
        if name not in present:
            yield f"{name} is missing"
        elif (size := files.size_of(path / name)) != entry["size"]:
            yield f"{name} must have {entry['size']} bytes, but has {size}"
        elif files.digest_of(path / name) != entry["sha256"]:
            yield f"{name} does not agree with its hash"


def _parse(text: bytes) -> Any:
    """Return what the JSON `text` holds, None where it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _newest_first(directory: Path) -> list[Path]:
    return [directory / name for name in reversed(files.names(directory)) if _NAME.fullmatch(name)]


def _superfluous(directory: Path, keep_last: int) -> list[Path]:
    """Return what is older than both the newest `keep_last` checkpoints and the two newest valid ones."""
    paths = _newest_first(directory)
    if len(paths) <= max(keep_last, _NUM_VALID):
        return []
    num_valid = 0
    for position, path in enumerate(paths):
        if position >= keep_last and num_valid >= _NUM_VALID:
            return paths[position:]
        if num_valid < _NUM_VALID:  # two are enough to know; each is read from end to end
            num_valid += not verify(path)
    return []


def _move_aside(path: Path, word: str) -> None:
    """`path` is called `<word>-<name>-<n>` with the first n that is free, on disk."""
    number = 1
    while files.exists(aside := path.with_name(f"{word}-{path.name}-{number}")):
        number += 1
    files.rename(path, aside)
    files.fsync_directory(path.parent)


def _none_valid(directory: Path, passed_over: list[tuple[str, tuple[str, ...]]], damaged: list[str]) -> DataError:
    found = "; ".join(f"{name}: {', '.join(reasons)}" for name, reasons in passed_over) or ", ".join(damaged)
    return DataError(
        f"there are checkpoints, but none is valid ({found})",
        where=str(directory),
        fix="put a good copy back, or start again at update 0 with resume=fresh, which keeps these folders",
    )


_NUM_DIGITS = 10
_NUM_VALID = 2  # never fewer are kept
_NUM_FAILURES = 3  # in a row, then saving is given up
_MANIFEST_BYTES = 16 << 20  # a manifest has about 200 bytes per file
_SUFFIX = ".safetensors"
_OUTGOING = f"{files.TEMPORARY}old-"
_NAME = re.compile(rf"update-(\d{{{_NUM_DIGITS}}})", re.ASCII)
_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_OWN_KEYS = frozenset({"sha256", "format_version", "update", "files"})
_DTYPES = frozenset(
    {
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "float8_e4m3fn",
        "float8_e5m2",
        "int64",
        "int32",
        "int16",
        "int8",
        "uint64",
        "uint32",
        "uint16",
        "uint8",
        "bool",
        "complex64",
    }
)  # what safetensors both writes and reads back
