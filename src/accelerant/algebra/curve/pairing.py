"""Products of pairings on the CPU: Miller's loop for four pairs at a time, one final power for all.

Points are canonical words on the host. The value is that of pairing_reference.py, exactly. Infinity in either group
makes a pair contribute 1. Not constant-time: verifiers' inputs are public.

Single-core milliseconds of a product of four on a 2.6 GHz Zen 4: bn254 1.4, bls12_381 2.4, of one 0.8 and 1.3. Most is
some 30,000 products in Fq and twice as many additions; tape.py and tower.py say how they are done.


----

Miller's loop for a few pairs as a tape, with the checks of their points.

The loop is that of pairing_reference.py, with T in homogeneous coordinates (x = X/Z, y = Y/Z) and the lines scaled by
elements of Fq2, which the final power removes; pairs share the squarings, and 6x + 2 or |x| has signed digits. Source
of the coordinates: Costello, Lange and Naehrig, PKC 2010; the scaling here is free of halves.


----

What a tape of Miller's loop finds out about its points: on their curves, and in their subgroups of order r.

What the loop leaves in T says whether Q is in the subgroup:

    bn254       T = (6x+2)Q + psi(Q) - psi^2(Q) must be -psi^3(Q)        Dai, Lin, Zhao and Zhou, eprint 2022/348, for
                the criterion; the vector (6x+2, 1, -1, 1) is of Vercauteren, eprint 2008/096
    bls12_381   T = |x|Q must be -psi(Q), x being negative               Bowe, eprint 2019/814; Scott, eprint 2021/1130

with psi Frobenius as the twist sees it, which satisfies psi^2 - t psi + q = 0. The points of the twist for which this
holds are killed by an element of Z[psi], and so by its norm; that is r times a number prime to the twist's cofactor
(the tests compute it), so they are the subgroup. An addition of T and a point equal or opposite to it gives Z = 0, and
Z stays 0 from then on; no point of order r gets there, and Z = 0 is refused. A point of G1 on bls12_381 is in the
subgroup where x^2 P = -phi(P), phi(x, y) = (beta x, y): the norm of x^2 + phi is r itself. On bn254 every point is.


----

The final power of pairings as a tape: f^((q^12 - 1) / r), the exact exponent, for f not zero.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from accelerant.algebra.counted import counted
from accelerant.algebra.curve.launch import check_reduced
from accelerant.algebra.curve.parameters import Family, endomorphism
from accelerant.algebra.curve.tape import Program, Recorder, Segment, Tape, kept, run_tape
from accelerant.algebra.curve.tower import (
    FQ12_SIZE,
    Fq2,
    Fq12,
    Line,
    Projective,
    RecordedTower,
    flat,
    flat12,
    pairs,
    recorded,
)
from accelerant.algebra.field import words as host
from accelerant.algebra.field.parameters import FIELDS, Field
from accelerant.algebra.field.places import HOST
from accelerant.algebra.field.program import montgomery_radix
from accelerant.errors import FormatError, ShapeError
from accelerant.runtime.ledger import OpRecord, ledger

__all__ = [
    "VERDICT_SIZE",
    "FinalTape",
    "MillerTape",
    "add_checks",
    "begin_segment",
    "final_tape",
    "miller_tape",
    "product",
    "product_is_one",
    "product_tape",
    "signed_windows",
    "unary_segment",
]

U64 = npt.NDArray[np.uint64]

_NONZERO = slice(7, 9)
"""The verdict's part that must not be zero."""

_AT_ONCE = 256
"""Groups that have registers at a time: 6 to 10 KiB each."""

_GROUP = 4
"""Pairs of one Miller loop. The squarings they share are a tenth of its work; the code of more would outgrow the first
cache."""


def product_is_one(family: Family, g1_points: U64, g2_points: U64, *, check: bool = True) -> bool:
    """Whether e(P_1, Q_1) ... e(P_n, Q_n) = 1; True for n = 0.

    Args:
        family: bn254 or bls12_381.
        g1_points: the P_i, (n, 2, limbs), canonical affine words; infinity all zeros.
        g2_points: the Q_i, (n, 2, 2, limbs).
        check: refuse points off their curve or out of the subgroup of order r; they cost nearly nothing. Without it the
            answer for such points means nothing. Coefficients that are not reduced are always refused.

    Raises:
        UnsupportedDtype: not uint64.
        ShapeError: other shapes, or not as many points of one group as of the other.
        FormatError: what check refuses; names the first point off the curve, or else the first out of the subgroup.
    """
    value = _powered(family, g1_points, g2_points, check)
    flat = value.reshape(-1)
    return bool(flat[0] == 1) and not flat[1:].any()


