/* One pass of number-theoretic transforms: see plan.py for what it computes, and for "place", "column", "twiddle".
 *
 *     sums of a column   y_j = sum_i x_i root^(i j)                i, j < NTT_ROWS
 *
 * Before this stand the field (field_text with the prefix F); from program.py, log2 of rows, of the columns of a block and
 * of the elements of a thread (NTT_LOG_ROWS, _COLUMNS, _RADIX), and the pass's variant (NTT_ALONG_IN, ...); and device_c.h
 * or device_cuda.h.
 *
 * Grid: a block for each NTT_COLUMNS columns, neighbours; NTT_THREADS threads, NTT_RADIX elements each, in registers.
 * Where columns are neighbours in memory, elements go straight between memory and registers, NTT_COLUMNS to an access;
 * where rows are, through the block's memory, along the rows. Levels of butterflies are done NTT_LOG_RADIX at a time;
 * in between a block exchanges elements through its memory: a plane for each 64-bit word, with unused places in between,
 * so that threads access different banks, also in the last levels, where their rows are NTT_RADIX apart.
 * Traffic: each element is read and written once a pass, and a twiddle read for it; roots lie in the nearest cache.
 * Multiplies for each element: half a one a level, less in the last NTT_LOG_RADIX levels, and one for each factor.
 * Bound by multiplies for fields of several limbs, by memory and the exchange for others.
 * No branch and no address depends on an element. Source: Gentleman and Sande 1966 (levels); Bailey 1990 (passes). */
#define NTT_ROWS (1 << NTT_LOG_ROWS)
#define NTT_COLUMNS (1 << NTT_LOG_COLUMNS)
#define NTT_RADIX (1 << NTT_LOG_RADIX)
#define NTT_GROUPS (NTT_ROWS / NTT_RADIX)
#define NTT_ELEMENTS (NTT_ROWS * NTT_COLUMNS)
#define NTT_SPACE (NTT_ELEMENTS + NTT_ELEMENTS / NTT_RADIX)

/* Where an element lies in the block's memory. */
#if NTT_ALONG_IN && NTT_ALONG_OUT
#define NTT_NUMBER(row, column) ((column) * NTT_ROWS + (row))
#define NTT_UNUSED(number) ((number) / NTT_RADIX)
#elif NTT_ALONG_IN || NTT_ALONG_OUT
#define NTT_NUMBER(row, column) ((row) * NTT_COLUMNS + (column))
#define NTT_UNUSED(number) ((number) / 16)
#else
#define NTT_NUMBER(row, column) ((row) * NTT_COLUMNS + (column))
#define NTT_UNUSED(number) ((number) / (NTT_RADIX * NTT_COLUMNS) * NTT_COLUMNS)
#endif
#define NTT_AT(row, column) (NTT_NUMBER(row, column) + NTT_UNUSED(NTT_NUMBER(row, column)))

/* Along the rows: where element `number` of a block's columns is in memory, counted from where the first one begins. */
#if NTT_ALONG_IN && NTT_ALONG_OUT
#define NTT_ALONG(number, stride) (number)
#else
#define NTT_ALONG(number, stride) ((number) / NTT_ROWS * (stride) + (number) % NTT_ROWS)
#endif

#if NTT_WORDS > 1
#define NTT_PUT(at, value)                                                                             \
    for (i32 word = 0; word < NTT_WORDS; word++) {                                                     \
        tile[word][at] = (value).limb[2 * word] | (u64)(value).limb[2 * word + 1] << 32;               \
    }
#define NTT_GET(at, value)                                                                             \
    for (i32 word = 0; word < NTT_WORDS; word++) {                                                     \
        u64 both = tile[word][at];                                                                     \
        (value).limb[2 * word] = (u32)both;                                                            \
        (value).limb[2 * word + 1] = (u32)(both >> 32);                                                \
    }
#else
#define NTT_PUT(at, value) tile[0][at] = (value)
#define NTT_GET(at, value) (value) = tile[0][at]
#endif

/* The NTT_LOG_ROWS lowest bits in the opposite order. */
ACL_DEVICE i32 ntt_reversed(i32 index) {
    return (i32)(ntt_turned((u32)index) >> (32 - NTT_LOG_ROWS));
}

