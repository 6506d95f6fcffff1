/* Arithmetic of limbs.h with NVIDIA's carry flag. The chains, FIELD_PTX_*(result, arguments), are unrolled for the
 * field's limbs by program.py, which describes them. */

/* Aligned to 16 bytes, an element is read and written in two or three wide accesses: half or a third as many. */
ACL_DEVICE FIELD FIELD_load(const FIELD_WORD *x, i64 index) {
    FIELD z;
    x += index * (FIELD_LIMBS / 2);
    if (((u64)x & 15) == 0) {
#pragma unroll
        for (int i = 0; i < FIELD_LIMBS / 4; i++) {
            uint4 part = ((const uint4 *)x)[i];
            z.limb[4 * i] = part.x, z.limb[4 * i + 1] = part.y, z.limb[4 * i + 2] = part.z, z.limb[4 * i + 3] = part.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < FIELD_LIMBS / 2; i++) {
            uint2 part = ((const uint2 *)x)[i];
            z.limb[2 * i] = part.x, z.limb[2 * i + 1] = part.y;
        }
    }
    return z;
}

ACL_DEVICE void FIELD_store(FIELD_WORD *z, i64 index, FIELD x) {
    z += index * (FIELD_LIMBS / 2);
    if (((u64)z & 15) == 0) {
#pragma unroll
        for (int i = 0; i < FIELD_LIMBS / 4; i++) {
            ((uint4 *)z)[i] = make_uint4(x.limb[4 * i], x.limb[4 * i + 1], x.limb[4 * i + 2], x.limb[4 * i + 3]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < FIELD_LIMBS / 2; i++) {
            ((uint2 *)z)[i] = make_uint2(x.limb[2 * i], x.limb[2 * i + 1]);
        }
    }
}

ACL_DEVICE FIELD FIELD_add(FIELD x, FIELD y) {
    FIELD z;
    FIELD_PTX_ADD(z, x, y);
    return z;
}

ACL_DEVICE FIELD FIELD_sub(FIELD x, FIELD y) {
    FIELD z;
    FIELD_PTX_SUB(z, x, y);
    return z;
}

/* x y / R mod p, below p. y may be any number of n limbs. */
ACL_DEVICE FIELD FIELD_mul(FIELD x, FIELD y) {
    FIELD z;
    FIELD_PTX_MUL(z, x, y);
    return z;
}

ACL_DEVICE FIELD FIELD_square(FIELD x) {
    FIELD z;
    FIELD_PTX_SQUARE(z, x);
    return z;
}

/* (x y - v w) / R mod p, below p: one reduction for both where p has two spare bits. */
ACL_DEVICE FIELD FIELD_mul_sub(FIELD x, FIELD y, FIELD v, FIELD w) {
#if defined(FIELD_PTX_DOT2)
    FIELD z;
    w = FIELD_sub(FIELD_zero(), w);
    FIELD_PTX_DOT2(z, w, v, x, y);
    return z;
#else
    return FIELD_sub(FIELD_mul(x, y), FIELD_mul(v, w));
#endif
}

/* The following functions take unreduced elements, any number of n limbs unless a bound is given; see limbs_c.h. */
#if defined(FIELD_PTX_SHOUP)
ACL_DEVICE FIELD FIELD_shoup(FIELD x, FIELD w, FIELD quotient) {
    FIELD z;
    FIELD_PTX_SHOUP(z, x, w, quotient);
    return z;
}

ACL_DEVICE FIELD FIELD_lazy_add(FIELD x, FIELD y) {
    FIELD z;
    FIELD_PTX_LAZY_ADD(z, x, y);
    return z;
}

ACL_DEVICE FIELD FIELD_lazy_sub(FIELD x, FIELD y) {
    FIELD z;
    FIELD_PTX_LAZY_SUB(z, x, y);
    return z;
}

ACL_DEVICE FIELD FIELD_lazy_reduce(FIELD x) {
    FIELD z;
    FIELD_PTX_LAZY_REDUCE(z, x);
    return z;
}
#endif
