/* Elements of a prime field of several limbs in a reduced radix: FIELD_DIGITS digits of FIELD_DIGIT_BITS bits, fewer than the 32
 * a word has, so that a product's sums of digit products fit in 64 bits and nothing is carried while they are summed. NVIDIA's
 * wide multiply-add without a carry has twice the rate of the one with: a product takes 2 n^2 of the fast ones here where
 * limbs_ptx.h takes 2 m^2 of the slow, m of 32 bits for n digits. Sums and differences carry nothing either, and are not reduced.
 *
 * Stands after limbs.h and one of its arithmetics; FIELD stands for the field's prefix. Given before, by program.py, as lists of
 * digits: FIELD_DIGITS_P p, FIELD_DIGITS_ONE R' mod p and FIELD_DIGITS_LIMBS R mod p; FIELD_DIGITS_INVERSE -1/p mod 2^b.
 *
 * With n digits of b bits R' = 2^(n b): an element stands in Montgomery form, x R'. Its value is at most a small multiple of p,
 * which each function states as [k], at most k p; its digits are below 2^b + 8, but the highest, which holds what there is. A
 * value is below 2^(n b), so with FIELD_DIGITS_LOADED L = R'/R what is [2 L] fits.
 *
 * A product of [x] and [y] is [1 + x y p / R'], which is said below as [2] where x y p < R'; p / R' is below 2^-7 for BN254 and
 * 2^-11 for BLS12-381. Nothing branches on an element.
 *
 * Source: Koc, Acar and Kaliski 1996, IEEE Micro 16(3), "FIOS"; lazy reduction as in Aranha et al., EUROCRYPT 2011, section 3. */

typedef struct {
    u32 digit[FIELD_DIGITS];
} FIELD_lazy;

#define FIELD_DIGIT_MASK ((1U << FIELD_DIGIT_BITS) - 1)

/* sum += x y, which must not overflow. The pair becomes one instruction; of other ways to write it NVIDIA's compiler makes three. */
#if defined(__CUDA_ARCH__)
#define FIELD_MULTIPLY_ADD(sum, x, y)                                                                                       \
    asm("{ .reg .u32 l, h; mov.b64 {l, h}, %0; mad.lo.cc.u32 l, %1, %2, l; madc.hi.u32 h, %1, %2, h; mov.b64 %0, {l, h}; }" \
        : "+l"(sum) : "r"(x), "r"(y))
#else
#define FIELD_MULTIPLY_ADD(sum, x, y) (sum) += (u64)(x) * (y)
#endif

/* The value of limbs in Montgomery form, times L: [L]. The digits are the limbs' bits, L having moved them. */
ACL_DEVICE FIELD_lazy FIELD_lazy_load(FIELD x) {
    FIELD_lazy z;
#pragma unroll
    for (int i = 0; i < FIELD_DIGITS; i++) {
        const int bit = i * FIELD_DIGIT_BITS - FIELD_LOADED_BITS;
        const int low = bit < 0 ? 0 : bit / 32, shift = bit < 0 ? 0 : bit % 32;
        u64 pair = x.limb[low];
        if (low + 1 < FIELD_LIMBS) {
            pair |= (u64)x.limb[low + 1] << 32;
        }
        z.digit[i] = (bit < 0 ? (u32)pair << -bit : (u32)(pair >> shift)) & FIELD_DIGIT_MASK;
    }
    return z;
}

/* What exceeds b bits of a digit goes to the next one: digits are below 2^b + 8 where they were below 2^32. */
ACL_DEVICE FIELD_lazy FIELD_lazy_carried(FIELD_lazy x) {
    FIELD_lazy z;
    z.digit[0] = x.digit[0] & FIELD_DIGIT_MASK;
#pragma unroll
    for (int i = 1; i < FIELD_DIGITS; i++) {
        z.digit[i] = (i + 1 < FIELD_DIGITS ? x.digit[i] & FIELD_DIGIT_MASK : x.digit[i]) + (x.digit[i - 1] >> FIELD_DIGIT_BITS);
    }
    return z;
}

/* [x + y]. */
ACL_DEVICE FIELD_lazy FIELD_lazy_add(FIELD_lazy x, FIELD_lazy y) {
#pragma unroll
    for (int i = 0; i < FIELD_DIGITS; i++) {
        x.digit[i] += y.digit[i];
    }
    return FIELD_lazy_carried(x);
}

/* x - y + k p, [x + k], of y that is [k] by at least 2^(n b - b + 2). `multiple` is k p with digits, but for the highest, that are no
 * less than any digit of y. */
ACL_DEVICE FIELD_lazy FIELD_lazy_less(FIELD_lazy x, FIELD_lazy y, FIELD_lazy multiple) {
#pragma unroll
    for (int i = 0; i < FIELD_DIGITS; i++) {
        x.digit[i] += multiple.digit[i] - y.digit[i];
    }
    return FIELD_lazy_carried(x);
}

