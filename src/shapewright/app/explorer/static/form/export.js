// Exports of the job and its answers, in the formats that the command line writes.
import { post, postText } from "../core/api.js";
import { byId, save } from "../core/dom.js";
import { address, job } from "../core/state.js";

const nameOf = (answer) => (answer.config.name || "model").replace(/[^\w.-]+/g, "-").slice(0, 60);

const ACTIONS = {
  config: async () => save("config.json", `${JSON.stringify((await post("/config", { job: job() })).config, null, 2)}\n`, "application/json"),
  json: async () => {
    const { text, moved, ...facts } = await post("/predict", { job: job() });
    save(`${nameOf(facts)}.json`, `${JSON.stringify(facts, null, 2)}\n`, "application/json");
  },
  csv: async () => save("operations.csv", await postText("/operations.csv", { job: job() }), "text/csv"),
  report: async () => save("report.html", await postText("/report.html", { job: job() }), "text/html"),
  link: async () => {
    const link = address();
    try {
      await navigator.clipboard.writeText(link);
    } catch {
      throw new Error("the browser does not let this page copy; the link is its address"); // as without TLS
    }
    byId("spoken").textContent = "Link copied";
  },
};

export function makeExports(fail) {
  const menu = byId("export");
  for (const button of menu.querySelectorAll("[data-export]")) {
    button.hidden = false;
    button.addEventListener("click", async () => {
      button.disabled = true;
      try {
        await ACTIONS[button.dataset.export]();
        menu.open = false;
        menu.querySelector("summary").focus();
      } catch (error) {
        menu.open = false;
        fail(error);
      } finally {
        button.disabled = false;
      }
    });
  }
  document.addEventListener("click", (event) => { if (!menu.contains(event.target)) menu.open = false; });
  menu.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      menu.open = false;
      menu.querySelector("summary").focus();
    }
  });
}
