// Puts the page together: reads the blocks, makes the panels, and redraws those that a change concerns.

const LIVE = document.documentElement.dataset.live ?? null;
const LIVE_TEXTS = { reading: "reading what is there", live: "live", over: "over", gone: "deleted" };
/** Panels that draw both of two runs; the others are of A alone. */
const OF_BOTH = new Set(["against", "lines", "numbers", "objectives"]);
/** Panels that do not grow with steps: each is made anew where its block is a new one, and not drawn at other times. */
const REMADE = { ranks: RanksPanel, images: ImagesPanel, histograms: HistogramsPanel, units: UnitsPanel };

class App {
  constructor(blocks) {
    this.blocks = blocks;
    this.state = new State();
    this.tooltip = new Tooltip();
    this.dumps = new Dumps(this);
    this.panels = [];
    this.source = null;
    this.listen();
  }
  /** What concerns the whole page for as long as it is open. */
  listen() {
    this.state.onChange((names) => {
      if (names === null && this.bar?.contains(document.activeElement)) document.activeElement.blur(); // it is drawn anew
      this.change(names);
    });
    let width = window.innerWidth;
    window.addEventListener("resize", onceAFrame(() => {
      if (window.innerWidth === width) return; // the height alone changes where a phone hides its bars
      width = window.innerWidth;
      this.change(null);
    }));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.change(null));
    for (const [name, isPaper] of [["beforeprint", true], ["afterprint", false]]) {
      window.addEventListener(name, () => { // paper is light, also where the page is dark, and has a width of its own
        document.documentElement.toggleAttribute("data-paper", isPaper);
        this.redraw(this.panels);
      });
    }
    window.addEventListener("pointerdown", () => { this.isHeld = true; }, true);
    for (const name of ["pointerup", "pointercancel", "blur"]) window.addEventListener(name, () => { this.isHeld = false; }, true);
  }
  async start() {
    await this.load();
    this.build();
    await this.redraw(this.panels);
    this.goTo(this.state.get("view"), "instant");
    document.documentElement.dataset.drawn = String(Math.round(performance.now()));
  }
  async load() {
    const { blocks } = this;
    const first = Promise.all(["top", "modules", "axes", "gaps", "ranks", "images"].map((name) => blocks.get(name)));
    const [top, modules, axes, gaps, ranks, images] = await first;
    this.top = top.data;
    this.modules = new Modules(modules);
    const isPair = blocks.has("against");
    this.run = new RunData(blocks, axes.data, this.modules, "", isPair ? "A: " : "");
    this.other = isPair ? new RunData(blocks, (await blocks.get("b.axes")).data, this.modules, "b.", "B: ") : null;
    this.against = isPair ? new AgainstPanel(this, await blocks.get("against")) : null;
    const culprit = this.against?.data.culprits[0];
    if (culprit && this.state.get("site") === null) Object.assign(this.state.values, { site: culprit.site, module: culprit.seen_at || null, step: culprit.step }); // two runs are opened where they part
    this.axis = new StepAxis(this);
    this.choices = new Choices(this);
    this.gaps = new Gaps(this, gaps);
    this.lines = new LinesPanel(this);
    this.head = new TopPanel(this);
    this.panes = new PanesPanel(this, blocks.has("panes") ? await blocks.get("panes") : null);
    const { panels: wanted } = document.documentElement.dataset;
    this.panels = [
      this.against, this.head, blocks.has("tokens") ? new TokensPanel(this, await blocks.get("tokens")) : null, this.panes, new MapPanel(this), this.lines, new NumbersPanel(this, "objectives"), new NumbersPanel(this, wanted === undefined ? "rest" : "all"),
      new HistogramsPanel(this, blocks.has("histograms") ? await blocks.get("histograms") : null),
      new UnitsPanel(this, blocks.has("units") ? await blocks.get("units") : null), new DepthPanel(this), new GraphPanel(this), new RanksPanel(this, ranks), new ImagesPanel(this, images),
    ].filter((panel) => panel?.isShown && (wanted === undefined || wanted.split(" ").includes(panel.id)));
  }
  build() {
    const page = document.getElementById("page");
    const title = this.against ? `A: ${this.against.data.a}, B: ${this.against.data.b}` : this.top.run;
    this.bar = el("div", { class: "choices" });
    this.zoomed = el("button", { type: "button", class: "primary", id: "zoom-out", hidden: true, onclick: () => this.axis.zoom(null, null) });
    const links = this.panels.map((panel) => el("a", { href: `#view=${panel.id}`, "data-view": panel.id, onclick: (event) => {
      event.preventDefault();
      this.show(panel.id);
    } }, panel.title));
    this.liveText = this.source && el("span", { id: "live", role: "status" });
    page.replaceChildren();
    page.append(
      el("a", { class: "skip", href: "#view=map", onclick: (event) => { event.preventDefault(); this.show("map"); } }, "to the map"),
      el("header", {}, el("h1", {}, title, this.liveText), el("nav", { "aria-label": "panels" }, links), el("div", { class: "bar" }, this.bar, this.zoomed)),
      el("main", {}, this.panels.map((panel) => {
        panel.section = el("section", { id: `panel-${panel.id}`, "aria-label": panel.title }, el("h2", {}, panel.title, this.other && !OF_BOTH.has(panel.id) && el("span", { class: "dim" }, " of A alone"), this.keepers(panel)));
        return [el("div", { id: `at-${panel.id}` }), panel.section];
      }).flat()),
      el("footer", {}, `Made by recorder ${this.top.version}. ` + (this.source ? "This page asks nothing but the server that it came from." :
        "This file holds numbers for drawing and asks nothing of a network.")));
    for (const panel of this.panels) {
      panel.build(panel.section);
      panel.section.append(takers(panel, this.top.run));
    }
    this.sayLive();
  }
  /** Buttons that keep a picture as a pane. */
  keepers(panel) {
    if (!this.source || !(panel.id in PANE_KINDS)) return null;
    return el("button", { type: "button", class: "keep", "data-keep": panel.id, onclick: () => this.panes.add(panel.id, panel) }, "keep as a pane");
  }
  flags() {
    return this.head.flags();
  }
  /** Show the lines of what was clicked: where there is room, they have come beside the picture by themselves. */
  beside() {
    if (NARROW.matches) this.show("lines");
  }
  change(names) {
    const concerned = this.panels.filter((panel) => names === null || panel.listens.some((name) => names.includes(name)));
    this.redraw(concerned).then(() => {
      if (names === null) this.goTo(this.state.get("view"));
    });
  }
  async redraw(panels) {
    if (!this.bar) return; // a window may change its size before the page is built
    if (this.run?.series.length && !this.bar.contains(document.activeElement)) this.bar.replaceChildren(this.choices.bar());
    this.zoomed.hidden = !this.axis?.isZoomed;
    if (!this.zoomed.hidden) this.zoomed.textContent = `all steps (now ${this.axis.domain.map((end, index) => end + (index ? -0.5 : 0.5)).join(" to ")})`;
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
  /** Show a panel with other choices. */
  follow(id, values) {
    this.state.set({ ...values, view: id });
    this.goTo(id);
  }
  goTo(id, behavior = "auto") {
    if (id === null) return;
    if (id === "map" && NARROW.matches && this.state.get("pins", []).length) id = "lines";
    document.getElementById(`at-${id}`)?.scrollIntoView({ block: "start", behavior }); // a docked panel itself is always in sight
    if (id === "map") document.querySelector("#panel-map .chosen")?.scrollIntoView({ block: "nearest", behavior });
    for (const link of document.querySelectorAll("nav a")) link.toggleAttribute("aria-current", link.dataset.view === id);
  }
  /** Everything, from a server: at the beginning, and when series, lanes or columns are others. */
  async takeAll(packed) {
    this.blocks.clear();
    for (const [name, bytes] of packed) this.blocks.set(name, bytes);
    if (!this.blocks.has("axes") || !["ranks", "images", "gaps"].every((name) => this.blocks.has(name))) return this.wait();
    const scrolled = window.scrollY, isFirst = document.documentElement.dataset.drawn === undefined;
    this.isWaiting = false;
    await this.load();
    for (const name of this.run.cubeNames) await this.run.cube(...name);
    this.build();
    await this.redraw(this.panels);
    if (isFirst) this.goTo(this.state.get("view"), "instant");
    else window.scrollTo({ top: scrolled, behavior: "instant" });
    document.documentElement.dataset.drawn ??= String(Math.round(performance.now()));
    this.told();
  }
  /** There is nothing to draw yet. */
  async wait() {
    const top = this.blocks.has("top") ? (await this.blocks.get("top")).data : null;
    this.top = top ?? { run: "", live: { state: "reading", step: null } };
    const isReading = this.top.live.state === "reading";
    const text = isReading ? "This page draws the run once rows of all ranks are found and put into the order of steps." :
      "Nothing is recorded yet. This page draws it as soon as it is.";
    this.liveText = el("span", { id: "live", role: "status" });
    document.getElementById("page").replaceChildren(el("header", {}, el("h1", {}, this.top.run, this.liveText)),
      el("main", {}, el("section", {}, el("p", { class: "note", id: "waiting" }, text))));
    this.sayLive();
    this.isWaiting = true;
  }
  /** What is new, from a server. */
  async takeMore(packed) {
    const names = new Set();
    for (const [name, bytes] of packed) {
      if (/^(values|scalars)\//.test(name) && this.run) {
        const block = await unpack(bytes), [kind, statistic] = name.split("/");
        (await this.run.cube(statistic, kind))?.merge(block);
      } else if (name === "steps" && this.run) {
        this.run.takeSteps((await unpack(bytes)).data);
      } else {
        this.blocks.set(name, bytes);
        names.add(name);
      }
    }
    if (this.isWaiting || !this.panels.length) return this.wait();
    const isNew = (name) => names.has(name) && !this.panels.some((one) => one.id === name);
    if (isNew("histograms") || isNew("units") || (isNew("images") && (await this.blocks.get("images")).data.images.length)) {
      return this.takeAll([...this.blocks.packed].filter(([, bytes]) => bytes instanceof Uint8Array));
    }
    if (names.has("top")) this.top = (await this.blocks.get("top")).data;
    if (names.has("gaps")) this.gaps = new Gaps(this, await this.blocks.get("gaps"));
    if (names.has("panes")) this.panes.take(await this.blocks.get("panes"));
    for (const name of [...names].filter((one) => one.includes("/"))) this.run.cubes.delete(name);
    for (const [id, Panel] of Object.entries(REMADE)) {
      if (names.has(id)) await this.remake(id, new Panel(this, await this.blocks.get(id)));
    }
    this.told();
    this.isStale = true;
    this.redrawLive();
  }
  /** Draw what is new, unless somebody is holding something, and not more often than there is time for. */
  redrawLive() {
    if (this.isDrawing || !this.isStale) return;
    const now = performance.now();
    const isBusy = this.isHeld || document.hidden;
    if (isBusy || now < (this.notBefore ?? 0)) {
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.redrawLive(), isBusy ? 300 : this.notBefore - now);
      return;
    }
    this.isDrawing = true;
    this.isStale = false;
    const active = document.activeElement;
    const isTyping = (panel) => active?.matches?.("input, select") && panel.section.contains(active) && active.type !== "checkbox";
    this.redraw(this.panels.filter((panel) => !(panel.id in REMADE) && !isTyping(panel))).then(() => {
      this.isDrawing = false;
      this.notBefore = performance.now() + 4 * (performance.now() - now);
      this.told();
      this.redrawLive();
    });
  }
  /** A panel anew, with what was unfolded in it. */
  async remake(id, panel) {
    const index = this.panels.findIndex((one) => one.id === id);
    if (index < 0) return;
    const { section } = this.panels[index];
    const open = [...section.querySelectorAll("details")].map((one) => one.open);
    panel.section = section;
    this.panels[index] = panel;
    section.replaceChildren(el("h2", {}, panel.title, this.keepers(panel)));
    panel.build(section);
    section.append(takers(panel, this.top.run));
    await panel.update?.();
    [...section.querySelectorAll("details")].forEach((one, number) => { one.open = open[number] ?? false; });
  }
  /** Say in the page how far it is, for people and for tests. */
  told() {
    document.documentElement.dataset.step = String(this.top?.live?.step ?? "");
    document.documentElement.dataset.state = this.top?.live?.state ?? "";
    this.sayLive();
  }
  sayLive() {
    if (!this.liveText || !this.top?.live) return;
    const { state, step, found } = this.top.live, problem = this.source?.problem;
    this.liveText.className = problem ? "wrong" : state;
    this.liveText.replaceChildren();
    put(this.liveText, problem ? problem : `${LIVE_TEXTS[state] ?? state}${step === null ? "" : `, step ${step}`}${found ? `, ${found}` : ""}`);
  }
}

async function begin() {
  const blocks = new Blocks();
  blocks.readPage();
  if (LIVE === "runs") return new RunsPage(blocks).start();
  if (LIVE === "side") return new SidePage().start();
  if (LIVE === "ranks") return new RanksPage().start();
  const app = new App(blocks);
  if (LIVE === null) return app.start();
  await app.wait();
  app.source = new LiveSource(app);
  new Beside(app.state);
}

begin().catch((error) => {
  console.error(error);
  document.getElementById("page").append(el("p", { class: "verdict wrong" },
    `This page could not be drawn: ${error.message}. It needs a browser of 2023 or later (DecompressionStream).`));
});
