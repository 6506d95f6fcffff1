/* A table of factors, made on the device that uses it:
 *
 *     z[position][c] = s a^row (t w^row)^(c 2^log_unit)       row = position, or bitrev(position) by_bits; c < 2^log_count
 *
 * Preceded by the field (field_text with the prefix F), POWERS_LADDER, and device_c.h or device_cuda.h.
 *
 * ladder: s, in the table's form; then POWERS_LADDER elements each of a, t and w in Montgomery form, element j
 * raised to 2^j. by_row, by_column: whether a and t are other than 1.
 * Grid: a thread for 2^log_steps factors of a row, 2^(log_count - log_steps) apart, so that neighbours store neighbours.
 * Multiplies: one per factor, and for each thread the bits set in its exponents, about two per factor in all. Bound by memory
 * for fields of one word, else by multiplies: 2^24 factors take some milliseconds; on the host, seconds.
 * The time depends only on the numbers of rows and columns. */

/* v x^exponent, of the elements x^(2^j) from `first` on. */
ACL_DEVICE F powers_times(F v, ACL_GLOBAL const F_WORD *ladder, i32 first, u64 exponent) {
    for (i32 j = first; exponent; j++) {
        if (exponent & 1) {
            v = F_mul(v, F_load(ladder, j));
        }
        exponent >>= 1;
    }
    return v;
}

ACL_KERNEL ACL_BLOCK(POWERS_BLOCK) void ntt_powers(
    ACL_GLOBAL F_WORD *z, ACL_GLOBAL const F_WORD *ladder, i64 log_rows, i64 log_count, i64 log_steps, i64 log_unit,
    i64 by_bits, i64 by_row, i64 by_column) {
    const i64 i = acl_global_id(), log_apart = log_count - log_steps;
    const i64 position = i >> log_apart, c = i & (((i64)1 << log_apart) - 1);
    if (position >> log_rows) {
        return;
    }
    const u64 row = by_bits && log_rows ? (u64)(ntt_reverse_32((u32)position) >> (32 - log_rows)) : (u64)position;
    const i32 a = 1, t = a + POWERS_LADDER, w = t + POWERS_LADDER;
    F v = F_load(ladder, 0), step = F_one();
    v = powers_times(v, ladder, a, by_row ? row : 0);
    v = powers_times(v, ladder, t, by_column ? (u64)c << log_unit : 0);
    v = powers_times(v, ladder, w, row * (u64)c << log_unit);
    step = powers_times(step, ladder, t, by_column ? (u64)1 << (log_apart + log_unit) : 0);
    step = powers_times(step, ladder, w, row << (log_apart + log_unit));
    for (i64 k = 0; k < (i64)1 << log_steps; k++) {
        F_store(z, (position << log_count) + (k << log_apart) + c, v);
        v = F_mul(v, step);
    }
}
