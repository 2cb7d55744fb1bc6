// Draws the server's chart options in the page's colours. Tooltips show the text that the server sends for each point.
// They are drawn on the canvas because the content security policy forbids inline styles.
/* global echarts, shapewrightCharts */
import { h, save } from "./dom.js";

const charts = new Map();

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** Label of an axis tick: integers in full, other values to three digits. */
const tick = (value) => (Number.isInteger(value) ? value : Number(value.toPrecision(3))).toLocaleString("en");

// Palette colours with too little contrast on a dark background, and the light blue that would equal the other one.
const ON_DARK = { "#0072b2": "#3d9fdc", "#56b4e9": "#b3e2ff", "#7f7f7f": "#a3a3a3", "#333333": "#e6e6e6" };
const tone = (style) => style && style.color in ON_DARK ? { ...style, color: ON_DARK[style.color] } : style;

// Narrower parts of a bar have no room for their text. [px]
const LEAST_LABELLED_PX = 58;

/** Width of the longest of some names of bars. [px] */
function widest(names) {
  const pen = document.createElement("canvas").getContext("2d");
  pen.font = "12px system-ui, sans-serif";
  return Math.max(0, ...names.map((name) => pen.measureText(name).width));
}

/** Bars without the texts that their parts have no room for. */
function withRoom(series, width) {
  const bars = series.filter((one) => one.type === "bar");
  const size = (point) => point?.value ?? point;
  const longest = Math.max(...(bars[0]?.data ?? [0]).map((_, index) => bars.reduce((sum, one) => sum + size(one.data[index]), 0)));
  const hasRoom = (point) => point?.label?.position !== "inside" || ((0.7 * width) / longest) * point.value > LEAST_LABELLED_PX;
  return series.map((one) => (one.type === "bar" ? { ...one, data: one.data.map((point) => (hasRoom(point) ? point : point.value)) } : one));
}

function themed(figure, adjust, width, withLegend = false) {
  const [ink, soft, line, panel] = ["--ink", "--soft", "--line", "--panel"].map(color);
  const option = shapewrightCharts.revived(figure.option);
  const axis = (one) => one && {
    ...one,
    axisLine: { lineStyle: { color: line } },
    axisTick: { lineStyle: { color: line } },
    axisLabel: { ...one.axisLabel, color: soft, hideOverlap: true, fontSize: 12, ...(one.type === "value" ? { formatter: tick } : {}), ...(typeof one.max === "number" ? { showMaxLabel: false } : {}) },
    nameTextStyle: { color: soft, fontSize: 12, ...(one.nameLocation === "middle" ? {} : { align: "left" }) },
    splitLine: { ...one.splitLine, lineStyle: { color: line, opacity: 0.6 } },
  };
  // Long names of bars leave most of a narrow chart to the bars.
  const names = option.yAxis?.type === "category" && !option.grid.containLabel ? option.yAxis.data : [];
  const left = Math.min(Math.max(option.grid?.left ?? 0, widest(names) + 24), Math.max(90, 0.46 * width));
  if (names.length > 0) option.yAxis = { ...option.yAxis, axisLabel: { width: left - 12, overflow: "break", lineHeight: 13 } };
  const dark = getComputedStyle(document.documentElement).colorScheme === "dark";
  const toned = (one) => !dark ? one : { ...one, itemStyle: tone(one.itemStyle), lineStyle: tone(one.lineStyle) };
  const outside = (one) => one.type === "scatter" || (one.type === "bar" && one.data.some((point) => point?.label?.position === "right"));
  const series = withRoom(option.series, width).map(toned).map((one) => ({
    ...one,
    ...(outside(one) ? { label: { ...one.label, color: soft, textBorderWidth: 0, fontSize: 11 } } : {}),
    ...(one.markLine ? { markLine: { ...one.markLine, data: one.markLine.data.map((mark) => ({ ...mark, label: { ...mark.label, color: soft, textBorderWidth: 0, fontSize: 11 } })) } } : {}),
  }));
  const textOf = (one) => figure.texts[one.seriesName]?.[one.dataIndex] ?? "";
  const formatter = (given) => {
    const lines = (Array.isArray(given) ? given : [given]).map(textOf).filter(Boolean);
    return [...new Set(lines)].slice(0, 12).join("\n") || "";
  };
  return {
    ...option,
    series,
    toolbox: undefined,
    textStyle: { fontFamily: "system-ui, sans-serif", color: ink },
    xAxis: axis(option.xAxis),
    yAxis: axis(option.yAxis),
    // On the page, the legend is a list below the chart, which wraps; a saved picture has its own.
    legend: withLegend && option.legend ? { ...option.legend, type: "plain", textStyle: { color: soft } } : { show: false },
    grid: { ...option.grid, left, ...(withLegend || !option.legend ? {} : { bottom: option.grid.containLabel ? 34 : 52 }) },
    visualMap: option.visualMap && { ...option.visualMap, textStyle: { color: soft } },
    tooltip: {
      ...option.tooltip, renderMode: "richText", confine: true, formatter, backgroundColor: panel, borderColor: line,
      textStyle: { color: ink, fontSize: 12 }, axisPointer: { ...option.tooltip?.axisPointer, lineStyle: { color: soft } },
    },
    ...adjust?.(series),
  };
}

