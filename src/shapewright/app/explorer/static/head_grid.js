// Heat map of the model rate over number of heads and hidden size. A click applies the pair.
import { post } from "./api.js";
import { card, plot } from "./cards.js";
import { applyChanges } from "./controls.js";
import { draw, savers } from "./figures.js";

export function makeHeadGrid() {
  const place = plot("tall");
  place.classList.add("clickable");
  card({ id: "heat", title: "Heads and hidden size", wide: true, tools: savers(place, "heads-and-hidden-size"), content: place,
    lead: "Model TFLOP/s of each pair with all other fields fixed; empty cells are not valid shapes. Click a cell to apply it.",
    refresh: async ({ job }) => {
      const answer = await post("/heat-map", { job });
      draw(place, answer.figure, { onPoint: (event) => {
        const cell = answer.cells[event.dataIndex];
        if (event.seriesType === "heatmap" && cell?.changes) applyChanges(cell.changes);
      } });
      return "";
    } });
}
