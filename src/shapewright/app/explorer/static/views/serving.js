// Serving: front, latency over load, what limits, and the commands that launch the recommended point.
import { post } from "../core/api.js";
import { card, fill, h, plot } from "../core/cards.js";
import { facts, table } from "../core/dom.js";
import { draw, savers } from "../core/figures.js";
import { keep } from "../core/state.js";

const ENGINES = { vllm: "vLLM", sglang: "SGLang", trtllm: "TensorRT-LLM" };
// Fields of the request: label, start value, and the factor from the shown unit.
const FIELDS = {
  prompt_len: ["Prompt tokens", null, 1],
  output_len: ["Answer tokens", null, 1],
  num_devices: ["Devices", null, 1],
  ttft_limit_s: ["First token within, ms", null, 1e-3],
  tpot_limit_s: ["Per token within, ms", null, 1e-3],
  requests_per_s: ["Load, requests/s", null, 1],
  usd_per_hour: ["USD/h of a device", null, 1],
};
const USUAL = { prompt_len: "1000", output_len: "200" };
const COUNTS = ["prompt_len", "output_len", "num_devices"];
const FIGURES = ["front", "ttft", "tpot", "limits"];

export function makeServing() {
  const inputs = Object.fromEntries(Object.entries(FIELDS).map(([name, [, value]]) => {
    const whole = COUNTS.includes(name);
    return [name, keep(h("input", { type: "number", id: `serving-${name}`, min: whole ? "1" : "0", step: whole ? "1" : "any", value: value === null ? "" : String(value), inputmode: whole ? "numeric" : "decimal", placeholder: USUAL[name] ?? "any" }))];
  }));
  const engine = keep(h("select", { id: "serving-engine" }, Object.entries(ENGINES).map(([name, title]) => h("option", { value: name }, title))));
  const request = () => ({
    ...Object.fromEntries(Object.entries(inputs).filter(([, input]) => input.value !== "").map(([name, input]) => [name, Number(input.value) * FIELDS[name][2]])),
    engine: engine.value,
  });
  const verdict = h("h3", { id: "serving-verdict" });
  const status = h("p", { class: "hint", role: "status" });
  const about = h("div", { class: "below" });
  const places = Object.fromEntries(FIGURES.map((name) => [name, plot()]));
  const titles = Object.fromEntries(FIGURES.map((name) => [name, h("h3", {})]));
  const reasons = Object.fromEntries(FIGURES.map((name) => [name, h("p", { class: "empty", hidden: true })]));
  const drawn = (name) => h("div", {}, titles[name], places[name], reasons[name]);
  const limits = h("div", { class: "below" });
  const lines = h("pre", { class: "lines", id: "serving-launch", tabindex: "0", role: "region", "aria-label": "Launch lines" });
  const copy = h("button", { type: "button", class: "tiny", id: "serving-copy" }, "Copy");
  const launchProblem = h("p", { class: "problem", hidden: true });
  const warnings = h("ul", { class: "notes" });
  const below = h("div", { class: "below" });
  copy.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(lines.textContent);
      copy.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(lines); // no permission: the lines are selected for Ctrl+C
      copy.textContent = "Selected";
    }
    setTimeout(() => { copy.textContent = "Copy"; }, 2000);
  });
  const show = (found) => {
    const { text, figures, launch } = found;
    verdict.textContent = text.verdict;
    status.textContent = text.request;
    const { recommended: why, ...more } = text.facts;
    fill(about, facts({ "recommended as": why ?? "", ...more }, "facts stacked"), text.best.rows.length ? table(text.best, { caption: "Recommended, and most tokens/s of each mode" }) : null);
    for (const [name, place] of Object.entries(places)) {
      const problem = figures[name].problem;
      place.hidden = Boolean(problem);
      titles[name].textContent = figures[name].title ?? "";
      reasons[name].hidden = !problem;
      reasons[name].textContent = problem ?? "";
      if (!problem) draw(place, figures[name]);
    }
    fill(limits, figures.limits.rows ? h("details", {}, h("summary", {}, "What limits each point"), table({ columns: ["point", "instances", "limited by"].map((name) => ({ name, is_text: true })), rows: figures.limits.rows }, { caption: "What limits each point" })) : null);
    lines.textContent = launch?.text ?? "";
    lines.hidden = copy.hidden = !launch;
    launchProblem.hidden = !found.launch_problem;
    launchProblem.textContent = found.launch_problem;
    fill(warnings, (launch?.warnings ?? []).map((words) => h("li", {}, words)));
    fill(below, h("details", {}, h("summary", {}, "All points of the front"), table(text.front, { caption: "Points of the front" })),
      h("ul", { class: "notes" }, found.notes.map((note) => h("li", {}, note))));
  };
  card({ page: "serving", id: "serving", title: "Serving", wide: true,
    lead: "Ways to serve this model on the device above: tokens/s of a user against tokens/s of a GPU, latency under load, what limits, and how to launch it. The step above does not count here: layout and batch are chosen.",
    tools: [savers(places.front, "serving")],
    form: h("div", { class: "search-form" }, h("div", { class: "row serving-fields" },
      Object.entries(inputs).map(([name, input]) => h("label", { class: "field wide" }, h("span", {}, FIELDS[name][0]), input)),
      h("label", { class: "field wide" }, h("span", {}, "Engine"), engine))),
    content: [verdict, status, about, drawn("front"), h("div", { class: "pair" }, drawn("ttft"), drawn("tpot")), drawn("limits"), limits,
    h("div", { class: "card-head" }, h("h3", {}, "Launch"), h("div", { class: "card-tools" }, copy)), launchProblem, lines, warnings, below],
    refresh: async ({ job }) => {
      show(await post("/serving", { job, ...request() }));
      return "";
    } });
}
