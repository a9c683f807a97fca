"""Lists of shapes to step, and a network to train."""

import torch
from torch import nn

from madam_lab.models.resnet import ResNet18

Shapes = list[tuple[int, ...]]


def gpt() -> Shapes:
    """A GPT of 20 layers, 0.91 billion weights in 163 tensors."""
    width, layers, words, length = 1840, 20, 50304, 1024
    square, tall = (width, width), (4 * width, width)
    layer = [(width,), square, square, square, square, (width,), tall, tall[::-1]]
    return [(words, width), (length, width), *layer * layers, (width,)]


def small_gpt() -> Shapes:
    """The same in small, for machines where 0.91 billion weights take too long."""
    width, layers = 512, 4
    layer = [(width,), *[(width, width)] * 4, (width,), (4 * width, width), (width, 4 * width)]
    return [(8192, width), *layer * layers, (width,)]


def resnet18() -> Shapes:
    """ResNet-18 for CIFAR-10 without its norms: 11.2 million weights in 22 tensors."""
    with torch.device("meta"):
        net = ResNet18(10)
    normless = [m for m in net.modules() if not isinstance(m, nn.BatchNorm2d)]
    return [tuple(p.shape) for m in normless for p in m.parameters(recurse=False)]


def odd() -> Shapes:
    """Small and awkward, to check a step before it is timed."""
    return [(37, 53), (1,), (128, 64), (7, 3, 3, 3), (0,), (1000,), (16, 8)]
