// Memory by component and stage against device memory, largest sizes that fit, and remedies.
import { post } from "../core/api.js";
import { card, fill, h, plot } from "../core/cards.js";
import { applyChanges } from "../form/controls.js";
import { facts, table } from "../core/dom.js";
import { draw, savers } from "../core/figures.js";
import { change, state } from "../core/state.js";

export function makeMemory(optimizers) {
  const place = plot();
  const below = h("div", { class: "below" });
  const select = h("select", { id: "optimizer" }, optimizers.map((name) => h("option", { value: name }, name)));
  select.addEventListener("change", () => change((next) => { next.view.optimizer = select.value; }));
  card({ id: "memory", title: "Memory", wide: true, tools: [h("label", { class: "inline" }, h("span", {}, "Optimizer"), select), savers(place, "memory")], content: [place, below],
    refresh: async ({ job, answer }) => {
      const optimizer = optimizers.includes(state().view.optimizer) ? state().view.optimizer : optimizers[0];
      select.value = optimizer;
      select.disabled = answer.workload.phase !== "train";
      const found = await post("/memory", { job, optimizer });
      draw(place, found.figure);
      place.classList.toggle("stages", found.stages.length > 1);
      fill(below, h("p", { class: found.fits ? "fine" : "problem" }, found.text.verdict), facts(found.text.largest),
        found.remedies.length ? [h("h3", {}, "Remedies, smallest time cost first"), table(found.text.remedies, { caption: "Remedies", action: (index) =>
          h("button", { type: "button", class: "apply", onclick: () => applyChanges(found.remedies[index].changes) }, "Apply") })] : null);
      return "";
    } });
}
