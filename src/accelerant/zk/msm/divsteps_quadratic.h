/* Inverses in a field of quadratic.h, given those of divsteps.h. */

/* (c0 - c1 u) / (c0^2 + c1^2), and 0 of 0. */
ACL_DEVICE COORD COORD_inverse_vartime(COORD x) {
    BASE scale = BASE_inverse_vartime(BASE_add(BASE_SQUARE(x.c0), BASE_SQUARE(x.c1)));
    COORD conjugate = COORD_conjugate(x);
    return COORD_pair(BASE_MUL(conjugate.c0, scale), BASE_MUL(conjugate.c1, scale));
}
