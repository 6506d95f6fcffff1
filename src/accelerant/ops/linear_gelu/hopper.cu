// linear_gelu forward on Hopper: y = gelu(x W^T + b) and, if KEEP, z = x W^T + b.
//
// The product follows ops/_hopper/product.h. While one warpgroup multiplies, the other applies gelu to its sums (two
// special functions per element, a fifth of the time of 16 steps) and stores them. A warp finishes 16 rows by 64 columns
// at a time through SLOTS buffers of its own, from which the copy engine stores them, so that only the turns and the bias
// need barriers. Gelu is as in ops/gelu/triton_kernels.py.
//
// Bound: tensor cores, 2 M N K flops at 4096 per clock and multiprocessor; then shared memory at 128 bytes per clock: a
// step writes 128 (TILE_M + WIDTH) bytes and each of its wgmmas reads 32 (64 + WIDTH). By that count shared memory takes
// 1.25 times the clocks of the products for tiles of 128 x 128, and 1.08 times for 128 x 192.
// Measured (H200, bfloat16, tanh, M x K x N; in parentheses cuBLAS's product alone, and cuBLASLt's with its epilogue):
//     8192 x 1024 x 4096   0.095 ms with 128 x 128, the last of 16 waves half full (0.098, 0.110); 0.107 with z
//     16384 x 768 x 3072   0.112 ms with 128 x 192, 0.116 with 128 x 128 (0.114, 0.132); 0.127 with z
//     32768 x 768 x 3072   0.229 ms with z, 128 x 192 (cuBLAS's product with the bias alone 0.225)
// Slower for the first: both warpgroups on one tile of 128 x 256, its sums rounded and finished under the next tile's
// products 0.107, or finished immediately 0.112. Slower for the third: two buffers per warp, each read before the next
// 0.245; loads of the bias between the stores 0.234.

constexpr int OFF_BIAS = OFF_SLOTS + 8 * SLOTS * SLOT_BYTES, OFF_BARRIERS = OFF_BIAS + 2 * 512;
static_assert(SLOTS > KEEP, "z and y take a buffer each");
static_assert(WIDTH % 64 == 0 && WIDTH <= 256, "two columns of the bias to a thread");

struct Shape {
    int columns;                                         // of the bias, 0 without one
    Tiles tiles;
};

__device__ __forceinline__ float gelu(float x) {
    constexpr float LOG2_E = 1.4426950408889634f;
    float square = x * x;
    if (TANH) {
        constexpr float SLOPE = -1.5957691216057308f * LOG2_E;           // -2 sqrt(2 / pi) log2 e
        return x * reciprocal(1.f + exp2_fast(x * fmaf(square, SLOPE * 0.044715f, SLOPE)));
    }
    float t = reciprocal(fmaf(fabsf(x), 0.3275911f * 0.7071067811865476f, 1.f));
    float tail = fmaf(t, 0.5f * 1.061405429f, 0.5f * -1.453152027f);
    tail = fmaf(t, tail, 0.5f * 1.421413741f);
    tail = fmaf(t, tail, 0.5f * -0.284496736f);
    tail = fmaf(t, tail, 0.5f * 0.254829592f) * t * exp2_fast(square * (-0.5f * LOG2_E));
    return x * (x < 0.f ? tail : 1.f - tail);
}
__device__ __forceinline__ void unpack(u32 word, float& low, float& high) {
#if IS_BF16
    low = __uint_as_float(word << 16);
    high = __uint_as_float(word & 0xFFFF0000u);
#else
    asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\n}"
        : "=f"(low), "=f"(high) : "r"(word));
#endif
}
__device__ __forceinline__ u32 load_word(u32 address) {
    u32 word;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
    return word;
}
__device__ __forceinline__ void store_word(u32 address, u32 word) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}

