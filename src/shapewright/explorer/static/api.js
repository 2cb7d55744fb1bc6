// The JSON API. Every error is a Problem whose message is the command line's one line.

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
    throw new Problem(0, "Offline", "the server does not answer; is 'shapewright serve' still running?");
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
 * A view's line to the server: one request at a time, and of those that wait only the newest.
 * A slider that moves faster than answers come skips positions instead of queueing them.
 */
export function line(work) {
  let busy = false;
  let waiting = null;
  return async function ask(...what) {
    if (busy) {
      waiting = what;
      return;
    }
    busy = true;
    try {
      await work(...what);
    } finally {
      busy = false;
      if (waiting) {
        const next = waiting;
        waiting = null;
        ask(...next);
      }
    }
  };
}
