// Attention forward on Hopper: O = softmax(scale Q K^T) V and lse = log sum exp(scale Q K^T), row by row; scale > 0.
//
// A block has a producer, which loads tiles through the copy engine, and WGS warpgroups, each with 64 query rows of a tile
// of TILE_M = 64 WGS. Keys come in blocks of BLOCK_N, the last first, through STAGES buffers of K and of V. Warpgroups run
// independently: each issues the next S = Q K^T before it turns the current one into P, and O += P V after it, so that the
// tensor cores work during the exponentials (Shah et al. 2024, arXiv:2407.08608, section 3.2). The overlap continues
// across tiles: O is stored while the next tile's scores are computed.
//
// A row's exponentials are relative to the maximum of its first block, and no other maximum is computed: any reference
// gives the same softmax unless something overflows, which the sums reveal (LIMIT). Then, rarely, the warp recomputes the
// block's scores and raises the reference. That leaves four instructions per score (scale, exponential, sum, half a
// conversion) and makes the shuffles for row maxima and the rescaling of O rare.
//
// A block draws its tiles from a counter, the longest first, so that all blocks end at about the same time. No block of the
// grid is idle.
//
// Bound, per score: 4 HEAD_DIM flops at 4096 per clock and multiprocessor, one exponential at 16 per clock. HEAD_DIM 64
// needs the same time for both; causal with 1024 keys keeps each busy about 55% of the time, at 1.66 GHz (H200, Nsight
// Compute). Computing some exponentials by polynomials on the FMA units cost 10% there, since issue slots are as scarce.

constexpr int TILE_M = 64 * WGS;
constexpr int CHUNKS = HEAD_DIM / 64;                    // boxes of 64 columns
constexpr int Q_BYTES = TILE_M * HEAD_DIM * 2, KV_BYTES = BLOCK_N * HEAD_DIM * 2;
constexpr int OFF_Q = 0, OFF_K = OFF_Q + 2 * Q_BYTES, OFF_V = OFF_K + STAGES * KV_BYTES;
constexpr int OFF_BARRIERS = OFF_V + STAGES * KV_BYTES;
constexpr int S_REGS = BLOCK_N / 2, P_REGS = BLOCK_N / 4, O_REGS = HEAD_DIM / 2;
constexpr int NO_TILE = -1;
constexpr float LIMIT = IS_BF16 ? 0x1p64f : 0x1p12f;     // of a thread's sum of a block, so that P and O stay finite
constexpr float LOWEST = -1e30f;                         // reference of rows whose scores are all -infinity
#define INFINITE __int_as_float(0x7f800000)
static_assert(!CAUSAL || BLOCK_N == 64, "the diagonal must go through corners");

#define PASTE2(a, b, c) a##b##c
#define PASTE(a, b, c) PASTE2(a, b, c)
#define MMA_QK PASTE(mma_ss_n, BLOCK_N, _nn)
#define MMA_PV PASTE(mma_rs_n, HEAD_DIM, _nt)

struct Shape {
    int batch, heads, share, queries, keys;              // share: query heads to a key head
    int tiles, group, items;                             // query tiles per head, heads that run concurrently, all tiles
};

struct Origin { int batch, head, row; };

// Returns the item-th tile: heads in groups whose keys fit in the L2 cache, the longest tiles of a group first.
__device__ __forceinline__ Origin locate(const Shape& s, int item) {
    int in_group = s.group * s.tiles, g = item / in_group, rest = item - g * in_group;
    int members = min(s.group, s.batch * s.heads - g * s.group);
    int step = rest / members, bh = g * s.group + rest - step * members;
    int tile = CAUSAL ? s.tiles - 1 - step : step;
    Origin p;
    p.batch = bh / s.heads;
    p.head = bh - p.batch * s.heads;
    p.row = tile * TILE_M;
    return p;
}

// Blocks of keys visible to a tile.
__device__ __forceinline__ int blocks_of(const Shape& s, int row) {
    return ((CAUSAL ? min(row + TILE_M, s.keys) : s.keys) + BLOCK_N - 1) / BLOCK_N;
}

struct Position {                                        // in a ring of buffers
    u32 stage = 0, parity = 0;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) { stage = 0; parity ^= 1; }
    }
};

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// What a thread keeps of its two rows.
struct Rows {
    float top[2];                                        // log2 of what the exponentials are divided by
    float sum[2];                                        // this thread's part
};

