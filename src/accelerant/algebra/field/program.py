"""A field's programs, assembled from its constants and the C and WGSL files of this folder.

Two C dialects share the kernels (kernel.c) and the elements (limbs.h; word.h with goldilocks.h, mersenne61.h or
babybear.h):

    portable   arithmetic in C (limbs_c.h): CUDA, HIP and OpenCL
    cuda       for fields of several limbs: NVIDIA's carry chains behind the same names (limbs_ptx.h)

FIELD in a file is replaced by a prefix, so that one program can contain several fields. WGSL has field.wgsl.

Carry chains in PTX are unrolled for a field's number of limbs. A product is split into two sums of 32-bit limbs, *even*
and *odd*: x_j y_i is added to the even one if j is even, else to the odd one, which is one limb higher. So the 64-bit
products of a row follow one another without overlap, the whole row is one carry chain, and a pair mad.lo.cc, madc.hi.cc
of the same factors becomes one wide multiply-add with carry. After a row x y_i and a row m p the lowest limb is 0.
Shifting by that limb swaps the sums: the odd one becomes the next row's even one, after the even one's second limb is
added to it; the carry enters the next row's first chain.

With n limbs and p < 2^(32 n - 1) the sum stays below 2 p 2^32 (see limbs_c.h), so that n + 1 limbs hold it and no chain
but the even one carries out. Multiply: 2 n^2 wide multiply-adds and n low products; square: n (n + 1) / 2 + n^2, and n.
A sum of two products has two such rows before each m p, 3 n^2 and n in all: below 3 p 2^32, with p < 2^(32 n - 2).

A product x w by a constant, for which v = floor(w R / p) is known, needs no m: it is the lower half of x w - q p, with
q the upper half of x v. q is computed without the products x_j v_i of i + j < n - 2, so that x w - q p is below
(1 + x / R + 2^-28) p. In the lower half products at limb n - 1 are low ones. For n = 8: 99 wide and 16 low products.

Source: Koc, Acar and Kaliski 1996, IEEE Micro 16(3), "CIOS", for the rows; Shoup's product by a constant as in Harvey
2014, J. Symbolic Computation 60.
"""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from accelerant.algebra.field.llvm_kernels import ENTRIES, field_kernels
from accelerant.algebra.field.parameters import Field, field_of
from accelerant.errors import ConfigError
from accelerant.runtime.compilation.kernel import (
    Builder,
    KernelSource,
    LazyDialects,
    bindings,
    constants,
    elementwise,
    portable_header,
    sources_hash,
    words,
)

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


# --- A field's programs, assembled from its constants and the C and WGSL files of this folder ------------------------
BLOCK = 256  # Most threads per block in the C dialects; a power of two
INVERSES = 16  # elements that a thread inverts together in the C dialects: 2^20 still fill a device

_FOLDER = "algebra/field"
_PACKAGE = Path(__file__).parents[2]
_BY_CHUNK = ("field_sum", "field_dot", "field_dot_montgomery", "field_unreduced")
_BY_SEVERAL = ("field_inv", "field_inv_montgomery")


def entries(field: Field) -> dict[str, tuple[str, ...]]:
    """Return each entry point and its arguments' types; "montgomery" ones take x R mod p, exponents are public."""
    types = dict.fromkeys(("x", "y", "z", "partial"), f"*u{field.word_bits}") | {"exponent": "*u64", "first": "*i64"}
    return {f"field_{name}": tuple(types.get(a, "i64") for a in arguments) for name, (arguments, _) in ENTRIES.items()}


@dataclass(frozen=True, slots=True)
class CudaProgram:
    """A Builder of CUDA C++ that is written to be compiled; it depends on `arguments` and sources in `folders`."""

    arguments: str
    folders: tuple[str, ...]
    write: Callable[[], str]

    @property
    def key(self) -> str:
        """The arguments, and the hash of the sources."""
        hashes = (sources_hash(folder, endings=(".py", ".c", ".h")) for folder in self.folders)
        return " ".join((self.arguments, *hashes, portable_header()))

    def build(self, target: str) -> str:
        """Return the text, the same for each target."""
        return f"{portable_header()}\n{self.write()}"


