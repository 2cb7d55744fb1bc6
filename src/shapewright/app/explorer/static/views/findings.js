// Findings of the linter with their cost, and buttons that apply the suggestions.
import { get, post } from "../core/api.js";
import { card, fill, h } from "../core/cards.js";
import { applyChanges } from "../form/controls.js";
import { table } from "../core/dom.js";

export function makeFindings(rules) {
  const pages = new Map(rules.map((rule) => [rule.code, rule]));
  const content = h("div", { class: "findings" });
  card({ id: "findings", title: "Findings", wide: true, content, refresh: async ({ job }) => {
    const answer = await post("/check", { job });
    const list = answer.findings.map((finding, index) => findingItem(finding, answer.text.findings[index], pages.get(finding.code)));
    const better = answer.better_shapes.length ? [h("h3", {}, "Nearest better shapes of almost the same size"),
      table(answer.text.better_shapes, { caption: "Nearest better shapes", action: (index) =>
        h("button", { type: "button", class: "apply", onclick: () => applyChanges(answer.better_shapes[index].changes) }, "Apply") })] : [];
    fill(content, list.length ? h("ul", { class: "finding-list" }, list) : h("p", { class: "fine" }, "No findings."), better);
  } });
}

function findingItem(finding, words, rule) {
  return h("li", { class: `finding ${finding.severity}`, "data-code": finding.code },
    h("div", { class: "finding-head" }, h("span", { class: "severity" }, finding.severity), h("b", {}, `${finding.code} ${finding.name}`), words.cost ? h("span", { class: "cost" }, words.cost) : null),
    h("p", {}, words.message),
    h("div", { class: "row" }, finding.suggestions.map((suggestion, index) =>
      Object.keys(suggestion.changes).length
        ? h("button", { type: "button", class: "apply", onclick: () => applyChanges(suggestion.changes) }, `Apply: ${words.suggestions[index]}`)
        : h("span", { class: "advice" }, words.suggestions[index]))),
    rule ? explanationOf(rule) : null);
}

// The rule's page is long, so it is fetched on demand.
function explanationOf(rule) {
  const page = h("pre", {}, "Loading");
  const details = h("details", { class: "why" }, h("summary", {}, `Why: ${rule.summary}`), page);
  details.addEventListener("toggle", async () => {
    if (details.open) page.textContent = await get("/rules").then((answer) => answer.rules.find((one) => one.code === rule.code).page, (error) => error.message);
  });
  return details;
}
