/* Multi-scalar multiplication, between sort.c and accumulate.c: rounds that add the points of a bucket in pairs, in affine
 * coordinates, with 6 products per addition instead of 10 in XYZZ coordinates. A round halves the number of points. The
 * curve's point.h and divsteps.h, with COORD and BASE replaced, precede this file. device_plan.py has the costs.
 *
 *   msm_affine_begin    the product of the denominators x2 - x1 of a thread's pairs of entries, and the products before each
 *   msm_affine_invert   the inverses of all threads' products
 *   msm_affine_round    the sums of the pairs, given the inverse of the product; then the products of the next round's pairs
 *
 * sort.c pads a bucket's entries to units of 2^rounds with MSM_NONE, the point at infinity. Pair k is entries 2 k and 2 k + 1,
 * so both are in one bucket, and one point per unit is left after all rounds. A thread has `per_thread` consecutive units, and
 * the same ones in all rounds. Each round takes the pairs in the order opposite to the previous round's, as required by
 * Montgomery's trick. Source: Montgomery 1987, Mathematics of Computation 48, pages 243 to 264.
 *
 * In memory: thread t's k-th pair, sum or product is at k threads + t, so that a warp's accesses are coalesced; the last
 * round's sum of unit u is at u. Points are affine, in Montgomery form, infinity all zeros. */

/* Denominator of a slope: x2 - x1, or the tangent's 2 y1 for equal points, or 1 where there is no slope. */
ACL_DEVICE COORD COORD_run(COORD_affine p, COORD_affine q) {
    COORD run = COORD_sub(q.x, p.x);
    if (COORD_is_zero(run)) {
        run = COORD_add(p.y, q.y); /* 0 of opposite points, or of two at infinity */
    }
    if (COORD_affine_is_infinity(p) | COORD_affine_is_infinity(q) | COORD_is_zero(run)) {
        run = COORD_one();
    }
    return run;
}

/* Row of an entry's point. */
ACL_DEVICE i64 COORD_row(u32 entry) {
    return entry == MSM_NONE ? 0 : entry & 0x7fffffff;
}

/* An entry's point. */
ACL_DEVICE COORD_affine COORD_entry(ACL_GLOBAL const u64 *points, i64 first, u32 entry) {
    COORD_affine p = COORD_affine_negate(0 - (entry >> 31), COORD_affine_load(points, first + COORD_row(entry)));
    u32 none = 0 - (u32)(entry == MSM_NONE);
    p.x = COORD_select(none, COORD_zero(), p.x);
    p.y = COORD_select(none, COORD_zero(), p.y);
    return p;
}

/* Number of units of thread t. */
ACL_DEVICE i64 COORD_units(i64 units, i64 t, i32 per_thread) {
    i64 left = units - t * per_thread;
    return left < 0 ? 0 : left < per_thread ? left : per_thread;
}

/* Grid: one thread per `per_thread` units; arrays have `threads` columns. Reads only x unless the points are equal, opposite or
 * at infinity. The next pair is loaded before the current one is multiplied, since its addresses are random. */
ACL_KERNEL ACL_BLOCK(MSM_BEGIN_RESIDENT) void msm_affine_begin(ACL_GLOBAL const u64 *points, ACL_GLOBAL const u32 *sorted,
                                                               ACL_GLOBAL const u32 *counts, ACL_GLOBAL u64 *before,
                                                               ACL_GLOBAL u64 *totals, i64 keys, i64 first, i64 threads,
                                                               i32 per_thread, i32 rounds) {
    i64 t = acl_global_id();
    if (t >= threads) {
        return;
    }
    i64 pairs = COORD_units(counts[keys + MSM_UNITS], t, per_thread) << (rounds - 1);
    ACL_GLOBAL const u32 *entries = sorted + (t * per_thread << rounds);
    COORD product = COORD_one();
    u32 next_a = MSM_NONE, next_b = MSM_NONE;
    COORD next_p = product, next_q = product;
    if (pairs) {
        next_a = entries[0];
        next_b = entries[1];
        next_p = COORD_load(points, 2 * (first + COORD_row(next_a)));
        next_q = COORD_load(points, 2 * (first + COORD_row(next_b)));
    }
#pragma unroll 1
    for (i64 k = 0; k < pairs; k++) {
        u32 a = next_a, b = next_b;
        COORD run = COORD_sub(next_q, next_p);
        u32 rare = COORD_is_zero(next_p) | COORD_is_zero(next_q) | COORD_is_zero(run);
        if (k + 1 < pairs) {
            next_a = entries[2 * k + 2];
            next_b = entries[2 * k + 3];
            next_p = COORD_load(points, 2 * (first + COORD_row(next_a)));
            next_q = COORD_load(points, 2 * (first + COORD_row(next_b)));
        }
        COORD_store(before, k * threads + t, product);
        if ((a == MSM_NONE) | (b == MSM_NONE)) {
            continue;
        }
        if (rare) {
            run = COORD_run(COORD_entry(points, first, a), COORD_entry(points, first, b));
        }
        product = COORD_MUL(product, run);
    }
    COORD_store(totals, t, product);
}

/* totals_i = 1 / totals_i, i < n, none of which is 0. Grid: blocks of MSM_INVERT_BLOCK threads, a power of two, `per_thread`
 * totals per thread, at most MSM_INVERT_EACH, a block's threads apart; one inversion per block. tree[1] is the product of all
 * threads' products, and tree[i] = tree[2 i] tree[2 i + 1]. */
