// Histograms over steps: which share of the values has which sign and power of two, as a heat map.

class HistogramsPanel extends SeriesPanel {
  constructor(app, block) {
    super(app, block, "histograms", "Histograms");
  }
  note(ranks) {
    return `Shares of the values by sign and power of two: large positive ones on top, zero between. Values of ${ranks} are counted together.`;
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
}
