"""The verifier of proofs of inference; the standard library only."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from accelerant.zk.inference.protocol import (
    BIAS_LIMIT,
    COMMITMENT_HEADER,
    LOG_ARITY,
    LOG_CAP,
    LOG_FINAL,
    LOG_RATE,
    ONE,
    PROOF_HEADER,
    SHIFT,
    ZERO,
    Channel,
    Claim,
    Element,
    Network,
    P,
    Stack,
    WeightLayout,
    WitnessLayout,
    add,
    bits,
    combine,
    eq,
    eq_below,
    eq_table,
    extension,
    fingerprint,
    fold,
    image_weights,
    inner,
    log2_ceil,
    mul,
    read_network,
    require,
    root_of_unity,
    scale,
    sha256,
    shape_bits,
    sub,
    table_rows,
    unpack,
    unpadded,
)  # fmt: skip


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
