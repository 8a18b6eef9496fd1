// What panels share: colours, the tooltip, the bar of choices, redrawing once a frame.

const DARK = matchMedia("(prefers-color-scheme: dark)"), NARROW = matchMedia("(max-width: 760px)");
const ON_WHITE = ["#0072b2", "#d55e00", "#009e73", "#b8528a", "#b07800", "#3b8fc4", "#6f6f6f", "#7a5c12"];
const ON_BLACK = ["#56b4e9", "#f28e2b", "#2fc99a", "#f0a1cf", "#ecd24a", "#8fa8ff", "#b5b5b5", "#d0a45c"];
function isPaper() {
  return "paper" in document.documentElement.dataset;
}
function isDark() {
  return DARK.matches && !isPaper();
}
/** Colours of lines, which the colour-blind tell apart: Okabe and Ito's, darker or lighter as the page is. */
function lineColor(number) {
  return (isDark() ? ON_BLACK : ON_WHITE)[number % ON_WHITE.length];
}
const BAD_COLOR = "#e6007a";
const STATISTIC_TEXTS = {
  absmax: "largest magnitude", l2: "L2 norm", mean: "mean", std: "standard deviation", min: "smallest", max: "largest",
  zero_count: "zeros", numel: "elements (of an expert: its load)", nan_count: "NaN", inf_count: "infinite", update: "step of the optimizer / weight",
};

function cssColor(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** A part of the page. It has an id, a title, and the names in the address that it is drawn anew for. */
class Panel {
  constructor(app, about) {
    Object.assign(this, { app, isShown: true, listens: [], ...about });
  }
}

/** A path through points, to be stroked or filled. */
function pathThrough(context, points) {
  context.beginPath();
  for (const [x, y] of points) context.lineTo(x, y);
}

/** A canvas of a size in CSS pixels, with its context scaled to the screen. */
function sizedCanvas(canvas, width, height) {
  const ratio = Math.max(window.devicePixelRatio || 1, 1);
  canvas.width = Math.max(Math.round(width * ratio), 1);
  canvas.height = Math.max(Math.round(height * ratio), 1);
  Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}

/** One tooltip for the page; its lines are texts. */
class Tooltip {
  constructor() {
    this.element = el("div", { class: "tooltip", role: "status", "aria-live": "polite" });
    this.element.hidden = true;
    document.body.append(this.element);
  }
  show(x, y, lines) {
    this.element.replaceChildren(...lines.map((line, number) => el("div", { class: number ? "" : "tooltip-title" }, line)));
    this.element.hidden = false;
    const { width, height } = this.element.getBoundingClientRect();
    const left = x + 14 + width > window.innerWidth ? Math.max(x - width - 10, 4) : x + 14;
    const top = y + 14 + height > window.innerHeight ? Math.max(y - height - 10, 4) : y + 14;
    Object.assign(this.element.style, { left: `${left}px`, top: `${top}px` });
  }
  hide() {
    this.element.hidden = true;
  }
}

/** A choice of several; `options` are [value, text]. */
function choice(label, options, chosen, onchange, attributes = {}) {
  const select = el("select", { ...attributes, onchange: (event) => onchange(event.target.value) },
    options.map(([value, text]) => el("option", { value, selected: value === chosen }, text)));
  select.value = chosen;
  return el("label", { class: "choice" }, el("span", {}, label), select);
}

function toggle(label, isOn, onchange, attributes = {}) {
  const input = el("input", { ...attributes, type: "checkbox", onchange: (event) => onchange(event.target.checked) });
  input.checked = isOn;
  return el("label", { class: "toggle" }, input, label);
}

/** Call a function once in the next frame, however often it is asked for. */
function onceAFrame(work) {
  let isAsked = false;
  return () => {
    if (isAsked) return;
    isAsked = true;
    requestAnimationFrame(() => {
      isAsked = false;
      work();
    });
  };
}

/** Positions of ticks: about every `gap` pixels, at round steps of the index. */
function ticksOf(count, width, gap) {
  if (!count) return [];
  const each = (gap * count) / Math.max(width, 1);
  let stride = 1;
  for (const factor of [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]) if ((stride = factor) >= each) break;
  const ticks = [];
  for (let i = 0; i < count; i += stride) ticks.push(i);
  return ticks;
}
