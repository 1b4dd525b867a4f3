"""Who is at work on a `.staging-*` or `.trash-*` folder. Knows no torch.

An owner is a process of a host: its start time tells it from a later process with the same number. For another host
(or container) nothing can be asked, so its heartbeat counts: the owner file's modification time.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from osora_cli.checkpoint import fsio
from osora_cli.checkpoint.layout import OWNER

HEARTBEAT_S = 30.0
DEAD_AFTER_S = 600.0

Purpose = Literal["save", "replaced", "retired"]


@dataclass(frozen=True)
class Owner:
    """A process, and what it is doing with the folder.

    Attributes:
        host: tells machines, boots and process-number spaces apart.
        pid: process number on that host.
        start: its start time in clock ticks since boot, "" where the system does not tell.
        purpose: "save" (staging), or why a checkpoint is in the trash: a save of the same name takes its place
            ("replaced"), or retention removes it ("retired").
    """

    host: str
    pid: int
    start: str
    purpose: Purpose


def write_owner(folder: Path, purpose: Purpose) -> None:
    """Say that this process is at work on the folder."""
    pid = os.getpid()
    owner = Owner(_host(), pid, _start_time(pid) or "", purpose)
    fsio.write_durable(folder / OWNER, (json.dumps(asdict(owner)) + "\n").encode())


def read_owner(folder: Path) -> Owner | None:
    """The folder's owner, None where there is none or its file is cut."""
    try:
        data = json.loads((folder / OWNER).read_bytes())
        return Owner(str(data["host"]), int(data["pid"]), str(data["start"]), data["purpose"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_live(folder: Path) -> bool:
    """Whether the folder's owner may still be at work. In doubt, yes."""
    owner = read_owner(folder)
    if owner is not None and owner.host == _host():
        alive = _alive(owner)
        if alive is not None:
            return alive
    beat = folder / OWNER if (folder / OWNER).exists() else folder
    try:
        return time.time() - beat.stat().st_mtime < DEAD_AFTER_S
    except OSError:
        return False


def _alive(owner: Owner) -> bool | None:
    """Whether that very process runs on this host; None when the system does not tell."""
    if owner.pid <= 0:
        return False
    try:
        os.kill(owner.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    start = _start_time(owner.pid)
    if start is None or not owner.start:
        return None
    return start == owner.start


def _start_time(pid: int) -> str | None:
    """Start time in clock ticks since boot, "ended" for a zombie, None where it cannot be read."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the name before it may hold blanks and brackets
    return "ended" if fields[0] in ("Z", "X") else fields[19]


def _host() -> str:
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with suppress(OSError):
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    return "/".join(parts)


class Heartbeat:
    """Touches the owner file of a folder while a save is at work, from a thread of its own."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / OWNER
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="osora-heartbeat", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_S):
            with suppress(OSError):
                os.utime(self._path)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
