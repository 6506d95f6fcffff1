"""Run in its own process: compile an op's kernels for targets and print what came out as JSON.

A separate process, since Triton's functions are decorated either for the compiler or for the interpreter.
Usage: python compile_kernels.py OP TARGET... ; the target sm_90 compiles every specialisation, the others one a kernel.
"""

import importlib
import json
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")


def disassembled(code):
    """What cuobjdump says of a cubin; None where this installation of Triton has none."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.is_file():
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        done = subprocess.run([str(tool), "-res-usage", "-sass", file.name], capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else None


def report(compilation, target):
    row = {"kernel": compilation.name, "target": target, "error": "", "stack_bytes": None, "wide_loads": None}
    try:
        source = compilation.source()
        binary = source.dialects["triton"].build(target)
    except Exception as error:
        return {**row, "error": f"{type(error).__name__}: {error}"[:2000]}
    row["code_bytes"] = len(binary.code)
    if target == "sm_90":
        text = disassembled(binary.code)
        stack = re.search(r"STACK:(\d+)", text or "")
        row["stack_bytes"] = int(stack.group(1)) if stack else None
        registers = re.search(r"REG:(\d+)", text or "")
        row["registers"] = int(registers.group(1)) if registers else None
        row["wide_loads"] = None if text is None else len(re.findall(r"LD(?:G|GSTS)\.E\S*\.128", text))
    return row


def main(op, *targets):
    cases = importlib.import_module(f"accelerant.ops.{op}.cases")
    rows = []
    for target in targets:
        seen = set()
        for compilation in cases.KERNELS:
            if target not in (*compilation.kernel.targets, "gfx942"):
                continue
            if target == "sm_90" or compilation.kernel.name not in seen:
                rows.append(report(compilation, target))
            seen.add(compilation.kernel.name)
    print(json.dumps(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
