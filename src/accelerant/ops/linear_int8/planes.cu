// One row of x in 24-bit integers times a weight in 8 or 4 bits, for Hopper. The sums of integers are exact: the bits are
// those of linear_int8_planes and linear_int4_planes, however the work is divided.
//
// Source: as triton_kernels.py, and that of linear_int4; planes are those of ops/decode.
// Layout: planes (3, K) int8, unit (1,), or if COLUMNS, which is K, x (K,) and the gain (K,) of an RMS norm if NORM: each
//         block converts x. ALONE: the kernel that only converts, rows (M, K), one a block. Weight (N, K) int8 or (N,
//         K / 2) uint8, or 2 N rows if GATED, gates first; scale (rows,) or, in 4 bits, (rows, K / 128); bias (rows,); residual and y (N,). K is a multiple of 16, in 4 bits of 128.
// Grid:   a block takes `fours` times four rows, two of them gates if GATED, in steps of 512 bytes of each row; its warps
//         share the steps, with DEPTH of them in flight in each.
// Start:  a block may begin before the preceding kernel ends. No load is of the kind for constants: the
//         kernel that writes the data may not have ended.
// Order:  sums in 4 bits are of a group, scaled in float32 and added one by one in order, at the end.
// Bound:  memory, the weight is read once: three (6 in 4 bits) dp4a of four products per word.

typedef unsigned short u16;

__device__ __forceinline__ uint4 load_once(const uint4* p) {
    uint4 w;
    asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w) : "l"(p));
    return w;
}
__device__ __forceinline__ int dot_signed(u32 w, u32 x, int sum) {
    asm("dp4a.s32.s32 %0, %1, %2, %0;" : "+r"(sum) : "r"(w), "r"(x));
    return sum;
}
__device__ __forceinline__ int dot_unsigned(u32 w, u32 x, int sum) {
    asm("dp4a.u32.s32 %0, %1, %2, %0;" : "+r"(sum) : "r"(w), "r"(x));
    return sum;
}
__device__ __forceinline__ u32 word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
__device__ __forceinline__ float element_of(u16 bits) {
    float y;
    asm("cvt.f32." ELEMENT " %0, %1;" : "=f"(y) : "h"(bits));
    return y;
}
__device__ __forceinline__ float at(const void* p, int bytes, int i) {
    return bytes == 4 ? ((const float*)p)[i] : element_of(((const u16*)p)[i]);
}
__device__ __forceinline__ float joined(int high, int middle, int low) {
    return __fadd_rn(__fmul_rn((float)high, 65536.0f), __fadd_rn(__fmul_rn((float)middle, 256.0f), (float)low));
}

__device__ __forceinline__ float exp2_exact(float x) {
    float y;
    asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#if COLUMNS
// Elements of x, times the norm's gain, of the chunks of 8 that a thread has: one in THREADS.
#define THREADS (32 * WARPS)
#define CHUNKS ((COLUMNS / 8 + THREADS - 1) / THREADS)

// Converts a row of x, after an RMS norm if NORM, to planes with `line` times 16 bytes each; returns the unit. Squares are
// summed over 256 columns by a warp and then in order, so that the bits do not depend on the block's size.
__device__ __forceinline__ float to_planes(const u16* x, const u16* norm, float eps, uint4* planes, int line, float* space) {
    const int warp = warp_id();  // a shuffle: of all lanes
    float z[CHUNKS][8], top = 0.0f;
    bool finite = true;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const int chunk = threadIdx.x + c * THREADS;
        if (CHUNKS * THREADS * 8 != COLUMNS && chunk - lane_id() >= COLUMNS / 8) break;
        const bool inside = chunk < COLUMNS / 8;
        const uint4 some = inside ? *(const uint4*)(x + 8 * chunk) : make_uint4(0, 0, 0, 0);
#if NORM
        const uint4 gains = inside ? *(const uint4*)(norm + 8 * chunk) : make_uint4(0, 0, 0, 0);
#endif
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float one = element_of((u16)(word(some, i / 2) >> (i % 2 * 16)));
            squares = __fmaf_rn(one, one, squares);
#if NORM
            z[c][i] = __fmul_rn(one, element_of((u16)(word(gains, i / 2) >> (i % 2 * 16))));
#else
            z[c][i] = one;
#endif
            top = fmaxf(top, fabsf(z[c][i]));
            finite = finite && fabsf(z[c][i]) < __int_as_float(0x7F800000);
        }
#if NORM
#pragma unroll
        for (int other = 16; other; other /= 2) squares = __fadd_rn(squares, __shfl_xor_sync(~0u, squares, other));
        if (lane_id() == 0) space[WARPS + chunk / 32] = squares;
#endif
    }
#pragma unroll
    for (int other = 16; other; other /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, other));
    if (lane_id() == 0) space[warp] = top;
    finite = __syncthreads_and(finite);
