// Attention's backward pass for Hopper, float32 sums, 16-bit operands:
//     P = exp(scale Q K^T - lse), dS = P o (dO V^T - delta), dV = P^T dO, dK = scale dS^T Q, dQ = scale dS K.
// Source: Dao 2023, arXiv:2307.08691, algorithm 2; overlap of products and exponentials: Shah et al. 2024, arXiv:2407.08608.
//
// Constants (hopper_bwd.py): D, 64 or 128, the padded width of a head; CAUSAL; WHOLE; SHARED; GIVE, TAKE, registers;
// PART:
//     0  attention_bwd       the products
//     1  attention_bwd_rows  runs before: delta = row sums of dO o O, stored with lse; zeros for dQ's sums and the counts
//     2  attention_bwd_dq    runs after: converts dQ's float32 sums to 16-bit rows
//
// attention_bwd: a block has three warpgroups, one for the copy engine and two that compute, 64 keys each. A block loops
// over the query tiles of a key tile, with dK and dV in registers. S^T and dP^T (keys by queries) leave P^T and dS^T in
// registers in the layout of the next products' left operands. dS also goes through shared memory, [key][query]: dQ sums
// over the keys of both warpgroups. The products for S and dP of the next tile start before this tile's dQ is read, so that
// the tensor cores work during the exponentials. SHARED with D = 64 (INTERLEAVED) overlaps more: dV and dK start after each
// quarter of dS, half of the next tile's exponentials are computed during dQ and half during dP, and a count is
// incremented while the next addition is in flight (384 heads of 1024: 0.375 to 0.363 ms; 192 of 2048: 0.621 to 0.596).
// Other variants are slower that way (added, 16 heads of 16384, not causal: 6.1 instead of 5.3 ms).
//
// dQ is summed over key tiles in float32, in the layout of the registers ("fragments", 16 KiB per warpgroup): fragments are
// staged in shared memory, and the copy engine adds them to sums in global memory (0.007 of 0.33 ms; stores or reductions
// by the compute threads, even into the L2 cache, cost 0.07). Start and end of the sums:
//     neither  the rows kernel writes zeros, and a third kernel converts the sums.
//     SHARED   the blocks of a head run concurrently. A count per tile of dQ holds the number of key tiles added so far: one
//              block stores its part instead of adding it, and the others wait for that. Two otherwise idle warps convert
//              finished tiles, each tile by a fixed block. (1024 keys, 384 heads, before INTERLEAVED: 0.377 ms instead
//              of 0.410, although the products take 0.350 instead of 0.325; 0.020 of the difference are the conversion's
//              memory traffic, 0.005 the counts.)
//     WHOLE    a block processes all key tiles of a head, and each addition waits for the last one: a fixed order. Two warps
//              convert here too. Slower if the heads in flight, one per block, do not fit in the L2 cache.
//
// Helpers (INTERLEAVED): multiprocessors that would not shorten the products run helper blocks. They compute the row
// statistics of the heads from `first` on, in the order in which the other blocks need them; the rows kernel computes
// those of the heads before. All blocks run concurrently (a cooperative launch), and helpers wait for no other block. A
// block's last tile of dQ is converted by its compute warps. (384 heads of 1024: 0.361 to 0.346 ms, with the last tile
// 0.345; 192 of 2048: 0.614 to 0.607. Storing dK and dV through shared memory gained nothing.)
//
// Bound: latency. Without INTERLEAVED, a 128 by 128 tile takes about 5200 clocks; the products need at least 2560 (D = 64,
// H200; alone they take 2563), shared memory 2800 and instruction issue 2000. Without the additions 0.375 ms become 0.357.
// The two warpgroups compute exponentials at the same time and multiply at the same time. Delaying dQ by one tile, so that
// they need not synchronise in each tile, gained nothing: they stay in step. Also slower: dQ's left operand in registers
// (spills); conversion by the block that adds last (some blocks convert most); programmatic dependent launch of the second
// and third kernel (at most 1% faster); a quarter of the exponentials as polynomials of degree 3 (0.007 ms slower); S of the
// next tile before dV and dK, with dQ last (0.40 instead of 0.37).

#define INTERLEAVED (SHARED && D == 64)

#if PART == 0
constexpr int TILE_K = 128, TILE_Q = D == 64 ? 128 : 64, PANELS = D / 64;
constexpr int KV_STAGES = D == 64 ? 2 : 1;
constexpr int KV_BYTES = TILE_K * D * 2, Q_BYTES = TILE_Q * D * 2, DS_BYTES = TILE_K * TILE_Q * 2;
constexpr int KV_PANEL = TILE_K * 128, Q_PANEL = TILE_Q * 128;      // 64 columns of a tile
constexpr int OFF_K = 0, OFF_V = KV_STAGES * KV_BYTES, OFF_Q = 2 * KV_STAGES * KV_BYTES, OFF_DO = OFF_Q + 2 * Q_BYTES;
constexpr int OFF_DS = OFF_DO + 2 * Q_BYTES, OFF_STAGE = OFF_DS + 2 * DS_BYTES;
constexpr int OFF_STATS = OFF_STAGE + TILE_Q * D * 4;
constexpr int HELP_WARPS = 8, HELP_STAGES = (OFF_STATS - 4096) / (2 * Q_BYTES);
constexpr int OFF_BARS = OFF_STATS + 2 * TILE_Q * 8, OFF_INFO = OFF_BARS + 128, OFF_COUNTS = OFF_INFO + 128;
static_assert(OFF_COUNTS + 16 == SHARED_BYTES, "as hopper_bwd.py counts");
#endif

struct Strides { long long batch, head, row; };      // of elements

struct Job {
    TensorMap q, k, v, dout, out;
    const char* stats;         // (heads, query tiles, TILE_Q / 2) of 4 floats: -lse log2(e) of 2 rows, -delta of 2 rows
    float* sums;               // dq in fragments
    int* counts;               // SHARED: (heads, query tiles), key tiles added to a tile of dq
    int* ready;                // SHARED: (heads), warps that have computed their part of a head's statistics
    char *dq, *dk, *dv;
    const float* lse;
    Strides sq, sk, sv;        // of dq, dk, dv
    int batch, heads, kv_heads, queries, keys, width, nq, nk, chunks;
    int grid, first;           // blocks that multiply, the others are helpers; first head whose statistics these compute
    float scale, scale_log2;   // scale_log2 = scale log2(e), a constant memory operand, which takes no register
};

struct RowsJob {
    const char *dout, *out;
    const float* lse;
    float *stats, *sums;
    int* counts;
    Strides sdo, so;
    int heads, queries, width, blocks, rows, zeros;       // blocks of 128 rows, `rows` of them in whole query tiles, of a head
};

