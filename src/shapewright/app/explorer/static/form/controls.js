// The form: all fields of model, workload and layout, built from the server's description of each field.
import { byId, fill, h } from "../core/dom.js";
import { change, isTraining, NODES, state } from "../core/state.js";

const SHAPE = [
  "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "vocab_size",
  "num_experts", "num_experts_per_token", "moe_intermediate_size", "shared_expert_intermediate_size",
];
const EXPERTS = new Set(["num_experts", "num_experts_per_token", "moe_intermediate_size", "shared_expert_intermediate_size"]);
const HIDDEN = new Set(["name", "model_type"]);
const GROUPS = { model: "overrides", workload: "workload", layout: "layout" };
const MAX_STOPS = 512;

const controls = [];
let swept = new Set();
let shown = null; // config of the last answer
let answered = null; // the last answer
let slid = () => {};

/** Call a function at every move of a slider. */
export const onSlide = (call) => { slid = call; };
let rangeModel = ""; // model that the slider ranges belong to; they stay fixed while its fields change

const words = (name) => name.replaceAll("_", " ");
// Fields that usually repeat another one.
const REPEATED = { v_head_dim: "head_dim", embedding_size: "hidden_size", num_kv_heads: "num_heads" };

/** Changes of fields in words: "vocab size 50304, num heads 20". */
export function describeChanges(changes) {
  return Object.entries(changes)
    .filter(([name, value]) => !(REPEATED[name] in changes && changes[REPEATED[name]] === value))
    .map(([name, value]) => (value === true ? words(name) : value === false ? `no ${words(name)}` : `${words(name)} ${value}`))
    .join(", ");
}

/** Build the form. */
export function makeControls(about) {
  swept = new Set(about.swept);
  const models = new Map();
  for (const one of about.models) models.set(one.family, [...(models.get(one.family) || []), one]);
  fill(byId("preset"), [...models].map(([family, list]) =>
    h("optgroup", { label: family || "other" }, list.map((one) => h("option", { value: one.name }, `${one.name} (${one.text})`)))));
  const vendors = new Map();
  for (const one of about.devices) vendors.set(one.vendor, [...(vendors.get(one.vendor) || []), one]);
  fill(byId("device"), [...vendors].map(([vendor, list]) =>
    h("optgroup", { label: vendor }, list.map((one) => h("option", { value: one.name }, one.title)))));
  fill(byId("software"), about.software.map((one) => h("option", { value: one.name }, one.name === "tuned" ? one.title : `${one.name}: ${one.title}`)));
  byId("software").addEventListener("change", (event) => change((next) => { next.software = event.target.value; }));
  byId("preset").addEventListener("change", (event) => change((next) => {
    next.preset = event.target.value;
    next.config = null;
    next.overrides = {};
  }));
  byId("device").addEventListener("change", (event) => change((next) => { next.device = event.target.value; }));
  for (const name of NODES) byId(name).addEventListener("change", ({ target }) => change((next) => { next[name] = target.value === "" ? null : Number(target.value); }));
  byId("uncalibrated").addEventListener("change", (event) => change((next) => { next.uncalibrated = event.target.checked; }));
  byId("reset").addEventListener("click", () => change((next) => Object.assign(next, { overrides: {}, workload: {}, layout: {} })));
  for (const group of Object.keys(GROUPS)) {
    for (const field of about.fields[group]) if (!HIDDEN.has(field.name)) controls.push(makeControl(group, field));
  }
  const of = (group) => controls.filter((one) => one.group === group);
  const shape = SHAPE.map((name) => of("model").find((one) => one.field.name === name));
  fill(byId("shape-fields"), shape.map((one) => one.element));
  fill(byId("more-fields"), of("model").filter((one) => !shape.includes(one)).map((one) => one.element));
  fill(byId("workload-fields"), of("workload").map((one) => one.element));
  fill(byId("layout-fields"), of("layout").map((one) => one.element));
  showHelpOnTap();
}

/** Mark the field tapped last: what it means is its title, which a screen without a pointer shows below it alone. */
function showHelpOnTap() {
  const form = byId("form");
  form.addEventListener("click", ({ target }) => {
    for (const one of form.querySelectorAll(".tapped")) one.classList.remove("tapped");
    target.closest("[title].control, [title].field")?.classList.add("tapped");
  });
}

