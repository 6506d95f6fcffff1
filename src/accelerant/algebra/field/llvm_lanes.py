"""Prime fields of several limbs by AVX512-IFMA: eight elements at a time, 52-bit limbs, one register a limb.

vpmadd52luq and vpmadd52huq multiply the low 52 bits of two lanes and add the low or the high 52 bits of the product to
a 64-bit lane, so that carries can wait: a column takes 4 K additions of numbers below 2^52 (K limbs, 8 at most), which
stay below 2^57. A pack is [K x <8 x i64>].

Normal: each limb below 2^52, as all packs between functions are but those of load_left and load_half. Columns: sums not
yet carried.

    mul        the 2 K columns of x y first, all independent; then K steps, each of which adds m p so that the lowest
               column becomes 0 in its low 52 bits, and carries what is above into the next. Latency is hidden by the
               next pack's instructions, out of order. Bound by the two ports of vpmadd52: 4 K^2 of them, 100 for 4
               words (K = 5) and 256 for 6 (K = 8).
    square     products of different limbs once, doubled.
    load       words of eight elements are transposed by shuffles, then cut into limbs by funnel shifts.

Source: Gueron and Krasnov 2016, "Accelerating Big Integer Arithmetic Using Intel IFMA Extensions", ARITH 23.
"""

from __future__ import annotations

from collections.abc import Sequence

from accelerant.algebra.field.llvm_form import Form
from accelerant.algebra.field.llvm_text import Body, splat
from accelerant.algebra.field.parameters import Field

__all__ = ["Lanes"]

_LANES = 8
_BITS = 52
_MASK = (1 << _BITS) - 1
_V = f"<{_LANES} x i64>"
_DECLARATIONS = "".join(
    f"declare {line}\n"
    for line in (
        f"{_V} @llvm.x86.avx512.vpmadd52l.uq.512({_V}, {_V}, {_V})",
        f"{_V} @llvm.x86.avx512.vpmadd52h.uq.512({_V}, {_V}, {_V})",
        f"{_V} @llvm.fshr.v8i64({_V}, {_V}, {_V})",
        f"{_V} @llvm.masked.load.v8i64.p0(ptr, i32, <8 x i1>, {_V})",
        f"void @llvm.masked.store.v8i64.p0({_V}, ptr, i32, <8 x i1>)",
    )
)


