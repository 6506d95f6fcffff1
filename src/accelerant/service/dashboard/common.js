// What the pages share: elements, requests with the API key, the choice of colors.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

/** Return an element with attributes, and texts or elements in it. */
export function make(tag, attributes = {}, ...content) {
  const svg = ["svg", "path", "rect", "text", "line", "title"].includes(tag);
  const element = svg ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...content);
  return element;
}

export function show(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

let key = sessionStorage.getItem("accelerant-key") || "";

export const apiKey = () => key;

/** Keep an API key for this tab. */
export function setApiKey(value) {
  key = value;
  sessionStorage.setItem("accelerant-key", value);
}

/** Fetch from the service, with the key if there is one. */
export function request(path, options = {}) {
  const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
  return fetch(path, { cache: "no-store", ...options, headers });
}

/** Return the message of an error answer, for people. */
export async function reasonOf(answer) {
  if (answer.status === 401) return key ? "This key is not valid. It may be incomplete, expired or revoked." : "This service demands an API key. The dashboard asks for it.";
  const body = await answer.json().catch(() => ({}));
  return body.error?.message || body.error || `${answer.status} ${answer.statusText}`;
}

const THEMES = { "": ["◐", "as the system"], light: ["☀", "light"], dark: ["☾", "dark"] };

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  show(byId("theme"), THEMES[theme][0]);
  byId("theme").setAttribute("aria-label", `Colors: ${THEMES[theme][1]}`);
  byId("theme").title = `Colors: ${THEMES[theme][1]}`;
}

byId("theme").onclick = () => {
  const names = Object.keys(THEMES), next = names[(names.indexOf(document.documentElement.dataset.theme) + 1) % names.length];
  localStorage.setItem("accelerant-theme", next);
  setTheme(next);
};
setTheme(localStorage.getItem("accelerant-theme") in THEMES ? localStorage.getItem("accelerant-theme") : "");
