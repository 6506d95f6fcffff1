"""Arithmetic of large fields in PTX: carry chains, unrolled for a field's number of limbs.

A product is split into two sums of 32-bit limbs, *even* and *odd*: x_j y_i is added to the even one if j is even, else
to the odd one, which is one limb higher. So the 64-bit products of a row follow one another without overlap, the whole
row is one carry chain, and a pair mad.lo.cc, madc.hi.cc of the same factors becomes one wide multiply-add with carry.
After a row x y_i and a row m p the lowest limb is 0. Shifting by that limb swaps the sums: the odd one becomes the
next row's even one, after the even one's second limb is added to it; the carry enters the next row's first chain.

With n limbs and p < 2^(32 n - 1) the sum stays below 2 p 2^32 (see limbs_c.h), so that n + 1 limbs hold it and no chain
but the even one carries out. Multiply: 2 n^2 wide multiply-adds and n low products; square: n (n + 1) / 2 + n^2, and n.
A sum of two products has two such rows before each m p, 3 n^2 and n in all: below 3 p 2^32, with p < 2^(32 n - 2).

A product x w by a constant, for which v = floor(w R / p) is known, needs no m: it is the lower half of x w - q p, with
q the upper half of x v. q is computed without the products x_j v_i of i + j < n - 2, so that x w - q p is below
(1 + x / R + 2^-28) p. In the lower half products at limb n - 1 are low ones. For n = 8: 99 wide and 16 low products.

Source: Koc, Acar and Kaliski 1996, IEEE Micro 16(3), "CIOS", for the rows; Shoup's product by a constant as in Harvey
2014, J. Symbolic Computation 60.
"""

from __future__ import annotations

from collections.abc import Sequence

from accelerant.algebra.field.parameters import Field

_BITS = 32
Limbs = list[str]


class _Chains:
    """A sequence of PTX instructions. Each result is a new register; None among limbs is a zero that needs none."""

    def __init__(self, inputs: int, limbs: int) -> None:
        self.operands = [[f"%{limbs * (1 + i) + j}" for j in range(limbs)] for i in range(inputs)]
        self._lines: list[str] = []
        self._registers = self._predicates = 0

    def do(self, instruction: str, *sources: str | None) -> str:
        """Append an instruction on u32; return its result."""
        result = f"t{self._registers}"
        self._registers += 1
        self._lines.append(f"{instruction} {result}, {', '.join(source or '0' for source in sources)};")
        return result

    def products(
        self, sums: list[str | None], at: int, factors: Sequence[str], y: str, carry: bool = False, last: bool = False
    ) -> None:
        """Add factors times y 2^(32 at) to the sums, in one chain, after a `carry`, and before one unless `last`."""
        end = at + 2 * len(factors)
        wide, low = (factors[:-1], factors[-1]) if end > len(sums) else (factors, None)
        if not carry and all(limb is None for limb in sums[at:end]):
            for k, factor in enumerate(factors):
                sums[at + 2 * k] = self.do("mul.lo.u32", factor, y)
                if factor is not low:
                    sums[at + 2 * k + 1] = self.do("mul.hi.u32", factor, y)
            return
        out = low is not None or (not last and sums[end - 1] is not None)  # else the highest has room for the carry
        for k, factor in enumerate(wide):
            start, high = at + 2 * k, at + 2 * k + 1
            final = "" if factor is wide[-1] and not out else ".cc"
            sums[start] = self.do(f"mad{'c' if carry or k else ''}.lo.cc.u32", factor, y, sums[start])
            sums[high] = self.do(f"madc.hi{final}.u32", factor, y, sums[high])
        if low is not None:
            sums[-1] = self.do(f"mad{'c' if carry or wide else ''}.lo.u32", low, y, sums[-1])
        elif out:
            sums[end] = self.do("addc.u32", sums[end], None)

    def chain(self, operation: str, x: Sequence[str | None], y: Sequence[str | None], *, out: bool = False) -> Limbs:
        """Append x + y or x - y ("add", "sub"), limb by limb; the flag keeps the carry if `out` is set."""
        result = []
        for i, (a, b) in enumerate(zip(x, y, strict=True)):
            final = "" if i == len(x) - 1 and not out else ".cc"
            result.append(self.do(f"{operation}{'c' if i else ''}{final}.u32", a, b))
        return result

    def borrow(self) -> str:
        """Append a word with all bits set if the last difference was negative."""
        return self.do("subc.u32", None, None)

    def statement(self, name: str, result: Limbs) -> str:
        """Return the macro of a name, which assigns these limbs."""
        moves = [f"mov.u32 %{i}, {limb};" for i, limb in enumerate(result)]
        declared = [f".reg .u32 t<{self._registers}>;"]
        if self._predicates:
            declared.append(f".reg .pred q<{self._predicates}>;")
        text = " ".join(["{", *declared, *self._lines, *moves, "}"])
        names, limbs = "xyvw"[: len(self.operands)], range(len(result))
        outputs = ", ".join(f'"=r"((z).limb[{i}])' for i in limbs)
        inputs = ", ".join(f'"r"(({each}).limb[{i}])' for each in names for i in limbs)
        return f'#define {name}(z, {", ".join(names)}) asm("{text}" : {outputs} : {inputs})'

    def at_least_zero(self, reduced: Limbs, otherwise: Limbs, negative: str) -> Limbs:
        """Append a choice of the reduced limbs, or of the others where `negative` has all bits set."""
        which = f"q{self._predicates}"
        self._predicates += 1
        self._lines.append(f"setp.ne.u32 {which}, {negative}, 0;")
        return [self.do("selp.u32", plain, less, which) for less, plain in zip(reduced, otherwise, strict=True)]


