"""The cases of the suite zk: sizes, what is to be reached, and what others take.

Libraries of others are not run beside ours: each wants a build of its own. Their times stand in the notes as they were
measured apart: on a GPU on one H200 (driver 580, CUDA 13.0), medians, data on the device; on a CPU on two cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from accelerant.errors import ConfigError

__all__ = ["CPU_CASES", "GPU_CASES", "Case", "chosen"]


@dataclass(frozen=True, slots=True)
class Case:
    """What one piece of a run measures.

    Attributes:
        op: "field_mul", "ntt", "msm", "pairing" or "first call".
        of: name of the field, the curve or the pairing; for a first call the op.
        log_n: log2 of the elements or points.
        target_ms: to reach: on a GPU on an H200; on a CPU with AVX512-IFMA.
        plain_ms: the same on a CPU without AVX512-IFMA.
        fixed_ms: to reach with precomputed multiples of the points.
        peers: what others take, in words.
    """

    op: str
    of: str
    log_n: int = 0
    target_ms: float | None = None
    plain_ms: float | None = None
    fixed_ms: float | None = None
    peers: str = ""

    @property
    def key(self) -> str:
        """Op and case, as the rows have them."""
        return f"{self.op} {self.name}"

    @property
    def name(self) -> str:
        """The case."""
        return f"{self.of} 2^{self.log_n}" if self.log_n else self.of


_FIRST = ("field_mul", "ntt", "msm")

GPU_CASES = (
    Case("field_mul", "bn254_fr", 24, 0.41),
    Case("ntt", "bn254_fr", 20, 0.22, peers="era-bellman-cuda 0.245, sppark 0.266, ICICLE 0.477 ms"),
    Case("ntt", "bn254_fr", 24, 3.8, peers="era-bellman-cuda 4.19, sppark 4.40, ICICLE 6.2 ms"),
    Case("ntt", "goldilocks", 20, 0.038, peers="era-boojum 0.043, sppark 0.057 ms"),
    Case("ntt", "goldilocks", 24, 0.45, peers="era-boojum 0.544, sppark 0.61 ms"),
    Case("ntt", "babybear", 20, 0.030, peers="ICICLE 0.036, sppark 0.038 ms"),
    Case("ntt", "babybear", 23, 0.11, peers="sppark 0.129, ICICLE 0.145 ms"),
    Case("msm", "bn254_g1", 16, 1.4, peers="era-bellman-cuda 1.68, sppark 4.1, ICICLE v2 4.80 ms"),
    Case("msm", "bn254_g1", 18, 1.9, peers="era-bellman-cuda 2.22, ICICLE v2 6.35, sppark 12.6 ms"),
    Case("msm", "bn254_g1", 20, 4.1, peers="era-bellman-cuda 4.54, ICICLE v2 11.0, sppark 11.9 ms"),
    Case("msm", "bn254_g1", 22, 12.6, peers="era-bellman-cuda 14.0, sppark 26, ICICLE 30 ms"),
    Case("msm", "bn254_g1", 23, 22.9, peers="era-bellman-cuda 25.4, sppark 47, ICICLE 52 ms"),
    Case(
        "msm",
        "bls12_381_g1",
        20,
        10.0,
        fixed_ms=8.0,
        peers="sppark 20.1, ICICLE v2 20.5 ms; yrrid, precomputed, 9.4 ms",
    ),
    Case(
        "msm", "bls12_381_g1", 22, 30.0, fixed_ms=23.0, peers="ICICLE v2 51, sppark 52 ms; yrrid, precomputed, 25.8 ms"
    ),
    *(Case("first call", op) for op in _FIRST),
)

CPU_CASES = (
    Case(
        "field_mul",
        "bn254_fr",
        14,
        7e-6 * 2**14,
        25e-6 * 2**14,
        peers="C: 25.8 ns each, with AVX512-IFMA 5.5; galois 1151",
    ),
    Case("ntt", "bn254_fr", 16),
    Case("ntt", "goldilocks", 16),
    Case("ntt", "babybear", 16),
    Case("msm", "bn254_g1", 14),
    Case("msm", "bn254_g1", 16, 135.0, 270.0, peers="snarkjs 2700 ms"),
    Case("pairing", "bn254", 0, 10.0, 10.0),
    Case("pairing", "bls12_381", 0, 10.0, 10.0),
    *(Case("first call", op) for op in _FIRST),
)
"""A field's multiply has few enough elements for one core: a launch is split from 32768 on."""


def chosen(cases: Sequence[Case], only: Sequence[str]) -> list[Case]:
    """The cases that a run measures: all, or those with one of the texts in their keys, in any case of letters.

    Raises:
        ConfigError: a text that no case has; lists the cases.
    """
    for text in only:
        if not any(text.lower() in each.key.lower() for each in cases):
            raise ConfigError(f"no case has {text!r} in its name; there are {', '.join(each.key for each in cases)}")
    return [each for each in cases if not only or any(text.lower() in each.key.lower() for text in only)]
