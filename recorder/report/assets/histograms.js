// Histograms over steps: which share of the values has which sign and power of two, as a heat map.

const RIDGE_PIXELS = 44, RIDGES_PIXELS = 380, MAX_RIDGE_GAP = 24, BIN_PIXELS = 56;

class HistogramsPanel extends SeriesPanel {
  constructor(app, block) {
    super(app, block, "histograms", "Histograms");
    this.listens.push("ridges");
  }
  build(section) {
    const { state } = this.app;
    super.build(section);
    this.heats.before(el("div", { class: "bar" }, toggle("as ridges", state.get("ridges") === "1", (isOn) => state.set({ ridges: isOn ? "1" : null }), { id: "ridges" })));
  }
  note(ranks) {
    return `Shares of the values by sign and power of two: large positive ones on top, zero between.${ranks === "1 rank" ? "" : ` Values of ${ranks} are counted together.`}`;
  }
  /** What the bins of a row of the picture hold: [sign, exponent], sign 0 for zeros. */
  binOf(index) {
    const { first, zero, lowest } = this.block.data, at = first + index;
    if (at === zero) return [0, 0];
    return at > zero ? [1, at - zero - 1 + lowest] : [-1, zero - 1 - at + lowest];
  }
  rangeText(index) {
    const [sign, exponent] = this.binOf(index);
    if (sign === 0) return "0";
    const low = powerOfTwo(exponent), high = powerOfTwo(exponent + 1);
    return sign > 0 ? `${low} to ${high}` : `-${high} to -${low}`;
  }
  share(code) {
    const { levels, least } = this.block.data;
    return code === 0 ? 0 : least ** (1 - (code - 1) / (levels - 1));
  }
  picture(series, start) {
    const { data, arrays } = this.block, [, numSteps, numBins] = data.shape;
    const code = (step, bin) => arrays.codes[(start + step) * numBins + bin];
    const used = Array.from({ length: numBins }, (_, bin) => bin).filter((bin) => {
      for (let step = 0; step < numSteps; step++) if (code(step, bin)) return true;
      return false;
    });
    const nonfinite = (step) => arrays.nonfinite[start + step];
    const steps = Array.from({ length: numSteps }, (_, step) => step).filter((step) => nonfinite(step) || used.some((bin) => code(step, bin)));
    if (!steps.length) return;
    const bins = []; // from the largest on; null stands for a stretch without values
    for (let bin = used.length ? used[used.length - 1] : -1; bin >= used[0]; bin--) {
      const isNear = [bin - 1, bin, bin + 1].some((near) => used.includes(near));
      if (isNear) bins.push(bin);
      else if (bins[bins.length - 1] !== null) bins.push(null);
    }
    const cells = bins.map((bin) => steps.map((step) => (bin !== null && code(step, bin) ? { kind: NUMBER, value: this.share(code(step, bin)) } : null)));
    const rows = bins.map((bin) => ({ label: bin === null ? "⋯" : this.rangeText(bin), title: "", indent: 0, fold: null }));
    if (this.app.state.get("ridges") === "1") return this.ridges(series, steps.map((step) => [data.steps[step], nonfinite(step), bins.map((bin) => (bin === null ? 0 : this.share(code(step, bin)))).reverse()]), bins.toReversed());
    const kinds = [];
    if (steps.some(nonfinite)) {
      kinds.push([NONFINITE, "NaN or infinite"]);
      rows.unshift({ label: "not finite", title: "", indent: 0, fold: null });
      cells.unshift(steps.map((step) => (nonfinite(step) ? { kind: NONFINITE, value: this.share(nonfinite(step)) } : null)));
    }
    this.draw(series, {
      what: "histogram", unit: "share of the values", kinds, steps, rows, cells,
      describe: (row, column) => [`${rows[row].label}: ${
        cells[row][column] === null ? "none" : `about ${shortNumber(100 * cells[row][column].value, 2)} %`} of the values`],
    });
  }
  /** A ridge for each recorded step that is shown, the first on top: small values to the left, all of one scale. */
  ridges(series, all, bins) {
    const [low, high] = this.app.axis.domain, lines = all.filter(([step]) => low <= step && step <= high);
    const canvas = el("canvas", { role: "img" }), name = valueText(series.path, series.site, series.name);
    put(this.heats, el("h3", {}, name), canvas);
    const width = Math.max(this.heats.clientWidth, 200), gutter = this.app.axis.gutter(width), gap = Math.max(Math.min(RIDGES_PIXELS / lines.length, MAX_RIDGE_GAP), 5);
    const context = sizedCanvas(canvas, width, RIDGE_PIXELS + gap * lines.length + AXIS_PIXELS), dim = cssColor("--dim");
    const most = Math.max(...lines.flatMap(([, , shares]) => shares)) || 1, x = (at) => gutter + ((at + 0.5) * (width - gutter)) / bins.length;
    context.font = "11px system-ui, sans-serif";
    context.textAlign = "right";
    let below = -Infinity;
    lines.forEach(([step, isBad, shares], number) => {
      const base = RIDGE_PIXELS + gap * number;
      context.beginPath();
      context.moveTo(x(-0.5), base);
      shares.forEach((share, at) => context.lineTo(x(at), base - RIDGE_PIXELS * (share / most)));
      context.lineTo(x(bins.length - 0.5), base);
      context.fillStyle = cssColor("--back");
      context.fill();
      context.strokeStyle = isBad ? BAD_COLOR : lineColor(0);
      context.stroke();
      if (base - below < 14) return;
      below = base;
      context.fillStyle = isBad ? BAD_COLOR : dim;
      context.fillText(`${number ? "" : "step "}${step}`, gutter - 8, base + 3);
    });
    context.fillStyle = dim;
    context.textAlign = "center";
    ticksOf(bins.length, width - gutter, BIN_PIXELS).forEach((at) => context.fillText(bins[at] === null ? "⋯" : this.leastText(bins[at]), x(at), RIDGE_PIXELS + gap * lines.length + 8));
    canvas.setAttribute("aria-label", `ridges of ${visible(name)}: ${lines.map(([step, isBad, shares]) => `step ${step}${isBad ? ", not finite" : ""}, most ${this.rangeText(bins[shares.indexOf(Math.max(...shares))])}`).join("; ")}`);
  }
  /** The magnitude with which a bin begins. */
  leastText(index) {
    const [sign, exponent] = this.binOf(index);
    return sign === 0 ? "0" : `${sign < 0 ? "-" : ""}${powerOfTwo(exponent)}`;
  }
}
