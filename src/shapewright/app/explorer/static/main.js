// Entry point: builds the form and the cards, and runs the update loop: state -> request -> answer -> cards.
import { get, latestOnly, post } from "./core/api.js";
import { showCards, updateCards } from "./core/cards.js";
import { makeBreakdown, makePipeline } from "./views/breakdown.js";
import { makeConfigInput } from "./form/config_input.js";
import { makeControls, onSlide, showControls, showRequested } from "./form/controls.js";
import { makeDesign } from "./views/design.js";
import { makeDevices } from "./views/devices.js";
import { byId, h } from "./core/dom.js";
import { makeExports } from "./form/export.js";
import { redrawAll } from "./core/figures.js";
import { makeFindings } from "./views/findings.js";
import { makeFieldSweep, makeHeadGrid, moveMarker } from "./views/sweeps.js";
import { makeMemory } from "./views/memory.js";
import { makeOperations } from "./views/operations.js";
import { makePlan } from "./views/plan.js";
import { makeSearch } from "./views/search.js";
import { makeServing } from "./views/serving.js";
import { makeTiles } from "./views/tiles.js";
import { addressOf, canRedo, canUndo, change, job, listen, open, PAGES, readAddress, redo, state, undo, useJob } from "./core/state.js";
import { showFailure, showProblem, showVerdict } from "./views/verdict.js";

// Cards to refresh when a view setting changes; the other settings begin with the name of their card.
const CARDS_OF_SETTING = { dim: "sweep", y: "sweep", op: "tiles" };
const cardOf = (setting) => CARDS_OF_SETTING[setting] ?? setting.split("-")[0];
// While a slider moves, the step is predicted at every position and the cards follow when it rests this long.
const REST_MS = 260;

let answer = null;
let lastView = {};
let resting = 0;
let slidAt = -REST_MS;

const update = latestOnly(async (wanted) => {
  const now = state();
  clearTimeout(resting);
  try {
    answer = await predict(wanted, now.pin);
  } catch (error) {
    answer = null;
    showProblem(error);
    await showRequested(() => post("/predict", { job: { ...wanted, overrides: {}, workload: {}, layout: {} } }).catch(() => null));
    updateCards({ job: wanted, answer }, ["findings"]); // the findings often have a fix for a job that cannot run
    return;
  }
  showProblem(null);
  showVerdict(answer);
  showControls(answer);
  moveMarker(answer);
  measurePaint();
  const rest = () => updateCards({ job: wanted, answer });
  if (performance.now() - slidAt < REST_MS) resting = setTimeout(rest, REST_MS);
  else rest();
});

/** Answer for a job, compared with a pinned one; where that cannot run, the reason takes the place of the comparison. */
async function predict(wanted, pin) {
  if (!pin) return post("/predict", { job: wanted });
  try {
    return await post("/predict", { job: wanted, baseline: pin });
  } catch (error) {
    return { ...(await post("/predict", { job: wanted })), moved: [], pinProblem: error.message };
  }
}

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
  showPage(now.page);
  const changed = Object.keys({ ...lastView, ...now.view }).filter((key) => JSON.stringify(now.view[key]) !== JSON.stringify(lastView[key]));
  lastView = structuredClone(now.view);
  if (jobChanged || !answer) update(job(now));
  else if (changed.length) updateCards({ job: job(now), answer }, changed.map(cardOf));
}

function showPage(page) {
  const main = byId("main");
  for (const link of byId("pages").children) {
    link.href = addressOf(link.dataset.page);
    if (link.dataset.page === page) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = page === "shape" ? "Shapewright explorer" : `${PAGES[page]} - Shapewright explorer`;
  if (main.dataset.page === page) return;
  main.dataset.page = page;
  showCards(page);
  scrollTo(0, 0);
}

function makePages() {
  byId("pages").append(...Object.entries(PAGES).map(([page, title]) => h("a", { "data-page": page, href: addressOf(page), onclick: (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return; // another tab or window
    event.preventDefault();
    open(page);
  } }, title)));
  showPage(state().page);
  showCards(state().page);
}

function makeTools() {
  byId("undo").addEventListener("click", undo);
  byId("redo").addEventListener("click", redo);
  byId("pin").addEventListener("click", () => change((next) => { next.pin = next.pin ? null : structuredClone(job(next)); }));
  byId("swap").addEventListener("click", () => change((next) => {
    const pinned = next.pin;
    next.pin = structuredClone(job(next));
    useJob(next, pinned);
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
      const page = Object.keys(PAGES)[Number(key) - 1];
      if (page) open(page);
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
  makeFieldSweep(about.swept);
  tiles = makeTiles();
  makeFindings(about.rules);
  makeHeadGrid();
  makeOperations();
  makeBreakdown();
  makeMemory(about.optimizers);
  makePlan();
  makePipeline();
  makeServing();
  makeDesign();
  makeSearch(about);
  makeDevices(about.devices);
  makeTools();
  makeExports(showFailure);
  onSlide(() => { slidAt = performance.now(); });
  repaint();
  makePages();
  listen(onChange);
  if (!readAddress()) update(job());
}

start();