class Lanes(Form):
    """See the module's docstring."""

    lanes = _LANES

    def __init__(self, field: Field) -> None:
        words = field.limbs
        if field.word_bits != 64 or words % 2:
            raise ValueError(f"{field.name}: wanted an even number of 64-bit words, got {words}")
        self.field = field
        self._words = words
        self._count = -(-64 * words // _BITS)
        self.type = f"[{self._count} x {_V}]"
        self.radix = 1 << _BITS * self._count
        self.memory_radix = 1 << 64 * words
        self.shift = _BITS * self._count - 64 * words
        self._modulus = [_all(limb) for limb in field.words(field.modulus, _BITS, self._count)]

    def constant(self, value: int) -> str:
        """The limbs, each in all lanes."""
        limbs = self.field.words(value, _BITS, self._count)
        return "[" + ", ".join(f"{_V} {_all(limb)}" for limb in limbs) + "]"

    def functions(self) -> str:
        """See Form."""
        pair = [f"{self.type} %x", f"{self.type} %y"]
        place = ["ptr %x", "i64 %i", "i64 %stop"]
        return _DECLARATIONS + "".join(
            (
                self.define("load", place, self._load(0)),
                self.define("load_left", place, self._load(self.shift)),
                self.define("load_half", place, self._load(self.shift // 2)),
                self.define("store", [*place, f"{self.type} %z"], self._store(), result="void"),
                self.define("add", pair, self._add()),
                self.define("sub", pair, self._sub()),
                self.define("neg", pair[:1], self._neg()),
                self.define("mul", pair, self._mul()),
                self.define("square", pair[:1], self._square()),
                self.define("one_for_zero", pair, self._one_for_zero()),
                self.define("keep_zero", pair, self._keep_zero()),
                self.define("fold", pair[:1], self._fold()),
            )
        )

    # --- packs and limbs ---------------------------------------------------------------------------------------------

    def _limbs(self, body: Body, pack: str) -> list[str]:
        return [body(f"extractvalue {self.type} {pack}, {k}") for k in range(self._count)]

    def _return(self, body: Body, limbs: Sequence[str]) -> None:
        pack = "poison"
        for k, limb in enumerate(limbs):
            pack = body(f"insertvalue {self.type} {pack}, {_V} {limb}, {k}")
        body.do(f"ret {self.type} {pack}")

    def _settle(self, body: Body, less: Sequence[str], more: Sequence[str]) -> None:
        """Return a number `less` between -p and p, or `more` = less + p where it is negative; both as signed columns.

        Both are carried at once, which takes as many instructions as adding p later and half the time.
        """
        carried = [_carried(body, columns) for columns in (less, more)]
        negative = body(f"icmp slt {_V} {carried[0][-1]}, zeroinitializer")
        limbs = [body(f"select <8 x i1> {negative}, {_V} {b}, {_V} {a}") for a, b in zip(*carried, strict=True)]
        self._return(body, [_op(body, "and", limb, _all(_MASK)) for limb in limbs])

    def _minus_modulus(self, body: Body, columns: Sequence[str]) -> list[str]:
        return [_op(body, "sub", column, p) for column, p in zip(columns, self._modulus, strict=True)]

    def _plus_modulus(self, body: Body, columns: Sequence[str]) -> list[str]:
        return [_op(body, "add", column, p) for column, p in zip(columns, self._modulus, strict=True)]

    # --- memory ------------------------------------------------------------------------------------------------------

    def _masks(self, body: Body) -> list[str]:
        """For each of W registers of an array's words, which of its lanes lie before stop."""
        left = body("sub i64 %stop, %i")
        words = body(f"mul i64 {left}, {self._words}")
        single = body(f"insertelement {_V} poison, i64 {words}, i64 0")
        bound = body(f"shufflevector {_V} {single}, {_V} poison, <8 x i32> zeroinitializer")
        return [body(f"icmp sgt {_V} {bound}, {_each(range(8 * j, 8 * j + 8))}") for j in range(self._words)]

    def _places(self, body: Body) -> list[str]:
        first = body(f"getelementptr inbounds [{self._words} x i64], ptr %x, i64 %i")
        return [body(f"getelementptr inbounds i8, ptr {first}, i64 {64 * j}") for j in range(self._words)]

    def _load(self, shift: int) -> Body:
        """Normal, but where shifted: that is for products, which do not look above bit 52."""
        body = Body()
        rows = [
            body(f"call {_V} @llvm.masked.load.v8i64.p0(ptr {at}, i32 8, <8 x i1> {mask}, {_V} zeroinitializer)")
            for at, mask in zip(self._places(body), self._masks(body), strict=True)
        ]
        words = _columns(body, rows)
        limbs = []
        for k in range(self._count):
            low = _BITS * k - shift
            if low < 0:
                limb = _op(body, "shl", words[0], _all(-low))
            elif low % 64 == 0:
                limb = words[low // 64]
            elif low // 64 + 1 == self._words:
                limb = _op(body, "lshr", words[-1], _all(low % 64))
            else:
                a, b = words[low // 64 : low // 64 + 2]
                limb = body(f"call {_V} @llvm.fshr.v8i64({_V} {b}, {_V} {a}, {_V} {_all(low % 64)})")
            limbs.append(limb if shift else _op(body, "and", limb, _all(_MASK)))
        self._return(body, limbs)
        return body

    def _store(self) -> Body:
        body = Body()
        limbs = self._limbs(body, "%z")
        words = []
        for j in range(self._words):
            first = 64 * j // _BITS
            offset = 64 * j - _BITS * first
            word = _op(body, "lshr", limbs[first], _all(offset)) if offset else limbs[first]
            for k in range(first + 1, self._count):
                left = _BITS * k - 64 * j
                if left < 64:
                    word = _op(body, "or", word, _op(body, "shl", limbs[k], _all(left)))
            words.append(word)
        for row, at, mask in zip(_rows(body, words), self._places(body), self._masks(body), strict=True):
            body.do(f"call void @llvm.masked.store.v8i64.p0({_V} {row}, ptr {at}, i32 8, <8 x i1> {mask})")
        body.do("ret void")
        return body

    # --- arithmetic --------------------------------------------------------------------------------------------------

    def _add(self) -> Body:
        body = Body()
        pairs = zip(self._limbs(body, "%x"), self._limbs(body, "%y"), strict=True)
        total = [_op(body, "add", x, y) for x, y in pairs]
        self._settle(body, self._minus_modulus(body, total), total)
        return body

    def _sub(self) -> Body:
        body = Body()
        pairs = zip(self._limbs(body, "%x"), self._limbs(body, "%y"), strict=True)
        difference = [_op(body, "sub", x, y) for x, y in pairs]
        self._settle(body, difference, self._plus_modulus(body, difference))
        return body

    def _neg(self) -> Body:
        body = Body()
        negated = [_op(body, "sub", _all(0), x) for x in self._limbs(body, "%x")]
        self._settle(body, negated, self._plus_modulus(body, negated))
        return body

    def _mul(self) -> Body:
        body = Body()
        xs, ys = self._limbs(body, "%x"), self._limbs(body, "%y")
        columns = [_all(0)] * (2 * self._count)
        for i, y in enumerate(ys):
            for j, x in enumerate(xs):
                _accumulate(body, columns, i + j, x, y)
        self._reduce(body, columns)
        return body

    def _square(self) -> Body:
        body = Body()
        xs = self._limbs(body, "%x")
        columns = [_all(0)] * (2 * self._count)
        for i, y in enumerate(xs):
            for j, x in enumerate(xs[:i]):
                _accumulate(body, columns, i + j, x, y)
        columns = [column if column == _all(0) else _op(body, "add", column, column) for column in columns]
        for i, x in enumerate(xs):
            _accumulate(body, columns, 2 * i, x, x)
        self._reduce(body, columns)
        return body

    def _reduce(self, body: Body, columns: list[str]) -> None:
        """Return (the columns' number) / L mod p, for a number below L p.

        m p makes the low 52 bits of column i zero, so all that it gives the next column is a carry, 1 unless those bits
        were 0 already: no product is needed for it, and it is known before m. The next column decides the next m: what
        two products add to it is kept apart, so that they run at the same time.
        """
        inverse = _all(self.field.montgomery_inverse(_BITS))
        for i in range(self._count):
            factor = _madd(body, "l", _all(0), columns[i], inverse)
            carry = _op(body, "lshr", _op(body, "add", columns[i], _all(_MASK)), _all(_BITS))
            high = _madd(body, "h", _all(0), self._modulus[0], factor)
            columns[i + 1] = _op(body, "add", columns[i + 1], carry)
            for j, p in enumerate(self._modulus[1:], start=1):
                _accumulate(body, columns, i + j, p, factor)
                if j == 1:
                    columns[i + 1] = _op(body, "add", columns[i + 1], high)
        total = columns[self._count :]
        self._settle(body, self._minus_modulus(body, total), total)

    def _is_zero(self, body: Body) -> str:
        limbs = self._limbs(body, "%x")
        some = limbs[0]
        for limb in limbs[1:]:
            some = _op(body, "or", some, limb)
        return body(f"icmp eq {_V} {some}, zeroinitializer")

    def _one_for_zero(self) -> Body:
        body = Body()
        zero = self._is_zero(body)
        pairs = zip(self._limbs(body, "%x"), self._limbs(body, "%y"), strict=True)
        self._return(body, [body(f"select <8 x i1> {zero}, {_V} {y}, {_V} {x}") for x, y in pairs])
        return body

    def _keep_zero(self) -> Body:
        body = Body()
        zero = self._is_zero(body)
        limbs = self._limbs(body, "%y")
        self._return(body, [body(f"select <8 x i1> {zero}, {_V} zeroinitializer, {_V} {y}") for y in limbs])
        return body

    def _fold(self) -> Body:
        body = Body()
        pack = "%x"
        for step in (4, 2, 1):
            turned = "poison"
            for k, limb in enumerate(self._limbs(body, pack)):
                moved = _shuffle(body, limb, limb, [(lane + step) % _LANES for lane in range(_LANES)])
                turned = body(f"insertvalue {self.type} {turned}, {_V} {moved}, {k}")
            pack = self.call(body, "add", pack, turned)
        body.do(f"ret {self.type} {pack}")
        return body


def _all(value: int) -> str:
    return splat("i64", _LANES, value)


def _each(values: Sequence[int], element: str = "i64") -> str:
    return "<" + ", ".join(f"{element} {value}" for value in values) + ">"


def _op(body: Body, name: str, x: str, y: str) -> str:
    return body(f"{name} {_V} {x}, {y}")


def _madd(body: Body, half: str, total: str, x: str, y: str) -> str:
    return body(f"call {_V} @llvm.x86.avx512.vpmadd52{half}.uq.512({_V} {total}, {_V} {x}, {_V} {y})")


def _accumulate(body: Body, columns: list[str], at: int, x: str, y: str) -> None:
    """Add x y to the columns, its low half at `at` and its high half one above."""
    columns[at] = _madd(body, "l", columns[at], x, y)
    columns[at + 1] = _madd(body, "h", columns[at + 1], x, y)


def _carried(body: Body, columns: Sequence[str]) -> list[str]:
    """Columns after carries from one to the next; the limbs are their low 52 bits, the sign is the highest's."""
    carried = [columns[0]]
    for column in columns[1:]:
        carry = _op(body, "ashr", carried[-1], _all(_BITS))
        carried.append(_op(body, "add", column, carry))
    return carried


def _shuffle(body: Body, x: str, y: str, lanes: Sequence[int]) -> str:
    return body(f"shufflevector {_V} {x}, {_V} {y}, <8 x i32> {_each(lanes, 'i32')}")


def _columns(body: Body, rows: Sequence[str]) -> list[str]:
    """From registers of an array's words, in order, to a register of each word of eight elements.

    Two words of an element (a pair) move together first: `_gather` brings the pairs k of four elements into one
    register. Unpacking two such registers then gives words 2 k and 2 k + 1, the elements in the order 0, 4, 1, 5, ...
    """
    words = []
    pairs = len(rows) // 2
    for k in range(pairs):
        low, high = (_gather(body, rows, [pairs * (4 * h + e) + k for e in range(4)]) for h in range(2))
        words.append(_shuffle(body, low, high, [0, 8, 2, 10, 4, 12, 6, 14]))
        words.append(_shuffle(body, low, high, [1, 9, 3, 11, 5, 13, 7, 15]))
    return words


def _rows(body: Body, words: Sequence[str]) -> list[str]:
    """The inverse of _columns."""
    pairs = len(words) // 2
    halves: list[list[str]] = [[], []]
    for k in range(pairs):
        even, odd = words[2 * k : 2 * k + 2]
        halves[0].append(_shuffle(body, even, odd, [0, 8, 2, 10, 4, 12, 6, 14]))
        halves[1].append(_shuffle(body, even, odd, [1, 9, 3, 11, 5, 13, 7, 15]))
    rows = []
    for r in range(2 * pairs):
        elements = [divmod(4 * r + c, pairs) for c in range(4)]
        sources = [halves[element // 4][k] for element, k in elements]
        rows.append(_pick(body, sources, [element % 4 for element, _ in elements]))
    return rows


def _gather(body: Body, rows: Sequence[str], pairs: Sequence[int]) -> str:
    """A register of four pairs, numbered along the rows, four to a row."""
    return _pick(body, [rows[pair // 4] for pair in pairs], [pair % 4 for pair in pairs])


def _pick(body: Body, sources: Sequence[str], places: Sequence[int]) -> str:
    """A register whose pair c is the pair places[c] of sources[c], two or more: a shuffle for each but one."""
    distinct = list(dict.fromkeys(sources))
    picked, done = distinct[0], {c: p for c, p in enumerate(places) if sources[c] == distinct[0]}
    for source in distinct[1:]:
        lanes = []
        for c in range(4):
            pair = 4 + places[c] if sources[c] == source else done.get(c, c)
            lanes += [2 * pair, 2 * pair + 1]
        picked = _shuffle(body, picked, source, lanes)
        done = {c: c for c in range(4)}
    return picked
