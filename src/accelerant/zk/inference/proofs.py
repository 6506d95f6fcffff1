"""Networks of 8-bit integers, commitments to them, and proofs of what they map an input to."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from accelerant.algebra.field.memory_space import space_at
from accelerant.errors import ConfigError, FormatError, OutOfMemory, ShapeError, UnsupportedDtype
from accelerant.runtime.files import write_atomic
from accelerant.runtime.host import host_memory, refuse_masked, refuse_without_values
from accelerant.runtime.registry import DeviceLike
from accelerant.zk.inference import extension as ext
from accelerant.zk.inference import verifier
from accelerant.zk.inference.extension import Words
from accelerant.zk.inference.prover import (
    CommittedTable,
    Speaker,
    code_bytes,
    multiplied,
    send_fractions,
    send_openings,
    sumcheck,
    values_at,
)
from accelerant.zk.inference.verifier import Element, Layer, Network, RejectedProofError

NETWORK_HEADER = b"accelerant integer network 2\n"
_OLDER_HEADER = b"accelerant integer network 1\n"  # without multipliers of channels
Int8 = npt.NDArray[np.int8]
Trace = dict[str, npt.NDArray[np.int64]]  # columns of activations, and sums W x + b, (batch, outputs), padded


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
            if (off := (bias < -verifier.BIAS_LIMIT) | (bias >= verifier.BIAS_LIMIT)).any():
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
            r, excess = scaled & (1 << verifier.SHIFT) - 1, (scaled >> verifier.SHIFT) - (u - 128)
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
            scaled = sums * padded(multipliers, layer.outputs)[:, None, None] + (1 << verifier.SHIFT - 1)
            if layer.skip:
                scaled += outputs[i - layer.skip].astype(np.int64) * layer.skip_multiplier
            u = np.clip(scaled >> verifier.SHIFT, -128, 127) + 128
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


def read_public(data: bytes) -> tuple[Network, verifier.Channel]:
    """Read the public part of an integer network's file, and return what has the rest; FormatError as from_bytes."""
    if not data.startswith((NETWORK_HEADER, _OLDER_HEADER)):
        raise FormatError(f"an integer network begins with {NETWORK_HEADER!r}, got {data[: len(NETWORK_HEADER)]!r}")
    reader = verifier.Channel(data[len(NETWORK_HEADER) :])
    try:
        return verifier.read_network(reader), reader
    except RejectedProofError as error:
        raise FormatError(f"the integer network is malformed: {error}") from None


def padded(x: npt.NDArray[Any], *shape: int, value: int = 0) -> npt.NDArray[Any]:
    """Return an array whose last axes, of this shape, are padded to powers of two, by zeros or another value."""
    width = [(0, 0)] * (x.ndim - len(shape)) + [(0, (1 << verifier.log2_ceil(size)) - size) for size in shape]
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
    """Return int8 x as an array (batch, channels, height, width), from that or from (batch, inputs)."""
    return checked_array("x", x, network.layers[0].input_shape)


def checked_array(name: str, x: Any, shape: tuple[int, int, int]) -> Int8:
    """Return an int8 array (batch, *shape), which may be given with the shape flattened; errors as checked_input."""
    refuse_masked(x, name)
    refuse_without_values(x, name)
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


# --- Commitments to networks, and proofs of what they map an input to ------------------------------------------------
_INVERTED = 1 << 18  # Denominators that are inverted at a time
_SATURATED, _TABLES = 512, 1022  # Rows of table_rows where (255, d) with d > 0 and the tables of activations begin


class ModelCommitment:
    """The public commitment to a network, which verifiers need."""

    def __init__(self, data: bytes) -> None:
        """Read the bytes of `to_bytes` and verify the range proof; FormatError says what is wrong."""
        data = checked_bytes("model commitment", data)
        try:
            self.checked: verifier.Commitment = verifier.check_commitment(data)
        except RejectedProofError as error:
            raise FormatError(f"the model commitment is invalid: {error}") from None
        self._data = data

    @property
    def network(self) -> Network:
        """The public part of the network."""
        return self.checked.network

    @property
    def digest(self) -> bytes:
        """The SHA-256 hash of the public part and the root."""
        return verifier.sha256(verifier.COMMITMENT_HEADER, self.network.encode(), self.checked.root)

    def __repr__(self) -> str:
        return f"ModelCommitment({self.network.widths}, {self.digest.hex()[:16]})"

    def to_bytes(self) -> bytes:
        """Return the commitment as a file."""
        return self._data

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModelCommitment) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


