// Draws the server's chart options in the page's colours. Tooltips show the text that the server sends for each point.
// They are drawn on the canvas because the content security policy forbids inline styles.
/* global echarts, shapewrightCharts */
import { h, save } from "./dom.js";

const charts = new Map();

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** Label of an axis tick: integers in full, other values to three digits. */
const tick = (value) => (Number.isInteger(value) ? value : Number(value.toPrecision(3))).toLocaleString("en");

// Palette colours with too little contrast on a dark background.
const ON_DARK = { "#0072b2": "#3d9fdc", "#7f7f7f": "#a3a3a3", "#333333": "#e6e6e6" };
const tone = (style) => style && style.color in ON_DARK ? { ...style, color: ON_DARK[style.color] } : style;

function themed(figure, adjust) {
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
  const dark = getComputedStyle(document.documentElement).colorScheme === "dark";
  const toned = (one) => !dark ? one : { ...one, itemStyle: tone(one.itemStyle), lineStyle: tone(one.lineStyle) };
  const series = option.series.map(toned).map((one) => one.markLine
    ? { ...one, markLine: { ...one.markLine, data: one.markLine.data.map((mark) => ({ ...mark, label: { ...mark.label, color: soft, textBorderWidth: 0, fontSize: 11 } })) } }
    : one);
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
    legend: option.legend && { ...option.legend, textStyle: { color: soft }, inactiveColor: line, pageTextStyle: { color: soft }, pageIconColor: soft },
    visualMap: option.visualMap && { ...option.visualMap, textStyle: { color: soft } },
    tooltip: {
      ...option.tooltip, renderMode: "richText", confine: true, formatter, backgroundColor: panel, borderColor: line,
      textStyle: { color: ink, fontSize: 12 }, axisPointer: { ...option.tooltip?.axisPointer, lineStyle: { color: soft } },
    },
    ...adjust?.(series),
  };
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
  chart.setOption(themed(figure, adjust), { notMerge: true, lazyUpdate: false });
  element.setAttribute("aria-label", figure.alt);
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
    const chart = charts.get(element)?.chart;
    if (!chart) return;
    const canvas = chart.renderToCanvas({ pixelRatio: 2, backgroundColor: color("--paper") });
    canvas.toBlob((blob) => save(`${name}.png`, blob));
  };
  const svg = () => {
    const own = charts.get(element);
    if (!own) return;
    const other = echarts.init(null, null, { renderer: "svg", ssr: true, width: element.clientWidth, height: element.clientHeight });
    other.setOption({ ...themed(own.figure, own.adjust), animation: false, backgroundColor: color("--paper") });
    save(`${name}.svg`, other.renderToSVGString(), "image/svg+xml");
    other.dispose();
  };
  return saveButtons(name, { PNG: png, SVG: svg });
}

export function saveButtons(name, actions) {
  return h("div", { class: "savers", role: "group", "aria-label": `Save ${name}` },
    Object.entries(actions).map(([kind, onclick]) => h("button", { type: "button", class: "tiny", onclick, "aria-label": `Save ${name} as ${kind}` }, kind)));
}
