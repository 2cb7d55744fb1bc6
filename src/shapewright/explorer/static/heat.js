// Heads against hidden size: which pairs go well together on this device. A click adopts the pair.
import { post } from "./api.js";
import { card, plot } from "./cards.js";
import { applyChanges } from "./controls.js";
import { draw, savers } from "./figures.js";

export function makeHeat() {
  const place = plot("tall");
  place.classList.add("clickable");
  card({ id: "heat", title: "Heads and hidden size", wide: true, tools: savers(place, "heads-and-hidden-size"), content: place,
    lead: "Model TFLOP/s of each pair, all else held; empty cells cannot be. Click a cell to adopt it.",
    refresh: async ({ job }) => {
      const answer = await post("/heat-map", { job });
      draw(place, answer.figure, { onPoint: (event) => {
        const cell = answer.cells[event.dataIndex];
        if (event.seriesType === "heatmap" && cell?.changes) applyChanges(cell.changes);
      } });
      return "";
    } });
}