function makeControl(group, field) {
  const id = `${group}-${field.name}`;
  const place = GROUPS[group];
  const set = (value, key = "") => change((next) => {
    if (value === null) delete next[place][field.name];
    else next[place][field.name] = value;
    if (field.name === "hidden_size") keepHeads(next, value);
    if (key && swept.has(field.name)) next.view.dim = field.name;
  }, key);
  const control = { group, field, id, stops: [] };
  const symbol = field.symbol ? h("var", {}, field.symbol) : null;
  const name = h("span", { class: "name" }, words(field.name), " ", symbol);
  control.reset = h("button", { type: "button", class: "tiny reset", title: `Reset ${words(field.name)}`, "aria-label": `Reset ${words(field.name)}`, hidden: true, onclick: () => set(null) }, "\u21ba");
  control.follows = h("p", { class: "follows", hidden: true });
  if (field.choices.length) {
    control.input = h("select", { id }, field.has_no_value ? h("option", { value: "" }, "default") : null, field.choices.map((choice) => h("option", { value: choice }, choice)));
    control.input.addEventListener("change", () => set(control.input.value === "" ? null : control.input.value));
  } else if (field.type === "bool") {
    control.input = h("input", { id, type: "checkbox" });
    control.input.addEventListener("change", () => set(control.input.checked));
  } else if (field.type.startsWith("tuple")) {
    control.input = h("input", { id, type: "text", placeholder: "none" });
    control.input.addEventListener("change", () => set(control.input.value.trim() === "" ? null : control.input.value.split(",").map((part) => parsePart(part.trim()))));
  } else if (field.type === "str") {
    control.input = h("input", { id, type: "text" });
    control.input.addEventListener("change", () => set(control.input.value.trim() || null));
  } else {
    control.input = h("input", { id, type: "number", inputmode: "numeric", min: "0", step: field.type === "float" ? "any" : "1" });
    control.input.addEventListener("change", () => set(control.input.value === "" ? null : Number(control.input.value)));
    if (field.type === "int" && (SHAPE.includes(field.name) || ["micro_batch_size", "seq_len", "context_len"].includes(field.name))) {
      control.slider = h("input", { type: "range", min: "0", step: "1", "aria-label": `${words(field.name)}, slider` });
      control.slider.addEventListener("input", () => {
        performance.mark("shapewright:input");
        slid();
        const value = control.stops[Number(control.slider.value)];
        control.input.value = value;
        control.slider.setAttribute("aria-valuetext", String(value));
        set(value, id);
      });
    }
  }
  const kind = field.type === "bool" ? "check" : "field";
  control.element = h("div", { class: `control ${kind}`, title: field.help, "data-field": field.name },
    h("label", { for: id }, kind === "check" ? [control.input, name] : name), kind === "check" ? null : control.input, control.reset, control.slider, control.follows);
  return control;
}

/** Heads keep their width when the hidden size changes: a width of 191 is nothing that anyone wants. */
function keepHeads(next, hiddenSize) {
  if (!shown || shown.kv_lora_rank) return;
  if (hiddenSize === null || shown.head_dim * shown.num_heads === hiddenSize) delete next.overrides.head_dim;
  else if (!("head_dim" in next.overrides)) next.overrides.head_dim = shown.head_dim;
}

function parsePart(text) {
  if (text === "true" || text === "false") return text === "true";
  return text !== "" && Number.isFinite(Number(text)) ? Number(text) : text;
}

/** Slider positions from half to twice the current value that are valid with the other fields. */
function sliderValues(name, values, middle) {
  const divisors = (total, least) => {
    const found = [];
    for (let i = 1; i <= Math.min(total, 4096); i += 1) if (total % i === 0 && total / i >= least) found.push(i);
    return found;
  };
  const derived = values.head_dim * values.num_heads === values.hidden_size;
  if (name === "num_heads" && derived) return divisors(values.hidden_size, 16);
  if (name === "num_kv_heads") return divisors(values.num_heads, 1);
  if (name === "micro_batch_size") return Array.from({ length: 64 }, (_, i) => i + 1);
  if (name === "seq_len" || name === "context_len") return [128, 256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 65536, 131072];
  const grain = { hidden_size: 8, intermediate_size: 8, moe_intermediate_size: 8, shared_expert_intermediate_size: 8, head_dim: 2 }[name] || 1;
  const [low, high] = [Math.max(grain, Math.floor(middle / 2 / grain) * grain), Math.max(4 * grain, Math.ceil((2 * middle) / grain) * grain)];
  const step = Math.max(grain, Math.ceil((high - low) / MAX_STOPS / grain) * grain);
  const found = [];
  for (let value = low; value <= high; value += step) found.push(value);
  return found;
}

