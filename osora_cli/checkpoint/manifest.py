"""manifest.json: what a checkpoint must hold, byte for byte, proven by its own digest. Knows no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import xxhash

from osora_cli.checkpoint.counters import Counters

FORMAT_VERSION = 1
DIGEST = "xxh3_128"


class ManifestError(ValueError):
    """The manifest is damaged; the message says in which way."""


class LaterFormat(ManifestError):
    """The manifest is whole, but a later osora wrote it. Every later format keeps the rule of its digest."""


@dataclass(frozen=True)
class DigestRange:
    """Bytes [offset, offset + length) of a file and their xxh3_128, in hex."""

    offset: int
    length: int
    digest: str


@dataclass(frozen=True)
class FileRecord:
    """One file: its size and ranges that cover it."""

    size: int
    ranges: tuple[DigestRange, ...]

    def gaps(self) -> str | None:
        """What is wrong with the cover: every byte must be in exactly one range."""
        position = 0
        for part in sorted(self.ranges, key=lambda r: (r.offset, r.length)):
            if part.offset != position:
                kind = "twice" if part.offset < position else "by no range"
                return f"bytes from {min(position, part.offset)} to {max(position, part.offset)} are covered {kind}"
            position += part.length
        return None if position == self.size else f"the ranges end at byte {position} of {self.size}"


@dataclass(frozen=True)
class Manifest:
    """Parsed manifest.

    Attributes:
        counters: as in running_states.json.
        sequence: number of the save in its run, from 1: the order in which checkpoints were made, whatever step
            the run was taken back to in between.
        parts: groups and small states that the checkpoint holds.
        files: path relative to the checkpoint (with `/`) -> record. The manifest itself is not in it.
        optimizer_lag: optimizer group -> updates of the run minus the optimizer's own step (0 unless updates were
            skipped or the optimizer started later than the run).
        provenance: what the caller told of the run: engine, plugin, run_id, digests of table and buckets.
    """

    counters: Counters
    sequence: int
    parts: tuple[str, ...]
    files: dict[str, FileRecord]
    optimizer_lag: dict[str, int] = field(default_factory=dict)
    async_io: bool = False
    writer: str = ""
    world_size: int = 1
    plan_digest: str = ""
    osora_version: str = ""
    format_version: int = FORMAT_VERSION
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        return sum(record.size for record in self.files.values())


def whole_record(data: bytes) -> FileRecord:
    """Record of a small file in one range."""
    ranges = (DigestRange(0, len(data), xxhash.xxh3_128_hexdigest(data)),) if data else ()
    return FileRecord(len(data), ranges)


def dump_manifest(manifest: Manifest) -> bytes:
    """The file's bytes. The digest covers the parsed content, so that white space does not matter."""
    content = {
        "format_version": manifest.format_version,
        "osora_version": manifest.osora_version,
        "writer": manifest.writer,
        "async_io": manifest.async_io,
        "ranks": manifest.world_size,
        "sequence": manifest.sequence,
        "counters": manifest.counters.to_dict(),
        "parts": list(manifest.parts),
        "optimizer_lag": manifest.optimizer_lag,
        "plan": manifest.plan_digest,
        "provenance": manifest.provenance,
        "digest_kind": DIGEST,
        "files": {
            path: {"size": record.size, "ranges": [[r.offset, r.length, r.digest] for r in record.ranges]}
            for path, record in manifest.files.items()
        },
    }
    # Through JSON and back: what is digested is what a reader will parse (tuples are lists by then).
    content = json.loads(json.dumps(content, allow_nan=False))
    content["digest"] = _digest(content)
    return (json.dumps(content, separators=(",", ":")) + "\n").encode()


def _digest(content: Mapping[str, Any]) -> str:
    plain = {key: value for key, value in content.items() if key != "digest"}
    return xxhash.xxh3_128_hexdigest(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode())


def parse_manifest(raw: bytes) -> Manifest:
    """Parse and prove a manifest.

    Raises:
        ManifestError: no JSON, not proven by its own digest, or not complete.
        LaterFormat: written by a later osora.
    """
    try:
        content = json.loads(raw, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"is no JSON ({error})") from None
    if not isinstance(content, dict) or "digest" not in content:
        raise ManifestError("is no manifest: it has no digest of itself")
    if content["digest"] != _digest(content):
        raise ManifestError("does not match its own digest: it was changed after the save")
    version = content.get("format_version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise LaterFormat(f"has format version {version}, this osora reads up to {FORMAT_VERSION}")
    try:
        return _from_content(content)
    except (KeyError, TypeError, ValueError) as error:
        raise ManifestError(f"lacks something or holds the wrong kind of value ({error})") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a name occurs twice")
    return out


def _from_content(content: dict[str, Any]) -> Manifest:
    files = {
        str(path): FileRecord(
            int(record["size"]), tuple(DigestRange(int(o), int(n), str(d)) for o, n, d in record["ranges"])
        )
        for path, record in content["files"].items()
    }
    return Manifest(
        counters=Counters.from_dict(content["counters"]),
        sequence=int(content["sequence"]),
        parts=tuple(str(part) for part in content["parts"]),
        files=files,
        optimizer_lag={str(k): int(v) for k, v in content["optimizer_lag"].items()},
        async_io=bool(content["async_io"]),
        writer=str(content["writer"]),
        world_size=int(content["ranks"]),
        plan_digest=str(content["plan"]),
        osora_version=str(content["osora_version"]),
        format_version=int(content["format_version"]),
        provenance=dict(content["provenance"]),
    )
