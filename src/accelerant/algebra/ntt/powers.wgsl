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
    var v = load_ladder(0);
    var step = one();
    v = times(v, 1, select(0, row, scalars.by_row != 0));
    v = times(v, t, select(0, c << unit, scalars.by_column != 0));
    v = times(v, w, (row * c) << unit);
    step = times(step, t, select(0, 1 << (log_apart + unit), scalars.by_column != 0));
    step = times(step, w, row << (log_apart + unit));
    for (var k = 0; k < 1 << u32(scalars.log_steps); k++) {
        store_z((position << u32(scalars.log_count)) + (k << log_apart) + c, v);
        v = mul(v, step);
    }
}
