// The ranks: who they were, which is odd, and who had which chunk of a tensor.

const MAX_RANK_ROWS = 16, MAX_LAYOUTS = 8, MAX_GRID_ROWS = 32, GPUS = 8, RULE_RANKS = 4;
/** What the ranks may be coloured by: a title, and the number of a rank, given its facts and those of all ranks. */
const RANK_COLORS = {
  deviation: [DEVIATION_TEXT, null],
  far: ["share of its values far from the median of the ranks", (one) => (one.compared ? one.far / one.compared : null)],
  alone: ["values not finite where most ranks' are", (one) => one.alone],
  step: ["steps behind the foremost rank", (one, all) => one.step === null ? null : all.reduce((most, other) => Math.max(most, other.step ?? 0), 0) - one.step],
  late: ["seconds since its last status, after the newest of all", (one) => one.late],
  dropped: ["rows dropped", (one) => one.dropped],
  rows: ["rows", (one) => one.rows],
};

/** Ranks of a live page: how far each is behind the foremost. Statuses are older than the rows, and the head has the step of these. */
function behind({ titles, rows, odd }) {
  const at = titles.indexOf("step"), foremost = rows.reduce((most, row) => Math.max(most, row[at] ?? 0), 0);
  return { odd, titles: titles.with(at, "steps behind"), rows: rows.map((row) => row[at] === null ? row : row.with(at, foremost - row[at])) };
}

