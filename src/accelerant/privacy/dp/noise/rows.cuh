/* Tensors of one launch, and access to their elements; included after portable.h.
 *
 * Row t is a tensor; its groups, of the kernel's size, begin at begin[t]. Passed by value, so that a captured graph
 * holds it without a copy. */
#define ROWS 192

struct Rows {
    u64 pointer[ROWS];
    i64 size[ROWS];
    u32 begin[ROWS];
    u32 groups;
    u32 count;
};

/* Return the row of a group. */
ACL_DEVICE u32 row_of(const struct Rows &rows, u32 group) {
    u32 row = 0, above = rows.count;
    while (above - row > 1) {
        u32 middle = (row + above) / 2;
        if (rows.begin[middle] <= group) {
            row = middle;
        } else {
            above = middle;
        }
    }
    return row;
}

#if defined(VALUE_FLOAT)
typedef float Value;
ACL_DEVICE float load_value(const Value *at) { return *at; }
ACL_DEVICE void store_value(Value *at, float y) { *at = y; }
#elif defined(VALUE_BFLOAT16)
typedef unsigned short Value;
ACL_DEVICE float load_value(const Value *at) { return __uint_as_float((u32)*at << 16); }
ACL_DEVICE void store_value(Value *at, float y) { /* to the nearest, halves to even; y is never NaN */
    u32 bits = __float_as_uint(y);
    *at = (Value)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
#elif defined(VALUE_FLOAT16)
typedef unsigned short Value;
ACL_DEVICE float load_value(const Value *at) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(*at));
    return y;
}
ACL_DEVICE void store_value(Value *at, float y) {
    Value bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(y));
    *at = bits;
}
#else
typedef i64 Value;
#endif
