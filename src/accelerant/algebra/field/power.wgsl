// Follows field.wgsl, and the array `exponent` of words of 32 bits, which is public: the time depends on it.

// x^(the lowest bits of exponent), of x in Montgomery form.
fn power(x: Element, bits: i32) -> Element {
    var z = one();
    for (var bit = bits - 1; bit >= 0; bit--) {
        z = mul(z, z);
        if (((exponent[bit / 32] >> u32(bit % 32)) & 1u) == 1u) {
            z = mul(z, x);
        }
    }
    return z;
}
