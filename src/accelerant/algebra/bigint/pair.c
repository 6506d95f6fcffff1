/* Numbers modulo the square of n as pairs, low + high n with both below n, with the functions of product.h.
 *
 * A product modulo n^2 takes products of half its size alone. With a c + mu n = t R, as Montgomery's product finds mu,
 *     (a + b n) (c + d n) = (t + w n) R mod n^2,    w = (a d + b c - mu) / R mod n,
 * and a square needs a b once: 4 LIMBS^2 wide products, where Montgomery's square of twice the size takes 8 LIMBS^2.
 * -mu is ~mu + 1 - R, so that w = (a d + b c + ~mu + 1) / R - 1. A pair is in Montgomery form, x R mod n^2, and has
 * 2 LIMBS words: low, then high. Layout, grid and timing: see product.h. */

typedef struct {
    bigint_part low, high;
} bigint_pair;

ACL_DEVICE bigint_pair bigint_pair_load(ACL_GLOBAL const u32 *x, i64 index) {
    bigint_pair z;
    z.low = bigint_load(x, 2 * index);
    z.high = bigint_load(x, 2 * index + 1);
    return z;
}

ACL_DEVICE void bigint_pair_store(ACL_GLOBAL u32 *z, i64 index, bigint_pair x) {
    bigint_store(z, 2 * index, x.low);
    bigint_store(z, 2 * index + 1, x.high);
}

/* t and mu of x y + mu n = t R, or of t - n, if that is not negative: subtracted is 1. x may be any number below R. */
ACL_DEVICE bigint_part bigint_quotient(
    BIGINT_TILE_ARGUMENT, bigint_part x, bigint_part y, bigint_part n, u32 inverse, bigint_part *mu, u32 *subtracted) {
    bigint_part t;
    u32 over, top;
    BIGINT_UNROLL
    for (int j = 0; j < WIDTH; j++) {
        t.limb[j] = mu->limb[j] = 0;
    }
    bigint_rows rows = bigint_begin(t, 0);
    for (i32 from = 0; from < LANES; from++) {
        u32 mine = bigint_lane() == from ? 0xffffffffU : 0;
        BIGINT_UNROLL
        for (int i = 0; i < WIDTH; i++) {
            bigint_row(&rows, x, bigint_from(tile, y.limb[i], from));
            mu->limb[i] |= bigint_step(tile, &rows, n, inverse) & mine;
        }
    }
    t = bigint_carried(tile, bigint_end(&rows, &over), over, &top);
    return bigint_reduced(tile, t, n, &top, subtracted);
}

/* (x y + v w - mu) / R + one mod n; without v w if cross is 0. */
ACL_DEVICE bigint_part bigint_cross(
    BIGINT_TILE_ARGUMENT, bigint_part x, bigint_part y, bigint_part v, bigint_part w, int cross, bigint_part mu, u32 one,
    bigint_part n, u32 inverse) {
    bigint_part t;
    u32 over, top, unused;
    BIGINT_UNROLL
    for (int j = 0; j < WIDTH; j++) {
        t.limb[j] = ~mu.limb[j];
    }
    bigint_rows rows = bigint_begin(t, bigint_lane() == 0 ? 1U : 0U);
    for (i32 from = 0; from < LANES; from++) {
        BIGINT_UNROLL
        for (int i = 0; i < WIDTH; i++) {
            bigint_row(&rows, x, bigint_from(tile, y.limb[i], from));
            if (cross) {
                bigint_row(&rows, v, bigint_from(tile, w.limb[i], from));
            }
            bigint_step(tile, &rows, n, inverse);
        }
    }
    t = bigint_carried(tile, bigint_end(&rows, &over), over, &top); /* below 3 n */
    t = bigint_reduced(tile, t, n, &top, &unused);
    t = bigint_reduced(tile, t, n, &top, &unused);
    bigint_part less = n; /* n - 1 + one: n is odd */
    less.limb[0] ^= bigint_lane() ? 0 : one ^ 1U;
    return bigint_sum(tile, t, less, 0, n, &unused);
}

/* x y / R mod n^2; x.low may be any number below R if x.high is 0. */
ACL_FAR bigint_pair bigint_pair_product(
    BIGINT_TILE_ARGUMENT, bigint_pair x, bigint_pair y, bigint_part n, u32 inverse) {
    bigint_pair z;
    bigint_part mu;
    u32 one;
    z.low = bigint_quotient(tile, x.low, y.low, n, inverse, &mu, &one);
    z.high = bigint_cross(tile, x.low, y.high, x.high, y.low, 1, mu, one, n, inverse);
    return z;
}

/* x x / R mod n^2. */
ACL_FAR bigint_pair bigint_pair_square(BIGINT_TILE_ARGUMENT, bigint_pair x, bigint_part n, u32 inverse) {
    bigint_pair z;
    bigint_part mu;
    u32 one;
    z.low = bigint_quotient(tile, x.low, x.low, n, inverse, &mu, &one);
    u32 unused;
    bigint_part twice = bigint_sum(tile, x.high, x.high, 0, n, &unused);
    z.high = bigint_cross(tile, x.low, twice, twice, twice, 0, mu, one, n, inverse);
    return z;
}

