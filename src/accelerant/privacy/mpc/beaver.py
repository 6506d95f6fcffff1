"""Products of shares, and their truncation, with the help of a trusted dealer.

    dealer        triples = beaver.deal_triples(x.sharing, y.sharing, matrix=True), one for each party
    each party    sent = beaver.mask(x, y, triple), to all parties
    each party    z = beaver.multiply(triple, received), a share of the product, with the fraction bits of both factors

A triple is shares of uniform a and b and of c = a b. The parties open d = x - a and e = y - b, which are uniform, and
x y = c + d b + a e + d e, also of matrices (Beaver, CRYPTO '91, "Efficient multiparty protocols using circuit
randomization"). Truncation removes fraction bits:

    dealer        masks = beaver.deal_truncations(z.sharing, bits=16)
    each party    sent = beaver.mask_truncation(z, mask), to all parties
    each party    z = beaver.truncate(z, mask, received)

For a number v of 64 bits and r uniform below 2^192, v + 2^63 + r is opened, which hides v up to a distance of 2^-128.
The result is floor(v / 2^bits) or 1 more, with the cut-off fraction as the chance of 1 more, so the error is below one
unit in the last place (Catrina and Saxena 2010, Financial Cryptography, protocol 3.1). It takes a field of 254 bits.

Trust: the dealer is honest and colludes with nobody: with one opened message it knows a factor. Parties follow the
protocol; wrong messages are seen as by combine, with more parties than the threshold. Not audited.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from accelerant.algebra.field.field import PrimeField, prime_field
from accelerant.errors import ConfigError, ProtocolError, ShapeError
from accelerant.privacy.mpc.shamir import Share, Sharing, deal, opened, uniform
from accelerant.privacy.random import SecureStream
from accelerant.runtime.files import clipped

__all__ = [
    "Triple", "Truncation", "deal_triples", "deal_truncations", "mask", "mask_truncation", "multiply", "truncate",
]  # fmt: skip

_MASK_LIMBS, _CPU = 3, torch.device("cpu")
_stream = SecureStream()


@dataclass
class Triple:
    """One party's shares of a, b and their product c, elementwise or of matrices; for one product."""

    a: Share
    b: Share
    c: Share
    matrix: bool
    used: bool = False


@dataclass
class Truncation:
    """One party's shares of a mask r below 2^192 and of its lowest bits; for one truncation."""

    r: Share
    low: Share
    bits: int
    used: bool = False


def deal_triples(x: Sharing, y: Sharing, *, matrix: bool = False) -> list[Triple]:
    """Deal each party a triple, on the CPU, for factors of one shape, or of matrices (m, k) and (k, n)."""
    bits, chosen = x.fraction_bits + y.fraction_bits, prime_field(x.field)
    alike = replace(y, shape=x.shape, fraction_bits=x.fraction_bits, split_id=x.split_id)
    if alike != x or x.curve or x.dtype == "bytes" or bits > 62:
        raise ConfigError(
            f"factors must be plain shares of numbers, alike in field, threshold, count and dtype, with at most 62 "
            f"fraction bits together; got {x.dtype}, {x.field} and {y.dtype}, {y.field}, {bits} bits"
        )
    fits = (len(x.shape), len(y.shape), x.shape[-1:]) == (2, 2, y.shape[:1]) if matrix else x.shape == y.shape
    if not fits:
        raise ShapeError(f"no {'matrix ' * matrix}product of shapes {x.shape} and {y.shape}")
    a, b = (uniform(chosen.parameters, math.prod(each.shape), _CPU) for each in (x, y))
    a, b = (words.reshape(*of.shape, *words.shape[1:]) for words, of in ((a, x), (b, y)))
    c = _product(chosen, a, b, matrix)
    shape = (x.shape[0], y.shape[1]) if matrix else x.shape
    of_c = replace(x, shape=shape, fraction_bits=bits)
    return [Triple(*shares, matrix) for shares in zip(_deal(x, a), _deal(y, b), _deal(of_c, c), strict=True)]


def mask(x: Share, y: Share, triple: Triple) -> tuple[Share, Share]:
    """Return this party's shares of x - a and y - b, which all parties get. ProtocolError if the triple was used."""
    _use(triple)
    return x - triple.a, y - triple.b


