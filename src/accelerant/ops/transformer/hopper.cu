// The gradient before gelu, in the epilogue of the product that gives the gradient after it (Hopper):
//
//     dz = (x W^T) gelu'(z)    a = gelu(z)    partial[p, n] = sum of dz[m, n] over 32 rows m
//
// x (M, K) is the gradient of the second linear map's result, W (N, K) that map's weight transposed, z (M, N) what stands
// before gelu. So the gradient of a is never written, and a, which the forward pass did not keep, is made anew from z,
// which is read once for both.
//
// The course of the product is linear_gelu's (see ops/linear_gelu/hopper.cu): a producer, and two warpgroups that take
// turns, one multiplying while the other finishes its tile of 128 x 128. A warp has z's four boxes of 16 rows by 64
// columns fetched when its turn begins, so that they are there when the sums are; dz replaces z where it lies, a goes
// through two buffers, and the copy engine stores both. A second kernel adds the M / 32 sums of each column in a fixed
// order.
//
// Bound: 2 M N K operations; beside them z is read, dz and a are written, 6 bytes an element, where a product apart, and
// gelu's gradient apart, move 12. About 20 operations and two special functions an element.
// Measured (H200, 32768 x 768 x 3072): 0.295 ms; cuBLAS's product apart takes 0.223 and the rest apart 0.223 more. Slower:
// loads of z between the stores 0.306; tiles of 128 x 192 so, with three steps in flight, 0.315.
// Source: PTX ISA 8.7, section 9.7.15 (wgmma); Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2.

constexpr int HEIGHT = 2, WIDTH = 128, TILE_M = 64 * HEIGHT;
constexpr int A_BYTES = TILE_M * 128, B_BYTES = WIDTH * 128;
constexpr int SLOT_BYTES = 16 * 128, BOXES = HEIGHT * WIDTH / 64, WARP_BYTES = (BOXES + 2) * SLOT_BYTES;
constexpr int OFF_A = 0, OFF_B = OFF_A + STAGES * A_BYTES, OFF_SLOTS = OFF_B + STAGES * B_BYTES;
constexpr int OFF_BARRIERS = OFF_SLOTS + 8 * WARP_BYTES;
constexpr int REGS = WIDTH / 2;                          // sums of 64 rows

struct Shape {
    int columns, rows, steps;                            // N, M; of a tile's sum
    int down, across, group, items;                      // tiles, how many go down together, all of them
};

struct Place { int row, column; };

// The item-th tile: `group` down, then one to the right.
__device__ __forceinline__ Place locate(const Shape& s, int item) {
    int in_group = s.group * s.across, g = item / in_group, rest = item - g * in_group;
    int height = min(s.group, s.down - g * s.group), across = rest / height;
    return {(g * s.group + rest - across * height) * TILE_M, across * WIDTH};
}

struct Position {                                        // in the ring of buffers
    u32 stage = 0, parity = 0;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) { stage = 0; parity ^= 1; }
    }
    __device__ __forceinline__ void skip(u32 steps) {
        u32 to = stage + steps;
        parity ^= (to / STAGES) & 1;
        stage = to % STAGES;
    }
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
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, 4);
        }
        for (int w = 0; w < 8; ++w) barrier_init(fetched + 8 * w, 1);
        barriers_ready();
    }
    __syncthreads();
    if (warpgroup_id() == 2) {
        registers_give<GIVE>();
        if (threadIdx.x == 256) {
            Position at;
            prefetch_map(&map_x);
            prefetch_map(&map_w);
            for (int item = first; item < shape.items; item += stride) {
                Place p = locate(shape, item);
#pragma unroll 1
                for (int k = 0; k < shape.steps; ++k, at.next()) {
                    u32 got = full + 8 * at.stage;
                    barrier_wait(empty + 8 * at.stage, at.parity ^ 1);
                    barrier_expect(got, A_BYTES + B_BYTES);
                    load_tile(base + OFF_A + at.stage * A_BYTES, &map_x, got, 64 * k, p.row, 0, 0);
                    load_tile(base + OFF_B + at.stage * B_BYTES, &map_w, got, 64 * k, p.column, 0, 0);
                }
            }
        }
    } else {
        registers_take<TAKE>();
        int group = warpgroup_id(), lane = threadIdx.x & 31;
        int warp = __shfl_sync(~0u, (threadIdx.x & 127) >> 5, 0);
        // Accumulator element x of a thread: of its warp's 16 rows, row g + 8 ((x >> 1) & 1), and column
        // 8 (x >> 2) + 2 t + (x & 1), where g = lane / 4, t = lane % 4.
        float sums[HEIGHT][REGS];
        Position at;
        u32 slots = base + OFF_SLOTS + (4 * group + warp) * WARP_BYTES, mine = fetched + 8 * (4 * group + warp);
        u32 to = (lane & 15) * 128, swizzle = lane & 7, turn = 0;
#pragma unroll
        for (int h = 0; h < HEIGHT; ++h)
#pragma unroll
            for (int x = 0; x < REGS; ++x) sums[h][x] = 0.f;

        // The compiler must not see into these, or it adds to their halves apart: twice the instructions.
        u64 a_first = descriptor(base + OFF_A), b_first = descriptor(base + OFF_B);
        asm volatile("" : "+l"(a_first), "+l"(b_first));

        auto release = [&](u32 stage) {
            if (lane == 0) barrier_arrive(empty + 8 * stage);
        };
        auto multiply = [&](int k) {
            barrier_wait(full + 8 * at.stage, at.parity);
            u64 a = a_first + at.stage * (A_BYTES >> 4), b = b_first + at.stage * (B_BYTES >> 4);
            wgmma_fence();
#pragma unroll
            for (int d = 0; d < 4; ++d)
#pragma unroll
                for (int h = 0; h < HEIGHT; ++h) mma_ss_n128_nn(sums[h], a + h * 512 + 2 * d, b + 2 * d, d ? 1 : k);
            wgmma_commit();
        };

        int item = first;
        if (group == 1) {
            item += stride;
            at.skip(shape.steps);
            named_arrive(1, 256);
        }
        for (; item < shape.items; item += 2 * stride) {
            Place p = locate(shape, item);
            if (lane == 0) {                             // box 2 c + h: rows 64 h, columns 64 c
                store_wait_read<0>();
                barrier_expect(mine, BOXES * SLOT_BYTES);
#pragma unroll
                for (int i = 0; i < BOXES; ++i)
                    load_tile(slots + i * SLOT_BYTES, &map_z, mine, p.column + 64 * (i / HEIGHT),
                              p.row + 64 * (i % HEIGHT) + 16 * warp, 0, 0);
            }
            __syncwarp();
            named_barrier(1 + group, 256);               // this one's turn
            u32 last = at.stage;
            multiply(0);
            at.next();
#pragma unroll 1
            for (int k = 1; k < shape.steps; ++k) {
                multiply(k);
                wgmma_wait<1>();
                release(last);
                last = at.stage;
                at.next();
            }
            if (item + stride < shape.items) named_arrive(2 - group, 256);
            wgmma_wait<0>();
            release(last);
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
            at.skip(shape.steps);
            __syncwarp();                                // or the compiler takes the loop for divergent
        }
        if (lane == 0) store_wait_read<0>();
    }
}