__device__ __forceinline__ void row_maxima(const float (&s)[S_REGS], float& a, float& b) {
    a = fmaxf(s[0], s[1]);
    b = fmaxf(s[2], s[3]);
#pragma unroll
    for (int x = 4; x < S_REGS; x += 4) {
        a = fmaxf(a, fmaxf(s[x], s[x + 1]));
        b = fmaxf(b, fmaxf(s[x + 2], s[x + 3]));
    }
}

// Replace a part of the scores by their exponentials, and add them up, four sums to a thread: two a row.
template <int FROM, int TO>
__device__ __forceinline__ void exponentials(float (&s)[S_REGS], float (&part)[4], const float (&top)[2], float scale) {
#pragma unroll
    for (int x = FROM; x < TO; ++x) {
        s[x] = exp2_fast(fmaf(s[x], scale, -top[(x >> 1) & 1]));
        part[x & 3] = x < 4 ? s[x] : part[x & 3] + s[x];
    }
}

// The tile's first block: S becomes P, and the rows' references and sums begin.
__device__ __forceinline__ void softmax_first(float (&s)[S_REGS], Rows& rows, float scale) {
    float a, b;
    row_maxima(s, a, b);
    rows.top[0] = fmaxf(quad_max(a) * scale, LOWEST);
    rows.top[1] = fmaxf(quad_max(b) * scale, LOWEST);
    float part[4];
    exponentials<0, S_REGS>(s, part, rows.top, scale);
    rows.sum[0] = part[0] + part[1];
    rows.sum[1] = part[2] + part[3];
}

// The same for the block of 64 keys that the diagonal crosses from corner to corner: of a warp's 16 rows, the keys of
// the warps before are all seen, its own up to the diagonal, those after not at all.
__device__ __forceinline__ void softmax_diagonal(float (&s)[S_REGS], Rows& rows, float scale) {
    int warp = warp_id() % 4, g = lane_id() >> 2, t = lane_id() & 3;
    float a = -INFINITE, b = -INFINITE;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        float* f = s + 8 * w;
        if (w == warp) {
#pragma unroll
            for (int x = 0; x < 8; ++x)
                if (8 * (x >> 2) + 2 * t + (x & 1) > g + 8 * ((x >> 1) & 1)) f[x] = -INFINITE;
        }
        if (w <= warp) {
            a = fmaxf(a, fmaxf(fmaxf(f[0], f[1]), fmaxf(f[4], f[5])));
            b = fmaxf(b, fmaxf(fmaxf(f[2], f[3]), fmaxf(f[6], f[7])));
        }
    }
    rows.top[0] = fmaxf(quad_max(a) * scale, LOWEST);
    rows.top[1] = fmaxf(quad_max(b) * scale, LOWEST);
    rows.sum[0] = rows.sum[1] = 0.f;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        float* f = s + 8 * w;
        if (w <= warp) {
#pragma unroll
            for (int x = 0; x < 8; ++x) {
                f[x] = exp2_fast(fmaf(f[x], scale, -rows.top[(x >> 1) & 1]));
                rows.sum[(x >> 1) & 1] += f[x];
            }
        } else {
#pragma unroll
            for (int x = 0; x < 8; ++x) f[x] = 0.f;
        }
    }
}

// For a later block, of which s holds the scores: make the largest so far the rows' references, and O refer to them.
__device__ __forceinline__ void raise(const float (&s)[S_REGS], float (&o)[O_REGS], Rows& rows, float scale) {
    float a, b;
    row_maxima(s, a, b);
    a = fmaxf(quad_max(a) * scale, rows.top[0]);
    b = fmaxf(quad_max(b) * scale, rows.top[1]);
    float shrink[2] = {exp2_fast(rows.top[0] - a), exp2_fast(rows.top[1] - b)};
    rows.top[0] = a;
    rows.top[1] = b;
    rows.sum[0] *= shrink[0];
    rows.sum[1] *= shrink[1];
#pragma unroll
    for (int x = 0; x < O_REGS; ++x) o[x] *= shrink[(x >> 1) & 1];
}

