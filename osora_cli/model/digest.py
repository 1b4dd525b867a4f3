"""Which network made something: a digest of what its encoder's outputs follow from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import xxhash
from torch import nn

# Parts of an autoencoder that no latent comes from.
_DECODING = ("decoder.", "post_quant_conv.")


def encoder_digest(network: nn.Module, options: Mapping[str, Any]) -> str:
    """xxh3_128, in hex, over `options` and the names, dtypes, shapes and bytes of all that is not the decoder's.

    Args:
        network: autoencoder or text embedder; where it is does not count.
        options: plain values that its outputs hang on beside the weights.
    """
    hashed = xxhash.xxh3_128(json.dumps(dict(options), sort_keys=True, default=str).encode())
    for name, value in sorted(network.state_dict().items()):
        if not name.startswith(_DECODING):
            hashed.update(f"{name}{value.dtype}{tuple(value.shape)}".encode())
            hashed.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return hashed.hexdigest()
