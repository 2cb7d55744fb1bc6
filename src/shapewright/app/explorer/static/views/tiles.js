// The output matrix of one GEMM divided into tiles, coloured by wave.
import { post } from "../core/api.js";
import { card, fill, h } from "../core/cards.js";
import { byId, facts, save } from "../core/dom.js";
import { saveButtons } from "../core/figures.js";
import { change, open, state } from "../core/state.js";
import { watchedGemm } from "./sweeps.js";

const MAX_CELLS = 20000; // per matrix; of larger ones only the lower right corner is drawn
const MAX_COPIES = 4;
const GAP = 14;

let last = null;

export function makeTiles() {
  const select = h("select", { id: "tile-operation" });
  const canvas = h("canvas", { class: "tile-canvas", role: "img" });
  const waves = h("canvas", { class: "wave-canvas", role: "img" });
  const numbers = h("div", { class: "tile-numbers" });
  const note = h("p", { class: "hint" });
  select.addEventListener("change", () => change((next) => { next.view.op = select.value; }));
  const tools = [h("label", { class: "inline" }, h("span", {}, "GEMM"), select), saveButtons("tiles", {
    PNG: () => canvas.toBlob((blob) => save("tiles.png", blob)),
    SVG: () => last && save("tiles.svg", svgOf(last), "image/svg+xml"),
  })];
  const content = h("div", { class: "tiles" }, h("div", { class: "tile-pictures" }, canvas, h("h3", {}, "The last wave"), waves, note), numbers);
  const paint = () => {
    if (!last || !canvas.clientWidth) return;
    paintMatrix(canvas, last);
    paintLastWave(waves, last);
  };
  new ResizeObserver(paint).observe(content);
  card({ page: "shape", id: "tiles", title: "Tiles and waves", tools, content,
    lead: "Each box is a tile of the output, one colour per wave. Hatched tiles compute padding.",
    refresh: async ({ job, answer }) => {
      const gemms = answer.text.operations.keys.filter((key) => key.has_tiles);
      if (!gemms.length) return "Tiles are not modelled for this device: its GEMMs are priced by the roofline only.";
      const nameOf = (key) => `${key.name}:${key.pass}`;
      const wanted = gemms.some((key) => nameOf(key) === state().view.op) ? state().view.op : nameOf(gemms.find((key) => nameOf(key) === watchedGemm()) || gemms.find((key) => key.name === "mlp.up") || gemms[0]);
      fill(select, gemms.map((key) => h("option", { value: nameOf(key) }, `${key.name} (${key.pass})`)));
      select.value = wanted;
      const [operation, pass] = wanted.split(":");
      last = await post("/tiles", { job, operation, pass });
      const { gemm, ...rest } = last.text;
      fill(numbers, h("h3", {}, gemm), facts(rest));
      canvas.setAttribute("aria-label", `${gemm}: ${rest.tiles} tiles of ${rest.tile} in ${rest.waves}; ${rest["last wave"]} in the last one.`);
      waves.setAttribute("aria-label", `Last wave: ${rest["last wave"]}.`);
      note.textContent = noteOn(last);
      paint();
      return "";
    } });
  return { redraw: paint };
}

/** Show the tiles of an operation, on their page. */
export function showTiles(operation) {
  change((next) => { next.view.op = operation; });
  open("shape");
  byId("tiles").scrollIntoView();
  byId("tiles").focus({ preventScroll: true });
}

function noteOn(grid) {
  const view = viewOf(grid);
  const parts = [];
  if (view.copies < grid.num_copies) parts.push(`${view.copies} of ${grid.num_copies.toLocaleString("en")} matrices are drawn, the last one at the end.`);
  if (view.rows < grid.num_rows || view.columns < grid.num_columns) parts.push("Only the lower right corner of each matrix is drawn.");
  parts.push("Tiles are numbered row by row; libraries also use other orders, with the same number of waves.");
  return parts.join(" ");
}

function viewOf(grid) {
  let [rows, columns] = [grid.num_rows, grid.num_columns];
  if (rows * columns > MAX_CELLS) {
    const side = Math.floor(Math.sqrt(MAX_CELLS));
    rows = Math.min(rows, Math.max(side, Math.floor(MAX_CELLS / Math.min(columns, side))));
    columns = Math.min(columns, Math.floor(MAX_CELLS / rows));
  }
  return { rows, columns, copies: Math.min(grid.num_copies, MAX_COPIES) };
}

/** All drawn tiles with position, wave, and the fraction that lies inside the matrix. */
function* cells(grid, box) {
  const view = viewOf(grid);
  const [r0, c0] = [grid.num_rows - view.rows, grid.num_columns - view.columns];
  for (let copy = 0; copy < view.copies; copy += 1) {
    const index = copy === view.copies - 1 ? grid.num_copies - 1 : copy;
    for (let r = 0; r < view.rows; r += 1) {
      for (let c = 0; c < view.columns; c += 1) {
        const [row, column] = [r0 + r, c0 + c];
        const number = (index * grid.num_rows + row) * grid.num_columns + column;
        yield {
          x: box.x + copy * (view.columns * box.w + GAP) + c * box.w, y: box.y + r * box.h,
          w: box.w, h: box.h,
          wave: Math.floor(number / grid.num_slots),
          across: column === grid.num_columns - 1 ? grid.last_column_fraction : 1,
          down: row === grid.num_rows - 1 ? grid.last_row_fraction : 1,
        };
      }
    }
  }
}

