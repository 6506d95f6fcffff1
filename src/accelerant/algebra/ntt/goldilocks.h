/* Levels of Goldilocks in a pass. Roots of order 16 are powers of two, 2^192 = 1, so within a group of levels a factor is a
 * shift; the rest of the factor, a power of the block's root, is multiplied once before the group.
 *
 * program.py defines NTT_SHIFT, the base-2 logarithm of the root of order 16.
 *
 * Bounds. Operands of multiplies and shifts are below p. Sums and differences are any 64-bit words and need one operand
 * below p: for any x and y < p, x + y - 2^64 is below 2^64 - 2^32, so that adding e after a carry does not carry again;
 * x - y likewise. Elements are read and written below p. Source: Hamburg 2015, eprint 2015/625, for the reduction. */

#ifndef NTT_FOLDED
/* Return low + 2^64 a, below p. */
ACL_DEVICE F ntt_raised(u64 low, u32 a) {
    u64 part = ((u64)a << 32) - a;
    u64 sum = low + part;
    sum += F_EPSILON & (0 - (u64)(sum < part));
    return F_reduced(sum);
}

/* Return low + 2^64 a + 2^96 b, below p. */
ACL_DEVICE F ntt_folded(u64 low, u32 a, u32 b) {
    u64 rest = low - b;
    return ntt_raised(rest - (F_EPSILON & (0 - (u64)(low < b))), a);
}
#endif

/* Return 2^shift x, below p, for shifts from 1 to 95. */
ACL_DEVICE F ntt_shifted(F x, i32 shift) {
    if (shift < 32) {
        return ntt_raised(x << shift, (u32)(x >> (64 - shift)));
    }
    u64 low = x << (shift % 32);
    u64 high = shift % 32 ? x >> (64 - shift % 32) : 0;
    if (shift < 64) {
        return ntt_folded(low << 32, (u32)(low >> 32), (u32)high);
    }
    return F_sub((low << 32) - (u32)low, high << 32 | low >> 32);
}

ACL_DEVICE void ntt_levels(F *v, NTT_TABLE roots, i32 block, i32 done, i32 skip, i32 levels, i32 first) {
    if (!first) {
#pragma unroll
        for (i32 k = 1; k < NTT_RADIX; k++) {
            v[k] = F_mul(F_load(roots, ((NTT_RADIX + k) << done) + block), v[k]);
        }
    }
#pragma unroll
    for (i32 level = 0; level < NTT_LOG_RADIX; level++) {
#pragma unroll
        for (i32 pair = 0; pair < NTT_RADIX / 2; pair++) {
            const i32 span = NTT_RADIX >> (level + 1), part = pair / span, k = pair + part * span;
            const i32 turned = ((part & 1) << 2 | (part & 2) | part >> 2) >> (3 - level);
            const i32 shift = turned * (NTT_SHIFT << (3 - level)) % 192;
            if (level < levels) {
                F x = v[k], y = v[k + span];
                if (part) {
                    y = ntt_shifted(y, shift % 96);
                } else if (level) {
                    y = F_reduced(y);
                }
                v[k] = shift < 96 ? F_add(x, y) : F_sub(x, y);
                v[k + span] = shift < 96 ? F_sub(x, y) : F_add(x, y);
            }
        }
    }
}

ACL_DEVICE F ntt_canonical(F x) {
    return F_reduced(x);
}