extern "C" __global__ void __launch_bounds__(128 * (WGS + 1), 1)
attention_fwd(const __grid_constant__ TensorMap map_q, const __grid_constant__ TensorMap map_k,
              const __grid_constant__ TensorMap map_v, const __grid_constant__ TensorMap map_o, float* __restrict__ lse,
              u32* __restrict__ tickets, const __grid_constant__ Shape shape, float scale) {
    extern __shared__ __align__(1024) char memory[];
    u32 base = shared_address(memory);
    u32 q_full = base + OFF_BARRIERS, q_empty = q_full + 16, k_full = q_empty + 16, k_empty = k_full + 8 * STAGES;
    u32 v_full = k_empty + 8 * STAGES, v_empty = v_full + 8 * STAGES, origins = v_empty + 8 * STAGES;
    if (threadIdx.x == 0) {
        for (int s = 0; s < 2; ++s) {
            barrier_init(q_full + 8 * s, 1);
            barrier_init(q_empty + 8 * s, 4 * WGS);
        }
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(k_full + 8 * s, 1);
            barrier_init(k_empty + 8 * s, 4 * WGS);
            barrier_init(v_full + 8 * s, 1);
            barrier_init(v_empty + 8 * s, 4 * WGS);
        }
        barriers_ready();
    }
    __syncthreads();
    if (warpgroup_id() == WGS) {
        registers_give<GIVE>();
        if (threadIdx.x == 128 * WGS) {
            Position at;
            prefetch_map(&map_q);
            prefetch_map(&map_k);
            prefetch_map(&map_v);
            prefetch_map(&map_o);
            for (int n = 0, item = blockIdx.x;; ++n) {
                u32 full = q_full + 8 * (n & 1), q = base + OFF_Q + (n & 1) * Q_BYTES;
                barrier_wait(q_empty + 8 * (n & 1), ((n >> 1) & 1) ^ 1);
                if (item >= shape.items) {
                    store_words(origins + 16 * (n & 1), 0, 0, NO_TILE, 0);
                    barrier_arrive(full);
                    break;
                }
                Origin p = locate(shape, item);
                int kv_head = p.head / shape.share;
                store_words(origins + 16 * (n & 1), p.batch, p.head, p.row, 0);
                barrier_expect(full, Q_BYTES);
                for (int c = 0; c < CHUNKS; ++c)
                    load_tile(q + c * TILE_M * 128, &map_q, full, 64 * c, p.row, p.head, p.batch);
#pragma unroll 1
                for (int j = blocks_of(shape, p.row) - 1; j >= 0; --j, at.next()) {
                    u32 k = base + OFF_K + at.stage * KV_BYTES, v = base + OFF_V + at.stage * KV_BYTES;
                    u32 got_k = k_full + 8 * at.stage, got_v = v_full + 8 * at.stage;
                    barrier_wait(k_empty + 8 * at.stage, at.parity ^ 1);
                    barrier_expect(got_k, KV_BYTES);
                    for (int c = 0; c < CHUNKS; ++c)
                        load_tile(k + c * BLOCK_N * 128, &map_k, got_k, 64 * c, j * BLOCK_N, kv_head, p.batch);
                    barrier_wait(v_empty + 8 * at.stage, at.parity ^ 1);
                    barrier_expect(got_v, KV_BYTES);
                    for (int c = 0; c < CHUNKS; ++c)
                        load_tile(v + c * BLOCK_N * 128, &map_v, got_v, 64 * c, j * BLOCK_N, kv_head, p.batch);
                }
                // Drawn late, so that no block sits on tiles that an idle one could take. shape.items tickets are drawn
                // a launch, each block's last being too high; then the count is 0 again.
                item = gridDim.x + atomicInc(tickets, shape.items - 1);
            }
        }
    } else {
        registers_take<TAKE>();
        int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, (threadIdx.x & 127) >> 5, 0);
        // Accumulator element x of a thread: of its warp's 16 rows, row g + 8 ((x >> 1) & 1), and column
        // 8 (x >> 2) + 2 t + (x & 1), where g = lane / 4, t = lane % 4.
        float s[S_REGS], o[O_REGS];
        u32 p[P_REGS];
        Rows rows;
        Position at;
        Origin old;
        int old_row = 0;
        u32 old_rows = 0;                                // where the tile's Q was, and where its O goes
#pragma unroll
        for (int x = 0; x < S_REGS; ++x) s[x] = 0.f;
