// The map: a statistic of a site over two of module, step and rank.

const MANY_ROWS = 70;

/** What is chosen for all panels: site, mode, name, statistic, lane. */
class Choices {
  constructor(app) {
    this.app = app;
  }
  /** [site, mode] that there are, as the format lists sites. */
  get sitesAndModes() {
    if (this.known) return this.known;
    const pairs = new Map();
    for (const one of this.app.run.series) pairs.set(`${one.site} ${one.mode}`, [one.site, one.mode]);
    const order = ["output", "grad_output", "param", "grad", "input", "grad_input", "buffer", "optim", "tap"];
    const modes = ["train", "eval", "no_grad"];
    const indexIn = (list, value) => (list.includes(value) ? list.indexOf(value) : list.length);
    return this.known = [...pairs.values()].sort((a, b) => indexIn(modes, a[1]) - indexIn(modes, b[1]) || indexIn(order, a[0]) - indexIn(order, b[0]));
  }
  get siteAndMode() {
    const all = this.sitesAndModes, { state } = this.app;
    return all.find(([site, mode]) => site === state.get("site") && mode === state.get("mode", mode)) ?? all[0] ?? ["", ""];
  }
  get names() {
    const [site, mode] = this.siteAndMode, key = `${site} ${mode}`;
    this.namesOf ??= new Map();
    if (!this.namesOf.has(key)) {
      const some = this.app.run.series.filter((one) => one.site === site && one.mode === mode);
      this.namesOf.set(key, [...new Set(some.map((one) => one.name))]);
    }
    return this.namesOf.get(key);
  }
  get name() {
    const name = this.app.state.get("name");
    return name !== null && this.names.includes(name) ? name : null;
  }
  get statistics() {
    return [...this.app.run.axes.statistics, "zero_count"];
  }
  get statistic() {
    const { statistics } = this;
    return statistics.includes(this.app.state.get("stat")) ? this.app.state.get("stat") : statistics[0];
  }
  get lane() {
    const { run, state } = this.app, number = Number(state.get("lane") ?? run.mainLane);
    const isKnown = Number.isInteger(number) && number >= ANY_RANK && number < run.lanes.length;
    return isKnown && (number >= 0 || run.lanes.length > 1) ? number : run.mainLane;
  }
  /** The series of a module that are chosen. */
  seriesOf(number, run = this.app.run) {
    const [site, mode] = this.siteAndMode, { name } = this;
    return (run.byModule.get(number) ?? []).filter(
      (one) => one.site === site && one.mode === mode && (name === null || one.name === name));
  }
  bar() {
    const { app } = this, { state, run } = app;
    const siteText = ([site, mode]) => site + (mode === "train" ? "" : ` (${mode})`);
    const [site, mode] = this.siteAndMode;
    const names = this.names;
    return el("div", { class: "bar", role: "toolbar", "aria-label": "what is drawn" },
      choice("value", this.sitesAndModes.map((one) => [one.join(" "), siteText(one)]), `${site} ${mode}`, (value) => {
        const [newSite, newMode] = this.sitesAndModes.find((one) => one.join(" ") === value);
        state.set({ site: newSite, mode: newMode, name: null });
      }, { id: "choose-site" }),
      names.length > 1 && choice("name", [["*", "all names"], ...names.map((one) => ["=" + one, one || "(no name)"])],
        this.name === null ? "*" : "=" + this.name, (value) => state.set({ name: value === "*" ? null : value.slice(1) }),
        { id: "choose-name" }),
      choice("statistic", this.statistics.map((one) => [one, STATISTIC_TEXTS[one] ?? one]), this.statistic,
        (value) => state.set({ stat: value }), { id: "choose-stat" }),
      run.lanes.length > 1 && choice("of", [...run.lanes.keys(), ANY_RANK].map((lane) => [String(lane), run.laneName(lane)]), String(this.lane),
        (value) => state.set({ lane: Number(value) === run.mainLane ? null : value }), { id: "choose-lane" }));
  }
}

