"""ResNet-18 for small images, in the usual modules and with torchvision's names (arXiv 1512.03385)."""

from __future__ import annotations

from torch import Tensor, nn


class BasicBlock(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, in_planes: int, planes: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_planes, planes, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample: nn.Module | None = None
        if stride > 1 or in_planes != planes:
            self.downsample = nn.Sequential(nn.Conv2d(in_planes, planes, 1, stride, bias=False), nn.BatchNorm2d(planes))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, planes, height / stride, width / stride]."""
        y = self.relu(self.bn1(self.conv1(x)))
        shortcut = x if self.downsample is None else self.downsample(x)
        return self.relu(self.bn2(self.conv2(y)) + shortcut)  # type: ignore[no-any-return]


class ResNet18(nn.Module):
    """`width` features after the first convolution; images [batch, 3, height, width]."""

    def __init__(self, num_classes: int = 10, width: int = 64) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = _layer(width, width, 1)
        self.layer2 = _layer(width, 2 * width, 2)
        self.layer3 = _layer(2 * width, 4 * width, 2)
        self.layer4 = _layer(4 * width, 8 * width, 2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8 * width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [batch, num_classes]."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.avgpool(x).flatten(1))  # type: ignore[no-any-return]


def _layer(in_planes: int, planes: int, stride: int) -> nn.Sequential:
    return nn.Sequential(BasicBlock(in_planes, planes, stride), BasicBlock(planes, planes, 1))