#pragma unroll
        for (int x = 0; x < O_REGS; ++x) o[x] = 0.f;

        // The compiler must not see into these, or it adds to their halves apart: twice the instructions.
        u64 q_first = descriptor(base + OFF_Q), k_first = descriptor(base + OFF_K);
        u64 v_first = descriptor(base + OFF_V, BLOCK_N * 128);
        asm volatile("" : "+l"(q_first), "+l"(k_first), "+l"(v_first));
        auto multiply_qk = [&](int qs, int sub) {
            u64 k = k_first + at.stage * (KV_BYTES >> 4);
            u64 a = q_first + (qs * (Q_BYTES >> 4) + sub * (8192 >> 4));
            wgmma_fence();
#pragma unroll
            for (int d = 0; d < HEAD_DIM / 16; ++d) {
                u64 b = k + (d / 4) * (BLOCK_N * 8) + 2 * (d % 4);
                MMA_QK(s, a + (d / 4) * (TILE_M * 8) + 2 * (d % 4), b, d != 0);
            }
            wgmma_commit();
        };
        // The scores of this warp's 16 rows once more, by the warp alone.
        auto scores_again = [&](int qs, int sub) {
            int lane = lane_id();                        // found again here: nothing is kept in registers for this path
            u32 k = base + OFF_K + at.stage * KV_BYTES + ((lane >> 4) * 8 + (lane & 7)) * 128;
            u32 from = base + OFF_Q + qs * Q_BYTES + (64 * sub + 16 * warp + (lane & 15)) * 128;
#pragma unroll
            for (int x = 0; x < S_REGS; ++x) s[x] = 0.f;
#pragma unroll
            for (int d = 0; d < HEAD_DIM / 16; ++d) {
                u32 a[4], b[4];
                u32 part = (d / 4) * (TILE_M * 128) + (((2 * (d & 3) + (lane >> 4)) ^ (lane & 7)) * 16);
                load_matrices(from + part, a[0], a[1], a[2], a[3]);
                u32 chunk = (d / 4) * (BLOCK_N * 128) + (((2 * (d & 3) + ((lane >> 3) & 1)) ^ (lane & 7)) * 16);
#pragma unroll
                for (int x = 0; x < BLOCK_N / 8; x += 2) {
                    load_matrices(k + chunk + x * 1024, b[0], b[1], b[2], b[3]);
                    warp_mma(s + 4 * x, a, b);
                    warp_mma(s + 4 * x + 4, a, b + 2);
                }
            }
        };
        auto multiply_pv = [&](u32 stage, int accumulate) {
            u64 v = v_first + stage * (KV_BYTES >> 4);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < BLOCK_N / 16; ++k) MMA_PV(o, p + 4 * k, v + 128 * k, k ? 1 : accumulate);
            wgmma_commit();
        };
        auto release = [&](u32 barrier) {
            if (lane == 0) barrier_arrive(barrier);
        };
        // The tile before this one: O, by the copy engine from where its Q was, and lse.
        auto store = [&]() {
            int lane = lane_id(), g = lane >> 2, t = lane & 3;
            float a = quad_sum(rows.sum[0]), b = quad_sum(rows.sum[1]);
            float ra = reciprocal(a), rb = reciprocal(b);
            int first = old_row + 16 * warp;
            if (t == 0) {
                float* to = lse + (long long)(old.batch * shape.heads + old.head) * shape.queries;
                if (first + g < shape.queries) to[first + g] = (rows.top[0] + log2_fast(a)) * 0.69314718056f;
                if (first + g + 8 < shape.queries) to[first + g + 8] = (rows.top[1] + log2_fast(b)) * 0.69314718056f;
            }
            __syncwarp();
#pragma unroll
            for (int x = 0; x < HEAD_DIM / 16; ++x) {
                u32 chunk = (2 * (x & 3) + (lane >> 4)) ^ (lane & 7);
                const float* f = o + 8 * x;
                store_matrices(old_rows + (x / 4) * (TILE_M * 128) + (lane & 15) * 128 + chunk * 16,
                               pack(f[0] * ra, f[1] * ra), pack(f[2] * rb, f[3] * rb),
                               pack(f[4] * ra, f[5] * ra), pack(f[6] * rb, f[7] * rb));
            }
            proxy_fence();
            __syncwarp();
            if (lane == 0) {
                for (int c = 0; c < CHUNKS; ++c)
                    store_tile(&map_o, old_rows + c * (TILE_M * 128), 64 * c, first, old.head, old.batch);
                store_commit();
            }
        };

        int n = 0, row, qs, sub, mine;
        Origin origin;
        // Learn which tile is next; false if none is.
        auto look = [&]() {
            qs = n & 1;
            barrier_wait(q_full + 8 * qs, (n >> 1) & 1);
            int unused;
            load_words(origins + 16 * qs, origin.batch, origin.head, origin.row, unused);
            origin.batch = __shfl_sync(~0u, origin.batch, 0);
            origin.head = __shfl_sync(~0u, origin.head, 0);
            origin.row = __shfl_sync(~0u, origin.row, 0);
            return origin.row != NO_TILE;
        };
        // Pass over the keys that only other warpgroups' rows see.
        auto enter = [&]() {
            sub = (warpgroup_id() + n / 2) % WGS;        // the rows with more keys to see go around
            if (n & 1) sub = WGS - 1 - sub;
            row = origin.row + 64 * sub;
            int blocks = blocks_of(shape, origin.row);
            mine = CAUSAL ? min((row + 63) / BLOCK_N + 1, blocks) : blocks;
            for (int j = blocks; j > mine; --j, at.next()) {
                barrier_wait(k_full + 8 * at.stage, at.parity);
                release(k_empty + 8 * at.stage);
                barrier_wait(v_full + 8 * at.stage, at.parity);
                release(v_empty + 8 * at.stage);
            }
            barrier_wait(k_full + 8 * at.stage, at.parity);
        };
        auto to_p = [&]() {
#pragma unroll
            for (int x = 0; x < P_REGS; ++x) p[x] = pack(s[2 * x], s[2 * x + 1]);
        };
        auto begin = [&]() {                             // the tile's first block, which may hold keys out of sight
            if (CAUSAL) {
                softmax_diagonal(s, rows, scale);
            } else {
                int limit = shape.keys - 1 - (mine - 1) * BLOCK_N - 2 * (lane & 3);
                if (limit < BLOCK_N - 1) {
#pragma unroll
                    for (int x = 0; x < S_REGS; ++x)
                        if (8 * (x >> 2) + (x & 1) > limit) s[x] = -INFINITE;
                }
                softmax_first(s, rows, scale);
            }
            to_p();
        };
        look();
        enter();
        multiply_qk(qs, sub);
        wgmma_wait<0>();
        release(k_empty + 8 * at.stage);
        begin();
        while (true) {
            int accumulate = 0;
            for (int j = mine - 1; j > 0; --j) {
                Position now = at;
                at.next();
                barrier_wait(k_full + 8 * at.stage, at.parity);
                multiply_qk(qs, sub);
                barrier_wait(v_full + 8 * now.stage, now.parity);
                multiply_pv(now.stage, accumulate);
                accumulate = 1;
                wgmma_wait<1>();
                float part[4];
                exponentials<0, S_REGS / 2>(s, part, rows.top, scale);
                wgmma_wait<0>();                         // mostly done by now; P fills while the others are found
                release(v_empty + 8 * now.stage);
                exponentials<S_REGS / 2, S_REGS>(s, part, rows.top, scale);
                to_p();
                // Also true of NaN, which then reaches the row's result by the same way.
                if (__any_sync(~0u, !(part[0] + part[1] <= LIMIT && part[2] + part[3] <= LIMIT))) {
                    scores_again(qs, sub);
                    raise(s, o, rows, scale);
                    exponentials<0, S_REGS>(s, part, rows.top, scale);
                    to_p();
                }
                rows.sum[0] += part[0] + part[1];
                rows.sum[1] += part[2] + part[3];
                release(k_empty + 8 * at.stage);
            }
            old = origin;
            old_row = row;
            old_rows = base + OFF_Q + qs * Q_BYTES + (64 * sub + 16 * warp) * 128;
            ++n;
            bool more = look();
            barrier_wait(v_full + 8 * at.stage, at.parity);
            if (!more) {
                multiply_pv(at.stage, accumulate);
                break;
            }
            Position now = at;
            multiply_pv(at.stage, accumulate);
            at.next();
            enter();
            multiply_qk(qs, sub);
            wgmma_wait<1>();
            release(v_empty + 8 * now.stage);
            store();
            wgmma_wait<0>();
            release(k_empty + 8 * at.stage);
            begin();
            store_wait_read<0>();
            release(q_empty + 8 * (qs ^ 1));
            __syncwarp();                                // or the compiler takes the loop for divergent
        }
        wgmma_wait<0>();
        store();                                         // the grid has no block without a tile
        if (lane == 0) store_wait_read<0>();
    }
}
