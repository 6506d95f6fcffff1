// Largest score of each block of rows on Hopper: m[q, j] = max over n in block j of s[q, n], see triton_kernels.py.
//
// The product q x^T follows ops/_hopper/product.h. A thread reduces the columns that its accumulators have, so that a
// block is the WIDTH / 8 rows of a tile that are equal modulo 8, and the scores never leave the registers. The other warps
// of the producer sum the squares of x's rows from the tiles in shared memory, once for each row (MEASURE): a search under
// "ip" needs the largest norm for its bound, and NaN or infinity anywhere shows in it.
//
// METRIC: 0 inner product; 1 l2, 2 s - |x|^2; 2 cosine, s / |x|; |x| is `norms` in both.
// Bound: tensor cores, 2 Q N D operations at 4096 a clock and multiprocessor.

constexpr int OFF_BARRIERS = OFF_SLOTS, OTHERS = 96;
static_assert(WIDTH % OTHERS == 0, "whole rows to a thread");

#define NOTHING __int_as_float(0xFF800000)               // minus infinity

struct Work {
    int queries, rows, blocks;
    Tiles tiles;
};

// The largest sum of squares of the rows, of which the first tile of each column of tiles is read; 96 threads.
__device__ __forceinline__ void measure(u32 base, u32 full, u32 empty, const Tiles& tiles, int first, int stride,
                                        u32* largest) {
    int thread = threadIdx.x - 288, lane = threadIdx.x & 31;
    Position at;
    for (int item = first; item < tiles.items; item += stride) {
        bool counts = locate(tiles, item).row == 0;
        float squares[WIDTH / OTHERS] = {};
#pragma unroll 1
        for (int k = 0; k < tiles.steps; ++k, at.next()) {
            barrier_wait(full + 8 * at.stage, at.parity);
            if (counts) {
                u32 tile = base + OFF_B + at.stage * B_BYTES;
#pragma unroll
                for (int i = 0; i < WIDTH / OTHERS; ++i)
#pragma unroll
                    for (int c = 0; c < 8; ++c) {        // 16-byte chunks of a row in any order: by lane, without conflicts
                        int words[4];
                        load_words(tile + (thread + OTHERS * i) * 128 + ((c + lane) & 7) * 16, words[0], words[1],
                                   words[2], words[3]);
#pragma unroll
                        for (int w = 0; w < 4; ++w) {
                            float low = __uint_as_float((u32)words[w] << 16), high = __uint_as_float(words[w] & 0xFFFF0000u);
                            squares[i] = fmaf(low, low, fmaf(high, high, squares[i]));
                        }
                    }
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(empty + 8 * at.stage);
        }
        if (counts) {
            u32 most = 0;                                // the bits of NaN are above all others
#pragma unroll
            for (int i = 0; i < WIDTH / OTHERS; ++i) most = max(most, __float_as_uint(squares[i]) & 0x7FFFFFFFu);
            most = __reduce_max_sync(~0u, most);
            if (lane == 0) atomicMax(largest, most);
        }
    }
}

extern "C" __global__ void __launch_bounds__(384, 1)
search_maxima(const __grid_constant__ TensorMap map_q, const __grid_constant__ TensorMap map_x,
              const float* __restrict__ norms, float* __restrict__ maxima, u32* __restrict__ largest,
              const __grid_constant__ Work work) {
    extern __shared__ __align__(1024) char memory[];
    u32 base = shared_address(memory);
    u32 full = base + OFF_BARRIERS, empty = full + 8 * STAGES;
    int first = blockIdx.x, stride = gridDim.x;
    if (threadIdx.x == 0) {
        ring_init(full, empty);
        barriers_ready();
    }
    __syncthreads();
    if (warpgroup_id() == 2) {
        registers_give<GIVE>();
        if (threadIdx.x == 256) {
            prefetch_map(&map_q);
            prefetch_map(&map_x);
            produce(base, full, empty, &map_q, &map_x, work.tiles, first, stride);
        }
        if (READERS && warp_id() > 8) measure(base, full, empty, work.tiles, first, stride, largest);
    } else {
        registers_take<TAKE>();
        int group = warpgroup_id(), lane = threadIdx.x & 31;
        int warp = __shfl_sync(~0u, (threadIdx.x & 127) >> 5, 0);
        float sums[HEIGHT][REGS];
#pragma unroll
        for (int h = 0; h < HEIGHT; ++h)
#pragma unroll
            for (int x = 0; x < REGS; ++x) sums[h][x] = 0.f;

        Multiplier product(base, full, empty, group, lane);
        int item = product.begin(work.tiles, first, stride);
        for (; item < work.tiles.items; item += 2 * stride) {
            Origin p = locate(work.tiles, item);
            product.multiply(sums, work.tiles.steps, item + stride < work.tiles.items);
            product.finish();
            int column = p.column + 2 * (lane & 3);
            bool whole = p.column + WIDTH <= work.rows;
            float best[HEIGHT][4];
#pragma unroll
            for (int h = 0; h < HEIGHT; ++h)
#pragma unroll
                for (int i = 0; i < 4; ++i) best[h][i] = NOTHING;
#pragma unroll
            for (int j = 0; j < WIDTH / 8; ++j)
#pragma unroll
                for (int odd = 0; odd < 2; ++odd) {
                    int n = column + 8 * j + odd;
                    float scale = 1.f, shift = 0.f;
                    if (METRIC) {
                        float norm = __ldg(norms + min(n, work.rows - 1));
                        if (METRIC == 1) scale = 2.f, shift = norm * norm;
                        else scale = reciprocal(fmaxf(norm, 1e-30f));    // a zero vector's is 0
                    }
#pragma unroll
                    for (int h = 0; h < HEIGHT; ++h)
#pragma unroll
                        for (int r = 0; r < 2; ++r) {
                            float score = sums[h][4 * j + 2 * r + odd];
                            if (METRIC) score = fmaf(score, scale, -shift);
                            if (!whole && n >= work.rows) score = NOTHING;
                            best[h][2 * r + odd] = fmaxf(best[h][2 * r + odd], score);
                        }
                }
            int block = p.column / WIDTH * 8 + 2 * (lane & 3);
#pragma unroll
            for (int h = 0; h < HEIGHT; ++h)
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    int query = p.row + 64 * h + 16 * warp + 8 * r + lane / 4;
                    if (query < work.queries)
                        *(float2*)(maxima + (size_t)query * work.blocks + block) =
                            make_float2(best[h][2 * r], best[h][2 * r + 1]);
                }
            product.next(work.tiles.steps);
        }
    }
}
