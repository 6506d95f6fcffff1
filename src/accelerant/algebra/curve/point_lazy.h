/* Points in XYZZ coordinates in the reduced radix of reduced_radix.h, whose notation this keeps; COORD stands for
 * the prefix of the coordinates' field. Before this stand point.h, COORD_lazy's arithmetic, COORD_LAZY_MUL, _SQUARE and
 * _DOT2, which say whether a product is written out at each place or called, and COORD_LAZY_WORDS, 64-bit words of a point. As in
 * point.h any two points of the curve may be equal, opposite or infinite, and what is called takes them by address.
 *
 * What is [2] here is a product x y with x y p < 0.95 R': the largest, of degree 2, is 2 x 33 x 2 for BN254, whose R' / p is 169
 * and L 32, and 2 x 257 x 2 for BLS12-381 with 2500 and 256. */

/* x [6], the others [2]; at infinity the digits of zz are all 0. */
typedef struct {
    COORD_lazy x, y, zz, zzz;
} COORD_lazy_xyzz;

ACL_DEVICE COORD_lazy_xyzz COORD_lazy_infinity(void) {
    COORD_lazy_xyzz p;
    p.x = p.y = p.zz = p.zzz = COORD_lazy_zero();
    return p;
}

/* In memory the digits of x, y, zz, zzz one after the other, two to a word. */
ACL_DEVICE COORD_lazy_xyzz COORD_lazy_xyzz_load(ACL_GLOBAL const u64 *points, i64 index) {
    COORD_lazy_xyzz p;
    u32 *digit = (u32 *)&p;
#pragma unroll
    for (int i = 0; i < COORD_LAZY_WORDS; i++) {
        u64 word = points[index * COORD_LAZY_WORDS + i];
        digit[2 * i] = (u32)word;
        digit[2 * i + 1] = (u32)(word >> 32);
    }
    return p;
}

ACL_DEVICE void COORD_lazy_xyzz_store(ACL_GLOBAL u64 *points, i64 index, COORD_lazy_xyzz p) {
    const u32 *digit = (const u32 *)&p;
#pragma unroll
    for (int i = 0; i < COORD_LAZY_WORDS; i++) {
        points[index * COORD_LAZY_WORDS + i] = digit[2 * i] | (u64)digit[2 * i + 1] << 32;
    }
}

/* What has x that is [L + 1] brought to [2]. */
ACL_DEVICE COORD_lazy COORD_lazy_small(COORD_lazy x) {
    return COORD_LAZY_MUL(x, COORD_lazy_one(), 1 + 1);
}

/* p = 2 p: dbl-2008-s-1 with a = 0; 6M + 3S, of which two products share a reduction. Infinity stays infinity. */
ACL_FAR void COORD_lazy_double(COORD_lazy_xyzz *p) {
    COORD_lazy u = COORD_lazy_add(p->y, p->y);   /* [4] */
    COORD_lazy v = COORD_LAZY_SQUARE(u, 4);
    COORD_lazy w = COORD_LAZY_MUL(u, v, 2);
    COORD_lazy s = COORD_LAZY_MUL(p->x, v, 2);   /* [1.15] */
    COORD_lazy m = COORD_LAZY_SQUARE(p->x, 6);
    m = COORD_lazy_add(COORD_lazy_add(m, m), m);   /* [6] */
    p->x = COORD_lazy_sub(COORD_LAZY_SQUARE(m, 6), COORD_lazy_add(s, s), 4);
    COORD_lazy minus_y = COORD_lazy_sub(COORD_lazy_zero(), p->y, 2);
    p->y = COORD_LAZY_DOT2(m, COORD_lazy_sub(s, p->x, 6), 8, w, minus_y, 2);
    p->zz = COORD_LAZY_MUL(p->zz, v, 2);
    p->zzz = COORD_LAZY_MUL(p->zzz, w, 2);
}

