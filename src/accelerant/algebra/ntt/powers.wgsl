// A table of factors in WGSL: what powers.c computes, with its arguments and its grid. Follows field.wgsl, the arrays z and
// ladder, and LADDER.

// v x^exponent, of the elements x^(2^j) from `first` on.
fn times(value: Element, first: i32, exponent: i32) -> Element {
    var v = value;
    var rest = u32(exponent);
    for (var j = first; rest != 0u; j++) {
        if ((rest & 1u) == 1u) {
            v = mul(v, load_ladder(j));
        }
        rest >>= 1u;
    }
    return v;
}

@compute @workgroup_size(BLOCK_X)
fn ntt_powers(
    @builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32
) {
    let i = i32(linear_group(group, groups) * BLOCK_X + thread);
    let log_apart = u32(scalars.log_count - scalars.log_steps);
    let position = i >> log_apart;
    let c = i & ((1 << log_apart) - 1);
    if ((position >> u32(scalars.log_rows)) != 0) {
        return;
    }
    var row = position;
    if (scalars.by_bits != 0 && scalars.log_rows > 0) {
        row = i32(reverseBits(u32(position)) >> u32(32 - scalars.log_rows));
    }
    let unit = u32(scalars.log_unit);
    let t = 1 + LADDER;
    let w = t + LADDER;
    // The first element and the step between elements; one loop, since compilers copy a function's text to each call.
    var z = array<Element, 2>(load_ladder(0), one());
    var firsts = array<i32, 5>(1, t, w, t, w);
    var exponents = array<i32, 5>(
        select(0, row, scalars.by_row != 0), select(0, c << unit, scalars.by_column != 0), (row * c) << unit,
        select(0, 1 << (log_apart + unit), scalars.by_column != 0), row << (log_apart + unit)
    );
    for (var k = 0; k < 5; k++) {
        z[k / 3] = times(z[k / 3], firsts[k], exponents[k]);
    }
    var v = z[0];
    let step = z[1];
    for (var k = 0; k < 1 << u32(scalars.log_steps); k++) {
        store_z((position << u32(scalars.log_count)) + (k << log_apart) + c, v);
        v = mul(v, step);
    }
}
