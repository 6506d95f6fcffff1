// Functions that the portable C of fused functions calls (code.py); FUSED_HAS_... says which are needed.
#if defined(__OPENCL_VERSION__)
#define ACL_MATH(name) name
#define ACL_INFINITY INFINITY
#define ACL_NAN NAN
#define FUSED_SUM(sum) float sum = 0.0f, sum##_rest = 0.0f;
#define FUSED_ADD(sum, v) { \
    const float term = (v) - sum##_rest, next = sum + term; \
    sum##_rest = (next - sum) - term; \
    sum##_rest = sum##_rest == sum##_rest ? sum##_rest : 0.0f; /* where a sum is not finite */ \
    sum = next; \
}
#define FUSED_TOTAL(sum) sum
#else
#define FUSED_SUM(sum) double sum = 0.0;
#define FUSED_ADD(sum, v) sum += (v);
#define FUSED_TOTAL(sum) sum
#define ACL_MATH(name) __builtin_##name##f
#define ACL_INFINITY __builtin_inff()
#define ACL_NAN __builtin_nanf("")
#endif

#if defined(FUSED_HAS_POWER)
#if defined(__OPENCL_VERSION__)
#define fused_power(x, n) pown(x, n)
#else
static inline float fused_power(float x, int n) {
    double factor = x, y = 1.0;
    for (int left = n < 0 ? -n : n; left; left >>= 1, factor *= factor) {
        y = left & 1 ? y * factor : y;
    }
    return (float)(n < 0 ? 1.0 / y : y);
}
#endif
#endif

#if defined(FUSED_HAS_TANH)
// On the CPU x P(x^2) / Q(x^2), fitted for the least largest relative error, in float64: 1.2e-12 before rounding.
#if defined(__OPENCL_VERSION__)
ACL_DEVICE float fused_tanh(float x) {
    float size = x < 0.0f ? -x : x, z = x * x, p = -0.005893945302802656f;
    p = acl_fma_f32(p, z, 0.020794617709806007f);
    p = acl_fma_f32(p, z, -0.053783293000263965f);
    p = acl_fma_f32(p, z, 0.13331915298814714f);
    p = acl_fma_f32(p, z, -0.3333329751012878f);
    float large = 1.0f - 2.0f / (acl_exp_f32(size * 2.0f) + 1.0f);
    return z < 0.36f ? (x == 0.0f ? x : acl_fma_f32(x * z, p, x)) : (x < 0.0f ? -large : large);
}
#else
static inline float fused_tanh(float x) {
    double a = x > 9.011f ? 9.011f : x;
    a = a < -9.011f ? -9.011f : a;
    double z = a * a, p = 0x1.538178f6e2829p-33, q = 0x1.d4b90b683b712p-40;
    p = __builtin_fma(p, z, 0x1.92673fd1d9e82p-23);
    p = __builtin_fma(p, z, 0x1.b5b2fb5a579c5p-15);
    p = __builtin_fma(p, z, 0x1.38a135434bb09p-8);
    p = __builtin_fma(p, z, 0x1.25e2ab0a36707p-3);
    p = __builtin_fma(p, z, 0x1.fffffffffd511p-1);
    q = __builtin_fma(q, z, 0x1.d22d3a3ec1fc9p-28);
    q = __builtin_fma(q, z, 0x1.e79d9dbfbaff2p-19);
    q = __builtin_fma(q, z, 0x1.2ac216a5e4a01p-11);
    q = __builtin_fma(q, z, 0x1.f1c35406bd87cp-6);
    q = __builtin_fma(q, z, 0x1.e846aada2fed4p-2);
    q = __builtin_fma(q, z, 1.0);
    return (float)(a * p / q);
}
#endif
#endif

#if defined(FUSED_HAS_MOD)
// As CPython's, NumPy's and torch's: the remainder is exact, and the quotient is corrected where it was rounded up.
#define FUSED_REMAINDERS(T, mod, floordiv, MATH) \
ACL_DEVICE T mod(T a, T b) { \
    T rest = MATH(fmod)(a, b); \
    return rest != 0 && (b < 0) != (rest < 0) ? rest + b : rest; \
} \
ACL_DEVICE T floordiv(T a, T b) { \
    T rest = MATH(fmod)(a, b), quotient = (a - rest) / b; \
    quotient = rest != 0 && (b < 0) != (rest < 0) ? quotient - 1 : quotient; \
    T down = MATH(floor)(quotient); \
    down = quotient - down > (T)0.5 ? down + 1 : down; \
    return b == 0 ? a / b : quotient != 0 ? down : MATH(copysign)(0, a / b); \
}
FUSED_REMAINDERS(float, fused_mod, fused_mod_floor, ACL_MATH)
#if !defined(__OPENCL_VERSION__)
#define FUSED_WIDE(name) __builtin_##name
FUSED_REMAINDERS(double, fused_mod_d, fused_mod_d_floor, FUSED_WIDE)
#endif
#endif
