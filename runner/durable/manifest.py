"""The manifest of a checkpoint: JSON that holds its own hash."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def serialize_manifest(manifest: Mapping[str, Any]) -> bytes:
    """Serialize a manifest; its first key is the hash of the others in canonical JSON."""
    content = json.loads(json.dumps(manifest))  # as a reader sees it: string keys, lists for tuples
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    return json.dumps({"sha256": hashlib.sha256(canonical).hexdigest(), **content}, indent=1).encode() + b"\n"


def has_valid_hash(manifest: Mapping[str, Any], text: bytes) -> bool:
    """Return whether `text` is exactly what `serialize_manifest` returns: changed whitespace is detected."""
    try:
        return serialize_manifest({key: value for key, value in manifest.items() if key != "sha256"}) == text
    except RecursionError:
        return False


def is_entry(entry: Any) -> bool:
    """Return whether this is a plain name, a size and a hash."""
    return (
        isinstance(entry, dict)
        and entry.keys() == {"name", "size", "sha256"}
        and isinstance(entry["name"], str)
        and SAFE_NAME.fullmatch(entry["name"]) is not None
        and type(entry["size"]) is int
        and isinstance(entry["sha256"], str)
    )


def parse_json(text: bytes) -> Any:
    """Parse JSON; return None if it is invalid."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
