/* Products, sums and powers of vectors of numbers modulo n, with the functions of product.h.
 *
 * Grid: a block has several groups; those past the last number compute its result again and store nothing.
 * A power of bigint_pow reads its whole table for each window of 4 bits. */
#define ENTRIES 16

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
        bigint_part factor = bigint_chosen(table, entry, ENTRIES, 1, wanted);
        for (int k = 0; k < 5; k++) { /* four squares, then the factor */
            power = bigint_product(BIGINT_TILE_VALUE, power, k < 4 ? power : factor, n, inverse);
        }
    }
    if (group < count) {
        bigint_store(z, index, power);
    }
}

/* z = x + y mod n of `count` numbers; y has one number for all if step is 0, else as many as x. */
ACL_KERNEL ACL_BLOCK(BIGINT_BLOCK) void bigint_add(
    ACL_GLOBAL const u32 *x, ACL_GLOBAL const u32 *y, ACL_GLOBAL u32 *z, ACL_GLOBAL const u32 *modulus, i64 step,
    i64 count) {
    BIGINT_TILE
    i64 group = acl_group_id() * (acl_local_size() / LANES) + acl_local_id() / LANES;
    i64 index = group < count ? group : count - 1;
    u32 subtracted;
    bigint_part sum = bigint_sum(
        BIGINT_TILE_VALUE, bigint_load(x, index), bigint_load(y, index * step), 0, bigint_load(modulus, 0), &subtracted);
    if (group < count) {
        bigint_store(z, index, sum);
    }
}

/* z = product of table[256 i + byte i of an exponent], i from 0 to below 4 words, of `count` exponents; the addresses
 * depend on the exponents. */
ACL_KERNEL ACL_BLOCK(BIGINT_BLOCK) void bigint_fixed_vartime(
    ACL_GLOBAL const u32 *table, ACL_GLOBAL const u32 *exponents, ACL_GLOBAL u32 *z, ACL_GLOBAL const u32 *modulus,
    u32 inverse, i64 words, i64 count) {
    BIGINT_TILE
    i64 group = acl_group_id() * (acl_local_size() / LANES) + acl_local_id() / LANES;
    i64 index = group < count ? group : count - 1;
    bigint_part n = bigint_load(modulus, 0);
    exponents += index * words;
    bigint_part power = bigint_load(table, exponents[0] & 255U);
    for (i64 i = 1; i < 4 * words; i++) {
        u32 digit = exponents[i / 4] >> (8 * (u32)(i % 4)) & 255U;
        power = bigint_product(BIGINT_TILE_VALUE, power, bigint_load(table, 256 * i + digit), n, inverse);
    }
    if (group < count) {
        bigint_store(z, index, power);
    }
}
