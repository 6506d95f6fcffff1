// linear_int8 of one row of x, for Hopper: y = (x W^T) scale + b, W in 8 bits.
//
// Source: as triton_kernels.py.
// Layout: x (K,), weight (N, K), rows contiguous and 16-byte aligned, K a multiple of 16; scale, bias and y (N,).
// Grid:   WARPS warps per block; a warp processes ROWS rows of the weight over all of K, 512 columns per step, with UNROLL
//         steps in flight while as many are multiplied.
// Start:  a block may begin before the preceding kernel of the stream ends (programmatic dependent launch). Until that
//         kernel's results may be read, it prefetches the first PREFETCH bytes of its rows, x and the scales to the L2
//         cache. It allows the next kernel to begin as soon as all its blocks run, so that the next kernel's blocks
//         prefetch while the last rows are summed.
// Order:  x is loaded with the weights that it is multiplied by, one step early, and the scales first: waiting for each
//         when needed cost 0.5 and 1 us of 19 (8192 x 8192, H200, all in memory).
// Bound:  memory, N K bytes of weight. Integers are converted to floats by a byte permutation and a subtraction; conversion
//         instructions, at an eighth of the rate, would bound the kernel.

typedef unsigned short u16;
#define X_PART 512

// Not ld.global.nc, which requires that nothing writes the data while the kernel runs: the kernel may begin before the
// kernel that writes the weight has ended.
__device__ __forceinline__ uint4 load_once(const uint4* p) {
    uint4 w;
    asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w) : "l"(p));
    return w;
}
// Byte i of four integers biased by 128: (2^23 + byte) - (2^23 + 128); exact.
__device__ __forceinline__ float integer_of(u32 bytes, int i) {
    return __uint_as_float(__byte_perm(bytes, 0x4B000000u, 0x7440 | i)) - 8388736.0f;
}
__device__ __forceinline__ float element_of(u16 bits) {
    float y;
    asm("cvt.f32." ELEMENT " %0, %1;" : "=f"(y) : "h"(bits));
    return y;
}
template <int BYTES> __device__ __forceinline__ float at(const void* p, int i) {
    return BYTES == 4 ? ((const float*)p)[i] : element_of(((const u16*)p)[i]);
}

struct Columns {
    uint4 weight[UNROLL][ROWS];
    uint4 x[UNROLL][2];
};
// Loads groups of 16 columns from `from` on, one per lane; past the end zero weights, which are not multiplied.
__device__ __forceinline__ void load_columns(
    Columns& some, const uint4* x, const uint4* const (&rows)[ROWS], int from, int groups) {
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
        const int group = from + 32 * u;
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
            some.weight[u][r] = group < groups ? load_once(rows[r] + group) : make_uint4(0, 0, 0, 0);
        if (group < groups) {
            some.x[u][0] = x[2 * group];
            some.x[u][1] = x[2 * group + 1];
        }
    }
}
__device__ __forceinline__ void bring_to_l2(const void* p, int bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(bytes));
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    linear_int8_row(const uint4* x, const uint4* weight, const void* scale, const void* bias, u16* y, int N, int K) {
    const int lane = lane_id(), first = (blockIdx.x * WARPS + warp_id()) * ROWS, groups = K / 16;
    if (first >= N) return;
    const uint4* rows[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) rows[r] = weight + (long long)min(first + r, N - 1) * groups;
    const int own = min(first + lane, N - 1);  // of the first ROWS lanes
    if (lane < ROWS) bring_to_l2(weight + (long long)own * groups, min(PREFETCH, K));
    if (threadIdx.x == 0) {
        const long long part = (long long)blockIdx.x * X_PART;  // of x, in bytes: a block's
        if (part < 2ll * K) bring_to_l2((const char*)x + part, (int)min((long long)X_PART, 2ll * K - part));
        asm volatile("prefetch.global.L2 [%0];" ::"l"((const char*)scale + (long long)SCALE_BYTES * first));
    }
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");

    const float own_scale = lane < ROWS ? at<SCALE_BYTES>(scale, own) : 0.0f;
    const float own_bias = BIAS_BYTES && lane < ROWS ? at<BIAS_BYTES>(bias, own) : 0.0f;
    float sums[ROWS] = {};
    Columns now, next;
    load_columns(now, x, rows, lane, groups);
    for (int from = lane; from < groups + lane; from += 32 * UNROLL) {
        load_columns(next, x, rows, from + 32 * UNROLL, groups);
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            if (from + 32 * u >= groups) break;
            const uint4 low = now.x[u][0], high = now.x[u][1];
            const u32 pairs[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const uint4 w = now.weight[u][r];
                const u32 bytes[4] = {w.x ^ 0x80808080u, w.y ^ 0x80808080u, w.z ^ 0x80808080u, w.w ^ 0x80808080u};
#pragma unroll
                for (int i = 0; i < 16; ++i) {
                    const float one = element_of((u16)(i % 2 ? pairs[i / 2] >> 16 : pairs[i / 2] & 0xffff));
                    sums[r] = fmaf(integer_of(bytes[i / 4], i % 4), one, sums[r]);
                }
            }
        }
        now = next;
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
        for (int other = 16; other; other /= 2) sums[r] += __shfl_xor_sync(~0u, sums[r], other);
        const float sum = fmaf(sums[r], __shfl_sync(~0u, own_scale, r), __shfl_sync(~0u, own_bias, r));
        if (lane == 0 && first + r < N) y[first + r] = (u16)pack(sum, 0.0f);
    }
}
