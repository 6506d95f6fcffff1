/* One pass of number-theoretic transforms: see plan.py for what it computes, and for "column" and "twiddle".
 *
 *     sums of a column   y_j = sum_i x_i root^(i j)                i, j < NTT_ROWS
 *
 * Preceded by the field (field_text with the prefix F); from program.py, log2 of rows, of the columns of a block and
 * of the elements of a thread (NTT_LOG_ROWS, _COLUMNS, _RADIX), NTT_RADIX, and the pass's variant (NTT_ALONG_IN, ...);
 * device_c.h or device_cuda.h; and levels.h, limbs.h or goldilocks.h:
 *
 *     ntt_levels                          levels of butterflies between a thread's elements
 *     ntt_canonical                       the value below p of any F, which levels return
 *     NTT_WAIT_FOR_PREVIOUS               waits for the preceding kernel of the stream; tables are complete before
 *
 * Grid: a block for each NTT_COLUMNS neighbouring columns; NTT_THREADS threads, NTT_RADIX elements each, in
 * registers. Where columns are neighbours in memory, elements move directly between memory and registers, NTT_COLUMNS
 * per access; where rows are, they move through shared memory, along the rows. Levels of butterflies are done
 * NTT_LOG_RADIX at a time; in between a block exchanges elements through shared memory: a plane for each word, with
 * unused positions in between, so that threads access different banks, also in the last levels, where their rows are
 * NTT_RADIX apart.
 *
 * A level halves blocks of rows: of the pair (x, y) of a block, y is multiplied by the block's own factor, then x + y
 * and x - y replace the pair. `block` is the number of the block in which a thread's elements are before a group of
 * levels; those within it are block 2^level + part. Factors are in the order of the blocks; x is not multiplied, so
 * unreduced values grow by the bound of one product per level. Early levels have few factors, which threads share.
 *
 * Traffic: each element is read and written once a pass, and a twiddle read for it; roots are in the nearest cache.
 * Multiplies per element: half a multiply per level, less in the first NTT_LOG_RADIX levels, and one for each factor.
 * Bound by multiplies for fields of several limbs, by instructions for Goldilocks, by memory for others.
 * No branch and no address depends on an element. Source: Cooley and Tukey 1965, with factors in bit-reversed order as in
 * Longa and Naehrig, CANS 2016 (levels); Bailey 1990 (passes). */
#define NTT_ROWS (1 << NTT_LOG_ROWS)
#define NTT_COLUMNS (1 << NTT_LOG_COLUMNS)
#define NTT_GROUPS (NTT_ROWS / NTT_RADIX)
#define NTT_ELEMENTS (NTT_ROWS * NTT_COLUMNS)
#define NTT_SPACE (NTT_ELEMENTS + NTT_ELEMENTS / NTT_RADIX)

/* The position of an element in shared memory. NTT_LINEAR: whether the NTT_RADIX rows of a thread, 2^shift apart, are at
 * constant distances in spite of the unused positions: a thread then computes one position and adds constants. */
#if NTT_ALONG_IN && NTT_ALONG_OUT
#define NTT_NUMBER(row, column) (((column) << NTT_LOG_ROWS) + (row))
#define NTT_UNUSED(number) ((number) >> NTT_LOG_RADIX)
#define NTT_APART(shift) ((1 << (shift)) + NTT_UNUSED(1 << (shift)))
#define NTT_LINEAR (NTT_LOG_ROWS >= 2 * NTT_LOG_RADIX)
#elif NTT_ALONG_IN || NTT_ALONG_OUT
#define NTT_NUMBER(row, column) (((row) << NTT_LOG_COLUMNS) + (column))
#define NTT_UNUSED(number) ((number) >> 4)
#define NTT_APART(shift) ((NTT_COLUMNS << (shift)) + NTT_UNUSED(NTT_COLUMNS << (shift)))
#define NTT_LINEAR (NTT_LOG_ROWS >= 2 * NTT_LOG_RADIX && NTT_LOG_COLUMNS >= 4)
#else
#define NTT_NUMBER(row, column) (((row) << NTT_LOG_COLUMNS) + (column))
#define NTT_UNUSED(number) ((number) >> (NTT_LOG_RADIX + NTT_LOG_COLUMNS) << NTT_LOG_COLUMNS)
#define NTT_APART(shift) ((NTT_COLUMNS << (shift)) + NTT_UNUSED(NTT_COLUMNS << (shift)))
#define NTT_LINEAR (NTT_LOG_ROWS >= 2 * NTT_LOG_RADIX)
#endif
#define NTT_AT(row, column) (NTT_NUMBER(row, column) + NTT_UNUSED(NTT_NUMBER(row, column)))
#if NTT_LINEAR
#define NTT_AT_STEP(row, k, shift) (NTT_AT(row, own) + (k) * NTT_APART(shift))
#else
#define NTT_AT_STEP(row, k, shift) NTT_AT((row) + ((k) << (shift)), own)
#endif

