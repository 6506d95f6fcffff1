/* Multi-scalar multiplication, third part: from the sums of segments to one point per window. The curve's point.h, with COORD
 * replaced, precedes this file. Points are in XYZZ coordinates, four per point, unless stated otherwise.
 *
 *   msm_combine   the sums of heavy buckets, from the sums of their segments
 *   msm_reduce    for each window the sum of b times bucket b, in one launch or two
 *
 * Bound by arithmetic: about 45 products per bucket; with few buckets by its latency, about 60 sequential additions. */

/* A thread's point in local (shared) memory. The padding makes the stride an odd number of words, so that a warp's accesses go
 * to different banks. */
typedef struct {
    COORD_xyzz point;
    u32 gap;
} COORD_slot;

/* The sum over the threads of a block, in the first thread. */
#define COORD_SUM_OF_BLOCK(value)                                                                      \
    tile[thread].point = value;                                                                        \
    for (i32 width = acl_local_size() / 2; width > 0; width /= 2) {                                    \
        acl_barrier();                                                                                 \
        if (thread < width) {                                                                          \
            COORD_xyzz other = tile[thread + width].point;                                             \
            COORD_xyzz_add(&value, &other);                                                            \
            tile[thread].point = value;                                                                \
        }                                                                                              \
    }

/* Grid: `groups` blocks of a power of two threads. A thread sums a heavy bucket of few segments, blocks one of many: with fewer
 * lines than blocks each sums a share, in place of its first segment, and a second launch, `again`, the shares. */
ACL_KERNEL ACL_BLOCK(MSM_REDUCE_BLOCK) void msm_combine(ACL_GLOBAL const u32 *heavy, ACL_GLOBAL const u32 *counts,
                                                        ACL_GLOBAL u64 *sums, i64 keys, i64 groups, i32 again) {
    ACL_LOCAL COORD_slot tile[MSM_REDUCE_BLOCK];
    i32 thread = acl_local_id();
    i64 lines = counts[keys + MSM_HEAVY];
    i64 shares = lines && lines < groups ? groups / lines : 1;
    if (again && shares == 1) {
        return;
    }
#pragma unroll 1
    for (i64 line = acl_global_id(); line < lines && !again; line += groups * acl_local_size()) {
        u32 begin = heavy[3 * line + 1], parts = heavy[3 * line + 2];
        if (parts <= MSM_FEW) {
            COORD_xyzz sum = COORD_xyzz_load(sums, begin);
#pragma unroll 1
            for (u32 part = 1; part < parts; part++) {
                COORD_xyzz other = COORD_xyzz_load(sums, (i64)begin + part);
                COORD_xyzz_add(&sum, &other);
            }
            COORD_xyzz_store(sums, heavy[3 * line], sum);
        }
    }
#pragma unroll 1
    for (i64 item = acl_group_id(); item < (again ? lines : lines * shares); item += groups) {
        i64 line = again ? item : item / shares;
        u32 begin = heavy[3 * line + 1], parts = heavy[3 * line + 2];
        u32 each = (parts + (u32)shares - 1) / (u32)shares;
        each = each < (u32)acl_local_size() ? (u32)acl_local_size() : each;
        u32 low = again ? 0 : (u32)(item % shares) * each, high = again || low + each > parts ? parts : low + each;
        u32 step = again ? each : 1;
        if (parts <= MSM_FEW || low >= high) {
            continue;
        }
        COORD_xyzz sum = COORD_xyzz_infinity();
#pragma unroll 1
        for (u32 part = low + thread * step; part < high; part += acl_local_size() * step) {
            COORD_xyzz other = COORD_xyzz_load(sums, (i64)begin + part);
            COORD_xyzz_add(&sum, &other);
        }
        COORD_SUM_OF_BLOCK(sum)
        if (thread == 0) {
            COORD_xyzz_store(sums, again || shares == 1 ? heavy[3 * line] : (i64)begin + low, sum);
        }
        acl_barrier();
    }
}

/* Reduce `items` pairs (P_i, R_i) per window, whose value is sum P_i + 2^shift sum i R_i, to one pair per block: the value of
 * the block's items, with i counted from its first one, and their sum R_i. With P_i = R_i = bucket i + 1 and shift 0 the value
 * is the sum of (i + 1) times bucket i + 1. The last launch, of one block per window, writes the value only, in projective
 * coordinates (x = X/Z, y = Y/Z, infinity (0 : 1 : 0)), three per point, for the host.
 *
 * Grid: `blocks` blocks per window, of a power of two threads, 2^log_items items per thread. Running sums from the thread's
 * last item give the weights i within the thread; a scan over the threads in local memory gives the weights of the threads
 * within the block, in units of 2^log_items items. */
ACL_KERNEL ACL_BLOCK(MSM_REDUCE_BLOCK) void msm_reduce(ACL_GLOBAL const u64 *plain, ACL_GLOBAL const u64 *weighted,
                                                       ACL_GLOBAL u64 *next_plain, ACL_GLOBAL u64 *next_weighted, i64 items,
                                                       i64 blocks, i32 log_items, i32 shift, i32 last) {
    ACL_LOCAL COORD_slot tile[MSM_REDUCE_BLOCK];
    i32 thread = acl_local_id();
    i64 window = acl_group_id() / blocks;
    i64 low = (acl_group_id() % blocks * acl_local_size() + thread) << log_items;
    i64 high = low + ((i64)1 << log_items) < items ? low + ((i64)1 << log_items) : items;
    COORD_xyzz inside = COORD_xyzz_infinity(), run = inside, sum = inside;
#pragma unroll 1
    for (i64 i = high - 1; i >= low; i--) {
        COORD_xyzz_add(&inside, &run);
        COORD_xyzz item = COORD_xyzz_load(weighted, window * items + i);
        COORD_xyzz_add(&run, &item);
        if (plain != weighted) {
            item = COORD_xyzz_load(plain, window * items + i);
            COORD_xyzz_add(&sum, &item);
        }
    }
    if (plain == weighted) {
        sum = run;
    }
    tile[thread].point = run;
    for (i32 step = 1; step < acl_local_size(); step *= 2) {
        acl_barrier();
        if (thread + step < acl_local_size()) {
            COORD_xyzz other = tile[thread + step].point;
            COORD_xyzz_add(&run, &other);
        }
        acl_barrier();
        tile[thread].point = run;
    }
    acl_barrier();
    COORD_xyzz value = thread ? run : COORD_xyzz_infinity();
#pragma unroll 1
    for (i32 k = 0; k < log_items; k++) {
        COORD_xyzz_double(&value);
    }
    COORD_xyzz_add(&value, &inside);
#pragma unroll 1
    for (i32 k = 0; k < shift; k++) {
        COORD_xyzz_double(&value);
    }
    COORD_xyzz_add(&value, &sum);
    COORD_SUM_OF_BLOCK(value)
    if (thread == 0 && last) {
        COORD_store(next_plain, 3 * acl_group_id(), COORD_MUL(value.x, value.zzz));
        COORD y = COORD_select(COORD_is_zero(value.zz), COORD_one(), COORD_MUL(value.y, value.zz));
        COORD_store(next_plain, 3 * acl_group_id() + 1, y);
        COORD_store(next_plain, 3 * acl_group_id() + 2, COORD_MUL(value.zz, value.zzz));
    } else if (thread == 0) {
        COORD_xyzz_store(next_plain, acl_group_id(), value);
        COORD_xyzz_store(next_weighted, acl_group_id(), run);
    }
}
