// Functions of expressions (tensors/tensor.py: FUNCTIONS) for values of type T, f32 or i32, under the prefix acl_.
// WGSL lets a compiler assume that there is no NaN and no infinity, so both are told by their bits.

var<private> nan_bits: u32 = 0x7fc00000u;
var<private> infinity_bits: u32 = 0x7f800000u;

fn differ_f32(a: f32, b: f32) -> bool {
    return !(a == b);
}

fn nan_f32(x: f32) -> bool {
    return (bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u;
}

fn inf_f32(x: f32) -> bool {
    return (bitcast<u32>(x) & 0x7fffffffu) == 0x7f800000u;
}

fn tanh_f32(x: f32) -> f32 {
    if (abs(x) < 0.3) {  // the quotient of exponentials loses digits here; 2e-8 relative
        let s = x * x;
        return x + x * s * (-0.33333333 + s * (0.13333334 + s * (-0.053968254 + s * (0.021869488 + s * -0.0088632356))));
    }
    let e = exp(-2.0 * abs(x));
    let y = (1.0 - e) / (1.0 + e);
    return select(y, -y, x < 0.0);
}

// The polynomials of portable.h, which states the error.
fn erf_f32(x: f32) -> f32 {
    let s = x * x;
    var inner = 7.85390657e-05;
    inner = inner * s - 0.000801020651;
    inner = inner * s + 0.00518832915;
    inner = inner * s - 0.0268538129;
    inner = inner * s + 0.112835854;
    inner = inner * s - 0.37612626;
    inner = inner * s + 1.12837911;
    let a = select(abs(x), 4.0, abs(x) > 4.0);
    var outer = -0.000185573139;
    outer = outer * a + 0.00293959863;
    outer = outer * a - 0.0218052827;
    outer = outer * a + 0.10303729;
    outer = outer * a + 0.638225794;
    outer = outer * a + 1.12704003;
    outer = outer * a + 0.000353733019;
    let tail = 1.0 - exp(-outer);
    let y = select(select(tail, -tail, x < 0.0), x * inner, a < 1.0);
    return select(y, x, nan_f32(x));
}

fn pow_f32(a: f32, b: f32) -> f32 {
    if (b == 0.0 || a == 1.0) {
        return 1.0;
    }
    if (nan_f32(a) || nan_f32(b)) {
        return bitcast<f32>(nan_bits);
    }
    var size = exp2(b * log2(abs(a)));
    if (a == 0.0) {
        size = select(0.0, bitcast<f32>(infinity_bits), b < 0.0);
    } else if (inf_f32(b)) {
        size = select(select(0.0, bitcast<f32>(infinity_bits), (abs(a) > 1.0) == (b > 0.0)), 1.0, a == -1.0);
    }
    if (bitcast<u32>(a) >> 31u == 0u) {
        return size;
    }
    if (floor(b) != b) {
        return select(bitcast<f32>(nan_bits), size, a == 0.0 || inf_f32(a));
    }
    return select(size, -size, floor(b * 0.5) * 2.0 != b);
}

// The exact remainder; WGSL's % rounds the quotient. Each difference is exact: a number less one in [half of it, it].
fn fmod_f32(a: f32, b: f32) -> f32 {
    if (b == 0.0 || inf_f32(a) || nan_f32(a) || nan_f32(b)) {
        return bitcast<f32>(nan_bits);
    }
    var rest = abs(a);
    let divisor = abs(b);
    if (inf_f32(b)) {
        return a;
    }
    while (rest >= divisor) {
        let power = i32(bitcast<u32>(rest) >> 23u) - i32(bitcast<u32>(divisor) >> 23u);
        var step = ldexp(divisor, power);
        step = select(step, ldexp(divisor, power - 1), step > rest || inf_f32(step));
        rest -= step;
    }
    return select(rest, -rest, a < 0.0);
}

fn rem_f32(a: f32, b: f32) -> f32 {
    let m = fmod_f32(a, b);
    return select(m, m + b, m != 0.0 && (b < 0.0) != (m < 0.0));
}

fn div_f32(a: f32, b: f32) -> f32 {
    if (b == 0.0) {
        return a / b;
    }
    let m = fmod_f32(a, b);
    let q = (a - m) / b - select(0.0, 1.0, m != 0.0 && (b < 0.0) != (m < 0.0));
    let f = floor(q);
    return select(f, f + 1.0, q - f > 0.5);
}

fn quotient_i32(a: i32, b: i32) -> i32 {
    if (b == 0) {
        return 0;
    }
    if (b == -1) {
        return -a;
    }
    return a / b;
}

fn div_i32(a: i32, b: i32) -> i32 {
    let q = quotient_i32(a, b);
    return select(q, q - 1, b != 0 && q * b != a && (a < 0) != (b < 0));
}

// Philox 4x32-10: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
fn high_product(a: u32, b: u32) -> u32 {
    let low = (a & 0xffffu) * (b & 0xffffu);
    let middle = (a >> 16u) * (b & 0xffffu) + (low >> 16u);
    let other = (a & 0xffffu) * (b >> 16u) + (middle & 0xffffu);
    return (a >> 16u) * (b >> 16u) + (middle >> 16u) + (other >> 16u);
}

fn drawn(i: i32, n0: i32, n1: i32) -> vec4<u32> {
    var c = vec4<u32>(u32(i), 0u, 0u, 0u);
    var k = vec2<u32>(u32(n0), u32(n1));
    for (var round = 0; round < 10; round++) {
        let h0 = high_product(0xD2511F53u, c.x);
        let h1 = high_product(0xCD9E8D57u, c.z);
        c = vec4<u32>(h1 ^ c.y ^ k.x, 0xCD9E8D57u * c.z, h0 ^ c.w ^ k.y, 0xD2511F53u * c.x);
        k += vec2<u32>(0x9E3779B9u, 0xBB67AE85u);
    }
    return c;
}

fn acl_uniform(i: i32, n0: i32, n1: i32) -> f32 {
    return f32(drawn(i, n0, n1).x >> 8u) * 5.9604645e-08;
}

fn acl_normal(i: i32, n0: i32, n1: i32) -> f32 {
    let r = drawn(i, n0, n1);
    let u = f32((r.x >> 8u) + 1u) * 5.9604645e-08;
    return sqrt(-2.0 * log(u)) * cos(f32(r.y >> 8u) * (1.1920929e-07 * 3.14159265));
}
