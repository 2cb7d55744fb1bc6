// Page of a traced module: its step, findings and memory on the chosen device.
import { get, latestOnly } from "./core/api.js";
import { byId, facts, fill, h, table } from "./core/dom.js";
import { draw } from "./core/figures.js";

const findingItem = (finding, words) =>
  h("li", { class: `finding ${finding.severity}`, "data-code": finding.code },
    h("div", { class: "finding-head" }, h("span", { class: "severity" }, finding.severity), h("b", {}, `${finding.code} ${finding.name}`), words.cost ? h("span", { class: "cost" }, words.cost) : null),
    h("p", {}, words.message),
    h("div", { class: "row" }, words.suggestions.map((text) => h("span", { class: "advice" }, text))));

function paint(answer) {
  const { text } = answer;
  byId("title").textContent = text.title;
  fill(byId("verdict"), facts(text.verdict));
  fill(byId("findings"), answer.findings.length ? h("ul", { class: "finding-list" }, answer.findings.map((finding, index) => findingItem(finding, text.findings[index]))) : h("p", { class: "fine" }, "No findings."));
  fill(byId("operations"), table(text.operations, { caption: "Operations of one step" }));
  fill(byId("components"), facts(text.components));
  draw(byId("timeline"), answer.figure);
  fill(byId("modules"), table(text.modules, { caption: "Memory by module" }));
  fill(byId("notes"), answer.warnings.map((line) => h("li", {}, line)));
}

const show = latestOnly(async (name) => {
  byId("main").setAttribute("aria-busy", "true");
  try {
    paint(await get(`/trace?device=${encodeURIComponent(name)}`));
    byId("problem").hidden = true;
  } catch (error) {
    byId("problem").textContent = error.message;
    byId("problem").hidden = false;
    if (!("status" in error)) console.error(error);
  } finally {
    byId("main").removeAttribute("aria-busy");
  }
});

const select = byId("device");
const { devices } = await get("");
const first = new URLSearchParams(location.search).get("device");
fill(select, devices.map((one) => h("option", { value: one.name, selected: one.name === first }, one.title)));
select.addEventListener("change", () => {
  history.replaceState(null, "", `?device=${encodeURIComponent(select.value)}`);
  show(select.value);
});
show(select.value);