def product(family: Family, g1_points: U64, g2_points: U64, *, check: bool = True) -> Fq12:
    """The product of product_is_one, as Python integers; equal to that of pairing_reference.pairing's values."""
    words = _powered(family, g1_points, g2_points, check).reshape(2, 3, 2, -1)
    first, second = (tuple((c0, c1) for c0, c1 in half) for half in host.decode(FIELDS[f"{family.name}_fq"], words))
    return (first[0], first[1], first[2]), (second[0], second[1], second[2])


def _powered(family: Family, g1_points: U64, g2_points: U64, check: bool) -> U64:
    """(12, limbs), canonical."""
    n = _checked_shapes(family, g1_points, g2_points)
    with counted(HOST, _record(family, n)):
        points = np.concatenate([g1_points, g2_points.reshape(n, 4, g2_points.shape[-1])], axis=1)
        finite1, finite2 = (
            _nonzero(part.reshape(n, part.shape[1] * part.shape[2])) for part in (points[:, :2], points[:, 2:])
        )
        whole = finite1 & finite2
        values, verdicts = _miller(family, points[whole])
        if check:
            alone = finite1 ^ finite2
            halves, generators = points.copy(), _generators(family)
            halves[~finite1, :2], halves[~finite2, 2:] = generators[:2], generators[2:]
            judged = np.zeros((n, VERDICT_SIZE), np.bool_)
            judged[:, _NONZERO] = True
            judged[whole], judged[alone] = verdicts, _miller(family, halves[alone])[1]
        while len(values) > 1:
            half = len(values) // 2
            multiplied = _applied(product_tape(family), values[:half], values[half : 2 * half])
            values = np.concatenate([multiplied, values[2 * half :]])
        found: U64 = _applied(final_tape(family), values)[0]
    if check:  # here, since what raises inside `counted` is in the ledger as a failure of the op, not of a point
        _judge(family, points, judged)
    return found


def _checked_shapes(family: Family, g1_points: U64, g2_points: U64) -> int:
    """How many pairs; or the errors of product_is_one."""
    field = FIELDS[f"{family.name}_fq"]
    named = (("g1_points", g1_points, family.g1), ("g2_points", g2_points, family.g2))
    for name, points, curve in named:
        host.check_words(field, points.dtype.name if points.dtype.isnative else points.dtype.str, points.shape, name)
        if points.shape[1:] != curve.shape:
            wanted = ", ".join(map(str, curve.shape))
            raise ShapeError(f"{name} of {family.name} must be (n, {wanted}), got {points.shape}")
    if len(g1_points) != len(g2_points):
        raise ShapeError(f"wanted as many points of both groups, got {len(g1_points)} and {len(g2_points)}")
    for name, points, curve in named:
        check_reduced(HOST, curve, HOST.contiguous(points), name)
    return len(g1_points)


# --- tapes on arrays -------------------------------------------------------------------------------------------------


def _miller(family: Family, points: U64) -> tuple[U64, npt.NDArray[np.bool_]]:
    """Values of Miller's loop whose product is that of all pairs, (m, 12, limbs), one at least; and the verdicts.

    Args:
        family: of the pairs.
        points: (n, 6, limbs): P then Q, none of them infinity.

    Returns:
        with the values, (n, VERDICT_SIZE): which of the numbers that pairing_checks.py speaks of are not zero.
    """
    limbs = points.shape[-1]
    one = host.encode(FIELDS[f"{family.name}_fq"], [_radix(family)] + [0] * (FQ12_SIZE - 1))
    values, verdicts = [one.reshape(1, FQ12_SIZE, limbs)], [np.zeros((0, VERDICT_SIZE), np.bool_)]
    for first, size, groups in _grouped(len(points)):
        program = miller_tape(family, size)
        registers = _registers(program.tape, groups)
        grouped = points[first : first + groups * size].reshape(groups, size, 6, limbs)
        for i, place in enumerate(program.points):
            registers[:, place : place + 6] = grouped[:, i]
        run_tape(program.tape, registers)
        values.append(registers[:, program.value : program.value + FQ12_SIZE])
        verdict = np.stack([registers[:, place : place + VERDICT_SIZE] for place in program.verdicts], axis=1)
        verdicts.append(_nonzero(verdict.reshape(groups * size, VERDICT_SIZE, limbs)))
    return np.concatenate(values[1:] or values), np.concatenate(verdicts)


