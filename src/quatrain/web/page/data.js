// The view of a run's token store: its facts, and windows as the model sees them.

import { Failure, get } from "./api.js";
import { cells, element, fillSelect, grouped, percent } from "./elements.js";

const SPLITS = ["train", "val"];

export function dataView() {
  const select = document.getElementById("data-form").elements.run;
  const status = document.getElementById("data-status");
  const host = document.getElementById("data");
  let shown = null; // the run whose store is on the page

  async function show() {
    try {
      const names = (await get("api/runs")).runs.map((run) => run.name);
      fillSelect(select, names);
      if (!names.length) status.textContent = "No run was given to this server, so there is no store to look into.";
      else if (shown !== select.value) await load(select.value);
    } catch (error) {
      tell(error);
    }
  }

  async function load(run) {
    status.textContent = "counting …";
    host.replaceChildren();
    const facts = await get("api/store", { run });
    if (run !== select.value) return; // another was chosen meanwhile
    shown = run;
    status.textContent = "";
    host.replaceChildren(...storeParts(facts, run));
  }

  function tell(error) {
    if (!(error instanceof Failure)) throw error;
    shown = null;
    status.textContent = error.message;
  }

  select.addEventListener("change", () => load(select.value).catch(tell));
  return { show };
}

function storeParts(facts, run) {
  return [
    element("h2", { class: "store" }, facts.name),
    figures(facts),
    element("div", { class: "pair" }, splits(facts), remarks(facts)),
    windows(facts, run),
    element("div", { class: "pair" }, lengths(facts), frequent(facts)),
    element("p", { class: "note" }, "fingerprint ", element("code", {}, facts.fingerprint)),
  ];
}

const perToken = (value) => (value === null ? "–" : value.toFixed(3));
const size = (value) => (value === null ? "unknown" : grouped(value));

function figures({ tokenizer, documents, tokens, bytes_per_token: ratio }) {
  const told = {
    documents: grouped(documents),
    "ids, every eot counted": grouped(tokens),
    "bytes of text an id": perToken(ratio),
    [`tokenizer, ${grouped(tokenizer.vocab_size)} ids`]: tokenizer.name,
  };
  return element("dl", { class: "figures" }, ...Object.entries(told).map(([word, number]) => element("div", {}, element("dt", {}, word), element("dd", {}, number))));
}

function part(title, ...children) {
  return element("section", {}, element("h2", {}, title), ...children);
}

// A table that scrolls by itself, by keyboard too, where the screen is narrower.
function table(caption, columns, rows) {
  const made = element(
    "table",
    {},
    element("caption", {}, caption),
    element("thead", {}, cells("th", columns, { scope: "col" })),
    element("tbody", {}, ...rows.map(([first, ...others]) => element("tr", {}, element("th", { scope: "row" }, first), ...others.map((other) => element("td", {}, other))))),
  );
  return element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, made);
}

function splits(facts) {
  const rows = SPLITS.map((name) => {
    const split = facts.splits[name];
    return [name, grouped(split.documents), grouped(split.tokens), size(split.bytes), perToken(split.bytes_per_token)];
  });
  const padded = SPLITS.map((name) => [name, percent(facts.splits[name].padding), percent(facts.splits[name].best_fit), "0 %"]);
  return part(
    "Splits",
    table("ids count every eot, bytes an id does not", ["split", "documents", "ids", "bytes of text", "bytes an id"], rows),
    table(`positions wasted in rows of ${grouped(facts.seq_len)} ids`, ["split", "padded", "best fit", "packed"], padded),
  );
}

function remarks(facts) {
  const out = facts.left_out.map(([reason, count]) => [reason, grouped(count)]);
  const told = out.length ? table("documents that are not in the store", ["reason", "documents"], out) : element("p", {}, "No document was left out.");
  return part("Left out, and why", told, element("ul", {}, ...facts.remarks.map((remark) => element("li", {}, remark))));
}