/* The element times what the variant has before or after the sums: a factor of the place, a twiddle of place and column. */
#define NTT_FACTORS(name, of_place, of_column)                                                         \
    ACL_DEVICE F name(F a, i64 place, i64 column, ACL_GLOBAL const F_WORD *factors,                    \
                      ACL_GLOBAL const F_WORD *low, ACL_GLOBAL const F_WORD *high, i64 log_low,        \
                      i64 log_columns) {                                                               \
        if (of_place) {                                                                                \
            a = F_mul(F_load(factors, place), a);                                                      \
        }                                                                                              \
        if (of_column) {                                                                               \
            i64 near = (place << log_low) + (column & (((i64)1 << log_low) - 1));                      \
            a = F_mul(F_load(low, near), a);                                                           \
            if (NTT_SPLIT) {                                                                           \
                a = F_mul(F_load(high, (place << (log_columns - log_low)) + (column >> log_low)), a);  \
            }                                                                                          \
        }                                                                                              \
        return a;                                                                                      \
    }

NTT_FACTORS(ntt_before, NTT_BEFORE, NTT_TWIDDLE_BEFORE)
NTT_FACTORS(ntt_after, NTT_AFTER, NTT_TWIDDLE_AFTER)

/* Where a column begins, on one side of the pass. A block's columns differ in their lowest digit alone. */
ACL_DEVICE i64 ntt_begin(i64 column, i64 digit_0, i64 digit_1, i64 stride_0, i64 stride_1, i64 stride_2) {
    i64 rest = column >> digit_0;
    return (column & (((i64)1 << digit_0) - 1)) * stride_0 + (rest & (((i64)1 << digit_1) - 1)) * stride_1 +
           (rest >> digit_1) * stride_2;
}

