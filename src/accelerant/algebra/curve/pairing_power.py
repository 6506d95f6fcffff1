"""The final power of pairings as a tape: f^((q^12 - 1) / r), the exact exponent, for f not zero."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from accelerant.algebra.curve.parameters import Family
from accelerant.algebra.curve.tape import Program, Recorder, Segment, Tape
from accelerant.algebra.curve.tape_store import kept
from accelerant.algebra.curve.tower import FQ12_SIZE, Fq12, flat12, recorded
from accelerant.algebra.field.parameters import FIELDS
from accelerant.algebra.field.program import montgomery_radix

__all__ = ["FinalTape", "final_tape", "product_tape", "signed_windows", "unary_segment"]


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
