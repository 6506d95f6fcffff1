/* Points of y^2 = x^3 + b in XYZZ coordinates: x = X/ZZ, y = Y/ZZZ, ZZ^3 = ZZZ^2; infinity has ZZ = 0. COORD is the
 * prefix of the coordinates' field, whose elements are in Montgomery form. Preceded by its arithmetic, and by COORD_MUL,
 * COORD_SQUARE and COORD_MUL_SUB, which either inline a product or call it. The last, x y - v w, may share a reduction.
 *
 * Every function takes any two points of the curve, equal, opposite or infinite; none of order 2. They branch on the
 * points: equal and opposite points are rare. M is a product, S a square.
 * Source: Explicit-Formulas Database, short Weierstrass curves, "xyzz", by the names at each function. */

typedef struct {
    COORD x, y;
} COORD_affine;

typedef struct {
    COORD x, y, zz, zzz;
} COORD_xyzz;

/* In memory x, then y; infinity is all zeros, which is no point of the curve. */
ACL_DEVICE COORD_affine COORD_affine_load(ACL_GLOBAL const u64 *points, i64 index) {
    COORD_affine p;
    p.x = COORD_load(points, 2 * index);
    p.y = COORD_load(points, 2 * index + 1);
    return p;
}

ACL_DEVICE void COORD_affine_store(ACL_GLOBAL u64 *points, i64 index, COORD_affine p) {
    COORD_store(points, 2 * index, p.x);
    COORD_store(points, 2 * index + 1, p.y);
}

/* Return all bits set for infinity, else 0. */
ACL_DEVICE u32 COORD_affine_is_infinity(COORD_affine p) {
    return COORD_is_zero(p.x) & COORD_is_zero(p.y);
}

/* Negate the point where the mask has all bits set. */
ACL_DEVICE COORD_affine COORD_affine_negate(u32 mask, COORD_affine p) {
    p.y = COORD_select(mask, COORD_sub(COORD_zero(), p.y), p.y);
    return p;
}

ACL_DEVICE COORD_xyzz COORD_xyzz_load(ACL_GLOBAL const u64 *points, i64 index) {
    COORD_xyzz p;
    p.x = COORD_load(points, 4 * index);
    p.y = COORD_load(points, 4 * index + 1);
    p.zz = COORD_load(points, 4 * index + 2);
    p.zzz = COORD_load(points, 4 * index + 3);
    return p;
}

ACL_DEVICE void COORD_xyzz_store(ACL_GLOBAL u64 *points, i64 index, COORD_xyzz p) {
    COORD_store(points, 4 * index, p.x);
    COORD_store(points, 4 * index + 1, p.y);
    COORD_store(points, 4 * index + 2, p.zz);
    COORD_store(points, 4 * index + 3, p.zzz);
}

ACL_DEVICE COORD_xyzz COORD_xyzz_infinity(void) {
    COORD_xyzz p;
    p.x = p.y = p.zz = p.zzz = COORD_zero();
    return p;
}

/* Return the XYZZ coordinates of an affine point: ZZ = ZZZ = 1, or infinity. */
ACL_DEVICE COORD_xyzz COORD_xyzz_from_affine(COORD_affine p) {
    COORD_xyzz q;
    q.x = p.x;
    q.y = p.y;
    q.zz = q.zzz = COORD_select(COORD_affine_is_infinity(p), COORD_zero(), COORD_one());
    return q;
}

/* p = 2 p: dbl-2008-s-1 with a = 0; 6M + 3S. Infinity stays infinity. Called functions take points by address: passed by
 * value they would occupy the caller's registers twice. */
ACL_FAR void COORD_xyzz_double(COORD_xyzz *p) {
    COORD u = COORD_add(p->y, p->y);
    COORD v = COORD_SQUARE(u);
    COORD w = COORD_MUL(u, v);
    COORD s = COORD_MUL(p->x, v);
    COORD m = COORD_SQUARE(p->x);
    m = COORD_add(COORD_add(m, m), m);
    p->x = COORD_sub(COORD_SQUARE(m), COORD_add(s, s));
    p->y = COORD_MUL_SUB(m, COORD_sub(s, p->x), w, p->y);
    p->zz = COORD_MUL(v, p->zz);
    p->zzz = COORD_MUL(w, p->zzz);
}

/* p = p + q: add-2008-s; 12M + 2S. */
ACL_FAR void COORD_xyzz_add(COORD_xyzz *p, const COORD_xyzz *q) {
    if (COORD_is_zero(q->zz)) {
        return;
    }
    if (COORD_is_zero(p->zz)) {
        *p = *q;
        return;
    }
    COORD u = COORD_MUL(p->x, q->zz);
    COORD s = COORD_MUL(p->y, q->zzz);
    COORD h = COORD_sub(COORD_MUL(q->x, p->zz), u);
    COORD r = COORD_sub(COORD_MUL(q->y, p->zzz), s);
    if (COORD_is_zero(h)) {
        if (COORD_is_zero(r)) {
            COORD_xyzz_double(p);
        } else {
            *p = COORD_xyzz_infinity();
        }
        return;
    }
    COORD hh = COORD_SQUARE(h);
    COORD hhh = COORD_MUL(h, hh);
    COORD v = COORD_MUL(u, hh);
    p->zz = COORD_MUL(COORD_MUL(p->zz, q->zz), hh);
    p->zzz = COORD_MUL(COORD_MUL(p->zzz, q->zzz), hhh);
    p->x = COORD_sub(COORD_sub(COORD_SQUARE(r), hhh), COORD_add(v, v));
    p->y = COORD_MUL_SUB(r, COORD_sub(v, p->x), s, hhh);
}

/* madd-2008-s; 8M + 2S. */
ACL_DEVICE COORD_xyzz COORD_xyzz_add_affine(COORD_xyzz p, COORD_affine q) {
    if (COORD_affine_is_infinity(q)) {
        return p;
    }
    if (COORD_is_zero(p.zz)) {
        return COORD_xyzz_from_affine(q);
    }
    COORD h = COORD_sub(COORD_MUL(q.x, p.zz), p.x);
    COORD r = COORD_sub(COORD_MUL(q.y, p.zzz), p.y);
    if (COORD_is_zero(h)) {
        COORD_xyzz rare = p;
        COORD_xyzz_double(&rare);
        return COORD_is_zero(r) ? rare : COORD_xyzz_infinity();
    }
    COORD hh = COORD_SQUARE(h);
    COORD hhh = COORD_MUL(h, hh);
    COORD v = COORD_MUL(p.x, hh);
    p.zz = COORD_MUL(p.zz, hh);
    p.zzz = COORD_MUL(p.zzz, hhh);
    p.x = COORD_sub(COORD_sub(COORD_SQUARE(r), hhh), COORD_add(v, v));
    p.y = COORD_MUL_SUB(r, COORD_sub(v, p.x), p.y, hhh);
    return p;
}
