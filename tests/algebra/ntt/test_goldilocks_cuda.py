"""Goldilocks's carry chains, emulated: their instructions as the program holds them, on edges and on random numbers."""

from __future__ import annotations

import random
import re

import pytest

from accelerant.algebra.field.parameters import FIELDS
from accelerant.algebra.ntt.plan import Variant
from accelerant.algebra.ntt.program import Tile, kernel_source

P = FIELDS["goldilocks"].modulus
WORD = 2**32 - 1


def instructions(name):
    """Of the asm statement of a function, its macros replaced: [operation, operands...]."""
    text = kernel_source(FIELDS["goldilocks"], Variant(), Tile(4, 2, 2)).dialects["cuda"].build("sm_90")
    joined = text.replace("\\\n", " ")
    macros = dict(re.findall(r"#define (GOLDILOCKS_\w+) (.*)", joined))
    body = re.search(rf" F {name}\([^)]*\) {{[^}}]*?GOLDILOCKS_DO\((.*?)\);\n}}", joined, re.DOTALL)[1]
    body = f"GOLDILOCKS_BEGIN {body}"
    while "GOLDILOCKS" in body:
        body = re.sub(r"\bGOLDILOCKS_\w+", lambda found: macros[found[0]], body)
    lines = "".join(re.findall(r'"([^"]*)"', body)).strip(" {}").split(";")
    split = [line.split(None, 1) for line in lines if line.strip(" {}")]
    return [(operation, re.findall(r"\{[^}]*\}|[^,\s]+", rest)) for operation, rest in split if operation != ".reg"]


def emulate(lines, x, y):
    """What they give. Source: PTX ISA, "Extended-Precision Integer Arithmetic Instructions"."""
    values, flag, result = {"%3": WORD}, None, None
    for operation, (target, *names) in lines:
        base, *kinds = operation.split(".")
        if operation == "mov.b64" and target.startswith("{"):
            whole = {"%1": x, "%2": y}[names[0]]
            low, high = target.strip("{}").split(", ")
            values |= {low: whole & WORD, high: whole >> 32}
            continue
        if operation == "mov.b64":
            low, high = names[0].strip("{}").split(", ")
            result = values[low] | values[high] << 32
            continue
        given = [values[name] if name in values else int(name, 0) for name in names]
        if base == "mov":
            values[target] = given[0]
            continue
        incoming = 0
        if base in ("addc", "subc", "madc"):
            assert flag is not None, f"{operation} {target}: no carry is set"
            incoming = flag
        if base in ("mul", "mad", "madc"):
            product = given[0] * given[1]
            found = (product >> 32 if "hi" in kinds else product & WORD) + sum(given[2:]) + incoming
        elif base in ("add", "addc"):
            found = given[0] + given[1] + incoming
        else:
            assert base in ("sub", "subc")
            found = given[0] - given[1] - incoming
        flag = int(not 0 <= found <= WORD) if "cc" in kinds else None
        values[target] = found & WORD
    return result


EDGES = [0, 1, 2, WORD - 1, WORD, WORD + 1, 2**33, 2**63, P // 2, P // 2 + 1, P - WORD, P - 2**32, P - 2, P - 1]


WORDS = [*EDGES, P, P + 1, P + WORD - 2, 2**64 - 2**31, 2**64 - 1]
"""Any words, not only elements below the modulus."""


@pytest.mark.parametrize("name", ["add", "sub", "mul"])
def test_carry_chains_are_exact(name):
    """Of a sum or difference one operand is any word, and so is the result; a product takes any and is reduced."""
    lines = instructions(f"goldilocks_{name}")
    function = {"add": lambda x, y: x + y, "sub": lambda x, y: x - y, "mul": lambda x, y: x * y}[name]
    draw = random.Random(name)
    second, top = (WORDS, 2**64) if name == "mul" else (EDGES, P)
    pairs = [(x, y) for x in WORDS for y in second]
    pairs += [(draw.randrange(2**64), draw.randrange(top)) for _ in range(3000)]
    for x, y in pairs:
        found = emulate(lines, x, y)
        assert found % P == function(x, y) % P, (x, y)
        assert found < (P if name == "mul" else 2**64), (x, y)


@pytest.mark.parametrize("name", ["goldilocks_reduced", "ntt_raised", "ntt_folded"])
def test_what_exceeds_a_word_is_folded(name):
    """x; x + 2^64 y, y of 32 bits; x + 2^64 y, y of 64 bits."""
    lines, draw = instructions(name), random.Random(name)
    high = {"goldilocks_reduced": [0], "ntt_raised": [0, 1, 2**31, WORD - 1, WORD], "ntt_folded": WORDS}[name]
    pairs = [(x, y) for x in WORDS for y in high]
    pairs += [(draw.randrange(2**64), draw.randrange(max(high) + 1)) for _ in range(3000)]
    for x, y in pairs:
        assert emulate(lines, x, y) == (x + (y << 64)) % P, (x, y)


def test_carry_chains_are_as_short_as_said():
    """Without moves, the halves of a wide multiply as one: the header's numbers."""
    for name, count in (("add", 4), ("sub", 5), ("mul", 16)):
        kinds = [operation for operation, _ in instructions(f"goldilocks_{name}") if not operation.startswith("mov")]
        assert len([kind for kind in kinds if ".hi" not in kind]) == count


def test_reductions_that_borrow_and_carry():
    """Products whose lowest 64 bits are less than the highest 32, which random ones never have, and sums past 2^64."""
    lines, draw = instructions("goldilocks_mul"), random.Random(3)
    for _ in range(1000):
        x, y = (draw.randrange(2**31, 2**32 - 1) << 32 for _ in range(2))
        assert (x * y) & (2**64 - 1) < x * y >> 96
        assert emulate(lines, x, y) == x * y % P
        y = (2**64 - 1 - draw.randrange(2**33)) % P
        x = (2**64 - 1 - draw.randrange(2**33)) % P
        assert emulate(lines, x, y) == x * y % P
