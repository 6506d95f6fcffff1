/* Multi-scalar multiplication, the entries of large sums by bucket: instead of msm_rank and msm_scatter in sort.c, which
 * describes digits, entries and counts. A bin is 2^bin_bits consecutive keys. prefix_sum.h precedes this file.
 *
 *   msm_count          number of entries of each bin
 *   msm_pieces         position of each bin's first entry; the pieces, of at most MSM_PIECE entries of a bin
 *   msm_partition      the entries by bin, each with its key in the bin
 *   msm_rank_bins      counts[key] = number of points in a bucket; for each piece and key the number in other pieces before it
 *   msm_scatter_bins   sorted[counts[key] + rank] = i + w stride | sign << 31
 *
 * The second half of the sort, in pieces, follows msm_segments. Counters are in local memory, and a block orders its entries
 * there before it writes them, so that it writes runs. For 63 million entries on an H100 msm_rank and msm_scatter take 3.0 ms,
 * these kernels 1.2 ms; writes of single entries to neighbouring addresses, without that order, take as long as to random ones.
 *
 * In memory: bins, the end of counts, has the number of entries of each bin, later the bin's position, in the end its end;
 * then the number of pieces. A piece is (bin, first entry). binned[position] = key in the bin << 32 | entry.
 * Bound by memory: 44 bytes per entry; 16 bytes of them in runs of about 8 entries. */

#define MSM_NO_ENTRY (~(u64)0)
#define MSM_IS_ENTRY(entry) ((u32)((entry) >> 32) != MSM_NONE)

/* size[g] = number of a block's entries of group g, a bin or a bucket, g < groups; ranks[k] = number of those counted before
 * found[k], whose group is MSM_GROUP_OF, or MSM_NO_ENTRY; and `filled`, whether there is an entry. A thread adds all its entries of
 * one group at once: if most entries are of few groups, as those of equal scalars are, single additions contend for counters. */
#define MSM_COUNT(groups)                                                                              \
    ACL_LOCAL u32 size[groups];                                                                        \
    ACL_LOCAL u32 filled;                                                                              \
    u32 ranks[MSM_EACH], common = MSM_NONE, before_thread = 0;                                         \
    for (i32 k = thread; k < (groups); k += MSM_BLOCK) {                                               \
        size[k] = 0;                                                                                   \
    }                                                                                                  \
    if (thread == 0) {                                                                                 \
        filled = 0;                                                                                    \
    }                                                                                                  \
    acl_barrier();                                                                                     \
    for (i32 k = 0; k < MSM_EACH; k++) {                                                               \
        common = MSM_IS_ENTRY(found[k]) ? (u32)(MSM_GROUP_OF(found[k])) : common;                        \
    }                                                                                                  \
    for (i32 k = 0; k < MSM_EACH; k++) {                                                               \
        before_thread += (u32)(MSM_GROUP_OF(found[k])) == common;                                      \
    }                                                                                                  \
    if (common != MSM_NONE) {                                                                          \
        filled = 1;                                                                                    \
        before_thread = acl_atomic_add_u32(&size[common], before_thread);                              \
    }                                                                                                  \
    for (i32 k = 0; k < MSM_EACH; k++) {                                                               \
        u32 group = (u32)(MSM_GROUP_OF(found[k]));                                                     \
        if (group == common) {                                                                         \
            ranks[k] = before_thread++;                                                                \
        } else if (MSM_IS_ENTRY(found[k])) {                                                            \
            ranks[k] = acl_atomic_add_u32(&size[group], 1);                                            \
        }                                                                                              \
    }                                                                                                  \
    acl_barrier();

/* The entries of a block of digits, MSM_EACH per thread, a block's threads apart, each with its key from that of the first `bin` of
 * the window. Grid: `windows` times as many blocks as hold n entries. Neighbouring blocks are of different windows, so that fewer
 * add to one bin at once. */
