"""Small problems with answers, made here: nothing is downloaded."""

import math

import torch
from torch import nn

FONT = """
.##. ..#. .##. ###. ..#. #### .##. #### .##. .##.
#..# .##. #..# ...# .##. #... #... ...# #..# #..#
#..# ..#. ..#. .##. #.#. ###. ###. ..#. .##. .###
#..# ..#. .#.. ...# #### ...# #..# .#.. #..# ...#
.##. .### #### ###. ..#. ###. .##. .#.. .##. .##.
"""
"""Ten digits, 5 rows of 4."""


def glyphs():
    """(10, 5, 4), 0 and 1."""
    rows = [[[float(c == "#") for c in cell] for cell in line.split()] for line in FONT.strip().splitlines()]
    return torch.tensor(rows).transpose(0, 1)


def digits(count, seed):
    """Digits on a field of 8 x 8, somewhere, with noise: (count, 1, 8, 8) and (count,)."""
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(10, (count,), generator=generator)
    images = torch.zeros(count, 1, 8, 8)
    down, right = (torch.randint(most, (count,), generator=generator).tolist() for most in (4, 5))
    for number, digit in enumerate(classes.tolist()):
        y, x = down[number], right[number]
        images[number, 0, y : y + 5, x : x + 4] = glyphs()[digit]
    return images + 0.3 * torch.randn(images.shape, generator=generator), classes


def spiral(count, seed):
    """Points on three arms: (count, 2) and (count,)."""
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(3, (count,), generator=generator)
    radius = torch.rand(count, generator=generator) * 0.95 + 0.05
    angle = 4 * radius + classes * (2 * math.pi / 3) + 0.08 * torch.randn(count, generator=generator)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], 1), classes


class Dense(nn.Module):
    """Two inputs, three classes."""

    def __init__(self, width=32, dropout=0.0):
        super().__init__()
        self.up, self.middle, self.down = nn.Linear(2, width), nn.Linear(width, width), nn.Linear(width, 3)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.down(self.dropout(torch.tanh(self.middle(torch.tanh(self.up(x))))))


class Convolutional(nn.Module):
    """Images of 8 x 8, ten classes, a batch norm inside."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveMaxPool2d(2),
            nn.Flatten(),
            nn.Linear(128, 10),
        )

    def forward(self, x):
        return self.layers(x)


class Recurrent(nn.Module):
    """A row of numbers in, a class a row out."""

    def __init__(self, kind):
        super().__init__()
        self.cells = kind(1, 24, batch_first=True)
        self.head = nn.Linear(24, 2)

    def forward(self, x):
        outputs, _ = self.cells(x)
        return self.head(outputs[:, -1])


def first_sign(count, seed):
    """Rows of 8 numbers whose class is the sign of the first: (count, 8, 1) and (count,)."""
    x = torch.randn(count, 8, 1, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, 0, 0] > 0).long()
