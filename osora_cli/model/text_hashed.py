"""A text embedder without weights: hashed n-grams. It tells texts apart and sees shared word parts, no meaning.

For demos and tests. A feature (a character n-gram, a word, a pair of words) stands for C signs, the first C bits of its
SHAKE-256 hash: a random projection with entries +1 and -1 (Achlioptas 2003), whose matrix is never stored. Sums of
signs are whole numbers, and what follows is one division, so the vectors are the same on every machine.

Shapes: B texts, L tokens, C channels.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from osora_cli.model.text import FrozenTextEmbedder, TextEmbedding

Sums = npt.NDArray[np.int64]

NGRAM_SIZES = (3, 4, 5)
WORD_WEIGHT = 3  # of a word, and of its pair with the word before, against one of its n-grams
# Runs of letters and digits of alphabets; of all else (signs, ideographs, emoji) each character. Ranges and not
# categories, because those depend on the Unicode version that a Python has.
_WORD = re.compile(r"[0-9a-z\u00aa-\u1fff]+|\S")
_LAST_CASED = "\u052f"  # lower case is taken up to here (Latin, Greek, Cyrillic) for the same reason
_END, _PAD = "end", "pad"


class HashedNgramEmbedder(FrozenTextEmbedder):
    """Words to vectors by hashing. Both outputs have `width` channels; each vector's mean square is 1.

    A token is a word or sign: its n-grams, itself, and its pair with the word before, so that order shows. An end token
    follows, and then padding, as T5 has it. The pooled vector sums up what the tokens up to the end hold.
    """

    pad_C: torch.Tensor

    def __init__(self, width: int, max_length: int) -> None:
        super().__init__(max_length, width, width)
        # The buffer also says where the embedder is and in which dtype; it can be recomputed, so no file has it.
        self.register_buffer("pad_C", torch.from_numpy(_unit(_signs("special", _PAD, width))), persistent=False)
        self.train(False)

    def _embed(self, texts: list[str], length: int) -> TextEmbedding:
        width = self.token_width
        tokens_BLC = self.pad_C.expand(len(texts), length, width).clone()
        pooled_BC = torch.empty(len(texts), width)
        for index, text in enumerate(texts):
            sums_LC = np.stack(list(_token_sums(text, self.max_length, width)))
            units_LC = np.stack([_unit(sums_C) for sums_C in sums_LC])
            tokens_BLC[index, : len(units_LC)] = torch.from_numpy(units_LC).to(self.pad_C)
            pooled_BC[index] = torch.from_numpy(_unit(sums_LC.sum(axis=0)))
        return TextEmbedding(tokens_BLC, pooled_BC.to(self.pad_C))


def _token_sums(text: str, max_length: int, width: int) -> Iterator[Sums]:
    lowered = "".join(char.lower() if char <= _LAST_CASED else char for char in text)
    before = ""
    for word in _WORD.findall(lowered)[: max_length - 1]:
        yield _word_sums(word, width) + WORD_WEIGHT * _signs("pair", f"{before} {word}", width)
        before = word
    yield _signs("special", _END, width)


@lru_cache(maxsize=4096)
def _word_sums(word: str, width: int) -> Sums:
    marked = f"<{word}>"
    sums_C = WORD_WEIGHT * _signs("word", word, width)
    for size in NGRAM_SIZES:
        for start in range(len(marked) - size + 1):
            sums_C += _signs("ngram", marked[start : start + size], width)
    return sums_C


def _signs(kind: str, feature: str, width: int) -> Sums:
    hashed = hashlib.shake_256(f"{kind}:{feature}".encode("utf-8", "surrogatepass"))
    bits = np.unpackbits(np.frombuffer(hashed.digest(-(-width // 8)), np.uint8), count=width)
    return bits.astype(np.int64) * 2 - 1


def _unit(sums_C: Sums) -> npt.NDArray[np.float32]:
    """Scaled to a mean square of 1; signs that cancel out everywhere stay zero."""
    rms = math.sqrt(int(sums_C @ sums_C) / len(sums_C))
    return (sums_C / (rms or 1.0)).astype(np.float32)
