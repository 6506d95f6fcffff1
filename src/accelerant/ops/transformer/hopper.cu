// The gradient before gelu, in the epilogue of the product that computes the gradient after it (Hopper):
//
//     dz = (x W^T) gelu'(z)    a = gelu(z)    partial[p, n] = sum of dz[m, n] over 32 rows m
//
// x (M, K) is the gradient of the second linear layer's result, W (N, K) that layer's transposed weight, z (M, N) the
// input of gelu. The gradient of a is never written; a, which the forward pass did not save, is recomputed from z, which is
// read once for both.
//
// The product follows ops/_hopper/product.h, with tiles of 128 x 128. When its turn begins, a warp fetches z's four boxes
// of 16 rows by 64 columns, which arrive before the sums are complete. dz overwrites z in shared memory, a goes through two
// buffers, and the copy engine stores both. A second kernel adds the M / 32 partial sums of each column in a fixed order.
//
// Bound: tensor cores, 2 M N K flops. z is read and dz and a are written, 6 bytes per element, where a separate product
// and gelu gradient move 12. About 20 operations and two special functions per element.
// Measured (H200, 32768 x 768 x 3072): 0.295 ms; cuBLAS's product alone 0.223 and the separate rest 0.223. Slower: loads
// of z between the stores 0.306; tiles of 128 x 192, with three steps in flight, 0.315.
// Source: PTX ISA 8.7, section 9.7.15 (wgmma); Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2.

constexpr int BOXES = HEIGHT * WIDTH / 64, WARP_BYTES = (BOXES + 2) * SLOT_BYTES;
constexpr int OFF_BARRIERS = OFF_SLOTS + 8 * WARP_BYTES;

struct Shape {
    int columns, rows;                                   // N, M
    Tiles tiles;
};

// da becomes dz, z becomes a.
__device__ __forceinline__ void through_gelu(float& da, float& z) {
    constexpr float LOG2_E = 1.4426950408889634f, TWICE = 1.5957691216057308f;      // 2 sqrt(2 / pi)
    float square = fminf(z * z, 1e4f);                   // s is 0 or 1 long before |z| = 100
    float s = reciprocal(1.f + exp2_fast(z * fmaf(square, -TWICE * LOG2_E * 0.044715f, -TWICE * LOG2_E)));
    float a = z * s, slope = fmaf(square, TWICE * 0.134145f, TWICE);
    da *= fmaf(a * slope, 1.f - s, s);
    z = a;
}
__device__ __forceinline__ void unpack(u32 word, float& low, float& high) {
    low = __uint_as_float(word << 16);
    high = __uint_as_float(word & 0xFFFF0000u);
}

// Adds the other half's sums and keeps one half, for lanes that differ in a bit and have sums of the same columns.
template <int HALF> __device__ __forceinline__ void fold(float* sums, bool upper, int bit) {
#pragma unroll
    for (int i = 0; i < HALF; ++i) {
        float kept = upper ? sums[i + HALF] : sums[i], sent = upper ? sums[i] : sums[i + HALF];
        sums[i] = kept + __shfl_xor_sync(~0u, sent, bit);
    }
}