/* k p as FIELD_lazy_less takes it: each digit but the lowest lends two units to the one below it. */
ACL_DEVICE FIELD_lazy FIELD_lazy_multiple(u32 k) {
    const u32 p[FIELD_DIGITS] = {FIELD_DIGITS_P};
    FIELD_lazy z;
    u64 carry = 0;
#pragma unroll
    for (int i = 0; i < FIELD_DIGITS; i++) {
        carry += (u64)p[i] * k;
        u32 digit = i + 1 < FIELD_DIGITS ? (u32)carry & FIELD_DIGIT_MASK : (u32)carry;
        z.digit[i] = digit + (i + 1 < FIELD_DIGITS ? 2U << FIELD_DIGIT_BITS : 0) - (i ? 2U : 0);
        carry >>= FIELD_DIGIT_BITS;
    }
    return z;
}

#define FIELD_lazy_sub(x, y, k) FIELD_lazy_less(x, y, FIELD_lazy_multiple(k))

/* Sums of digit products from digit `i` of the result on: n of them, and those of the reduction so far. */
typedef struct {
    u64 sum[FIELD_DIGITS];
} FIELD_sums;

/* One step of the reduction: the lowest digit becomes 0 by a multiple of p, and the sums move down by one. */
ACL_DEVICE FIELD_sums FIELD_lazy_step(FIELD_sums t) {
    const u32 p[FIELD_DIGITS] = {FIELD_DIGITS_P};
    u32 m = (u32)t.sum[0] * FIELD_DIGITS_INVERSE & FIELD_DIGIT_MASK;
#pragma unroll
    for (int j = 0; j < FIELD_DIGITS; j++) {
        FIELD_MULTIPLY_ADD(t.sum[j], m, p[j]);
    }
    u64 carry = t.sum[0] >> FIELD_DIGIT_BITS;
#pragma unroll
    for (int j = 0; j + 1 < FIELD_DIGITS; j++) {
        t.sum[j] = t.sum[j + 1];
    }
    t.sum[FIELD_DIGITS - 1] = 0;
    t.sum[0] += carry;
    return t;
}

/* The element whose digits, before they are carried, the sums are: digits below 2^b. */
ACL_DEVICE FIELD_lazy FIELD_lazy_of_sums(FIELD_sums t) {
    FIELD_lazy z;
    u64 carry = 0;
#pragma unroll
    for (int j = 0; j < FIELD_DIGITS; j++) {
        carry += t.sum[j];
        z.digit[j] = j + 1 < FIELD_DIGITS ? (u32)carry & FIELD_DIGIT_MASK : (u32)carry;
        carry >>= FIELD_DIGIT_BITS;
    }
    return z;
}

ACL_DEVICE FIELD_sums FIELD_lazy_no_sums(void) {
    FIELD_sums t;
#pragma unroll
    for (int j = 0; j < FIELD_DIGITS; j++) {
        t.sum[j] = 0;
    }
    return t;
}

/* x y / R', [2] where x y p < R'. */
ACL_DEVICE FIELD_lazy FIELD_lazy_mul(FIELD_lazy x, FIELD_lazy y) {
    FIELD_sums t = FIELD_lazy_no_sums();
#pragma unroll
    for (int i = 0; i < FIELD_DIGITS; i++) {
#pragma unroll
        for (int j = 0; j < FIELD_DIGITS; j++) {
            FIELD_MULTIPLY_ADD(t.sum[j], x.digit[j], y.digit[i]);
        }
        t = FIELD_lazy_step(t);
    }
    return FIELD_lazy_of_sums(t);
}

/* (x y + v w) / R', [2] where (x y + v w) p < R'. */
ACL_DEVICE FIELD_lazy FIELD_lazy_dot2(FIELD_lazy x, FIELD_lazy y, FIELD_lazy v, FIELD_lazy w) {
    FIELD_sums t = FIELD_lazy_no_sums();
#pragma unroll
    for (int i = 0; i < FIELD_DIGITS; i++) {
#pragma unroll
        for (int j = 0; j < FIELD_DIGITS; j++) {
            FIELD_MULTIPLY_ADD(t.sum[j], x.digit[j], y.digit[i]);
            FIELD_MULTIPLY_ADD(t.sum[j], v.digit[j], w.digit[i]);
        }
        t = FIELD_lazy_step(t);
    }
    return FIELD_lazy_of_sums(t);
}

