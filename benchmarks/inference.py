"""Proofs of inference: CPU seconds of commitment, proof and verification, and bytes, of networks of random integers.

    python -m benchmarks.inference [--network mlp] [--network lenet] [--network dense4m] [--network gpt2-block]
        [--device cuda] [--ezkl PYTHON] [--out FILE]

One JSON object a network; --ezkl measures EZKL too, on mlp, by an interpreter that has the packages ezkl and onnx.
Times are CPU seconds of the whole process on all cores, the least of three, that of the commitment and of EZKL of one
run; the peak of memory is that of the process so far.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from accelerant._version import __version__
from accelerant.runtime.host import processor_name, usable_cores
from accelerant.zk.inference import IntegerNetwork, Layer, ModelCommitment, Network, Prover, check
from accelerant.zk.inference.verifier import IDENTITY
from benchmarks.inference_block import gpt2_block

RELU = bytes(max(0, i - 128) for i in range(256))
_REPEATS = 3


def _layer(inputs: int, outputs: int, **options: Any) -> Layer:
    products = inputs * int(np.prod(options.get("kernel", (1, 1))))
    return Layer(inputs, outputs, int(2**24 / (60 * products**0.5)), RELU, **options)


def _dense(*widths: int) -> list[Layer]:
    return [_layer(*pair) for pair in pairwise(widths)]


def _lenet() -> list[Layer]:
    """A LeNet of 28x28 pixels whose pools are convolutions of stride 2."""
    return [
        _layer(1, 6, image=(28, 28), kernel=(5, 5), padding=2), _layer(6, 6, image=(28, 28), kernel=(2, 2), stride=2),
        _layer(6, 16, image=(14, 14), kernel=(5, 5)), _layer(16, 16, image=(10, 10), kernel=(2, 2), stride=2),
        _layer(16, 120, image=(5, 5), kernel=(5, 5)), *_dense(120, 84, 10),
    ]  # fmt: skip


NETWORKS: dict[str, Callable[[], list[Layer]]] = {
    "mlp": lambda: _dense(64, 128, 64, 10),
    "lenet": _lenet,
    "dense4m": lambda: _dense(1024, 2048, 1024, 10),
}
"""Name -> layers. mlp is EZKL's example of 64-128-64-10."""


def _network(name: str) -> tuple[IntegerNetwork, Any]:
    """Return a network with random weights, and an input."""
    generator = np.random.default_rng(0)
    if name == "gpt2-block":
        block, inputs, _ = gpt2_block(generator, examples=2)
        return block, inputs[:1]
    layers = NETWORKS[name]()
    layers[-1] = layers[-1]._replace(table=IDENTITY)
    shapes = [(each.outputs, each.inputs, *each.kernel) for each in layers]
    weights = [generator.integers(-127, 128, shape).astype(np.int8) for shape in shapes]
    biases = [generator.integers(-20_000, 20_000, shape[0]) for shape in shapes]
    x = generator.integers(-128, 128, (1, *layers[0].input_shape)).astype(np.int8)
    return IntegerNetwork(Network(tuple(layers)), weights, biases), x


def measured(name: str, device: str = "cpu", repeats: int = _REPEATS) -> dict[str, Any]:
    """Return the record of a network; each proof is verified."""
    network, x = _network(name)
    committing, prover = _least(lambda: Prover(network, device=device), 1)
    published = prover.commitment.to_bytes()
    proving, (y, proof) = _least(lambda: prover.prove(x), repeats)
    wall, _ = _least(lambda: prover.prove(x), repeats, time.perf_counter)
    loading, commitment = _least(lambda: ModelCommitment(published), repeats)
    verifying, _ = _least(lambda: check(commitment, x, y, proof), repeats)
    return {
        "network": name, "shape": network.network.widths, "prover": f"accelerant {__version__}",
        "weights": sum(w.size for w in network.weights),
        "device": device, "commit_cpu_s": committing, "prove_cpu_s": proving, "prove_s": wall,
        "check_commitment_cpu_s": loading, "verify_cpu_s": verifying,
        "commitment_bytes": len(published), "proof_bytes": len(proof),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }  # fmt: skip


def _least(call: Callable[[], Any], repeats: int, clock: Callable[[], float] = time.process_time) -> tuple[float, Any]:
    times = []
    for _ in range(repeats):
        began = clock()
        result = call()
        times.append(clock() - began)
    return round(min(times), 4), result


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the networks that the arguments name, by default the two small ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*NETWORKS, "gpt2-block"]
    parser.add_argument("--network", action="append", choices=names, help="may be repeated; by default mlp and lenet")
    parser.add_argument("--device", default="cpu", help="that hashes: cpu or cuda")
    parser.add_argument("--ezkl", metavar="PYTHON", help="an interpreter that has ezkl and onnx")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the records to a file, too")
    options, records = parser.parse_args(arguments), []
    for name in options.network or ["mlp", "lenet"]:
        records.append(measured(name, options.device))
        print(json.dumps(records[-1]), flush=True)
    if options.ezkl:
        script = Path(__file__).with_name("inference_ezkl.py")
        done = subprocess.run([options.ezkl, script, "64-128-64-10"], stdout=subprocess.PIPE, text=True, check=True)
        records.append(json.loads(done.stdout.splitlines()[-1]))
        print(json.dumps(records[-1]), flush=True)
    if options.out:
        environment = {"processor": processor_name(), "cores": usable_cores(), "python": platform.python_version()}
        options.out.write_text(json.dumps({"environment": environment, "records": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
