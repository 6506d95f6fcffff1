/* Levels of butterflies on elements kept below p: elements of one word, or of limbs without spare bits. */

/* Described in kernel.c. */
ACL_DEVICE void ntt_levels(F *v, NTT_TABLE roots, i32 block, i32 done, i32 skip, i32 levels, i32 first) {
#pragma unroll
    for (i32 level = 0; level < NTT_LOG_RADIX; level++) {
#pragma unroll
        for (i32 pair = 0; pair < NTT_RADIX / 2; pair++) {
            const i32 span = NTT_RADIX >> (level + 1), part = pair / span, k = pair + part * span;
            if (level >= skip && level < levels) {
                F x = v[k], y = v[k + span];
                if (!first || part) {
                    y = F_mul(F_load(roots, (block << level) + part), y);
                }
                v[k] = F_add(x, y);
                v[k + span] = F_sub(x, y);
            }
        }
    }
}

ACL_DEVICE F ntt_canonical(F x) {
    return x;
}