#pragma unroll
    for (int i = 0; i < WARPS; ++i) top = fmaxf(top, space[i]);
    float unit = top > 0.0f ? top : 1.0f;
    const float factor = __fdiv_rn(8355000.0f, unit);
    unit = __fdiv_rn(unit, 8355000.0f);
#if NORM
    float squares = 0.0f;
    for (int i = 0; i < (COLUMNS + 255) / 256; ++i) squares = __fadd_rn(squares, space[WARPS + i]);
    unit = __fmul_rn(unit, __frcp_rn(__fsqrt_rn(__fadd_rn(__fdiv_rn(squares, (float)COLUMNS), eps))));
#endif
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const int chunk = threadIdx.x + c * THREADS;
        if (chunk >= COLUMNS / 8) break;
        u32 out[3][2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32 n[4];  // of three bytes, each plus 128
#pragma unroll
            for (int i = 0; i < 4; ++i) n[i] = __float2int_rd(__fmaf_rn(z[c][4 * half + i], factor, 0.5f)) + 0x808080;
            const u32 low = __byte_perm(n[0], n[1], 0x5140), upper = __byte_perm(n[2], n[3], 0x5140);
            out[2][half] = __byte_perm(low, upper, 0x5410) ^ 0x80808080u;
            out[1][half] = __byte_perm(low, upper, 0x7632) ^ 0x80808080u;
            out[0][half] = __byte_perm(__byte_perm(n[0], n[1], 0x0062), __byte_perm(n[2], n[3], 0x0062), 0x5410) ^ 0x80808080u;
        }
#pragma unroll
        for (int j = 0; j < 3; ++j) ((uint2*)(planes + j * line))[chunk] = make_uint2(out[j][0], out[j][1]);
    }
    return finite ? unit : __int_as_float(0x7FC00000);
}
#endif

#if ALONE
extern "C" __global__ void __launch_bounds__(THREADS)
    linear_planes(const u16* x, const u16* norm, uint4* planes, float* units, float eps) {
    __shared__ float space[WARPS + (COLUMNS + 255) / 256];
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const long long row = blockIdx.x;
    const float unit = to_planes(x + row * COLUMNS, norm, eps, planes + row * (3 * COLUMNS / 16), COLUMNS / 16, space);
    if (threadIdx.x == 0) units[row] = unit;
}
#else

struct Step {
    uint4 weight[4];
    float scale;
};
struct Work {
    const uint4* weight;
    const float* scale;
    int first, steps, columns, line, groups, N, rows;  // first quad; steps in a quad; 16-byte pieces of a row
};
__device__ __forceinline__ int row_of(const Work& work, int quad, int r) {
    const int q = work.first + quad;
#if GATED
    return min(2 * q + r % 2, work.N - 1) + r / 2 * work.N;
#else
    return min(4 * q + r, work.N - 1);
#endif
}
__device__ __forceinline__ void load(Step& step, const Work& work, int index, int end) {
    if (index >= end) return;
    const int quad = index / work.steps, piece = index % work.steps * 32 + lane_id();
    const bool inside = piece < work.columns;
#pragma unroll
    for (int r = 0; r < 4; ++r)
        step.weight[r] = inside ? load_once(work.weight + (long long)row_of(work, quad, r) * work.columns + piece)
                                : make_uint4(0, 0, 0, 0);
#if BITS == 4
    step.scale = inside ? work.scale[(long long)row_of(work, quad, lane_id() % 4) * work.groups + piece / 4] : 0.0f;
#endif
}

