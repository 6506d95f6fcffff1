/* SHA-256 (FIPS 180-4) of rows: z = SHA-256(prefix, row), eight words for each of n rows of `count` 32-bit words.
 *
 * Rows and digests are bytes in memory, which is little-endian; the prefix is a word of four bytes, the first the highest.
 * Grid: a thread for each row. Bound by arithmetic, about 2,000 instructions for 64 bytes. */
ACL_CONSTANT u32 sha256_constants[64] = {
    0x428a2f98U, 0x71374491U, 0xb5c0fbcfU, 0xe9b5dba5U, 0x3956c25bU, 0x59f111f1U, 0x923f82a4U, 0xab1c5ed5U,
    0xd807aa98U, 0x12835b01U, 0x243185beU, 0x550c7dc3U, 0x72be5d74U, 0x80deb1feU, 0x9bdc06a7U, 0xc19bf174U,
    0xe49b69c1U, 0xefbe4786U, 0x0fc19dc6U, 0x240ca1ccU, 0x2de92c6fU, 0x4a7484aaU, 0x5cb0a9dcU, 0x76f988daU,
    0x983e5152U, 0xa831c66dU, 0xb00327c8U, 0xbf597fc7U, 0xc6e00bf3U, 0xd5a79147U, 0x06ca6351U, 0x14292967U,
    0x27b70a85U, 0x2e1b2138U, 0x4d2c6dfcU, 0x53380d13U, 0x650a7354U, 0x766a0abbU, 0x81c2c92eU, 0x92722c85U,
    0xa2bfe8a1U, 0xa81a664bU, 0xc24b8b70U, 0xc76c51a3U, 0xd192e819U, 0xd6990624U, 0xf40e3585U, 0x106aa070U,
    0x19a4c116U, 0x1e376c08U, 0x2748774cU, 0x34b0bcb5U, 0x391c0cb3U, 0x4ed8aa4aU, 0x5b9cca4fU, 0x682e6ff3U,
    0x748f82eeU, 0x78a5636fU, 0x84c87814U, 0x8cc70208U, 0x90befffaU, 0xa4506cebU, 0xbef9a3f7U, 0xc67178f2U};

ACL_DEVICE u32 sha256_turned(u32 x, i32 by) {
    return x >> by | x << (32 - by);
}

ACL_DEVICE u32 sha256_swapped(u32 x) {
    return x >> 24 | (x >> 8 & 0xff00U) | (x & 0xff00U) << 8 | x << 24;
}

ACL_KERNEL void sha256_rows(ACL_GLOBAL const u32 *x, ACL_GLOBAL u32 *z, i64 prefix, i64 count, i64 n) {
    i64 row = acl_global_id(), blocks = (count + 19) / 16; /* the prefix, a bit of 1, and the length in two words */
    if (row >= n) {
        return;
    }
    u32 state[8] = {0x6a09e667U, 0xbb67ae85U, 0x3c6ef372U, 0xa54ff53aU, 0x510e527fU, 0x9b05688cU, 0x1f83d9abU, 0x5be0cd19U};
    for (i64 block = 0; block < blocks; block++) {
        u32 w[16], s[8];
        for (i32 i = 0; i < 16; i++) {
            i64 at = 16 * block + i - 1;
            w[i] = at < 0 ? (u32)prefix : at < count ? sha256_swapped(x[row * count + at]) : at == count ? 0x80000000U : 0;
        }
        if (block == blocks - 1) {
            w[15] = (u32)(32 * (count + 1));
        }
        for (i32 i = 0; i < 8; i++) {
            s[i] = state[i];
        }
        for (i32 round = 0; round < 64; round += 16) {
            for (i32 i = 0; i < 16; i++) { /* unrolled, so that w is in registers */
                if (round) {
                    u32 a = w[(i + 1) % 16], b = w[(i + 14) % 16];
                    w[i] += (sha256_turned(a, 7) ^ sha256_turned(a, 18) ^ a >> 3) + w[(i + 9) % 16] +
                            (sha256_turned(b, 17) ^ sha256_turned(b, 19) ^ b >> 10);
                }
                u32 e = s[4], a = s[0];
                u32 first = s[7] + (sha256_turned(e, 6) ^ sha256_turned(e, 11) ^ sha256_turned(e, 25)) +
                            ((e & s[5]) ^ (~e & s[6])) + sha256_constants[round + i] + w[i];
                u32 second = (sha256_turned(a, 2) ^ sha256_turned(a, 13) ^ sha256_turned(a, 22)) +
                             ((a & s[1]) ^ (a & s[2]) ^ (s[1] & s[2]));
                for (i32 k = 7; k > 0; k--) {
                    s[k] = s[k - 1];
                }
                s[4] += first;
                s[0] = first + second;
            }
        }
        for (i32 i = 0; i < 8; i++) {
            state[i] += s[i];
        }
    }
    for (i32 i = 0; i < 8; i++) {
        z[8 * row + i] = sha256_swapped(state[i]);
    }
}