#define MSM_OF_DIGITS(stride)                                                                          \
    i32 thread = acl_local_id();                                                                       \
    i64 w = acl_group_id() % windows;                                                                  \
    i64 first = acl_group_id() / windows * MSM_PIECE + thread;                                         \
    i64 bin = w * spread >> bin_bits, key = w * spread - 1 - (bin << bin_bits);                        \
    u64 found[MSM_EACH];                                                                               \
    for (i32 k = 0; k < MSM_EACH; k++) {                                                               \
        i64 i = first + k * MSM_BLOCK;                                                                 \
        u32 digit = i < n ? digits[w * n + i] : 0;                                                     \
        u32 bucket = digit & 0x7fffffff;                                                               \
        u32 entry = (u32)(i + w * (stride)) | (digit & 0x80000000);                                    \
        found[k] = bucket ? (u64)(key + bucket) << 32 | entry : MSM_NO_ENTRY;                          \
    }                                                                                                  \
    MSM_COUNT(MSM_BINS)

#define MSM_GROUP_OF(entry) ((entry) >> 32 >> bin_bits)

ACL_KERNEL ACL_BLOCK(MSM_BLOCK) void msm_count(ACL_GLOBAL const u32 *digits, ACL_GLOBAL u32 *counts, i64 bins, i64 n, i64 windows,
                                               i64 spread, i32 bin_bits) {
    MSM_OF_DIGITS(0)
    for (i32 k = thread; filled && k < MSM_BINS; k += MSM_BLOCK) {
        if (size[k]) {
            acl_atomic_add_u32(&counts[bins + bin + k], size[k]);
        }
    }
}

/* Grid: one block. */
ACL_KERNEL ACL_BLOCK(MSM_BLOCK) void msm_pieces(ACL_GLOBAL u32 *counts, ACL_GLOBAL u32 *pieces, i64 bins, i64 count) {
    ACL_LOCAL u32 tile[MSM_BLOCK];
    i32 thread = acl_local_id();
    i64 per_thread = (count + MSM_BLOCK - 1) / MSM_BLOCK;
    i64 first = thread * per_thread, end = first + per_thread < count ? first + per_thread : count;
    u32 entries = 0, parts = 0;
    for (i64 bin = first; bin < end; bin++) {
        entries += counts[bins + bin];
        parts += (counts[bins + bin] + MSM_PIECE - 1) / MSM_PIECE;
    }
    MSM_BEFORE(tile, entries, begin)
    MSM_BEFORE(tile, parts, piece)
    for (i64 bin = first; bin < end; bin++) {
        u32 size = counts[bins + bin];
        for (u32 at = 0; at < size; at += MSM_PIECE, piece++) {
            pieces[2 * (i64)piece] = (u32)bin;
            pieces[2 * (i64)piece + 1] = begin + at;
        }
        counts[bins + bin] = begin;
        begin += size;
    }
    if (thread == MSM_BLOCK - 1) {
        counts[bins + count] = piece;
    }
}

/* After MSM_COUNT order the entries by group in local memory, and write them to out. MSM_POSITION(g, count) is the position of the
 * group's first entry in out. A thread has `own` consecutive groups. */
#define MSM_WRITE_BY_GROUP(own, out, value)                                                            \
    ACL_LOCAL u32 tile[MSM_BLOCK];                                                                     \
    ACL_LOCAL u64 staged[MSM_PIECE];                                                                   \
    u32 here[own], sum = 0;                                                                            \
    for (i32 k = 0; k < own; k++) {                                                                    \
        here[k] = size[own * thread + k];                                                              \
        sum += here[k];                                                                                \
    }                                                                                                  \
    MSM_BEFORE(tile, sum, at)                                                                          \
    for (i32 k = 0; k < own; k++) {                                                                    \
        u32 count = here[k];                                                                           \
        here[k] = (count ? MSM_POSITION(own * thread + k, count) : 0) - at;                            \
        size[own * thread + k] = at;                                                                   \
        at += count;                                                                                   \
    }                                                                                                  \
    acl_barrier();                                                                                     \
    for (i32 k = 0; k < MSM_EACH; k++) {                                                               \
        if (found[k] != MSM_NO_ENTRY) {                                                                \
            staged[size[MSM_GROUP_OF(found[k])] + ranks[k]] = found[k];                                \
        }                                                                                              \
    }                                                                                                  \
    if (thread == MSM_BLOCK - 1) {                                                                     \
        tile[0] = at;                                                                                  \
    }                                                                                                  \
    acl_barrier();                                                                                     \
    for (i32 k = 0; k < own; k++) {                                                                    \
        size[own * thread + k] = here[k];                                                              \
    }                                                                                                  \
    acl_barrier();                                                                                     \
    for (u32 i = thread; i < tile[0]; i += MSM_BLOCK) {                                                \
        u64 entry = staged[i];                                                                         \
        out[(i64)(u32)(size[MSM_GROUP_OF(entry)] + i)] = value;                                        \
    }

