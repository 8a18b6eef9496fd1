// The ranks: who they were, which is odd, and who had which chunk of a tensor.

const MAX_RANK_ROWS = 64, MAX_LAYOUTS = 8;

class RanksPanel {
  constructor(app, block) {
    this.app = app;
    this.id = "ranks";
    this.title = "Ranks";
    this.data = block.data;
    this.isShown = block.data.rows.length > 0;
    this.listens = ["rank"];
    this.isWhole = false;
  }
  build(section) {
    this.table = el("div", { class: "scroll" });
    const { layouts, why_none: whyNone } = this.data;
    put(section, this.table, el("h3", {}, "Who had which chunk"),
      whyNone ? el("p", { class: "note" }, whyNone) :
        layouts.length ? this.pictures(layouts) :
          el("p", { class: "note" }, "No value was recorded of which that could be said."));
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
  update() {
    const { titles, rows, odd } = this.data;
    const chosen = this.app.state.get("rank");
    const order = new Map(odd.map((rank, index) => [rank, index]));
    const sorted = [...rows].sort((a, b) => (order.get(a[0]) ?? Infinity) - (order.get(b[0]) ?? Infinity) || 0);
    const shown = this.isWhole ? rows : sorted.slice(0, MAX_RANK_ROWS);
    const isKept = titles.map((_, index) => rows.some((row) => row[index] !== null && row[index] !== "" && !(row[index] === 0 && index > 6)));
    const explain = { far: "values far from the median of all ranks", alone: "values not finite where most ranks' are", compared: "values that were compared" };
    const head = titles.map((title, index) => isKept[index] && el("th", { scope: "col", title: explain[title] ?? null }, title));
    const body = shown.map((row) => el("tr", { class: (order.has(row[0]) ? "odd" : "") + (row[0] === chosen ? " chosen" : "") },
      row.map((value, index) => isKept[index] && el("td", { class: typeof value === "number" ? "number" : "" },
        value === null ? "" : typeof value === "number" ? value.toLocaleString("en") : value))));
    const said = odd.length ? `Odd: ${odd.slice(0, 20).map((rank) => `rank ${rank}`).join(", ")}. ` :
      rows.length > 2 ? "No rank is odd: of the values that were compared, no rank has more far from the median of all than the others. " : "";
    this.table.replaceChildren(el("p", { class: "note" }, said),
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
