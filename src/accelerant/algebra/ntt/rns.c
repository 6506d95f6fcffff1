/* Polynomials mod x^n + 1 in a residue number system (RNS): negacyclic transforms, conversions of base, sums of products.
 *
 * An array of rows: n coefficients mod one prime each, n = 2^log_n, the rows of a polynomial's primes one after the other.
 * Row r belongs to prime `first + r mod count` of the tables, which rns.py describes:
 *
 *     primes   RNS_PRIME words for each prime: p, 1/p mod R, n^-1, its quotient, n^-1 R, its quotient      R = 2^32
 *     roots    4 n words for each prime: psi^bitrev(i), their quotients floor(w R / p), their inverses, and those' quotients
 *
 * Primes are below 2^30. Elements in memory are below p; between levels of a transform they are below 4 p (forward) or 2 p.
 * The prime is an argument, since a program for each of the thirty primes of a base would be compiled for seconds.
 *
 * Source: Longa and Naehrig, CANS 2016, algorithms 1 and 2 (roots in bit-reversed order, no separate twist); Harvey 2014,
 * J. Symbolic Computation 60, algorithms 2 to 4 (lazy butterflies). Transforms: a block for 2^RNS_LOG_TILE elements, in local
 * memory, each read and written once; 3 levels at a time in registers. No branch or address depends on an element. */
#define RNS_PRIME 8
#define RNS_LOG_TILE 13
#define RNS_TILE (1 << RNS_LOG_TILE)
#define RNS_THREADS 256
#define RNS_AT(i) ((i) + ((i) >> 5)) /* unused words, so that threads 8 elements apart access different banks */

typedef ACL_GLOBAL const u32 *rns_table;

ACL_DEVICE u32 rns_less(u32 x, u32 p) { /* x - p where x >= p, x < 2^32 - p */
    u32 less = x - p;
    return less < x ? less : x;
}

/* x w mod p, below 2 p, of any word x; quotient: floor(w R / p). */
ACL_DEVICE u32 rns_shoup(u32 x, u32 w, u32 quotient, u32 p) {
    return x * w - acl_mul_high_u32(x, quotient) * p;
}

/* A sum of 8 products of elements, or less than 2 p R, over R: below p. */
ACL_DEVICE u32 rns_montgomery(u64 sum, u32 p, u32 inverse) {
    u32 result = (u32)(sum >> 32) - acl_mul_high_u32((u32)sum * inverse, p) + p;
    return rns_less(rns_less(result, 2 * p), p);
}

/* Keep a sum that 8 products were added to below 2 p R. */
ACL_DEVICE u64 rns_kept(u64 sum, u32 p) {
    const u64 bound = (u64)p << 33;
    return sum >= bound ? sum - bound : sum;
}

#if RNS_FORWARD || RNS_INVERSE || RNS_LEVEL
ACL_DEVICE void rns_butterfly(u32 *x, u32 *y, rns_table roots, i64 n, i64 root, u32 p, i32 inverse) {
    if (inverse) {
        u32 difference = *x - *y + 2 * p;
        *x = rns_less(*x + *y, 2 * p);
        *y = rns_shoup(difference, roots[2 * n + root], roots[3 * n + root], p);
    } else {
        u32 product = rns_shoup(*y, roots[root], roots[n + root], p), kept = rns_less(*x, 2 * p);
        *x = kept + product;
        *y = kept - product + 2 * p;
    }
}
#endif

#if RNS_LEVEL
/* One level of transforms of more than a tile, on pairs 2^log_span apart: a thread for each pair. */
ACL_KERNEL ACL_BLOCK(RNS_THREADS) void rns_level(
    ACL_GLOBAL u32 *z, rns_table roots, rns_table primes, i64 first, i64 count, i64 log_n, i64 log_span, i64 inverse, i64 rows) {
    const i64 i = acl_global_id(), n = (i64)1 << log_n, row = i >> (log_n - 1), pair = i & (n / 2 - 1);
    if (row >= rows) {
        return;
    }
    const i64 prime = first + row % count, block = pair >> log_span, root = (n >> (log_span + 1)) + block;
    const i64 at = row * n + pair + (block << log_span);
    u32 x = z[at], y = z[at + ((i64)1 << log_span)], p = primes[prime * RNS_PRIME];
    rns_butterfly(&x, &y, roots + prime * 4 * n, n, root, p, (i32)inverse);
    if (inverse && log_span == log_n - 1) {
        x = rns_less(x, p);
        y = rns_less(y, p);
    }
    z[at] = x;
    z[at + ((i64)1 << log_span)] = y;
}
#endif

#if RNS_FORWARD || RNS_INVERSE
/* The levels within a tile: a group of `levels` levels with spans from 2^(low + levels - 1) down to 2^low (inverse: up from
 * 2^low), of which a thread has the 2^levels elements that they connect. */
