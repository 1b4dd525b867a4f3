"""Real processes that train together over gloo. They are forked once and kept: torch is imported once in all."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

_PRELOAD = [
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.tensor",
    "osora_cli.cli.main",
    "osora_cli.app.train",
    "osora_cli.engine.fsdp",
    "osora_cli.engine.ddp",
    "support.rank_bodies",
]
TIMEOUT_S = 120


class RankServer:
    """Up to `most` processes that wait for something to do together.

    An order names a function of `support.rank_bodies`, how many ranks take part and its arguments; it forms a process
    group of its own. The function gets this rank's `Ranks` first.
    """

    def __init__(self, most: int) -> None:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as `osora` sets it for ranks
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        self._scratch = tempfile.TemporaryDirectory()
        self._orders = 0
        self._members: list[tuple[BaseProcess, Connection]] = []
        for rank in range(most):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, there), daemon=True)
            process.start()
            there.close()
            self._members.append((process, here))

    def run(self, world_size: int, body: Callable[..., Any] | str, *args: Any, **options: Any) -> list[Any]:
        """What the function returns on each rank, in rank order. The first rank's exception is raised here."""
        self._orders += 1
        meeting = str(Path(self._scratch.name) / f"meeting-{self._orders}")
        name = body if isinstance(body, str) else body.__name__
        for _, pipe in self._members[:world_size]:
            pipe.send((world_size, meeting, name, args, options))
        answers = []
        for rank, (_, pipe) in enumerate(self._members[:world_size]):
            if not pipe.poll(TIMEOUT_S):
                raise TimeoutError(f"rank {rank} of {world_size} gave no answer to `{name}` in {TIMEOUT_S} s")
            answers.append(pipe.recv())
        errors = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(answers) if text is not None]
        if errors:
            raise AssertionError("\n".join(errors))
        return [value for _, value in answers]

    def close(self) -> None:
        for process, pipe in self._members:
            pipe.close()
            process.join(10)
            if process.is_alive():
                process.kill()
        self._scratch.cleanup()


def _serve(rank: int, pipe: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            world_size, meeting, name, args, options = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((None, _obey(rank, world_size, meeting, name, args, options)))
        except BaseException:
            pipe.send((traceback.format_exc(), None))


def _obey(rank: int, world_size: int, meeting: str, name: str, args: Any, options: Any) -> Any:
    from datetime import timedelta

    import torch.distributed as dist
    from support import rank_bodies

    from osora_cli.engine.ranks import Ranks

    body = getattr(rank_bodies, name)
    if world_size == 1:
        return body(Ranks(), *args, **options)
    store = dist.FileStore(meeting, world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    try:
        group = dist.new_group(backend="gloo")
        return body(Ranks(rank, world_size, rank, group, None), *args, **options)
    finally:
        time.sleep(0.1)  # as osora does at the end of a run, see engine/launch.py
        dist.destroy_process_group()
