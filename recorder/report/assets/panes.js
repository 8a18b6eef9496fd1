// Panes: pictures that somebody put together and named, each with choices of its own. A server saves them with the run.

const PANE_NAMES = ["site", "root", "mode", "name", "stat", "lane", "axes", "log", "each", "from", "to", "step", "module", "pins", "open", "shut"];
const PANE_KINDS = { map: "Map", lines: "Lines", numbers: "Numbers of the step", histograms: "Histograms", units: "Units", graph: "Graph" };

/** The choices of one pane; they are no part of the page's address. */
class PaneState {
  constructor(values, changed) {
    this.values = { ...values };
    this.changed = changed;
  }
  get(name, otherwise = null) {
    return this.values[name] ?? otherwise;
  }
  set(changes) {
    Object.assign(this.values, changes);
    this.changed();
  }
}

class PanesPanel extends Panel {
  constructor(app, block) {
    super(app, { id: "panes", title: "Panes", canChange: app.source !== null, panes: block?.data.panes ?? [], drawn: [] });
    this.whyNotSaved = block?.data.why_not_saved ?? null;
    this.isShown = this.canChange || this.panes.length > 0;
  }
  build(section) {
    this.about = el("p", { class: "note" });
    this.grid = el("div", { class: "panes" });
    put(section, this.about, this.grid);
    this.arrange();
  }
  /** What the server has by now; another page may have changed it. */
  take(block) {
    this.whyNotSaved = block.data.why_not_saved;
    const isOwn = JSON.stringify(block.data.panes) === this.saved;
    if (!isOwn && JSON.stringify(block.data.panes) !== JSON.stringify(this.panes)) {
      this.panes = block.data.panes;
      this.arrange();
    }
    this.say();
  }
  say() {
    const empty = "None yet: each picture below has a button that keeps it here, with what it shows, under a name.";
    this.about.textContent = this.whyNotSaved ? `These panes are not saved with the run: ${visible(this.whyNotSaved)}. They stay until the server ends.` :
      this.panes.length || !this.canChange ? "" : empty;
    this.about.hidden = !this.about.textContent;
  }
  /** Keep what a panel shows. */
  add(kind, panel) {
    const { state } = this.app;
    const values = Object.fromEntries(PANE_NAMES.filter((name) => state.get(name) !== null).map((name) => [name, state.get(name)]));
    const [site, mode] = this.app.choices.siteAndMode;
    Object.assign(values, { site, mode, stat: this.app.choices.statistic });
    if (kind === "lines") values.pins = panel.pinned.map(keyOf);
    const about = kind === "lines" && panel.pinned.length === 1 ? `${pathText(panel.pinned[0].path)} ${site}` : site;
    const name = kind === "numbers" ? PANE_KINDS[kind] : `${PANE_KINDS[kind]}: ${STATISTIC_TEXTS[values.stat]} of ${about}`;
    this.panes.push({ name, kind, wide: kind === "map", state: values });
    this.arrange();
    this.save();
    this.app.show("panes");
  }
  /** Tell the server, once a while. */
  save() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => {
      this.saved = JSON.stringify(this.panes);
      this.app.source?.save(this.panes).then((why) => {
        this.whyNotSaved = why;
        this.say();
      });
    }, 250);
  }
  arrange() {
    this.say();
    this.drawn = this.panes.map((pane, index) => this.pane(pane, index));
    this.grid.replaceChildren(...this.drawn.map((one) => one.element));
    if (this.isBuilt) this.update();
  }
  pane(pane, index) {
    const { app } = this;
    const button = (text, label, onclick, isOff = false) => el("button", { type: "button", "aria-label": `${label} ${visible(pane.name)}`, title: label, onclick, disabled: isOff }, text);
    const move = (by) => {
      this.panes.splice(index, 1);
      this.panes.splice(index + by, 0, pane);
      this.arrange();
      this.save();
    };
    const name = this.canChange ? el("input", {
      type: "text", class: "pane-name", "aria-label": "name of the pane", value: visible(pane.name), maxlength: 200,
      onchange: (event) => {
        pane.name = event.target.value;
        this.save();
      },
    }) : el("strong", { class: "pane-name" }, pane.name);
    const body = el("div", { class: "pane-body" });
    const element = el("article", { class: pane.wide ? "pane wide" : "pane" }, el("div", { class: "pane-head" }, name,
      button("↗", "show in full", () => app.follow(pane.kind, pane.state)),
      ...(this.canChange ? [
        button("←", "move forward", () => move(-1), index === 0), button("→", "move back", () => move(1), index === this.panes.length - 1),
        button("↔", pane.wide ? "make narrow" : "make wide", () => {
          pane.wide = !pane.wide;
          this.arrange();
          this.save();
        }),
        button("✕", "remove", () => {
          this.panes.splice(index, 1);
          this.arrange();
          this.save();
        })] : [])), body);
    const own = Object.create(app);
    own.state = new PaneState(pane.state, () => {
      pane.state = own.state.values;
      this.drawOne(one);
      if (this.canChange) this.save();
    });
    own.axis = new StepAxis(own, own.state, app.axis.pictures);
    own.state.address = (values) => app.state.address(values);
    own.beside = () => app.follow("map", own.state.values);
    const one = { element, body, own, kind: pane.kind, panel: null };
    return one;
  }
  async drawOne(one) {
    const { own, kind, body } = one;
    own.choices = new Choices(own);
    const block = this.app.blocks.has(kind) ? await this.app.blocks.get(kind) : null; // a live one has newer and newer ones
    if (one.panel === null) {
      own.lines = new LinesPanel(own);
      one.panel = kind === "map" ? new MapPanel(own) : kind === "graph" ? new GraphPanel(own) : kind === "numbers" ? new NumbersPanel(own, "all") :
        kind === "histograms" ? new HistogramsPanel(own, block) : kind === "units" ? new UnitsPanel(own, block) : own.lines;
      if (!one.panel.isShown) {
        put(body, el("p", { class: "note" }, "There is nothing of this kind in this run."));
        one.panel = { update() {} };
        return;
      }
      one.panel.build(body);
    }
    if (block !== null) one.panel.block = block;
    await one.panel.update();
    for (const named of body.querySelectorAll("[id]")) named.removeAttribute("id"); // the page's own panels have these
  }
  async update() {
    this.isBuilt = true;
    for (const one of this.drawn) await this.drawOne(one);
  }
}
