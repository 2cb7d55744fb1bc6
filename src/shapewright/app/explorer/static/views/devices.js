// Comparison of the job across devices.
import { post } from "../core/api.js";
import { card, fill, h, plot } from "../core/cards.js";
import { table } from "../core/dom.js";
import { draw, savers } from "../core/figures.js";
import { change, state } from "../core/state.js";

const DEFAULT_DEVICES = ["a100-sxm-80gb", "h100-sxm-80gb", "h200-sxm-141gb", "b200-sxm-180gb", "mi300x", "l40s"];

export function makeDevices(devices) {
  const place = plot();
  const below = h("div", { class: "below" });
  const names = devices.map((one) => one.name);
  const chosen = () => {
    const wanted = Array.isArray(state().view.devices) ? state().view.devices.filter((name) => names.includes(name)) : DEFAULT_DEVICES;
    return [...new Set([state().device, ...wanted])];
  };
  const add = h("select", { id: "add-device" });
  add.addEventListener("change", () => change((next) => { next.view.devices = [...chosen(), add.value]; }));
  const chips = h("div", { class: "row chips", role: "group", "aria-label": "Devices compared" });
  card({ page: "devices", id: "devices", title: "Devices", wide: true, tools: [h("label", { class: "inline" }, h("span", {}, "Add"), add), savers(place, "devices")], form: chips, content: [place, below],
    refresh: async ({ job }) => {
      const list = chosen();
      fill(add, h("option", { value: "" }, "a device"), devices.filter((one) => !list.includes(one.name)).map((one) => h("option", { value: one.name }, one.title)));
      fill(chips, list.map((name) => h("button", { type: "button", class: "chip-button", "aria-label": `Remove ${name}`, disabled: name === state().device, onclick: () => change((next) => { next.view.devices = list.filter((other) => other !== name); }) }, name, h("span", { "aria-hidden": "true" }, name === state().device ? "" : " ×"))));
      const found = await post("/compare", { job, devices: list });
      place.style.blockSize = `${130 + 22 * found.figure.option.yAxis.data.length}px`;
      draw(place, found.figure, { onPoint: (event) => change((next) => { next.device = event.name; }) });
      fill(below, table(found.text.devices, { caption: "Devices side by side" }),
        found.devices.filter((one) => !one.runs).map((one) => h("p", { class: "problem" }, `${one.name}: cannot run the job: ${one.problem}`)),
        h("ul", { class: "notes" }, found.notes.map((text) => h("li", {}, text))));
      return "";
    } });
}
