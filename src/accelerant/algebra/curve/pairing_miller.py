"""Miller's loop for a few pairs as a tape, with the checks of their points.

The loop is that of pairing_reference.py, with T in homogeneous coordinates (x = X/Z, y = Y/Z) and the lines scaled by
elements of Fq2, which the final power removes; pairs share the squarings, and 6x + 2 or |x| has signed digits. Source
of the coordinates: Costello, Lange and Naehrig, PKC 2010; the scaling here is free of halves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from accelerant.algebra.curve.pairing_checks import VERDICT_SIZE, add_checks, begin_segment
from accelerant.algebra.curve.pairing_power import signed_windows, unary_segment
from accelerant.algebra.curve.parameters import Family
from accelerant.algebra.curve.tape import Program, Recorder, Segment, Tape
from accelerant.algebra.curve.tape_store import kept
from accelerant.algebra.curve.tower import (
    FQ12_SIZE,
    Fq2,
    Line,
    Projective,
    RecordedTower,
    flat,
    flat12,
    pairs,
    recorded,
)
from accelerant.algebra.field.parameters import FIELDS

__all__ = ["MillerTape", "miller_tape"]


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
