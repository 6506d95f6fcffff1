"""Networks of 8-bit integers with a defined integer semantics, and the witness of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from accelerant.errors import ConfigError, FormatError, ShapeError, UnsupportedDtype
from accelerant.runtime.files import write_atomic
from accelerant.zk.inference.protocol import (
    BIAS_LIMIT,
    SHIFT,
    Channel,
    Network,
    RejectedProofError,
    log2_ceil,
    read_network,
)

NETWORK_HEADER = b"accelerant integer network 1\n"
Int8 = npt.NDArray[np.int8]
Trace = dict[str, npt.NDArray[np.int64]]
"""The columns of a layer's activations by name, each (batch, outputs), padded to powers of two."""


class IntegerNetwork:
    """Layers of int8 weights with a defined integer semantics: y = T[clamp((m (W x + b) + 2^23) >> 24, -128, 127)].

    Attributes:
        network: widths, multipliers m, tables T and scales, which commitments publish.
        weights: (outputs, inputs), int8, of each layer; private.
        biases: (outputs,), from -2^23 to 2^23 - 1, of each layer; private.
    """

    def __init__(self, network: Network, weights: Sequence[Any], biases: Sequence[Any]) -> None:
        """Take arrays of NumPy; ConfigError, ShapeError or UnsupportedDtype name the layer that does not fit."""
        try:
            network.check()
        except RejectedProofError as error:
            raise ConfigError(str(error)) from None
        self.network, self.weights, self.biases = network, [], []
        for i, (layer, weight, bias) in enumerate(zip(network.layers, weights, biases, strict=True)):
            weight, bias = np.asarray(weight), np.asarray(bias)
            if weight.dtype != np.int8 or bias.dtype.kind != "i":
                raise UnsupportedDtype(
                    f"layer {i} takes int8 weights and integer biases, got {weight.dtype}, {bias.dtype}"
                )
            if weight.shape != (layer.outputs, layer.inputs) or bias.shape != (layer.outputs,):
                shapes = f"{weight.shape} and {bias.shape}"
                raise ShapeError(
                    f"layer {i} takes ({layer.outputs}, {layer.inputs}) and ({layer.outputs},), got {shapes}"
                )
            if (off := (bias < -BIAS_LIMIT) | (bias >= BIAS_LIMIT)).any():
                value = int(bias[off][0])
                raise ConfigError(f"layer {i} has the bias {value}, which is not from -2^23 to 2^23 - 1")
            self.weights.append(weight)
            self.biases.append(bias.astype(np.int64))

    def __repr__(self) -> str:
        return f"IntegerNetwork({self.network.widths})"  # no values: they may be secret

    def __call__(self, x: Int8) -> Int8:
        """Return the output (batch, outputs) of int8 inputs (batch, inputs), exactly."""
        return self.run(checked_input(self.network, x))

    def run(self, x: Int8) -> Int8:
        """Return the output of a checked input."""
        for layer, weight, bias in zip(self.network.layers, self.weights, self.biases, strict=True):
            q = (_accumulators(x, weight, bias) * layer.multiplier + (1 << SHIFT - 1)) >> SHIFT
            x = np.frombuffer(layer.table, np.int8)[np.clip(q, -128, 127) + 128]
        return x

    def trace(self, x: Int8) -> list[Trace]:
        """Return the witness of each layer for padded inputs (2^batch bits, inputs)."""
        traces = []
        for layer, weight, bias in zip(self.network.layers, self.weights, self.biases, strict=True):
            padded = np.zeros((len(x), 1 << log2_ceil(layer.outputs)), np.int64)
            padded[:, : layer.outputs] = _accumulators(x[:, : layer.inputs], weight, bias)
            scaled = padded * layer.multiplier + (1 << SHIFT - 1)
            q, r = scaled >> SHIFT, scaled & (1 << SHIFT) - 1
            u = np.clip(q, -128, 127) + 128
            excess = q - (u - 128)
            columns = {f"r{i}": r >> 8 * i & 255 for i in range(3)}
            columns |= {f"d{i}": np.sign(excess) * (np.abs(excess) >> 8 * i & 255) for i in range(3)}
            table = np.frombuffer(layer.table, np.int8)
            traces.append(columns | {"u": u, "y": table[u].astype(np.int64)})
            x = traces[-1]["y"].astype(np.int8)
        return traces

    def to_bytes(self) -> bytes:
        """Return the network as a file, which has the private weights."""
        pairs = zip(self.weights, self.biases, strict=True)
        arrays = [part for w, b in pairs for part in (w.tobytes(), b.astype("<i4").tobytes())]
        return b"".join([NETWORK_HEADER, self.network.encode(), *arrays])

    def save(self, path: str | Path) -> None:
        """Write the file of `to_bytes` atomically."""
        write_atomic(Path(path), self.to_bytes())

    @classmethod
    def load(cls, path: str | Path) -> IntegerNetwork:
        """Read a file of `save`; FormatError says what is wrong."""
        return cls.from_bytes(Path(path).read_bytes())

    @classmethod
    def from_bytes(cls, data: bytes) -> IntegerNetwork:
        """Read such a file; FormatError says what is wrong."""
        if not data.startswith(NETWORK_HEADER):
            raise FormatError(f"an integer network begins with {NETWORK_HEADER!r}, got {data[: len(NETWORK_HEADER)]!r}")
        try:
            reader = Channel(data[len(NETWORK_HEADER) :])
            network, weights, biases = read_network(reader), [], []
            for layer in network.layers:
                shape = (layer.outputs, layer.inputs)
                weights.append(np.frombuffer(reader.take(layer.outputs * layer.inputs), np.int8).reshape(shape))
                biases.append(np.frombuffer(reader.take(4 * layer.outputs), "<i4"))
        except RejectedProofError as error:
            raise FormatError(f"the integer network is malformed: {error}") from None
        if reader.at != len(reader.proof):
            raise FormatError(f"{len(reader.proof) - reader.at} bytes follow the integer network")
        return cls(network, weights, biases)


def _accumulators(x: Int8, weight: Int8, bias: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return W x + b; sums of at most 2^16 products of 2^14 are exact in float64."""
    sums: npt.NDArray[np.int64] = (x.astype(np.float64) @ weight.T.astype(np.float64)).astype(np.int64) + bias
    return sums


def checked_input(network: Network, x: Any) -> Int8:
    """Return x as an array; ShapeError or UnsupportedDtype where it is not int8 (batch, inputs)."""
    width, array = network.layers[0].inputs, np.asarray(x)
    if array.dtype != np.int8:
        raise UnsupportedDtype(f"x must be int8, got {array.dtype}: divide real numbers by input_scale and round")
    if array.ndim != 2 or array.shape[1] != width or not len(array):
        raise ShapeError(f"x must be (batch, {width}) with a batch of at least 1, got {array.shape}")
    return array
