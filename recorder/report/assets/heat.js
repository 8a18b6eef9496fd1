// A heat map on canvas, with rows that fold, a cursor for mouse and keyboard, and cells that are plainly not numbers.

const VIRIDIS = ["#440154", "#482878", "#3e4989", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6ece58", "#b5de2b", "#fde725"];
const SIGNED = ["#2166ac", "#67a9cf", "#d1e5f0", "#f7f7f7", "#fddbc7", "#ef8a62", "#b2182b"];
const MAX_DECADES = 8;
const ROW_PIXELS = 17, AXIS_PIXELS = 22, CHUNK_ROWS = 150;

function mixed(palette, share) {
  const at = Math.min(Math.max(share, 0), 1) * (palette.length - 1);
  const low = Math.min(Math.floor(at), palette.length - 2), part = at - low;
  const channel = (text, i) => parseInt(text.slice(1 + 2 * i, 3 + 2 * i), 16);
  const rgb = [0, 1, 2].map((i) => Math.round(channel(palette[low], i) * (1 - part) + channel(palette[low + 1], i) * part));
  return "#" + rgb.map((value) => value.toString(16).padStart(2, "0")).join("");
}

/** Colours by the logarithm of magnitudes; of numbers of both signs, by that away from zero. */
class Colors {
  constructor(values) {
    let smallest = Infinity, largest = 0;
    this.isSigned = false;
    for (const value of values) {
      const size = Math.abs(value);
      if (value < 0) this.isSigned = true;
      if (size > 0 && size < smallest) smallest = size;
      if (size > largest) largest = size;
    }
    this.isEmpty = values.length === 0;
    this.largest = largest || 1;
    this.smallest = Math.min(Math.max(smallest, this.largest / 10 ** MAX_DECADES), this.largest);
    const span = Math.log(this.largest / this.smallest);
    this.span = span > 0.01 ? span : 0; // less is how numbers were rounded for drawing
    this.palette = Array.from({ length: 256 }, (_, i) => mixed(this.isSigned ? SIGNED : VIRIDIS, i / 255));
  }
  share(value) {
    const size = Math.abs(value);
    const part = this.span > 0 ? Math.max(Math.log(size / this.smallest), 0) / this.span : size > 0 ? 0.5 : 0;
    if (!this.isSigned) return size > 0 ? part : 0;
    return 0.5 + (Math.sign(value) * (size > 0 ? 0.08 + 0.92 * part : 0)) / 2;
  }
  of(value) {
    return this.palette[Math.round(this.share(value) * 255)];
  }
  /** Black or white, whichever is read on a colour. */
  inkOn(color) {
    const [r, g, b] = [1, 3, 5].map((i) => parseInt(color.slice(i, i + 2), 16));
    return r * 0.299 + g * 0.587 + b * 0.114 > 140 ? "#111" : "#fff";
  }
  /** What stands under the bar of colours. */
  get ticks() {
    if (this.isEmpty) return [];
    if (this.isSigned) return [[0, -this.largest], [0.5, 0], [1, this.largest]];
    if (this.span === 0) return [[0.5, this.largest]];
    return [[0, this.smallest], [0.5, Math.sqrt(this.smallest * this.largest)], [1, this.largest]];
  }
}

/** Lines across a rectangle: how a hole is drawn. */
function hatch(context, x, y, width, height, color, gap) {
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  context.strokeStyle = color;
  context.lineWidth = 1;
  context.beginPath();
  for (let at = x - (x % gap) - height - gap; at < x + width; at += gap) {
    const shift = (y + height) % gap;
    context.moveTo(at + shift, y + height);
    context.lineTo(at + shift + height, y);
  }
  context.stroke();
  context.restore();
}

/** Draw one cell, or a run of alike cells. */
function drawCell(context, cell, colors, x, y, width, height, theme) {
  if (cell === null) return;
  if (cell.kind === NUMBER) {
    context.fillStyle = colors.of(cell.value);
    context.fillRect(x, y, width, height);
  } else if (cell.kind === NONFINITE) {
    context.fillStyle = BAD_COLOR;
    context.fillRect(x, y, width, height);
  } else {
    context.fillStyle = theme.hole;
    context.fillRect(x, y, width, height);
    if (cell.kind === HOLE) hatch(context, x, y, width, height, theme.hatch, 6);
    else {
      context.fillStyle = theme.hatch;
      for (let dx = 3; dx < width; dx += 6) context.fillRect(x + dx, y + height / 2, 1.5, 1.5);
    }
  }
}

function themeOf() {
  return { hole: cssColor("--hole"), hatch: cssColor("--hatch"), text: cssColor("--text"), cursor: cssColor("--text") };
}

const KIND_TEXTS = [[NONFINITE, "NaN or infinite"], [HOLE, "not recorded"], [NULL_CELL, "recorded without this"]];

/** The bar of colours with its numbers, and what the other cells mean. */
function legendOf(colors, title, kinds = KIND_TEXTS) {
  const theme = themeOf();
  const bar = el("canvas", { class: "legend-bar", role: "img", "aria-label": "colours" });
  const context = sizedCanvas(bar, 220, 12);
  for (let x = 0; x < 220; x++) {
    context.fillStyle = colors.palette[Math.round((x / 219) * 255)];
    context.fillRect(x, 0, 1, 12);
  }
  const ticks = el("div", { class: "legend-ticks" }, colors.ticks.map(([share, value]) => {
    const edge = share === 0 ? "start" : share === 1 ? "end" : "middle";
    return el("span", { class: `tick-${edge}`, style: { left: `${share * 100}%` } }, shortNumber(value, 3));
  }));
  const swatch = (kind, text) => {
    const canvas = el("canvas", { class: "swatch" });
    drawCell(sizedCanvas(canvas, 18, 12), { kind, value: 0 }, colors, 0, 0, 18, 12, theme);
    return el("span", { class: "legend-item" }, canvas, text);
  };
  return el("div", { class: "legend" }, el("span", { class: "legend-title" }, title),
    !colors.isEmpty && el("div", { class: "legend-scale" }, bar, ticks), kinds.map(([kind, text]) => swatch(kind, text)));
}

/**
 * A heat map. `rows` are {label, title, indent, fold: null | "open" | "shut", key}; `cell(row, column)` gives
 * {kind, value} or null for nothing at all; `columns` are texts. Where they are steps, `steps` are [first, last] of each.
 */
class HeatMap {
  constructor({ label, describe, choose, fold, app }) {
    Object.assign(this, { describe, choose, fold, tooltip: app.tooltip, dumps: app.dumps, state: app.state });
    this.rows = [];
    this.columns = [];
    this.cursor = null;
    this.names = el("div", { class: "heat-names" });
    this.cells = el("div", { class: "heat-cells", tabindex: "0", role: "application", "aria-label": label });
    this.axis = el("canvas", { class: "heat-axis", "aria-hidden": "true" });
    this.mark = el("div", { class: "heat-cursor", hidden: true });
    this.band = el("div", { class: "heat-band", hidden: true });
    this.element = el("div", { class: "heat" }, this.names, el("div", { class: "heat-right" }, this.cells, this.axis));
    this.cells.addEventListener("mousemove", (event) => this.hover(event));
    this.cells.addEventListener("mouseleave", () => this.leave());
    this.cells.addEventListener("blur", () => this.leave());
    this.cells.addEventListener("pointerdown", (event) => this.press(event));
    this.cells.addEventListener("pointermove", (event) => this.drag(event));
    for (const name of ["pointerup", "pointercancel"]) this.cells.addEventListener(name, (event) => this.release(event));
    this.cells.addEventListener("dblclick", () => this.steps !== null && this.state.set({ from: null, to: null }));
    this.cells.addEventListener("click", (event) => {
      if (this.isDragged) return;
      this.hover(event);
      if (this.cursor) this.choose(this.cursor.row, this.cursor.column, event.shiftKey);
    });
    this.cells.addEventListener("keydown", (event) => this.key(event));
  }
  draw({ rows, columns, cell, colors, marked = null, steps = null }) {
    Object.assign(this, { rows, columns, cell, colors, steps });
    const theme = themeOf();
    this.names.replaceChildren(...rows.map((row, number) => this.name(row, number)));
    const width = Math.max(this.element.clientWidth - this.names.offsetWidth, 80);
    this.width = width;
    const chunks = [];
    for (let start = 0; start < rows.length; start += CHUNK_ROWS) {
      const count = Math.min(CHUNK_ROWS, rows.length - start);
      const canvas = el("canvas", { class: "heat-chunk" });
      const context = sizedCanvas(canvas, width, count * ROW_PIXELS);
      for (let r = 0; r < count; r++) this.drawRow(context, start + r, r * ROW_PIXELS, theme);
      chunks.push(canvas);
    }
    this.cells.replaceChildren(...chunks, this.mark, this.band);
    this.mark.hidden = this.band.hidden = true;
    this.drawAxis(theme, marked);
  }
  edge(column) {
    return Math.round((column * this.width) / Math.max(this.columns.length, 1));
  }
  drawRow(context, row, y, theme) {
    const height = ROW_PIXELS - 1;
    const look = (cell) => cell === null ? "" : cell.kind === NUMBER ? this.colors.of(cell.value) : String(cell.kind);
    for (let c = 0; c < this.columns.length;) {
      const cell = this.cell(row, c), same = look(cell), first = c;
      while (++c < this.columns.length && look(this.cell(row, c)) === same);
      const x = this.edge(first), width = this.edge(c) - x;
      drawCell(context, cell, this.colors, x, y, width, height, theme);
      if (cell !== null && cell.kind === NONFINITE && this.width / this.columns.length >= 7) {
        context.fillStyle = "#fff";
        context.font = "bold 11px sans-serif";
        context.textAlign = "center";
        context.textBaseline = "middle";
        for (let n = first; n < c; n++) context.fillText("×", (this.edge(n) + this.edge(n + 1)) / 2, y + height / 2 + 1);
      }
    }
  }
  drawAxis(theme, marked) {
    const context = sizedCanvas(this.axis, this.width, AXIS_PIXELS);
    context.fillStyle = theme.text;
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "top";
    const longest = this.columns.reduce((size, text) => Math.max(size, text.length), 1);
    let free = -Infinity;
    for (const c of ticksOf(this.columns.length, this.width, longest * 7 + 16)) {
      const middle = (this.edge(c) + this.edge(c + 1)) / 2, half = context.measureText(this.columns[c]).width / 2;
      const x = Math.min(Math.max(middle, half), this.width - half);
      if (x - half < free) continue;
      context.textAlign = "center";
      context.fillRect(Math.round(middle), 0, 1, 4);
      context.fillText(this.columns[c], x, 6);
      free = x + half + 6;
    }
    context.fillStyle = cssColor("--dump");
    const dumps = this.steps === null ? [] : this.dumps.over(this.steps);
    dumps.forEach(([first, last], number) => {
      const left = this.edge(first), width = Math.max(this.edge(last + 1) - left - 1, 3);
      if (dumps.length === 1) context.fillRect(left, 0, width, 4);
      else context.fillRect(left, (number % 2) * 3, width, 2); // those of the same steps below each other
    });
    if (marked !== null && marked >= 0) {
      context.fillStyle = BAD_COLOR;
      const middle = (this.edge(marked) + this.edge(marked + 1)) / 2;
      context.beginPath();
      context.moveTo(middle, 0);
      context.lineTo(middle - 5, 7);
      context.lineTo(middle + 5, 7);
      context.fill();
    }
  }
  name(row, number) {
    const button = row.fold === null ? el("span", { class: "fold" }) :
      el("button", {
        class: "fold", type: "button", "aria-expanded": row.fold === "open" ? "true" : "false",
        "aria-label": `${row.fold === "open" ? "fold" : "unfold"} ${row.label}`, onclick: () => this.fold(number),
      }, row.fold === "open" ? "▾" : "▸");
    return el("div", { class: "heat-name", title: row.title, style: { "padding-left": `${Math.min(row.indent, 12) * 10}px` } },
      button, el("span", { class: "heat-label" }, row.label), el("span", { class: "heat-class" }, row.note ?? ""));
  }
  columnAt(event) {
    return Math.floor(((event.clientX - this.cells.getBoundingClientRect().left) / this.width) * this.columns.length);
  }
  hover(event) {
    const row = Math.floor((event.clientY - this.cells.getBoundingClientRect().top) / ROW_PIXELS);
    this.point(row, this.columnAt(event), event.clientX, event.clientY);
  }
  /** A drag over columns that are steps zooms to them; a finger scrolls the page instead. */
  press(event) {
    this.isDragged = false;
    this.pressed = this.steps !== null && event.button === 0 && event.pointerType !== "touch" ? this.columnAt(event) : null;
    if (this.pressed !== null) this.cells.setPointerCapture(event.pointerId);
  }
  drag(event) {
    if ((this.pressed ?? null) === null) return;
    const at = Math.min(Math.max(this.columnAt(event), 0), this.columns.length - 1);
    this.dragged = [Math.min(at, this.pressed), Math.max(at, this.pressed)];
    const [first, last] = this.dragged, left = this.edge(first);
    this.isDragged ||= first < last;
    this.band.hidden = !this.isDragged;
    for (const [name, value] of Object.entries({ left, width: this.edge(last + 1) - left })) this.band.style.setProperty(name, `${value}px`);
  }
  release(event) {
    const isZoomed = this.isDragged && (this.pressed ?? null) !== null && event.type === "pointerup";
    this.pressed = null;
    this.band.hidden = true;
    if (isZoomed) this.state.set({ from: this.steps[this.dragged[0]][0], to: this.steps[this.dragged[1]][1] });
  }
  leave() {
    this.tooltip.hide();
    this.mark.hidden = true;
  }
  point(row, column, x = null, y = null) {
    if (row < 0 || row >= this.rows.length || column < 0 || column >= this.columns.length) return this.leave();
    this.cursor = { row, column };
    const left = this.edge(column), box = this.cells.getBoundingClientRect();
    this.mark.hidden = false;
    for (const [name, value] of Object.entries({
      left, top: row * ROW_PIXELS, width: Math.max(this.edge(column + 1) - left, 2), height: ROW_PIXELS - 1,
    })) this.mark.style.setProperty(name, `${value}px`);
    this.tooltip.show(x ?? box.left + left, y ?? box.top + (row + 1) * ROW_PIXELS,
      [...this.describe(row, column), ...(this.steps === null ? [] : this.dumps.of(...this.steps[column]))]);
  }
  key(event) {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const { row, column } = this.cursor ?? { row: 0, column: -1 };
    if (event.key in moves) {
      const [down, right] = moves[event.key];
      this.point(Math.min(Math.max(row + down, 0), this.rows.length - 1),
        Math.min(Math.max(column + right, 0), this.columns.length - 1));
      this.mark.scrollIntoView({ block: "nearest" });
    } else if (event.key === "Enter" && this.cursor) {
      this.choose(row, column, event.shiftKey);
    } else if (event.key === " " && this.cursor && this.rows[row].fold !== null) {
      this.fold(row);
    } else if (event.key === "Escape") {
      this.leave();
    } else {
      return;
    }
    event.preventDefault();
  }
}
