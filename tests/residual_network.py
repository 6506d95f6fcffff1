"""A small ResNet, written as people write it."""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.shortcut = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        y = torch.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += self.shortcut(x)
        return nn.functional.relu(y)


class ResNet(nn.Module):
    """Two convolutions and a shortcut for each width, at half of the resolution before from the second on."""

    def __init__(self, widths, classes, *, pool):
        super().__init__()
        first = widths[0]
        self.stem = nn.Sequential(nn.Conv2d(1, first, 3, padding=1), nn.BatchNorm2d(first), nn.ReLU(), nn.MaxPool2d(2))
        pairs = zip([first, *widths], widths, strict=False)
        self.blocks = nn.Sequential(*(Block(*pair, stride=1 + (i > 0)) for i, pair in enumerate(pairs)))
        self.pool, self.head = nn.AvgPool2d(pool), nn.Linear(widths[-1], classes)

    def forward(self, x):
        y = self.pool(self.blocks(self.stem(x)))
        return self.head(y.view(y.size(0), -1))