@functools.cache
def montgomery_radix(field: Field) -> int:
    """Return R of the Montgomery form x R mod p; 1 for fields whose products need no such form."""
    return 1 if _is_special(field) else 1 << field.limbs * field.word_bits


@functools.cache
def kernel_source(field: Field, entry: str | None = None, checked: bool = False) -> KernelSource:
    """Return the field's functions on arrays, or only one of entries(field), which then also has the dialect "wgsl".

    ConfigError for an unknown entry. `checked`, for elementwise entries in C: a word follows the pointers, which is set
    to 1 where an element read is not below the modulus.
    """
    known = entries(field)
    if entry is not None and entry not in known:
        raise ConfigError(f"{field.name} has no entry {entry!r}; it has {', '.join(known)}")
    makers: dict[str, Callable[[], str | Builder]] = {"portable": lambda: _kernels(field, "portable", entry, checked)}
    if not checked:
        makers["llvm"] = lambda: field_kernels(field.name, entry or "")
    if not checked and entry is not None:
        names, canonical = ENTRIES[entry.removeprefix("field_")][0], montgomery_radix(field) == 1
        makers["wgsl"] = lambda: kernel_wgsl(field, canonical, entry, names, INVERSES)
    if field.limbs > 1:
        write = functools.partial(_kernels, field, "cuda", entry, checked)
        makers["cuda"] = lambda: CudaProgram(f"{field} {entry}{' checked' * checked}", (_FOLDER,), write)
    kept = known if entry is None else {entry: known[entry]}
    if checked:
        kept = {name: (*kinds[:-1], "*u32", kinds[-1]) for name, kinds in kept.items()}
    name = f"{entry or 'field'}{'_checked' * checked}_{field.name}"
    return KernelSource(name=name, dialects=LazyDialects(**makers), entries=kept)


@functools.cache
def field_add_source() -> KernelSource:
    """Return the sum in Goldilocks in every dialect: the kernel that conformance tests and `doctor` run."""
    return replace(kernel_source(field_of("goldilocks"), "field_add"), name="field_add")


