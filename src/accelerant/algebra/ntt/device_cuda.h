/* The compiler-dependent parts of a pass for NVIDIA. Registers are limited so that NTT_RESIDENT blocks fit on a
 * multiprocessor, unless that is 0. Tables do not change while a pass runs, so they are read past the stores. Arrays and
 * tables begin at a multiple of 16 bytes, so that no access of an element of several words looks whether it may be wide:
 * that took 70 branches. */
#if NTT_RESIDENT > 0
#define NTT_BLOCK __launch_bounds__(NTT_THREADS, NTT_RESIDENT)
#else
#define NTT_BLOCK ACL_BLOCK(NTT_THREADS)
#endif
#define NTT_TABLE const F_WORD *__restrict__
#define NTT_ALIGNED(pointer) __builtin_assume(((u64)(pointer) & 15) == 0)

/* Wait until the preceding kernel of the stream has ended and its results can be read. Before that, let the next kernel
 * launch: its blocks start where there is room once all of these have started, and wait in turn. Without it a multiprocessor
 * is idle for 1 to 2 us between two passes. */
#if __CUDA_ARCH__ >= 900
#define NTT_AHEAD_ENDED()                                                                              \
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");                                    \
    asm volatile("griddepcontrol.wait;" ::: "memory")
#else
#define NTT_AHEAD_ENDED()
#endif

/* The 32 bits in the opposite order. */
ACL_DEVICE u32 ntt_turned(u32 x) {
    return __brev(x);
}
