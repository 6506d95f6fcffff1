/* A prime field of one 32-bit word in Montgomery form, R = 2^32: p = 15 2^27 + 1 (BabyBear). FIELD is replaced by a prefix.
 *
 * Defined by program.py: FIELD_MODULUS p, below 2^31; FIELD_INVERSE -1/p mod R; FIELD_ONE R mod p; FIELD_R2 R^2 mod p.
 * An element is below p. No branch depends on one. */
#define FIELD_WORD u32
#define FIELD_P FIELD_MODULUS

typedef u32 FIELD;

/* 1 in Montgomery form. */
ACL_DEVICE FIELD FIELD_one(void) {
    return FIELD_ONE;
}

/* x - p where x >= p, with x < 2 p: x - p wraps to more than x where x < p, so this is a minimum. */
ACL_DEVICE FIELD FIELD_reduced(u32 x) {
    u32 less = x - FIELD_MODULUS;
    return less < x ? less : x;
}

ACL_DEVICE FIELD FIELD_add(FIELD x, FIELD y) {
    return FIELD_reduced(x + y);
}

/* x - y wraps to more than p where it is negative. */
ACL_DEVICE FIELD FIELD_sub(FIELD x, FIELD y) {
    u32 difference = x - y;
    u32 more = difference + FIELD_MODULUS;
    return more < difference ? more : difference;
}

/* x y / R mod p, below p. y may be any word: x y + m p < 2 p R < 2^64. */
ACL_DEVICE FIELD FIELD_mul(FIELD x, FIELD y) {
    u64 product = (u64)x * y;
    u32 m = (u32)product * FIELD_INVERSE;
    return FIELD_reduced((u32)(((u64)m * FIELD_MODULUS + product) >> 32));
}

/* x R mod p of any word x. */
ACL_DEVICE FIELD FIELD_to_montgomery(FIELD x) {
    return FIELD_mul(FIELD_R2, x);
}

ACL_DEVICE FIELD FIELD_from_montgomery(FIELD x) {
    return FIELD_mul(x, 1);
}
