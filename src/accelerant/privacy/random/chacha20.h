/* ChaCha20's block function, after portable.h (RFC 8439, section 2.3).
 *
 * NVIDIA's integer multiplier works in parallel with its adder: additions written as products by a 1 that the compiler
 * does not know use it, which leaves 640 of 960 operations of a block to the adder (two thirds of the time, by the count
 * of instructions). */
#if defined(__CUDACC__)
#define CHACHA_ADD(a, b) ((a) * one + (b))
#define CHACHA_UNROLL _Pragma("unroll")
#else
#define CHACHA_ADD(a, b) ((a) + (b))
#define CHACHA_UNROLL
#endif
#define CHACHA_ROTATE(x, n) (((x) << (n)) | ((x) >> (32 - (n))))
#define CHACHA_QUARTER(a, b, c, d) \
    a = CHACHA_ADD(a, b), d ^= a, d = CHACHA_ROTATE(d, 16); \
    c = CHACHA_ADD(c, d), b ^= c, b = CHACHA_ROTATE(b, 12); \
    a = CHACHA_ADD(a, b), d ^= a, d = CHACHA_ROTATE(d, 8); \
    c = CHACHA_ADD(c, d), b ^= c, b = CHACHA_ROTATE(b, 7);

/* x: 16 words of a block; start: key (8), then words 12 to 15 of the state. `one` is 1, unknown to the compiler. */
ACL_DEVICE void chacha20_block(u32 *x, const u32 *start, u32 one) {
    x[0] = 0x61707865u, x[1] = 0x3320646eu, x[2] = 0x79622d32u, x[3] = 0x6b206574u;
    for (i32 i = 0; i < 12; i++) {
        x[4 + i] = start[i];
    }
    CHACHA_UNROLL
    for (i32 i = 0; i < 10; i++) {
        CHACHA_QUARTER(x[0], x[4], x[8], x[12])
        CHACHA_QUARTER(x[1], x[5], x[9], x[13])
        CHACHA_QUARTER(x[2], x[6], x[10], x[14])
        CHACHA_QUARTER(x[3], x[7], x[11], x[15])
        CHACHA_QUARTER(x[0], x[5], x[10], x[15])
        CHACHA_QUARTER(x[1], x[6], x[11], x[12])
        CHACHA_QUARTER(x[2], x[7], x[8], x[13])
        CHACHA_QUARTER(x[3], x[4], x[9], x[14])
    }
    x[0] += 0x61707865u, x[1] += 0x3320646eu, x[2] += 0x79622d32u, x[3] += 0x6b206574u;
    for (i32 i = 0; i < 12; i++) {
        x[4 + i] += start[i];
    }
}

/* The block's start from a stream's state: key (8 words), nonce (2); and a counter of 64 bits. */
ACL_DEVICE void chacha20_start(u32 *start, ACL_GLOBAL const u32 *state, u64 counter) {
    for (i32 i = 0; i < 8; i++) {
        start[i] = state[i];
    }
    start[8] = (u32)counter, start[9] = (u32)(counter >> 32);
    start[10] = state[8], start[11] = state[9];
}
