"""The small language model of the paper: a causal encoder as in PyTorch's word-language-model example."""

import math

import torch
from torch import Tensor, nn


class WordTransformer(nn.Module):
    """Embedding, sinusoidal positions, post-norm encoder layers with a causal mask, and an output that is not tied.

    With the defaults and 33,278 words it has 13,828,478 weights. Embedding and output weights start uniform on
    (-0.1, 0.1), and the output bias at zero.
    """

    def __init__(
        self, words: int, width: int = 200, heads: int = 2, hidden: int = 200, layers: int = 2, dropout: float = 0.2
    ) -> None:
        super().__init__()
        self.width = width
        self.embedding = nn.Embedding(words, width)
        self.dropout = nn.Dropout(dropout)
        layer = nn.TransformerEncoderLayer(width, heads, hidden, dropout)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.output = nn.Linear(width, words)
        self.register_buffer("positions", sinusoids(512, width), persistent=False)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.uniform_(self.output.weight, -0.1, 0.1)
        nn.init.zeros_(self.output.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Length x batch of word numbers to length x batch x words of logits for the word that comes next."""
        length = tokens.shape[0]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        x = self.embedding(tokens) * math.sqrt(self.width) + self.positions[:length]  # type: ignore[index]
        logits: Tensor = self.output(self.encoder(self.dropout(x), mask, is_causal=True))
        return logits


def sinusoids(length: int, width: int) -> Tensor:
    """Positions as sines and cosines (Vaswani et al. 2017), length x 1 x width."""
    place = torch.arange(length).unsqueeze(1)
    rate = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
    table = torch.zeros(length, 1, width)
    table[:, 0, 0::2] = torch.sin(place * rate)
    table[:, 0, 1::2] = torch.cos(place * rate)
    return table
