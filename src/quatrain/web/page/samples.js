// What a run wrote: the samples of its validations, and the reader's own prompt through its checkpoints.

import { Failure, get, objects, post } from "./api.js";
import { element, fillSelect, grouped } from "./elements.js";

export function samplesView(runs) {
  const shown = new Map(); // by name of the run: samples by step, and where the file is read on
  const form = document.getElementById("samples-form");
  const { run: select, place, step: told } = form.elements;
  let turn = Promise.resolve(); // two readers at once would read the same rows twice
  let follows = true; // the newest step, until the reader looks at another

  const written = () => shown.get(select.value)?.steps ?? new Map();

  function update() {
    turn = turn.catch(() => {}).then(next);
    return turn;
  }

  async function next() {
    const names = [...runs.keys()];
    fillSelect(select, names);
    fillSelect(document.getElementById("through-form").elements.run, names);
    if (!select.value) return draw();
    if (!shown.has(select.value)) shown.set(select.value, { steps: new Map(), next: 0, mark: "" });
    await readOn(select.value, shown.get(select.value));
    draw();
  }

  function draw() {
    const steps = [...written().keys()];
    place.max = Math.max(0, steps.length - 1);
    place.disabled = steps.length < 2;
    if (follows) place.value = place.max;
    const step = steps[Number(place.value)];
    told.value = step === undefined ? "–" : grouped(step);
    place.setAttribute("aria-valuetext", `step ${told.value}`);
    drawTexts(document.getElementById("samples"), written().get(step) ?? []);
  }

  select.addEventListener("change", () => {
    follows = true;
    update().catch(() => {}); // the next look at the runs says what is wrong
  });
  place.addEventListener("input", () => {
    follows = place.value === place.max;
    draw();
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  throughView();
  return { update };
}

async function readOn(name, kept) {
  for (;;) {
    const told = await get("api/rows", { run: name, file: "samples", after: kept.next, mark: kept.mark });
    if (told.start < kept.next) kept.steps.clear();
    for (const row of told.rows) {
      if (typeof row.text !== "string") continue;
      if (!kept.steps.has(row.step)) kept.steps.set(row.step, []);
      kept.steps.get(row.step).push(row);
    }
    [kept.next, kept.mark] = [told.next, told.mark];
    if (!told.more) return;
  }
}

function drawTexts(host, samples) {
  const key = JSON.stringify(samples);
  if (host.dataset.told === key) return;
  host.dataset.told = key;
  const none = element("p", { class: "note" }, "No samples were written; train.samples sets how many each validation draws.");
  host.replaceChildren(...(samples.length ? samples.map((sample) => text(sample.prompt ?? "", sample.text)) : [none]));
}

// A prompt, softly, and what a model made of it.
function text(prompt, continuation) {
  return element("blockquote", { dir: "auto" }, element("span", { class: "given" }, prompt), continuation);
}

function throughView() {
  const form = document.getElementById("through-form");
  const stop = document.getElementById("through-stop");
  const status = document.getElementById("through-status");
  const host = document.getElementById("through");
  let going = null;

  async function go() {
    const fields = Object.fromEntries(new FormData(form));
    const numbers = Object.fromEntries(["max_tokens", "temperature", "seed"].map((name) => [name, Number(fields[name])]));
    if (!fields.run) return void (status.textContent = "There is no run to ask yet.");
    going = new AbortController();
    let count = 0;
    setBusy(true);
    host.replaceChildren();
    status.textContent = "reading the first checkpoint …";
    try {
      const response = await post("api/through", { run: fields.run, prompt: fields.prompt, ...numbers }, going.signal);
      for await (const row of objects(response)) {
        if (row.done) break;
        if ("checkpoints" in row) count = row.checkpoints; // the first line
        else host.append(ofCheckpoint(row, fields.prompt));
        status.textContent = `${host.children.length} of ${count} checkpoints …`;
      }
      status.textContent = counted(host.children.length);
    } catch (error) {
      if (error.name === "AbortError") status.textContent = "stopped";
      else if (error instanceof Failure) status.textContent = error.message;
      else status.textContent = "The connection broke before the last checkpoint.";
    } finally {
      setBusy(false);
    }
  }

  function setBusy(busy) {
    stop.disabled = !busy;
    form.querySelector("[type=submit]").disabled = busy;
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    go();
  });
  stop.addEventListener("click", () => going?.abort());
}

function counted(checkpoints) {
  if (!checkpoints) return "This run has no checkpoint yet.";
  return checkpoints === 1 ? "The only checkpoint" : `${checkpoints} checkpoints, oldest first`;
}

function ofCheckpoint(row, prompt) {
  const heading = element("h3", {}, `step ${grouped(row.step)}`);
  const said = row.error ? element("p", { class: "error" }, row.error) : text(prompt, row.text);
  return element("div", {}, heading, said);
}
