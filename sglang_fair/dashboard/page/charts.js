// Curves over time, as SVG. A missing value is a gap, and a chart without any says so.

const SVG = "http://www.w3.org/2000/svg";
const LEFT = 46, RIGHT = 10, TOP = 12, BOTTOM = 22;

export function make(name, attributes = {}, text = "") {
  const node = name.startsWith("svg:")
    ? document.createElementNS(SVG, name.slice(4))
    : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== "") node.textContent = text;
  return node;
}

/** A patch of a colour, for legends. */
export function swatch(colour) {
  const patch = make("span", { class: "swatch" });
  patch.style.background = colour;
  return patch;
}

/** A step for about `count` lines up to `most`: 1, 2 or 5 times a power of ten. */
export function niceStep(most, count) {
  const rough = most / count, power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= rough);
}

const clock = (seconds, more = {}) =>
  new Date(1000 * seconds).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", hourCycle: "h23", ...more });

/** Draws into one element, again whenever it is told or its size changes. */
export class Chart {
  constructor(element) {
    this.element = element;
    this.tip = make("div", { class: "tip" });
    this.tip.hidden = true;
    this.pointed = null;
    this.data = null;
    new ResizeObserver(() => this.draw()).observe(element);
    element.addEventListener("pointermove", (event) => {
      this.pointed = event.clientX - element.getBoundingClientRect().left;
      this.draw();
    });
    element.addEventListener("pointerleave", () => {
      this.pointed = null;
      this.draw();
    });
  }

  /** `series`: {name, colour, values}; `limit`: {value, name}, a line that is always in sight. */
  show(data) {
    this.data = data;
    this.draw();
  }

  draw() {
    if (!this.data) return;
    const { times, series, format, label, limit } = this.data;
    const width = this.element.clientWidth, height = this.element.clientHeight;
    const svg = make("svg:svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
    const known = series.flatMap((one) => one.values).filter((value) => value !== null);
    const most = Math.max(...known, limit ? limit.value : 0, 0) * 1.08 || 1;
    const right = width - RIGHT, bottom = height - BOTTOM;
    const first = times[0], last = times[times.length - 1];
    const x = (time) => LEFT + ((time - first) / (last - first || 1)) * (right - LEFT);
    const y = (value) => bottom - (value / most) * (bottom - TOP);

    const step = niceStep(most, 4);
    for (let value = 0; value <= most; value += step) {
      svg.append(make("svg:line", { class: "grid", x1: LEFT, x2: right, y1: y(value), y2: y(value) }));
      svg.append(make("svg:text", { x: LEFT - 8, y: y(value) + 4, "text-anchor": "end" }, format(value)));
    }
    if (times.length > 1) {
      const marks = Math.max(2, Math.min(6, Math.floor((right - LEFT) / 110)));
      for (let mark = 0; mark < marks; mark++) {
        const time = first + ((last - first) * mark) / (marks - 1);
        const anchor = mark === 0 ? "start" : mark === marks - 1 ? "end" : "middle";
        const seconds = last - first < 60 * marks ? { second: "2-digit" } : {};
        svg.append(make("svg:text", { x: x(time), y: height - 4, "text-anchor": anchor }, clock(time, seconds)));
      }
    }
    if (limit) {
      svg.append(make("svg:line", { class: "limit", x1: LEFT, x2: right, y1: y(limit.value), y2: y(limit.value) }));
      svg.append(make("svg:text", { class: "limit-name", x: right, y: y(limit.value) - 5, "text-anchor": "end" }, limit.name));
    }
    for (const one of series) {
      const path = make("svg:path", { class: "curve", d: curve(times, one.values, x, y) });
      path.style.stroke = one.colour;
      svg.append(path);
    }
    if (known.length === 0) {
      const middle = { class: "none", x: (LEFT + right) / 2, y: (TOP + bottom) / 2, "text-anchor": "middle" };
      svg.append(make("svg:text", middle, this.data.none || "No data"));
    }
    this.point(svg, x, height);
    this.element.replaceChildren(svg, this.tip);
  }

  point(svg, x, height) {
    const { times, series, format } = this.data;
    this.tip.hidden = this.pointed === null || times.length === 0;
    if (this.tip.hidden) return;
    const distance = times.map((time) => Math.abs(x(time) - this.pointed));
    const at = distance.indexOf(Math.min(...distance)), left = x(times[at]);
    svg.append(make("svg:line", { class: "cross", x1: left, x2: left, y1: TOP, y2: height - BOTTOM }));
    const rows = [make("div", {}, clock(times[at], { second: "2-digit" }))];
    for (const one of series) {
      if (one.values[at] === null || one.values[at] === undefined) continue;
      const row = make("div");
      row.append(swatch(one.colour), make("span", { class: "name" }, one.name), make("b", {}, format(one.values[at])));
      rows.push(row);
    }
    this.tip.replaceChildren(...rows);
    const flips = left > this.element.clientWidth / 2;
    this.tip.style.left = flips ? "auto" : `${left + 12}px`;
    this.tip.style.right = flips ? `${this.element.clientWidth - left + 12}px` : "auto";
  }
}

/** The path through the known values; one between two gaps is a dot. */
function curve(times, values, x, y) {
  let path = "", isOpen = false;
  values.forEach((value, at) => {
    if (value === null || value === undefined) {
      isOpen = false;
      return;
    }
    const isAlone = !isOpen && (values[at + 1] === null || values[at + 1] === undefined);
    path += `${isOpen ? "L" : "M"}${x(times[at]).toFixed(1)} ${y(value).toFixed(1)}${isAlone ? "h0.1" : ""}`;
    isOpen = true;
  });
  return path;
}
