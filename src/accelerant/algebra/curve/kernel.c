/* Functions on arrays of points. Preceded by point.h and complete.h, with COORD replaced.
 *
 * Layout: n points, affine, x then y in Montgomery form, infinity all zeros; all on the curve, except in curve_off_curve and
 * curve_inward, which takes canonical ones.
 * Grid: one thread per point; CURVE_ADDS points in curve_add; one block per chunk of points in curve_off_curve and
 * curve_off_subgroup. A block has at most CURVE_BLOCK threads, a power of two.
 * Bound by arithmetic: curve_add takes 5M + 2S per point and a share of an inversion; curve_mul 64 additions and 256
 * doublings, and an inversion. A thread's tables are in its private memory. */

ACL_KERNEL ACL_BLOCK(CURVE_BLOCK) void curve_neg(ACL_GLOBAL const u64 *x, ACL_GLOBAL u64 *z, i64 n) {
    i64 i = acl_global_id();
    if (i < n) {
        COORD_affine_store(z, i, COORD_affine_negate(~(u32)0, COORD_affine_load(x, i)));
    }
}

/* The denominator of the slope: x2 - x1 for a chord, 2 y1 for a tangent, else 1. */
ACL_DEVICE COORD COORD_run_of(COORD_affine p, COORD_affine q) {
    COORD chord = COORD_sub(q.x, p.x);
    u32 same = COORD_is_zero(chord);
    COORD run = COORD_select(same, COORD_add(p.y, q.y), chord); /* 2 y, or 0 for opposite points */
    u32 none = COORD_affine_is_infinity(p) | COORD_affine_is_infinity(q) | COORD_is_zero(run);
    return COORD_select(none, COORD_one(), run);
}

/* P + Q, given the inverse of their COORD_run_of. */
ACL_DEVICE COORD_affine COORD_affine_sum(COORD_affine p, COORD_affine q, COORD inverse) {
    u32 same = COORD_is_zero(COORD_sub(q.x, p.x));
    u32 opposite = same & COORD_is_zero(COORD_add(p.y, q.y));
    COORD square = COORD_SQUARE(p.x);
    COORD rise = COORD_select(same, COORD_add(COORD_add(square, square), square), COORD_sub(q.y, p.y));
    COORD slope = COORD_MUL(rise, inverse);
    COORD_affine z;
    z.x = COORD_sub(COORD_sub(COORD_SQUARE(slope), p.x), q.x);
    z.y = COORD_sub(COORD_MUL(slope, COORD_sub(p.x, z.x)), p.y);
    u32 p_alone = COORD_affine_is_infinity(q), q_alone = COORD_affine_is_infinity(p);
    z.x = COORD_select(p_alone, p.x, COORD_select(q_alone, q.x, COORD_select(opposite, COORD_zero(), z.x)));
    z.y = COORD_select(p_alone, p.y, COORD_select(q_alone, q.y, COORD_select(opposite, COORD_zero(), z.y)));
    return z;
}

/* A thread's points are as far apart as the block has threads, and share one inversion, as in the field's kernels:
 * Montgomery 1987, Mathematics of Computation 48, pages 243 to 264. */
ACL_KERNEL ACL_BLOCK(CURVE_BLOCK) void curve_add(ACL_GLOBAL const u64 *x, ACL_GLOBAL const u64 *y, ACL_GLOBAL u64 *z, i64 n) {
    i64 threads = acl_local_size();
    i64 first = acl_group_id() * threads * CURVE_ADDS + acl_local_id();
    if (first >= n) {
        return;
    }
    i32 count = n - first > (CURVE_ADDS - 1) * threads ? CURVE_ADDS : (i32)((n - first - 1) / threads) + 1;
    COORD before[CURVE_ADDS];
    COORD product = COORD_one();
#pragma unroll 1
    for (i32 k = 0; k < count; k++) {
        i64 at = first + k * threads;
        before[k] = product;
        product = COORD_MUL(product, COORD_run_of(COORD_affine_load(x, at), COORD_affine_load(y, at)));
    }
    COORD inverse = COORD_inverse(product);
#pragma unroll 1
    for (i32 k = count - 1; k >= 0; k--) {
        i64 at = first + k * threads;
        COORD_affine p = COORD_affine_load(x, at), q = COORD_affine_load(y, at);
        COORD_affine sum = COORD_affine_sum(p, q, COORD_MUL(inverse, before[k]));
        inverse = COORD_MUL(inverse, COORD_run_of(p, q));
        COORD_affine_store(z, at, sum);
    }
}

