"""Write tensors in safetensors format without a second copy in host memory.

safetensors' own `save` makes a second copy of all data before the first byte is written. Here the header is built
separately and followed by the memory of the tensors. The bytes are identical to those of the library.
"""

from __future__ import annotations

import json
import mmap
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from runner.base.accelerator import get_accelerator, page_unlock
from runner.base.text import dtype_name
from runner.tensors.stored_tensor import StoredTensor

Value = TypeVar("Value", bound=Tensor | StoredTensor)


class HostBuffer:
    """Host memory for copies of the state, reused from save to save.

    Fresh memory is slow: the kernel zeroes each page on its first write, which takes longer than the copy
    itself (scripts/measure/save.py). The buffer is not inherited by forked children such as data workers: otherwise
    copy-on-write would duplicate each page written while they live. For a GPU it is page-locked, so that copies run at
    the speed of the bus.
    """

    def __init__(self) -> None:
        self._chunks: list[Tensor] = []  # bytes
        self._chunk = self._used = 0  # position of the next copy
        self._allocator: threading.Thread | None = None

    def prepare(self, nbytes: int, device: torch.device) -> None:
        """Allocate memory for `nbytes` bytes on a thread, so that even the first copy does not wait for page faults.

        Does nothing for sizes that the system provides within milliseconds, or if enough memory is already allocated.

        device  source of the copies
        """
        if self._allocator is None and not self._chunks and nbytes >= _MIN_THREAD_BYTES:
            thread = threading.Thread(
                target=self._allocate_in_background, args=(nbytes, device), name="host-buffer", daemon=True
            )
            with suppress(RuntimeError):  # no thread available: the first copy waits for the memory
                thread.start()
                self._allocator = thread

    def _allocate_in_background(self, nbytes: int, device: torch.device) -> None:
        get_accelerator(device).activate()  # a new thread starts on device 0, where this would create another context
        with suppress(MemoryError):  # the copy itself will raise it
            chunk = _allocate_pages(nbytes, device)
            view = chunk.numpy()
            for start in range(0, len(view), _HUGE_PAGE):  # numpy releases the GIL
                np.copyto(view[start : start + _HUGE_PAGE], 0)
            self._chunks.append(chunk)

    @property
    def nbytes(self) -> int:
        """Allocated address space in bytes; pages that were never written to use no memory."""
        return sum(chunk.numel() for chunk in self._chunks)

    def clear(self) -> None:
        """Mark all copies as free to be overwritten."""
        if self._allocator is not None:
            self._allocator.join()
        self._chunk = self._used = 0

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a dense, contiguous copy of `tensor` on the host, valid until `clear`.

        Raises MemoryError if the host is out of memory.
        """
        if tensor.layout != torch.strided:
            return tensor.detach().to("cpu", copy=True)  # the format does not support it; `save` reports its name
        size = tensor.numel() * tensor.element_size()
        buffer = self._reserve(size, tensor.device)
        result = buffer.view(tensor.dtype).view(tensor.shape) if size else torch.empty(tensor.shape, dtype=tensor.dtype)
        return result.copy_(tensor.detach())

    def _reserve(self, size: int, device: torch.device) -> Tensor:
        while self._chunk < len(self._chunks):
            chunk, start = self._chunks[self._chunk], self._used
            if start + size <= chunk.numel():
                self._used = -(-(start + size) // _ALIGNMENT) * _ALIGNMENT
                return chunk[start : start + size]
            self._chunk, self._used = self._chunk + 1, 0
        chunk_size = max(size, min(self.nbytes, _LARGEST_CHUNK), _SMALLEST_CHUNK)
        self._chunks.append(_allocate_pages(chunk_size, device))
        return self._reserve(size, device)


def serialize_tensors(tensors: Mapping[str, Tensor]) -> list[bytes | memoryview]:
    """Return the parts of a safetensors file of these CPU tensors, in order; the same bytes as safetensors' `save`.

    Contiguous tensors are not copied, and must not change until they are written.
    """
    data: list[bytes | memoryview] = [serialize_header(tensors)]
    for _, tensor in _in_file_order(tensors):
        # The memory of a conjugated view is not conjugated, and safetensors 0.8 writes it unchanged.
        dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
        if dense.numel():
            data.append(view_bytes(dense))
    return data


def serialize_header(tensors: Mapping[str, Tensor | StoredTensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the header of a safetensors file, which the tensors follow in the order of `stream_tensors`."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in _in_file_order(tensors):
        size = tensor.shape.numel() * tensor.dtype.itemsize
        header[name] = {
            "dtype": DTYPES[dtype_name(tensor.dtype)],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + size],
        }
        end += size
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def stream_tensors(tensors: Mapping[str, StoredTensor], max_bytes: int = 64 << 20) -> Iterator[tuple[str, int, Tensor]]:
    """Yield (name, first row, rows) of all tensors in the order of a file, in pieces of about `max_bytes`."""
    for name, tensor in _in_file_order(tensors):
        num_rows = tensor.shape[0] if tensor.shape else 1
        rows = max(1, max_bytes * num_rows // max(1, tensor.nbytes))
        for start in range(0, num_rows, rows):
            yield name, start, tensor.read(start, start + rows)


def view_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor."""
    flat = tensor.as_strided((tensor.numel(),), (1,))  # reshape may keep another stride
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def _in_file_order(tensors: Mapping[str, Value]) -> list[tuple[str, Value]]:
    """Return the tensors in safetensors' order: by dtype, then by name."""
    return sorted(tensors.items(), key=lambda item: (_DTYPE_ORDER[dtype_name(item[1].dtype)], item[0].encode()))


def unsupported_reason(tensor: Tensor) -> str | None:
    """Return why the format cannot store the tensor, None if it can."""
    if str(tensor.layout) != "torch.strided" or dtype_name(tensor.dtype) not in DTYPES:
        return f"it is {tensor.layout} and {tensor.dtype}"
    return None


def _allocate_pages(size: int, device: torch.device) -> Tensor:
    """Return `size` bytes of host memory in fresh pages, page-locked for copies from a GPU."""
    size = -(-size // _HUGE_PAGE) * _HUGE_PAGE
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"cannot allocate {size / 2**20:.0f} MiB of host memory for a copy of the state") from error
    memory.madvise(mmap.MADV_DONTFORK)
    with suppress(OSError):  # no huge pages on this system
        memory.madvise(mmap.MADV_HUGEPAGE)
    chunk = torch.frombuffer(memory, dtype=torch.uint8)  # keeps a reference to `memory`
    # Not `pin_memory=True`: torch rounds page-locked memory to powers of two, caches it, and forked children copy it.
    if get_accelerator(device).page_lock(chunk.data_ptr(), chunk.numel()):
        # Unlock before the pages are unmapped, because memory mapped there later would otherwise count as locked.
        weakref.finalize(memory, page_unlock, chunk.data_ptr()).atexit = False
    return chunk


DTYPES: Mapping[str, str] = {
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
    "complex64": "C64",
    "float32": "F32",
    "uint32": "U32",
    "int32": "I32",
    "bfloat16": "BF16",
    "float16": "F16",
    "uint16": "U16",
    "int16": "I16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}  # dtypes that safetensors writes and reads, in its order in the file: torch's name -> the format's name
_DTYPE_ORDER = {word: rank for rank, word in enumerate(DTYPES)}
_ALIGNMENT = 64  # cache line
_HUGE_PAGE = 2 << 20
_SMALLEST_CHUNK, _LARGEST_CHUNK = 2 << 20, 1 << 30
_MIN_THREAD_BYTES = 16 << 20  # the system provides less within milliseconds
