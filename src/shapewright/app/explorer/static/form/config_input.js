// Input of a config.json: pasted, chosen as a file or dropped on the page. It is sent only to this server.
import { byId } from "../core/dom.js";
import { address, change } from "../core/state.js";

const MAX_BYTES = 200 * 1024;

export function makeConfigInput() {
  const problem = byId("config-problem");
  const showProblem = (text) => {
    problem.hidden = !text;
    problem.textContent = text;
    if (text) problem.closest("details").open = true;
  };
  const use = (text) => {
    showProblem("");
    if (text.length > MAX_BYTES) return showProblem("the file is larger than 200 KiB; a config.json has a few KiB");
    let config;
    try {
      config = JSON.parse(text);
    } catch (error) {
      return showProblem(`not valid JSON: ${error.message}`);
    }
    if (config === null || typeof config !== "object" || Array.isArray(config)) return showProblem("not a JSON object; a config.json holds one: {...}");
    change((next) => Object.assign(next, { config, preset: null, overrides: {} }));
    address(); // immediately, so that a reload does not lose the pasted config
  };
  byId("use-config").addEventListener("click", () => use(byId("config").value));
  const read = async (file) => {
    if (!file) return;
    if (file.size > MAX_BYTES) {
      showProblem("the file is larger than 200 KiB; a config.json has a few KiB");
      return;
    }
    byId("config").value = await file.text();
    use(byId("config").value);
  };
  byId("config-file").addEventListener("change", (event) => read(event.target.files[0]));
  document.addEventListener("dragover", (event) => event.preventDefault());
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    const file = event.dataTransfer.files[0];
    if (file) read(file);
    else if (event.dataTransfer.getData("text")) {
      byId("config").value = event.dataTransfer.getData("text");
      use(byId("config").value);
    }
  });
}
