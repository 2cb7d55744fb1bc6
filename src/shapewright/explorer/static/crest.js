// The crest view: throughput over one dimension. A click adopts the nearest value that was priced.
import { post } from "./api.js";
import { card, fill, h, plot } from "./cards.js";
import { applyChanges } from "./controls.js";
import { draw, savers, valueAt } from "./figures.js";
import { change, state } from "./state.js";

const MEASURES = { rate: "TFLOP/s", tokens: "tokens/s", step: "step time" };

export function makeCrest(swept) {
  const place = plot("tall");
  place.classList.add("clickable");
  const field = h("select", { id: "crest-field" }, swept.map((name) => h("option", { value: name }, name.replaceAll("_", " "))));
  const measure = h("select", { id: "crest-measure" }, Object.entries(MEASURES).map(([value, text]) => h("option", { value }, text)));
  field.addEventListener("change", () => change((next) => { next.view.dim = field.value; }));
  measure.addEventListener("change", () => change((next) => { next.view.y = measure.value; }));
  const chips = h("div", { class: "row chips", role: "group", "aria-label": "Crests" });
  const hint = h("p", { class: "hint" });
  let last = null;
  const adopt = (value) => applyChanges({ [last.field]: value });
  place.addEventListener("click", (event) => {
    const at = last && valueAt(place, event);
    if (!at) return;
    const nearest = last.points.reduce((best, point) => (Math.abs(point.value - at[0]) < Math.abs(best.value - at[0]) ? point : best));
    const crest = last.crests.find((one) => Math.abs(one.value - at[0]) <= 0.012 * (last.points.at(-1).value - last.points[0].value));
    adopt((crest ?? nearest).value);
  });
  const tools = [h("label", { class: "inline" }, h("span", {}, "Over"), field), h("label", { class: "inline" }, h("span", {}, "Show"), measure), savers(place, "crests")];
  card({ id: "crest", title: "Crests", wide: true, tools, content: [place, chips, hint],
    lead: "Throughput over one dimension with all others held; dotted lines are ends of waves, colours are alignment, diamonds measurements of a store. Click to adopt a value.",
    refresh: async ({ job }) => {
      const { view } = state();
      field.value = swept.includes(view.dim) ? view.dim : "intermediate_size";
      measure.value = view.y in MEASURES ? view.y : "rate";
      last = await post("/sweep", { job, field: field.value, measure: measure.value });
      draw(place, last.figure, { adjust: (series) => ({ series: series.map(dressed), dataZoom: undefined }) });
      const crests = [...last.crests].sort((one, other) => one.value - other.value);
      fill(chips, h("span", { class: "label" }, "Crests"), crests.map((crest) => h("button", {
        type: "button", class: "chip-button", title: crest.text, "data-value": String(crest.value), disabled: crest.value === last.current, onclick: () => adopt(crest.value),
      }, crest.value.toLocaleString("en"), h("small", {}, crest.gain_text))));
      const ends = last.wave_ends.length ? ` Waves of ${last.watched} end at ${last.wave_ends.slice(0, 12).join(", ")}${last.wave_ends.length > 12 ? ", ..." : "."}` : "";
      const here = last.points.find((point) => point.value === last.current);
      hint.textContent = `${here ? here.text : `${last.field}=${last.current} itself cannot run`}.${ends}`;
      return "";
    } });
}

// Crests and the current value stand out; alignment classes stay in the background.
function dressed(one, index) {
  if (one.name === "crests") return { ...one, symbol: "triangle", symbolSize: 13, z: 6 };
  if (one.name === "measured") return { ...one, symbol: "diamond", symbolSize: 12, z: 8 };
  if (one.name === "this shape") return { ...one, symbol: "circle", symbolSize: 13, z: 7, itemStyle: { ...one.itemStyle, borderColor: "#fff", borderWidth: 2 } };
  if (one.type === "line" && index === 1) return { ...one, showSymbol: one.data.length < 12, symbol: "circle", symbolSize: 6 };
  if (one.type === "line") return { ...one, showSymbol: true, symbol: "circle", symbolSize: 5, lineStyle: { ...one.lineStyle, width: 1, opacity: 0.7 } };
  return one;
}
