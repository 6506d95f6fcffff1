/* Discrete Gaussian noise on NVIDIA GPUs, for up to ROWS tensors in one launch; discrete.py defines it.
 *
 *   x <- (round(x / grid) + Z) * grid * scale        with VALUE_STEPS: out <- Z
 *
 * Layout: persistent blocks, one per multiprocessor. A warp processes a group of 32 units, one per lane, so that the 32
 *         lanes access 32 adjacent elements. The tensors are described by rows.cuh.
 * Time:   does not depend on what is drawn. The first table has a copy in each of the 32 banks of shared memory, so
 *         lookups never conflict; the second has four copies, read by four lanes at a time: 64 + 24 KiB.
 * Bound:  integer arithmetic: in the machine code 240 operations of the integer pipe for a draw of four terms, 175 of
 *         them ChaCha's, and 90 of the multiplier. */
#define DRAWS (16 / TERMS)

/* Read entries of the second table, four lanes at a time: each quarter of a bank's row is one of four copies.
 * rest: their address in shared memory. */
ACL_DEVICE void rest_entries(u32 rest, u32 at, u32 lane, u32 *entry) {
    u32 where = rest + at;
    entry[0] = entry[1] = entry[2] = 0;
#pragma unroll
    for (u32 pass = 0; pass < 8; pass++) {
        asm volatile(
            "{\n\t.reg .pred mine;\n\tsetp.eq.u32 mine, %4, %5;\n\t@mine ld.shared.u32 %0, [%3];\n\t"
            "@mine ld.shared.u32 %1, [%3 + 8192];\n\t@mine ld.shared.u32 %2, [%3 + 16384];\n\t}"
            : "+r"(entry[0]), "+r"(entry[1]), "+r"(entry[2])
            : "r"(where), "r"(lane >> 2), "r"(pass));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) gaussian(
    const __grid_constant__ struct Rows rows, const u32 *__restrict__ state, const u64 *__restrict__ first,
    const u32 *__restrict__ tables, i32 k1, i32 k2, i32 k3, i32 k4, u32 one, float inverse, float outward
) {
    extern __shared__ u32 table[];
    for (u32 i = threadIdx.x; i < 16384; i += THREADS) {
        table[i] = tables[i >> 5];
    }
    for (u32 i = threadIdx.x; i < 6144; i += THREADS) {
        table[16384 + i] = tables[512 + (i >> 2)];
    }
    __syncthreads();
    u32 rest = (u32)__cvta_generic_to_shared(table + 16384);
    u32 lane = threadIdx.x & 31, own = 4 * lane;
    u32 start[12], word[16];
    chacha20_start(start, state, 0);
    u64 begin = first[0];
    for (u32 group = blockIdx.x * (THREADS / 32) + threadIdx.x / 32; group < rows.groups;
         group += gridDim.x * (THREADS / 32)) {
        u32 row = row_of(rows, group);
        Value *x = (Value *)rows.pointer[row];
        i64 n = rows.size[row];
        i64 element = (i64)(group - rows.begin[row]) * (15 * DRAWS * 32) + lane;
        u64 counter = begin + 16 * ((u64)group * 32 + lane);
        u64 pool = 0;
#pragma unroll 1
        for (u32 block = 0; block < 16; block++) {
            start[8] = (u32)(counter + block), start[9] = (u32)((counter + block) >> 32);
#if !defined(VALUE_STEPS)
            float value[DRAWS];
#pragma unroll
            for (i32 draw = 0; draw < DRAWS; draw++) { /* prefetched: loads overlap the arithmetic */
                value[draw] = block && element + 32 * draw < n ? load_value(x + element + 32 * draw) : 0.0f;
            }
#endif
            chacha20_block(word, start, one);
            if (block == 0) {
#pragma unroll
                for (i32 slot = 0; slot < 5; slot++) {
                    u32 entry[3];
                    rest_entries(rest, ((word[3 * slot] & CELL_FIELD) >> 3) | (own & 12), lane, entry);
                    pool |= (u64)rest_sample(
                                word[3 * slot], word[3 * slot + 1], word[3 * slot + 2], entry[0], entry[1], entry[2])
                            << 9 * slot;
                }
            } else {
#pragma unroll
                for (i32 draw = 0; draw < DRAWS; draw++) {
                    i32 z = 0;
#pragma unroll
                    for (i32 term = 0; term < TERMS; term++) {
                        u32 w = word[TERMS * draw + term];
                        u32 entry = *(const u32 *)((const char *)table + ((w & CELL_FIELD) | own));
                        z += base_sample(w, entry, &pool) *
                             (term == 0 ? 1 : term == 1 ? k1 : term == 2 ? k2 : term == 3 ? k3 : k4);
                    }
                    if (element < n) {
#if defined(VALUE_STEPS)
                        x[element] = z;
#else
                        store_value(x + element, (float)(to_steps(value[draw], inverse) + z) * outward);
#endif
                    }
                    element += 32;
                }
            }
        }
    }
}
