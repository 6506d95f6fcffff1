"""The declarations of a WGSL module that runtime/providers/webgpu.py launches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["bindings", "constants", "elementwise"]

_TYPES = {"f32": "f32", "bool": "u32", **dict.fromkeys(("i8", "i16", "i32", "i64"), "i32")}
_TYPES |= dict.fromkeys(("u8", "u16", "u32", "u64"), "u32")


def bindings(arrays: Mapping[str, str], scalars: Mapping[str, str]) -> str:
    """Declare arrays, and `scalars.NAME` for each scalar.

    Args:
        arrays: name -> type of an element: "f32", "u32", "vec4<f32>".
        scalars: name -> type, as in KernelSource.entries. All arrive as 32 bits.
    """
    lines = [
        f"@group(0) @binding({i}) var<storage, read_write> {name}: array<{kind}>;"
        for i, (name, kind) in enumerate(arrays.items())
    ]
    if scalars:
        members = ", ".join(f"{name}: {_TYPES[kind]}" for name, kind in scalars.items())
        lines.append(f"struct Scalars {{ {members} }}")
        lines.append(f"@group(0) @binding({len(arrays)}) var<uniform> scalars: Scalars;")
    return "".join(f"{line}\n" for line in lines) + _INDEX


_INDEX = """\
override BLOCK_X: u32 = 256u;

fn linear_group(group: vec3<u32>, groups: vec3<u32>) -> u32 {
    return group.x + group.y * groups.x;
}
"""
"""The threads of a block, and the number of a block in a grid of one dimension, which may be folded into two."""


def constants(values: Mapping[str, int | bool | Sequence[int]]) -> str:
    """Declare numbers as i32, truth values as bool, and sequences of numbers as arrays of u32."""
    lines = []
    for name, value in values.items():
        if isinstance(value, bool):
            lines.append(f"const {name}: bool = {str(value).lower()};")
        elif isinstance(value, int):
            lines.append(f"const {name}: i32 = {value};")
        else:
            words = ", ".join(f"{word:#x}u" for word in value)
            # a variable: not every compiler of WGSL takes an index that is no constant into an array that is one
            lines.append(f"var<private> {name}: array<u32, {len(value)}> = array<u32, {len(value)}>({words});")
    return "".join(f"{line}\n" for line in lines)


def elementwise(*element_bytes: int) -> str:
    """Declare that elements do not depend on one another, with the bytes of one of each array."""
    return f"//! elementwise {' '.join(map(str, element_bytes))}\n"