ACL_KERNEL ACL_BLOCK(MSM_INVERT_BLOCK) void msm_affine_invert(ACL_GLOBAL u64 *totals, i64 n, i32 per_thread) {
    ACL_LOCAL COORD tree[2 * MSM_INVERT_BLOCK];
    COORD before[MSM_INVERT_EACH];
    i32 thread = acl_local_id(), threads = acl_local_size();
    i64 first = acl_group_id() * threads * per_thread + thread;
    COORD product = COORD_one();
#pragma unroll 1
    for (i32 k = 0; k < per_thread; k++) {
        if (first + k * threads < n) {
            before[k] = product;
            product = COORD_MUL(product, COORD_load(totals, first + k * threads));
        }
    }
    tree[threads + thread] = product;
#pragma unroll 1
    for (i32 width = threads / 2; width > 0; width /= 2) {
        acl_barrier();
        if (thread < width) {
            tree[width + thread] = COORD_MUL(tree[2 * (width + thread)], tree[2 * (width + thread) + 1]);
        }
    }
    if (thread == 0) {
        tree[1] = COORD_inverse_vartime(tree[1]);
    }
#pragma unroll 1
    for (i32 width = 1; width < threads; width *= 2) {
        acl_barrier();
        if (thread < width) {
            COORD inverse = tree[width + thread], left = tree[2 * (width + thread)];
            tree[2 * (width + thread)] = COORD_MUL(inverse, tree[2 * (width + thread) + 1]);
            tree[2 * (width + thread) + 1] = COORD_MUL(inverse, left);
        }
    }
    acl_barrier();
    COORD inverse = tree[threads + thread];
#pragma unroll 1
    for (i32 k = per_thread - 1; k >= 0; k--) {
        if (first + k * threads < n) {
            COORD total = COORD_load(totals, first + k * threads);
            COORD_store(totals, first + k * threads, COORD_MUL(inverse, before[k]));
            inverse = COORD_MUL(inverse, total);
        }
    }
}

/* Point i of thread t in a round; in round 0 the point of its entry. */
ACL_DEVICE COORD_affine COORD_operand(ACL_GLOBAL const u64 *rows, ACL_GLOBAL const u32 *entries, i64 first, i64 threads, i64 t,
                                      i32 round, i64 i) {
    return round ? COORD_affine_load(rows, i * threads + t) : COORD_entry(rows, first, entries[i]);
}

/* Grid: as msm_affine_begin. Round `round` of `rounds`, from 0. `before` and `totals` have the products of this round,
 * `next_before` and then `totals` receive those of the next. `rows` are the points; entries index them in round 0. Even rounds
 * go down. Rarely needed values are loaded again instead of kept, since registers limit the occupancy. */
ACL_KERNEL ACL_BLOCK(MSM_RESIDENT) void msm_affine_round(ACL_GLOBAL const u64 *rows, ACL_GLOBAL const u32 *sorted,
                                                         ACL_GLOBAL const u32 *counts, ACL_GLOBAL const u64 *before,
                                                         ACL_GLOBAL u64 *totals, ACL_GLOBAL u64 *sums,
                                                         ACL_GLOBAL u64 *next_before, i64 keys, i64 first, i64 threads,
                                                         i32 per_thread, i32 round, i32 rounds) {
    i64 t = acl_global_id();
    if (t >= threads) {
        return;
    }
    i32 up = round & 1, last = round == rounds - 1;
    i32 pairs = (i32)COORD_units(counts[keys + MSM_UNITS], t, per_thread) << (rounds - 1 - round);
    ACL_GLOBAL const u32 *entries = sorted + (t * per_thread << rounds);
    COORD inverse = COORD_load(totals, t);
    COORD product = COORD_one();
#pragma unroll 1
    for (i32 step = 0; step < pairs; step++) {
        i32 k = up ? step : pairs - 1 - step;
        COORD_affine p = COORD_operand(rows, entries, first, threads, t, round, 2 * k);
        COORD_affine q = COORD_operand(rows, entries, first, threads, t, round, 2 * k + 1);
        COORD share = COORD_MUL(inverse, COORD_load(before, k * threads + t));
        inverse = COORD_MUL(inverse, COORD_run(p, q));
        u32 same = COORD_is_zero(COORD_sub(q.x, p.x));
        u32 p_alone = COORD_affine_is_infinity(q), q_alone = COORD_affine_is_infinity(p);
        COORD rise = COORD_sub(q.y, p.y);
        if (same) {
            rise = COORD_SQUARE(p.x);
            rise = COORD_add(COORD_add(rise, rise), rise);
        }
        COORD slope = COORD_MUL(rise, share);
        COORD_affine sum;
        sum.x = COORD_sub(COORD_sub(COORD_SQUARE(slope), p.x), q.x);
        sum.y = COORD_sub(COORD_MUL(slope, COORD_sub(p.x, sum.x)), p.y);
        sum.x = COORD_select(p_alone, p.x, sum.x);
        sum.y = COORD_select(p_alone, p.y, sum.y);
        if ((same | q_alone) & ~p_alone) {
            q = COORD_operand(rows, entries, first, threads, t, round, 2 * k + 1);
            u32 opposite = same & COORD_is_zero(COORD_add(p.y, q.y));
            sum.x = COORD_select(q_alone, q.x, COORD_select(opposite, COORD_zero(), sum.x));
            sum.y = COORD_select(q_alone, q.y, COORD_select(opposite, COORD_zero(), sum.y));
        }
        COORD_affine_store(sums, last ? t * per_thread + k : k * threads + t, sum);
        if (!last && (step & 1)) {
            COORD_affine held = COORD_affine_load(sums, (k ^ 1) * threads + t);
            COORD_store(next_before, (k >> 1) * threads + t, product);
            product = COORD_MUL(product, up ? COORD_run(held, sum) : COORD_run(sum, held));
        }
    }
    if (!last) {
        COORD_store(totals, t, product);
    }
}