extern "C" __global__ void __launch_bounds__(384, 1)
linear_gelu(const __grid_constant__ TensorMap map_x, const __grid_constant__ TensorMap map_w,
            const __grid_constant__ TensorMap map_y, const __grid_constant__ TensorMap map_z,
            const u32* __restrict__ bias, const __grid_constant__ Shape shape) {
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
            prefetch_map(&map_x);
            prefetch_map(&map_w);
            prefetch_map(&map_y);
            produce(base, full, empty, &map_x, &map_w, shape.tiles, first, stride);
        }
    } else {
        registers_take<TAKE>();
        int group = warpgroup_id(), lane = threadIdx.x & 31;
        int warp = __shfl_sync(~0u, (threadIdx.x & 127) >> 5, 0);
        float sums[HEIGHT][REGS];
        u32 slots = base + OFF_SLOTS + (4 * group + warp) * (SLOTS * SLOT_BYTES), slot = 0;
        u32 bias_at = base + OFF_BIAS + group * 512 + (lane & 3) * 4;
        u32 to = (lane & 15) * 128, swizzle = lane & 7;
#pragma unroll
        for (int h = 0; h < HEIGHT; ++h)
#pragma unroll
            for (int x = 0; x < REGS; ++x) sums[h][x] = 0.f;

        // A buffer whose last contents have been read; where z and y take one each before either is sent, both have.
        auto take_slot = [&]() {
            if (lane == 0) store_wait_read<SLOTS - 1 - KEEP>();
            __syncwarp();
            u32 taken = slots + slot * SLOT_BYTES;
            slot = slot + 1 == SLOTS ? 0 : slot + 1;
            return taken;
        };
        auto send = [&](const TensorMap* map, u32 from, int row, int column) {
            proxy_fence();
            __syncwarp();
            if (lane == 0) {
                store_tile(map, from, column, row, 0, 0);
                store_commit();
            }
        };
        u32 y_slot = 0, z_slot = 0;
        auto with_bias = [&](float* f, int x) {          // columns 16 x to 16 x + 15
            float a, b, c, d;
            unpack(load_word(bias_at + 32 * x), a, b);
            unpack(load_word(bias_at + 32 * x + 16), c, d);
            f[0] += a, f[1] += b, f[2] += a, f[3] += b;
            f[4] += c, f[5] += d, f[6] += c, f[7] += d;
        };

        Multiplier product(base, full, empty, group, lane);
        int item = product.begin(shape.tiles, first, stride);
        for (; item < shape.tiles.items; item += 2 * stride) {
            Origin p = locate(shape.tiles, item);
            u32 word = 0;                                // two columns of the bias; used when the sums are there
            int thread = threadIdx.x & 127, column = p.column + 2 * thread;
            if (2 * thread < WIDTH && column < shape.columns) word = __ldg(bias + column / 2);
            product.multiply(sums, shape.tiles.steps, item + stride < shape.tiles.items);
            named_barrier(3 + group, 128);               // all have read the last tile's
            store_word(base + OFF_BIAS + group * 512 + thread * 4, word);
            named_barrier(3 + group, 128);
            product.finish();
#pragma unroll
            for (int h = 0; h < HEIGHT; ++h) {
                int row = p.row + 64 * h + 16 * warp;
#pragma unroll
                for (int c = 0; c < WIDTH / 64; ++c) {
                    // Loads, then arithmetic, then stores: a load may not pass a store, and would wait for it.
                    u32 words[KEEP ? 16 : 1];
#pragma unroll
                    for (int j = 0; j < 4; ++j) with_bias(sums[h] + 32 * c + 8 * j, 4 * c + j);
#pragma unroll
                    for (int i = 0; i < 32; i += 2) {
                        float* f = sums[h] + 32 * c + i;
                        if (KEEP) words[i / 2] = pack(f[0], f[1]);
                        f[0] = gelu(f[0]), f[1] = gelu(f[1]);
                    }
                    if (KEEP) z_slot = take_slot();
                    y_slot = take_slot();
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        float* f = sums[h] + 32 * c + 8 * j;
                        u32* z = words + (KEEP ? 4 * j : 0);
                        u32 part = to + ((2 * j + (lane >> 4)) ^ swizzle) * 16;
                        if (KEEP) store_matrices(z_slot + part, z[0], z[1], z[2], z[3]);
                        store_matrices(y_slot + part, pack(f[0], f[1]), pack(f[2], f[3]), pack(f[4], f[5]),
                                       pack(f[6], f[7]));
                    }
                    if (KEEP) send(&map_z, z_slot, row, p.column + 64 * c);
                    send(&map_y, y_slot, row, p.column + 64 * c);
                }
            }
            product.next(shape.tiles.steps);
        }
        if (lane == 0) store_wait_read<0>();
    }
}
