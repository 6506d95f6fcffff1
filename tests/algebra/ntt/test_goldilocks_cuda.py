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
    """Of the asm statement of goldilocks_<name>, its macros replaced: [operation, operands...]."""
    text = kernel_source(FIELDS["goldilocks"], Variant(), Tile(4, 2, 2)).dialects["cuda"]
    joined = text.replace("\\\n", " ")
    macros = dict(re.findall(r"#define (GOLDILOCKS_\w+)(?:\(low, high\))? (.*)", joined))
    body = re.search(rf"goldilocks_{name}\(F x, F y\) {{.*?asm\((.*?) : \"=l\"", joined, re.DOTALL)[1]
    below = macros["GOLDILOCKS_BELOW_P"].replace('" low "', "r").replace('" high "', "s")
    body = body.replace('GOLDILOCKS_BELOW_P("r", "s")', below).replace("GOLDILOCKS_BEGIN", macros["GOLDILOCKS_BEGIN"])
    lines = "".join(re.findall(r'"([^"]*)"', body)).strip(" {}").split(";")
    split = [line.split(None, 1) for line in lines if line.strip()]
    return [(operation, re.findall(r"\{[^}]*\}|[^,\s]+", rest)) for operation, rest in split if operation != ".reg"]


def emulate(lines, x, y):
    """What they give. Source: PTX ISA, "Extended-Precision Integer Arithmetic Instructions"."""
    values, flag, result = {}, None, None
    for operation, (target, *names) in lines:
        base, *kinds = operation.split(".")
        if base == "mov" and target.startswith("{"):
            whole = {"%1": x, "%2": y}[names[0]]
            low, high = target.strip("{}").split(", ")
            values |= {low: whole & WORD, high: whole >> 32}
            continue
        if base == "mov":
            low, high = names[0].strip("{}").split(", ")
            result = values[low] | values[high] << 32
            continue
        given = [values[name] if name in values else int(name, 0) for name in names]
        if base == "setp":
            values[target] = given[0] != given[1]
            continue
        if base == "selp":
            values[target] = given[0] if given[2] else given[1]
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


@pytest.mark.parametrize("name", ["add", "sub", "mul"])
def test_carry_chains_are_exact(name):
    lines = instructions(name)
    function = {"add": lambda x, y: x + y, "sub": lambda x, y: x - y, "mul": lambda x, y: x * y}[name]
    draw = random.Random(name)
    pairs = [(x, y) for x in EDGES for y in EDGES]
    pairs += [(draw.randrange(P), draw.randrange(P)) for _ in range(3000)]
    for x, y in pairs:
        assert emulate(lines, x, y) == function(x, y) % P, (x, y)


def test_carry_chains_are_as_short_as_said():
    """Without moves, the halves of a wide multiply as one: the header's 9 and 5, and 21 of 25."""
    for name, count in (("add", 9), ("sub", 5), ("mul", 21)):
        kinds = [operation for operation, _ in instructions(name) if not operation.startswith("mov")]
        assert len([kind for kind in kinds if ".hi" not in kind]) == count


def test_reductions_that_borrow_and_carry():
    """Products whose lowest 64 bits are less than the highest 32, which random ones never have, and sums past 2^64."""
    lines, draw = instructions("mul"), random.Random(3)
    for _ in range(1000):
        x, y = (draw.randrange(2**31, 2**32 - 1) << 32 for _ in range(2))
        assert (x * y) & (2**64 - 1) < x * y >> 96
        assert emulate(lines, x, y) == x * y % P
        y = (2**64 - 1 - draw.randrange(2**33)) % P
        x = (2**64 - 1 - draw.randrange(2**33)) % P
        assert emulate(lines, x, y) == x * y % P
