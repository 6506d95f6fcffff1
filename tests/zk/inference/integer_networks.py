"""Networks of random integers for the tests of proofs of inference."""

from itertools import pairwise

import numpy as np

from accelerant.zk.inference import IntegerNetwork, Layer, Network
from accelerant.zk.inference.protocol import IDENTITY

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


def random_input(generator, network, batch=1):
    return generator.integers(-128, 128, (batch, network.network.layers[0].inputs)).astype(np.int8)


def evaluated(network, x):
    """Return the output by the definition, in Python's integers."""
    rows = x.tolist()
    for layer, weight, bias in zip(network.network.layers, network.weights, network.biases, strict=True):
        outputs = []
        for row in rows:
            sums = [sum(w * v for w, v in zip(ws, row, strict=True)) for ws in weight.tolist()]
            scaled = [(layer.multiplier * (a + b) + 2**23) // 2**24 for a, b in zip(sums, bias.tolist(), strict=True)]
            entries = [layer.table[min(max(q, -128), 127) + 128] for q in scaled]
            outputs.append([entry - 256 * (entry > 127) for entry in entries])
        rows = outputs
    return np.array(rows, np.int8)
