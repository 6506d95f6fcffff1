// Per-example gradients of a matrix on Hopper, with their squared norms:
//
//     y[b] = g[b]^T a[b]    partial[b, tile, warp] = sum of y^2 over the warp's rows of the tile, y as it is rounded
//
// a (B, T, K) are inputs, g (B, T, N) gradients of the outputs; y (B, N, K) has their dtype, sums are in float32. So
// the norms cost no second pass over y, which is much larger than a and g. Bu et al. 2022, arXiv:2210.00038, section 2.
//
// The product is that of ops/_hopper/product.h, with the summed dimension outermost in both operands. While one
// warpgroup multiplies, the other rounds its sums, squares and stores them: a warp finishes 16 rows by 64 columns at a
// time, through SLOTS buffers of its own that the copy engine reads. Rows and columns beyond the end are zeros, and the
// copy engine does not store them. Every partial sum has its own address, so that results are deterministic.
//
// Bound: 2 B T N K operations at 4096 a clock and multiprocessor; a and g are read once if an example's stay in the L2
// cache while its tiles are multiplied, y is written once.
// Measured (H200, bfloat16, ms), then torch.bmm alone, then torch.bmm and a pass for the squares:
//     B = 64, T = 1024    N x K = 2304 x 768    0.322    0.343    0.412
//                               3072 x 768      0.424    0.453    0.528
//                               768 x 3072      0.458    0.449    0.586
//                               768 x 768       0.135    0.133    0.164
//                               50304 x 768     7.58     7.32     9.47
//     B = 128, T = 128          2304 x 768      0.190    0.229    0.365
// Processes differ by up to a tenth: 2304 x 768 took 0.359 in another. At 3072 x 768 the loads cost 0.08, the stores
// 0.02, the squares 0.003, since the other warpgroup multiplies meanwhile; zeros, which take less power, take 0.366.
// Slower: tiles of 128 x 128, 192 x 128 and 64 x 256, 4 to 13%; clusters of two that share a's columns, 2 to 10%, but
// at 50304 x 768 they took 7.24. No gain: five steps in flight, two buffers a warp, other orders of the tiles, stores
// that leave the L2 cache first.
// Source: PTX ISA 8.7, section 9.7.15 (wgmma).

constexpr int OFF_BARRIERS = OFF_SLOTS + 8 * SLOTS * SLOT_BYTES;
static_assert(WIDTH % 64 == 0 && WIDTH <= 256, "whole panels");

__device__ __forceinline__ void unpack(u32 word, float& low, float& high) {
#if IS_BF16
    low = __uint_as_float(word << 16);
    high = __uint_as_float(word & 0xFFFF0000u);
#else
    asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\n}"
        : "=f"(low), "=f"(high) : "r"(word));
#endif
}

extern "C" __global__ void __launch_bounds__(384, 1)
clip_form(const __grid_constant__ TensorMap map_g, const __grid_constant__ TensorMap map_a,
          const __grid_constant__ TensorMap map_y, float* __restrict__ partial, const __grid_constant__ Tiles tiles) {
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
            prefetch_map(&map_g);
            prefetch_map(&map_a);
            prefetch_map(&map_y);
            produce(base, full, empty, &map_g, &map_a, tiles, first, stride);
        }
    } else {
        registers_take<TAKE>();
        int group = warpgroup_id(), lane = threadIdx.x & 31;
        int warp = __shfl_sync(~0u, (threadIdx.x & 127) >> 5, 0);
        float sums[HEIGHT][REGS];
        u32 slots = base + OFF_SLOTS + (4 * group + warp) * (SLOTS * SLOT_BYTES), slot = 0;
        u32 to = (lane & 15) * 128, swizzle = lane & 7;
#pragma unroll
        for (int h = 0; h < HEIGHT; ++h)
#pragma unroll
            for (int x = 0; x < REGS; ++x) sums[h][x] = 0.f;

        Multiplier product(base, full, empty, group, lane);
        int item = product.begin(tiles, first, stride);
        for (; item < tiles.items; item += 2 * stride) {
            Origin p = locate(tiles, item);
            product.multiply(sums, tiles.steps, item + stride < tiles.items);
            product.finish();
            float squares[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
            for (int h = 0; h < HEIGHT; ++h) {
                int row = p.row + 64 * h + 16 * warp;
#pragma unroll
                for (int c = 0; c < WIDTH / 64; ++c) {
                    u32 words[16];
#pragma unroll
                    for (int i = 0; i < 16; ++i) {
                        float low, high;
                        words[i] = pack(sums[h][32 * c + 2 * i], sums[h][32 * c + 2 * i + 1]);
                        unpack(words[i], low, high);
                        squares[2 * i % 4] = fmaf(low, low, squares[2 * i % 4]);
                        squares[2 * i % 4 + 1] = fmaf(high, high, squares[2 * i % 4 + 1]);
                    }
                    if (lane == 0) store_wait_read<SLOTS - 1>();         // the buffer's last contents are being stored
                    __syncwarp();
                    u32 from = slots + slot * SLOT_BYTES;
                    slot = slot + 1 == SLOTS ? 0 : slot + 1;
#pragma unroll
                    for (int j = 0; j < 4; ++j)
                        store_matrices(from + to + ((2 * j + (lane >> 4)) ^ swizzle) * 16, words[4 * j],
                                       words[4 * j + 1], words[4 * j + 2], words[4 * j + 3]);
                    proxy_fence();
                    __syncwarp();
                    if (lane == 0) {
                        store_tile(&map_y, from, p.column + 64 * c, row, 0, p.batch);
                        store_commit();
                    }
                }
            }
            float sum = (squares[0] + squares[1]) + (squares[2] + squares[3]);
#pragma unroll
            for (int bit = 16; bit; bit /= 2) sum += __shfl_xor_sync(~0u, sum, bit);
            if (lane == 0) partial[4 * item + warp] = sum;
            product.next(tiles.steps);
        }
        if (lane == 0) store_wait_read<0>();
    }
}
