"""Products of optimal ate pairings on the CPU: Miller loops of up to four pairs, then one final exponentiation.

The arithmetic is recorded once as tapes (tape.py) over the tower Fq2 = Fq[u] / (u^2 + 1), Fq6 = Fq2[v] / (v^3 - xi),
Fq12 = Fq6[w] / (w^2 - v). Values equal those of the Python reference of the tests exactly, not up to a power. A pair
with infinity contributes 1. Not constant-time.

Miller loop. Pairs share the squarings; T has homogeneous coordinates (x = X/Z, y = Y/Z), lines are scaled by elements
of Fq2, which the final exponentiation removes, and |6x + 2| (BN) or |x| (BLS12) has signed digits. Source of the
coordinates: Costello, Lange and Naehrig, PKC 2010; the scaling here needs no halves.

Subgroup checks. The final T of the loop also decides whether Q is in the subgroup of order r:

    bn254       T = (6x+2)Q + psi(Q) - psi^2(Q) must be -psi^3(Q)        Dai, Lin, Zhao and Zhou, eprint 2022/348, for
                the criterion; the vector (6x+2, 1, -1, 1) is of Vercauteren, eprint 2008/096
    bls12_381   T = |x|Q must be -psi(Q), x being negative               Bowe, eprint 2019/814; Scott, eprint 2021/1130

psi is Frobenius on the twist, with psi^2 - t psi + q = 0. Points that pass are annihilated by an element of Z[psi],
hence by its norm, which is r times a number prime to the twist's cofactor (the tests compute it). Adding T and a point
equal or opposite to it gives Z = 0, and Z stays 0 from then on; this never happens to points of order r, so Z = 0 is
refused. P is in the subgroup of bls12_381 if x^2 P = -phi(P), phi(x, y) = (beta x, y): the norm of x^2 + phi is r
itself. On bn254 every point of the curve is in the subgroup.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from accelerant.algebra.curve.launch import check_reduced
from accelerant.algebra.curve.llvm_kernels import add, double
from accelerant.algebra.curve.parameters import Family, endomorphism
from accelerant.algebra.curve.tape import (
    Fq2,
    RecordedPairs,
    Recorder,
    Segment,
    Tape,
    TapeFunction,
    TapeProgram,
    cached,
    flat,
    pairs,
    run_tape,
)
from accelerant.algebra.curve.weierstrass import Pair, QuadraticCoordinates, signed_windows
from accelerant.algebra.field import words as host
from accelerant.algebra.field.memory_space import HOST
from accelerant.algebra.field.program import montgomery_radix
from accelerant.errors import FormatError, ShapeError
from accelerant.runtime.ledger import OpRecord, RecordedLaunch, sole_record

Fq6 = tuple[Fq2, Fq2, Fq2]
Fq12 = tuple[Fq6, Fq6]
Projective = tuple[Fq2, Fq2, Fq2]  # A point (X/Z, Y/Z) of the twist
Line = tuple[Fq2, Fq2, Fq2]  # Coefficients of 1, w, w^3 on a twist by division; of 1, w^2, w^3 on one by multiplication
FQ12_SIZE = 12  # Registers of an element of Fq12, in the order of its nested tuples

U64 = npt.NDArray[np.uint64]
Bools = npt.NDArray[np.bool_]

_CHECKS = 11  # registers of a pair: P's curve 1, Q's 2, Q's subgroup 4, Z 2 (not zero), P's subgroup 2

_Z = slice(7, 9)

_BATCH = 256  # Groups of pairs whose registers are allocated at a time: 6 to 10 KiB each
_GROUP = 4  # pairs of one Miller loop: the code for more would not fit in the first-level cache


def product_is_one(
    family: Family, g1_points: U64, g2_points: U64, *, check: bool = True, values: U64 | None = None
) -> bool:  # fmt: skip
    """Return whether e(P_1, Q_1) ... e(P_n, Q_n) = 1 for points of canonical affine words; True for n = 0.

    With `check` points off their curve or out of the subgroup of order r raise FormatError, at almost no cost: it names
    the first one off the curve, else the first out of the subgroup. Unreduced coefficients, other shapes and dtypes are
    always refused. `values` of other pairs, from `loops`, are part of the product.
    """
    value = _evaluate(family, g1_points, g2_points, check, values).reshape(-1)
    return bool(value[0] == 1) and not value[1:].any()


def product(family: Family, g1_points: U64, g2_points: U64, *, check: bool = True) -> Fq12:
    """Return the product that product_is_one compares with 1, as Python integers."""
    words = _evaluate(family, g1_points, g2_points, check).reshape(2, 3, 2, -1)
    first, second = (tuple((c0, c1) for c0, c1 in half) for half in host.decode(family.fq, words))
    return (first[0], first[1], first[2]), (second[0], second[1], second[2])


def loops(family: Family, g1_points: U64, g2_points: U64) -> U64:
    """Return values whose product is that of the pairs' Miller loops, checked; half of the work of `product_is_one`."""
    return _evaluate(family, g1_points, g2_points, True, exponentiates=False)


