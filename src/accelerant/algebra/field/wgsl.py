"""A field's programs in WGSL: field.wgsl with the field's constants, and kernel.c's entries over it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

from accelerant.algebra.field.parameters import Field
from accelerant.runtime.compilation.wgsl import bindings, constants, elementwise, words

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
    """Return the module of one entry of a field.

    Args:
        canonical: see field_wgsl.
        names: the entry's arguments, arrays first.
        inverses: elements that a thread inverts together.
    """
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
