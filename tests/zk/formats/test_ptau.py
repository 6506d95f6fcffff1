"""Powers of tau: what is read, refused and written."""

import struct

import numpy as np
import pytest
from parts import VECTORS, edited, offset_of, refused, without

from accelerant import zk
from accelerant.algebra.curve.weierstrass import add, encode_points
from accelerant.errors import ConfigError, FormatError, ShapeError
from accelerant.zk.formats import Label, Ptau, write_ptau
from refusals import assert_raises

KIND, FILE = Ptau, "prepared.ptau"
HEADER, TAU_G1, TAU_G2, ALPHA_G1, BETA_G1, BETA_G2, CONTRIBUTIONS = range(1, 8)
LAGRANGE = range(12, 16)
NAMES = ("tau_g1", "tau_g2", "alpha_g1", "beta_g1")
BEACON = bytes(range(1, 32))


@pytest.fixture
def powers(family):
    with Ptau.open(VECTORS / family.name / "prepared.ptau") as found:
        yield found


def canonical(family, words):
    """Rows of points as the public API takes them."""
    field = zk.field(f"{family.name}_fq")
    limbs, inverse = field.limbs, pow(1 << 64 * field.limbs, -1, family.q)
    return field.mul(words.reshape(-1, limbs), field.encode(inverse)).reshape(-1, words.shape[1])


def of_group(family, group, words):
    curve = zk.curve(f"{family.name}_{group}")
    return canonical(family, np.atleast_2d(words)).reshape(-1, *curve.shape)