def _evaluate(
    family: Family, g1_points: U64, g2_points: U64, check: bool, others: U64 | None = None, *,
    exponentiates: bool = True,
) -> U64:  # fmt: skip
    """Return the product, (12, limbs), canonical; or without the final exponentiation the values of Miller loops."""
    n = _checked_size(family, g1_points, g2_points)
    with RecordedLaunch(_record(family, n), HOST.provider, HOST.index):
        points = np.concatenate([g1_points, g2_points.reshape(n, 4, g2_points.shape[-1])], axis=1)
        finite1, finite2 = (part.any(axis=(1, 2)) for part in (points[:, :2], points[:, 2:]))
        whole = finite1 & finite2
        values, whole_checks = _miller_values(family, points[whole])
        if check:
            # A pair with one point at infinity contributes 1; the other point is checked together with a generator.
            alone = finite1 ^ finite2
            halves, generators = points.copy(), _generators(family)
            halves[~finite1, :2], halves[~finite2, 2:] = generators[:2], generators[2:]
            checks = np.zeros((n, _CHECKS), np.bool_)
            checks[:, _Z] = True
            checks[whole], checks[alone] = whole_checks, _miller_values(family, halves[alone])[1]
        values = values if others is None else np.concatenate([values, others])
        while exponentiates and len(values) > 1:
            half = len(values) // 2
            products = _apply(product_tape(family), values[:half], values[half : 2 * half])
            values = np.concatenate([products, values[2 * half :]])
        result: U64 = _apply(final_tape(family), values)[0] if exponentiates else values
    if check:  # after the launch: the ledger would count an error inside it as a failure of the op
        _raise_for(family, points, checks)
    return result


def _checked_size(family: Family, g1_points: U64, g2_points: U64) -> int:
    """Return the number of pairs, or raise the errors of product_is_one."""
    arguments = (("g1_points", g1_points, family.g1), ("g2_points", g2_points, family.g2))
    for name, points, curve in arguments:
        dtype = points.dtype.name if points.dtype.isnative else points.dtype.str
        host.check_words(family.fq, dtype, points.shape, name)
        if points.shape[1:] != curve.shape:
            wanted = ", ".join(map(str, curve.shape))
            raise ShapeError(f"{name} of {family.name} must be (n, {wanted}), got {points.shape}")
    if len(g1_points) != len(g2_points):
        raise ShapeError(f"wanted as many points of both groups, got {len(g1_points)} and {len(g2_points)}")
    for name, points, curve in arguments:
        check_reduced(HOST, curve, HOST.contiguous(points), name)
    return len(g1_points)


# --- tapes on arrays -------------------------------------------------------------------------------------------------
def _miller_values(family: Family, points: U64) -> tuple[U64, Bools]:
    """Return values whose product is that of all pairs (n, 6, limbs), and which check registers are not zero."""
    limbs = points.shape[-1]
    values: list[U64] = []
    checks: list[Bools] = [np.zeros((0, _CHECKS), np.bool_)]
    for first, size, groups in _grouped(len(points)):
        loop = miller_tape(family, size)
        value, *check_registers = loop.outputs
        registers = _registers(loop.tape, groups)
        grouped = points[first : first + groups * size].reshape(groups, size, 6, limbs)
        for i, register in enumerate(loop.inputs):
            registers[:, register : register + 6] = grouped[:, i]
        run_tape(loop.tape, registers)
        values.append(registers[:, value : value + FQ12_SIZE])
        group_checks = np.stack([registers[:, register : register + _CHECKS] for register in check_registers], axis=1)
        checks.append(np.asarray(group_checks.reshape(groups * size, _CHECKS, limbs).any(axis=-1)))
    if not values:
        one = [montgomery_radix(family.fq) % family.q] + [0] * (FQ12_SIZE - 1)
        values.append(host.encode(family.fq, one).reshape(1, FQ12_SIZE, limbs))
    return np.concatenate(values), np.concatenate(checks)


def _grouped(n: int) -> list[tuple[int, int, int]]:
    """Return (first pair, pairs per group, groups) of each batch: full groups, then the remaining pairs."""
    full, rest = divmod(n, _GROUP)
    batches = [(first * _GROUP, _GROUP, min(_BATCH, full - first)) for first in range(0, full, _BATCH)]
    return batches + [(full * _GROUP, rest, 1)] * (rest > 0)


