/* Multi-scalar multiplication, first part: sort points by bucket. No curve arithmetic.
 *
 * A scalar is windows digits of c bits, -2^(c - 1) < d <= 2^(c - 1). An entry is the digit of one point in a window, n per
 * window; if it is not 0 the point, or its negative, belongs to bucket |d| of the window, whose key is w buckets + |d| - 1 with
 * buckets = 2^(c - 1). If the multiples 2^(c w) of all points are stored, `stride` points per window, all windows share one set
 * of buckets: the distance `spread` between the keys of two windows is then 0, otherwise `buckets`.
 *
 *   msm_digits     digits[w n + i] = |d| | sign << 31
 *   msm_rank       counts[key] = number of points in a bucket; ranks[entry] = number of those before it, in any order
 *   msm_tiles      sums of units over tiles of keys, and the number of segments of each length
 *   msm_scan       exclusive prefix sums of both
 *   msm_segments   counts[key] = position of the bucket's first point; the segments, longest first; padding
 *   msm_scatter    sorted[counts[key] + rank] = i + w stride | sign << 31
 *
 * With rounds of affine.c, 2^rounds entries of a bucket are a unit, which the rounds reduce to one point; entries MSM_NONE
 * fill the last unit. Without rounds a unit is an entry.
 *
 * A segment is at most `length` units of one bucket, summed by one thread: (first unit, units, index of the sum). A bucket of
 * one segment has its sum at its key. A heavy bucket, of several, has a partial sum per segment after all buckets, and a line
 * (key, first partial sum, number of them) in `heavy`. The sums of empty buckets, infinity, are written here.
 *
 * In memory: counts has the keys, then MSM_COUNTERS numbers: at l the number of segments of l units, later the index of the
 * next of them; at MSM_SEGMENTS, MSM_HEAVY, MSM_PARTIALS and MSM_UNITS the numbers of segments, heavy buckets, partial sums and
 * units.
 * Bound by memory: 28 bytes and an atomic addition at a random address per entry. msm_rank counts one frequent digit per block
 * separately, that of the first thread; if two to about a hundred digits make up most entries, the other additions contend for
 * few counters. For large sums bins.c replaces msm_rank and msm_scatter. prefix_sum.h precedes this file. */

/* Units of a number of entries. */
ACL_DEVICE u32 msm_units(u32 entries, i32 rounds) {
    return (u32)(((u64)entries + ((u64)1 << rounds) - 1) >> rounds);
}

/* Grid: any, `threads` threads in all. Also clears counts, which has `zeros` numbers. */
ACL_KERNEL ACL_BLOCK(MSM_BLOCK) void msm_digits(ACL_GLOBAL const u64 *scalars, ACL_GLOBAL u32 *digits, ACL_GLOBAL u32 *counts,
                                                i64 first, i64 n, i32 c, i32 windows, i64 zeros, i64 threads) {
    for (i64 i = acl_global_id(); i < zeros; i += threads) {
        counts[i] = 0;
    }
    for (i64 i = acl_global_id(); i < n; i += threads) {
        ACL_GLOBAL const u64 *scalar = scalars + 4 * (first + i);
        u64 a = scalar[0], b = scalar[1], d = scalar[2], e = scalar[3];
        u32 carry = 0;
        for (i32 w = 0; w < windows; w++) {
            u32 digit = ((u32)a & (((u32)1 << c) - 1)) + carry;
            carry = digit > (u32)1 << (c - 1);
            digits[w * n + i] = carry ? (((u32)1 << c) - digit) | ((u32)(digit < (u32)1 << c) << 31) : digit;
            a = a >> c | b << (64 - c);
            b = b >> c | d << (64 - c);
            d = d >> c | e << (64 - c);
            e >>= c;
        }
    }
}

/* Grid: `blocks` blocks per window, one thread per MSM_EACH entries, a block's threads apart, for as many atomic additions in
 * flight. The counter of a digit of many scalars would be the bottleneck, so a block counts one of its digits in local memory
 * and adds the count once. */
ACL_KERNEL ACL_BLOCK(MSM_BLOCK) void msm_rank(ACL_GLOBAL const u32 *digits, ACL_GLOBAL u32 *ranks, ACL_GLOBAL u32 *counts,
                                              i64 n, i64 blocks, i64 spread) {
    ACL_LOCAL u32 common, claims, times, before;
    i32 thread = acl_local_id(), threads = acl_local_size();
    i64 w = acl_group_id() / blocks;
    i64 first = acl_group_id() % blocks * threads * MSM_EACH + thread;
    u32 buckets[MSM_EACH], found[MSM_EACH];
#pragma unroll
    for (i32 k = 0; k < MSM_EACH; k++) {
        i64 i = first + k * threads;
        buckets[k] = i < n ? digits[w * n + i] & 0x7fffffff : 0;
    }
    if (thread == 0) {
        common = 0;
        claims = 0;
        times = 0;
    }
    acl_barrier();
    if (thread % 32 == 0 && buckets[0] && acl_atomic_add_u32(&claims, 1) == 0) {
        common = buckets[0]; /* first come, from one thread in 32 so that few contend for the counter */
    }
    acl_barrier();
#pragma unroll
    for (i32 k = 0; k < MSM_EACH; k++) {
        if (buckets[k] && buckets[k] == common) {
            found[k] = acl_atomic_add_u32(&times, 1);
        } else if (buckets[k]) {
            found[k] = acl_atomic_add_u32(&counts[w * spread + buckets[k] - 1], 1);
        }
    }
    acl_barrier();
    if (thread == 0 && times) {
        before = acl_atomic_add_u32(&counts[w * spread + common - 1], times);
    }
    acl_barrier();
#pragma unroll
    for (i32 k = 0; k < MSM_EACH; k++) {
        if (buckets[k]) {
            ranks[w * n + first + k * threads] = buckets[k] == common ? before + found[k] : found[k];
        }
    }
}