class RanksPanel extends Panel {
  constructor(app, block) {
    super(app, { id: "ranks", title: "Ranks", data: block.data, isShown: block.data.rows.length > 0 });
    this.listens = ["rank", "by", "site", "root", "mode", "name"];
    const { titles, rows, odd } = block.data, newest = new Map();
    for (const row of rows) if (row[0] !== null) newest.set(row[0], Object.fromEntries(titles.map((title, index) => [title, row[index]])));
    this.ranks = [...newest.values()];
    const named = app.top.findings.filter(([, , mark]) => mark === "wrong").flatMap(([, , , , about]) => (about.rank ?? "").replace(/\(.*/, "").match(/\d+/g) ?? []);
    this.named = [...new Set(named.map(Number))];
    this.odd = new Set([...odd, ...(named.length < this.ranks.length ? this.named : [])]);
    this.isWhole = false;
  }
  build(section) {
    this.listed = el("div", { class: "scroll" });
    const { layouts, why_none: whyNone } = this.data;
    this.options = el("div", { class: "bar" });
    this.legend = el("div", {});
    this.heat = new HeatMap({
      label: "grid of ranks by node and GPU; arrow keys move, Enter chooses a rank", app: this.app, fold: () => {},
      describe: (row, column) => this.describe(this.at(row, column)),
      choose: (row, column) => this.at(row, column) && this.app.state.set({ rank: this.at(row, column).rank }),
    });
    this.hasGrid = this.ranks.length > GPUS;
    put(section, this.hasGrid && [this.options, this.legend, this.heat.element], this.listed, el("h3", {}, "Who had which chunk"),
      whyNone ? el("p", { class: "note" }, whyNone) :
        layouts.length ? this.pictures(layouts) :
          el("p", { class: "note" }, "Not known: no parameter, gradient or output of several ranks was recorded."));
  }
  pictures(layouts) {
    const some = (part) => el("div", { class: "layouts" }, part.map((layout) => this.layout(layout)));
    const whole = layouts.filter((one) => this.isWholeOf(one)), cut = layouts.filter((one) => !whole.includes(one));
    const more = cut.slice(MAX_LAYOUTS);
    return [
      whole.length > 0 && el("details", { class: "whole" }, el("summary", {}, `${plural(whole.length, "value")} that each rank had whole`),
        el("ul", { class: "checks" }, whole.map((one) => el("li", {}, `${this.titleOf(one)}: ${this.captionOf(one)}, ${this.ranksText(one.chunks.map(([rank]) => rank))}`)))),
      some(cut.slice(0, MAX_LAYOUTS)),
      more.length > 0 && el("details", {}, el("summary", {}, `${plural(more.length, "more value")}`), some(more))];
  }
  /** Whether there is nothing to draw, as each chunk is all of the tensor. */
  isWholeOf(one) {
    return one.shape !== null && !one.why && !one.missing.length && one.chunks.length > 0 &&
      one.chunks.every(([, shape, offsets, , , op]) => !op && offsets !== null && String(shape) === String(one.shape));
  }
  ranksText(ranks) {
    const text = [...new Set(ranks)];
    return `rank ${text.slice(0, 4).join(", ")}${text.length > 4 ? ` and ${text.length - 4} more` : ""}`;
  }
  titleOf(one) {
    return valueText(one.module, one.site, one.name);
  }
  captionOf(one) {
    return [one.shape === null ? "no single tensor" : `[${one.shape.join(", ")}]`, one.source && `layout: ${one.source}`,
      one.scale && `scale: ${one.scale}`, one.missing.length && `missing: rank ${one.missing.join(", ")}`].filter(Boolean).join(" · ");
  }
  /** The ranks of each node, in lines of so many nodes that the lines are few. */
  get lines() {
    const nodes = new Map();
    for (const one of this.ranks) {
      const node = one.node ?? Math.floor(one.rank / GPUS);
      nodes.set(node, [...(nodes.get(node) ?? []), one]);
    }
    const each = Math.ceil(nodes.size / MAX_GRID_ROWS), width = Math.max(...[...nodes.values()].map((some) => some.length));
    const lines = [];
    [...nodes.keys()].sort((a, b) => a - b).forEach((node, number) => {
      if (number % each === 0) lines.push({ first: node, ranks: [] });
      const line = lines[lines.length - 1], some = nodes.get(node).sort((a, b) => (a["local rank"] ?? a.rank) - (b["local rank"] ?? b.rank));
      line.last = node;
      if (line.ranks.length) line.ranks.push(null); // nodes are apart
      line.ranks.push(...some, ...new Array(width - some.length).fill(null));
    });
    return lines;
  }
  at(row, column) {
    return this.drawn.lines[row].ranks[column] ?? null;
  }
  async updateGrid() {
    const { run, state, choices } = this.app, lines = this.lines;
    const isPerRank = run.blocks.has(`${run.prefix}by-rank/deviation`), picture = isPerRank ? await run.picture("deviation", "by-rank") : null;
    const series = this.app.modules.rows.flatMap((_, number) => choices.seriesOf(number)), isOwn = picture?.cube.numColumns === run.axes.num_ranks;
    const sorted = this.ranks.map((one) => one.rank).sort((a, b) => a - b), columnOf = new Map(sorted.map((rank, index) => [rank, index]));
    const cellOf = (by, one) => {
      if (by === "deviation") {
        const cell = series.reduce((most, { number }) => outstanding(most, picture.cell(number, 0, columnOf.get(one.rank))), null);
        return cell && Object.assign(cell, { shade: Math.max(cell.value, 1) });
      }
      const value = RANK_COLORS[by][1](one, this.ranks);
      return { kind: value === null || value === undefined ? NULL_CELL : NUMBER, value: value ?? NaN };
    };
    const offered = Object.keys(RANK_COLORS).filter((by) => by === "deviation" ? isOwn && series.length : this.ranks.some((one) => RANK_COLORS[by][1](one, this.ranks) > 0));
    const by = offered.includes(state.get("by")) ? state.get("by") : offered[0] ?? "rows";
    const cells = new Map(this.ranks.map((one) => [one, Object.assign(cellOf(by, one) ?? { kind: HOLE }, { isMarked: this.odd.has(one.rank) || one.rank === state.get("rank") })]));
    this.drawn = { lines, by, cells };
    const colors = new Colors([...cells.values()].filter((cell) => cell.kind === NUMBER).map((cell) => cell.shade ?? cell.value));
    const title = RANK_COLORS[by][0] + (by === "deviation" ? `, ${choices.siteAndMode[0]}` : "");
    put(this.options.replaceChildren() ?? this.options, choice("ranks by", offered.map((one) => [one, RANK_COLORS[one][0]]), by, (value) => state.set({ by: value }), { id: "choose-by" }));
    this.legend.replaceChildren(legendOf(colors, title, by === "deviation" ? KIND_TEXTS.slice(0, 1) : []));
    const rows = lines.map(({ first, last }, number) => ({ label: first === last ? `node ${first}` : `${number ? "" : "nodes "}${first}–${last}`, title: "", indent: 0, fold: null }));
    const longest = lines.reduce((most, line) => (line.ranks.length > most.ranks.length ? line : most), lines[0]);
    const num = lines[0].last - lines[0].first + 1, wide = (longest.ranks.length + 1) / num;
    const ticks = num > 1 ? Array.from({ length: num }, (_, node) => [Math.floor((node + 0.5) * wide - 0.5), `+${node}`]) : null; // of lines of several nodes
    this.heat.draw({ rows, columns: longest.ranks.map((one) => String(one?.["local rank"] ?? "")), across: ticks ? "node" : "GPU", ticks, cell: (r, c) => cells.get(this.at(r, c)) ?? null, colors });
  }
  describe(one) {
    if (one === null) return ["no rank"];
    const { by, cells } = this.drawn, cell = cells.get(one);
    const value = cell.kind === NUMBER ? shortNumber(cell.value) : cell.kind === NONFINITE ? `${cell.nan} NaN, ${cell.inf} infinite` : "not known";
    return [`rank ${one.rank}${this.odd.has(one.rank) ? ", which stands out" : ""}`, [one.host, one.node !== null && `node ${one.node}`, one["local rank"] !== null && `GPU ${one["local rank"]}`].filter(Boolean).join(", "),
      `${RANK_COLORS[by][0]}: ${value}`, [one.state, one.step !== null && !this.app.top.live && `step ${one.step}`].filter(Boolean).join(", "), ...(one.farthest ? [`farthest from the median: ${visible(one.farthest)}`] : [])];
  }
  async update() {
    if (this.hasGrid) await this.updateGrid();
    const { titles, rows, odd } = this.app.top.live ? behind(this.data) : this.data;
    const chosen = this.app.state.get("rank");
    const order = new Map(odd.map((rank, index) => [rank, index]));
    const isFirst = (row) => row[0] === chosen ? -1 : order.get(row[0]) ?? (row[9] > 0 || (this.hasGrid && this.odd.has(row[0])) ? odd.length : Infinity);
    const alone = rows.filter((row) => row[9] > 0).map((row) => row[0]);
    const sorted = [...rows].sort((a, b) => isFirst(a) - isFirst(b) || 0);
    const shown = this.isWhole ? rows : sorted.slice(0, MAX_RANK_ROWS);
    const isKept = titles.map((_, index) => rows.some((row) => row[index] !== null && row[index] !== "" && !(row[index] === 0 && index > 6)));
    const explain = { rows: "rows that the rank wrote, with those of the probe", far: "values far from the median of all ranks", alone: "values not finite where most ranks' are", compared: "values that were compared", farthest: "the value that is farthest from the median of all ranks",
      step: "of its last status", "steps behind": "behind the foremost rank, by the last status of each", late: "seconds since its last status, after the newest of all ranks" };
    const head = titles.map((title, index) => isKept[index] && el("th", { scope: "col", title: explain[title] ?? null }, title));
    const body = shown.map((row) => el("tr", { class: (order.has(row[0]) ? "odd" : "") + (row[0] === chosen ? " chosen" : "") },
      row.map((value, index) => isKept[index] && el("td", { class: typeof value === "number" ? "number" : "" },
        value === null ? "" : typeof value === "number" ? value.toLocaleString("en") : value))));
    const said = odd.length ? `Odd: ${odd.slice(0, 20).map((rank) => `rank ${rank}`).join(", ")}. ` :
      rows.length > 2 && !alone.length && !this.named.length ? "No rank is odd: of the values that were compared, no rank has more far from the median of all than the others. " : "";
    const few = this.ranks.length > 1 && this.ranks.length < RULE_RANKS ? `The rule outlier_rank judges from ${RULE_RANKS} data-parallel ranks on by their peers alone: of ${this.ranks.length}, it compares with how far apart they usually move. ` : "";
    const found = this.hasGrid && this.named.length ? `What stands out of the run names ${this.ranksText(this.named)}. ` : "";
    const more = found + (alone.length ? `Values that are not finite where most ranks' are: ${this.ranksText(alone)}.` : "");
    this.listed.replaceChildren(el("p", { class: "note" }, said + few + more),
      el("table", { class: "grid" }, el("thead", {}, el("tr", {}, head)), el("tbody", {}, body)),
      ...(rows.length > shown.length ? [el("button", { type: "button", onclick: () => { this.isWhole = true; this.update(); } }, `all ${plural(rows.length, "rank")}`)] : []));
  }
  layout(one) {
    return el("figure", { class: "layout" }, el("figcaption", {}, el("strong", {}, this.titleOf(one)), el("span", { class: "dim" }, this.captionOf(one))),
      one.why && el("p", { class: "note" }, one.why), this.picture(one));
  }
  /** The tensor as a box, cut along the first two dims that are cut; else a list. */
  picture(one) {
    const chunks = one.chunks.filter(([, , offsets]) => offsets !== null);
    const describe = ([rank, shape, offsets, isCopy, placements, op, microStep]) =>
      [`rank ${rank}: [${shape.join(", ")}]`, offsets && `from [${offsets.join(", ")}]`, placements, op && `summand (${op})`, isCopy && "copy",
        microStep > 0 && `micro-step ${microStep}`].filter(Boolean).join(", ");
    const list = el("details", {}, el("summary", {}, plural(one.num_chunks, "chunk")), el("ul", { class: "checks" }, one.chunks.map((chunk) => el("li", {}, describe(chunk)))));
    if (one.shape === null || !one.shape.length || chunks.length < one.chunks.length || one.shape.some((size) => size < 1)) return list;
    const cut = one.shape.map((_, dim) => dim).filter((dim) => new Set(chunks.map(([, , offsets]) => offsets[dim])).size > 1);
    if (cut.length > 2) return list;
    const [down, across] = cut.length === 2 ? cut : cut.length === 1 ? (cut[0] === one.shape.length - 1 && one.shape.length > 1 ? [null, cut[0]] : [cut[0], null]) : [null, null];
    const ranksOf = new Map();
    for (const [rank, shape, offsets] of chunks) {
      const span = (dim) => dim === null ? [0, 1] : [offsets[dim] / one.shape[dim], shape[dim] / one.shape[dim]];
      const region = JSON.stringify([span(down), span(across)]);
      ranksOf.set(region, [...(ranksOf.get(region) ?? []), rank]);
    }
    const box = el("div", { class: "tensor", role: "img", "aria-label": `${plural(ranksOf.size, "different chunk")}` }, [...ranksOf].map(([region, ranks], number) => {
      const [[top, height], [left, width]] = JSON.parse(region);
      return el("div", { class: "chunk", style: {
        top: `${top * 100}%`, height: `${height * 100}%`, left: `${left * 100}%`, width: `${width * 100}%`,
        "border-color": lineColor(number),
      } }, this.ranksText(ranks));
    }));
    return el("div", {}, box, list);
  }
}
