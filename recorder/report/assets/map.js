// The map: a statistic of a site over two of module, step and rank.

const MANY_ROWS = 70, FEW_ROWS = 4;
const NO_ROW_TEXTS = { "": "", frozen: "frozen: requires_grad is False, so no step changes it", "in no optimizer": "in no optimizer: no step changes it" };
const USUAL_UPDATE = 1e-3, DEVIATION_TEXT = "quartile ranges from the median of the ranks; up to one is usual";
const UPDATE_TEXT = "How far the step of the optimizer moved the weight, by the probe, over the norm of the weight: 1e-3 is usual. ";
const SAMPLE_TEXT = "About: of a sample of 1,024 elements; parameters of at most 1,024 elements are exact.";

const NO_UPDATE_TEXT = "a vector, such as a bias or the weight of a norm, is not set against its norm";
function hasNoUpdate(choices, series) {
  return choices.statistic === "update" && series?.shape.includes(",") === false;
}

/** What the sizes of updates are, and where there are none. */
function updateTexts(run) {
  return [UPDATE_TEXT + SAMPLE_TEXT, ...(run.series.some((one) => one.site === "param" && !one.shape.includes(",")) ? [`Dotted: ${NO_UPDATE_TEXT}, as it may begin at zero.`] : [])];
}

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
    const order = ["output", "grad_output", "param", "grad", "update", "input", "grad_input", "buffer", "optim", "tap"];
    const modes = ["train", "eval", "no_grad"];
    const indexIn = (list, value) => (list.includes(value) ? list.indexOf(value) : list.length);
    return this.known = [...pairs.values()].sort((a, b) => indexIn(modes, a[1]) - indexIn(modes, b[1]) || indexIn(order, a[0]) - indexIn(order, b[0]));
  }
  get siteAndMode() {
    const all = this.sitesAndModes, { state } = this.app;
    return all.find(([site, mode]) => site === state.get("site") && mode === state.get("mode", mode)) ?? all.find((one) => !this.app.run.axes.bare?.includes(one.join(" "))) ?? all[0] ?? ["", ""];
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
    const { run } = this.app;
    return [...run.axes.statistics, "zero_count", "numel", ...(this.siteAndMode[0] === "param" && run.hasUpdates ? ["update"] : [])];
  }
  get statistic() {
    const { statistics } = this;
    return statistics.includes(this.app.state.get("stat")) ? this.app.state.get("stat") : statistics[this.app.run.axes.probed && statistics.includes("l2") ? statistics.indexOf("l2") : 0]; // the probe has norms alone
  }
  /** What is drawn, as a title. */
  get title() {
    return STATISTIC_TEXTS[this.statistic] + (this.statistic === "update" ? "" : ` of ${this.siteAndMode[0]}`);
  }
  get lane() {
    const { run, state } = this.app, number = Number(state.get("lane") ?? run.mainLane);
    const isKnown = Number.isInteger(number) && number >= ANY_RANK && number < run.lanes.length;
    return isKnown && (number >= 0 || run.lanes.length > 1) ? number : run.mainLane;
  }
  /** The models of a run whose values have the same names, as those of a GAN may; none where names tell models apart. */
  get roots() {
    if (this.knownRoots) return this.knownRoots;
    const known = new Map(), nameOf = (one) => [one.path, one.site, one.name, one.mode].join("\0");
    for (const one of this.app.run.series) known.set(nameOf(one), (known.get(nameOf(one)) ?? new Set()).add(one.root));
    return this.knownRoots = [...new Set([...known.values()].filter((roots) => roots.size > 1).flatMap((roots) => [...roots]))].sort();
  }
  get root() {
    const chosen = this.app.state.get("root");
    return this.roots.includes(chosen) ? chosen : this.roots[0] ?? null;
  }
  /** Whether a series is of the chosen model. */
  isOfModel({ root }) {
    return this.root === null || root === this.root || !this.roots.includes(root);
  }
  /** The series of a module that are chosen. */
  seriesOf(number, run = this.app.run) {
    const [site, mode] = this.siteAndMode, { name } = this;
    return (run.byModule.get(number) ?? []).filter(
      (one) => one.site === site && one.mode === mode && (name === null || one.name === name) && this.isOfModel(one));
  }
  siteText([site, mode]) {
    return site + (mode === "train" ? "" : ` (${mode})`);
  }
  bar() {
    const { app } = this, { state, run } = app;
    const [site, mode] = this.siteAndMode;
    const names = this.names;
    return el("div", { class: "bar", role: "toolbar", "aria-label": "what is drawn" },
      this.root !== null && choice("model", this.roots.map((one) => [one, one]), this.root, (value) => state.set({ root: value, pins: null }), { id: "choose-root" }),
      choice("value", this.sitesAndModes.map((one) => [one.join(" "), this.siteText(one)]), `${site} ${mode}`, (value) => {
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

/** Rows of the tree: modules that have such values, and what contains them, as far as it is unfolded. */
class FoldedTree {
  constructor(app) {
    this.app = app;
  }
  /** `seriesOf` gives the series of a module's number. */
  rows(seriesOf) {
    const { modules, state } = this.app, [site] = this.app.choices.siteAndMode;
    const has = new Map();
    const all = modules.below(modules.root).reverse(); // children before what contains them, as `below` gives parents first
    const find = state.get("find", "").toLowerCase(), depth = Number(state.get("depth", Infinity));
    const isFound = (node) => `${node.path} ${modules.className(node.number)}`.toLowerCase().includes(find);
    for (const node of all) {
      const own = node.number === null || !isFound(node) ? [] : seriesOf(node.number), why = isFound(node) && !own.length ? modules.whyNone(node.number, site) : "";
      has.set(node, { own, why, count: (own.length || why ? 1 : 0) + node.children.reduce((sum, child) => sum + has.get(child).count, 0) });
    }
    const isOpen = find || depth < Infinity ? new Set(all.filter((node) => find || node.depth < depth)) :
      openLevels(modules.root, (node) => node.children.filter((child) => has.get(child).count), FEW_ROWS, MANY_ROWS);
    const opened = new Set(state.get("open", [])), shut = new Set(state.get("shut", [])), chosen = state.get("module", "");
    for (let at = chosen.indexOf("."); at > 0; at = chosen.indexOf(".", at + 1)) opened.add(chosen.slice(0, at)); // what was chosen is in sight
    const rows = [];
    const visit = (node, indent) => {
      const { own, why, count } = has.get(node);
      if (!count) return;
      const children = node.children.filter((child) => has.get(child).count);
      const open = children.length > 0 && !shut.has(node.path) && (opened.has(node.path) || isOpen.has(node));
      const isOnly = node === modules.root && !own.length;
      const series = open || !children.length ? own :
        modules.below(node).flatMap((one) => has.get(one).own);
      if (!isOnly || !open) {
        rows.push({
          node, series, why, indent, isChosen: node.path !== "" && node.path === chosen, fold: children.length ? (open ? "open" : "shut") : null,
          label: node === modules.root ? pathText("") : node.label,
          note: `${modules.className(node.number)}${why ? ` · ${why}` : ""}${open || !children.length ? "" : ` · ${count}`}`,
          title: `${pathText(node.path)} ${visible(modules.className(node.number))}\n${visible(modules.source(node.number))}`,
        });
      }
      if (open) for (const child of children) visit(child, indent + (isOnly ? 0 : 1));
    };
    visit(modules.root, 0);
    return rows;
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

class MapPanel extends Panel {
  constructor(app) {
    super(app, { id: "map", title: "Map", isShown: app.run.series.length > 0, tree: new FoldedTree(app) });
    this.listens = ["site", "root", "mode", "name", "stat", "lane", "axes", "from", "to", "open", "shut", "step", "module", "colors", "find", "depth"];
  }
  build(section) {
    this.options = el("div", { class: "bar" });
    this.legend = el("div", {});
    this.note = el("p", { class: "note" });
    this.heat = new HeatMap({
      label: "map of modules and steps; arrow keys move, Enter shows the line, space folds, plus, minus and 0 zoom",
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
  bar() {
    const { state, modules } = this.app, deepest = Math.max(...[...modules.nodes.values()].map((node) => node.depth));
    const depths = Array.from({ length: Math.min(deepest, 8) }, (_, depth) => [String(depth + 1), plural(depth + 1, "level")]);
    return [
      choice("map of", this.axesOffered, this.axes, (value) => state.set({ axes: value }), { id: "choose-axes" }),
      !this.isDeviation && choice("colours", [["", "absolute"], ["median", "against the row's median"], ["first", "against the row's first step"]], state.get("colors", ""),
        (value) => state.set({ colors: value || null }), { id: "choose-colors" }),
      deepest > 1 && choice("unfolded", [["", "as room allows"], ...depths], state.get("depth", ""),
        (value) => state.set({ depth: value || null, open: [], shut: null }), { id: "choose-depth" }),
      el("label", { class: "choice" }, el("input", { type: "search", id: "find", placeholder: "find a module or class", "aria-label": "module or class to find",
        value: state.get("find"), oninput: (event) => state.set({ find: event.target.value || null }, false) })),
    ];
  }
  async update() {
    const { app } = this, { state, run, choices } = app;
    const isMany = run.blocks.has(`${run.prefix}by-rank/deviation`);
    this.isDeviation = isMany && this.axes !== "module-step";
    const statistic = choices.statistic;
    if (!this.options.contains(document.activeElement) || document.activeElement.id !== "find") {
      this.options.replaceChildren();
      put(this.options, ...this.bar());
    }
    const drawn = this.drawn = this.axes === "module-step" ? await this.moduleSteps(statistic) :
      this.axes === "module-rank" ? await this.moduleRanks(statistic, isMany) : await this.rankSteps(statistic, isMany);
    const hasFirst = this.markFirst(drawn);
    const colors = this.colorsOf(drawn);
    const title = this.isDeviation ? DEVIATION_TEXT : choices.title +
      (statistic === "update" ? `, against ${USUAL_UPDATE}` : colors.isRatio ? `, against the ${state.get("colors") === "first" ? "first step" : "median"} of its row` : "");
    const bad = hasFirst ? [[NONFINITE, "the first NaN or infinity"], [NONFINITE, "after it", true]] : [[NONFINITE, "NaN or infinite", Boolean(app.top.first)]];
    this.legend.replaceChildren(legendOf(colors, title, [...bad, ...KIND_TEXTS.slice(1)]));
    const step = state.get("step");
    const marked = step === null || !drawn.isOfSteps ? null : drawn.columns.findIndex((one) => one.first <= step && step <= one.last);
    this.heat.draw({ rows: drawn.rows, columns: drawn.columns, across: drawn.across, cell: (r, c) => drawn.cells[r][c], colors, marked });
    this.note.replaceChildren(...this.notes(drawn));
  }
  /** Tell the first cell that is not finite from those that came after it; returns whether it is on the map. */
  markFirst({ rows, cells, columns, isOfSteps, ranks }) {
    const { first } = this.app.top, { run } = this.app;
    if (!first) return false;
    let hasFirst = false;
    rows.forEach((row, r) => cells[r].forEach((cell, c) => {
      if (cell?.kind !== NONFINITE) return;
      const isThere = !row.series || row.series.some((one) => one.path === first.module && one.site === first.site && one.name === first.name);
      const isThen = isOfSteps ? columns[c].first <= first.step && first.step <= columns[c].last : cell.step === undefined || cell.step === first.step;
      const rank = ranks ? ranks[c] : row.lane !== undefined ? run.lane(row.lane).rank : null;
      cell.isFirst = isThere && isThen && (rank === null || first.rank === null || rank === first.rank) && cell.series?.site === first.site;
      cell.isLater = !cell.isFirst;
      hasFirst ||= cell.isFirst;
    }));
    return hasFirst;
  }
  /** The colours of numbers: of themselves, or of how many times they are what is usual in their row. */
  colorsOf({ cells }) {
    const kind = this.isDeviation ? null : this.app.choices.statistic === "update" ? "usual" : this.app.state.get("colors"), values = [];
    for (const row of cells) {
      const known = row.filter((cell) => cell?.kind === NUMBER), sizes = known.map((cell) => Math.abs(cell.value)).filter((size) => size > 0);
      const base = kind === "usual" ? USUAL_UPDATE : kind === "median" ? [...sizes].sort((a, b) => a - b)[sizes.length >> 1] : sizes[0];
      for (const cell of known) {
        if (this.isDeviation) cell.shade = Math.max(cell.value, 1);
        else if (kind) cell.shade = base > 0 ? Math.abs(cell.value) / base : 1;
        values.push(cell.shade ?? cell.value);
      }
    }
    return new Colors(values, Boolean(kind));
  }
  notes(drawn) {
    const { run, choices, modules, state } = this.app, find = state.get("find");
    if (find && drawn.isOfModules && !drawn.rows.length) return [el("span", { class: "wrong" }, `No module or class with ${choices.siteAndMode[0]} has "${visible(find)}" in its name.`)];
    const texts = choices.statistic === "update" ? updateTexts(run) : [];
    if (drawn.isOfSteps && run.isBinned) {
      texts.push(`${plural(run.axes.num_steps, "step")} in ${run.steps.length} columns: each shows the value that stands out most of its steps.`);
    }
    if (run.axes.global_steps !== null && drawn.isOfSteps && run.lane(choices.lane).kind === "global") {
      texts.push(`Values of all ranks together were made for ${plural(run.axes.global_steps, "step")} of this run; the others are holes here.`);
    }
    if (drawn.numOfRanks) texts.push(`${plural(drawn.numOfRanks, "row")} ${drawn.numOfRanks === 1 ? "has" : "have"} values of each rank and none of all: choose a rank.`);
    if (!run.axes.has_global && run.axes.num_ranks > 1) {
      texts.push("Values of all ranks together are not made of a run with so many rows in a step; `recorder stats --global` makes them.");
    }
    const dumps = drawn.isOfSteps ? this.app.dumps.over(drawn.columns) : [];
    if (dumps.length) texts.push(`${DUMP_MARK} on the axis: steps that ${plural(dumps.length, "trigger")} had the ranks write; the pointer says why.`);
    if (drawn.isOfSteps && this.app.flags().length) texts.push("▴ on the axis: a step at which something stands out.");
    if (drawn.isOfModules) {
      const isShown = ({ number }) => number !== null && (choices.seriesOf(number).length > 0 || modules.whyNone(number, choices.siteAndMode[0]));
      const hidden = modules.paths.filter((path) => !modules.below(modules.node(path)).some(isShown)).length; // a container of what is shown has a row
      if (hidden) texts.push(`${plural(hidden, "module")} ${hidden === 1 ? "has" : "have"} no ${choices.siteAndMode[0]} and no row of ${hidden === 1 ? "its" : "their"} own.`);
    }
    const [site, mode] = choices.siteAndMode;
    const others = choices.sitesAndModes.filter((one) => one[0] === site && one[1] !== mode).map((one) =>
      el("a", { href: state.address({ ...state.values, view: "map", site, mode: one[1], name: null }) }, choices.siteText(one)));
    const also = others.length ? [el("span", {}, "Values in another mode: ", ...others.flatMap((one) => [one, " "]))] : [];
    return [...texts.map((text) => el("span", {}, text + " ")), ...also];
  }
  /** Of some series on a lane, at some columns, the cell that stands out. */
  outlier(picture, some, lane, columns) {
    let outlier = null;
    for (const series of some) {
      for (const c of columns) {
        const cell = picture.cell(series.number, lane, c);
        outlier = outstanding(outlier, Object.assign(cell, { series, step: this.app.run.steps[c] }));
      }
    }
    return outlier;
  }
  /** The columns with a value of some series, on the axis of steps. */
  columnsOf(picture, some) {
    const { run, axis } = this.app;
    return axis.columns(run.steps, picture.columnsWith(some), (c) => run.lastStep(c));
  }
  async moduleSteps(statistic) {
    const { run, choices } = this.app, picture = await run.picture(statistic);
    const rows = this.tree.rows((number) => choices.seriesOf(number)), columns = this.columnsOf(picture, rows.flatMap((row) => row.series));
    const cells = rows.map((row) => columns.map(({ c }) => this.outlier(picture, row.series, choices.lane, [c])));
    const isOfRanks = (row, r) => cells[r].every((cell) => cell === null || cell.kind === HOLE) && row.series.some((one) => columns.some(({ c }) => picture.cell(one.number, ANY_RANK, c).kind !== HOLE));
    return { rows, cells, columns, isOfSteps: true, isOfModules: true, lane: choices.lane, numOfRanks: run.lane(choices.lane).kind === "global" ? rows.filter(isOfRanks).length : 0 };
  }
  /** Over ranks a cell shows what stands out of all steps. */
  async moduleRanks(statistic, isMany) {
    const { run, choices } = this.app;
    const rows = this.tree.rows((number) => choices.seriesOf(number));
    const picture = isMany ? await run.picture("deviation", "by-rank") : await run.picture(statistic);
    const lanes = [...run.lanes.keys()].filter((lane) => run.lanes[lane].kind === "rank"), { numColumns } = picture.cube;
    const ranks = isMany ? Array.from({ length: numColumns }, (_, c) => this.rankOf(c, numColumns)) : lanes.map((lane) => run.lanes[lane].rank);
    const steps = isMany ? [] : this.columnsOf(picture, rows.flatMap((row) => row.series)).map(({ c }) => c);
    const cells = rows.map((row) => ranks.map((_, c) => {
      const cell = isMany ? this.outlier(picture, row.series, 0, [c]) : this.outlier(picture, row.series, lanes[c], steps);
      return isMany && cell ? Object.assign(cell, { step: undefined }) : cell;
    }));
    return { rows, cells, columns: ranks.map(String), across: "rank", ranks, isOfModules: true };
  }
  rankOf(bin, numBins) {
    const { num_ranks: num, ranks } = this.app.run.axes;
    return ranks.length === numBins ? ranks[bin] : Math.ceil((bin * num) / numBins);
  }
  async rankSteps(statistic, isMany) {
    const { run, choices, state, axis } = this.app;
    if (isMany) {
      const picture = await run.picture("deviation", "rank-steps");
      const site = run.axes.sites.indexOf(choices.siteAndMode[0]), { numLanes, numColumns } = picture.cube;
      const rows = Array.from({ length: numLanes }, (_, bin) => ({ label: `rank ${this.rankOf(bin, numLanes)}`, title: "", indent: 0, fold: null }));
      const steps = Array.from({ length: numColumns }, (_, c) => run.steps[Math.ceil((c * run.steps.length) / numColumns)]);
      const columns = axis.columns(steps, undefined, (c) => (run.steps.length > numColumns && c + 1 < numColumns ? steps[c + 1] - 1 : steps[c]));
      return { rows, cells: rows.map((_, bin) => columns.map(({ c }) => picture.cell(site, bin, c))), columns, isOfSteps: true };
    }
    const picture = await run.picture(statistic);
    const module = state.get("module"), number = module === null ? undefined : this.app.modules.numberOf.get(module);
    let series = number === undefined ? [] : choices.seriesOf(number);
    if (!series.length) series = this.app.modules.rows.flatMap((_, one) => choices.seriesOf(one));
    const rows = run.lanes.map((_, lane) => ({ label: run.laneName(lane), title: "", indent: 0, fold: null, lane, series }));
    const columns = this.columnsOf(picture, series);
    const cells = rows.map((row) => columns.map(({ c }) => this.outlier(picture, series, row.lane, [c])));
    return { rows, cells, columns, isOfSteps: true };
  }
  describe(row, column) {
    const { run, choices, gaps } = this.app, { rows, ranks, isOfSteps, lane } = this.drawn, at = this.drawn.columns[column];
    const cell = this.drawn.cells[row][column], series = cell?.series ?? rows[row].series?.[0];
    const lines = [visible(series ? valueText(series.path, series.site, series.name) : rows[row].label)];
    if (series?.shape) lines.push(`${series.dtype} ${series.shape}`);
    if (isOfSteps) lines.push(at.last > at.first ? `steps ${at.first} to ${at.last}` : `step ${at.first}`);
    if (ranks) lines.push(`rank ${ranks[column]}` + (cell?.step !== undefined ? `, step ${cell.step}` : ""));
    else if (lane !== undefined || rows[row].lane !== undefined) lines.push(run.laneName(lane ?? rows[row].lane));
    if (rows[row].series?.length > 1) lines.push(`what stands out of ${plural(rows[row].series.length, "value")}`);
    const what = this.isDeviation ? "quartile ranges from the median" : STATISTIC_TEXTS[choices.statistic];
    if (cell === null) lines.push(NO_ROW_TEXTS[rows[row].why] || "has no such value of its own");
    else if (cell.kind === NONFINITE) {
      lines.push([cell.nan && `${cell.nan} NaN`, cell.inf && `${cell.inf} infinite`].filter(Boolean).join(", "));
      if (cell.isFirst) lines.push("the first of the run that is not finite");
      if (!Number.isNaN(cell.value)) lines.push(`${what} of the others: ${shortNumber(cell.value, 4, cell.digits)}`);
    } else if (cell.kind === NUMBER) {
      lines.push(`${what}: ${shortNumber(cell.value, 4, cell.digits)}`);
      if (cell.shade !== undefined && !this.isDeviation && choices.statistic !== "update") lines.push(`${shortNumber(cell.shade, 3)} times the ${this.app.state.get("colors") === "first" ? "first" : "median"} of its row`);
      if (series && choices.statistic === "zero_count") lines.push(`of ${plural(series.numel, "element")}`);
    } else {
      lines.push(...gaps.why(cell, series, isOfSteps ? at.first : null, lane ?? rows[row].lane ?? null, ranks?.[column] ?? null));
    }
    return lines;
  }
  choose(row, column, isMore) {
    const { state } = this.app;
    const cell = this.drawn.cells[row][column], series = cell?.series ?? this.drawn.rows[row].series?.[0];
    if (!series) return;
    const key = keyOf(series), pins = isMore ? state.get("pins", []) : [];
    const step = this.drawn.isOfSteps ? this.drawn.columns[column].first : cell?.step ?? null;
    state.set({ pins: [...pins.filter((one) => JSON.stringify(one) !== JSON.stringify(key)), key], step, module: series.path });
    this.app.beside();
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
    if (hasNoUpdate(this.app.choices, series)) return [NO_UPDATE_TEXT];
    const kind = lane === null ? "rank" : run.lane(lane).kind;
    const reason = run.reasons.get(`${series.number} ${kind === "global" ? 1 : 0}`) ?? run.reasons.get(`${series.number} 0`);
    if (cell.kind === NULL_CELL) return ["recorded, without this statistic", ...(reason ? [visible(reason)] : [])];
    const who = rank ?? (lane === null ? null : run.lane(lane).rank);
    const gap = this.gaps.find((one) => one.sites.includes(series.site) && inRanges(one.modules, series.module) &&
      (step === null || inRanges(one.steps, step)) && (who === null || !one.ranks.length || inRanges(one.ranks, who)));
    if (gap) return ["not recorded", visible(gap.text)];
    if (kind === "global" && run.axes.global_steps !== null) return ["not made for this step of a large run"];
    if (kind === "global" && reason) return ["the ranks have values of their own", visible(reason)];
    return ["not recorded: the rules do not ask for it here, or there was no such value"];
  }
}