/* z_i = s_i x_i: with the scalar written as 64 digits d_j - 8 of base 16 and a carry in front, 0 <= d_j < 16, which are the
 * digits of s + 8 (1 + 16 + ... + 16^63). The table, x to 8 x, is read whole for each digit. The formulas are complete, so
 * nothing branches on the scalar or the points, and no address depends on them. */
ACL_KERNEL ACL_BLOCK(CURVE_BLOCK) void curve_mul(ACL_GLOBAL const u64 *x, ACL_GLOBAL const u64 *scalars, ACL_GLOBAL u64 *z,
                                                 i64 n, i64 x_step, i64 scalar_step) {
    i64 i = acl_global_id();
    if (i >= n) {
        return;
    }
    u64 digits[4];
    u64 carry = 0;
    for (i32 k = 0; k < 4; k++) {
        u64 sum = scalars[4 * i * scalar_step + k] + carry;
        carry = sum < carry;
        digits[k] = sum + 0x8888888888888888UL;
        carry |= digits[k] < sum;
    }
    COORD_projective table[8];
    table[0] = COORD_projective_from_affine(COORD_affine_load(x, i * x_step));
#pragma unroll 1
    for (i32 k = 1; k < 8; k++) {
        table[k] = COORD_projective_add(table[k - 1], table[0]);
    }
    COORD_projective infinity;
    infinity.x = infinity.z = COORD_zero();
    infinity.y = COORD_one();
    COORD_projective total = COORD_projective_select(0 - (u32)carry, table[0], infinity);
#pragma unroll 1
    for (i32 position = 63; position >= 0; position--) {
#pragma unroll 1
        for (i32 k = 0; k < 4; k++) {
            total = COORD_projective_double(total);
        }
        u32 digit = (u32)(digits[position / 16] >> 4 * (position % 16)) & 15;
        u32 negative = (digit >> 3) - 1;
        u32 magnitude = ((digit - 8) ^ negative) - negative;
        COORD_projective term = infinity;
#pragma unroll 1
        for (u32 k = 1; k <= 8; k++) {
            term = COORD_projective_select((u32)(((u64)(k ^ magnitude) - 1) >> 32), table[k - 1], term);
        }
        term.y = COORD_select(negative, COORD_sub(COORD_zero(), term.y), term.y);
        total = COORD_projective_add(total, term);
    }
    COORD_affine_store(z, i, COORD_projective_to_affine(total));
}

/* Whether y^2 = x^3 + b, or all zeros. */
ACL_DEVICE u32 COORD_on_curve(COORD_affine p) {
    const COORD b = COORD_B;
    COORD right = COORD_add(COORD_MUL(COORD_SQUARE(p.x), p.x), b);
    return COORD_affine_is_infinity(p) | COORD_is_zero(COORD_sub(COORD_SQUARE(p.y), right));
}

ACL_CONSTANT u64 COORD_eigenvalue[] = {CURVE_EIGENVALUE};

/* Whether a point of the curve is in the subgroup of order r: whether (c x', d y') = k P, with x' the conjugate over Fq2.
 * See Endomorphism in parameters.py for the constants and the proof. */