extern "C" __global__ void __launch_bounds__(384, 1)
transformer_dz(const __grid_constant__ TensorMap map_x, const __grid_constant__ TensorMap map_w,
               const __grid_constant__ TensorMap map_z, const __grid_constant__ TensorMap map_dz,
               const __grid_constant__ TensorMap map_a, float* __restrict__ partial,
               const __grid_constant__ Shape shape) {
    extern __shared__ __align__(1024) char memory[];
    u32 base = shared_address(memory);
    u32 full = base + OFF_BARRIERS, empty = full + 8 * STAGES, fetched = empty + 8 * STAGES;
    int first = blockIdx.x, stride = gridDim.x;
    if (threadIdx.x == 0) {
        ring_init(full, empty);
        for (int w = 0; w < 8; ++w) barrier_init(fetched + 8 * w, 1);
        barriers_ready();
    }
    __syncthreads();
    if (warpgroup_id() == 2) {
        registers_give<GIVE>();
        if (threadIdx.x == 256) {
            prefetch_map(&map_x);
            prefetch_map(&map_w);
            produce(base, full, empty, &map_x, &map_w, shape.tiles, first, stride);
        }
    } else {
        registers_take<TAKE>();
        int group = warpgroup_id(), lane = threadIdx.x & 31;
        int warp = __shfl_sync(~0u, (threadIdx.x & 127) >> 5, 0);
        float sums[HEIGHT][REGS];
        u32 slots = base + OFF_SLOTS + (4 * group + warp) * WARP_BYTES, mine = fetched + 8 * (4 * group + warp);
        u32 to = (lane & 15) * 128, swizzle = lane & 7, turn = 0;
#pragma unroll
        for (int h = 0; h < HEIGHT; ++h)
#pragma unroll
            for (int x = 0; x < REGS; ++x) sums[h][x] = 0.f;

        Multiplier product(base, full, empty, group, lane);
        int item = product.begin(shape.tiles, first, stride);
        for (; item < shape.tiles.items; item += 2 * stride) {
            Origin p = locate(shape.tiles, item);
            if (lane == 0) {                             // box 2 c + h: rows 64 h, columns 64 c
                store_wait_read<0>();
                barrier_expect(mine, BOXES * SLOT_BYTES);
#pragma unroll
                for (int i = 0; i < BOXES; ++i)
                    load_tile(slots + i * SLOT_BYTES, &map_z, mine, p.column + 64 * (i / HEIGHT),
                              p.row + 64 * (i % HEIGHT) + 16 * warp, 0, 0);
            }
            __syncwarp();
            product.multiply(sums, shape.tiles.steps, item + stride < shape.tiles.items);
            product.finish();
            barrier_wait(mine, turn);
            turn ^= 1;
#pragma unroll
            for (int c = 0; c < WIDTH / 64; ++c) {
                float columns[16];                       // 4 j + 2 i + e: column 16 j + 8 i + 2 t + e
#pragma unroll
                for (int i = 0; i < 16; ++i) columns[i] = 0.f;
#pragma unroll
                for (int h = 0; h < HEIGHT; ++h) {
                    u32 z_slot = slots + (HEIGHT * c + h) * SLOT_BYTES, a_slot = slots + (BOXES + h) * SLOT_BYTES;
                    u32 words[4][4], part[4];
                    // All of z first: a load may not pass a store, and what is between them takes 200 clocks.
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        part[j] = to + ((2 * j + (lane >> 4)) ^ swizzle) * 16;
                        load_matrices(z_slot + part[j], words[j][0], words[j][1], words[j][2], words[j][3]);
                    }
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        float* f = sums[h] + 32 * c + 8 * j;
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            float low, high;
                            unpack(words[j][i], low, high);
                            through_gelu(f[2 * i], low);
                            through_gelu(f[2 * i + 1], high);
                            columns[4 * j + 2 * (i / 2)] += f[2 * i];
                            columns[4 * j + 2 * (i / 2) + 1] += f[2 * i + 1];
                            words[j][i] = pack(low, high);
                        }
                    }
                    if (c) {                             // the box sent from there before has been read
                        if (lane == 0) store_wait_read<1>();
                        __syncwarp();
                    }
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        float* f = sums[h] + 32 * c + 8 * j;
                        store_matrices(z_slot + part[j], pack(f[0], f[1]), pack(f[2], f[3]), pack(f[4], f[5]),
                                       pack(f[6], f[7]));
                        store_matrices(a_slot + part[j], words[j][0], words[j][1], words[j][2], words[j][3]);
                    }
                    proxy_fence();
                    __syncwarp();
                    if (lane == 0) {
                        int row = p.row + 64 * h + 16 * warp;
                        store_tile(&map_dz, z_slot, p.column + 64 * c, row, 0, 0);
                        store_tile(&map_a, a_slot, p.column + 64 * c, row, 0, 0);
                        store_commit();
                    }
                }
                fold<8>(columns, lane & 16, 16);
                fold<4>(columns, lane & 8, 8);
                fold<2>(columns, lane & 4, 4);
                int column = p.column + 64 * c + 2 * (lane & 16) + 2 * (lane & 8) + 2 * (lane & 4) + 2 * (lane & 3);
                if (column < shape.columns && p.row + 16 * warp < shape.rows) {
                    float2* out = (float2*)(partial + (size_t)(p.row / 32 + warp) * shape.columns + column);
                    *out = make_float2(columns[0], columns[1]);
                }
            }
            product.next(shape.tiles.steps);
        }
        if (lane == 0) store_wait_read<0>();
    }
}
