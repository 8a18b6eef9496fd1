// The head of the page: what ran in one line, the loss with flags, and a table of what stands out.

const IN_SHORT = ["model", "ranks", "layout", "steps", "state"], COLUMNS = ["module", "value", "step", "rank", "size"];
const MAX_FINDINGS = 8, NEAR_STEPS = 24, FEW_STEPS = 100;

class TopPanel extends Panel {
  constructor(app) {
    super(app, { id: "top", title: "Run" });
    this.numbers = new NumbersPanel(app, "head");
    this.listens = this.numbers.listens;
  }
  build(section) {
    this.line = el("summary", { class: "line" });
    this.more = el("div", { class: "more" });
    this.findings = el("div", {});
    put(section, el("details", { class: "facts-line" }, this.line, this.more));
    this.numbers.build(section);
    put(section, this.findings);
  }
  async update() {
    const { top } = this.app;
    if (this.drawn !== top) {
      this.drawn = top; // a live page has a newer one now and then
      this.tell(top);
    }
    await this.numbers.update();
  }
  tell(top) {
    const facts = top.facts.filter(([name]) => name !== "rule"), rules = top.facts.filter(([name]) => name === "rule");
    const verdict = top.verdict ? top.verdict : top.num_missing ? `not whole: ${plural(top.num_missing, "finding")} of what is damaged or missing` : "whole, as far as recorder doctor sees";
    const mood = top.num_missing ? "verdict wrong" : top.verdict && !top.checks.length ? "dim" : "verdict right";
    this.line.replaceChildren(...(this.app.other ? [el("span", { class: "fact" }, "A alone:")] : []), ...facts.filter(([name]) => IN_SHORT.includes(name)).map(([name, value]) => el("span", { class: "fact" }, el("span", { class: "dim" }, name), ` ${value}`)),
      el("span", { class: mood, id: "verdict" }, verdict));
    const list = (title, texts) => texts.length > 0 && el("details", {}, el("summary", {}, title), el("ul", { class: "checks" }, texts.map((text) => el("li", {}, text))));
    const open = [...this.more.querySelectorAll("details")].map((one) => one.open);
    this.more.replaceChildren();
    put(this.more, el("table", { class: "facts" }, facts.map(([name, value]) => el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, value)))),
      el("div", {}, top.checks.length > 0 && el("ul", { class: "checks" }, top.checks.map(([mark, text]) => el("li", { class: `check ${mark}` }, el("b", {}, mark), " " + text))),
        list(plural(rules.length, "rule"), rules.map(([, text]) => text)), list(plural(top.notes.length, "note"), top.notes)));
    [...this.more.querySelectorAll("details")].forEach((one, number) => { one.open = open[number] ?? false; });
    this.tellFindings(top.findings);
  }
  /** A table of faults: where each was seen, since when, how large, and what to do; what followed from it is folded below. */
  tellFindings(findings) {
    const open = [...this.findings.querySelectorAll("details")].map((one) => one.open);
    const { against } = this.app, nothing = against && findings.find(([, , mark]) => mark === "right"), ofA = nothing ? nothing[0].replace("The", "A alone: the") : "Of A alone";
    const isTable = findings.some(([, , , , about]) => about.module);
    const rows = findings.map((finding, number) => {
      if (finding === nothing) return "";
      const [text, link, mark, more, about] = finding;
      const words = ([text, link]) => Object.keys(link).length ? el("a", { href: this.app.state.address(this.target(link)) }, text) : el("span", {}, text);
      const followers = more.length > 0 && el("details", {}, el("summary", {}, `with it ${plural(more.length, "more finding")}`),
        el("ul", { class: "findings" }, more.map((one) => el("li", { class: one[2] }, words(one)))));
      const isWhole = !about.module && !about.size;
      return el("tr", { class: mark, hidden: number >= MAX_FINDINGS && !this.isWhole }, el("td", { class: "flag-cell" }, el("span", { class: `flag ${mark}` }, this.label(number, mark))),
        el("td", { class: "what", colspan: isWhole && isTable ? COLUMNS.length + 1 : null }, words([about.what ?? text, link]),
          about.advice && el("div", { class: "dim" }, about.advice), about.type?.split("\n").map((line) => el("code", { class: "type" }, line)), followers),
        !isWhole && COLUMNS.map((name) => el("td", { class: name, "data-name": name }, (about[name] ?? "").replace(/^(since )?(steps?|ranks?) /, "$1"))));
    });
    this.findings.replaceChildren(...(against ? [el("p", { class: "dim", id: "of-a" }, `${ofA}. For B: `, el("code", {}, `recorder check ${against.data.typed_b}`))] : []), el("div", { class: "scroll" }, el("table", { class: "grid findings" },
      isTable && el("thead", {}, el("tr", {}, ["", "what stands out", ...COLUMNS].map((title) => el("th", { scope: "col" }, title === "size" ? "how large" : title)))), el("tbody", {}, rows))),
      findings.length > MAX_FINDINGS && !this.isWhole ? el("button", { type: "button", class: "quiet", onclick: () => { this.isWhole = true; this.tellFindings(findings); } }, `all ${plural(findings.length, "finding")}`) : "");
    [...this.findings.querySelectorAll("details")].forEach((one, number) => { one.open = open[number] ?? false; });
  }
  /** Faults are counted; what is a note or well has no number. */
  label(number, mark) {
    return mark === "right" ? "✓" : mark === "note" ? "–" : String(this.app.top.findings.slice(0, number + 1).filter((one) => one[2] === "wrong").length);
  }
  /** The findings that have a step, to be marked where steps are drawn. */
  flags() {
    return this.app.top.findings.map(([text, link, mark, , { first }], number) => ({
      step: first ?? null, text, mark, label: this.label(number, mark), href: this.app.state.address(this.target(link)),
    })).filter((flag) => flag.step !== null && flag.mark === "wrong");
  }
  /** What the address says where a finding is followed: its value on the map, and its lines beside that. */
  target(link) {
    const { root, module, site, name, step, stat, rank, from, to } = link, view = link.view === "lines" ? "map" : link.view;
    const values = { view, site, step, stat, module, from, to };
    if (site === "scalar") { // the number of the step itself, and what is near
      const [first, last] = this.app.run.axes.ends, isFew = step === undefined || last - first <= FEW_STEPS;
      const isHead = this.numbers.scalars.some((one) => one.path === module && one.name === name);
      return { view: isHead ? "top" : objectiveOf(name) ? "objectives" : "numbers", step, ...(isFew ? {} : { from: Math.max(step - NEAR_STEPS, first), to: Math.min(step + NEAR_STEPS, last) }) };
    }
    if (module !== undefined && site !== undefined) {
      const series = this.app.run.series.find((one) => one.path === module && one.site === site && one.name === (name ?? "") && (root === undefined || one.root === root));
      if (this.app.choices.roots.includes(root)) values.root = root;
      if (series) Object.assign(values, { mode: series.mode, pins: [keyOf(series)] });
    }
    if (rank !== undefined && view === "ranks") values.rank = rank;
    return values;
  }
}
