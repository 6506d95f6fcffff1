/* Levels of butterflies on elements of several limbs with spare bits, 5 p < R = 2^(32 n): elements are reduced below p only
 * when they are stored, and a root w is kept with its quotient floor(w R / p). For n = 8 a product by such a root takes 99
 * wide multiplies and 16 low ones; a Montgomery product takes 128, 8, and a reduction.
 *
 * Bounds. [k] denotes a number below k p; p < R / 5.
 *     product      for any x: [1 + x / R + 2^-28]. Let v = floor(w R / p) and q = floor((x v - d) / R), where d is the part
 *                  of x v that F_shoup omits: products below limb n - 2, in total less than (n - 2) 2^-32 R^2 (1 + 2^-31).
 *                  As w R / p - 1 < v, q is above x w / p - x / R - d / R - 1, and at most x w / p. So x w - q p is at
 *                  least 0, within the bound, and below R: its lower half is the whole number. x is [4], hence below 0.8 R
 *                  (0.76 R for BN254), and the product is [2].
 *     butterfly    x is [4], and [2] after subtracting 2 p where x >= 2 p. The product t is [2]; x + t and x - t + 2 p are
 *                  [4], below R.
 *     factor 1     y is [4] and reduced like x to [2]. In the first level both are inputs, [1].
 *     inputs       are [1], and so is the Montgomery product of a factor and an input.
 *     outputs      are [1]: a factor's Montgomery product with any number of n limbs; or [4], less 2 p, less p.
 * Source: Harvey 2014, J. Symbolic Computation 60, algorithms 2 and 4 (there for one word). */

/* Described in kernel.c. */
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
