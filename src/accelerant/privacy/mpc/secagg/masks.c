/* Sums of masks, portable, after chacha20.h: one block of 16 words of one row per thread.
 *
 *     out[row][16 i + j] = sum over seeds s of the row of sign_s * word j of block i of ChaCha20(seed_s)    mod 2^32
 *
 * states: (seeds, 12) words: key (8), nonce (2), sign (1 or 2^32 - 1), unused; starts: (rows + 1), the row's first seed.
 * Bound: integer arithmetic, about 1000 operations for a block of keystream; memory is written once per row. */
ACL_KERNEL ACL_BLOCK(256) void chacha20_mask_sums(
    ACL_GLOBAL const u32 *states, ACL_GLOBAL const i64 *starts, ACL_GLOBAL u32 *out, i64 blocks, i64 total, u32 one
) {
    i64 index = acl_global_id();
    if (index >= total) {
        return;
    }
    i64 row = index / blocks, block = index % blocks;
    u32 start[12], x[16], sum[16];
    for (i32 j = 0; j < 16; j++) {
        sum[j] = 0;
    }
    for (i64 seed = starts[row]; seed < starts[row + 1]; seed++) {
        chacha20_start(start, states + 12 * seed, (u64)block);
        chacha20_block(x, start, one);
        u32 sign = states[12 * seed + 10];
        for (i32 j = 0; j < 16; j++) {
            sum[j] += sign * x[j];
        }
    }
    for (i32 j = 0; j < 16; j++) {
        out[16 * index + j] = sum[j];
    }
}
