// The graph: modules in the order in which values went through them, tinted by a statistic; containers open and close.

const MAX_BOXES = 400, MAX_BOX_NAME = 36, MANY_OPEN = 40;

class GraphPanel extends Panel {
  constructor(app) {
    super(app, { id: "graph", title: "Graph", isShown: app.run.series.length > 0, opened: null });
    this.listens = ["site", "root", "mode", "name", "stat", "lane", "step", "from", "to"];
  }
  build(section) {
    this.about = el("p", { class: "note" });
    this.legend = el("div", {});
    this.boxes = el("div", { class: "graph" });
    put(section, el("p", { class: "note" }, "Modules in the order in which they were first called, with the shape of what they return. Containers open and close; an arrow says what ran next, which is not always what a value went into."),
      this.about, this.legend, this.boxes);
  }
  /** What a module contains; of two runs that is what A has values of, as the graph is of A alone. */
  children(node) {
    const { run, other, modules } = this.app;
    this.own ??= new Set(run.series.map((one) => one.path));
    return other ? node.children.filter((child) => modules.below(child).some((one) => this.own.has(one.path))) : node.children;
  }
  async update() {
    const { run, choices, state, modules } = this.app;
    this.opened ??= new Set([...openLevels(modules.root, (node) => this.children(node), 1, MANY_OPEN)].map((node) => node.path));
    const picture = await run.picture(choices.statistic);
    const step = state.get("step"), seen = this.app.axis.columns(run.steps).map((one) => one.c);
    const atStep = step === null ? -1 : run.steps.findIndex((first, c) => first <= step && step <= run.lastStep(c));
    const columns = atStep >= 0 ? [atStep] : seen;
    const numBad = (cell) => (cell?.kind === NONFINITE ? cell.nan + cell.inf : 0);
    this.cellOf = (node, isWhole) => {
      const own = (isWhole ? modules.below(node) : [node]).flatMap((one) => (one.number === null ? [] : choices.seriesOf(one.number)));
      const cells = columns.map((c) => own.reduce((outlier, { number }) => outstanding(outlier, picture.cell(number, choices.lane, c)), null));
      return cells.reduce((most, cell) => (numBad(most) && numBad(cell) ? (numBad(cell) > numBad(most) ? cell : most) : cell === null ? most : outstanding(most, cell)), null);
    };
    const values = [];
    for (const node of modules.nodes.values()) {
      const cell = this.cellOf(node, false);
      if (cell?.kind === NUMBER) values.push(cell.value);
    }
    this.colors = new Colors(values);
    this.about.textContent = `Tinted by the ${choices.title}` + (atStep >= 0 ? ` at step ${run.steps[atStep]}.` : ": what stands out most of all steps that are shown; NaN are counted at the step that has the most.");
    const { first } = this.app.top, isWith = ({ path }) => first && (path === first.module || first.module.startsWith(path && `${path}.`));
    const isFirst = first && choices.siteAndMode[0] === first.site && (atStep < 0 || (run.steps[atStep] <= first.step && first.step <= run.lastStep(atStep)));
    this.isLater = (node, isShut) => Boolean(first) && !(isFirst && (node.path === first.module || (isShut && isWith(node))));
    const bad = isFirst ? [[NONFINITE, "the first NaN or infinity"], [NONFINITE, "others", true]] : [[NONFINITE, "NaN or infinite", Boolean(first)]];
    this.legend.replaceChildren(legendOf(this.colors, choices.title, [...bad, ...KIND_TEXTS.slice(1)]));
    this.count = 0;
    this.boxes.replaceChildren(this.box(modules.root));
    if (this.count > MAX_BOXES) this.boxes.append(el("p", { class: "note" }, `The first ${MAX_BOXES} boxes; fold some to see more.`));
  }
  shapes(node) {
    const own = node.number === null ? [] : this.app.run.byModule.get(node.number) ?? [];
    const outputs = own.filter((one) => one.site === "output" && this.app.choices.isOfModel(one));
    const main = outputs.filter((one) => one.mode === (outputs.find((other) => other.mode === "train") ?? outputs[0]).mode);
    return main.slice(0, 3).map((one) => one.shape).join(" ");
  }
  box(node) {
    const { modules } = this.app;
    this.count++;
    const children = this.children(node), isContainer = children.length > 0, isOpen = isContainer && this.opened.has(node.path);
    const cell = this.cellOf(node, isContainer && !isOpen);
    const title = node.path === "" ? pathText("") : node.label;
    const whole = [`${pathText(node.path)} ${visible(modules.className(node.number))}`, visible(modules.source(node.number))], { tooltip } = this.app;
    const head = el("div", { class: "box-head", title: whole.join("\n") },
      isContainer && el("button", {
        type: "button", class: "fold", "aria-expanded": String(isOpen), "aria-label": `${isOpen ? "close" : "open"} ${title}`,
        onclick: () => {
          if (!this.opened.delete(node.path)) this.opened.add(node.path);
          this.update();
        },
      }, isOpen ? "▾" : "▸"),
      el("button", { type: "button", class: "box-name", onclick: () => this.choose(node), onblur: () => tooltip.hide(), onfocus: ({ target }) => {
        const { left, bottom } = target.getBoundingClientRect();
        if (target.matches(":focus-visible")) tooltip.show(left, bottom, whole);
      } }, withoutMiddle(title, NARROW.matches ? MAX_BOX_NAME / 2 : MAX_BOX_NAME)),
      el("span", { class: "box-class" }, withoutMiddle(modules.className(node.number), MAX_BOX_NAME)),
      el("span", { class: "box-shape" }, this.shapes(node)),
      el("span", { class: "box-value" }, this.text(cell)));
    if (cell?.kind === NUMBER) {
      const color = this.colors.of(cell.value);
      Object.assign(head.style, { background: color, color: this.colors.inkOn(color) });
    } else if (cell?.kind === NONFINITE) {
      head.classList.add(this.isLater(node, isContainer && !isOpen) ? "later" : "bad");
    } else {
      head.classList.add("empty");
    }
    const box = el("div", { class: isOpen ? "box open" : "box", "data-path": visible(node.path) }, head);
    if (isOpen) {
      const inside = el("div", { class: "box-inside" });
      children.forEach((child, index) => {
        if (this.count > MAX_BOXES) return;
        if (index) inside.append(el("div", { class: child.first === Infinity ? "arrow none" : "arrow", "aria-hidden": "true" }, child.first === Infinity ? "" : "↓"));
        inside.append(this.box(child));
      });
      box.append(inside);
    }
    return box;
  }
  text(cell) {
    if (cell === null) return "";
    if (cell.kind === NONFINITE) return [[cell.nan, "NaN"], [cell.inf, "inf"]].map(([count, what]) => count && `${Number(count.toPrecision(3)).toLocaleString("en")} ${what}`).filter(Boolean).join(" ");
    return cell.kind === NUMBER ? shortNumber(cell.value, 3, cell.digits) : "";
  }
  table() {
    const nodes = this.app.modules.below(this.app.modules.root), isWhole = (node) => node.children.length > 0 && !this.opened.has(node.path);
    return [["module", "class", "shape", this.about.textContent], ...nodes.map((node) => [pathText(node.path), this.app.modules.className(node.number), this.shapes(node), plainNumber(this.cellOf(node, isWhole(node)))])];
  }
  choose(node) {
    const { state, choices } = this.app;
    const series = node.number === null ? [] : choices.seriesOf(node.number);
    if (!series.length) return;
    state.set({ pins: series.slice(0, MAX_PINS).map(keyOf), module: node.path });
    this.app.show("lines");
  }
}