__device__ __forceinline__ void bulk_add(void* dst, u32 src, u32 size_bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(dst), "r"(src), "r"(size_bytes) : "memory");
}
__device__ __forceinline__ void store_shared(u32 p, const float* v) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(p), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]) : "memory");
}
// threadIdx.x, read where it is used, so that addresses computed from it take no registers before.
__device__ __forceinline__ u32 thread_now() {
    u32 v;
    asm volatile("mov.u32 %0, %tid.x;" : "=r"(v));
    return v;
}
__device__ __forceinline__ void bulk_store(void* dst, u32 src, u32 size_bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst), "r"(src), "r"(size_bytes) : "memory");
}
// Waits for all of this thread's bulk stores and additions.
__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// INTERLEAVED: waits for the end of the rows kernel, before which this one may begin (programmatic dependent launch).
__device__ __forceinline__ void rows_wait() {
#if INTERLEAVED
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// A count in shared memory that one thread increments with release semantics.
__device__ __forceinline__ void publish(u32 count, int value) {
    asm volatile("st.release.cta.shared::cta.s32 [%0], %1;" ::"r"(count), "r"(value) : "memory");
}
__device__ __forceinline__ void await(u32 count, int value) {
    while (true) {
        int found;
        asm volatile("ld.acquire.cta.shared::cta.s32 %0, [%1];" : "=r"(found) : "r"(count) : "memory");
        if (found >= value) return;
        __nanosleep(100);
    }
}
// The same in global memory, by adding.
__device__ __forceinline__ void raise(int* count) {
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(count) : "memory");
}
__device__ __forceinline__ void await(const int* count, int value) {
    while (true) {
        int found;
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(found) : "l"(count) : "memory");
        if (found >= value) return;
        __nanosleep(40);
    }
}
// The same for an event of another block microseconds away; traps after about 2 s instead of hanging if it never comes.
__device__ __forceinline__ void await_soon(const int* count, int value) {
#pragma unroll 1
    for (int turn = 0; turn < 1 << 22; ++turn) {
        int found;
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(found) : "l"(count) : "memory");
        if (found >= value) return;
        __nanosleep(40);
    }
    __trap();
}
__device__ __forceinline__ void store_global(float4* p, const float* v) {
    asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]) : "memory");
}
__device__ __forceinline__ float4 load_global(const float4* p) {
    float4 v;
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ void unpack(u32 word, float& low, float& high) {
#if IS_BF16
    low = __int_as_float(word << 16);
    high = __int_as_float(word & 0xffff0000u);
#else
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;\n}" : "=f"(low), "=f"(high) : "r"(word));
#endif
}

// Returns a row's sum of dO o O in all of LANES threads, of 8 elements each.
template <int LANES> __device__ __forceinline__ float row_product(uint4 x, uint4 y) {
    float sum = 0.f;
    const u32* a = (const u32*)&x;
    const u32* c = (const u32*)&y;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        float a0, a1, c0, c1;
        unpack(a[w], a0, a1);
        unpack(c[w], c0, c1);
        sum = fmaf(a0, c0, fmaf(a1, c1, sum));
    }
#pragma unroll
    for (int m = 1; m < LANES; m *= 2) sum += __shfl_xor_sync(~0u, sum, m);
    return sum;
}
// Stores the statistics of row r of all heads' rows, padded to whole query tiles. Rows outside the tensor, and rows without
// a visible key, whose lse is -inf, get -inf and 0, so that their probabilities are 0.
__device__ __forceinline__ void store_statistics(float* stats, long long r, float lse, float sum) {
    float* p = stats + (r & ~1ll) * 2 + (r & 1);
    p[0] = lse == __int_as_float(0xff800000) ? lse : lse * -1.4426950408889634f;
    p[2] = -sum;
}

// Stores half of a 64 x 64 accumulator (32 columns) as 16-bit rows. A quad of threads transposes 4 x 4 words, so that each
// stores 16 bytes. `row` and `column` are this thread's first.
__device__ __forceinline__ void store_half(const float* acc, float factor, char* base, long long row_elements, int row, int rows, int column, int columns) {
    int t = threadIdx.x & 3;
    bool odd = t & 1, high = t & 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {          // rows g, g + 8
        u32 w[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) w[n] = pack(acc[4 * n + 2 * half] * factor, acc[4 * n + 2 * half + 1] * factor);
        u32 x0 = __shfl_xor_sync(~0u, odd ? w[0] : w[1], 1), x1 = __shfl_xor_sync(~0u, odd ? w[2] : w[3], 1);
        if (odd) { w[0] = x0; w[2] = x1; } else { w[1] = x0; w[3] = x1; }
        u32 y0 = __shfl_xor_sync(~0u, high ? w[0] : w[2], 2), y1 = __shfl_xor_sync(~0u, high ? w[1] : w[3], 2);
        if (high) { w[0] = y0; w[1] = y1; } else { w[2] = y0; w[3] = y1; }
        int r = row + 8 * half, c = column + 8 * t;
        if (r < rows && c < columns) *(uint4*)(base + (r * row_elements + c) * 2) = make_uint4(w[0], w[1], w[2], w[3]);
    }
}

#if PART == 0

// The order of a block's work: its items (a key/value head and some of its key tiles), their key tiles (a sweep each), the
// query heads of the group, their query tiles. Causal items pair a long sweep with a short one, so that all are equal.
struct Walk {
    int item, k, j, g, i, kv, chunk;
    __device__ __forceinline__ void enter(const Job& job) {
        kv = item / job.chunks;
        chunk = SHARED ? job.chunks - 1 - item % job.chunks : item % job.chunks;
        k = 0;
        sweep(job);
    }
    __device__ __forceinline__ void sweep(const Job& job) {
        j = WHOLE ? k : k == 0 ? chunk : job.nk - 1 - chunk;
        g = 0;
        i = first();
    }
    __device__ __forceinline__ int first() const { return CAUSAL ? j * (TILE_K / TILE_Q) : 0; }
    __device__ __forceinline__ int sweeps(const Job& job) const {
        return WHOLE ? job.nk : CAUSAL && chunk != job.nk - 1 - chunk ? 2 : 1;
    }
    __device__ __forceinline__ bool valid(const Job& job) const { return item < job.batch * job.kv_heads * job.chunks; }
    // Advances to the next query tile; returns whether a sweep ends.
    __device__ __forceinline__ bool advance(const Job& job) {
        if (++i < job.nq) return false;
        if (++g < job.heads / job.kv_heads) {
            i = first();
            return false;
        }
        if (++k < sweeps(job)) {
            sweep(job);
        } else {
            item += INTERLEAVED ? job.grid : gridDim.x;
            enter(job);
        }
        return true;
    }
    __device__ __forceinline__ int head(const Job& job) const { return kv * (job.heads / job.kv_heads) + g; }
};

// D = A B^T over a head's width, 16 columns at a time, of tiles stored as panels of 64 columns.
__device__ __forceinline__ void scores(float* d, u64 a, u64 b) {
    wgmma_fence();
#if INTERLEAVED
    MMA_S(d, a, b, 0);             // reads d formally, which keeps dq and dp in the same registers
#else
    MMA_S_FIRST(d, a, b);
#endif
#pragma unroll
    for (int k = 1; k < D / 16; ++k)
        MMA_S(d, a + (k / 4) * (KV_PANEL / 16) + 2 * (k % 4), b + (k / 4) * (Q_PANEL / 16) + 2 * (k % 4), 1);
    wgmma_commit();
}

