/* Multiples 2^k P of fixed points. The curve's point.h, with COORD replaced, precedes this file.
 *
 * z_(to + i) = 2^doublings x_(from + i), i < n; affine points in Montgomery form, all zeros at infinity. Grid: one thread per
 * MSM_TOGETHER points, which are a block's threads apart and share an inversion; its arrays are in thread-local memory.
 * Bound by arithmetic: 6M + 3S per doubling. Source: Montgomery 1987, Mathematics of Computation 48, pages 243 to 264. */

ACL_KERNEL ACL_BLOCK(MSM_MULTIPLES_BLOCK) void msm_multiples(ACL_GLOBAL const u64 *x, ACL_GLOBAL u64 *z, i64 n, i64 from,
                                                             i64 to, i32 doublings) {
    i64 threads = acl_local_size();
    i64 first = acl_group_id() * threads * MSM_TOGETHER + acl_local_id();
    COORD_xyzz points[MSM_TOGETHER];
    COORD before[MSM_TOGETHER];
    COORD product = COORD_one();
#pragma unroll 1
    for (i32 k = 0; k < MSM_TOGETHER; k++) {
        if (first + k * threads < n) {
            COORD_xyzz p = COORD_xyzz_from_affine(COORD_affine_load(x, from + first + k * threads));
#pragma unroll 1
            for (i32 doubling = 0; doubling < doublings; doubling++) {
                COORD_xyzz_double(&p);
            }
            points[k] = p;
            before[k] = product;
            product = COORD_MUL(product, COORD_select(COORD_is_zero(p.zzz), COORD_one(), p.zzz));
        }
    }
    COORD inverse = COORD_inverse(product);
#pragma unroll 1
    for (i32 k = MSM_TOGETHER - 1; k >= 0; k--) {
        if (first + k * threads < n) {
            COORD_xyzz p = points[k];
            u32 none = COORD_is_zero(p.zzz);
            COORD one_by_zzz = COORD_MUL(inverse, before[k]);
            COORD one_by_z = COORD_MUL(p.zz, one_by_zzz);
            COORD_affine q;
            q.x = COORD_select(none, COORD_zero(), COORD_MUL(p.x, COORD_SQUARE(one_by_z)));
            q.y = COORD_select(none, COORD_zero(), COORD_MUL(p.y, one_by_zzz));
            inverse = COORD_MUL(inverse, COORD_select(none, COORD_one(), p.zzz));
            COORD_affine_store(z, to + first + k * threads, q);
        }
    }
}
