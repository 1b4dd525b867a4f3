"""What of a launcher's surroundings is taken, and what is refused."""

from __future__ import annotations

import pytest
import torch

from osora_cli.engine.launch import joined, launched
from osora_cli.engine.native import pick_device
from osora_cli.engine.ranks import SINGLE_RANK, Ranks
from osora_cli.errors import SetupError


def test_alone_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert not launched()
    with joined("cpu", 60) as ranks:
        assert ranks == SINGLE_RANK
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert not launched()


def test_a_launchers_variable_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with (
        pytest.raises(SetupError, match="RANK, MASTER_ADDR, MASTER_PORT is not set"),
        joined("cpu", 60),
    ):
        pass


def test_a_rank_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device("auto", 1) == torch.device("cuda", 1)
    assert pick_device("cpu", 5) == torch.device("cpu")
    with pytest.raises(SetupError, match="rank 2 of this machine has no GPU: there are 2"):
        pick_device("auto", 2)


def test_ranks_that_share_tokens_are_one_for_the_data() -> None:
    assert [Ranks(rank, 4, sequence=2).data_rank for rank in range(4)] == [0, 0, 1, 1]
    assert Ranks(3, 4, sequence=2).data_replicas == 2
