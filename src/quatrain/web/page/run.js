// The view of runs: their numbers and curves, kept up to date while they are written.

import { Failure, get } from "./api.js";
import { decimals, duration, element, exactPercent, grouped, percent, short, significant } from "./elements.js";
import { Chart } from "./plots.js";
import { samplesView } from "./samples.js";
import { History, points } from "./series.js";

const EVERY = 2000; // milliseconds between two looks at runs that go on
const RARELY = 10000; // and where all have ended
const NEAR = 1.7; // nats above GPT-2's loss up to which its line is shown unasked
const GPT2_VOCAB = 50257;
const REFERENCES = {
  val_loss: [
    { label: "GPT-2 124M: 3.292", value: 3.292 },
    { label: "H100 reproduction: 2.99", value: 2.99 },
  ],
  "task hellaswag raw_mean": [
    { label: "GPT-2 124M: 29.55 %", value: 0.2955 },
    { label: "H100 reproduction: 31.71 %", value: 0.3171 },
  ],
};
const ABOUT_REFERENCES =
  "Dashed: GPT-2 124M (OpenAI's weights) on FineWeb-Edu's validation split, 3.292, and on HellaSwag, 29.55 %; " +
  "the H100 reproduction of it, 2.99 and 31.71 %. The losses were measured on another validation set than this run's, " +
  "so they are a direction, not a comparison.";

// Charts in their order; `from` are the lines of a history that one draws, the first is smoothed.
const CHARTS = [
  { name: "loss", title: "Loss", unit: "nats a token; thick with points: validation", from: ["loss", "val_loss"], tall: true, falls: true },
  { name: "bits", title: "Bits per byte", unit: "of validation text", from: ["bits_per_byte"], falls: true },
  { name: "lr", title: "Learning rate", from: ["lr"] },
  { name: "grad_norm", title: "Gradient norm", unit: "before clipping", from: ["grad_norm"], falls: true },
  { name: "tokens_per_second", title: "Tokens per second", from: ["tokens_per_second"], spelled: short },
  { name: "mfu", title: "MFU", unit: "of the device's peak", from: ["mfu"], spelled: exactPercent },
];
const SMOOTHED = new Set(["loss", "grad_norm", "tokens_per_second", "mfu"]);
const MEASURED_SELDOM = (name) => name === "val_loss" || name === "bits_per_byte" || name.startsWith("task ");

export function runView() {
  const runs = new Map(); // by name: facts, history, where its file is read on, whether it is drawn
  const charts = new Map();
  const axes = document.getElementById("axes");
  const status = document.getElementById("run-status");
  const texts = samplesView(runs);
  let timer = null;
  let looking = false; // two looks at once would read the same rows twice
  let open = false;
  let asked = false; // whether the reader set the box of the reference lines

  async function look() {
    clearTimeout(timer);
    if (looking) return;
    looking = true;
    try {
      await update();
    } catch (error) {
      if (!(error instanceof Failure)) throw error;
      status.textContent = error.message;
    } finally {
      looking = false;
      const goesOn = [...runs.values()].some((run) => !ended(run));
      // A page that nobody sees asks for nothing.
      if (open && !document.hidden) timer = setTimeout(look, goesOn ? EVERY : RARELY);
    }
  }

  async function update() {
    for (const facts of (await get("api/runs")).runs) {
      if (!runs.has(facts.name)) runs.set(facts.name, newRun(runs.size));
      runs.get(facts.name).facts = facts;
    }
    let changed = false;
    for (const [name, run] of runs) changed = (await readOn(name, run)) || changed;
    status.textContent = said(runs);
    if (changed) draw();
    await texts.update();
  }

  function draw() {
    drawTable(runs, draw);
    if (!asked) axes.elements.references.checked = [...runs.values()].some(nearGpt2);
    const how = settings(axes);
    document.getElementById("references").hidden = !how.references;
    document.getElementById("references").textContent = ABOUT_REFERENCES;
    const shown = wanted(runs);
    for (const chart of shown) {
      if (!charts.has(chart.name)) {
        charts.set(chart.name, new Chart(chart.title, chart));
        document.getElementById("charts").append(charts.get(chart.name).root);
      }
      charts.get(chart.name).draw(linesOf(runs, chart, how), {
        x: how.x,
        logX: how.logX,
        logY: how.logY,
        references: how.references ? chart.from.flatMap((name) => REFERENCES[name] ?? []) : [],
      });
    }
    const gone = [...charts.keys()].filter((name) => !shown.some((chart) => chart.name === name)); // a resume cut its rows
    for (const name of gone) charts.get(name).draw([], { ...how, references: [] });
  }

  axes.addEventListener("change", (event) => {
    if (event.target.name === "references") asked = true;
    draw();
  });
  axes.addEventListener("submit", (event) => event.preventDefault());
  document.addEventListener("themechange", draw);
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden && open) look();
  });

  return {
    show() {
      open = true;
      look();
    },
    hide() {
      open = false;
      clearTimeout(timer);
    },
  };
}

const newRun = (number) => ({ number, facts: null, history: new History(), next: 0, mark: "", drawn: true });

const ended = (run) => (run.history.last?.step ?? 0) >= (run.facts?.steps ?? Infinity);