function lengths(facts) {
  const words = Object.keys(facts.splits.train.quantiles);
  const rows = SPLITS.map((name) => {
    const split = facts.splits[name];
    return [name, split.mean.toFixed(1), ...words.map((word) => grouped(split.quantiles[word]))];
  });
  const columns = ["split", "mean", ...words.map((word) => word.replace("percentile_", "p"))];
  const counts = facts.splits.train.histogram.map((bin, place) => [bin.label, grouped(bin.documents), grouped(facts.splits.val.histogram[place].documents)]);
  return part(
    "Document lengths",
    histogram(facts),
    table("ids of text in a document, its eot not counted", columns, rows),
    element("details", {}, element("summary", {}, "The bars as numbers"), table("documents by length in ids", ["ids", ...SPLITS], counts)),
  );
}

function histogram(facts) {
  const shares = (name) => facts.splits[name].histogram.map((bin) => bin.documents / Math.max(1, facts.splits[name].documents));
  const [train, val] = SPLITS.map(shares);
  const most = Math.max(...train, ...val) || 1;
  const bars = train.map((share, place) => {
    const label = facts.splits.train.histogram[place].label;
    const pair = [share, val[place]].map((one, split) => {
      const bar = element("span", { class: `bar run${split}` });
      bar.style.height = `${(100 * one) / most}%`; // by the CSSOM, which the policy allows
      return bar;
    });
    return element("div", { class: "place", title: `${label} ids: ${percent(share)} of train, ${percent(val[place])} of val` }, ...pair);
  });
  const first = facts.splits.train.histogram[0]?.label ?? "";
  const last = facts.splits.train.histogram.at(-1)?.label ?? "";
  const keys = SPLITS.map((name, split) => element("span", {}, element("span", { class: `key run${split}`, "aria-hidden": "true" }), name));
  return element(
    "figure",
    { class: "histogram" },
    element("div", { class: "bars", role: "img", "aria-label": "Histogram of document lengths; its numbers stand in the table below" }, ...bars),
    element("p", { class: "ends" }, element("span", {}, first), element("span", {}, last)),
    element("figcaption", {}, "share of each split's documents by length in ids ", ...keys),
  );
}

function frequent(facts) {
  const rows = facts.frequent.map(({ id, text, share }) => [element("code", {}, text), String(id), percent(share)]);
  return part("Most frequent targets", table("ids of train", ["text", "id", "share"], rows));
}

function windows(facts, run) {
  const status = element("p", { class: "status", role: "status" });
  const text = element("div", { class: "window", tabindex: "0", role: "region", "aria-label": "Window", dir: "auto" });
  const choice = element("select", {}, ...SPLITS.map((name) => element("option", { value: name }, name)));
  const another = element("button", { type: "button" }, "Another window");
  let number = 0;

  async function load() {
    try {
      const window = await get("api/window", { run, split: choice.value, number });
      status.textContent = `${window.split}, ids ${grouped(window.start)} to ${grouped(window.start + window.ids - 1)}`;
      text.classList.toggle("short", window.ids <= 256);
      text.replaceChildren(...window.parts.flatMap((one) => documentPart(one, window.documents)));
    } catch (error) {
      if (!(error instanceof Failure)) throw error;
      status.textContent = error.message;
      text.replaceChildren();
    }
  }

  another.addEventListener("click", () => {
    number += 1;
    load();
  });
  choice.addEventListener("change", () => {
    number = 0;
    load();
  });
  load();
  const bar = element("div", { class: "bar" }, element("label", {}, "split ", choice), another, status);
  return part("Windows, as the model sees them", bar, text);
}

function documentPart({ begins, document: number, text }, documents) {
  const border = element("p", { class: "border" }, `document ${grouped(number)} of ${grouped(documents)} begins`);
  return begins ? [border, element("p", { class: "text", dir: "auto" }, text)] : [element("p", { class: "text", dir: "auto" }, text)];
}