def _nonzero(elements: U64) -> npt.NDArray[np.bool_]:
    return np.asarray(elements.any(axis=-1))


def _grouped(n: int) -> list[tuple[int, int, int]]:
    """(first pair, pairs of a group, groups): full groups, so many at once, and the rest."""
    full, rest = divmod(n, _GROUP)
    blocks = [(first * _GROUP, _GROUP, min(_AT_ONCE, full - first)) for first in range(0, full, _AT_ONCE)]
    return blocks + [(full * _GROUP, rest, 1)] * (rest > 0)


def _judge(family: Family, points: U64, nonzero: npt.NDArray[np.bool_]) -> None:
    """Refuse what the verdicts of pairing_checks.py say is wrong; on the curve is asked first."""
    off1, off2 = nonzero[:, 0], nonzero[:, 1:3].any(axis=1)
    out1, out2 = nonzero[:, 9:].any(axis=1), nonzero[:, 3:7].any(axis=1) | ~nonzero[:, _NONZERO].any(axis=1)
    for name, curve, wrong, what in (
        ("g1_points", family.g1.name, off1, "is not on {}"),
        ("g2_points", family.g2.name, off2, "is not on {}"),
        ("g1_points", family.g1.name, out1, "is on {} but not in its subgroup of order r"),
        ("g2_points", family.g2.name, out2, "is on {} but not in its subgroup of order r"),
    ):
        if wrong.any():
            i = int(wrong.argmax())
            part = points[i, :2] if name == "g1_points" else points[i, 2:]
            shown = ", ".join(f"{value:#x}" for value in host.decode(FIELDS[f"{family.name}_fq"], part))
            raise FormatError(f"{name}[{i}], ({shown}), {what.format(curve)}")


def _applied(function: FinalTape, *inputs: U64) -> U64:
    """The function of elements (m, 12, limbs), each m by itself."""
    registers = _registers(function.tape, len(inputs[0]))
    for place, values in zip(function.inputs, inputs, strict=True):
        registers[:, place : place + FQ12_SIZE] = values
    run_tape(function.tape, registers)
    return registers[:, function.value : function.value + FQ12_SIZE]


def _registers(tape: Tape, n: int) -> U64:
    """Register files with their constants; the rest is undefined."""
    constants = _constants(tape)
    registers = np.empty((n, tape.registers, tape.field.limbs), np.uint64)
    registers[:, : len(constants)] = constants
    return registers


@functools.cache
def _constants(tape: Tape) -> U64:
    radix = montgomery_radix(tape.field)
    return host.encode(tape.field, [value * radix for value in tape.constants], reduce=True)


@functools.cache
def _generators(family: Family) -> U64:
    (x, y), (u, v) = family.g1_generator, family.g2_generator
    return host.encode(FIELDS[f"{family.name}_fq"], [x, y, *u, *v])


def _radix(family: Family) -> int:
    return montgomery_radix(FIELDS[f"{family.name}_fq"]) % family.q


# --- ledger ----------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def _record(family: Family, n: int) -> OpRecord:
    field: Field = FIELDS[f"{family.name}_fq"]
    loops = sum(miller_tape(family, size).tape.products * groups for _, size, groups in _grouped(n))
    return ledger().record(
        OpRecord(
            op="pairing_product",
            implementation="llvm",
            backend=HOST.backend,
            device=HOST.label,
            case=f"{n} {family.name}",
            own=True,
            bytes_per_call=6 * n * field.size_bytes,
            flops_per_call=loops + final_tape(family).tape.products,
            reason=f"the only one on {HOST.backend}",
        )
    )


@dataclass(frozen=True, slots=True, eq=False)
class MillerTape:
    """Miller's loop for some pairs.

    Attributes:
        tape: the program.
        points: for each pair, the first of the registers for x and y of P, then x and y of Q (c0 before c1): canonical.
        verdicts: for each pair, the first of VERDICT_SIZE registers.
        value: the first register of f, in Montgomery form.
    """

    tape: Tape
    points: tuple[int, ...]
    verdicts: tuple[int, ...]
    value: int


def _square_segment(family: Family) -> Segment:
    tower = recorded(family)
    f = tower.unflatten(tower.base.inputs("f", FQ12_SIZE))
    return tower.base.segment({"f": flat12(tower.square12(f))})


