/* The rest of a field of one word, after its arithmetic (goldilocks.h, mersenne61.h, babybear.h).
 * FIELD is replaced by a prefix. */

ACL_DEVICE FIELD FIELD_load(ACL_GLOBAL const FIELD_WORD *x, i64 index) {
    return x[index];
}

ACL_DEVICE void FIELD_store(ACL_GLOBAL FIELD_WORD *z, i64 index, FIELD x) {
    z[index] = x;
}

ACL_DEVICE FIELD FIELD_zero(void) {
    return 0;
}

ACL_DEVICE FIELD FIELD_square(FIELD x) {
    return FIELD_mul(x, x);
}

/* Return all bits set if x is 0, else none. */
ACL_DEVICE u32 FIELD_is_zero(FIELD x) {
    return 0 - (u32)(x == 0);
}

/* Return x if mask has all bits set, y if it has none. */
ACL_DEVICE FIELD FIELD_select(u32 mask, FIELD x, FIELD y) {
    return mask ? x : y;
}

/* Return whether x is below p; x is any word. */
ACL_DEVICE u32 FIELD_is_reduced(FIELD x) {
    return x < FIELD_P;
}
