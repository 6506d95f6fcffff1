/* Inverses in a prime field by divsteps, for few elements at once: x^(p - 2) takes about 330 sequential products, and this
 * about a tenth of their time. BASE is the field's prefix. Its arithmetic precedes this file, with the number of 30-bit digits
 * BASE_DIGITS, the digits BASE_MODULUS_DIGITS of p, and BASE_MODULUS_INVERSE, 1/p mod 2^30. The time depends on the element.
 *
 * From f = p, g = x, a divstep maps (f, g) to (f, g/2), (f, (g + f)/2) or (g, (g - f)/2), until g = 0 and f = 1 or -1. The
 * choice depends on the lowest bit of g and on a counter, so 30 steps depend on the lowest 30 bits: they are computed there, as
 * a matrix of small numbers, and applied to all of f and g, and mod p to d and e, with f = d x and g = e x up to the powers
 * of 2 that were divided off.
 * Source: Bernstein and Yang, eprint 2019/266; the counter starts at 1/2, which takes fewer steps (Pieter Wuille). */

#define MSM_DIGIT_MASK 0x3fffffff

/* Digits of 30 bits, least significant first; the last one is signed. */
typedef struct {
    i32 digit[BASE_DIGITS];
} BASE_digits;

ACL_DEVICE BASE_digits BASE_to_digits(BASE x) {
    BASE_digits z;
#pragma unroll
    for (i32 i = 0; i < BASE_DIGITS; i++) {
        i32 at = 30 * i / 32;
        u64 low = at < BASE_LIMBS ? x.limb[at < BASE_LIMBS ? at : 0] : 0;
        u64 high = at + 1 < BASE_LIMBS ? x.limb[at + 1 < BASE_LIMBS ? at + 1 : 0] : 0;
        z.digit[i] = (i32)((low | high << 32) >> 30 * i % 32) & MSM_DIGIT_MASK;
    }
    return z;
}

/* Convert non-negative digits to BASE_LIMBS limbs. */
ACL_DEVICE BASE BASE_from_digits(BASE_digits x) {
    BASE z;
#pragma unroll
    for (i32 j = 0; j < BASE_LIMBS; j++) {
        i32 at = 32 * j / 30;
        u64 sum = (u64)x.digit[at];
        sum |= at + 1 < BASE_DIGITS ? (u64)x.digit[at + 1 < BASE_DIGITS ? at + 1 : 0] << 30 : 0;
        sum |= at + 2 < BASE_DIGITS ? (u64)x.digit[at + 2 < BASE_DIGITS ? at + 2 : 0] << 60 : 0;
        z.limb[j] = (u32)(sum >> 32 * j % 30);
    }
    return z;
}

/* (x u + y v + w p) / 2^30, an exact division. */
ACL_DEVICE BASE_digits BASE_combined(BASE_digits x, i64 u, BASE_digits y, i64 v, i64 w) {
    const i32 p[BASE_DIGITS] = {BASE_MODULUS_DIGITS};
    BASE_digits z;
    i64 sum = (u * x.digit[0] + v * y.digit[0] + w * p[0]) >> 30;
#pragma unroll
    for (i32 i = 1; i < BASE_DIGITS; i++) {
        sum += u * x.digit[i] + v * y.digit[i] + w * p[i];
        z.digit[i - 1] = (i32)sum & MSM_DIGIT_MASK;
        sum >>= 30;
    }
    z.digit[BASE_DIGITS - 1] = (i32)sum;
    return z;
}

/* The w, -2^29 <= w < 2^29, for which x u + y v + w p is a multiple of 2^30. */
ACL_DEVICE i64 BASE_multiple_of_p(BASE_digits x, i32 u, BASE_digits y, i32 v) {
    u32 lowest = (u32)x.digit[0] * (u32)u + (u32)y.digit[0] * (u32)v;
    return (i32)((0 - lowest * BASE_MODULUS_INVERSE) << 2) >> 2;
}

/* x + sign y, sign 1 or -1. */
ACL_DEVICE BASE_digits BASE_sum_of_digits(BASE_digits x, BASE_digits y, i32 sign) {
    i32 carry = 0;
#pragma unroll
    for (i32 i = 0; i < BASE_DIGITS; i++) {
        carry += x.digit[i] + sign * y.digit[i];
        x.digit[i] = i < BASE_DIGITS - 1 ? carry & MSM_DIGIT_MASK : carry;
        carry >>= 30;
    }
    return x;
}

/* 1/x in Montgomery form, 0 for 0. d and e grow by p/2 in 30 steps, to less than 16 p, which fits the digits. */
ACL_FAR BASE BASE_inverse_vartime(BASE x) {
    const BASE_digits p = {{BASE_MODULUS_DIGITS}};
    BASE_digits f = p, g = BASE_to_digits(x), d, e, zero;
#pragma unroll
    for (i32 i = 0; i < BASE_DIGITS; i++) {
        d.digit[i] = e.digit[i] = zero.digit[i] = 0;
    }
    e.digit[0] = 1;
    i32 counter = -1; /* negated with respect to the source */
    u32 any = 1;
#pragma unroll 1
    while (any) {
        i32 a = 1, b = 0, c = 0, k = 1; /* after i steps f and g are (a f + b g) / 2^i and (c f + k g) / 2^i */
        u32 low_f = (u32)f.digit[0], low_g = (u32)g.digit[0];
#pragma unroll 6
        for (i32 i = 0; i < 30; i++) {
            i32 odd = -(i32)(low_g & 1), swap = counter >> 31;
            low_g += ((low_f ^ (u32)swap) - (u32)swap) & (u32)odd;
            c += ((a ^ swap) - swap) & odd;
            k += ((b ^ swap) - swap) & odd;
            swap &= odd;
            counter = (counter ^ swap) - 1;
            low_f += low_g & (u32)swap;
            a = (a + (c & swap)) * 2;
            b = (b + (k & swap)) * 2;
            low_g >>= 1;
        }
        BASE_digits other = BASE_combined(f, c, g, k, 0);
        f = BASE_combined(f, a, g, b, 0);
        g = other;
        other = BASE_combined(d, c, e, k, BASE_multiple_of_p(d, c, e, k));
        d = BASE_combined(d, a, e, b, BASE_multiple_of_p(d, a, e, b));
        e = other;
        any = 0;
#pragma unroll
        for (i32 i = 0; i < BASE_DIGITS; i++) {
            any |= (u32)g.digit[i];
        }
    }
    if (f.digit[BASE_DIGITS - 1] < 0) {
        d = BASE_sum_of_digits(zero, d, -1);
    }
#pragma unroll 1
    while (d.digit[BASE_DIGITS - 1] < 0) {
        d = BASE_sum_of_digits(d, p, 1);
    }
    BASE_digits less = BASE_sum_of_digits(d, p, -1);
#pragma unroll 1
    while (less.digit[BASE_DIGITS - 1] >= 0) {
        d = less;
        less = BASE_sum_of_digits(d, p, -1);
    }
    return BASE_to_montgomery(BASE_to_montgomery(BASE_from_digits(d))); /* the input is x R, and R / x = R^2 / (x R) */
}