/* Grid: one block per tile of MSM_TILE keys. */
ACL_KERNEL ACL_BLOCK(MSM_BLOCK) void msm_tiles(ACL_GLOBAL u32 *counts, ACL_GLOBAL u32 *tiles, i64 keys, i32 length,
                                               i32 rounds) {
    ACL_LOCAL u32 of_length[MSM_LENGTH + 1];
    ACL_LOCAL u32 total;
    i32 thread = acl_local_id();
    for (i32 l = thread; l <= length; l += acl_local_size()) {
        of_length[l] = 0;
    }
    if (thread == 0) {
        total = 0;
    }
    acl_barrier();
    u32 sum = 0;
    for (i32 k = thread; k < MSM_TILE; k += acl_local_size()) {
        i64 key = acl_group_id() * MSM_TILE + k;
        u32 count = key < keys ? msm_units(counts[key], rounds) : 0;
        sum += count;
        if (count >= (u32)length) {
            acl_atomic_add_u32(&of_length[length], count / length);
        }
        if (count % length) {
            acl_atomic_add_u32(&of_length[count % length], 1);
        }
    }
    acl_atomic_add_u32(&total, sum);
    acl_barrier();
    for (i32 l = thread; l <= length; l += acl_local_size()) {
        if (of_length[l]) {
            acl_atomic_add_u32(&counts[keys + l], of_length[l]);
        }
    }
    if (thread == 0) {
        tiles[acl_group_id()] = total;
    }
}

/* Grid: one block. */
ACL_KERNEL ACL_BLOCK(MSM_BLOCK) void msm_scan(ACL_GLOBAL u32 *counts, ACL_GLOBAL u32 *tiles, i64 keys, i64 count, i32 length) {
    ACL_LOCAL u32 tile[MSM_BLOCK];
    ACL_LOCAL u32 of_length[MSM_LENGTH + 1];
    i32 thread = acl_local_id();
    i64 per_thread = (count + acl_local_size() - 1) / acl_local_size();
    i64 end = (thread + 1) * per_thread < count ? (thread + 1) * per_thread : count;
    u32 sum = 0;
    for (i64 k = thread * per_thread; k < end; k++) {
        sum += tiles[k];
    }
    for (i32 l = thread; l <= length; l += acl_local_size()) {
        of_length[l] = counts[keys + l];
    }
    MSM_BEFORE(tile, sum, before)
    if (thread == acl_local_size() - 1) {
        counts[keys + MSM_UNITS] = tile[thread];
    }
    for (i64 k = thread * per_thread; k < end; k++) {
        u32 here = tiles[k];
        tiles[k] = before;
        before += here;
    }
    if (thread == 0) {
        u32 longer = 0;
        for (i32 l = length; l > 0; l--) {
            counts[keys + l] = longer;
            longer += of_length[l];
        }
        counts[keys + MSM_SEGMENTS] = longer;
    }
}

#define MSM_SEGMENT(line, first_unit, units, sum)                                                      \
    {                                                                                                  \
        i64 of_line = 3 * (i64)(line);                                                                 \
        segments[of_line] = first_unit;                                                                \
        segments[of_line + 1] = units;                                                                 \
        segments[of_line + 2] = sum;                                                                   \
    }
#define MSM_LONG 64
#define MSM_LONG_LISTS 32

/* Grid: one block per tile, as msm_tiles; a thread has consecutive keys. A point of `sums` has `words` words. A block together
 * writes the empty buckets' sums, and the segments of MSM_LONG_LISTS buckets of more than MSM_LONG, each of which would take a
 * thread as long as all others. */
