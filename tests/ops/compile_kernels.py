"""Run in its own process: compile the kernels of ops for targets and print what came out as JSON.

A separate process, since Triton's functions are decorated either for the compiler or for the interpreter.
Usage: python compile_kernels.py; reads lines "folder every|first target..." and answers each with a line of JSON: every
specialization of a kernel, or only its first one.
"""

import importlib
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")


def tool(name, *arguments, code):
    """What a tool beside Triton's assembler says of a cubin; None where this installation has none."""
    import triton

    path = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    if not path.is_file():
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        done = subprocess.run([str(path), *arguments, file.name], capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else None


def instructions(code):
    """The 16-byte instructions of a cubin's functions, as pairs of little-endian 64-bit words.

    Source: the sections of a 64-bit ELF file; machine code stands in those named ".text.<function>".
    """
    (table,) = struct.unpack_from("<Q", code, 40)
    entry, count, names = struct.unpack_from("<3H", code, 58)
    sections = [struct.unpack_from("<IIQQQQ", code, table + i * entry) for i in range(count)]
    strings = sections[names][4]
    for name, _, _, _, start, size in sections:
        if code[strings + name :].startswith(b".text."):
            yield from struct.iter_unpack("<2Q", code[start : start + size])


AMD_TARGETS = ("gfx90a", "gfx942", "gfx1100")
"""MI200 and MI300, with waves of 64 threads, and RDNA 3, with waves of 32; every kernel of Triton compiles for them."""

LOADS = (0x981, 0xFAE)
"""The lowest 12 bits of LDG and LDGSTS (a copy into shared memory) on sm_90."""

SIXTEEN_BYTES = 6
"""What such an instruction has in bits 73 to 75 where it loads 16 bytes a thread."""


def wide_loads(code):
    """Loads of 16 bytes from global memory, read off the instructions: nvdisasm takes 0.7 s for each cubin."""
    return sum(low & 0xFFF in LOADS and high >> 9 & 7 == SIXTEEN_BYTES for low, high in instructions(code))


def check_decoding(code):
    """Fail where nvdisasm sees other loads of 16 bytes in a cubin."""
    text = tool("nvdisasm", code=code)
    if text is not None:
        seen = len(re.findall(r"LD(?:G|GSTS)\.E\S*\.128", text))
        if seen != wide_loads(code):
            raise SystemExit(f"nvdisasm sees {seen} loads of 16 bytes, this decoding {wide_loads(code)}")


checked = []
"""The kernel whose loads nvdisasm counted too."""


def report(compilation, target):
    row = {"kernel": compilation.name, "target": target, "error": "", "stack_bytes": None, "wide_loads": None}
    try:
        source = compilation.source()
        binary = source.dialects["triton"].build(target)
    except Exception as error:
        return {**row, "error": f"{type(error).__name__}: {error}"[:2000]}
    row["code_bytes"], row["threads"] = len(binary.code), binary.metadata["threads"]
    row["warps"] = compilation.num_warps
    if target == "sm_90":
        text = tool("cuobjdump", "-res-usage", code=binary.code)
        stack = re.search(r"STACK:(\d+)", text or "")
        row["stack_bytes"] = int(stack.group(1)) if stack else None
        registers = re.search(r"REG:(\d+)", text or "")
        row["registers"] = int(registers.group(1)) if registers else None
        row["wide_loads"] = wide_loads(binary.code)
        if row["wide_loads"] and not checked:
            checked.append(compilation.name)
            check_decoding(binary.code)
    return row


def compile_all(op, every, targets):
    cases = importlib.import_module("leaky_relu.cases" if op == "leaky_relu" else f"accelerant.ops.{op}.cases")
    rows = []
    for target in targets:
        seen = set()
        for compilation in cases.KERNELS:
            if target not in (*compilation.kernel.targets, *AMD_TARGETS):
                continue
            if every or compilation.kernel.name not in seen:
                rows.append(report(compilation, target))
            seen.add(compilation.kernel.name)
    return rows


def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints, an assembler included, stands apart from the answers
    for line in sys.stdin:
        op, which, *targets = line.split()
        print(json.dumps(compile_all(op, which == "every", targets)), file=answers, flush=True)


if __name__ == "__main__":
    main()
