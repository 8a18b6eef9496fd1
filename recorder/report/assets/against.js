// Two runs: where they differ first, the difference over the map, and both runs' values in lists.

class AgainstPanel extends Panel {
  constructor(app, block) {
    super(app, { id: "against", title: "Against", data: block.data, tree: new FoldedTree(app) });
    this.listens = ["site", "root", "mode", "name", "stat", "from", "to", "open", "shut", "step"];
  }
  build(section) {
    const { data, app } = this;
    const follow = (module, site, name, step, text) => {
      const series = app.run.series.find((one) => one.path === module && one.site === site && one.name === name);
      const values = { view: "lines", site, step, module, ...(series ? { mode: series.mode, pins: [keyOf(series)] } : {}) };
      return series ? el("a", { href: app.state.address(values) }, text) : el("span", {}, text);
    };
    const culprits = data.culprits.map((one, number) => el("li", { class: number ? "follows" : "wrong" }, follow(one.seen_at ?? one.module_path ?? "", one.site, one.name, one.step, one.text), one.hint && el("div", { class: "dim" }, one.hint)));
    const facts = data.facts.map(([title, a, b]) => el("tr", {}, el("th", { scope: "row" }, title), [a, b].map((text) => el("td", {}, text.split("\n").map((line) => el("div", {}, line || "-"))))));
    const differing = data.differing.map(([step, module, site, name, kind, abs, ofMax, statistic, rel]) => el("tr", {},
      el("td", { class: "number" }, String(step)), el("td", {}, follow(module, site, name, step, pathText(module))), el("td", {}, [site, name].filter(Boolean).join(" ")),
      el("td", {}, kind), el("td", { class: "number" }, shortNumber(abs)), el("td", { class: "number" }, shortNumber(ofMax ?? rel)), el("td", {}, statistic ?? "")));
    const only = (rows, name) => rows.length > 0 && el("details", {}, el("summary", {}, `${plural(rows.length, "value")} only in ${visible(name)}`),
      el("ul", { class: "checks" }, rows.map((row) => el("li", {}, `${valueText(row[1], row[2], row[3])}: ${plural(row[4], "row")}`))));
    const isEqual = data.verdict.startsWith("equal");
    put(section,
      el("p", { class: isEqual ? "verdict right" : "verdict wrong", id: "diff-verdict" }, `${data.verdict}: ${plural(data.num_differing, "value")} of ${data.num_compared.toLocaleString("en")} differ`),
      data.models.map((text) => el("p", { class: "verdict wrong" }, text)),
      el("ul", { class: "findings" }, culprits.slice(0, MAX_FINDINGS)),
      data.notes.map((text) => el("p", { class: "dim" }, text)),
      culprits.length > MAX_FINDINGS && el("details", {}, el("summary", {}, `${plural(culprits.length - MAX_FINDINGS, "more culprit")}, which may follow from the first`), el("ul", { class: "findings" }, culprits.slice(MAX_FINDINGS))),
      el("table", { class: "facts unlike" }, el("thead", {}, el("tr", {}, ["", `A: ${data.a}`, `B: ${data.b}`].map((title) => el("th", { scope: "col" }, title)))),
        el("tbody", {}, facts.length ? facts : el("tr", {}, el("td", {}), el("td", { colspan: 2, class: "dim" }, "ranks, layout, steps, versions and rules are the same")))));
    this.legend = el("div", {});
    this.heat = new HeatMap({
      label: "map of how far two runs are apart; arrow keys move, Enter shows the lines",
      describe: (row, column) => this.describe(row, column),
      choose: (row, column) => {
        const cell = this.drawn.cells[row][column], series = cell?.series ?? this.drawn.rows[row].series[0];
        if (!series) return;
        app.state.set({ pins: [keyOf(series)], step: this.drawn.columns[column].first, module: series.path });
        app.beside();
      },
      fold: (row) => this.tree.turn(this.drawn.rows[row]),
      app,
    });
    put(section, el("h3", {}, "How far the statistic is apart, of the larger one"), this.legend, this.heat.element,
      differing.length > 0 && el("details", {}, el("summary", {}, `the first ${plural(differing.length, "value")} that differ`),
        el("div", { class: "scroll" }, el("table", { class: "grid" }, el("thead", {}, el("tr", {}, ["step", "module", "value", "kind", "max abs", "of max", "statistic"].map((title) => el("th", { scope: "col" }, title)))), el("tbody", {}, differing)))),
      only(data.only_a, "A"), only(data.only_b, "B"));
  }
  async update() {
    const { run, other, choices, axis } = this.app;
    const { statistic } = choices;
    const [picture, beside, apart] = await Promise.all([run.picture(statistic), other.picture(statistic), run.cube(statistic, "apart")]);
    const rows = this.tree.rows((number) => choices.seriesOf(number).filter((one) => this.otherOf(one) !== null));
    const all = rows.flatMap((row) => row.series), known = new Set([...picture.columnsWith(all), ...(beside?.columnsWith(all.map((one) => this.otherOf(one))) ?? [])]);
    const [culprit] = this.data.culprits, values = [], columns = axis.columns(run.steps, [...known].sort((a, b) => a - b), (c) => run.lastStep(c));
    const cells = rows.map((row) => {
      const line = [];
      const pairs = row.series.map((one) => [one, this.otherOf(one)]);
      for (const { c } of columns) {
        let outlier = null;
        for (const [one, two] of pairs) {
          const a = picture.cell(one.number, run.mainLane, c), b = beside ? beside.cell(two.number, other.mainLane, c) : { kind: HOLE, value: NaN };
          let cell = { kind: Math.min(a.kind, b.kind), value: NaN, nan: 0, inf: 0 };
          if (a.kind === NONFINITE || b.kind === NONFINITE) cell = { kind: NONFINITE, value: NaN, nan: (a.nan ?? 0) + (b.nan ?? 0), inf: (a.inf ?? 0) + (b.inf ?? 0) };
          else if (cell.kind === NUMBER && apart !== null) Object.assign(cell, { value: apart.values[apart.at(one.number, 0, c)], digits: apart.digits[apart.at(one.number, 0, c)] });
          else if (cell.kind === NUMBER) cell.kind = NULL_CELL;
          Object.assign(cell, { series: one, a, b, isMarked: culprit && one.path === (culprit.seen_at ?? culprit.module_path) && one.site === culprit.site && run.steps[c] <= culprit.step && culprit.step <= run.lastStep(c) });
          if (culprit?.is_bad && cell.kind === NONFINITE && culprit.step <= run.lastStep(c)) Object.assign(cell, { isFirst: cell.isMarked, isLater: !cell.isMarked });
          outlier = outstanding(outlier, cell);
        }
        if (outlier?.kind === NUMBER) values.push(outlier.value);
        line.push(outlier);
      }
      return line;
    });
    this.drawn = { rows, cells, columns };
    const colors = new Colors(values);
    this.legend.replaceChildren(legendOf(colors, `${choices.title}: share apart`, culprit?.is_bad ? [[NONFINITE, "the first NaN or infinity"], [NONFINITE, "after it", true], ...KIND_TEXTS.slice(1)] : KIND_TEXTS));
    this.heat.draw({ rows, columns, cell: (r, c) => cells[r][c], colors });
  }
  /** The series of the second run that is drawn beside one of the first. */
  otherOf(series) {
    const number = this.data.pairs[series.number];
    return number === undefined || number < 0 ? null : this.app.other.series[number];
  }
  describe(row, column) {
    const cell = this.drawn.cells[row][column], step = this.drawn.columns[column].first;
    const lines = [cell?.series ? valueText(cell.series.path, cell.series.site, cell.series.name) : this.drawn.rows[row].label, `step ${step}`];
    if (cell?.kind === NUMBER) lines.push(`A: ${shortNumber(cell.a.value, 4, cell.a.digits)}, B: ${shortNumber(cell.b.value, 4, cell.b.digits)}`, `${shortNumber(100 * cell.value, 3, cell.digits)} % apart`);
    else if (cell?.kind === NONFINITE) lines.push(`${cell.nan} NaN, ${cell.inf} infinite in the two together`);
    else lines.push("not in both runs");
    return lines;
  }
}
