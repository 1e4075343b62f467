// Write with the model that is served, see how sure it was of each token, and go on from another one.

import { Failure, events, get, post } from "./api.js";
import { element, fillSelect, percent } from "./elements.js";
import { BAND_WORDS, Paper, spelled } from "./paper.js";

const TOP = 5; // alternatives that are asked for
const NUMBERS = ["max_tokens", "temperature", "top_p", "min_p", "repetition_penalty", "seed"];

const INVITATION = "Choose a token of the text to see what else could have stood there, and go on from that.";
const NO_MODEL =
  "No model is served yet: quatrain serve RUN speaks from a run's newest checkpoint, and a run that has just begun has none.";

const BROKEN = "The connection broke before the text ended.";

const byId = (id) => document.getElementById(id);

export class Playground {
  constructor() {
    this.form = byId("playground-form");
    this.stop = byId("playground-stop");
    this.status = byId("playground-status");
    this.fault = byId("playground-error");
    this.paper = new Paper(byId("paper"), (place) => this.open(place));
    this.written = null; // the prompt, its ids once they are needed, and the settings of the text on the paper
    this.going = null; // what stops the request that runs
    this.opened = -1; // the token whose alternatives are shown
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.begin();
    });
    this.stop.addEventListener("click", () => this.going?.abort());
    byId("alternatives").addEventListener("keydown", (event) => event.key === "Escape" && this.close());
    byId("scale").replaceChildren(...BAND_WORDS.map((word, band) => element("span", { class: `band${band}` }, word)));
    const folded = byId("settings");
    folded.open = matchMedia("(min-width: 48rem)").matches;
    folded.addEventListener("invalid", () => (folded.open = true), true); // a field that is wrong must be seen
    this.close();
  }

  // List the models, each time the view is opened: a server may have been started anew.
  async show() {
    try {
      const models = new Map((await get("v1/models")).data.map((model) => [model.id, model.checkpoint]));
      const names = [...models.keys()];
      fillSelect(this.form.elements.model, names, (name) => [name, models.get(name)].filter(Boolean).join(", "));
      if (!names.length) this.status.textContent = NO_MODEL;
      else if (!this.written) this.status.textContent = "";
    } catch (error) {
      this.tell(error);
    }
  }

  async begin() {
    const turn = this.take();
    if (!this.form.elements.model.value) await this.show();
    this.written = { prompt: this.form.elements.prompt.value, ids: null, settings: settings(this.form) };
    this.paper.begin(this.written.prompt);
    this.close();
    await this.write(turn, this.written.prompt, this.written.settings.max_tokens);
  }

  // Keep the tokens before `place`, take another one there, and let the model go on.
  async goOn(place, alternative) {
    const turn = this.take();
    const { prompt, settings: given } = this.written;
    try {
      this.written.ids ??= await idsOf(prompt, given.model, turn.signal);
    } catch (error) {
      return this.end(turn, error);
    }
    if (turn !== this.going) return;
    const chosen = { ...this.paper.tokens[place], ...alternative, chosen: true };
    this.paper.cut(place);
    this.paper.add(chosen);
    this.close();
    this.paper.focus(place);
    const ids = [...this.written.ids, ...this.paper.tokens.map((token) => token.id)];
    await this.write(turn, ids, Math.max(0, given.max_tokens - this.paper.tokens.length));
  }

  // The turn of one request: what ran before is stopped, and none of its pieces may arrive any more.
  take() {
    this.going?.abort();
    this.going = new AbortController();
    this.fault.textContent = "";
    this.status.textContent = "reading …";
    this.setBusy(true);
    return this.going;
  }

  async write(turn, prompt, max_tokens) {
    const started = performance.now();
    let [count, reason] = [0, null];
    try {
      const body = { ...this.written.settings, prompt, max_tokens, stream: true, logprobs: TOP };
      for await (const event of events(await post("v1/completions", body, turn.signal))) {
        turn.signal.throwIfAborted(); // of what was read already nothing is wanted
        const choice = event.choices?.[0] ?? {};
        const tokens = tokensOf(choice);
        for (const token of tokens) this.paper.add(token);
        count += tokens.length;
        reason = choice.finish_reason ?? reason;
        this.status.textContent = progress(count, started);
      }
      this.status.textContent = `${progress(count, started)}; ${ENDED[reason] ?? "ended"}`;
      this.end(turn);
    } catch (error) {
      this.end(turn, error);
    }
  }

  end(turn, error = null) {
    if (turn !== this.going) return; // another request has begun, and the lines are its own
    this.going = null;
    this.setBusy(false);
    if (error) this.tell(error);
  }

  tell(error) {
    this.status.textContent = error.name === "AbortError" ? "stopped" : "";
    if (error.name !== "AbortError") this.fault.textContent = error instanceof Failure ? error.message : BROKEN;
  }

  setBusy(busy) {
    this.stop.disabled = !busy;
    this.paper.host.setAttribute("aria-busy", String(busy));
  }

  // Show what else could have stood at a place of the text.
  open(place) {
    const token = this.paper.tokens[place];
    this.opened = place;
    this.paper.mark(place);
    byId("alternatives-note").textContent =
      `In place of ${spelled(token.text)}; the model's own probabilities, before temperature and cuts. Choosing one goes on from there.`;
    const offers = withItself(token).map((one) => element("li", {}, offer(one, token, () => this.goOn(place, one))));
    byId("alternatives-list").replaceChildren(...offers);
    byId("alternatives-list").querySelector("button").focus();
  }

  close() {
    const place = this.opened;
    this.opened = -1;
    this.paper.mark(-1);
    byId("alternatives-note").textContent = INVITATION;
    byId("alternatives-list").replaceChildren();
    if (place >= 0) this.paper.focus(place);
  }
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
async function idsOf(prompt, model, signal) {
  const asked = { model, prompt, echo: true, max_tokens: 0, logprobs: 0 };
  const answer = await (await post("v1/completions", asked, signal)).json();
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
