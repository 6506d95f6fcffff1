"""Networks of random integers for the tests of proofs of inference."""

from itertools import pairwise

import numpy as np

from accelerant.zk.inference import IntegerNetwork, Layer, Network
from accelerant.zk.inference.verifier import IDENTITY

RELU = bytes(max(0, i - 128) for i in range(256))


def random_network(generator, widths, *, tables=(RELU, IDENTITY), multipliers=None, biases=20_000):
    """Return layers of these widths; the last has the identity. By default about a fifth of the outputs saturate."""
    layers, weights, offsets = [], [], []
    for i, (inputs, outputs) in enumerate(pairwise(widths)):
        typical = min(1 << 17, int(2**24 / (60 * inputs**0.5)))
        multiplier = typical if multipliers is None else int(generator.choice(multipliers))
        table = tables[int(generator.integers(len(tables)))] if i + 2 < len(widths) else IDENTITY
        layers.append(Layer(inputs, outputs, multiplier, table))
        weights.append(generator.integers(-128, 128, (outputs, inputs)).astype(np.int8))
        offsets.append(generator.integers(-biases, biases, outputs))
    return IntegerNetwork(Network(tuple(layers)), weights, offsets)


def by_channel(generator, network):
    """Return the network with other multipliers for the channels of about two layers of three."""
    layers = [
        layer._replace(multiplier=tuple(map(int, generator.integers(1, 1 + layer.multiplier, layer.outputs))))
        if generator.random() < 2 / 3 else layer
        for layer in network.network.layers
    ]  # fmt: skip
    return IntegerNetwork(network.network._replace(layers=tuple(layers)), network.weights, network.biases)


def random_convolutions(generator, count):
    """Return convolutions of random geometries; some have an earlier source, and some add an output."""
    shapes, layers, weights, offsets = (
        [(int(generator.integers(1, 4)), *map(int, generator.integers(1, 8, 2)))],
        [],
        [],
        [],
    )
    for i in range(count):
        source = int(generator.integers(1, i + 2)) if generator.random() < 0.3 else 1
        channels, *image = shapes[len(shapes) - source]
        kernel = tuple(int(generator.integers(1, 1 + min(size, 4))) for size in image)
        padding, stride = int(generator.integers(0, min(kernel))), int(generator.integers(1, 3))
        if generator.random() < 0.3:
            kernel, padding, stride = (1, 1), 0, 1  # so that outputs of one shape are common
        outputs = channels if kernel == (1, 1) else int(generator.integers(1, 6))
        multiplier = min(1 << 17, int(2**24 / (60 * (channels * kernel[0] * kernel[1]) ** 0.5)))
        layer = Layer(
            channels, outputs, multiplier, generator.bytes(256), tuple(image), kernel, stride, padding, source
        )
        before = [k for k in range(1, i + 1) if shapes[len(shapes) - k] == layer.output_shape]
        if before:
            layer = layer._replace(
                skip=int(generator.choice(before)), skip_multiplier=int(generator.integers(0, 1 << 25))
            )
        layers.append(layer)
        shapes.append(layer.output_shape)
        weights.append(generator.integers(-128, 128, (outputs, channels, *kernel)).astype(np.int8))
        offsets.append(generator.integers(-20_000, 20_000, outputs))
    return IntegerNetwork(Network(tuple(layers)), weights, offsets)


def with_extremes(generator, network):
    """Return the network with limits of multipliers, biases and weights, and sums that are halves of both signs."""
    layers, weights, biases = [], [], []
    for layer, weight, bias in zip(network.network.layers, network.weights, network.biases, strict=True):
        common, *some = generator.choice([1, 2, 3, 1 << 14, 1 << 16, (1 << 17) - 1, 1 << 17], 1 + layer.outputs)
        of_channels = tuple(map(int, some))
        skip = int(generator.choice([0, 1, 1 << 23, 1 << 24, 1 << 25])) if layer.skip else 0
        multiplier = int(common) if generator.random() < 0.5 else of_channels
        layers.append(layer._replace(multiplier=multiplier, skip_multiplier=skip))
        halves = [-(1 << 23), (1 << 23) - 1, -192, -64, 0, 64, 192]  # 64 * 2^17 is half of 2^24
        values = [[-128, 127], [-64, 0, 64], [0]][int(generator.integers(3))]
        weights.append(generator.choice(values, weight.shape).astype(np.int8) if generator.random() < 0.5 else weight)
        biases.append(generator.choice(halves, bias.shape) if generator.random() < 0.7 else bias)
    return IntegerNetwork(network.network._replace(layers=tuple(layers)), weights, biases)


def random_input(generator, network, batch=1):
    return generator.integers(-128, 128, (batch, *network.network.layers[0].input_shape)).astype(np.int8)


def evaluated(network, x):
    """Return the output (batch, channels, height, width) by the definition, in Python's integers."""
    arrays = [x.astype(object)]
    for layer, weight, bias in zip(network.network.layers, network.weights, network.biases, strict=True):
        image = arrays[len(arrays) - layer.source]
        y = np.zeros((len(x), *layer.output_shape), object)
        for b, o, row, column in np.ndindex(*y.shape):
            total = int(bias[o])
            for c, i, j in np.ndindex(layer.inputs, *layer.kernel):
                at = row * layer.stride + i - layer.padding, column * layer.stride + j - layer.padding
                if 0 <= at[0] < layer.image[0] and 0 <= at[1] < layer.image[1]:
                    total += int(weight[o, c, i, j]) * int(image[b, c, *at])
            scaled = (layer.by_channel[o] if layer.by_channel else layer.multiplier) * total + 2**23
            if layer.skip:
                scaled += layer.skip_multiplier * int(arrays[len(arrays) - layer.skip][b, o, row, column])
            entry = layer.table[min(max(scaled // 2**24, -128), 127) + 128]
            y[b, o, row, column] = entry - 256 * (entry > 127)
        arrays.append(y)
    return arrays[-1].astype(np.int8)