// Exchanges halves of the lanes' sums of rows: afterwards a lane has those of half of its rows, over two lanes.
template <int ROWS> __device__ __forceinline__ void halve(int (*sums)[3], int other) {
    const bool upper = lane_id() & other;
#pragma unroll
    for (int r = 0; r < ROWS / 2; ++r)
#pragma unroll
        for (int j = 0; j < 3; ++j) {
            const int low = sums[r][j], high = sums[r + ROWS / 2][j];
            sums[r][j] = (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, other);
        }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    linear_planes_row(const void* planes, const void* unit, const uint4* weight, const float* scale, const void* bias,
                      const u16* residual, u16* y, int N, int K, int fours, float eps) {
    extern __shared__ uint4 x[];  // planes, then sums: of 8 bits (rows, 3) integers, of 4 bits (rows, groups + 1) floats; then what to_planes needs
    const int total = GATED ? (N + 1) / 2 : (N + 3) / 4, first = blockIdx.x * fours, lane = lane_id();
    Work work = {weight, scale, first, 0, K * BITS / 128, K / 16, K / 128, N, 0};
    work.steps = (work.columns + 31) / 32;
    const int mine = min(fours, total - first), end = mine * work.steps;
    int next = warp_id();
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    Step steps[DEPTH];
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) load(steps[d], work, next + d * WARPS, end);
#if COLUMNS
    float* space = (float*)(x + 3 * work.line) + fours * (BITS == 8 ? 12 : 4 * (work.groups + 1));
    const float units = to_planes((const u16*)planes, (const u16*)unit, eps, x, work.line, space);
#else
    for (int i = threadIdx.x; i < 3 * work.line; i += 32 * WARPS) x[i] = ((const uint4*)planes)[i];
    const float units = *(const float*)unit;
#endif
#if BITS == 8
    int* sums_of = (int*)(x + 3 * work.line);
    for (int i = threadIdx.x; i < 12 * mine; i += 32 * WARPS) sums_of[i] = 0;
#else
    float* parts = (float*)(x + 3 * work.line);
#endif
    __syncthreads();

    for (; next < end; next += DEPTH * WARPS) {
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
            const int index = next + d * WARPS;
            if (index >= end) break;
            const int quad = index / work.steps, step = index % work.steps, piece = step * 32 + lane;
            int sums[4][3] = {};
#if BITS == 8
            if (piece < work.columns) {
#pragma unroll
                for (int j = 0; j < 3; ++j) {
                    const uint4 ones = x[j * work.line + piece];
#pragma unroll
                    for (int r = 0; r < 4; ++r)
#pragma unroll
                        for (int i = 0; i < 4; ++i)
                            sums[r][j] = dot_signed(word(steps[d].weight[r], i), word(ones, i), sums[r][j]);
                }
            }
            load(steps[d], work, index + DEPTH * WARPS, end);
            halve<4>(sums, 16);
            halve<2>(sums, 8);
#pragma unroll
            for (int j = 0; j < 3; ++j) {
#pragma unroll
                for (int other = 4; other; other /= 2) sums[0][j] += __shfl_xor_sync(~0u, sums[0][j], other);
                if (lane % 8 == 0) atomicAdd(sums_of + (4 * quad + lane / 8) * 3 + j, sums[0][j]);
            }
#else
            // Of two neighbouring groups one begins with its upper halves: 8 lanes read all banks.
            const int group = piece / 4, odd = group & 1, shift = 4 * odd;
            if (piece < work.columns) {
#pragma unroll
                for (int half = 0; half < 2; ++half)
#pragma unroll
                    for (int j = 0; j < 3; ++j) {
                        const uint4 ones = x[j * work.line + group * 8 + (half ^ odd) * 4 + piece % 4];
                        int eights = 0;
#pragma unroll
                        for (int i = 0; i < 4; ++i) eights = dot_signed(0xF8F8F8F8u, word(ones, i), eights);
#pragma unroll
                        for (int r = 0; r < 4; ++r) {
                            sums[r][j] += eights;
#pragma unroll
                            for (int i = 0; i < 4; ++i) {
                                const u32 w = word(steps[d].weight[r], i) >> (half ? 4 - shift : shift);
                                sums[r][j] = dot_unsigned(w & 0x0F0F0F0Fu, word(ones, i), sums[r][j]);
                            }
                        }
                    }
            }
            const float factor = steps[d].scale;
            load(steps[d], work, index + DEPTH * WARPS, end);
            halve<4>(sums, 2);
            halve<2>(sums, 1);
            const float part = __fmul_rn(joined(sums[0][0], sums[0][1], sums[0][2]), factor);
            if (piece < work.columns) parts[(4 * quad + lane % 4) * (work.groups + 1) + group] = part;
#endif
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 4 * mine + (-4 * mine & 31); i += 32 * WARPS) {
        const int quad = min(i / 4, mine - 1), r = i % 4, row = row_of(work, quad, r);
#if BITS == 8
        const int* s = sums_of + (4 * quad + r) * 3;
        float z = __fmul_rn(__fmul_rn(joined(s[0], s[1], s[2]), units), scale[row]);
#else
        float z = 0.0f;
        for (int g = 0; g < work.groups; ++g) z = __fadd_rn(z, parts[(4 * quad + r) * (work.groups + 1) + g]);
        z = __fmul_rn(z, units);
#endif
        if (BIAS_BYTES) z = __fadd_rn(z, at(bias, BIAS_BYTES, row));
#if GATED
        float up = __shfl_down_sync(~0u, z, 2), exponential, gate;
        exponential = exp2_exact(__fmul_rn(-z, 1.44269504f));
        asm("div.full.f32 %0, %1, %2;" : "=f"(gate) : "f"(z), "f"(__fadd_rn(exponential, 1.0f)));
        z = __fmul_rn(gate, up);
        const int n = 2 * (first + quad) + r;
        const bool stored = r < 2;
#else
        const int n = 4 * (first + quad) + r;
        const bool stored = true;
#endif
        if (i < 4 * mine && stored && n < N) {
            if (RESIDUAL) z = __fadd_rn(z, element_of(residual[n]));
            y[n] = (u16)pack(z, 0.0f);
        }
    }
}
#endif
