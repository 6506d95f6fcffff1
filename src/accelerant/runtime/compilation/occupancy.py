"""How many blocks of a kernel one multiprocessor of an NVIDIA device can hold, reckoned without the device.

A multiprocessor holds blocks until it runs out of warps, blocks, registers, shared memory or barriers. Occupancy is
the warps that are then resident over the most that it can hold: an upper bound on how much latency other warps can
hide, not a measure of speed.

Sources: CUDA Programming Guide 13, "Compute Capabilities", table of technical specifications (warps, blocks,
registers, shared memory); CUDA Occupancy API, header cuda_occupancy.h (units of allocation, barriers).
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["LIMITS", "Limits", "Occupancy", "occupancy"]

_WARP = 32
_REGISTER_UNIT = 256
_PARTITIONS = 4
_MAX_THREADS = 1024
_MAX_REGISTERS = 255
_REGISTERS = 65536
KIB = 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """What one multiprocessor has.

    Attributes:
        warps, blocks: the most that are resident at once.
        shared_bytes: shared memory.
        reserved_bytes: what the system keeps of it for each block.
        shared_unit_bytes: shared memory is given to blocks in multiples of this.
        barriers: named barriers; 0 where they are no limit.
    """

    warps: int
    blocks: int
    shared_bytes: int
    reserved_bytes: int = KIB
    shared_unit_bytes: int = 128
    barriers: int = 0

    @property
    def block_shared_bytes(self) -> int:
        """The most that one block can ask for."""
        return self.shared_bytes - self.reserved_bytes


LIMITS = {
    75: Limits(32, 16, 64 * KIB, reserved_bytes=0, shared_unit_bytes=256),
    80: Limits(64, 32, 164 * KIB),
    86: Limits(48, 16, 100 * KIB),
    87: Limits(48, 16, 164 * KIB),
    88: Limits(48, 16, 100 * KIB),
    89: Limits(48, 24, 100 * KIB),
    90: Limits(64, 32, 228 * KIB, barriers=64),
    100: Limits(64, 32, 228 * KIB, barriers=64),
    103: Limits(64, 32, 228 * KIB, barriers=64),
    110: Limits(48, 24, 228 * KIB, barriers=24),
    120: Limits(48, 24, 100 * KIB, barriers=24),
    121: Limits(48, 24, 100 * KIB, barriers=24),
}
"""Compute capability, times ten -> limits. Registers are 65,536 on each of them, in units of 256 a warp."""


@dataclass(frozen=True, slots=True)
class Occupancy:
    """What fits on a multiprocessor.

    Attributes:
        threads: threads a block that it was reckoned for.
        blocks: resident blocks; 0 where not even one fits.
        warps: resident warps.
        percent: of the warps that the multiprocessor can hold.
        limited_by: "warps", "blocks", "registers", "shared memory" or "barriers"; several that bind alike are joined
            by " and ".
    """

    threads: int
    blocks: int
    warps: int
    percent: float
    limited_by: str

    def to_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


def occupancy(
    target: str, threads: int, *, registers: int, shared_bytes: int = 0, barriers: int = 0
) -> Occupancy | None:
    """Theoretical occupancy; None for an architecture that LIMITS does not have.

    Args:
        target: "sm_90", "sm_90a".
        threads: a block.
        registers: a thread.
        shared_bytes: static and dynamic, a block.
        barriers: named barriers a block, as ptxas prints.
    """
    number = re.fullmatch(r"sm_(\d+)[af]?", target)
    limits = LIMITS.get(int(number[1])) if number else None
    if limits is None:
        return None
    warps = -(-threads // _WARP)
    fits = {
        "warps": limits.warps // warps if threads <= _MAX_THREADS else 0,
        "blocks": limits.blocks,
        "registers": _by_registers(warps, registers),
        "shared memory": _by_shared(limits, shared_bytes),
    }
    if limits.barriers and barriers:
        fits["barriers"] = limits.barriers // barriers
    blocks = min(fits.values())
    binding = " and ".join(name for name, count in fits.items() if count == blocks)
    return Occupancy(threads, blocks, blocks * warps, 100.0 * blocks * warps / limits.warps, binding)


def _by_registers(warps: int, registers: int) -> int:
    """Registers are given to warps, in units, each from the quarter of the file that belongs to its scheduler."""
    a_warp = max(_round_up(registers * _WARP, _REGISTER_UNIT), _REGISTER_UNIT)
    if registers > _MAX_REGISTERS or a_warp * _round_up(warps, _PARTITIONS) > _REGISTERS:
        return 0
    return _REGISTERS // _PARTITIONS // a_warp * _PARTITIONS // warps


def _by_shared(limits: Limits, shared_bytes: int) -> int:
    if shared_bytes > limits.block_shared_bytes:
        return 0
    a_block = _round_up(shared_bytes + limits.reserved_bytes, limits.shared_unit_bytes)
    return limits.shared_bytes // a_block if a_block else limits.blocks


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
