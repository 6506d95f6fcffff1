// The dashboard: reads /events, and shows devices, queue, jobs, latencies and the ledger. No framework, no build.

import { apiKey, byId, make, reasonOf, request, setApiKey, show } from "./common.js";
import { startExamples } from "./examples.js";

const MINUTE = 60;  // states are a second apart

// --- numbers ---------------------------------------------------------------------------------------------------------

const whole = new Intl.NumberFormat("en");

/** Return a number rounded to an integer, or below ten to two digits. */
function plain(value) {
  return value >= 9.95 ? whole.format(Math.round(value)) : String(Number(value.toPrecision(2)));
}

function seconds(value) {
  const [amount, unit] = secondsParts(value);
  return `${amount} ${unit}`;
}

function secondsParts(value) {
  if (value >= 120) return [`${Math.floor(value / 60)}:${String(Math.floor(value % 60)).padStart(2, "0")}`, "min"];
  if (value >= 1 || value === 0) return [plain(value), "s"];
  return value >= 1e-3 ? [plain(value * 1e3), "ms"] : [plain(value * 1e6), "µs"];
}

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; value >= 1000 && unit < units.length - 1; unit++) value /= 1024;
  return `${plain(value)} ${units[unit]}`;
}

/** Return the value below which a share of the counts lies, by linear interpolation within its bucket. */
function quantile(counts, bounds, q) {
  const total = counts.reduce((sum, count) => sum + count, 0);
  let left = q * total;
  for (let i = 0; i < counts.length; i++) {
    if (counts[i] && left <= counts[i]) {
      const low = i ? bounds[i - 1] : 0;
      return i < bounds.length ? low + (bounds[i] - low) * (left / counts[i]) : low;
    }
    left -= counts[i];
  }
  return null;
}

// --- the stream ------------------------------------------------------------------------------------------------------

let started = { buckets_s: [], history: {}, jobs: [] };
let states = [];

function setLink(state, text) {
  byId("link").dataset.state = state;
  show(byId("link").firstChild, text);
}

function askKey(reason) {
  const dialog = byId("key");
  show(byId("key-reason"), reason);
  dialog.showModal();
  byId("key-value").select();
  return new Promise((resolve) => {
    dialog.onclose = () => {
      setApiKey(byId("key-value").value.trim());
      resolve();
    };
  });
}

const handlers = { start, state: showState, job: showJob, ledger: showLedger };

/** Read /events for ever; after a lost connection, again after a pause that doubles up to ten seconds. */
async function listen() {
  for (let pause = 500; ; pause = Math.min(2 * pause, 10000)) {
    try {
      const answer = await request("events");
      if (answer.status === 401 || answer.status === 403) {
        setLink("lost", "Key needed");
        await askKey(!apiKey() ? "This service demands a key with the scope monitor."
          : answer.status === 403 ? "This key is valid, but it does not have the scope monitor, which the dashboard needs." : await reasonOf(answer));
        pause = 250;
        continue;
      }
      if (!answer.ok) throw new Error(await reasonOf(answer));
      pause = 500;
      let text = "";
      for await (const part of parts(answer.body.pipeThrough(new TextDecoderStream()))) {
        text += part;
        for (let end; (end = text.indexOf("\n\n")) >= 0; text = text.slice(end + 2)) receive(text.slice(0, end));
      }
    } catch (error) {
      if (!(error instanceof TypeError)) console.warn(error);  // a TypeError is fetch's for a lost connection
    }
    setLink("lost", "Reconnecting");
    await new Promise((resolve) => setTimeout(resolve, pause));
  }
}

async function* parts(stream) {  // not every browser iterates over a stream
  const reader = stream.getReader();
  for (let { value, done } = await reader.read(); !done; { value, done } = await reader.read()) yield value;
}

function receive(message) {
  const lines = message.split("\n");
  const field = (name) => lines.filter((line) => line.startsWith(`${name}: `)).map((line) => line.slice(name.length + 2));
  const handler = handlers[field("event")[0]];
  if (handler) handler(JSON.parse(field("data").join("\n")));
}

function start(data) {
  started = data;
  states = [];
  jobs.clear();
  byId("job-list").replaceChildren();
  data.jobs.reverse().forEach(showJob);
  show(byId("version"), `Accelerant ${data.version}`);
  for (const link of document.querySelectorAll("footer a")) link.hidden = Boolean(apiKey());  // a link sends no key
  startExamples();
}

