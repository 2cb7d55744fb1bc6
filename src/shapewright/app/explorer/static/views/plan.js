// Plan: how to distribute the training job over devices.
import { post } from "../core/api.js";
import { card, fill, h, plot } from "../core/cards.js";
import { table } from "../core/dom.js";
import { draw, savers } from "../core/figures.js";
import { applyPlan } from "../form/controls.js";
import { keep } from "../core/state.js";

const OBJECTIVES = { time: "shortest step", cost: "lowest cost", memory: "least memory" };

export function makePlan() {
  const number = (id, placeholder, value = "") => keep(h("input", { type: "number", id: `plan-${id}`, min: "1", step: "1", inputmode: "numeric", placeholder, value }));
  const devices = number("devices", "8", "8");
  const batch = number("batch", "512");
  const objective = keep(h("select", { id: "plan-objective" }, Object.entries(OBJECTIVES).map(([name, title]) => h("option", { value: name }, title))));
  const verdict = h("h3", { id: "plan-verdict" });
  const status = h("p", { class: "hint", role: "status" });
  const steps = plot("tall");
  const front = plot("tall");
  const below = h("div", { class: "below" });
  card({ page: "plan", id: "plan", title: "Plan", wide: true, tools: savers(steps, "plan"),
    lead: "Ways to distribute the training job over devices, all of them priced. The layout, micro-batch and recomputation are chosen here; apply one to use it.",
    form: h("div", { class: "search-form" }, h("div", { class: "row" },
      h("label", { class: "inline" }, h("span", {}, "Devices"), devices), h("label", { class: "inline" }, h("span", {}, "Global batch"), batch), h("label", { class: "inline" }, h("span", {}, "Find the"), objective))),
    content: [verdict, below, h("div", { class: "pair" }, h("div", {}, h("h3", {}, "Where the steps go"), steps), h("div", {}, h("h3", {}, "Memory against time"), front)), status],
    refresh: async (context) => {
      if (context.answer.workload.phase !== "train") return "Plans are for training; Serving plans inference.";
      const found = await post("/plan", { job: context.job, num_devices: Number(devices.value || 8), objective: objective.value, ...(batch.value ? { global_batch_size: Number(batch.value) } : {}) });
      verdict.textContent = found.text.verdict;
      status.textContent = `${found.text.request}. ${found.text.space}`;
      fill(below, found.plans.length ? table(found.text.plans, { caption: "Plans", action: (index) => {
        const { layout, ...plan } = found.plans[index];
        return h("button", { type: "button", class: "apply", onclick: () => applyPlan(layout, { ...plan, global_batch_size: found.workload.global_batch_size }) }, "Apply");
      } }) : null, h("ul", { class: "notes" }, found.notes.map((note) => h("li", {}, note))));
      if (found.plans.length) {
        draw(steps, found.figures.steps);
        draw(front, found.figures.front);
      }
      steps.parentElement.parentElement.hidden = !found.plans.length;
      return "";
    } });
}
