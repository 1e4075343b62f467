// A chart: a title, the numbers under the cursor, and lines that uPlot draws.

import { duration, element, short, significant } from "./elements.js";
import uPlot from "./uPlot.esm.js";

const AXIS_FONT = "12px system-ui, sans-serif";
const SHORT_NAME = 10; // characters; longer names of runs are not written beside each number
const FIRST = 0.02; // of a line: the fall at its start, which would press the rest flat

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

const runColour = (number) => colour(`run${number % 8}`);

function spelledX(x, value) {
  if (x === "seconds") return duration(value);
  if (x === "flops") return value.toExponential(1).replace("e+", "e");
  return short(value);
}

export class Chart {
  constructor(title, { unit = "", tall = false, falls = false, spelled = significant } = {}) {
    this.title = title;
    this.spelled = spelled; // a value as text
    this.falls = falls; // steeply at first
    this.zoomed = false;
    this.readout = element("p", { class: "readout" });
    this.plot = element("div", { class: tall ? "plot tall" : "plot", tabindex: "0", role: "group" });
    const heading = element("figcaption", {}, element("strong", {}, title), unit ? ` ${unit}` : "");
    this.root = element("figure", { class: tall ? "chart wide" : "chart" }, heading, this.readout, this.plot);
    this.lines = [];
    this.shape = "";
    this.plot.addEventListener("keydown", (event) => this.step(event));
    this.plot.addEventListener("dblclick", () => this.whole());
    new ResizeObserver(() => this.resize()).observe(this.plot);
  }

  // `lines`: {run, number, name, x, y, points, faint}; `how`: {x, logX, logY, references: [{label, value}]}.
  draw(lines, how) {
    this.lines = lines;
    this.how = how;
    const theme = colour("ink");
    const shape = JSON.stringify([theme, how, lines.map((line) => [line.name, line.points, line.faint])]);
    this.root.hidden = !lines.some((line) => line.x.length);
    if (!this.root.hidden) this.show(shape, uPlot.join(lines.map((line) => [line.x, line.y])));
    else this.discard();
    this.tell(this.chart?.cursor.idx);
  }

  // All of the lines again, behind what uPlot itself does at a double click.
  whole() {
    this.zoomed = false;
    this.chart?.setData(this.chart.data);
  }

  show(shape, data) {
    if (this.chart && shape === this.shape) {
      this.chart.setData(data, !this.zoomed);
      if (this.zoomed) this.chart.redraw();
      return;
    }
    this.discard();
    this.chart = new uPlot(this.options(), data, this.plot);
    this.shape = shape;
  }

  discard() {
    this.zoomed = false;
    this.chart?.destroy();
    this.chart = null;
    this.shape = "";
  }

  resize() {
    const { clientWidth: width, clientHeight: height } = this.plot;
    if (this.chart && width) this.chart.setSize({ width, height });
  }

