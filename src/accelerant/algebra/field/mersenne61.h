/* The field of p = 2^61 - 1 (Mersenne), an element a 64-bit word below p. FIELD is replaced by a prefix.
 *
 * 2^61 = 1 mod p: a number is reduced by adding the bits above the lowest 61 to those, so nothing is kept in Montgomery form;
 * R = 1 here, and "Montgomery" functions are the plain ones. No branch depends on an element. */
#define FIELD_WORD u64
#define FIELD_P 0x1FFFFFFFFFFFFFFFUL

typedef u64 FIELD;

ACL_DEVICE FIELD FIELD_one(void) {
    return 1;
}

/* x mod p; x is any word: the sum of its parts is at most p + 7, below 2 p. */
ACL_DEVICE FIELD FIELD_reduced(u64 x) {
    u64 sum = (x & FIELD_P) + (x >> 61);
    return sum - (FIELD_P & (0 - (u64)(sum >= FIELD_P)));
}

ACL_DEVICE FIELD FIELD_add(FIELD x, FIELD y) {
    return FIELD_reduced(x + y);
}

ACL_DEVICE FIELD FIELD_sub(FIELD x, FIELD y) {
    return x - y + (FIELD_P & (0 - (u64)(x < y)));
}

/* x y = low + 2^61 high with low < 2^61; high < 2^64 as x < 2^61, y any word, so high mod p + low < 2^62. */
ACL_DEVICE FIELD FIELD_mul(FIELD x, FIELD y) {
    u64 low = x * y;
    u64 high = (acl_mul_high_u64(x, y) << 3) | (low >> 61);
    return FIELD_reduced(FIELD_reduced(high) + (low & FIELD_P));
}

/* Reduce any word mod p. */
ACL_DEVICE FIELD FIELD_to_montgomery(FIELD x) {
    return FIELD_reduced(x);
}

ACL_DEVICE FIELD FIELD_from_montgomery(FIELD x) {
    return x;
}