// The last key tile that contributes to query tile i.
__device__ __forceinline__ int last_key_tile(const Job& job, int i) {
    return CAUSAL ? (i * TILE_Q + TILE_Q - 1) / TILE_K : job.nk - 1;
}

// SHARED: the key tile whose block stores its part of query tile i's sums, while all others add theirs. It finishes first:
// of the first sweeps, which start at their own key tile, this one is furthest along.
__device__ __forceinline__ int first_key_tile(const Job& job, int i) {
    return CAUSAL ? min(i * TILE_Q / TILE_K, job.chunks - 1) : job.chunks - 1;
}

// Waits until the first part of a tile's sums is stored.
__device__ __forceinline__ void await_sums(const Job& job, int slot, int kv) {
    await(job.counts + kv * (job.heads / job.kv_heads * job.nq) + slot, 1);
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Converts, by one warp, steps begin to end of 8 of half of a tile of dq's sums, a warpgroup's fragments, to 16-bit rows. A
// lane handles 8 columns of 2 rows per step, four neighbours' fragments, and loads TOGETHER steps before it converts.
template <int TOGETHER>
__device__ __forceinline__ void convert_tile(const Job& job, int half, const float* sums, int bh, int i, int begin, int end) {
    int lane = lane_id(), r = i * TILE_Q + (D == 64 ? 64 * half : 0) + lane / 4, column = (D == 64 ? 0 : 64 * half) + lane % 4 * 8;
    const float4* from = (const float4*)sums + half * 1024 + begin * 128 + lane % 4 * 32 + lane / 4 * 4;
    char* out = job.dq + (bh / job.heads * job.sq.batch + bh % job.heads * job.sq.head) * 2;
#pragma unroll 1
    for (int first = begin; first < end; first += TOGETHER, from += 128 * TOGETHER) {
        float4 fetched[4 * TOGETHER];
#pragma unroll
        for (int y = 0; y < 4 * TOGETHER; ++y) fetched[y] = load_global(from + y / 4 * 128 + y % 4);
#pragma unroll
        for (int u = 0; u < TOGETHER; ++u) {                       // 16 rows, 32 columns
            const float4* v = fetched + 4 * u;
            int x = first + u, row = r + x / 2 * 16, c = column + x % 2 * 32;
            u32 w[8];
#pragma unroll
            for (int y = 0; y < 4; ++y) {
                w[y] = pack(v[y].x * job.scale, v[y].y * job.scale);
                w[4 + y] = pack(v[y].z * job.scale, v[y].w * job.scale);
            }
            if (c < job.width && row < job.queries) *(uint4*)(out + (row * job.sq.row + c) * 2) = make_uint4(w[0], w[1], w[2], w[3]);
            if (c < job.width && row + 8 < job.queries) *(uint4*)(out + ((row + 8) * job.sq.row + c) * 2) = make_uint4(w[4], w[5], w[6], w[7]);
        }
    }
}

// WHOLE: converts the tiles of the block's heads, in the order in which they are finished.
__device__ __forceinline__ void convert_own(const Job& job, int half, u32 summed, u32 converted) {
    constexpr int RATIO = TILE_K / TILE_Q;
    for (int n = 0;; ++n) {
        int group_heads = job.heads / job.kv_heads, tiles = group_heads * job.nq;
        int kv = blockIdx.x + n / tiles * gridDim.x, g = 0, i = n % tiles;
        if (kv >= job.batch * job.kv_heads) break;
        if (group_heads > 1 && CAUSAL) {
            int j = i / (RATIO * group_heads), rest = i % (RATIO * group_heads), count = min(RATIO, job.nq - RATIO * j);
            g = rest / count;
            i = RATIO * j + rest % count;
        } else if (group_heads > 1) {
            g = i / job.nq;
            i = i % job.nq;
        }
        await(summed, n + 1);
        __syncwarp();
        convert_tile<1>(job, half, job.sums + ((long long)blockIdx.x * tiles + g * job.nq + i) * TILE_Q * D, kv * group_heads + g, i, 0, 8);
        __syncwarp();
        if (lane_id() == 0) publish(converted, n + 1);
        __syncwarp();
    }
}

// SHARED: converts every chunks-th tile of the block's heads. INTERLEAVED: except the last, see convert_last.
__device__ __forceinline__ void convert_shared(const Job& job, int half) {
    int tiles = job.heads / job.kv_heads * job.nq, items = job.batch * job.kv_heads * job.chunks, grid = INTERLEAVED ? job.grid : gridDim.x;
    for (int item = blockIdx.x; item < items; item += grid)
        for (int slot = item % job.chunks; slot < tiles; slot += job.chunks) {
            if (INTERLEAVED && item + grid >= items && slot + job.chunks >= tiles) break;
            int at = item / job.chunks * tiles + slot, i = slot % job.nq;
            await(job.counts + at, last_key_tile(job, i) + 1);
            __syncwarp();
            convert_tile<1>(job, half, job.sums + (long long)at * TILE_Q * D, at / job.nq, i, 0, 8);
        }
}

// INTERLEAVED: converts the block's last tile by the compute warps, which are idle then: two producer warps took 6 us.
__device__ __forceinline__ void convert_last(const Job& job, int half, int warp) {
    int tiles = job.heads / job.kv_heads * job.nq, items = job.batch * job.kv_heads * job.chunks, grid = INTERLEAVED ? job.grid : gridDim.x;
    int item = blockIdx.x + (items - 1 - (int)blockIdx.x) / grid * grid, slot = item % job.chunks;
    if (slot >= tiles) return;
    slot += (tiles - 1 - slot) / job.chunks * job.chunks;
    int at = item / job.chunks * tiles + slot, i = slot % job.nq;
    await(job.counts + at, last_key_tile(job, i) + 1);
    __syncwarp();
    convert_tile<2>(job, half, job.sums + (long long)at * TILE_Q * D, at / job.nq, i, 2 * warp, 2 * warp + 2);
}

#if INTERLEAVED

// A helper block: computes the row statistics of every n-th head from job.first on. One thread lets the copy engine load
// tiles of dO and O, and eight warps multiply. Both have the same swizzle, and the sum over eight lanes does not depend on
// which lane has which chunk: results have the bits of the rows kernel's.
__device__ __forceinline__ void help(const Job& job, u32 base, const char* memory) {
    constexpr int LSE = HELP_STAGES * 2 * Q_BYTES, SHARE = TILE_Q / HELP_WARPS;
    int warp = warp_id(), lane = lane_id(), n = 0;
    int bh = job.first + blockIdx.x - job.grid, step = gridDim.x - job.grid, heads = job.batch * job.heads;
    u32 full = base + OFF_BARS, empty = full + 8 * HELP_STAGES;
    if (warp == HELP_WARPS && lane == 0) {
        for (; bh < heads; bh += step)
#pragma unroll 1
            for (int i = 0; i < job.nq; ++i, ++n) {
                int s = n % HELP_STAGES, b = bh / job.heads, h = bh % job.heads, count = min(TILE_Q, job.queries - i * TILE_Q);
                u32 to = base + s * 2 * Q_BYTES, got = full + 8 * s;
                barrier_wait(empty + 8 * s, ((n / HELP_STAGES) & 1) ^ 1);
                barrier_expect(got, 2 * Q_BYTES + 4 * count);
                load_tile(to, &job.dout, got, 0, i * TILE_Q, h, b);
                load_tile(to + Q_BYTES, &job.out, got, 0, i * TILE_Q, h, b);
                load_bytes(base + LSE + s * TILE_Q * 4, job.lse + (long long)bh * job.queries + i * TILE_Q, 4 * count, got);
            }
    } else if (warp < HELP_WARPS) {
        int part = lane % 8, row = warp * SHARE + lane / 8, mine = row + 4 * part;     // this lane stores row `mine`, if part < 4
        for (; bh < heads; bh += step) {
#pragma unroll 1
            for (int i = 0; i < job.nq; ++i, ++n) {
                int s = n % HELP_STAGES, r = i * TILE_Q + mine;
                const char* at = memory + s * 2 * Q_BYTES + row * 128 + part * 16;
                float sum = 0.f, lse = __int_as_float(0xff800000);
                barrier_wait(full + 8 * s, (n / HELP_STAGES) & 1);
                if (part < SHARE / 4 && r < job.queries) lse = ((const float*)(memory + LSE))[s * TILE_Q + mine];
#pragma unroll
                for (int u = 0; u < SHARE / 4; ++u) {
                    const char* from = at + u * 512;
                    float found = row_product<8>(*(const uint4*)from, *(const uint4*)(from + Q_BYTES));
                    if (part == u) sum = found;
                }
                __syncwarp();
                if (lane == 0) barrier_arrive(empty + 8 * s);
                if (part < SHARE / 4) store_statistics((float*)job.stats, (long long)bh * job.nq * TILE_Q + r, lse, sum);
            }
            asm volatile("fence.proxy.async.global;" ::: "memory");        // read by the copy engine
            __syncwarp();
            if (lane == 0) raise(job.ready + bh);
        }
    }
}

// Scores of tile nt to exponentials in place: groups FROM to TO of 8 queries.
template <int FROM, int TO> __device__ __forceinline__ void exponentials(float* sc, const char* memory, int nt, float c, int t) {
    const float4* st = (const float4*)(memory + OFF_STATS + (nt & 1) * TILE_Q * 8) + t;
#pragma unroll
    for (int n = FROM; n < TO; ++n) {
        float2 l = *(const float2*)(st + 4 * n);
        sc[4 * n] = exp2_fast(fmaf(sc[4 * n], c, l.x));
        sc[4 * n + 1] = exp2_fast(fmaf(sc[4 * n + 1], c, l.y));
        sc[4 * n + 2] = exp2_fast(fmaf(sc[4 * n + 2], c, l.x));
        sc[4 * n + 3] = exp2_fast(fmaf(sc[4 * n + 3], c, l.y));
    }
}
// Zeroes invisible pairs. Rows are computed where they are used: with a few more registers ptxas 13.0 (unlike 13.5) waits
// for each wgmma (C7511): 0.406 instead of 0.361 ms.
__device__ __forceinline__ void masks(float* sc, const char* memory, int nt, int keys) {
    const volatile int* now = (const volatile int*)(memory + OFF_INFO + 16 * (nt & 7));
    int j = now[1], i = now[3] >> 2;
    if (CAUSAL && i * TILE_Q < (j + 1) * TILE_K) {
        int me = thread_now() - 128, row = me / 32 * 16 + (me & 31) / 4, t = me & 3;
        int key = row + j * TILE_K - i * TILE_Q - 2 * t;               // relative to this thread's first query
#pragma unroll
        for (int n = 0; n < TILE_Q / 8; ++n) {
            if (key > 8 * n) sc[4 * n] = 0.f;
            if (key > 8 * n + 1) sc[4 * n + 1] = 0.f;
            if (key + 8 > 8 * n) sc[4 * n + 2] = 0.f;
            if (key + 8 > 8 * n + 1) sc[4 * n + 3] = 0.f;
        }
    }
    if (j * TILE_K + TILE_K > keys) {
        int me = thread_now() - 128, row = me / 32 * 16 + (me & 31) / 4;
        bool out0 = j * TILE_K + row >= keys, out1 = j * TILE_K + row + 8 >= keys;
#pragma unroll
        for (int n = 0; n < TILE_Q / 8; ++n) {
            if (out0) sc[4 * n] = sc[4 * n + 1] = 0.f;
            if (out1) sc[4 * n + 2] = sc[4 * n + 3] = 0.f;
        }
    }
}

#endif

extern "C" __global__ void __launch_bounds__(384, 1) attention_bwd(const __grid_constant__ Job job) {
    extern __shared__ __align__(1024) char memory[];
    u32 base = shared_address(memory), bars = base + OFF_BARS, info = base + OFF_INFO;
    u32 kv_full = bars, kv_empty = bars + 16, q_full = bars + 32, do_full = bars + 48, q_empty = bars + 64;
    u32 dq_full = bars + 80, dq_empty = bars + 96, summed = base + OFF_COUNTS, converted = summed + 4;
    bool helps = INTERLEAVED && blockIdx.x >= job.grid;
    if (helps && threadIdx.x == 0) {
        for (int s = 0; s < 2 * HELP_STAGES; ++s) barrier_init(bars + 8 * s, s < HELP_STAGES ? 1 : HELP_WARPS);
        barriers_ready();
    }
    if (threadIdx.x == 0 && !helps) {
        for (int s = 0; s < 2; ++s) {
            barrier_init(kv_full + 8 * s, 1);
            barrier_init(kv_empty + 8 * s, 8);
            barrier_init(q_full + 8 * s, 1);
            barrier_init(do_full + 8 * s, 1);
            barrier_init(q_empty + 8 * s, 8);
            barrier_init(dq_full + 8 * s, 4);
            barrier_init(dq_empty + 8 * s, 1);
        }
        for (int s = 0; s < 3; ++s) publish(summed + 4 * s, 0);
        barriers_ready();
    }
    __syncthreads();
    int group = __shfl_sync(~0u, threadIdx.x / 128, 0);             // warp-uniform, so that uniform registers hold it
    if (group == 0 && !helps) {
        registers_give<GIVE>();
        int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x & 31;
        if (warp == 0 && lane == 0) {                               // loads
            prefetch_map(&job.q);
            prefetch_map(&job.k);
            prefetch_map(&job.v);
            prefetch_map(&job.dout);
            Walk at;
            at.item = blockIdx.x;
            at.enter(job);
            int nt = 0, nkv = 0;
            bool fresh = true;
            while (at.valid(job)) {
                if (fresh) {
                    int s = nkv % KV_STAGES, b = at.kv / job.kv_heads, h = at.kv % job.kv_heads;
                    barrier_wait(kv_empty + 8 * s, ((nkv / KV_STAGES) & 1) ^ 1);
                    barrier_expect(kv_full + 8 * s, 2 * KV_BYTES);
#pragma unroll 1
                    for (int p = 0; p < PANELS; ++p) {
                        load_tile(base + OFF_K + s * KV_BYTES + p * KV_PANEL, &job.k, kv_full + 8 * s, 64 * p, at.j * TILE_K, h, b);
                        load_tile(base + OFF_V + s * KV_BYTES + p * KV_PANEL, &job.v, kv_full + 8 * s, 64 * p, at.j * TILE_K, h, b);
                    }
                    ++nkv;
                }
                int s = nt & 1, bh = at.head(job), b = bh / job.heads, h = bh % job.heads, i = at.i;
                int slot = at.g * job.nq + i, j = at.j, kv = at.kv;
                bool enters = i == at.first();     // a head
                fresh = at.advance(job);
                barrier_wait(q_empty + 8 * s, ((nt >> 1) & 1) ^ 1);
                // The tile's coordinates for the compute threads, which have no registers to iterate themselves.
                asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(info + 16 * (nt & 7)), "r"(slot), "r"(j), "r"(kv),
                             "r"((fresh ? 1 : 0) | (at.valid(job) ? 2 : 0) | i << 2) : "memory");
                barrier_expect(q_full + 8 * s, Q_BYTES + TILE_Q * 8);
#pragma unroll 1
                for (int p = 0; p < PANELS; ++p)
                    load_tile(base + OFF_Q + s * Q_BYTES + p * Q_PANEL, &job.q, q_full + 8 * s, 64 * p, i * TILE_Q, h, b);
                if (nt == 0) rows_wait();
#if INTERLEAVED
                if (enters && bh >= job.first) {
                    await_soon(job.ready + bh, HELP_WARPS);
                    asm volatile("fence.proxy.async.global;" ::: "memory");
                }
#endif
                load_bytes(base + OFF_STATS + s * TILE_Q * 8, job.stats + ((long long)bh * job.nq + i) * TILE_Q * 8, TILE_Q * 8, q_full + 8 * s);
                barrier_expect(do_full + 8 * s, Q_BYTES);
#pragma unroll 1
                for (int p = 0; p < PANELS; ++p)
                    load_tile(base + OFF_DO + s * Q_BYTES + p * Q_PANEL, &job.dout, do_full + 8 * s, 64 * p, i * TILE_Q, h, b);
                ++nt;
            }
        } else if (warp == 1 && lane == 0) {                        // additions to dq
            rows_wait();
#if INTERLEAVED
            int tiles = job.heads / job.kv_heads * job.nq, owed = -1;
            bool begun = false;                    // whether the current tile's sums have their first part
            for (int nt = 0, more = 1; more; ++nt) {
                const volatile int* tile = (const volatile int*)(memory + OFF_INFO + 16 * (nt & 7));
                barrier_wait(dq_full, nt & 1);
                int at = tile[2] * tiles + tile[0], j = tile[1], flags = tile[3];
                bool stores = j == first_key_tile(job, flags >> 2);
                more = flags & 2;
                if (!stores && !begun) {
                    if (owed >= 0) {               // others may wait for it
                        bulk_wait();
                        raise(job.counts + owed);
                        owed = -1;
                    }
                    await(job.counts + at, 1);
                }
                if (!stores) asm volatile("fence.proxy.async.global;" ::: "memory");
                float* sums = job.sums + (long long)at * TILE_Q * D;
                if (stores) bulk_store(sums, base + OFF_STAGE, 16384);
                else bulk_add(sums, base + OFF_STAGE, 16384);
                barrier_wait(dq_full + 8, nt & 1);
                if (stores) bulk_store(sums + 4096, base + OFF_STAGE + 16384, 16384);
                else bulk_add(sums + 4096, base + OFF_STAGE + 16384, 16384);
                store_commit();
                store_wait_read<0>();
                barrier_arrive(dq_empty);
                barrier_arrive(dq_empty + 8);
                if (owed >= 0) {
                    asm volatile("cp.async.bulk.wait_group 1;" ::: "memory");
                    raise(job.counts + owed);
                }
                owed = at;
                if (stores || flags & 1 || !more) {          // others wait for it, or nothing follows for a while
                    bulk_wait();
                    raise(job.counts + owed);
                    owed = -1;
                }
                if (more) {                        // the next tile's first part, while there is time
                    const volatile int* next = (const volatile int*)(memory + OFF_INFO + 16 * ((nt + 1) & 7));
                    int found;
                    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(found) : "l"(job.counts + next[2] * tiles + next[0]) : "memory");
                    begun = found > 0;
                }
            }
            bulk_wait();
#else
            int group_heads = job.heads / job.kv_heads, tiles = group_heads * job.nq, finished = 0;
            bool finishes = false;
            for (int nt = 0, more = 1; more; ++nt) {
                barrier_wait(dq_full, nt & 1);
                const volatile int* tile = (const volatile int*)(memory + OFF_INFO + 16 * (nt & 7));
                int slot = tile[0], j = tile[1], kv = tile[2], flags = tile[3], i = flags >> 2;
                more = flags & 2;
                if (WHOLE) {
                    bulk_wait();                   // in order: deterministic
                    if (finishes) publish(summed, ++finished);
                    finishes = j == last_key_tile(job, i);
                    if (j == 0) {                  // the sums' memory is free when the block's previous head is converted
                        int before = (kv - blockIdx.x) / gridDim.x * tiles, wanted = group_heads > 1 ? before : before - tiles + i + 1;
                        await(converted, wanted);
                        await(converted + 4, wanted);
                    }
                }
                bool stores = WHOLE ? j == 0 : SHARED ? j == first_key_tile(job, i) : false;
                if (SHARED && nt == 0 && !stores) await_sums(job, slot, kv);
                float* sums = job.sums + ((long long)(WHOLE ? blockIdx.x : kv) * tiles + slot) * TILE_Q * D;
                if (stores) bulk_store(sums, base + OFF_STAGE, 16384);
                else bulk_add(sums, base + OFF_STAGE, 16384);
                barrier_wait(dq_full + 8, nt & 1);
                if (stores) bulk_store(sums + 4096, base + OFF_STAGE + 16384, 16384);
                else bulk_add(sums + 4096, base + OFF_STAGE + 16384, 16384);
                store_commit();
                store_wait_read<0>();
                barrier_arrive(dq_empty);
                barrier_arrive(dq_empty + 8);
                if (SHARED) {
                    bulk_wait();
                    raise(job.counts + kv * tiles + slot);
                    if (more) {                    // the next tile's first part, while waiting for its sums
                        const volatile int* next = (const volatile int*)(memory + OFF_INFO + 16 * ((nt + 1) & 7));
                        int p = next[0];
                        if (next[1] != first_key_tile(job, next[3] >> 2)) await_sums(job, p, next[2]);
                    }
                }
            }
            bulk_wait();
            if (WHOLE && finishes) publish(summed, ++finished);
#endif
        } else if (WHOLE && warp >= 2) {
            convert_own(job, warp - 2, summed, converted + 4 * (warp - 2));
        } else if (SHARED && warp >= 2) {
            rows_wait();
            convert_shared(job, warp - 2);
        }
#if INTERLEAVED
    } else if (helps) {
        rows_wait();                               // for zeros in job.ready
        help(job, base, memory);
#endif
    } else {
        registers_take<TAKE>();
        int wg = group - 1, tid = threadIdx.x & 127, lane = threadIdx.x & 31;
        int t = lane & 3;
#if INTERLEAVED
        const float c = job.scale_log2;
        float sc[TILE_Q / 2], dp[TILE_Q / 2], dkacc[D / 2], dvacc[D / 2];
#pragma unroll
        for (int x = 0; x < D / 2; ++x) dkacc[x] = dvacc[x] = 0.f;
        int started = 0;                           // 0: the sweep's first tile overwrites dk and dv
        int nt = 0, nkv = 0;
        barrier_wait(kv_full, 0);
        barrier_wait(q_full, 0);
        scores(sc, descriptor(base + OFF_K + wg * 8192), descriptor(base + OFF_Q));
        barrier_wait(do_full, 0);
        scores(dp, descriptor(base + OFF_V + wg * 8192), descriptor(base + OFF_DO));
        wgmma_wait<1>();
        exponentials<0, TILE_Q / 8>(sc, memory, 0, c, t);
        while (true) {
            int s = nt & 1, ks = nkv % KV_STAGES;
            const volatile int* now = (const volatile int*)(memory + OFF_INFO + 16 * (nt & 7));
            const float4* st = (const float4*)(memory + OFF_STATS + s * TILE_Q * 8) + t;
            masks(sc, memory, nt, job.keys);
            u32 buffer = (nt & 1) * DS_BYTES;      // double-buffered: the other warpgroup may still multiply the last one
            // stmatrix: lane l gives the address of row l % 8 of matrix l / 8: (keys, keys + 8) x (queries, queries + 8)
            u32 me = thread_now() - 128, srow = me / 32 * 16 + (me & 15), schunk = (me >> 4) & 1, sxor = me & 7;
            u32 swrite = base + OFF_DS + srow * 128;
            u64 do_b = descriptor(base + OFF_DO + s * Q_BYTES, Q_PANEL), q_b = descriptor(base + OFF_Q + s * Q_BYTES, Q_PANEL);
            u32 pr[TILE_Q / 4], ds[TILE_Q / 4];
            wgmma_wait<0>();                                                    // dp
#pragma unroll
            for (int part = 0; part < 4; ++part) {
                constexpr int STEPS = TILE_Q / 64;
#pragma unroll
                for (int n = part * 2 * STEPS; n < (part + 1) * 2 * STEPS; ++n) {
                    float2 l = *(const float2*)((const char*)(st + 4 * n) + 8);
                    pr[2 * n] = pack(sc[4 * n], sc[4 * n + 1]);
                    pr[2 * n + 1] = pack(sc[4 * n + 2], sc[4 * n + 3]);
                    ds[2 * n] = pack(sc[4 * n] * (dp[4 * n] + l.x), sc[4 * n + 1] * (dp[4 * n + 1] + l.y));
                    ds[2 * n + 1] = pack(sc[4 * n + 2] * (dp[4 * n + 2] + l.x), sc[4 * n + 3] * (dp[4 * n + 3] + l.y));
                }
#pragma unroll
                for (int k = part * STEPS; k < (part + 1) * STEPS; ++k) {
                    u32 chunk = (2 * k + schunk) & 7;
                    store_matrices(swrite + buffer + (k / 4) * 16384 + ((chunk ^ sxor) << 4), ds[4 * k], ds[4 * k + 1], ds[4 * k + 2], ds[4 * k + 3]);
                }
                if (part == 3) proxy_fence();      // for dS; after the last products it cost 0.02 of 0.39 ms
                wgmma_fence();
#pragma unroll
                for (int k = part * STEPS; k < (part + 1) * STEPS; ++k) MMA_D(dvacc, pr + 4 * k, do_b + 128 * k, k ? 1 : started);
#pragma unroll
                for (int k = part * STEPS; k < (part + 1) * STEPS; ++k) MMA_D(dkacc, ds + 4 * k, q_b + 128 * k, k ? 1 : started);
                wgmma_commit();
            }
            int flags = now[3];
            bool ends = flags & 1, more = flags & 2;
            int s2 = (nt + 1) & 1, nkv2 = nkv + (ends ? 1 : 0), ks2 = nkv2 % KV_STAGES;
            if (more) {
                if (ends) barrier_wait(kv_full + 8 * ks2, (nkv2 / KV_STAGES) & 1);
                barrier_wait(q_full + 8 * s2, ((nt + 1) >> 1) & 1);
            }
            named_barrier(1, 256);
            if (more) barrier_wait(do_full + 8 * s2, ((nt + 1) >> 1) & 1);
            barrier_wait(dq_empty + 8 * wg, (nt & 1) ^ 1);
            wgmma_wait<0>();                                                    // dv, dk
            if (lane == 0) barrier_arrive(q_empty + 8 * s);
            __syncwarp();
            started = !ends;
            // After the last tile this multiplies stale tiles, since a branch would make ptxas serialise the wgmmas.
            scores(sc, descriptor(base + OFF_K + ks2 * KV_BYTES + wg * 8192), descriptor(base + OFF_Q + s2 * Q_BYTES));
            // dq, 64 of 128 queries each, in the registers of dp, since there are no others
            u64 ds_a = descriptor(base + OFF_DS + buffer + wg * 16384);
            u64 k_b = descriptor(base + OFF_K + ks * KV_BYTES);
            wgmma_fence();
            MMA_Q_FIRST(dp, ds_a, k_b);
#pragma unroll
            for (int k = 1; k < TILE_K / 16; ++k) MMA_Q(dp, ds_a + 128 * k, k_b + 128 * k, 1);
            wgmma_commit();
            wgmma_wait<1>();                                                    // sc
            exponentials<0, TILE_Q / 16>(sc, memory, nt + 1, c, t);
            wgmma_wait<0>();                       // dq
            u32 again = thread_now() - 128, stage = base + OFF_STAGE + again / 32 * 4096 + (again & 31) * 16;
#pragma unroll
            for (int x = 0; x < 8; ++x) store_shared(stage + 512 * x, dp + 4 * x);
            proxy_fence();
            __syncwarp();
            if (lane == 0) barrier_arrive(dq_full + 8 * wg);
            __syncwarp();
            scores(dp, descriptor(base + OFF_V + ks2 * KV_BYTES + wg * 8192), descriptor(base + OFF_DO + s2 * Q_BYTES));
            exponentials<TILE_Q / 16, TILE_Q / 8>(sc, memory, nt + 1, c, t);
            if (ends) {
                int mine = thread_now() - 128, row = mine / 32 * 16 + (mine & 31) / 4, at = now[1], kv = now[2], b = kv / job.kv_heads, h = kv % job.kv_heads;
                if (KV_STAGES > 1 && lane == 0) barrier_arrive(kv_empty + 8 * ks);
                __syncwarp();
                char* pk = job.dk + (b * job.sk.batch + h * job.sk.head) * 2;
                char* pv = job.dv + (b * job.sv.batch + h * job.sv.head) * 2;
#pragma unroll
                for (int x = 0; x < D / 32; ++x) {
                    store_half(dkacc + 16 * x, job.scale, pk, job.sk.row, at * TILE_K + row, job.keys, 32 * x, job.width);
                    store_half(dvacc + 16 * x, 1.f, pv, job.sv.row, at * TILE_K + row, job.keys, 32 * x, job.width);
                }
                ++nkv;
            }
            ++nt;
            if (!more) break;
        }
        wgmma_wait<0>();
#if INTERLEAVED
        convert_last(job, wg, tid / 32);
#endif
#else
        int row = wg * 64 + tid / 32 * 16 + (lane >> 2);                       // of the key tile, and row + 8
        float c = job.scale * 1.4426950408889634f;
        float sc[TILE_Q / 2], dp[TILE_Q / 2], dkacc[D / 2], dvacc[D / 2];
#pragma unroll
        for (int x = 0; x < D / 2; ++x) dkacc[x] = dvacc[x] = 0.f;
        int started = 0;                           // 0: the sweep's first tile overwrites dk and dv
        int nt = 0, nkv = 0;
        barrier_wait(kv_full, 0);
        barrier_wait(q_full, 0);
        scores(sc, descriptor(base + OFF_K + wg * 8192), descriptor(base + OFF_Q));
        barrier_wait(do_full, 0);
        scores(dp, descriptor(base + OFF_V + wg * 8192), descriptor(base + OFF_DO));
        wgmma_wait<1>();
        while (true) {
            float dqacc[32], p[TILE_Q / 2];
            int s = nt & 1, ks = nkv % KV_STAGES;
            const volatile int* now = (const volatile int*)(memory + OFF_INFO + 16 * (nt & 7));
            const float4* st = (const float4*)(memory + OFF_STATS + s * TILE_Q * 8) + t;
            int j = now[1], i = now[3] >> 2;
#pragma unroll
            for (int n = 0; n < TILE_Q / 8; ++n) {
                float2 l = *(const float2*)(st + 4 * n);
                p[4 * n] = exp2_fast(fmaf(sc[4 * n], c, l.x));
                p[4 * n + 1] = exp2_fast(fmaf(sc[4 * n + 1], c, l.y));
                p[4 * n + 2] = exp2_fast(fmaf(sc[4 * n + 2], c, l.x));
                p[4 * n + 3] = exp2_fast(fmaf(sc[4 * n + 3], c, l.y));
            }
            if (CAUSAL && i * TILE_Q < (j + 1) * TILE_K) {
                int key = row + j * TILE_K - i * TILE_Q - 2 * t;               // relative to this thread's first query
#pragma unroll
                for (int n = 0; n < TILE_Q / 8; ++n) {
                    if (key > 8 * n) p[4 * n] = 0.f;
                    if (key > 8 * n + 1) p[4 * n + 1] = 0.f;
                    if (key + 8 > 8 * n) p[4 * n + 2] = 0.f;
                    if (key + 8 > 8 * n + 1) p[4 * n + 3] = 0.f;
                }
            }
            if (j * TILE_K + TILE_K > job.keys) {
                bool out0 = j * TILE_K + row >= job.keys, out1 = j * TILE_K + row + 8 >= job.keys;
#pragma unroll
                for (int n = 0; n < TILE_Q / 8; ++n) {
                    if (out0) p[4 * n] = p[4 * n + 1] = 0.f;
                    if (out1) p[4 * n + 2] = p[4 * n + 3] = 0.f;
                }
            }
            u32 pr[TILE_Q / 4], ds[TILE_Q / 4];
            wgmma_wait<0>();                                                    // dp
#pragma unroll
            for (int n = 0; n < TILE_Q / 8; ++n) {
                float2 l = *(const float2*)((const char*)(st + 4 * n) + 8);
                pr[2 * n] = pack(p[4 * n], p[4 * n + 1]);
                pr[2 * n + 1] = pack(p[4 * n + 2], p[4 * n + 3]);
                ds[2 * n] = pack(p[4 * n] * (dp[4 * n] + l.x), p[4 * n + 1] * (dp[4 * n + 1] + l.y));
                ds[2 * n + 1] = pack(p[4 * n + 2] * (dp[4 * n + 2] + l.x), p[4 * n + 3] * (dp[4 * n + 3] + l.y));
            }
            u32 buffer = (nt & 1) * DS_BYTES;      // double-buffered: the other warpgroup may still multiply the last one
            // stmatrix: lane l gives the address of row l % 8 of matrix l / 8: (keys, keys + 8) x (queries, queries + 8)
            u32 me = thread_now() - 128, srow = me / 32 * 16 + (me & 15), schunk = (me >> 4) & 1, sxor = me & 7;
            u32 swrite = base + OFF_DS + srow * 128;
#pragma unroll
            for (int k = 0; k < TILE_Q / 16; ++k) {
                u32 chunk = (2 * k + schunk) & 7;
                store_matrices(swrite + buffer + (k / 4) * 16384 + ((chunk ^ sxor) << 4), ds[4 * k], ds[4 * k + 1], ds[4 * k + 2], ds[4 * k + 3]);
            }
            proxy_fence();                         // for dS, and for the fragments of dq staged by the last tile
            __syncwarp();
            if (lane == 0 && nt > 0) barrier_arrive(dq_full + 8 * wg);
            __syncwarp();
            u64 do_b = descriptor(base + OFF_DO + s * Q_BYTES, Q_PANEL), q_b = descriptor(base + OFF_Q + s * Q_BYTES, Q_PANEL);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < TILE_Q / 16; ++k) MMA_D(dvacc, pr + 4 * k, do_b + 128 * k, k ? 1 : started);
#pragma unroll
            for (int k = 0; k < TILE_Q / 16; ++k) MMA_D(dkacc, ds + 4 * k, q_b + 128 * k, k ? 1 : started);
            wgmma_commit();
            named_barrier(1, 256);
            // dq: each warpgroup computes 64 of 128 queries (D = 64) or 64 of 128 columns (D = 128)
            u64 ds_a = descriptor(base + OFF_DS + buffer + (D == 64 ? wg * 16384 : 0));
            u64 k_b = descriptor(base + OFF_K + ks * KV_BYTES + (D == 64 ? 0 : wg * KV_PANEL));
            wgmma_fence();
            MMA_Q_FIRST(dqacc, ds_a, k_b);
#pragma unroll
            for (int k = 1; k < TILE_K / 16; ++k) MMA_Q(dqacc, ds_a + 128 * k, k_b + 128 * k, 1);
            wgmma_commit();
            wgmma_wait<1>();                                                    // dv, dk
            if (lane == 0) barrier_arrive(q_empty + 8 * s);
            __syncwarp();
            int flags = now[3];
            bool ends = flags & 1, more = flags & 2;
            started = !ends;
            int s2 = (nt + 1) & 1, nkv2 = nkv + (ends ? 1 : 0), ks2 = nkv2 % KV_STAGES;
            if (KV_STAGES == 1 && ends) {
                wgmma_wait<0>();
                if (lane == 0) barrier_arrive(kv_empty);
                __syncwarp();
            }
            if (more) {
                if (ends) barrier_wait(kv_full + 8 * ks2, (nkv2 / KV_STAGES) & 1);
                barrier_wait(q_full + 8 * s2, ((nt + 1) >> 1) & 1);
            }
            // After the last tile this multiplies stale tiles, since a branch would make ptxas serialise the wgmmas.
            scores(sc, descriptor(base + OFF_K + ks2 * KV_BYTES + wg * 8192), descriptor(base + OFF_Q + s2 * Q_BYTES));
            wgmma_wait<1>();                                                    // dq
            u32 again = thread_now() - 128, stage = base + OFF_STAGE + again / 32 * 4096 + (again & 31) * 16;
            barrier_wait(dq_empty + 8 * wg, (nt & 1) ^ 1);
#pragma unroll
            for (int x = 0; x < 8; ++x) store_shared(stage + 512 * x, dqacc + 4 * x);
            if (more) barrier_wait(do_full + 8 * s2, ((nt + 1) >> 1) & 1);
            scores(dp, descriptor(base + OFF_V + ks2 * KV_BYTES + wg * 8192), descriptor(base + OFF_DO + s2 * Q_BYTES));
            wgmma_wait<1>();                       // sc; in this basic block, or ptxas serialises the wgmmas (C7514)
            if (ends) {
                int at = now[1], kv = now[2], b = kv / job.kv_heads, h = kv % job.kv_heads;
                if (KV_STAGES > 1 && lane == 0) barrier_arrive(kv_empty + 8 * ks);
                __syncwarp();
                char* pk = job.dk + (b * job.sk.batch + h * job.sk.head) * 2;
                char* pv = job.dv + (b * job.sv.batch + h * job.sv.head) * 2;
#pragma unroll
                for (int x = 0; x < D / 32; ++x) {
                    store_half(dkacc + 16 * x, job.scale, pk, job.sk.row, at * TILE_K + row, job.keys, 32 * x, job.width);
                    store_half(dvacc + 16 * x, 1.f, pv, job.sv.row, at * TILE_K + row, job.keys, 32 * x, job.width);
                }
                ++nkv;
            }
            ++nt;
            if (!more) break;
        }
        wgmma_wait<0>();
        proxy_fence();
        __syncwarp();
        if (lane == 0) barrier_arrive(dq_full + 8 * wg);
