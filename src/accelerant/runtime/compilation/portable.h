/* The words of portable kernels: one text for CUDA (NVRTC), HIP (clang), OpenCL C 1.2, and the CPU's C compiler.
 *
 *   ACL_KERNEL void name(ACL_GLOBAL const u64 *x, ..., i64 n)    an entry point
 *   ACL_KERNEL ACL_BLOCK(128) void name(...)                     one whose blocks have at most 128 threads
 *   ACL_DEVICE                                                   a function it calls, written out at each call
 *   ACL_FAR                                                      one that stays a function: large, or called often
 *   ACL_LOCAL u64 tile[64];                                      memory of a block, declared in the kernel
 *   acl_global_id_y(), acl_group_id_y(), ...            the same along the second axis: rows, acl_global_id() being the column
 *   acl_atomic_add_u32(p, v)                                     *p += v, in global or local memory; what stood there
 *   acl_fma_f32(a, b, c)                                         a b + c, rounded once
 *   acl_exp_f32(x)                                               e^x, 3 units in the last place at most; 0.54 on the CPU
 *   acl_erf_f32(x)                                               error function, 2e-7 at most from the true value
 *
 * No templates; no address-space qualifier on helper arguments except ACL_GLOBAL. */
#if defined(__OPENCL_VERSION__)
typedef uint u32;
typedef ulong u64;
typedef int i32;
typedef long i64;
#define ACL_KERNEL __kernel
#define ACL_BLOCK(threads)
#define ACL_DEVICE static inline
#define ACL_FAR static __attribute__((noinline))
#define ACL_GLOBAL __global
#define ACL_LOCAL __local
#define ACL_CONSTANT __constant
#define acl_global_id() ((i64)get_global_id(0))
#define acl_local_id() ((i32)get_local_id(0))
#define acl_local_size() ((i32)get_local_size(0))
#define acl_group_id() ((i64)get_group_id(0))
#define acl_global_id_y() ((i64)get_global_id(1))
#define acl_local_id_y() ((i32)get_local_id(1))
#define acl_local_size_y() ((i32)get_local_size(1))
#define acl_group_id_y() ((i64)get_group_id(1))
#define acl_barrier() barrier(CLK_LOCAL_MEM_FENCE)
#define acl_mul_high_u32(a, b) mul_hi((u32)(a), (u32)(b))
#define acl_mul_high_u64(a, b) mul_hi((u64)(a), (u64)(b))
#define acl_atomic_add_u32(p, v) atomic_add((p), (u32)(v))
#define acl_fma_f32(a, b, c) fma((float)(a), (float)(b), (float)(c))
#define acl_exp_f32(x) exp((float)(x))
#else
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;
#define ACL_GLOBAL
#if defined(ACL_HOST) /* compilation/host_c.py declares acl_here */
#define ACL_KERNEL static inline __attribute__((always_inline))
#define bool _Bool /* as in CUDA C++ and OpenCL C */
#define ACL_BLOCK(threads)
#define ACL_DEVICE static inline
#define ACL_FAR static __attribute__((noinline))
#define ACL_LOCAL static __thread
#define ACL_CONSTANT static const
#define acl_local_id() (acl_here.local)
#define acl_local_size() (acl_here.size)
#define acl_group_id() (acl_here.group)
#define acl_local_id_y() (acl_here.local_y)
#define acl_local_size_y() (acl_here.size_y)
#define acl_group_id_y() (acl_here.group_y)
#define acl_barrier() acl_host_barrier()
#define acl_mul_high_u32(a, b) ((u32)(((u64)(u32)(a) * (u32)(b)) >> 32))
#define acl_mul_high_u64(a, b) ((u64)(((unsigned __int128)(u64)(a) * (u64)(b)) >> 64))
#define acl_atomic_add_u32(p, v) __atomic_fetch_add((p), (u32)(v), __ATOMIC_RELAXED)
#define acl_fma_f32(a, b, c) __builtin_fmaf(a, b, c)
/* e^x = 2^k e^r with |r| <= ln(2) / 2, and e^r = 1 + r + r^2 / 2 + r^3 P(r): the rounding errors of r and of the sum
 * of the first three terms are added to the last one. 0.54 units in the last place; a compiler turns it into vectors. NaN stays NaN.
 * Source: Cody and Waite 1980, Software Manual for the Elementary Functions; P fitted for the least largest error. */
