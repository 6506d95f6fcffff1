"""NVIDIA's carry chains on Python integers: the instructions of an asm statement, one after the other.

Source: PTX ISA, "Extended-Precision Integer Arithmetic Instructions"; .cc sets the flag, addc, subc, madc read it.
"""

import re

WORD = 2**32 - 1

SEMANTICS = {
    "mov": lambda v, product, carry: v[0],
    "and": lambda v, product, carry: v[0] & v[1],
    "shl": lambda v, product, carry: v[0] << v[1] & WORD,
    "shf": lambda v, product, carry: (v[1] << 32 | v[0]) << v[2] >> 32 & WORD,
    "selp": lambda v, product, carry: v[0] if v[2] else v[1],
    "setp": lambda v, product, carry: int(v[0] != v[1]),
    "mul": lambda v, product, carry: product,
    "mad": lambda v, product, carry: product + v[2],
    "madc": lambda v, product, carry: product + v[2] + carry,
    "add": lambda v, product, carry: v[0] + v[1],
    "addc": lambda v, product, carry: v[0] + v[1] + carry,
    "sub": lambda v, product, carry: v[0] - v[1],
    "subc": lambda v, product, carry: v[0] - v[1] - carry,
}
"""An instruction -> its result before it is cut to 32 bits."""


def parsed(text):
    """[operation, operands...] of each instruction; a pair of registers in braces is one operand."""
    lines = [line.split(None, 1) for line in text.split(";") if line.strip()]
    return [(name, *re.findall(r"\{[^}]*\}|[^,\s]+", rest)) for name, rest in lines if name != ".reg"]


def execute(instructions, registers):
    """Change the registers as the instructions do; return those that lost a carry: without .cc, and wrapped."""
    flag, wrapped = None, []
    for operation, target, *names in instructions:
        base, *kinds = operation.split(".")
        if operation == "mov.b64":
            (pair,) = (part.strip("{}").split(", ") for part in (target, *names) if part[0] == "{")
            if target[0] == "{":
                registers |= {pair[0]: registers[names[0]] & WORD, pair[1]: registers[names[0]] >> 32}
            else:
                registers[target] = registers[pair[0]] | registers[pair[1]] << 32
            continue
        values = [registers[name] if name in registers else int(name, 0) for name in names]
        if base in ("addc", "subc", "madc"):
            assert flag is not None, f"{operation} {target}: no carry is set"
        product = values[0] * values[1] if base in ("mul", "mad", "madc") else 0
        product = product >> 32 if "hi" in kinds else product & WORD
        result = SEMANTICS[base](values, product, flag or 0)
        if "cc" in kinds:
            flag = int(not 0 <= result <= WORD)
        else:
            if not 0 <= result <= WORD:
                wrapped.append(operation)
            flag = None if base in ("add", "addc", "subc", "mad", "madc") else flag  # m is found within a chain
        registers[target] = result & WORD
    return wrapped
