"""Bounds of a user's kernel, checked under the setting `debug`: its text with an index check in each access.

    y[i] = x[i + 1];    becomes    y[acl_checked(i, bytes of y / sizeof(*y), 1, line, report)] = x[acl_checked(...)];

An index out of bounds is replaced by 0, and the first one is written to the report. The bytes of each array and the
report are hidden arguments at the end.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from accelerant.errors import BoundsError
from accelerant.runtime.compilation.kernel import KernelSource, first_line
from accelerant.runtime.compilation.signatures import Parameter, closing_at, find_kernels, without_comments

REPORT_BYTES = 256
"""Bytes of the report, and of the memory of an array without elements."""

_CHECK = (
    "{head} acl_wide acl_checked(acl_wide index, acl_wide length, int argument, int line, {report} *report) {{ "
    "if (index >= 0 && index < length) return index; "
    "if ({add}(report, 1u) == 0) {{ report[1] = argument; report[2] = line; "
    "report[4] = ({word})index; report[5] = ({word})(index >> 32); "
    "report[6] = ({word})length; report[7] = ({word})(length >> 32); }} return 0; }}"
)
_WORDS = {
    "portable": ("long long", "ACL_GLOBAL u32", "u32", "ACL_DEVICE", "acl_atomic_add_u32"),
    "cuda": ("long long", "unsigned", "unsigned", "static __device__", "atomicAdd"),
    "opencl": ("long", "__global uint", "uint", "static", "atomic_add"),
}
"""Dialect -> a 64-bit integer, an element of the report, a 32-bit word, a function's head, an atomic sum."""


def checked_source(source: KernelSource, dialect: str, parameters: Sequence[Parameter]) -> KernelSource | None:
    """Return the kernel with its accesses checked; None where its definition is not found in the text.

    Its hidden arguments are an i64 for each pointer, the bytes of the array, and a pointer to REPORT_BYTES of zeros.
    """
    ((entry, kinds),) = source.entries.items()
    text = source.dialects[dialect]
    assert isinstance(text, str)
    matching = [each for each in find_kernels(text, dialect) if each.name == entry.partition("<")[0]]
    if len(matching) != 1 or any(each.name.startswith("argument ") for each in parameters):
        return None
    plain, (start, end) = without_comments(text), matching[0].body
    closing = re.compile(r"\)\s*(?:__\w+\s*\(\(.*?\)\)\s*)*\Z", re.DOTALL).search(plain, 0, start)
    if closing is None:
        return None
    wide, report, word, head, add = _WORDS[dialect]
    if dialect == "portable":
        wide = "i64"
    pointers = [i for i, each in enumerate(parameters) if each.kind.startswith("*")]
    hidden = "".join(f", {wide} acl_bytes_{i}" for i in pointers) + f", {report} *acl_report"
    inserted = [(closing.start(), hidden)]
    for i in pointers:
        name = parameters[i].name
        size = "1" if parameters[i].kind == "*void" else f"sizeof(*{name})"
        for access in re.compile(rf"(?<![\w.>]){name}\s*\[").finditer(plain, start, end):
            inserted.append((access.end(), "acl_checked((acl_wide)("))
            rest = f"), acl_bytes_{i} / (acl_wide){size}, {i}, __LINE__, acl_report)"
            inserted.append((closing_at(plain, access.end(), "[]"), rest))
    for position, addition in sorted(inserted, reverse=True):
        text = text[:position] + addition + text[position:]
    check = _CHECK.format(head=head, report=report, word=word, add=add)
    line = "#line 1\n" if dialect == "opencl" else f"{first_line(source.name)}\n"
    kinds = (*kinds, *("i64" for _ in pointers), "*u32")
    program = f"typedef {wide} acl_wide;\n{check}\n{line}{text}"
    return replace(source, name=f"{source.name} (checked)", dialects={dialect: program}, entries={entry: kinds})


def raise_if_out_of_bounds(report: npt.NDArray[np.uint8], kernel: str, parameters: Sequence[Parameter]) -> None:
    """Raise BoundsError for the first access out of bounds in the report of a launch."""
    words = report.view(np.uint32)
    if not words[0]:
        return
    i, line = int(words[1]), int(words[2])
    index, length = words[4:8].view(np.int64).tolist()
    more = f", and {int(words[0]) - 1} more accesses are" if words[0] > 1 else ""
    where = f"kernel {kernel!r}, line {line}, argument {i} ({parameters[i].name})"
    raise BoundsError(f"{where}: index {index} is out of bounds of {length} elements{more}; the results are wrong")