ACL_KERNEL ACL_BLOCK(MSM_BLOCK) void msm_segments(ACL_GLOBAL u32 *counts, ACL_GLOBAL const u32 *tiles, ACL_GLOBAL u32 *segments,
                                                  ACL_GLOBAL u32 *heavy, ACL_GLOBAL u64 *sums, ACL_GLOBAL u32 *sorted,
                                                  i64 keys, i32 length, i32 words, i32 rounds) {
    ACL_LOCAL u32 tile[MSM_BLOCK];
    ACL_LOCAL u32 of_length[MSM_LENGTH + 1];
    ACL_LOCAL u32 empties, empty[MSM_TILE];
    ACL_LOCAL u32 longs, long_begin[MSM_LONG_LISTS], long_full[MSM_LONG_LISTS], long_target[MSM_LONG_LISTS], long_at[MSM_LONG_LISTS];
    i32 thread = acl_local_id();
    i32 per_thread = MSM_TILE / acl_local_size();
    i64 first = acl_group_id() * MSM_TILE + (i64)thread * per_thread;
    if (thread == 0) {
        longs = 0;
        empties = 0;
    }
    for (i32 l = thread; l <= length; l += acl_local_size()) {
        of_length[l] = 0;
    }
    u32 sum = 0;
    for (i64 key = first; key < first + per_thread && key < keys; key++) {
        sum += msm_units(counts[key], rounds);
    }
    MSM_BEFORE(tile, sum, before)
    /* The block's number of segments of each length, replaced by the index of its first segment of that length. */
    for (i64 key = first; key < first + per_thread && key < keys; key++) {
        u32 count = msm_units(counts[key], rounds);
        if (count >= (u32)length) {
            acl_atomic_add_u32(&of_length[length], count / length);
        }
        if (count % length) {
            acl_atomic_add_u32(&of_length[count % length], 1);
        }
    }
    acl_barrier();
    for (i32 l = thread + 1; l <= length; l += acl_local_size()) {
        of_length[l] = of_length[l] ? acl_atomic_add_u32(&counts[keys + l], of_length[l]) : 0;
    }
    acl_barrier();
    u32 begin = tiles[acl_group_id()] + before;
    for (i64 key = first; key < first + per_thread && key < keys; key++) {
        u32 count = msm_units(counts[key], rounds);
        i64 position = (i64)begin << rounds;
        for (i64 k = counts[key]; k < (i64)count << rounds; k++) {
            sorted[position + k] = MSM_NONE;
        }
        u32 full = count / length, rest = count % length, parts = full + (rest > 0);
        u32 target = (u32)key;
        counts[key] = (u32)position;
        empty[key - (i64)acl_group_id() * MSM_TILE] = parts == 0;
        if (parts == 0) {
            empties = 1;
        }
        if (parts > 1) {
            u32 partial = acl_atomic_add_u32(&counts[keys + MSM_PARTIALS], parts);
            u32 line = acl_atomic_add_u32(&counts[keys + MSM_HEAVY], 1);
            target = (u32)keys + partial;
            heavy[3 * (i64)line] = (u32)key;
            heavy[3 * (i64)line + 1] = target;
            heavy[3 * (i64)line + 2] = parts;
        }
        u32 at = full ? acl_atomic_add_u32(&of_length[length], full) : 0;
        u32 list = full > MSM_LONG ? acl_atomic_add_u32(&longs, 1) : MSM_LONG_LISTS;
        if (list < MSM_LONG_LISTS) {
            long_begin[list] = begin;
            long_full[list] = full;
            long_target[list] = target;
            long_at[list] = at;
        }
        for (u32 part = 0; list >= MSM_LONG_LISTS && part < full; part++) {
            MSM_SEGMENT(at + part, begin + part * length, length, target + part)
        }
        if (rest) {
            MSM_SEGMENT(acl_atomic_add_u32(&of_length[rest], 1), begin + full * length, rest, target + full)
        }
        begin += count;
    }
    acl_barrier();
    for (u32 list = 0; list < longs && list < MSM_LONG_LISTS; list++) {
        for (u32 part = thread; part < long_full[list]; part += acl_local_size()) {
            MSM_SEGMENT(long_at[list] + part, long_begin[list] + part * length, length, long_target[list] + part)
        }
    }
    i64 tile_key = (i64)acl_group_id() * MSM_TILE;
    i32 tile_keys = keys - tile_key < MSM_TILE ? (i32)(keys - tile_key) : MSM_TILE;
    for (i32 k = thread; empties && k < tile_keys * words; k += acl_local_size()) {
        if (empty[k / words]) {
            sums[tile_key * words + k] = 0;
        }
    }
}

/* Grid: as msm_rank. */
ACL_KERNEL ACL_BLOCK(MSM_BLOCK) void msm_scatter(ACL_GLOBAL const u32 *digits, ACL_GLOBAL const u32 *ranks,
                                                 ACL_GLOBAL const u32 *counts, ACL_GLOBAL u32 *sorted, i64 n, i64 blocks,
                                                 i64 spread, i64 stride) {
    i32 threads = acl_local_size();
    i64 w = acl_group_id() / blocks;
    i64 first = acl_group_id() % blocks * threads * MSM_EACH + acl_local_id();
#pragma unroll
    for (i32 k = 0; k < MSM_EACH; k++) {
        i64 i = first + k * threads;
        u32 digit = i < n ? digits[w * n + i] : 0;
        u32 bucket = digit & 0x7fffffff;
        if (bucket) {
            sorted[(i64)counts[w * spread + bucket - 1] + ranks[w * n + i]] = (u32)(i + w * stride) | (digit & 0x80000000);
        }
    }
}
