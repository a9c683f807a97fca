"""A class-conditional GAN for pictures of 32 x 32 pixels, after BigGAN (Brock et al. 2018), of the paper's sizes.

Every convolution, matrix and embedding of both networks is spectrally normalised.
"""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from madam_lab.models.spectral import Conv2d, Embedding, Linear, orthogonal_

CHUNKS = 4  # of the noise: one for the first layer, one for each block


class NonLocal(nn.Module):
    """Attention over positions (Zhang et al. 2019), with a gain that starts at 1."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.query = Conv2d(channels, max(1, channels // 8), 1, bias=False)
        self.key = Conv2d(channels, max(1, channels // 8), 1, bias=False)
        self.value = Conv2d(channels, max(1, channels // 2), 1, bias=False)
        self.out = Conv2d(max(1, channels // 2), channels, 1, bias=False)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        """Batch x channels x height x width, as it comes; keys and values are pooled, four positions to one."""
        query = self.query(x).flatten(2)
        key = F.max_pool2d(self.key(x), 2).flatten(2)
        value = F.max_pool2d(self.value(x), 2).flatten(2)
        weights = (query.transpose(1, 2) @ key).softmax(-1)
        seen = (value @ weights.transpose(1, 2)).view(len(x), -1, *x.shape[2:])
        added: Tensor = (self.gain * self.out(seen)).to(
            x.dtype
        ) + x  # the gain is float32, whatever autocast makes of x
        return added


class ConditionalNorm(nn.Module):
    """Batch norm whose gain and shift are linear in the condition."""

    def __init__(self, channels: int, condition: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels, affine=False)
        self.gain = Linear(condition, channels, bias=False)
        self.shift = Linear(condition, channels, bias=False)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """Batch x channels x height x width, and batch x condition."""
        gain, shift = (layer(condition)[:, :, None, None] for layer in (self.gain, self.shift))
        normal: Tensor = self.norm(x) * (1 + gain) + shift
        return normal


class UpBlock(nn.Module):
    """Two 3 x 3 convolutions to twice the size, beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, condition: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = ConditionalNorm(inputs, condition), ConditionalNorm(outputs, condition)
        self.conv1, self.conv2 = Conv2d(inputs, outputs, 3), Conv2d(outputs, outputs, 3)
        self.shortcut = Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """Batch x inputs x n x n to batch x outputs x 2n x 2n."""
        y = self.conv1(_doubled(F.relu(self.norm1(x, condition))))
        y = self.conv2(F.relu(self.norm2(y, condition)))
        # A 1 x 1 convolution and nearest pixels commute, and this way round it has a quarter of the work.
        skipped: Tensor = y + _doubled(self.shortcut(x))
        return skipped


class Generator(nn.Module):
    """Noise and a class to a picture from -1 to 1. ``width`` is 64 in the paper: blocks of 256, 256, 128 and 64."""

    def __init__(self, classes: int = 10, width: int = 64, noise: int = 80, embedding: int = 80) -> None:
        super().__init__()
        self.noise, self.first = noise, 4 * width
        chunk = noise // CHUNKS
        self.embedding = Embedding(classes, embedding)
        self.linear = Linear(chunk, self.first * 16)
        widths = (4 * width, 4 * width, 2 * width, width)
        self.blocks = nn.ModuleList(UpBlock(i, o, embedding + chunk) for i, o in itertools.pairwise(widths))
        self.attention = NonLocal(2 * width)
        self.norm = nn.BatchNorm2d(width)
        self.out = Conv2d(width, 3, 3)
        orthogonal_(self)

    def forward(self, z: Tensor, classes: Tensor) -> Tensor:
        """Batch x noise and batch to batch x 3 x 32 x 32."""
        first, *chunks = z.chunk(CHUNKS, dim=1)
        embedded = self.embedding(classes)
        x = self.linear(first).view(-1, self.first, 4, 4).contiguous(memory_format=torch.channels_last)
        for block, chunk in zip(self.blocks, chunks, strict=True):
            x = block(x, torch.cat([embedded, chunk], 1))
            if x.shape[-1] == 16:
                x = self.attention(x)
        return torch.tanh(self.out(F.relu(self.norm(x))).float())


class DownBlock(nn.Module):
    """Two 3 x 3 convolutions, to half the size if ``down``, beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, *, down: bool = True, first: bool = False) -> None:
        super().__init__()
        self.down, self.first = down, first
        self.conv1, self.conv2 = Conv2d(inputs, outputs, 3), Conv2d(outputs, outputs, 3)
        self.shortcut: nn.Module = Conv2d(inputs, outputs, 1) if down or inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Batch x inputs x n x n to batch x outputs x n/2 x n/2; the first block of all gets pixels, and no ReLU."""
        y = self.conv2(F.relu(self.conv1(x if self.first else F.relu(x))))
        if self.down:  # the mean of four pixels and a 1 x 1 convolution commute, too
            y, x = F.avg_pool2d(y, 2), F.avg_pool2d(x, 2)
        shortened: Tensor = y + self.shortcut(x)
        return shortened


class Discriminator(nn.Module):
    """A picture and a class to a number, large for real pictures: projection on the class (Miyato and Koyama 2018)."""

    def __init__(self, classes: int = 10, width: int = 64) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            DownBlock(3, width, first=True),
            DownBlock(width, 2 * width),
            NonLocal(2 * width),
            DownBlock(2 * width, 4 * width),
            DownBlock(4 * width, 4 * width, down=False),
        )
        self.linear = Linear(4 * width, 1)
        self.embedding = Embedding(classes, 4 * width)
        orthogonal_(self)

    def forward(self, x: Tensor, classes: Tensor) -> Tensor:
        """Batch x 3 x 32 x 32 and batch to batch."""
        features = F.relu(self.blocks(x)).float().mean((2, 3))
        projected = (self.embedding(classes).float() * features).sum(1)
        verdict: Tensor = 10 * (self.linear(features).squeeze(1).float() + projected)
        return verdict


class Gan(nn.Module):
    """Both players; evaluation asks for pictures."""

    def __init__(self, classes: int = 10, width: int = 64) -> None:
        super().__init__()
        self.generator = Generator(classes, width)
        self.discriminator = Discriminator(classes, width)

    def forward(self, z: Tensor, classes: Tensor) -> Tensor:
        """What the generator makes of this noise."""
        made: Tensor = self.generator(z, classes)
        return made


def _doubled(x: Tensor) -> Tensor:
    """Every pixel four times, in channels_last. Gradients are sums of four, where a compiled F.interpolate scatters
    and adds in any order.
    """
    n, channels, height, width = x.shape
    four = x.permute(0, 2, 3, 1)[:, :, None, :, None].expand(n, height, 2, width, 2, channels)
    return four.reshape(n, 2 * height, 2 * width, channels).permute(0, 3, 1, 2)