/** Show the values of the answer in the form, except in a field that is being edited. */
export function showControls(answer) {
  answered = answer;
  shown = answer.config;
  showFields(answer);
}

/** Show the requested values of a job without an answer, over the last answer for its model, or that of base(). */
export async function showRequested(base) {
  if (rangeModel !== modelKey()) answered = await base();
  const { config = {}, workload = {}, layout = {}, device = { name: state().device } } = answered ?? {};
  showFields({ config, workload, layout, device, text: { followed: {} } });
}

const modelKey = () => JSON.stringify(state().config) + state().preset;

function showFields(answer) {
  const now = state();
  const isFresh = modelKey() !== rangeModel;
  rangeModel = modelKey();
  const preset = byId("preset");
  if (preset.value !== now.preset) preset.value = now.preset ?? "";
  preset.querySelector("option[value='']")?.remove();
  if (!now.preset) preset.prepend(h("option", { value: "", selected: true }, now.config ? "pasted config" : "fields only"));
  const device = [...byId("device").options].some((one) => one.value === now.device) ? now.device : answer.device.name;
  if (byId("device").value !== device) byId("device").value = device;
  for (const name of NODES) byId(name).value = now[name] ?? "";
  byId("uncalibrated").checked = now.uncalibrated;
  byId("software").value = now.software;
  byId("software").parentElement.hidden = !isTraining();
  const all = { model: answer.config, workload: answer.workload, layout: answer.layout };
  for (const control of controls) {
    const { field, group, input, slider } = control;
    const given = now[GROUPS[group]][field.name];
    const isGiven = given !== undefined;
    // The requested value takes precedence: the answer may be older than the latest change.
    const value = isGiven ? given : all[group][field.name] ?? null;
    if (EXPERTS.has(field.name)) control.element.hidden = !answer.config.num_experts && !isGiven;
    control.reset.hidden = !isGiven;
    control.element.classList.toggle("given", isGiven);
    const follows = group === "model" ? answer.text.followed[field.name] : "";
    control.follows.hidden = !follows;
    control.follows.textContent = follows ? `follows: ${follows}` : "";
    if (document.activeElement !== input || input.type !== "number") {
      if (input.type === "checkbox") input.checked = Boolean(value);
      else input.value = value === null ? "" : Array.isArray(value) ? value.join(",") : value;
    }
    if (slider && document.activeElement !== slider) {
      if (isFresh || !control.middle) control.middle = value;
      if (value > 2 * control.middle || value < control.middle / 2) control.middle = value;
      const stops = sliderValues(field.name, answer.config, control.middle);
      control.stops = stops.includes(value) ? stops : [...stops, value].sort((one, other) => one - other);
      slider.max = control.stops.length - 1;
      slider.value = control.stops.indexOf(value);
      slider.setAttribute("aria-valuetext", String(value));
      slider.disabled = control.stops.length < 2;
    }
  }
}

/** State group of a field, for changes by findings and searches. */
export function groupOf(name) {
  const found = controls.find((one) => one.field.name === name);
  return found ? GROUPS[found.group] : "overrides";
}

/** Whether the form has all fields of some changes: those of a tower are in its own config alone. */
export const canApply = (changes) => Object.keys(changes).every((name) => controls.some((one) => one.field.name === name));

/** Set fields by name. */
export function applyChanges(changes) {
  change((next) => {
    for (const [name, value] of Object.entries(changes)) next[groupOf(name)][name] = value;
    if ("hidden_size" in changes && !("head_dim" in changes)) keepHeads(next, changes.hidden_size);
  });
}

// Fields of the workload that a plan chooses.
const PLANNED = ["micro_batch_size", "recompute", "offload_activations", "offload_optimizer", "global_batch_size", "seq_len"];

/** Use a layout and the workload fields of its plan, after other changes by before(next) in the same step. */
export function applyPlan({ num_devices: _, ...layout }, plan, before = () => {}) {
  change((next) => {
    before(next);
    next.layout = Object.fromEntries(Object.entries(layout).filter(([, value]) => value !== null));
    for (const name of PLANNED) if (name in plan) next.workload[name] = plan[name];
    delete next.workload.recompute_layers; // a plan recomputes all layers alike
    next.workload.phase = "train";
  });
}
