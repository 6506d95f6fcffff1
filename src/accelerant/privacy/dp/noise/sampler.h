/* Base samples of the discrete Gaussian, included after chacha20.h; discrete.py defines the words and the entries.
 *
 * No branch, and no memory address except those of the tables, depends on what is drawn. */
#define CELL_FIELD 0x0000ff80u
#define COMPARED 0x7fff007fu
#ifndef TRIGGER
#define TRIGGER COMPARED
#endif
#define COMPARED_REST 0xffff007fu

/* Return a sample from a word and its cell's entry. pool: magnitudes for triggers, 9 bits each from bit 7 on. */
ACL_DEVICE i32 base_sample(u32 word, u32 entry, u64 *pool) {
    u32 compared = word & COMPARED;
    u32 chosen = compared < (entry & COMPARED) ? word : entry;
    u32 trigger = (word & TRIGGER) == TRIGGER;
    i32 sign = (i32)word >> 31;
    chosen = trigger ? (u32)*pool : chosen;
    *pool = trigger ? *pool >> 9 : *pool;
    return ((i32)((chosen & CELL_FIELD) ^ (u32)sign) >> 7) - sign;
}

/* Return a magnitude of the second table from three words and its cell's entry, at the bits of CELL_FIELD. */
ACL_DEVICE u32 rest_sample(u32 upper, u32 middle, u32 lower, u32 entry, u32 entry_middle, u32 entry_lower) {
    u32 mine = upper & COMPARED_REST, threshold = entry & COMPARED_REST;
    u64 low = (u64)middle << 32 | lower, low_threshold = (u64)entry_middle << 32 | entry_lower;
    u32 below = (u32)(mine < threshold) | ((u32)(mine == threshold) & (u32)(low < low_threshold));
    return (below ? upper : entry) & CELL_FIELD;
}

/* Round x / grid to the nearest integer, halves to even; saturates at +-2^46; NaN is 0. inverse: 1 / grid. */
ACL_DEVICE i64 to_steps(float x, float inverse) {
    float y = x * inverse;
    float size = y < 0.0f ? -y : y;
    float whole = size < 8388608.0f ? (size + 8388608.0f) - 8388608.0f : size;
    whole = whole < 70368744177664.0f ? whole : 70368744177664.0f;
    whole = y == y ? whole : 0.0f;
    return (i64)(y < 0.0f ? -whole : whole);
}