function showState(data) {
  setLink("live", "Live");
  states.push(data);
  if (states.length > 2 * MINUTE) states.shift();
  showFigures(data);
  showDevices(data);
  showLatencies(data.requests);
  for (const row of jobs.values()) if (row.job.finished === null) showTime(row, data.time_s);
}

// --- the summary -----------------------------------------------------------------------------------------------------

const all = (requests) => Object.values(requests).reduce((sum, row) => sum + total(row), 0);
const total = (row) => row.counts.reduce((sum, count) => sum + count, 0);

function showFigures(now) {
  const before = states[Math.max(0, states.length - 1 - MINUTE)], recent = states[Math.max(0, states.length - 6)];
  const span = now.time_s - recent.time_s;
  const rates = states.slice(1).map((state, i) => Math.max(0, all(state.requests) - all(states[i].requests)));
  show(byId("rate"), span > 0 ? plain((all(now.requests) - all(recent.requests)) / span) : "–");
  show(byId("rate-foot"), `${whole.format(all(now.requests))} in ${seconds(now.time_s - started.started)}`);
  drawLine(byId("rate-line").children, rates, Math.max(4, ...rates), 120, 28, Math.max(20, rates.length));

  const minute = started.buckets_s.map(() => 0).concat(0);
  let errors = 0, asked = 0;
  for (const [name, row] of Object.entries(now.requests)) {
    const old = before.requests[name];
    row.counts.forEach((count, i) => { minute[i] += count - (old ? old.counts[i] : 0); });
    errors += row.errors - (old ? old.errors : 0);
  }
  asked = minute.reduce((sum, count) => sum + count, 0);
  const [p99, unit] = asked ? secondsParts(quantile(minute, started.buckets_s, 0.99)) : ["–", ""];
  show(byId("p99"), p99);
  show(byId("p99-unit"), unit);
  show(byId("p99-foot"), asked ? `median ${seconds(quantile(minute, started.buckets_s, 0.5))}` : "no request");

  const queue = now.queue, full = Math.max(queue.queued / queue.jobs_limit, queue.bytes / queue.bytes_limit);
  show(byId("queued"), whole.format(queue.queued));
  show(byId("queued-foot"), `of ${whole.format(queue.jobs_limit)}; ${bytes(queue.bytes)} of ${bytes(queue.bytes_limit)}`);
  setMeter(byId("queue-meter"), full);
  const up = now.workers.filter((worker) => worker.alive).length;
  show(byId("running"), whole.format(queue.running));
  show(byId("running-unit"), queue.running === 1 ? "job" : "jobs");
  show(byId("running-foot"), `${up} of ${now.workers.length} worker${now.workers.length === 1 ? "" : "s"} up`);
  byId("running").closest(".card").classList.toggle("bad", up < now.workers.length);
  show(byId("errors"), whole.format(errors));
  show(byId("errors-unit"), asked ? `of ${whole.format(asked)}` : "");
  byId("errors").closest(".card").classList.toggle("bad", errors > 0);
  show(byId("fallback-count"), whole.format(now.fallbacks));
}

function setMeter(meter, share) {
  const percent = Math.min(100, Math.round(1000 * share) / 10);
  meter.firstElementChild.style.width = `${percent}%`;
  meter.setAttribute("aria-valuenow", percent);
  meter.classList.toggle("high", share > 0.9);
}

/** Draw values as a line, the last at the right edge, over an area. */
function drawLine([below, line], values, most, width, height, room = 2 * MINUTE) {
  if (values.length < 2) return;
  const step = width / (room - 1), left = width - step * (values.length - 1);
  const points = values.map((value, i) => `${(left + i * step).toFixed(2)} ${(height - 1 - (height - 2) * value / most).toFixed(2)}`);
  line.setAttribute("d", `M${points.join("L")}`);
  below.setAttribute("d", `M${left.toFixed(2)} ${height}L${points.join("L")}V${height}Z`);
}

// --- devices ---------------------------------------------------------------------------------------------------------

const cards = new Map();
const NAMES = {
  utilisation_percent: "utilization", memory_used_bytes: "memory in use", power_w: "power", temperature_c: "temperature",
  clock_mhz: "clock",
};

function deviceCard(device) {
  const part = (tag, name, ...content) => make(tag, { class: name }, ...content);
  const load = make("b"), lines = [make("path", { class: "below" }), make("path")], memory = make("span"), why = make("ul"), state = part("span", "chip");
  const meter = make("div", { class: "meter", role: "meter", "aria-label": "Memory", "aria-valuemin": 0, "aria-valuemax": 100 }, make("i"));
  const chart = make("svg", { viewBox: "0 0 240 72", preserveAspectRatio: "none", role: "img" },
    ...[18, 36, 54].map((y) => make("line", { class: "rule", x1: 0, x2: 240, y1: y, y2: y })), ...lines);
  const facts = Object.fromEntries(["Power", "Temperature", "Clock"].map((name) => [name, make("dd")]));
  const note = make("span"), reasons = make("details", {}, make("summary", {}, "Not reported"), why);
  const foot = make("footer", {}, note, reasons);
  const card = make("article", { class: "card device" },
    make("header", {}, make("h3", {}, device.name, make("code", {}, device.device)), state),
    part("div", "body",
      make("div", {}, make("p", { class: "percent" }, load, make("span", {}, "utilization, two minutes")), part("div", "load", chart)),
      make("div", {}, part("div", "row", make("span", {}, "Memory"), memory), meter,
        make("dl", { class: "facts" }, ...Object.entries(facts).map(([name, value]) => make("div", {}, make("dt", {}, name), value))))),
    foot);
  const values = (started.history[device.device] || []).map((sample) => sample.utilisation_percent).filter((value) => value !== null);
  return { card, load, lines, chart, memory, meter, facts, state, note, why, reasons, foot, values, shown: "" };
}

function showDevices(now) {
  const list = byId("device-list");
  for (const device of now.devices) {
    if (!cards.has(device.device)) {
      if (!cards.size) list.replaceChildren();
      cards.set(device.device, deviceCard(device));
      list.append(cards.get(device.device).card);
    }
    showDevice(cards.get(device.device), device, now.workers.filter((worker) => worker.label === device.device));
  }
}

function showDevice(parts, device, workers) {
  const percent = device.utilisation_percent;
  if (percent !== null) parts.values = [...parts.values, percent].slice(-2 * MINUTE);
  show(parts.load, percent === null ? "–" : `${Math.round(percent)} %`);
  drawLine(parts.lines, parts.values, 100, 240, 72);
  const summary = percent === null ? "Utilization is not reported" : `Utilization ${Math.round(percent)} %, at most ${Math.round(Math.max(...parts.values))} % in two minutes`;
  parts.chart.setAttribute("aria-label", summary);
  const used = device.memory_used_bytes, size = device.memory_total_bytes;
  show(parts.memory, size === null ? "–" : used === null ? bytes(size) : `${bytes(used)} of ${bytes(size)}`);
  setMeter(parts.meter, used === null || !size ? 0 : used / size);
  const facts = { Power: [device.power_w, "W"], Temperature: [device.temperature_c, "°C"], Clock: [device.clock_mhz, "MHz"] };
  for (const [name, [value, unit]] of Object.entries(facts)) {
    show(parts.facts[name], value === null ? "–" : `${whole.format(Math.round(value))} ${unit}`);
    parts.facts[name].classList.toggle("none", value === null);
  }

  const slowed = device.slow_down?.length ? `slowed: ${device.slow_down.join(", ")}` : "";
  const [kind, text] = device.lost ? ["bad", "lost"] : workers.some((worker) => !worker.alive) ? ["bad", "worker down"] : slowed ? ["warn", slowed]
    : workers.some((worker) => worker.job || worker.calls) ? ["work", "working"] : workers.length ? ["good", "ready"] : ["", "not used"];
  parts.state.className = `chip ${kind}`;
  show(parts.state, text);
  parts.card.classList.toggle("lost", device.lost);
  const running = workers.filter((worker) => worker.job).map((worker) => worker.job.slice(0, 8));
  const restarts = workers.reduce((sum, worker) => sum + worker.restarts, 0);
  const notes = [running.length && `runs ${running.join(", ")}`, restarts && `worker restarted ${restarts}×`];
  show(parts.note, notes.filter(Boolean).join(", "));

  const reasons = Object.entries(device.reasons).filter(([name]) => name in NAMES).map(([name, why]) => `${NAMES[name]}: ${why}`);
  if (reasons.join() !== parts.shown) {
    parts.shown = reasons.join();
    parts.why.replaceChildren(...reasons.map((reason) => make("li", {}, reason)));
  }
  parts.reasons.hidden = !reasons.length;
  parts.foot.hidden = !reasons.length && !notes.some(Boolean);
}

// --- jobs ------------------------------------------------------------------------------------------------------------

