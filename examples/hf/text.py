"""What the Hugging Face examples share: a text cut into pieces, and a small GPT-2 made from its config."""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

VOCABULARY = 256  # bytes


def pieces(paths: Iterable[Path], length: int) -> list[dict[str, Tensor]]:
    """The files' bytes in pieces of a length, each as Trainer wants it; what is left at the end is dropped."""
    text = b"".join(path.read_bytes() for path in paths)
    if len(text) < length:
        raise ValueError(f"the text has {len(text)} bytes, less than one piece of {length}; give more files")
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)[: len(text) // length * length].long()
    return [{"input_ids": piece, "labels": piece} for piece in tokens.view(-1, length)]


def small_gpt2(length: int, *, layers: int = 2, width: int = 64, seed: int = 0) -> GPT2LMHeadModel:
    """A GPT-2 of bytes. Its matrices start at 1 / sqrt(width), not at GPT-2's 0.02: see docs/migration.md."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=length,
        n_embd=width,
        n_layer=layers,
        n_head=max(width // 32, 1),
        initializer_range=width**-0.5,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)
