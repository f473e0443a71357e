"""Ways to damage files, and two small checkpoints to try them on."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from runner.durable import checkpoint, files
from runner.durable.manifest import serialize_manifest
from tests.faults import saver

Content = dict[str, bytes]  # file name -> content
OLD, NEW = 1, 2


class Pair:
    """Two checkpoints in a folder, which `put` rewrites any number of times."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.originals: dict[int, Content] = {}
        for update in (OLD, NEW):
            path = checkpoint.save(folder / "source", saver.snapshot(update))
            self.originals[update] = {file.name: file.read_bytes() for file in path.iterdir()}

    @property
    def directory(self) -> Path:
        """The folder that recovery reads."""
        return self.folder / "checkpoints"

    def put(self, contents: Mapping[str, Content]) -> None:
        """Replace the content of the folder with these checkpoints, by name."""
        shutil.rmtree(self.directory, ignore_errors=True)
        for name, content in contents.items():
            (self.directory / name).mkdir(parents=True)
            for file, data in content.items():
                (self.directory / name / file).write_bytes(data)


def name_of(update: int) -> str:
    return checkpoint.checkpoint_path(Path(), update).name


# Damage to one file


def flip_bits(data: bytes, generator: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(generator.choice((1, 1, 1, 2, 64))):
        changed[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
    return bytes(changed)


def truncate(data: bytes, generator: random.Random) -> bytes:
    return data[: generator.choice((0, 1, len(data) - 1, generator.randrange(len(data))))]


def lengthen(data: bytes, generator: random.Random) -> bytes:
    return data + generator.choice((b"\0", b"\n", b"\0" * 512, generator.randbytes(7), data))


def zero_block(data: bytes, generator: random.Random) -> bytes:
    start, length = _block(data, generator)
    return data[:start] + bytes(length) + data[start + length :]


def swap_blocks(data: bytes, generator: random.Random) -> bytes:
    size = min(generator.choice((1, 16, 128, 512)), len(data) // 2)
    count = len(data) // size
    one, other = sorted(generator.sample(range(count), 2))
    changed = bytearray(data)
    first, second = slice(one * size, (one + 1) * size), slice(other * size, (other + 1) * size)
    changed[first], changed[second] = data[second], data[first]
    return bytes(changed)


def double_block(data: bytes, generator: random.Random) -> bytes:
    start, length = _block(data, generator)
    return data[: start + length] + data[start:]


def drop_block(data: bytes, generator: random.Random) -> bytes:
    start, length = _block(data, generator)
    return data[:start] + data[start + length :]


def random_bytes(data: bytes, generator: random.Random) -> bytes:
    return generator.randbytes(generator.choice((0, 1, len(data), 5000)))


ON_A_FILE: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    flip_bits, flip_bits, flip_bits, truncate, truncate, lengthen, zero_block, swap_blocks, double_block, drop_block,
    random_bytes,
)  # fmt: skip


# Damage to one checkpoint of two


def damage_file(pair: Pair, update: int, generator: random.Random) -> tuple[str, Content]:
    content = dict(pair.originals[update])
    name, change = generator.choice(sorted(content)), generator.choice(ON_A_FILE)
    content[name] = change(content[name], generator)
    return f"{change.__name__} {name}", content


def remove_file(pair: Pair, update: int, generator: random.Random) -> tuple[str, Content]:
    content = dict(pair.originals[update])
    name = generator.choice(sorted(content))
    del content[name]
    return f"without {name}", content


def add_file(pair: Pair, update: int, generator: random.Random) -> tuple[str, Content]:
    name = generator.choice(("more.safetensors", "MANIFEST.json.bak", ".hidden", "model", "a b", "é"))
    return f"with {name}", pair.originals[update] | {name: generator.choice((b"", b"{}", b"\0" * 99))}


def rename_file(pair: Pair, update: int, generator: random.Random) -> tuple[str, Content]:
    content = dict(pair.originals[update])
    name = generator.choice(sorted(content))
    other = generator.choice((name.upper(), name + "~", "x-" + name, name.replace(".", "-")))
    content[other] = content.pop(name)
    return f"{name} is called {other}", content


def exchange_files(pair: Pair, update: int, generator: random.Random) -> tuple[str, Content]:
    content = dict(pair.originals[update])
    one, other = generator.sample(sorted(content), 2)
    content[one], content[other] = content[other], content[one]
    return f"{one} and {other} exchanged", content


def mix_files(pair: Pair, update: int, generator: random.Random) -> tuple[str, Content]:
    theirs = pair.originals[OLD + NEW - update]
    names = generator.sample(sorted(theirs), generator.randint(1, len(theirs) - 1))
    return f"{names} are those of the other", pair.originals[update] | {name: theirs[name] for name in names}


def replace_by_the_other(pair: Pair, update: int, generator: random.Random) -> tuple[str, Content]:
    return "is the other", dict(pair.originals[OLD + NEW - update])


def forge_manifest(pair: Pair, update: int, generator: random.Random) -> tuple[str, Content]:
    """Change the manifest and recompute its hash, as a bug in a program might."""
    content = dict(pair.originals[update])
    manifest = json.loads(content["MANIFEST.json"])
    del manifest["sha256"]
    what, change = generator.choice(_FORGERIES)
    change(manifest, generator.choice(manifest["files"]))
    content["MANIFEST.json"] = serialize_manifest(manifest)
    return what, content


def _sized(size: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda _, entry: entry.__setitem__("size", size)


_FORGERIES: tuple[tuple[str, Callable[[dict[str, Any], dict[str, Any]], Any]], ...] = (
    *((f"size {size}", _sized(size)) for size in (0, -1, 1 << 40, 1 << 80, 1e300, True, None, "9")),
    ("an entry twice", lambda manifest, entry: manifest["files"].append(dict(entry))),
    ("one entry missing", lambda manifest, entry: manifest["files"].remove(entry)),
    ("no files", lambda manifest, _: manifest["files"].clear()),
    ("another hash", lambda _, entry: entry.__setitem__("sha256", "0" * 64)),
    ("another name", lambda _, entry: entry.__setitem__("name", "../" + entry["name"])),
    ("another update", lambda manifest, _: manifest.__setitem__("update", 7)),
    ("a huge update", lambda manifest, _: manifest.__setitem__("update", 10**40)),
    ("another version", lambda manifest, _: manifest.__setitem__("format_version", 99)),
)

ON_A_CHECKPOINT: tuple[Callable[[Pair, int, random.Random], tuple[str, Content]], ...] = (
    *([damage_file] * 8), remove_file, add_file, rename_file, exchange_files, mix_files, mix_files,
    replace_by_the_other, forge_manifest,
)  # fmt: skip


def every_bit(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the content with each bit flipped in turn."""
    for position in range(len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[position] ^= 1 << bit
            yield f"bit {bit} of byte {position}", bytes(changed)


def every_length(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield every proper prefix of the content."""
    for length in range(len(data)):
        yield f"cut to {length} bytes", data[:length]


def tree(folder: Path) -> Content:
    """Return file name -> content."""
    return {name: (folder / name).read_bytes() for name in files.list_names(folder)}


def make_odd(path: Path, generator: random.Random) -> str:
    """Replace `path` by something other than a regular file; return its kind."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    kind = generator.choice(("a folder", "a pipe", "a link to nowhere", "a link to a file", "a device"))
    if kind == "a folder":
        path.mkdir()
    elif kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    else:
        path.symlink_to("nowhere" if kind == "a link to nowhere" else "config.yaml")
    return kind


def _block(data: bytes, generator: random.Random) -> tuple[int, int]:
    start = generator.randrange(len(data))
    return start, generator.randint(1, min(512, len(data) - start))
