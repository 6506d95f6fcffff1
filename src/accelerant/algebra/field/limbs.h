/* A prime field of several limbs, in Montgomery form: the element type. FIELD is replaced by the field's
 * prefix. limbs_c.h or limbs_ptx.h follows, with the arithmetic.
 *
 * Defined by program.py: FIELD_LIMBS n, a multiple of 4, of 32-bit limbs, R = 2^(32 n); FIELD_INVERSE -1/p mod 2^32;
 * and as lists of limbs FIELD_MODULUS p, FIELD_ONE R mod p, FIELD_R2 R^2 mod p. p has a spare bit: p < 2^(32 n - 1).
 *
 * An element is below p, the least significant limb first. No branch and no address depends on one, so all functions take the
 * same time for all values. In memory an element is n / 2 words of 64 bits. */
#define FIELD_WORD u64

typedef struct {
    u32 limb[FIELD_LIMBS];
} FIELD;

ACL_DEVICE FIELD FIELD_zero(void) {
    FIELD z;
#pragma unroll
    for (int i = 0; i < FIELD_LIMBS; i++) {
        z.limb[i] = 0;
    }
    return z;
}

/* 1 in Montgomery form. */
ACL_DEVICE FIELD FIELD_one(void) {
    const FIELD z = {{FIELD_ONE}};
    return z;
}

/* Return all bits set if x is 0, else none. */
ACL_DEVICE u32 FIELD_is_zero(FIELD x) {
    u32 any = 0;
#pragma unroll
    for (int i = 0; i < FIELD_LIMBS; i++) {
        any |= x.limb[i];
    }
    return (u32)(((u64)any - 1) >> 32);
}

/* Return x if mask has all bits set, y if it has none. */
ACL_DEVICE FIELD FIELD_select(u32 mask, FIELD x, FIELD y) {
#pragma unroll
    for (int i = 0; i < FIELD_LIMBS; i++) {
        x.limb[i] = (x.limb[i] & mask) | (y.limb[i] & ~mask);
    }
    return x;
}

/* Return whether x is below p; x is any number of n limbs. */
ACL_DEVICE u32 FIELD_is_reduced(FIELD x) {
    const u32 p[FIELD_LIMBS] = {FIELD_MODULUS};
    u64 borrow = 0;
#pragma unroll
    for (int i = 0; i < FIELD_LIMBS; i++) {
        borrow = ((u64)x.limb[i] - p[i] - borrow) >> 63;
    }
    return (u32)borrow;
}

ACL_DEVICE FIELD FIELD_mul(FIELD x, FIELD y);

/* x R mod p; x is any number of n limbs. */
ACL_DEVICE FIELD FIELD_to_montgomery(FIELD x) {
    const FIELD r2 = {{FIELD_R2}};
    return FIELD_mul(r2, x);
}

ACL_DEVICE FIELD FIELD_from_montgomery(FIELD x) {
    FIELD one = FIELD_zero();
    one.limb[0] = 1;
    return FIELD_mul(x, one);
}
