// Hopper's instructions as functions, for kernels compiled at run time for sm_90a: one instruction per function, without
// other headers. program.py joins this text, the wgmma wrappers that a kernel needs, and the kernel.
//
// Shared memory is addressed by 32-bit numbers (shared_address). A tile there has rows of 128 bytes under the 128-byte
// swizzle: 16-byte chunk c of row r is stored at chunk c ^ (r % 8), so tiles start at multiples of 1024 bytes.
// Source: PTX ISA 8.7, sections 9.7.13 (mbarrier), 9.7.9.27 (cp.async.bulk.tensor), 9.7.15 (wgmma).

typedef unsigned int u32;
typedef unsigned long long u64;

struct alignas(64) TensorMap { char bytes[128]; };

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Volatile, so that values computed from these are recomputed where they are used instead of kept in registers.
__device__ __forceinline__ int lane_id() {
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}
// Through a shuffle, which makes the value warp-uniform to the compiler: loops and descriptors that depend on it then use
// the uniform datapath.
__device__ __forceinline__ int warp_id() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return __shfl_sync(~0u, thread / 32, 0);
}
__device__ __forceinline__ int warpgroup_id() { return warp_id() / 4; }

// --- mbarriers: a phase ends when all arrivals and all expected bytes are complete; parity is the awaited phase's

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// After the last barrier_init and before the block's first __syncthreads: makes the barriers visible to the copy engine.
__device__ __forceinline__ void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void barrier_expect(u32 barrier, u32 size_bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(size_bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra finished;\nbra again;\nfinished:\n}" ::"r"(barrier), "r"(parity) : "memory");
}

// --- barriers among some warps of a block: ids 1 to 15; `threads` counts those that sync and those that arrive

__device__ __forceinline__ void named_barrier(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// --- the copy engine

__device__ __forceinline__ void prefetch_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// Loads a box of a (batch, head, row, column) tensor; elements outside the tensor are zeros.
__device__ __forceinline__ void load_tile(u32 dst, const TensorMap* map, u32 barrier, int x, int row, int head,
                                          int batch) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(dst), "l"(map), "r"(barrier), "r"(x), "r"(row), "r"(head),
        "r"(batch) : "memory");
}
// Stores a box; elements outside the tensor are not written. Each thread that wrote the box must call proxy_fence before.
__device__ __forceinline__ void store_tile(const TensorMap* map, u32 src, int x, int row, int head, int batch) {
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map), "r"(src),
        "r"(x), "r"(row), "r"(head), "r"(batch) : "memory");
}
// size_bytes is a multiple of 16.
__device__ __forceinline__ void load_bytes(u32 dst, const void* src, u32 size_bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst), "l"(src),
        "r"(size_bytes), "r"(barrier) : "memory");
}
__device__ __forceinline__ void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until at most PENDING of this thread's store groups still read shared memory.
template <int PENDING> __device__ __forceinline__ void store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
// Makes this thread's writes to shared memory visible to the copy engine and to wgmma (after the barrier that follows).
__device__ __forceinline__ void proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// --- registers: every warp of a warpgroup changes its limit to COUNT per thread (a multiple of 8)

template <int COUNT> __device__ __forceinline__ void registers_take() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> __device__ __forceinline__ void registers_give() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// --- wgmma

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Descriptor of a matrix with rows of 128 bytes, 128-byte swizzle and 1024 bytes between groups of 8 rows. For an operand
// stored across the sum (the wrapper's letter t), `next` is the distance in bytes of panels of 64 columns. Add 2 for the
// next 16 columns, 128 for the next 16 rows.
__device__ __forceinline__ u64 descriptor(u32 address, u32 next = 16) {
    return (u64)((address & 0x3FFFF) >> 4) | ((u64)(next >> 4) << 16) | (64ull << 32) | (1ull << 62);
}

// --- arithmetic and shared memory

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float log2_fast(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// Packs two floats as 16-bit elements, `low` in the low half.
__device__ __forceinline__ u32 pack(float low, float high) {
    u32 word;
    asm("cvt.rn." ELEMENT "x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}
__device__ __forceinline__ void store_words(u32 address, int a, int b, int c, int d) {
    asm volatile("st.shared.v4.s32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
__device__ __forceinline__ void load_words(u32 address, int& a, int& b, int& c, int& d) {
    asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
                 : "r"(address) : "memory");
}
// Stores four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrices(u32 address, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
                 "r"(c), "r"(d) : "memory");
}
__device__ __forceinline__ void load_matrices(u32 address, u32& a, u32& b, u32& c, u32& d) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
                 : "r"(address) : "memory");
}
// D += A B of a warp: 16 rows, 8 columns, 16 summed.
__device__ __forceinline__ void warp_mma(float* d, const u32* a, const u32* b) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32." ELEMENT "." ELEMENT ".f32"
        " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