#endif
    }
}

#elif PART == 1

// Grid: blocks of 128 rows, heads. Bound by memory.
extern "C" __global__ void __launch_bounds__(256) attention_bwd_rows(const __grid_constant__ RowsJob job) {
    constexpr int LANES = D / 8, ROWS = 256 / LANES, LOADS = 128 / ROWS;
    if (INTERLEAVED) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    int bh = blockIdx.x / job.blocks, tile = blockIdx.x % job.blocks, b = bh / job.heads, h = bh % job.heads;
    int part = threadIdx.x % LANES, r0 = tile * 128 + threadIdx.x / LANES;
    const char* pdo = job.dout + (b * job.sdo.batch + h * job.sdo.head + part * 8) * 2;
    const char* po = job.out + (b * job.so.batch + h * job.so.head + part * 8) * 2;
    uint4 x[LOADS], y[LOADS];
    float l[LOADS];
#pragma unroll
    for (int u = 0; u < LOADS; ++u) {
        int r = r0 + u * ROWS;
        x[u] = y[u] = make_uint4(0, 0, 0, 0);
        l[u] = __int_as_float(0xff800000);
        if (r < job.queries) {
            if (part * 8 < job.width) {
                x[u] = *(const uint4*)(pdo + r * job.sdo.row * 2);
                y[u] = *(const uint4*)(po + r * job.so.row * 2);
            }
            if (part == 0) l[u] = job.lse[(long long)bh * job.queries + r];
        }
    }
    if (SHARED)
        for (int u = blockIdx.x * 256 + threadIdx.x; u < job.zeros; u += gridDim.x * 256) job.counts[u] = 0;
    if (!WHOLE && !SHARED) {
        const float zero[4] = {0.f, 0.f, 0.f, 0.f};
        float4* sums = (float4*)(job.sums + ((long long)bh * job.rows + tile * 128) * D);
        int count = min(128, job.rows - tile * 128) * D / 4;
        for (int u = threadIdx.x; u < count; u += 256) store_global(sums + u, zero);
    }
#pragma unroll
    for (int u = 0; u < LOADS; ++u) {
        int r = r0 + u * ROWS;
        float sum = row_product<LANES>(x[u], y[u]);
        if (part == 0 && r < job.rows) store_statistics(job.stats, (long long)bh * job.rows + r, l[u], sum);
    }
}

