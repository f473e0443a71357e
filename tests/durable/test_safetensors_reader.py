"""safetensors files are read row by row; files that the safetensors library rejects are rejected here, too."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from runner.base.errors import DataError, StorageError
from runner.durable.safetensors_header import InvalidFormat
from runner.durable.safetensors_reader import join_parts, open_tensors
from runner.durable.safetensors_writer import DTYPES, serialize_header, stream_tensors, view_bytes


def sample(dtype: torch.dtype, *shape: int) -> Tensor:
    numbers = torch.arange(1.0, torch.Size(shape).numel() + 1).view(shape)
    return numbers.to(dtype)


TENSORS = {
    **{f"t.{name}": sample(getattr(torch, name), 5, 3) for name in DTYPES if name != "bool"},
    "flags": torch.tensor([True, False, True]),
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 4),
    "no columns": torch.zeros(4, 0),
    "deep": sample(torch.float32, 4, 2, 3),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "t.safetensors", metadata={"format": "pt"})
    return tmp_path / "t.safetensors"


def same(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype) and view_bytes(one.contiguous()) == view_bytes(
        other.contiguous()
    )


def test_tensors_and_rows_equal_those_read_by_safetensors(file: Path) -> None:
    stored = open_tensors(file)
    assert stored.keys() == TENSORS.keys()
    for name, expected in load_file(file).items():
        assert (stored[name].shape, stored[name].dtype, stored[name].nbytes) == (
            expected.shape, expected.dtype, expected.nbytes
        )  # fmt: skip
        assert same(stored[name].read(), expected), name
        for start, stop in ((0, 1), (1, 3), (2, 99), (3, 3)) if expected.dim() else ():
            assert same(stored[name].read(start, stop), expected[start:stop]), (name, start, stop)


@pytest.mark.parametrize("max_bytes", [1, 20, 1 << 20])
def test_streaming_gives_the_bytes_of_the_safetensors_library(file: Path, max_bytes: int) -> None:
    chunks = [*stream_tensors(open_tensors(file), max_bytes)]
    largest_row = max(row.nbytes for _, _, rows in chunks for row in (rows if rows.dim() else [rows]))
    assert max(rows.nbytes for _, _, rows in chunks) <= max(max_bytes, largest_row)
    content = serialize_header(TENSORS, {"format": "pt"}) + b"".join(bytes(view_bytes(rows)) for _, _, rows in chunks)
    assert content == file.read_bytes()


def test_shards_are_joined_along_the_first_dimension(tmp_path: Path) -> None:
    whole = sample(torch.float32, 7, 2)
    for number, rows in enumerate((whole[:3], whole[3:6], whole[6:], whole[:0])):
        save_file({"w": rows.clone()} | ({"b": whole[0].clone()} if not number else {}), tmp_path / f"{number}")
    joined = join_parts([open_tensors(tmp_path / str(number)) for number in range(4)], tmp_path)
    assert same(joined["b"].read(), whole[0])
    for start in range(8):
        for stop in range(start, 8):
            assert same(joined["w"].read(start, stop), whole[start:stop])


def with_header(change: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    def changed(content: bytes) -> bytes:
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + content[8 + length :]

    return changed


INVALID: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "short": lambda content: content[:5],
    "huge header": lambda content: (1 << 60).to_bytes(8, "little") + content[8:],
    "no header": lambda content: (0).to_bytes(8, "little") + content[8:],
    "not json": lambda content: content[:8] + b"x" + content[9:],
    "a list": lambda content: (2).to_bytes(8, "little") + b"[]",
    "truncated": lambda content: content[:-1],
    "longer": lambda content: content + b"x",
    "hole": with_header(lambda header: header["deep"].update(data_offsets=[0, 96])),
    "wrong size": with_header(lambda header: header["deep"].update(shape=[4, 2, 4])),
    "negative": with_header(lambda header: header["deep"].update(shape=[-4, -2, 3])),
    "overflow": with_header(lambda header: header["empty"].update(shape=[0, 1 << 64])),
    "dtype": with_header(lambda header: header["deep"].update(dtype="F33")),
    "no dtype": with_header(lambda header: header["deep"].pop("dtype")),
    "backwards": with_header(lambda header: header["deep"].update(data_offsets=header["deep"]["data_offsets"][::-1])),
    "text shape": with_header(lambda header: header["deep"].update(shape="423")),
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_files_are_rejected(name: str, file: Path) -> None:
    file.write_bytes(INVALID[name](file.read_bytes()))
    with pytest.raises(SafetensorError), safe_open(file, framework="pt") as opened:
        opened.keys()
    with pytest.raises(InvalidFormat):
        open_tensors(file)


def test_a_file_that_shrinks_after_opening_does_not_crash(file: Path) -> None:
    """Reading raises an error."""
    stored = open_tensors(file)
    file.write_bytes(file.read_bytes()[:600])
    with pytest.raises(DataError):
        [tensor.read() for tensor in stored.values()]
    file.unlink()
    with pytest.raises(StorageError):
        stored["deep"].read()


def test_a_strided_view_of_one_element_is_written_like_a_copy() -> None:
    """The only dimension of the view keeps the stride of the column that it is taken from."""
    column = torch.arange(6.0).view(3, 2)[:1, 0]
    assert bytes(view_bytes(column)) == bytes(view_bytes(column.clone()))
