"""A GPT: pre-norm blocks of rotary attention and a GELU network, without biases."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

# Layers, width, heads. The names count GPT-2's 50,257 tokens in, except 30M, which is meant for 8,192 of them.
SIZES = {
    "tiny": (4, 128, 4),
    "30M": (8, 512, 8),
    "124M": (12, 768, 12),
    "350M": (24, 1024, 16),
    "1.3B": (24, 2048, 16),
}

Part = TypeVar("Part", bound=nn.Module)


@dataclass(frozen=True)
class Shape:
    """The sizes of a model. ``length``: tokens it can look at; ``tied``: the output weights are the embedding."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    length: int
    tied: bool = True

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width={self.width} does not give {self.heads} heads an even number of dimensions each, which rotary "
                f"positions need; make it a multiple of {2 * self.heads}"
            )


class Norm(nn.Module):
    """RMS norm with a gain. Computed in the residual stream's float32, whatever the gain is held in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return F.rms_norm(x, (x.shape[-1],)) * self.gain


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, self.heads = shape.width, shape.heads
        self.attention_norm, self.mlp_norm = Norm(width), Norm(width)
        self.query_key_value = _linear(width, 3 * width)
        self.mix = _linear(width, width)
        self.up, self.down = _linear(width, 4 * width), _linear(4 * width, width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """From (batch, length, width) to the same."""
        parts = self.query_key_value(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)  # each (batch, heads, length, dimensions)
        query, key = rotated(query, cos, sin), rotated(key, cos, sin)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).flatten(2))
        return x + cast(Tensor, self.down(F.gelu(self.up(self.mlp_norm(x)))))


class GPT(nn.Module):
    """Logits, or the loss, of tokens.

    Parts are made one by one, on the device. ``made`` is called with each as soon as it exists, and its number, and may
    convert its weights: so a model that is too large for its device in float32 never is in float32 as a whole.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self, shape: Shape, device: torch.device, made: Callable[[nn.Module, int], None], checkpointing: bool = False
    ) -> None:
        super().__init__()
        self.shape, self.checkpointing = shape, checkpointing
        numbers = itertools.count()

        def part(make: Callable[[], Part]) -> Part:
            with device:
                fresh = make()
            made(fresh, next(numbers))
            return fresh

        self.embedding = part(lambda: _embedding(shape))
        self.blocks = nn.ModuleList(part(lambda: Block(shape)) for _ in range(shape.layers))
        self.norm = part(lambda: Norm(shape.width))
        self.output = None if shape.tied else part(lambda: _linear(shape.width, shape.vocabulary))
        for name, buffer in zip(("cos", "sin"), angles(shape.length, shape.width // shape.heads), strict=True):
            self.register_buffer(name, buffer.to(device), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits (batch, length, vocabulary), or with targets the mean loss, a number."""
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        # A float32 residual stream for all methods: they differ in how weights are held, and in nothing else.
        x = self.embedding(tokens).float()
        for block in self.blocks:
            if self.checkpointing and torch.is_grad_enabled():
                # preserve_rng_state: there is no dropout.
                x = checkpoint(block, x, cos, sin, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, cos, sin)
        return self.read(self.norm(x), self.embedding.weight if self.output is None else self.output.weight, targets)

    @staticmethod
    def read(x: Tensor, weight: Tensor, targets: Tensor | None) -> Tensor:
        """From the last block's output to logits, or to their loss."""
        logits = F.linear(x, weight).float()
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def compile_parts(self, options: dict[str, Any] | None) -> None:
        """Compile block by block: one compilation serves all of them, and released gradients go block by block."""
        for block in self.blocks:
            block.compile(dynamic=False, options=options)
        self.read = torch.compile(self.read, dynamic=False, options=options)  # type: ignore[method-assign]


def _embedding(shape: Shape) -> nn.Embedding:
    embedding = nn.Embedding(shape.vocabulary, shape.width)
    nn.init.normal_(embedding.weight, std=1 / math.sqrt(shape.width))
    return embedding


def _linear(inputs: int, outputs: int) -> nn.Linear:
    # Weights that move by relative amounts grow slowly, so they must not start small: docs/log.md has the numbers.
    linear = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(linear.weight, std=1 / math.sqrt(inputs))
    return linear


def angles(length: int, dimensions: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of rotary positions, (length, dimensions / 2), wavelengths from 2 pi to 10,000 times that."""
    rates = 10_000 ** -(torch.arange(0, dimensions, 2, dtype=torch.float64) / dimensions)
    turns = torch.outer(torch.arange(length, dtype=torch.float64), rates)
    return turns.cos().float(), turns.sin().float()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of dimensions by their angles (Su et al., RoFormer)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)
