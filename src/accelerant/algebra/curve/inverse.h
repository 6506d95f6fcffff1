/* Inverses in a prime field of several limbs. BASE is the field's prefix. Preceded by its arithmetic and
 * BASE_EXPONENT, the 64-bit words of p - 2, BASE_NIBBLES digits of four bits. */

ACL_CONSTANT u64 BASE_exponent[] = {BASE_EXPONENT};

/* 1/x, and 0 for 0: x^(p - 2) by digits of four bits, from a table of x^0 to x^15 in the thread's private memory: 254 bits
 * take 252 squares and 77 multiplies, where bit by bit they take 253 and about 110. The exponent is the same for all. */
ACL_FAR BASE BASE_inverse(BASE x) {
    BASE table[16];
    table[0] = BASE_one();
#pragma unroll 1
    for (i32 k = 1; k < 16; k++) {
        table[k] = BASE_mul(table[k - 1], x);
    }
    BASE z = BASE_one();
#pragma unroll 1
    for (i32 digit = BASE_NIBBLES - 1; digit >= 0; digit--) {
#pragma unroll 1
        for (i32 k = 0; k < 4; k++) {
            z = BASE_square(z);
        }
        z = BASE_mul(z, table[BASE_exponent[digit / 16] >> 4 * (digit % 16) & 15]);
    }
    return z;
}
