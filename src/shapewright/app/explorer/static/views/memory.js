// Memory by component and stage against device memory, largest sizes that fit, and remedies.
import { post } from "../core/api.js";
import { card, fill, h, plot } from "../core/cards.js";
import { applyChanges, describeChanges } from "../form/controls.js";
import { facts, table } from "../core/dom.js";
import { draw, savers } from "../core/figures.js";
import { change } from "../core/state.js";

export function makeMemory(optimizers) {
  const place = plot();
  const below = h("div", { class: "below" });
  const select = h("select", { id: "optimizer" }, optimizers.map((name) => h("option", { value: name }, name)));
  select.addEventListener("change", () => change((next) => { next.workload.optimizer = select.value; }));
  card({ page: "memory", id: "memory", title: "Memory", wide: true, tools: [h("label", { class: "inline" }, h("span", {}, "Optimizer"), select), savers(place, "memory")], content: [place, below],
    refresh: async ({ job, answer }) => {
      select.value = answer.workload.optimizer;
      select.disabled = answer.workload.phase !== "train";
      const found = await post("/memory", { job });
      draw(place, found.figure);
      place.classList.toggle("stages", found.stages.length > 1);
      const own = found.layout.num_devices;
      fill(below, h("p", { class: found.fits ? "fine" : "problem" }, found.text.verdict), facts(found.text.largest),
        remedies(found, (one) => one.num_devices === own, "On the same devices, shortest time of a token first"),
        remedies(found, (one) => one.num_devices !== own, "On more devices, shortest device time of a token first"));
      return "";
    } });
}

/** Table of the remedies that a test chooses, with their changes as fields of this page. */
function remedies(found, isShown, title) {
  const { columns, rows } = found.text.remedies;
  const shown = found.remedies.map((one, index) => ({ ...one, index })).filter(isShown)
    .sort((one, other) => (one.slowdown_fraction ?? Infinity) - (other.slowdown_fraction ?? Infinity));
  if (!shown.length) return null;
  const content = { columns, rows: shown.map(({ changes, index }) => [describeChanges(changes), ...rows[index].slice(1)]) };
  return [h("h3", {}, title), table(content, { caption: title, action: (index) =>
    h("button", { type: "button", class: "apply", onclick: () => applyChanges(shown[index].changes) }, "Apply") })];
}
