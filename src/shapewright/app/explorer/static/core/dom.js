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

/** Table from {columns: [{name, is_text}], rows: [[text]]}, as the command line prints it. */
export function table(content, { caption, action } = {}) {
  const head = content.columns.map((column) => h("th", { scope: "col", class: column.is_text ? "words" : "" }, column.name));
  if (action) head.push(h("th", { scope: "col" }, h("span", { class: "spoken" }, "Action")));
  const body = content.rows.map((row, index) => {
    const cells = row.map((text, column) => h("td", { class: content.columns[column].is_text ? "words" : "" }, text));
    if (action) cells.push(h("td", {}, action(index)));
    return h("tr", {}, cells);
  });
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption || "table" },
    h("table", {}, caption ? h("caption", { class: "spoken" }, caption) : null, h("thead", {}, h("tr", {}, head)), h("tbody", {}, body)));
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
