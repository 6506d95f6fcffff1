/* Template: y = max(x, 0), elementwise, in 16-byte accesses.
 *
 * Layout: n floats, contiguous. Any grid: each thread takes every (grid * block)-th group of four elements.
 * Bound by memory: 8 bytes per element, one comparison. A warp's 16-byte accesses are 512 contiguous bytes, which need a
 * quarter of the load and store instructions of single floats.
 *
 * A NaN stays a NaN: (x < 0) is false for it, while fmaxf(x, 0) would make it 0.
 *
 * From Python:
 *   acl.kernel("relu.cu", "relu")(min(-(-n // 1024), 4096), 256, x, y, n)
 */
static __device__ __forceinline__ float relu_one(float x) {
    return x < 0.0f ? 0.0f : x;
}

/* 16-byte accesses need 16-byte addresses: torch's allocations have them, a view such as x[1:] does not. */
static __device__ __forceinline__ bool is_aligned(const void *pointer) {
    return (reinterpret_cast<unsigned long long>(pointer) & 15) == 0;
}

extern "C" __global__ void __launch_bounds__(256) relu(const float *x, float *y, long long n) {
    long long thread = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
    long long threads = gridDim.x * static_cast<long long>(blockDim.x);
    long long quads = is_aligned(x) && is_aligned(y) ? n / 4 : 0;

    const float4 *x4 = reinterpret_cast<const float4 *>(x);
    float4 *y4 = reinterpret_cast<float4 *>(y);
    for (long long i = thread; i < quads; i += threads) {
        float4 value = x4[i];
        value.x = relu_one(value.x);
        value.y = relu_one(value.y);
        value.z = relu_one(value.z);
        value.w = relu_one(value.w);
        y4[i] = value;
    }
    /* The last elements that fill no group of four; all of them where the addresses are not aligned. */
    for (long long i = 4 * quads + thread; i < n; i += threads) {
        y[i] = relu_one(x[i]);
    }
}