class Prover:
    """A network with its committed weights; it proves any number of inferences.

    Attributes:
        network: the IntegerNetwork.
        commitment: the ModelCommitment, to publish.
    """

    def __init__(self, network: Any, *, memory_limit_bytes: int | None = None, device: DeviceLike = "cpu") -> None:
        """Commit to an IntegerNetwork, or to the model that nn.quantize made with mode="exact".

        The device, "cuda" for example, hashes Merkle trees and sums weights; all else is computed by the CPU.
        OutOfMemory: this, or later a proof, is predicted to pass the limit, by default the memory that is free; nothing
        has been computed then.
        """
        self.network, self.memory_limit_bytes = integer_network(network), memory_limit_bytes
        self.space = space_at(device)
        public = self.network.network
        _require_memory("a commitment to this network", commitment_memory_bytes(public), memory_limit_bytes)
        self.layout = verifier.WeightLayout(public)
        values = self._byte_table()
        helpers = self.layout.helpers
        asked = values[: len(helpers.queries) << helpers.log_height]
        counts = np.bincount(asked, minlength=256).astype(np.uint64)
        self._weights = CommittedTable(values, self.layout.log_rows, [(0, self.layout.end)], self.space, keep=True)
        del values, asked
        self.commitment = ModelCommitment(self._commitment(public, counts))

    def __repr__(self) -> str:
        return f"Prover({self.network.network.widths}, {self.commitment.digest.hex()[:16]})"

    def _byte_table(self) -> npt.NDArray[np.uint8]:
        """Return the table of weights that WeightLayout describes."""
        values = np.zeros(1 << self.layout.log_size, np.uint8)
        for i, (weight, bias) in enumerate(zip(self.network.weights, self.network.biases, strict=True)):
            block = padded(weight.view(np.uint8) ^ 128, *weight.shape, value=128).reshape(-1)
            values[self.layout.weights[i] :][: len(block)] = block
            block = padded(bias, len(bias)) + verifier.BIAS_LIMIT
            for byte, at in enumerate(self.layout.biases[i]):
                values[at:][: len(block)] = block >> 8 * byte & 255
        return values

    def _commitment(self, public: Network, counts: Words) -> bytes:
        """Return the commitment with its range proof; see verifier.check_commitment."""
        root, layout = self._weights.tree.root, self.layout
        header = verifier.COMMITMENT_HEADER + public.encode() + root
        speaker = Speaker(header, verifier.COMMITMENT_HEADER, public.encode(), root, space=self.space)
        multiplicities = CommittedTable(counts, layout.log_rows, [(0, 1 << 8)], self.space)
        speaker.send(multiplicities.tree.root)
        alpha, _ = speaker.challenges(2)
        values = self._weights.values.reshape(-1)[: 1 << layout.log_size]

        def denominators(part: slice) -> Words:
            return ext.sub(ext.constant(alpha, 1), ext.lifted(values[part].astype(np.uint64)))

        lookups = Lookups(speaker, alpha, (0, 0), denominators, counts, ([], 8), layout.helpers)
        point = lookups.show_queries()
        over_rows = self._weights.over_rows(ext.eq_table(point[: layout.log_rows])[:, None], 0)[:, 0]
        columns = ext.eq_table(point[layout.log_rows :])[:, self._weights.columns]
        value = ext.total(ext.mul(over_rows, columns))[:, None]
        speaker.send_elements(value)
        claims = [verifier.Claim(0, 0, lookups.point, ext.elements(value)[0]), *lookups.show_table(1, 0)]
        send_openings(
            speaker, layout.stack(), [self._weights, multiplicities, lookups.committed], claims + lookups.claims(2)
        )
        return b"".join(speaker.parts)

    def prove(self, x: Any) -> tuple[Int8, bytes]:
        """Return the output (batch, outputs) of int8 x (batch, inputs), and the proof that it is the network's."""
        public = self.network.network
        x = checked_input(public, x)
        size = proof_memory_bytes(public, len(x))
        _require_memory(f"a proof of {len(x)} inputs", size, self.memory_limit_bytes)
        return InferenceProof(self, x).run()