const jobs = new Map();
const KINDS = { queued: "", running: "work", succeeded: "good", failed: "bad", cancelled: "warn" };
const MOST_JOBS = 100;
let shownJobs = "all";

function jobRow(job) {
  const bar = make("progress", { max: 1, "aria-label": `Progress of ${job.operation} ${job.id.slice(0, 8)}` });
  const row = { bar, state: make("span", { class: "chip" }), time: make("span", { class: "time" }), note: make("span"), act: make("span", { class: "act" }) };
  row.element = make("li", { "data-id": job.id },
    make("span", { class: "name" }, make("b", {}, job.operation), make("code", { class: "id" }, job.id.slice(0, 8))), row.state,
    make("span", { class: "bar" }, bar, row.note), row.time, row.act);
  return row;
}

function showJob(job) {
  let row = jobs.get(job.id);
  if (!row) {
    row = jobRow(job);
    jobs.set(job.id, row);
    if (jobs.size > MOST_JOBS) {
      const [oldest, { element }] = jobs.entries().next().value;
      jobs.delete(oldest);
      element.remove();
    }
  }
  const moved = row.job?.state !== job.state;
  row.job = job;
  if (moved) placeJob(row);
  const ended = job.finished !== null;
  row.state.className = `chip ${KINDS[job.state] ?? ""}`;
  show(row.state, job.state);
  row.bar.value = job.state === "succeeded" ? 1 : job.progress;
  row.bar.hidden = job.state !== "running";
  const where = [job.device, job.attempts > 1 && `attempt ${job.attempts}`, job.result_bytes && bytes(job.result_bytes)].filter(Boolean).join(", ");
  const percent = job.state === "running" ? `${Math.round(100 * job.progress)} %` : "";
  show(row.note, job.error || [percent, !ended && job.message, where].filter(Boolean).join(" · "));
  row.note.className = job.error ? "note bad" : "note";
  row.note.title = row.note.textContent;
  showTime(row, states.at(-1)?.time_s ?? job.created);
  if (ended || job.state === "cancelled") row.act.replaceChildren();
  else if (!row.act.firstChild) row.act.append(cancelButton(job));
  filterJobs();
}

function showTime({ job, time }, now) {
  const from = job.started ?? job.created;
  const length = seconds(Math.max(0, (job.finished ?? Math.max(now, from)) - from));
  show(time, job.state === "queued" ? `waits ${length}` : length);
}

function cancelButton(job) {
  const button = make("button", { class: "plain", type: "button", "aria-label": `Cancel ${job.operation} ${job.id.slice(0, 8)}` }, "Cancel");
  button.onclick = async () => {
    button.disabled = true;
    const answer = await request(`jobs/${encodeURIComponent(job.id)}`, { method: "DELETE" }).catch(() => null);
    if (!answer?.ok) {
      button.disabled = false;
      setLink("live", answer ? await reasonOf(answer) : "The service did not answer");
    }
  };
  return button;
}

const RANKS = { running: 0, queued: 1 };
const rank = (job) => RANKS[job.state] ?? 2;

/** Keep running jobs first, then those that wait, then those that ended, each the latest first. */
function placeJob(row) {
  const list = byId("job-list"), order = (other) => [rank(other.job), -other.job.created];
  const [mine, when] = order(row);
  for (const element of list.children) {
    if (element === row.element) continue;
    const [theirs, then] = order(jobs.get(element.dataset.id));
    if (mine < theirs || (mine === theirs && when < then)) return void (element.previousSibling === row.element || element.before(row.element));
  }
  if (list.lastChild !== row.element) list.append(row.element);
}

function filterJobs() {
  const wanted = { all: () => true, active: (job) => job.finished === null, failed: (job) => job.state === "failed" }[shownJobs];
  let visible = 0;
  for (const { job, element } of jobs.values()) visible += !(element.hidden = !wanted(job));
  byId("job-empty").hidden = visible > 0;
  if (jobs.size) show(byId("job-empty"), `No ${shownJobs} job.`);
}

for (const button of document.querySelectorAll("[data-show]")) {
  button.onclick = () => {
    shownJobs = button.dataset.show;
    for (const other of document.querySelectorAll("[data-show]")) other.setAttribute("aria-pressed", other === button);
    filterJobs();
  };
}

// --- latencies -------------------------------------------------------------------------------------------------------

const histograms = new Map();

