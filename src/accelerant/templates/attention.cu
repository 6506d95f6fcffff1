/* Template: o = softmax(scale q k^T) v by the online softmax, without storing rows of scores.
 *
 *   o[i] = sum over j of exp(s[i, j] - m[i]) v[j] / sum over j of exp(s[i, j] - m[i]),   s[i, j] = scale q[i] . k[j]
 *
 * m[i] is the maximum of the scores so far. When it grows, the sums are multiplied by exp(old m - new m), which gives the
 * result of the overall maximum. Source: Milakov and Gimelshein 2018,
 * arXiv:1805.02867; Dao et al. 2022, arXiv:2205.14135.
 *
 * Layout: q, o (heads, queries, 64), k, v (heads, keys, 64), float, contiguous; batch and heads flattened into one.
 * Grid: (ceil(queries / 64), heads), block: 256 threads. With `causal`, query i sees the keys j <= i.
 * A query that sees no key (keys = 0) gives zeros.
 *
 * Four neighbouring threads hold one query and its 64 sums in registers, every fourth element each, and add their parts of
 * a score by two shuffles. The block loops over tiles of 32 keys, which its threads load into shared memory; the eight
 * queries of a warp read the same key at the same time, a broadcast. Scores are processed 8 at a time, so that the sums are
 * rescaled once for 8 keys.
 *
 * Bound by the floating-point units: 4 * 64 operations per query and key. Tensor cores are many times faster; as a next
 * step let a warp hold 16 queries and use mma for both products.
 *
 * From Python:
 *   acl.kernel("attention.cu", "attention")((-(-queries // 64), heads), 256, q, k, v, o, queries, keys, 0.125, causal)
 */
constexpr int WIDTH = 64;   // of a head
constexpr int QUERIES = 64; // per block
constexpr int LANES = 4;    // threads per query
constexpr int PART = WIDTH / LANES;
constexpr int THREADS = QUERIES * LANES;
constexpr int KEYS = 32;    // per tile
constexpr int GROUP = 8;    // keys per rescaling
constexpr float NOTHING = -1e30f; // a score below every other; not -inf, whose difference with itself is NaN

extern "C" __global__ void __launch_bounds__(THREADS)
attention(const float *q, const float *k, const float *v, float *o, int queries, int keys, float scale, int causal) {
    __shared__ float k_tile[KEYS][WIDTH];
    __shared__ float v_tile[KEYS][WIDTH];

    int lane = threadIdx.x % LANES; // holds the elements lane, lane + 4, lane + 8, ...
    int query = blockIdx.x * QUERIES + threadIdx.x / LANES;
    bool inside = query < queries;
    long long head = blockIdx.y;
    const float *k_head = k + head * keys * WIDTH;
    const float *v_head = v + head * keys * WIDTH;
    long long row = (head * queries + query) * WIDTH;

    float mine[PART];
    float sums[PART] = {};
#pragma unroll
    for (int i = 0; i < PART; ++i) {
        mine[i] = inside ? q[row + i * LANES + lane] * scale : 0.0f;
    }
    float largest = NOTHING;
    float weight_sum = 0.0f;

    /* With the causal mask no query of this block sees a key beyond its last query. */
    int last_query = min(static_cast<int>(blockIdx.x) * QUERIES + QUERIES, queries);
    int seen = causal ? min(keys, last_query) : keys;

    for (int first = 0; first < seen; first += KEYS) {
        for (int i = threadIdx.x; i < KEYS * WIDTH; i += THREADS) {
            bool there = first + i / WIDTH < keys;
            long long place = static_cast<long long>(first) * WIDTH + i;
            k_tile[i / WIDTH][i % WIDTH] = there ? k_head[place] : 0.0f;
            v_tile[i / WIDTH][i % WIDTH] = there ? v_head[place] : 0.0f;
        }
        __syncthreads(); // the tiles are complete

        for (int group = 0; group < KEYS; group += GROUP) {
            float scores[GROUP];
            float largest_now = largest;
#pragma unroll
            for (int j = 0; j < GROUP; ++j) {
                float score = 0.0f;
#pragma unroll
                for (int i = 0; i < PART; ++i) {
                    score += mine[i] * k_tile[group + j][i * LANES + lane];
                }
                /* Every thread of the warp is here, those outside the queries too: a shuffle needs them all. */
                score += __shfl_xor_sync(0xffffffffu, score, 1);
                score += __shfl_xor_sync(0xffffffffu, score, 2);
                int key = first + group + j;
                bool hidden = key >= keys || (causal && key > query);
                scores[j] = hidden ? NOTHING : score;
                largest_now = fmaxf(largest_now, scores[j]);
            }
            float shrink = __expf(largest - largest_now);
            largest = largest_now;
            weight_sum *= shrink;
#pragma unroll
            for (int i = 0; i < PART; ++i) {
                sums[i] *= shrink;
            }
#pragma unroll
            for (int j = 0; j < GROUP; ++j) {
                /* Until a query has seen a key, largest is NOTHING too, and exp(0) would count what is hidden. */
                float weight = scores[j] == NOTHING ? 0.0f : __expf(scores[j] - largest);
                weight_sum += weight;
#pragma unroll
                for (int i = 0; i < PART; ++i) {
                    sums[i] += weight * v_tile[group + j][i * LANES + lane];
                }
            }
        }
        __syncthreads(); // nobody reads the tiles any more
    }

    if (inside) {
        float share = weight_sum > 0.0f ? 1.0f / weight_sum : 0.0f;
#pragma unroll
        for (int i = 0; i < PART; ++i) {
            o[row + i * LANES + lane] = sums[i] * share;
        }
    }
}
