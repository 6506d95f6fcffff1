// Follows field.wgsl, and the arrays x and z; INVERSES, BITS and P_MINUS_2 are from program.py.

// 1/x of x in Montgomery form, 0 of 0: x^(p - 2). One product for both steps: compilers copy its text to each call.
fn inverse_of(x: Element) -> Element {
    var z = x;
    var y = x;
    for (var step = 2 * BITS - 3; step >= 0; step--) {
        let bit = step / 2;
        if ((step & 1) == 1) {
            y = z;
        } else if (((P_MINUS_2[bit / 32] >> u32(bit % 32)) & 1u) == 1u) {
            y = x;
        } else {
            continue;
        }
        z = mul(z, y);
    }
    return z;
}

// A thread's elements are as far apart as the block has threads; see FIELD_invert in kernel.c.
fn invert(group: u32, thread: u32, n: i32, canonical: bool) {
    let threads = i32(BLOCK_X);
    let first = i32(group) * threads * INVERSES + i32(thread);
    var before: array<Packed, INVERSES>;
    var product = one();
    for (var k = 0; k < INVERSES; k++) {
        before[k] = packed(product);
        if (first + k * threads < n) {
            let a = load_x(first + k * threads);
            product = mul(product, choose(is_zero(a), one(), a));
        }
    }
    var inverse = inverse_of(product);
    if (canonical) {
        for (var times = 0; times < 2; times++) {
            inverse = from_montgomery(inverse);
        }
    }
    for (var k = INVERSES - 1; k >= 0; k--) {
        if (first + k * threads < n) {
            let a = load_x(first + k * threads);
            let none = is_zero(a);
            store_z(first + k * threads, choose(none, zero(), mul(inverse, unpacked(before[k]))));
            inverse = mul(inverse, choose(none, one(), a));
        }
    }
}
