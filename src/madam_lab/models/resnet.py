"""ResNet-18 for pictures of 32 x 32 pixels (He et al. 2015): a 3 x 3 stem, no pooling before the stages."""

import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut, which is a 1 x 1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int, affine: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs, affine=affine)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs, affine=affine)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs, affine=affine)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Batch x inputs x height x width to batch x outputs x height/stride x width/stride."""
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet18(nn.Module):
    """Four stages of two blocks, of width, 2 width, 4 width and 8 width channels; 64 in the paper.

    ``affine=False`` switches the learnable gains and biases of batch norm off, as the paper does for Madam: with 10
    classes 11,164,362 weights are left.
    """

    def __init__(self, classes: int, width: int = 64, affine: bool = True) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width, affine=affine)
        blocks, channels = [], width
        for stage in range(4):
            out = width * 2**stage
            blocks += [Block(channels, out, 1 if stage == 0 else 2, affine), Block(out, out, 1, affine)]
            channels = out
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Batch x 3 x 32 x 32 to batch x classes."""
        x = self.blocks(F.relu(self.norm(self.stem(x))))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits
