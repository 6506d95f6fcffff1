/* The keystream: words[16 i + j] is word j of the block of counter first + i. One block per thread. */
ACL_KERNEL ACL_BLOCK(256) void chacha20_keystream(
    ACL_GLOBAL const u32 *state, ACL_GLOBAL const u64 *first, ACL_GLOBAL u32 *words, i64 n, u32 one
) {
    i64 block = acl_global_id();
    if (16 * block >= n) {
        return;
    }
    u32 start[12], x[16];
    chacha20_start(start, state, first[0] + (u64)block);
    chacha20_block(x, start, one);
#if defined(__CUDACC__)
    if (16 * block + 16 <= n) { /* 16 bytes per store: 4 stores, not 16 */
        for (i32 i = 0; i < 4; i++) {
            ((uint4 *)words)[4 * block + i] = make_uint4(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
        }
        return;
    }
#endif
    for (i32 i = 0; i < 16; i++) {
        if (16 * block + i < n) {
            words[16 * block + i] = x[i];
        }
    }
}