function showLatencies(requests) {
  const list = byId("latency-list");
  for (const [name, row] of Object.entries(requests).sort(([a], [b]) => a.localeCompare(b))) {
    let parts = histograms.get(name);
    if (!parts) {
      if (!histograms.size) list.replaceChildren();
      parts = histogram(name);
      histograms.set(name, parts);
      list.append(parts.card);
    }
    const count = total(row);
    if (count !== parts.count) showHistogram(parts, row, count);
  }
}

function histogram(name) {
  const bars = [...started.buckets_s, null].map((bound, i) => {
    const range = bound === null ? `above ${seconds(started.buckets_s.at(-1))}` : `to ${seconds(bound)}`;
    return make("rect", { x: 17 * i, width: 14, rx: 2.5 }, make("title", {}, range));
  });
  const labels = started.buckets_s.flatMap((bound, i) => [0.001, 0.01, 0.1, 1, 10].includes(bound)
    ? [make("text", { x: 17 * (i + 1) - 1.5, y: 86, "text-anchor": "middle" }, seconds(bound))] : []);
  const chart = make("svg", { viewBox: "0 0 287 90", role: "img" }, ...bars, ...labels);
  const count = make("span"), values = ["p50", "p95", "p99"].map(() => make("dd"));
  const card = make("article", { class: "card histogram" },
    make("header", {}, make("h3", { class: "mono" }, name), count), chart,
    make("dl", { class: "quantiles" }, ...["p50", "p95", "p99"].map((title, i) => make("div", {}, make("dt", {}, title), values[i]))));
  return { card, bars, chart, text: count, values, name, count: -1 };
}

function showHistogram(parts, row, count) {
  parts.count = count;
  const most = Math.max(1, ...row.counts);
  row.counts.forEach((value, i) => {
    const height = value ? Math.max(3, 68 * value / most) : 2;
    parts.bars[i].setAttribute("height", height);
    parts.bars[i].setAttribute("y", 71 - height);
    parts.bars[i].setAttribute("class", value ? "" : "none");
    const title = parts.bars[i].firstChild;
    show(title, `${title.textContent.split(":")[0]}: ${whole.format(value)}`);
  });
  const failed = row.errors ? `, ${whole.format(row.errors)} failed` : "";
  show(parts.text, `${whole.format(count)} request${count === 1 ? "" : "s"}${failed}`);
  const found = [0.5, 0.95, 0.99].map((q) => seconds(quantile(row.counts, started.buckets_s, q) ?? 0));
  found.forEach((text, i) => show(parts.values[i], text));
  parts.chart.setAttribute("aria-label", `${parts.name}: half within ${found[0]}, 95 % within ${found[1]}, 99 % within ${found[2]}`);
}

// --- the ledger ------------------------------------------------------------------------------------------------------

function showLedger({ rows, left_out, fallbacks }) {
  byId("ledger-rows").replaceChildren(...rows.map((row) => {
    const share = make("div", { class: "meter", "aria-hidden": "true" }, make("i"));
    share.firstChild.style.width = `${100 * row.share}%`;
    const ms = row.ms_p50 ?? row.ms_first, first = row.ms_p50 === null ? "*" : "";
    const chip = make("span", { class: row.own ? "chip good" : "chip", title: row.reason }, row.own ? "own kernel" : "library");
    const failures = row.failures ? make("small", {}, ` (${whole.format(row.failures)} failed)`) : "";
    return make("tr", {},
      make("td", { class: "mono nowrap" }, row.op), make("td", { class: "nowrap" }, `${row.implementation} `, chip),
      make("td", { class: "nowrap" }, row.device), make("td", { class: "case" }, row.case),
      make("td", { class: "number" }, whole.format(row.calls), failures),
      make("td", { class: "number" }, ms === null ? "–" : seconds(ms / 1e3) + first),
      make("td", { class: "number" }, row.ms_total ? seconds(row.ms_total / 1e3) : "–"),
      make("td", { class: "nowrap" }, share, `${(100 * row.share).toFixed(1)} %`));
  }));
  byId("fallbacks").replaceChildren(...fallbacks.map((row) => make("li", {},
    make("b", {}, row.op), ` ${row.case}: ${row.ran} instead of ${row.wanted}, ${whole.format(row.count)} times: ${row.reason}`)));
  const notes = [left_out && `${whole.format(left_out)} more rows`, rows.some((row) => row.ms_p50 === null) && "* the first call, which may compile"];
  show(byId("ledger-foot"), rows.length ? notes.filter(Boolean).join("; ") : "Nothing has run yet.");
  byId("ledger-foot").hidden = rows.length > 0 && !notes.some(Boolean);
}

listen();
