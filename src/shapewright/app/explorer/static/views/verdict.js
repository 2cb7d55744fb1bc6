// Headline numbers: step time, utilization, memory, and changes against the pinned job A.
import { byId, fill, h } from "../core/dom.js";

let speak = 0;

export function showVerdict(answer) {
  const { title, verdict } = answer.text;
  byId("title").textContent = title;
  const [[stepName, stepText], ...rest] = Object.entries(verdict);
  const [middle, interval] = splitInterval(stepText);
  const fits = answer.memory.fits;
  fill(byId("verdict"),
    h("div", { class: "step" }, h("span", { class: "label" }, stepName), h("strong", { "data-fact": "step" }, middle), h("span", { class: "interval" }, interval)),
    rest.map(([name, text]) => h("div", { class: `stat ${name === "memory" ? (fits ? "good" : "bad") : ""}` },
      h("span", { class: "label" }, name), h("span", { class: "fact", "data-fact": name }, inTwo(text)),
      name === "MFU" ? meter(answer.mfu, name) : name === "MBU" ? meter(answer.mbu, name) : name === "memory" ? meter(answer.memory.total_bytes / answer.memory.capacity_bytes, "memory") : null)));
  fill(byId("notes"), answer.text.notes.map((text) => h("li", {}, text)));
  const use = verdict.MBU ? "MBU" : "MFU";  // decode is usually memory-bound
  byId("mini").textContent = `${middle} · ${use} ${verdict[use]}${fits ? "" : " · does not fit"}`;
  showMoved(answer.moved, answer.pinProblem);
  clearTimeout(speak);
  speak = setTimeout(() => { byId("spoken").textContent = `${stepName} ${stepText}, ${use} ${verdict[use]}, memory ${verdict.memory}`; }, 700);
}

/** Split a long text into value and remainder: "67.7 GiB" and " of 37.3 GiB (does not fit)". */
function inTwo(text) {
  const at = text.indexOf(" of ");
  return at < 0 ? h("span", { class: "value" }, text) : [h("span", { class: "value" }, text.slice(0, at)), h("span", { class: "rest" }, text.slice(at))];
}

function splitInterval(text) {
  const at = text.indexOf(" (");
  return at < 0 ? [text, ""] : [text.slice(0, at), text.slice(at + 2, -1)];
}

function meter(fraction, name) {
  const bar = h("span", { class: `meter ${fraction > 1 ? "over" : ""}`, "aria-hidden": "true" }, h("span", {}));
  bar.firstChild.style.inlineSize = `${Math.min(1, Math.max(0, fraction)) * 100}%`;
  bar.dataset.name = name;
  return bar;
}

function showMoved(moved, problem) {
  const place = byId("moved");
  place.hidden = !moved;
  if (!moved) return;
  fill(place, h("span", { class: "label" }, "against A"), problem ? `A cannot run: ${problem}` : "", moved.map((one) =>
    h("span", { class: `chip ${one.is_better === null ? "" : one.is_better ? "good" : "bad"}`, title: one.before ? `${one.before}, now ${one.after}` : "" },
      `${one.name} `, h("b", {}, one.text), one.is_better === null ? "" : h("span", { class: "spoken" }, one.is_better ? " (better)" : " (worse)"))));
}

/** Show why something else failed, above the numbers, until the next answer. */
export function showFailure(error) {
  byId("problem").hidden = false;
  byId("problem").textContent = error.message;
}

/** Show why a job cannot run, in place of numbers, or remove the reason. */
export function showProblem(problem) {
  const place = byId("problem");
  place.hidden = !problem;
  place.textContent = problem ? problem.message : "";
  byId("main").classList.toggle("refused", Boolean(problem));
  const mini = byId("mini");
  mini.classList.toggle("bad", Boolean(problem));
  if (!problem) return;
  mini.textContent = problem.message;
  byId("title").textContent = "This shape cannot run";
  fill(byId("verdict"));
  byId("moved").hidden = true;
}