_FIXED_BYTES, _ROW_BYTES = 24 << 20, 1100  # of any network, and for each row of the committed tables


def commitment_memory_bytes(network: Network) -> int:
    """Predict the memory that a commitment takes at its peak: within a third of it, where it is over 100 MB."""
    layout = verifier.WeightLayout(network)
    size = 8 * len(layout.helpers.queries) << layout.helpers.log_height
    return _FIXED_BYTES + (_ROW_BYTES << layout.log_rows) + (80 << layout.log_size) + 4 * size + code_bytes(2 * size)


def proof_memory_bytes(network: Network, batch: int) -> int:
    """Predict the memory that a proof takes at its peak, as commitment_memory_bytes, with what the prover keeps.

    ShapeError: no proof has such a batch.
    """
    layout = verifier.WeightLayout(network)
    witness = _witness_layout(network, batch, layout)
    kept = (1 << layout.log_size) + (32 * len(layout.helpers.queries) << layout.helpers.log_height)
    rows = 8 << witness.log_rows
    layers = 0
    for layer in network.layers:
        products = math.prod((layer.inputs, *layer.kernel))
        seen = products * math.prod(layer.output_shape[1:])
        layers = max(layers, 16 * products * layer.outputs + (112 + 16 * batch) * seen)
    codes = code_bytes(8 * rows) + code_bytes(16 * rows)
    return _FIXED_BYTES + (_ROW_BYTES << layout.log_rows) + kept + 140 * rows + codes + layers


def prediction(network: Network, batch: int) -> tuple[float, int]:
    """Return the bytes of a commitment and a proof together, and predict their CPU seconds within a factor of 3."""
    layout = verifier.WeightLayout(network)
    witness = _witness_layout(network, batch, layout)
    seen = [math.prod((layer.inputs, *layer.kernel, *layer.output_shape[1:])) for layer in network.layers]
    seconds = 0.1 + 1e-6 * layout.end + 2e-5 * (1 << layout.log_rows) + 8e-6 * witness.used + 1.5e-7 * sum(seen)
    hashes = 3 * layout.log_rows + sum(range(layout.log_rows, 0, -verifier.LOG_ARITY))
    leaves = sum(len(columns) for stack in (layout.stack(), witness.stack) for columns in stack.columns)
    fixed = 3 * len(network.encode()) + (1 << 16) + (1 << witness.logs[-1])
    return seconds, fixed + verifier.QUERIES * (8 * leaves + 2 * 32 * hashes + 128 * layout.log_rows)


def _witness_layout(network: Network, batch: int, layout: verifier.WeightLayout) -> verifier.WitnessLayout:
    try:
        return verifier.WitnessLayout(network, batch, layout)
    except RejectedProofError as error:
        raise ShapeError(f"x has {batch} inputs: {error}") from None


def require_memory(network: Network, batch: int) -> None:
    """Raise OutOfMemory if a commitment or a proof of a batch is predicted to take more memory than is free."""
    _require_memory("a commitment to this network", commitment_memory_bytes(network), None)
    _require_memory(f"a proof of {batch} inputs", proof_memory_bytes(network, batch), None)


def _require_memory(what: str, size: int, limit: int | None) -> None:
    """Raise OutOfMemory if a predicted size passes the limit, by default the memory that is free."""
    free = host_memory().get("MemAvailable", size) if limit is None else limit
    if size > free:
        may = "are free" if limit is None else "is the limit"
        raise OutOfMemory(f"{what} takes about {size >> 20:,} MiB of memory, and {free >> 20:,} MiB {may}")


