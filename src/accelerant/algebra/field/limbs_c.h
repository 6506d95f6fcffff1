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

/* Return x + y, which must fit in n limbs. */
ACL_DEVICE FIELD FIELD_lazy_add(FIELD x, FIELD y) {
    u64 carry = 0;
#pragma unroll
    for (int i = 0; i < FIELD_LIMBS; i++) {
        carry += (u64)x.limb[i] + y.limb[i];
        x.limb[i] = (u32)carry;
        carry >>= 32;
    }
    return x;
}

/* x - y, and whether that is negative: all bits set, or none. */
ACL_DEVICE FIELD FIELD_difference(FIELD x, FIELD y, u32 *negative) {
    u64 borrow = 0;
#pragma unroll
    for (int i = 0; i < FIELD_LIMBS; i++) {
        u64 difference = (u64)x.limb[i] - y.limb[i] - borrow;
        x.limb[i] = (u32)difference;
        borrow = difference >> 63;
    }
    *negative = 0 - (u32)borrow;
    return x;
}

/* t - bound where t is no less. */
ACL_DEVICE FIELD FIELD_below(FIELD t, FIELD bound) {
    u32 negative;
    FIELD less = FIELD_difference(t, bound, &negative);
    return FIELD_select(negative, t, less);
}

/* t - p where t >= p, with t < 2 p. FIELD_below instead would cost an inverse 7 registers more on AMD GPUs (clang). */
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
    return FIELD_reduced(FIELD_lazy_add(x, y));
}

/* x - y, plus p where that is negative. */
ACL_DEVICE FIELD FIELD_sub(FIELD x, FIELD y) {
    const FIELD p = {{FIELD_MODULUS}};
    u32 negative;
    FIELD z = FIELD_difference(x, y, &negative);
    return FIELD_lazy_add(z, FIELD_select(negative, p, FIELD_zero()));
}

/* x y / R mod p, below p. y may be any number of n limbs. For each limb of y, that limb times x is added, and p times an m
 * that makes the lowest limb 0, which is dropped: the sum stays below 2 p 2^32, so that n + 1 limbs hold it.
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

/* x w mod p, below (1 + x / R + 2^-28) p, of any number x of n limbs; `quotient` is floor(w R / p) of w < p. It is the lower
 * half of x w - q p, where q is the upper half of x times the quotient without the products below limb n - 2.
 * Here and below p < 2^(32 n - 2). Source: Shoup's product by a constant, as in Harvey 2014, J. Symbolic Computation 60. */
ACL_DEVICE FIELD FIELD_shoup(FIELD x, FIELD w, FIELD quotient) {
    const u32 p[FIELD_LIMBS] = {FIELD_MODULUS};
    u32 upper[2 * FIELD_LIMBS];
#pragma unroll
    for (int i = 0; i < 2 * FIELD_LIMBS; i++) {
        upper[i] = 0;
    }
#pragma unroll
    for (int i = 0; i < FIELD_LIMBS; i++) {
        u64 carry = 0;
#pragma unroll
        for (int j = 0; j < FIELD_LIMBS; j++) {
            if (i + j >= FIELD_LIMBS - 2) {
                carry += (u64)x.limb[j] * quotient.limb[i] + upper[i + j];
                upper[i + j] = (u32)carry;
                carry >>= 32;
            }
        }
        upper[i + FIELD_LIMBS] = (u32)carry;
    }
    FIELD z = FIELD_zero();
#pragma unroll
    for (int i = 0; i < FIELD_LIMBS; i++) {
        u64 more = 0, less = 0;
#pragma unroll
        for (int j = 0; j < FIELD_LIMBS - i; j++) {
            u32 minus_p = ~p[j] + (j == 0 ? 1U : 0U);
            more += (u64)x.limb[j] * w.limb[i] + z.limb[i + j];
            less += (u64)upper[FIELD_LIMBS + i] * minus_p + (u32)more;
            z.limb[i + j] = (u32)less;
            more >>= 32;
            less >>= 32;
        }
    }
    return z;
}

ACL_DEVICE FIELD FIELD_twice_p(void) {
    const FIELD p = {{FIELD_MODULUS}};
    return FIELD_lazy_add(p, p);
}

/* x - y + 2 p, of y < 2 p. */
ACL_DEVICE FIELD FIELD_lazy_sub(FIELD x, FIELD y) {
    u32 negative;
    return FIELD_difference(FIELD_lazy_add(x, FIELD_twice_p()), y, &negative);
}

/* x - 2 p where x is no less. */
ACL_DEVICE FIELD FIELD_lazy_reduce(FIELD x) {
    return FIELD_below(x, FIELD_twice_p());
}
