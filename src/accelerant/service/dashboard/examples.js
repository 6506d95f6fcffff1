// The form "Try it": sends a small call in KServe's binary format, and checks the answer with big integers.

import { byId, make, reasonOf, request } from "./common.js";

const FIELDS = {  // modulus, bytes of an element, a root of unity's generator
  goldilocks: { p: 2n ** 64n - 2n ** 32n + 1n, bytes: 8, type: "UINT64", g: 7n },
  babybear: { p: 15n * 2n ** 27n + 1n, bytes: 4, type: "UINT32", g: 31n },
  bn254_fr: { p: 21888242871839275222246405745257275088548364400416034343698204186575808495617n, bytes: 32, type: "UINT64", g: 5n },
};
const BASE = 21888242871839275222246405745257275088696311157297823662689037894645226208583n;  // coordinates of bn254_g1
const ORDER = FIELDS.bn254_fr.p;
const MOST = 4096;

const field = (name, symbol, compute) => ({
  fields: Object.keys(FIELDS), names: ["x", "y"], two: true, label: `${name.replace("_", " ")}: x ${symbol} y`,
  tensors: (x, y, { bytes, type }) => [tensor("x", type, bytes, x), tensor("y", type, bytes, y)],
  expected: (x, y, { p }) => x.map((value, i) => compute(value, y[i], p)), shown: "z",
});

const OPERATIONS = {
  field_mul: field("field_mul", "·", (a, b, p) => a * b % p),
  field_add: field("field_add", "+", (a, b, p) => (a + b) % p),
  field_sub: field("field_sub", "−", (a, b, p) => (a - b + p) % p),
  ntt: {
    fields: Object.keys(FIELDS), names: ["x"], label: "ntt: transform of x", shown: "y",
    tensors: (x, y, { bytes, type }) => [tensor("x", type, bytes, x)],
    expected: transform,
    check: (x) => (x.length < 2 || x.length & (x.length - 1) ? `x must have 2, 4, 8, ... values, it has ${x.length}` : ""),
  },
  msm: {
    fields: ["bn254_g1"], names: ["scalars, of the points G, 2G, 3G, …"], label: "msm: sum of multiples of points", shown: "sum",
    tensors: (scalars) => {
      const points = [];
      for (let point = null; points.length < scalars.length;) points.push(point = add(point, [1n, 2n]));
      return [tensor("scalars", "UINT64", 32, scalars), tensor("points", "UINT64", 32, points.flat(), [points.length, 2, 4])];
    },
    expected: (scalars) => multiple(scalars.reduce((sum, value, i) => (sum + value * BigInt(i + 1)) % ORDER, 0n)) ?? [0n, 0n],
  },
};

// --- mathematics -----------------------------------------------------------------------------------------------------

function power(base, exponent, p) {
  let result = 1n;
  for (; exponent; exponent >>= 1n, base = base * base % p) if (exponent & 1n) result = result * base % p;
  return result;
}

/** Return X[k] = sum_j x[j] w^(jk), w = g^((p-1)/n). */
function transform(x, _, { p, g }) {
  const n = x.length, w = power(g, (p - 1n) / BigInt(n), p);
  return x.map((_, k) => {
    const step = power(w, BigInt(k), p);
    return x.reduceRight((sum, value) => (sum * step + value) % p, 0n);
  });
}

/** Add affine points of y^2 = x^3 + 3 over BN254's base field; null is infinity. */
function add(a, b) {
  if (!a || !b) return a ?? b;
  if (a[0] === b[0] && a[1] !== b[1]) return null;
  const [above, below] = a[0] === b[0] ? [3n * a[0] * a[0], 2n * a[1]] : [b[1] - a[1], b[0] - a[0]];
  const positive = (value) => ((value % BASE) + BASE) % BASE;
  const slope = positive(above * power(positive(below), BASE - 2n, BASE));
  const x = positive(slope * slope - a[0] - b[0]);
  return [x, positive(slope * (a[0] - x) - a[1])];
}

function multiple(scalar) {
  let sum = null;
  for (let point = [1n, 2n]; scalar; scalar >>= 1n, point = add(point, point)) if (scalar & 1n) sum = add(sum, point);
  return sum;
}

// --- bytes -----------------------------------------------------------------------------------------------------------

/** Return a tensor of integers in little-endian limbs. */
function tensor(name, datatype, size, values, shape) {
  const data = new Uint8Array(size * values.length);
  values.forEach((value, i) => {
    for (let at = 0; at < size; at++, value >>= 8n) data[i * size + at] = Number(value & 255n);
  });
  return { data, head: { name, datatype, shape: shape ?? (size > 8 ? [values.length, size / 8] : [values.length]), parameters: { binary_data_size: data.length } } };
}

