"""A second verifier of proofs of inference, which specifies them: plain Python, without code of the package or NumPy.

`check(commitment, batch, x, y, proof)` takes files, int8 input and output as bytes, and raises unless the
proof shows that the network maps x to y. docs/proof-of-inference.md has the notation. The methods differ from those of
the package's verifier, and are slower: tables are bound a variable at a time, rounds and folds are interpolated.
"""

import functools
import hashlib
import itertools
import math
import struct
from types import SimpleNamespace

P = 2**64 - 2**32 + 1
COMMITMENT = b"accelerant model commitment 2, not zero-knowledge\n"
PROOF = b"accelerant proof of inference 2, not zero-knowledge\n"
IDENTITY = bytes(i ^ 128 for i in range(256))


class K(tuple):
    """An element a + b u of F[u]/(u^2 - 7); integers are elements, too."""

    def __new__(cls, a, b=0):
        return tuple.__new__(cls, (a % P, b % P))

    def __add__(self, other):
        a, b = other if isinstance(other, K) else (other, 0)
        return K(self[0] + a, self[1] + b)

    def __mul__(self, other):
        a, b = other if isinstance(other, K) else (other, 0)
        return K(self[0] * a + 7 * self[1] * b, self[0] * b + self[1] * a)

    def __sub__(self, other):
        return self + -1 * other

    def __rsub__(self, other):
        return -1 * self + other

    __radd__, __rmul__ = __add__, __mul__


class RejectedError(Exception):
    """The proof or commitment does not show its statement."""


def need(holds, reason):
    if not holds:
        raise RejectedError(reason)


def eq(z, x):
    """The equality of a point with another, or with the bits of a number."""
    x = [x >> k & 1 for k in range(len(z))] if isinstance(x, int) else x
    return math.prod((a * b + (1 - a) * (1 - b) for a, b in zip(z, x, strict=True)), start=K(1))


def at(table, z):
    """The extension of a table of 2^k elements, bit j of an index with z_j."""
    for c in z:
        table = [a + c * (b - a) for a, b in zip(table[::2], table[1::2], strict=True)]
    return table[0]


def log(n):
    return (n - 1).bit_length()


def log_size(shape):
    return sum(map(log, shape))


def int8(data):
    return [e - 256 * (e > 127) for e in data]


def padded(array, shape):
    """The entries of an array of a shape, each axis padded by zeros to a power of two."""
    if not shape:
        return array
    step = len(array) // shape[0]
    parts = [e for i in range(shape[0]) for e in padded(array[i * step :][:step], shape[1:])]
    return parts + [0] * (((1 << log(shape[0])) - shape[0]) << log_size(shape[1:]))


def sha(*parts):
    return hashlib.sha256(b"".join(parts)).digest()


def numbers(data):
    words = struct.unpack(f"<{len(data) // 8}Q", data)
    need(all(word < P for word in words), "an element is not below the modulus")
    return words


class Verifier:
    """The transcript, and the bytes of the proof that are left."""

    def __init__(self, left, *statement):
        self.left, self.state = left, bytes(32)
        for part in statement:
            self.absorb(part)

    def absorb(self, data):
        self.state = sha(b"absorb", self.state, struct.pack("<Q", len(data)), data)

    def read(self, size):
        need(size <= len(self.left), "the proof is cut off")
        data, self.left = self.left[:size], self.left[size:]
        return data

    def hear(self, size):
        self.absorb(data := self.read(size))
        return data

    def elements(self, count):
        words = numbers(self.hear(16 * count))
        return list(map(K, words[::2], words[1::2]))

    def squeeze(self):
        drawn, self.state = sha(b"draw", self.state), sha(b"next", self.state)
        return drawn

    def draw(self, count):
        drawn = [self.squeeze() for _ in range(count)]
        return [K(int.from_bytes(each[:16], "little"), int.from_bytes(each[16:], "little")) for each in drawn]

    def sumcheck(self, claim, rounds, degree):
        """P sends g(0), g(2), ..., g(degree) in each round; g(1) = claim - g(0), and g(z) is Lagrange's."""
        point, nodes = [], range(degree + 1)
        for _ in range(rounds):
            first, *rest = self.elements(degree)
            values, (z,), claim = [first, claim - first, *rest], self.draw(1), 0
            for i, value in enumerate(values):
                scale = pow(math.prod(i - j for j in nodes if j != i), -1, P)
                claim += math.prod((z - j for j in nodes if j != i), start=value * scale)
            point.append(z)
        return point, claim