@functools.cache
def miller_tape(family: Family, size: int) -> MillerTape:
    """Miller's loop for so many pairs, none of them with infinity.

    Four at most are sensible: the code grows with them.
    """
    field = FIELDS[f"{family.name}_fq"]
    return kept(MillerTape, f"miller_{family.name}_{size}", field, lambda: _recorded_loop(family, size))


def _recorded_loop(family: Family, size: int) -> MillerTape:
    program = Program(FIELDS[f"{family.name}_fq"])
    f = program.window(FQ12_SIZE)
    each = [
        (program.window(2), program.window(4), program.window(6), program.window(VERDICT_SIZE)) for _ in range(size)
    ]
    image = program.window(4)
    square, double = _square_segment(family), _loop_segment(family, _doubling)
    add, subtract = _loop_segment(family, _addition, 1), _loop_segment(family, _addition, -1)
    program.call(_constant_segment(family), f=f)
    begin = begin_segment(family)
    for p, q, t, verdict in each:
        program.call(begin, p=p, q=q, t=t, verdict=verdict)
    x = family.parameter
    for i, digit in enumerate(signed_windows(6 * x + 2 if family.kind == "bn" else abs(x), 2)[1:]):
        if i:
            program.call(square, f=f)
        for p, q, t, _ in each:
            program.call(double, f=f, t=t, p=p)
            if digit:
                program.call(add if digit > 0 else subtract, f=f, t=t, p=p, q=q)
    if family.kind == "bn":
        for times, step in ((1, add), (2, subtract)):
            frobenius = _frobenius_segment(family, times)
            for p, q, t, _ in each:
                program.call(frobenius, q=q, z=image)
                program.call(step, f=f, t=t, p=p, q=image)
    elif x < 0:
        program.call(unary_segment(family, "conjugate"), f=f)
    add_checks(program, family, each)
    tape = program.assemble()
    first = len(tape.constants)
    return MillerTape(
        tape=tape,
        points=tuple(first + p for p, _, _, _ in each),
        verdicts=tuple(first + verdict for _, _, _, verdict in each),
        value=first + f,
    )


def _constant_segment(family: Family) -> Segment:
    """The window f becomes 1."""
    k = Recorder(FIELDS[f"{family.name}_fq"])
    return k.segment({"f": [k.constant(int(i == 0)) for i in range(FQ12_SIZE)]})


# --- steps -----------------------------------------------------------------------------------------------------------


def _doubling(tower: RecordedTower, t: Projective, p: tuple[int, int]) -> tuple[Line, Projective]:
    """2T, and the tangent at P times 2YZ; 5 products and 6 squares in Fq2.

    With B = Y^2, E = 3b'Z^2, H = 2YZ, J = X^2: X3 = 2XY(B - 3E), Y3 = (B + 3E)^2 - 12E^2, Z3 = 4BH; the line is
    H y_P, -3J x_P, B - E.
    """
    x, y, z = t
    b, c, j = tower.square(y), tower.square(z), tower.square(x)
    e = tower.thrice(tower.times_constant(c, tower.family.g2.b))
    h = tower.sub(tower.square(tower.add(y, z)), tower.add(b, c))
    xy = tower.sub(tower.square(tower.add(x, y)), tower.add(j, b))
    f, ee = tower.thrice(e), tower.square(e)
    x3 = tower.mul(xy, tower.sub(b, f))
    y3 = tower.sub(tower.square(tower.add(b, f)), tower.thrice(tower.twice(tower.twice(ee))))
    z3 = tower.twice(tower.twice(tower.mul(b, h)))
    return _arranged(tower, tower.scale(h, p[1]), tower.scale(tower.thrice(j), p[0]), tower.sub(b, e)), (x3, y3, z3)


def _addition(tower: RecordedTower, t: Projective, q: tuple[Fq2, Fq2], p: tuple[int, int]) -> tuple[Line, Projective]:
    """T + Q, Q affine, and the chord at P times X - x_Q Z; 11 products and 2 squares in Fq2.

    With S = Y - y_Q Z, L = X - x_Q Z, F = Z S^2, G = X L^2, H = L^3 + F - 2G: X3 = LH, Y3 = S(G - H) - Y L^3,
    Z3 = Z L^3; the line is L y_P, -S x_P, S x_Q - L y_Q.
    """
    x, y, z = t
    s, length = tower.sub(y, tower.mul(q[1], z)), tower.sub(x, tower.mul(q[0], z))
    squared = tower.square(length)
    cube, g = tower.mul(length, squared), tower.mul(x, squared)
    h = tower.sub(tower.add(cube, tower.mul(z, tower.square(s))), tower.twice(g))
    y3 = tower.sub(tower.mul(s, tower.sub(g, h)), tower.mul(y, cube))
    last = tower.sub(tower.mul(s, q[0]), tower.mul(length, q[1]))
    line = _arranged(tower, tower.scale(length, p[1]), tower.scale(s, p[0]), last)
    return line, (tower.mul(length, h), y3, tower.mul(z, cube))


