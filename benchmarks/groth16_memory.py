"""A program of one proof: how much memory reading a key and proving with it take at their highest.

python -P groth16_memory.py DEVICE SMALL.ZKEY SMALL.WTNS CIRCUIT.ZKEY WITNESS.WTNS prints one JSON object, in bytes:

    base        resident before, after a proof with the small key: the interpreter, NumPy, LLVM, the kernels
    peak        the highest that it was resident after that, less base: pages of the key's file that were touched too
    anonymous   the same without pages of files, seen each millisecond
    device      the highest that torch has allocated on the device; 0 on the CPU

Linux only: the kernel counts, and the count is set back before the second proof.
"""

from __future__ import annotations

import gc
import json
import sys
import threading
from pathlib import Path

from accelerant.zk.groth16 import Prover

_STATUS = Path("/proc/self/status")
_HIGHEST_ANEW = "5"
"""For clear_refs: the highest resident size is that of now. See proc(5)."""

_EACH_S = 1e-3


def _of_status(name: str) -> int:
    """A line of /proc/self/status, in bytes."""
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


class _Anonymous:
    """Watches from a thread of its own."""

    def __init__(self) -> None:
        self.most = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> _Anonymous:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(_EACH_S):
            self.most = max(self.most, _of_status("RssAnon"))


def main(device: str, small_key: str, small_witness: str, key: str, witness: str) -> None:
    """Prove twice, and print."""
    Prover(small_key, device=device).prove(small_witness)
    gc.collect()
    torch = sys.modules.get("torch") if device != "cpu" else None
    if torch is not None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    base, anonymous = _of_status("VmRSS"), _of_status("RssAnon")
    Path("/proc/self/clear_refs").write_text(_HIGHEST_ANEW)
    with _Anonymous() as watch:
        Prover(key, device=device).prove(witness)
    peak = _of_status("VmHWM")
    found = {
        "base": base,
        "peak": peak - base,
        "anonymous": watch.most - anonymous,
        "device": torch.cuda.max_memory_allocated() if torch is not None else 0,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
