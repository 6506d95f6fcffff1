// Compares NumPy's arrays of a call with those of a plan, and computes. `p` is the plan (recorder.py): a tuple's head and
// length, the table, ... PyArrayObject is part of NumPy's public interface: data, nd, dimensions, strides, base, descr.
__attribute__((visibility("default"))) int acl_run_fused(i64, i64, i64, i64, i32, i32, i32, void *);
__attribute__((visibility("default"))) int fused_call(const i64 *p, const char *args, const char *out) {
    const i64 head = p[0], arrays = p[4], constants = p[5], pointers = p[6], results = p[7];
    i64 *t = (i64 *)p[3], data[16];
    const i64 *items = (const i64 *)(args + p[1]), *made = (const i64 *)(out + p[1]);
    if (*(const i64 *)(args + head) != p[2]) return 1;
    p += 8;
    for (i64 i = 0; i < arrays; i++) {
        const i64 *x = (const i64 *)(items[p[0]] + head), count = p[4];
        if (x[-1] != p[1] || x[5] != p[2] || (int)x[1] != count || x[0] & p[3]) return 1;
        const i64 *sizes = (const i64 *)x[2], *strides = (const i64 *)x[3];
        data[i] = x[0];
        p += 5;
        for (i64 k = 0; k < count; k++, p += 2)
            if (sizes[k] != p[0] || strides[k] != p[1]) return 1;
    }
    for (i64 i = 0; i < constants; i++, p += 2)
        if (items[p[0]] != p[1]) return 1;
    for (i64 i = 0; i < pointers; i++, p += 2) t[i] = data[p[0]] + p[1];
    for (i64 i = 0; i < results; i++) t[pointers + i] = *(const i64 *)(made[i] + head);
    return acl_run_fused(0, 1, 1, 1, 1, 1, 1, t);
}