/* Along the rows: the index in memory of element `number` of a block's columns, relative to the first one. */
#if NTT_ALONG_IN && NTT_ALONG_OUT
#define NTT_ALONG(number, stride) (number)
#else
#define NTT_ALONG(number, stride) (((number) >> NTT_LOG_ROWS) * (stride) + ((number) & (NTT_ROWS - 1)))
#endif

/* Whether the second group of levels is a partial one: its last levels are done, so that positions stay NTT_LINEAR. */
#define NTT_PARTIAL ((NTT_LOG_ROWS - NTT_FIRST) % NTT_LOG_RADIX != 0)

#if NTT_WORDS > 1
#define NTT_PLANES F_LIMBS
#define NTT_PLANE_WORD u32
#define NTT_PART(value, plane) (value).limb[plane]
#else
#define NTT_PLANES 1
#define NTT_PLANE_WORD F_WORD
#define NTT_PART(value, plane) (value)
#endif

#define NTT_PUT(at, value)                                                                             \
    for (i32 plane = 0; plane < NTT_PLANES; plane++) {                                                 \
        tile[plane][at] = NTT_PART(value, plane);                                                      \
    }
#define NTT_GET(at, value)                                                                             \
    for (i32 plane = 0; plane < NTT_PLANES; plane++) {                                                 \
        NTT_PART(value, plane) = tile[plane][at];                                                      \
    }

/* With NTT_CHECKED, which is for first passes, there is one more argument, set to 1 where an element is not below p. */
#if NTT_CHECKED
#define NTT_VERDICT ACL_GLOBAL u32 *verdict,
#define NTT_JUDGE(value) reduced &= F_is_reduced(value)
#define NTT_SENTENCE()                                                                                 \
    if (!reduced) {                                                                                    \
        *verdict = 1;                                                                                  \
    }
#else
#define NTT_VERDICT
#define NTT_JUDGE(value)
#define NTT_SENTENCE()
#endif

/* Reverse the NTT_LOG_ROWS lowest bits. */
ACL_DEVICE i32 ntt_reversed(i32 index) {
    return (i32)(ntt_reverse_32((u32)index) >> (32 - NTT_LOG_ROWS));
}

/* The offset of a thread's element k from its first one: a constant, also for reversed bits, so that a thread computes one
 * address and adds constants. */
#define NTT_REVERSE(k) ((((k) & 1) << 3 | ((k) & 2) << 1 | ((k) & 4) >> 1 | (k) >> 3) >> (4 - NTT_LOG_RADIX))
#define NTT_POSITION_IN(k) (NTT_REVERSED_IN ? NTT_REVERSE(k) : (k) << (NTT_LOG_ROWS - NTT_LOG_RADIX))
#define NTT_POSITION_OUT(k) (NTT_REVERSED_OUT ? (k) : NTT_REVERSE(k) << (NTT_LOG_ROWS - NTT_LOG_RADIX))

/* Multiply the element at position + more by the variant's factors before or after the sums: a factor of the position, a
 * twiddle of position and column. */
#define NTT_FACTORS(name, of_position, of_column)                                                         \
    ACL_DEVICE F name(F a, i64 position, i64 more, i64 column, NTT_TABLE factors, NTT_TABLE low,          \
                      NTT_TABLE high, i64 log_low, i64 log_columns) {                                  \
        if (of_position) {                                                                                \
            a = F_mul(F_load(factors + position * NTT_WORDS, more), a);                                   \
        }                                                                                              \
        if (of_column) {                                                                               \
            i64 near = (position << log_low) + (column & (((i64)1 << log_low) - 1));                      \
            a = F_mul(F_load(low + near * NTT_WORDS, more << log_low), a);                             \
            if (NTT_SPLIT) {                                                                           \
                i64 log_high = log_columns - log_low, far = (position << log_high) + (column >> log_low); \
                a = F_mul(F_load(high + far * NTT_WORDS, more << log_high), a);                        \
            }                                                                                          \
        }                                                                                              \
        return a;                                                                                      \
    }

