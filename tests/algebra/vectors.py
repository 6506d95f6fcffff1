"""Inputs of any size from splitmix64, and the known answers to them, for the tests of fields, transforms and sums.

Points P_i = splitmix64(0x1000000000000000 + i) G. Scalars s_i and field elements: limbs j splitmix64(base + 4 i + j),
masked to the bits of the modulus, less the modulus if not below it; one-limb fields take splitmix64(base + i) mod p.
The base is 0x2000000000000000 for scalars and 0x3000000000000000 for the inputs of transforms.
"""

import numpy as np

POINTS_BASE = 0x1000000000000000
SCALARS_BASE = 0x2000000000000000
TRANSFORM_BASE = 0x3000000000000000

MSM_ANSWERS = {
    ("bn254_g1", 14): (
        0x21D6449766AFF412EEF566981338262C353E201E30EEE51BB79CB8D2F7E744DB,
        0x2D074656D9A8E63942B60610997A3DD09169DD3741498B8C2B3F3D6A30615283,
    ),
    ("bn254_g1", 16): (
        0x064DD6239F3839EC342722A510E46BD9FD88E521D2FED37C14AE5F3068D711D2,
        0x2C9462A42487573E0BE5C643000FF9015E05219C887A095365435034DF54B954,
    ),
    ("bls12_381_g1", 14): (
        0x06DD3515347F2463645A6FF0761B113EBCC9268BF4576660A727D06EB622979AF678CD46CFC642ADF0E44666D75384D2,
        0x08E2E158F2B99D44F5046BA21D2BAAA976B6AA2027847F1A10E1893235AF79142D36428E40C6B3B31AFAB107F11CB9F6,
    ),
    ("bls12_381_g1", 16): (
        0x19111BB671200B538BEC13C18C79B20CA01453B45239031EBBBE340D42115FDEB8AA834BD86F293D7F970AE51303DB19,
        0x07A12025B4E339A4FFDE1CB5E3C84B4BD698C96932C0EDC54183ECA6186B5141FC74975478ECF3C2DAB7A079F2B968F5,
    ),
}
"""(curve, k) -> the affine sum of s_i P_i for i below 2^k: (sum s_i m_i mod r) G, if P_i is m_i G."""


def splitmix64(x):
    """The function of splitmix64 at x (an integer or an array of uint64); an integer or an array of uint64."""
    z = np.atleast_1d(np.asarray(x, dtype=np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return z if isinstance(x, np.ndarray) else int(z[0])


def field_elements(field, n, base):
    """n elements of a field of four limbs or of one, as integers."""
    if field.limbs == 1:
        return [int(z) % field.modulus for z in splitmix64(np.uint64(base) + np.arange(n, dtype=np.uint64))]
    if field.limbs != 4:
        raise ValueError(f"these inputs are defined for one limb and for four, not for {field.limbs} ({field.name})")
    data = splitmix64(np.uint64(base) + np.arange(4 * n, dtype=np.uint64)).astype("<u8").tobytes()
    mask = (1 << field.bits) - 1
    values = (int.from_bytes(data[i : i + 32], "little") & mask for i in range(0, len(data), 32))
    return [value - field.modulus if value >= field.modulus else value for value in values]


def msm_scalars(curve, n):
    """The n scalars of a sum over a curve."""
    return field_elements(curve.scalars, n, SCALARS_BASE)


def msm_multipliers(n):
    """What the generator is multiplied by, as integers below 2^64."""
    return [int(z) for z in splitmix64(np.uint64(POINTS_BASE) + np.arange(n, dtype=np.uint64))]
