/* Kernels of the prover, before and between transforms. The text of the scalar field, with the prefix F, precedes this file.
 * Elements have F_LIMBS / 2 words of 64 bits.
 *
 *   groth16_gather     z[i] = x[which[i]]
 *   groth16_unreduced  wrong[b] = 1 if an element of block b is not below r, else 0
 *   groth16_rows       z[i] = sum over k in [starts[i], starts[i + 1]) of values[k] x[columns[k]] / R, for short rows
 *   groth16_long_rows  the same for the rows listed in `rows`
 *   groth16_products   z[2 n + i] = z[i] z[n + i] / R
 *   groth16_quotient   z[i] = (x[i] x[n + i] / R - x[2 n + i]) / R
 *
 * With values a R^2, as in a .zkey, and a canonical x, rows compute A x and B x in Montgomery form; groth16_quotient returns
 * to canonical form. Values are any words; results for an x that is not reduced are below 2^256 and meaningless.
 * Bound by memory: 36 bytes per entry and nearly random reads of 32 bytes from x; elsewhere 96 to 128 bytes per element.
 * No branch and no address depends on an element. */

ACL_KERNEL ACL_BLOCK(GROTH16_BLOCK) void groth16_gather(ACL_GLOBAL const u64 *x, ACL_GLOBAL const u32 *which, ACL_GLOBAL u64 *z,
                                                        i64 n) {
    i64 i = acl_global_id();
    if (i < n) {
        F_store(z, i, F_load(x, which[i]));
    }
}

/* Grid: one block per GROTH16_BLOCK * GROTH16_EACH elements; a thread's elements are GROTH16_BLOCK apart. */
ACL_KERNEL ACL_BLOCK(GROTH16_BLOCK) void groth16_unreduced(ACL_GLOBAL const u64 *x, ACL_GLOBAL u32 *wrong, i64 n) {
    ACL_LOCAL u32 any;
    i64 first = acl_group_id() * GROTH16_BLOCK * GROTH16_EACH + acl_local_id();
    u32 reduced = 1;
    if (acl_local_id() == 0) {
        any = 0;
    }
    acl_barrier();
    for (i32 k = 0; k < GROTH16_EACH; k++) {
        i64 i = first + k * GROTH16_BLOCK;
        if (i < n) {
            reduced &= F_is_reduced(F_load(x, i));
        }
    }
    if (!reduced) {
        any = 1; /* all threads write the same value */
    }
    acl_barrier();
    if (acl_local_id() == 0) {
        wrong[acl_group_id()] = any;
    }
}

/* Grid: one thread per row; rows of more than GROTH16_LONG entries are left to groth16_long_rows. */
ACL_KERNEL ACL_BLOCK(GROTH16_BLOCK) void groth16_rows(ACL_GLOBAL const u64 *values, ACL_GLOBAL const u32 *columns,
                                                      ACL_GLOBAL const i64 *starts, ACL_GLOBAL const u64 *x, ACL_GLOBAL u64 *z,
                                                      i64 n) {
    i64 i = acl_global_id();
    if (i >= n) {
        return;
    }
    i64 k = starts[i], end = starts[i + 1];
    if (end - k > GROTH16_LONG) {
        return;
    }
    F sum = F_zero();
    for (; k < end; k++) {
        sum = F_add(sum, F_mul(F_load(x, columns[k]), F_load(values, k)));
    }
    F_store(z, i, sum);
}

/* Grid: one block per element of `rows`. */
ACL_KERNEL ACL_BLOCK(GROTH16_BLOCK) void groth16_long_rows(ACL_GLOBAL const u64 *values, ACL_GLOBAL const u32 *columns,
                                                           ACL_GLOBAL const i64 *starts, ACL_GLOBAL const u32 *rows,
                                                           ACL_GLOBAL const u64 *x, ACL_GLOBAL u64 *z) {
    ACL_LOCAL F tile[GROTH16_BLOCK];
    i32 thread = acl_local_id();
    i64 row = rows[acl_group_id()];
    i64 end = starts[row + 1];
    F sum = F_zero();
    for (i64 k = starts[row] + thread; k < end; k += GROTH16_BLOCK) {
        sum = F_add(sum, F_mul(F_load(x, columns[k]), F_load(values, k)));
    }
    tile[thread] = sum;
    for (i32 width = GROTH16_BLOCK / 2; width > 0; width /= 2) {
        acl_barrier();
        if (thread < width) {
            sum = F_add(sum, tile[thread + width]);
            tile[thread] = sum;
        }
    }
    if (thread == 0) {
        F_store(z, row, sum);
    }
}

ACL_KERNEL ACL_BLOCK(GROTH16_BLOCK) void groth16_products(ACL_GLOBAL u64 *z, i64 n) {
    i64 i = acl_global_id();
    if (i < n) {
        F_store(z, 2 * n + i, F_mul(F_load(z, i), F_load(z, n + i)));
    }
}

ACL_KERNEL ACL_BLOCK(GROTH16_BLOCK) void groth16_quotient(ACL_GLOBAL const u64 *x, ACL_GLOBAL u64 *z, i64 n) {
    i64 i = acl_global_id();
    if (i < n) {
        F product = F_mul(F_load(x, i), F_load(x, n + i));
        F_store(z, i, F_from_montgomery(F_sub(product, F_load(x, 2 * n + i))));
    }
}