static inline float acl_exp_f32(float x) {
    float t = 89.0f < x ? 89.0f : x; /* beyond, e^x is infinite or rounds to 0 */
    t = -104.0f > t ? -104.0f : t;
    float k = __builtin_rintf(t * 1.44269504f);
    float high = __builtin_fmaf(k, -0.693359375f, t), r = __builtin_fmaf(k, 2.12194440e-4f, high);
    float rest = __builtin_fmaf(k, 2.12194440e-4f, high - r);
    float square = r * r, half = 0.5f * square, one = 1.0f + half, two = one + r;
    float s = 1.963386e-4f;
    s = acl_fma_f32(s, r, 1.3935587e-3f);
    s = acl_fma_f32(s, r, 8.333777e-3f);
    s = acl_fma_f32(s, r, 4.166646e-2f);
    s = acl_fma_f32(s, r, 0.16666664f);
    rest = acl_fma_f32(rest, two, (half - (one - 1.0f)) + (r - (two - one)));
    s = two + acl_fma_f32(s, r * square, rest);
    int n = (int)k, low = n >> 1; /* 2^k in two factors: it may be subnormal */
    union {
        u32 bits;
        float number;
    } a, b;
    a.bits = (u32)(low + 127) << 23;
    b.bits = (u32)(n - low + 127) << 23;
    s = s * a.number * b.number;
    return x == x ? s : x;
}
#elif defined(__HIP__)
#define ACL_KERNEL extern "C" __attribute__((global))
#define ACL_BLOCK(threads) __attribute__((amdgpu_flat_work_group_size(1, threads)))
#define ACL_DEVICE static inline __attribute__((device))
#define ACL_FAR static __attribute__((device, noinline))
#define ACL_LOCAL static __attribute__((shared))
#define ACL_CONSTANT static __attribute__((constant))
#define acl_local_id() ((i32)__builtin_amdgcn_workitem_id_x())
#define acl_local_size() ((i32)__builtin_amdgcn_workgroup_size_x())
#define acl_group_id() ((i64)__builtin_amdgcn_workgroup_id_x())
#define acl_local_id_y() ((i32)__builtin_amdgcn_workitem_id_y())
#define acl_local_size_y() ((i32)__builtin_amdgcn_workgroup_size_y())
#define acl_group_id_y() ((i64)__builtin_amdgcn_workgroup_id_y())
#define acl_barrier() \
    (__builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup"), __builtin_amdgcn_s_barrier(), \
     __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup"))
#define acl_mul_high_u32(a, b) ((u32)(((u64)(u32)(a) * (u32)(b)) >> 32))
#define acl_mul_high_u64(a, b) ((u64)(((unsigned __int128)(u64)(a) * (u64)(b)) >> 64))
#define acl_atomic_add_u32(p, v) __hip_atomic_fetch_add((p), (u32)(v), __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT)
#define acl_fma_f32(a, b, c) __builtin_fmaf(a, b, c)
#define acl_exp_f32(x) __builtin_expf(x)
#else
#define ACL_KERNEL extern "C" __global__
#define ACL_BLOCK(threads) __launch_bounds__(threads)
#define ACL_DEVICE static __device__ __forceinline__
#define ACL_FAR static __device__ __noinline__
#define ACL_LOCAL __shared__
#define ACL_CONSTANT static __constant__
#define acl_local_id() ((i32)threadIdx.x)
#define acl_local_size() ((i32)blockDim.x)
#define acl_group_id() ((i64)blockIdx.x)
#define acl_local_id_y() ((i32)threadIdx.y)
#define acl_local_size_y() ((i32)blockDim.y)
#define acl_group_id_y() ((i64)blockIdx.y)
#define acl_barrier() __syncthreads()
#define acl_mul_high_u32(a, b) __umulhi((u32)(a), (u32)(b))
#define acl_mul_high_u64(a, b) __umul64hi((u64)(a), (u64)(b))
#define acl_atomic_add_u32(p, v) atomicAdd((p), (u32)(v))
#define acl_fma_f32(a, b, c) fmaf(a, b, c)
#define acl_exp_f32(x) expf(x)
#endif
#define acl_global_id() (acl_group_id() * acl_local_size() + acl_local_id())
#define acl_global_id_y() (acl_group_id_y() * acl_local_size_y() + acl_local_id_y())
#endif

