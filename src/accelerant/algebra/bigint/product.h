/* Sums and Montgomery products modulo an odd number of LIMBS limbs of 32 bits: LANES threads a number on NVIDIA, one
 * elsewhere; kernel.c and pair.c use them.
 *
 * Layout: numbers have LIMBS words, the least significant first; lane l of a number's group has limbs l WIDTH to
 * (l + 1) WIDTH - 1 in registers, WIDTH = LIMBS / LANES. Words are in Montgomery form, x R mod n with R = 2^(32 LIMBS), and
 * below n. Lanes exchange words by shuffles on NVIDIA, and, for tests, through local memory (tile) elsewhere.
 * Grid: a block has several groups; those past the last number compute its product again and store nothing.
 * Time and addresses depend on sizes only, not on the numbers: carries and subtractions are computed always.
 * Bound by the 32-bit multiplier: 2 LIMBS^2 wide products for each Montgomery product.
 * Source: Koc, Acar and Kaliski 1996, IEEE Micro 16(3), "CIOS"; lanes as in Emmart, Luitjens, Weems and Woolley 2016,
 * "Optimizing modular multiplication for NVIDIA's Maxwell GPUs", ARITH 23. */
#define WIDTH (LIMBS / LANES)

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

/* t + top R - n where that is not negative, else t; top becomes the new word above, subtracted whether n was. */
ACL_DEVICE bigint_part bigint_reduced(BIGINT_TILE_ARGUMENT, bigint_part t, bigint_part n, u32 *top, u32 *subtracted) {
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
    u32 out = (u32)(into >> LANES & 1), kept = out & (*top == 0 ? 1U : 0U), keep = 0U - kept;
    BIGINT_UNROLL
    for (int j = 0; j < WIDTH; j++) {
        t.limb[j] = (t.limb[j] & keep) | (less.limb[j] & ~keep);
    }
    *top -= out & ~keep;
    *subtracted = kept ^ 1U;
    return t;
}

/* t with all carries done, and in top the word above: each lane owes `over`, a few units at most, to the limb above its
 * own; then carries of 1 go through all lanes at once. */
ACL_DEVICE bigint_part bigint_carried(BIGINT_TILE_ARGUMENT, bigint_part t, u32 over, u32 *top) {
    i32 lane = bigint_lane(), previous = lane ? lane - 1 : 0;
    u64 carry = bigint_from(tile, over, previous) & (lane ? 0xffffffffU : 0);
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
    *top = bigint_from(tile, over, LANES - 1) + (u32)(into >> LANES & 1);
    return t;
}

/* x + y + one mod n, where x + y + one < 2 n; subtracted becomes whether n was subtracted. */
ACL_DEVICE bigint_part bigint_sum(
    BIGINT_TILE_ARGUMENT, bigint_part x, bigint_part y, u32 one, bigint_part n, u32 *subtracted) {
    u64 carry = bigint_lane() ? 0 : one;
    u32 top;
    BIGINT_UNROLL
    for (int j = 0; j < WIDTH; j++) {
        carry += (u64)x.limb[j] + y.limb[j];
        x.limb[j] = (u32)carry;
        carry >>= 32;
    }
    x = bigint_carried(tile, x, (u32)carry, &top);
    return bigint_reduced(tile, x, n, &top, subtracted);
}

/* Sums of rows, x factor, and of multiples of n; see bigint_row and bigint_step. What is left to add to the lowest limb is
 * `low`. NVIDIA's carry flag adds the two words of each product at once, but only to pairs of words that do not overlap: so
 * products of the even limbs of x go to `even`, those of the odd ones to `odd`, which is one limb further up, and carries
 * to top, two limbs above even's last one. */
#if defined(__CUDA_ARCH__) && WIDTH % 2 == 0
typedef struct {
    u32 even[WIDTH], odd[WIDTH], top, low;
} bigint_rows;

ACL_DEVICE bigint_rows bigint_begin(bigint_part t, u32 low) {
    bigint_rows z;
    BIGINT_UNROLL
    for (int j = 0; j < WIDTH; j++) {
        z.even[j] = t.limb[j];
        z.odd[j] = 0;
    }
    z.top = 0;
    z.low = low;
    return z;
}

ACL_DEVICE void bigint_row(bigint_rows *t, bigint_part x, u32 factor) {
    BIGINT_PTX_ROW(t->even, t->odd, t->top, t->low, x.limb, factor);
    t->low = 0;
}

ACL_DEVICE u32 bigint_lowest(const bigint_rows *t) {
    return t->even[0];
}