NTT_FACTORS(ntt_before, NTT_BEFORE, NTT_TWIDDLE_BEFORE)
NTT_FACTORS(ntt_after, NTT_AFTER, NTT_TWIDDLE_AFTER)

/* Return the canonical element: products by a factor already are canonical. */
ACL_DEVICE F ntt_stored(F a) {
    return NTT_AFTER || NTT_TWIDDLE_AFTER ? a : ntt_canonical(a);
}

/* The index of a column's first element on one side of the pass. A block's columns differ in their lowest digit only. */
ACL_DEVICE i64 ntt_begin(i64 column, i64 digit_0, i64 digit_1, i64 stride_0, i64 stride_1, i64 stride_2) {
    i64 rest = column >> digit_0;
    return (column & (((i64)1 << digit_0) - 1)) * stride_0 + (rest & (((i64)1 << digit_1) - 1)) * stride_1 +
           (rest >> digit_1) * stride_2;
}

ACL_KERNEL NTT_BLOCK void ntt_pass(
    ACL_GLOBAL const F_WORD *x, ACL_GLOBAL F_WORD *z, NTT_VERDICT NTT_TABLE roots, NTT_TABLE before, NTT_TABLE after,
    NTT_TABLE low, NTT_TABLE high, i64 count, i64 log_low, i64 digit_0, i64 digit_1, i64 read_0, i64 read_1, i64 read_2,
    i64 read_row, i64 write_0, i64 write_1, i64 write_2, i64 write_row) {
    NTT_ALIGNED(x);
    NTT_ALIGNED(z);
    NTT_ALIGNED(roots);
    NTT_ALIGNED(before);
    NTT_ALIGNED(after);
    NTT_ALIGNED(low);
    NTT_ALIGNED(high);
    ACL_LOCAL NTT_PLANE_WORD tile[NTT_PLANES][NTT_SPACE];
    F v[NTT_RADIX];
    i32 thread = acl_local_id();
    i64 first = acl_group_id() * NTT_COLUMNS;
    i32 here = count - first < NTT_COLUMNS ? (i32)(count - first) : NTT_COLUMNS;
#if NTT_ALONG_IN && NTT_ALONG_OUT
    i32 group = thread & (NTT_GROUPS - 1), own = thread >> (NTT_LOG_ROWS - NTT_LOG_RADIX);
#else
    i32 group = thread >> NTT_LOG_COLUMNS, own = thread & (NTT_COLUMNS - 1);
#endif
    i64 near = (first & (((i64)1 << digit_0) - 1)) + own;
    i64 begin = ntt_begin(first, digit_0, digit_1, read_0, read_1, read_2);
#if NTT_CHECKED
    u32 reduced = 1;
#endif
    NTT_WAIT_FOR_PREVIOUS();

    /* In: a thread has rows group + k NTT_GROUPS of its column. */
#if NTT_ALONG_IN
#pragma unroll
    for (i32 k = 0; k < NTT_RADIX; k++) {
        i32 number = k * NTT_THREADS + thread;
        if (number >> NTT_LOG_ROWS < here) {
            v[k] = F_load(x, begin + NTT_ALONG(number, read_0));
            NTT_JUDGE(v[k]);
        }
    }
    NTT_SENTENCE();
#pragma unroll
    for (i32 k = 0; k < NTT_RADIX; k++) {
        i32 number = k * NTT_THREADS + thread;
        i32 position = number & (NTT_ROWS - 1);
        v[k] = ntt_before(v[k], position, 0, 0, before, low, high, log_low, digit_0);
        NTT_PUT(NTT_AT(NTT_REVERSED_IN ? ntt_reversed(position) : position, number >> NTT_LOG_ROWS), v[k]);
    }
    acl_barrier();
#pragma unroll
    for (i32 k = 0; k < NTT_RADIX; k++) {
        NTT_GET(NTT_AT_STEP(group, k, NTT_LOG_ROWS - NTT_LOG_RADIX), v[k]);
    }
#else
    if (own < here) {
        i32 position = NTT_REVERSED_IN ? ntt_reversed(group) : group;
        x += (begin + own * read_0 + position * read_row) * NTT_WORDS;
#pragma unroll
        for (i32 k = 0; k < NTT_RADIX; k++) {
            v[k] = F_load(x, NTT_POSITION_IN(k) * read_row);
            NTT_JUDGE(v[k]);
        }
        NTT_SENTENCE();
#pragma unroll
        for (i32 k = 0; k < NTT_RADIX; k++) {
            v[k] = ntt_before(v[k], position, NTT_POSITION_IN(k), near, before, low, high, log_low, digit_0);
        }
    }
#endif

    /* Levels on the bits below `top` of the rows' numbers, of which a thread's elements differ in the NTT_LOG_RADIX highest. */
    ntt_levels(v, roots, 0, 0, 0, NTT_FIRST, 1);
#if NTT_LOG_ROWS > NTT_FIRST
    i32 row = group, shift = NTT_LOG_ROWS - NTT_LOG_RADIX;
#pragma unroll 1
    for (i32 top = NTT_LOG_ROWS - NTT_FIRST; top > 0; top = shift) {
#pragma unroll
        for (i32 k = 0; k < NTT_RADIX; k++) {
            NTT_PUT(NTT_AT_STEP(row, k, shift), v[k]);
        }
        acl_barrier();
        shift = (top - 1) / NTT_LOG_RADIX * NTT_LOG_RADIX;
        row = (group >> shift << (shift + NTT_LOG_RADIX)) + (group & ((1 << shift) - 1));
#pragma unroll
        for (i32 k = 0; k < NTT_RADIX; k++) {
            NTT_GET(NTT_AT_STEP(row, k, shift), v[k]);
        }
        const i32 skip = NTT_PARTIAL ? shift + NTT_LOG_RADIX - top : 0;
        ntt_levels(v, roots, group >> shift, NTT_LOG_ROWS - NTT_LOG_RADIX - shift, skip, NTT_LOG_RADIX, 0);
    }
#endif

    /* Out: element k of a thread is row bitrev(group NTT_RADIX + k). All factors are loaded before the first store, since
     * the compiler must assume that a store may overwrite a factor. */
    begin = ntt_begin(first, digit_0, digit_1, write_0, write_1, write_2);
#if NTT_ALONG_OUT
#pragma unroll
    for (i32 k = 0; k < NTT_RADIX; k++) {
        NTT_PUT(NTT_AT_STEP(group << NTT_LOG_RADIX, k, 0), v[k]);
    }
    acl_barrier();
#pragma unroll
    for (i32 k = 0; k < NTT_RADIX; k++) {
        i32 number = k * NTT_THREADS + thread;
        i32 position = number & (NTT_ROWS - 1);
        NTT_GET(NTT_AT(NTT_REVERSED_OUT ? position : ntt_reversed(position), number >> NTT_LOG_ROWS), v[k]);
        v[k] = ntt_after(v[k], position, 0, 0, after, low, high, log_low, digit_0);
    }
#pragma unroll
    for (i32 k = 0; k < NTT_RADIX; k++) {
        i32 number = k * NTT_THREADS + thread;
        if (number >> NTT_LOG_ROWS < here) {
            F_store(z, begin + NTT_ALONG(number, write_0), ntt_stored(v[k]));
        }
    }
#else
    if (own < here) {
        i32 position = NTT_REVERSED_OUT ? group << NTT_LOG_RADIX : ntt_reversed(group << NTT_LOG_RADIX);
        z += (begin + own * write_0 + position * write_row) * NTT_WORDS;
#pragma unroll
        for (i32 k = 0; k < NTT_RADIX; k++) {
            v[k] = ntt_after(v[k], position, NTT_POSITION_OUT(k), near, after, low, high, log_low, digit_0);
        }
#pragma unroll
        for (i32 k = 0; k < NTT_RADIX; k++) {
            F_store(z, NTT_POSITION_OUT(k) * write_row, ntt_stored(v[k]));
        }
    }
#endif
}
