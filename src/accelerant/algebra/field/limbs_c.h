/* Arithmetic of limbs.h in portable C. */

ACL_DEVICE FIELD FIELD_load(ACL_GLOBAL const FIELD_WORD *x, i64 index) {
    FIELD z;
#pragma unroll
    for (int i = 0; i < FIELD_LIMBS / 2; i++) {
        u64 word = x[index * (FIELD_LIMBS / 2) + i];
        z.limb[2 * i] = (u32)word;
        z.limb[2 * i + 1] = (u32)(word >> 32);
    }
    return z;
}

ACL_DEVICE void FIELD_store(ACL_GLOBAL FIELD_WORD *z, i64 index, FIELD x) {
#pragma unroll
    for (int i = 0; i < FIELD_LIMBS / 2; i++) {
        z[index * (FIELD_LIMBS / 2) + i] = x.limb[2 * i] | (u64)x.limb[2 * i + 1] << 32;
    }
}

/* t - p where t >= p, with t < 2 p. */
ACL_DEVICE FIELD FIELD_reduced(FIELD t) {
    const u32 p[FIELD_LIMBS] = {FIELD_MODULUS};
    FIELD less;
    u64 borrow = 0;
#pragma unroll
    for (int i = 0; i < FIELD_LIMBS; i++) {
        u64 difference = (u64)t.limb[i] - p[i] - borrow;
        less.limb[i] = (u32)difference;
        borrow = difference >> 63;
    }
    return FIELD_select(0 - (u32)borrow, t, less);
}

ACL_DEVICE FIELD FIELD_add(FIELD x, FIELD y) {
    u64 carry = 0;
#pragma unroll
    for (int i = 0; i < FIELD_LIMBS; i++) {
        carry += (u64)x.limb[i] + y.limb[i];
        x.limb[i] = (u32)carry;
        carry >>= 32;
    }
    return FIELD_reduced(x);
}

/* x - y, and p once more where that is negative. */
ACL_DEVICE FIELD FIELD_sub(FIELD x, FIELD y) {
    const u32 p[FIELD_LIMBS] = {FIELD_MODULUS};
    u64 borrow = 0;
#pragma unroll
    for (int i = 0; i < FIELD_LIMBS; i++) {
        u64 difference = (u64)x.limb[i] - y.limb[i] - borrow;
        x.limb[i] = (u32)difference;
        borrow = difference >> 63;
    }
    u32 back = 0 - (u32)borrow;
    u64 carry = 0;
#pragma unroll
    for (int i = 0; i < FIELD_LIMBS; i++) {
        carry += (u64)x.limb[i] + (p[i] & back);
        x.limb[i] = (u32)carry;
        carry >>= 32;
    }
    return x;
}

/* x y / R mod p, below p. y may be any number of n limbs. A row of x times a limb of y, and a row of p times m, chosen so
 * that the lowest limb becomes 0, in turn: the sum stays below 2 p 2^32, so that n + 1 limbs hold it.
 * Source: Koc, Acar and Kaliski 1996, IEEE Micro 16(3), "CIOS". */
ACL_DEVICE FIELD FIELD_mul(FIELD x, FIELD y) {
    const u32 p[FIELD_LIMBS] = {FIELD_MODULUS};
    FIELD t = FIELD_zero();
#pragma unroll
    for (int i = 0; i < FIELD_LIMBS; i++) {
        u64 carry = 0;
#pragma unroll
        for (int j = 0; j < FIELD_LIMBS; j++) {
            carry += (u64)x.limb[j] * y.limb[i] + t.limb[j];
            t.limb[j] = (u32)carry;
            carry >>= 32;
        }
        u64 top = carry;
        u32 m = t.limb[0] * FIELD_INVERSE;
        carry = ((u64)m * p[0] + t.limb[0]) >> 32;
#pragma unroll
        for (int j = 1; j < FIELD_LIMBS; j++) {
            carry += (u64)m * p[j] + t.limb[j];
            t.limb[j - 1] = (u32)carry;
            carry >>= 32;
        }
        t.limb[FIELD_LIMBS - 1] = (u32)(top + carry);
    }
    return FIELD_reduced(t);
}

ACL_DEVICE FIELD FIELD_square(FIELD x) {
    return FIELD_mul(x, x);
}

/* (x y - v w) / R mod p, below p. */
ACL_DEVICE FIELD FIELD_mul_sub(FIELD x, FIELD y, FIELD v, FIELD w) {
    return FIELD_sub(FIELD_mul(x, y), FIELD_mul(v, w));
}
