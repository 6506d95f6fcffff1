/* Goldilocks with NVIDIA's carry flag, in place of goldilocks.h's functions in what follows: 9, 5 and 25 instructions instead
 * of 13, 6 and 28, a fifth of a pass's. e = 2^32 - 1, p = 2^64 - e; an element is b 2^32 + a below p.
 *
 * Sums: s + e carries out of 64 bits, or s did already, where s >= p; what is left is then s - p, since s < p + 2^64. */
#define GOLDILOCKS_BELOW_P(low, high)                                                                  \
    "add.cc.u32 v, " low ", 0xFFFFFFFF; addc.cc.u32 w, " high ", 0; addc.u32 e, e, 0; "                \
    "setp.ne.u32 q, e, 0; selp.u32 a, v, " low ", q; selp.u32 b, w, " high ", q; mov.b64 %0, {a, b}; "

#define GOLDILOCKS_BEGIN                                                                               \
    ".reg .u32 a, b, c, d, e, m, r, s, t, u, v, w; .reg .pred q; mov.b64 {a, b}, %1; mov.b64 {c, d}, %2; "

ACL_DEVICE F goldilocks_add(F x, F y) {
    F z;
    asm("{ " GOLDILOCKS_BEGIN
        "add.cc.u32 r, a, c; addc.cc.u32 s, b, d; addc.u32 e, 0, 0; "
        GOLDILOCKS_BELOW_P("r", "s") "}" : "=l"(z) : "l"(x), "l"(y));
    return z;
}

/* m is e where the difference wrapped by 2^64 = p + e. */
ACL_DEVICE F goldilocks_sub(F x, F y) {
    F z;
    asm("{ " GOLDILOCKS_BEGIN
        "sub.cc.u32 r, a, c; subc.cc.u32 s, b, d; subc.u32 m, 0, 0; "
        "sub.cc.u32 a, r, m; subc.u32 b, s, 0; mov.b64 %0, {a, b}; }" : "=l"(z) : "l"(x), "l"(y));
    return z;
}

/* x y = r + 2^32 s + 2^64 t + 2^96 u = (r + 2^32 s - u) + e t, as goldilocks.h has it; e t is (t 2^32 - t). */
ACL_DEVICE F goldilocks_mul(F x, F y) {
    F z;
    asm("{ " GOLDILOCKS_BEGIN
        "mul.lo.u32 r, a, c; mul.hi.u32 s, a, c; mad.lo.cc.u32 s, a, d, s; madc.hi.u32 t, a, d, 0; "
        "mad.lo.cc.u32 s, b, c, s; madc.hi.cc.u32 t, b, c, t; addc.u32 u, 0, 0; "
        "mad.lo.cc.u32 t, b, d, t; madc.hi.u32 u, b, d, u; "
        "sub.cc.u32 r, r, u; subc.cc.u32 s, s, 0; subc.u32 m, 0, 0; sub.cc.u32 r, r, m; subc.u32 s, s, 0; "
        "sub.cc.u32 v, 0, t; subc.u32 w, t, 0; "
        "add.cc.u32 r, r, v; addc.cc.u32 s, s, w; addc.u32 e, 0, 0; "
        GOLDILOCKS_BELOW_P("r", "s") "}" : "=l"(z) : "l"(x), "l"(y));
    return z;
}

#define F_add goldilocks_add
#define F_sub goldilocks_sub
#define F_mul goldilocks_mul

