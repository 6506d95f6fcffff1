/* Sums of multiples, between sort.c and accumulate.c: rounds that add up the points of a bucket in pairs, in affine
 * coordinates, for 6 products each where an addition in XYZZ coordinates takes 10. A round leaves half as many points. Before
 * this stand the curve's point.h and divsteps.h, with COORD and BASE replaced. What rounds cost is in affine.py.
 *
 *   msm_affine_begin    the product of the slopes' runs, x2 - x1, of a thread's pairs of entries, and of those before each
 *   msm_affine_invert   the inverses of all threads' products
 *   msm_affine_round    the sums of the pairs, given the inverse of the runs' product; and as msm_affine_begin of the sums
 *
 * With so many rounds that sort.c pads a bucket's entries to a multiple of 2^rounds, which is a unit, pair k is entries 2 k
 * and 2 k + 1: no pair has two buckets, and after all rounds there is one point a unit. MSM_NONE pads: a point at infinity.
 * A thread has `each` units one after the other, hence pairs << rounds - 1 - r of round r, and no other thread's in any round.
 * A round takes the pairs in the order opposite to that of the round before, as Montgomery's trick has it: product by
 * product back. Source: Montgomery 1987, Mathematics of Computation 48, pages 243 to 264.
 *
 * In memory: thread t's k-th pair, sum or product is at k threads + t, so that a warp's are side by side; the last round's
 * sum of unit u is at u. Points are affine, in Montgomery form, infinity all zeros. */

/* What a slope is divided by: x2 - x1, the tangent's 2 y1 of equal points, and 1 where there is no slope. */
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

/* Of an entry the point's row. */
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

/* How many units are the thread's. */
ACL_DEVICE i64 COORD_units(i64 units, i64 t, i32 each) {
    i64 left = units - t * each;
    return left < 0 ? 0 : left < each ? left : each;
}

/* Grid: one thread `each` units; `threads` is what all arrays are cut for. Reads x alone but where the points are equal,
 * opposite or at infinity. The next pair's are asked for before the last's are multiplied, since their address is random. */
ACL_KERNEL ACL_BLOCK(MSM_BEGIN_RESIDENT) void msm_affine_begin(ACL_GLOBAL const u64 *points, ACL_GLOBAL const u32 *sorted,
                                                               ACL_GLOBAL const u32 *counts, ACL_GLOBAL u64 *before,
                                                               ACL_GLOBAL u64 *totals, i64 keys, i64 first, i64 threads,
                                                               i32 each, i32 rounds) {
    i64 t = acl_global_id();
    if (t >= threads) {
        return;
    }
    i64 pairs = COORD_units(counts[keys + MSM_UNITS], t, each) << (rounds - 1);
    ACL_GLOBAL const u32 *place = sorted + (t * each << rounds);
    COORD product = COORD_one();
    u32 next_a = MSM_NONE, next_b = MSM_NONE;
    COORD next_p = product, next_q = product;
    if (pairs) {
        next_a = place[0];
        next_b = place[1];
        next_p = COORD_load(points, 2 * (first + COORD_row(next_a)));
        next_q = COORD_load(points, 2 * (first + COORD_row(next_b)));
    }
#pragma unroll 1
    for (i64 k = 0; k < pairs; k++) {
        u32 a = next_a, b = next_b;
        COORD run = COORD_sub(next_q, next_p);
        u32 rare = COORD_is_zero(next_p) | COORD_is_zero(next_q) | COORD_is_zero(run);
        if (k + 1 < pairs) {
            next_a = place[2 * k + 2];
            next_b = place[2 * k + 3];
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

/* totals_i = 1 / totals_i, i < n, none of which is 0. Grid: blocks of MSM_INVERT_BLOCK threads, a power of two, `each` totals a
 * thread, at most MSM_INVERT_EACH, a block's threads apart; one inverse a block. `tree` has at 1 the product of all threads'
 * products, at 2 i and 2 i + 1 the two that make that at i. */
ACL_KERNEL ACL_BLOCK(MSM_INVERT_BLOCK) void msm_affine_invert(ACL_GLOBAL u64 *totals, i64 n, i32 each) {
    ACL_LOCAL COORD tree[2 * MSM_INVERT_BLOCK];
    COORD before[MSM_INVERT_EACH];
    i32 thread = acl_local_id(), threads = acl_local_size();
    i64 first = acl_group_id() * threads * each + thread;
    COORD product = COORD_one();
#pragma unroll 1
    for (i32 k = 0; k < each; k++) {
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
    for (i32 k = each - 1; k >= 0; k--) {
        if (first + k * threads < n) {
            COORD total = COORD_load(totals, first + k * threads);
            COORD_store(totals, first + k * threads, COORD_MUL(inverse, before[k]));
            inverse = COORD_MUL(inverse, total);
        }
    }
}

/* Row i of the thread's in a round; in round 0 what its entry names. */
ACL_DEVICE COORD_affine COORD_operand(ACL_GLOBAL const u64 *rows, ACL_GLOBAL const u32 *place, i64 first, i64 threads, i64 t,
                                      i32 round, i64 i) {
    return round ? COORD_affine_load(rows, i * threads + t) : COORD_entry(rows, first, place[i]);
}

/* Grid: as msm_affine_begin. Round `round` of `rounds`, from 0; before it `before` and `totals` have what its pairs are summed
 * with, after it `next_before` and `totals` what the next round's are. `rows` are the points, or in round 0 those that entries
 * name. Even rounds go down. What is seldom needed is read again, not kept: registers are what there is least of. */
ACL_KERNEL ACL_BLOCK(MSM_RESIDENT) void msm_affine_round(ACL_GLOBAL const u64 *rows, ACL_GLOBAL const u32 *sorted,
                                                         ACL_GLOBAL const u32 *counts, ACL_GLOBAL const u64 *before,
                                                         ACL_GLOBAL u64 *totals, ACL_GLOBAL u64 *sums,
                                                         ACL_GLOBAL u64 *next_before, i64 keys, i64 first, i64 threads,
                                                         i32 each, i32 round, i32 rounds) {
    i64 t = acl_global_id();
    if (t >= threads) {
        return;
    }
    i32 up = round & 1, last = round == rounds - 1;
    i32 pairs = (i32)COORD_units(counts[keys + MSM_UNITS], t, each) << (rounds - 1 - round);
    ACL_GLOBAL const u32 *place = sorted + (t * each << rounds);
    COORD inverse = COORD_load(totals, t);
    COORD product = COORD_one();
#pragma unroll 1
    for (i32 step = 0; step < pairs; step++) {
        i32 k = up ? step : pairs - 1 - step;
        COORD_affine p = COORD_operand(rows, place, first, threads, t, round, 2 * k);
        COORD_affine q = COORD_operand(rows, place, first, threads, t, round, 2 * k + 1);
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
            q = COORD_operand(rows, place, first, threads, t, round, 2 * k + 1);
            u32 opposite = same & COORD_is_zero(COORD_add(p.y, q.y));
            sum.x = COORD_select(q_alone, q.x, COORD_select(opposite, COORD_zero(), sum.x));
            sum.y = COORD_select(q_alone, q.y, COORD_select(opposite, COORD_zero(), sum.y));
        }
        COORD_affine_store(sums, last ? t * each + k : k * threads + t, sum);
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