def grid_and_block(entry: str, n: int, chunk: int = 1) -> tuple[int, int]:
    """Return blocks and threads per block of an entry of the C dialects, for n > 0 elements in chunks of `chunk`."""
    if entry in _BY_CHUNK:
        return -(-n // chunk), BLOCK
    return -(-n // (BLOCK * (INVERSES if entry in _BY_SEVERAL else 1))), BLOCK


def field_text(field: Field, prefix: str, dialect: str) -> str:
    """Return a field's elements and arithmetic in dialect "portable" or "cuda", to follow portable.h.

    The prefix is the type of an element, and begins the names of its functions: PREFIX_add, _sub, _mul, _square (in
    Montgomery form), _zero, _one, _is_zero, _is_reduced, _select, _to_montgomery, _from_montgomery, _load, _store. No
    other prefix in the program may begin with it. ConfigError for a modulus without a spare bit in 32 bits or an even
    number of words.
    """
    if dialect not in ("portable", "cuda"):
        raise ConfigError(f"field_text knows the dialects portable and cuda, got {dialect!r}")
    macros = ""
    if field.limbs == 1:
        files = [_SPECIAL.get(field.modulus, "babybear.h"), "word.h"]
    elif dialect == "cuda":
        files, macros = ["limbs.h", "limbs_ptx.h"], ptx_macros(field, prefix)
    else:
        files = ["limbs.h", "limbs_c.h"]
    return prefixed(_constants(field), FIELD=prefix) + macros + prefixed(read_files(_FOLDER, *files), FIELD=prefix)


def read_files(folder: str, *names: str) -> str:
    """Return the concatenated files of a folder of the package: "algebra/field"."""
    return "".join((_PACKAGE / folder / name).read_text(encoding="utf-8") for name in names)


def prefixed(text: str, **prefixes: str) -> str:
    """Replace some names, as words or before an underscore, by prefixes: FIELD_add by fq_add with FIELD="fq"."""
    return re.sub(rf"\b({'|'.join(prefixes)})(?=_|\b)", lambda match: prefixes[match[1]], text)


def defined(values: Mapping[str, int | str]) -> str:
    """Return a macro for each name."""
    return "".join(f"#define {name} {value}\n" for name, value in values.items())


_SPECIAL = {2**64 - 2**32 + 1: "goldilocks.h", 2**61 - 1: "mersenne61.h"}  # whose form reduces products


def _is_special(field: Field) -> bool:
    return field.modulus in _SPECIAL


_ENTRY = re.compile(
    r"^(?:FIELD_MAP2?\((?P<map>\w+), .*\)|ACL_KERNEL void (?P<kernel>\w+)\([^{]*\{\n(?:.*\n)*?\})\n", re.MULTILINE
)


def _kernels(field: Field, dialect: str, entry: str | None, checked: bool) -> str:
    """Return the field and its kernels, or one of them, under the field's name."""

    def select(match: re.Match[str]) -> str:
        return match[0] if entry in (None, match["map"], match["kernel"]) else ""

    sizes: dict[str, int | str] = {
        "FIELD_BLOCK": BLOCK,
        "FIELD_VERDICT": "ACL_GLOBAL u32 *verdict," if checked else "",
        "FIELD_JUDGE(reduced)": "if (!(reduced)) { *verdict = 1; }" if checked else "",
        "FIELD_INVERSES": INVERSES,
        "FIELD_BITS": field.bits,
        "FIELD_P_MINUS_2": _hexadecimal(field.words(field.modulus - 2, 64, -(-field.bits // 64)), "UL"),
    }
    kernels = defined(sizes) + _ENTRY.sub(select, read_files(_FOLDER, "kernel.c"))
    return field_text(field, field.name, dialect) + prefixed(kernels, FIELD=field.name)


def _constants(field: Field) -> str:
    """Return the macros of the field's header; none where the modulus is in the reduction."""
    if _is_special(field):
        return ""
    limbs = field.limbs * field.word_bits // 32
    if field.bits >= 32 * limbs or (limbs > 1 and limbs % 4):
        raise ConfigError(
            f"{field.name}: the C kernels are for moduli with a spare bit in 32 bits or in an even number of 64-bit "
            f"words, got {field.bits} bits"
        )
    radix = montgomery_radix(field)

    def limbs_of(value: int) -> str:
        return _hexadecimal(field.words(value, 32, limbs), "U")

    return defined(
        {
            "FIELD_LIMBS": limbs,
            "FIELD_INVERSE": _hexadecimal((field.montgomery_inverse(32),), "U"),
            "FIELD_MODULUS": limbs_of(field.modulus),
            "FIELD_ONE": limbs_of(radix % field.modulus),
            "FIELD_R2": limbs_of(radix**2 % field.modulus),
        }
    )


def _hexadecimal(words: tuple[int, ...], suffix: str) -> str:
    return ", ".join(f"0x{word:x}{suffix}" for word in words)


# --- WGSL ------------------------------------------------------------------------------------------------------------
_HEAD = """
@compute @workgroup_size(BLOCK_X)
fn {entry}(
    @builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32
) {{
{body}}}
"""

_MAPS = {
    "field_add": "add(load_x(i), load_y(i))",
    "field_sub": "sub(load_x(i), load_y(i))",
    "field_mul": "to_montgomery(mul(load_x(i), load_y(i)))",
    "field_mul_montgomery": "mul(load_x(i), load_y(i))",
    "field_neg": "sub(zero(), load_x(i))",
    "field_square": "to_montgomery(mul(load_x(i), load_x(i)))",
    "field_square_montgomery": "mul(load_x(i), load_x(i))",
    "field_to_montgomery": "to_montgomery(load_x(i))",
    "field_from_montgomery": "from_montgomery(load_x(i))",
    "field_reduce": "from_montgomery(to_montgomery(load_x(i)))",
    "field_pow": "from_montgomery(power(to_montgomery(load_x(i)), scalars.bits))",
    "field_pow_montgomery": "power(load_x(i), scalars.bits)",
}  # Entry -> the value of element i
_SUMS = {
    "field_sum": ("load_x(i)", "unpacked(tile[0])"),
    "field_dot": ("mul(load_x(i), load_y(i))", "to_montgomery(unpacked(tile[0]))"),
    "field_dot_montgomery": ("mul(load_x(i), load_y(i))", "unpacked(tile[0])"),
}  # Entry -> a term, and the element of the sum


@functools.cache
def _file(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def _body(entry: str) -> str:
    """Return the statements of an entry point."""
    if entry in _MAPS:
        stored = f"    if (i < scalars.n) {{\n        store_z(i, {_MAPS[entry]});\n    }}\n"
        return "    let i = i32(linear_group(group, groups) * BLOCK_X + thread);\n" + stored
    if entry in _SUMS:
        return prefixed(_file("sum.wgsl"), **dict(zip(("TERM", "RESULT"), _SUMS[entry], strict=True)))
    if entry == "field_unreduced":  # its indices are i64 in memory
        return _file("unreduced.wgsl")
    return f"    invert(linear_group(group, groups), thread, scalars.n, {str(entry == 'field_inv').lower()});\n"


def field_wgsl(field: Field, canonical: bool) -> str:
    """Return a field's arithmetic; `canonical` where montgomery_radix(field) is 1."""
    digits = field.limbs * field.word_bits // 16
    radix = 1 << 16 * digits

    def limbs_of(value: int) -> tuple[int, ...]:
        return field.words(value % radix, 16, digits)

    head: dict[str, int | bool | Sequence[int]] = {
        "DIGITS": digits, "CANONICAL": canonical, "MODULUS": limbs_of(field.modulus),
        "R1": limbs_of(radix % field.modulus), "R2": limbs_of(radix**2 % field.modulus),
    }  # fmt: skip
    inverse = f"const INVERSE: u32 = {field.montgomery_inverse(16):#x}u;\n"
    return constants(head) + inverse + _file("field.wgsl")


def accessors(name: str) -> str:
    """Return functions that load and store elements of an array of words."""
    return f"\n{words(name)}\n" + _file("accessors.wgsl").replace("NAME", name)


def kernel_wgsl(field: Field, canonical: bool, entry: str, names: tuple[str, ...], inverses: int) -> str:
    """Return the module of one entry, whose arguments, arrays first, have these names; a thread has `inverses`."""
    arrays = [name for name in names if name not in _NUMBERS]
    simple = entry in _MAPS and "exponent" not in arrays
    exponent = field.words(field.modulus - 2, 32, -(-field.bits // 32))
    return "".join(
        [
            elementwise(*[field.size_bytes] * len(arrays)) if simple else "",
            bindings(dict.fromkeys(arrays, "u32"), {name: "i64" for name in names if name in _NUMBERS}),
            field_wgsl(field, canonical),
            *(accessors(name) for name in arrays if name not in ("exponent", "first")),
            "var<workgroup> indices: array<i32, 256>;\n" if entry == "field_unreduced" else "",
            *(_file(name) for part, name in _PARTS.items() if part in entry),
            constants({"INVERSES": inverses, "BITS": field.bits, "P_MINUS_2": exponent}) if "inv" in entry else "",
            _HEAD.format(entry=entry, body=_body(entry)),
        ]
    )


_NUMBERS = ("n", "chunk", "bits")
_PARTS = {"pow": "power.wgsl", "inv": "invert.wgsl", "sum": "fold.wgsl", "dot": "fold.wgsl"}
"""Part of an entry's name -> the file that it needs."""
