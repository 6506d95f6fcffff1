/* Exclusive prefix sum over the threads of a block; tile has one number per thread. */
#define MSM_BEFORE(tile, value, result)                                                                \
    tile[thread] = value;                                                                              \
    for (i32 step = 1; step < acl_local_size(); step *= 2) {                                           \
        acl_barrier();                                                                                 \
        u32 other = thread >= step ? tile[thread - step] : 0;                                          \
        acl_barrier();                                                                                 \
        tile[thread] += other;                                                                         \
    }                                                                                                  \
    u32 result = tile[thread] - value;