ACL_KERNEL NTT_BLOCK void ntt_pass(
    ACL_GLOBAL const F_WORD *x, ACL_GLOBAL F_WORD *z, NTT_TABLE roots, NTT_TABLE before, NTT_TABLE after, NTT_TABLE low,
    NTT_TABLE high, i64 count, i64 log_low, i64 digit_0, i64 digit_1, i64 read_0, i64 read_1, i64 read_2, i64 read_row,
    i64 write_0, i64 write_1, i64 write_2, i64 write_row) {
    NTT_ALIGNED(x);
    NTT_ALIGNED(z);
    NTT_ALIGNED(roots);
    NTT_ALIGNED(before);
    NTT_ALIGNED(after);
    NTT_ALIGNED(low);
    NTT_ALIGNED(high);
    ACL_LOCAL F_WORD tile[NTT_WORDS][NTT_SPACE];
    F v[NTT_RADIX];
    i32 thread = acl_local_id();
    i64 first = acl_group_id() * NTT_COLUMNS;
    i32 here = count - first < NTT_COLUMNS ? (i32)(count - first) : NTT_COLUMNS;
#if NTT_ALONG_IN && NTT_ALONG_OUT
    i32 group = thread % NTT_GROUPS, own = thread / NTT_GROUPS;
#else
    i32 group = thread / NTT_COLUMNS, own = thread % NTT_COLUMNS;
#endif
    i64 near = (first & (((i64)1 << digit_0) - 1)) + own;
    i64 begin = ntt_begin(first, digit_0, digit_1, read_0, read_1, read_2);

    /* In: a thread has rows group + k NTT_GROUPS of its column. */
#if NTT_ALONG_IN
#pragma unroll
    for (i32 k = 0; k < NTT_RADIX; k++) {
        i32 number = k * NTT_THREADS + thread;
        if (number / NTT_ROWS < here) {
            v[k] = F_load(x, begin + NTT_ALONG(number, read_0));
        }
    }
#pragma unroll
    for (i32 k = 0; k < NTT_RADIX; k++) {
        i32 number = k * NTT_THREADS + thread;
        i32 place = number % NTT_ROWS;
        v[k] = ntt_before(v[k], place, 0, before, low, high, log_low, digit_0);
        NTT_PUT(NTT_AT(NTT_REVERSED_IN ? ntt_reversed(place) : place, number / NTT_ROWS), v[k]);
    }
    acl_barrier();
#pragma unroll
    for (i32 k = 0; k < NTT_RADIX; k++) {
        NTT_GET(NTT_AT(group + k * NTT_GROUPS, own), v[k]);
    }
#else
    if (own < here) {
        begin += own * read_0;
#pragma unroll
        for (i32 k = 0; k < NTT_RADIX; k++) {
            i32 row = group + k * NTT_GROUPS;
            v[k] = F_load(x, begin + (NTT_REVERSED_IN ? ntt_reversed(row) : row) * read_row);
        }
#pragma unroll
        for (i32 k = 0; k < NTT_RADIX; k++) {
            i32 row = group + k * NTT_GROUPS;
            i32 place = NTT_REVERSED_IN ? ntt_reversed(row) : row;
            v[k] = ntt_before(v[k], place, near, before, low, high, log_low, digit_0);
        }
    }
#endif

    /* Levels on the bits below `top` of the rows' numbers; a thread's elements differ in the NTT_LOG_RADIX highest of
     * them. First as many levels as leave a multiple of NTT_LOG_RADIX. */
    i32 top = NTT_LOG_ROWS;
#pragma unroll 1
    while (top > NTT_LOG_RADIX) {
        i32 levels = (top - 1) % NTT_LOG_RADIX + 1;
        i32 shift = top - NTT_LOG_RADIX;
        i32 below = group & ((1 << shift) - 1);
        i32 row = (group >> shift << top) + below;
#pragma unroll
        for (i32 level = 0; level < NTT_LOG_RADIX; level++) {
            if (level < levels) {
                const i32 span = NTT_RADIX >> (level + 1);
#pragma unroll
                for (i32 k = 0; k < span; k++) {
                    F factor = F_load(roots, (i64)((k << shift) + below) << (NTT_LOG_ROWS - top + level));
#pragma unroll
                    for (i32 pair = k; pair < NTT_RADIX; pair += 2 * span) {
                        F sum = F_add(v[pair], v[pair + span]);
                        v[pair + span] = F_mul(factor, F_sub(v[pair], v[pair + span]));
                        v[pair] = sum;
                    }
                }
            }
        }
#pragma unroll
        for (i32 k = 0; k < NTT_RADIX; k++) {
            NTT_PUT(NTT_AT(row + (k << shift), own), v[k]);
        }
        acl_barrier();
        top -= levels;
        shift = top - NTT_LOG_RADIX;
        row = (group >> shift << top) + (group & ((1 << shift) - 1));
#pragma unroll
        for (i32 k = 0; k < NTT_RADIX; k++) {
            NTT_GET(NTT_AT(row + (k << shift), own), v[k]);
        }
    }

    /* The last levels: the same factors for all threads, some of them 1. */
#pragma unroll
    for (i32 level = 0; level < NTT_LOG_RADIX; level++) {
        const i32 span = NTT_RADIX >> (level + 1);
#pragma unroll
        for (i32 k = 0; k < span; k++) {
            F factor = F_load(roots, (i64)k << (NTT_LOG_ROWS - NTT_LOG_RADIX + level));
#pragma unroll
            for (i32 pair = k; pair < NTT_RADIX; pair += 2 * span) {
                F sum = F_add(v[pair], v[pair + span]);
                F difference = F_sub(v[pair], v[pair + span]);
                v[pair + span] = k ? F_mul(factor, difference) : difference;
                v[pair] = sum;
            }
        }
    }

    /* Out: element k of a thread is row bitrev(group NTT_RADIX + k). All factors come before the first store, which for all
     * the compiler knows is to where the next factor is. */
    begin = ntt_begin(first, digit_0, digit_1, write_0, write_1, write_2);
#if NTT_ALONG_OUT
#pragma unroll
    for (i32 k = 0; k < NTT_RADIX; k++) {
        NTT_PUT(NTT_AT(group * NTT_RADIX + k, own), v[k]);
    }
    acl_barrier();
#pragma unroll
    for (i32 k = 0; k < NTT_RADIX; k++) {
        i32 number = k * NTT_THREADS + thread;
        i32 place = number % NTT_ROWS;
        NTT_GET(NTT_AT(NTT_REVERSED_OUT ? place : ntt_reversed(place), number / NTT_ROWS), v[k]);
        v[k] = ntt_after(v[k], place, 0, after, low, high, log_low, digit_0);
    }
#pragma unroll
    for (i32 k = 0; k < NTT_RADIX; k++) {
        i32 number = k * NTT_THREADS + thread;
        if (number / NTT_ROWS < here) {
            F_store(z, begin + NTT_ALONG(number, write_0), v[k]);
        }
    }
#else
    if (own < here) {
        begin += own * write_0;
#pragma unroll
        for (i32 k = 0; k < NTT_RADIX; k++) {
            i32 row = group * NTT_RADIX + k;
            i32 place = NTT_REVERSED_OUT ? row : ntt_reversed(row);
            v[k] = ntt_after(v[k], place, near, after, low, high, log_low, digit_0);
        }
#pragma unroll
        for (i32 k = 0; k < NTT_RADIX; k++) {
            i32 row = group * NTT_RADIX + k;
            F_store(z, begin + (NTT_REVERSED_OUT ? row : ntt_reversed(row)) * write_row, v[k]);
        }
    }
#endif
}
