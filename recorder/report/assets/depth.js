// By depth: a statistic of one step, module by module in the order in which they ran, with a slider over the steps.

const DEPTH_PIXELS = 230, DEPTH_VIEWS = [["outputs", "output", "l2"], ["gradients of outputs", "grad_output", "absmax"], ["gradients of parameters", "grad", "l2"], ["parameters", "param", "l2"], ["updates", "param", "update"]];

class DepthPanel extends Panel {
  constructor(app) {
    super(app, { id: "depth", title: "By depth", isShown: app.run.series.length > 0 });
    this.listens = ["site", "root", "mode", "name", "stat", "lane", "step", "module", "from", "to"];
  }
  build(section) {
    this.views = el("div", { class: "bar" });
    this.slider = el("input", { type: "range", min: 0, step: 1, id: "depth-step", "aria-label": "step", oninput: () => this.draw(Number(this.slider.value)),
      onchange: () => this.app.state.set({ step: this.columns[Number(this.slider.value)].first }) });
    this.about = el("span", { class: "dim" });
    this.body = el("div", { class: "chart-body", tabindex: "0", role: "application", onkeydown: (event) => this.key(event) });
    this.reading = el("p", { class: "note", role: "status" });
    put(section, this.views, el("label", { class: "choice slide" }, this.slider, this.about), this.body, this.reading);
  }
  /** The modules that have such a value, in the order in which they returned: a container comes after what it contains. */
  nodes() {
    const { modules, choices } = this.app, nodes = [];
    const visit = (node) => {
      node.children.forEach(visit);
      const series = node.number === null ? [] : choices.seriesOf(node.number);
      const why = series.length ? "" : modules.whyNone(node.number, choices.siteAndMode[0]);
      if (series.length || why) nodes.push({ node, series, why });
    };
    visit(modules.root);
    return nodes;
  }
  async update() {
    const { run, choices, state, axis } = this.app;
    this.picture = await run.picture(choices.statistic);
    this.points = this.nodes();
    const all = this.points.flatMap((one) => one.series);
    this.columns = axis.columns(run.steps, this.picture.columnsWith(all), (c) => run.lastStep(c));
    const [site, mode] = choices.siteAndMode;
    const offered = DEPTH_VIEWS.filter(([, one, statistic]) => run.series.some((other) => other.site === one) && (statistic !== "update" || run.hasUpdates));
    this.views.replaceChildren(...offered.map(([text, one, statistic]) => el("a", { href: state.address({ ...state.values, view: "depth", site: one, mode, stat: statistic, name: null }),
      "aria-current": one === site && (statistic === "update") === (choices.statistic === "update") && "true" }, text)));
    this.ends = this.points.map(({ series }) => this.endsOf(series));
    const step = state.get("step", this.app.top.first?.step ?? null), at = step === null ? -1 : this.columns.findIndex((one) => one.first <= step && step <= one.last);
    this.slider.max = String(Math.max(this.columns.length - 1, 0));
    this.draw(at >= 0 ? at : this.columns.length - 1);
  }
  /** The smallest and the largest magnitude of some series over all steps that are shown. */
  endsOf(some) {
    const { cube, nan, inf } = this.picture, lanes = this.app.choices.lane === ANY_RANK ? this.picture.ownLanes : [this.app.choices.lane];
    let low = Infinity, high = 0;
    for (const series of some) for (const lane of lanes) for (const { c } of this.columns) {
      const at = cube.at(series.number, lane, c), size = Math.abs(cube.values[at]);
      if (nan?.values[at] > 0 || inf?.values[at] > 0) continue; // what is left of it is no magnitude of the value
      if (size < low) low = size;
      if (size > high) high = size;
    }
    return low <= high ? [low, high] : [null, null];
  }
  draw(at) {
    const { choices } = this.app, column = this.columns[at];
    this.plotted?.destroy();
    this.body.replaceChildren();
    if (!column || !this.points.length) return;
    this.slider.value = String(at);
    this.step = column.first;
    this.slider.setAttribute("aria-valuetext", `step ${column.first}`);
    this.cells = this.points.map(({ series }) => series.reduce((most, one) => outstanding(most, this.picture.cell(one.number, choices.lane, column.c)), null));
    const values = this.cells.map((cell) => (cell?.kind === NUMBER ? Math.abs(cell.value) : null)), all = [...values, ...this.ends.flat()].filter((value) => value > 0);
    const isLog = all.length > 0 && Math.max(...all) > LOG_FROM * Math.min(...all), hasZero = isLog && [...values, ...this.ends.flat()].includes(0);
    const edge = 10 ** Math.floor(Math.log10(Math.min(...all) / 2)), lifted = (value) => (hasZero && value === 0 ? edge : value); // a logarithmic axis has no zero
    const what = choices.title;
    const hasBad = this.cells.some((cell) => cell?.kind === NONFINITE);
    this.about.textContent = `step ${column.first}: ${what}; the band spans all steps${hasZero ? "; zeros lie at the lower edge" : ""}${hasBad ? "; a magenta bar is not finite" : ""}`;
    this.body.setAttribute("aria-label", `${what} of ${plural(this.points.length, "module")} at step ${column.first}; left and right move, Enter shows the lines`);
    const width = Math.max(this.body.clientWidth, 200), gutter = this.app.axis.gutter(width), line = { stroke: cssColor("--grid"), width: 1 };
    const ruled = { stroke: cssColor("--dim"), font: "11px system-ui, sans-serif", grid: line, ticks: { ...line, size: 4 } };
    const each = Math.max(Math.ceil((this.points.length * 22) / (width - gutter)), 1), color = lineColor(0), band = { stroke: cssColor("--line"), width: 1, points: { show: false } };
    this.plotted = new uPlot({
      width, height: DEPTH_PIXELS, legend: { show: false }, class: "plot", padding: [8, 8, 0, roomBeside(true, gutter)], cursor: { y: false, drag: { x: false, y: false }, points: { size: 6 } },
      scales: { x: { time: false, range: () => [-0.5, this.points.length - 0.5] }, y: isLog ? { distr: 3 } : {} },
      axes: [
        { ...ruled, size: 26 + 4.2 * Math.max(...this.points.map((_, index) => this.nameOf(index).length)), gap: 4, rotate: 40, splits: () => this.points.map((_, index) => index).filter((index) => index % each === 0), values: (_, splits) => splits.map((index) => this.nameOf(index)) },
        numberAxis(ruled, isLog, unitOf(choices.statistic), gutter),
      ],
      bands: [{ series: [2, 1], fill: cssColor("--grid") }],
      series: [{}, band, band, { stroke: color, width: 2, points: { show: this.points.length <= 120, size: 5, fill: color } }],
      hooks: { drawAxes: [(plot) => this.drawAlone(plot, lifted)], draw: [(plot) => this.drawBad(plot)], setCursor: [(plot) => this.read(plot.cursor.idx)] },
    }, [this.points.map((_, index) => index), ...[0, 1].map((end) => this.ends.map((one) => lifted(one[end]))), values.map(lifted)], this.body);
    this.plotted.over.addEventListener("click", () => this.choose());
    this.read(null);
  }
  /** The end of a path, which tells it apart. */
  nameOf(index) {
    const { node, why } = this.points[index], path = pathText(node.path), after = { "": "", frozen: " (frozen)", "in no optimizer": " (no optimizer)" }[why];
    const most = NARROW.matches ? 10 : 16; // rotated names of the first modules need room to their left
    const end = path.slice(1 - most), whole = end.slice(end.indexOf(".") + 1); // no name is cut in its middle where there is another
    return (path.length > most && node.path ? `…${whole}` : path) + after;
  }
  /** The band of a module between two without numbers, which has no width of its own. */
  drawAlone(plot, lifted) {
    const ratio = devicePixelRatio || 1, { ctx } = plot, isKnown = (index) => typeof this.ends[index]?.[0] === "number";
    Object.assign(ctx, { fillStyle: cssColor("--grid"), strokeStyle: cssColor("--line"), lineWidth: ratio });
    this.ends.forEach((ends, index) => {
      if (!isKnown(index) || isKnown(index - 1) || isKnown(index + 1)) return;
      const [low, high] = ends.map((end) => plot.valToPos(lifted(end), "y", true)), bar = [plot.valToPos(index, "x", true) - 4 * ratio, high, 8 * ratio, low - high];
      ctx.fillRect(...bar);
      ctx.strokeRect(...bar);
    });
  }
  drawBad(plot) {
    const ratio = devicePixelRatio || 1;
    plot.ctx.fillStyle = BAD_COLOR;
    this.cells.forEach((cell, index) => {
      if (cell?.kind === NONFINITE) plot.ctx.fillRect(plot.valToPos(index, "x", true) - 3 * ratio, plot.bbox.top, 6 * ratio, plot.bbox.height);
    });
  }
  read(index) {
    const cell = this.cells[index], [low, high] = this.ends[index] ?? [], about = this.app.choices.statistic === "update" ? `${SAMPLE_TEXT} ` : "";
    const text = !cell ? NO_ROW_TEXTS[this.points[index]?.why ?? ""] : cell.kind === NONFINITE ? "not finite" : cell.kind === NUMBER ? shortNumber(cell.value, 4, cell.digits) : hasNoUpdate(this.app.choices, this.points[index]?.series[0]) ? NO_UPDATE_TEXT : "not recorded";
    this.reading.textContent = index === null || index === undefined ? this.emptyText() + about + (isPaper() ? "" : "Point at a module for its number; a click shows its lines.") :
      `${pathText(this.points[index].node.path)} ${visible(this.app.modules.className(this.points[index].node.number))}: ${text} at step ${this.step}${low === null || low === undefined ? "" : `; ${shortNumber(low, 3)} to ${shortNumber(high, 3)} over all steps`}`;
  }
  /** Why no module has a number at this step. */
  emptyText() {
    if (this.cells.some((cell) => cell?.kind === NUMBER)) return "";
    return `No module has a number at this step. ${this.app.choices.statistic === "update" ? UPDATE_TEXT : ""}`;
  }
  choose() {
    const { idx } = this.plotted.cursor, point = this.points[idx];
    if (point?.series.length) this.app.state.set({ pins: point.series.slice(0, MAX_PINS).map(keyOf), module: point.node.path, step: this.step });
  }
  key(event) {
    const idx = this.plotted?.cursor.idx, by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Enter") this.choose();
    else if (by === undefined) return;
    else this.plotted.setCursor({ left: this.plotted.valToPos(Math.min(Math.max((idx ?? -1) + by, 0), this.points.length - 1), "x"), top: 0 });
    event.preventDefault();
  }
  table() {
    return [["module", `step ${this.step}`, "smallest", "largest"], ...this.points.map(({ node }, index) => [node.path, plainNumber(this.cells[index]), ...this.ends[index]])];
  }
}
