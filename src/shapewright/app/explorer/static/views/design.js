// Design: two sliders, size and tokens; shape, plan and run for them, the frontier of loss against time, the verdict.
import { get, latestOnly, post, remove } from "../core/api.js";
import { card, fill, h, plot } from "../core/cards.js";
import { table } from "../core/dom.js";
import { draw, savers } from "../core/figures.js";
import { applyPlan } from "../form/controls.js";
import { job, keep, useJob } from "../core/state.js";

const POLL_MS = 250;
const STEPS_PER_DECADE = 20;
const RANGES = { size: [1e8, 1e12, 3e9], tokens: [1e9, 1e14, 3e11] };

const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 2 });

/** A slider over decades; its value has two digits. */
function logSlider(id, label, [low, high, start]) {
  const steps = (value) => Math.round(Math.log10(value / low) * STEPS_PER_DECADE);
  const slider = h("input", { type: "range", id: `design-${id}`, min: "0", max: String(steps(high)), step: "1", value: String(steps(start)), "aria-label": label });
  const shown = h("output", { for: `design-${id}`, id: `design-${id}-value` });
  const value = () => Number((low * 10 ** (Number(slider.value) / STEPS_PER_DECADE)).toPrecision(2));
  const show = () => {
    shown.textContent = compact.format(value());
    slider.setAttribute("aria-valuetext", shown.textContent);
  };
  slider.addEventListener("input", show);
  keep(slider, show);
  show();
  return { value, slider, field: h("label", { class: "field wide" }, h("span", {}, `${label}: `, shown), slider) };
}

/** Use a design of a job: of its workload only what the design kept, so that the step is the one of the table. */
function applyDesign(asked, result, index) {
  const { plan } = result.designs[index];
  const { seq_len, global_batch_size } = result.workload;
  applyPlan(plan.layout, { ...plan, seq_len, global_batch_size }, (next) =>
    useJob(next, { ...asked, preset: null, config: result.configs[index], overrides: {}, workload: result.kept_workload }));
}

export function makeDesign() {
  const size = logSlider("size", "Parameters", RANGES.size);
  const tokens = logSlider("tokens", "Tokens", RANGES.tokens);
  const devices = keep(h("input", { type: "number", id: "design-devices", min: "1", step: "1", value: "64", inputmode: "numeric" }));
  const start = h("button", { type: "button", class: "primary", id: "start-design" }, "Design");
  const bar = h("progress", { max: 1, value: 0, "aria-label": "Progress of the design", hidden: true });
  const status = h("p", { class: "hint", role: "status" });
  const verdict = h("h3", { id: "design-verdict" });
  const place = plot("tall");
  const saving = savers(place, "design");
  const found = h("div", { class: "below" });
  place.hidden = saving.hidden = true;
  let running = null;

  const show = (result, asked) => {
    const { text } = result;
    status.textContent = `${text.request}. ${text.space}`;
    verdict.textContent = result.verdict.text;
    place.hidden = saving.hidden = !result.front.length;
    if (result.front.length) draw(place, result.figure);
    const parts = { columns: ["part", "value"].map((name) => ({ name, is_text: true })), rows: Object.entries(text.answer) };
    fill(found, table(parts, { caption: "Answer" }),
      h("h3", {}, "Answer and runners-up, compared with the shape of the family"),
      table(text.designs, { caption: "Designs", action: (index) => h("button", { type: "button", class: "apply", onclick: () => applyDesign(asked, result, index) }, "Apply") }),
      h("ul", { class: "notes" }, result.notes.map((note) => h("li", {}, note))));
  };
  const watch = async (id, asked) => {
    while (running === id) {
      const run = await get(`/searches/${id}`);
      bar.value = run.progress_fraction;
      if (run.state === "failed") throw new Error(run.error);
      if (run.state === "cancelled") return;
      if (run.state === "done") {
        show(run.result, asked);
        return;
      }
      await new Promise((resolve) => setTimeout(resolve, POLL_MS));
    }
  };
  const run = latestOnly(async () => {
    bar.hidden = false;
    bar.removeAttribute("value");
    status.textContent = "Designing.";
    try {
      const asked = job();
      const started = await post("/designs", { job: asked, num_parameters: size.value(), train_tokens: tokens.value(), num_devices: Number(devices.value) });
      running = started.id;
      await watch(started.id, asked);
    } catch (error) {
      status.textContent = error.message;
      verdict.textContent = "";
      place.hidden = saving.hidden = true;
      fill(found);
    } finally {
      running = null;
      bar.hidden = true;
    }
  });
  // A new question stops the one that runs.
  const ask = () => {
    if (running) remove(`/searches/${running}`).catch(() => {});
    run();
  };
  for (const input of [size.slider, tokens.slider, devices]) input.addEventListener("change", ask);
  start.addEventListener("click", ask);
  card({ page: "design", id: "design", title: "Design", wide: true,
    lead: "Shape, layout and run for a size and tokens: this model scaled, on the device above. Letters in the table are those beside the fields.",
    tools: [saving],
    content: [h("div", { class: "search-form" }, size.field, tokens.field,
      h("div", { class: "row" }, h("label", { class: "inline" }, h("span", {}, "Devices"), devices), start)), bar, verdict, status, place, found],
    refresh: async () => "" });
}