#if defined(ACL_HOST)
/* erf(x) = x P(x^2) / Q(x^2) for |x| <= 3.93, beyond which it rounds to 1, in float64: 1.2e-10 relative before rounding.
 * P and Q are fitted for the least largest relative error. NaN stays NaN. */
static inline float acl_erf_f32(float x) {
    double a = x > 3.93f ? 3.93f : x;
    a = a < -3.93f ? -3.93f : a;
    double z = a * a, p = 0x1.ebd2353897a83p-21, q = 0x1.5122717546ee7p-25;
    p = __builtin_fma(p, z, 0x1.b5f0b7cdc5f9cp-15);
    p = __builtin_fma(p, z, 0x1.a682373c94dd0p-11);
    p = __builtin_fma(p, z, 0x1.3b91e6b82db56p-7);
    p = __builtin_fma(p, z, 0x1.2d4ea2bacb736p-4);
    p = __builtin_fma(p, z, 0x1.345654944fb58p-2);
    p = __builtin_fma(p, z, 0x1.20dd75039e7b4p+0);
    q = __builtin_fma(q, z, 0x1.31a9526fbc059p-17);
    q = __builtin_fma(q, z, 0x1.c0af1e19413b0p-13);
    q = __builtin_fma(q, z, 0x1.876b97839d55bp-9);
    q = __builtin_fma(q, z, 0x1.c116b4ce1fe17p-6);
    q = __builtin_fma(q, z, 0x1.5270a93dfb03cp-3);
    q = __builtin_fma(q, z, 0x1.334b87c77dd33p-1);
    q = __builtin_fma(q, z, 1.0);
    return (float)(a * p / q);
}
#else
/* With s = x^2 and a = min(|x|, 4), each P a polynomial of degree 6, fitted for the least largest error:
 *
 *   |x| < 1   erf(x) = x P(s)                          1.3e-9 relative before rounding
 *   else      erf(x) = sign(x) (1 - exp(-P(a)))        1.1e-9 absolute; beyond 4 the result rounds to 1
 *
 * Written out, since HIP has no erf without ROCm's device libraries; so all devices but the CPU round alike but for exp. NaN stays
 * NaN. */
ACL_DEVICE float acl_erf_f32(float x) {
    float s = x * x;
    float inner = 7.85390657e-05f;
    inner = acl_fma_f32(inner, s, -0.000801020651f);
    inner = acl_fma_f32(inner, s, 0.00518832915f);
    inner = acl_fma_f32(inner, s, -0.0268538129f);
    inner = acl_fma_f32(inner, s, 0.112835854f);
    inner = acl_fma_f32(inner, s, -0.37612626f);
    inner = x * acl_fma_f32(inner, s, 6.0574e-8f); /* the first term's rest */
    float a = x < 0.0f ? -x : x;
    a = 4.0f < a ? 4.0f : a;
    float outer = -0.000185573139f;
    outer = acl_fma_f32(outer, a, 0.00293959863f);
    outer = acl_fma_f32(outer, a, -0.0218052827f);
    outer = acl_fma_f32(outer, a, 0.10303729f);
    outer = acl_fma_f32(outer, a, 0.638225794f);
    outer = acl_fma_f32(outer, a, 1.12704003f);
    outer = acl_fma_f32(outer, a, 0.000353733019f);
    float tail = 1.0f - acl_exp_f32(-outer);
    return a < 1.0f ? acl_fma_f32(x, 1.12837911f, inner) : (x < 0.0f ? -tail : tail);
}
#endif