def placed(logs):
    """Offsets of blocks of 2^k entries, the largest first, and log2 of the size of the table."""
    order = sorted(range(len(logs)), key=lambda i: -logs[i])
    ends = dict(zip(order, itertools.accumulate(1 << logs[i] for i in order), strict=True))
    return [ends[i] - (1 << logs[i]) for i in range(len(logs))], log(max(ends.values()))


def columns(parts, h):
    """The columns of 2^h entries that parts (offset, size) reach."""
    return sorted({c for start, size in parts for c in range(start >> h, -(-(start + size) >> h))})


def read_layer(v, before):
    """A layer; `before` has the shapes of the network's input and of the outputs so far, and is empty at first."""
    inputs, outputs, m, *sides, stride, padding, source, skip, s = struct.unpack("<12I", v.read(48))
    table, image, kernel = v.read(256), sides[:2], sides[2:]
    each = struct.unpack(f"<{outputs}I", v.read(4 * outputs)) if m == 0 else [m]  # multipliers of the channels
    need(min(inputs, outputs, stride, *sides) >= 1, "a size is 0")
    need(inputs * math.prod(kernel) <= 1 << 16, "sums could pass int32")
    need(all(1 <= k <= 1 << 17 for k in each) and s <= 1 << 25 and padding < min(kernel), "a parameter is out of range")
    space = [size + 2 * padding - k for size, k in zip(image, kernel, strict=True)]
    need(min(space) >= 0, "a kernel is larger than its image")
    need(1 <= source <= max(1, len(before)) and skip < max(1, len(before)), "a source is out of range")
    came, shape = (inputs, *image), (outputs, *(n // stride + 1 for n in space))
    need(not before or (before[-source] == came and (not skip or before[-skip] == shape)), "an input of another shape")
    return SimpleNamespace(**{name: value for name, value in locals().items() if name not in ("v", "before")})


def read_network(v):
    """The public part: its layers, the layout of the table of weights, and the height 2^h of all columns."""
    start, (count, *scales) = v.left, struct.unpack("<Idd", v.read(20))
    need(1 <= count <= 256 and all(0 < each < math.inf for each in scales), "layers or scales are out of range")
    layers, shapes, logs = [], [], []
    for _ in range(count):
        layers.append(a := read_layer(v, shapes))
        shapes += [a.shape] if shapes else [a.came, a.shape]
        logs += [log_size((a.inputs, *a.kernel, a.outputs)), *[log(a.outputs)] * 3]
    offsets, log_weights = placed(logs)
    need(log_weights <= 26, "too many weights")
    entries = (weights := sum(1 << k for k in logs)) + (24 << placed(list(map(log_size, shapes[1:])))[1])
    heights = range(18, max(5, log(weights) - 10), -1)
    hashes = {h: 3 * (h - 4) + sum(max(0, n - 7) + 4 for n in range(h, 4, -3)) for h in heights}
    h = min(heights, key=lambda h: 148 * (32 * hashes[h] + 8 * (3 + (entries >> h))) + (8 << h))
    public = start[: len(start) - len(v.left)]
    return SimpleNamespace(layers=layers, at=offsets, log=log_weights, weights=weights, h=h, bytes=public)


class Lookups:
    """logUp of queries and rows of tables, both with h in K, that is two blocks."""

    def __init__(self, v, h, log_queries, queries, log_table):
        (self.at, _), low = placed([log_queries] * 2 + [log_table] * 2), min(h, log_queries)
        self.h, self.asked, self.logs, self.claims = h, columns(queries, h), (log_queries, log_table), []
        self.parts = [(start + (c << low), 1 << low) for start in self.at[:2] for c in self.asked]
        self.parts += [(start, 1 << log_table) for start in self.at[2:]]
        self.root, (self.total,) = v.hear(32), v.elements(1)

    def side(self, v, k):
        """The sumcheck of queries (0) or rows (1): its point, and what compares its end."""
        z, (delta,) = v.draw(self.logs[k]), v.draw(1)
        point, final = v.sumcheck(delta * self.total, self.logs[k], 3)
        parts = v.elements(2)
        h = parts[0] + K(0, 1) * parts[1]
        self.claims += [(2, start, point, part) for start, part in zip(self.at[2 * k :], parts, strict=False)]
        asked = sum(eq(point[self.h :], c) for c in self.asked)

        def show(den, num=asked):
            need(eq(z, point) * (h * den - num) + delta * h == final, "a lookup is not in its table")

        return point, show

    def rows(self, v, tables, alpha, beta, offset):
        """The side of the tables; returns all claims."""
        rows = [(i, 0, 0) for i in range(256)] + [(0, u, 1) for u in range(256)]
        rows += [(sign * d, 255 * (sign > 0), 1) for sign in (1, -1) for d in range(1, 256)]
        rows += [(u, y, 2 + i) for i, table in enumerate(tables) for u, y in enumerate(int8(table))]
        rows = (rows + [(0, 0, 0)] * (1 << self.logs[1]))[: 1 << self.logs[1]]
        point, show = self.side(v, 1)
        (count,) = v.elements(1)
        show(alpha - fingerprint(beta, *(at(column, point) for column in zip(*rows, strict=True))), count)
        return [(1, offset, point, count), *self.claims]


def fingerprint(beta, a, b, tag):
    return a + beta * b + beta * beta * tag


def tree(v, root, depth, width):
    """Read the level of a Merkle tree of 2^depth leaves; return a function that reads and verifies a leaf."""
    up = max(0, depth - 6)
    need(sha(b"cap", cap := v.read(32 << depth - up)) == root, "a level of a tree is not that of its root")

    def leaf(i):
        data = v.read(8 * width)
        node = sha(b"leaf", data)
        for k in range(up):
            other = v.read(32)
            node = sha(b"node", other, node) if i >> k & 1 else sha(b"node", node, other)
        need(node == cap[32 * (i >> up) :][:32], "an opening is not in its tree")
        return numbers(data)

    return leaf


def check_openings(v, h, tables, roots, claims):
    """Basefold for claims (table, offset, point, value), over the columns of tables, given by their parts."""
    have = [columns(parts, h) for parts in tables]
    logs = [log(each[-1] + 1) for each in have]
    (start, log_columns), (lam,), full, total, power = placed(logs), v.draw(1), [], 0, K(1)
    need(log_columns <= 12, "too many columns")
    for k, offset, point, value in claims:
        z = point + [offset >> i & 1 for i in range(len(point), h + logs[k])]
        full.append((power, z[h:] + [start[k] >> i & 1 for i in range(logs[k], log_columns)] + z[:h]))
        total, power = total + power * value, power * lam
    r, total = v.sumcheck(total, log_columns, 2)
    weights, left, folds = [[eq(r, s + c) for c in cs] for s, cs in zip(start, have, strict=True)], h, []
    while left > 4:
        root, (zs, total) = v.hear(32), v.sumcheck(total, 3, 2)
        r, left = r + zs, left - 3
        folds.append((root, zs, left + 2))
    message = v.elements(1 << left)
    ends = [power * eq(r, z[: len(r)]) * at(message, z[len(r) :]) for power, z in full]
    need(sum(ends) == total, "the claims on committed tables do not hold")
    words = [word for _ in range(19) for word in struct.unpack("<8I", v.squeeze())][:148]
    trees = [tree(v, root, h + 2, len(cs)) for root, cs in zip(roots, have, strict=True)]
    later = [tree(v, root, n, 16) for root, _, n in folds]
    for i in (word % (1 << h + 2) for word in words):
        value = sum(w * e for ws, leaf in zip(weights, trees, strict=True) for w, e in zip(ws, leaf(i), strict=True))
        for leaf, (_, zs, n) in zip(later, folds, strict=True):
            which, i = divmod(i, 1 << n)
            words = leaf(i)
            need(words[2 * which :][:2] == value, "a fold of the code is wrong")
            inverses = [pow(7, (P - 1 >> n + 3) * -(i + (j << n)), P) for j in range(8)]  # 1/x: f(x) = sum x^k f_k(x^8)
            parts = [sum(K(*words[2 * j :][:2]) * pow(x, k, P) for j, x in enumerate(inverses)) for k in range(8)]
            value = sum(eq(zs, k) * part for k, part in enumerate(parts)) * pow(8, -1, P)
        x = pow(7, (P - 1 >> left + 2) * i, P)
        need(value == sum(e * pow(x, k, P) for k, e in enumerate(message)), "the last fold of the code is wrong")
    need(not v.left, "bytes follow the proof")


@functools.cache
def check_commitment(data):
    """The range proof: all committed weights are bytes. Returns the network and the root."""
    need(data.startswith(COMMITMENT), "no commitment of version 2")
    v = Verifier(data[len(COMMITMENT) :])
    net, root = read_network(v), v.read(32)
    v = Verifier(v.left, COMMITMENT, net.bytes, root)
    counts, (alpha, beta) = v.hear(32), v.draw(2)
    lookups = Lookups(v, net.h, net.log, [(0, net.weights)], 8)
    point, show = lookups.side(v, 0)
    (value,) = v.elements(1)
    show(alpha - value)
    claims = [(0, 0, point, value), *lookups.rows(v, [], alpha, beta, 0)]
    check_openings(v, net.h, [[(0, net.weights)], [(0, 256)], lookups.parts], [root, counts, lookups.root], claims)
    return net, root


def pixels(a, axis, z, j, q):
    """Sum of eq(z, p) eq(j, d) over outputs p and kernel offsets d whose pixel is p stride + d - padding, at q."""
    weights = [0] * (1 << log(a.image[axis]))
    for p, d in itertools.product(range(a.shape[1 + axis]), range(a.kernel[axis])):
        if 0 <= (pixel := p * a.stride + d - a.padding) < a.image[axis]:
            weights[pixel] += eq(z, p) * eq(j, d)
    return at(weights, q)


def check_layer(v, net, i, witness, x_at):
    """Equation (1) of a layer; returns claims."""
    a, (column, rows, logs) = net.layers[i], witness
    z, down, high, k_out = v.draw(logs[i]), log_size(a.shape[1:]), log_size(a.kernel), log(a.outputs)
    outputs, images, equal, m, left = z[down:][:k_out], z[down + k_out :], 1, K(a.m), 0
    if not a.m:  # sum_o eq(z, o) (s_o - m_o a_o) = 0, reduced to a random o
        point, left = v.sumcheck(0, k_out, 3)
        equal, m = eq(outputs, point), at([K(k) for k in padded(list(a.each), [a.outputs])], point)
        outputs, z = point, z[:down] + point + images
    sent, bias = v.elements(7), v.elements(3)
    r, d, b = (sum(e * 256**k for k, e in enumerate(digits)) for digits in (sent[:3], sent[3:6], bias))
    claims = [(1, c + rows[i], z, value) for c, value in zip(column[:7], sent, strict=True)]
    claims += [(0, net.at[4 * i + 1 + k], outputs, value) for k, value in enumerate(bias)]
    scaled = (sent[6] - 128 + d) * 2**24 + r - 2**23
    if a.skip:
        (added,) = v.elements(1)
        claims.append((1, column[7] + rows[i - a.skip], z, added))
        scaled -= added * a.s
    claim, width = equal * (scaled - m * (b - 2**23)) - left, log(a.inputs)
    j, final = v.sumcheck(claim, high + width, 2 + (a.inputs != 1 << width))
    (w, g), channels = v.elements(2), j[high:]
    claims.append((0, net.at[4 * i], j + outputs, w))
    mask = at([K(c < a.inputs) for c in range(1 << width)], channels)
    need(equal * m * (w - 128) * g * mask == final, f"the product of layer {i} is wrong")
    q, final = v.sumcheck(g, log_size(a.image), 2)
    point = q + channels + images
    (x,) = [x_at(point)] if a.source > i else v.elements(1)
    claims += [] if a.source > i else [(1, column[7] + rows[i - a.source], point, x)]
    across, wide, row = log(a.shape[2]), log(a.kernel[1]), log(a.image[1])
    of_columns = pixels(a, 1, z[:across], j[:wide], q[:row])
    of_rows = pixels(a, 0, z[across:down], j[wide:high], q[row:])
    need(x * of_rows * of_columns == final, f"the image of layer {i} is wrong")
    return claims


def check(commitment, batch, x, y, proof):
    """Raise RejectedError unless the proof shows that the network maps x to y."""
    net, root = check_commitment(commitment)
    h, shapes = net.h, ((batch, *net.layers[0].came), (batch, *net.layers[-1].shape))
    need(batch >= 1 and [len(x), len(y)] == list(map(math.prod, shapes)), "an input or output of another size")
    need(proof.startswith(PROOF), "no proof of version 2")
    v = Verifier(proof[len(PROOF) :], PROOF, net.bytes, root, struct.pack("<Q", batch), x, y)
    tables = list(dict.fromkeys([IDENTITY, *(a.table for a in net.layers)]))
    logs = [log_size((*a.shape, batch)) for a in net.layers]
    (rows, n), log_table = placed(logs), log(1022 + 256 * len(tables))
    column, _ = placed([n] * 8 + [log_table])
    last = v.hear(1 << logs[-1])
    inside = [all(map(int.__lt__, i, shapes[1])) for i in itertools.product(*(range(1 << log(k)) for k in shapes[1]))]
    need(n <= 23 and bytes(itertools.compress(last, inside)) == y, "the proof is of another output")
    witness, (alpha, beta), used = v.hear(32), v.draw(2), min(1 << n, -(-sum(1 << k for k in logs) >> h) << h)
    lookups = Lookups(v, h, n + 3, [(kind << n, used) for kind in range(7)], log_table)
    point, show = lookups.side(v, 0)
    values, row = v.elements(8), point[:n]
    tags = [tables.index(a.table) * eq(row[k:], start >> k) for a, start, k in zip(net.layers, rows, logs, strict=True)]
    queries = [(r, 0, 0) for r in values[:3]] + [(d, values[6], 1) for d in values[3:6]]
    queries += [(values[6], values[7], 2 + sum(tags)), (0, 0, 0)]
    show(sum(eq(point[n:], k) * (alpha - fingerprint(beta, *query)) for k, query in enumerate(queries)))
    claims = [(1, start, row, value) for start, value in zip(column[:8], values, strict=True)]
    claims += lookups.rows(v, tables, alpha, beta, column[8])
    for i in range(len(net.layers)):
        claims += check_layer(v, net, i, (column, rows, logs), lambda z: at(padded(int8(x), shapes[0]), z))
    z = v.draw(logs[-1])
    claims.append((1, column[7] + rows[-1], z, at(int8(last), z)))
    parts = [*((start, used) for start in column[:8]), (column[8], 1 << log_table)]
    check_openings(v, h, [[(0, net.weights)], parts, lookups.parts], [root, witness, lookups.root], claims)
