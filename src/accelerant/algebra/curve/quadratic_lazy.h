/* quadratic.h in the base field's reduced radix. Each of a pair's two is below the multiple of p that is stated. A product's y
 * is [k]: its second part is taken from k p. */

typedef struct {
    BASE_lazy c0, c1;
} COORD_lazy;

ACL_DEVICE COORD_lazy COORD_lazy_pair(BASE_lazy c0, BASE_lazy c1) {
    COORD_lazy z;
    z.c0 = c0;
    z.c1 = c1;
    return z;
}

ACL_DEVICE COORD_lazy COORD_lazy_load(COORD x) {
    return COORD_lazy_pair(BASE_lazy_load(x.c0), BASE_lazy_load(x.c1));
}

ACL_DEVICE COORD COORD_lazy_store(COORD_lazy x) {
    return COORD_pair(BASE_lazy_store(x.c0), BASE_lazy_store(x.c1));
}

ACL_DEVICE COORD_lazy COORD_lazy_zero(void) {
    return COORD_lazy_pair(BASE_lazy_zero(), BASE_lazy_zero());
}

ACL_DEVICE COORD_lazy COORD_lazy_one(void) {
    return COORD_lazy_pair(BASE_lazy_one(), BASE_lazy_zero());
}

ACL_DEVICE COORD_lazy COORD_lazy_add(COORD_lazy x, COORD_lazy y) {
    return COORD_lazy_pair(BASE_lazy_add(x.c0, y.c0), BASE_lazy_add(x.c1, y.c1));
}

#define COORD_lazy_sub(x, y, k) COORD_lazy_pair(BASE_lazy_sub((x).c0, (y).c0, k), BASE_lazy_sub((x).c1, (y).c1, k))

ACL_DEVICE COORD_lazy COORD_lazy_select(u32 mask, COORD_lazy x, COORD_lazy y) {
    return COORD_lazy_pair(BASE_lazy_select(mask, x.c0, y.c0), BASE_lazy_select(mask, x.c1, y.c1));
}

ACL_DEVICE u32 COORD_lazy_is_plain_zero(COORD_lazy x) {
    return BASE_lazy_is_plain_zero(x.c0) & BASE_lazy_is_plain_zero(x.c1);
}

ACL_DEVICE u32 COORD_lazy_product_is_zero(COORD_lazy x) {
    return BASE_lazy_product_is_zero(x.c0) & BASE_lazy_product_is_zero(x.c1);
}

/* Two sums of two products: 6 n^2 digit products, where Karatsuba's three reduced products take as many and more sums. */
ACL_DEVICE COORD_lazy COORD_lazy_mul(COORD_lazy x, COORD_lazy y, u32 k) {
    BASE_lazy minus = BASE_lazy_sub(BASE_lazy_zero(), y.c1, k);
    return COORD_lazy_pair(BASE_lazy_dot2(x.c0, y.c0, x.c1, minus), BASE_lazy_dot2(x.c0, y.c1, x.c1, y.c0));
}

ACL_DEVICE COORD_lazy COORD_lazy_square(COORD_lazy x, u32 k) {
    BASE_lazy minus = BASE_lazy_sub(BASE_lazy_zero(), x.c1, k);
    return COORD_lazy_pair(BASE_lazy_dot2(x.c0, x.c0, x.c1, minus), BASE_lazy_mul(BASE_lazy_add(x.c0, x.c0), x.c1));
}

/* x y + v w, of y that is [k] and w that is [l]. */
ACL_DEVICE COORD_lazy COORD_lazy_dot2(COORD_lazy x, COORD_lazy y, u32 k, COORD_lazy v, COORD_lazy w, u32 l) {
    BASE_lazy minus_y = BASE_lazy_sub(BASE_lazy_zero(), y.c1, k), minus_w = BASE_lazy_sub(BASE_lazy_zero(), w.c1, l);
    BASE_lazy c0 = BASE_lazy_dot4(x.c0, y.c0, x.c1, minus_y, v.c0, w.c0, v.c1, minus_w);
    return COORD_lazy_pair(c0, BASE_lazy_dot4(x.c0, y.c1, x.c1, y.c0, v.c0, w.c1, v.c1, w.c0));
}
