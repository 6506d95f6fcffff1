/* Montgomery products and powers modulo an odd number of LIMBS limbs of 32 bits: LANES threads a number on
 * NVIDIA, one elsewhere.
 *
 * Layout: numbers have LIMBS words, the least significant first; lane l of a number's group has limbs l WIDTH to
 * (l + 1) WIDTH - 1 in registers, WIDTH = LIMBS / LANES. Words are in Montgomery form, x R mod n with R = 2^(32 LIMBS), and
 * below n. Lanes exchange words by shuffles on NVIDIA, and, for tests, through local memory (tile) elsewhere.
 * Grid: a block has several groups; those past the last number compute its product again and store nothing.
 * Time and addresses depend on sizes only, not on the numbers: carries and the last subtraction are computed always, and
 * a power reads its whole table for each window of 4 bits.
 * Bound by the 32-bit multiplier: 2 LIMBS^2 wide products for each Montgomery product.
 * Source: Koc, Acar and Kaliski 1996, IEEE Micro 16(3), "CIOS"; lanes as in Emmart, Luitjens, Weems and Woolley 2016,
 * "Optimizing modular multiplication for NVIDIA's Maxwell GPUs", ARITH 23. */
#define WIDTH (LIMBS / LANES)
#define ENTRIES 16

typedef struct {
    u32 limb[WIDTH];
} bigint_part;

#if defined(__CUDA_ARCH__)
#define BIGINT_UNROLL _Pragma("unroll")
#define BIGINT_TILE
#define BIGINT_TILE_ARGUMENT u32 *tile
#define BIGINT_TILE_VALUE 0
ACL_DEVICE u32 bigint_from(BIGINT_TILE_ARGUMENT, u32 word, i32 lane) {
    return __shfl_sync(0xffffffffU, word, lane, LANES);
}
/* Bits of the group's lanes, lane 0 the lowest. */
ACL_DEVICE u64 bigint_ballot(BIGINT_TILE_ARGUMENT, u32 bit) {
    u32 bits = __ballot_sync(0xffffffffU, bit);
    return (bits >> (acl_local_id() % 32 / LANES * LANES)) & (0xffffffffU >> (32 - LANES));
}
#else
#define BIGINT_UNROLL /* 128 limbs in private memory, or barriers in the loops: compilers take minutes to unroll them */
#define BIGINT_TILE ACL_LOCAL u32 tile[BIGINT_BLOCK];
#define BIGINT_TILE_VALUE tile
#if defined(__OPENCL_VERSION__)
#define BIGINT_TILE_ARGUMENT __local u32 *tile
#else
#define BIGINT_TILE_ARGUMENT u32 *tile
#endif
ACL_DEVICE u32 bigint_from(BIGINT_TILE_ARGUMENT, u32 word, i32 lane) {
#if LANES > 1
    i32 first = acl_local_id() / LANES * LANES;
    tile[acl_local_id()] = word;
    acl_barrier();
    word = tile[first + lane];
    acl_barrier();
#endif
    return word;
}
ACL_DEVICE u64 bigint_ballot(BIGINT_TILE_ARGUMENT, u32 bit) {
#if LANES > 1
    i32 first = acl_local_id() / LANES * LANES;
    u64 bits = 0;
    tile[acl_local_id()] = bit;
    acl_barrier();
    for (i32 lane = 0; lane < LANES; lane++) {
        bits |= (u64)tile[first + lane] << lane;
    }
    acl_barrier();
    return bits;
#else
    return bit;
#endif
}
#endif

ACL_DEVICE i32 bigint_lane(void) {
    return acl_local_id() % LANES;
}

ACL_DEVICE bigint_part bigint_load(ACL_GLOBAL const u32 *x, i64 index) {
    bigint_part z;
    x += index * LIMBS + bigint_lane() * WIDTH;
    BIGINT_UNROLL
    for (int j = 0; j < WIDTH; j++) {
        z.limb[j] = x[j];
    }
    return z;
}

