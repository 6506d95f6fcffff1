"""Networks of 8-bit integers with a defined integer semantics, and the witness of a run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from accelerant.errors import ConfigError, FormatError, ShapeError, UnsupportedDtype
from accelerant.runtime.files import write_atomic
from accelerant.zk.inference.verifier import (
    BIAS_LIMIT,
    SHIFT,
    Channel,
    Layer,
    Network,
    RejectedProofError,
    log2_ceil,
    read_network,
)

NETWORK_HEADER = b"accelerant integer network 2\n"
_OLDER_HEADER = b"accelerant integer network 1\n"  # without multipliers of channels
Int8 = npt.NDArray[np.int8]
Trace = dict[str, npt.NDArray[np.int64]]
"""The columns of a layer's activations, and its sums W x + b, each (batch, outputs), padded to powers of two."""


class IntegerNetwork:
    """Layers of int8 weights with a defined integer semantics: y = T[clamp((m (W x + b) + 2^23) >> 24, -128, 127)].

    Attributes:
        network: widths, multipliers m, of layers or of their output channels, tables T and scales, which commitments
            publish.
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
            shape = (layer.outputs, layer.inputs, *layer.kernel)
            flat = shape[:2] if layer.kernel == (1, 1) else shape
            if weight.shape not in (shape, flat) or bias.shape != (layer.outputs,):
                raise ShapeError(f"layer {i} takes {flat} and ({layer.outputs},), got {weight.shape} and {bias.shape}")
            if (off := (bias < -BIAS_LIMIT) | (bias >= BIAS_LIMIT)).any():
                value = int(bias[off][0])
                raise ConfigError(f"layer {i} has the bias {value}, which is not from -2^23 to 2^23 - 1")
            self.weights.append(weight.reshape(shape))
            self.biases.append(bias.astype(np.int64))

    def __repr__(self) -> str:
        return f"IntegerNetwork({self.network.widths})"  # no values: they may be secret

    def __call__(self, x: Int8) -> Int8:
        """Return the output of int8 inputs, exactly: (batch, outputs), or (batch, outputs, height, width)."""
        *_, (_, _, _, y) = self._run(checked_input(self.network, x))
        return self.outward(y)

    def outward(self, y: npt.NDArray[Any]) -> Int8:
        """Return the last layer's padded output as callers get it."""
        shape = self.network.layers[-1].output_shape
        y = unpadded(y.astype(np.int8), shape)
        return np.ascontiguousarray(y if shape[1:] != (1, 1) else y.reshape(len(y), -1))

    def trace(self, x: Int8) -> list[Trace]:
        """Return the witness of each layer for checked inputs, each axis but the batch's padded to a power of two."""
        traces: list[Trace] = []
        for sums, scaled, u, y in self._run(x):
            r, excess = scaled & (1 << SHIFT) - 1, (scaled >> SHIFT) - (u - 128)
            columns = {f"r{k}": r >> 8 * k & 255 for k in range(3)}
            columns |= {f"d{k}": np.sign(excess) * (np.abs(excess) >> 8 * k & 255) for k in range(3)}
            traces.append(columns | {"u": u, "y": y.astype(np.int64), "sums": sums})
        return traces

    def _run(
        self, x: Int8
    ) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64], Int8]]:
        """Yield a, m a + s x' + 2^23, u and y of each layer."""
        outputs: list[Int8] = []
        for i, (layer, weight, bias) in enumerate(zip(self.network.layers, self.weights, self.biases, strict=True)):
            source = x if layer.source > i else unpadded(outputs[i - layer.source], layer.input_shape)
            sums = padded(_products(source, weight, layer), *layer.output_shape)
            sums += padded(bias, layer.outputs)[:, None, None]
            multipliers = np.array(layer.by_channel or [layer.common] * layer.outputs)
            scaled = sums * padded(multipliers, layer.outputs)[:, None, None] + (1 << SHIFT - 1)
            if layer.skip:
                scaled += outputs[i - layer.skip].astype(np.int64) * layer.skip_multiplier
            u = np.clip(scaled >> SHIFT, -128, 127) + 128
            outputs.append(np.frombuffer(layer.table, np.int8)[u])
            yield sums, scaled, u, outputs[-1]

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
        network, reader = read_public(checked_bytes("integer network", data))
        weights, biases = [], []
        try:
            for layer in network.layers:
                shape = (layer.outputs, layer.inputs, *layer.kernel)
                weights.append(np.frombuffer(reader.take(math.prod(shape)), np.int8).reshape(shape))
                biases.append(np.frombuffer(reader.take(4 * layer.outputs), "<i4"))
        except RejectedProofError as error:
            raise FormatError(f"the integer network is malformed: {error}") from None
        if reader.at != len(reader.proof):
            raise FormatError(f"{len(reader.proof) - reader.at} bytes follow the integer network")
        return cls(network, weights, biases)


