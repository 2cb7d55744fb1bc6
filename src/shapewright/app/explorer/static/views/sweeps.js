// Time over the values of one field, and heat map over number of heads and hidden size. A click applies a value.
import { post } from "../core/api.js";
import { card, fill, h, plot } from "../core/cards.js";
import { byId } from "../core/dom.js";
import { applyChanges } from "../form/controls.js";
import { draw, movePoint, savers, valueAt } from "../core/figures.js";
import { change, state } from "../core/state.js";

const METRICS = {
  step: { text: "step time", of: (answer) => 1e3 * answer.step_time_s },
  rate: { text: "TFLOP/s", of: (answer) => 1e-12 * answer.model_flops_per_s },
  tokens: { text: "tokens/s", of: (answer) => answer.tokens_per_s_per_device },
};
const metricOf = (view) => (Object.hasOwn(METRICS, view.y) ? view.y : "step");
const FIRST_FIELD = "hidden_size";

const place = plot("cliff");
let last = null;

export function makeFieldSweep(fields) {
  place.classList.add("clickable");
  const field = h("select", { id: "sweep-field" }, fields.map((name) => h("option", { value: name }, name.replaceAll("_", " "))));
  const metric = h("select", { id: "sweep-metric" }, Object.entries(METRICS).map(([value, { text }]) => h("option", { value }, text)));
  field.addEventListener("change", () => change((next) => { next.view.dim = field.value; }));
  metric.addEventListener("change", () => change((next) => { next.view.y = metric.value; }));
  const chips = h("div", { class: "row chips", role: "group", "aria-label": "Local maxima" });
  const hint = h("p", { class: "hint" });
  const apply = (value) => applyChanges({ [last.field]: value });
  place.addEventListener("click", (event) => {
    const at = last && valueAt(place, event);
    if (!at) return;
    const nearest = last.points.reduce((best, point) => (Math.abs(point.value - at[0]) < Math.abs(best.value - at[0]) ? point : best));
    const maximum = last.local_maxima.find((one) => Math.abs(one.value - at[0]) <= 0.012 * (last.points.at(-1).value - last.points[0].value));
    apply((maximum ?? nearest).value);
  });
  const tools = [h("label", { class: "inline" }, h("span", {}, "Over"), field), h("label", { class: "inline" }, h("span", {}, "Show"), metric), savers(place, "sweep")];
  card({ page: "shape", id: "sweep", title: "Cliffs", eager: true, tools, content: [place, chips, hint],
    lead: "One dimension, all others fixed. The band is the uncertainty of the difference to this shape; colours are alignment classes, dotted lines ends of waves. Click to use a value.",
    refresh: async ({ job }) => {
      const { view } = state();
      field.value = fields.includes(view.dim) ? view.dim : FIRST_FIELD;
      metric.value = metricOf(view);
      try {
        last = await post("/sweep", { job, field: field.value, measure: metric.value });
      } catch (error) {
        last = null;
        fill(byId("headline"));
        throw error;
      }
      const { verdict } = last;
      fill(byId("headline"), verdict.text, verdict.value === null ? null : h("button", { type: "button", class: "apply", onclick: () => apply(verdict.value) }, `Use ${verdict.value.toLocaleString("en")}`));
      draw(place, last.figure, { adjust: (series) => ({ series: series.map(withMarkers), dataZoom: undefined }) });
      const maxima = [...last.local_maxima].sort((one, other) => one.value - other.value);
      fill(chips, h("span", { class: "label" }, "Most work per second, change of time, certainty"), maxima.map((maximum) => h("button", {
        type: "button", class: "chip-button", title: maximum.text, "data-value": String(maximum.value), disabled: maximum.value === last.current, onclick: () => apply(maximum.value),
      }, maximum.value.toLocaleString("en"), h("small", {}, maximum.gain_text))));
      const ends = last.wave_ends.length ? ` Wave ends of ${last.watched}: ${last.wave_ends.slice(0, 12).join(", ")}${last.wave_ends.length > 12 ? ", ..." : "."}` : "";
      const current = last.points.find((point) => point.value === last.current);
      hint.textContent = `${current ? current.text : `${last.field}=${last.current} cannot run`}.${ends}`;
      return "";
    } });
}

/** Move the point of this shape while a slider moves; the curve follows when it rests. */
export function moveMarker(answer) {
  if (!last || (state().view.dim ?? FIRST_FIELD) !== last.field) return;
  const value = { ...answer.config, ...answer.workload, ...answer.layout }[last.field];
  movePoint(place, "this shape", [value, METRICS[metricOf(state().view)].of(answer)]);
}

/** GEMM whose waves the sweep counts, as the tiles show it; empty without one. */
export const watchedGemm = () => (last?.watched ? `${last.watched}:forward` : "");

export function makeHeadGrid() {
  const grid = plot("tall");
  grid.classList.add("clickable");
  card({ page: "shape", id: "heat", title: "Heads and hidden size", wide: true, tools: savers(grid, "heads-and-hidden-size"), content: grid,
    lead: "Model TFLOP/s of each pair with all other fields fixed; empty cells are not valid shapes. Click a cell to apply it.",
    refresh: async ({ job }) => {
      const answer = await post("/heat-map", { job });
      draw(grid, answer.figure, { onPoint: (event) => {
        const cell = answer.cells[event.dataIndex];
        if (event.seriesType === "heatmap" && cell?.changes) applyChanges(cell.changes);
      } });
      return "";
    } });
}

// Emphasise local maxima, measured steps and the current value over the alignment classes.
function withMarkers(one, index) {
  if (one.name === "local maxima") return { ...one, symbol: "triangle", symbolSize: 11, z: 6 };
  if (one.name === "measured") return { ...one, symbol: "diamond", symbolSize: 12, z: 8 };
  if (one.name === "this shape") return { ...one, symbol: "circle", symbolSize: 14, z: 7, itemStyle: { ...one.itemStyle, borderColor: "#fff", borderWidth: 2 } };
  if (one.type === "line" && index === 1) return { ...one, showSymbol: one.data.length < 12, symbol: "circle", symbolSize: 6 };
  if (one.type === "line") return { ...one, showSymbol: true, symbol: "circle", symbolSize: 6, lineStyle: { ...one.lineStyle, width: 0 } };
  return one;
}
