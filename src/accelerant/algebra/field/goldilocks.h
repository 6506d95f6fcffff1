/* The field of p = 2^64 - 2^32 + 1 (Goldilocks), an element a 64-bit word below p. FIELD is replaced by a prefix.
 *
 * 2^64 = e mod p with e = 2^32 - 1, and 2^96 = -1: a product is reduced by shifts and adds, so nothing is kept in
 * Montgomery form; R = 1 here, and "Montgomery" functions are the plain ones. No branch depends on an element.
 * Source: Hamburg 2015, eprint 2015/625, with phi = 2^32. */
#define FIELD_WORD u64
#define FIELD_P 0xFFFFFFFF00000001UL
#define FIELD_EPSILON 0xFFFFFFFFUL

typedef u64 FIELD;

ACL_DEVICE FIELD FIELD_one(void) {
    return 1;
}

/* x mod p; x is any word, and 2^64 < 2 p. */
ACL_DEVICE FIELD FIELD_reduced(u64 x) {
    return x - (FIELD_P & (0 - (u64)(x >= FIELD_P)));
}

/* A carry out of the sum is paid back by adding e, which cannot carry again: the wrapped sum of two canonical elements is
 * at most p - 2^32. */
ACL_DEVICE FIELD FIELD_add(FIELD x, FIELD y) {
    u64 sum = x + y;
    sum += FIELD_EPSILON & (0 - (u64)(sum < x));
    return FIELD_reduced(sum);
}

/* A borrow wraps by 2^64 = p + e: e too much. */
ACL_DEVICE FIELD FIELD_sub(FIELD x, FIELD y) {
    return x - y - (FIELD_EPSILON & (0 - (u64)(x < y)));
}

/* x y = low + 2^64 (a + 2^32 b) = low - b + e a. low - b borrows where low < b; the wrapped value is then at least
 * 2^64 - 2^32 + 1, so that e can be taken off. e a is at most (2^32 - 1)^2, so that their sum, where it carries, is below
 * 2^64 - 2^33 + 1 and e can be added. x and y may be any words. */
ACL_DEVICE FIELD FIELD_mul(FIELD x, FIELD y) {
    u64 low = x * y;
    u64 high = acl_mul_high_u64(x, y);
    u64 a = (u32)high;
    u64 b = high >> 32;
    u64 rest = low - b;
    rest -= FIELD_EPSILON & (0 - (u64)(low < b));
    u64 part = (a << 32) - a;
    u64 sum = rest + part;
    sum += FIELD_EPSILON & (0 - (u64)(sum < part));
    return FIELD_reduced(sum);
}

/* Reduce any word mod p. */
ACL_DEVICE FIELD FIELD_to_montgomery(FIELD x) {
    return FIELD_reduced(x);
}

ACL_DEVICE FIELD FIELD_from_montgomery(FIELD x) {
    return x;
}
