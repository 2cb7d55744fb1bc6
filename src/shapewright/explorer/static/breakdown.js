// Where the time of a step goes: layers, losses, roofline, pipeline. One answer serves all four.
import { post } from "./api.js";
import { card, fill, h, plot } from "./cards.js";
import { draw, savers } from "./figures.js";
import { change } from "./state.js";
import { table } from "./dom.js";

const known = { job: null, answer: null };

/** The answer for a job, asked for once however many views want it. */
function breakdown(job) {
  const key = JSON.stringify(job);
  if (known.job !== key) {
    known.job = key;
    known.answer = post("/breakdown", { job });
    known.answer.catch(() => { known.job = null; });
  }
  return known.answer;
}

function figureCard({ id, title, lead, size, wide, after, onPoint }) {
  const place = plot(size);
  const below = h("div", { class: "below" });
  card({ id, title, lead, wide, tools: savers(place, id), content: [place, below], refresh: async ({ job }) => {
    const figure = (await breakdown(job))[id];
    if (figure.problem) return figure.problem;
    draw(place, figure, { onPoint });
    if (after) fill(below, after(figure));
    return "";
  } });
}

export function makeBreakdown() {
  figureCard({ id: "layer", title: "Layers", lead: "What the layers of one device take in a step, pass by pass." });
  figureCard({ id: "waterfall", title: "Losses", size: "tall", lead: "From the model's arithmetic at the dense peak to the predicted step.",
    after: (figure) => h("details", {}, h("summary", {}, "In words"), table({ columns: [{ name: "part", is_text: true }, { name: "time, share, and what it is", is_text: true }], rows: figure.rows }, { caption: "Losses" })) });
  figureCard({ id: "roofline", title: "Roofline", lead: "Operations under the device's peak and memory bandwidth; choose a product to see its tiles.", size: "tall",
    onPoint: (event) => {
      const [name, pass] = String(event.name).split(":")[0].replace(")", "").split(" (");
      if (pass) change((next) => { next.view.op = `${name}:${pass}`; });
    } });
}

export function makePipeline() {
  figureCard({ id: "pipeline", title: "Pipeline", lead: "Which stage works on which micro-batch when; gaps are the bubble.", after: (figure) => h("p", { class: "hint" }, figure.words) });
}