ACL_DEVICE void bigint_store(ACL_GLOBAL u32 *z, i64 index, bigint_part x) {
    z += index * LIMBS + bigint_lane() * WIDTH;
    BIGINT_UNROLL
    for (int j = 0; j < WIDTH; j++) {
        z[j] = x.limb[j];
    }
}

/* Lanes into which a carry goes, and at bit LANES the carry out, from those that make one and those that pass one on;
 * no lane does both. */
ACL_DEVICE u64 bigint_carries(u64 made, u64 passed) {
    return ((made << 1) + passed) ^ passed;
}

/* t + extra R - n where that is not negative, else t; t + extra R < 2 n. */
ACL_DEVICE bigint_part bigint_reduced(BIGINT_TILE_ARGUMENT, bigint_part t, bigint_part n, u32 extra) {
    bigint_part less;
    u64 borrow = 0;
    u32 any = 0;
    BIGINT_UNROLL
    for (int j = 0; j < WIDTH; j++) {
        u64 difference = (u64)t.limb[j] - n.limb[j] - borrow;
        less.limb[j] = (u32)difference;
        any |= less.limb[j];
        borrow = difference >> 63;
    }
    u64 made = bigint_ballot(tile, (u32)borrow);
    u64 passed = bigint_ballot(tile, any == 0 ? 1U : 0U) & ~made;
    u64 into = bigint_carries(made, passed);
    borrow = into >> bigint_lane() & 1;
    BIGINT_UNROLL
    for (int j = 0; j < WIDTH; j++) {
        u64 difference = (u64)less.limb[j] - borrow;
        less.limb[j] = (u32)difference;
        borrow = difference >> 63;
    }
    u32 negative = (u32)(into >> LANES & 1) & (extra ^ 1U);
    u32 keep = 0U - negative;
    BIGINT_UNROLL
    for (int j = 0; j < WIDTH; j++) {
        t.limb[j] = (t.limb[j] & keep) | (less.limb[j] & ~keep);
    }
    return t;
}

/* x y / R mod n. For each limb of y that limb times x is added, and n times an m that makes the lowest limb 0, which is
 * dropped: all limbs move down by one, between lanes too. `over` is what a lane owes to the limb above its own. */
ACL_FAR bigint_part bigint_product(BIGINT_TILE_ARGUMENT, bigint_part x, bigint_part y, bigint_part n, u32 inverse) {
    bigint_part t;
    i32 lane = bigint_lane(), next = lane + 1 < LANES ? lane + 1 : lane, previous = lane ? lane - 1 : 0;
    u32 inner = lane + 1 < LANES ? 0xffffffffU : 0, above = lane ? 0xffffffffU : 0;
    u64 over = 0;
    BIGINT_UNROLL
    for (int j = 0; j < WIDTH; j++) {
        t.limb[j] = 0;
    }
    for (i32 from = 0; from < LANES; from++) {
        BIGINT_UNROLL
        for (int i = 0; i < WIDTH; i++) {
            u32 factor = bigint_from(tile, y.limb[i], from);
            u64 carry = 0;
            BIGINT_UNROLL
            for (int j = 0; j < WIDTH; j++) {
                carry += (u64)x.limb[j] * factor + t.limb[j];
                t.limb[j] = (u32)carry;
                carry >>= 32;
            }
            over += carry;
            u32 m = bigint_from(tile, t.limb[0] * inverse, 0);
            carry = 0;
            BIGINT_UNROLL
            for (int j = 0; j < WIDTH; j++) {
                carry += (u64)n.limb[j] * m + t.limb[j];
                t.limb[j] = (u32)carry;
                carry >>= 32;
            }
            over += carry + (bigint_from(tile, t.limb[0], next) & inner);
            BIGINT_UNROLL
            for (int j = 0; j + 1 < WIDTH; j++) {
                t.limb[j] = t.limb[j + 1];
            }
            t.limb[WIDTH - 1] = (u32)over;
            over >>= 32;
        }
    }
    /* Each lane adds what the lane below owes, at most 2; then carries of 1 go through all lanes at once. */
    u64 carry = bigint_from(tile, (u32)over, previous) & above;
    u32 all = 0xffffffffU;
    BIGINT_UNROLL
    for (int j = 0; j < WIDTH; j++) {
        carry += t.limb[j];
        t.limb[j] = (u32)carry;
        all &= t.limb[j];
        carry >>= 32;
    }
    u64 made = bigint_ballot(tile, (u32)carry);
    u64 passed = bigint_ballot(tile, all == 0xffffffffU ? 1U : 0U) & ~made;
    u64 into = bigint_carries(made, passed);
    carry = into >> lane & 1;
    BIGINT_UNROLL
    for (int j = 0; j < WIDTH; j++) {
        carry += t.limb[j];
        t.limb[j] = (u32)carry;
        carry >>= 32;
    }
    u32 top = bigint_from(tile, (u32)over, LANES - 1) + (u32)(into >> LANES & 1);
    return bigint_reduced(tile, t, n, top);
}