class Lookups:
    """The two sides of a lookup argument: h = 1/den of the queries, h = multiplicity/den of the table's rows."""

    def __init__(
        self, speaker: Speaker, alpha: Element, beta: Element, denominators: Callable[[slice], Words], counts: Words,
        table: tuple[list[bytes], int], layout: verifier.HelperLayout,
    ) -> None:  # fmt: skip
        """Commit to h and send its sum; alpha and beta are of fingerprints, `table` takes table_rows."""
        self.speaker, self.counts, self.denominators, self.offsets = speaker, counts, denominators, layout.offsets
        a, b, tag = (ext.lifted(np.array(column, np.uint64)) for column in verifier.table_rows(*table))
        self.table, size = fingerprint(alpha, beta, a, b, tag), 1 << layout.log_queries
        self.log_height, self.asked = layout.log_height, np.zeros(size >> layout.log_height, np.uint64)
        self.asked[layout.queries] = 1
        values = np.zeros(1 << layout.log_size, np.uint64)
        sizes = [size] * 2 + [len(counts)] * 2
        blocks = [values[at : at + length] for at, length in zip(self.offsets, sizes, strict=True)]
        self.h, self.h_table, sums = blocks[:2], blocks[2:], []
        for part in (slice(at, min(at + _INVERTED, size)) for at in range(0, size, _INVERTED)):
            if (asked := self.numerators(part)).any():
                inverses = ext.base("mul", ext.inverse(denominators(part)), asked)
                self.h[0][part], self.h[1][part] = inverses
                sums.append(ext.total(inverses))
        self.h_table[0][:], self.h_table[1][:] = ext.base("mul", ext.inverse(self.table), counts)
        self.committed = CommittedTable(values, layout.log_rows, layout.parts, speaker.space)
        speaker.send(self.committed.tree.root)
        speaker.send_elements(ext.total(np.stack(sums, axis=-1))[:, None])

    def numerators(self, part: slice) -> Words:
        """Return 1 for queries in columns that have any, and 0 for others."""
        asked: Words = self.asked[np.arange(part.start, part.stop) >> self.log_height]
        return asked

    def show_queries(self) -> list[Element]:
        """Show the queries' side, and return its point."""
        self.point, values = send_fractions(self.speaker, self.h, self.denominators, self.numerators)
        self.parts = self.speaker.send_elements(values)
        return self.point

    def show_table(self, source: int, offset: int) -> list[verifier.Claim]:
        """Show the table's side, and return the claim on the multiplicities, which are there."""
        table, counts = self.table, self.counts
        self.table_point, values = send_fractions(
            self.speaker, self.h_table, lambda of: table[:, of], lambda of: counts[of]
        )
        self.table_parts = self.speaker.send_elements(values)
        value = self.speaker.send_elements(values_at(self.counts[None], self.table_point))
        return [verifier.Claim(source, offset, self.table_point, value[0])]

    def claims(self, source: int) -> list[verifier.Claim]:
        """Return the claims on h."""
        sides = [(self.point, part) for part in self.parts] + [(self.table_point, part) for part in self.table_parts]
        return [verifier.Claim(source, at, point, part) for at, (point, part) in zip(self.offsets, sides, strict=True)]


def fingerprint(alpha: Element, beta: Element, a: Words, b: Words, tag: Words) -> Words:
    """Return alpha - a - beta b - beta^2 tag for arrays over K."""
    scale = ext.constant(beta, a.ndim - 1)
    return ext.sub(ext.constant(alpha, a.ndim - 1), ext.add(a, ext.mul(scale, ext.add(b, ext.mul(scale, tag)))))


