from __future__ import annotations

import numpy as np

from osora_cli.data.seeded_uniform import SeededUniform


def test_streams_are_those_of_numpy() -> None:
    edges = [0, 1, 2, 42, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**40 + 7, 2**63, 2**64 - 1]
    seeds = np.array(edges + list(range(10**6, 10**6 + 500)), dtype=np.uint64)
    uniform, everyone = SeededUniform(seeds), np.arange(len(seeds))
    got = np.stack([uniform.random(everyone) for _ in range(6)], axis=1)
    assert (got == np.array([np.random.default_rng(int(seed)).random(6) for seed in seeds])).all()


def test_each_generator_keeps_its_own_place() -> None:
    uniform = SeededUniform(np.array([7, 8, 9], dtype=np.uint64))
    wanted = [np.random.default_rng(seed).random(3) for seed in (7, 8, 9)]
    assert uniform.random(np.array([1])).tolist() == [wanted[1][0]]
    assert uniform.random(np.array([0, 1])).tolist() == [wanted[0][0], wanted[1][1]]
    assert uniform.random(np.array([2, 1, 0])).tolist() == [wanted[2][0], wanted[1][2], wanted[0][1]]
