"""Small networks of many kinds, initialised as is usual for each."""

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from madam_lab.models.mlp import mlp


class Letters(nn.Module):
    """An LSTM that says which letter comes next."""

    def __init__(self, letters: int, width: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(letters, width // 2)
        self.lstm = nn.LSTM(width // 2, width, batch_first=True)
        self.output = nn.Linear(width, letters)

    def forward(self, letters: Tensor) -> Tensor:
        """Batch x length of numbers to batch x length x letters of logits."""
        logits: Tensor = self.output(self.lstm(self.embedding(letters))[0])
        return logits


class Block(nn.Module):
    """A layer of a pre-norm transformer: attention to what came before, then a perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.asked, self.mixed = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Batch x length x width."""
        q, k, v = self.asked(self.norms[0](x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.mixed(seen)
        return x + self.narrow(F.gelu(self.wide(self.norms[1](x))))  # type: ignore[no-any-return]


class Gpt(nn.Module):
    """A transformer that says which letter comes next; embeddings begin small, as GPT-2's."""

    def __init__(self, letters: int, length: int, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(letters, width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.output = nn.LayerNorm(width), nn.Linear(width, letters, bias=False)

    def forward(self, letters: Tensor) -> Tensor:
        """Batch x length of numbers to batch x length x letters of logits."""
        logits: Tensor = self.output(self.norm(self.blocks(self.embedding(letters) + self.positions)))
        return logits


def plain_cnn(classes: int = 10, width: int = 32) -> nn.Sequential:
    """Three convolutions of stride 2 for pictures of 32 x 32, and no norms."""
    sizes = [3, width, 2 * width, 4 * width]
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.ReLU()]
    hidden = nn.Linear(16 * sizes[-1], 128)
    return nn.Sequential(*layers, nn.Flatten(), hidden, nn.ReLU(), nn.Linear(128, classes))


class Siren(nn.Module):
    """A picture as a function of the place (Sitzmann et al. 2020), with sines between its layers."""

    def __init__(self, width: int = 128, layers: int = 2, frequency: float = 30.0) -> None:
        super().__init__()
        self.frequency = frequency
        self.first, self.output = nn.Linear(2, width), nn.Linear(width, 3)
        self.hidden = nn.ModuleList([nn.Linear(width, width) for _ in range(layers)])
        nn.init.uniform_(self.first.weight, -1 / 2, 1 / 2)
        for layer in (*self.hidden, self.output):
            most = math.sqrt(6 / width) / frequency
            nn.init.uniform_(layer.weight, -most, most)

    def forward(self, place: Tensor) -> Tensor:
        """Places, n x 2 from -1 to 1, to colours, n x 3."""
        x = torch.sin(self.frequency * self.first(place))
        for layer in self.hidden:
            x = torch.sin(self.frequency * layer(x))
        colours: Tensor = self.output(x)
        return colours


class Vae(nn.Module):
    """A variational autoencoder of perceptrons."""

    def __init__(self, pixels: int = 64, width: int = 128, codes: int = 8) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(pixels, width, 2 * codes), mlp(codes, width, pixels)

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of the pixels, and mean and log-variance of the codes; ``noise`` is normal."""
        mean, spread = self.encoder(x).chunk(2, dim=1)
        return self.decoder(mean + noise * (spread / 2).exp()), mean, spread


class Denoiser(nn.Module):
    """Says what the noise in a picture is, given how much there is; its last layer begins as zeros."""

    def __init__(self, pixels: int = 64, width: int = 256, layers: int = 3) -> None:
        super().__init__()
        self.input, self.output = nn.Linear(pixels, width), nn.Linear(width, pixels)
        self.time = nn.Sequential(nn.Linear(64, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Pictures, n x pixels, and times from 0 to 1, n, to noise."""
        rates = 1000 * torch.exp(torch.arange(32, device=x.device) * (-math.log(1000) / 32))
        turns = time.unsqueeze(1) * rates
        when = self.time(torch.cat([turns.sin(), turns.cos()], dim=1))
        h = self.input(x)
        for block in self.blocks:
            h = h + block(h + when)
        noise: Tensor = self.output(self.norm(h))
        return noise


def autoencoder(pixels: int = 64, codes: int = 8) -> nn.Sequential:
    """Eight layers with tanh, narrow in the middle."""
    half = [pixels, 128, 64, 32, codes]
    sizes = [*half, *half[-2::-1]]
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers[:-1])
