// A prime field in WGSL, which has no integers of 64 bits and no high half of a product: DIGITS digits of 16 bits in u32,
// the least significant first, so that x y + z + carry of digits fits in 32 bits. One text for every field.
//
// Defined by program.py: DIGITS n; MODULUS p, R1 = R mod p and R2 = R^2 mod p, R = 2^(16 n); INVERSE -1/p mod 2^16;
// CANONICAL: whether elements in "Montgomery form" are canonical, as in Goldilocks, whose products in C need no such form.
// A product then is two Montgomery products.
//
// An element is below p. No branch and no address depends on one. In memory it is n / 2 words of 32 bits.

alias Element = array<u32, DIGITS>;
alias Packed = array<u32, DIGITS / 2>;

fn unpacked(words: Packed) -> Element {
    var packed = words;
    var z: Element;
    for (var i = 0; i < DIGITS / 2; i++) {
        z[2 * i] = packed[i] & 0xffffu;
        z[2 * i + 1] = packed[i] >> 16u;
    }
    return z;
}

fn packed(digits: Element) -> Packed {
    var x = digits;
    var words: Packed;
    for (var i = 0; i < DIGITS / 2; i++) {
        words[i] = x[2 * i] | (x[2 * i + 1] << 16u);
    }
    return words;
}

fn zero() -> Element {
    return Element();
}

// 1 in Montgomery form.
fn one() -> Element {
    var z: Element;
    z[0] = 1u;
    if (CANONICAL) {
        return z;
    }
    return R1;
}

fn is_zero(x: Element) -> bool {
    var digits = x;
    var any = 0u;
    for (var i = 0; i < DIGITS; i++) {
        any |= digits[i];
    }
    return any == 0u;
}

fn choose(first: bool, x: Element, y: Element) -> Element {
    var a = x;
    var z = y;
    let mask = select(0u, 0xffffu, first);
    for (var i = 0; i < DIGITS; i++) {
        z[i] = (a[i] & mask) | (z[i] & ~mask);
    }
    return z;
}

// Return whether x is below p.
fn is_reduced(x: Element) -> bool {
    var digits = x;
    var borrow = 0u;
    for (var i = 0; i < DIGITS; i++) {
        borrow = (digits[i] - MODULUS[i] - borrow) >> 31u;
    }
    return borrow == 1u;
}

// Return x + top R, below 2 p, less p where it is p or more.
fn reduced(x: Element, top: u32) -> Element {
    var z = x;
    var difference: Element;
    var borrow = 0u;
    for (var i = 0; i < DIGITS; i++) {
        let d = z[i] - MODULUS[i] - borrow;
        difference[i] = d & 0xffffu;
        borrow = d >> 31u;
    }
    return choose(top >= borrow, difference, z);
}

fn add(x: Element, y: Element) -> Element {
    var a = x;
    var b = y;
    var carry = 0u;
    for (var i = 0; i < DIGITS; i++) {
        let s = a[i] + b[i] + carry;
        a[i] = s & 0xffffu;
        carry = s >> 16u;
    }
    return reduced(a, carry);
}

fn sub(x: Element, y: Element) -> Element {
    var a = x;
    var b = y;
    var borrow = 0u;
    for (var i = 0; i < DIGITS; i++) {
        let d = a[i] - b[i] - borrow;
        a[i] = d & 0xffffu;
        borrow = d >> 31u;
    }
    let mask = 0u - borrow;
    var carry = 0u;
    for (var i = 0; i < DIGITS; i++) {
        let s = a[i] + (MODULUS[i] & mask) + carry;
        a[i] = s & 0xffffu;
        carry = s >> 16u;
    }
    return a;
}

// x y / R mod p, below p; x is below p, y any number of n digits. 2 n^2 + n products of digits.
// Source: Koc, Acar and Kaliski 1996, IEEE Micro 16(3), coarsely integrated operand scanning.
fn montgomery(x: Element, y: Element) -> Element {
    var a = x;
    var b = y;
    var t: Element;
    var high = 0u;
    for (var i = 0; i < DIGITS; i++) {
        let digit = b[i];
        var carry = 0u;
        for (var j = 0; j < DIGITS; j++) {
            let s = t[j] + a[j] * digit + carry;
            t[j] = s & 0xffffu;
            carry = s >> 16u;
        }
        let above = high + carry;
        let m = (t[0] * INVERSE) & 0xffffu;
        carry = (t[0] + m * MODULUS[0]) >> 16u;
        for (var j = 1; j < DIGITS; j++) {
            let s = t[j] + m * MODULUS[j] + carry;
            t[j - 1] = s & 0xffffu;
            carry = s >> 16u;
        }
        let s = above + carry;
        t[DIGITS - 1] = s & 0xffffu;
        high = s >> 16u;
    }
    return reduced(t, high);
}

// The product of elements in Montgomery form.
fn mul(x: Element, y: Element) -> Element {
    let z = montgomery(x, y);
    if (CANONICAL) {
        return montgomery(R2, z);
    }
    return z;
}

// x R mod p, or x mod p if CANONICAL; x is any number of n digits.
fn to_montgomery(x: Element) -> Element {
    if (CANONICAL) {
        return montgomery(R1, x);
    }
    return montgomery(R2, x);
}

fn from_montgomery(x: Element) -> Element {
    if (CANONICAL) {
        return x;
    }
    var unit: Element;
    unit[0] = 1u;
    return montgomery(x, unit);
}