/* z = x y / R mod n^2 of `count` pairs; y has one pair for all if step is 0, else as many as x. */
ACL_KERNEL ACL_BLOCK(BIGINT_BLOCK) void bigint_pair_mul(
    ACL_GLOBAL const u32 *x, ACL_GLOBAL const u32 *y, ACL_GLOBAL u32 *z, ACL_GLOBAL const u32 *modulus, u32 inverse,
    i64 step, i64 count) {
    BIGINT_TILE
    i64 group = acl_group_id() * (acl_local_size() / LANES) + acl_local_id() / LANES;
    i64 index = group < count ? group : count - 1;
    bigint_pair product = bigint_pair_product(
        BIGINT_TILE_VALUE, bigint_pair_load(x, index), bigint_pair_load(y, index * step), bigint_load(modulus, 0),
        inverse);
    if (group < count) {
        bigint_pair_store(z, index, product);
    }
}

/* z = sum over k of the LIMBS words k of x times constant k, / R mod n^2, of `count` numbers of chunks LIMBS words. */
ACL_KERNEL ACL_BLOCK(BIGINT_BLOCK) void bigint_pair_from(
    ACL_GLOBAL const u32 *x, ACL_GLOBAL const u32 *constants, ACL_GLOBAL u32 *z, ACL_GLOBAL const u32 *modulus,
    u32 inverse, i64 chunks, i64 count) {
    BIGINT_TILE
    i64 group = acl_group_id() * (acl_local_size() / LANES) + acl_local_id() / LANES;
    i64 index = group < count ? group : count - 1;
    bigint_part n = bigint_load(modulus, 0);
    bigint_pair sum;
    BIGINT_UNROLL
    for (int j = 0; j < WIDTH; j++) {
        sum.low.limb[j] = sum.high.limb[j] = 0;
    }
    for (i64 k = 0; k < chunks; k++) {
        bigint_pair term = sum;
        u32 one;
        term.low = bigint_load(x, index * chunks + k);
        BIGINT_UNROLL
        for (int j = 0; j < WIDTH; j++) {
            term.high.limb[j] = 0;
        }
        term = bigint_pair_product(BIGINT_TILE_VALUE, term, bigint_pair_load(constants, k), n, inverse);
        sum.low = bigint_sum(BIGINT_TILE_VALUE, sum.low, term.low, 0, n, &one);
        sum.high = bigint_sum(BIGINT_TILE_VALUE, sum.high, term.high, one, n, &one);
    }
    if (group < count) {
        bigint_pair_store(z, index, sum);
    }
}

/* z = x^e of `count` pairs. e has digits of `window` bits, digits window <= 32 (words - 1). one: R mod n^2. table: 2^window
 * pairs for each group of the grid; all are read for each digit if secret is 1, else addresses depend on e. */
ACL_KERNEL ACL_BLOCK(BIGINT_BLOCK) void bigint_pair_pow(
    ACL_GLOBAL const u32 *x, ACL_GLOBAL const u32 *exponent, ACL_GLOBAL u32 *z, ACL_GLOBAL u32 *table,
    ACL_GLOBAL const u32 *modulus, ACL_GLOBAL const u32 *one, u32 inverse, i64 digits, i64 window, i64 secret,
    i64 count) {
    BIGINT_TILE
    i64 group = acl_group_id() * (acl_local_size() / LANES) + acl_local_id() / LANES;
    i64 index = group < count ? group : count - 1, entries = (i64)1 << window, entry = group * entries;
    bigint_part n = bigint_load(modulus, 0);
    bigint_pair base = bigint_pair_load(x, index), power = bigint_pair_load(one, 0);
    for (i64 k = 0; k < entries; k++) {
        bigint_pair_store(table, entry + k, power);
        power = bigint_pair_product(BIGINT_TILE_VALUE, power, base, n, inverse);
    }
    power = bigint_pair_load(one, 0);
    for (i64 digit = digits - 1; digit >= 0; digit--) {
        i64 bit = digit * window;
        u64 pair_of_words = exponent[bit / 32] | (u64)exponent[bit / 32 + 1] << 32;
        u32 wanted = (u32)(pair_of_words >> (bit % 32)) & (u32)(entries - 1);
        for (i64 k = 0; k < window; k++) {
            power = bigint_pair_square(BIGINT_TILE_VALUE, power, n, inverse);
        }
        bigint_pair factor;
        if (secret) {
            factor.low = bigint_chosen(table, 2 * entry, (u32)entries, 2, wanted);
            factor.high = bigint_chosen(table, 2 * entry + 1, (u32)entries, 2, wanted);
        } else {
            factor = bigint_pair_load(table, entry + wanted);
        }
        power = bigint_pair_product(BIGINT_TILE_VALUE, power, factor, n, inverse);
    }
    if (group < count) {
        bigint_pair_store(z, index, power);
    }
}
