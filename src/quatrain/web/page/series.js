// Rows of a run as columns, and columns as the points of a line: pure functions but for `History`.

const DRAWN = 2000; // points of a line: more than a screen has columns

// What a run has measured so far: a list of {x, y} for each name, in the order of the steps.
export class History {
  constructor() {
    this.clear();
  }

  clear() {
    this.lines = new Map();
    this.last = null; // the last training row
    this.lastValidation = null;
  }

  add(rows) {
    for (const row of rows) {
      const at = { step: row.step, tokens: row.tokens, seconds: row.seconds };
      if (typeof row.val_loss === "number") {
        this.lastValidation = row;
        this.put("val_loss", at, row.val_loss);
        for (const [task, scores] of Object.entries(row.tasks ?? {})) this.putTask(task, at, scores);
      } else if (typeof row.loss === "number") {
        this.last = row;
        for (const name of ["loss", "lr", "grad_norm", "tokens_per_second", "mfu"]) this.put(name, at, row[name]);
      }
    }
  }

  putTask(task, at, scores) {
    for (const [name, value] of Object.entries(scores)) {
      if (name !== "count" && name !== "context_length") this.put(`task ${task} ${name}`, at, value);
    }
  }

  put(name, at, y) {
    if (typeof y !== "number") return;
    if (!this.lines.has(name)) this.lines.set(name, { at: [], y: [] });
    const line = this.lines.get(name);
    line.at.push(at);
    line.y.push(y);
  }
}

// The mean of the points on both sides, with weights that fall exponentially over `span` points: looking ahead as far
// as back, it does not lag behind a falling curve, so that it can stand beside validation.
export function smooth(values, span) {
  if (!span) return values;
  const keep = Math.exp(-1 / span);
  const before = faded(values, keep);
  const behind = faded(values.toReversed(), keep).reverse();
  return values.map((value, place) => {
    const [sum, weight] = [0, 1].map((part) => before[place][part] + behind[place][part]);
    return (sum - value) / (weight - 1); // the point itself stands in both
  });
}

function faded(values, keep) {
  let [sum, weight] = [0, 0];
  return values.map((value) => [(sum = sum * keep + value), (weight = weight * keep + 1)]);
}

// Points for an axis; those that a logarithm cannot show are left out.
export function points(line, x, flopsPerToken, span, logX, logY) {
  const place = x === "flops" ? (at) => at.tokens * flopsPerToken : (at) => at[x];
  const smoothed = smooth(line.y, span);
  const found = { x: [], y: [] };
  line.at.forEach((at, index) => {
    const [right, up] = [place(at), smoothed[index]];
    if (!Number.isFinite(right) || (logX && right <= 0) || (logY && up <= 0)) return;
    if (right <= found.x.at(-1)) return; // two rows of one moment
    found.x.push(right);
    found.y.push(up);
  });
  return thin(found);
}

// Of each stretch its lowest and its highest point, so that no spike is lost.
export function thin({ x, y }, most = DRAWN) {
  if (x.length <= most) return { x, y };
  const kept = { x: [], y: [] };
  const stretch = (2 * x.length) / most;
  for (let first = 0; first < x.length; first += stretch) {
    const from = Math.floor(first);
    const to = Math.min(x.length, Math.floor(first + stretch));
    let [low, high] = [from, from];
    for (let index = from; index < to; index++) {
      if (y[index] < y[low]) low = index;
      if (y[index] > y[high]) high = index;
    }
    for (const index of new Set([Math.min(low, high), Math.max(low, high)])) {
      kept.x.push(x[index]);
      kept.y.push(y[index]);
    }
  }
  return kept;
}
