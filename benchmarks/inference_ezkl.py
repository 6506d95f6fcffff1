"""EZKL's proof of the MLP of benchmarks.inference, by an interpreter that has the packages ezkl and onnx.

    PYTHON benchmarks/inference_ezkl.py WIDTHS

Prints one JSON object: CPU seconds of each step, and bytes. The SRS is made here, for the test of times alone.
"""

import asyncio
import inspect
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import ezkl  # type: ignore[import-not-found,unused-ignore]
import numpy as np
import onnx  # type: ignore[import-not-found,unused-ignore]
from onnx import TensorProto, helper, numpy_helper


def write_model(widths: list[int]) -> None:
    """Write model.onnx, layers of random weights with ReLU between them, and input.json."""
    generator, nodes, arrays, at = np.random.default_rng(0), [], [], "x"
    for i, (inputs, outputs) in enumerate(pairwise(widths)):
        weight = (generator.standard_normal((inputs, outputs)) / inputs**0.5).astype(np.float32)
        arrays += [numpy_helper.from_array(weight, f"w{i}"), numpy_helper.from_array(np.zeros(outputs, "f4"), f"b{i}")]
        last = i + 2 == len(widths)
        nodes.append(helper.make_node("Gemm", [at, f"w{i}", f"b{i}"], ["y" if last else f"a{i}"]))
        if not last:
            nodes.append(helper.make_node("Relu", [f"a{i}"], [at := f"r{i}"]))
    x, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, size])
        for name, size in (("x", widths[0]), ("y", widths[-1]))
    )
    model = helper.make_model(
        helper.make_graph(nodes, "mlp", [x], [y], arrays), opset_imports=[helper.make_opsetid("", 13)]
    )
    model.ir_version = 8
    onnx.save(model, "model.onnx")
    Path("input.json").write_text(json.dumps({"input_data": [generator.standard_normal(widths[0]).tolist()]}))


async def measured() -> dict[str, float]:
    """Return CPU seconds of each step, for model.onnx in this folder."""
    seconds = {}

    async def step(name: str, call: Callable[..., Any], *arguments: str) -> None:
        began = time.process_time()
        result = call(*arguments)
        result = await result if inspect.isawaitable(result) else result
        if result is False:
            raise RuntimeError(f"{name} failed")
        seconds[f"{name}_cpu_s"] = round(time.process_time() - began, 3)

    await step("settings", ezkl.gen_settings, "model.onnx", "settings.json")
    await step("calibrate", ezkl.calibrate_settings, "input.json", "model.onnx", "settings.json", "resources")
    await step("compile", ezkl.compile_circuit, "model.onnx", "model.ezkl", "settings.json")
    log_rows = json.loads(Path("settings.json").read_text())["run_args"]["logrows"]
    await step("srs", ezkl.gen_srs, "kzg.srs", log_rows)
    await step("witness", ezkl.gen_witness, "input.json", "model.ezkl", "witness.json")
    await step("setup", ezkl.setup, "model.ezkl", "vk.key", "pk.key", "kzg.srs")
    await step("prove", ezkl.prove, "witness.json", "model.ezkl", "pk.key", "proof.json", "kzg.srs")
    await step("verify", ezkl.verify, "proof.json", "settings.json", "vk.key", "kzg.srs")
    return seconds | {"log_rows": log_rows}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        write_model([int(width) for width in sys.argv[1].split("-")])
        found = asyncio.run(measured())
        found |= {f"{name}_bytes": Path(file).stat().st_size for name, file in (("key", "pk.key"),)}
        found["proof_bytes"] = len(json.loads(Path("proof.json").read_text())["hex_proof"]) // 2
        os.chdir("/")
    print(json.dumps({
        "network": "mlp", "shape": sys.argv[1], "prover": f"ezkl {ezkl.__version__}", **found,
        "peak_mib": int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) // 1024,
    }))  # fmt: skip
