/* Levels of butterflies of elements of several limbs with room above them, 5 p < R = 2^(32 n): nothing is reduced below p
 * until it is stored, and roots w stand with their quotients floor(w R / p). For n = 8 a product by one takes 99 wide
 * multiplies and 16 low ones, where a Montgomery product takes 128, 8, and a reduction.
 *
 * Bounds. Below, [k] is a number below k p; p < R / 5.
 *     a product       of any x: [1 + x / R + 2^-28]. Let v = floor(w R / p) and q = floor((x v - d) / R), where d is what
 *                     F_shoup leaves out of x v: products below limb n - 2, together less than (n - 2) 2^-32 R^2 (1 + 2^-31).
 *                     As w R / p - 1 < v, q is above x w / p - x / R - d / R - 1, and at most x w / p: so x w - q p is at
 *                     least 0, below that, and below R, so that its lower half is all of it. x is [4], hence below 0.8 R
 *                     (0.76 R for BN254): [2].
 *     a butterfly     x is [4]; less 2 p where it is no less: [2]. So is the product t; x + t and x - t + 2 p are [4], below R.
 *     the factor 1    y is [4], and reduced as x is: [2]. In the first level both are what was read, and [1].
 *     what is read    is [1], and so is a factor's Montgomery product with it.
 *     what is stored  is [1]: a factor's Montgomery product with any number of n limbs; or [4], less 2 p, less p.
 * Source: Harvey 2014, J. Symbolic Computation 60, algorithms 2 and 4 (there for one word). */

/* See kernel.c. */
ACL_DEVICE void ntt_levels(F *v, NTT_TABLE roots, i32 block, i32 done, i32 skip, i32 levels, i32 first) {
#pragma unroll
    for (i32 level = 0; level < NTT_LOG_RADIX; level++) {
#pragma unroll
        for (i32 pair = 0; pair < NTT_RADIX / 2; pair++) {
            const i32 span = NTT_RADIX >> (level + 1), part = pair / span, k = pair + part * span;
            if (level >= skip && level < levels) {
                F x = v[k], y = v[k + span];
                if (!first || level) {
                    x = F_lazy_reduce(x);
                }
                if (!first || part) {
                    i32 root = 2 * ((block << level) + part);
                    y = F_shoup(y, F_load(roots, root), F_load(roots, root + 1));
                } else if (level) {
                    y = F_lazy_reduce(y);
                }
                v[k] = F_lazy_add(x, y);
                v[k + span] = F_lazy_sub(x, y);
            }
        }
    }
}

ACL_DEVICE F ntt_canonical(F x) {
    return F_add(F_lazy_reduce(x), F_zero());
}