ACL_DEVICE u32 COORD_in_subgroup(COORD_affine p) {
    if (CURVE_EIGENVALUE_BITS == 0) {
        return ~(u32)0; /* the whole curve is the subgroup */
    }
    const COORD c = COORD_ENDOMORPHISM_X, d = COORD_ENDOMORPHISM_Y;
    COORD_projective base = COORD_projective_from_affine(p);
    COORD_projective multiple = base;
#pragma unroll 1
    for (i32 bit = CURVE_EIGENVALUE_BITS - 2; bit >= 0; bit--) {
        multiple = COORD_projective_double(multiple);
        if (COORD_eigenvalue[bit / 64] >> bit % 64 & 1) {
            multiple = COORD_projective_add(multiple, base);
        }
    }
    COORD x = COORD_MUL(COORD_MUL(COORD_CONJUGATE(p.x), c), multiple.z);
    COORD y = COORD_MUL(COORD_MUL(COORD_CONJUGATE(p.y), d), multiple.z);
    u32 finite = ~COORD_is_zero(multiple.z); /* or both products are 0, as is X of infinity */
    u32 equal = finite & COORD_is_zero(COORD_sub(x, multiple.x)) & COORD_is_zero(COORD_sub(y, multiple.y));
    return equal | COORD_affine_is_infinity(p);
}

/* The least index in a chunk whose point is not good; n if there is none. A block processes a chunk, one point per thread at
 * a time; or, for chunks of one point, as many chunks as it has threads. */
#define CURVE_FIRST_BUT(good)                                                                          \
    ACL_LOCAL i64 tile[CURVE_BLOCK];                                                                   \
    i32 thread = acl_local_id();                                                                       \
    i64 span = chunk == 1 ? acl_local_size() : chunk;                                                  \
    i64 start = acl_group_id() * span;                                                                 \
    i64 end = start + span < n ? start + span : n;                                                     \
    i64 least = n;                                                                                     \
    for (i64 i = start + thread; i < end && least == n; i += acl_local_size()) {                       \
        least = good(COORD_affine_load(x, i)) ? n : i;                                                 \
    }                                                                                                  \
    if (chunk == 1) {                                                                                  \
        if (start + thread < n) {                                                                      \
            first[start + thread] = least;                                                             \
        }                                                                                              \
        return;                                                                                        \
    }                                                                                                  \
    tile[thread] = least;                                                                              \
    for (i32 width = acl_local_size() / 2; width > 0; width /= 2) {                                    \
        acl_barrier();                                                                                 \
        if (thread < width) {                                                                          \
            least = tile[thread + width] < least ? tile[thread + width] : least;                       \
            tile[thread] = least;                                                                      \
        }                                                                                              \
    }                                                                                                  \
    if (thread == 0 && start < n) {                                                                    \
        first[acl_group_id()] = least;                                                                 \
    }

ACL_CONSTANT u64 COORD_order[] = {CURVE_ORDER};

/* Convert canonical points to Montgomery form. *verdict becomes 1 where a coefficient is not below the modulus, a point is off
 * the curve, or a scalar is not below r. */
ACL_KERNEL ACL_BLOCK(CURVE_BLOCK) void curve_inward(ACL_GLOBAL const u64 *x, ACL_GLOBAL u64 *z, ACL_GLOBAL const u64 *scalars,
                                                    ACL_GLOBAL u32 *verdict, i64 n, i64 n_scalars) {
    i64 i = acl_global_id();
    u32 good = 1;
    if (i < n) {
#pragma unroll 1
        for (i64 k = CURVE_PARTS * i; k < CURVE_PARTS * (i + 1); k++) {
            BASE part = BASE_load(x, k);
            good &= BASE_is_reduced(part);
            BASE_store(z, k, BASE_to_montgomery(part));
        }
        good &= COORD_on_curve(COORD_affine_load(z, i));
    }
    if (i < n_scalars) {
        u64 borrow = 0;
        for (i32 k = 0; k < 4; k++) {
            u64 word = scalars[4 * i + k];
            borrow = word < COORD_order[k] || word - COORD_order[k] < borrow;
        }
        good &= (u32)borrow;
    }
    if (!good) {
        *verdict = 1;
    }
}

ACL_KERNEL ACL_BLOCK(CURVE_BLOCK) void curve_off_curve(ACL_GLOBAL const u64 *x, ACL_GLOBAL i64 *first, i64 n, i64 chunk) {
    CURVE_FIRST_BUT(COORD_on_curve)
}

ACL_KERNEL ACL_BLOCK(CURVE_BLOCK) void curve_off_subgroup(ACL_GLOBAL const u64 *x, ACL_GLOBAL i64 *first, i64 n, i64 chunk) {
    CURVE_FIRST_BUT(COORD_in_subgroup)
}