class InferenceProof:
    """One run of the protocol, in the order of verifier.check_inference."""

    def __init__(self, prover: Prover, x: Int8) -> None:
        self.prover, self.network, self.x = prover, prover.network, x
        public, batch = self.network.network, len(x)
        self.layers, self.layout = public.layers, verifier.WitnessLayout(public, batch, prover.layout)
        images = np.pad(x, [(0, (1 << verifier.log2_ceil(batch)) - batch), *[(0, 0)] * 3])
        self.inputs, self.traces = images.astype(np.int64), self.network.trace(images)
        self.padded_output = self.traces[-1]["y"].astype(np.int8)
        self.y = self.network.outward(self.traces[-1]["y"][:batch])
        root = prover.commitment.checked.root
        statement = (public.encode(), root, batch.to_bytes(8, "little"), x.tobytes(), self.y.tobytes())
        self.speaker = Speaker(verifier.PROOF_HEADER, verifier.PROOF_HEADER, *statement, space=prover.space)

    def run(self) -> tuple[Int8, bytes]:
        """Return the output and the proof."""
        layout, speaker = self.layout, self.speaker
        columns = self.columns()
        asked = np.isin(np.arange(8 << layout.log_rows) >> layout.helpers.log_height, layout.helpers.queries)
        indices = self.table_indices(columns).reshape(-1)[asked]
        counts = np.bincount(indices, minlength=1 << layout.log_table).astype(np.uint64)
        self.values = ext.words(columns)
        committed = np.zeros(1 << layout.log_size, np.uint64)
        for at, values in zip([*layout.columns, layout.multiplicities], [*self.values, counts], strict=True):
            committed[at : at + len(values)] = values
        witness = CommittedTable(committed, self.prover.layout.log_rows, layout.parts, speaker.space)
        speaker.send(self.padded_output.tobytes())
        speaker.send(witness.tree.root)
        alpha, beta = speaker.challenges(2)
        denominators = self.denominators(alpha, beta)
        table = layout.tables, layout.log_table
        lookups = Lookups(speaker, alpha, beta, denominators, counts, table, layout.helpers)
        rows = lookups.show_queries()[: layout.log_rows]
        sent = speaker.send_elements(values_at(self.values, rows))
        claims = [verifier.Claim(1, at, rows, value) for at, value in zip(layout.columns, sent, strict=True)]
        claims += lookups.show_table(1, layout.multiplicities) + lookups.claims(2)
        for index in range(len(self.layers)):
            claims += self.show_layer(index)
        point = speaker.challenges(layout.logs[-1])
        output = ext.elements(values_at(ext.words(self.padded_output.reshape(1, -1)), point))
        claims.append(verifier.Claim(1, layout.columns[7] + layout.rows[-1], point, output[0]))
        send_openings(speaker, layout.stack, [self.prover._weights, witness, lookups.committed], claims)
        return self.y, b"".join(speaker.parts)

    def columns(self) -> npt.NDArray[np.int64]:
        """Return the columns of all layers' activations, (8, rows); rows that are left have the output 0."""
        columns = np.zeros((8, 1 << self.layout.log_rows), np.int64)
        columns[verifier.COLUMNS.index("u"), : self.layout.used] = 128
        for trace, at in zip(self.traces, self.layout.rows, strict=True):
            for i, name in enumerate(verifier.COLUMNS):
                columns[i, at : at + trace[name].size] = trace[name].reshape(-1)
        return columns

    def tags(self) -> npt.NDArray[np.int64]:
        """Return the tag of each row's table of activations."""
        tags = np.full(1 << self.layout.log_rows, 2, np.int64)
        for layer, at, log in zip(self.layers, self.layout.rows, self.layout.logs, strict=True):
            tags[at : at + (1 << log)] = self.layout.tag(layer)
        return tags

    def table_indices(self, columns: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the index in table_rows of each query, (8, rows)."""
        d, u = columns[3:6], columns[6]
        excess = np.where(d > 0, _SATURATED - 1 + d, _SATURATED + 254 - d)
        return np.stack(
            (*columns[:3], *np.where(d == 0, 256 + u, excess), _TABLES + 256 * (self.tags() - 2) + u, 0 * u)
        )

    def denominators(self, alpha: Element, beta: Element) -> Callable[[slice], Words]:
        """Return a function that returns alpha - fingerprint of a slice of the 8 rows queries, (2, n)."""
        rows = self.values.shape[1]
        ones = np.ones(rows, np.uint64)
        table = np.stack((*self.values, 0 * ones, ones, self.tags().astype(np.uint64)))
        zero, one, tag, u, y = 8, 9, 10, 6, 7
        columns = np.array([
            [0, 1, 2, 3, 4, 5, u, zero], [zero] * 3 + [u] * 3 + [y, zero], [zero] * 3 + [one] * 3 + [tag, zero],
        ])  # fmt: skip

        def part(of: slice) -> Words:
            kind, row = np.divmod(np.arange(of.start, of.stop), rows)
            return fingerprint(alpha, beta, *(ext.lifted(table[each[kind], row]) for each in columns))

        return part

    def show_layer(self, index: int) -> list[verifier.Claim]:
        """Show equation (1) of a layer at a random z; see verifier.check_layer."""
        layer, layout, weights, speaker = self.layers[index], self.layout, self.prover.layout, self.speaker
        z, at, k_out = speaker.challenges(layout.logs[index]), layout.rows[index], verifier.log2_ceil(layer.outputs)
        pixels = verifier.shape_bits(layer.output_shape[1:])
        outputs, images = z[pixels : pixels + k_out], z[pixels + k_out :]
        factor = ext.constant((layer.common, 0), 1)
        if layer.by_channel:
            outputs, factor = self.show_channels(index, z)
            z = z[:pixels] + outputs + images
        columns = speaker.send_elements(values_at(self.values[:7, at : at + (1 << layout.logs[index])], z))
        table = self.prover._weights.values.reshape(-1)
        biases = np.stack([table[b : b + (1 << k_out)] for b in weights.biases[index]]).astype(np.uint64)
        bias = speaker.send_elements(values_at(biases, outputs))
        claims = [verifier.Claim(1, c + at, z, value) for c, value in zip(layout.columns[:7], columns, strict=True)]
        claims += [verifier.Claim(0, b, outputs, value) for b, value in zip(weights.biases[index], bias, strict=True)]
        if layer.skip:
            before = index - layer.skip
            values = self.values[7:, layout.rows[before] :][:, : 1 << layout.logs[before]]
            (added,) = speaker.send_elements(values_at(values, z))
            claims.append(verifier.Claim(1, layout.columns[7] + layout.rows[before], z, added))

        x, size = self.inputs_at(index, images), 1 << verifier.shape_bits((layer.inputs, *layer.kernel))
        kernel = self.prover._weights.resident.reshape(-1)[weights.weights[index] :][: size << k_out]
        products = ext.byte_products(ext.eq_table(outputs)[:, None, :], kernel.reshape(1 << k_out, -1))[:, 0]
        tables = [ext.sub(products, ext.constant((128, 0), 1)), self.seen(layer, x, z)]
        if layer.inputs & (layer.inputs - 1):
            mask = np.arange(tables[0].shape[1]) >> verifier.shape_bits(layer.kernel) < layer.inputs
            tables.append(ext.lifted(mask.astype(np.uint64)))

        def terms(tables: Words) -> Words:
            return ext.mul(multiplied(tables), factor[:, :, None])

        j, last = sumcheck(speaker, np.stack(tables, axis=1), len(tables), terms)
        last[:, 0] = ext.add(last[:, 0], np.array([128, 0], np.uint64))
        weight, _ = speaker.send_elements(last[:, :2])
        claims.append(verifier.Claim(0, weights.weights[index], j + outputs, weight))

        channels = j[verifier.shape_bits(layer.kernel) :]
        of_channels = ext.total(np.moveaxis(ext.mul(x, ext.eq_table(channels)[:, :, None, None]), 1, -1))
        of_rows, of_columns = (np.array(each, np.uint64).T for each in verifier.image_weights(z, j, layer))
        of_pixels = ext.mul(of_rows[:, :, None], of_columns[:, None, :])
        tables = [of_channels.reshape(2, -1), of_pixels.reshape(2, -1)]
        pixel, last = sumcheck(speaker, np.stack(tables, axis=1), 2, multiplied)
        if layer.source <= index:
            (value,) = speaker.send_elements(last[:, :1])
            row = layout.rows[index - layer.source]
            claims.append(verifier.Claim(1, layout.columns[7] + row, pixel + channels + images, value))
        return claims

    def show_channels(self, index: int, z: list[Element]) -> tuple[list[Element], Words]:
        """Reduce the equations of channels with their own multipliers to one; return its point, and eq m there."""
        layer, sums = self.layers[index], self.traces[index]["sums"]
        pixels, k_out = verifier.shape_bits(layer.output_shape[1:]), verifier.log2_ceil(layer.outputs)
        of_images, of_pixels = ext.eq_table(z[pixels + k_out :]), ext.eq_table(z[:pixels])
        values = ext.dot(of_pixels[:, None, None], ext.words(sums.reshape(1, len(sums), 1 << k_out, -1)))
        values = ext.total(np.moveaxis(ext.mul(values, of_images[:, :, None]), 1, -1))
        multipliers = ext.lifted(padded(np.array(layer.by_channel, np.uint64), layer.outputs))
        equal = ext.eq_table(z[pixels : pixels + k_out])
        tables = np.stack([equal, multipliers, values, ext.mul(multipliers, values)], axis=1)

        def terms(tables: Words) -> Words:
            equal, multiplier, value, scaled = (tables[:, i] for i in range(4))
            return ext.mul(equal, ext.sub(scaled, ext.mul(multiplier, value)))

        point, last = sumcheck(self.speaker, tables, 3, terms)
        return point, ext.mul(last[:, 0:1], last[:, 1:2])

    def inputs_at(self, index: int, images: list[Element]) -> Words:
        """Return sum_b eq(images, b) x_b of a layer's inputs, padded to powers of two: (2, channels, height, width)."""
        layer = self.layers[index]
        source = self.inputs if layer.source > index else self.traces[index - layer.source]["y"]
        x = padded(source, *layer.input_shape) if layer.source > index else source
        return values_at(ext.words(x.reshape(len(x), -1).T), images).reshape(2, *x.shape[1:])

    def seen(self, layer: Layer, x: Words, z: list[Element]) -> Words:
        """Return g(j), the sum of eq(z, p) x at the pixel that output p sees through j, a channel and kernel offset."""
        k = verifier.shape_bits(layer.output_shape[2:])
        of_columns, of_rows = ext.eq_table(z[:k]), ext.eq_table(z[k : verifier.shape_bits(layer.output_shape[1:])])
        _, height, width = layer.output_shape
        of_pixels = ext.mul(of_rows[:, :height, None], of_columns[:, None, :width]).reshape(2, 1, 1, 1, -1)
        views = windows(unpadded(x, layer.image), layer)
        sums = ext.total(ext.mul(views.reshape(*views.shape[:4], -1), of_pixels))
        return padded(sums, *layer.kernel).reshape(2, -1)


def integer_network(model: Any) -> IntegerNetwork:
    """Return the IntegerNetwork of the model that nn.quantize made with mode="exact"; one is returned as it is.

    Raises UnsupportedDtype for other models.
    """
    if isinstance(model, IntegerNetwork):
        return model
    if not hasattr(model, "exact_layers"):
        hint = ": its .model is what is proven" if hasattr(getattr(model, "model", None), "exact_layers") else ""
        raise UnsupportedDtype(
            "expected an IntegerNetwork, or the model of accelerant.nn.quantize(model, mode='exact', examples=x), got "
            f"{type(model).__name__}{hint}"
        )
    layers, weights, biases = [], [], []
    for layer in model.exact_layers():
        weight, bias, table = (array.cpu().numpy() for array in (layer.weight, layer.bias, layer.table))
        multipliers = tuple(layer.multiplier.tolist())
        multiplier = multipliers if len(set(multipliers)) > 1 else multipliers[0]
        sizes = weight.shape[1], len(weight), multiplier, table.tobytes()
        geometry = layer.image, weight.shape[2:], layer.stride, layer.padding
        layers.append(Layer(*sizes, *geometry, layer.source, layer.skip, layer.skip_multiplier))
        weights.append(weight)
        biases.append(bias)
    return IntegerNetwork(Network(tuple(layers), model.input_scale, model.output_scale), weights, biases)


def commit(model: Any) -> ModelCommitment:
    """Return the public commitment to a model; Prover(model).commitment is the same."""
    return Prover(model).commitment


def check(commitment: ModelCommitment, x: Any, y: Any, proof: bytes) -> None:
    """Verify that the committed network maps int8 x (batch, inputs) to int8 y (batch, outputs).

    Raises:
        RejectedProofError: the proof does not show it; says which check fails.
        ShapeError, UnsupportedDtype: x or y is not of this network, the proof is not bytes, or the commitment is no
            ModelCommitment.
    """
    if not isinstance(commitment, ModelCommitment):
        raise UnsupportedDtype(
            f"commitment must be a ModelCommitment, got {type(commitment).__name__}: ModelCommitment(bytes) reads one"
        )
    x = checked_input(commitment.network, x)
    y = checked_array("y", y, commitment.network.layers[-1].output_shape)
    proof = checked_bytes("proof", proof)
    if len(y) != len(x):
        raise ShapeError(f"x and y must have one batch size, got {len(x)} and {len(y)}")
    verifier.check_inference(commitment.checked, len(x), x.tobytes(), y.tobytes(), proof)


def verify(commitment: ModelCommitment, x: Any, y: Any, proof: bytes) -> bool:
    """Return whether a proof shows that the committed network maps x to y; see `check`, which says why not."""
    try:
        check(commitment, x, y, proof)
    except RejectedProofError:
        return False
    return True
