"""A block of GPT-2 without softmax and normalization, as a network of integers whose output is close to it.

Attention is causal, with max(0, q k) in place of softmax. The image is a column of tokens. Keys and values, shifted by
0, 1, ... tokens, are columns of an image of tokens x shifts; a query is repeated in all of them. A product of two
activations is ((a + b) / 2)^2 - ((a - b) / 2)^2, of squares by the table of a layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from accelerant.zk.inference import IntegerNetwork, Layer, Network

Reals = npt.NDArray[np.float64]


class QuantizedSteps:
    """Convolutions of real numbers as layers of integers, whose scales follow from examples.

    Attributes:
        nodes: the values (examples, channels, height, width) of the input, number 0, and of each step, and their scale.
    """

    def __init__(self, x: Reals) -> None:
        self.layers: list[Layer] = []
        self.weights: list[npt.NDArray[np.int8]] = []
        self.nodes = [(x, float(np.abs(x).max()) / 127)]

    def step(
        self, weight: Reals, source: int, added: int = 0, function: Callable[[Reals], Reals] | None = None,
        padding: int = 0,
    ) -> int:  # fmt: skip
        """Append function(weight * source + added), for (outputs, inputs, height, width); return its number."""
        x, x_scale = self.nodes[source]
        unit = float(np.abs(weight).max()) / 127
        real = functional.conv2d(torch.from_numpy(x), torch.from_numpy(weight), padding=padding).numpy()
        other, other_scale = self.nodes[added] if added else (np.zeros(1), 0.0)
        real = real + other
        wanted = max(float(np.abs(real).max()) / 127, other_scale / 1.99)
        multiplier = min(1 << 17, round(unit * x_scale / wanted * 2**24))
        scale = unit * x_scale * 2**24 / multiplier
        after = real if function is None else function(real)
        y_scale = scale if function is None else float(np.abs(after).max()) / 127
        entries = np.arange(-128.0, 128.0)
        results = entries if function is None else np.rint(function(entries * scale) / y_scale).clip(-128, 127)
        image, kernel = (x.shape[2], x.shape[3]), (weight.shape[2], weight.shape[3])
        number, table = len(self.nodes), results.astype(np.int8).tobytes()
        skip = (number - added, round(other_scale / scale * 2**24)) if added else (0, 0)
        sizes = weight.shape[1], weight.shape[0], multiplier, table, image, kernel, 1, padding
        self.layers.append(Layer(*sizes, number - source, *skip))
        self.weights.append(np.rint(weight / unit).astype(np.int8))
        self.nodes.append((after, y_scale))
        return number

    def product(self, a: int, b: int, channels: int) -> int:
        """Append the products of two steps with so many channels, of which `b` is halved."""
        eye = np.eye(channels)[:, :, None, None]
        less = self.step(-eye, b)
        of_sum, of_difference = (self.step(eye / 2, a, each, np.square) for each in (b, less))
        return self.step(-eye, of_difference, of_sum)

    def network(self) -> IntegerNetwork:
        """Return the network."""
        public = Network(tuple(self.layers), self.nodes[0][1], self.nodes[-1][1])
        return IntegerNetwork(public, self.weights, [np.zeros(each.outputs, np.int64) for each in self.layers])


def gelu(x: Reals) -> Reals:
    """Return GPT-2's activation, GELU by tanh."""
    y: Reals = x * 0.5 * (1 + np.tanh(0.7978845608 * (x + 0.044715 * x**3)))
    return y


def gpt2_block(
    generator: np.random.Generator, width: int = 768, heads: int = 12, tokens: int = 4, examples: int = 64
) -> tuple[IntegerNetwork, npt.NDArray[np.int8], Reals]:
    """Return the network of a block with random weights, examples in integers, and their outputs in real numbers."""
    each, shifts = width // heads, np.arange(tokens)
    x = generator.normal(size=(examples, width, tokens, 1))
    block, one, eye = QuantizedSteps(x), np.eye(width)[:, :, None, None], np.eye(each)
    shifted = np.zeros((each, each, 2 * tokens - 1, tokens))
    shifted[:, :, tokens - 1 - shifts, tokens - 1 - shifts] = eye[:, :, None] / 2
    repeated = np.zeros_like(shifted)
    repeated[:, :, tokens - 1] = eye[:, :, None]
    weights = generator.normal(size=(4, heads, each, width)) / width**0.5
    up, down = (generator.normal(size=shape) / width**0.5 for shape in ((4 * width, width), (width, 4 * width)))
    hidden = block.step(one, 0)
    inputs, expected = hidden, x[..., 0].swapaxes(1, 2)
    rows, causal = expected, np.tri(tokens)
    for query, key, value, out in weights.swapaxes(0, 1):
        q, k, v = (block.step(matrix[:, :, None, None], inputs) for matrix in (query, key, value))
        wide = functools.partial(block.step, padding=tokens - 1)
        products = block.product(wide(repeated, q), wide(shifted, k), each)
        total = np.full((each, each, 1, 1), each**-0.5)  # the score, in all channels
        scores = block.step(total, products, function=lambda s: np.maximum(s, 0))
        attended = block.step(np.tile(eye[:, :, None, None], tokens), block.product(scores, wide(shifted, v), each))
        hidden = block.step(out.T[:, :, None, None], attended, hidden)
        found = np.maximum(rows @ query.T @ (rows @ key.T).swapaxes(1, 2) / each**0.5, 0) * causal
        expected = expected + found @ (rows @ value.T) @ out
    block.step(down[:, :, None, None], block.step(up[:, :, None, None], hidden, function=gelu), hidden)
    expected = expected + gelu(expected @ up.T) @ down.T
    integers: Any = np.rint(x / block.nodes[0][1]).clip(-128, 127).astype(np.int8)
    return block.network(), integers, expected.swapaxes(1, 2)[..., None]
