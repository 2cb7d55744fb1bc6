// Table of all operations of the step: sortable, with an explanation of each operation's time.
import { post } from "../core/api.js";
import { card, fill, h } from "../core/cards.js";
import { byRank, facts, scroller } from "../core/dom.js";
import { showTiles } from "./tiles.js";

// Units in formatted values, to sort cells by value.
const SCALE = { ns: 1e-9, us: 1e-6, ms: 1e-3, s: 1, B: 1, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, TiB: 2 ** 40 };

const HINT = "Point at an operation, tap its row, or move to it with Tab, to see how its time is computed.";

let sorted = { column: -1, down: true };
let current = null;

export function makeOperations() {
  const reason = h("div", { class: "reason", id: "reason", "aria-live": "polite" }, h("p", { class: "hint" }, HINT));
  const body = h("tbody");
  const head = h("tr");
  const view = h("div", { class: "operations" }, scroller(h("table", { class: "operation-table" }, h("caption", { class: "spoken" }, "Operations of one step"), h("thead", {}, head), body), "Operations", "tall"), reason);
  let shown = ""; // operation whose explanation is shown or requested
  let asked = null; // its key, until the job has no such operation
  let timer = 0;
  const explain = (wanted) => {
    clearTimeout(timer);
    asked = wanted;
    timer = setTimeout(async () => {
      const { name, pass, explained } = wanted;
      const [context, key] = [current, `${name}:${explained}`];
      if (shown === key) return;
      shown = key;
      const isWanted = () => shown === key && current === context;
      try {
        const answer = await post("/explain", { job: context.job, operation: name });
        if (isWanted()) fill(reason, h("h3", {}, `${name} (${pass})`), facts(answer.text[explained]));
      } catch (error) {
        if (isWanted()) fill(reason, h("p", { class: "empty" }, error.message));
      }
    }, 80);
  };
  /** Explain the operation again for another job, whose step may not have it. */
  const explainAgain = () => {
    clearTimeout(timer);
    shown = "";
    if (!asked) return;
    const same = current.answer.text.operations.keys.find((key) => key.name === asked.name && key.explained === asked.explained && key.pass === asked.pass);
    if (same) {
      explain(same);
    } else {
      asked = null;
      fill(reason, h("p", { class: "hint" }, HINT));
    }
  };
  const paint = () => {
    const { columns, rows, keys } = byRank(current.answer.text.operations);
    fill(head, columns.map((column, index) => {
      const here = sorted.column === index;
      return h("th", { scope: "col", class: column.is_text ? "words" : "", "aria-sort": here ? (sorted.down ? "descending" : "ascending") : "none" },
        h("button", { type: "button", class: "sort", onclick: () => {
          sorted = { column: index, down: here ? !sorted.down : !column.is_text };
          paint();
          head.querySelectorAll("button")[index].focus();
        } }, column.name, h("span", { class: "arrow", "aria-hidden": "true" }, here ? (sorted.down ? "↓" : "↑") : "")));
    }));
    const order = rows.map((_, index) => index);
    if (sorted.column >= 0) order.sort((one, other) => (sorted.down ? -1 : 1) * compare(rows[one][sorted.column], rows[other][sorted.column], columns[sorted.column].is_text));
    fill(body, order.map((index) => {
      const key = keys[index];
      const show = () => explain(key);
      return h("tr", { onmouseenter: show, "data-operation": `${key.name}:${key.pass}` }, rows[index].map((text, column) => column === 0
        ? h("th", { scope: "row", class: "words" }, h("button", { type: "button", class: "link", onfocus: show, title: key.has_tiles ? "Show tiles" : "", onclick: () => {
          show();
          if (key.has_tiles) showTiles(`${key.name}:${key.pass}`);
        } }, text))
        : h("td", { class: columns[column].is_text ? "words" : "" }, text)));
    }));
  };
  card({ page: "time", id: "operations", title: "Operations", wide: true, content: view,
    lead: "Operations of one device in a step, slowest first. Click a name to see its tiles.",
    refresh: async (context) => {
      current = context;
      paint();
      explainAgain();
    } });
}

function amount(text) {
  const [number, unit = ""] = text.replaceAll(",", "").split(/[\s/x]+/);
  const value = Number.parseFloat(number);
  return Number.isNaN(value) ? -Infinity : value * (SCALE[unit] ?? 1);
}

function compare(one, other, isText) {
  return isText ? one.localeCompare(other, "en", { numeric: true }) : amount(one) - amount(other);
}
