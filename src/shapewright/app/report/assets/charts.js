"use strict";
// Draws the charts of a page: each <figure data-chart="N"> takes option N of the JSON block #chart-options.
// What ECharts has no series for is drawn here and named by the option's renderItem.
(function () {
  const drawings = {
    // The area between low and high, one quadrilateral from each point to the next.
    band(params, api) {
      const next = params.dataIndex + 1;
      if (next >= api.rows.length) return null;
      const here = api.rows[params.dataIndex], there = api.rows[next];
      const points = [[here[0], here[2]], [there[0], there[2]], [there[0], there[1]], [here[0], here[1]]].map((at) => api.coord(at));
      return { type: "polygon", shape: { points }, style: { fill: api.visual("color"), opacity: 0.18 }, silent: true };
    },
    span(params, api) {
      const [left, middle] = api.coord([api.value(1), api.value(0)]);
      const right = api.coord([api.value(2), api.value(0)])[0];
      const height = Math.min(api.size([0, 1])[1] * 0.8, 30);
      const rect = echarts.graphic.clipRectByRect(
        { x: left, y: middle - height / 2, width: Math.max(right - left, 0.5), height },
        params.coordSys
      );
      return rect && { type: "rect", shape: rect, style: { fill: api.visual("color"), stroke: "rgba(128,128,128,.5)", lineWidth: 0.5 } };
    },
  };

  // Option as ECharts wants it: names of drawings become functions.
  function revived(option) {
    const series = (option.series || []).map((one) => {
      if (typeof one.renderItem !== "string") return one;
      const draw = drawings[one.renderItem], rows = one.data;
      return Object.assign({}, one, { renderItem: (params, api) => draw(params, Object.assign(Object.create(api), { rows })) });
    });
    return Object.assign({}, option, { series });
  }

  function draw(element, option, dark) {
    const old = echarts.getInstanceByDom(element);
    if (old) old.dispose();
    const chart = echarts.init(element, dark ? "dark" : null, { renderer: "svg" });
    chart.setOption(revived(option));
    return chart;
  }

  window.shapewrightCharts = { draw, revived };

  const block = document.getElementById("chart-options");
  if (!block) return;
  const options = JSON.parse(block.textContent);
  const preference = window.matchMedia("(prefers-color-scheme: dark)");
  const drawAll = () =>
    document.querySelectorAll("[data-chart]").forEach((element) => draw(element, options[element.dataset.chart], preference.matches));
  preference.addEventListener("change", drawAll);
  window.addEventListener("resize", () =>
    document.querySelectorAll("[data-chart]").forEach((element) => echarts.getInstanceByDom(element)?.resize())
  );
  drawAll();
})();