  options() {
    const { x, logX, logY, references } = this.how;
    const axis = { stroke: colour("soft"), font: AXIS_FONT, grid: { stroke: colour("rule"), width: 1 }, ticks: { show: false } };
    return {
      width: this.plot.clientWidth || 300,
      height: this.plot.clientHeight || 200,
      legend: { show: false },
      cursor: { y: false, drag: { x: true, y: false }, points: { size: 7 } },
      scales: {
        x: { time: false, distr: logX ? 3 : 1, range: (_, low, high) => rangeX(low, high, logX) },
        y: { distr: logY ? 3 : 1, range: (_, low, high) => range(low, Math.min(high, this.top()), references, logY) },
      },
      axes: [
        { ...axis, size: 30, space: 70, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : spelledX(x, tick))) },
        { ...axis, size: 58, space: 34, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : this.spelled(tick))) },
      ],
      series: [{}, ...this.lines.map((line) => drawn(line))],
      hooks: {
        setCursor: [(chart) => this.tell(chart.cursor.idx)],
        setSelect: [(chart) => (this.zoomed = chart.select.width > 0)],
        draw: [(chart) => drawReferences(chart, references)],
      },
    };
  }

  // The highest value behind the start of the lines, where they are seen whole and evenly spaced.
  top() {
    const { logX, logY } = this.how;
    if (!this.falls || logX || logY || this.zoomed) return Infinity;
    return Math.max(...this.lines.map(({ x, y }) => Math.max(...y.filter((_, place) => x[place] >= FIRST * x.at(-1)))));
  }

  // The numbers at a place of the x axis, or the last ones.
  tell(place) {
    const at = this.chart?.data[0][place]; // undefined without a place
    const told = this.lines.filter((line) => !line.faint && line.x.length);
    const moment = at === undefined ? "last" : spelledX(this.how.x, at);
    const how = this.lines.some((line) => line.faint) ? `${moment}, smoothed:` : `${moment}:`;
    const numbers = told.map((line) => this.number(line, at === undefined ? line.y.at(-1) : line.y[nearest(line.x, at)]));
    this.readout.replaceChildren(how, ...numbers);
    this.readout.setAttribute("aria-live", at === undefined ? "off" : "polite");
    const spoken = `${this.title}. ${this.readout.textContent}. Arrow keys read along the curve`;
    if (at === undefined) this.plot.setAttribute("aria-label", spoken);
  }

  // The key of a run with a value: its name too, unseen where it is long, since the table above has it.
  number({ run, number, name }, value) {
    const long = run.length > SHORT_NAME;
    const key = element("span", { class: `key run${number % 8}`, title: run });
    const words = [element("span", { class: long && "unseen" }, ` ${name}`), long ? name.slice(run.length) : ""];
    return element("span", { class: "told" }, key, ...words, ` ${this.spelled(value)}`);
  }

  // Arrow keys move the cursor: by one point, or by a tenth of all with shift.
  step(event) {
    const way = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!way || !this.chart) return;
    event.preventDefault();
    const places = this.chart.data[0];
    const stride = event.shiftKey ? Math.ceil(places.length / 10) : 1;
    const from = this.chart.cursor.idx ?? (way > 0 ? -1 : places.length);
    const next = Math.min(places.length - 1, Math.max(0, from + way * stride));
    this.chart.setCursor({ left: this.chart.valToPos(places[next], "x"), top: 0 });
  }
}

function drawn(line) {
  const stroke = runColour(line.number);
  return {
    label: line.name,
    stroke,
    width: line.faint ? 1 : line.points ? 2.5 : 1.5,
    alpha: line.faint ? 0.28 : 1,
    points: { show: Boolean(line.points), size: 6, fill: stroke },
    spanGaps: true,
  };
}

function rangeX(low, high, log) {
  if (low === null) return [null, null];
  if (log) return uPlot.rangeLog(low, high, 10, false);
  return [low < 0.05 * high ? 0 : low, high];
}

// A little air above and below, with the reference lines inside.
function range(low, high, references, log) {
  if (low === null) return [null, null];
  const values = references.map((reference) => reference.value);
  const [from, to] = [Math.min(low, ...values), Math.max(high, ...values)];
  if (log) return [from / 1.05, to * 1.05];
  const air = 0.06 * (to - from || Math.abs(to) || 1);
  return [from - air, to + air];
}

// Dashed lines with their names: the highest one's above it, the others' below theirs, so that two near ones can be read.
function drawReferences(chart, references) {
  const { ctx, bbox } = chart;
  const scale = devicePixelRatio;
  const highest = Math.max(...references.map((reference) => reference.value));
  ctx.save();
  Object.assign(ctx, { fillStyle: colour("mark"), font: `${12 * scale}px system-ui, sans-serif`, lineJoin: "round", textAlign: "left", textBaseline: "alphabetic" });
  for (const { label, value } of references) {
    const y = chart.valToPos(value, "y", true);
    const place = [label, bbox.left + 6 * scale, y + (value === highest ? -6 : 15) * scale];
    Object.assign(ctx, { strokeStyle: colour("ground"), lineWidth: 4 * scale });
    ctx.setLineDash([]);
    ctx.strokeText(...place);
    ctx.fillText(...place);
    Object.assign(ctx, { strokeStyle: colour("mark"), lineWidth: scale });
    ctx.setLineDash([6 * scale, 4 * scale]);
    ctx.beginPath();
    ctx.moveTo(bbox.left, y);
    ctx.lineTo(bbox.left + bbox.width, y);
    ctx.stroke();
  }
  ctx.restore();
}

function nearest(sorted, value) {
  let [low, high] = [0, sorted.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low > 0 && value - sorted[low - 1] < sorted[low] - value ? low - 1 : low;
}
