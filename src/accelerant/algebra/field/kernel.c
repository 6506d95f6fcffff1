/* A field's functions on arrays, to follow field_text's output. FIELD is replaced by the field's prefix.
 *
 * Layout: arrays of n elements as limbs.h, goldilocks.h and babybear.h define them; canonical, or x R mod p in
 * "montgomery" functions. The result may overwrite an argument. field_add, field_sub, field_neg and field_sum are the same
 * in both forms.
 * Grid: one thread per element; FIELD_INVERSES elements per thread in field_inv; in the sums and in field_unreduced a chunk
 * of elements per block of at most FIELD_BLOCK threads, a power of two.
 * Bound by memory: two or three elements of traffic each, except field_mul of large fields (two Montgomery products),
 * field_pow and field_inv. No branch and no address depends on an element, except in field_unreduced, which searches for
 * errors of the caller; the time of field_pow depends on the exponent. */

/* A "checked" program has one more argument, FIELD_VERDICT, which FIELD_JUDGE sets to 1 where an element is not below p;
 * otherwise both are empty (program.py). */

#define FIELD_MAP(entry, value)                                                                        \
    ACL_KERNEL void entry(ACL_GLOBAL const FIELD_WORD *x, ACL_GLOBAL FIELD_WORD *z, FIELD_VERDICT i64 n) { \
        i64 i = acl_global_id();                                                                       \
        if (i < n) {                                                                                   \
            FIELD a = FIELD_load(x, i);                                                                \
            FIELD_JUDGE(FIELD_is_reduced(a))                                                           \
            FIELD_store(z, i, value);                                                                  \
        }                                                                                              \
    }

#define FIELD_MAP2(entry, value)                                                                       \
    ACL_KERNEL void entry(ACL_GLOBAL const FIELD_WORD *x, ACL_GLOBAL const FIELD_WORD *y,              \
                          ACL_GLOBAL FIELD_WORD *z, FIELD_VERDICT i64 n) {                             \
        i64 i = acl_global_id();                                                                       \
        if (i < n) {                                                                                   \
            FIELD a = FIELD_load(x, i);                                                                \
            FIELD b = FIELD_load(y, i);                                                                \
            FIELD_JUDGE(FIELD_is_reduced(a) & FIELD_is_reduced(b))                                     \
            FIELD_store(z, i, value);                                                                  \
        }                                                                                              \
    }

FIELD_MAP2(field_add, FIELD_add(a, b))
FIELD_MAP2(field_sub, FIELD_sub(a, b))
FIELD_MAP2(field_mul, FIELD_to_montgomery(FIELD_mul(a, b)))
FIELD_MAP2(field_mul_montgomery, FIELD_mul(a, b))
FIELD_MAP(field_neg, FIELD_sub(FIELD_zero(), a))
FIELD_MAP(field_square, FIELD_to_montgomery(FIELD_square(a)))
FIELD_MAP(field_square_montgomery, FIELD_square(a))
FIELD_MAP(field_to_montgomery, FIELD_to_montgomery(a))
FIELD_MAP(field_from_montgomery, FIELD_from_montgomery(a))
FIELD_MAP(field_reduce, FIELD_from_montgomery(FIELD_to_montgomery(a)))

/* x^e of x in Montgomery form, e the lowest bits of an array of words: squares, and multiplies where a bit is set, from
 * the top. The time depends on e, which is public. */
ACL_DEVICE FIELD FIELD_power(FIELD x, ACL_GLOBAL const u64 *exponent, i64 bits) {
    FIELD z = FIELD_one();
    for (i64 bit = bits - 1; bit >= 0; bit--) {
        z = FIELD_square(z);
        if (exponent[bit / 64] >> bit % 64 & 1) {
            z = FIELD_mul(z, x);
        }
    }
    return z;
}

ACL_KERNEL void field_pow(ACL_GLOBAL const FIELD_WORD *x, ACL_GLOBAL FIELD_WORD *z, ACL_GLOBAL const u64 *exponent, i64 bits,
                          i64 n) {
    i64 i = acl_global_id();
    if (i < n) {
        FIELD_store(z, i, FIELD_from_montgomery(FIELD_power(FIELD_to_montgomery(FIELD_load(x, i)), exponent, bits)));
    }
}

ACL_KERNEL void field_pow_montgomery(ACL_GLOBAL const FIELD_WORD *x, ACL_GLOBAL FIELD_WORD *z,
                                     ACL_GLOBAL const u64 *exponent, i64 bits, i64 n) {
    i64 i = acl_global_id();
    if (i < n) {
        FIELD_store(z, i, FIELD_power(FIELD_load(x, i), exponent, bits));
    }
}

/* 1/x of x in Montgomery form, 0 of 0: x^(p - 2). The exponent is the same for all. */
ACL_CONSTANT u64 FIELD_fermat[] = {FIELD_P_MINUS_2};

ACL_DEVICE FIELD FIELD_inverse(FIELD x) {
    FIELD z = x;
    for (i32 bit = FIELD_BITS - 2; bit >= 0; bit--) {
        z = FIELD_square(z);
        if (FIELD_fermat[bit / 64] >> bit % 64 & 1) {
            z = FIELD_mul(z, x);
        }
    }
    return z;
}

