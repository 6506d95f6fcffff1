// Functions of expressions for values of type T, which FLOATING says are floating, and indices of type I; those that draw
// numbers with RANDOM, those of bfloat16 with BFLOAT16.
#undef select
#define select(b, a, c) ((c) ? (a) : (b))
#define min_index(a, b) ((a) < (b) ? (a) : (b))

#ifdef RANDOM
static inline uint4 philox(uint4 c, uint2 k) {
    for (int round = 0; round < 10; ++round) {
        uint h0 = mul_hi(0xD2511F53u, c.x), l0 = 0xD2511F53u * c.x;
        uint h1 = mul_hi(0xCD9E8D57u, c.z), l1 = 0xCD9E8D57u * c.z;
        c = (uint4)(h1 ^ c.y ^ k.x, l1, h0 ^ c.w ^ k.y, l0);
        k += (uint2)(0x9E3779B9u, 0xBB67AE85u);
    }
    return c;
}
static inline uint4 drawn(long i, long n0, long n1) {
    return philox((uint4)((uint)i, (uint)(i >> 32), 0u, 0u), (uint2)((uint)n0, (uint)n1));
}
static inline float uniform(long i, long n0, long n1) { return (drawn(i, n0, n1).x >> 8) * 0x1p-24f; }
static inline float normal(long i, long n0, long n1) {
    uint4 r = drawn(i, n0, n1);
    float u = ((r.x >> 8) + 1) * 0x1p-24f;
    return sqrt(-2.0f * log(u)) * cospi((r.y >> 8) * 0x1p-23f);
}
#endif

#ifdef BFLOAT16
static inline float load_bfloat16(ushort x) { return as_float((uint)x << 16); }
static inline ushort store_bfloat16(float x) {
    uint bits = as_uint(x);
    return x != x ? (ushort)0x7FC0 : (ushort)((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}
#endif

#ifdef FLOATING
#define is_nan(x) ((x) != (x))
#define is_inf(x) (fabs(x) == (T)INFINITY)
static inline T acl_max(T a, T b) { return a != a ? a : b != b ? b : a > b ? a : b; }
static inline T acl_min(T a, T b) { return a != a ? a : b != b ? b : a < b ? a : b; }
static inline T acl_rem(T a, T b) { T m = fmod(a, b); return m != 0 && ((b < 0) != (m < 0)) ? m + b : m; }
static inline T acl_div(T a, T b) {
    if (b == 0) return a / b;
    T m = fmod(a, b), q = (a - m) / b;
    if (m != 0 && ((b < 0) != (m < 0))) q -= 1;
    T f = floor(q);
    return q == 0 ? copysign((T)0, a / b) : q - f > (T)0.5 ? f + 1 : f;
}
#undef abs
#define abs(x) fabs(x)
#else
#define is_nan(x) 0
#define is_inf(x) 0
static inline T acl_max(T a, T b) { return a > b ? a : b; }
static inline T acl_min(T a, T b) { return a < b ? a : b; }
static inline T acl_quotient(T a, T b) { return b == 0 ? 0 : b == -1 ? -a : a / b; }
static inline T acl_div(T a, T b) {
    T q = acl_quotient(a, b);
    return b && q * b != a && ((a < 0) != (b < 0)) ? q - 1 : q;
}
static inline T acl_rem(T a, T b) { return a - acl_div(a, b) * b; }
#define div_trunc(a, b) acl_quotient(a, b)
#undef abs
#define abs(x) ((x) < 0 ? -(x) : (x))
#endif

#undef max
#undef min
#define max(a, b) acl_max(a, b)
#define min(a, b) acl_min(a, b)
#define rem_floor(a, b) acl_rem(a, b)
#define div_floor(a, b) acl_div(a, b)
