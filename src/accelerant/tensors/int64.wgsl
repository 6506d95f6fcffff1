// Integers of 64 bits as vec2<u32>, the lower half first, in two's complement; follows expressions.wgsl.

fn from_i32(x: i32) -> vec2<u32> {
    return vec2<u32>(u32(x), u32(x >> 31u));
}

fn add_i64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    let low = a.x + b.x;
    return vec2<u32>(low, a.y + b.y + select(0u, 1u, low < a.x));
}

fn sub_i64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    return vec2<u32>(a.x - b.x, a.y - b.y - select(0u, 1u, a.x < b.x));
}

fn neg_i64(a: vec2<u32>) -> vec2<u32> {
    return sub_i64(vec2<u32>(), a);
}

fn mul_i64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    return vec2<u32>(a.x * b.x, high_product(a.x, b.x) + a.x * b.y + a.y * b.x);
}

fn eq_i64(a: vec2<u32>, b: vec2<u32>) -> bool {
    return a.x == b.x && a.y == b.y;
}

fn lt_i64(a: vec2<u32>, b: vec2<u32>) -> bool {
    return i32(a.y) < i32(b.y) || (a.y == b.y && a.x < b.x);
}

fn abs_i64(a: vec2<u32>) -> vec2<u32> {
    return select(a, neg_i64(a), i32(a.y) < 0);
}

fn max_i64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    return select(a, b, lt_i64(a, b));
}

fn min_i64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    return select(a, b, lt_i64(b, a));
}

// The quotient rounded towards 0; 0 for a divisor of 0. One bit of it a step.
fn quotient_i64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    if (b.x == 0u && b.y == 0u) {
        return vec2<u32>();
    }
    var rest = abs_i64(a);
    let divisor = abs_i64(b);
    var remainder = vec2<u32>();
    for (var bit = 0; bit < 64; bit++) {
        remainder = vec2<u32>((remainder.x << 1u) | (rest.y >> 31u), (remainder.y << 1u) | (remainder.x >> 31u));
        rest = vec2<u32>(rest.x << 1u, (rest.y << 1u) | (rest.x >> 31u));
        if (remainder.y > divisor.y || (remainder.y == divisor.y && remainder.x >= divisor.x)) {
            remainder = sub_i64(remainder, divisor);
            rest.x |= 1u;
        }
    }
    return select(rest, neg_i64(rest), ((a.y ^ b.y) >> 31u) == 1u);
}

fn rest_i64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    return sub_i64(a, mul_i64(quotient_i64(a, b), b));
}

fn div_i64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    let q = quotient_i64(a, b);
    let whole = eq_i64(mul_i64(q, b), a) || (b.x == 0u && b.y == 0u);
    return select(q, sub_i64(q, vec2<u32>(1u, 0u)), !whole && ((a.y ^ b.y) >> 31u) == 1u);
}

fn rem_i64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    return sub_i64(a, mul_i64(div_i64(a, b), b));
}

// Towards 0, as torch's conversions.
fn from_f32(x: f32) -> vec2<u32> {
    let size = trunc(abs(x));
    let high = floor(size / 4294967296.0);
    let whole = vec2<u32>(u32(size - high * 4294967296.0), u32(high));
    return select(whole, neg_i64(whole), x < 0.0);
}

fn to_f32(a: vec2<u32>) -> f32 {
    let size = abs_i64(a);
    let x = f32(size.y) * 4294967296.0 + f32(size.x);
    return select(x, -x, i32(a.y) < 0);
}

// The number in 32 bits, or the nearest one.
fn narrowed(a: vec2<u32>) -> i32 {
    let nearest = select(2147483647, -2147483647 - 1, i32(a.y) < 0);
    return select(nearest, i32(a.x), eq_i64(a, from_i32(i32(a.x))));
}
