// cross_entropy of long bfloat16 rows, loss and gradient in one pass, for Hopper.
//
//     loss = (1 - s) (L - x_t) + s (L - mean x)            L = log sum exp x, t the row's class, s the smoothing
//     dx   = c (exp(x - L) - (1 - s) [column = t] - s / N)  c one over the number of counted rows, or 1
//
// Source: as triton_kernels.py, whose gradient this one equals.
// Layout: rows of N logits, accessed in groups of 8 from a 16-byte boundary on. A group that belongs to the row only in
//         part is read and written element by element; in shared memory the elements outside the row are -inf.
// Grid:   BLOCKS blocks per multiprocessor; clusters of CLUSTER blocks loop over the rows. A row stays in its cluster's
//         shared memory while it is processed: the copy engine loads it, the gradient overwrites it, and the copy engine
//         stores that. Each warp owns a part of the row, so warps synchronise once per row, to combine maximum and sum:
//         in a block by a barrier, in a cluster by messages from each warp to every block (st.async).
// Bound:  memory: the logits are read once, the gradient is written once. Two exponentials per element take 60% of that.

typedef unsigned short u16;

#define LOG2_E 1.4426950408889634f
#define LOWEST -3.0e38f
#define WARPS (THREADS / 32)
#define PARTS (CLUSTER * WARPS)
// One block per row and the same alignment of all rows: a simpler form, which took 0.888 ms for 16384 rows of 50304 on an
// H200, the general one 0.968.
#define SIMPLE (CLUSTER == 1 && ALIKE)
#if SIMPLE
#define FIRST_ROW blockIdx.x
#define ROWS_APART gridDim.x
#else
#define FIRST_ROW first_row
#define ROWS_APART rows_apart
#endif
#if CLUSTER > 1
#define IN_CLUSTERS __cluster_dims__(CLUSTER, 1, 1)
#else
#define IN_CLUSTERS
#endif

extern __shared__ char dynamic[];

__device__ __forceinline__ float low_of(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_of(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ u32 larger(u32 a, u32 b) {
    u32 c;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}
__device__ __forceinline__ void store_bytes(void* dst, u32 src, u32 size_bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst), "r"(src), "r"(size_bytes)
                 : "memory");
}
__device__ __forceinline__ void join(float& peak, float& total, float other_peak, float other_total) {
    const float both = fmaxf(peak, other_peak);
    total = total * exp2_fast((peak - both) * LOG2_E) + other_total * exp2_fast((other_peak - both) * LOG2_E);
    peak = both;
}

// --- clusters. Source: PTX ISA 8.7, sections 9.7.9.13 (st.async), 9.7.13.4 (barrier.cluster), 9.7.9.23 (mapa)

__device__ __forceinline__ void cluster_meets() {
    __syncwarp();  // "aligned": lanes that went apart, as where one starts a copy, come together first
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The same address in the shared memory of another block of the cluster.
__device__ __forceinline__ u32 in_block(u32 address, u32 block) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(block));
    return there;
}
// Sends four floats to another block, whose barrier counts the 16 bytes.
__device__ __forceinline__ void send(u32 address, float a, float b, float c, float d, u32 barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                     address),
                 "f"(a), "f"(b), "f"(c), "f"(d), "r"(barrier) : "memory");
}
// barrier_wait for messages from other blocks.
__device__ __forceinline__ void cluster_barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@done bra finished;\nbra again;\nfinished:\n}" ::"r"(barrier), "r"(parity) : "memory");
}

// --- rows

// Groups per warp: the same for every row, so that a warp's next row never overlaps its neighbour's current one.
__device__ __forceinline__ int share_of(const u16* x, int N, long long x_stride) {
    const int most = x_stride % 8 ? N + 14 : N + (int)((u64)x & 15) / 2 + 7;
    return (most / 8 + PARTS - 1) / PARTS;
}

// A warp's part of a row: groups [first, last), of which [from, to) are whole.
struct Part {
    const u16* row;  // start of the first group: lead elements before the row
    int lead, end;   // the row is elements [lead, end)
    int first, last, from, to;
};

__device__ __forceinline__ Part part_of(const u16* x, int N, int given, int which) {
    Part part;
    part.lead = (int)((u64)x & 15) / 2;
    part.row = x - part.lead;
    part.end = part.lead + N;
    const int groups = (part.end + 7) / 8, share = SIMPLE ? (groups + WARPS - 1) / WARPS : given;
    part.first = min(which * share, groups);
    part.last = min(part.first + share, groups);
    part.from = max(part.first, part.lead ? 1 : 0);
    part.to = max(part.from, min(part.last, part.end / 8));
    return part;
}

