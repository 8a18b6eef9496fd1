// Puts the page together: reads the blocks, makes the panels, and redraws those that a change concerns.

class App {
  constructor() {
    this.blocks = new Blocks();
    this.blocks.readPage();
    this.state = new State();
    this.tooltip = new Tooltip();
    this.panels = [];
  }
  async start() {
    const { blocks } = this;
    const first = Promise.all(["top", "modules", "axes", "gaps", "ranks", "images"].map((name) => blocks.get(name)));
    const [top, modules, axes, gaps, ranks, images] = await first;
    this.top = top.data;
    this.modules = new Modules(modules);
    this.run = new RunData(blocks, axes.data, this.modules);
    const isPair = blocks.has("against");
    this.other = isPair ? new RunData(blocks, (await blocks.get("b.axes")).data, this.modules, "b.") : null;
    this.choices = new Choices(this);
    this.gaps = new Gaps(this, gaps);
    this.against = isPair ? new AgainstPanel(this, await blocks.get("against")) : null;
    this.lines = new LinesPanel(this);
    this.panels = [
      new TopPanel(this), this.against, new MapPanel(this),
      this.lines,
      new HistogramsPanel(this, blocks.has("histograms") ? await blocks.get("histograms") : null),
      new UnitsPanel(this, blocks.has("units") ? await blocks.get("units") : null), new GraphPanel(this), new RanksPanel(this, ranks), new ImagesPanel(this, images),
    ].filter((panel) => panel?.isShown);
    this.build();
    this.state.onChange((names) => this.change(names));
    let width = window.innerWidth;
    window.addEventListener("resize", onceAFrame(() => {
      if (window.innerWidth === width) return; // the height alone changes where a phone hides its bars
      width = window.innerWidth;
      this.change(null);
    }));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.change(null));
    await this.redraw(this.panels);
    this.goTo(this.state.get("view"), "instant");
    document.documentElement.dataset.drawn = String(Math.round(performance.now()));
  }
  build() {
    const page = document.getElementById("page");
    const title = this.top.against ? `${this.top.run} against ${this.top.against}` : this.top.run;
    this.bar = el("div", { class: "choices" });
    const links = this.panels.map((panel) => el("a", { href: `#view=${panel.id}`, "data-view": panel.id, onclick: (event) => {
      event.preventDefault();
      this.show(panel.id);
    } }, panel.title));
    page.append(
      el("a", { class: "skip", href: "#view=map", onclick: (event) => { event.preventDefault(); this.show("map"); } }, "to the map"),
      el("header", {}, el("h1", {}, title), el("nav", { "aria-label": "panels" }, links), this.bar),
      el("main", {}, this.panels.map((panel) => {
        panel.section = el("section", { id: `panel-${panel.id}`, "aria-label": panel.title }, el("h2", {}, panel.title));
        return panel.section;
      })),
      el("footer", {}, `Made by recorder ${this.top.version}. This file holds numbers for drawing and asks nothing of a network.`));
    for (const panel of this.panels) panel.build(panel.section);
  }
  change(names) {
    const concerned = this.panels.filter((panel) => names === null || panel.listens.some((name) => names.includes(name)));
    this.redraw(concerned).then(() => {
      if (names === null) this.goTo(this.state.get("view"));
    });
  }
  async redraw(panels) {
    if (this.run.series.length) this.bar.replaceChildren(this.choices.bar());
    for (const panel of panels) {
      if (!panel.update) continue;
      try {
        await panel.update();
        if (panel.id === "map" && document.documentElement.dataset.map === undefined) {
          document.documentElement.dataset.map = String(Math.round(performance.now()));
          await new Promise((done) => setTimeout(done)); // what is drawn by now is shown before the rest is
        }
      } catch (error) {
        console.error(panel.id, error);
        panel.section.append(el("p", { class: "verdict wrong" }, `This panel could not be drawn: ${error.message}`));
      }
    }
  }
  /** Show a panel, and say so in the address. */
  show(id) {
    this.state.values.view = id;
    this.state.set({ view: id });
    this.goTo(id);
  }
  goTo(id, behavior = "auto") {
    if (id === null) return;
    document.getElementById(`panel-${id}`)?.scrollIntoView({ block: "start", behavior });
    for (const link of document.querySelectorAll("nav a")) link.toggleAttribute("aria-current", link.dataset.view === id);
  }
}

new App().start().catch((error) => {
  console.error(error);
  document.getElementById("page").append(el("p", { class: "verdict wrong" },
    `This page could not be drawn: ${error.message}. It needs a browser of 2023 or later (DecompressionStream).`));
});