#else

// Grid: query tiles of all heads, the last first: it is in the L2 cache. Bound by memory.
extern "C" __global__ void __launch_bounds__(256) attention_bwd_dq(const __grid_constant__ Job job) {
    constexpr int TILE_Q = D == 64 ? 128 : 64;
    int tile = gridDim.x - 1 - blockIdx.x, bh = tile / job.nq, i = tile % job.nq, b = bh / job.heads, h = bh % job.heads;
    int wg = threadIdx.x / 128, tid = threadIdx.x & 127;
    const float4* sums = (const float4*)job.sums + ((long long)tile * 2 + wg) * 1024 + tid / 32 * 256 + (tid & 31);
    float sum[32];
#pragma unroll
    for (int x = 0; x < 8; ++x) {
        float4 v = load_global(sums + 32 * x);
        sum[4 * x] = v.x, sum[4 * x + 1] = v.y, sum[4 * x + 2] = v.z, sum[4 * x + 3] = v.w;
    }
    char* out = job.dq + (b * job.sq.batch + h * job.sq.head) * 2;
    int row = i * TILE_Q + (D == 64 ? 64 * wg : 0) + tid / 32 * 16 + (tid & 31) / 4;
#pragma unroll
    for (int set = 0; set < 2; ++set)
        store_half(sum + 16 * set, job.scale, out, job.sq.row, row, job.queries, (D == 64 ? 0 : 64 * wg) + 32 * set, job.width);
}

#endif
