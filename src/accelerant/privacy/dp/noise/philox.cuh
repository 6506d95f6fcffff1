/* Philox 4x32-10 and Box-Muller, for up to ROWS tensors in one launch. Not for a privacy claim.
 *
 *   x <- (x + width * z) * outward       z from N(0, 1); LAPLACE: of density exp(-|z|) / 2; FILLS: x counts as 0
 *
 * Source: Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3", section 5.2.2 (Philox);
 *         Box and Muller 1958.
 * Layout: a warp processes a group of 1024 elements: a counter gives four adjacent ones, 8 counters per lane. Aligned
 *         tensors are read and written 16 bytes at a time.
 * Bound:  memory, if it hides the arithmetic: a counter of four draws takes 20 wide products, 8 or 10 special functions
 *         and conversions, and about 60 other operations. Logarithm, square root, sine and cosine are those of the
 *         special function unit, with errors of about 2^-21. */
#define GROUP_ELEMENTS 1024

/* Keys of the ten rounds: arguments are operands from constant memory, without cost. */
struct Keys {
    u32 word[20];
    u32 stream; /* the counter's third word, by device, so that two devices draw different noise */
};

ACL_DEVICE void philox(u32 *c, const struct Keys &keys) {
#pragma unroll
    for (i32 i = 0; i < 10; i++) {
        u64 first = (u64)0xd2511f53u * c[0], second = (u64)0xcd9e8d57u * c[2];
        c[0] = (u32)(second >> 32) ^ c[1] ^ keys.word[2 * i];
        c[2] = (u32)(first >> 32) ^ c[3] ^ keys.word[2 * i + 1];
        c[1] = (u32)second, c[3] = (u32)first;
    }
}

/* (word + 1) / 2^32 approximately, in (0, 1]. */
ACL_DEVICE float positive_uniform(u32 word) { return fmaf((float)word, 2.3283064e-10f, 2.3283064e-10f); }

ACL_DEVICE float binary_logarithm(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#if defined(LAPLACE)
ACL_DEVICE void variates(float *z, const u32 *c) {
#pragma unroll
    for (i32 i = 0; i < 4; i++) {
        float size = -0.69314718f * binary_logarithm(positive_uniform(c[i] << 1));
        z[i] = __uint_as_float(__float_as_uint(size) ^ (c[i] & 0x80000000u));
    }
}
#else
ACL_DEVICE void variates(float *z, const u32 *c) {
#pragma unroll
    for (i32 i = 0; i < 4; i += 2) {
        float squared = -1.3862944f * binary_logarithm(positive_uniform(c[i])), radius, sine, cosine;
        asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(radius) : "f"(squared));
        float angle = (__uint_as_float(0x3f800000u | (c[i + 1] >> 9)) - 1.5f) * 6.2831853f;
        asm("sin.approx.ftz.f32 %0, %1;" : "=f"(sine) : "f"(angle));
        asm("cos.approx.ftz.f32 %0, %1;" : "=f"(cosine) : "f"(angle));
        z[i] = radius * cosine, z[i + 1] = radius * sine;
    }
}
#endif

#if defined(VALUE_FLOAT)
typedef float4 Four;
#else
typedef ushort4 Four;
#endif

/* Replace the values of four elements. */
ACL_DEVICE void noised(Four *values, u64 counter, const struct Keys &keys, float width, float outward) {
    u32 c[4] = {(u32)counter, (u32)(counter >> 32), keys.stream, 0};
    float z[4];
    Value *value = (Value *)values;
    philox(c, keys);
    variates(z, c);
#pragma unroll
    for (i32 j = 0; j < 4; j++) {
#if defined(FILLS)
        store_value(value + j, z[j] * (width * outward));
#else
        store_value(value + j, fmaf(z[j], width, load_value(value + j)) * outward);
#endif
    }
}

extern "C" __global__ void __launch_bounds__(256, 4) philox_add(
    const __grid_constant__ struct Rows rows, const __grid_constant__ struct Keys keys, const u64 *__restrict__ first,
    i32 aligned, float width, float outward
) {
    u32 lane = threadIdx.x & 31;
    u64 begin = first[0];
    for (u32 group = blockIdx.x * 8 + threadIdx.x / 32; group < rows.groups; group += gridDim.x * 8) {
        u32 row = row_of(rows, group);
        Value *x = (Value *)rows.pointer[row];
        i64 n = rows.size[row];
        i64 from = (i64)(group - rows.begin[row]) * GROUP_ELEMENTS + 4 * lane;
        u64 counter = begin + (u64)group * (GROUP_ELEMENTS / 4) + lane;
        if (aligned && from - 4 * lane + GROUP_ELEMENTS <= n) {
#pragma unroll 1
            for (u32 half = 0; half < 2; half++) { /* four loads in flight */
                Four *at = (Four *)(x + from) + 128 * half;
                Four values[4];
#if !defined(FILLS)
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    values[i] = at[32 * i];
                }
#endif
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    noised(values + i, counter + 128 * half + 32 * i, keys, width, outward);
                    at[32 * i] = values[i];
                }
            }
            continue;
        }
#pragma unroll 1
        for (u32 i = 0; i < 8; i++) {
            i64 element = from + 128 * i;
            Four values;
            Value *value = (Value *)&values;
#pragma unroll
            for (i32 j = 0; j < 4; j++) {
                value[j] = element + j < n ? x[element + j] : (Value)0;
            }
            noised(&values, counter + 32 * i, keys, width, outward);
#pragma unroll
            for (i32 j = 0; j < 4; j++) {
                if (element + j < n) {
                    x[element + j] = value[j];
                }
            }
        }
    }
}