/** List of the series of a chart with their colours, below it. */
function showLegend(element, { series }, names) {
  const items = names.map((name) => series.find((one) => one.name === name)).filter(Boolean).map((one) => {
    const item = h("li", { class: one.lineStyle?.width === 0 ? "scatter" : one.type }, one.name);
    item.style.setProperty("--swatch", one.itemStyle?.color ?? "currentColor");
    return item;
  });
  const old = element.nextElementSibling?.matches("ul.legend") ? element.nextElementSibling : null;
  const list = h("ul", { class: "legend", "aria-hidden": "true", hidden: items.length < 2 }, items);
  if (old) old.replaceWith(list);
  else element.after(list);
}

/** Draw a figure into an element, or update it. */
export function draw(element, figure, { onPoint, adjust } = {}) {
  let chart = charts.get(element)?.chart;
  if (!chart) {
    chart = echarts.init(element, null, { renderer: "canvas" });
    new ResizeObserver(() => chart.resize()).observe(element);
    chart.on("click", (event) => charts.get(element).onPoint?.(event));
  }
  charts.set(element, { chart, figure, onPoint, adjust });
  element.setAttribute("role", "img");
  const option = themed(figure, adjust, element.clientWidth);
  chart.setOption(option, { notMerge: true, lazyUpdate: false });
  showLegend(element, option, figure.option.legend?.data ?? []);
  element.setAttribute("aria-label", figure.alt);
}

/** Move the only point of a series. */
export function movePoint(element, name, value) {
  charts.get(element)?.chart.setOption({ series: [{ name, data: [value] }] });
}

/** Position of a click in axis values. */
export function valueAt(element, event) {
  const chart = charts.get(element)?.chart;
  return chart ? chart.convertFromPixel({ gridIndex: 0 }, [event.offsetX, event.offsetY]) : null;
}

export function redrawAll() {
  for (const [element, { figure, onPoint, adjust }] of charts) if (element.isConnected) draw(element, figure, { onPoint, adjust });
}

/** Buttons that save a figure as PNG and as SVG. */
export function savers(element, name) {
  const png = () => {
    const own = charts.get(element);
    if (!own) return;
    const other = echarts.init(h("div"), null, { renderer: "canvas", width: element.clientWidth, height: element.clientHeight });
    other.setOption({ ...themed(own.figure, own.adjust, element.clientWidth, true), animation: false });
    other.renderToCanvas({ pixelRatio: 2, backgroundColor: color("--paper") }).toBlob((blob) => save(`${name}.png`, blob));
    other.dispose();
  };
  const svg = () => {
    const own = charts.get(element);
    if (!own) return;
    const other = echarts.init(null, null, { renderer: "svg", ssr: true, width: element.clientWidth, height: element.clientHeight });
    other.setOption({ ...themed(own.figure, own.adjust, element.clientWidth, true), animation: false, backgroundColor: color("--paper") });
    save(`${name}.svg`, other.renderToSVGString(), "image/svg+xml");
    other.dispose();
  };
  return saveButtons(name, { PNG: png, SVG: svg });
}

export function saveButtons(name, actions) {
  return h("div", { class: "savers", role: "group", "aria-label": `Save ${name}` },
    Object.entries(actions).map(([kind, onclick]) => h("button", { type: "button", class: "tiny", onclick, "aria-label": `Save ${name} as ${kind}` }, kind)));
}
