"""Products of pairings on the CPU: Miller's loop for four pairs at a time, one final power for all.

Points are canonical words on the host. The value is that of pairing_reference.py, exactly. Infinity in either group
makes a pair contribute 1. Not constant-time: verifiers' inputs are public.

Single-core milliseconds of a product of four on a 2.6 GHz Zen 4: bn254 1.4, bls12_381 2.4, of one 0.8 and 1.3. Most is
some 30,000 products in Fq and twice as many additions; tape.py and tower.py say how they are done.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from accelerant.algebra.counted import counted
from accelerant.algebra.curve.launch import check_reduced
from accelerant.algebra.curve.pairing_checks import VERDICT_SIZE
from accelerant.algebra.curve.pairing_miller import miller_tape
from accelerant.algebra.curve.pairing_power import FinalTape, final_tape, product_tape
from accelerant.algebra.curve.pairing_reference import Fq12
from accelerant.algebra.curve.parameters import Family
from accelerant.algebra.curve.tape import Tape
from accelerant.algebra.curve.tape_kernel import run_tape
from accelerant.algebra.curve.tower import FQ12_SIZE
from accelerant.algebra.field import words as host
from accelerant.algebra.field.parameters import FIELDS, Field
from accelerant.algebra.field.places import HOST
from accelerant.algebra.field.program import montgomery_radix
from accelerant.errors import FormatError, ShapeError
from accelerant.runtime.ledger import OpRecord, ledger

__all__ = ["product", "product_is_one"]

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