class _PtxField:
    """The operations of one field: each appends instructions to some chains, and returns the result's limbs."""

    def __init__(self, field: Field) -> None:
        self.limbs = field.limbs * field.word_bits // _BITS
        self.field = field
        self.p = self.multiple(1)
        self.inverse = f"0x{field.montgomery_inverse(_BITS):08x}"

    def multiple(self, k: int) -> Limbs:
        """Return the limbs of k p mod R."""
        value = k * self.field.modulus % (1 << _BITS * self.limbs)
        return [f"0x{limb:08x}" for limb in self.field.words(value, _BITS, self.limbs)]

    def below(self, do: _Chains, t: Limbs, bound: Limbs) -> Limbs:
        """Append t - bound where t >= bound."""
        less = do.chain("sub", t, bound, out=True)
        return do.at_least_zero(less, t, do.borrow())

    def below_p(self, do: _Chains, t: Limbs) -> Limbs:
        """Append t - p where t >= p, with t < 2 p."""
        return self.below(do, t, self.p)

    def add(self, do: _Chains) -> Limbs:
        return self.below_p(do, do.chain("add", *do.operands))

    def sub(self, do: _Chains) -> Limbs:
        difference = do.chain("sub", *do.operands, out=True)
        negative = do.borrow()
        return do.chain("add", difference, [do.do("and.b32", limb, negative) for limb in self.p])

    def negated_quotient(self, do: _Chains, lowest: str | None) -> str:
        """Append m = -lowest / p mod 2^32; for 1 / p = 1 a difference, since a product would split wide ones."""
        if self.inverse == "0xffffffff":
            return do.do("sub.u32", None, lowest)
        return do.do("mul.lo.u32", lowest, self.inverse)

    def step(self, do: _Chains, even: list[str | None], odd: list[str | None], carry: bool = False) -> None:
        """Add m p with m so that the lowest limb becomes 0; `carry` as for products."""
        m = self.negated_quotient(do, even[0])
        do.products(odd, 0, self.p[1::2], m, carry=carry, last=True)
        do.products(even, 0, self.p[0::2], m)

    def shifted(
        self, do: _Chains, even: list[str | None], odd: list[str | None]
    ) -> tuple[list[str | None], list[str | None]]:
        """Divide both sums by 2^32. The flag holds a carry into the new odd one."""
        n = self.limbs
        low = do.do("add.cc.u32", odd[0], even[1])
        return [low, *odd[1:n], None], [*even[2 : n + 1], None]

    def mul(self, do: _Chains) -> Limbs:
        """Append x y / R or (x y + v w) / R mod p, row by row; the sum before the last loop is below (1 + pairs) p."""
        n, pairs = self.limbs, list(zip(do.operands[::2], do.operands[1::2], strict=True))
        even: list[str | None] = [None] * (n + 1)
        odd: list[str | None] = [None] * n
        for i in range(n):
            if i:
                even, odd = self.shifted(do, even, odd)
            for k, (x, y) in enumerate(pairs):
                do.products(odd, 0, x[1::2], y[i], carry=i > 0 and k == 0, last=True)
                do.products(even, 0, x[0::2], y[i])
            self.step(do, even, odd)
        total = do.chain("add", even[1:], odd)
        for _ in pairs:
            total = self.below_p(do, total)
        return total

    def square(self, do: _Chains) -> Limbs:
        """Square: the products below the diagonal once, with one factor doubled; then n steps of reduction."""
        n, (x,) = self.limbs, do.operands
        alone = [do.do("shl.b32", limb, "1") for limb in x]  # twice a limb, without the bit from the limb below
        twice = [alone[0], *(do.do("shf.l.wrap.b32", x[j - 1], x[j], "1") for j in range(1, n))]
        even: list[str | None] = [None] * (2 * n + 1)
        odd: list[str | None] = [None] * (2 * n + 1)
        for i in range(n):
            do.products(even, 2 * i, [x[i], *twice[i + 2 :: 2]], x[i])
            if i + 1 < n:
                do.products(odd, 2 * i + 1, [alone[i + 1], *twice[i + 3 :: 2]], x[i])
        t = do.chain("add", even[: 2 * n], odd[: 2 * n])
        return self.below_p(do, self._reduced(do, t))

    def shoup(self, do: _Chains) -> Limbs:
        """Multiply by a constant: arguments x, w, floor(w R / p); any x."""
        n, (x, w, v) = self.limbs, do.operands
        q = self._upper_half(do, x, v)
        even: list[str | None] = [None] * n
        odd: list[str | None] = [None] * n
        for factors, y in ((x, w), (self.multiple(-1), q)):
            for i in range(n):
                do.products(even, i + i % 2, factors[i % 2 : n - i : 2], y[i], last=True)
                do.products(odd, i + 1 - i % 2, factors[1 - i % 2 : n - i : 2], y[i])
        return [do.do("mov.u32", even[0]), *do.chain("add", even[1:], odd[1:])]

    def _upper_half(self, do: _Chains, x: Limbs, y: Limbs) -> Limbs:
        """Append x y / R, without the products below limb n - 2."""
        n = self.limbs
        sums: tuple[list[str | None], ...] = ([None] * (2 * n + 1), [None] * (2 * n + 1))
        for i in range(n):
            first = max(0, n - 2 - i)
            for j in range(first, min(first + 2, n)):
                do.products(sums[(i + j) % 2], i + j, x[j::2], y[i])
        return do.chain("add", sums[0][n - 1 : 2 * n], sums[1][n - 1 : 2 * n])[1:]

    def lazy_sub(self, do: _Chains) -> Limbs:
        x, y = do.operands
        return do.chain("sub", do.chain("add", x, self.multiple(2)), y)

    def _reduced(self, do: _Chains, t: Limbs) -> Limbs:
        """Append t / R mod p, below 2 p, with t < p^2: its lower half in n steps, then the upper is added."""
        n = self.limbs
        even: list[str | None] = [*t[:n], None]
        odd: list[str | None] = [None] * n
        self.step(do, even, odd)
        for _ in range(1, n):
            even, odd = self.shifted(do, even, odd)
            self.step(do, even, odd, carry=True)
        return do.chain("add", do.chain("add", even[1:], odd), t[n:])


