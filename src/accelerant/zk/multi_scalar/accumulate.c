/* Sums of multiples, second part: the sum of each segment's points. Before this stands the curve's point.h, with COORD
 * replaced; what goes in is as sort.c says, or what rounds of affine.c leave of it: then MSM_ENTRY(sorted, k) is k, else
 * sorted[k].
 *
 * Points are affine, in Montgomery form, infinity all zeros; sums in XYZZ coordinates, four a point.
 * Bound by arithmetic: 8M + 2S an entry. */

/* Grid: one thread a segment, the longest first, so that the threads of a warp do about the same and the last blocks are the
 * shortest; there are at most as many segments as threads. The next point is asked for before the last is added, since its
 * address is random. */
ACL_KERNEL ACL_BLOCK(MSM_RESIDENT) void msm_accumulate(ACL_GLOBAL const u64 *points, ACL_GLOBAL const u32 *sorted,
                                                               ACL_GLOBAL const u32 *segments, ACL_GLOBAL const u32 *counts,
                                                               ACL_GLOBAL u64 *sums, i64 keys, i64 first) {
    i64 i = acl_global_id();
    if (i >= counts[keys + MSM_SEGMENTS]) {
        return;
    }
    u32 place = segments[3 * i];
    u32 end = place + segments[3 * i + 1];
    COORD_xyzz sum = COORD_xyzz_infinity();
    u32 which = MSM_ENTRY(sorted, place);
    COORD_affine next = COORD_affine_load(points, first + (which & 0x7fffffff));
#pragma unroll 1
    while (place < end) {
        COORD_affine p = COORD_affine_negate(0 - (which >> 31), next);
        place++;
        if (place < end) {
            which = MSM_ENTRY(sorted, place);
            next = COORD_affine_load(points, first + (which & 0x7fffffff));
        }
        sum = COORD_xyzz_add_affine(sum, p);
    }
    COORD_xyzz_store(sums, segments[3 * i + 2], sum);
}
