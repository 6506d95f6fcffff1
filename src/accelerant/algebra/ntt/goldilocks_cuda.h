/* Goldilocks with NVIDIA's carry flag, replacing the functions of algebra/field/goldilocks.h below: 4, 5 and 16
 * instructions instead of 13, 6 and 28. e = 2^32 - 1, p = 2^64 - e; a word is b 2^32 + a. In a sum or difference x is any
 * word, y is below p, and the result is any word; in a product both are any words, and the result is below p.
 *
 * A pass is bound by the adders, and the multiplier has spare cycles: a carry, 0 or 1, is reduced as e times the carry in a
 * wide multiply-add, and so are the upper 64 bits of a product. e is hidden from the compiler, which would turn the product
 * into additions. A pair of mad.lo and madc.hi becomes one instruction; mad.wide with an unrelated addend three. */
ACL_CONSTANT u32 goldilocks_epsilon = 0xFFFFFFFFU;

#define GOLDILOCKS_BEGIN                                                                               \
    ".reg .u32 a, b, c, d, f, m, r, s, t, u; mov.b64 {a, b}, %1; mov.b64 {c, d}, %2; "

/* Return r + 2^32 s + f e. */
#define GOLDILOCKS_PAID "mad.lo.cc.u32 r, f, %3, r; madc.hi.u32 s, f, %3, s; mov.b64 %0, {r, s}; }"

/* Subtract p from r + 2^32 s where it is at least p: f = 1 where adding e carries out of 64 bits, and adding e then
 * subtracts p. */
#define GOLDILOCKS_BELOW_P                                                                             \
    "add.cc.u32 a, r, 0xFFFFFFFF; addc.cc.u32 b, s, 0; addc.u32 f, f, 0; "                             \
    GOLDILOCKS_PAID

#define GOLDILOCKS_DO(lines)                                                                           \
    asm("{ " GOLDILOCKS_BEGIN lines : "=l"(z) : "l"(x), "l"(y), "r"(goldilocks_epsilon));              \
    return z

ACL_DEVICE F goldilocks_add(F x, F y) {
    F z;
    GOLDILOCKS_DO("add.cc.u32 r, a, c; addc.cc.u32 s, b, d; addc.u32 f, 0, 0; " GOLDILOCKS_PAID);
}

/* m is e where the difference wrapped around by 2^64 = p + e: e^2 + 2^32 = 2^64 - e. */
#define GOLDILOCKS_UNWRAPPED                                                                           \
    "subc.u32 m, 0, 0; mad.lo.cc.u32 r, m, %3, r; madc.hi.u32 s, m, %3, s; sub.u32 s, s, m; "

ACL_DEVICE F goldilocks_sub(F x, F y) {
    F z;
    GOLDILOCKS_DO("sub.cc.u32 r, a, c; subc.cc.u32 s, b, d; " GOLDILOCKS_UNWRAPPED "mov.b64 %0, {r, s}; }");
}

/* r + 2^32 s + 2^64 t + 2^96 u = (r + 2^32 s - u) + e t, as in algebra/field/goldilocks.h. After a carry the sum is
 * at most 2^64 - 2^33, so it is not also p or more. */
#define GOLDILOCKS_FOLDED "sub.cc.u32 r, r, u; subc.cc.u32 s, s, 0; " GOLDILOCKS_UNWRAPPED GOLDILOCKS_RAISED
#define GOLDILOCKS_RAISED                                                                              \
    "mad.lo.cc.u32 r, t, %3, r; madc.hi.cc.u32 s, t, %3, s; addc.u32 f, 0, 0; " GOLDILOCKS_BELOW_P

ACL_DEVICE F goldilocks_mul(F x, F y) {
    F z;
    GOLDILOCKS_DO("mul.lo.u32 r, a, c; mul.hi.u32 s, a, c; mad.lo.cc.u32 s, a, d, s; madc.hi.u32 t, a, d, 0; "
                  "mad.lo.cc.u32 s, b, c, s; madc.hi.cc.u32 t, b, c, t; addc.u32 u, 0, 0; "
                  "mad.lo.cc.u32 t, b, d, t; madc.hi.u32 u, b, d, u; " GOLDILOCKS_FOLDED);
}

ACL_DEVICE F goldilocks_reduced(F x) {
    const F y = 0;
    F z;
    GOLDILOCKS_DO("mov.u32 r, a; mov.u32 s, b; mov.u32 f, 0; " GOLDILOCKS_BELOW_P);
}

/* Same functions as in goldilocks.h of this directory. */
#define NTT_FOLDED
ACL_DEVICE F ntt_raised(u64 x, u64 y) {
    F z;
    GOLDILOCKS_DO("mov.u32 r, a; mov.u32 s, b; mov.u32 t, c; " GOLDILOCKS_RAISED);
}

ACL_DEVICE F ntt_folded(u64 x, u32 middle, u32 high) {
    const u64 y = (u64)high << 32 | middle;
    F z;
    GOLDILOCKS_DO("mov.u32 r, a; mov.u32 s, b; mov.u32 t, c; mov.u32 u, d; " GOLDILOCKS_FOLDED);
}

#define F_add goldilocks_add
#define F_sub goldilocks_sub
#define F_mul goldilocks_mul
#define F_reduced goldilocks_reduced

