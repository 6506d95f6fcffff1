"""Program of the suite groth16: the peak memory of reading a key and proving with it.

python -P groth16_memory.py DEVICE SMALL.ZKEY SMALL.WTNS CIRCUIT.ZKEY WITNESS.WTNS prints one JSON object, in bytes:

    base        resident size after a proof with the small key: the interpreter, NumPy, LLVM, the kernels
    peak        peak resident size after that, minus base; includes touched pages of the key's file
    anonymous   the same without pages of files, sampled each millisecond
    device      the peak that torch has allocated on the device; 0 on the CPU

Linux only: the kernel counts, and its count is reset before the second proof.
"""

from __future__ import annotations

import gc
import json
import sys
import threading
from pathlib import Path

from accelerant.zk.groth16 import Prover

_STATUS = Path("/proc/self/status")
_RESET_PEAK = "5"
"""Value for clear_refs that resets the peak resident size. See proc(5)."""

_EACH_S = 1e-3


def _status_bytes(name: str) -> int:
    """Return a line of /proc/self/status, in bytes."""
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


class _AnonymousPeak:
    """Samples the anonymous resident size in a thread."""

    def __init__(self) -> None:
        self.most = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> _AnonymousPeak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(_EACH_S):
            self.most = max(self.most, _status_bytes("RssAnon"))


def main(device: str, small_key: str, small_witness: str, key: str, witness: str) -> None:
    """Prove twice and print the figures."""
    Prover(small_key, device=device).prove(small_witness)
    gc.collect()
    torch = sys.modules.get("torch") if device != "cpu" else None
    if torch is not None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    base, anonymous = _status_bytes("VmRSS"), _status_bytes("RssAnon")
    Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
    with _AnonymousPeak() as watch:
        Prover(key, device=device).prove(witness)
    peak = _status_bytes("VmHWM")
    figures = {
        "base": base,
        "peak": peak - base,
        "anonymous": watch.most - anonymous,
        "device": torch.cuda.max_memory_allocated() if torch is not None else 0,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main(*sys.argv[1:])
