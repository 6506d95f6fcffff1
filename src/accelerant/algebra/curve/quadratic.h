/* COORD = BASE[u] / (u^2 + 1), pairs c0 + c1 u over a prime field of prefix BASE: the coordinates of G2. In memory c0, then
 * c1. Nothing branches on an element, or takes an address from one. */

typedef struct {
    BASE c0, c1;
} COORD;

ACL_DEVICE COORD COORD_pair(BASE c0, BASE c1) {
    COORD z;
    z.c0 = c0;
    z.c1 = c1;
    return z;
}

ACL_DEVICE COORD COORD_load(ACL_GLOBAL const u64 *x, i64 index) {
    return COORD_pair(BASE_load(x, 2 * index), BASE_load(x, 2 * index + 1));
}

ACL_DEVICE void COORD_store(ACL_GLOBAL u64 *z, i64 index, COORD x) {
    BASE_store(z, 2 * index, x.c0);
    BASE_store(z, 2 * index + 1, x.c1);
}

ACL_DEVICE COORD COORD_zero(void) {
    return COORD_pair(BASE_zero(), BASE_zero());
}

ACL_DEVICE COORD COORD_one(void) {
    return COORD_pair(BASE_one(), BASE_zero());
}

ACL_DEVICE u32 COORD_is_zero(COORD x) {
    return BASE_is_zero(x.c0) & BASE_is_zero(x.c1);
}

ACL_DEVICE COORD COORD_select(u32 mask, COORD x, COORD y) {
    return COORD_pair(BASE_select(mask, x.c0, y.c0), BASE_select(mask, x.c1, y.c1));
}

ACL_DEVICE COORD COORD_add(COORD x, COORD y) {
    return COORD_pair(BASE_add(x.c0, y.c0), BASE_add(x.c1, y.c1));
}

ACL_DEVICE COORD COORD_sub(COORD x, COORD y) {
    return COORD_pair(BASE_sub(x.c0, y.c0), BASE_sub(x.c1, y.c1));
}

/* x^q: c0 - c1 u. */
ACL_DEVICE COORD COORD_conjugate(COORD x) {
    return COORD_pair(x.c0, BASE_sub(BASE_zero(), x.c1));
}

/* Karatsuba: three products in the base field. */
ACL_DEVICE COORD COORD_mul(COORD x, COORD y) {
    BASE low = BASE_MUL(x.c0, y.c0);
    BASE high = BASE_MUL(x.c1, y.c1);
    BASE both = BASE_MUL(BASE_add(x.c0, x.c1), BASE_add(y.c0, y.c1));
    return COORD_pair(BASE_sub(low, high), BASE_sub(BASE_sub(both, low), high));
}

/* (c0 + c1) (c0 - c1) + 2 c0 c1 u. */
ACL_DEVICE COORD COORD_square(COORD x) {
    BASE cross = BASE_MUL(x.c0, x.c1);
    return COORD_pair(BASE_MUL(BASE_add(x.c0, x.c1), BASE_sub(x.c0, x.c1)), BASE_add(cross, cross));
}

/* (c0 - c1 u) / (c0^2 + c1^2), and 0 of 0. */
ACL_DEVICE COORD COORD_inverse(COORD x) {
    BASE scale = BASE_inverse(BASE_add(BASE_SQUARE(x.c0), BASE_SQUARE(x.c1)));
    return COORD_pair(BASE_MUL(x.c0, scale), BASE_sub(BASE_zero(), BASE_MUL(x.c1, scale)));
}
