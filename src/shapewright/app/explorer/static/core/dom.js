// DOM elements from plain values. Strings become text nodes; nothing is parsed as markup.

/** Create an element with properties and children; strings become text nodes. */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") element.className = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && !name.startsWith("aria") && typeof value !== "string") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export const byId = (id) => document.getElementById(id);

/** Replace the children of an element. */
export function fill(element, ...children) {
  element.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** The same table with its columns by rank where the window is narrow, so that those in sight say most. */
export function byRank(given) {
  if (!matchMedia("(max-width: 40rem)").matches) return given;
  const rank = (index) => (index === 0 ? -1 : given.columns[index].rank ?? 0);
  const order = given.columns.map((_, index) => index).sort((one, other) => rank(one) - rank(other));
  const arranged = (cells) => order.map((index) => cells[index]);
  return { ...given, columns: arranged(given.columns), rows: given.rows.map(arranged) };
}

/** Table from {columns: [{name, is_text, rank}], rows: [[text]]}, as the command line prints it, without empty columns. */
export function table(given, { caption, action } = {}) {
  const { columns, rows } = byRank(given);
  const shown = columns.map((_, index) => index).filter((index) => rows.some((row) => row[index] !== ""));
  const kind = (index) => (columns[index].is_text ? "words" : "");
  const head = shown.map((index) => h("th", { scope: "col", class: kind(index) }, columns[index].name));
  if (action) head.push(h("th", { scope: "col", class: "action" }, h("span", { class: "spoken" }, "Action")));
  const body = rows.map((row, index) => {
    const cells = shown.map((column) => h("td", { class: kind(column) }, withArrows(row[column])));
    if (action) cells.push(h("td", { class: "action" }, action(index)));
    return h("tr", {}, cells);
  });
  return scroller(h("table", {}, caption ? h("caption", { class: "spoken" }, caption) : null, h("thead", {}, h("tr", {}, head)), h("tbody", {}, body)), caption || "table");
}

/** Text in which no line ends inside of an arrow. */
export const withArrows = (text) => String(text).split("->").flatMap((part, index) => (index ? [h("span", { class: "unbroken" }, "->"), part] : [part]));

/** Region that scrolls sideways; its edge fades and a line says so while columns are out of sight. */
export function scroller(content, label, className = "") {
  const region = h("div", { class: `scroll ${className}`, tabindex: "0", role: "region", "aria-label": label }, content);
  const cue = h("p", { class: "more-columns", "aria-hidden": "true", hidden: true }, "more columns \u2192");
  const look = () => {
    const hasMore = region.scrollLeft + region.clientWidth < region.scrollWidth - 4;
    region.classList.toggle("fades", hasMore);
    cue.hidden = !hasMore;
  };
  region.addEventListener("scroll", look, { passive: true });
  new ResizeObserver(look).observe(region);
  return h("div", { class: "scroller" }, region, cue);
}

/** Definition list of names and values; empty values are skipped. */
export function facts(pairs, className = "facts") {
  return h("dl", { class: className }, Object.entries(pairs).filter(([, value]) => value !== "").map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

/** Save text or a blob as a file. */
export function save(name, content, type) {
  const blob = content instanceof Blob ? content : new Blob([content], { type });
  const link = h("a", { href: URL.createObjectURL(blob), download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