def _raise_for(family: Family, points: U64, nonzero: Bools) -> None:
    """Raise FormatError for the first point off its curve, or else out of its subgroup."""
    off1, off2 = nonzero[:, 0], nonzero[:, 1:3].any(axis=1)
    out1, out2 = nonzero[:, 9:].any(axis=1), nonzero[:, 3:7].any(axis=1) | ~nonzero[:, _Z].any(axis=1)
    for name, curve, wrong, what in (
        ("g1_points", family.g1.name, off1, "is not on {}"),
        ("g2_points", family.g2.name, off2, "is not on {}"),
        ("g1_points", family.g1.name, out1, "is on {} but not in its subgroup of order r"),
        ("g2_points", family.g2.name, out2, "is on {} but not in its subgroup of order r"),
    ):
        if wrong.any():
            i = int(wrong.argmax())
            coordinates = points[i, :2] if name == "g1_points" else points[i, 2:]
            shown = ", ".join(f"{value:#x}" for value in host.decode(family.fq, coordinates))
            raise FormatError(f"{name}[{i}], ({shown}), {what.format(curve)}")


def _apply(function: TapeFunction, *inputs: U64) -> U64:
    """Apply a function of elements of Fq12 to arrays (m, 12, limbs), element by element."""
    registers = _registers(function.tape, len(inputs[0]))
    for register, values in zip(function.inputs, inputs, strict=True):
        registers[:, register : register + FQ12_SIZE] = values
    run_tape(function.tape, registers)
    (value,) = function.outputs
    return registers[:, value : value + FQ12_SIZE]


def _registers(tape: Tape, n: int) -> U64:
    """Return n register files with their constants set, the rest undefined."""
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
    return host.encode(family.fq, [x, y, *u, *v])


@functools.lru_cache(maxsize=4096)
def _record(family: Family, n: int) -> OpRecord:
    loops = sum(miller_tape(family, size).tape.products * groups for _, size, groups in _grouped(n))
    case, size_bytes = f"{n} {family.name}", 6 * n * family.fq.size_bytes
    operations = loops + final_tape(family).tape.products
    return sole_record(
        "pairing_product", "llvm", HOST.backend, HOST.label, case, size_bytes=size_bytes, operations=operations
    )


# --- Miller loop -----------------------------------------------------------------------------------------------------
def _kept(record: Callable[..., TapeFunction]) -> Callable[..., TapeFunction]:
    """Keep what a function records of a family and perhaps a size in memory, and on the disk under its name."""

    @functools.cache
    def tape(family: Family, *size: int) -> TapeFunction:
        name = "_".join((record.__name__.removesuffix("_tape"), family.name, *map(str, size)))
        return cached(name, f"{family} {family.q:x}", family.fq, lambda: record(family, *size))

    return functools.wraps(record)(tape)


@_kept
def miller_tape(family: Family, size: int) -> TapeFunction:
    """Return the Miller loop of `size` finite pairs, six canonical coordinates each: its value, then their checks."""
    program = TapeProgram(family.fq)
    f = program.window(FQ12_SIZE)
    windows = [(program.window(2), program.window(4), program.window(6), program.window(_CHECKS)) for _ in range(size)]
    image = program.window(4)
    square, double = _unary_segment(family, "square"), _step_segment(family, _double_step)
    add, subtract = _step_segment(family, _add_step, 1), _step_segment(family, _add_step, -1)
    ones = Recorder(family.fq)
    program.call(ones.segment({"f": [ones.constant(int(i == 0)) for i in range(FQ12_SIZE)]}), f=f)
    begin = _begin_segment(family)
    for p, q, t, checks in windows:
        program.call(begin, p=p, q=q, t=t, checks=checks)
    x = family.parameter
    for i, digit in enumerate(signed_windows(abs(6 * x + 2 if family.kind == "bn" else x), 2)[-2::-1]):
        if i:
            program.call(square, f=f)
        for p, q, t, _ in windows:
            program.call(double, f=f, t=t, p=p)
            if digit:
                program.call(add if digit > 0 else subtract, f=f, t=t, p=p, q=q)
    if x < 0:
        program.call(_unary_segment(family, "conjugate"), f=f)
    if family.kind == "bn":
        for _, _, t, _ in windows if x < 0 else ():
            program.call(_opposite_segment(family), t=t)
        for times, step in ((1, add), (2, subtract)):
            tower = RecordedTower(family)
            x_q, y_q = pairs(tower.base.inputs("q", 4))
            frobenius = tower.base.segment({"z": flat(tower.frobenius_twist(x_q, y_q, times))})
            for p, q, t, _ in windows:
                program.call(frobenius, q=q, z=image)
                program.call(step, f=f, t=t, p=p, q=image)
    _add_checks(program, family, windows)
    return program.function([p for p, _, _, _ in windows], [f, *(checks for _, _, _, checks in windows)])


def _double_step(tower: RecordedTower, t: Projective, p: tuple[int, int]) -> tuple[Line, Projective]:
    """Return the tangent at T, evaluated at P and scaled by 2YZ, and 2T; 5 products and 6 squares in Fq2.

    With B = Y^2, E = 3b'Z^2, H = 2YZ, J = X^2: X3 = 2XY(B - 3E), Y3 = (B + 3E)^2 - 12E^2, Z3 = 4BH; the line is
    H y_P, -3J x_P, B - E.
    """
    x, y, z = t
    b, c, j = tower.square(y), tower.square(z), tower.square(x)
    e = tower.times(tower.times_constant(c, tower.family.g2.b), 3)
    h = tower.sub(tower.square(tower.add(y, z)), tower.add(b, c))
    xy = tower.sub(tower.square(tower.add(x, y)), tower.add(j, b))
    f, ee = tower.times(e, 3), tower.square(e)
    x3 = tower.mul(xy, tower.sub(b, f))
    y3 = tower.sub(tower.square(tower.add(b, f)), tower.times(tower.times(ee, 4), 3))
    z3 = tower.times(tower.mul(b, h), 4)
    return _line(tower, tower.scale(h, p[1]), tower.scale(tower.times(j, 3), p[0]), tower.sub(b, e)), (x3, y3, z3)


def _add_step(tower: RecordedTower, t: Projective, q: tuple[Fq2, Fq2], p: tuple[int, int]) -> tuple[Line, Projective]:
    """Return the chord through T and Q, evaluated at P and scaled by X - x_Q Z, and T + Q; 11 products, 2 squares.

    With S = Y - y_Q Z, L = X - x_Q Z, F = Z S^2, G = X L^2, H = L^3 + F - 2G: X3 = LH, Y3 = S(G - H) - Y L^3,
    Z3 = Z L^3; the line is L y_P, -S x_P, S x_Q - L y_Q.
    """
    x, y, z = t
    s, length = tower.sub(y, tower.mul(q[1], z)), tower.sub(x, tower.mul(q[0], z))
    squared = tower.square(length)
    cube, g = tower.mul(length, squared), tower.mul(x, squared)
    h = tower.sub(tower.add(cube, tower.mul(z, tower.square(s))), tower.times(g, 2))
    y3 = tower.sub(tower.mul(s, tower.sub(g, h)), tower.mul(y, cube))
    last = tower.sub(tower.mul(s, q[0]), tower.mul(length, q[1]))
    line = _line(tower, tower.scale(length, p[1]), tower.scale(s, p[0]), last)
    return line, (tower.mul(length, h), y3, tower.mul(z, cube))


def _line(tower: RecordedTower, y_p: Fq2, minus_x_p: Fq2, rest: Fq2) -> Line:
    """Return y_p - minus_x_p w + rest w^3, or rest - minus_x_p w^2 + y_p w^3 on a twist by multiplication."""
    middle = tower.neg(minus_x_p)
    return (y_p, middle, rest) if tower.family.twist == "divide" else (rest, middle, y_p)


def _step_segment(family: Family, step: Callable[..., tuple[Line, Projective]], sign: int = 0) -> Segment:
    """Return the update of T and f by one step of one pair; an addition adds Q or, for a negative sign, -Q."""
    tower = RecordedTower(family)
    f = tower.unflatten(tower.base.inputs("f", FQ12_SIZE))
    t = _point(tower)
    p = tower.base.inputs("p", 2)
    if sign:
        x, y = pairs(tower.base.inputs("q", 4))
        line, t = step(tower, t, (x, y if sign > 0 else tower.neg(y)), p)
    else:
        line, t = step(tower, t, p)
    return tower.base.segment({"f": flat12(tower.mul12_line(f, line)), "t": flat(t)})


@functools.cache
def _opposite_segment(family: Family) -> Segment:
    """Return the change of T to -T."""
    tower = RecordedTower(family)
    x, y, z = _point(tower)
    return tower.base.segment({"t": flat((x, tower.neg(y), z))})


# --- checks of points ------------------------------------------------------------------------------------------------
def _begin_segment(family: Family) -> Segment:
    """Return the conversion of points to Montgomery form, T = Q, and the curve equations of P and Q."""
    tower = RecordedTower(family)
    k = tower.base
    radix = k.constant(montgomery_radix(family.fq))  # a Montgomery product divides by R
    (x_p, y_p), q = (
        tuple(k.mul(value, radix) for value in k.inputs(name, size)) for name, size in (("p", 2), ("q", 4))
    )
    x, y = pairs(q)
    off1 = k.sub(k.mul(y_p, y_p), k.add(k.mul(k.mul(x_p, x_p), x_p), k.constant(family.b)))
    off2 = tower.sub(tower.square(y), tower.add(tower.mul(tower.square(x), x), tower.pair(family.g2.b)))
    outputs = {"p": (x_p, y_p), "q": q, "t": (*q, k.constant(1), k.constant(0)), "checks": (off1, *off2)}
    return k.segment(outputs)


def _add_checks(program: TapeProgram, family: Family, windows: Sequence[tuple[int, int, int, int]]) -> None:
    """Append the subgroup checks (P times x twice) to a loop; windows are p, q, t and checks of each pair."""
    q_check = _q_segment(family)
    for _, q, t, checks in windows:
        program.call(q_check, q=q, t=t, subgroup=checks + 3)

    def segment(outputs: Callable[[Recorder], dict[str, Sequence[int]]]) -> Segment:
        recorder = Recorder(family.fq)
        return recorder.segment(outputs(recorder))

    if family.g1.cofactor == 1:
        passed = segment(lambda k: {"subgroup": [k.constant(0)] * 2})
        for _, _, _, checks in windows:
            program.call(passed, subgroup=checks + 9)
        return
    base, total, b3 = program.window(3), program.window(3), (3 * family.b,)
    start = segment(lambda k: {"total": (*k.inputs("p", 2), k.constant(1))})
    keep = segment(lambda k: {"base": k.inputs("total", 3)})
    twice = segment(lambda k: {"total": double(k, b3, k.inputs("total", 3))})
    plus = segment(lambda k: {"total": add(k, b3, k.inputs("total", 3), k.inputs("base", 3))})
    end = _p_segment(family)
    for p, _, _, checks in windows:
        program.call(start, p=p, total=total)
        for _ in range(2):
            program.call(keep, base=base, total=total)
            for bit in bin(abs(family.parameter))[3:]:
                program.call(twice, total=total)
                if bit == "1":
                    program.call(plus, total=total, base=base)
        program.call(end, p=p, total=total, subgroup=checks + 9)


def _q_segment(family: Family) -> Segment:
    """Return X - x Z, Y - y Z and Z of T and (x, y) = -psi^3(Q) (BN) or psi(Q) with the sign of x (BLS12)."""
    tower = RecordedTower(family)
    x, y = pairs(tower.base.inputs("q", 4))
    t = _point(tower)
    u, v = tower.frobenius_twist(x, y, 3 if family.kind == "bn" else 1)
    first = tower.sub(t[0], tower.mul(u, t[2]))
    same = family.kind == "bls12" and family.parameter > 0
    second = (tower.sub if same else tower.add)(t[1], tower.mul(v, t[2]))
    return tower.base.segment({"subgroup": (*first, *second, *t[2])})


def _p_segment(family: Family) -> Segment:
    """Return the comparison of total = x^2 P with -(beta x, y)."""
    test = endomorphism(family.g1)
    if test is None or test.eigenvalue != family.parameter**2 - 1:
        raise ValueError(f"{family.name}: wanted an endomorphism that multiplies by x^2 - 1")
    beta = family.g1.coordinates.square(test.x_factor)  # the other cube root of 1: (beta x, y) = -x^2 P
    k = Recorder(family.fq)
    (total_x, total_y, total_z), (x, y) = k.inputs("total", 3), k.inputs("p", 2)
    image = k.mul(x, k.constant(beta))
    return k.segment({"subgroup": (k.sub(total_x, k.mul(image, total_z)), k.add(total_y, k.mul(y, total_z)))})


# --- final exponentiation --------------------------------------------------------------------------------------------
@_kept
def final_tape(family: Family) -> TapeFunction:
    """Return f^((q^12 - 1) / r) of one element that is not zero, exactly, from Montgomery to canonical form."""
    machine = _Machine(family)
    f = machine.new()
    start = machine.copy(f)
    machine.unary(start, "unitary")
    machine.mul(start, machine.frobenius(start, 2))
    result = (_hard_bn if family.kind == "bn" else _hard_bls)(machine, start)
    k = Recorder(family.fq)
    inverse = k.constant(pow(montgomery_radix(family.fq), -1, family.q))
    machine.program.call(k.segment({"f": [k.mul(value, inverse) for value in k.inputs("f", FQ12_SIZE)]}), f=result)
    return machine.program.function([f], [result])


@_kept
def product_tape(family: Family) -> TapeFunction:
    """Return the product of two elements in Montgomery form."""
    machine = _Machine(family)
    f, g = machine.new(), machine.new()
    machine.mul(f, g)
    return machine.program.function([f, g], [f])


@functools.cache
def _unary_segment(family: Family, name: str, times: int = 0) -> Segment:
    """Return f's square, conjugate, cyclotomic square, power by q^times, or f^(q^6 - 1) ("unitary"), in place."""
    tower = RecordedTower(family)
    f = tower.unflatten(tower.base.inputs("f", FQ12_SIZE))
    functions: dict[str, Callable[[], Fq12]] = {
        "square": lambda: tower.square12(f),
        "conjugate": lambda: tower.conjugate12(f),
        "cyclotomic": lambda: tower.square_cyclotomic(f),
        "frobenius": lambda: tower.frobenius12(f, times),
        "unitary": lambda: tower.mul12(tower.conjugate12(f), tower.inv12(f)),
    }
    return tower.base.segment({"f": flat12(functions[name]())})


@functools.cache
def _product_segment(family: Family, sign: int) -> Segment:
    """Return the product of f and g, or of f and conj(g) for a negative sign, in place of f."""
    tower = RecordedTower(family)
    f, g = (tower.unflatten(tower.base.inputs(name, FQ12_SIZE)) for name in ("f", "g"))
    return tower.base.segment({"f": flat12(tower.mul12(f, g if sign > 0 else tower.conjugate12(g)))})


class _Machine:
    """A program on registers of Fq12; `square` and `power` take elements whose order divides q^4 - q^2 + 1."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self.program = TapeProgram(family.fq)
        recorder = Recorder(family.fq)
        self._copy = recorder.segment({"f": recorder.inputs("g", FQ12_SIZE)})
        self._table = [self.new() for _ in range(5)]

    def new(self) -> int:
        return self.program.window(FQ12_SIZE)

    def copy(self, a: int, to: int | None = None) -> int:
        """Copy a register to another, new by default; return that one."""
        to = self.new() if to is None else to
        self.program.call(self._copy, f=to, g=a)
        return to

    def unary(self, a: int, name: str, times: int = 0) -> None:
        """Apply a function of _unary_segment in place."""
        self.program.call(_unary_segment(self.family, name, times), f=a)

    def square(self, a: int) -> None:
        self.unary(a, "cyclotomic")

    def frobenius(self, a: int, times: int) -> int:
        """Return a new register with a^(q^times)."""
        power = self.copy(a)
        self.unary(power, "frobenius", times)
        return power

    def mul(self, a: int, b: int, sign: int = 1) -> None:
        """Multiply register a by b, or by conj(b), which is 1 / b for elements that `power` takes."""
        self.program.call(_product_segment(self.family, sign), f=a, g=b)

    def power(self, a: int, exponent: int) -> int:
        """Return a new register with a power, by signed windows of the width with the fewest products."""
        width = min(range(2, 5), key=lambda w: sum(map(bool, signed_windows(abs(exponent), w))) + (1 << w - 2))
        odd, square = self._table[:-1], self._table[-1]
        self.copy(a, odd[0])
        if width > 2:
            self.square(self.copy(a, square))
        for i in range(1, 1 << width - 2):
            self.mul(self.copy(odd[i - 1], odd[i]), square)
        first, *digits = reversed(signed_windows(abs(exponent), width))
        result = self.copy(odd[first // 2])
        for digit in digits:
            self.square(result)
            if digit:
                self.mul(result, odd[abs(digit) // 2], 1 if digit > 0 else -1)
        if exponent < 0:
            self.unary(result, "conjugate")
        return result


def _hard_bn(machine: _Machine, f: int) -> int:
    """Raise f to (q^4 - q^2 + 1) / r by three powers by x.

    y0 y1^2 y2^6 y3^12 y4^18 y5^30 y6^36 with y0 = f^(q + q^2 + q^3), y1 = 1/f, y2 = f^(x^2 q^2), y3 = 1/f^(x q), y4 =
    1/f^(x + x^2 q), y5 = 1/f^(x^2), y6 = 1/f^(x^3 + x^3 q). Source of the chain: Scott et al., eprint 2008/490, section
    5.
    """
    x = machine.family.parameter
    fx = machine.power(f, x)
    fxx = machine.power(fx, x)
    y6 = machine.power(fxx, x)
    y0, y2 = machine.frobenius(f, 1), machine.frobenius(fxx, 2)
    y3, y4 = machine.frobenius(fx, 1), machine.frobenius(fxx, 1)
    for times in (2, 3):
        machine.mul(y0, machine.frobenius(f, times))
    machine.mul(y4, fx)
    machine.mul(y6, machine.frobenius(y6, 1))
    for y in (y3, y4, y6):
        machine.unary(y, "conjugate")

    first, second = y6, y3
    machine.square(first)
    machine.mul(first, y4)
    machine.mul(first, fxx, -1)
    machine.mul(second, fxx, -1)
    machine.mul(second, first)
    machine.mul(first, y2)
    machine.square(second)
    machine.mul(second, first)
    machine.square(second)
    first = machine.copy(second)
    machine.mul(first, f, -1)
    machine.mul(second, y0)
    machine.square(first)
    machine.mul(first, second)
    return first


def _hard_bls(machine: _Machine, f: int) -> int:
    """Raise f to (q^4 - q^2 + 1) / r = (x - 1)^2 / 3 (x + q) (x^2 + q^2 - 1) + 1; x is 1 mod 3.

    Source: Hayashida, Hayasaka and Teruya, eprint 2020/875, who take three times that, which saves some ten products.
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


def flat12(a: Fq12) -> tuple[int, ...]:
    """Return the coefficients of an element of Fq12."""
    return flat((*a[0], *a[1]))


def _point(tower: RecordedTower) -> Projective:
    """Return T of the window "t"."""
    x, y, z = pairs(tower.base.inputs("t", 6))
    return x, y, z


class RecordedTower(RecordedPairs):
    """The tower of a family over a new recorder; names end in the degree, 6 or 12; M is a product in Fq."""

    def __init__(self, family: Family) -> None:
        super().__init__(Recorder(family.fq))
        self.family = family

    def times_xi(self, a: Fq2) -> Fq2:
        """Return a xi by additions; xi = c + u with c a small positive number."""
        c, one = self.family.nonresidue
        if one != 1:
            raise ValueError(f"{self.family.name}: wanted a non-residue c + u, got {self.family.nonresidue}")
        scaled = self.times(a, c)
        return self.base.sub(scaled[0], a[1]), self.base.add(scaled[1], a[0])

    # --- Fq6 -----------------------------------------------------------------------------------------------------
    def add6(self, a: Fq6, b: Fq6) -> Fq6:
        return self.add(a[0], b[0]), self.add(a[1], b[1]), self.add(a[2], b[2])

    def sub6(self, a: Fq6, b: Fq6) -> Fq6:
        return self.sub(a[0], b[0]), self.sub(a[1], b[1]), self.sub(a[2], b[2])

    def neg6(self, a: Fq6) -> Fq6:
        return self.neg(a[0]), self.neg(a[1]), self.neg(a[2])

    def times_v(self, a: Fq6) -> Fq6:
        return self.times_xi(a[2]), a[0], a[1]

    def mul6(self, a: Fq6, b: Fq6) -> Fq6:
        """Return a b by six products in Fq2, 18M. Source: Devegili et al., eprint 2006/471."""
        v0, v1, v2 = (self.mul(a[i], b[i]) for i in range(3))
        c12 = self.sub(self._crossed(a[1], a[2], b[1], b[2]), self.add(v1, v2))
        c01 = self.sub(self._crossed(a[0], a[1], b[0], b[1]), self.add(v0, v1))
        c02 = self.sub(self._crossed(a[0], a[2], b[0], b[2]), self.add(v0, v2))
        return self.add(v0, self.times_xi(c12)), self.add(c01, self.times_xi(v2)), self.add(c02, v1)

    def mul6_sparse(self, a: Fq6, b0: Fq2, b1: Fq2) -> Fq6:
        """Return a (b0 + b1 v): mul6 without b2, 15M."""
        v0, v1 = self.mul(a[0], b0), self.mul(a[1], b1)
        high = self.sub(self.mul(self.add(a[1], a[2]), b1), v1)
        middle = self.sub(self._crossed(a[0], a[1], b0, b1), self.add(v0, v1))
        last = self.sub(self.mul(self.add(a[0], a[2]), b0), v0)
        return self.add(v0, self.times_xi(high)), middle, self.add(last, v1)

    def mul6_by2(self, a: Fq6, b: Fq2) -> Fq6:
        """Return the product of a and an element of Fq2, 9M."""
        return self.mul(a[0], b), self.mul(a[1], b), self.mul(a[2], b)

    def _crossed(self, a0: Fq2, a1: Fq2, b0: Fq2, b1: Fq2) -> Fq2:
        return self.mul(self.add(a0, a1), self.add(b0, b1))

    # --- Fq12 ----------------------------------------------------------------------------------------------------
    def unflatten(self, values: Sequence[int]) -> Fq12:
        """Return the element with these twelve coefficients in Fq."""
        c = pairs(values)
        return (c[0], c[1], c[2]), (c[3], c[4], c[5])

    def mul12(self, a: Fq12, b: Fq12) -> Fq12:
        """Return a b by Karatsuba, 54M."""
        low, high = self.mul6(a[0], b[0]), self.mul6(a[1], b[1])
        cross = self.mul6(self.add6(a[0], a[1]), self.add6(b[0], b[1]))
        return self.add6(low, self.times_v(high)), self.sub6(cross, self.add6(low, high))

    def square12(self, a: Fq12) -> Fq12:
        """Return a^2 = (a0 + a1) (a0 + v a1) - (1 + v) a0 a1 + 2 a0 a1 w, 36M."""
        product = self.mul6(a[0], a[1])
        both = self.mul6(self.add6(a[0], a[1]), self.add6(a[0], self.times_v(a[1])))
        return self.sub6(self.sub6(both, product), self.times_v(product)), self.add6(product, product)

    def mul12_line(self, a: Fq12, line: Line) -> Fq12:
        """Return the product of a and a line, 39M: by Karatsuba without the products by zero.

        On a twist by division a line is c0 + (c1 + c2 v) w, on one by multiplication (c0 + c1 v) + (c2 v) w.
        """
        c0, c1, c2 = line
        if self.family.twist == "divide":
            low = self.mul6_by2(a[0], c0)
            high = self.mul6_sparse(a[1], c1, c2)
            cross = self.mul6_sparse(self.add6(a[0], a[1]), self.add(c0, c1), c2)
        else:
            low = self.mul6_sparse(a[0], c0, c1)
            high = self.times_v(self.mul6_by2(a[1], c2))
            cross = self.mul6_sparse(self.add6(a[0], a[1]), c0, self.add(c1, c2))
        return self.add6(low, self.times_v(high)), self.sub6(cross, self.add6(low, high))

    def conjugate12(self, a: Fq12) -> Fq12:
        """Return a0 - a1 w, which is a^(q^6): the inverse of an element whose order divides q^6 + 1."""
        return a[0], self.neg6(a[1])

    def inv12(self, a: Fq12) -> Fq12:
        """Return 1/a = (a0 - a1 w) / (a0^2 - v a1^2), by norms down to Fq; zero for zero."""
        b = self.sub6(self.mul6(a[0], a[0]), self.times_v(self.mul6(a[1], a[1])))
        adjoint = (
            self.sub(self.square(b[0]), self.times_xi(self.mul(b[1], b[2]))),
            self.sub(self.times_xi(self.square(b[2])), self.mul(b[0], b[1])),
            self.sub(self.square(b[1]), self.mul(b[0], b[2])),
        )
        mixed = self.add(self.mul(b[2], adjoint[1]), self.mul(b[1], adjoint[2]))
        norm = self.add(self.mul(b[0], adjoint[0]), self.times_xi(mixed))
        k = self.base
        length = self.inv(k.add(k.mul(norm[0], norm[0]), k.mul(norm[1], norm[1])))
        inverse = self.mul6_by2(adjoint, self.conjugate(self.scale(norm, length)))
        return self.mul6(a[0], inverse), self.neg6(self.mul6(a[1], inverse))

    def inv(self, a: int) -> int:
        """Return a^(q - 2) in Fq, by windows of four bits: the inverse, zero for zero."""
        k, exponent = self.base, self.family.q - 2
        square = k.mul(a, a)
        odd = [a]
        for _ in range(7):
            odd.append(k.mul(odd[-1], square))
        digits = bin(exponent)[2:]
        result, i = k.constant(1), 0
        while i < len(digits):
            if digits[i] == "0":
                result, i = k.mul(result, result), i + 1
                continue
            window = digits[i : i + 4].rstrip("0")
            for _ in window:
                result = k.mul(result, result)
            result, i = k.mul(result, odd[int(window, 2) // 2]), i + len(window)
        return result

    def frobenius12(self, a: Fq12, times: int) -> Fq12:
        """Return a^(q^times): coefficients in Fq2 are conjugated for odd times, and that of w^i gains a factor."""
        (a0, a2, a4), (a1, a3, a5) = a
        factors = _frobenius_factors(self.family, times)
        b = [self._moved(c, times, factor) for c, factor in zip((a0, a1, a2, a3, a4, a5), factors, strict=True)]
        return (b[0], b[2], b[4]), (b[1], b[3], b[5])

    def frobenius_twist(self, x: Fq2, y: Fq2, times: int) -> tuple[Fq2, Fq2]:
        """Apply the curve's Frobenius over Fq12 to coordinates of the twist, several times."""
        _, _, for_x, for_y, _, _ = _frobenius_factors(self.family, times)
        if self.family.twist == "multiply":
            k = QuadraticCoordinates(self.family.fq)
            for_x, for_y = k.inv(for_x), k.inv(for_y)
        return self._moved(x, times, for_x), self._moved(y, times, for_y)

    def _moved(self, c: Fq2, times: int, factor: Pair) -> Fq2:
        return self.times_constant(self.conjugate(c) if times % 2 else c, factor)

    def square_cyclotomic(self, a: Fq12) -> Fq12:
        """Return the square of an element whose order divides q^4 - q^2 + 1, 18M.

        Over Fq4 = Fq2[t] / (t^2 - xi), t = w^3, an element is A + B w + C w^2, and its square is
        3 A^2 - 2 conj(A) + (3 t C^2 + 2 conj(B)) w + (3 B^2 - 2 conj(C)) w^2, conj taking t to -t.
        Source: Granger and Scott, eprint 2009/565, section 3.2.
        """
        (a0, a2, a4), (a1, a3, a5) = a
        p0, p1 = self._square4(a0, a3)
        q0, q1 = self._square4(a1, a4)
        s0, s1 = self._square4(a2, a5)

        def less(a: Fq2, b: Fq2) -> Fq2:  # 3 a - 2 b
            return self.add(self.times(self.sub(a, b), 2), a)

        def plus(a: Fq2, b: Fq2) -> Fq2:  # 3 a + 2 b
            return self.add(self.times(self.add(a, b), 2), a)

        b0, b3 = less(p0, a0), plus(p1, a3)
        b1, b4 = plus(self.times_xi(s1), a1), less(s0, a4)
        b2, b5 = less(q0, a2), plus(q1, a5)
        return (b0, b2, b4), (b1, b3, b5)

    def _square4(self, a: Fq2, b: Fq2) -> tuple[Fq2, Fq2]:
        """Return (a + b t)^2 by three squares."""
        first, second = self.square(a), self.square(b)
        cross = self.sub(self.square(self.add(a, b)), self.add(first, second))
        return self.add(first, self.times_xi(second)), cross


def _frobenius_factors(family: Family, times: int) -> list[Pair]:
    """Return w^(i (q^times - 1)) = xi^(i (q^times - 1) / 6) for i below 6."""
    k = QuadraticCoordinates(family.fq)
    root = k.power(family.nonresidue, (family.q**times - 1) // 6)
    return [k.power(root, i) for i in range(6)]