function nearGpt2({ facts, history }) {
  const loss = history.lastValidation?.val_loss;
  return facts.vocab_size === GPT2_VOCAB && loss !== undefined && loss < REFERENCES.val_loss[0].value + NEAR;
}

function said(runs) {
  if (!runs.size) return "No run was given to this server. quatrain serve RUN shows one, quatrain train --serve the one that goes on.";
  const empty = [...runs].filter(([, run]) => !run.history.last && !run.history.lastValidation).map(([name]) => name);
  return empty.length ? `Nothing is measured yet in ${empty.join(", ")}; this page looks again by itself.` : "";
}

// Read what a run has measured since; whether there was anything.
async function readOn(name, run) {
  let changed = false;
  for (;;) {
    const told = await get("api/rows", { run: name, file: "metrics", after: run.next, mark: run.mark });
    if (told.start < run.next) {
      run.history.clear(); // the run went on from an earlier checkpoint, and its file was cut
      changed = true;
    }
    run.history.add(told.rows);
    changed ||= told.rows.length > 0;
    [run.next, run.mark] = [told.next, told.mark];
    if (!told.more) return changed;
  }
}

function settings(form) {
  const { x, smoothing, logX, logY, references } = form.elements;
  return {
    x: x.value,
    smoothing: Number(smoothing.value),
    logX: logX.checked,
    logY: logY.checked,
    references: references.checked,
  };
}

// The charts for which any run has numbers: those above, and one for each score of a task.
function wanted(runs) {
  const names = new Set([...runs.values()].flatMap((run) => [...run.history.lines.keys()]));
  const known = [...runs.values()].some((run) => run.facts.bytes_per_token);
  const tasks = [...names].filter((name) => name.startsWith("task "));
  const shown = CHARTS.filter((chart) => (chart.name === "bits" ? known && names.has("val_loss") : chart.from.some((name) => names.has(name))));
  return [...shown, ...tasks.map((name) => ofTask(name, runs))];
}

function ofTask(name, runs) {
  const values = [...runs.values()].flatMap((run) => run.history.lines.get(name)?.y ?? []);
  const spelled = values.every((value) => value >= 0 && value <= 1) ? exactPercent : significant; // a perplexity is above 1
  return { name, title: name.slice(5).replaceAll("_", " "), from: [name], spelled };
}

function linesOf(runs, chart, how) {
  const found = [];
  for (const [name, run] of runs) {
    if (!run.drawn || (how.x === "flops" && !run.facts.flops_per_token)) continue;
    for (const from of chart.from) {
      const line = lineOf(run, from);
      if (!line) continue;
      const span = SMOOTHED.has(from) ? how.smoothing : 0;
      const placed = (smoothing) => points(line, how.x, run.facts.flops_per_token, smoothing, how.logX, how.logY);
      const label = from === "val_loss" ? `${name} validation` : name;
      const shared = { run: name, number: run.number, name: label };
      if (span) found.push({ ...shared, ...placed(0), faint: true });
      found.push({ ...shared, ...placed(span), points: MEASURED_SELDOM(from) });
    }
  }
  return found;
}

function lineOf({ facts, history }, name) {
  if (name !== "bits_per_byte") return history.lines.get(name);
  const losses = history.lines.get("val_loss");
  return losses && facts.bytes_per_token && { at: losses.at, y: losses.y.map((loss) => bits(loss, facts)) };
}

const bits = (loss, facts) => loss / Math.LN2 / facts.bytes_per_token;

const COLUMNS = ["run", "step", "tokens", "time", "loss", "validation", "bits per byte", "learning rate", "gradient norm", "tokens/s", "MFU"];

function drawTable(runs, redraw) {
  const table = document.getElementById("latest");
  const head = element("tr", {}, ...COLUMNS.map((column) => element("th", { scope: "col" }, column)));
  table.tHead.replaceChildren(head);
  const body = table.tBodies[0];
  for (const [name, run] of runs) {
    run.row ??= body.appendChild(element("tr", {}, legend(name, run, redraw)));
    run.row.replaceChildren(run.row.firstChild, ...numbers(run).map((number) => element("td", {}, number)));
  }
}

// The box that shows or hides a run's curves: it keeps its focus, so it is made once.
function legend(name, run, redraw) {
  const box = element("input", { type: "checkbox", checked: true });
  box.addEventListener("change", () => {
    run.drawn = box.checked;
    redraw();
  });
  const key = element("span", { class: `key run${run.number % 8}`, "aria-hidden": "true" });
  return element("th", { scope: "row" }, element("label", { class: "check" }, box, key, name));
}

function numbers({ facts, history }) {
  const [row, validated] = [history.last, history.lastValidation];
  const latest = row ?? validated;
  if (!latest) return COLUMNS.slice(1).map(() => "–");
  const of = facts.steps ? ` of ${grouped(facts.steps)}` : "";
  return [
    `${grouped(latest.step)}${of}`,
    grouped(latest.tokens),
    duration(latest.seconds ?? 0),
    decimals(row?.loss),
    decimals(validated?.val_loss),
    validated && facts.bytes_per_token ? decimals(bits(validated.val_loss, facts)) : "–",
    significant(row?.lr),
    significant(row?.grad_norm),
    row?.tokens_per_second ? grouped(Math.round(row.tokens_per_second)) : "–",
    row?.mfu === null || row?.mfu === undefined ? "–" : percent(row.mfu),
  ];
}
