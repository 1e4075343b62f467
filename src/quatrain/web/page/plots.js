// A chart: a title, the numbers under the cursor, and lines that uPlot draws.

import { duration, element, short, significant } from "./elements.js";
import uPlot from "./uPlot.esm.js";

const AXIS_FONT = "12px system-ui, sans-serif";

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

export const runColour = (number) => colour(`run${number % 8}`);

function spelledX(x, value) {
  if (x === "seconds") return duration(value);
  if (x === "flops") return value.toExponential(1).replace("e+", "e");
  return short(value);
}

export class Chart {
  constructor(title, { unit = "", tall = false, spelled = significant } = {}) {
    this.title = title;
    this.spelled = spelled; // a value as text
    this.readout = element("p", { class: "readout" });
    this.plot = element("div", { class: tall ? "plot tall" : "plot", tabindex: "0", role: "group" });
    const heading = element("figcaption", {}, element("strong", {}, title), unit ? ` ${unit}` : "");
    this.root = element("figure", { class: tall ? "chart wide" : "chart" }, heading, this.readout, this.plot);
    this.lines = [];
    this.shape = "";
    this.plot.addEventListener("keydown", (event) => this.step(event));
    new ResizeObserver(() => this.resize()).observe(this.plot);
  }

  // `lines`: {name, colour, x, y, points, faint}; `how`: {x, logX, logY, references: [{label, value}]}.
  draw(lines, how) {
    this.lines = lines;
    this.how = how;
    const theme = colour("ink");
    const shape = JSON.stringify([theme, how, lines.map((line) => [line.name, line.colour, line.points, line.faint])]);
    const data = uPlot.join(lines.map((line) => [line.x, line.y]));
    if (!lines.some((line) => line.x.length)) {
      this.discard();
    } else if (this.chart && shape === this.shape) {
      this.chart.setData(data);
    } else {
      this.discard();
      this.chart = new uPlot(this.options(), data, this.plot);
      this.shape = shape;
    }
    this.tell(null);
  }

  discard() {
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
        x: { time: false, distr: logX ? 3 : 1, range: (_, low, high) => [!logX && low < 0.05 * high ? 0 : low, high] },
        y: { distr: logY ? 3 : 1, range: (_, low, high) => range(low, high, references, logY) },
      },
      axes: [
        { ...axis, size: 30, space: 70, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : spelledX(x, tick))) },
        { ...axis, size: 58, space: 34, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : this.spelled(tick))) },
      ],
      series: [{}, ...this.lines.map((line) => drawn(line))],
      hooks: {
        setCursor: [(chart) => this.tell(chart.cursor.idx)],
        draw: [(chart) => drawReferences(chart, references)],
      },
    };
  }

  // The numbers at a place of the x axis, or the last ones.
  tell(place) {
    const told = this.lines.filter((line) => !line.faint && line.x.length);
    const at = place === null || place === undefined ? null : this.chart?.data[0][place];
    const words = told.map((line) => {
      const value = at === null || at === undefined ? line.y.at(-1) : line.y[nearest(line.x, at)];
      return `${line.name} ${this.spelled(value)}`;
    });
    const moment = at === null || at === undefined ? "last" : spelledX(this.how.x, at);
    const where = this.lines.some((line) => line.faint) ? `${moment}, smoothed` : moment;
    this.readout.textContent = words.length ? `${where}: ${words.join(" · ")}` : "nothing measured yet";
    if (at === null || at === undefined) this.plot.setAttribute("aria-label", `${this.title}. ${this.readout.textContent}. Arrow keys read along the curve`);
    this.readout.setAttribute("aria-live", at === null || at === undefined ? "off" : "polite");
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
  return {
    label: line.name,
    stroke: line.colour,
    width: line.faint ? 1 : line.points ? 2.5 : 1.5,
    alpha: line.faint ? 0.28 : 1,
    points: { show: Boolean(line.points), size: 6, fill: line.colour },
    spanGaps: true,
  };
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

function drawReferences(chart, references) {
  const { ctx, bbox } = chart;
  const scale = devicePixelRatio;
  ctx.save();
  ctx.strokeStyle = ctx.fillStyle = colour("mark");
  ctx.font = `${12 * scale}px system-ui, sans-serif`;
  ctx.textAlign = "right";
  ctx.setLineDash([6 * scale, 4 * scale]);
  for (const { label, value } of references) {
    const y = chart.valToPos(value, "y", true);
    ctx.beginPath();
    ctx.moveTo(bbox.left, y);
    ctx.lineTo(bbox.left + bbox.width, y);
    ctx.stroke();
    ctx.fillText(label, bbox.left + bbox.width - 4 * scale, y - 4 * scale);
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
