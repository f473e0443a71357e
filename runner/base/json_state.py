"""Convert a `state_dict()` of unknown content to JSON and back: nested containers of numbers, text, bytes, arrays."""

from __future__ import annotations

import base64
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.base.text import dtype_name


def encode_state(value: Any) -> Any:
    """Return a JSON-serializable copy of a state. Raises TypeError if the type of a value cannot be stored."""
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if isinstance(value, float) and not isinstance(value, np.generic):
        return value if math.isfinite(value) else _tag_value("float", repr(value))
    if isinstance(value, bytes):
        return _tag_value("bytes", _to_base64(value))
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
        array = np.asarray(value)
        tag = "array" if isinstance(value, np.ndarray) else "scalar"
        return _tag_value(tag, [array.dtype.str, list(array.shape), _to_base64(np.ascontiguousarray(array).tobytes())])
    if isinstance(value, Tensor):
        plain = value.detach().cpu().contiguous()
        content = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
        return _tag_value("tensor", [dtype_name(plain.dtype), list(plain.shape), _to_base64(content)])
    if isinstance(value, list):
        return [encode_state(item) for item in value]
    if isinstance(value, (tuple, set, frozenset)):
        items = value if isinstance(value, tuple) else sorted(value, key=repr)
        return _tag_value(
            type(value).__name__ if type(value) in (set, frozenset) else "tuple", [*map(encode_state, items)]
        )
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value) and _TAG not in value:
            return {key: encode_state(item) for key, item in value.items()}
        return _tag_value("dict", [[encode_state(key), encode_state(item)] for key, item in value.items()])
    raise TypeError(f"a {type(value).__name__} cannot be stored")


def decode_state(value: Any) -> Any:
    """Return the state that `encode_state` converted."""
    if isinstance(value, list):
        return [decode_state(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: decode_state(item) for key, item in value.items()}
    tag, content = value[_TAG], value["value"]
    match tag:
        case "float":
            return float(content)
        case "bytes":
            return _from_base64(content)
        case "array" | "scalar":
            array = np.frombuffer(_from_base64(content[2]), dtype=np.dtype(content[0])).reshape(content[1]).copy()
            return array if tag == "array" else array[()]
        case "tensor":
            flat = (
                torch.frombuffer(bytearray(_from_base64(content[2])), dtype=torch.uint8)
                if content[2]
                else torch.empty(0)
            )
            return flat.view(_DTYPES[content[0]]).reshape(content[1])
        case "tuple":
            return tuple(map(decode_state, content))
        case "set":
            return set(map(decode_state, content))
        case "frozenset":
            return frozenset(map(decode_state, content))
    return {decode_state(key): decode_state(item) for key, item in content}


def _tag_value(tag: str, value: Any) -> dict[str, Any]:
    return {_TAG: tag, "value": value}


def _to_base64(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")


def _from_base64(text: str) -> bytes:
    return base64.b64decode(text)


_TAG = "~type"
_DTYPES = {
    dtype_name(dtype): dtype
    for dtype in (
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
        torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    )
}  # fmt: skip