/* A block reserves its part of each bin by one addition. */
ACL_KERNEL ACL_BLOCK(MSM_BLOCK) void msm_partition(ACL_GLOBAL const u32 *digits, ACL_GLOBAL u32 *counts, ACL_GLOBAL u64 *binned,
                                                   i64 bins, i64 n, i64 windows, i64 spread, i64 stride, i32 bin_bits) {
    MSM_OF_DIGITS(stride)
    if (!filled) {
        return;
    }
    u64 in_bin = (((u64)1 << bin_bits) - 1) << 32 | 0xffffffff;
#define MSM_POSITION(group, count) acl_atomic_add_u32(&counts[bins + bin + (group)], count)
    MSM_WRITE_BY_GROUP(MSM_BINS_PER_THREAD, binned, (entry & in_bin))
#undef MSM_GROUP_OF
#undef MSM_POSITION
}

/* The entries of a block's piece, of bin `bin`, each with its key in the bin. Grid: one block per piece; those beyond the last piece
 * end. */
#define MSM_OF_PIECE                                                                                   \
    i32 thread = acl_local_id();                                                                       \
    i64 piece = acl_group_id();                                                                        \
    if (piece >= counts[bins + count]) {                                                               \
        return;                                                                                        \
    }                                                                                                  \
    i64 bin = pieces[2 * piece];                                                                       \
    u32 begin = pieces[2 * piece + 1];                                                                 \
    u32 end = counts[bins + bin] - begin < MSM_PIECE ? counts[bins + bin] : begin + MSM_PIECE;         \
    u64 found[MSM_EACH];                                                                               \
    for (i32 k = 0; k < MSM_EACH; k++) {                                                               \
        u32 i = begin + thread + k * MSM_BLOCK;                                                        \
        found[k] = i < end ? binned[i] : MSM_NO_ENTRY;                                                 \
    }                                                                                                  \
    MSM_COUNT(MSM_BIN_KEYS)

#define MSM_GROUP_OF(entry) ((entry) >> 32)

ACL_KERNEL ACL_BLOCK(MSM_BLOCK) void msm_rank_bins(ACL_GLOBAL const u64 *binned, ACL_GLOBAL const u32 *pieces,
                                                   ACL_GLOBAL u32 *counts, ACL_GLOBAL u32 *before, i64 bins, i64 count,
                                                   i32 bin_bits) {
    MSM_OF_PIECE
    for (i32 k = thread; k < 1 << bin_bits; k += MSM_BLOCK) {
        before[(piece << bin_bits) + k] = size[k] ? acl_atomic_add_u32(&counts[(bin << bin_bits) + k], size[k]) : 0;
    }
}

ACL_KERNEL ACL_BLOCK(MSM_BLOCK) void msm_scatter_bins(ACL_GLOBAL const u64 *binned, ACL_GLOBAL const u32 *pieces,
                                                      ACL_GLOBAL const u32 *counts, ACL_GLOBAL const u32 *before,
                                                      ACL_GLOBAL u32 *sorted, i64 bins, i64 count, i32 bin_bits) {
    MSM_OF_PIECE
#define MSM_POSITION(group, size_here) (counts[(bin << bin_bits) + (group)] + before[(piece << bin_bits) + (group)])
    MSM_WRITE_BY_GROUP(MSM_KEYS_PER_THREAD, sorted, (u32)entry)
#undef MSM_GROUP_OF
#undef MSM_POSITION
}
