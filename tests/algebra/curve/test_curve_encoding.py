import json
from pathlib import Path

import numpy as np
import pytest

from accelerant import zk
from accelerant.algebra.curve import CURVES, curve_of
from accelerant.algebra.curve.weierstrass import (
    add,
    decode_points,
    encode_points,
    multiply,
    negate,
    point_bytes,
    points_from_bytes,
    points_to_bytes,
)
from accelerant.errors import ConfigError, FormatError, ShapeError, UnsupportedDtype
from refusals import assert_raises

NAMES = list(CURVES)
LAYOUTS = ["evm", "uncompressed", "compressed"]
each_curve = pytest.mark.parametrize("name", NAMES)
each_layout = pytest.mark.parametrize("layout", LAYOUTS)


def sample(curve):
    g = curve.generator
    return [g, None, negate(curve, g), multiply(curve, 3, g), multiply(curve, 1 << 200, g), None]


def test_shapes():
    assert {name: curve_of(name).shape for name in NAMES} == {
        "bn254_g1": (2, 4), "bn254_g2": (2, 2, 4), "bls12_381_g1": (2, 6), "bls12_381_g2": (2, 2, 6),
    }  # fmt: skip


@each_curve
def test_arrays_round_trip(name):
    curve = curve_of(name)
    points = sample(curve)
    array = encode_points(curve, points)
    assert array.dtype == np.uint64
    assert array.shape == (len(points), *curve.shape)
    assert array.flags.writeable
    assert not array[1].any()
    # The limbs, from the definition.
    parts = [part for element in points[3] for part in curve.coordinates.parts(element)]
    limbs = [part >> 64 * i & (1 << 64) - 1 for part in parts for i in range(curve.shape[-1])]
    assert array[3].reshape(-1).tolist() == limbs
    assert decode_points(curve, array) == points
    assert decode_points(curve, array[::2]) == points[::2]
    assert decode_points(curve, np.asfortranarray(array)) == points
    assert decode_points(curve, encode_points(curve, [])) == []


@each_curve
def test_arrays_refused(name):
    curve = curve_of(name)
    q = curve.coordinates.base.modulus
    good = encode_points(curve, sample(curve))
    assert_raises(UnsupportedDtype, "must be uint64, got int64", lambda: decode_points(curve, good.astype(np.int64)))
    for wrong in (good[0], good[..., :-1], good[:, :1], good[None]):
        assert_raises(ShapeError, rf"points of {name} must be \(n, 2, .*got", decode_points, curve, wrong)
    for value in (q, q + 1, (1 << 64 * curve.shape[-1]) - 1):
        bad = good.copy()
        bad[(3, *(-1,) * (len(curve.shape) - 1))] = np.frombuffer(value.to_bytes(8 * curve.shape[-1], "little"), "<u8")
        coordinate = "y" if len(curve.shape) == 2 else r"y\.c1"
        with pytest.raises(FormatError, match=rf"points\[3\] {coordinate} is {value:#x}, not reduced.*{q:#x}"):
            decode_points(curve, bad)


@each_curve
def test_points_that_cannot_be_encoded(name):
    curve = curve_of(name)
    k, (x, y) = curve.coordinates, curve.generator
    for value in (k.base.modulus, -1):
        wrong = k.join([value] * k.degree)
        with pytest.raises(FormatError, match=rf"points\[1\] y.* is {value:#x}, not reduced"):
            encode_points(curve, [(x, y), (x, wrong)])
        with pytest.raises(FormatError, match=rf"points\[0\] x.* is {value:#x}, not reduced"):
            points_to_bytes(curve, [(wrong, y)], "compressed")


@each_curve
@each_layout
def test_bytes_round_trip(name, layout):
    curve = curve_of(name)
    points = sample(curve)
    data = points_to_bytes(curve, points, layout)
    assert len(data) == len(points) * point_bytes(curve, layout)
    assert points_from_bytes(curve, data, layout) == points
    assert points_from_bytes(curve, b"", layout) == []
    for wrong in (data[:-1], data + b"\0"):
        assert_raises(FormatError, rf"bytes each; {len(wrong)} is no multiple", points_from_bytes, curve, wrong, layout)