def test_sizes_and_contributions(powers, family):
    assert (powers.family, powers.power, powers.ceremony_power, powers.prepared) == (family.name, 3, 3, True)
    assert [each.label for each in powers.contributions] == [Label(0, "first é"), Label(1, "Final", 10, BEACON)]
    limbs = 2 * -(-family.q.bit_length() // 64)
    assert [powers.powers(name).shape for name in NAMES] == [(15, limbs), (8, 2 * limbs), (8, limbs), (8, limbs)]
    assert [powers.lagrange(name, 3).shape for name in NAMES] == [(8, limbs), (8, 2 * limbs), (8, limbs), (8, limbs)]
    assert powers.lagrange("tau_g1", 4).shape == (16, limbs)


def test_lagrange_forms_add_up_to_the_generator(powers, family):
    """The Lagrange polynomials of any domain add up to 1: so do their values at tau, times G; and times alpha."""
    curve = family.g1
    for name, log_n, total in [("tau_g1", n, powers.powers("tau_g1")[0]) for n in range(5)] + [
        ("alpha_g1", 3, powers.powers("alpha_g1")[0])
    ]:
        points = zk.curve(curve.name).decode(of_group(family, "g1", powers.lagrange(name, log_n)))
        found = None
        for point in points:
            found = add(curve, found, point)
        assert [found] == zk.curve(curve.name).decode(of_group(family, "g1", total)), (name, log_n)


def test_a_contributions_points_are_what_they_are_called(powers, family):
    """In the first one the secrets themselves: e(g1_sx, G2) = e(g1_s, tau G2), and beta's the same."""
    first = powers.contributions[0].points
    g2 = encode_points(family.g2, [family.g2.generator])
    for s, sx, power in (
        ("tau_g1_s", "tau_g1_sx", "tau_g2"), ("beta_g1_s", "beta_g1_sx", "beta_g2"),
    ):  # fmt: skip
        left = zk.curve(f"{family.name}_g1").neg(of_group(family, "g1", first[sx]))
        p = np.concatenate([left, of_group(family, "g1", first[s])])
        q = np.concatenate([g2, of_group(family, "g2", first[power])])
        assert zk.pairing_product_is_one(p, q, family=family.name), power
    last = powers.contributions[-1].points
    assert np.array_equal(last["tau_g2"], powers.powers("tau_g2")[1])
    assert np.array_equal(last["alpha_g1"], powers.powers("alpha_g1")[0])


def everything(powers):
    names = ("power", "ceremony_power", "beta_g2", "contributions")
    return {name: getattr(powers, name) for name in names} | {name: powers.powers(name) for name in NAMES}


def test_written_again_it_is_the_same_file(powers, family, data, tmp_path):
    lagrange = {name: powers.points[f"Lagrange {name}"] for name in NAMES}
    write_ptau(tmp_path / "again.ptau", family.name, **everything(powers), lagrange=lagrange)
    assert (tmp_path / "again.ptau").read_bytes() == data
    write_ptau(tmp_path / "again.ptau", family.name, **everything(powers))
    with Ptau.open(tmp_path / "again.ptau") as again:
        assert not again.prepared
        again.check()
        with pytest.raises(FormatError, match=r"no Lagrange forms: run snarkjs powersoftau prepare phase2"):
            again.lagrange("tau_g1", 0)


def test_other_names_and_sizes_are_refused(powers):
    with pytest.raises(ConfigError, match="unknown powers 'tau'; expected one of tau_g1, tau_g2, alpha_g1, beta_g1"):
        powers.powers("tau")
    for name, log_n in (("tau_g1", 5), ("tau_g2", 4), ("beta_g1", -1)):
        assert_raises(ConfigError, f"log_n must be 0 to . for {name}, got {log_n}", powers.lagrange, name, log_n)


def test_what_no_header_has(altered, data, family):
    size = 8 * -(-family.q.bit_length() // 64)
    for power, of_ceremony in ((0, 3), (4, 3), (2**32 - 1, 2**32 - 1), (3, 64)):
        message = f"power {power}, ceremonyPower {of_ceremony}; expected 1 <= power"
        with refused(HEADER, offset_of(data, HEADER) + 4 + size, message):
            altered(edited(data, HEADER, 4 + size, struct.pack("<II", power, of_ceremony)))
    most = {"bn254": 28, "bls12_381": 32}[family.name]
    message = f"bytes, {2 ** (most + 1) - 1} points need {(2 ** (most + 1) - 1) * 2 * size}"
    with refused(TAU_G1, offset_of(data, TAU_G1), message):  # found without that much memory
        altered(edited(data, HEADER, 4 + size, struct.pack("<II", most, most)))
    with refused(HEADER, None, "not the prime of a supported curve"):
        altered(edited(data, HEADER, 4, bytes(size)))


@pytest.mark.parametrize("number", LAGRANGE)
def test_lagrange_forms_are_all_there_or_none(altered, data, number):
    assert_raises(FormatError, rf"section {number} \(Lagrange .*\) is missing", lambda: altered(without(data, number)))


@pytest.mark.parametrize("number", [TAU_G1, TAU_G2, ALPHA_G1, BETA_G1, BETA_G2, *LAGRANGE])
def test_points_off_the_curve_are_found(altered, data, number):
    wrong = edited(data, number, 8, b"\x5a\x5a")
    with altered(wrong) as powers, refused(number, offset_of(data, number), "point 0 is not on"):
        powers.check()


@pytest.mark.parametrize(
    ("copied", "to", "section", "message"),
    [(1, 0, TAU_G1, "the first power is not the generator of"), (2, 1, CONTRIBUTIONS, "tau_g1 of the last .* differs")],
)
def test_powers_of_another_generator_or_ceremony_are_found(altered, data, family, copied, to, section, message):
    size = 16 * -(-family.q.bit_length() // 64)
    point = data[offset_of(data, TAU_G1) + copied * size :][:size]
    place = offset_of(data, section)
    with altered(edited(data, TAU_G1, to * size, point)) as powers, refused(section, place, message):
        powers.check()


def test_counts_of_contributions_that_would_overflow(altered, data):
    with refused(CONTRIBUTIONS, None, "the section ends within"):
        altered(edited(data, CONTRIBUTIONS, 0, struct.pack("<I", 2**32 - 1)))
    with refused(CONTRIBUTIONS, None, "trailing bytes"):
        altered(edited(data, CONTRIBUTIONS, 0, struct.pack("<I", 1)))


def test_arguments_that_make_no_file(powers, family, tmp_path):
    good = everything(powers)
    for change, error, message in (
        ({"power": 0}, ConfigError, "power and ceremony_power must satisfy 1"),
        ({"power": 4}, ConfigError, "got 4 and 3"),
        ({"tau_g1": powers.powers("tau_g1")[:-1]}, ShapeError, r"tau_g1 must be \(15, \d+\), got \(14,"),
        ({"lagrange": {"tau_g1": powers.powers("tau_g1")}}, ConfigError, "lagrange must have tau_g1, tau_g2,"),
    ):
        assert_raises(error, message, write_ptau, tmp_path / "wrong.ptau", family.name, **(good | change))
    assert not list(tmp_path.iterdir())
