// What the page asks of its own server, and how answers that come in pieces are read.

export class Failure extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

const SILENT = "The server does not answer. Is quatrain still running?";

async function ask(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure(SILENT);
  }
  if (response.ok) return response;
  throw new Failure(await sentence(response), response.status);
}

async function sentence(response) {
  try {
    const { error } = await response.json();
    return typeof error === "string" ? error : error.message;
  } catch {
    return `The server answered with status ${response.status} and no sentence.`;
  }
}

export async function get(path, query = {}) {
  const words = new URLSearchParams(query).toString();
  return (await ask(words ? `${path}?${words}` : path)).json();
}

export function post(path, body, signal) {
  const headers = { "content-type": "application/json" };
  return ask(path, { method: "POST", headers, body: JSON.stringify(body), signal });
}

async function* lines(response) {
  const decoder = new TextDecoder();
  let rest = "";
  const reader = response.body.getReader();
  for (;;) {
    const { done, value } = await reader.read();
    rest += done ? decoder.decode() : decoder.decode(value, { stream: true });
    const whole = rest.split("\n");
    rest = done ? "" : whole.pop();
    yield* whole;
    if (done) return;
  }
}

// One JSON object a line.
export async function* objects(response) {
  for await (const line of lines(response)) if (line.trim()) yield JSON.parse(line);
}

// Server-sent events of the completions API, up to its [DONE].
export async function* events(response) {
  for await (const line of lines(response)) {
    if (!line.startsWith("data:")) continue;
    const data = line.slice(5).trim();
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new Failure(event.error.message ?? String(event.error));
    yield event;
  }
}
