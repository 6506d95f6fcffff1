"""Philox4x32-10 in LLVM IR, vectors of counters at a time.

Source: Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3", section 5.2.2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from accelerant.runtime.compilation.llvm import FunctionBuilder, Operand, Value

ROUNDS = 10
WEYL = (0x9E3779B9, 0xBB67AE85)
"""Added to the two words of the key after each round, modulo 2^32."""

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_LOW = 0xFFFFFFFF


def philox(code: FunctionBuilder, counter: Sequence[Operand], key: Callable[[int, int], Value]) -> list[Operand]:
    """Append the rounds; return the four words of each lane's counter.

    Words of 32 bits lie in lanes of 64, so that a product of two is one instruction; the upper halves are undefined.
    key(round, word) returns word 0 or 1 of a round's key.
    """
    words = list(counter)
    for i in range(ROUNDS):
        keys = [key(i, side) for side in (0, 1)]
        products = [code.op("mul", code.op("and", words[2 * s], _LOW), _MULTIPLIERS[s]) for s in (0, 1)]
        mixed = []
        for side in (0, 1):
            high = code.op("lshr", products[1 - side], 32)
            mixed.append(code.op("xor", code.op("xor", high, words[2 * side + 1]), keys[side]))
        words = [mixed[0], products[1], mixed[1], products[0]]
    return words
