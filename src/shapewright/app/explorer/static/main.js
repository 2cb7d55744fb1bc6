// Entry point: builds the form and the cards, and runs the update loop: state -> request -> answer -> cards.
import { get, latestOnly, post } from "./core/api.js";
import { updateCards } from "./core/cards.js";
import { makeBreakdown, makePipeline } from "./views/breakdown.js";
import { makeConfigInput } from "./form/config_input.js";
import { makeControls, showControls, showRequested } from "./form/controls.js";
import { makeDesign } from "./views/design.js";
import { makeDevices } from "./views/devices.js";
import { byId } from "./core/dom.js";
import { makeExports } from "./form/export.js";
import { redrawAll } from "./core/figures.js";
import { makeFindings } from "./views/findings.js";
import { makeFieldSweep, makeHeadGrid } from "./views/sweeps.js";
import { makeMemory } from "./views/memory.js";
import { makeOperations } from "./views/operations.js";
import { makeSearch } from "./views/search.js";
import { makeServing } from "./views/serving.js";
import { makeTiles } from "./views/tiles.js";
import { canRedo, canUndo, change, job, listen, readAddress, redo, state, undo } from "./core/state.js";
import { showProblem, showVerdict } from "./views/verdict.js";

// Cards to refresh when a view setting changes.
const CARDS_OF_SETTING = { dim: ["sweep"], y: ["sweep"], op: ["tiles"], optimizer: ["memory"], devices: ["devices"] };

let answer = null;
let lastView = {};

const update = latestOnly(async (wanted) => {
  const now = state();
  try {
    answer = await post("/predict", { job: wanted, ...(now.pin ? { baseline: now.pin } : {}) });
  } catch (error) {
    showProblem(error);
    showRequested();
    updateCards({ job: wanted, answer }, ["findings"]); // the findings often have a fix for a job that cannot run
    return;
  }
  showProblem(null);
  showVerdict(answer);
  showControls(answer);
  measurePaint();
  updateCards({ job: wanted, answer });
});

/** Record the time from a slider move to the frame that shows its answer, as a browser performance measure. */
function measurePaint() {
  if (!performance.getEntriesByName("shapewright:input").length) return;
  requestAnimationFrame(() => setTimeout(() => {
    if (performance.getEntriesByName("shapewright:input").length) performance.measure("shapewright:slide-to-paint", "shapewright:input");
    performance.clearMarks("shapewright:input");
  }));
}

function onChange(now, { jobChanged }) {
  byId("undo").disabled = !canUndo();
  byId("redo").disabled = !canRedo();
  byId("pin").setAttribute("aria-pressed", String(Boolean(now.pin)));
  byId("pin").textContent = now.pin ? "Unpin A" : "Pin as A";
  byId("swap").hidden = !now.pin;
  const changed = Object.keys(CARDS_OF_SETTING).filter((key) => JSON.stringify(now.view[key]) !== JSON.stringify(lastView[key]));
  lastView = structuredClone(now.view);
  if (jobChanged || !answer) update(job(now));
  else if (changed.length) updateCards({ job: job(now), answer }, changed.flatMap((key) => CARDS_OF_SETTING[key]));
}

function makeTools() {
  byId("undo").addEventListener("click", undo);
  byId("redo").addEventListener("click", redo);
  byId("pin").addEventListener("click", () => change((next) => { next.pin = next.pin ? null : structuredClone(job(next)); }));
  byId("swap").addEventListener("click", () => change((next) => {
    const { preset = null, config = null, overrides = {}, device, workload = {}, layout = {}, node_size = null, network_gbit_per_s = null, uncalibrated = false, software = "tuned" } = next.pin;
    next.pin = structuredClone(job(next));
    Object.assign(next, { preset, config, overrides, device, workload, layout, node_size, network_gbit_per_s, uncalibrated, software });
  }));
  byId("appearance").addEventListener("click", () => {
    const next = isDark() ? "light" : "dark";
    document.documentElement.dataset.appearance = next;
    try {
      localStorage.setItem("shapewright.appearance", next);
    } catch {
      // storage is blocked: the choice lasts until the page is closed
    }
    repaint();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
  document.addEventListener("keydown", (event) => {
    const typing = event.target.closest("input, select, textarea");
    const key = event.key.toLowerCase();
    if ((event.ctrlKey || event.metaKey) && key === "z" && !(typing && ["text", "number", "textarea"].includes(typing.type))) {
      event.preventDefault();
      (event.shiftKey ? redo : undo)();
    } else if (!typing && !event.ctrlKey && !event.metaKey && !event.altKey) {
      if (key === "p") byId("pin").click();
      if (key === "/") {
        event.preventDefault();
        byId("question").open = true;
        byId("preset").focus();
      }
    }
  });
}

const isDark = () => (document.documentElement.dataset.appearance ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";

let tiles = null;

function repaint() {
  byId("appearance").textContent = isDark() ? "Light" : "Dark";
  redrawAll();
  tiles?.redraw();
}

async function start() {
  if (matchMedia("(max-width: 60rem)").matches) byId("question").open = false;
  let about;
  try {
    about = await get("");
  } catch (error) {
    showProblem(error);
    return;
  }
  byId("version").textContent = [`Shapewright ${about.version}.`, about.calibration ? `${about.calibration.text}.` : ""].join(" ");
  makeControls(about);
  makeConfigInput();
  makeFindings(about.rules);
  makeFieldSweep(about.swept);
  tiles = makeTiles();
  makeOperations();
  makeBreakdown();
  makePipeline();
  makeMemory(about.optimizers);
  makeDevices(about.devices);
  makeServing();
  makeHeadGrid();
  makeSearch(about);
  makeDesign();
  makeTools();
  makeExports(showProblem);
  repaint();
  listen(onChange);
  readAddress();
  if (!answer) update(job());
}

start();
