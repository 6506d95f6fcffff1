// The page that sends a prompt to a served model, and shows its answer while it comes.

import { byId, make, reasonOf, request, show } from "./common.js";

let stop = null;

async function fillModels() {
  const answer = await request("v1/models");
  if (!answer.ok) throw new Error(await reasonOf(answer));
  const models = (await answer.json()).data.filter(({ task }) => task === "generate");
  if (!models.length) throw new Error("No language model is served: start the service with --model FOLDER.");
  byId("model").replaceChildren(...models.map(({ id, context }) => make("option", { value: id }, `${id}, ${context} tokens`)));
  const fitKind = () => {
    const { chat } = models.find(({ id }) => id === byId("model").value);
    byId("kind").options[0].disabled = !chat;
    byId("kind").value = chat ? "chat" : "text";
  };
  byId("model").onchange = fitKind;
  fitKind();
}

/** Yield the JSON of each server-sent event until [DONE]. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const lines = (text + part.value).split("\n\n");
    text = lines.pop();
    for (const line of lines) if (line !== "data: [DONE]") yield JSON.parse(line.slice(6));
  }
}

async function send() {
  const chat = byId("kind").value === "chat", text = byId("text").value;
  const given = chat ? { messages: [{ role: "user", content: text }] } : { prompt: text };
  const options = { max_tokens: Number(byId("tokens").value), temperature: Number(byId("temperature").value) };
  const body = { model: byId("model").value, ...given, ...options, stream: true, stream_options: { include_usage: true } };
  const began = performance.now(), path = chat ? "v1/chat/completions" : "v1/completions";
  stop = new AbortController();
  const answer = await request(path, { method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" }, signal: stop.signal });
  if (!answer.ok) throw new Error(await reasonOf(answer));
  let first = 0;
  for await (const event of events(answer.body)) {
    if (event.error) throw new Error(event.error.message);
    const [choice] = event.choices, now = performance.now();
    if (choice) byId("answer").append(chat ? choice.delta.content : choice.text);
    first ||= now;
    if (!event.usage) continue;
    // Over the whole time: a browser may read several tokens at once, so that the time since the first is too short.
    const { prompt_tokens: before, completion_tokens: count } = event.usage, seconds = (now - began) / 1000;
    const rate = `${seconds.toFixed(2)} s, ${(count / seconds).toFixed(1)} tokens per second`;
    show(byId("figures"), `${count} tokens after ${before} in ${rate}; the first in ${Math.round(first - began)} ms`);
  }
}

async function shown(work) {
  show(byId("problem"), "");
  try {
    await work();
  } catch (error) {
    show(byId("problem"), error.name === "AbortError" ? "Stopped." : error.message);
  }
}

byId("prompt").onsubmit = async (event) => {
  event.preventDefault();
  byId("answer").replaceChildren();
  show(byId("figures"), "");
  byId("send").disabled = !(byId("stop").disabled = false);
  await shown(send);
  byId("send").disabled = !(byId("stop").disabled = true);
};
byId("stop").onclick = () => stop?.abort();
shown(fillModels);
