// Follows field.wgsl, and the array `exponent` of words of 32 bits, which is public: the time depends on it.

// x^(the lowest bits of exponent), of x in Montgomery form.
fn power(x: Element, bits: i32) -> Element {
    var z = one();
    var y = x;
    for (var step = 2 * bits - 1; step >= 0; step--) {
        let bit = step / 2;
        if ((step & 1) == 1) {
            y = z;
        } else if (((exponent[bit / 32] >> u32(bit % 32)) & 1u) == 1u) {
            y = x;
        } else {
            continue;
        }
        z = mul(z, y);
    }
    return z;
}
