// Three views behind tabs; the address says which one is open.

import { dataView } from "./data.js";
import { Playground } from "./playground.js";
import { runView } from "./run.js";
import { themeButton } from "./theme.js";

const views = { run: runView(), playground: new Playground(), data: dataView() };
const names = Object.keys(views);
const tab = (name) => document.getElementById(`tab-${name}`);

function open() {
  const asked = location.hash.slice(1);
  const chosen = names.includes(asked) ? asked : names[0];
  for (const name of names) {
    const selected = name === chosen;
    tab(name).setAttribute("aria-selected", String(selected));
    tab(name).tabIndex = selected ? 0 : -1;
    document.getElementById(`panel-${name}`).hidden = !selected;
    if (!selected) views[name].hide?.();
  }
  document.title = `${tab(chosen).textContent} – quatrain`;
  views[chosen].show();
}

const STEPS = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };

function move(event) {
  const here = names.findIndex((name) => tab(name) === event.target);
  let next;
  if (event.key in STEPS) next = names.at((here + STEPS[event.key]) % names.length);
  else if (event.key === "Home") next = names[0];
  else if (event.key === "End") next = names.at(-1);
  else if (event.key === " ") next = names[here];
  else return;
  event.preventDefault();
  location.hash = next;
  tab(next).focus();
}

document.querySelector("[role=tablist]").addEventListener("keydown", move);
addEventListener("hashchange", open);
themeButton(document.getElementById("theme"));
open();
