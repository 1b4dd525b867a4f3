"""`numpy.random.default_rng(seed).random()` for very many seeds at once.

Bucket assignment gives every clip a generator of its own, which as NumPy objects costs about 20 microseconds a clip.
Here the same numbers are made for whole arrays of seeds: NumPy's seed sequence (after M. E. O'Neill, "Developing a
seed_seq alternative", 2015) and PCG64 with XSL-RR output (O'Neill, "PCG: A family of simple fast space-efficient
statistically good algorithms for random number generation", 2014). NumPy promises both streams for good (NEP 19
guards bit generators); the tests compare with the installed one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]

_POOL_WORDS = 4
_MASK_32 = 0xFFFFFFFF
_INIT_A, _MULT_A = 0x43B0D7E5, 0x931E8875
_INIT_B, _MULT_B = 0x8B51F9DD, 0x58F38DED
_MIX_LEFT, _MIX_RIGHT = np.uint32(0xCA01F9DD), np.uint32(0x4973F715)
_HALF_WORD = np.uint32(16)

_PCG_MULT_HIGH, _PCG_MULT_LOW = np.uint64(0x2360ED051FC65DA4), np.uint64(0x4385DF649FCCF645)
_LOW_32, _SHIFT_32 = np.uint64(_MASK_32), np.uint64(32)
_ONE, _SHIFT_63 = np.uint64(1), np.uint64(63)


class _Hash:
    """The seed sequence's hash, whose constant moves on with every call."""

    def __init__(self, start: int, step: int) -> None:
        self._constant, self._step = start, step

    def __call__(self, value: U32) -> U32:
        value = value ^ np.uint32(self._constant)
        self._constant = self._constant * self._step & _MASK_32
        value = value * np.uint32(self._constant)
        return value ^ (value >> _HALF_WORD)


def _mix(x: U32, y: U32) -> U32:
    mixed = _MIX_LEFT * x - _MIX_RIGHT * y
    return mixed ^ (mixed >> _HALF_WORD)


def _seed_words(seeds: U64) -> list[U64]:
    """Four 64-bit words for each seed, as `SeedSequence(seed).generate_state(4, numpy.uint64)`."""
    # A seed is split into 32-bit words; missing words count as 0, so two words serve for any seed below 2**64.
    entropy = [seeds.astype(np.uint32), (seeds >> _SHIFT_32).astype(np.uint32)]
    zero = np.zeros_like(entropy[0])
    hash_in = _Hash(_INIT_A, _MULT_A)
    pool = [hash_in(word) for word in (*entropy, zero, zero)]
    for source in range(_POOL_WORDS):
        for target in range(_POOL_WORDS):
            if source != target:
                pool[target] = _mix(pool[target], hash_in(pool[source]))
    hash_out = _Hash(_INIT_B, _MULT_B)
    halves = [hash_out(pool[i % _POOL_WORDS]).astype(np.uint64) for i in range(2 * _POOL_WORDS)]
    return [halves[2 * i] | (halves[2 * i + 1] << _SHIFT_32) for i in range(_POOL_WORDS)]


def _multiply_64(x: U64, y: np.uint64) -> tuple[U64, U64]:
    """High and low 64 bits of the product."""
    x_low, x_high, y_low, y_high = x & _LOW_32, x >> _SHIFT_32, y & _LOW_32, y >> _SHIFT_32
    low = x_low * y_low
    middle = x_high * y_low + (low >> _SHIFT_32)
    middle_2 = x_low * y_high + (middle & _LOW_32)
    return x_high * y_high + (middle >> _SHIFT_32) + (middle_2 >> _SHIFT_32), x * y


def _add_128(a_high: U64, a_low: U64, b_high: U64, b_low: U64) -> tuple[U64, U64]:
    low = a_low + b_low
    return a_high + b_high + (low < a_low), low


class SeededUniform:
    """One PCG64 for each seed; `random(index)` takes the next number of some of them.

    Args:
        seeds: uint64 [N].
    """

    def __init__(self, seeds: U64) -> None:
        high, low, stream_high, stream_low = _seed_words(seeds)
        self._inc_high = (stream_high << _ONE) | (stream_low >> _SHIFT_63)
        self._inc_low = (stream_low << _ONE) | _ONE
        # Seeding: one step from state 0 gives the increment; add the seed; one more step.
        everyone = np.arange(len(seeds))
        self._high, self._low = _add_128(self._inc_high, self._inc_low, high, low)
        self._step(everyone)

    def _step(self, index: NDArray[np.intp]) -> tuple[U64, U64]:
        state_high, state_low = self._high[index], self._low[index]
        high, low = _multiply_64(state_low, _PCG_MULT_LOW)
        high = high + state_high * _PCG_MULT_LOW + state_low * _PCG_MULT_HIGH
        high, low = _add_128(high, low, self._inc_high[index], self._inc_low[index])
        self._high[index], self._low[index] = high, low
        return high, low

    def random(self, index: NDArray[np.intp]) -> NDArray[np.float64]:
        """The next number in [0, 1) of the generators at `index` (each at most once), float64 [len(index)]."""
        high, low = self._step(index)
        folded, turn = high ^ low, high >> np.uint64(58)
        bits = (folded >> turn) | (folded << ((np.uint64(64) - turn) & np.uint64(63)))
        return (bits >> np.uint64(11)) * (1.0 / 9007199254740992.0)
