// The head of the page: what ran, whether its record is whole, what stands out.

class TopPanel {
  constructor(app) {
    this.app = app;
    this.id = "top";
    this.title = "Run";
    this.isShown = true;
    this.listens = [];
  }
  build(section) {
    const { top, state } = this.app;
    const facts = el("table", { class: "facts" }, top.facts.filter(([name]) => name !== "rule").map(([name, value]) =>
      el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, value))));
    const rules = top.facts.filter(([name]) => name === "rule");
    const finding = ([text, link, mark, more = []]) => {
      const isLink = Object.keys(link).length > 0;
      const words = isLink ? el("a", { href: state.address(this.target(link)) }, text) : el("span", {}, text);
      return el("li", { class: mark }, words, more.length > 0 && el("details", {},
        el("summary", {}, `${plural(more.length, "more finding")} of the same fault`), el("ul", { class: "findings" }, more.map(finding))));
    };
    const findings = el("ul", { class: "findings" }, top.findings.map(finding));
    const verdict = top.verdict ? top.verdict : top.num_missing ? `not whole: ${plural(top.num_missing, "finding")} of recorder doctor` : "whole, as far as recorder doctor sees";
    const checks = top.checks.map(([mark, text]) => el("li", { class: `check ${mark}` }, el("b", {}, mark), " " + text));
    put(section, 
      el("div", { class: "columns" },
        el("div", {}, el("h3", {}, "What ran"), facts,
          rules.length > 0 && el("details", {}, el("summary", {}, plural(rules.length, "rule")),
            el("ul", { class: "checks" }, rules.map(([, text]) => el("li", {}, text))))),
        el("div", {}, el("h3", {}, "What stands out"), findings,
          el("h3", {}, "Is it whole?"),
          el("p", { class: top.num_missing ? "verdict wrong" : top.verdict && !top.checks.length ? "dim" : "verdict right", id: "verdict" }, verdict),
          top.num_missing > 0 && el("ul", { class: "checks" }, checks.slice(0, Math.min(top.num_missing, 8))),
          top.checks.length > 0 && el("details", {}, el("summary", {}, top.verdict ? plural(top.checks.length, "rank") : `all ${plural(top.checks.length, "answer")} of recorder doctor`),
            el("ul", { class: "checks" }, checks.slice(top.num_missing).map((one) => one.cloneNode(true)))),
          top.notes.length > 0 && el("details", {}, el("summary", {}, plural(top.notes.length, "note")),
            el("ul", { class: "checks" }, top.notes.map((text) => el("li", {}, text)))))));
  }
  /** What the address says where a finding is followed. */
  target(link) {
    const { module, site, name, step, stat, view, rank, from, to } = link;
    const values = { view, site, step, stat, module, from, to };
    if (module !== undefined && site !== undefined) {
      const series = this.app.run.series.find((one) => one.path === module && one.site === site && one.name === (name ?? ""));
      if (series) Object.assign(values, { mode: series.mode, pins: [keyOf(series)] });
    }
    if (rank !== undefined && view === "ranks") values.rank = rank;
    return values;
  }
}
