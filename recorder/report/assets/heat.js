// A heat map on canvas, with rows that fold, a cursor for mouse and keyboard, and cells that are plainly not numbers.

const VIRIDIS = ["#440154", "#482878", "#3e4989", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6ece58", "#b5de2b", "#fde725"];
const SIGNED = ["#2166ac", "#67a9cf", "#d1e5f0", "#f7f7f7", "#fddbc7", "#ef8a62", "#b2182b"];
const SIGNED_DARK = ["#8cc4ff", "#4385cf", "#24486f", "#1f2429", "#6a3222", "#c9623b", "#ffb08a"];
const MAX_DECADES = 8, LEAST_FACTOR = 4;
const ROW_PIXELS = 17, AXIS_PIXELS = 22, CHUNK_ROWS = 150, MARK_PIXELS = 11, MAX_TICKS_TEXT = 17;

function mixed(palette, share) {
  const at = Math.min(Math.max(share, 0), 1) * (palette.length - 1);
  const low = Math.min(Math.floor(at), palette.length - 2), part = at - low;
  const channel = (text, i) => parseInt(text.slice(1 + 2 * i, 3 + 2 * i), 16);
  const rgb = [0, 1, 2].map((i) => Math.round(channel(palette[low], i) * (1 - part) + channel(palette[low + 1], i) * part));
  return "#" + rgb.map((value) => value.toString(16).padStart(2, "0")).join("");
}

/** Colours by the logarithm of magnitudes; of numbers of both signs, by that away from zero; of ratios, by that away from 1. */
class Colors {
  constructor(values, isRatio = false) {
    let smallest = Infinity, largest = 0;
    this.isRatio = isRatio;
    this.isSigned = isRatio;
    for (const value of values) {
      const size = isRatio ? Math.max(value, 1 / value) : Math.abs(value);
      if (value < 0) this.isSigned = true;
      if (size > 0 && size < smallest) smallest = size;
      if (size > largest && size < Infinity) largest = size;
    }
    this.isEmpty = values.length === 0;
    this.isZero = largest === 0;
    this.largest = isRatio ? Math.max(largest, LEAST_FACTOR) : largest || 1;
    this.smallest = isRatio ? 1 : Math.min(Math.max(smallest, this.largest / 10 ** MAX_DECADES), this.largest);
    const span = Math.log(this.largest / this.smallest);
    this.span = span > 0.01 ? span : 0; // less is how numbers were rounded for drawing
    this.palette = Array.from({ length: 256 }, (_, i) => mixed(this.isSigned ? (isDark() ? SIGNED_DARK : SIGNED) : VIRIDIS, i / 255));
  }
  share(value) {
    if (this.isRatio) return 0.5 + Math.log(Math.max(value, 1e-30)) / this.span / 2;
    const size = Math.abs(value);
    const part = this.span > 0 ? Math.max(Math.log(size / this.smallest), 0) / this.span : size > 0 ? 0.5 : 0;
    if (!this.isSigned) return size > 0 ? part : 0;
    return 0.5 + (Math.sign(value) * (size > 0 ? 0.08 + 0.92 * part : 0)) / 2;
  }
  of(value) {
    return this.palette[Math.round(Math.min(Math.max(this.share(value), 0), 1) * 255)];
  }
  inkOn(color) {
    const [r, g, b] = [1, 3, 5].map((i) => parseInt(color.slice(i, i + 2), 16));
    return r * 0.299 + g * 0.587 + b * 0.114 > 140 ? "#111" : "#fff";
  }
  /** What stands under the bar of colours. */
  get ticks() {
    if (this.isEmpty) return [];
    const text = (value) => shortNumber(value, 3);
    if (this.isZero) return [[0, "0"]];
    if (this.isRatio) return [[0, `÷ ${text(this.largest)}`], [0.5, "1"], [1, `× ${text(this.largest)}`]];
    if (this.isSigned) return [[0, text(-this.largest)], [0.5, "0"], [1, text(this.largest)]];
    if (this.span === 0) return [[0.5, text(this.largest)]];
    const ticks = [[0, this.smallest], [0.5, Math.sqrt(this.smallest * this.largest)], [1, this.largest]].map(([share, value]) => [share, text(value)]);
    const isLong = ticks.map(([, word]) => word).join("").length > MAX_TICKS_TEXT; // they would overlap
    return isLong || ticks[1][1] === ticks[0][1] ? [ticks[0], ticks[2]] : ticks;
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
  if (cell.kind >= NUMBER) {
    context.fillStyle = cell.kind === NUMBER ? colors.of(cell.shade ?? cell.value) : cell.isLater ? theme.later : BAD_COLOR;
    context.fillRect(x, y, width, height);
    return;
  }
  context.fillStyle = theme.hole;
  context.fillRect(x, y, width, height);
  if (cell.kind === HOLE) return hatch(context, x, y, width, height, theme.hatch, 6);
  context.fillStyle = theme.hatch;
  for (let dx = 3; dx < width; dx += 6) context.fillRect(x + dx, y + height / 2, 1.5, 1.5);
}

/** The sign of the first cell that is not finite; it is as wide as its cross, however narrow the cell is. */
function drawFirst(context, x, y, width, height) {
  const wide = Math.max(width, MARK_PIXELS), left = Math.max(x + (width - wide) / 2, 0);
  context.fillStyle = BAD_COLOR;
  context.fillRect(left, y, wide, height);
  context.fillStyle = "#fff";
  context.font = "bold 12px sans-serif";
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.fillText("×", left + wide / 2, y + height / 2 + 1);
}

function themeOf() {
  return { hole: cssColor("--hole"), hatch: cssColor("--hatch"), text: cssColor("--dim"), later: cssColor("--later"), mark: cssColor("--bad") };
}

const KIND_TEXTS = [[NONFINITE, "NaN or infinite"], [HOLE, "not recorded"], [NULL_CELL, "recorded without this"]];

/** The bar of colours with its numbers, and what the other cells mean. */
function legendOf(colors, title, kinds = KIND_TEXTS) {
  const theme = themeOf();
  const bar = el("canvas", { class: "legend-bar", role: "img", "aria-label": "colours" });
  const context = sizedCanvas(bar, 160, 10);
  for (let x = 0; x < 160; x++) {
    context.fillStyle = colors.palette[Math.round((x / 159) * 255)];
    context.fillRect(x, 0, 160 - x, 10); // up to the end: paper shows a gap between neighbours
  }
  const ticks = el("div", { class: "legend-ticks" }, colors.ticks.map(([share, text]) => {
    const edge = share === 0 ? "start" : share === 1 ? "end" : "middle";
    return el("span", { class: `tick-${edge}`, style: { left: `${share * 100}%` } }, text);
  }));
  const swatch = ([kind, text, isLater]) => {
    const canvas = el("canvas", { class: "swatch" });
    drawCell(sizedCanvas(canvas, 16, 10), { kind, value: 0, isLater }, colors, 0, 0, 16, 10, theme);
    return el("span", { class: "legend-item" }, canvas, text);
  };
  return el("div", { class: "legend" }, el("span", { class: "legend-title" }, title),
    !colors.isEmpty && el("div", { class: "legend-scale" }, bar, ticks), kinds.map(swatch));
}

/**
 * A heat map. `rows` are {label, title, indent, note, fold: null | "open" | "shut"}; `cell(row, column)` gives
 * {kind, value} or null for nothing at all. `columns` are those of the axis of steps, or else texts, of equal width.
 */
class HeatMap {
  constructor({ label, describe, choose, fold, app }) {
    Object.assign(this, { describe, choose, fold, tooltip: app.tooltip, dumps: app.dumps, axis: app.axis });
    this.rows = [];
    this.columns = [];
    this.cursor = null;
    this.names = el("div", { class: "heat-names" });
    this.cells = el("div", { class: "heat-cells", tabindex: "0", role: "application", "aria-label": label });
    this.ruler = el("canvas", { class: "heat-axis", "aria-hidden": "true" });
    this.mark = el("div", { class: "heat-cursor", hidden: true });
    this.line = el("div", { class: "heat-line", hidden: true });
    this.element = el("div", { class: "heat" }, this.names, el("div", { class: "heat-right" }, this.cells, this.ruler));
    this.element.table = () => [["", ...this.columns.map((one) => (this.isOfSteps ? `step ${one.first}` : one))],
      ...this.rows.map((row, r) => [row.node ? row.node.path : row.label, ...this.columns.map((_, c) => this.cell(r, c)).map((cell) => (cell?.kind === NONFINITE ? "not finite" : cell?.value))])];
    this.cells.addEventListener("mousemove", (event) => this.hover(event));
    for (const name of ["mouseleave", "blur"]) this.cells.addEventListener(name, () => this.leave());
    this.cells.addEventListener("click", (event) => {
      if (this.axis.wasDragged) return;
      this.hover(event);
      if (this.cursor) this.choose(this.cursor.row, this.cursor.column, event.shiftKey);
    });
    this.cells.addEventListener("keydown", (event) => this.key(event));
  }
  /** `across` is what columns that are no steps are numbers of; `ticks` are the indices and texts of marks below them. */
  draw({ rows, columns, cell, colors, marked = null, across = "", ticks = null }) {
    const isOfSteps = columns.length > 0 && typeof columns[0] !== "string";
    Object.assign(this, { rows, columns, cell, colors, isOfSteps, across: isOfSteps ? "step" : across });
    if (isOfSteps) this.axis.pictures.add(this);
    if (isOfSteps && !this.band) this.band = this.axis.zoomable(this.cells);
    const theme = themeOf(), gutter = this.axis.gutter(this.element.clientWidth);
    this.element.style.setProperty("--gutter", `${gutter}px`);
    this.names.replaceChildren(...rows.map((row, number) => this.name(row, number)));
    const width = this.width = Math.max(this.element.clientWidth - gutter, 80);
    const edge = (step, c) => Math.min(Math.max(Math.round(isOfSteps ? this.axis.pixelOf(step, width) : (c * width) / columns.length), 0), width);
    this.edges = columns.map((one, c) => [edge(one.low, c), edge(one.high, c + 1)]);
    const chunks = [], most = isPaper() ? 1 : CHUNK_ROWS; // a sheet of paper may end below any row
    for (let start = 0; start < rows.length; start += most) {
      const count = Math.min(most, rows.length - start);
      const canvas = el("canvas", { class: "heat-chunk" });
      const context = sizedCanvas(canvas, width, count * ROW_PIXELS - isPaper());
      for (let r = 0; r < count; r++) this.drawRow(context, start + r, r * ROW_PIXELS, theme);
      chunks.push(canvas);
    }
    this.cells.replaceChildren(...chunks, this.line, this.mark, ...(this.band ? [this.band] : []));
    this.mark.hidden = this.line.hidden = true;
    this.drawRuler(theme, marked, ticks);
    if (isOfSteps && this.cursor) this.cursor.column = columns.findIndex(({ first, last }) => first <= this.cursor.step && this.cursor.step <= last);
    if (this.isZoomedByKey) this.point(this.cursor.row, this.cursor.column);
    this.isZoomedByKey = false;
  }
  drawRow(context, row, y, theme) {
    const height = ROW_PIXELS - 1, { edges } = this, num = this.columns.length;
    const look = (cell) => cell === null ? "" : cell.kind === NUMBER ? this.colors.of(cell.shade ?? cell.value) : `${cell.kind} ${cell.isLater}`;
    const bad = [];
    for (let c = 0; c < num;) {
      const cell = this.cell(row, c), same = look(cell), first = c;
      while (++c < num && edges[c][0] <= edges[c - 1][1] && look(this.cell(row, c)) === same);
      const x = this.leftOf(first, cell), isBeside = c < num && edges[c][0] <= edges[c - 1][1];
      const width = (isBeside ? this.leftOf(c, this.cell(row, c)) : edges[c - 1][1]) - x;
      if (cell?.kind === NONFINITE) bad.push([cell, x, width, first]);
      drawCell(context, cell, this.colors, x, y, width + (isBeside && this.cell(row, c) !== null), height, theme); // below its neighbour, too: paper shows a gap
    }
    for (const [cell, x, width] of bad) if (width < 2) drawCell(context, cell, this.colors, x, y, 2, height, theme); // a spike does not vanish
    for (let c = 0; c < num; c++) {
      if (!this.cell(row, c)?.isMarked) continue;
      context.lineWidth = 2;
      context.strokeStyle = theme.mark;
      context.strokeRect(edges[c][0] + 1, y + 1, edges[c][1] - edges[c][0] - 2, height - 2);
    }
    for (const [cell, , , first] of bad) {
      const left = this.leftOf(first, cell);
      if (cell.isFirst) drawFirst(context, left, y, edges[first][1] - left, height);
    }
  }
  /** Where a cell begins: what is not finite in the column of the run's first NaN begins at that, and not with the column. */
  leftOf(column, cell) {
    const step = this.axis.app.top.first?.step, { first, last } = this.columns[column], [left] = this.edges[column];
    return cell?.kind === NONFINITE && column && first < step && step <= last ? Math.max(left, Math.round(this.axis.pixelOf(step - 0.5, this.width))) : left;
  }
  drawRuler(theme, marked, own) {
    const context = sizedCanvas(this.ruler, this.width, AXIS_PIXELS);
    context.fillStyle = theme.text;
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "top";
    context.textAlign = "center";
    const middle = (c) => (this.edges[c][0] + this.edges[c][1]) / 2;
    const longest = this.columns.reduce((size, one) => Math.max(size, String(one).length), 1);
    const ticks = own ? own.map(([c, text]) => [middle(c), text]) : this.isOfSteps ? this.axis.ticks(this.width).map((step) => [this.axis.pixelOf(step, this.width), String(step)]) :
      ticksOf(this.columns.length, this.width, longest * 7 + 16).map((c) => [middle(c), this.columns[c]]);
    for (const [index, [x, number]] of ticks.entries()) {
      const text = index ? number : `${this.across} ${number}`.trim();
      const half = context.measureText(text).width / 2;
      context.fillRect(Math.round(x), 0, 1, 4);
      context.fillText(text, Math.min(Math.max(x, half), this.width - half), 6);
    }
    context.fillStyle = cssColor("--dump");
    const dumps = this.isOfSteps ? this.dumps.over(this.columns) : [];
    dumps.forEach(([first, last], number) => {
      const left = this.edges[first][0], width = Math.max(this.edges[last][1] - left - 1, 3);
      if (dumps.length === 1) context.fillRect(left, 0, width, 4);
      else context.fillRect(left, (number % 2) * 3, width, 2); // those of the same steps below each other
    });
    if (this.isOfSteps) this.axis.drawFlags(context, 0, 1, (step) => this.axis.pixelOf(step, this.width));
    if (marked !== null && marked >= 0) {
      context.fillStyle = cssColor("--accent");
      pathThrough(context, [[middle(marked), 0], [middle(marked) - 5, 7], [middle(marked) + 5, 7]]);
      context.fill();
    }
  }
  name(row, number) {
    const button = row.fold === null ? el("span", { class: "fold" }) :
      el("button", {
        class: "fold", type: "button", tabindex: "-1", "aria-expanded": row.fold === "open" ? "true" : "false", // the space bar folds, too
        "aria-label": `${row.fold === "open" ? "fold" : "unfold"} ${row.label}`, onclick: () => this.fold(number),
      }, row.fold === "open" ? "▾" : "▸");
    return el("div", { class: row.isChosen ? "heat-name chosen" : "heat-name", title: row.title, style: { "padding-left": `${Math.min(row.indent, 12) * (NARROW.matches ? 4 : 10)}px` } },
      button, el("span", { class: "heat-label" }, el("bdi", { dir: "ltr" }, row.label)), el("span", { class: "heat-class" }, row.note ?? ""));
  }
  hover(event) {
    const box = this.cells.getBoundingClientRect(), x = event.clientX - box.left;
    this.point(Math.floor((event.clientY - box.top) / ROW_PIXELS), this.edges.findIndex(([left, right]) => left <= x && x < right), event.clientX, event.clientY);
  }
  leave() {
    this.tooltip.hide();
    this.mark.hidden = true;
    if (this.isOfSteps) this.axis.point(null, this);
  }
  /** The cursor of another picture. */
  pointAt(step) {
    this.line.hidden = step === null;
    if (step !== null) this.line.style.setProperty("left", `${Math.round(this.axis.pixelOf(step, this.width))}px`);
  }
  point(row, column, x = null, y = null) {
    if (row < 0 || row >= this.rows.length || column < 0 || column >= this.columns.length) return this.leave();
    this.cursor = { row, column, step: this.columns[column].first };
    const [left, right] = this.edges[column], box = this.cells.getBoundingClientRect();
    this.mark.hidden = false;
    Object.assign(this.mark.style, { left: `${left}px`, top: `${row * ROW_PIXELS}px`, width: `${Math.max(right - left, 2)}px`, height: `${ROW_PIXELS - 1}px` });
    const { first, last } = this.columns[column];
    if (this.isOfSteps) this.axis.point(first, this);
    this.tooltip.show(x ?? box.left + left, y ?? box.top + (row + 1) * ROW_PIXELS,
      [...this.describe(row, column), ...(this.isOfSteps ? this.dumps.of(first, last) : [])]);
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
      this.isZoomedByKey = this.cursor !== null;
      if (!this.isOfSteps || !this.axis.key(event, this.columns[Math.max(column, 0)].first)) this.isZoomedByKey = false;
      return;
    }
    event.preventDefault();
  }
}