def read_public(data: bytes) -> tuple[Network, Channel]:
    """Read the public part of an integer network's file, and return what has the rest; FormatError as from_bytes."""
    if not data.startswith((NETWORK_HEADER, _OLDER_HEADER)):
        raise FormatError(f"an integer network begins with {NETWORK_HEADER!r}, got {data[: len(NETWORK_HEADER)]!r}")
    reader = Channel(data[len(NETWORK_HEADER) :])
    try:
        return read_network(reader), reader
    except RejectedProofError as error:
        raise FormatError(f"the integer network is malformed: {error}") from None


def padded(x: npt.NDArray[Any], *shape: int, value: int = 0) -> npt.NDArray[Any]:
    """Return an array whose last axes, of this shape, are padded to powers of two, by zeros or another value."""
    width = [(0, 0)] * (x.ndim - len(shape)) + [(0, (1 << log2_ceil(size)) - size) for size in shape]
    return np.pad(x, width, constant_values=value)


def unpadded(x: npt.NDArray[Any], shape: Sequence[int]) -> npt.NDArray[Any]:
    """Return the part of an array whose last axes have this shape."""
    key: Any = (..., *(slice(size) for size in shape))
    part: npt.NDArray[Any] = x[key]
    return part


def windows(x: npt.NDArray[Any], layer: Layer) -> npt.NDArray[Any]:
    """Return the pixels that each output pixel sees: (..., image) -> (..., *kernel, *output image)."""
    sides = [(0, 0)] * (x.ndim - 2) + [(layer.padding, layer.padding)] * 2
    views = np.lib.stride_tricks.sliding_window_view(np.pad(x, sides), layer.kernel, axis=(-2, -1))
    views = views[..., :: layer.stride, :: layer.stride, :, :]
    return np.moveaxis(views, (-2, -1), (-4, -3))


def _products(x: npt.NDArray[Any], weight: Int8, layer: Layer) -> npt.NDArray[np.int64]:
    """Return the convolution (batch, outputs, height, width); sums of 2^16 products of 2^14 are exact in float64."""
    seen = windows(x.astype(np.float64), layer)
    sums = np.tensordot(seen, weight.astype(np.float64), ((1, 2, 3), (1, 2, 3)))
    return np.moveaxis(sums, -1, 1).astype(np.int64)


def checked_input(network: Network, x: Any) -> Int8:
    """Return x as an array (batch, channels, height, width).

    ShapeError if it is neither that nor (batch, inputs), or empty; UnsupportedDtype if it is not int8.
    """
    return checked_array("x", x, network.layers[0].input_shape)


def checked_array(name: str, x: Any, shape: tuple[int, int, int]) -> Int8:
    """Return an int8 array (batch, *shape), which may be given with the shape flattened; errors as checked_input."""
    array, size = np.asarray(x), math.prod(shape)
    if array.dtype != np.int8:
        raise UnsupportedDtype(f"{name} must be int8, got {array.dtype}: divide real numbers by the scale and round")
    if array.ndim < 2 or not len(array) or array.shape[1:] not in (shape, (size,)):
        either = f"(batch, {size})" if shape[1:] == (1, 1) else f"(batch, {', '.join(map(str, shape))})"
        raise ShapeError(f"{name} must be {either} with a batch of at least 1, got {array.shape}")
    return array.reshape(-1, *shape)


def checked_bytes(name: str, data: Any) -> bytes:
    """Return bytes, of a bytearray or memoryview a copy; raise UnsupportedDtype for anything else."""
    if not isinstance(data, bytes | bytearray | memoryview):
        raise UnsupportedDtype(f"the {name} must be bytes, got {type(data).__name__}")
    return bytes(data)