/** Which columns are looked at: those of the steps that were zoomed to. */
function columnRange(steps, state) {
  const from = state.get("from", -Infinity), to = state.get("to", Infinity);
  let first = steps.findIndex((step) => step >= from);
  if (first < 0) first = Math.max(steps.length - 1, 0);
  let last = steps.length;
  while (last > first + 1 && steps[last - 1] > to) last--;
  return [first, last];
}

/** Rows of the tree: modules that have such values, and what contains them, as far as it is unfolded. */
class FoldedTree {
  constructor(app) {
    this.app = app;
  }
  /** `seriesOf` gives the series of a module's number. */
  rows(seriesOf) {
    const { modules, state } = this.app;
    const has = new Map();
    const all = modules.below(modules.root).reverse(); // children before what contains them, as `below` gives parents first
    for (const node of all) {
      const own = node.number === null ? [] : seriesOf(node.number);
      has.set(node, { own, count: (own.length ? 1 : 0) + node.children.reduce((sum, child) => sum + has.get(child).count, 0) });
    }
    const isOpen = this.defaultOpen(has);
    const opened = new Set(state.get("open", [])), shut = new Set(state.get("shut", []));
    const rows = [];
    const visit = (node, indent) => {
      const { own, count } = has.get(node);
      if (!count) return;
      const children = node.children.filter((child) => has.get(child).count);
      const open = children.length > 0 && !shut.has(node.path) && (opened.has(node.path) || isOpen.has(node));
      const isOnly = node === modules.root && !own.length;
      const series = open || !children.length ? own :
        modules.below(node).flatMap((one) => has.get(one).own);
      if (!isOnly || !open) {
        rows.push({
          node, series, indent, fold: children.length ? (open ? "open" : "shut") : null,
          label: node === modules.root ? modules.className(node.number) || "(the model)" : node.label,
          note: open || !children.length ? "" : `${count}`,
          title: `${pathText(node.path)} ${visible(modules.className(node.number))}\n${visible(modules.source(node.number))}`,
        });
      }
      if (open) for (const child of children) visit(child, indent + (isOnly ? 0 : 1));
    };
    visit(modules.root, 0);
    return rows;
  }
  /** Containers that are open where nobody said anything: level by level, as long as the rows are few. */
  defaultOpen(has) {
    const { modules } = this.app;
    const open = new Set();
    let level = [modules.root], num = 1;
    while (level.length) {
      const next = level.flatMap((node) => node.children.filter((child) => has.get(child).count));
      if (num + next.length > MANY_ROWS && open.size) break;
      num += next.length;
      level.forEach((node) => open.add(node));
      level = next;
    }
    return open;
  }
  turn(row) {
    const { state } = this.app, path = row.node.path;
    const without = (name) => state.get(name, []).filter((one) => one !== path);
    if (row.fold === "open") state.set({ open: without("open"), shut: [...without("shut"), path] });
    else state.set({ open: [...without("open"), path], shut: without("shut") });
  }
}

function keyOf(series) {
  return [series.path, series.site, series.name, series.mode, series.root];
}