ACL_DEVICE void rns_group(
    u32 *v, rns_table roots, i64 n, i64 blocks, i32 row, i32 log_tile, i32 low, i32 levels, u32 p, i32 inverse) {
#pragma unroll
    for (i32 step = 0; step < 3; step++) {
        const i32 level = inverse ? step : levels - 1 - step;
        if (step < levels) {
#pragma unroll
            for (i32 pair = 0; pair < 4; pair++) {
                const i32 span = 1 << level, part = pair >> level, k = pair + (part << level);
                if (pair < 1 << (levels - 1)) {
                    const i64 block = ((i64)row << (levels - 1 - level)) + part;
                    const i64 root = (blocks << (log_tile - 1 - low - level)) + block;
                    rns_butterfly(&v[k], &v[k + span], roots, n, root, p, inverse);
                }
            }
        }
    }
}

ACL_KERNEL ACL_BLOCK(RNS_THREADS) void RNS_NAME(
    ACL_GLOBAL u32 *z, rns_table roots, rns_table primes, i64 first, i64 count, i64 log_n, i64 products) {
    ACL_LOCAL u32 tile[RNS_AT(RNS_TILE)];
    const i32 log_tile = log_n < RNS_LOG_TILE ? (i32)log_n : RNS_LOG_TILE, size = 1 << log_tile;
    const i64 n = (i64)1 << log_n, tiles = n >> log_tile, row = acl_group_id() / tiles, part = acl_group_id() % tiles;
    const i64 prime = first + row % count, blocks = tiles + part; /* root of the tile's first level */
    const u32 p = primes[prime * RNS_PRIME];
    roots += prime * 4 * n;
    z += row * n + (part << log_tile);
    for (i32 i = acl_local_id(); i < size; i += RNS_THREADS) {
        tile[RNS_AT(i)] = z[i];
    }
    acl_barrier();
    const i32 odd = (log_tile - 1) % 3 + 1; /* levels of the group with the widest spans */
    for (i32 done = 0; done < log_tile;) {
        const i32 wide = RNS_INVERSE ? done + odd == log_tile : done == 0;
        const i32 levels = wide ? odd : 3, low = RNS_INVERSE ? done : log_tile - done - levels;
        for (i32 i = acl_local_id(); i < size >> levels; i += RNS_THREADS) {
            const i32 group = i >> low, at = (group << (low + levels)) + (i & ((1 << low) - 1));
            u32 v[8];
#pragma unroll
            for (i32 k = 0; k < 8; k++) {
                if (k < 1 << levels) {
                    v[k] = tile[RNS_AT(at + (k << low))];
                }
            }
            if (levels == 3) {
                rns_group(v, roots, n, blocks, group, log_tile, low, 3, p, RNS_INVERSE);
            } else if (levels == 2) {
                rns_group(v, roots, n, blocks, group, log_tile, low, 2, p, RNS_INVERSE);
            } else {
                rns_group(v, roots, n, blocks, group, log_tile, low, 1, p, RNS_INVERSE);
            }
#pragma unroll
            for (i32 k = 0; k < 8; k++) {
                if (k < 1 << levels) {
                    tile[RNS_AT(at + (k << low))] = v[k];
                }
            }
        }
        done += levels;
        acl_barrier();
    }
    const u32 scale = primes[prime * RNS_PRIME + 2 + 2 * products], quotient = primes[prime * RNS_PRIME + 3 + 2 * products];
    for (i32 i = acl_local_id(); i < size; i += RNS_THREADS) {
        u32 x = tile[RNS_AT(i)];
        z[i] = rns_less(RNS_INVERSE ? rns_shoup(x, scale, quotient, p) : rns_less(x, 2 * p), p);
    }
}
#endif

#if RNS_CONVERT
/* Convert from the base of `sources` primes, row s of x on, to that of `targets`: see rns.conversion. A thread for each
 * coefficient of a polynomial. y_i = x_i c_i mod q_i; v = round(sum y_i / q_i); z_j = sum y_i m_ij + v m_j + a_j e_j mod p_j. */
