// Units over steps: how large the units of a layer are, sorted, as a heat map.

class UnitsPanel extends SeriesPanel {
  constructor(app, block) {
    super(app, block, "units", "Units");
  }
  note(ranks) {
    return "The units (neurons, channels, features) of the chosen values by their root mean square: the largest on top, dead ones at the bottom. " +
      `Those of each of ${ranks} are sorted on their own, and a line shows their mean.`;
  }
  size(code) {
    const { low, high, levels } = this.block.data;
    return 2 ** (low + ((code - 2) / (levels - 1)) * (high - low));
  }
  placeText(place, numPlaces, num) {
    if (num < numPlaces) return place === 0 ? "largest" : place === num - 1 ? "least" : "";
    if (place === 0) return "largest";
    if (place === numPlaces - 1) return "least";
    return place * 2 === numPlaces - 1 ? "median" : place % 4 === 0 ? `${Math.round((100 * place) / (numPlaces - 1))} % are larger` : "";
  }
  picture(series, start) {
    const { data, arrays } = this.block, [, numSteps, numPlaces] = data.shape;
    const code = (step, place) => arrays.codes[(start + step) * numPlaces + place];
    const steps = Array.from({ length: numSteps }, (_, step) => step).filter((step) => arrays.about[3 * (start + step)] > 0);
    if (!steps.length) return;
    const about = (step) => Array.from(arrays.about.subarray(3 * (start + step), 3 * (start + step) + 3));
    const most = steps.reduce((found, step) => Math.max(found, about(step)[0]), 0); // few units have a row each
    const numRows = Math.min(most, numPlaces);
    const placeOf = (row) => (numRows > 1 ? Math.round((row * (numPlaces - 1)) / (numRows - 1)) : 0);
    const places = Array.from({ length: numRows }, (_, row) => placeOf(row));
    const kindOf = (one) => (one === 0 ? NONFINITE : one === 1 ? NULL_CELL : NUMBER);
    const cells = places.map((place) => steps.map((step) => ({ kind: kindOf(code(step, place)), value: this.size(code(step, place)) })));
    const rows = places.map((_, row) => ({ label: this.placeText(row, numPlaces, most), title: "", indent: 0, fold: null }));
    this.draw(series, {
      what: "units", unit: "root mean square of a unit", kinds: [[NONFINITE, "NaN or infinite"], [NULL_CELL, "all zero"]], steps, rows, cells,
      describe: (row, column) => {
        const [num, numDead, largest] = about(steps[column]), cell = cells[row][column];
        const share = numRows > 1 ? Math.round((100 * row) / (numRows - 1)) : 0;
        return [cell.kind === NONFINITE ? "not finite" : cell.kind === NULL_CELL ? "all zero" :
          `root mean square about ${shortNumber(cell.value, 2)}; ${share} % of ${plural(num, "unit")} are larger`,
        `the largest is unit ${largest}; ${plural(numDead, "unit")} all zero`];
      },
    });
    const [num, numDead, largest] = about(steps[steps.length - 1]);
    put(this.heats, el("p", { class: "note" },
      `At step ${data.steps[steps[steps.length - 1]]}: ${plural(num, "unit")}, the largest is unit ${largest}, ${numDead} all zero.`));
  }
}