class MapPanel {
  constructor(app) {
    this.app = app;
    this.id = "map";
    this.title = "Map";
    this.isShown = app.run.series.length > 0;
    this.tree = new FoldedTree(app);
    this.listens = ["site", "mode", "name", "stat", "lane", "axes", "from", "to", "open", "shut", "step", "module"];
  }
  build(section) {
    this.options = el("div", { class: "bar" });
    this.legend = el("div", {});
    this.note = el("p", { class: "note" });
    this.heat = new HeatMap({
      label: "map of modules and steps; arrow keys move, Enter shows the line, space folds",
      describe: (row, column) => this.describe(row, column),
      choose: (row, column, isMore) => this.choose(row, column, isMore),
      fold: (row) => this.tree.turn(this.drawn.rows[row]),
      app: this.app,
    });
    put(section, this.options, this.legend, this.heat.element, this.note);
  }
  get axes() {
    const asked = this.app.state.get("axes", "module-step");
    return this.axesOffered.some(([value]) => value === asked) ? asked : "module-step";
  }
  get axesOffered() {
    const { run } = this.app;
    const offered = [["module-step", "modules over steps"]];
    if (run.axes.num_ranks > 1) offered.push(["module-rank", "modules over ranks"], ["rank-step", "ranks over steps"]);
    return offered;
  }
  async update() {
    const { app } = this, { state, run, choices } = app;
    const isMany = run.blocks.has(`${run.prefix}by-rank/deviation`);
    this.isDeviation = isMany && this.axes !== "module-step";
    const statistic = choices.statistic;
    const [from, to] = columnRange(run.steps, state);
    this.options.replaceChildren(
      choice("map of", this.axesOffered, this.axes, (value) => state.set({ axes: value }), { id: "choose-axes" }),
      ...(from > 0 || to < run.steps.length ? [el("button", { type: "button", onclick: () => state.set({ from: null, to: null }) },
        `all steps (now ${run.steps[from]} to ${run.lastStep(to - 1)})`)] : []));
    const drawn = this.axes === "module-step" ? await this.moduleSteps(statistic, from, to) :
      this.axes === "module-rank" ? await this.moduleRanks(statistic, from, to, isMany) :
        await this.rankSteps(statistic, from, to, isMany);
    this.drawn = drawn;
    const values = [];
    for (const row of drawn.cells) for (const cell of row) if (cell !== null && cell.kind === NUMBER) values.push(cell.value);
    const colors = new Colors(values);
    const title = this.isDeviation ? "quartile ranges from the median of the ranks" :
      `${STATISTIC_TEXTS[statistic]} of ${choices.siteAndMode[0]}`;
    this.legend.replaceChildren(legendOf(colors, title));
    const step = state.get("step");
    let marked = null;
    if (step !== null && drawn.isOfSteps) {
      for (let c = from; c < to; c++) if (run.steps[c] <= step && step <= run.lastStep(c)) marked = c - from;
    }
    this.heat.draw({ rows: drawn.rows, columns: drawn.columns, cell: (r, c) => drawn.cells[r][c], colors, marked, steps: drawn.isOfSteps ? run.stepsOf(from, to) : null });
    this.note.replaceChildren(...this.notes(drawn, from, to));
  }
  notes(drawn, from, to) {
    const { run, choices, modules } = this.app;
    const texts = [];
    if (drawn.isOfSteps && run.isBinned) {
      texts.push(`${plural(run.axes.num_steps, "step")} in ${run.steps.length} columns: each shows the value that stands out most of its steps.`);
    }
    if (run.axes.global_steps !== null && drawn.isOfSteps && run.lane(choices.lane).kind === "global") {
      texts.push(`Values of all ranks together were made for ${plural(run.axes.global_steps, "step")} of this large run; the others are holes here.`);
    }
    if (!run.axes.has_global && run.axes.num_ranks > 1) {
      texts.push("Values of all ranks together are not made of a run with so many rows in a step; `recorder stats --global` makes them.");
    }
    const dumps = drawn.isOfSteps ? this.app.dumps.over(run.stepsOf(from, to)) : [];
    if (dumps.length) texts.push(`${DUMP_MARK} on the axis: steps that ${plural(dumps.length, "trigger")} had the ranks write; the pointer says why.`);
    if (drawn.isOfModules) {
      const hidden = modules.rows.filter((_, number) => !choices.seriesOf(number).length).length;
      if (hidden) texts.push(`${plural(hidden, "module")} ${hidden === 1 ? "has" : "have"} no ${choices.siteAndMode[0]} and no row of ${hidden === 1 ? "its" : "their"} own.`);
    }
    return texts.map((text) => el("span", {}, text + " "));
  }
  async moduleSteps(statistic, from, to) {
    const { run, choices } = this.app;
    const picture = await run.picture(statistic);
    const rows = this.tree.rows((number) => choices.seriesOf(number));
    const cells = rows.map((row) => {
      const line = [];
      for (let c = from; c < to; c++) {
        let outlier = null;
        for (const series of row.series) {
          const cell = picture.cell(series.number, choices.lane, c);
          cell.series = series;
          outlier = outstanding(outlier, cell);
        }
        line.push(outlier);
      }
      return line;
    });
    const columns = run.steps.slice(from, to);
    return { rows, cells, columns: columns.map(String), steps: columns, isOfSteps: true, isOfModules: true, lane: choices.lane };
  }
  /** Over ranks a cell shows what stands out of all steps. */
  async moduleRanks(statistic, from, to, isMany) {
    const { run, choices } = this.app;
    const rows = this.tree.rows((number) => choices.seriesOf(number));
    const picture = isMany ? await run.picture("deviation", "by-rank") : await run.picture(statistic);
    const lanes = run.lanes.map((lane, number) => ({ ...lane, number })).filter((lane) => lane.kind === "rank");
    const columns = isMany ? Array.from({ length: picture.cube.numColumns }, (_, c) => this.rankOf(c, picture.cube.numColumns)) :
      lanes.map((lane) => lane.rank);
    const cells = rows.map((row) => columns.map((_, c) => {
      let outlier = null;
      for (const series of row.series) {
        const [lane, first, last] = isMany ? [0, c, c + 1] : [lanes[c].number, from, to];
        for (let at = first; at < last; at++) {
          const cell = picture.cell(series.number, lane, at);
          cell.series = series;
          if (!isMany) cell.step = run.steps[at];
          outlier = outstanding(outlier, cell);
        }
      }
      return outlier;
    }));
    return { rows, cells, columns: columns.map(String), ranks: columns, isOfModules: true };
  }
  rankOf(bin, numBins) {
    const { num_ranks: num, ranks } = this.app.run.axes;
    return ranks.length === numBins ? ranks[bin] : Math.ceil((bin * num) / numBins);
  }
  async rankSteps(statistic, from, to, isMany) {
    const { run, choices, state } = this.app;
    if (isMany) {
      const picture = await run.picture("deviation", "rank-steps");
      const site = run.axes.sites.indexOf(choices.siteAndMode[0]), { numLanes, numColumns } = picture.cube;
      const rows = Array.from({ length: numLanes }, (_, bin) => ({ label: `rank ${this.rankOf(bin, numLanes)}`, title: "", indent: 0, fold: null }));
      const cells = rows.map((_, bin) => Array.from({ length: numColumns }, (_, c) => picture.cell(site, bin, c)));
      const steps = Array.from({ length: numColumns }, (_, c) => run.steps[Math.ceil((c * run.steps.length) / numColumns)]);
      return { rows, cells, columns: steps.map(String), steps };
    }
    const picture = await run.picture(statistic);
    const module = state.get("module"), number = module === null ? undefined : this.app.modules.numberOf.get(module);
    let series = number === undefined ? [] : choices.seriesOf(number);
    if (!series.length) series = this.app.modules.rows.flatMap((_, one) => choices.seriesOf(one));
    const lanes = run.lanes.map((lane, at) => ({ ...lane, number: at }));
    const rows = lanes.map((lane) => ({ label: run.laneName(lane.number), title: "", indent: 0, fold: null, lane: lane.number }));
    const cells = rows.map((row) => {
      const line = [];
      for (let c = from; c < to; c++) {
        let outlier = null;
        for (const one of series) {
          const cell = picture.cell(one.number, row.lane, c);
          cell.series = one;
          outlier = outstanding(outlier, cell);
        }
        line.push(outlier);
      }
      return line;
    });
    const columns = run.steps.slice(from, to);
    return { rows, cells, columns: columns.map(String), steps: columns, isOfSteps: true };
  }
  describe(row, column) {
    const { run, choices, state, gaps } = this.app;
    const { rows, cells, steps, ranks } = this.drawn;
    const cell = cells[row][column], [from] = columnRange(run.steps, state);
    const series = cell?.series;
    const title = series ? valueText(series.path, series.site, series.name) : rows[row].label;
    const lines = [visible(title)];
    if (steps) {
      const last = this.drawn.isOfSteps ? run.lastStep(from + column) : steps[column];
      lines.push(last > steps[column] ? `steps ${steps[column]} to ${last}` : `step ${steps[column]}`);
    }
    if (ranks) lines.push(`rank ${ranks[column]}` + (cell?.step !== undefined ? `, step ${cell.step}` : ""));
    else if (this.drawn.lane !== undefined) lines.push(run.laneName(this.drawn.lane));
    if (rows[row].series?.length > 1) lines.push(`what stands out of ${plural(rows[row].series.length, "value")}`);
    const what = this.isDeviation ? "quartile ranges from the median" : STATISTIC_TEXTS[choices.statistic];
    if (cell === null) lines.push("has no such value of its own");
    else if (cell.kind === NONFINITE) {
      lines.push([cell.nan && `${cell.nan} NaN`, cell.inf && `${cell.inf} infinite`].filter(Boolean).join(", "));
      if (!Number.isNaN(cell.value)) lines.push(`${what} of the others: ${shortNumber(cell.value, 4, cell.digits)}`);
    } else if (cell.kind === NUMBER) {
      lines.push(`${what}: ${shortNumber(cell.value, 4, cell.digits)}`);
      if (series && choices.statistic === "zero_count") lines.push(`of ${plural(series.numel, "element")}`);
    } else {
      lines.push(...gaps.why(cell, series, steps?.[column] ?? null, this.drawn.lane ?? null, ranks?.[column] ?? null));
    }
    return lines;
  }
  choose(row, column, isMore) {
    const { state } = this.app;
    const cell = this.drawn.cells[row][column], series = cell?.series ?? this.drawn.rows[row].series?.[0];
    if (!series) return;
    const key = keyOf(series), pins = isMore ? state.get("pins", []) : [];
    const step = this.drawn.steps?.[column] ?? cell?.step ?? null;
    state.set({ pins: [...pins.filter((one) => JSON.stringify(one) !== JSON.stringify(key)), key], step, module: series.path });
    this.app.show("lines");
  }
}

/** Why values are not there. */
class Gaps {
  constructor(app, block) {
    this.app = app;
    this.gaps = block.data.gaps;
  }
  why(cell, series, step, lane, rank) {
    const { run } = this.app;
    if (!series) return ["not recorded"];
    const kind = lane === null ? "rank" : run.lane(lane).kind;
    const reason = run.reasons.get(`${series.number} ${kind === "global" ? 1 : 0}`) ?? run.reasons.get(`${series.number} 0`);
    if (cell.kind === NULL_CELL) return ["recorded, without this statistic", ...(reason ? [visible(reason)] : [])];
    const who = rank ?? (lane === null ? null : run.lane(lane).rank);
    const gap = this.gaps.find((one) => one.sites.includes(series.site) && inRanges(one.modules, series.module) &&
      (step === null || inRanges(one.steps, step)) && (who === null || !one.ranks.length || inRanges(one.ranks, who)));
    if (gap) return ["not recorded", visible(gap.text)];
    if (kind === "global" && run.axes.global_steps !== null) return ["not made for this step of a large run"];
    if (kind === "global" && reason) return ["the ranks' values make no single one", visible(reason)];
    return ["not recorded: the rules do not ask for it here, or there was no such value"];
  }
}
