"""The declarations of a WGSL module that runtime/providers/webgpu.py launches."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence

_TYPES = {"f32": "f32", "bool": "u32", **dict.fromkeys(("i8", "i16", "i32", "i64"), "i32")}
_TYPES |= dict.fromkeys(("u8", "u16", "u32", "u64"), "u32")


def bindings(arrays: Mapping[str, str], scalars: Mapping[str, str]) -> str:
    """Declare arrays by the type of an element ("f32", "vec4<f32>"), and `scalars.NAME` for each scalar, of 32 bits."""
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


_BINDING = re.compile(r"@group\(0\) @binding\(\d+\) var<(.*)> (\w+): (.*);")


def words(name: str) -> str:
    """Declare `word_NAME(i)` and `set_word_NAME(i, word)` of an array of u32, which `windowed` can replace."""
    return (
        f"fn word_{name}(i: i32) -> u32 {{ return {name}[i]; }}\n"
        f"fn set_word_{name}(i: i32, word: u32) {{ {name}[i] = word; }}\n"
    )


def windowed(text: str, counts: Sequence[int], log_words: int) -> str | None:
    """Return the module with arrays bound as windows of 2^log_words words; None if one of several lacks `words`."""
    names = [match[2] for match in _BINDING.finditer(text) if match[1].startswith("storage")]
    windows = dict(zip(names, counts, strict=True))
    number = itertools.count()

    def bound(match: re.Match[str]) -> str:
        count = windows.get(match[2], 1)
        parts = [match[2]] if count == 1 else [f"{match[2]}_{k}" for k in range(count)]
        return "\n".join(f"@group(0) @binding({next(number)}) var<{match[1]}> {part}: {match[3]};" for part in parts)

    text = _BINDING.sub(bound, text)
    for name, count in windows.items():
        if count == 1:
            continue
        if words(name) not in text:
            return None
        at = f"i & {(1 << log_words) - 1}"
        labels = [*(f"case {k}" for k in range(count - 1)), "default"]
        read = " ".join(f"{label}: {{ word = {name}_{k}[{at}]; }}" for k, label in enumerate(labels))
        write = " ".join(f"{label}: {{ {name}_{k}[{at}] = word; }}" for k, label in enumerate(labels))
        chosen = f"switch (i >> {log_words}u)"
        text = text.replace(
            words(name),
            f"fn word_{name}(i: i32) -> u32 {{ var word = 0u; {chosen} {{ {read} }} return word; }}\n"
            f"fn set_word_{name}(i: i32, word: u32) {{ {chosen} {{ {write} }} }}\n",
        )
    return text
