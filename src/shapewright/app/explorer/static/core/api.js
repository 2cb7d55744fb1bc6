// Client of the JSON API. Every error is a Problem with the same one-line message as on the command line.

export class Problem extends Error {
  constructor(status, title, detail) {
    super(detail);
    this.status = status;
    this.title = title;
  }
}

async function send(method, path, body) {
  let answer;
  try {
    answer = await fetch(`/api/v1${path}`, {
      method,
      headers: body === undefined ? {} : { "Content-Type": "application/json" },
      body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch {
    throw new Problem(0, "Offline", "no answer from the server; is 'shapewright serve' still running?");
  }
  if (!answer.ok) {
    const problem = await answer.json().catch(() => ({ title: "Error", detail: `the server answered ${answer.status}` }));
    throw new Problem(answer.status, problem.title, problem.detail);
  }
  return answer;
}

export const get = async (path) => (await send("GET", path)).json();
export const post = async (path, body) => (await send("POST", path, body)).json();
export const postText = async (path, body) => (await send("POST", path, body)).text();
export const remove = async (path) => (await send("DELETE", path)).json();

/**
 * Make a function that runs one request at a time and, of the calls that arrive meanwhile, only the latest.
 * Positions of a fast slider are skipped instead of queued.
 */
export function latestOnly(work) {
  let busy = false;
  let waiting = null;
  return async function run(...args) {
    if (busy) {
      waiting = args;
      return;
    }
    busy = true;
    try {
      await work(...args);
    } finally {
      busy = false;
      if (waiting) {
        const next = waiting;
        waiting = null;
        run(...next);
      }
    }
  };
}
