// Elements from words: text goes in as text, so nothing that a model or a corpus says can become markup.

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    if (name === "onclick") made.addEventListener("click", value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

export function cells(tag, values, attributes = {}) {
  return element("tr", {}, ...values.map((value) => element(tag, attributes, value)));
}

// The options of a select, and its choice kept where it is still there.
export function fillSelect(select, values, spelled = (value) => value) {
  const told = values.join("\n");
  if (select.dataset.told === told) return;
  const chosen = select.value;
  select.replaceChildren(...values.map((value) => element("option", { value }, spelled(value))));
  if (values.includes(chosen)) select.value = chosen;
  select.dataset.told = told;
}

const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 });
const whole = new Intl.NumberFormat("en");

export const short = (value) => compact.format(value);
export const grouped = (value) => whole.format(value);

export function decimals(value, digits = 4) {
  return value === null || value === undefined ? "–" : value.toFixed(digits);
}

// 4 significant digits, as powers of ten where the number is far from one.
export function significant(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return String(Number(value.toExponential(2)).toExponential()).replace("e+", "e");
  return size >= 1000 ? grouped(Math.round(value)) : String(Number(value.toPrecision(4)));
}

export const exactPercent = (share) => `${Number((100 * share).toPrecision(4))} %`;

export function percent(share) {
  const value = 100 * share;
  return `${value >= 10 ? value.toFixed(0) : value >= 0.1 ? value.toFixed(1) : value.toPrecision(1)} %`;
}

export function duration(seconds) {
  const total = Math.round(seconds);
  const [hours, minutes, rest] = [Math.floor(total / 3600), Math.floor(total / 60) % 60, total % 60];
  const two = (value) => String(value).padStart(2, "0");
  return hours ? `${hours}:${two(minutes)}:${two(rest)}` : `${minutes}:${two(rest)}`;
}
