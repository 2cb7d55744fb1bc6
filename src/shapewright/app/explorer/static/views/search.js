// Search for faster shapes: start, progress, stop, and buttons that apply a result.
import { get, post, remove } from "../core/api.js";
import { card, fill, h, plot } from "../core/cards.js";
import { groupOf } from "../form/controls.js";
import { table, withArrows } from "../core/dom.js";
import { draw, savers } from "../core/figures.js";
import { change, job, keep, useJob } from "../core/state.js";

const POLL_MS = 250;

/** Use a shape that a search of a job found; the job may be another one by now. */
function applyCandidate(asked, candidate) {
  change((next) => {
    useJob(next, asked);
    for (const [name, { to }] of Object.entries(candidate.changes)) next[groupOf(name)][name] = to;
  });
}

export function makeSearch(about) {
  const boxes = about.vary.map((name) => h("label", { class: "check" }, keep(h("input", { type: "checkbox", id: `search-${name}`, value: name, checked: about.vary_default.includes(name) })), h("span", {}, name.replace("_", " "))));
  const tolerance = keep(h("select", { id: "search-tolerance" }, [["0.005", "0.5 %"], ["0.02", "2 %"], ["0.05", "5 %"]].map(([value, text]) => h("option", { value, selected: value === "0.02" }, text))));
  const tokens = keep(h("select", { id: "search-tokens" }, [["", "speed"], ["1e11", "time to the loss of 100 B tokens"], ["1e12", "time to the loss of 1 T tokens"], ["15e12", "time to the loss of 15 T tokens"]].map(([value, text]) => h("option", { value }, text))));
  const guard = keep(h("select", { id: "search-guard" }, [["usual", "usual"], ["strict", "closer to this shape"], ["free", "any"]].map(([value, text]) => h("option", { value }, text))));
  const start = h("button", { type: "button", class: "primary", id: "start-search" }, "Search");
  const stop = h("button", { type: "button", id: "stop-search", hidden: true }, "Stop");
  const bar = h("progress", { max: 1, value: 0, "aria-label": "Progress of the search", hidden: true });
  const status = h("p", { class: "hint", role: "status" });
  const place = plot("tall");
  const saving = savers(place, "pareto");
  const found = h("div", { class: "below" });
  place.hidden = saving.hidden = true;
  let running = null;
  let isStopped = false; // also before the search has a name

  const finish = () => {
    running = null;
    start.disabled = false;
    stop.hidden = bar.hidden = true;
  };
  const show = (result, asked, isCancelled) => {
    const { candidates, pareto } = result.text;
    status.textContent = `${isCancelled ? "Stopped. " : ""}${result.text.request}. ${result.text.space}`;
    place.hidden = saving.hidden = !result.pareto.length;
    if (result.pareto.length) draw(place, result.figure, { onPoint: (event) => event.seriesName === "shape" && applyCandidate(asked, result.pareto[event.dataIndex]) });
    const action = (list) => (index) => h("button", { type: "button", class: "apply", onclick: () => applyCandidate(asked, list[index]) }, "Apply");
    fill(found,
      result.verdict ? h("p", {}, h("strong", {}, "Verdict: "), withArrows(result.verdict.text)) : null,
      result.candidates.length ? [h("h3", {}, "Shapes of the same size"), table(candidates, { caption: "Faster shapes", action: action(result.candidates) })] : null,
      result.pareto.length ? h("details", {}, h("summary", {}, `Pareto front: ${result.pareto.length} shapes`), table(pareto, { caption: "Pareto front", action: action(result.pareto) })) : null,
      h("p", { class: "hint" }, result.text.letters),
      h("ul", { class: "notes" }, result.notes.map((text) => h("li", {}, text))));
  };
  const watch = async (id, asked) => {
    while (running === id) {
      const run = await get(`/searches/${id}`);
      bar.value = run.progress_fraction;
      if (run.state === "waiting") status.textContent = "Waiting for another search.";
      if (run.state === "running") status.textContent = run.num_shapes ? `${run.done.toLocaleString("en")} of ${run.num_shapes.toLocaleString("en")} shapes` : "Starting.";
      if (run.state === "failed") throw new Error(run.error);
      if (["done", "cancelled"].includes(run.state)) {
        if (run.result) show(run.result, asked, run.state === "cancelled");
        else status.textContent = "Stopped before a shape was found.";
        if (run.error) status.textContent += ` ${run.error}`;
        return;
      }
      await new Promise((resolve) => setTimeout(resolve, POLL_MS));
    }
  };
  start.addEventListener("click", async () => {
    start.disabled = true;
    isStopped = stop.hidden = bar.hidden = false;
    bar.removeAttribute("value");
    status.textContent = "Starting.";
    fill(found);
    place.hidden = saving.hidden = true;
    try {
      const vary = boxes.map((box) => box.querySelector("input")).filter((box) => box.checked).map((box) => box.value);
      const asked = job();
      const run = await post("/searches", { job: asked, vary, tolerance_fraction: Number(tolerance.value), guard: guard.value, ...(tokens.value ? { train_tokens: Number(tokens.value) } : {}) });
      running = run.id;
      if (isStopped) await remove(`/searches/${running}`);
      await watch(run.id, asked);
    } catch (error) {
      status.textContent = error.message;
    } finally {
      finish();
    }
  });
  stop.addEventListener("click", async () => {
    isStopped = stop.hidden = true;
    status.textContent = "Stopping.";
    if (running) await remove(`/searches/${running}`).catch((error) => { status.textContent = error.message; });
  });
  card({ page: "design", id: "search", title: "Search", wide: true,
    lead: "Faster shapes with the same number of parameters, with proportions of public models.",
    tools: [saving],
    content: [h("div", { class: "search-form" }, h("fieldset", { class: "plain" }, h("legend", {}, "Vary"), h("div", { class: "row" }, boxes)),
      h("div", { class: "row" }, h("label", { class: "inline" }, h("span", {}, "Size within"), tolerance), h("label", { class: "inline" }, h("span", {}, "Rank by"), tokens), h("label", { class: "inline" }, h("span", {}, "Proportions"), guard), start, stop)), bar, status, place, found],
    refresh: async () => "" });
}
