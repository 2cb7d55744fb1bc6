// State of the page: job, page, view settings and pinned job, with undo, and stored in the URL.

const START = {
  preset: "gpt3-2.7b",
  config: null,
  overrides: {},
  device: "a100-sxm-80gb",
  workload: {},
  layout: {},
  node_size: null,
  network_gbit_per_s: null,
  uncalibrated: false,
  software: "tuned",
  page: "shape",
  view: {},
  pin: null,
};
/** Pages, by the name in the address. */
export const PAGES = { shape: "Shape", time: "Time", memory: "Memory", plan: "Plan", serving: "Serving", design: "Design", devices: "Devices" };
/** Node options of a job. */
export const NODES = ["node_size", "network_gbit_per_s"];
const GROUPS = { m: "overrides", w: "workload", l: "layout", v: "view" };
const MAX_UNDO_STEPS = 200;
// Moves of one slider within this time are merged into one undo step.
const MERGE_MS = 800;

let now = structuredClone(START);
let past = [];
let future = [];
let last = { key: "", at: 0 };
const listeners = new Set();

export const state = () => now;

/** The job of a state, as the API takes it. */
export function job(from = now) {
  const { config, overrides, device, workload, layout, uncalibrated, software } = from;
  const model = config ? { config } : from.preset ? { preset: from.preset } : {};
  const nodes = Object.fromEntries(NODES.filter((name) => from[name] !== null).map((name) => [name, from[name]]));
  return { ...model, overrides, device, ...nodes, workload, layout, uncalibrated, ...(isTraining(from) ? { software } : {}) };
}

/** Make a job, as the API takes it, the job of a state. */
export function useJob(next, given) {
  const { preset = null, config = null, overrides = {}, device, workload = {}, layout = {}, uncalibrated = false, software = START.software } = given;
  const nodes = Object.fromEntries(NODES.map((name) => [name, given[name] ?? null]));
  Object.assign(next, structuredClone({ preset, config, overrides, device, workload, layout, ...nodes, uncalibrated, software }));
}

/** Whether the job is a training step; only training has a training software. */
export const isTraining = (from = now) => (from.workload.phase ?? "train") === "train";

/** Register a listener for changes: listener(state, {jobChanged}). */
export const listen = (listener) => listeners.add(listener);

/** Change the state; quick successive changes with the same key are one undo step. */
export function change(mutate, key = "") {
  const next = structuredClone(now);
  mutate(next);
  if (JSON.stringify(next) === JSON.stringify(now)) return;
  const time = performance.now();
  if (!key || key !== last.key || time - last.at > MERGE_MS) {
    past.push(now);
    past = past.slice(-MAX_UNDO_STEPS);
  }
  last = { key, at: time };
  future = [];
  move(next);
}

/**
 * Keep the value of an input among the view settings, under its id: it is in the address, and undone like the rest.
 * Its start value is not written. shown() is called when the state sets the value.
 */
export function keep(input, shown = () => {}) {
  const property = input.type === "checkbox" ? "checked" : "value";
  const start = input[property];
  input.addEventListener("change", () => change((next) => {
    if (input[property] === start) delete next.view[input.id];
    else next.view[input.id] = input[property];
  }));
  listen(({ view }) => {
    const wanted = view[input.id] ?? start;
    if (input[property] === wanted) return;
    input[property] = wanted;
    if (input.selectedIndex === -1) input.value = start; // an address with an unknown choice
    shown();
  });
  return input;
}

export function undo() {
  if (!past.length) return;
  future.push(now);
  last = { key: "", at: 0 };
  move({ ...past.pop(), page: now.page });
}

export function redo() {
  if (!future.length) return;
  past.push(now);
  last = { key: "", at: 0 };
  move({ ...future.pop(), page: now.page });
}

/** Show another page; the address of this one stays in the history. */
export function open(page) {
  if (page === now.page) return;
  address();
  history.pushState({ page }, "", `#${write({ ...now, page })}`);
  move({ ...now, page });
}

/** Address of a page with the current job. */
export const addressOf = (page) => `#${write({ ...now, page })}`;

export const canUndo = () => past.length > 0;
export const canRedo = () => future.length > 0;

function move(next) {
  const jobChanged = JSON.stringify([job(next), next.pin]) !== JSON.stringify([job(), now.pin]);
  now = next;
  for (const listener of listeners) listener(now, { jobChanged });
  scheduleUrlUpdate();
}

// The URL is updated with a delay: browsers limit the rate of updates.
let timer = 0;
let written = 0;
function scheduleUrlUpdate() {
  clearTimeout(timer);
  const due = written + 250 - performance.now();
  if (due <= 0) address();
  else timer = setTimeout(address, due);
}

/** Write the state to the URL, and return the URL. */
export function address() {
  clearTimeout(timer);
  written = performance.now();
  history.replaceState({ page: now.page }, "", `#${write(now)}`);
  return location.href;
}

function write(from) {
  const words = new URLSearchParams();
  if (from.page !== START.page) words.set("page", from.page);
  if (from.config) words.set("config", JSON.stringify(from.config));
  else if (from.preset) words.set("preset", from.preset);
  words.set("device", from.device);
  for (const name of NODES) if (from[name] !== null) words.set(name, String(from[name]));
  if (from.uncalibrated) words.set("uncalibrated", "1");
  if (from.software !== START.software) words.set("software", from.software);
  for (const [letter, group] of Object.entries(GROUPS)) {
    for (const [name, value] of Object.entries(from[group])) words.set(`${letter}.${name}`, JSON.stringify(value));
  }
  if (from.pin) words.set("pin", JSON.stringify(from.pin));
  return words.toString();
}

function parse(text) {
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}

/** Read the state from the URL, and return whether it has one. */
export function readAddress() {
  const words = new URLSearchParams(location.hash.slice(1));
  if (![...words].length && now.page === START.page) return false;
  const next = structuredClone(START);
  const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
  const config = words.has("config") ? parse(words.get("config")) : null;
  next.config = isObject(config) ? config : null;
  next.preset = next.config ? null : words.get("preset") || (words.has("config") ? START.preset : null);
  next.device = words.get("device") || START.device;
  if (Object.hasOwn(PAGES, words.get("page"))) next.page = words.get("page");
  for (const name of NODES) next[name] = words.has(name) && Number.isFinite(Number(words.get(name))) ? Number(words.get(name)) : null;
  next.uncalibrated = words.get("uncalibrated") === "1";
  next.software = words.get("software") || START.software;
  for (const [key, text] of words) {
    const [letter, name] = [key.slice(0, 1), key.slice(2)];
    if (key[1] === "." && GROUPS[letter] && name) Object.defineProperty(next[GROUPS[letter]], name, { value: parse(text), enumerable: true, writable: true, configurable: true });
  }
  const pin = words.has("pin") ? parse(words.get("pin")) : null;
  next.pin = isObject(pin) ? pin : null;
  if (!next.preset && !next.config && !Object.keys(next.overrides).length) next.preset = START.preset;
  move(next);
  return true;
}

// Back and forward change the page and keep the job; an address that is typed or opened changes both.
window.addEventListener("popstate", ({ state: entry }) => {
  if (Object.hasOwn(PAGES, entry?.page)) move({ ...now, page: entry.page });
  else readAddress();
});
