"""ResNet-50 for photographs (He et al. 2015), with its stride in the 3 x 3 convolutions, as everybody trains it now.

Parameters have the names they have in torchvision, so that scales can be taken from the models published there.
"""

import torch.nn.functional as F
from torch import Tensor, nn

STAGES = (3, 4, 6, 3)


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions beside a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int, affine: bool) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width, affine=affine)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width, affine=affine)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs, affine=affine)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs, affine=affine)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Batch x inputs x height x width to batch x 4 width x height/stride x width/stride."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.downsample(x))


class ResNet50(nn.Module):
    """Four stages of 3, 4, 6 and 3 blocks; 25,557,032 weights with 1,000 classes and batch norm's gains and biases.

    Args:
        classes: how many there are.
        affine: whether batch norm has gains and biases.
        width: of the first stage, 64.
        stages: blocks in each.
    """

    def __init__(
        self, classes: int = 1000, affine: bool = True, width: int = 64, stages: tuple[int, ...] = STAGES
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width, affine=affine)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        channels = width
        for number, count in enumerate(stages):
            blocks = []
            for i in range(count):
                blocks.append(Bottleneck(channels, width * 2**number, 2 if i == 0 and number else 1, affine))
                channels = 4 * width * 2**number
            self.add_module(f"layer{number + 1}", nn.Sequential(*blocks))
        self.stages = len(stages)
        self.fc = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Batch x 3 x height x width to batch x classes."""
        x = self.maxpool(F.relu(self.bn1(self.conv1(x))))
        for number in range(self.stages):
            x = getattr(self, f"layer{number + 1}")(x)
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits
