"""Tiny T5 and CLIP text encoders with tokenizers, made on the spot: they need the extra `text`."""

from __future__ import annotations

import json
import random
import string
from pathlib import Path
from typing import Any

import sentencepiece
import torch
import transformers
from torch import nn

# Enough different words for a vocabulary of 200 pieces.
_RNG = random.Random(0)
WORDS = ["".join(_RNG.choices(string.ascii_lowercase, k=_RNG.randint(2, 7))) for _ in range(300)]
CORPUS = [f"The {' '.join(_RNG.choices(WORDS, k=5))} over a dog, slowly." for _ in range(600)]
START, END = "<|startoftext|>", "<|endoftext|>"
CLIP_LENGTH = 16
WIDTH = 32


def make_t5(folder: Path) -> Path:
    """A whole T5, decoder too, as the released ones are kept: a `.bin` file and a sentencepiece model."""
    (folder / "corpus.txt").write_text("\n".join(CORPUS))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "corpus.txt"), model_prefix=str(folder / "spiece"), vocab_size=200, minloglevel=2,
        pad_id=0, eos_id=1, unk_id=2, bos_id=-1, num_threads=1,
    )  # fmt: skip
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=304, d_model=WIDTH, d_kv=8, d_ff=48, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config)
    config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    return folder


def make_clip(folder: Path) -> Path:
    """The text half of a CLIP, with the end id of the released one's config, which is not the tokenizer's."""
    letters = "abcdefghijklmnopqrstuvwxyz,."
    merges = [("t", "h"), ("th", "e</w>"), ("d", "o"), ("do", "g</w>"), ("r", "u"), ("e", "e")]
    units = [*letters, *(f"{letter}</w>" for letter in letters), *("".join(pair) for pair in merges), START, END]
    (folder / "vocab.json").write_text(json.dumps({unit: index for index, unit in enumerate(units)}))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *(" ".join(pair) for pair in merges)]) + "\n")
    torch.manual_seed(0)
    model = transformers.CLIPTextModel(clip_text_config(len(units)))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return folder


def clip_text_config(vocabulary: int) -> Any:
    """Of a tiny CLIP text half."""
    return transformers.CLIPTextConfig(
        vocab_size=vocabulary, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=CLIP_LENGTH, bos_token_id=0, pad_token_id=1, eos_token_id=2,
    )  # fmt: skip
