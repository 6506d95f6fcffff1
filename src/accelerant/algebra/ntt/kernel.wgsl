// One pass of number-theoretic transforms in WGSL: what kernel.c computes, with its arguments and its grid.
//
// Follows field.wgsl, the arrays x, z, roots, before, after, low and high, and from program.py the tile (LOG_ROWS, LOG_COLUMNS,
// THREADS) and the variant (ALONG_IN, ...). A block loads its columns into workgroup memory, does one level of butterflies
// after another there, and stores them. Roots are w R mod p, without quotients, in bit-reversed order, for every field.
//
// Multiplies per element: half a multiply per level, and one for each factor. Bound by multiplies on all devices tried.

const ROWS: i32 = 1 << u32(LOG_ROWS);
const COLUMNS: i32 = 1 << u32(LOG_COLUMNS);

var<workgroup> tile: array<Packed, ROWS * COLUMNS>;

fn reversed_row(row: i32) -> i32 {
    if (LOG_ROWS == 0) {
        return row;
    }
    return i32(reverseBits(u32(row)) >> u32((32 - LOG_ROWS) & 31));
}

// Return the lowest bits of a number, of which there may be more than it has.
fn low_bits(value: i32, bits: i32) -> i32 {
    return select(value & ((1 << u32(bits & 31)) - 1), value, bits > 30);
}

fn high_bits(value: i32, bits: i32) -> i32 {
    return select(value >> u32(bits & 31), 0, bits > 30);
}

// The index of a column's first element on one side of the pass.
fn begin(column: i32, stride_0: i32, stride_1: i32, stride_2: i32) -> i32 {
    let rest = high_bits(column, scalars.digit_0);
    return low_bits(column, scalars.digit_0) * stride_0 + low_bits(rest, scalars.digit_1) * stride_1 +
           high_bits(rest, scalars.digit_1) * stride_2;
}

// Multiply by a factor of the position, and by a twiddle of position and column.
fn twiddle(value: Element, position: i32, column: i32) -> Element {
    let near = low_bits(column, scalars.digit_0);
    let z = mul(load_low((position << u32(scalars.log_low)) + low_bits(near, scalars.log_low)), value);
    if (SPLIT) {
        let log_high = scalars.digit_0 - scalars.log_low;
        return mul(load_high((position << u32(log_high)) + (near >> u32(scalars.log_low))), z);
    }
    return z;
}

@compute @workgroup_size(THREADS)
fn ntt_pass(
    @builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32
) {
    let first = i32(linear_group(group, groups)) * COLUMNS;
    let here = min(scalars.count - first, COLUMNS);

    // Neighbours in memory are columns, or rows where ALONG_IN.
    for (var number = i32(thread); number < ROWS * COLUMNS; number += THREADS) {
        let position = select(number >> u32(LOG_COLUMNS), number & (ROWS - 1), ALONG_IN);
        let own = select(number & (COLUMNS - 1), number >> u32(LOG_ROWS), ALONG_IN);
        if (own < here) {
            let column = first + own;
            let at = begin(column, scalars.read_0, scalars.read_1, scalars.read_2) + position * scalars.read_row;
            var value = load_x(at);
            if (BEFORE) {
                value = mul(load_before(position), value);
            }
            if (TWIDDLE_BEFORE) {
                value = twiddle(value, position, column);
            }
            tile[select(position, reversed_row(position), REVERSED_IN) * COLUMNS + own] = packed(value);
        }
    }

    // A level halves blocks of rows: y is multiplied by its block's root, then x + y and x - y replace the pair.
    for (var level = 0; level < LOG_ROWS; level++) {
        workgroupBarrier();
        let log_span = u32(LOG_ROWS - 1 - level);
        for (var number = i32(thread); number < ROWS / 2 * COLUMNS; number += THREADS) {
            let pair = number >> u32(LOG_COLUMNS);
            let block = pair >> log_span;
            let upper = ((pair + (block << log_span)) * COLUMNS) + (number & (COLUMNS - 1));
            let lower = upper + (COLUMNS << log_span);
            let x = unpacked(tile[upper]);
            var y = unpacked(tile[lower]);
            if (block > 0) {
                y = mul(load_roots(block), y);
            }
            tile[upper] = packed(add(x, y));
            tile[lower] = packed(sub(x, y));
        }
    }
    workgroupBarrier();

    // Row r of the tile is output bitrev(r).
    for (var number = i32(thread); number < ROWS * COLUMNS; number += THREADS) {
        let position = select(number >> u32(LOG_COLUMNS), number & (ROWS - 1), ALONG_OUT);
        let own = select(number & (COLUMNS - 1), number >> u32(LOG_ROWS), ALONG_OUT);
        if (own < here) {
            let column = first + own;
            let at = begin(column, scalars.write_0, scalars.write_1, scalars.write_2) + position * scalars.write_row;
            var value = unpacked(tile[select(reversed_row(position), position, REVERSED_OUT) * COLUMNS + own]);
            if (AFTER) {
                value = mul(load_after(position), value);
            }
            if (TWIDDLE_AFTER) {
                value = twiddle(value, position, column);
            }
            store_z(at, value);
        }
    }
}
