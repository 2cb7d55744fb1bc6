// A config.json of one's own: pasted, chosen or dropped anywhere on the page. It is data, sent to this machine alone.
import { byId } from "./dom.js";
import { address, change } from "./state.js";

const LARGEST_BYTES = 200 * 1024;

export function makePaste() {
  const problem = byId("config-problem");
  const say = (text) => {
    problem.hidden = !text;
    problem.textContent = text;
    if (text) problem.closest("details").open = true;
  };
  const use = (text) => {
    say("");
    if (text.length > LARGEST_BYTES) return say("this is larger than 200 KiB; a config.json has a few");
    let config;
    try {
      config = JSON.parse(text);
    } catch (error) {
      return say(`this is not valid JSON: ${error.message}`);
    }
    if (config === null || typeof config !== "object" || Array.isArray(config)) return say("this is no JSON object; a config.json holds one: {...}");
    change((next) => Object.assign(next, { config, preset: null, overrides: {} }));
    address(); // at once: nobody types the config again because the page was reloaded a moment too soon
  };
  byId("use-config").addEventListener("click", () => use(byId("config").value));
  const read = async (file) => {
    if (!file) return;
    if (file.size > LARGEST_BYTES) {
      say("this is larger than 200 KiB; a config.json has a few");
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
