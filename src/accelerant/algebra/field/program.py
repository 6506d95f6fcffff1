"""A field's programs, assembled from its constants and the C and WGSL files of this folder.

Two C dialects share the kernels (kernel.c) and the elements (limbs.h; word.h with goldilocks.h, mersenne61.h or
babybear.h):

    portable   arithmetic in C (limbs_c.h): CUDA, HIP and OpenCL
    cuda       for fields of several limbs: NVIDIA's carry chains behind the same names (limbs_ptx.h, ptx.py)

FIELD in a file is replaced by a prefix, so that one program can contain several fields. WGSL has field.wgsl.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from accelerant.algebra.field.llvm_kernels import ENTRIES, field_kernels
from accelerant.algebra.field.parameters import Field, field_of
from accelerant.algebra.field.ptx import ptx_macros
from accelerant.errors import ConfigError
from accelerant.runtime.compilation.kernel import Builder, KernelSource, LazyDialects, portable_header, sources_hash
from accelerant.runtime.compilation.wgsl import bindings, constants, elementwise, words

BLOCK = 256
"""Most threads per block in the C dialects; a power of two."""

INVERSES = 16
"""Elements that a thread inverts together in the C dialects: about (3 * 16 + 380) / 16 multiplies each for 254 bits,
and 2^20 elements still give 65,536 threads."""

_FOLDER = "algebra/field"
_PACKAGE = Path(__file__).parents[2]
_BY_CHUNK = ("field_sum", "field_dot", "field_dot_montgomery", "field_unreduced")
_BY_SEVERAL = ("field_inv", "field_inv_montgomery")


def entries(field: Field) -> dict[str, tuple[str, ...]]:
    """Return each entry point, as llvm_kernels.py defines them, and the types of its arguments.

    Elements are canonical, or x R mod p in "montgomery" entries. Exponents are public, in 64-bit words.
    """
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


_SPECIAL = {2**64 - 2**32 + 1: "goldilocks.h", 2**61 - 1: "mersenne61.h"}
"""Moduli by whose form products are reduced, with the modulus in the file."""


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


# --- WGSL -------------------------------------------------------------------------------------------------------------

_HEAD = """
@compute @workgroup_size(BLOCK_X)
fn {entry}(
    @builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32
) {{
{body}}}
"""

_MAP = """\
    let i = i32(linear_group(group, groups) * BLOCK_X + thread);
    if (i < scalars.n) {{
        {guarded}
    }}
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
}
"""Entry -> the value of element i."""

_INVERT = "    invert(linear_group(group, groups), thread, scalars.n, {canonical});\n"

_SUM = """\
    let block = i32(linear_group(group, groups));
    let first = block * scalars.chunk;
    var sum = zero();
    for (var i = first + i32(thread); i < min(first + scalars.chunk, scalars.n); i += i32(BLOCK_X)) {{
        sum = add(sum, {term});
    }}
    fold(thread, sum);
    if (thread == 0u && first < scalars.n) {{
        store_partial(block, {result});
    }}
"""

_UNREDUCED = """\
    let block = i32(linear_group(group, groups));
    let start = block * scalars.chunk;
    var least = scalars.n;
    let end = min(start + scalars.chunk, scalars.n);
    for (var i = start + i32(thread); i < end && least == scalars.n; i += i32(BLOCK_X)) {
        least = select(i, scalars.n, is_reduced(load_x(i)));
    }
    indices[thread] = least;
    for (var width = BLOCK_X / 2u; width > 0u; width /= 2u) {
        workgroupBarrier();
        if (thread < width) {
            least = min(least, indices[thread + width]);
            indices[thread] = least;
        }
    }
    if (thread == 0u && start < scalars.n) {
        first[2 * block] = u32(least);
        first[2 * block + 1] = 0u;
    }
"""
"""Indices are i64 in memory."""

_BODIES = {name: _MAP.format(guarded=f"store_z(i, {value});") for name, value in _MAPS.items()} | {
    "field_inv": _INVERT.format(canonical="true"),
    "field_inv_montgomery": _INVERT.format(canonical="false"),
    "field_sum": _SUM.format(term="load_x(i)", result="unpacked(tile[0])"),
    "field_dot": _SUM.format(term="mul(load_x(i), load_y(i))", result="to_montgomery(unpacked(tile[0]))"),
    "field_dot_montgomery": _SUM.format(term="mul(load_x(i), load_y(i))", result="unpacked(tile[0])"),
    "field_unreduced": _UNREDUCED,
}


@functools.cache
def _file(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def field_wgsl(field: Field, canonical: bool) -> str:
    """Return a field's arithmetic; `canonical` where montgomery_radix(field) is 1."""
    digits = field.limbs * field.word_bits // 16
    radix = 1 << 16 * digits

    def limbs_of(value: int) -> tuple[int, ...]:
        return field.words(value % radix, 16, digits)

    head: dict[str, int | bool | Sequence[int]] = {
        "DIGITS": digits,
        "CANONICAL": canonical,
        "MODULUS": limbs_of(field.modulus),
        "R1": limbs_of(radix % field.modulus),
        "R2": limbs_of(radix**2 % field.modulus),
    }
    inverse = f"const INVERSE: u32 = {field.montgomery_inverse(16):#x}u;\n"
    return constants(head) + inverse + _file("field.wgsl")


def accessors(name: str) -> str:
    """Return functions that load and store elements of an array of words."""
    return f"""
{words(name)}
fn load_{name}(index: i32) -> Element {{
    var words: Packed;
    for (var k = 0; k < DIGITS / 2; k++) {{
        words[k] = word_{name}(index * (DIGITS / 2) + k);
    }}
    return unpacked(words);
}}

fn store_{name}(index: i32, value: Element) {{
    var words = packed(value);
    for (var k = 0; k < DIGITS / 2; k++) {{
        set_word_{name}(index * (DIGITS / 2) + k, words[k]);
    }}
}}
"""


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
            _HEAD.format(entry=entry, body=_BODIES[entry]),
        ]
    )


_NUMBERS = ("n", "chunk", "bits")
_PARTS = {"pow": "power.wgsl", "inv": "invert.wgsl", "sum": "fold.wgsl", "dot": "fold.wgsl"}
"""Part of an entry's name -> the file that it needs."""
