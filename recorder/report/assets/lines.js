// Lines over steps: the chosen values on every rank and on all together, and the numbers of the step below them.

const STEP_INCREMENTS = Array.from({ length: 16 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** power)).flat();
const MAX_PINS = 8, MAX_SCALARS = 6, CHART_PIXELS = 250, SCALAR_PIXELS = 150;

/** How a lane is drawn. */
function laneStyle(lane, count, color, isBeside) {
  const { kind } = lane;
  const dash = isBeside ? [6, 4] : kind === "low" || kind === "high" ? [2, 3] : kind === "odd" ? [8, 3, 2, 3] : undefined;
  return { stroke: color, width: kind === "global" || kind === "median" || count === 1 ? 2.2 : 1.2, dash };
}

/** One picture of lines with its own legend; all pictures zoom together. */
class Chart {
  constructor(app, height) {
    this.app = app;
    this.height = height;
    this.plotted = null;
    this.head = el("div", { class: "chart-head" });
    this.body = el("div", { class: "chart-body" });
    this.legend = el("div", { class: "chart-legend" });
    this.element = el("figure", { class: "chart" }, this.head, this.body, this.legend);
    this.hidden = new Set();
  }
  /** `lines` are {label, values, bad, style}; `values` has null for a hole, `bad` says where a value is not finite. */
  draw({ title, steps, lines, isLog, link = null, about = [] }) {
    this.given = { title, steps, lines, isLog, link, about };
    this.plotted?.destroy();
    const { state } = this.app;
    this.head.replaceChildren(el("strong", {}, title), ...about.map((text) => el("span", { class: "dim" }, text)));
    const width = Math.max(this.body.clientWidth || this.element.clientWidth || 600, 200);
    const shown = lines.filter((line) => !this.hidden.has(line.label));
    const numbers = shown.flatMap((line) => line.values.filter((value) => value !== null && value !== undefined));
    const smallest = numbers.reduce((low, value) => (value !== 0 ? Math.min(low, Math.abs(value)) : low), Infinity);
    const isAllPositive = numbers.length > 0 && numbers.every((value) => value > 0);
    const text = cssColor("--text"), grid = cssColor("--grid");
    const numPoints = steps.length;
    const axis = {
      stroke: text, font: "11px system-ui, sans-serif", grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 },
    };
    let from = state.get("from"), to = state.get("to");
    if (from !== null && to !== null && !steps.some((step) => from <= step && step <= to)) from = to = null;
    const edges = [steps[0] ?? 0, steps[steps.length - 1] ?? 1];
    const pad = numPoints > 1 ? 0 : 1;
    const options = {
      width, height: this.height, legend: { show: false }, class: "plot",
      cursor: { sync: { key: "steps" }, drag: { x: true, y: false, setScale: false }, points: { size: 6 } },
      scales: {
        x: { time: false, range: () => [from ?? edges[0] - pad, to ?? edges[1] + pad] },
        y: isLog && numbers.length ? { distr: isAllPositive ? 3 : 4, asinh: Number.isFinite(smallest) ? smallest : 1 } : {
          range: (_, low, high) => this.range(low, high) },
      },
      axes: [
        { ...axis, incrs: STEP_INCREMENTS, space: 60, size: 30, values: (_, splits) => splits.map(String) },
        { ...axis, size: 64, space: 26, values: (_, splits) => splits.map((split) => (split === null ? "" : shortNumber(split, 3))) },
      ],
      series: [{}, ...shown.map((line) => ({
        ...line.style, label: "", spanGaps: false, points: { show: numPoints <= 60, size: 5, fill: line.style.stroke },
      }))],
      hooks: {
        setSelect: [(plot) => {
          if (plot.select.width < 4) return;
          const low = Math.ceil(plot.posToVal(plot.select.left, "x"));
          const high = Math.floor(plot.posToVal(plot.select.left + plot.select.width, "x"));
          if (high >= low) state.set({ from: low, to: Math.max(high, low) });
        }],
        drawAxes: [(plot) => this.drawDumps(plot)],
        draw: [(plot) => this.drawMarks(plot, shown)],
        setCursor: [(plot) => this.follow(plot, shown)],
      },
    };
    const data = [steps, ...shown.map((line) => line.values)];
    this.body.replaceChildren();
    this.plotted = new uPlot(options, data, this.body);
    this.body.firstElementChild?.addEventListener("dblclick", () => state.set({ from: null, to: null }));
    this.makeLegend(lines);
  }
  range(low, high) {
    if (low === null || high === null) return [0, 1];
    if (low === high) return low === 0 ? [-1, 1] : [low - Math.abs(low) * 0.1, high + Math.abs(high) * 0.1];
    const pad = (high - low) * 0.06;
    return [low - pad, high + pad];
  }
  /** The steps of dumps, below the lines. */
  drawDumps(plot) {
    const context = plot.ctx, { left, top, width, height } = plot.bbox;
    const ratio = devicePixelRatio || 1;
    const bands = this.app.dumps.all.map(({ first, last }) => [
      Math.max(plot.valToPos(first, "x", true) - 2 * ratio, left), Math.min(plot.valToPos(last, "x", true) + 2 * ratio, left + width),
    ]).filter(([from, to]) => from < to);
    context.save();
    context.fillStyle = cssColor("--dump");
    context.globalAlpha = 0.07;
    context.beginPath();
    for (const [from, to] of bands) context.rect(from, top, to - from, height);
    context.fill();
    context.globalAlpha = 1;
    bands.forEach(([from, to], number) => { // those of the same steps above each other
      context.fillRect(from, top + height - (3 + 4 * (number % 3)) * ratio, to - from, 3 * ratio);
    });
    context.restore();
  }
  /** Where something was not finite, and the step that the address names. */
  drawMarks(plot, shown) {
    const context = plot.ctx, { left, top, width, height } = plot.bbox;
    const ratio = devicePixelRatio || 1;
    const inside = (x) => x >= left - 1 && x <= left + width + 1;
    context.save();
    const step = this.app.state.get("step");
    if (step !== null) {
      const x = plot.valToPos(step, "x", true);
      if (inside(x)) {
        context.strokeStyle = cssColor("--text");
        context.setLineDash([3 * ratio, 3 * ratio]);
        context.beginPath();
        context.moveTo(x, top);
        context.lineTo(x, top + height);
        context.stroke();
        context.setLineDash([]);
      }
    }
    const bad = new Set(shown.flatMap((line) => line.bad));
    context.fillStyle = BAD_COLOR;
    for (const index of bad) {
      const x = plot.valToPos(this.given.steps[index], "x", true);
      if (!inside(x)) continue;
      context.globalAlpha = 0.18;
      context.fillRect(x - 2 * ratio, top, 4 * ratio, height);
      context.globalAlpha = 1;
      context.beginPath();
      context.moveTo(x - 5 * ratio, top);
      context.lineTo(x + 5 * ratio, top);
      context.lineTo(x, top + 9 * ratio);
      context.fill();
    }
    context.restore();
  }
  makeLegend(lines) {
    this.readings = new Map();
    const hasBad = lines.some((line) => line.bad.length);
    const { steps } = this.given;
    const hasDumps = steps.length > 0 && this.app.dumps.of(steps[0], steps[steps.length - 1]).length > 0;
    this.dumpNote = el("span", { class: "dump-note" }, `${DUMP_MARK} dump`);
    this.legend.replaceChildren(...lines.map((line) => {
      const reading = el("span", { class: "reading" });
      this.readings.set(line.label, reading);
      const mark = el("canvas", { class: "swatch", "aria-hidden": "true" });
      const context = sizedCanvas(mark, 22, 10);
      context.strokeStyle = line.style.stroke;
      context.lineWidth = line.style.width;
      context.setLineDash(line.style.dash ?? []);
      context.beginPath();
      context.moveTo(0, 5);
      context.lineTo(22, 5);
      context.stroke();
      return el("button", {
        type: "button", class: "line-name", "aria-pressed": this.hidden.has(line.label) ? "false" : "true",
        onclick: () => {
          if (!this.hidden.delete(line.label)) this.hidden.add(line.label);
          this.draw(this.given);
        },
      }, mark, line.label, reading);
    }), ...(hasBad ? [el("span", { class: "bad-note" }, "▼ NaN or infinite")] : []), ...(hasDumps ? [this.dumpNote] : []));
  }
  follow(plot, shown) {
    const index = plot.cursor.idx;
    const dumps = index === null || index === undefined ? [] : this.app.dumps.of(this.given.steps[index]);
    if (this.dumpNote) this.dumpNote.textContent = dumps.length ? dumps.join("; ") : `${DUMP_MARK} dump`;
    for (const line of shown) {
      const reading = this.readings?.get(line.label);
      if (!reading) continue;
      const value = index === null || index === undefined ? null : line.values[index];
      reading.textContent = index === null || index === undefined ? "" :
        ` ${line.bad.includes(index) ? "not finite; " : ""}${shortNumber(value, 4, line.digits[index])} at ${this.given.steps[index]}`;
    }
  }
}

