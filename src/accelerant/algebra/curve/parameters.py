"""The table of curves, the registration of further ones, and endomorphisms for subgroup checks.

Each curve states b, the twist's non-residue and kind, and the generators; the rest is derived, and checked on first
use: bn254 (EIP-196, EIP-197), y^2 = x^3 + 3, twisted by 9 + u; bls12_381 (EIP-2537), y^2 = x^3 + 4, twisted by 1 + u.
"""

import functools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from accelerant.algebra.curve import weierstrass
from accelerant.algebra.curve.weierstrass import Affine, Curve, Pair
from accelerant.algebra.field.parameters import (
    FIELDS,
    Field,
    field_of,
    known_name,
    letters_of,
    register_field,
    require_own_name,
)
from accelerant.errors import ConfigError
from accelerant.runtime.files import clipped

__all__ = [
    "CURVES", "FAMILIES", "Curve", "Endomorphism", "Family", "curve_of", "endomorphism", "family_of", "register_curve",
    "register_family",
]  # fmt: skip

E = TypeVar("E")


@dataclass(frozen=True, slots=True)
class Family:
    """A pairing-friendly curve: the parameters that the two groups of a pairing share.

    Attributes:
        kind: Barreto-Naehrig or Barreto-Lynn-Scott of embedding degree 12.
        b: constant of G1's curve.
        nonresidue: xi of Fq2, neither a square nor a cube: Fq12 = Fq2[w] / (w^6 - xi).
        twist: "divide" if G2's b is b / xi (a D-twist), "multiply" if it is b xi (an M-twist).
    """

    name: str
    kind: Literal["bn", "bls12"]
    b: int
    nonresidue: Pair
    twist: Literal["divide", "multiply"]
    g1_generator: Pair
    g2_generator: tuple[Pair, Pair]

    @property
    def fq(self) -> Field:
        """The field of G1's coordinates."""
        return FIELDS[f"{self.name}_fq"]

    @property
    def q(self) -> int:
        """Return the modulus of G1's coordinates."""
        return self.fq.modulus

    @property
    def r(self) -> int:
        """Return the order of both groups."""
        return FIELDS[f"{self.name}_fr"].modulus

    @property
    def parameter(self) -> int:
        """Return the family's x, of either sign: q - r = 6 x^2 (BN), or q = x mod r with x small (BLS12)."""
        if self.kind == "bn":
            x = math.isqrt((self.q - self.r) // 6)
            return x if _primes("bn", x)[0] == self.q else -x
        return x - self.r if (x := self.q % self.r) > self.r // 2 else x

    @property
    def trace(self) -> int:
        """Return the trace t of Frobenius on G1's curve, whose group has q + 1 - t elements."""
        return 6 * self.parameter**2 + 1 if self.kind == "bn" else self.parameter + 1

    @property
    def g1_cofactor(self) -> int:
        """Return (q + 1 - t) / r."""
        return (self.q + 1 - self.trace) // self.r

    @property
    def g2_cofactor(self) -> int:
        """Return the cofactor of the twist of degree 6.

        BN: 2 q - r (Barreto and Naehrig, SAC 2005). BLS12: EIP-2537, and Budroni and Pintore, eprint 2017/419.
        """
        x = self.parameter
        if self.kind == "bn":
            return 2 * self.q - self.r
        return (x**8 - 4 * x**7 + 5 * x**6 - 4 * x**4 + 6 * x**3 - 4 * x**2 - 4 * x + 13) // 9

    @property
    def g1(self) -> Curve[int]:
        """Return the first group's curve, over Fq."""
        return _g1(self.name)

    @property
    def g2(self) -> Curve[Pair]:
        """Return the second group's curve, over Fq2."""
        return _g2(self.name)


def _primes(kind: str, x: int) -> tuple[int, int]:
    """Return q and r of a family's parameter x."""
    if kind == "bn":
        q = 36 * x**4 + 36 * x**3 + 24 * x**2 + 6 * x + 1
        return q, q - 6 * x**2
    r = x**4 - x**2 + 1
    return (x - 1) ** 2 * r // 3 + x, r


FAMILIES = {
    family.name: family
    for family in (
        Family(
            name="bn254",
            kind="bn",
            b=3,
            nonresidue=(9, 1),
            twist="divide",
            g1_generator=(1, 2),
            g2_generator=(
                (
                    0x1800DEEF121F1E76426A00665E5C4479674322D4F75EDADD46DEBD5CD992F6ED,
                    0x198E9393920D483A7260BFB731FB5D25F1AA493335A9E71297E485B7AEF312C2,
                ),
                (
                    0x12C85EA5DB8C6DEB4AAB71808DCB408FE3D1E7690C43D37B4CE6CC0166FA7DAA,
                    0x090689D0585FF075EC9E99AD690C3395BC4B313370B38EF355ACDADCD122975B,
                ),
            ),
        ),
        Family(
            name="bls12_381",
            kind="bls12",
            b=4,
            nonresidue=(1, 1),
            twist="multiply",
            g1_generator=(
                0x17F1D3A73197D7942695638C4FA9AC0FC3688C4F9774B905A14E3A3F171BAC586C55E83FF97A1AEFFB3AF00ADB22C6BB,
                0x08B3F481E3AAA0F1A09E30ED741D8AE4FCF5E095D5D00AF600DB18CB2C04B3EDD03CC744A2888AE40CAA232946C5E7E1,
            ),
            g2_generator=(
                (
                    0x024AA2B2F08F0A91260805272DC51051C6E47AD4FA403B02B4510B647AE3D1770BAC0326A805BBEFD48056C8C121BDB8,
                    0x13E02B6052719F607DACD3A088274F65596BD0D09920B61AB5DA61BBDC7F5049334CF11213945D57E5AC7D055D042B7E,
                ),
                (
                    0x0CE5D527727D6E118CC9CDC6DA2E351AADFD9BAA8CBDD3A76D429A695160D12C923AC9CC3BACA289E193548608B82801,
                    0x0606C4A02EA734CC32ACD2B02BC28B99CB3E287E85A763AF267492AB572E99AB3F370D275CEC1DA1AAA9075FF05F79BE,
                ),
            ),
        ),
    )
}  # Families by name


def _checked(curve: Curve[E]) -> Curve[E]:
    """Return the curve if its generator lies on it and has order r; else raise ConfigError."""
    if not curve.is_on_curve(curve.generator):
        raise ConfigError(f"{curve.name}: the generator {curve.generator} is not on the curve")
    if not weierstrass.in_subgroup(curve, curve.generator):
        raise ConfigError(f"{curve.name}: {curve.order} times the generator {curve.generator} is not infinity")
    return curve


@functools.cache
def _g1(name: str) -> Curve[int]:
    family = FAMILIES[name]
    k, scalars = weierstrass.PrimeCoordinates(family.fq), FIELDS[f"{name}_fr"]
    return _checked(Curve(f"{name}_g1", k, scalars, family.b, family.g1_generator, family.g1_cofactor))


@functools.cache
def _g2(name: str) -> Curve[Pair]:
    family = FAMILIES[name]
    k, scalars = weierstrass.QuadraticCoordinates(family.fq), FIELDS[f"{name}_fr"]
    b = k.times(family.nonresidue if family.twist == "multiply" else k.inv(family.nonresidue), family.b)
    return _checked(Curve(f"{name}_g2", k, scalars, b, family.g2_generator, family.g2_cofactor))


CURVES: dict[str, Callable[[], Curve[Any]]] = {
    f"{family}_{group}": functools.partial(make, family)
    for family in FAMILIES
    for group, make in (("g1", _g1), ("g2", _g2))
}  # Functions that return the curve of a name; the first call takes milliseconds, to check the generator's order


def curve_of(name: Any) -> Curve[Any]:
    """Return the curve of a name, or of an object that has one as zk.curve's; ConfigError if there is none."""
    name = getattr(name, "name", name)
    found = (CURVES.get(name) or CURVES.get(known_name(name))) if isinstance(name, str) else None
    if found is None:
        raise ConfigError(f"unknown curve {clipped(name)}; known are {', '.join(CURVES)}")
    return found()


def family_of(name: str) -> Family:
    """Return the family of a name: bn254, bls12_381, what snarkjs calls them, or a registered one.

    ConfigError if there is none.
    """
    found = (FAMILIES.get(name) or FAMILIES.get(known_name(name))) if isinstance(name, str) else None
    if found is None:
        raise ConfigError(f"unknown pairing {clipped(name)}; known are {', '.join(FAMILIES)}")
    return found


def register_curve(
    name: str, *, field: str, scalar_field: str, b: int, generator: tuple[int, int], a: int = 0
) -> Curve[int]:
    """Register the curve y^2 = x^3 + b over a prime field for this process.

    The cofactor is derived from the orders of the fields. Arguments and errors are those of zk.register_curve.
    """
    if not (isinstance(name, str) and name.isidentifier() and name.isascii()):
        raise ConfigError(f"a curve's name must be an identifier, got {clipped(name)}")
    require_own_name(name)
    if not (isinstance(generator, tuple | list) and len(generator) == 2):
        raise ConfigError(f"{name}: the generator must be a pair (x, y), got {clipped(generator)}")
    for what, value in (("a", a), ("b", b), ("generator's x", generator[0]), ("generator's y", generator[1])):
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(
                f"{name}: the {what} must be a Python integer, got {type(value).__name__} {clipped(value)}"
            )
    base, scalars = field_of(field), field_of(scalar_field)
    q, r = base.modulus, scalars.modulus
    if a % q:
        raise ConfigError(f"{name}: kernels are for curves y^2 = x^3 + b, with a = 0; got a = {clipped(a)}")
    if not b % q:
        raise ConfigError(f"{name}: b must not be 0 mod q, got {clipped(b)}: (0, 0) encodes infinity")
    for purpose, row, fits, limits in (
        ("coordinates", base, base.limbs % 2 == 0, "an even number of"),
        ("scalars", scalars, scalars.limbs == weierstrass.SCALAR_WORDS, weierstrass.SCALAR_WORDS),
    ):
        if row.word_bits != 64 or not fits:
            raise ConfigError(f"{name}: {purpose} must have {limits} 64-bit limbs; {row.name} has {row.bits} bits")
    spread = math.isqrt(4 * q)
    cofactor = (q + 1 + spread) // r
    if cofactor * r < q + 1 - spread or r <= 2 * spread:
        raise ConfigError(f"{name}: not exactly one multiple of r = {r} is in Hasse's interval of {field}")
    x, y = generator
    if not (0 <= x < q and 0 <= y < q):
        raise ConfigError(
            f"{name}: the generator's coordinates must be from 0 to below q, got ({clipped(x)}, {clipped(y)})"
        )
    curve = _checked(Curve(name, weierstrass.PrimeCoordinates(base), scalars, b % q, (x, y), cofactor))
    rng, root = random.Random(0), None
    while root is None:
        x = rng.randrange(q)
        root = curve.coordinates.sqrt(curve.right_side(x))
    if weierstrass.multiply(curve, cofactor * r, (x, root)) is not None:
        raise ConfigError(f"{name}: the curve's group does not have {cofactor} r elements, r = {r}")
    if name in CURVES and CURVES[name]().canonical_text() != curve.canonical_text():
        raise ConfigError(f"{name}: another curve has this name")
    CURVES.setdefault(name, lambda: curve)
    return curve_of(name)


_LARGEST_NONRESIDUE = 64  # Products by c + u are c - 1 additions


def register_family(
    name: str, *, kind: Literal["bn", "bls12"], parameter: int, b: int, nonresidue: Pair,
    twist: Literal["divide", "multiply"], g1_generator: Pair, g2_generator: tuple[Pair, Pair],
) -> Family:  # fmt: skip
    """Register a pairing-friendly curve with its two groups and fields; arguments and errors of zk.register_family."""
    if not (isinstance(name, str) and name.isidentifier() and name.isascii()):
        raise ConfigError(f"a family's name must be an identifier, got {clipped(name)}")
    taken = {letters_of(known): known for known in FAMILIES}.get(letters_of(known_name(name)), name)
    if name != taken:
        raise ConfigError(f"{name}: files that name {taken} could mean this family, too: take another name")
    if kind not in ("bn", "bls12") or twist not in ("divide", "multiply"):
        raise ConfigError(
            f"{name}: kind must be bn or bls12, and twist divide or multiply; got {clipped(kind)}, {clipped(twist)}"
        )
    numbers = (parameter, b, *nonresidue, *g1_generator, *(part for pair in g2_generator for part in pair))
    if any(isinstance(each, bool) or not isinstance(each, int) for each in numbers) or len(numbers) != 10:
        raise ConfigError(f"{name}: parameter, b, nonresidue and generators must be Python integers and pairs of them")
    if kind == "bls12" and parameter % 3 != 1:
        raise ConfigError(f"{name}: the parameter of a BLS12 curve is 1 mod 3, got {clipped(parameter)}")
    q, r = _primes(kind, parameter)
    family = Family(name, kind, b, tuple(nonresidue), twist, tuple(g1_generator), tuple(map(tuple, g2_generator)))  # type: ignore[arg-type]  # pairs
    if not (q % 4 == 3 and 1 <= nonresidue[0] < _LARGEST_NONRESIDUE and nonresidue[1] == 1 and b % q):
        raise ConfigError(
            f"{name}: wanted q = 3 mod 4, b not 0 mod q, and a non-residue (c, 1) with c from 1 to below "
            f"{_LARGEST_NONRESIDUE}; got q = {clipped(q)}, b = {clipped(b)}, {clipped(nonresidue)}"
        )
    if FAMILIES.get(name, family) != family or (name in FAMILIES and (family.q, family.r) != (q, r)):
        raise ConfigError(f"{name}: another family has this name")
    if name in FAMILIES:
        return family
    before = set(FIELDS)
    try:
        for suffix, prime in (("fq", q), ("fr", r)):
            register_field(f"{name}_{suffix}", prime, _nonresidue(prime))
        if not all(0 <= each < q for each in numbers[1:]):
            raise ConfigError(f"{name}: b and the coordinates of generators must be from 0 to below q = {clipped(q)}")
        FAMILIES[name] = family
        _check_family(family)
    except ConfigError:
        FAMILIES.pop(name, None)
        for added in set(FIELDS) - before:
            del FIELDS[added]
        raise
    CURVES.update({f"{name}_g1": lambda: _g1(name), f"{name}_g2": lambda: _g2(name)})
    return family


def _nonresidue(prime: int) -> int:
    """Return the least number that is no square and, where 3 divides p - 1, no cube; 2 for a composite number."""
    powers = [(prime - 1) // n for n in (2, 3) if (prime - 1) % n == 0]
    return next((g for g in range(2, 1000) if all(pow(g, power, prime) != 1 for power in powers)), 2)


def _check_family(family: Family) -> None:
    """Raise ConfigError unless pairings and their checks of subgroups hold for a family whose fields are registered."""
    name, q, r = family.name, family.q, family.r
    if FIELDS[f"{name}_fr"].limbs != weierstrass.SCALAR_WORDS:
        raise ConfigError(f"{name}: r must have {weierstrass.SCALAR_WORDS} words of 64 bits, got {r.bit_length()} bits")
    k = weierstrass.QuadraticCoordinates(family.fq)
    if any(k.power(family.nonresidue, (q * q - 1) // n) == k.one for n in (2, 3)):
        raise ConfigError(f"{name}: {family.nonresidue} is a square or a cube in Fq2")
    g1, g2 = _g1.__wrapped__(name), _g2.__wrapped__(name)  # kept only if the family is
    x, trace = family.parameter, family.trace
    low, high = 0, 0  # what annihilates the points of G2 that pass, low + high psi, psi^2 = trace psi - q
    for factor in reversed((6 * x + 2, 1, -1, 1) if family.kind == "bn" else (-x, 1)):
        low, high = factor - high * q, low + high * trace
    norm = low * low + low * high * trace + high * high * q
    if norm % r or math.gcd(norm, g2.cofactor) != 1:
        raise ConfigError(f"{name}: the pairing's check of G2's subgroup does not hold for this curve")
    try:
        for curve in (g1, g2) if g1.cofactor > 1 else (g2,):
            _family_endomorphism(curve, family)
    except ValueError as error:
        raise ConfigError(str(error)) from None


@dataclass(frozen=True, slots=True)
class Endomorphism:
    """A subgroup test: P is in the subgroup if and only if (x_factor x', y_factor y') = eigenvalue P.

    x' and y' are the conjugates x^q and y^q over Fq2, else x and y themselves. On the curves of the table the map is an
    endomorphism that multiplies the subgroup by a constant of 64 to 128 bits, where r has 254 or 255:

        G1   phi(x, y) = (beta x, y) with beta^3 = 1. For r = x^4 - x^2 + 1 (BLS12) phi = x^2 - 1 in the subgroup; a
             point for which that holds has r P = 0, since phi^2 + phi + 1 = 0 and k^2 + k + 1 = r. BN: G1 is the whole
             curve.
        G2   psi(x, y) = (c x^q, d y^q): Frobenius, moved to the twist. psi^2 - t psi + q = 0, so a point with
             psi = t - 1 is annihilated by q + 1 - t, the order of G1's curve. That is r times G1's cofactor, which is
             prime to G2's, so r annihilates it.

    For registered curves the map is the identity, with eigenvalue r + 1. Source: Scott, eprint 2021/1130, sections 3 to
    5; Bowe, eprint 2019/814; Galbraith and Scott, Pairing 2008, for psi.
    """

    x_factor: Any
    y_factor: Any
    eigenvalue: int

    def apply(self, curve: Curve[Any], point: Affine[Any]) -> Affine[Any]:
        """Return (x_factor x', y_factor y') of a point on Python integers."""
        if point is None:
            return None
        k = curve.coordinates
        x, y = (k.join((v[0], -v[1] % k.base.modulus)) if k.degree == 2 else v for v in point)
        return k.mul(self.x_factor, x), k.mul(self.y_factor, y)


@functools.cache
def endomorphism(curve: Curve[Any]) -> Endomorphism | None:
    """Return the curve's subgroup test, checked; None if every point of the curve is in the subgroup."""
    if curve.cofactor == 1:
        return None
    family = FAMILIES.get(curve.name.removesuffix("_g1").removesuffix("_g2"))
    if family is None or curve not in (family.g1, family.g2):
        return Endomorphism(curve.coordinates.one, curve.coordinates.one, curve.order + 1)
    return _family_endomorphism(curve, family)


def _family_endomorphism(curve: Curve[Any], family: Family) -> Endomorphism:
    test = _g1_endomorphism(curve, family) if curve.coordinates.degree == 1 else _g2_endomorphism(curve, family)
    if test.apply(curve, curve.generator) != weierstrass.multiply(curve, test.eigenvalue, curve.generator):
        raise ValueError(f"{curve.name}: the endomorphism does not multiply the generator by {test.eigenvalue}")
    return test


def _g1_endomorphism(curve: Curve[Any], family: Family) -> Endomorphism:
    """Return phi with the cube root of 1 for which the subgroup's eigenvalue is x^2 - 1."""
    k, eigenvalue = curve.coordinates, family.parameter**2 - 1
    if eigenvalue**2 + eigenvalue + 1 != family.r:
        raise ValueError(f"{curve.name}: k^2 + k + 1 is not r for k = {eigenvalue}")
    root = pow(k.base.generator, (k.base.modulus - 1) // 3, k.base.modulus)
    if (x := weierstrass.multiply(curve, eigenvalue, curve.generator)) is None:
        raise ValueError(f"{curve.name}: the generator's order divides {eigenvalue}")
    beta = root if k.mul(root, curve.generator[0]) == x[0] else k.square(root)
    return Endomorphism(beta, k.one, eigenvalue)


def _g2_endomorphism(curve: Curve[Any], family: Family) -> Endomorphism:
    """Return psi: (x w^(2 (q - 1)), y w^(3 (q - 1))) of conjugates, w^6 = xi of a D-twist and 1 / xi of an M-twist."""
    k, q, trace = curve.coordinates, family.q, family.trace
    if math.gcd(family.g1_cofactor, curve.cofactor) != 1 or (q - 1) % 6:
        raise ValueError(f"{curve.name}: the cofactors have a factor in common, or q is not 1 mod 6")
    sixth = family.nonresidue if family.twist == "divide" else k.inv(family.nonresidue)
    x_factor, y_factor = k.power(sixth, (q - 1) // 3), k.power(sixth, (q - 1) // 2)
    if trace < 1:
        y_factor = k.neg(y_factor)
    return Endomorphism(x_factor, y_factor, abs(trace - 1))