/* (x y + v w + a b + c d) / R', likewise; its sums take 5 n 2^(2 b). */
ACL_DEVICE FIELD_lazy FIELD_lazy_dot4(FIELD_lazy x, FIELD_lazy y, FIELD_lazy v, FIELD_lazy w, FIELD_lazy a, FIELD_lazy b,
                                      FIELD_lazy c, FIELD_lazy d) {
    FIELD_sums t = FIELD_lazy_no_sums();
#pragma unroll
    for (int i = 0; i < FIELD_DIGITS; i++) {
#pragma unroll
        for (int j = 0; j < FIELD_DIGITS; j++) {
            FIELD_MULTIPLY_ADD(t.sum[j], x.digit[j], y.digit[i]);
            FIELD_MULTIPLY_ADD(t.sum[j], v.digit[j], w.digit[i]);
            FIELD_MULTIPLY_ADD(t.sum[j], a.digit[j], b.digit[i]);
            FIELD_MULTIPLY_ADD(t.sum[j], c.digit[j], d.digit[i]);
        }
        t = FIELD_lazy_step(t);
    }
    return FIELD_lazy_of_sums(t);
}

/* x^2 / R', [2] where x^2 p < R'; a product of two different digits is found once, with one of them doubled. A digit's double
 * fits: it is below 2^31. Column k of the product is complete before its step. */
ACL_DEVICE FIELD_lazy FIELD_lazy_square(FIELD_lazy x) {
    u64 column[2 * FIELD_DIGITS];
#pragma unroll
    for (int k = 0; k < 2 * FIELD_DIGITS; k++) {
        column[k] = 0;
    }
#pragma unroll
    for (int i = 0; i < FIELD_DIGITS; i++) {
        FIELD_MULTIPLY_ADD(column[2 * i], x.digit[i], x.digit[i]);
#pragma unroll
        for (int j = i + 1; j < FIELD_DIGITS; j++) {
            FIELD_MULTIPLY_ADD(column[i + j], x.digit[i] << 1, x.digit[j]);
        }
    }
    FIELD_sums t;
#pragma unroll
    for (int j = 0; j < FIELD_DIGITS; j++) {
        t.sum[j] = column[j];
    }
#pragma unroll
    for (int i = 0; i < FIELD_DIGITS; i++) {
        t = FIELD_lazy_step(t);
        t.sum[FIELD_DIGITS - 1] += column[FIELD_DIGITS + i];
    }
    return FIELD_lazy_of_sums(t);
}

/* All bits set where x, a product that is [2] with its digits carried, is 0 mod p: 0 or p. */
ACL_DEVICE u32 FIELD_lazy_product_is_zero(FIELD_lazy x) {
    const u32 p[FIELD_DIGITS] = {FIELD_DIGITS_P};
    u32 any = 0, other = 0;
#pragma unroll
    for (int i = 0; i < FIELD_DIGITS; i++) {
        any |= x.digit[i];
        other |= x.digit[i] ^ p[i];
    }
    return 0 - (u32)((any == 0) | (other == 0));
}

ACL_DEVICE FIELD_lazy FIELD_lazy_zero(void) {
    FIELD_lazy z;
#pragma unroll
    for (int i = 0; i < FIELD_DIGITS; i++) {
        z.digit[i] = 0;
    }
    return z;
}

/* [1]. */
ACL_DEVICE FIELD_lazy FIELD_lazy_one(void) {
    const FIELD_lazy z = {{FIELD_DIGITS_ONE}};
    return z;
}

/* All bits set where all digits are 0, which a value other than 0 has not. */
ACL_DEVICE u32 FIELD_lazy_is_plain_zero(FIELD_lazy x) {
    u32 any = 0;
#pragma unroll
    for (int i = 0; i < FIELD_DIGITS; i++) {
        any |= x.digit[i];
    }
    return 0 - (u32)(any == 0);
}

/* x where mask has all bits set, y where it has none. */
ACL_DEVICE FIELD_lazy FIELD_lazy_select(u32 mask, FIELD_lazy x, FIELD_lazy y) {
#pragma unroll
    for (int i = 0; i < FIELD_DIGITS; i++) {
        x.digit[i] = (x.digit[i] & mask) | (y.digit[i] & ~mask);
    }
    return x;
}

/* The limbs in Montgomery form, below p, of what is [L]: one product, by R. */
ACL_DEVICE FIELD FIELD_lazy_store(FIELD_lazy x) {
    const FIELD_lazy limbs = {{FIELD_DIGITS_LIMBS}};
    x = FIELD_lazy_mul(x, limbs);
    FIELD z;
#pragma unroll
    for (int i = 0; i < FIELD_LIMBS; i++) {
        const int low = 32 * i / FIELD_DIGIT_BITS, shift = 32 * i % FIELD_DIGIT_BITS;
        u32 limb = x.digit[low] >> shift;
        if (low + 1 < FIELD_DIGITS) {
            limb |= x.digit[low + 1] << (FIELD_DIGIT_BITS - shift);
        }
        if (low + 2 < FIELD_DIGITS && 2 * FIELD_DIGIT_BITS - shift < 32) {
            limb |= x.digit[low + 2] << (2 * FIELD_DIGIT_BITS - shift);
        }
        z.limb[i] = limb;
    }
    return FIELD_add(z, FIELD_zero());
}
