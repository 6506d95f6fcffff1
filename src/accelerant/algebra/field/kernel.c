/* z = x + y mod p, p = 2^64 - 2^32 + 1 (Goldilocks), canonical in and out.
 *
 * Layout: one 64-bit limb an element, contiguous; one thread an element.
 * 2^64 = 2^32 - 1 mod p, so a carry out of the sum is paid back by adding 2^32 - 1, which cannot carry again, since the
 * wrapped sum of two canonical elements is at most p - 2^32. What is left lies below 2^64 and one conditional
 * subtraction makes it canonical. No branch depends on the elements.
 * Bound by memory: 24 bytes an element. */
#define GOLDILOCKS_P 0xFFFFFFFF00000001UL
#define GOLDILOCKS_EPSILON 0xFFFFFFFFUL

ACL_DEVICE u64 goldilocks_add(u64 x, u64 y) {
    u64 sum = x + y;
    sum += GOLDILOCKS_EPSILON & (0 - (u64)(sum < x));
    return sum - (GOLDILOCKS_P & (0 - (u64)(sum >= GOLDILOCKS_P)));
}

ACL_KERNEL void field_add(ACL_GLOBAL const u64 *x, ACL_GLOBAL const u64 *y, ACL_GLOBAL u64 *z, i64 n) {
    i64 i = acl_global_id();
    if (i < n) {
        z[i] = goldilocks_add(x[i], y[i]);
    }
}
