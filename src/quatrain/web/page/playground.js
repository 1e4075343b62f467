// Write with the model that is served, see how sure it was of each token, and go on from another one.

import { Failure, events, get, post } from "./api.js";
import { element, fillSelect, percent } from "./elements.js";

const TOP = 5; // alternatives that are asked for
const BANDS = [0.8, 0.5, 0.2, 0.05, 0]; // lower borders of the five colours
const BAND_WORDS = ["80 % and more", "50 – 80 %", "20 – 50 %", "5 – 20 %", "below 5 %"];
const NUMBERS = ["max_tokens", "temperature", "top_p", "min_p", "repetition_penalty", "seed"];

export function playgroundView() {
  const form = document.getElementById("playground-form");
  const stop = document.getElementById("playground-stop");
  const status = document.getElementById("playground-status");
  const fault = document.getElementById("playground-error");
  const paper = new Paper(document.getElementById("paper"), (place) => showAlternatives(place, true));
  let written = null; // the prompt, its ids once they are needed, and the settings of the text on the paper
  let going = null; // what stops the request that runs
  let opened = -1; // the token whose alternatives are shown

  async function listModels() {
    try {
      const models = Object.fromEntries((await get("v1/models")).data.map((model) => [model.id, model.checkpoint]));
      const names = Object.keys(models);
      fillSelect(form.elements.model, names, (name) => [name, models[name]].filter(Boolean).join(", "));
      if (!names.length) status.textContent = "No model is served yet: quatrain serve RUN speaks from a run's newest checkpoint, and a run that has just begun has none.";
      else if (!written) status.textContent = "";
      return names.length > 0;
    } catch (error) {
      if (!(error instanceof Failure)) throw error;
      fault.textContent = error.message;
      return false;
    }
  }

  async function begin() {
    if (!form.elements.model.value) await listModels();
    written = { prompt: form.elements.prompt.value, ids: null, settings: settings(form) };
    paper.begin(written.prompt);
    showAlternatives(-1);
    await write(written.prompt, written.settings.max_tokens);
  }

  // Keep the tokens before `place`, take another one there, and let the model go on.
  async function goOn(place, alternative) {
    halt();
    fault.textContent = "";
    const { settings: with_ } = written;
    try {
      written.ids ??= await idsOf(written.prompt, with_.model);
    } catch (error) {
      return tell(error);
    }
    const chosen = { ...paper.tokens[place], ...alternative, chosen: true };
    paper.cut(place);
    paper.add(chosen);
    showAlternatives(-1);
    paper.focus(place);
    const ids = [...written.ids, ...paper.tokens.map((token) => token.id)];
    await write(ids, Math.max(0, with_.max_tokens - paper.tokens.length));
  }

  async function write(prompt, max_tokens) {
    halt();
    going = new AbortController();
    const mine = going;
    const started = performance.now();
    const before = paper.tokens.length;
    let reason = null;
    fault.textContent = "";
    setBusy(true);
    try {
      const body = { ...written.settings, prompt, max_tokens, stream: true, logprobs: TOP };
      for await (const event of events(await post("v1/completions", body, mine.signal))) {
        if (mine.signal.aborted) throw new DOMException("", "AbortError"); // what was read already is not wanted
        const choice = event.choices?.[0];
        if (!choice) continue;
        for (const token of tokensOf(choice)) paper.add(token);
        reason = choice.finish_reason ?? reason;
        status.textContent = progress(paper.tokens.length - before, started);
      }
      status.textContent = `${progress(paper.tokens.length - before, started)}; ${ENDED[reason] ?? "ended"}`;
    } catch (error) {
      if (going === mine) tell(error); // else another request has begun, and the line is its own
    } finally {
      if (going === mine) {
        going = null;
        setBusy(false);
      }
    }
  }

  function tell(error) {
    if (error.name === "AbortError") status.textContent = "stopped";
    else fault.textContent = error instanceof Failure ? error.message : "The connection broke before the text ended.";
  }

  // Stop what runs; its last pieces must not arrive behind what is asked for next.
  function halt() {
    going?.abort();
    going = null;
  }

  function setBusy(busy) {
    stop.disabled = !busy;
    paper.host.setAttribute("aria-busy", String(busy));
  }

  function showAlternatives(place, moveFocus = false) {
    opened = place;
    const token = paper.tokens[place];
    const list = document.getElementById("alternatives-list");
    const note = document.getElementById("alternatives-note");
    paper.mark(place);
    if (!token) {
      note.textContent = "Choose a token of the text to see what else could have stood there, and go on from that.";
      return list.replaceChildren();
    }
    note.textContent = `In place of ${spelled(token.text)}; the model's own probabilities, before temperature and cuts. Choosing one goes on from there.`;
    list.replaceChildren(...withItself(token).map((one) => element("li", {}, offer(one, token, () => goOn(place, one)))));
    if (moveFocus) list.querySelector("button")?.focus();
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    begin();
  });
  stop.addEventListener("click", () => going?.abort());
  document.getElementById("alternatives").addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || opened < 0) return;
    const place = opened;
    showAlternatives(-1);
    paper.focus(place);
  });
  const folded = document.getElementById("settings");
  folded.open = matchMedia("(min-width: 48rem)").matches;
  folded.addEventListener("invalid", () => (folded.open = true), true); // a field that is wrong must be seen
  document.getElementById("scale").replaceChildren(...BAND_WORDS.map((word, band) => element("span", { class: `band${band}` }, word)));

  return { show: listModels };
}