def _arranged(tower: RecordedTower, y_p: Fq2, minus_x_p: Fq2, rest: Fq2) -> Line:
    """The line y_p - minus_x_p w + rest w^3, or rest - minus_x_p w^2 + y_p w^3 on a twist by multiplication."""
    middle = tower.neg(minus_x_p)
    return (y_p, middle, rest) if tower.family.twist == "divide" else (rest, middle, y_p)


def _loop_segment(family: Family, step: Callable[..., tuple[Line, Projective]], sign: int = 0) -> Segment:
    """One step of one pair: T and f. sign: of the Q that an addition adds, 0 for a doubling."""
    tower = recorded(family)
    f = tower.unflatten(tower.base.inputs("f", FQ12_SIZE))
    t = tower.projective(tower.base.inputs("t", 6))
    x_p, y_p = tower.base.inputs("p", 2)
    if sign:
        x, y = pairs(tower.base.inputs("q", 4))
        line, t = step(tower, t, (x, y if sign > 0 else tower.neg(y)), (x_p, y_p))
    else:
        line, t = step(tower, t, (x_p, y_p))
    return tower.base.segment({"f": flat12(tower.mul12_line(f, line)), "t": flat(t)})


def _frobenius_segment(family: Family, times: int) -> Segment:
    """The window z becomes psi^times(Q)."""
    tower = recorded(family)
    x, y = pairs(tower.base.inputs("q", 4))
    return tower.base.segment({"z": flat(tower.frobenius_twist(x, y, times))})


VERDICT_SIZE = 11
"""Registers of what is found of a pair: y^2 - x^3 - b of P (1) and of Q (2), what is zero for Q in its subgroup (4), Z
(2, not zero), and what is zero for P in its subgroup (2)."""


def add_checks(program: Program, family: Family, each: Sequence[tuple[int, int, int, int]]) -> None:
    """Add what judges the subgroups to the end of a loop.

    Args:
        program: of the loop.
        family: of the pairing.
        each: for each pair the windows p, q, t and that of its verdict.
    """
    verdict_segment = _verdict_segment(family)
    for _, q, t, verdict in each:
        program.call(verdict_segment, q=q, t=t, subgroup=verdict + 3)
    if family.g1.cofactor == 1:
        for _, _, _, verdict in each:
            program.call(_g1_segment(family, "all"), subgroup=verdict + 9)
        return
    base, total = program.window(3), program.window(3)
    start, keep, double, add, end = (_g1_segment(family, kind) for kind in ("start", "keep", "double", "add", "end"))
    for p, _, _, verdict in each:
        program.call(start, p=p, total=total)
        for _ in range(2):
            program.call(keep, base=base, total=total)
            for bit in bin(abs(family.parameter))[3:]:
                program.call(double, total=total)
                if bit == "1":
                    program.call(add, total=total, base=base)
        program.call(end, p=p, total=total, subgroup=verdict + 9)


def begin_segment(family: Family) -> Segment:
    """Points in Montgomery form, T = Q, and how far P and Q are off their curves."""
    tower = recorded(family)
    k = tower.base
    x_p, y_p = _entered(tower, k.inputs("p", 2))
    q = _entered(tower, k.inputs("q", 4))
    x, y = pairs(q)
    off1 = k.sub(k.mul(y_p, y_p), k.add(k.mul(k.mul(x_p, x_p), x_p), k.constant(family.b)))
    off2 = tower.sub(tower.square(y), tower.add(tower.mul(tower.square(x), x), tower.pair(family.g2.b)))
    outputs = {"p": (x_p, y_p), "q": q, "t": (*q, k.constant(1), k.constant(0)), "verdict": (off1, *off2)}
    return k.segment(outputs)


def _entered(tower: RecordedTower, values: tuple[int, ...]) -> tuple[int, ...]:
    """Canonical values in Montgomery form: a product with R, which divides by R."""
    radix = tower.base.constant(montgomery_radix(tower.base.field))
    return tuple(tower.base.mul(value, radix) for value in values)


