/* Template: c = a b, a matrix product through tiles in shared memory.
 *
 *   c[i, j] = sum over k of a[i, k] b[k, j]
 *
 * Layout: a (M, K), b (K, N), c (M, N), float, row-major, contiguous. Any M, N, K from 0.
 * Grid: (ceil(N / 64), ceil(M / 64)), block: 256 threads.
 *
 * A block computes a 64 x 64 tile of c. It loops over K in steps of 16: all threads load a 64 x 16 tile of a and a 16 x 64
 * tile of b into shared memory, wait, and multiply. Each element loaded from memory is used in 64 products instead of
 * one. Each thread holds 4 x 4 sums in registers, so that 8 loads from shared memory serve 16 multiply-adds.
 *
 * The tile of a is stored transposed, with rows padded to 68 floats: the store walks down columns, where a pitch of 64
 * would put the 16 addresses of half a warp into the same bank, and 68 keeps rows 16-byte aligned for the loads.
 *
 * Bound by the floating-point units: 2 M N K float operations. Tensor cores, which libraries use, are many times
 * faster; as next steps use wmma or wgmma, and load the next tile while this one is used.
 *
 * From Python:
 *   acl.kernel("matmul.cu", "matmul")((-(-N // 64), -(-M // 64)), 256, a, b, c, M, N, K)
 */
constexpr int TILE = 64;        // rows and columns of c per block
constexpr int DEPTH = 16;       // step along K
constexpr int SIDE = 4;         // rows and columns of c per thread
constexpr int THREADS = (TILE / SIDE) * (TILE / SIDE);
constexpr int PITCH = TILE + 4; // row stride of the transposed tile of a, in floats

extern "C" __global__ void __launch_bounds__(THREADS)
matmul(const float *a, const float *b, float *c, int M, int N, int K) {
    __shared__ __align__(16) float a_tile[DEPTH][PITCH]; // a_tile[k][row]
    __shared__ __align__(16) float b_tile[DEPTH][TILE];  // b_tile[k][column]

    int first_row = blockIdx.y * TILE;
    int first_column = blockIdx.x * TILE;
    int row = threadIdx.x / (TILE / SIDE) * SIDE;    // of this thread's sums, within the tile
    int column = threadIdx.x % (TILE / SIDE) * SIDE;
    float sums[SIDE][SIDE] = {};

    for (int k0 = 0; k0 < K; k0 += DEPTH) {
        /* Neighbouring threads load neighbouring elements of a row. Outside the matrices the tiles hold zeros, so that
         * the multiplication below needs no test. */
        for (int i = threadIdx.x; i < TILE * DEPTH; i += THREADS) {
            int r = first_row + i / DEPTH, k = k0 + i % DEPTH;
            a_tile[i % DEPTH][i / DEPTH] = r < M && k < K ? a[static_cast<long long>(r) * K + k] : 0.0f;
        }
        for (int i = threadIdx.x; i < TILE * DEPTH; i += THREADS) {
            int k = k0 + i / TILE, q = first_column + i % TILE;
            b_tile[i / TILE][i % TILE] = k < K && q < N ? b[static_cast<long long>(k) * N + q] : 0.0f;
        }
        __syncthreads(); // the tiles are complete

#pragma unroll
        for (int k = 0; k < DEPTH; ++k) {
            float4 left = *reinterpret_cast<const float4 *>(&a_tile[k][row]);
            float4 right = *reinterpret_cast<const float4 *>(&b_tile[k][column]);
            float x[SIDE] = {left.x, left.y, left.z, left.w};
            float y[SIDE] = {right.x, right.y, right.z, right.w};
#pragma unroll
            for (int i = 0; i < SIDE; ++i) {
#pragma unroll
                for (int j = 0; j < SIDE; ++j) {
                    sums[i][j] += x[i] * y[j];
                }
            }
        }
        __syncthreads(); // nobody reads the tiles any more
    }

#pragma unroll
    for (int i = 0; i < SIDE; ++i) {
#pragma unroll
        for (int j = 0; j < SIDE; ++j) {
            int r = first_row + row + i, q = first_column + column + j;
            if (r < M && q < N) {
                c[static_cast<long long>(r) * N + q] = sums[i][j];
            }
        }
    }
}