function boxOf(grid, width, tallest) {
  const view = viewOf(grid);
  const room = width - (view.copies - 1) * GAP;
  // Tiles fill the width and keep their aspect ratio unless the matrix would become too flat or too tall.
  const w = Math.min(room / view.copies / view.columns, 90);
  const natural = (w * grid.tile_m) / grid.tile_n;
  const hgt = Math.max(Math.min(natural, tallest / view.rows), Math.min(14, tallest / view.rows));
  return { x: 0, y: 0, w, h: hgt, height: Math.ceil(hgt * view.rows) };
}

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function colors() {
  const list = ["--wave-1", "--wave-2", "--wave-3", "--wave-4"].map(style);
  return { of: (wave, waves) => (waves > 1 && wave === waves - 1 ? style("--wave-last") : list[wave % list.length]), hatch: style("--ink"), paper: style("--paper"), empty: style("--panel"), line: style("--line") };
}

function prepare(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  return context;
}

function paintMatrix(canvas, grid) {
  const box = boxOf(grid, canvas.clientWidth, 200);
  const context = prepare(canvas, canvas.clientWidth, box.height);
  const paint = colors();
  const gap = Math.min(box.w, box.h) > 4 ? 1 : 0;
  for (const cell of cells(grid, box)) {
    context.fillStyle = paint.of(cell.wave, grid.num_waves);
    context.fillRect(cell.x, cell.y, Math.max(cell.w - gap, 0.5), Math.max(cell.h - gap, 0.5));
    if (cell.across < 1 || cell.down < 1) hatch(context, cell, gap, paint);
  }
}

function hatch(context, cell, gap, paint) {
  const [w, hgt] = [cell.w - gap, cell.h - gap];
  context.save();
  context.beginPath();
  if (cell.across < 1) context.rect(cell.x + w * cell.across, cell.y, w * (1 - cell.across), hgt);
  if (cell.down < 1) context.rect(cell.x, cell.y + hgt * cell.down, w, hgt * (1 - cell.down));
  context.clip();
  context.globalAlpha = 0.82;
  context.fillStyle = paint.paper;
  context.fillRect(cell.x, cell.y, w, hgt);
  context.globalAlpha = 0.75;
  context.strokeStyle = paint.hatch;
  context.lineWidth = 0.8;
  context.beginPath();
  for (let at = -hgt; at < w; at += 4) {
    context.moveTo(cell.x + at, cell.y + hgt);
    context.lineTo(cell.x + at + hgt, cell.y);
  }
  context.stroke();
  context.restore();
}

/** Draw the SMs of the last wave: busy ones filled, idle ones empty. */
function paintLastWave(canvas, grid) {
  const width = canvas.clientWidth;
  const side = Math.max(7, Math.min(18, Math.floor(width / Math.ceil(grid.num_slots / 4))));
  const perRow = Math.max(1, Math.floor(width / side));
  const rows = Math.ceil(grid.num_slots / perRow);
  const context = prepare(canvas, width, rows * side);
  const paint = colors();
  for (let slot = 0; slot < grid.num_slots; slot += 1) {
    const [x, y] = [(slot % perRow) * side, Math.floor(slot / perRow) * side];
    context.fillStyle = slot < grid.num_last ? paint.of(grid.num_waves - 1, grid.num_waves) : paint.empty;
    context.fillRect(x + 1, y + 1, side - 2, side - 2);
    if (slot >= grid.num_last) {
      context.strokeStyle = paint.line;
      context.strokeRect(x + 1.5, y + 1.5, side - 3, side - 3);
    }
  }
}

function svgOf(grid) {
  const box = boxOf(grid, 960, 400);
  const paint = colors();
  const rects = [];
  for (const cell of cells(grid, box)) {
    const place = `x="${cell.x.toFixed(2)}" y="${cell.y.toFixed(2)}" width="${(cell.w * 0.95).toFixed(2)}" height="${(cell.h * 0.95).toFixed(2)}"`;
    rects.push(`<rect ${place} fill="${paint.of(cell.wave, grid.num_waves)}"/>`);
    if (cell.across < 1 || cell.down < 1) rects.push(`<rect ${place} fill="url(#hatch)"/>`);
  }
  const pattern = `<defs><pattern id="hatch" width="4" height="4" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><line x1="0" y1="0" x2="0" y2="4" stroke="#000" stroke-width="1" opacity=".6"/></pattern></defs>`;
  return `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 ${box.height}" width="960" height="${box.height}">${pattern}${rects.join("")}</svg>\n`;
}