def _verdict_segment(family: Family) -> Segment:
    """Whether T is -psi^3(Q) (BN) or psi(Q) with the sign of x (BLS12), by X - x Z, Y - y Z and Z."""
    tower = recorded(family)
    x, y = pairs(tower.base.inputs("q", 4))
    t = tower.projective(tower.base.inputs("t", 6))
    u, v = tower.frobenius_twist(x, y, 3 if family.kind == "bn" else 1)
    first = tower.sub(t[0], tower.mul(u, t[2]))
    same = family.kind == "bls12" and family.parameter > 0
    second = (tower.sub if same else tower.add)(t[1], tower.mul(v, t[2]))
    return tower.base.segment({"subgroup": (*first, *second, *t[2])})


@functools.cache
def _g1_segment(family: Family, kind: str) -> Segment:
    """A step of the multiplication by x^2: total is the sum so far, base what is added to it."""
    k = Recorder(FIELDS[f"{family.name}_fq"])
    if kind == "all":
        return k.segment({"subgroup": [k.constant(0)] * 2})
    if kind == "start":
        return k.segment({"total": (*k.inputs("p", 2), k.constant(1))})
    total = k.inputs("total", 3)
    if kind == "keep":
        return k.segment({"base": total})
    if kind == "double":
        return k.segment({"total": _g1_double(k, total, family.b)})
    if kind == "add":
        return k.segment({"total": _g1_add(k, total, k.inputs("base", 3), family.b)})
    x, y = k.inputs("p", 2)
    moved = k.mul(x, k.constant(_beta(family)))
    return k.segment({"subgroup": (k.sub(total[0], k.mul(moved, total[2])), k.add(total[1], k.mul(y, total[2])))})


def _beta(family: Family) -> int:
    """The cube root of 1 in Fq with (beta x, y) = -x^2 P: the square of the one that gives x^2 - 1."""
    found = endomorphism(family.g1)
    if found is None or found.eigenvalue != family.parameter**2 - 1:
        raise ValueError(f"{family.name}: wanted an endomorphism that multiplies by x^2 - 1")
    return family.g1.coordinates.square(found.x_factor)


def _times(k: Recorder, a: int, factor: int) -> int:
    result = a
    for bit in bin(factor)[3:]:
        result = k.add(result, result)
        if bit == "1":
            result = k.add(result, a)
    return result


def _g1_add(k: Recorder, p: tuple[int, ...], q: tuple[int, ...], b: int) -> tuple[int, int, int]:
    """The sum of any two points, homogeneous; 12M. Source: Renes, Costello and Batina, eprint 2015/1060, section 3.

    For a = 0, complete on curves without points of order 2: with X = X1X2, Y = Y1Y2, Z = Z1Z2 and the mixed sums
    XY = X1Y2 + X2Y1, YZ, XZ, the sum is
    (XY (Y - 3bZ) - 3b YZ XZ : (Y + 3bZ)(Y - 3bZ) + 9b X XZ : YZ (Y + 3bZ) + 3X XY).
    """
    x, y, z = (k.mul(first, second) for first, second in zip(p, q, strict=True))
    xy, yz, xz = (
        k.sub(k.mul(k.add(p[i], p[j]), k.add(q[i], q[j])), k.add(first, second))
        for i, j, first, second in ((0, 1, x, y), (1, 2, y, z), (0, 2, x, z))
    )
    bz, x_three = _times(k, z, 3 * b), _times(k, x, 3)
    bxz = _times(k, xz, 3 * b)
    less, more = k.sub(y, bz), k.add(y, bz)
    return (
        k.sub(k.mul(xy, less), k.mul(yz, bxz)),
        k.add(k.mul(more, less), k.mul(x_three, bxz)),
        k.add(k.mul(yz, more), k.mul(x_three, xy)),
    )


def _g1_double(k: Recorder, p: tuple[int, ...], b: int) -> tuple[int, int, int]:
    """Twice any point; 8M. The same source.

    (2XY (Y^2 - 9bZ^2) : (Y^2 - 9bZ^2)(Y^2 + 3bZ^2) + 24b Y^2 Z^2 : 8Y^3 Z).
    """
    x, y, z = p
    yy, bzz = k.mul(y, y), _times(k, k.mul(z, z), 3 * b)
    less = k.sub(yy, _times(k, bzz, 3))
    return (
        _times(k, k.mul(k.mul(x, y), less), 2),
        k.add(k.mul(less, k.add(yy, bzz)), _times(k, k.mul(yy, bzz), 8)),
        _times(k, k.mul(yy, k.mul(y, z)), 8),
    )


