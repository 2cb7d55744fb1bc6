// Cards: each belongs to a page, requests its own answer when it becomes visible, and shows an error in place of its
// content.
import { byId, fill, h } from "./dom.js";
import { latestOnly } from "./api.js";

const cards = [];

/**
 * Add a card to a page.
 * refresh(context) fetches and draws, and returns a message if there is nothing to draw; context = {job, answer}.
 * A card outside the viewport is refreshed when it becomes visible, an eager one at once. The form of a card stays
 * beside a message, so that what it refuses can be corrected.
 */
export function card({ page, id, title, lead, wide, eager, tools, form, content, refresh }) {
  const problem = h("p", { class: "empty", hidden: true });
  const inside = h("div", { class: "card-content" }, content);
  const element = h("section", { class: `card ${wide ? "wide" : ""}`, id, "data-page": page, "aria-labelledby": `${id}-title`, tabindex: "-1" },
    h("div", { class: "card-head" }, h("h2", { id: `${id}-title` }, title), h("div", { class: "card-tools" }, tools)),
    lead ? h("p", { class: "lead" }, lead) : null, form, problem, inside);
  const entry = { id, page, element, visible: false, pending: null };
  const showMessage = (text) => {
    problem.hidden = !text;
    problem.textContent = text || "";
    inside.hidden = Boolean(text);
  };
  const run = latestOnly(async (context) => {
    element.setAttribute("aria-busy", "true");
    try {
      inside.hidden = false;
      const message = await refresh(context);
      showMessage(message);
    } catch (error) {
      showMessage(error.message);
      if (!("status" in error)) console.error(error);
    } finally {
      element.removeAttribute("aria-busy");
    }
  });
  entry.update = (context) => {
    entry.pending = null;
    if (entry.visible || eager) run(context);
    else entry.pending = context;
  };
  new IntersectionObserver((entries) => {
    entry.visible = entries.at(-1).isIntersecting;
    if (entry.visible && entry.pending) entry.update(entry.pending);
  }, { rootMargin: "200px" }).observe(element);
  cards.push(entry);
  byId("cards").append(element);
  return entry;
}

export function updateCards(context, only) {
  for (const entry of cards) if (!only || only.includes(entry.id)) entry.update(context);
}

/** Show the cards of a page. */
export function showCards(page) {
  for (const entry of cards) {
    entry.element.hidden = entry.page !== page;
    if (!entry.element.hidden && entry.pending) entry.update(entry.pending);
  }
}

/** Container of a chart, with an optional height class. */
export const plot = (size = "") => h("div", { class: `plot ${size}` });

export { fill, h };