/* p = p + q: add-2008-s; 12M + 2S, of which two products share a reduction. */
ACL_FAR void COORD_lazy_xyzz_add(COORD_lazy_xyzz *p, const COORD_lazy_xyzz *q) {
    if (COORD_lazy_is_plain_zero(q->zz)) {
        return;
    }
    if (COORD_lazy_is_plain_zero(p->zz)) {
        *p = *q;
        return;
    }
    COORD_lazy u = COORD_LAZY_MUL(p->x, q->zz, 2), s = COORD_LAZY_MUL(p->y, q->zzz, 2);
    COORD_lazy h = COORD_lazy_sub(COORD_LAZY_MUL(q->x, p->zz, 2), u, 2);    /* [4] */
    COORD_lazy r = COORD_lazy_sub(COORD_LAZY_MUL(q->y, p->zzz, 2), s, 2);   /* [4] */
    COORD_lazy hh = COORD_LAZY_SQUARE(h, 4), rr = COORD_LAZY_SQUARE(r, 4);
    if (COORD_lazy_product_is_zero(hh)) {
        if (COORD_lazy_product_is_zero(rr)) {
            COORD_lazy_double(p);
        } else {
            *p = COORD_lazy_infinity();
        }
        return;
    }
    COORD_lazy hhh = COORD_LAZY_MUL(h, hh, 2), v = COORD_LAZY_MUL(u, hh, 2);   /* [1.2], [1.15] */
    p->zz = COORD_LAZY_MUL(COORD_LAZY_MUL(p->zz, q->zz, 2), hh, 2);
    p->zzz = COORD_LAZY_MUL(COORD_LAZY_MUL(p->zzz, q->zzz, 2), hhh, 2);
    p->x = COORD_lazy_sub(rr, COORD_lazy_add(hhh, COORD_lazy_add(v, v)), 4);
    COORD_lazy minus_s = COORD_lazy_sub(COORD_lazy_zero(), s, 2);
    p->y = COORD_LAZY_DOT2(r, COORD_lazy_sub(v, p->x, 6), 8, hhh, minus_s, 2);
}

/* p + q, or p - q where `negate` has all bits set: madd-2008-s, 8M + 2S, of which two products share a reduction. */
ACL_DEVICE COORD_lazy_xyzz COORD_lazy_add_affine(COORD_lazy_xyzz p, COORD_affine q, u32 negate) {
    if (COORD_affine_is_infinity(q)) {
        return p;
    }
    COORD_lazy x = COORD_lazy_load(q.x), y = COORD_lazy_load(q.y);
    y = COORD_lazy_select(negate, COORD_lazy_sub(COORD_lazy_zero(), y, COORD_LOADED + 1), y);
    if (COORD_lazy_is_plain_zero(p.zz)) {
        p.x = COORD_lazy_small(x);
        p.y = COORD_lazy_small(y);
        p.zz = p.zzz = COORD_lazy_one();
        return p;
    }
    COORD_lazy u = COORD_LAZY_MUL(x, p.zz, 2), s = COORD_LAZY_MUL(y, p.zzz, 2);
    COORD_lazy h = COORD_lazy_sub(u, p.x, 6);   /* [8] */
    COORD_lazy r = COORD_lazy_sub(s, p.y, 2);   /* [4] */
    COORD_lazy hh = COORD_LAZY_SQUARE(h, 8), rr = COORD_LAZY_SQUARE(r, 4);
    if (COORD_lazy_product_is_zero(hh)) {
        COORD_lazy_xyzz rare = p;
        COORD_lazy_double(&rare);
        return COORD_lazy_product_is_zero(rr) ? rare : COORD_lazy_infinity();
    }
    COORD_lazy hhh = COORD_LAZY_MUL(h, hh, 2), v = COORD_LAZY_MUL(p.x, hh, 2);   /* [1.2], [1.15] */
    p.zz = COORD_LAZY_MUL(p.zz, hh, 2);
    p.zzz = COORD_LAZY_MUL(p.zzz, hhh, 2);
    p.x = COORD_lazy_sub(rr, COORD_lazy_add(hhh, COORD_lazy_add(v, v)), 4);
    COORD_lazy minus_y = COORD_lazy_sub(COORD_lazy_zero(), p.y, 2);
    p.y = COORD_LAZY_DOT2(r, COORD_lazy_sub(v, p.x, 6), 8, hhh, minus_y, 2);
    return p;
}
