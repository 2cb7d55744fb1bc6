// Throughput over the values of one field, and heat map over number of heads and hidden size. A click applies a value.
import { post } from "../core/api.js";
import { card, fill, h, plot } from "../core/cards.js";
import { applyChanges } from "../form/controls.js";
import { draw, savers, valueAt } from "../core/figures.js";
import { change, state } from "../core/state.js";

const METRICS = { rate: "TFLOP/s", tokens: "tokens/s", step: "step time" };

export function makeFieldSweep(fields) {
  const place = plot("tall");
  place.classList.add("clickable");
  const field = h("select", { id: "sweep-field" }, fields.map((name) => h("option", { value: name }, name.replaceAll("_", " "))));
  const metric = h("select", { id: "sweep-metric" }, Object.entries(METRICS).map(([value, text]) => h("option", { value }, text)));
  field.addEventListener("change", () => change((next) => { next.view.dim = field.value; }));
  metric.addEventListener("change", () => change((next) => { next.view.y = metric.value; }));
  const chips = h("div", { class: "row chips", role: "group", "aria-label": "Local maxima" });
  const hint = h("p", { class: "hint" });
  let last = null;
  const apply = (value) => applyChanges({ [last.field]: value });
  place.addEventListener("click", (event) => {
    const at = last && valueAt(place, event);
    if (!at) return;
    const nearest = last.points.reduce((best, point) => (Math.abs(point.value - at[0]) < Math.abs(best.value - at[0]) ? point : best));
    const maximum = last.local_maxima.find((one) => Math.abs(one.value - at[0]) <= 0.012 * (last.points.at(-1).value - last.points[0].value));
    apply((maximum ?? nearest).value);
  });
  const tools = [h("label", { class: "inline" }, h("span", {}, "Over"), field), h("label", { class: "inline" }, h("span", {}, "Show"), metric), savers(place, "sweep")];
  card({ id: "sweep", title: "Sweep", wide: true, tools, content: [place, chips, hint],
    lead: "Throughput over one field with all others fixed. Dotted lines mark ends of waves, colours alignment classes, diamonds measured steps. Click to apply a value.",
    refresh: async ({ job }) => {
      const { view } = state();
      field.value = fields.includes(view.dim) ? view.dim : "intermediate_size";
      metric.value = view.y in METRICS ? view.y : "rate";
      last = await post("/sweep", { job, field: field.value, measure: metric.value });
      draw(place, last.figure, { adjust: (series) => ({ series: series.map(withMarkers), dataZoom: undefined }) });
      const maxima = [...last.local_maxima].sort((one, other) => one.value - other.value);
      fill(chips, h("span", { class: "label" }, "Local maxima"), maxima.map((maximum) => h("button", {
        type: "button", class: "chip-button", title: maximum.text, "data-value": String(maximum.value), disabled: maximum.value === last.current, onclick: () => apply(maximum.value),
      }, maximum.value.toLocaleString("en"), h("small", {}, maximum.gain_text))));
      const ends = last.wave_ends.length ? ` Wave ends of ${last.watched}: ${last.wave_ends.slice(0, 12).join(", ")}${last.wave_ends.length > 12 ? ", ..." : "."}` : "";
      const current = last.points.find((point) => point.value === last.current);
      hint.textContent = `${current ? current.text : `${last.field}=${last.current} cannot run`}.${ends}`;
      return "";
    } });
}

export function makeHeadGrid() {
  const place = plot("tall");
  place.classList.add("clickable");
  card({ id: "heat", title: "Heads and hidden size", wide: true, tools: savers(place, "heads-and-hidden-size"), content: place,
    lead: "Model TFLOP/s of each pair with all other fields fixed; empty cells are not valid shapes. Click a cell to apply it.",
    refresh: async ({ job }) => {
      const answer = await post("/heat-map", { job });
      draw(place, answer.figure, { onPoint: (event) => {
        const cell = answer.cells[event.dataIndex];
        if (event.seriesType === "heatmap" && cell?.changes) applyChanges(cell.changes);
      } });
      return "";
    } });
}

// Emphasise local maxima, measured steps and the current value over the alignment classes.
function withMarkers(one, index) {
  if (one.name === "local maxima") return { ...one, symbol: "triangle", symbolSize: 13, z: 6 };
  if (one.name === "measured") return { ...one, symbol: "diamond", symbolSize: 12, z: 8 };
  if (one.name === "this shape") return { ...one, symbol: "circle", symbolSize: 13, z: 7, itemStyle: { ...one.itemStyle, borderColor: "#fff", borderWidth: 2 } };
  if (one.type === "line" && index === 1) return { ...one, showSymbol: one.data.length < 12, symbol: "circle", symbolSize: 6 };
  if (one.type === "line") return { ...one, showSymbol: true, symbol: "circle", symbolSize: 5, lineStyle: { ...one.lineStyle, width: 1, opacity: 0.7 } };
  return one;
}