def multiply(triple: Triple, received: Sequence[tuple[Share, Share]]) -> Share:
    """Return this party's share of the product, from the masked factors of at least `threshold` parties."""
    (d, of_d), (e, of_e) = (opened(shares) for shares in zip(*received, strict=True))
    chosen, a, b = prime_field(triple.c.sharing.field), triple.a.words, triple.b.words
    words = triple.c.words
    for left, right in ((d, b), (a, e), (d, e)):
        words = chosen.add(words, _product(chosen, left, right, triple.matrix))
    return _computed(triple.c, words, of_d, of_e)


def deal_truncations(of: Sharing, bits: int) -> list[Truncation]:
    """Deal each party a mask, on the CPU, to remove 1 to of.fraction_bits fraction bits; or raise ConfigError."""
    chosen = prime_field(of.field)
    valid = isinstance(bits, int) and 1 <= bits <= of.fraction_bits
    if chosen.limbs <= _MASK_LIMBS or of.curve or not valid:
        raise ConfigError(
            f"truncation by {clipped(bits)} bits: wanted 1 to the shares' {of.fraction_bits} fraction bits, and plain "
            f"shares in bn254_fr or bls12_381_fr, got {of.field}"
        )
    r = torch.zeros((*of.shape, chosen.limbs), dtype=torch.int64, device=_CPU)
    r[..., :_MASK_LIMBS] = _stream.words(2 * _MASK_LIMBS * math.prod(of.shape)).view(torch.int64).reshape(*of.shape, 3)
    dealt = _deal(of, r.view(torch.uint64)), _deal(of, _lowest(r, bits))
    return [Truncation(*shares, bits) for shares in zip(*dealt, strict=True)]


def mask_truncation(x: Share, mask: Truncation) -> Share:
    """Return this party's share of x + 2^63 + r, which all parties get. ProtocolError if the mask was used."""
    _use(mask)
    masked = x + mask.r
    return replace(masked, words=prime_field(x.sharing.field).add(masked.words, 2**63))


def truncate(x: Share, mask: Truncation, received: Sequence[Share]) -> Share:
    """Return this party's share of x with `bits` fewer fraction bits, from masked shares of `threshold` parties."""
    words, of = opened(received)
    chosen, low = prime_field(of.field), _lowest(words.view(torch.int64), mask.bits)
    rest = chosen.sub(chosen.add(x.words, mask.low.words), low)
    result = _computed(x, chosen.mul(rest, pow(2, -mask.bits, chosen.modulus)), of, mask.low.sharing)
    return replace(result, sharing=replace(result.sharing, fraction_bits=of.fraction_bits - mask.bits))


def _use(dealt: Triple | Truncation) -> None:
    if dealt.used:  # both results together would reveal the difference of what they mask
        raise ProtocolError(f"this {type(dealt).__name__} was used: the dealer deals one for each operation")
    dealt.used = True


def _deal(of: Sharing, words: Tensor) -> list[Share]:
    return deal(replace(of, split_id=os.urandom(16)), prime_field(of.field).array(words))


def _lowest(words: Tensor, bits: int) -> Tensor:
    """Return the lowest bits of numbers (..., limbs) int64, as canonical words."""
    low = torch.zeros_like(words)
    low[..., 0] = words[..., 0] & 2**bits - 1
    return low.view(torch.uint64)


def _product(chosen: PrimeField, x: Tensor, y: Tensor, matrix: bool) -> Tensor:
    """Return the canonical words of a product; a row of matrices at a time, whose terms are (n, k)."""
    if not matrix:
        return cast("Tensor", chosen.mul(x, y))
    columns = y.transpose(0, 1).contiguous()
    rows = [chosen.dot(columns, row) for row in x]
    return torch.stack(rows) if rows else x.new_zeros((0, *columns.shape[:1], *x.shape[2:]))


def _computed(share: Share, words: Tensor, *of: Sharing) -> Share:
    ids = (share.sharing.split_id, *(each.split_id for each in of))
    split_id = hashlib.sha256(b"".join((b"beaver", *ids))).digest()[:16]
    return Share(replace(share.sharing, split_id=split_id), share.index, words)