def test_sizes():
    sizes = {(name, layout): point_bytes(curve_of(name), layout) for name in NAMES for layout in LAYOUTS}
    assert sizes == {
        ("bn254_g1", "evm"): 64, ("bn254_g1", "uncompressed"): 64, ("bn254_g1", "compressed"): 32,
        ("bn254_g2", "evm"): 128, ("bn254_g2", "uncompressed"): 128, ("bn254_g2", "compressed"): 64,
        ("bls12_381_g1", "evm"): 128, ("bls12_381_g1", "uncompressed"): 96, ("bls12_381_g1", "compressed"): 48,
        ("bls12_381_g2", "evm"): 256, ("bls12_381_g2", "uncompressed"): 192, ("bls12_381_g2", "compressed"): 96,
    }  # fmt: skip
    with pytest.raises(ConfigError, match="unknown layout 'arkworks'; known are evm"):
        point_bytes(curve_of("bn254_g1"), "arkworks")


def test_zcash_generators():
    # The draft's and ZCash's own: the generators' x, with 0x80, and 0x20 more for the larger y.
    g1, g2 = curve_of("bls12_381_g1"), curve_of("bls12_381_g2")
    x1, x2 = f"{g1.generator[0]:096x}", f"{g2.generator[0][1]:096x}{g2.generator[0][0]:096x}"
    assert points_to_bytes(g1, [g1.generator], "compressed").hex() == "97" + x1[2:]
    assert points_to_bytes(g1, [negate(g1, g1.generator)], "compressed").hex() == "b7" + x1[2:]
    assert points_to_bytes(g2, [g2.generator], "compressed").hex() == "93" + x2[2:]
    assert points_to_bytes(g2, [negate(g2, g2.generator)], "compressed").hex() == "b3" + x2[2:]
    for curve in (g1, g2):
        for layout, flags in (("compressed", 0xC0), ("uncompressed", 0x40)):
            assert points_to_bytes(curve, [None], layout) == bytes([flags]) + bytes(point_bytes(curve, layout) - 1)


def test_gnark_generators():
    g1, g2 = curve_of("bn254_g1"), curve_of("bn254_g2")
    assert points_to_bytes(g1, [(1, 2)], "compressed").hex() == "80" + "00" * 30 + "01"
    assert points_to_bytes(g1, [negate(g1, (1, 2))], "compressed").hex() == "c0" + "00" * 30 + "01"
    c0, c1 = g2.generator[0]
    # 0x09... of y's c1 is below q / 2: the smaller root.
    assert points_to_bytes(g2, [g2.generator], "compressed").hex() == f"{c1 | 1 << 255:064x}{c0:064x}"
    for curve in (g1, g2):
        assert points_to_bytes(curve, [None], "compressed") == b"\x40" + bytes(point_bytes(curve, "compressed") - 1)
        assert points_to_bytes(curve, sample(curve), "uncompressed") == points_to_bytes(curve, sample(curve), "evm")


@each_curve
@pytest.mark.parametrize("layout", ["uncompressed", "compressed"])
def test_flags(name, layout):
    """Of all values of the flags, a finite point has one or two, and infinity one."""
    curve = curve_of(name)
    bits = 2 if name.startswith("bn254") else 3
    size = point_bytes(curve, layout)
    for flags in range(1 << bits):
        top = flags << 8 - bits
        finite = bytearray(points_to_bytes(curve, [None, curve.generator], layout))
        finite[size] = finite[size] & 0xFF >> bits | top
        zero = bytes([top]) + bytes(size - 1)
        compressed = layout == "compressed"
        if bits == 3:
            takes_finite = flags in ((0b100, 0b101) if compressed else (0b000,))
            takes_zero = flags == (0b110 if compressed else 0b010)
        else:
            takes_finite = flags in ((0b10, 0b11) if compressed else (0b00,))
            takes_zero = flags == (0b01 if compressed else 0b00)
        if takes_finite:
            assert points_from_bytes(curve, bytes(finite), layout)[1][0] == curve.generator[0]
        else:
            with pytest.raises(FormatError, match=r"points\[1\] (has flags|is flagged as infinity but is 0x)"):
                points_from_bytes(curve, bytes(finite), layout)
        if takes_zero:
            assert points_from_bytes(curve, zero, layout) == [None]
        elif not (compressed and takes_finite):
            with pytest.raises(FormatError, match=r"points\[0\] (has flags|is all zeros without)"):
                points_from_bytes(curve, zero, layout)