/* z = x y / R mod n of `count` numbers; y has one number for all if step is 0, else as many as x. */
ACL_KERNEL ACL_BLOCK(BIGINT_BLOCK) void bigint_mul(
    ACL_GLOBAL const u32 *x, ACL_GLOBAL const u32 *y, ACL_GLOBAL u32 *z, ACL_GLOBAL const u32 *modulus, u32 inverse,
    i64 step, i64 count) {
    BIGINT_TILE
    i64 group = acl_group_id() * (acl_local_size() / LANES) + acl_local_id() / LANES;
    i64 index = group < count ? group : count - 1;
    bigint_part product = bigint_product(
        BIGINT_TILE_VALUE, bigint_load(x, index), bigint_load(y, index * step), bigint_load(modulus, 0), inverse);
    if (group < count) {
        bigint_store(z, index, product);
    }
}

/* z = x^e of `count` numbers in Montgomery form, e of `words` words of 32 bits, the least significant first; one exponent
 * for all if step is 0, else as many as x. one: R mod n. table: ENTRIES numbers for each group of the grid. */
ACL_KERNEL ACL_BLOCK(BIGINT_BLOCK) void bigint_pow(
    ACL_GLOBAL const u32 *x, ACL_GLOBAL const u32 *exponents, ACL_GLOBAL u32 *z, ACL_GLOBAL u32 *table,
    ACL_GLOBAL const u32 *modulus, ACL_GLOBAL const u32 *one, u32 inverse, i64 words, i64 step, i64 count) {
    BIGINT_TILE
    i64 group = acl_group_id() * (acl_local_size() / LANES) + acl_local_id() / LANES;
    i64 index = group < count ? group : count - 1, entry = group * ENTRIES;
    bigint_part n = bigint_load(modulus, 0), base = bigint_load(x, index), power = bigint_load(one, 0);
    for (int k = 0; k < ENTRIES; k++) {
        bigint_store(table, entry + k, power);
        power = bigint_product(BIGINT_TILE_VALUE, power, base, n, inverse);
    }
    power = bigint_load(one, 0);
    exponents += index * step * words;
    for (i64 digit = 8 * words - 1; digit >= 0; digit--) {
        u32 wanted = exponents[digit / 8] >> (4 * (u32)(digit % 8)) & 15U;
        bigint_part factor;
        BIGINT_UNROLL
        for (int j = 0; j < WIDTH; j++) {
            factor.limb[j] = 0;
        }
        for (u32 k = 0; k < ENTRIES; k++) {
            u32 chosen = 0U - (((k ^ wanted) - 1U) >> 31);
            bigint_part candidate = bigint_load(table, entry + k);
            BIGINT_UNROLL
            for (int j = 0; j < WIDTH; j++) {
                factor.limb[j] |= candidate.limb[j] & chosen;
            }
        }
        for (int k = 0; k < 5; k++) { /* four squares, then the factor */
            power = bigint_product(BIGINT_TILE_VALUE, power, k < 4 ? power : factor, n, inverse);
        }
    }
    if (group < count) {
        bigint_store(z, index, power);
    }
}
