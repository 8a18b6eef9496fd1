// Trainer against engine: samples down, tokens across, coloured by log-probabilities; a click shows the modules of a token.

class TokensPanel extends Panel {
  constructor(app, block) {
    super(app, { block, id: "tokens", title: "Tokens", isShown: block !== null });
  }
  build(section) {
    const { verdict, is_fine: isFine, samples, num_samples: all } = this.block.data;
    this.legend = el("div", {});
    this.heat = new HeatMap({
      label: "map of log-probabilities by sample and token; arrow keys move, Enter shows the modules of a token",
      describe: (row, column) => this.describe(row, column), choose: (row, column) => this.choose(row, column), fold: () => {}, app: this.app,
    });
    this.depth = el("div", { id: "token-depth", "aria-live": "polite" });
    put(section, el("p", { class: isFine ? "verdict right" : "verdict wrong", id: "align-verdict" }, verdict),
      el("p", { class: "note" }, `Log-probability of each token, the trainer's minus the engine's; ${samples.length} of ${plural(all, "sample")}, the farthest apart first. Choose a token to see its modules.`),
      this.legend, this.heat.element, this.depth);
  }
  at(row, column) {
    return row * this.block.data.length + column;
  }
  update() {
    const { samples, length } = this.block.data, { logprobs, tokens } = this.block.arrays;
    const cell = (row, column) => {
      const value = logprobs[this.at(row, column)];
      if (tokens[this.at(row, column)] < 0) return null;
      return Number.isNaN(value) ? { kind: NULL_CELL } : { kind: NUMBER, value };
    };
    const known = logprobs.filter((value) => !Number.isNaN(value)), colors = new Colors(known);
    this.legend.replaceChildren(legendOf(colors, "trainer minus engine", [[NULL_CELL, "no log-probability on both sides"]]));
    const rows = samples.map((label) => ({ label: visible(label), title: label, indent: 0, fold: null }));
    this.heat.draw({ rows, columns: Array.from({ length }, (_, position) => String(position)), across: "position", cell, colors });
  }
  tokenText(row, column) {
    const token = this.block.arrays.tokens[this.at(row, column)], text = this.block.data.texts[token];
    return text === undefined ? `token ${token}` : `token ${token} ${JSON.stringify(text)}`;
  }
  describe(row, column) {
    const value = this.block.arrays.logprobs[this.at(row, column)];
    if (this.block.arrays.tokens[this.at(row, column)] < 0) return [visible(this.block.data.samples[row]), "no token"];
    const apart = Number.isNaN(value) ? "no log-probability on both sides" : `log-probability ${shortNumber(value, 3)} apart`;
    return [`${visible(this.block.data.samples[row])}, position ${column}`, visible(this.tokenText(row, column)), apart];
  }
  /** Show how far each module is apart at a token, in the order of execution. */
  choose(row, column) {
    const { values, samples, length, lowest, decades } = this.block.data, { codes } = this.block.arrays;
    const apartOf = (number) => {
      const code = codes[(number * samples.length + row) * length + column];
      return code && 10 ** (lowest + (decades * (code - 1)) / 254);
    };
    const lines = values.map(([path, name, bound], number) => [path, name, bound, apartOf(number)]).filter(([, , , apart]) => apart > 0);
    const first = lines.findIndex(([, , bound, apart]) => apart > bound);
    const body = lines.map(([path, name, bound, apart], number) => el("tr", { class: number === first ? "chosen" : "" },
      el("td", {}, valueText(path, "", name)), el("td", { class: "number" }, apart <= 10 ** lowest ? "0" : shortNumber(apart, 2)), el("td", { class: "number" }, shortNumber(bound, 2)),
      el("td", {}, apart > bound ? (number === first ? "parts first" : "beyond") : "")));
    const titles = ["module", "apart", "bound", ""].map((title) => el("th", { scope: "col" }, title));
    this.depth.replaceChildren(
      el("h3", {}, this.describe(row, column).join(" · ")),
      lines.length ? el("div", { class: "scroll" }, el("table", { class: "grid" }, el("thead", {}, el("tr", {}, titles)), el("tbody", {}, body))) :
        el("p", { class: "note" }, "No module's value was recorded at this token on both sides. The preset records modules at few calls; the rule 'leaf=yes site=output keep=tokens' adds all."));
  }
}