const PART = /^bytes:(\\x[0-9a-f]{2})+$/; // how the server spells a token that is no whole characters

// What a token is in UTF-8.
function bytesOf(text) {
  if (!PART.test(text)) return new TextEncoder().encode(text);
  return Uint8Array.from(text.match(/[0-9a-f]{2}(?=\\|$)/g), (byte) => parseInt(byte, 16));
}

const ENDED = { stop: "it ended by itself, or at a stop text", length: "it reached max tokens or the model's length" };

function progress(count, started) {
  const rate = count / ((performance.now() - started) / 1000);
  return `${count} tokens${count > 1 ? `, ${rate.toFixed(rate < 10 ? 1 : 0)} a second` : ""}`;
}

function settings(form) {
  const fields = form.elements;
  const told = { model: fields.model.value };
  for (const name of NUMBERS) told[name] = Number(fields[name].value);
  if (fields.top_k.value) told.top_k = Number(fields.top_k.value);
  const stops = fields.stop.value.split("\n").filter((text) => text);
  if (stops.length) told.stop = stops;
  return told;
}

// The ids of a prompt, as the server's tokenizer gives them.
async function idsOf(prompt, model) {
  const answer = await (await post("v1/completions", { model, prompt, echo: true, max_tokens: 0, logprobs: 0 })).json();
  return answer.choices[0].logprobs.token_ids;
}

function tokensOf({ logprobs }) {
  return (logprobs?.token_ids ?? []).map((id, place) => ({
    id,
    text: logprobs.tokens[place],
    logprob: logprobs.token_logprobs[place],
    top: logprobs.top?.[place] ?? [],
  }));
}

// The likeliest tokens of a place, and the one that stands there even where it is none of them.
function withItself({ id, text, logprob, top }) {
  return top.some((one) => one.id === id) ? top : [...top, { id, text, logprob }];
}

function offer(one, token, choose) {
  const here = one.id === token.id;
  const bar = element("span", { class: "share", "aria-hidden": "true" });
  bar.style.setProperty("--share", Math.exp(one.logprob)); // by the CSSOM, which the policy allows
  const words = [element("code", {}, spelled(one.text)), bar, element("span", { class: "number" }, percent(Math.exp(one.logprob)))];
  return element("button", { type: "button", "aria-current": here && "true", onclick: choose }, ...words);
}

// A token as it can be seen: spaces, line ends and parts of characters too.
function spelled(text) {
  if (PART.test(text)) return text.replace(":", "").replaceAll("\\x", " ");
  return `“${text.replaceAll("\n", "↵").replaceAll("\t", "⇥")}”`;
}

const bandOf = (logprob) => BANDS.findIndex((border) => Math.exp(logprob) >= border);

// The text: one button for each token, of which the tab key reaches one and the arrow keys all.
class Paper {
  constructor(host, open) {
    this.host = host;
    this.tokens = [];
    this.buttons = [];
    host.addEventListener("click", ({ target }) => this.buttons.includes(target) && open(this.buttons.indexOf(target)));
    host.addEventListener("keydown", (event) => this.key(event, open));
  }

  begin(prompt) {
    this.tokens = [];
    this.buttons = [];
    this.characters = new TextDecoder();
    this.host.replaceChildren(element("span", { class: "given" }, prompt));
  }

  add(token) {
    const told = `${spelled(token.text)}, ${percent(Math.exp(token.logprob))}${token.chosen ? ", chosen by you" : ""}`;
    const kind = `token band${bandOf(token.logprob)}${token.chosen ? " chosen" : ""}`;
    const first = this.buttons.length === 0;
    const made = element("span", { class: kind, role: "button", tabindex: first ? "0" : "-1", title: told, "aria-label": told });
    made.textContent = this.characters.decode(bytesOf(token.text), { stream: true }) || "·"; // the rest comes with a later token
    this.tokens.push(token);
    this.buttons.push(made);
    this.host.append(made);
  }

  cut(place) {
    for (const button of this.buttons.splice(place)) button.remove();
    this.tokens.splice(place);
    this.characters = new TextDecoder(); // in the state in which the tokens that stay leave it
    for (const { text } of this.tokens) this.characters.decode(bytesOf(text), { stream: true });
  }

  mark(place) {
    this.buttons.forEach((button, index) => button.classList.toggle("open", index === place));
  }

  focus(place) {
    if (!this.buttons[place]) return;
    this.buttons.forEach((button, index) => (button.tabIndex = index === place ? 0 : -1));
    this.buttons[place].focus();
  }

  key(event, open) {
    const here = this.buttons.indexOf(event.target);
    if (here < 0) return;
    const last = this.buttons.length - 1;
    const next = { ArrowRight: here + 1, ArrowLeft: here - 1, Home: 0, End: last }[event.key];
    if (event.key === "Enter" || event.key === " ") open(here);
    else if (next === undefined) return;
    else this.focus(Math.min(last, Math.max(0, next)));
    event.preventDefault();
  }
}
