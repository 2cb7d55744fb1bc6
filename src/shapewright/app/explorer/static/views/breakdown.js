// Breakdown of the step time: layers, losses, roofline and pipeline, all from one request.
import { post } from "../core/api.js";
import { card, fill, h, plot } from "../core/cards.js";
import { draw, savers } from "../core/figures.js";
import { showTiles } from "./tiles.js";
import { table } from "../core/dom.js";

const cached = { job: null, answer: null };

/** Answer for a job, requested once for all cards. */
function breakdown(job) {
  const key = JSON.stringify(job);
  if (cached.job !== key) {
    cached.job = key;
    cached.answer = post("/breakdown", { job });
    cached.answer.catch(() => { cached.job = null; });
  }
  return cached.answer;
}

function figureCard({ page = "time", id, title, lead, size, wide, after, onPoint, adjust }) {
  const place = plot(size);
  const below = h("div", { class: "below" });
  card({ page, id, title, lead, wide, tools: savers(place, id), content: [place, below], refresh: async ({ job }) => {
    const figure = (await breakdown(job))[id];
    if (figure.problem) return figure.problem;
    draw(place, figure, { onPoint, adjust: adjust && ((series) => adjust(series, place)) });
    if (after) fill(below, after(figure));
    return "";
  } });
}

/** Names of points in a column at the right, with a line to each. */
function namesBeside(series, place) {
  const layout = () => ({ x: place.clientWidth - 118, moveOverlap: "shiftY", align: "left" });
  return {
    grid: { left: 16, right: 130, top: 40, bottom: 34, containLabel: true },
    series: series.map((one) => (one.type === "scatter" ? { ...one, label: { ...one.label, minMargin: 8 }, labelLayout: layout, labelLine: { show: true, length2: 4, lineStyle: { color: "#8a95a3", width: 0.7 } } } : one)),
  };
}

export function makeBreakdown() {
  figureCard({ id: "layer", title: "Layers", lead: "Time of all layers of one device in a step, by pass." });
  figureCard({ id: "waterfall", title: "Losses", size: "tall", lead: "From the model FLOPs at the dense peak to the predicted step time.",
    after: (figure) => h("details", {}, h("summary", {}, "As a table"), table({ columns: [{ name: "part", is_text: true }, { name: "time, share and cause", is_text: true }], rows: figure.rows }, { caption: "Losses" })) });
  figureCard({ id: "roofline", title: "Roofline", lead: "Operations under the device's peak and memory bandwidth; click a GEMM to see its tiles.", size: "tall", wide: true, adjust: namesBeside,
    onPoint: (event) => {
      const [name, pass] = String(event.name).split(":")[0].replace(")", "").split(" (");
      if (pass) showTiles(`${name}:${pass}`);
    } });
}

export function makePipeline() {
  figureCard({ page: "plan", id: "pipeline", wide: true, title: "Pipeline", lead: "Micro-batches of each pipeline stage over time; gaps are the bubble.", after: (figure) => h("p", { class: "hint" }, figure.words) });
}

