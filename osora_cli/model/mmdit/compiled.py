"""Blocks of the MMDiT by `torch.compile`: pointwise work between matrix products in a few kernels.

What is compiled is a block's `compute`, once for each class of block and shape: all blocks of a class share it. Hooks,
recomputation and host buffers stay outside, in `Block.forward` and in the engine, and state-dict keys are what they
were. Without gradients a block runs as it is: evaluation and sampling have shapes of their own, and few of each.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable
from typing import Any

import torch

from osora_cli.model.mmdit.blocks import Block, DoubleStreamBlock, SingleStreamBlock
from osora_cli.model.mmdit.model import MMDiT

# The environment may name another backend of torch.compile: `aot_eager` traces as all do and makes no kernels.
BACKEND_VARIABLE = "OSORA_COMPILE_BACKEND"
# Beside the shapes that are known ahead: batches that come as a surprise are compiled, too, up to so many.
SPARE_SHAPES = 8


def obstacle(device: torch.device) -> str | None:
    """Why nothing can be compiled for `device` here; None: nothing is known against it."""
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            return "Triton is not there, or does not know this GPU"
        names = [os.environ.get("CC", ""), "cc", "gcc", "clang"]
    else:
        names = [os.environ.get("CXX", ""), "g++", "clang++", "c++"]
    if not any(name and shutil.which(name.split()[0]) for name in names):
        return "there is no C compiler" if device.type == "cuda" else "there is no C++ compiler"
    return None


class BlockCompiler:
    """Compiles the blocks of a model and counts what was compiled.

    Attributes:
        graphs: what was compiled so far, in order, each as `CLASS BATCH x TOKENS`, text and image together.
        on_graph: told of each as it is about to be compiled.
    """

    def __init__(self, backend: str | None = None, *, deterministic: bool = False) -> None:
        """`backend` is one of torch.compile's by name; None: inductor. `deterministic`: kernels not chosen by times."""
        from torch._dynamo import lookup_backend
        from torch._inductor import config

        self.graphs: list[str] = []
        self.on_graph: Callable[[str], None] = lambda graph: None
        self._compile = lookup_backend(backend or os.environ.get(BACKEND_VARIABLE, "inductor"))
        if deterministic and hasattr(config, "deterministic"):  # from torch 2.9 on
            config.deterministic = True

    def attach(self, model: MMDiT, shapes: int) -> None:
        """Have the blocks of `model` compiled when they first see a shape; room is made for `shapes` of them."""
        _make_room(shapes + SPARE_SHAPES)
        # Dynamo looks at `.grad` of every input, and torch warns of it for those that have none.
        warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor that is not a leaf", UserWarning)
        for kind, blocks in ((DoubleStreamBlock, model.double_blocks), (SingleStreamBlock, model.single_blocks)):
            # The function and not a block's method: one cache for all blocks, and no block bound to another's copy.
            compiled = torch.compile(kind.compute, backend=self._counting(kind.__name__), dynamic=False)
            for block in blocks:
                assert isinstance(block, Block)
                block.compiled = compiled

    @staticmethod
    def detach(model: MMDiT) -> None:
        """Run the blocks as they are again."""
        for block in (*model.double_blocks, *model.single_blocks):
            assert isinstance(block, Block)
            block.compiled = None

    def _counting(self, kind: str) -> Callable[..., Any]:
        def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
            self.graphs.append(f"{kind} {_tokens(inputs)}")
            self.on_graph(self.graphs[-1])
            return self._compile(graph, inputs)

        return backend


def _tokens(inputs: list[Any]) -> str:
    """`BATCH x TOKENS` of the longest stream among a graph's inputs: those have three axes."""
    batch, tokens = max(
        (x.shape[:2] for x in inputs if isinstance(x, torch.Tensor) and x.ndim == 3), key=lambda s: s[1]
    )
    return f"{batch} x {tokens}"


def _make_room(shapes: int) -> None:
    """Raise Dynamo's limits on compilations of one function; each shape is one. Its own are 8 and 256."""
    from torch._dynamo import config

    for name in ("recompile_limit", "cache_size_limit"):  # the second is the first's name before torch 2.6
        if hasattr(config, name):
            setattr(config, name, max(getattr(config, name), shapes))
            break
    for name in ("accumulated_recompile_limit", "accumulated_cache_size_limit"):
        if hasattr(config, name):
            setattr(config, name, max(getattr(config, name), 4 * shapes))
            break