@dataclass(frozen=True, slots=True, eq=False)
class FinalTape:
    """A function of elements of Fq12.

    Attributes:
        tape: the program.
        inputs: the first register of each, in Montgomery form.
        value: the first register of the result.
    """

    tape: Tape
    inputs: tuple[int, ...]
    value: int


def signed_windows(exponent: int, width: int) -> list[int]:
    """The digits of a number, zero or odd and below 2^(width - 1) in size, the highest first; width 2 at least.

    Source: Solinas 2000, "Efficient arithmetic on Koblitz curves", width-w non-adjacent form.
    """
    digits, rest, base = [], exponent, 1 << width
    while rest:
        digit = 0
        if rest & 1:
            digit = rest % base
            digit -= base if digit >= base // 2 else 0
        digits.append(digit)
        rest = (rest - digit) // 2
    return digits[::-1]


@functools.cache
def _copy_segment(family: Family) -> Segment:
    """The window f becomes g."""
    k = Recorder(FIELDS[f"{family.name}_fq"])
    return k.segment({"f": k.inputs("g", FQ12_SIZE)})


@functools.cache
def unary_segment(family: Family, name: str, times: int = 0) -> Segment:
    """The window f becomes its conjugate, cyclotomic square, power by q^times, or f^(q^6 - 1) (unitary)."""
    tower = recorded(family)
    f = tower.unflatten(tower.base.inputs("f", FQ12_SIZE))
    functions: dict[str, Callable[[], Fq12]] = {
        "conjugate": lambda: tower.conjugate12(f),
        "cyclotomic": lambda: tower.square_cyclotomic(f),
        "frobenius": lambda: tower.frobenius12(f, times),
        "unitary": lambda: tower.mul12(tower.conjugate12(f), tower.inv12(f)),
    }
    return tower.base.segment({"f": flat12(functions[name]())})


@functools.cache
def _product_segment(family: Family, sign: int) -> Segment:
    """The window f becomes f g, or f conj(g) where the sign is below 0."""
    tower = recorded(family)
    f, g = (tower.unflatten(tower.base.inputs(name, FQ12_SIZE)) for name in ("f", "g"))
    return tower.base.segment({"f": flat12(tower.mul12(f, g if sign > 0 else tower.conjugate12(g)))})


