// Cards: each view asks for its own answer, when it is in sight, and says so when there is none.
import { byId, fill, h } from "./dom.js";
import { line } from "./api.js";

const cards = [];

/**
 * A view.
 * refresh(context) fetches and draws; context = {job, answer, state}. A card out of sight waits until it is seen.
 */
export function card({ id, title, lead, wide, tools, content, refresh }) {
  const problem = h("p", { class: "empty", hidden: true });
  const inside = h("div", { class: "card-content" }, content);
  const element = h("section", { class: `card ${wide ? "wide" : ""}`, id, "aria-labelledby": `${id}-title`, tabindex: "-1" },
    h("div", { class: "card-head" }, h("h2", { id: `${id}-title` }, title), h("div", { class: "card-tools" }, tools)),
    lead ? h("p", { class: "lead" }, lead) : null, problem, inside);
  const one = { id, element, seen: false, stale: null };
  const say = (text) => {
    problem.hidden = !text;
    problem.textContent = text || "";
    inside.hidden = Boolean(text);
  };
  const ask = line(async (context) => {
    element.setAttribute("aria-busy", "true");
    try {
      inside.hidden = false;
      const words = await refresh(context);
      say(words);
    } catch (error) {
      say(error.message);
      if (!("status" in error)) console.error(error);
    } finally {
      element.removeAttribute("aria-busy");
    }
  });
  one.update = (context) => {
    if (!one.seen) {
      one.stale = context;
      return;
    }
    one.stale = null;
    ask(context);
  };
  new IntersectionObserver((entries) => {
    one.seen = entries.at(-1).isIntersecting;
    if (one.seen && one.stale) one.update(one.stale);
  }, { rootMargin: "200px" }).observe(element);
  cards.push(one);
  byId("cards").append(element);
  byId("jump").append(h("button", { type: "button", onclick: () => {
    element.scrollIntoView({ behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
    element.focus({ preventScroll: true });
  } }, title));
  return one;
}

export function updateCards(context, only) {
  for (const one of cards) if (!only || only.includes(one.id)) one.update(context);
}

/** A place for a chart, of a given height class. */
export const plot = (size = "") => h("div", { class: `plot ${size}` });

export { fill, h };
