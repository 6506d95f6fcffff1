/* Multi-scalar multiplication, second part: the sum of the points of each segment. The curve's point.h, with COORD replaced,
 * precedes this file. The input is that of sort.c, with MSM_ENTRY(sorted, k) = sorted[k]; or that of affine.c, with
 * MSM_ENTRY(sorted, k) = k.
 *
 * Points are affine, in Montgomery form, infinity all zeros; sums are in XYZZ coordinates, four coordinates per point.
 * Bound by arithmetic: 8M + 2S per entry. */

/* Grid: one thread per segment, the longest first, so that the threads of a warp have about the same work and the last blocks
 * the least. The next point is loaded before the current one is added, since its address is random. */
ACL_KERNEL ACL_BLOCK(MSM_RESIDENT) void msm_accumulate(ACL_GLOBAL const u64 *points, ACL_GLOBAL const u32 *sorted,
                                                               ACL_GLOBAL const u32 *segments, ACL_GLOBAL const u32 *counts,
                                                               ACL_GLOBAL u64 *sums, i64 keys, i64 first) {
    i64 i = acl_global_id();
    if (i >= counts[keys + MSM_SEGMENTS]) {
        return;
    }
    u32 position = segments[3 * i];
    u32 end = position + segments[3 * i + 1];
    COORD_xyzz sum = COORD_xyzz_infinity();
    u32 which = MSM_ENTRY(sorted, position);
    COORD_affine next = COORD_affine_load(points, first + (which & 0x7fffffff));
#pragma unroll 1
    while (position < end) {
        COORD_affine p = COORD_affine_negate(0 - (which >> 31), next);
        position++;
        if (position < end) {
            which = MSM_ENTRY(sorted, position);
            next = COORD_affine_load(points, first + (which & 0x7fffffff));
        }
        sum = COORD_xyzz_add_affine(sum, p);
    }
    COORD_xyzz_store(sums, segments[3 * i + 2], sum);
}