// Loads a part: whole groups by the copy engine, the others by one lane.
__device__ __forceinline__ void fetch(const Part& part, u32 buffer, u32 barrier) {
    if (lane_id() == 0) {
        const u32 size_bytes = 16 * (part.to - part.from);
        barrier_expect(barrier, size_bytes);
        if (size_bytes) load_bytes(buffer + 16 * part.from, part.row + 8 * part.from, size_bytes, barrier);
        for (int group = part.first; group < part.last; ++group) {
            if (group >= part.from && group < part.to) {
                group = part.to - 1;
                continue;
            }
            for (int i = 0; i < 8; ++i) {
                const int at = 8 * group + i;
                const u16 x = at >= part.lead && at < part.end ? part.row[at] : (u16)0xff80;  // -inf
                asm volatile("st.shared.u16 [%0], %1;" ::"r"(buffer + 2 * at), "h"(x) : "memory");
            }
        }
    }
    __syncwarp();
}

extern "C" __global__ void IN_CLUSTERS __launch_bounds__(THREADS, BLOCKS)
    cross_entropy_row(const u16* x, const long long* targets, float* losses, float* statistics, u16* dx,
                      const int* counts, int M, int N, long long x_stride, long long dx_stride, long long ignore_index,
                      float smoothing) {
#if SIMPLE
    __shared__ float peaks[2][WARPS], totals[2][WARPS], sums[2][WARPS];
#else
    __shared__ float4 met[2][PARTS];  // per part: maximum, sum of exponentials, sum, and for the first part the class's logit
#endif
    constexpr int BARRIERS = SIMPLE ? WARPS : WARPS + 2;
    __shared__ u64 barriers[BARRIERS];
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = lane_id();
#if SIMPLE
    constexpr int rank = 0, share = 0;
    const int which = warp;
    const u32 buffer = shared_address(dynamic);
#else
    const int rank = blockIdx.x % CLUSTER, rows_apart = gridDim.x / CLUSTER, first_row = blockIdx.x / CLUSTER;
    const int share = share_of(x, N, x_stride), which = rank * WARPS + warp;
    const u32 buffer = shared_address(dynamic) - 16 * rank * WARPS * share;
#endif
    const u32 barrier = shared_address(&barriers[warp]);
    if (threadIdx.x < BARRIERS) barrier_init(shared_address(&barriers[threadIdx.x]), 1);
    if (threadIdx.x < BARRIERS) barriers_ready();
    if (CLUSTER > 1) {
        cluster_meets();
    } else {
        __syncthreads();
    }

    float c = 1.0f;
    if (MEAN) {
        int counted = 0;
        for (int i = lane; i < COUNTS; i += 32) counted += counts[i];
        c = 1.0f / (float)__reduce_add_sync(~0u, counted);
    }
#if SIMPLE
    u32 phase = 0;
    int turn = 0;
#else
    u32 phase = 0, turn = 0;  // turn: the half of met; in a cluster turn / 2 is the parity of its barrier
#endif
    long long target = targets[FIRST_ROW];
    if (target != ignore_index) fetch(part_of(x + FIRST_ROW * x_stride, N, share, which), buffer, barrier);
    for (int row = FIRST_ROW; row < M; row += ROWS_APART) {
        const int following = row + ROWS_APART;
        const long long next_target = following < M ? targets[following] : ignore_index;
        u16* out = dx + row * dx_stride;
        if (target == ignore_index) {
            for (int i = rank * THREADS + threadIdx.x; i < N; i += CLUSTER * THREADS) out[i] = 0;
            if (rank == 0 && threadIdx.x == 0) {
                losses[row] = 0.0f;
                statistics[row] = 0.0f;
                statistics[M + row] = 1.0f;
            }
        } else {
            const Part part = part_of(x + row * x_stride, N, share, which);
            const bool in_range = target >= 0 && target < N;
            float at_target = 0.0f;
            if ((SIMPLE ? threadIdx.x == 0 : which == 0) && in_range) at_target = __uint_as_float((u32)part.row[part.lead + target] << 16);
            barrier_wait(barrier, phase);
            phase ^= 1;
            float peak = LOWEST, total = 0.0f, sum = 0.0f;
#pragma unroll 2
            for (int group = part.first + lane; group < part.last; group += 32) {
                int w[4];
                load_words(buffer + 16 * group, w[0], w[1], w[2], w[3]);
                const u32 pair = larger(larger(w[0], w[1]), larger(w[2], w[3]));
                const float largest = fmaxf(low_of(pair), high_of(pair));
                if (largest > peak) {
                    total *= exp2_fast((peak - largest) * LOG2_E);
                    peak = largest;
                }
                float some = 0.0f;
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    total += exp2_fast((low_of(w[i]) - peak) * LOG2_E);
                    some += exp2_fast((high_of(w[i]) - peak) * LOG2_E);
                }
                total += some;
                if (SMOOTH) {
                    for (int i = 0; i < 8; ++i) {
                        const int at = 8 * group + i;
                        const float one = i % 2 ? high_of(w[i / 2]) : low_of(w[i / 2]);
                        sum += at >= part.lead && at < part.end ? one : 0.0f;
                    }
                }
            }
#pragma unroll
            for (int other = 16; other; other /= 2) {
                const float its_peak = __shfl_xor_sync(~0u, peak, other);
                const float its_total = __shfl_xor_sync(~0u, total, other);
                join(peak, total, its_peak, its_total);
                if (SMOOTH) sum += __shfl_xor_sync(~0u, sum, other);
            }
#if SIMPLE
            if (lane == 0) {
                peaks[turn][warp] = peak;
                totals[turn][warp] = total;
                sums[turn][warp] = sum;
            }
            __syncthreads();
            peak = peaks[turn][lane % WARPS];
            total = totals[turn][lane % WARPS];
            sum = sums[turn][lane % WARPS];
#else
            // The class's logit is sent too: a cluster's gradients could overwrite it before it is read.
            if (CLUSTER > 1) {
                const u32 all_met = shared_address(&barriers[WARPS + (turn & 1)]);
                if (threadIdx.x == 0) barrier_expect(all_met, 16 * PARTS);
                if (lane < CLUSTER)
                    send(in_block(shared_address(&met[turn & 1][which]), lane), peak, total, sum, at_target,
                         in_block(all_met, lane));
                cluster_barrier_wait(all_met, turn >> 1);
            } else {
                if (lane == 0) met[turn & 1][warp] = make_float4(peak, total, sum, at_target);
                __syncthreads();
            }
            const float4 one_part = met[turn & 1][lane % PARTS];
            peak = one_part.x;
            total = one_part.y;
            sum = one_part.z;
#pragma unroll
            for (int part_at = 32; part_at < PARTS; part_at += 32) {
                const float4 another = met[turn & 1][part_at + lane];
                join(peak, total, another.x, another.y);
                sum += another.z;
            }
#endif
#pragma unroll
            for (int other = min(PARTS, 32) / 2; other; other /= 2) {
                const float its_peak = __shfl_xor_sync(~0u, peak, other);
                const float its_total = __shfl_xor_sync(~0u, total, other);
                join(peak, total, its_peak, its_total);
                if (SMOOTH) sum += __shfl_xor_sync(~0u, sum, other);
            }
            turn = SIMPLE ? turn ^ 1 : (turn + 1) & 3;
            const bool fine = in_range && peak < __int_as_float(0x7f800000);
            const float of_row = fine ? c : __int_as_float(0x7fffffff);
            const float scale = of_row * (1.0f / total);
            if (rank == 0 && threadIdx.x == 0) {  // owner of the first part, with the class's logit
#if !SIMPLE
                at_target = one_part.w;
#endif
                float loss = (peak - at_target) + logf(total);
                if (SMOOTH) loss = (1.0f - smoothing) * loss + smoothing * ((peak - sum / N) + logf(total));
                losses[row] = fine ? loss : __int_as_float(0x7fffffff);
                statistics[row] = peak;
                statistics[M + row] = 1.0f / total;
            }
            const float everywhere = SMOOTH ? of_row * smoothing / N : 0.0f;
            const float hit = of_row * (SMOOTH ? 1.0f - smoothing : 1.0f);
            const int hit_at = in_range ? part.lead + (int)target : -1;
            u16* out_row = out - part.lead;
#pragma unroll 2
            for (int group = part.first + lane; group < part.last; group += 32) {
                int w[4];
                load_words(buffer + 16 * group, w[0], w[1], w[2], w[3]);
                float g[8];
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    const float one = i % 2 ? high_of(w[i / 2]) : low_of(w[i / 2]);
                    g[i] = exp2_fast((one - peak) * LOG2_E) * scale - everywhere;
                }
                if (group == hit_at >> 3) {
#pragma unroll
                    for (int i = 0; i < 8; ++i) g[i] -= i == (hit_at & 7) ? hit : 0.0f;
                }
#pragma unroll
                for (int i = 0; i < 4; ++i) w[i] = pack(g[2 * i], g[2 * i + 1]);
                if (group >= part.from && group < part.to) {
                    store_words(buffer + 16 * group, w[0], w[1], w[2], w[3]);
                } else {
#pragma unroll
                    for (int i = 0; i < 8; ++i) {
                        const int at = 8 * group + i;
                        if (at >= part.lead && at < part.end) out_row[at] = (u16)((u32)w[i / 2] >> (i % 2 ? 16 : 0));
                    }
                }
            }
            proxy_fence();
            __syncwarp();
            if (lane == 0 && part.to > part.from) {
                store_bytes(out_row + 8 * part.from, buffer + 16 * part.from, 16 * (part.to - part.from));
                store_commit();
            }
        }
        if (next_target != ignore_index) {
            if (lane == 0) store_wait_read<0>();
            __syncwarp();
            fetch(part_of(x + following * x_stride, N, share, which), buffer, barrier);
        }
        target = next_target;
    }
    if (lane == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    if (CLUSTER > 1) cluster_meets();  // a block's shared memory must outlive the others' last messages
}