def ptx_macros(field: Field, prefix: str) -> str:
    """Return macros PREFIX_PTX_ADD, _SUB, _MUL (z, x, y) and _SQUARE (z, x), of variables with `.limb`.

    The field has an even number n of 32-bit limbs and p < 2^(32 n - 1). Operands are below p, but y of a multiply may
    be any number of n limbs; results are below p, in Montgomery form with R = 2^(32 n). If p < 2^(32 n - 2), there are
    also _DOT2 (z, x, y, v, w), x y + v w, and:

        _SHOUP (z, x, y, v)   x y mod p, below (1 + x / R + 2^-28) p; v = floor(y R / p), y < p, and any x
        _LAZY_ADD (z, x, y)   x + y
        _LAZY_SUB (z, x, y)   x + 2 p - y, of y below 2 p
        _LAZY_REDUCE (z, x)   x - 2 p where x is no less
    """
    of = _PtxField(field)
    operations = {"ADD": (of.add, 2), "SUB": (of.sub, 2), "MUL": (of.mul, 2), "SQUARE": (of.square, 1)}
    if field.bits <= _BITS * of.limbs - 2:
        operations |= {"DOT2": (of.mul, 4), "SHOUP": (of.shoup, 3), "LAZY_SUB": (of.lazy_sub, 2)}
        operations["LAZY_ADD"] = lambda do: do.chain("add", *do.operands), 2
        operations["LAZY_REDUCE"] = lambda do: of.below(do, do.operands[0], of.multiple(2)), 1
    macros = []
    for name, (operation, inputs) in operations.items():
        chains = _Chains(inputs, of.limbs)
        macros.append(chains.statement(f"{prefix}_PTX_{name}", operation(chains)) + "\n")
    return "".join(macros)
