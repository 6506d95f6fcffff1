"""A Solidity contract that verifies the proofs of one circuit on BN254, with the precompiled contracts of Ethereum.

The contract takes the call data of `Proof.to_calldata` and of snarkjs's `zkey export soliditycalldata`, and answers as
`verify` does, but False where `verify` raises: it checks that public inputs are below r and coordinates below q; the
pairing's contract checks that points are on their curves and B in the subgroup.

Source: EIP-196 (addition 0x06 and multiplication 0x07 in G1) and EIP-197 (product of pairings 0x08, c1 before c0).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from accelerant._version import __version__
from accelerant.algebra.curve.encoding import decode_points
from accelerant.algebra.curve.parameters import family_of
from accelerant.errors import ConfigError, UnsupportedCase
from accelerant.runtime.files import clipped

if TYPE_CHECKING:
    from accelerant.zk.groth16.verifier import VerificationKey

_IDENTIFIER = re.compile(r"[A-Za-z_$][A-Za-z0-9_$]{0,79}", re.ASCII)

_KEYWORDS = """
abstract address after alias anonymous apply as assembly assert auto bool break byte bytes calldata case catch constant
constructor continue contract copyof days default define delete do else emit enum ether event external fallback false
final fixed for function gwei hex hours if immutable implements import in indexed inline int interface internal is
layout let library macro mapping match memory minutes modifier mutable new null of override partial payable pragma
private promise public pure receive reference relocatable return returns sealed seconds sizeof static storage string
struct super supports switch this throw transient true try type typedef typeof ufixed uint unchecked unicode using var
view virtual weeks wei while years
"""
_RESERVED = frozenset(_KEYWORDS.split())
_OWN = frozenset(("_", "verifyProof", "addTerm"))
"""Names that the compiler refuses for this contract: the reserved one, and those of its functions."""

_NUMBERED = re.compile(r"(u?int|bytes)\d+|u?fixed\d+x\d+", re.ASCII)

_TEMPLATE = """\
// SPDX-License-Identifier: Apache-2.0
// Written by Accelerant {version} from the verification key of a circuit with {count} public inputs.
pragma solidity >=0.8.13 <0.9.0;

/// @title Verifies Groth16 proofs of one circuit on BN254.
contract {name} {{
    /// Modulus of the coordinates and order of the groups.
    uint256 private constant Q = {q};
    uint256 private constant R = {r};

    /// @notice Returns whether (a, b, c) is a proof for these public inputs.
    /// @dev The equation is e(-a, b) e(alpha, beta) e(sum, gamma) e(c, delta) = 1, sum = IC[0] + input[i] IC[i + 1].
    /// Proofs can be changed into other proofs of the same statement: remember the inputs, not the proof.
    /// @param b x then y, the coefficient of u first, as in EIP-197.
    function verifyProof(
        uint256[2] calldata a,
        uint256[2][2] calldata b,
        uint256[2] calldata c{parameter}
    ) public view returns (bool) {{
        if (a[0] >= Q || a[1] >= Q || c[0] >= Q || c[1] >= Q) return false;
        if (b[0][0] >= Q || b[0][1] >= Q || b[1][0] >= Q || b[1][1] >= Q) return false;

        uint256[4] memory sum;
        sum[0] = {ic0[0]};
        sum[1] = {ic0[1]};
{terms}
        uint256[24] memory pairs;
        pairs[0] = a[0];
        pairs[1] = a[1] == 0 ? 0 : Q - a[1];
        pairs[2] = b[0][0];
        pairs[3] = b[0][1];
        pairs[4] = b[1][0];
        pairs[5] = b[1][1];
        // alpha, beta
{alpha_beta}
        pairs[12] = sum[0];
        pairs[13] = sum[1];
        // gamma
{gamma}
        pairs[18] = c[0];
        pairs[19] = c[1];
        // delta
{delta}
        uint256[1] memory product;
        bool ok;
        assembly ("memory-safe") {{
            ok := staticcall(gas(), 8, pairs, 0x300, product, 0x20)
        }}
        return ok && product[0] == 1;
    }}
{add_term}}}
"""

_ADD_TERM = """
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
"""


def verifier_contract(key: VerificationKey, name: str = "Groth16Verifier") -> str:
    """Return the source of a contract with verifyProof(uint256[2], uint256[2][2], uint256[2], uint256[nPublic]).

    Its signature is that of snarkjs's contract. For a circuit without public inputs the last argument is absent, since
    Solidity has no arrays of length 0.

    Args:
        key: a verification key on BN254.
        name: name of the contract.

    Raises:
        UnsupportedCase: another curve; Solidity 0.8 reaches pairings on BN254 only by EIP-197.
        ConfigError: the name is not an identifier of Solidity.
    """
    family = family_of(key.family)
    if key.family != "bn254":
        raise UnsupportedCase(f"contracts of Solidity verify proofs on BN254 (EIP-197); this key is on {key.family}")
    taken = isinstance(name, str) and (name in _RESERVED | _OWN or _NUMBERED.fullmatch(name))
    if not isinstance(name, str) or not _IDENTIFIER.fullmatch(name) or taken:
        raise ConfigError(f"a contract's name must be an identifier of Solidity that is not taken, got {clipped(name)}")
    (alpha,) = decode_points(family.g1, key.alpha[None], check=False)
    beta, gamma, delta = decode_points(family.g2, np.stack([key.beta, key.gamma, key.delta]), check=False)
    ic = [point or (0, 0) for point in decode_points(family.g1, key.ic, check=False)]

    def second(at: int, point: Any) -> str:
        return _assigned(at, [part for coordinate in point for part in reversed(coordinate)])

    terms = [f"        if (!addTerm(sum, {x}, {y}, input[{i}])) return false;\n" for i, (x, y) in enumerate(ic[1:])]
    return _TEMPLATE.format(
        version=__version__,
        count=key.n_public,
        name=name,
        q=family.q,
        r=family.r,
        parameter=f",\n        uint256[{key.n_public}] calldata input" if key.n_public else "",
        ic0=ic[0],
        terms="".join(terms),
        alpha_beta=_assigned(6, alpha) + "\n" + second(8, beta),
        gamma=second(14, gamma),
        delta=second(20, delta),
        add_term=_ADD_TERM if key.n_public else "",
    )


def _assigned(at: int, values: Any) -> str:
    return "\n".join(f"        pairs[{at + i}] = {value};" for i, value in enumerate(values))
