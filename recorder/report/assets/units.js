// Units over steps: how large the units of a layer are, sorted, as a heat map.

class UnitsPanel extends SeriesPanel {
  constructor(app, block) {
    super(app, block, "units", "Units");
  }
  note(ranks) {
    return "The units (neurons, channels, features) of the chosen values by their root mean square: the largest on top, dead ones at the bottom." +
      (ranks === "1 rank" ? "" : ` Those of each of ${ranks} are sorted on their own, and a line shows their mean.`);
  }
  size(code) {
    const { low, high, levels } = this.block.data;
    return 2 ** (low + ((code - 2) / (levels - 1)) * (high - low));
  }
  labelOf(quantile, numQuantiles, num) {
    if (num < numQuantiles) return quantile === 0 ? "largest" : quantile === num - 1 ? "least" : "";
    if (quantile === 0) return "largest";
    if (quantile === numQuantiles - 1) return "least";
    return quantile * 2 === numQuantiles - 1 ? "median" : quantile % 4 === 0 ? `${Math.round((100 * quantile) / (numQuantiles - 1))} % are larger` : "";
  }
  /** What there is to say of the units of a step, beside how many they are. */
  aboutText([num, numDead, largest, numNonfinite]) {
    const known = [`${numDead} all zero`, ...(numNonfinite ? [`${numNonfinite} not finite`] : [])].join(", ");
    return num === numDead + numNonfinite ? known : `the largest is unit ${largest}, ${known}`;
  }
  picture(series, start) {
    const { data, arrays } = this.block, [, numSteps, numQuantiles] = data.shape;
    const code = (step, quantile) => arrays.codes[(start + step) * numQuantiles + quantile];
    const steps = Array.from({ length: numSteps }, (_, step) => step).filter((step) => arrays.about[4 * (start + step)] > 0);
    if (!steps.length) return;
    const about = (step) => Array.from(arrays.about.subarray(4 * (start + step), 4 * (start + step) + 4));
    const most = steps.reduce((largest, step) => Math.max(largest, about(step)[0]), 0); // few units have a row each
    const numRows = Math.min(most, numQuantiles);
    const quantileOf = (row) => (numRows > 1 ? Math.round((row * (numQuantiles - 1)) / (numRows - 1)) : 0);
    const quantiles = Array.from({ length: numRows }, (_, row) => quantileOf(row));
    const kindOf = (one) => (one === 0 ? NONFINITE : one === 1 ? NULL_CELL : NUMBER);
    const cells = quantiles.map((quantile) => steps.map((step) => ({ kind: kindOf(code(step, quantile)), value: this.size(code(step, quantile)) })));
    const rows = quantiles.map((_, row) => ({ label: this.labelOf(row, numQuantiles, most), title: "", indent: 0, fold: null }));
    this.draw(series, {
      what: "units", unit: "root mean square of a unit", kinds: [[NONFINITE, "NaN or infinite"], [NULL_CELL, "all zero"]], steps, rows, cells,
      describe: (row, column) => {
        const [num] = about(steps[column]), cell = cells[row][column];
        const share = numRows > 1 ? Math.round((100 * row) / (numRows - 1)) : 0;
        return [cell.kind === NONFINITE ? "not finite" : cell.kind === NULL_CELL ? "all zero" :
          `root mean square about ${shortNumber(cell.value, 2)}; ${share} % of ${plural(num, "unit")} are larger`,
        this.aboutText(about(steps[column]))];
      },
    });
    const last = about(steps[steps.length - 1]);
    put(this.heats, el("p", { class: "note" },
      `At step ${data.steps[steps[steps.length - 1]]}: ${plural(last[0], "unit")}, ${this.aboutText(last)}.`));
  }
}