ACL_KERNEL ACL_BLOCK(RNS_THREADS) void rns_convert(
    ACL_GLOBAL const u32 *x, ACL_GLOBAL const u32 *a, ACL_GLOBAL u32 *z, rns_table table, i64 log_n, i64 sources, i64 targets,
    i64 x_rows, i64 x_from, i64 a_rows, i64 a_from, i64 z_rows, i64 z_from, i64 keep, i64 fused, i64 polynomials) {
    const i64 i = acl_global_id(), polynomial = i >> log_n, c = i & (((i64)1 << log_n) - 1);
    if (polynomial >= polynomials) {
        return;
    }
    u32 y[RNS_SOURCES];
    u64 fraction = (u64)1 << 56;
    for (i32 s = 0; s < sources; s++) {
        const u32 value = x[((polynomial * x_rows + x_from + s) << log_n) + c];
        if (keep >= 0) {
            z[((polynomial * z_rows + keep + s) << log_n) + c] = value;
        }
        y[s] = rns_less(rns_shoup(value, table[4 * s], table[4 * s + 1], table[4 * s + 2]), table[4 * s + 2]);
        fraction += (u64)y[s] * table[4 * s + 3];
    }
    const u32 v = (u32)(fraction >> 57);
    table += 4 * sources;
    for (i32 j = 0; j < targets; j++, table += 4 + sources) {
        const u32 p = table[0];
        u64 sum = (u64)v * table[3];
        if (fused) {
            sum += (u64)a[((polynomial * a_rows + a_from + j) << log_n) + c] * table[2];
        }
        for (i32 s = 0; s < sources; s++) {
            sum += (u64)y[s] * table[4 + s];
            if (s % 4 == 3) {
                sum = rns_kept(sum, p);
            }
        }
        z[((polynomial * z_rows + z_from + j) << log_n) + c] = rns_montgomery(rns_kept(sum, p), p, table[1]);
    }
}
#endif

#if RNS_DOT
/* z[b, h, j] = (sum_t x[x_0 + b x_b + t x_t + j] y[y_0 + b y_b + h y_h + t y_t + j]) / R mod prime first + j, in rows. */
ACL_KERNEL ACL_BLOCK(RNS_THREADS) void rns_dot(
    ACL_GLOBAL const u32 *x, ACL_GLOBAL const u32 *y, ACL_GLOBAL u32 *z, rns_table primes, i64 first, i64 count, i64 log_n,
    i64 terms, i64 parts, i64 x_0, i64 x_b, i64 x_t, i64 y_0, i64 y_b, i64 y_h, i64 y_t, i64 z_0, i64 z_b, i64 z_h, i64 rows) {
    const i64 i = acl_global_id(), row = i >> log_n, c = i & (((i64)1 << log_n) - 1);
    if (row >= rows) {
        return;
    }
    const i64 j = row % count, h = row / count % parts, b = row / (count * parts);
    const u32 p = primes[(first + j) * RNS_PRIME];
    x += ((x_0 + b * x_b + j) << log_n) + c;
    y += ((y_0 + b * y_b + h * y_h + j) << log_n) + c;
    u64 sum = 0;
    for (i32 t = 0; t < terms; t++) {
        sum += (u64)x[(t * x_t) * ((i64)1 << log_n)] * y[(t * y_t) * ((i64)1 << log_n)];
        if (t % 8 == 7) {
            sum = rns_kept(sum, p);
        }
    }
    z[((z_0 + b * z_b + h * z_h + j) << log_n) + c] = rns_montgomery(rns_kept(sum, p), p, primes[(first + j) * RNS_PRIME + 1]);
}
#endif

#if RNS_ADD
/* z = x + y, or x - y if mode & 1; rows as in a transform. With mode & 2 every second polynomial of y counts as 0. A thread
 * for each element. */
ACL_KERNEL ACL_BLOCK(RNS_THREADS) void rns_add(
    ACL_GLOBAL const u32 *x, ACL_GLOBAL const u32 *y, ACL_GLOBAL u32 *z, rns_table primes, i64 first, i64 count, i64 log_n,
    i64 mode, i64 rows) {
    const i64 i = acl_global_id(), row = i >> log_n;
    if (row >= rows) {
        return;
    }
    const u32 p = primes[(first + row % count) * RNS_PRIME], other = (mode & 2) && (row / count & 1) ? 0 : y[i];
    z[i] = rns_less((mode & 1) ? x[i] + p - other : x[i] + other, p);
}
#endif

#if RNS_GALOIS
/* z = x(X^g), g odd: coefficient i of z is that of index i / g mod 2 n of x, negated from n on. inverse: 1 / g mod 2 n. */
ACL_KERNEL ACL_BLOCK(RNS_THREADS) void rns_galois(
    ACL_GLOBAL const u32 *x, ACL_GLOBAL u32 *z, rns_table primes, i64 first, i64 count, i64 log_n, i64 inverse, i64 rows) {
    const i64 i = acl_global_id(), row = i >> log_n, n = (i64)1 << log_n, from = (i & (n - 1)) * inverse & (2 * n - 1);
    if (row >= rows) {
        return;
    }
    const u32 p = primes[(first + row % count) * RNS_PRIME], value = x[(row << log_n) + (from & (n - 1))];
    z[i] = from < n ? value : rns_less(p - value, p);
}
#endif
