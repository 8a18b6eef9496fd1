// What histograms and units share: a heat map over steps for each of the chosen values.

class SeriesPanel extends Panel {
  constructor(app, block, id, title) {
    super(app, { block, id, title, isShown: block !== null });
    this.listens = ["pins", "module", "site", "root", "mode", "name", "from", "to"];
  }
  build(section) {
    this.heats = el("div", {});
    const { ranks, steps, num_steps: numSteps } = this.block.data;
    const thinned = numSteps > steps.length ? ` Of ${plural(numSteps, "step")} that have them ${steps.length} are drawn.` : "";
    put(section, el("p", { class: "note" }, this.note(plural(ranks.length || 1, "rank")) + thinned), this.heats);
  }
  /** The chosen values of which the block has something, else its first. */
  update() {
    const { series, shape } = this.block.data;
    const chosen = this.app.lines.pinned.filter((one) => series.includes(one.number)).slice(0, 4);
    this.heats.replaceChildren();
    for (const one of chosen.length ? chosen : series.slice(0, 1).map((number) => this.app.run.series[number])) {
      this.picture(one, series.indexOf(one.number) * shape[1]);
    }
  }
  /** Draw cells, by row and by some `steps` of the block; cells that are null stay empty. */
  draw(series, { what, unit, kinds, steps, rows, cells, describe }) {
    const name = valueText(series.path, series.site, series.name);
    const columns = this.app.axis.columns(steps.map((step) => this.block.data.steps[step]));
    const heat = new HeatMap({
      label: `${what} of ${visible(name)} over steps`, choose: () => {}, fold: () => {}, app: this.app,
      describe: (row, column) => [visible(name), `step ${columns[column].first}`, ...describe(row, columns[column].c)],
    });
    const colors = new Colors(cells.flat().filter((cell) => cell?.kind === NUMBER).map((cell) => cell.value));
    put(this.heats, el("h3", {}, name), legendOf(colors, unit, kinds), heat.element);
    heat.draw({ rows, columns, cell: (r, c) => cells[r][columns[c].c], colors });
  }
}
