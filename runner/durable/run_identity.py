"""Decide which checkpoints belong to a run, by its past and present names and its random identifier."""

from __future__ import annotations

import re
import secrets
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from runner.records.run_record import RunRecord


@dataclass(frozen=True)
class RunIdentity:
    """The identity of a run, for matching its checkpoints.

    names    past and present names; empty: unknown, any name matches
    uid      identifier of the run; None: unknown, as in runs of earlier versions or with a damaged run.json
    adopted  uids of other runs whose checkpoints the user has accepted for this one
    """

    names: frozenset[str] = frozenset()
    uid: str | None = None
    adopted: frozenset[str] = frozenset()

    def has_other_name(self, manifest: Mapping[str, Any]) -> bool:
        """Return whether the checkpoint names a run other than this one."""
        name = manifest.get("run_id")
        return bool(self.names) and name is not None and not (isinstance(name, str) and name in self.names)

    def has_other_uid(self, manifest: Mapping[str, Any]) -> bool | None:
        """Return whether the uid of the checkpoint differs from that of this run; None if either has none."""
        uid = manifest_uid(manifest)
        return None if uid is None or self.uid is None else uid != self.uid and uid not in self.adopted


def read_identity(record: RunRecord, name: str) -> RunIdentity:
    """Return the identity of the run in a folder of this name. Any value of the record may be damaged."""
    names = frozenset(adopted_run for adopted_run in (record.name, *record.names) if adopted_run is not None)
    adopted = frozenset(adopted_run.uid for adopted_run in record.adopted if is_valid_uid(adopted_run.uid))
    return RunIdentity(names | {name} if names else names, record.uid if is_valid_uid(record.uid) else None, adopted)


def manifest_uid(manifest: Mapping[str, Any]) -> str | None:
    """Return the uid of the run that wrote a checkpoint; None for earlier versions."""
    uid = manifest.get("run_uid")
    return uid if is_valid_uid(uid) else None


def generate_uid() -> str:
    """Return 32 hexadecimal digits, 24 of them random and 8 a checksum.

    The checksum is needed because run.json has no hash: a bit flip would change the identity of the run, and all its
    checkpoints would be refused. A damaged identifier is treated as unknown.
    """
    digits = secrets.token_hex(_NUM_RANDOM // 2)
    return digits + _checksum(digits)


def is_valid_uid(value: object) -> TypeGuard[str]:
    """Return whether the value is a valid uid."""
    return (
        isinstance(value, str)
        and _UID.fullmatch(value) is not None
        and _checksum(value[:_NUM_RANDOM]) == value[_NUM_RANDOM:]
    )


def _checksum(digits: str) -> str:
    return f"{zlib.crc32(digits.encode()):08x}"


_NUM_RANDOM = 24
_UID = re.compile(r"[0-9a-f]{32}")
