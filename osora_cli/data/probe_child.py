"""The child process that opens other people's files, so that a file that hangs or crashes FFmpeg costs one row.

Speaks JSON, a line a message: a request `{"path": ..., "exact": ...}` is answered by `{"info": [...]}` or
`{"error": reason}`; `{"ready": true}` comes first.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
from typing import Any, BinaryIO

from osora_cli.data.media import MediaError, probe


def main() -> None:
    """Answers requests from standard input until it is closed."""
    # Ctrl-C reaches the whole group of processes; it is for the parent to act on.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever else a library prints must not get between the answers
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(sys.stdin.buffer, requests), daemon=True).start()
    _send(answers, {"ready": True})
    while True:
        _send(answers, answer(json.loads(requests.get())))


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The answer to one request. Whatever goes wrong with a file is a reason, never an exception."""
    try:
        info = probe(request["path"], exact=request["exact"])
    except MediaError as error:
        return {"error": error.reason}
    except MemoryError:
        return {"error": "not enough memory to look at it"}
    except Exception as error:  # a fault of the file, or of a library met by it: this row's, not the run's
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
    fps = None if info.is_image else info.fps
    return {"info": [info.num_frames, info.height, info.width, fps]}


def _read(stream: BinaryIO, requests: queue.SimpleQueue[bytes]) -> None:
    for line in stream:
        requests.put(line)
    # The parent is gone or done with us; the main thread may be stuck in a file.
    os._exit(0)


def _send(answers: BinaryIO, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message).encode() + b"\n")
    answers.flush()
