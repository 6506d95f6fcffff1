// A product x W^T with a kernel's own epilogue; x (M, K), W (N, K), sums in float32 registers.
//
// A block of 384 threads has a producer (warpgroup 2), which loads steps of 64 columns of x and W through the copy engine
// into STAGES buffers, and two warpgroups with alternate tiles of TILE_M rows and WIDTH columns: while one multiplies, the
// other finishes its tile. Tiles are numbered in groups of rows for reuse in the L2 cache; block i processes tiles i,
// i + gridDim.x and so on, alternating between its warpgroups.
//
// ACROSS: x^T W of a batch instead, x (T, M), W (T, N), both stored across the sum: a step is 64 rows of both, in panels of
// 64 columns. All tiles of one product precede those of the next.
//
// Constants: HEIGHT, wgmmas of 64 rows per tile; WIDTH; STAGES; MMA, the wrapper for 64 x WIDTH; ACROSS unless 0; READERS,
// warps besides the multiplying ones that read each buffer and arrive at its `empty` barrier, unless 0.
// Shared memory begins with the buffers; the kernel's own parts begin at OFF_SLOTS. Named barriers 1 and 2 are the turns.
// Source: PTX ISA 8.7, section 9.7.15 (wgmma); alternating warpgroups: CUTLASS's documentation, "Efficient GEMM in CUDA".

#ifndef ACROSS
#define ACROSS 0
#endif
#ifndef READERS
#define READERS 0
#endif

constexpr int TILE_M = 64 * HEIGHT;
constexpr int PANEL = 64 * 128;                          // 64 of the summed dimension by 64 columns
constexpr int NEXT_16 = ACROSS ? 128 : 2;                // offset in a descriptor to the next 16 of the summed dimension
constexpr int A_BYTES = TILE_M * 128, B_BYTES = WIDTH * 128;
constexpr int OFF_A = 0, OFF_B = OFF_A + STAGES * A_BYTES, OFF_SLOTS = OFF_B + STAGES * B_BYTES;
constexpr int SLOT_BYTES = 16 * 128;                     // a box of 16 rows by 64 columns in flight
constexpr int REGS = WIDTH / 2;                          // accumulators of 64 rows

struct Tiles {
    int steps;                                           // of K per tile
    int down, across, group, items;                      // tiles down and across, tiles per group, all tiles
};

struct Origin { int row, column, batch; };

// Returns the item-th tile: `group` down, then one to the right.
__device__ __forceinline__ Origin locate(const Tiles& s, int item) {
    int batch = 0;
    if (ACROSS) {
        batch = item / (s.down * s.across);
        item -= batch * s.down * s.across;
    }
    int in_group = s.group * s.across, g = item / in_group, rest = item - g * in_group;
    int height = min(s.group, s.down - g * s.group), across = rest / height;
    return {(g * s.group + rest - across * height) * TILE_M, across * WIDTH, batch};
}

struct Position {                                        // in the ring of buffers
    u32 stage = 0, parity = 0;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) { stage = 0; parity ^= 1; }
    }
    __device__ __forceinline__ void skip(u32 steps) {
        u32 to = stage + steps;
        parity ^= (to / STAGES) & 1;
        stage = to % STAGES;
    }
};

// Called by one thread before the block's barriers_ready: initialises STAGES barriers each.
__device__ __forceinline__ void ring_init(u32 full, u32 empty) {
    for (int s = 0; s < STAGES; ++s) {
        barrier_init(full + 8 * s, 1);
        barrier_init(empty + 8 * s, 4 + READERS);
    }
}

#if ACROSS
// Loads a step of both operands, from row `row`, in panels.
__device__ __forceinline__ void fetch(u32 x, u32 w, u32 got, const TensorMap* map_x, const TensorMap* map_w,
                                      const Origin& p, int row) {
#pragma unroll
    for (int j = 0; j < HEIGHT; ++j) load_tile(x + j * PANEL, map_x, got, p.row + 64 * j, row, 0, p.batch);
#pragma unroll
    for (int j = 0; j < WIDTH / 64; ++j) load_tile(w + j * PANEL, map_w, got, p.column + 64 * j, row, 0, p.batch);
}
#endif

