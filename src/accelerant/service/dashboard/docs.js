// The API's documentation, from /openapi.json and /v2/models.

import { byId, make, reasonOf, request } from "./common.js";

async function load(path) {
  const answer = await request(path);
  if (!answer.ok) throw new Error(await reasonOf(answer));
  return answer.json();
}

function table(titles, rows) {
  const head = make("tr", {}, ...titles.map((title) => make("th", { scope: "col" }, title)));
  const cells = (row) => make("tr", {}, ...row.map((cell, i) => make("td", i ? {} : { class: "mono" }, cell)));
  return make("div", { class: "scroll" }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows.map(cells))));
}

function entry(title, summary, ...content) {
  return make("details", { class: "card" }, make("summary", {}, ...title, make("span", {}, summary)), ...content.filter(Boolean));
}

/** Return what a value may be, from its JSON schema. */
function kind({ anyOf, const: only, enum: some, pattern, type, minimum, maximum, exclusiveMinimum, exclusiveMaximum }) {
  if (anyOf) return anyOf.map(kind).filter((one) => one !== "null").join(" or ");
  if (some ?? only) return [some ?? only].flat().join(", ");
  if (/^\^\([\w|]+\)\$$/.test(pattern)) return pattern.slice(2, -2).replaceAll("|", ", ");
  const bounds = [[minimum, "at least"], [exclusiveMinimum, "above"], [maximum, "at most"], [exclusiveMaximum, "below"]];
  return [type ?? "any", ...bounds.filter(([bound]) => bound !== undefined).map(([bound, word]) => `${word} ${size(bound)}`)].join(", ");
}

/** Return a bound; those beyond JavaScript's exact integers are powers of two. */
const size = (bound) => (bound > Number.MAX_SAFE_INTEGER ? `2^${Math.round(Math.log2(bound))}` : bound);
const plain = (value) => (value === undefined ? "required" : value === null ? "none" : String(value));
const sizes = (shape) => `(${shape.map((axis) => (axis < 0 ? "any" : axis)).join(", ")})`;

function operation({ name, summary, inputs, outputs, parameters }) {
  const tensors = (role, specs) => specs.map((spec) => [spec.name, role, (spec.datatypes ?? [spec.datatype]).join(", "), sizes(spec.shape)]);
  const options = Object.entries(parameters.properties ?? {}).map(([option, schema]) => [option, kind(schema), plain(schema.default)]);
  return entry([make("code", {}, name)], summary,
    table(["tensor", "", "datatype", "shape"], [...tensors("input", inputs), ...tensors("output", outputs)]),
    options.length && table(["parameter", "values", "default"], options));
}

function route(path, method, { summary, description, parameters = [], requestBody, responses }) {
  const given = parameters.map(({ name, in: where, required, schema = {} }) => [name, where, kind(schema), required ? "required" : plain(schema.default ?? null)]);
  const bodies = Object.keys(requestBody?.content ?? {}).map((type) => [type, "request body"]);
  const answers = Object.entries(responses).map(([status, { description: text }]) => [status, text]);
  return entry([make("span", { class: "chip work" }, method.toUpperCase()), make("code", {}, path)], summary,
    description && make("p", {}, description),
    given.length && table(["parameter", "in", "values", "default"], given),
    table(["", ""], [...bodies, ...answers]));
}

async function fill(id, entries) {
  try {
    byId(id).replaceChildren(...await entries());
  } catch (error) {
    byId(id).replaceChildren(make("p", { class: "empty card" }, `Not shown: ${error.message}`));
  }
}

fill("operation-list", async () => {
  const { models } = await load("v2/models");
  return Promise.all(models.map(async ({ name }) => operation(await load(`v2/models/${encodeURIComponent(name)}`))));
});
fill("request-list", async () => {
  const { paths } = await load("openapi.json");
  return Object.entries(paths).flatMap(([path, methods]) => Object.entries(methods).map(([method, about]) => route(path, method, about)));
});
