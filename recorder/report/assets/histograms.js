// Histograms over steps: which share of the values has which sign and power of two, as a heat map.

class HistogramsPanel {
  constructor(app, block) {
    this.app = app;
    this.id = "histograms";
    this.title = "Histograms";
    this.block = block;
    this.isShown = block !== null;
    this.listens = ["pins", "module", "site", "mode", "name"];
  }
  build(section) {
    this.heats = el("div", {});
    put(section, el("p", { class: "note" }, `Shares of the values by sign and power of two: large positive ones on top, zero between. Values of ${
      plural(this.block.data.ranks.length || 1, "rank")} are counted together.`), this.heats);
    this.maps = [];
  }
  /** What the bins of a row of the picture hold: [sign, exponent], sign 0 for zeros. */
  binOf(place) {
    const { first, zero, lowest } = this.block.data, at = first + place;
    if (at === zero) return [0, 0];
    return at > zero ? [1, at - zero - 1 + lowest] : [-1, zero - 1 - at + lowest];
  }
  rangeText(place) {
    const [sign, exponent] = this.binOf(place);
    if (sign === 0) return "0";
    const low = powerOfTwo(exponent), high = powerOfTwo(exponent + 1);
    return sign > 0 ? `${low} to ${high}` : `-${high} to -${low}`;
  }
  share(code) {
    const { levels, least } = this.block.data;
    return code === 0 ? 0 : least ** (1 - (code - 1) / (levels - 1));
  }
  update() {
    const { data, arrays } = this.block, [, numSteps, numBins] = data.shape;
    const chosen = this.app.lines.pinned.filter((one) => data.series.includes(one.number)).slice(0, 4);
    const shown = chosen.length ? chosen : data.series.slice(0, 1).map((number) => this.app.run.series[number]);
    this.heats.replaceChildren();
    for (const series of shown) {
      const start = data.series.indexOf(series.number) * numSteps;
      const code = (step, bin) => arrays.codes[(start + step) * numBins + bin];
      const used = Array.from({ length: numBins }, (_, bin) => bin).filter((bin) => {
        for (let step = 0; step < numSteps; step++) if (code(step, bin)) return true;
        return false;
      });
      const steps = Array.from({ length: numSteps }, (_, step) => step).filter((step) => used.some((bin) => code(step, bin)));
      if (!used.length) continue;
      const bins = []; // from the largest on; null stands for a stretch without values
      for (let bin = used[used.length - 1]; bin >= used[0]; bin--) {
        const isNear = [bin - 1, bin, bin + 1].some((near) => used.includes(near));
        if (isNear) bins.push(bin);
        else if (bins[bins.length - 1] !== null) bins.push(null);
      }
      const cells = bins.map((bin) => steps.map((step) => (bin !== null && code(step, bin) ? { kind: NUMBER, value: this.share(code(step, bin)) } : null)));
      const rows = bins.map((bin) => ({ label: bin === null ? "⋯" : this.rangeText(bin), title: "", indent: 0, fold: null }));
      const name = `${pathText(series.path)} ${[series.site, series.name].filter(Boolean).join(" ")}`;
      const heat = new HeatMap({
        label: `histogram of ${visible(name)} over steps`, choose: () => {}, fold: () => {}, app: this.app,
        describe: (row, column) => [visible(name), `step ${data.steps[steps[column]]}`, `${rows[row].label}: ${
          cells[row][column] === null ? "none" : `about ${shortNumber(100 * cells[row][column].value, 2)} %`} of the values`],
      });
      const colors = new Colors(cells.flat().filter(Boolean).map((cell) => cell.value));
      put(this.heats, el("h3", {}, name), legendOf(colors, "share of the values", []), heat.element);
      heat.draw({ rows, columns: steps.map((step) => String(data.steps[step])), cell: (r, c) => cells[r][c], colors,
        steps: steps.map((step) => [data.steps[step], data.steps[step]]) });
    }
  }
}
