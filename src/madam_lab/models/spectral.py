"""Spectral normalisation (Miyato et al. 2018): layers whose weights are divided by their largest singular value.

The parameter stays what it is, codes included: what is divided is a decoded view of it, made anew in every forward
pass. PyTorch's own parametrisation flattens the weight first, which would copy and repack codes that lie in
channels_last, and multiplies by vectors in bfloat16 under autocast; here both are sums of products in float32.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _Normalised(nn.Module):
    """What the layers below share: a power iteration, one round a training step, whose vector is a buffer."""

    weight: Tensor
    left: Tensor  # the estimate of the first left singular vector

    def _begin(self) -> None:
        self.register_buffer("left", F.normalize(torch.randn(self.weight.shape[0]), dim=0))

    def normalised(self) -> Tensor:
        """The weight over its largest singular value, as floats. The gradient flows through both."""
        weight = self.weight * 1.0  # codes become floats here, once
        return weight / self._largest(weight.flatten(1))

    def _largest(self, matrix: Tensor) -> Tensor:
        with torch.no_grad():
            left = self.left.clone()
            right = F.normalize((matrix * left.unsqueeze(1)).sum(0), dim=0)
            if self.training:
                left = F.normalize((matrix * right).sum(1), dim=0)
                self.left.copy_(left)
        return ((matrix * right).sum(1) * left).sum()


class Conv2d(_Normalised, nn.Conv2d):
    """A convolution."""

    def __init__(self, inputs: int, outputs: int, side: int, *, bias: bool = True) -> None:
        super().__init__(inputs, outputs, side, padding=side // 2, bias=bias)
        self._begin()

    def forward(self, x: Tensor) -> Tensor:
        """As nn.Conv2d, which keeps the size."""
        return F.conv2d(x, self.normalised(), self.bias, padding=self.padding)


class Linear(_Normalised, nn.Linear):
    """A matrix."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self._begin()

    def forward(self, x: Tensor) -> Tensor:
        """As nn.Linear."""
        return F.linear(x, self.normalised(), self.bias)


class Embedding(_Normalised, nn.Embedding):
    """A vector for each class."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__(count, width)
        self._begin()

    def forward(self, index: Tensor) -> Tensor:
        """As nn.Embedding; but the few classes are summed over, since a GPU adds up gradients of rows in any order."""
        table = self.normalised()
        chosen = index.unsqueeze(-1) == torch.arange(len(table), device=table.device)
        return (chosen.unsqueeze(-1) * table).sum(-2)


def orthogonal_(model: nn.Module) -> None:
    """Orthogonal weights, and biases from a normal distribution with standard deviation .01."""
    for module in model.modules():
        if isinstance(module, _Normalised):
            nn.init.orthogonal_(module.weight)
        bias = getattr(module, "bias", None)
        if isinstance(bias, nn.Parameter):
            nn.init.normal_(bias, std=0.01)
