/* The compiler-dependent parts of a pass for NVIDIA. Registers are limited so that NTT_RESIDENT blocks fit on a
 * multiprocessor, unless that is 0. Tables do not change while a pass runs, so their pointers are __restrict__. Arrays and
 * tables are aligned to 16 bytes; telling the compiler so removes the test for alignment from each access of an element of
 * several words, 70 branches in all. */
#if NTT_RESIDENT > 0
#define NTT_BLOCK __launch_bounds__(NTT_THREADS, NTT_RESIDENT)
#else
#define NTT_BLOCK ACL_BLOCK(NTT_THREADS)
#endif
#define NTT_TABLE const F_WORD *__restrict__
#define NTT_ALIGNED(pointer) __builtin_assume(((u64)(pointer) & 15) == 0)

/* Programmatic dependent launch: let the next kernel of the stream launch early, then wait until the preceding one has
 * ended and its results can be read. Without it a multiprocessor is idle for 1 to 2 us between two passes. */
#if __CUDA_ARCH__ >= 900
#define NTT_WAIT_FOR_PREVIOUS()                                                                              \
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");                                    \
    asm volatile("griddepcontrol.wait;" ::: "memory")
#else
#define NTT_WAIT_FOR_PREVIOUS()
#endif

/* Reverse the 32 bits. */
ACL_DEVICE u32 ntt_reverse_32(u32 x) {
    return __brev(x);
}