/* A thread's elements are as far apart as the block has threads. Only their product is inverted; going back through the
 * partial products gives the inverse of each for three multiplies. A zero counts as 1 in the products.
 * Source: Montgomery 1987, Mathematics of Computation 48, pages 243 to 264.
 *
 * The loops are not unrolled: unrolled, BLS12-381's took 196 registers and most of the program's time to compile. So the
 * partial products are in the thread's local memory, 64 bytes of traffic an element for some 27 multiplies.
 *
 * A canonical element is the Montgomery form of x / R, whose inverse is R^2 / x in that form: so if the product's inverse is
 * divided by R^2, all results are canonical. */
ACL_DEVICE void FIELD_invert(ACL_GLOBAL const FIELD_WORD *x, ACL_GLOBAL FIELD_WORD *z, i64 n, i32 canonical) {
    i64 threads = acl_local_size();
    i64 first = acl_group_id() * threads * FIELD_INVERSES + acl_local_id();
    if (first >= n) {
        return;
    }
    FIELD before[FIELD_INVERSES];
    FIELD product = FIELD_one();
#pragma unroll 1
    for (i32 k = 0; k < FIELD_INVERSES; k++) {
        before[k] = product;
        if (first + k * threads < n) {
            FIELD a = FIELD_load(x, first + k * threads);
            product = FIELD_mul(product, FIELD_select(FIELD_is_zero(a), FIELD_one(), a));
        }
    }
    FIELD inverse = FIELD_inverse(product);
    if (canonical) {
        inverse = FIELD_from_montgomery(FIELD_from_montgomery(inverse));
    }
#pragma unroll 1
    for (i32 k = FIELD_INVERSES - 1; k >= 0; k--) {
        if (first + k * threads < n) {
            FIELD a = FIELD_load(x, first + k * threads);
            u32 none = FIELD_is_zero(a);
            FIELD_store(z, first + k * threads, FIELD_select(none, FIELD_zero(), FIELD_mul(inverse, before[k])));
            inverse = FIELD_mul(inverse, FIELD_select(none, FIELD_one(), a));
        }
    }
}

ACL_KERNEL void field_inv(ACL_GLOBAL const FIELD_WORD *x, ACL_GLOBAL FIELD_WORD *z, i64 n) {
    FIELD_invert(x, z, n, 1);
}

ACL_KERNEL void field_inv_montgomery(ACL_GLOBAL const FIELD_WORD *x, ACL_GLOBAL FIELD_WORD *z, i64 n) {
    FIELD_invert(x, z, n, 0);
}

/* The sum of value over a block's chunk, in its first thread; term is one element of it, at index i. */
#define FIELD_SUM_OF(term, result)                                                                     \
    ACL_LOCAL FIELD tile[FIELD_BLOCK];                                                                 \
    i32 thread = acl_local_id();                                                                       \
    i64 end = (acl_group_id() + 1) * chunk < n ? (acl_group_id() + 1) * chunk : n;                     \
    FIELD sum = FIELD_zero();                                                                          \
    for (i64 i = acl_group_id() * chunk + thread; i < end; i += acl_local_size()) {                    \
        sum = FIELD_add(sum, term);                                                                    \
    }                                                                                                  \
    tile[thread] = sum;                                                                                \
    for (i32 width = acl_local_size() / 2; width > 0; width /= 2) {                                       \
        acl_barrier();                                                                                 \
        if (thread < width) {                                                                           \
            sum = FIELD_add(sum, tile[thread + width]);                                                 \
            tile[thread] = sum;                                                                        \
        }                                                                                              \
    }                                                                                                  \
    if (thread == 0 && acl_group_id() * chunk < n) {                                                   \
        FIELD_store(partial, acl_group_id(), result);                                                  \
    }

ACL_KERNEL void field_sum(ACL_GLOBAL const FIELD_WORD *x, ACL_GLOBAL FIELD_WORD *partial, i64 n, i64 chunk) {
    FIELD_SUM_OF(FIELD_load(x, i), sum)
}

ACL_KERNEL void field_dot(ACL_GLOBAL const FIELD_WORD *x, ACL_GLOBAL const FIELD_WORD *y, ACL_GLOBAL FIELD_WORD *partial, i64 n,
                          i64 chunk) {
    FIELD_SUM_OF(FIELD_mul(FIELD_load(x, i), FIELD_load(y, i)), FIELD_to_montgomery(sum))
}

ACL_KERNEL void field_dot_montgomery(ACL_GLOBAL const FIELD_WORD *x, ACL_GLOBAL const FIELD_WORD *y,
                                     ACL_GLOBAL FIELD_WORD *partial, i64 n, i64 chunk) {
    FIELD_SUM_OF(FIELD_mul(FIELD_load(x, i), FIELD_load(y, i)), sum)
}

/* Find the least index in a block's chunk whose element is not below p; n if there is none. */
ACL_KERNEL void field_unreduced(ACL_GLOBAL const FIELD_WORD *x, ACL_GLOBAL i64 *first, i64 n, i64 chunk) {
    ACL_LOCAL i64 tile[FIELD_BLOCK];
    i32 thread = acl_local_id();
    i64 end = (acl_group_id() + 1) * chunk < n ? (acl_group_id() + 1) * chunk : n;
    i64 least = n;
    for (i64 i = acl_group_id() * chunk + thread; i < end && least == n; i += acl_local_size()) {
        least = FIELD_is_reduced(FIELD_load(x, i)) ? n : i;
    }
    tile[thread] = least;
    for (i32 width = acl_local_size() / 2; width > 0; width /= 2) {
        acl_barrier();
        if (thread < width) {
            i64 other = tile[thread + width];
            least = other < least ? other : least;
            tile[thread] = least;
        }
    }
    if (thread == 0 && acl_group_id() * chunk < n) {
        first[acl_group_id()] = least;
    }
}
