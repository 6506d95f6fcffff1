"""The verifier of proofs of inference, and the definitions that the prover shares; the standard library only.

docs/proof-of-inference.md has the protocol and its soundness. Multilinear extensions are over {0, 1}^k with bit j of an
index as coordinate j, so a table is bound from its least significant bit. Elements of K = F[u]/(u^2 - 7) are pairs.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Sequence
from itertools import pairwise
from numbers import Integral
from typing import Any, NamedTuple

from accelerant.errors import AccelerantError

P = 2**64 - 2**32 + 1
COMMITMENT_HEADER = b"accelerant model commitment 2, not zero-knowledge\n"
PROOF_HEADER = b"accelerant proof of inference 2, not zero-knowledge\n"
QUERIES = 148
LOG_RATE = 2  # a code of rate 1/4
LOG_ARITY = 3  # variables folded between two codewords
LOG_FINAL = 4  # variables of the message that is sent in clear, at most
LOG_CAP = 6  # the level of a Merkle tree that a proof contains whole
SHIFT = 24  # of requantization
BIAS_LIMIT = 1 << 23
MAX_MULTIPLIER = 1 << 17
MAX_WIDTH, MAX_LAYERS, MAX_LOG_WEIGHTS, MAX_LOG_ROWS, MAX_LOG_COLUMNS = 1 << 16, 256, 26, 23, 12
MAX_LOG_IMAGE, MAX_LOG_SIDES, MAX_LOG_READ = 20, 19, 22
COLUMNS = ("r0", "r1", "r2", "d0", "d1", "d2", "u", "y")
IDENTITY = bytes(range(128, 256)) + bytes(range(128))  # the table of int8 entries from -128 to 127

Element = tuple[int, int]
ZERO, ONE = (0, 0), (1, 0)


class RejectedProofError(AccelerantError, ValueError):
    """A proof or commitment that does not show its statement."""


def require(holds: bool, reason: str) -> None:
    """Raise RejectedProofError unless a condition holds."""
    if not holds:
        raise RejectedProofError(reason)


# --- the extension field ---------------------------------------------------------------------------------------------
def add(x: Element, y: Element) -> Element:
    """Return x + y."""
    return (x[0] + y[0]) % P, (x[1] + y[1]) % P


def sub(x: Element, y: Element) -> Element:
    """Return x - y."""
    return (x[0] - y[0]) % P, (x[1] - y[1]) % P


def mul(x: Element, y: Element) -> Element:
    """Return x y."""
    return (x[0] * y[0] + 7 * x[1] * y[1]) % P, (x[0] * y[1] + x[1] * y[0]) % P


def scale(x: Element, c: int) -> Element:
    """Return c x for an integer c."""
    return x[0] * c % P, x[1] * c % P


def combine(weights: Sequence[Element], values: Sequence[int]) -> Element:
    """Return sum_i weights_i values_i for integers."""
    return sum(w[0] * v for w, v in zip(weights, values, strict=True)) % P, sum(
        w[1] * v for w, v in zip(weights, values, strict=True)
    ) % P


def inner(x: Sequence[Element], y: Sequence[Element]) -> Element:
    """Return sum_i x_i y_i."""
    total = ZERO
    for a, b in zip(x, y, strict=True):
        total = add(total, mul(a, b))
    return total


def eq(x: Sequence[Element], y: Sequence[Element]) -> Element:
    """Return prod_j (x_j y_j + (1 - x_j)(1 - y_j))."""
    value = ONE
    for a, b in zip(x, y, strict=True):
        if a in (ZERO, ONE):
            value = mul(value, b if a[0] else sub(ONE, b))
        else:
            value = mul(value, sub(add(ONE, scale(mul(a, b), 2)), add(a, b)))
    return value


def eq_table(point: Sequence[Element]) -> list[Element]:
    """Return eq(point, i) for each i."""
    table = [ONE]
    for z in reversed(point):
        ones = [mul(value, z) for value in table]
        table = [entry for value, one in zip(table, ones, strict=True) for entry in (sub(value, one), one)]
    return table


def eq_below(point: Sequence[Element], count: int) -> Element:
    """Return sum over i < count of eq(point, i)."""
    total, prefix = ZERO, ONE
    if count == 1 << len(point):
        return ONE
    for j in reversed(range(len(point))):
        if count >> j & 1:
            total = add(total, mul(prefix, sub(ONE, point[j])))
        prefix = mul(prefix, point[j] if count >> j & 1 else sub(ONE, point[j]))
    return total


def bits(index: int, count: int) -> list[Element]:
    """Return an index as a point."""
    return [(index >> j & 1, 0) for j in range(count)]


def root_of_unity(log_order: int) -> int:
    """Return the element of order 2^log_order of F's NTT."""
    return pow(7, (P - 1) >> log_order, P)


