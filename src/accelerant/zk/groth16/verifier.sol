// SPDX-License-Identifier: Apache-2.0
// Written by Accelerant ${version} from the verification key of a circuit with ${count} public inputs.
pragma solidity >=0.8.13 <0.9.0;

/// @title Verifies Groth16 proofs of one circuit on BN254.
contract ${name} {
    /// Modulus of the coordinates and order of the groups.
    uint256 private constant Q = ${q};
    uint256 private constant R = ${r};

    /// @notice Returns whether (a, b, c) is a proof for these public inputs.
    /// @dev The equation is e(-a, b) e(alpha, beta) e(sum, gamma) e(c, delta) = 1, sum = IC[0] + input[i] IC[i + 1].
    /// Proofs can be changed into other proofs of the same statement: remember the inputs, not the proof.
    /// @param b x then y, the coefficient of u first, as in EIP-197.
    function verifyProof(
        uint256[2] calldata a,
        uint256[2][2] calldata b,
        uint256[2] calldata c${parameter}
    ) public view returns (bool) {
        if (a[0] >= Q || a[1] >= Q || c[0] >= Q || c[1] >= Q) return false;
        if (b[0][0] >= Q || b[0][1] >= Q || b[1][0] >= Q || b[1][1] >= Q) return false;

        uint256[4] memory sum;
        sum[0] = ${ic00};
        sum[1] = ${ic01};
${terms}
        uint256[24] memory pairs;
        pairs[0] = a[0];
        pairs[1] = a[1] == 0 ? 0 : Q - a[1];
        pairs[2] = b[0][0];
        pairs[3] = b[0][1];
        pairs[4] = b[1][0];
        pairs[5] = b[1][1];
        // alpha, beta
${alpha_beta}
        pairs[12] = sum[0];
        pairs[13] = sum[1];
        // gamma
${gamma}
        pairs[18] = c[0];
        pairs[19] = c[1];
        // delta
${delta}
        uint256[1] memory product;
        bool ok;
        assembly ("memory-safe") {
            ok := staticcall(gas(), 8, pairs, 0x300, product, 0x20)
        }
        return ok && product[0] == 1;
    }

    /// @dev Adds scalar (x, y) to (sum[0], sum[1]); sum[2] and sum[3] are scratch. False if the scalar is not below R.
    function addTerm(uint256[4] memory sum, uint256 x, uint256 y, uint256 scalar) private view returns (bool ok) {
        if (scalar >= R) return false;
        uint256[3] memory term;
        term[0] = x;
        term[1] = y;
        term[2] = scalar;
        assembly ("memory-safe") {
            ok := staticcall(gas(), 7, term, 0x60, add(sum, 0x40), 0x40)
            ok := and(ok, staticcall(gas(), 6, sum, 0x80, sum, 0x40))
        }
    }
}
