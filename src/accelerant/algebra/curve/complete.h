/* Points of y^2 = x^3 + b in projective coordinates, x = X/Z, y = Y/Z, infinity (0 : 1 : 0), by formulas that hold for any
 * two points without branches. They are complete on curves of odd order, and in subgroups of odd order: the sum of two points
 * that differ by a point of order 2 is (0 : 0 : 0), and so is every sum with that. COORD is as in point.h; COORD_3B is 3 b
 * in Montgomery form. Source: Renes, Costello and Batina, eprint 2015/1060, algorithms 7 and 9. */

typedef struct {
    COORD x, y, z;
} COORD_projective;

ACL_DEVICE COORD COORD_times_3b(COORD x) {
    const COORD b3 = COORD_3B;
    return COORD_MUL(x, b3);
}

/* (x, y, 1), or (0, 1, 0) for infinity. */
ACL_DEVICE COORD_projective COORD_projective_from_affine(COORD_affine p) {
    u32 infinity = COORD_affine_is_infinity(p);
    COORD_projective q;
    q.x = p.x;
    q.y = COORD_select(infinity, COORD_one(), p.y);
    q.z = COORD_select(infinity, COORD_zero(), COORD_one());
    return q;
}

/* All zeros for infinity, since the inverse of 0 is 0. */
ACL_DEVICE COORD_affine COORD_projective_to_affine(COORD_projective p) {
    COORD inverse = COORD_inverse(p.z);
    COORD_affine q;
    q.x = COORD_MUL(p.x, inverse);
    q.y = COORD_MUL(p.y, inverse);
    return q;
}

ACL_DEVICE COORD_projective COORD_projective_select(u32 mask, COORD_projective p, COORD_projective q) {
    p.x = COORD_select(mask, p.x, q.x);
    p.y = COORD_select(mask, p.y, q.y);
    p.z = COORD_select(mask, p.z, q.z);
    return p;
}

/* 12M and two products by 3 b. */
ACL_FAR COORD_projective COORD_projective_add(COORD_projective p, COORD_projective q) {
    COORD xx = COORD_MUL(p.x, q.x);
    COORD yy = COORD_MUL(p.y, q.y);
    COORD zz = COORD_MUL(p.z, q.z);
    COORD xy = COORD_sub(COORD_MUL(COORD_add(p.x, p.y), COORD_add(q.x, q.y)), COORD_add(xx, yy));
    COORD yz = COORD_sub(COORD_MUL(COORD_add(p.y, p.z), COORD_add(q.y, q.z)), COORD_add(yy, zz));
    COORD xz = COORD_sub(COORD_MUL(COORD_add(p.x, p.z), COORD_add(q.x, q.z)), COORD_add(xx, zz));
    xx = COORD_add(COORD_add(xx, xx), xx);
    zz = COORD_times_3b(zz);
    xz = COORD_times_3b(xz);
    COORD sum = COORD_add(yy, zz);
    COORD difference = COORD_sub(yy, zz);
    COORD_projective s;
    s.x = COORD_sub(COORD_MUL(xy, difference), COORD_MUL(yz, xz));
    s.y = COORD_add(COORD_MUL(difference, sum), COORD_MUL(xz, xx));
    s.z = COORD_add(COORD_MUL(sum, yz), COORD_MUL(xx, xy));
    return s;
}

/* 6M + 2S and a product by 3 b. */
ACL_FAR COORD_projective COORD_projective_double(COORD_projective p) {
    COORD yy = COORD_SQUARE(p.y);
    COORD zz = COORD_times_3b(COORD_SQUARE(p.z));
    COORD xy = COORD_MUL(p.x, p.y);
    COORD yz = COORD_MUL(p.y, p.z);
    COORD twice = COORD_add(yy, yy);
    COORD eight = COORD_add(twice, twice);
    eight = COORD_add(eight, eight);
    COORD sum = COORD_add(yy, zz);
    COORD difference = COORD_sub(yy, COORD_add(COORD_add(zz, zz), zz));
    COORD part = COORD_MUL(difference, xy);
    COORD_projective s;
    s.x = COORD_add(part, part);
    s.y = COORD_add(COORD_MUL(zz, eight), COORD_MUL(difference, sum));
    s.z = COORD_MUL(yz, eight);
    return s;
}