// The producer's loop, one thread.
__device__ __forceinline__ void produce(u32 base, u32 full, u32 empty, const TensorMap* map_x, const TensorMap* map_w,
                                        const Tiles& tiles, int first, int stride) {
    Position at;
    for (int item = first; item < tiles.items; item += stride) {
        Origin p = locate(tiles, item);
#pragma unroll 1
        for (int k = 0; k < tiles.steps; ++k, at.next()) {
            u32 got = full + 8 * at.stage;
            barrier_wait(empty + 8 * at.stage, at.parity ^ 1);
            barrier_expect(got, A_BYTES + B_BYTES);
#if ACROSS
            fetch(base + OFF_A + at.stage * A_BYTES, base + OFF_B + at.stage * B_BYTES, got, map_x, map_w, p, 64 * k);
#else
            load_tile(base + OFF_A + at.stage * A_BYTES, map_x, got, 64 * k, p.row, 0, 0);
            load_tile(base + OFF_B + at.stage * B_BYTES, map_w, got, 64 * k, p.column, 0, 0);
#endif
        }
    }
}

// A warpgroup that multiplies. A thread's accumulator x is row g + 8 ((x >> 1) & 1) of its warp's 16 rows and column
// 8 (x >> 2) + 2 t + (x & 1), where g = lane / 4, t = lane % 4.
struct Multiplier {
    u32 full, empty, last = 0;
    int group, lane;
    u64 a_first, b_first;
    Position at;

    __device__ __forceinline__ Multiplier(u32 base, u32 full, u32 empty, int group, int lane)
        : full(full), empty(empty), group(group), lane(lane), a_first(descriptor(base + OFF_A)),
          b_first(descriptor(base + OFF_B, ACROSS ? PANEL : 16)) {
        // Opaque to the compiler, which otherwise adds to their halves separately: twice the instructions.
        asm volatile("" : "+l"(a_first), "+l"(b_first));
    }
    // Returns the first of this warpgroup's tiles; the second warpgroup lets the first begin.
    __device__ __forceinline__ int begin(const Tiles& tiles, int first, int stride) {
        if (group == 1) {
            first += stride;
            at.skip(tiles.steps);
            named_arrive(1, 256);
        }
        return first;
    }
    __device__ __forceinline__ void release() {
        if (lane == 0) barrier_arrive(empty + 8 * last);
    }
    __device__ __forceinline__ void step(float (&sums)[HEIGHT][REGS], int k) {
        barrier_wait(full + 8 * at.stage, at.parity);
        u64 a = a_first + at.stage * (A_BYTES >> 4), b = b_first + at.stage * (B_BYTES >> 4);
        wgmma_fence();
#pragma unroll
        for (int d = 0; d < 4; ++d)
#pragma unroll
            for (int h = 0; h < HEIGHT; ++h) MMA(sums[h], a + h * 512 + NEXT_16 * d, b + NEXT_16 * d, d ? 1 : k);
        wgmma_commit();
    }
    // Waits for the turn, starts all products of a tile and passes the turn on; `more`: the other warpgroup has another tile.
    __device__ __forceinline__ void multiply(float (&sums)[HEIGHT][REGS], int steps, bool more) {
        named_barrier(1 + group, 256);
        last = at.stage;
        step(sums, 0);
        at.next();
#pragma unroll 1
        for (int k = 1; k < steps; ++k) {
            step(sums, k);
            wgmma_wait<1>();
            release();
            last = at.stage;
            at.next();
        }
        if (more) named_arrive(2 - group, 256);
    }
    // Waits until the sums are complete.
    __device__ __forceinline__ void finish() {
        wgmma_wait<0>();
        release();
    }
    // Skips the other warpgroup's tile. The warp synchronises, or the compiler treats the loop as divergent.
    __device__ __forceinline__ void next(int steps) {
        at.skip(steps);
        __syncwarp();
    }
};
