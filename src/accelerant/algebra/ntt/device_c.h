/* The compiler-dependent parts of a pass, for every device; device_cuda.h has the same names. */
#define NTT_BLOCK ACL_BLOCK(NTT_THREADS)
#define NTT_TABLE ACL_GLOBAL const F_WORD *
#define NTT_ALIGNED(pointer)
#define NTT_WAIT_FOR_PREVIOUS()

/* Reverse the 32 bits. */
ACL_DEVICE u32 ntt_reverse_32(u32 x) {
    x = (x >> 1 & 0x55555555U) | (x & 0x55555555U) << 1;
    x = (x >> 2 & 0x33333333U) | (x & 0x33333333U) << 2;
    x = (x >> 4 & 0x0F0F0F0FU) | (x & 0x0F0F0F0FU) << 4;
    x = (x >> 8 & 0x00FF00FFU) | (x & 0x00FF00FFU) << 8;
    return x >> 16 | x << 16;
}