/** The lines of a series. */
function linesOf(run, picture, series, { lanes, colorOf, named, isBeside = false }) {
  return lanes.map((lane) => {
    const values = [], digits = [], bad = [];
    for (let c = 0; c < picture.cube.numColumns; c++) {
      const cell = picture.cell(series.number, lane, c);
      values.push(Number.isNaN(cell.value) ? null : cell.value);
      digits.push(cell.digits);
      if (cell.kind === NONFINITE) bad.push(c);
    }
    return { label: named(lane), values, digits, bad, style: laneStyle(run.lane(lane), lanes.length, colorOf(lane), isBeside) };
  });
}

class LinesPanel {
  /** `only` is "lines" or "numbers" (of the step) where a pane shows no more than these. */
  constructor(app, only = null) {
    this.app = app;
    this.only = only;
    this.id = "lines";
    this.title = "Lines";
    this.isShown = app.run.series.length > 0 || app.run.scalars.length > 0;
    this.listens = ["pins", "module", "site", "mode", "name", "stat", "lane", "from", "to", "step", "log", "each"];
    this.charts = [];
    this.scalarCharts = [];
  }
  build(section) {
    this.options = el("div", { class: "bar" });
    this.pictures = el("div", { class: "charts" });
    this.scalars = el("div", { class: "charts" });
    put(section, this.options, this.pictures, this.scalars);
  }
  /** The series that are drawn: those that were chosen; else those of a link; else the first that there is. */
  get pinned() {
    const { run, state, choices, modules } = this.app;
    const pins = state.get("pins", []).map(([path, site, name, mode, root]) =>
      run.series.find((one) => one.path === path && one.site === site && one.name === name &&
        (mode === undefined || one.mode === mode) && (root === undefined || one.root === root))).filter(Boolean);
    if (pins.length) return pins.slice(-MAX_PINS);
    const module = state.get("module"), number = module === null ? undefined : modules.numberOf.get(module);
    if (number !== undefined) {
      const own = choices.seriesOf(number);
      if (own.length) return own.slice(0, MAX_PINS);
      const any = run.byModule.get(number) ?? [];
      if (any.length) return any.slice(0, 1);
    }
    const first = modules.rows.map((_, one) => one).find((one) => choices.seriesOf(one).length);
    return first === undefined ? [] : choices.seriesOf(first).slice(0, 1);
  }
  async update() {
    const { app } = this, { state, run, choices, other } = app;
    if (this.only === "numbers") return this.updateScalars(state.get("each") !== "0");
    const pinned = this.pinned, { statistic } = choices;
    const isLog = state.get("log") === "1";
    const isEach = state.get("each") !== "0";
    this.options.replaceChildren(
      toggle("logarithmic", isLog, (isOn) => state.set({ log: isOn ? "1" : null }), { id: "log" }),
      ...(run.lanes.length > 1 ? [toggle("every rank", isEach, (isOn) => state.set({ each: isOn ? null : "0" }), { id: "each" })] : []),
      this.adder(),
      ...(state.get("from") !== null ? [el("button", { type: "button", id: "zoom-out", onclick: () => state.set({ from: null, to: null }) }, "all steps")] : []),
      el("span", { class: "dim" }, "Drag over a picture to zoom, double-click for all steps."));
    const picture = run.series.length ? await run.picture(statistic) : null;
    const lines = [];
    for (const [number, series] of pinned.entries()) {
      const lanes = isEach ? run.drawnLanes : [choices.lane];
      const name = valueText(series.path, series.site, series.name);
      const colorOf = (lane) => lineColor(pinned.length > 1 ? number : Math.max(lane, 0));
      const named = (lane) => (pinned.length > 1 ? `${name}, ${run.laneName(lane)}` : run.laneName(lane));
      lines.push(...linesOf(run, picture, series, { lanes, colorOf, named }));
      const beside = app.against?.otherOf(series);
      if (beside) {
        const otherPicture = await other.picture(statistic);
        if (otherPicture) {
          const otherLanes = isEach ? other.drawnLanes : [other.mainLane];
          lines.push(...linesOf(other, otherPicture, beside, {
            lanes: otherLanes, colorOf, isBeside: true,
            named: (lane) => `${app.top.against}: ${pinned.length > 1 ? name + ", " : ""}${other.laneName(lane)}`,
          }));
        }
      }
    }
    while (this.charts.length < 1) {
      const chart = new Chart(app, CHART_PIXELS);
      this.charts.push(chart);
      this.pictures.append(chart.element);
    }
    const title = pinned.length === 1 ?
      valueText(pinned[0].path, pinned[0].site, pinned[0].name) : plural(pinned.length, "value");
    this.pictures.hidden = !pinned.length;
    if (pinned.length) {
      const about = [STATISTIC_TEXTS[statistic], pinned.length === 1 ? `${pinned[0].dtype} ${pinned[0].shape}` : ""];
      this.charts[0].draw({ title, steps: run.steps, lines, isLog, about });
    }
    if (this.only === null) await this.updateScalars(isEach);
  }
  /** A field to add a value by the path of its module. */
  adder() {
    const { state, run, choices } = this.app;
    const list = el("datalist", { id: "paths" });
    const paths = [...new Set(run.series.map((one) => one.path))];
    for (const path of paths.slice(0, 2000)) list.append(el("option", { value: path }));
    const field = el("input", {
      type: "text", list: "paths", id: "add-path", placeholder: "add a module", "aria-label": "module to add",
      value: this.unknown ?? null,
      onchange: (event) => {
        const path = event.target.value, number = this.app.modules.numberOf.get(path);
        const ofModule = number === undefined ? [] : choices.seriesOf(number);
        const series = ofModule.length ? ofModule : (run.byModule.get(number) ?? []).slice(0, 1);
        this.unknown = series.length || !path ? null : path;
        problem.textContent = this.unknownText(number, paths);
        if (!series.length) return;
        const pins = this.pinned.map(keyOf);
        state.set({ pins: [...pins, ...series.map(keyOf)].slice(-MAX_PINS) });
      },
    });
    const problem = el("span", { class: "wrong", role: "status" }, this.unknownText(this.app.modules.numberOf.get(this.unknown), paths));
    return el("span", { class: "choice" }, field, list, problem);
  }
  /** Why the module whose name was typed is not added; empty where it was. */
  unknownText(number, paths) {
    if (!this.unknown) return "";
    const name = visible(this.unknown);
    if (number !== undefined) return `No value of the module ${name} was recorded.`;
    const near = nearest(this.unknown, paths.filter(Boolean));
    return `There is no module ${name}${near.length ? `; the nearest names are ${near.map(visible).join(", ")}` : ""}.`;
  }
  async updateScalars(isEach) {
    const { app } = this, { run, other } = app;
    const isRate = (one) => one.name.startsWith("lr."); // behind the loss, as there may be many
    const scalars = [...run.scalars].sort((a, b) => isRate(a) - isRate(b)).slice(0, MAX_SCALARS);
    if (!scalars.length) return;
    const picture = await run.picture("mean", "scalars");
    const otherPicture = other?.scalars.length ? await other.picture("mean", "scalars") : null;
    for (const [index, series] of scalars.entries()) {
      if (!this.scalarCharts[index]) {
        this.scalarCharts[index] = new Chart(app, SCALAR_PIXELS);
        this.scalars.append(this.scalarCharts[index].element);
      }
      const lanes = isEach ? run.drawnLanes : [run.mainLane];
      const colorOf = (lane) => lineColor(Math.max(lane, 0));
      let steps = run.axes.scalar_steps;
      let lines = linesOf(run, picture, series, { lanes, colorOf, named: (lane) => run.laneName(lane) });
      const beside = otherPicture && other.scalars.find((one) => one.path === series.path && one.name === series.name && one.mode === series.mode);
      if (beside) {
        const more = linesOf(other, otherPicture, beside, {
          lanes: [other.mainLane], colorOf, isBeside: true, named: (lane) => `${app.top.against}: ${other.laneName(lane)}`,
        });
        [steps, lines] = joinSteps([[steps, lines], [other.axes.scalar_steps, more]]);
      }
      lines = lines.filter((line) => line.bad.length || line.values.some((value) => value !== null && value !== undefined));
      const where = series.path === "" ? "" : ` of ${pathText(series.path)}`;
      const mode = series.mode === "train" ? "" : ` (${series.mode})`;
      this.scalarCharts[index].draw({ title: `${series.name || series.site}${where}${mode}`, steps, lines, isLog: false, about: [
        run.scalars.length > MAX_SCALARS && index === MAX_SCALARS - 1 ? `${plural(run.scalars.length - MAX_SCALARS, "more number")} not drawn` : ""] });
    }
  }
}

/** Lines over steps of their own, over the steps of all. */
function joinSteps(groups) {
  const steps = [...new Set(groups.flatMap(([own]) => own))].sort((a, b) => a - b);
  const indexOf = new Map(steps.map((step, number) => [step, number]));
  const lines = groups.flatMap(([own, some]) => some.map((line) => {
    const values = new Array(steps.length).fill(undefined); // unlike null, no gap: the other run has these steps
    const digits = [];
    line.values.forEach((value, number) => {
      values[indexOf.get(own[number])] = value;
      digits[indexOf.get(own[number])] = line.digits[number];
    });
    return { ...line, values, digits, bad: line.bad.map((number) => indexOf.get(own[number])) };
  }));
  return [steps, lines];
}
