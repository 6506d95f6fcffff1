// Body of the product on a GPU, of operands of any strides: a work-group of 256 writes a tile, a work-item 4 G rows of 4 G
// columns. The work-item loads a at k = A_K and m = A_M of a tile, b at k = B_K and n = B_N; A_STEPS and B_STEPS are the
// offsets of those elements.
__local T4 a_tile[BK * WIDTH / 4], b_tile[BK * WIDTH / 4];
__local T* const a_values = (__local T*)a_tile;
__local T* const b_values = (__local T*)b_tile;
const int t = get_local_id(0), tx = t % 16, ty = t / 16;
const I first = get_group_id(1) * TILE, left = get_group_id(0) * TILE, z = get_group_id(2);
__global const T* x0 = x0_whole + x0_at + z * x0_batch;
__global const T* x1 = x1_whole + x1_at + z * x1_batch;
__global T* out = out_whole + out_at + z * out_batch;
T4 c[4 * G][G];
for (int r = 0; r < 4 * G; ++r) for (int g = 0; g < G; ++g) c[r][g] = 0;
T a_next[4 * G], b_next[4 * G];  // of the next tile, on the way while this one is multiplied
for (I at = -BK; at < K; at += BK) {
    if (at >= 0) {
        barrier(CLK_LOCAL_MEM_FENCE);
        #pragma unroll
        for (int j = 0; j < 4 * G; ++j) {
            a_values[(A_K) * WIDTH + A_M] = a_next[j];
            b_values[(B_K) * WIDTH + B_N] = b_next[j];
        }
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    #pragma unroll
    for (int j = 0; j < 4 * G; ++j) {
        {
            const I k = at + BK + A_K, m = first + A_M;
            a_next[j] = k < K && m < M ? x0[0 A_STEPS] : 0;
        }
        {
            const I k = at + BK + B_K, n = left + B_N;
            b_next[j] = k < K && n < N ? x1[0 B_STEPS] : 0;
        }
    }
    if (at < 0) continue;
    #pragma unroll
    for (int k = 0; k < BK; ++k) {
        T4 row[G], column[G];
        #pragma unroll
        for (int g = 0; g < G; ++g) {
            column[g] = a_tile[k * (WIDTH / 4) + g * 16 + ty];
            row[g] = b_tile[k * (WIDTH / 4) + g * 16 + tx];
        }
        #pragma unroll
        for (int g = 0; g < G; ++g) {
            #pragma unroll
            for (int h = 0; h < G; ++h) {
                c[4 * g][h] += column[g].x * row[h];
                c[4 * g + 1][h] += column[g].y * row[h];
                c[4 * g + 2][h] += column[g].z * row[h];
                c[4 * g + 3][h] += column[g].w * row[h];
            }
        }
    }
}
#pragma unroll
for (int r = 0; r < 4 * G; ++r) {
    const I m = first + r / 4 * 64 + ty * 4 + r % 4;
    #pragma unroll
    for (int g = 0; g < G; ++g) {
        const I n = left + g * 64 + tx * 4;
        if (m < M && n < N) out[m * c_row + n] = c[r][g].x;
        if (m < M && n + 1 < N) out[m * c_row + n + 1] = c[r][g].y;
        if (m < M && n + 2 < N) out[m * c_row + n + 2] = c[r][g].z;
        if (m < M && n + 3 < N) out[m * c_row + n + 3] = c[r][g].w;
    }
}
