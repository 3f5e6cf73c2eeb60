// A line of the last two minutes, as SVG. Its text alternative is the number beside it.

const NAMESPACE = "http://www.w3.org/2000/svg";
const WIDTH = 240;
const HEIGHT = 44;
const NUM_POINTS = 120;

export class Chart {
  constructor(folder) {
    this.values = [];
    this.svg = this.#make("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" });
    this.area = this.#make("path", { class: "area" });
    this.line = this.#make("path", { class: "line" });
    this.svg.append(this.area, this.line);
    folder.append(this.svg);
  }

  clear() {
    this.values = [];
    for (const path of [this.line, this.area]) path.removeAttribute("d");
  }

  // A number, or null where there is none.
  add(value) {
    this.values.push(value);
    if (this.values.length > NUM_POINTS) this.values.shift();
    const most = Math.max(...this.values.map((each) => each ?? 0), 1e-9);
    const first = NUM_POINTS - this.values.length;
    const points = this.values.map((each, i) => [
      ((first + i) / (NUM_POINTS - 1)) * WIDTH,
      HEIGHT - 2 - ((each ?? 0) / most) * (HEIGHT - 6),
      each !== null,
    ]);
    let line = "";
    let isDrawing = false;
    for (const [x, y, isThere] of points) {
      if (isThere) line += `${isDrawing ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
      isDrawing = isThere;
    }
    this.line.setAttribute("d", line);
    const shape = points.map(([x, y]) => `L${x.toFixed(1)} ${y.toFixed(1)}`).join("");
    this.area.setAttribute("d", `M${points[0][0].toFixed(1)} ${HEIGHT}${shape}V${HEIGHT}Z`);
  }

  #make(tag, attributes) {
    const made = document.createElementNS(NAMESPACE, tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    return made;
  }
}

// The quantile of a histogram: `counts` are cumulative, `bounds` their upper ends, the last one null. As Prometheus does.
export function quantile(share, bounds, counts) {
  const all = counts[counts.length - 1] ?? 0;
  if (!all) return null;
  const wanted = share * all;
  const i = counts.findIndex((each) => each >= wanted);
  const low = i === 0 ? 0 : bounds[i - 1];
  if (bounds[i] === null) return low;
  const below = i === 0 ? 0 : counts[i - 1];
  const inside = counts[i] - below;
  return low + (inside ? (bounds[i] - low) * ((wanted - below) / inside) : 0);
}