ACL_DEVICE void bigint_shift(bigint_rows *t, u32 incoming) {
    bigint_rows z;
    BIGINT_UNROLL
    for (int j = 0; j < WIDTH; j++) {
        z.even[j] = t->odd[j];
        z.odd[j] = j + 2 < WIDTH ? t->even[j + 2 < WIDTH ? j + 2 : 0] : j + 1 < WIDTH ? incoming : t->top;
    }
    z.low = t->even[1];
    z.top = 0;
    *t = z;
}

ACL_DEVICE bigint_part bigint_end(const bigint_rows *t, u32 *over) {
    bigint_part z;
    u64 carry = t->low;
    BIGINT_UNROLL
    for (int j = 0; j < WIDTH; j++) {
        carry += (u64)t->even[j] + (j ? t->odd[j ? j - 1 : 0] : 0);
        z.limb[j] = (u32)carry;
        carry >>= 32;
    }
    *over = (u32)carry + t->odd[WIDTH - 1];
    return z;
}
#else
typedef struct {
    bigint_part part;
    u64 over;
    u32 low;
} bigint_rows;

ACL_DEVICE bigint_rows bigint_begin(bigint_part t, u32 low) {
    bigint_rows z;
    z.part = t;
    z.over = 0;
    z.low = low;
    return z;
}

ACL_DEVICE void bigint_row(bigint_rows *t, bigint_part x, u32 factor) {
    u64 carry = t->low;
    BIGINT_UNROLL
    for (int j = 0; j < WIDTH; j++) {
        carry += (u64)x.limb[j] * factor + t->part.limb[j];
        t->part.limb[j] = (u32)carry;
        carry >>= 32;
    }
    t->over += carry;
    t->low = 0;
}

ACL_DEVICE u32 bigint_lowest(const bigint_rows *t) {
    return t->part.limb[0];
}

ACL_DEVICE void bigint_shift(bigint_rows *t, u32 incoming) {
    BIGINT_UNROLL
    for (int j = 0; j + 1 < WIDTH; j++) {
        t->part.limb[j] = t->part.limb[j + 1];
    }
    t->over += incoming;
    t->part.limb[WIDTH - 1] = (u32)t->over;
    t->over >>= 32;
}

ACL_DEVICE bigint_part bigint_end(const bigint_rows *t, u32 *over) {
    *over = (u32)t->over;
    return t->part;
}
#endif

/* (t + n m) / 2^32 for the m, returned, that makes the lowest limb 0: all limbs move down by one, between lanes too. */
ACL_DEVICE u32 bigint_step(BIGINT_TILE_ARGUMENT, bigint_rows *t, bigint_part n, u32 inverse) {
    i32 lane = bigint_lane(), next = lane + 1 < LANES ? lane + 1 : lane;
    u32 inner = lane + 1 < LANES ? 0xffffffffU : 0;
    u32 m = bigint_from(tile, bigint_lowest(t) * inverse, 0);
    bigint_row(t, n, m);
    bigint_shift(t, bigint_from(tile, bigint_lowest(t), next) & inner);
    return m;
}

/* x y / R mod n: for each limb of y, that limb times x is added and a step made. x may be any number below R. */
ACL_FAR bigint_part bigint_product(BIGINT_TILE_ARGUMENT, bigint_part x, bigint_part y, bigint_part n, u32 inverse) {
    bigint_part t;
    u32 over, top, subtracted;
    BIGINT_UNROLL
    for (int j = 0; j < WIDTH; j++) {
        t.limb[j] = 0;
    }
    bigint_rows rows = bigint_begin(t, 0);
    for (i32 from = 0; from < LANES; from++) {
        BIGINT_UNROLL
        for (int i = 0; i < WIDTH; i++) {
            bigint_row(&rows, x, bigint_from(tile, y.limb[i], from));
            bigint_step(tile, &rows, n, inverse);
        }
    }
    t = bigint_carried(tile, bigint_end(&rows, &over), over, &top);
    return bigint_reduced(tile, t, n, &top, &subtracted);
}

/* The number of a table of `entries` ones at `entry`; all of them are read. */
ACL_DEVICE bigint_part bigint_chosen(ACL_GLOBAL const u32 *table, i64 entry, u32 entries, i64 apart, u32 wanted) {
    bigint_part z;
    BIGINT_UNROLL
    for (int j = 0; j < WIDTH; j++) {
        z.limb[j] = 0;
    }
    for (u32 k = 0; k < entries; k++) {
        u32 chosen = 0U - (((k ^ wanted) - 1U) >> 31);
        bigint_part candidate = bigint_load(table, entry + k * apart);
        BIGINT_UNROLL
        for (int j = 0; j < WIDTH; j++) {
            z.limb[j] |= candidate.limb[j] & chosen;
        }
    }
    return z;
}
