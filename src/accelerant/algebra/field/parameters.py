"""The table of prime fields, and the constants derived from it.

A field is its modulus and a generator of its multiplicative group; all else is derived. Moduli of curves follow from
the curve's parameter:

    goldilocks      p = 2^64 - 2^32 + 1                            Hamburg 2015, eprint 2015/625, with phi = 2^32
    babybear        p = 15 2^27 + 1                                the largest prime below 2^31 with 2^27 | p - 1
    mersenne61      p = 2^61 - 1                                   prime: Pervushin 1883
    bn254_fr, _fq   Barreto-Naehrig, x = 4965661367192848881       EIP-196
    bls12_381_*     Barreto-Lynn-Scott, x = -0xd201000000010000    EIP-2537
"""

import re
import secrets
from dataclasses import dataclass, field
from typing import Any

from accelerant.errors import ConfigError
from accelerant.runtime.files import clipped


@dataclass(frozen=True, slots=True)
class Field:
    """A prime field: p = `modulus` is odd, and `generator`, of the multiplicative group, a quadratic non-residue.

    An element is `limbs` unsigned words of `word_bits`, 32 if p fits in them, else 64, the least significant first.
    """

    name: str
    modulus: int
    generator: int
    bits: int = field(init=False, repr=False, compare=False)
    word_bits: int = field(init=False, repr=False, compare=False)
    limbs: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Derive the sizes; refuse an even modulus, or a square: Euler's criterion fails for most composites, too."""
        p = self.modulus
        if p < 3 or p % 2 == 0 or pow(self.generator, (p - 1) // 2, p) != p - 1:
            raise ValueError(
                f"{self.name}: {clipped(self.generator)} is a square mod {clipped(p)}, or that is no odd prime"
            )
        bits = p.bit_length()
        word_bits = 32 if bits <= 32 else 64
        for name, value in (("bits", bits), ("word_bits", word_bits), ("limbs", -(-bits // word_bits))):
            object.__setattr__(self, name, value)  # as attributes: a call on arrays reads them twenty times

    @property
    def size_bytes(self) -> int:
        """The bytes of a canonical element."""
        return self.limbs * self.word_bits // 8

    @property
    def two_adicity(self) -> int:
        """The largest k such that 2^k divides p - 1: transforms have at most 2^k points."""
        below = self.modulus - 1
        return (below & -below).bit_length() - 1

    def root_of_unity(self, order: int) -> int:
        """Return the root of unity generator^((p - 1) / order); ConfigError unless order is a divisor of p - 1."""
        if order < 1 or (self.modulus - 1) % order:
            raise ConfigError(f"{self.name} has no root of unity of order {clipped(order)}: it does not divide p - 1")
        return pow(self.generator, (self.modulus - 1) // order, self.modulus)

    def montgomery_inverse(self, limb_bits: int) -> int:
        """Return -1/p mod 2^limb_bits, the factor of one step of Montgomery's reduction."""
        return -pow(self.modulus, -1, 1 << limb_bits) % (1 << limb_bits)

    def words(self, value: int, limb_bits: int, limbs: int) -> tuple[int, ...]:
        """Return the limbs of a number, the least significant first; ValueError if it is negative or does not fit."""
        if not 0 <= value < 1 << limb_bits * limbs:
            raise ValueError(f"{value} does not fit in {limbs} limbs of {limb_bits} bits")
        mask = (1 << limb_bits) - 1
        return tuple(value >> limb_bits * i & mask for i in range(limbs))


# The moduli q (of coordinates) and r (the order) are polynomials in a curve's parameter. Sources: Barreto and Naehrig,
# SAC 2005; Barreto, Lynn and Scott, SCN 2002, embedding degree 12.
_BN_X, _BLS_X = 4965661367192848881, -0xD201000000010000
_BN254_FQ = 36 * _BN_X**4 + 36 * _BN_X**3 + 24 * _BN_X**2 + 6 * _BN_X + 1
_BN254_FR = _BN254_FQ - 6 * _BN_X**2
_BLS12_381_FR = _BLS_X**4 - _BLS_X**2 + 1
_BLS12_381_FQ = (_BLS_X - 1) ** 2 * _BLS12_381_FR // 3 + _BLS_X

FIELDS = {
    row.name: row
    for row in (
        Field("goldilocks", 2**64 - 2**32 + 1, 7),
        Field("babybear", 15 * 2**27 + 1, 31),
        Field("bn254_fr", _BN254_FR, 5),
        Field("bn254_fq", _BN254_FQ, 3),
        Field("bls12_381_fr", _BLS12_381_FR, 7),
        Field("bls12_381_fq", _BLS12_381_FQ, 2),
        Field("mersenne61", 2**61 - 1, 37),
    )
}
"""Field name -> Field. Generators are the least primitive roots. snarkjs takes 5 for bls12_381_fr: its transforms use
other roots of unity than generator^((p - 1) / n)."""


_FAMILY_NAMES = {"BN128": "bn254", "BN254": "bn254", "ALTBN128": "bn254", "BLS12381": "bls12_381"}
"""Names that snarkjs reads, of which letters and digits count -> name here."""


def known_name(name: str) -> str:
    """Return a name with bn254 or bls12_381 in the place of what snarkjs calls it: bn128_g1 is bn254_g1."""
    family, group = (name[:-3], name[-3:]) if name.endswith(("_g1", "_g2", "_fr", "_fq")) else (name, "")
    return name if (known := _FAMILY_NAMES.get(letters_of(family))) is None else known + group


def require_own_name(name: str) -> None:
    """Raise ConfigError for a name to register that means one of ours already, as bn128_g1 does."""
    if (known := known_name(name)) != name:
        raise ConfigError(f"{name} is another name of {known}: take one of its own")


def letters_of(name: str) -> str:
    """Return the letters and digits of a name in capitals, by which names of families are compared."""
    return "".join(re.findall("[A-Z0-9]", name.upper()))


def field_of(name: Any) -> Field:
    """Return the field of a name, of a modulus, or of an object that has a name as zk.field's; ConfigError if none."""
    name = getattr(name, "name", name)
    if isinstance(name, str):
        found = FIELDS.get(name) or FIELDS.get(known_name(name))
    else:
        found = next((row for row in FIELDS.values() if isinstance(name, int) and row.modulus == name), None)
    if found is None:
        raise ConfigError(f"unknown field {clipped(name)}; known are {', '.join(FIELDS)}")
    return found


_MOST_BITS = 4096  # Bits of the largest modulus that is tested for primality: it takes seconds beyond


def is_prime(n: int) -> bool:
    """Miller and Rabin's test with 64 random bases: Fermat's with fixed ones passes Carmichael's numbers."""
    if n < 5 or n % 2 == 0:
        return n in (2, 3)
    twos = ((n - 1) & (1 - n)).bit_length() - 1
    for _ in range(64):
        x = pow(2 + secrets.randbelow(n - 3), (n - 1) >> twos, n)
        if x not in (1, n - 1) and not any((x := x * x % n) == n - 1 for _ in range(twos - 1)):
            return False
    return True


def register_field(name: str, modulus: int, generator: int) -> Field:
    """Register a prime field for this process; arguments and errors as algebra.field.register_field."""
    if not (isinstance(name, str) and name.isidentifier() and name.isascii()):
        raise ConfigError(f"a field's name must be an identifier, got {clipped(name)}")
    require_own_name(name)
    for what, value in (("modulus", modulus), ("generator", generator)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(
                f"{name}: the {what} must be a Python integer, got {type(value).__name__} {clipped(value)}"
            )
    if modulus.bit_length() > _MOST_BITS:
        raise ConfigError(f"{name}: the modulus must have at most {_MOST_BITS:,} bits, got {modulus.bit_length():,}")
    if not is_prime(modulus):
        raise ConfigError(f"{name}: the modulus {clipped(modulus)} is not prime")
    try:
        field = Field(name, modulus, generator % modulus)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if field.bits <= 64 or field.limbs % 2 or field.bits % 64 == 0:
        raise ConfigError(
            f"{name}: kernels are for moduli of an even number of 64-bit words with a spare bit, got {field.bits} bits"
        )
    if FIELDS.setdefault(name, field) != field:
        raise ConfigError(f"{name}: another field has this name, {FIELDS[name]}")
    return FIELDS[name]
