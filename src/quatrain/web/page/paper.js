// The text of the playground: tokens on grounds that say how probable each was.

import { element, percent } from "./elements.js";

const BANDS = [0.8, 0.5, 0.2, 0.05, 0]; // lower borders of the five grounds
export const BAND_WORDS = ["80 % and more", "50 – 80 %", "20 – 50 %", "5 – 20 %", "below 5 %"];
const PART = /^bytes:(\\x[0-9a-f]{2})+$/; // how the server spells a token that is no whole characters

// What a token is in UTF-8.
function bytesOf(text) {
  if (!PART.test(text)) return new TextEncoder().encode(text);
  return Uint8Array.from(text.match(/[0-9a-f]{2}(?=\\|$)/g), (byte) => parseInt(byte, 16));
}

// A token as it can be seen: spaces, line ends and parts of characters too.
export function spelled(text) {
  if (PART.test(text)) return text.replace(":", "").replaceAll("\\x", " ");
  return `“${text.replaceAll("\n", "↵").replaceAll("\t", "⇥")}”`;
}

const bandOf = (logprob) => BANDS.findIndex((border) => Math.exp(logprob) >= border);

// The text: one button for each token, of which the tab key reaches one and the arrow keys all.
export class Paper {
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