function integers(data, size) {
  return Array.from({ length: data.length / size }, (_, i) => data.subarray(i * size, (i + 1) * size).reduceRight((sum, byte) => (sum << 8n) | BigInt(byte), 0n));
}

/** Call an operation; return its first output's bytes, the seconds, and the device. */
async function infer(operation, tensors, parameters) {
  const body = { inputs: tensors.map(({ head }) => head), parameters: { ...parameters, binary_data_output: true } };
  const head = new TextEncoder().encode(JSON.stringify(body));
  const headers = { "Content-Type": "application/octet-stream", "Inference-Header-Content-Length": head.length };
  const began = performance.now();
  const answer = await request(`v2/models/${operation}/infer`, { method: "POST", headers, body: new Blob([head, ...tensors.map(({ data }) => data)]) });
  if (!answer.ok) throw new Error(await reasonOf(answer));
  const bytes = new Uint8Array(await answer.arrayBuffer()), size = Number(answer.headers.get("Inference-Header-Content-Length"));
  const { outputs } = JSON.parse(new TextDecoder().decode(bytes.subarray(0, size || bytes.length)));
  if (!outputs) throw new Error("it became a job: see the list of jobs");
  return [bytes.subarray(size, size + outputs[0].parameters.binary_data_size), (performance.now() - began) / 1e3, answer.headers.get("accelerant-device")];
}

// --- the form --------------------------------------------------------------------------------------------------------

function chosen() {
  const name = byId("example-operation").value, operation = OPERATIONS[name], where = byId("example-field").value;
  return { name, operation, where, field: FIELDS[where] ?? FIELDS.bn254_fr };
}

function values(id, p) {
  const words = byId(id).value.split(/[\s,]+/).filter(Boolean);
  const wrong = words.find((word) => !/^\d+$/.test(word) || BigInt(word) >= p);
  if (wrong) throw new Error(`${wrong} is not an integer from 0 to ${p - 1n}`);
  if (!words.length || words.length > MOST) throw new Error(`give 1 to ${MOST} integers, separated by commas`);
  return words.map(BigInt);
}

function fillRandom() {
  const { field: { p, bytes } } = chosen();
  const random = () => integers(crypto.getRandomValues(new Uint8Array(bytes)), bytes)[0] % p;
  for (const id of ["example-x", "example-y"]) byId(id).value = Array.from({ length: 8 }, random).join(", ");
}

function chooseOperation() {
  const { operation } = chosen();
  byId("example-field").replaceChildren(...operation.fields.map((name) => make("option", { value: name }, name)));
  byId("example-kind").textContent = FIELDS[operation.fields[0]] ? "Field" : "Curve";
  byId("example-x-name").textContent = operation.names[0];
  byId("example-y-label").hidden = !operation.two;
  byId("example-x").value = "1, 2, 3, 4";
  byId("example-y").value = "5, 6, 7, 8";
}

async function run(event) {
  event.preventDefault();
  const result = byId("example-result"), button = event.submitter ?? byId("example").querySelector(".main");
  button.disabled = true;
  try {
    const { name, operation, where, field: chosenField } = chosen();
    const x = values("example-x", chosenField.p), y = operation.two ? values("example-y", chosenField.p) : [];
    const problem = operation.check?.(x) || (operation.two && x.length !== y.length ? `x has ${x.length} values and y ${y.length}` : "");
    if (problem) throw new Error(problem);
    const parameters = { [FIELDS[where] ? "field" : "curve"]: where };
    const [bytes, seconds, device] = await infer(name, operation.tensors(x, y, chosenField), parameters);
    const found = integers(bytes, chosenField.bytes), expected = operation.expected(x, y, chosenField);
    const right = found.length === expected.length && found.every((value, i) => value === expected[i]);
    const text = name === "msm" ? `x = ${found[0]}\ny = ${found[1]}` : found.join(", ");
    result.replaceChildren(
      make("p", { class: "verdict" }, make("span", { class: right ? "chip good" : "chip bad" }, right ? "✓ checked in this browser" : "✗ differs from this browser's result"),
        `${(1e3 * seconds).toFixed(1)} ms${device ? ` on ${device}` : ""}`),
      make("pre", { tabindex: 0, "aria-label": `Result ${operation.shown}` }, text));
  } catch (error) {
    result.replaceChildren(make("p", { class: "verdict" }, make("span", { class: "chip bad" }, "not run"), error.message));
  } finally {
    button.disabled = false;
  }
}

/** Fill the form with the operations that this service has; later calls do nothing. */
export async function startExamples() {
  const select = byId("example-operation");
  if (select.options.length) return;
  select.append(...Object.entries(OPERATIONS).map(([name, { label }]) => make("option", { value: name }, label)));
  select.onchange = chooseOperation;
  byId("example").onsubmit = run;
  byId("example-random").onclick = fillRandom;
  chooseOperation();
}
