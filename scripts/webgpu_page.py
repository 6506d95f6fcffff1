"""Write docs/webgpu.html: the package's WGSL for products of matrices and of field elements, checked in a browser.

usage: scripts/webgpu_page.py
"""

from __future__ import annotations

import json
from pathlib import Path

from accelerant.algebra.field.parameters import FIELDS
from accelerant.algebra.field.program import kernel_source
from accelerant.tensors.webgpu import matmul_source

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "webgpu.html"
SHOWN = ("goldilocks", "babybear", "bn254_fr")

_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Accelerant's kernels in this browser</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 52rem; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; width: 100%; margin: 1rem 0; }
th, td { text-align: left; padding: .4rem .8rem .4rem 0; border-bottom: 1px solid #ddd; }
td:last-child { font-weight: 600; }
.right { color: #12703b; }
.wrong { color: #b3261e; }
pre { overflow: auto; background: #f6f6f6; padding: 1rem; font-size: 13px; max-height: 30rem; }
</style>
</head>
<body>
<h1>Accelerant's kernels in this browser</h1>
<p>This page runs two kernels of the backend <code>webgpu</code> on the browser's WebGPU, from the same WGSL that the
Python package runs on Vulkan, Metal and Direct3D 12. It compares a product of matrices with a product in double
precision, and products of field elements with big integers of JavaScript, which they must equal.</p>
<p id="state">Waiting for WebGPU.</p>
<table><thead><tr><th>kernel</th><th>size</th><th>time</th><th>result</th></tr></thead><tbody id="rows"></tbody></table>
<p>The time is that of one launch after a first one, with the wait for its result.</p>
<div id="texts"></div>
<script>
// Written by scripts/webgpu_page.py from the package.
const KERNELS = __KERNELS__;

const show = (name, text) => { document.getElementById(name).textContent = text; };

function addRow(name, size, milliseconds, passed, text) {
  const row = document.getElementById("rows").insertRow();
  for (const cell of [name, size, `${milliseconds.toFixed(1)} ms`, text]) row.insertCell().textContent = cell;
  row.lastChild.className = passed ? "right" : "wrong";
}

function addText(name, wgsl) {
  const details = document.createElement("details"), summary = document.createElement("summary");
  const text = document.createElement("pre");
  summary.textContent = `WGSL of ${name}`;
  text.textContent = wgsl;
  details.append(summary, text);
  document.getElementById("texts").append(details);
}

// Run an entry point on arrays, with the scalars in a uniform buffer; return one of the arrays, and milliseconds.
async function run(device, wgsl, entry, arrays, result, scalars, groups) {
  const module = device.createShaderModule({ code: wgsl });
  const errors = (await module.getCompilationInfo()).messages.filter((message) => message.type === "error");
  if (errors.length) throw new Error(`line ${errors[0].lineNum}: ${errors[0].message}`);
  const pipeline = await device.createComputePipelineAsync({ layout: "auto", compute: { module, entryPoint: entry } });
  const usage = GPUBufferUsage.STORAGE | GPUBufferUsage.COPY_SRC | GPUBufferUsage.COPY_DST;
  const buffers = arrays.map((array) => {
    const buffer = device.createBuffer({ size: array.byteLength, usage });
    device.queue.writeBuffer(buffer, 0, array);
    return buffer;
  });
  const uniform = device.createBuffer({ size: 256, usage: GPUBufferUsage.UNIFORM | GPUBufferUsage.COPY_DST });
  device.queue.writeBuffer(uniform, 0, new Int32Array(scalars));
  const entries = [...buffers, uniform].map((buffer, binding) => ({ binding, resource: { buffer } }));
  const group = device.createBindGroup({ layout: pipeline.getBindGroupLayout(0), entries });
  const size = arrays[result].byteLength;
  const read = device.createBuffer({ size, usage: GPUBufferUsage.COPY_DST | GPUBufferUsage.MAP_READ });
  let milliseconds = 0;
  for (let time = 0; time < 2; time++) {
    const began = performance.now(), encoder = device.createCommandEncoder(), pass = encoder.beginComputePass();
    pass.setPipeline(pipeline);
    pass.setBindGroup(0, group);
    pass.dispatchWorkgroups(...groups);
    pass.end();
    encoder.copyBufferToBuffer(buffers[result], 0, read, 0, size);
    device.queue.submit([encoder.finish()]);
    await device.queue.onSubmittedWorkDone();
    milliseconds = performance.now() - began;
  }
  await read.mapAsync(GPUMapMode.READ);
  return [read.getMappedRange().slice(0), milliseconds];
}

async function checkMatmul(device) {
  const [M, K, N] = [130, 70, 90];
  const random = (count) => Float32Array.from({ length: count }, () => 2 * Math.random() - 1);
  const a = random(M * K), b = random(K * N);
  // offset, and strides of the batch, the rows and the columns, of each array; then the sizes
  const scalars = [0, 0, N, 1, 0, 0, K, 1, 0, 0, N, 1, M, N, K];
  const groups = [Math.ceil(N / 64), Math.ceil(M / 64), 1];
  const arrays = [new Float32Array(M * N), a, b];
  const [bytes, milliseconds] = await run(device, KERNELS.matmul.wgsl, "matmul", arrays, 0, scalars, groups);
  const found = new Float32Array(bytes);
  let worst = 0;
  for (let i = 0; i < M; i++) {
    for (let j = 0; j < N; j++) {
      let sum = 0;
      for (let k = 0; k < K; k++) sum += a[i * K + k] * b[k * N + j];
      worst = Math.max(worst, Math.abs(sum - found[i * N + j]));
    }
  }
  const passed = worst < 2e-5;  // K roundings of values below K, half of them in each direction
  addRow("matmul", `${M}x${K} by ${K}x${N}`, milliseconds, passed, `largest error ${worst.toExponential(1)}`);
  return { kernel: "matmul", passed, worst };
}

async function checkField(device, name) {
  const { wgsl, modulus, words } = KERNELS[name], p = BigInt(modulus), n = 1000;
  const draw = () => {
    let value = 0n;
    for (const word of crypto.getRandomValues(new Uint32Array(words + 2))) value = value << 32n | BigInt(word);
    return value % p;
  };
  const edges = [0n, 1n, 2n, p - 1n, p - 2n, p >> 1n];
  const pairs = edges.flatMap((x) => edges.map((y) => [x, y]));
  while (pairs.length < n) pairs.push([draw(), draw()]);
  const packed = (values) => Uint32Array.from(values.flatMap((value) =>
    Array.from({ length: words }, (_, k) => Number(value >> BigInt(32 * k) & 0xffffffffn))));
  const arrays = [packed(pairs.map(([x]) => x)), packed(pairs.map(([, y]) => y)), new Uint32Array(n * words)];
  const [bytes, milliseconds] = await run(device, wgsl, "field_mul", arrays, 2, [n], [Math.ceil(n / 256)]);
  const found = new Uint32Array(bytes), expected = packed(pairs.map(([x, y]) => x * y % p));
  const differs = (i) => Array.from({ length: words }, (_, k) => i * words + k).some((k) => expected[k] !== found[k]);
  const wrong = pairs.filter((_, i) => differs(i));
  const passed = wrong.length === 0;
  addRow(`field_mul ${name}`, `${n} products`, milliseconds, passed, passed ? "exact" : `${wrong.length} are wrong`);
  return { kernel: `field_mul ${name}`, passed, wrong: wrong.length };
}

async function main() {
  if (!navigator.gpu) throw new Error("This browser has no WebGPU.");
  const adapter = await navigator.gpu.requestAdapter();
  if (!adapter) throw new Error("This browser has WebGPU, and no adapter for it.");
  const device = await adapter.requestDevice();
  const { vendor, architecture, description } = adapter.info;
  const named = [vendor, architecture, description].filter(Boolean).join(", ");
  show("state", `WebGPU on ${named || "an adapter without a name"}.`);
  const checks = [await checkMatmul(device)];
  for (const name of Object.keys(KERNELS)) if (name !== "matmul") checks.push(await checkField(device, name));
  return checks;
}

for (const [name, { wgsl }] of Object.entries(KERNELS)) addText(name === "matmul" ? name : `field_mul ${name}`, wgsl);
main().then((checks) => ({ checks }), (error) => {
  show("state", String(error.message || error));
  return { error: String(error.message || error), checks: [] };
}).then((report) => {
  report.state = document.getElementById("state").textContent;
  const to = new URLSearchParams(location.search).get("report");  // for the test of this page
  if (to) fetch(to, { method: "POST", body: JSON.stringify(report) });
});
</script>
</body>
</html>
"""


def page() -> str:
    """Return the page's text."""
    kernels: dict[str, dict[str, object]] = {"matmul": {"wgsl": matmul_source().dialects["wgsl"]}}
    for name in SHOWN:
        field = FIELDS[name]
        text = kernel_source(field, "field_mul").dialects["wgsl"]
        kernels[name] = {"wgsl": text, "modulus": str(field.modulus), "words": field.size_bytes // 4}
    return _PAGE.replace("__KERNELS__", json.dumps(kernels, indent=1))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