class _Machine:
    """A program on registers that hold elements of Fq12; those of `power` have order dividing q^4 - q^2 + 1."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self.program = Program(FIELDS[f"{family.name}_fq"])
        self._table = [self.program.window(FQ12_SIZE) for _ in range(5)]

    def new(self) -> int:
        """A register."""
        return self.program.window(FQ12_SIZE)

    def copy(self, a: int) -> int:
        """A new register with the content of another."""
        return self._copied(self.new(), a)

    def _copied(self, to: int, a: int) -> int:
        self.program.call(_copy_segment(self.family), f=to, g=a)
        return to

    def unary(self, a: int, name: str, times: int = 0) -> None:
        """A function of the tower, in place."""
        self.program.call(unary_segment(self.family, name, times), f=a)

    def mul(self, a: int, b: int, sign: int = 1) -> None:
        """The register a becomes a b, or a conj(b), which is a / b for those of `power`."""
        self.program.call(_product_segment(self.family, sign), f=a, g=b)

    def power(self, a: int, exponent: int) -> int:
        """A new register with a power, by signed windows of the width with the fewest products."""
        width = min(range(2, 5), key=lambda w: sum(map(bool, signed_windows(abs(exponent), w))) + (1 << w - 2))
        odd, square = self._table[:-1], self._table[-1]
        self._copied(odd[0], a)
        if width > 2:
            self.unary(self._copied(square, a), "cyclotomic")
        for i in range(1, 1 << width - 2):
            self.mul(self._copied(odd[i], odd[i - 1]), square)
        first, *digits = signed_windows(abs(exponent), width)
        result = self.copy(odd[first // 2])
        for digit in digits:
            self.unary(result, "cyclotomic")
            if digit:
                self.mul(result, odd[abs(digit) // 2], 1 if digit > 0 else -1)
        if exponent < 0:
            self.unary(result, "conjugate")
        return result


def _hard_bn(machine: _Machine, f: int) -> int:
    """f^((q^4 - q^2 + 1) / r): three powers by x. Source: Scott et al., eprint 2008/490, section 5.

    y0 y1^2 y2^6 y3^12 y4^18 y5^30 y6^36 with y0 = f^(q + q^2 + q^3), y1 = 1/f, y2 = f^(x^2 q^2), y3 = 1/f^(x q),
    y4 = 1/f^(x + x^2 q), y5 = 1/f^(x^2), y6 = 1/f^(x^3 + x^3 q), by the addition chain given there.
    """
    x = machine.family.parameter
    fx = machine.power(f, x)
    fxx = machine.power(fx, x)
    y6 = machine.power(fxx, x)
    y0, y2, y3, y4 = machine.copy(f), machine.copy(fxx), machine.copy(fx), machine.copy(fxx)
    machine.unary(y0, "frobenius", 1)
    for times in (2, 3):
        power = machine.copy(f)
        machine.unary(power, "frobenius", times)
        machine.mul(y0, power)
    machine.unary(y2, "frobenius", 2)
    machine.unary(y3, "frobenius", 1)
    machine.unary(y4, "frobenius", 1)
    machine.mul(y4, fx)
    power = machine.copy(y6)
    machine.unary(power, "frobenius", 1)
    machine.mul(y6, power)
    for y in (y3, y4, y6):
        machine.unary(y, "conjugate")

    first = y6
    machine.unary(first, "cyclotomic")
    machine.mul(first, y4)
    machine.mul(first, fxx, -1)
    second = y3
    machine.mul(second, fxx, -1)
    machine.mul(second, first)
    machine.mul(first, y2)
    machine.unary(second, "cyclotomic")
    machine.mul(second, first)
    machine.unary(second, "cyclotomic")
    first = machine.copy(second)
    machine.mul(first, f, -1)
    machine.mul(second, y0)
    machine.unary(first, "cyclotomic")
    machine.mul(first, second)
    return first


def _hard_bls(machine: _Machine, f: int) -> int:
    """f^((q^4 - q^2 + 1) / r) with (x - 1)^2 / 3 (x + q) (x^2 + q^2 - 1) + 1.

    Source: Hayashida, Hayasaka and Teruya, eprint 2020/875, who take three times that; x is 1 mod 3, so that one of
    x - 1 can be divided instead, which costs some ten products.
    """
    x, q = machine.family.parameter, machine.family.q
    if (x - 1) ** 2 // 3 * (x + q) * (x**2 + q**2 - 1) + 1 != (q**4 - q**2 + 1) // machine.family.r or x % 3 != 1:
        raise ValueError(f"{machine.family.name}: not a curve of this family")
    a = machine.power(machine.power(f, x - 1), (x - 1) // 3)
    b = machine.power(a, x)
    machine.unary(a, "frobenius", 1)
    machine.mul(b, a)
    c = machine.power(machine.power(b, x), x)
    machine.mul(c, b, -1)
    machine.unary(b, "frobenius", 2)
    machine.mul(c, b)
    machine.mul(c, f)
    return c


@functools.cache
def final_tape(family: Family) -> FinalTape:
    """f^((q^12 - 1) / r), canonical: (q^6 - 1) (q^2 + 1), then the exact (q^4 - q^2 + 1) / r. f is not zero."""
    return kept(FinalTape, f"final_{family.name}", FIELDS[f"{family.name}_fq"], lambda: _recorded_power(family))


def _recorded_power(family: Family) -> FinalTape:
    machine = _Machine(family)
    f = machine.new()
    start = machine.copy(f)
    machine.unary(start, "unitary")
    power = machine.copy(start)
    machine.unary(power, "frobenius", 2)
    machine.mul(start, power)
    result = (_hard_bn if family.kind == "bn" else _hard_bls)(machine, start)
    tower = recorded(family)
    inverse = tower.base.constant(pow(montgomery_radix(tower.base.field), -1, family.q))
    values = tower.base.inputs("f", FQ12_SIZE)
    leave = tower.base.segment({"f": [tower.base.mul(value, inverse) for value in values]})
    machine.program.call(leave, f=result)
    return _final(machine, (f,), result)


@functools.cache
def product_tape(family: Family) -> FinalTape:
    """The product of two, in Montgomery form."""
    return kept(FinalTape, f"product_{family.name}", FIELDS[f"{family.name}_fq"], lambda: _recorded_product(family))


def _recorded_product(family: Family) -> FinalTape:
    machine = _Machine(family)
    f, g = machine.new(), machine.new()
    machine.mul(f, g)
    return _final(machine, (f, g), f)


def _final(machine: _Machine, inputs: tuple[int, ...], value: int) -> FinalTape:
    tape = machine.program.assemble()
    first = len(tape.constants)
    return FinalTape(tape, tuple(first + each for each in inputs), first + value)