def fold(values: list[Element], inverse: int, step: int, challenges: Sequence[Element]) -> Element:
    """Fold the values at x s^j of a code to that at x^(2^k); inverse = 1/x and step = 1/s."""
    for z in challenges:
        half, folded = len(values) // 2, []
        for j in range(half):
            a, b = values[j], values[j + half]
            even = scale(add(a, b), (P + 1) // 2)
            odd = scale(sub(a, b), (P + 1) // 2 * inverse * pow(step, j, P))
            folded.append(add(even, mul(z, sub(odd, even))))
        values, inverse, step = folded, inverse * inverse % P, step * step % P
    return values[0]


def fingerprint(alpha: Element, beta: Element, a: Element, b: Element, tag: Element) -> Element:
    """Return alpha - a - beta b - beta^2 tag."""
    return sub(alpha, add(a, mul(beta, add(b, mul(beta, tag)))))


# --- the statement ---------------------------------------------------------------------------------------------------
class Layer(NamedTuple):
    """The public part of a convolution; by default of a product with a matrix, which is one of an image of one pixel.

    Attributes:
        inputs, outputs: channels.
        multiplier: m of the requantization, or a tuple that has one for each output channel.
        table: of the activation, 256 int8 entries as bytes.
        image: height and width of the input.
        kernel: height and width of the kernel; a whole image flattens it.
        stride, padding: in both directions; the padding has zeros.
        source: how many layers before is the one whose output is the input; the network's input is before the first.
        skip: how many layers before is the one whose output, times skip_multiplier, is added before the shift; or 0.
    """

    inputs: int
    outputs: int
    multiplier: int | Sequence[int]
    table: bytes
    image: tuple[int, int] = (1, 1)
    kernel: tuple[int, int] = (1, 1)
    stride: int = 1
    padding: int = 0
    source: int = 1
    skip: int = 0
    skip_multiplier: int = 0

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of the input."""
        return self.inputs, *self.image

    @property
    def output_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of the output."""
        sizes = zip(self.image, self.kernel, strict=True)
        height, width = ((size + 2 * self.padding - k) // self.stride + 1 for size, k in sizes)
        return self.outputs, height, width

    @property
    def common(self) -> int:
        """The multiplier of all output channels; 0 if they have their own."""
        return 0 if isinstance(self.multiplier, Sequence) else self.multiplier

    @property
    def by_channel(self) -> Sequence[int]:
        """The multipliers of output channels; none if they have a common one."""
        return self.multiplier if isinstance(self.multiplier, Sequence) else ()

    def encode(self) -> bytes:
        """Return the bytes of the layer; multipliers of channels follow, and have a 0 in place of that of the layer."""
        numbers = (*self.image, *self.kernel, self.stride, self.padding, self.source, self.skip, self.skip_multiplier)
        head = struct.pack("<12I", self.inputs, self.outputs, self.common, *numbers)
        return head + self.table + struct.pack(f"<{len(self.by_channel)}I", *self.by_channel)


class Network(NamedTuple):
    """The public part of a network; a real number is about its integer times the scale."""

    layers: tuple[Layer, ...]
    input_scale: float = 1.0
    output_scale: float = 1.0

    @property
    def widths(self) -> str:
        """The shapes as text: 64-128-10, or 1x28x28-6x24x24-10."""
        shapes = [self.layers[0].input_shape, *(layer.output_shape for layer in self.layers)]
        return "-".join("x".join(map(str, shape if shape[1:] != (1, 1) else shape[:1])) for shape in shapes)

    def encode(self) -> bytes:
        """Return the bytes that commitments contain and transcripts absorb."""
        head = struct.pack("<Idd", len(self.layers), self.input_scale, self.output_scale)
        return head + b"".join(layer.encode() for layer in self.layers)

    def check(self) -> None:
        """Raise RejectedProofError where a number is out of range."""
        require(1 <= len(self.layers) <= MAX_LAYERS, f"{len(self.layers)} layers, not 1 to {MAX_LAYERS}")
        for i, layer in enumerate(self.layers):
            self._check_layer(i, layer)
        sides = sum(
            sum((*layer.image, *layer.kernel, *layer.output_shape[1:])) + len(layer.by_channel) for layer in self.layers
        )
        require(  # a verifier takes about 2 us for each
            sides <= 1 << MAX_LOG_SIDES,
            f"heights and widths of images and kernels, and numbers of multipliers, sum to {sides}, more than "
            f"2^{MAX_LOG_SIDES}",
        )
        read = sum(math.prod(layer.input_shape) for i, layer in enumerate(self.layers) if layer.source > i)
        require(  # at a point for each layer, in about 0.4 us for each
            read <= 1 << MAX_LOG_READ, f"layers take {read} entries of the network's input, more than 2^{MAX_LOG_READ}"
        )
        scales = (self.input_scale, self.output_scale)
        require(all(0 < each < math.inf for each in scales), f"scales must be positive and finite, got {scales}")
        weights = WeightLayout(self)
        try:
            WitnessLayout(self, 1, weights)
        except RejectedProofError:
            logs = blocks(activation_logs(self, 1))[1]
            raise RejectedProofError(f"2^{logs} activations of one input, or the tables, are too many") from None

    def _check_layer(self, i: int, layer: Layer) -> None:
        sizes = (*layer[:2], *layer.image, *layer.kernel, layer.stride)
        for size in sizes:
            require(1 <= size <= MAX_WIDTH, f"layer {i} has a size of {size}, not 1 to {MAX_WIDTH}")
        products = layer.inputs * math.prod(layer.kernel)
        require(products <= MAX_WIDTH, f"layer {i} has sums of {products} products, which could pass int32")
        given: Any = layer.multiplier
        if isinstance(given, Sequence):
            require(len(given) == layer.outputs, f"layer {i} has {len(given)} multipliers for {layer.outputs} outputs")
        for multiplier in given if isinstance(given, Sequence) else (given,):
            fits = isinstance(multiplier, Integral) and 1 <= int(multiplier) <= MAX_MULTIPLIER
            require(fits, f"layer {i} has multiplier {multiplier}")
        require(0 <= layer.skip_multiplier <= 2 << SHIFT, f"layer {i} has skip multiplier {layer.skip_multiplier}")
        require(len(layer.table) == 256, f"layer {i} has a table of {len(layer.table)} entries, not 256")
        require(0 <= layer.padding < min(layer.kernel), f"layer {i} has padding {layer.padding}, not below its kernel")
        require(min(layer.output_shape) >= 1, f"layer {i} has a kernel of {layer.kernel}, larger than its image")
        areas = (math.prod(layer.input_shape), math.prod(layer.output_shape))
        require(max(areas) <= 1 << MAX_LOG_IMAGE, f"layer {i} has {max(areas)} pixels, more than 2^{MAX_LOG_IMAGE}")
        seen = max(k * size for k, size in zip(layer.kernel, layer.output_shape[1:], strict=True))
        require(seen <= 1 << MAX_LOG_IMAGE, f"layer {i} sees {seen} pixels in a direction, more than 2^{MAX_LOG_IMAGE}")
        require(1 <= layer.source <= i + 1, f"layer {i} takes its input from {layer.source} layers before")
        require(0 <= layer.skip <= i, f"layer {i} adds the output of {layer.skip} layers before")
        came = self.shape_of(i - layer.source)
        require(layer.input_shape == came, f"layer {i} takes an input of {layer.input_shape}, and {came} comes")
        added = self.shape_of(i - layer.skip) if layer.skip else layer.output_shape
        require(layer.output_shape == added, f"layer {i} adds {added} to its output of {layer.output_shape}")

    def shape_of(self, index: int) -> tuple[int, int, int]:
        """Return the shape of a layer's output, or for -1 of the network's input."""
        return self.layers[index].output_shape if index >= 0 else self.layers[0].input_shape


def log2_ceil(n: int) -> int:
    """Return the least k with 2^k >= n."""
    return (n - 1).bit_length()


def shape_bits(shape: Sequence[int]) -> int:
    """Return log2 of the size of an array whose axes are padded to powers of two."""
    return sum(map(log2_ceil, shape))


def convolved(x: Sequence[Element], y: Sequence[Element]) -> list[Element]:
    """Return sum_i x_i y_(k - i) for each k by long integers, 160 bits an entry: sums are of 2^16 terms of 2^131."""
    (x0, x1), (y0, y1) = (
        [int.from_bytes(b"".join(e[i].to_bytes(20, "little") for e in each), "little") for i in (0, 1)]
        for each in (x, y)
    )
    size = 20 * (len(x) + len(y) - 1)
    sums = [each.to_bytes(size, "little") for each in (x0 * y0 + 7 * x1 * y1, x0 * y1 + x1 * y0)]
    low, high = ([int.from_bytes(each[i : i + 20], "little") % P for i in range(0, size, 20)] for each in sums)
    return list(zip(low, high, strict=True))


def pixel_weights(z: Sequence[Element], j: Sequence[Element], sizes: tuple[int, int], layer: Layer) -> list[Element]:
    """Return, for each q, sum eq(z, p) eq(j, d) over outputs p and kernel offsets d with p stride + d - padding = q.

    `sizes` has those of the kernel and of the output in this direction; q goes from -padding to the last that is used.
    """
    gap = [ZERO] * (layer.stride - 1)
    spaced = [entry for pixel in eq_table(z)[: sizes[1]] for entry in (pixel, *gap)]
    return convolved(spaced[: len(spaced) - len(gap)], eq_table(j)[: sizes[0]])


def image_weights(z: Sequence[Element], j: Sequence[Element], layer: Layer) -> tuple[list[Element], list[Element]]:
    """Return pixel_weights of rows and columns, padded to powers of two; z is columns first, j the kernel's."""
    found, at_z, at_j = [], 0, 0
    for axis in (1, 0):
        size, kernel, output = layer.image[axis], layer.kernel[axis], layer.output_shape[1 + axis]
        end_z, end_j = at_z + log2_ceil(output), at_j + log2_ceil(kernel)
        weights = pixel_weights(z[at_z:end_z], j[at_j:end_j], (kernel, output), layer)
        weights = weights[layer.padding : layer.padding + size]
        found.append(weights + [ZERO] * ((1 << log2_ceil(size)) - len(weights)))
        at_z, at_j = end_z, end_j
    return found[1], found[0]


def extension(values: bytes, shape: Sequence[int], point: Sequence[Element]) -> Element:
    """Return the extension of an int8 array, each axis padded by zeros to a power of two, at a point."""
    at, size = log2_ceil(shape[-1]), shape[-1]
    weights, signed = eq_table(point[:at])[:size], struct.unpack(f"{len(values)}b", values)
    level = [combine(weights, signed[i : i + size]) for i in range(0, len(signed), size)]
    for size in reversed(shape[:-1]):
        weights, at = eq_table(point[at : at + log2_ceil(size)])[:size], at + log2_ceil(size)
        level = [inner(weights, level[i : i + size]) for i in range(0, len(level), size)]
    return level[0]


def unpadded(data: bytes, shape: Sequence[int]) -> bytes:
    """Return the entries of an int8 array whose axes are padded to powers of two."""
    if len(shape) == 1:
        return data[: shape[0]]
    step = len(data) >> log2_ceil(shape[0])
    return b"".join(unpadded(data[i * step : (i + 1) * step], shape[1:]) for i in range(shape[0]))


Part = tuple[int, int]  # offset and size of entries of a table


def blocks(logs: Sequence[int]) -> tuple[list[int], int]:
    """Return offsets of blocks of 2^k entries, the largest first, hence aligned; and log2 of the table's size."""
    offsets, end = [0] * len(logs), 0
    for i in sorted(range(len(logs)), key=lambda i: -logs[i]):
        offsets[i], end = end, end + (1 << logs[i])
    return offsets, log2_ceil(end)


def occupied(parts: Sequence[Part], log_rows: int) -> list[int]:
    """Return the columns in which a table has parts; the others are zeros, and are not committed."""
    ends = [(at >> log_rows, (at + size - 1 >> log_rows) + 1) for at, size in parts]
    require(max(end for _, end in ends) <= 1 << MAX_LOG_COLUMNS, "the batch is too large for this network: divide it")
    return sorted({column for begin, end in ends for column in range(begin, end)})


def column_height(weights: int, log_rows: int) -> int:
    """Return log2 of the height of all columns that about minimizes a proof (a row of the tables counts 8 bytes)."""
    entries, sizes = weights + (24 << log_rows), {}
    for height in range(max(6, log2_ceil(weights) + 3 - MAX_LOG_COLUMNS), 19):
        hashes = 3 * (height - 4) + sum(max(0, left - 7) + 4 for left in range(height, LOG_FINAL, -LOG_ARITY))
        sizes[QUERIES * (32 * hashes + 8 * (3 + (entries >> height))) + (8 << height)] = height
    return sizes[min(sizes)]


class HelperLayout:
    """The table of a lookup argument's h, for queries (if any) and rows of tables, each in K: two blocks."""

    def __init__(self, log_rows: int, log_queries: int, queries: Sequence[Part], log_table: int) -> None:
        self.log_rows, self.log_queries, self.log_height = log_rows, log_queries, min(log_rows, log_queries)
        self.offsets, self.log_size = blocks([log_queries] * 2 + [log_table] * 2)
        self.queries, height = occupied(queries, log_rows), 1 << self.log_height
        self.parts = [(at + column * height, height) for at in self.offsets[:2] for column in self.queries]
        self.parts += [(at, 1 << log_table) for at in self.offsets[2:]]

    def numerator(self, point: Sequence[Element]) -> Element:
        """Return the extension of 1 in columns with queries and 0 in the others."""
        table, total = eq_table(point[self.log_rows :]), ZERO
        for column in self.queries:
            total = add(total, table[column])
        return total


def activation_logs(network: Network, batch: int) -> list[int]:
    """Return log2 of the number of a layer's activations, each axis padded to a power of two."""
    return [shape_bits(layer.output_shape) + log2_ceil(batch) for layer in network.layers]


class WeightLayout:
    """The table of weights: for each layer a block of w + 128, input index first, and three of the bias's bytes."""

    def __init__(self, network: Network) -> None:
        pairs = [(shape_bits((layer.inputs, *layer.kernel)), log2_ceil(layer.outputs)) for layer in network.layers]
        logs = [n for k_in, k_out in pairs for n in (k_in + k_out, *[k_out] * 3)]
        offsets, self.log_size = blocks(logs)
        require(
            self.log_size <= MAX_LOG_WEIGHTS,
            f"the weights need a table of 2^{self.log_size} entries, more than 2^{MAX_LOG_WEIGHTS}",
        )
        self.weights, self.biases = offsets[::4], [offsets[i + 1 : i + 4] for i in range(0, len(offsets), 4)]
        self.end = sum(1 << log for log in logs)
        self.log_rows = column_height(self.end, blocks(activation_logs(network, 1))[1])
        self.helpers = HelperLayout(self.log_rows, self.log_size, [(0, self.end)], 8)

    def stack(self) -> Stack:
        """Return the stack of the tables of a commitment."""
        return Stack(self.log_rows, [[(0, self.end)], [(0, 1 << 8)], self.helpers.parts])


class WitnessLayout:
    """The rows of activations, a block for each layer, output index first and then the batch's; and the tables."""

    def __init__(self, network: Network, batch: int, weights: WeightLayout) -> None:
        self.tables = list(dict.fromkeys([IDENTITY, *(layer.table for layer in network.layers)]))
        self.logs = activation_logs(network, batch)
        self.rows, self.log_rows = blocks(self.logs)
        require(self.log_rows <= MAX_LOG_ROWS, "the batch is too large for this network: divide it")
        self.log_table = log2_ceil(1022 + 256 * len(self.tables))
        offsets, self.log_size = blocks([*[self.log_rows] * 8, self.log_table])
        self.columns, self.multiplicities = offsets[:8], offsets[8]
        whole = -(-sum(1 << log for log in self.logs) >> weights.log_rows) << weights.log_rows
        self.used = used = min(1 << self.log_rows, whole)
        self.parts = [*((at, used) for at in self.columns), (self.multiplicities, 1 << self.log_table)]
        queries = [(kind << self.log_rows, used) for kind in range(7)]
        self.helpers = HelperLayout(weights.log_rows, self.log_rows + 3, queries, self.log_table)
        self.stack = Stack(weights.log_rows, [[(0, weights.end)], self.parts, self.helpers.parts])

    def tag(self, layer: Layer) -> int:
        """Return the tag of a layer's table in fingerprints."""
        return 2 + self.tables.index(layer.table)


def table_rows(tables: Sequence[bytes], log_size: int) -> tuple[list[int], list[int], list[int]]:
    """Return the columns a, b and tag: bytes, saturation (equation 2), then the tables of activations (3)."""
    byte = range(256)
    rows = [(i, 0, 0) for i in byte] + [(0, u, 1) for u in byte]
    rows += [(d, 255, 1) for d in byte[1:]] + [(P - d, 0, 1) for d in byte[1:]]
    rows += [(u, (y - 256 * (y > 127)) % P, 2 + i) for i, table in enumerate(tables) for u, y in enumerate(table)]
    rows = rows[: 1 << log_size] + [(0, 0, 0)] * ((1 << log_size) - len(rows))
    a, b, tag = zip(*rows, strict=True)
    return list(a), list(b), list(tag)


class Claim(NamedTuple):
    """f~(point) = value for the block of table `source` that begins at `offset`."""

    source: int
    offset: int
    point: list[Element]
    value: Element


class Stack:
    """The committed tables side by side: 2^log_rows rows, and for each table its columns in the one leaf of a row."""

    def __init__(self, log_rows: int, tables: Sequence[Sequence[Part]]) -> None:
        self.log_rows, self.columns = log_rows, [occupied(parts, log_rows) for parts in tables]
        self.logs = [log2_ceil(columns[-1] + 1) for columns in self.columns]
        self.offsets, self.log_columns = blocks(self.logs)
        self.log_domain = log_rows + LOG_RATE
        require(self.log_columns <= MAX_LOG_COLUMNS, "the batch is too large for this network: divide it")

    def point(self, claim: Claim) -> list[Element]:
        """Return the coordinates of a claim in the stack: those of the columns, then those of the rows."""
        k, h, source = len(claim.point), self.log_rows, claim.source
        full = claim.point + bits(claim.offset >> k, h + self.logs[source] - k)
        return (
            full[h:] + bits(self.offsets[source] >> self.logs[source], self.log_columns - self.logs[source]) + full[:h]
        )


# --- the transcript --------------------------------------------------------------------------------------------------
def sha256(*parts: bytes) -> bytes:
    """Return the hash of the parts joined."""
    return hashlib.sha256(b"".join(parts)).digest()


class Transcript:
    """A hash of all that was said, from which challenges are drawn."""

    def __init__(self, *statement: bytes) -> None:
        self.state = bytes(32)
        for part in statement:
            self.absorb(part)

    def absorb(self, data: bytes) -> None:
        """Add data to the transcript."""
        self.state = sha256(b"absorb", self.state, len(data).to_bytes(8, "little"), data)

    def squeeze(self) -> bytes:
        """Return 32 bytes that depend on all before."""
        self.state, drawn = sha256(b"next", self.state), sha256(b"draw", self.state)
        return drawn

    def challenge(self) -> Element:
        """Return an element of K: two integers of 128 bits modulo p."""
        drawn = self.squeeze()
        return int.from_bytes(drawn[:16], "little") % P, int.from_bytes(drawn[16:], "little") % P

    def challenges(self, count: int) -> list[Element]:
        """Return several elements."""
        return [self.challenge() for _ in range(count)]

    def positions(self, log_domain: int) -> list[int]:
        """Return the positions of the queries."""
        words = [word for _ in range(-(-QUERIES // 8)) for word in struct.unpack("<8I", self.squeeze())]
        return [word % (1 << log_domain) for word in words[:QUERIES]]


class Channel(Transcript):
    """The transcript of a verifier, who reads the messages from a proof. No length is taken from a proof."""

    def __init__(self, proof: bytes, *statement: bytes) -> None:
        super().__init__(*statement)
        self.proof, self.at = proof, 0

    def take(self, size: int) -> bytes:
        """Read bytes without absorbing them."""
        require(
            size <= len(self.proof) - self.at,
            f"the proof is cut off: {size - len(self.proof) + self.at:,} bytes of a message are missing",
        )
        self.at += size
        return self.proof[self.at - size : self.at]

    def bytes(self, size: int) -> bytes:
        """Read and absorb bytes."""
        data = self.take(size)
        self.absorb(data)
        return data

    def elements(self, count: int) -> list[Element]:
        """Read and absorb elements of K."""
        words = unpack(self.bytes(16 * count))
        return list(zip(words[::2], words[1::2], strict=True))


def unpack(data: bytes) -> tuple[int, ...]:
    """Return the elements of F in bytes; each must be below p."""
    words = struct.unpack(f"<{len(data) // 8}Q", data)
    require(max(words) < P, "an element is not below the modulus")
    return words


def read_network(reader: Channel) -> Network:
    """Read and check the public part of a network."""
    count, *scales = struct.unpack("<Idd", reader.take(20))
    require(count <= MAX_LAYERS, f"{count} layers, more than {MAX_LAYERS}")
    network = Network(tuple(_read_layer(reader) for _ in range(count)), *scales)
    network.check()
    return network


def _read_layer(reader: Channel) -> Layer:
    numbers = struct.unpack("<12I", reader.take(48))
    inputs, outputs, multiplier, *sizes, stride, padding, source, skip, skip_multiplier = numbers
    image, kernel = (sizes[0], sizes[1]), (sizes[2], sizes[3])
    table = reader.take(256)
    multiplier = multiplier or struct.unpack(f"<{outputs}I", reader.take(4 * outputs))
    return Layer(inputs, outputs, multiplier, table, image, kernel, stride, padding, source, skip, skip_multiplier)


def sumcheck(channel: Channel, claim: Element, rounds: int, degree: int) -> tuple[list[Element], Element]:
    """Reduce a sum over {0, 1}^rounds to a value at a random point; P sends g(0), g(2), ... g(degree), not g(1)."""
    point = []
    for _ in range(rounds):
        first, *others = channel.elements(degree)
        differences = [first, sub(claim, first), *others]
        z = channel.challenge()
        claim, basis = first, ONE
        for k in range(1, degree + 1):  # Newton's formula: sum_k binomial(z, k) (difference k of g at 0)
            differences = [sub(b, a) for a, b in pairwise(differences)]
            basis = scale(mul(basis, sub(z, (k - 1, 0))), pow(k, -1, P))
            claim = add(claim, mul(basis, differences[0]))
        point.append(z)
    return point, claim


# --- lookups ---------------------------------------------------------------------------------------------------------
class Fractions:
    """Show sum_x h(x) = total with h(x) den(x) = num(x); den and num at `point` are the caller's, who calls `check`."""

    def __init__(self, channel: Channel, total: Element, log_size: int) -> None:
        z, self.delta = channel.challenges(log_size), channel.challenge()
        self.point, self.final = sumcheck(channel, mul(self.delta, total), log_size, 3)
        self.parts = channel.elements(2)
        self.h = add(self.parts[0], mul((0, 1), self.parts[1]))
        self.eq = eq(z, self.point)

    def check(self, denominator: Element, numerator: Element) -> None:
        """Compare the sumcheck's last claim with the values of the tables."""
        inner = mul(self.eq, sub(mul(self.h, denominator), numerator))
        require(add(inner, mul(self.delta, self.h)) == self.final, "a lookup is not in its table")


def check_table(
    channel: Channel, total: Element, layout: tuple[Sequence[bytes], int], alpha: Element, beta: Element
) -> tuple[Fractions, Element]:
    """Verify the tables' side of the lookups; return it, and the claimed multiplicity at its point."""
    fractions = Fractions(channel, total, layout[1])
    (multiplicity,) = channel.elements(1)
    weights = eq_table(fractions.point)
    a, b, tag = (combine(weights, column) for column in table_rows(*layout))
    fractions.check(fingerprint(alpha, beta, a, b, tag), multiplicity)
    return fractions, multiplicity


# --- openings --------------------------------------------------------------------------------------------------------
class Tree:
    """A Merkle tree of 2^log_leaves leaves; the root is the hash of the level with at most 64 nodes, its cap."""

    def __init__(self, channel: Channel, root: bytes, log_leaves: int, leaf_bytes: int) -> None:
        self.channel, self.leaf_bytes = channel, leaf_bytes
        self.depth = max(0, log_leaves - LOG_CAP)
        cap = channel.take(32 << (log_leaves - self.depth))
        require(sha256(b"cap", cap) == root, "a level of a Merkle tree does not match its root")
        self.cap = [cap[i : i + 32] for i in range(0, len(cap), 32)]

    def open(self, index: int) -> tuple[int, ...]:
        """Read and verify a leaf and its path; return its elements of F."""
        leaf = self.channel.take(self.leaf_bytes)
        node = sha256(b"leaf", leaf)
        for _ in range(self.depth):
            other = self.channel.take(32)
            node = sha256(b"node", other, node) if index & 1 else sha256(b"node", node, other)
            index >>= 1
        require(node == self.cap[index], "an opening does not match its Merkle tree")
        return unpack(leaf)


def check_openings(channel: Channel, stack: Stack, roots: Sequence[bytes], claims: Sequence[Claim]) -> None:
    """Verify all claims on the committed tables by one sumcheck and one chain of folded codes (Basefold)."""
    lam, powers = channel.challenge(), [ONE]
    while len(powers) < len(claims):
        powers.append(mul(powers[-1], lam))
    total = inner(powers, [claim.value for claim in claims])
    point, total = sumcheck(channel, total, stack.log_columns, 2)
    weights, left, oracles = eq_table(point), stack.log_rows, []
    while left > LOG_FINAL:
        oracle = channel.bytes(32)
        more, total = sumcheck(channel, total, LOG_ARITY, 2)
        oracles.append((oracle, more, left + LOG_RATE))
        point, left = point + more, left - LOG_ARITY
    final = channel.elements(1 << left)
    for power, claim in zip(powers, claims, strict=True):
        full = stack.point(claim)
        value = inner(final, eq_table(full[len(point) :]))
        total = sub(total, mul(mul(power, eq(full[: len(point)], point)), value))
    require(total == ZERO, "the claims on committed tables do not hold")
    step = root_of_unity(left + LOG_RATE)
    ends = [combine(final, [pow(step, i * j, P) for j in range(len(final))]) for i in range(4 << left)]
    columns = [[weights[at + i] for i in each] for at, each in zip(stack.offsets, stack.columns, strict=True)]
    positions = channel.positions(stack.log_domain)
    trees = [Tree(channel, root, stack.log_domain, 8 * len(each)) for root, each in zip(roots, columns, strict=True)]
    folded = [Tree(channel, root, log - LOG_ARITY, 16 << LOG_ARITY) for root, _, log in oracles]
    for position in positions:
        value = ZERO
        for tree, column in zip(trees, columns, strict=True):
            value = add(value, combine(column, tree.open(position)))
        for tree, (_, challenges, log) in zip(folded, oracles, strict=True):
            index = position % (1 << (log - LOG_ARITY))
            words = tree.open(index)
            values = list(zip(words[::2], words[1::2], strict=True))
            require(values[position >> (log - LOG_ARITY)] == value, "a fold of the code is wrong")
            inverse = pow(root_of_unity(log), (1 << log) - index, P)
            value = fold(values, inverse, pow(root_of_unity(LOG_ARITY), -1, P), challenges)
            position = index
        require(ends[position] == value, "the last fold of the code is wrong")
    require(channel.at == len(channel.proof), f"{len(channel.proof) - channel.at} bytes follow the proof")


# --- statements ------------------------------------------------------------------------------------------------------
class Commitment(NamedTuple):
    """A network whose weights have the Merkle root `root`; check_commitment returns those that are bytes."""

    network: Network
    root: bytes


def check_commitment(data: bytes) -> Commitment:
    """Verify the range proof in a commitment: all entries of the committed table are from 0 to 255."""
    require(data.startswith(COMMITMENT_HEADER), "this is no model commitment of version 2")
    reader = Channel(data[len(COMMITMENT_HEADER) :])
    network = read_network(reader)
    root, layout = reader.take(32), WeightLayout(network)
    channel = Channel(reader.proof[reader.at :], COMMITMENT_HEADER, network.encode(), root)
    roots = [root, channel.bytes(32)]
    alpha, beta = channel.challenges(2)
    roots.append(channel.bytes(32))
    (total,) = channel.elements(1)
    lookups = Fractions(channel, total, layout.log_size)
    (value,) = channel.elements(1)
    lookups.check(sub(alpha, value), layout.helpers.numerator(lookups.point))
    table, multiplicity = check_table(channel, total, ((), 8), alpha, beta)
    helper = layout.helpers.offsets
    claims = [Claim(0, 0, lookups.point, value), Claim(1, 0, table.point, multiplicity)]
    claims += [Claim(2, helper[i], lookups.point, lookups.parts[i]) for i in range(2)]
    claims += [Claim(2, helper[2 + i], table.point, table.parts[i]) for i in range(2)]
    check_openings(channel, layout.stack(), roots, claims)
    return Commitment(network, root)


def check_layer(
    channel: Channel, network: Network, index: int, witness: WitnessLayout, x_at: Callable[[list[Element]], Element]
) -> list[Claim]:
    """Reduce equation (1) of a layer at a random z to claims on the weights (source 0) and the witness (source 1).

    The product is sum_j w~(j, z) g(j), j an input channel and an offset in the kernel, with g(j) = sum_q x~(q, j) c(q),
    q a pixel and c the weights of pixels for z and j. Where channels have multipliers, the equations of all of them are
    reduced to that at a random point, by sum_o eq(z, o) (s_o - m_o a_o) = 0, before.
    """
    layer, weights, z = network.layers[index], WeightLayout(network), channel.challenges(witness.logs[index])
    pixel_bits, k_out = shape_bits(layer.output_shape[1:]), log2_ceil(layer.outputs)
    outputs, images = z[pixel_bits : pixel_bits + k_out], z[pixel_bits + k_out :]
    digits, y, rows = (1, 1 << 8, 1 << 16), witness.columns[7], witness.rows
    factor, left, equal = (layer.common, 0), ZERO, ONE
    if layer.by_channel:
        channel_point, left = sumcheck(channel, ZERO, k_out, 3)
        equal = eq(outputs, channel_point)
        factor = mul(equal, combine(eq_table(channel_point)[: layer.outputs], layer.by_channel))
        outputs, z = channel_point, z[:pixel_bits] + channel_point + images
    columns, bias = channel.elements(7), channel.elements(3)
    q = sub(add(columns[6], combine(columns[3:6], digits)), (128, 0))
    scaled = sub(add(scale(q, 1 << SHIFT), combine(columns[:3], digits)), (1 << (SHIFT - 1), 0))
    claims = [Claim(1, at + rows[index], z, value) for at, value in zip(witness.columns[:7], columns, strict=True)]
    claims += [Claim(0, at, outputs, value) for at, value in zip(weights.biases[index], bias, strict=True)]
    if layer.skip:
        (added,) = channel.elements(1)
        claims.append(Claim(1, y + rows[index - layer.skip], z, added))
        scaled = sub(scaled, scale(added, layer.skip_multiplier))
    biases = sub(combine(bias, digits), (BIAS_LIMIT, 0))
    products = sub(sub(mul(equal, scaled), left), mul(factor, biases))

    kernel_bits, masked = shape_bits(layer.kernel), layer.inputs & (layer.inputs - 1) != 0
    j, final = sumcheck(channel, products, kernel_bits + log2_ceil(layer.inputs), 2 + masked)
    weight, g = channel.elements(2)
    claims.append(Claim(0, weights.weights[index], j + outputs, weight))
    value, channels = mul(factor, mul(sub(weight, (128, 0)), g)), j[kernel_bits:]
    value = mul(value, eq_below(channels, layer.inputs)) if masked else value
    require(value == final, f"the product of layer {index} is wrong")

    pixel, final = sumcheck(channel, g, shape_bits(layer.image), 2)
    point, column_bits = pixel + channels + images, log2_ceil(layer.image[1])
    if layer.source <= index:
        (x,) = channel.elements(1)
        claims.append(Claim(1, y + rows[index - layer.source], point, x))
    else:
        x = x_at(point)
    of_rows, of_columns = image_weights(z, j, layer)
    of_pixels = mul(inner(of_rows, eq_table(pixel[column_bits:])), inner(of_columns, eq_table(pixel[:column_bits])))
    require(mul(x, of_pixels) == final, f"the image of layer {index} is wrong")
    return claims


def check_inference(commitment: Commitment, batch: int, x: bytes, y: bytes, proof: bytes) -> None:
    """Verify that a committed network, as check_commitment returned it, maps int8 x (batch, inputs) to y."""
    network, root = commitment
    layers, last = network.layers, network.layers[-1]
    require(batch >= 1, f"the batch must be at least 1, got {batch}")
    shapes = (batch, *layers[0].input_shape), (batch, *last.output_shape)
    for name, data, shape in zip(("input", "output"), (x, y), shapes, strict=True):
        require(len(data) == math.prod(shape), f"the {name} has {len(data)} bytes, not {math.prod(shape)}")
    require(proof.startswith(PROOF_HEADER), "this is no proof of inference of version 2")
    statement = (PROOF_HEADER, network.encode(), root, batch.to_bytes(8, "little"), x, y)
    channel, layout = (
        Channel(proof[len(PROOF_HEADER) :], *statement),
        WitnessLayout(network, batch, WeightLayout(network)),
    )
    helper = layout.helpers.offsets
    padded = channel.bytes(1 << layout.logs[-1])
    require(unpadded(padded, shapes[1]) == y, "the proof is of another output")
    roots = [root, channel.bytes(32)]
    alpha, beta = channel.challenges(2)
    roots.append(channel.bytes(32))
    (total,) = channel.elements(1)

    lookups = Fractions(channel, total, layout.log_rows + 3)
    values, rows = channel.elements(8), lookups.point[: layout.log_rows]
    kinds = eq_table(lookups.point[layout.log_rows :])
    tags = (2, 0)  # rows of no layer have the identity
    for layer, at, log in zip(layers, layout.rows, layout.logs, strict=True):
        tags = add(tags, scale(eq(bits(at >> log, layout.log_rows - log), rows[log:]), layout.tag(layer) - 2))
    u, output = values[6:]
    fingerprints = [fingerprint(alpha, beta, r, ZERO, ZERO) for r in values[:3]]
    fingerprints += [fingerprint(alpha, beta, d, u, ONE) for d in values[3:6]]
    fingerprints += [fingerprint(alpha, beta, u, output, tags), alpha]  # the last are unused: a byte of 0
    lookups.check(inner(kinds, fingerprints), layout.helpers.numerator(lookups.point))
    table, multiplicity = check_table(channel, total, (layout.tables, layout.log_table), alpha, beta)
    claims = [Claim(1, at, rows, value) for at, value in zip(layout.columns, values, strict=True)]
    claims.append(Claim(1, layout.multiplicities, table.point, multiplicity))
    claims += [Claim(2, at, lookups.point, value) for at, value in zip(helper[:2], lookups.parts, strict=True)]
    claims += [Claim(2, at, table.point, value) for at, value in zip(helper[2:], table.parts, strict=True)]

    def x_at(z: list[Element]) -> Element:
        return extension(x, shapes[0], z)

    for index in range(len(layers)):
        claims += check_layer(channel, network, index, layout, x_at)
    z = channel.challenges(layout.logs[-1])
    value = extension(padded, [1 << log2_ceil(size) for size in shapes[1]], z)
    claims.append(Claim(1, layout.columns[7] + layout.rows[-1], z, value))
    check_openings(channel, layout.stack, roots, claims)
