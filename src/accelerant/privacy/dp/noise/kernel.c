/* Discrete Gaussian and discrete Laplace noise, portable; discrete.py defines both bit for bit.
 *
 * gaussian_steps   out <- Z                                        out i64
 * gaussian_add     x <- (round(x / grid) + Z) * grid * scale       x float32; inverse = 1 / grid, outward = grid * scale
 * laplace_steps    out <- Z
 *
 * One unit per thread: 16 blocks of keystream, (16 / TERMS) * 15 draws. A block's memory holds the tables once, so that
 * on a device with banks the time of a lookup depends on the other lookups: gaussian.cuh is for devices with room for a
 * copy in each bank. Bound: integer arithmetic, about 1000 operations for a block of keystream. */
#define DRAWS (16 / TERMS)

/* Load the tables into the block's memory and draw; word 0 of the pool's block is word[0]. */
#define GAUSSIAN_UNIT(n, STORE) \
    ACL_LOCAL u32 table[2048]; \
    for (i32 i = acl_local_id(); i < 2048; i += acl_local_size()) { \
        table[i] = tables[i]; \
    } \
    acl_barrier(); \
    i64 unit = acl_global_id(); \
    i64 element = (unit >> 5) * (15 * DRAWS * 32) + (unit & 31); \
    if (element >= (n)) { \
        return; \
    } \
    u32 start[12], word[16]; \
    u64 pool = 0; \
    chacha20_start(start, state, first[0] + 16 * (u64)unit); \
    chacha20_block(word, start, one); \
    for (i32 slot = 0; slot < 5; slot++) { \
        u32 at = (word[3 * slot] & CELL_FIELD) >> 7; \
        u64 found = rest_sample(word[3 * slot], word[3 * slot + 1], word[3 * slot + 2], table[512 + at], \
                                table[1024 + at], table[1536 + at]); \
        pool |= found << 9 * slot; \
    } \
    for (i32 block = 1; block < 16; block++) { \
        chacha20_start(start, state, first[0] + 16 * (u64)unit + (u64)block); \
        chacha20_block(word, start, one); \
        for (i32 draw = 0; draw < DRAWS; draw++) { \
            i32 z = 0; \
            for (i32 term = 0; term < TERMS; term++) { \
                u32 w = word[TERMS * draw + term]; \
                i32 sample = base_sample(w, table[(w & CELL_FIELD) >> 7], &pool); \
                z += sample * (term == 0 ? 1 : term == 1 ? k1 : term == 2 ? k2 : term == 3 ? k3 : k4); \
            } \
            if (element < (n)) { \
                STORE; \
            } \
            element += 32; \
        } \
    }

ACL_KERNEL ACL_BLOCK(128) void gaussian_steps(
    ACL_GLOBAL const u32 *state, ACL_GLOBAL const u64 *first, ACL_GLOBAL const u32 *tables, ACL_GLOBAL i64 *out, i64 n,
    i32 k1, i32 k2, i32 k3, i32 k4, u32 one
) {
    GAUSSIAN_UNIT(n, out[element] = z)
}

ACL_KERNEL ACL_BLOCK(128) void gaussian_add(
    ACL_GLOBAL const u32 *state, ACL_GLOBAL const u64 *first, ACL_GLOBAL const u32 *tables, ACL_GLOBAL float *x, i64 n,
    i32 k1, i32 k2, i32 k3, i32 k4, u32 one, float inverse, float outward
) {
    GAUSSIAN_UNIT(n, x[element] = (float)(to_steps(x[element], inverse) + z) * outward)
}

/* thresholds: (3, digits), the upper words first. One draw per thread. */
ACL_KERNEL ACL_BLOCK(128) void laplace_steps(
    ACL_GLOBAL const u32 *state, ACL_GLOBAL const u64 *first, ACL_GLOBAL const u32 *thresholds, ACL_GLOBAL i64 *out,
    i64 n, i32 digits, i32 blocks, u32 one
) {
    i64 element = acl_global_id();
    if (element >= n) {
        return;
    }
    u32 start[12], word[16];
    u64 pool0 = 0, pool1 = 0, pool2 = 0;
    u64 counter = first[0] + (u64)element * (u64)blocks;
    i64 sides = 0;
    for (i32 block = 0; block < blocks; block++) {
        chacha20_start(start, state, counter + (u64)block);
        chacha20_block(word, start, one);
        if (block == 0) {
            pool0 = (u64)word[0] << 32 | word[1];
            pool1 = (u64)word[2] << 32 | word[3];
            pool2 = (u64)word[4] << 32 | word[5];
        }
        for (i32 i = 0; i < 16; i++) {
            i32 at = 16 * block + i - 6;
            if (at >= 0 && at < 2 * digits) {
                i32 second = at >= digits;
                i32 digit = second ? at - digits : at;
                u32 upper = thresholds[digit];
                u64 rest = (u64)thresholds[digits + digit] << 32 | thresholds[2 * digits + digit];
                u32 equal = word[i] == upper;
                u64 decided = (u64)((u32)(word[i] < upper) | (equal & (u32)(pool0 < rest)));
                pool0 = equal ? pool1 : pool0;
                pool1 = equal ? pool2 : pool1;
                pool2 = equal ? 0 : pool2;
                sides += second ? -(i64)(decided << digit) : (i64)(decided << digit);
            }
        }
    }
    out[element] = sides;
}