@each_curve
def test_compressed_x_of_no_point(name):
    curve = curve_of(name)
    k = curve.coordinates
    x = k.one
    while k.sqrt(curve.right_side(x)) is not None:
        x = k.add(x, k.one)
    data = points_to_bytes(curve, [curve.generator, (x, k.one)], "compressed")
    with pytest.raises(FormatError, match=rf"points\[1\] has x = .*0x.*, with which no point is on {name}"):
        points_from_bytes(curve, data, "compressed")


@each_curve
@each_layout
def test_unreduced_bytes(name, layout):
    curve = curve_of(name)
    q, size = curve.coordinates.base.modulus, curve.coordinates.base.size_bytes
    data = bytearray(points_to_bytes(curve, [curve.generator] * 2, layout))
    # The last coefficient of the second point has no flags.
    data[-size:] = q.to_bytes(size, "big")
    if layout == "compressed" and curve.coordinates.degree == 1:
        data[-size] |= 0x80
    with pytest.raises(FormatError, match=rf"points\[1\] [xy].* is {q:#x}, not reduced"):
        points_from_bytes(curve, bytes(data), layout)


# The answers of Ethereum's precompiles: EIP-196, EIP-197, EIP-2537.

FOLDER = Path(__file__).parents[2] / "vectors"


def cases(file, kind, *names):
    rows = json.loads((FOLDER / f"{file}.json").read_text())[kind]
    return [pytest.param(*names, row, id=f"{file}-{row['Name']}") for row in rows]


@pytest.mark.parametrize(
    ("name", "row"), [*cases("eip196", "add", "bn254_g1"), *cases("eip2537", "add_g1", "bls12_381_g1")]
)
def test_add(name, row):
    curve = curve_of(name)
    p, q = points_from_bytes(curve, bytes.fromhex(row["Input"]), "evm")
    assert all(map(curve.is_on_curve, (p, q)))
    assert points_to_bytes(curve, [add(curve, p, q)], "evm").hex() == row["Expected"]


@pytest.mark.parametrize(("name", "row"), [
    *cases("eip196", "mul", "bn254_g1"),
    *cases("eip2537", "mul_g1", "bls12_381_g1"),
    *cases("eip2537", "mul_g2", "bls12_381_g2"),
])  # fmt: skip
def test_multiply(name, row):
    curve, data = curve_of(name), bytes.fromhex(row["Input"])
    (p,) = points_from_bytes(curve, data[:-32], "evm")
    assert (
        points_to_bytes(curve, [multiply(curve, int.from_bytes(data[-32:], "big"), p)], "evm").hex() == row["Expected"]
    )


@pytest.mark.parametrize(
    ("name", "row"),
    [*cases("eip2537", "fail_mul_g1", "bls12_381_g1"), *cases("eip2537", "fail_mul_g2", "bls12_381_g2")],
)
def test_refused(name, row):
    reason = {
        "invalid input length": "is no multiple of",
        "invalid fp.Element encoding": "not reduced",
        "invalid field element top bytes": "not reduced",
        "invalid point: not on curve": "which is not on",
        "g1 point is not in the correct subgroup": "out of the subgroup",
        "g2 point is not on correct subgroup": "out of the subgroup",
    }[row["ExpectedError"]]
    assert_raises(FormatError, reason, lambda: zk.curve(name).from_bytes(bytes.fromhex(row["Input"])[:-32], "evm"))
