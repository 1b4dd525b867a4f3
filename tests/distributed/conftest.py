"""One set of real processes for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.distributed import RankServer


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankServer]:
    server = RankServer(4)
    yield server
    server.close()
