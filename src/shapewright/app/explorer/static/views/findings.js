// Findings of the linter with their cost, and buttons that apply the suggestions; the best of them beside the headline.
import { get, post } from "../core/api.js";
import { card, fill, h } from "../core/cards.js";
import { byId, table } from "../core/dom.js";
import { applyChanges, canApply, describeChanges } from "../form/controls.js";
import { canUndo, undo } from "../core/state.js";

const MOST_ADVICE = 4;

const apply = (changes, ...words) => h("button", { type: "button", class: "apply", onclick: () => applyChanges(changes) }, words);
// The way back from a job that cannot run.
const back = () => (canUndo() ? [h("button", { type: "button", class: "apply", onclick: undo }, "Undo")] : []);
const isButton = ({ changes }) => Object.keys(changes).length > 0 && canApply(changes);
const saving = (words) => h("small", {}, words ? ` ${words}` : "");

export function makeFindings(rules) {
  const pages = new Map(rules.map((rule) => [rule.code, rule]));
  const content = h("div", { class: "findings" });
  card({ page: "shape", id: "findings", title: "Findings", wide: true, eager: true, content, refresh: async ({ job, answer: prediction }) => {
    let answer;
    try {
      answer = await post("/check", { job });
    } catch (error) {
      showAdvice([...back(), ...triesOf(error.message)]);
      return "No findings for a shape that cannot run.";
    }
    const fixed = answer.combined_fix && answer.combined_fix.codes.length > 1 && canApply(answer.combined_fix.changes) ? answer.combined_fix : null;
    const single = answer.findings.flatMap(({ suggestions }, index) => suggestions.slice(0, 1).map((one) => ({ ...one, saving: answer.text.findings[index].savings[0] }))).filter(isButton);
    const advice = [...(fixed ? [apply(fixed.changes, "All fixes: ", describeChanges(fixed.changes), saving(answer.text.combined_saving))] : []),
      ...single.map((one) => apply(one.changes, describeChanges(one.changes), saving(one.saving)))];
    showAdvice([...(prediction ? [] : back()), ...advice.slice(0, MOST_ADVICE)]);
    const list = answer.findings.map((finding, index) => findingItem(finding, answer.text.findings[index], pages.get(finding.code)));
    const better = answer.better_shapes.length ? [h("h3", {}, "Nearest better shapes of almost the same size"),
      table(answer.text.better_shapes, { caption: "Nearest better shapes", action: (index) => apply(answer.better_shapes[index].changes, "Apply") })] : [];
    fill(content, list.length ? h("ul", { class: "finding-list" }, list) : h("p", { class: "fine" }, "No findings."), better);
    return "";
  } });
}

/** Buttons beside the headline. */
function showAdvice(buttons) {
  const place = byId("advice");
  place.hidden = !buttons.length;
  fill(place, h("span", { class: "label" }, "Try"), buttons);
}

/** Values that an error proposes, as buttons. */
function triesOf(message) {
  const found = /\btry (\w+)=(\d+)/.exec(message);
  return found ? [apply({ [found[1]]: Number(found[2]) }, describeChanges({ [found[1]]: found[2] }))] : [];
}

function findingItem(finding, words, rule) {
  return h("li", { class: `finding ${finding.severity}`, "data-code": finding.code },
    h("div", { class: "finding-head" }, h("span", { class: "severity" }, finding.severity), h("b", {}, `${finding.code} ${finding.name}`), words.cost ? h("span", { class: "cost" }, words.cost) : null),
    h("p", {}, words.message),
    h("div", { class: "row" }, finding.suggestions.map((suggestion, index) =>
      isButton(suggestion) ? apply(suggestion.changes, `Apply: ${words.suggestions[index]}`) : h("span", { class: "advice" }, words.suggestions[index]))),
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
