// The numbers of the step: the loss and the norm of the gradient at the head of the page, the others further down.

const MAX_SCALARS = 8, TRACK_PIXELS = 118, STRIP_PIXELS = 72, LOG_FROM = 50;

/** Names of rates, those of one optimizer together: "lr.AdamW.0, 1; lr.SGD.0". */
function rateNames(names) {
  const startOf = (name) => name.slice(0, name.lastIndexOf(".") + 1), starts = [...new Set(names.map(startOf))];
  return starts.map((start) => start + names.filter((name) => startOf(name) === start).map((name) => name.slice(start.length)).join(", ")).join("; ");
}

class NumbersPanel {
  /** `part` is "head" for the loss and the norm, "objectives" for theirs, "rest" for the others, "all" in a pane. */
  constructor(app, part = "rest") {
    const isObjectives = part === "objectives";
    Object.assign(this, { app, part, id: isObjectives ? "objectives" : "numbers", title: isObjectives ? "Objectives" : "Numbers", charts: [] });
    const shown = app.run.scalars.filter((one) => part === "all" || (objectiveOf(one.name) !== null) === isObjectives).sort((a, b) => this.rank(a) - this.rank(b));
    const isHead = (one) => this.rank(one) < 2 && one === shown.find((other) => this.rank(other) === this.rank(one) && (this.rank(one) === 1 || other.name === one.name));
    const isRate = (one) => /^lr\.|^grad_scale$/.test(one.name);
    this.scalars = shown.filter((one) => part === "all" || isObjectives || (!isRate(one) && isHead(one) === (part === "head")));
    const others = (app.other?.scalars ?? []).filter((one) => isRate(one) && !shown.some((own) => own.name === one.name && own.path === one.path));
    this.rates = part === "head" ? [...shown.filter(isRate), ...others] : [];
    this.isShown = this.scalars.length > 0 || part === "head";
    this.listens = ["from", "to", "step", "each"];
  }
  /** The loss comes first, then the norm of the gradient, and rates last, as there may be many. */
  rank({ name, mode }) {
    if (mode !== "train" || name.startsWith("lr.")) return name.startsWith("lr.") ? 4 : 3;
    return name === "loss" || this.app.run.axes.losses.includes(name) ? 0 : /grad.*norm/.test(name) ? 1 : /loss$/.test(name) ? 2 : 3;
  }
  build(section) {
    this.body = el("div", { class: "tracks" });
    this.absent = el("p", { class: "note", hidden: true });
    this.constants = el("p", { class: "note", hidden: true });
    this.unfold = el("button", { type: "button", class: "quiet", hidden: true, onclick: () => { this.isWhole = true; this.update(); } });
    put(section, this.body, this.unfold, this.constants);
  }
  async update() {
    const { app } = this, { run, other, state } = app, flags = this.part === "head" || this.part === "objectives" ? app.flags() : [];
    const pictures = this.scalars.length || this.rates.length ? await Promise.all([run.picture("mean", "scalars"), other?.scalars.length ? other.picture("mean", "scalars") : null]) : [];
    const drawn = this.part === "objectives" ? this.ofObjectives(pictures) : this.scalars.slice(0, this.isWhole ? undefined : MAX_SCALARS).map((series) => this.linesOf(series, ...pictures, state.get("each") !== "0"));
    if (this.part === "head" && !this.scalars.some((one) => this.rank(one) === 1)) drawn.push(this.gradientNorms());
    const some = [...drawn.filter(Boolean), ...this.strips(pictures)];
    some.forEach((one, index) => {
      const chart = this.charts[index] ??= new Chart(app, TRACK_PIXELS, true), isLast = index === some.length - 1;
      chart.height = one.isStrip ? STRIP_PIXELS : TRACK_PIXELS;
      if (chart.element.parentNode !== this.body) this.body.append(chart.element); // what moves loses the focus
      const values = one.lines.flatMap((line) => line.values).filter((value) => value > 0), isWide = Math.max(...values) > LOG_FROM * Math.min(...values);
      chart.draw({ ...one, isLog: isWide && !one.ends && one.lines.every((line) => line.values.every((value) => value === null || value === undefined || value > 0)), hasRuler: isLast || this.part !== "head",
        flags: index ? flags.map((flag) => ({ ...flag, label: "" })) : flags, about: one.about ?? [] });
    });
    const [num, most, what] = this.part === "objectives" ? [this.numTensors, MAX_SCALARS / 2, "shared tensor"] : [this.scalars.length, MAX_SCALARS, "number"];
    this.unfold.hidden = this.isWhole || num <= most;
    this.unfold.textContent = `all ${plural(num, what)}`;
    for (const chart of this.charts.slice(some.length)) chart.element.remove();
    const isAbsent = drawn.at(-1) === null, next = drawn.length - 1;
    this.absent.hidden = !isAbsent;
    if (isAbsent) this.absent.textContent = `No gradient norm: ${this.whyNoNorm()}.`;
    if (isAbsent) this.body.insertBefore(this.absent, some[next] ? this.charts[next].element : null);
  }
  linesOf(series, picture, otherPicture, isEach) {
    const { run, other } = this.app, colorOf = (lane) => lineColor(Math.max(lane, 0));
    const isEmpty = (line) => !line.bad.length && line.values.every((value) => value === null || value === undefined);
    const isOwn = run.scalars.includes(series), own = isOwn ? picture.columnsWith([series]) : [];
    let steps = own.map((c) => run.axes.scalar_steps[c]);
    let lines = isOwn ? linesOf(run, picture, series, { columns: own, lanes: isEach ? run.drawnLanes : [run.mainLane], colorOf, named: (lane) => run.lineName(lane) }) : [];
    const beside = otherPicture && other.scalars.find((one) => one.path === series.path && one.name === series.name && one.mode === series.mode);
    if (beside) {
      const columns = otherPicture.columnsWith([beside]), of = (lanes) => linesOf(other, otherPicture, beside, {
        columns, lanes, colorOf, isBeside: true, named: (lane) => other.lineName(lane),
      });
      const together = of([other.mainLane]), more = together.every(isEmpty) ? of(other.drawnLanes) : together;
      [steps, lines] = joinSteps([[steps, lines], [columns.map((c) => other.axes.scalar_steps[c]), more]]);
    }
    lines = lines.filter((line) => !isEmpty(line));
    const title = `${series.name || series.site}${series.mode === "train" ? "" : ` (${series.mode})`}`;
    const note = isOwn ? run.axes.scalar_notes[series.number] : "";
    return { title, about: [series.path === "" ? "" : `of ${pathText(series.path)}`, note].filter(Boolean), steps, lines };
  }
  /** Two pictures for each shared tensor: the norms of the gradients of its objectives, and the cosines between them. */
  ofObjectives(pictures) {
    const isEach = this.app.state.get("each") !== "0", shared = new Map(), known = this.scalars.map((series) => ({ series, ...objectiveOf(series.name) }));
    for (const one of known) shared.set(JSON.stringify([one.series.path, one.tensor]), { path: one.series.path, tensor: one.tensor });
    this.numTensors = shared.size;
    return [...shared.values()].sort((a, b) => (a.path === b.path ? a.tensor - b.tensor : 0)).slice(0, this.isWhole ? undefined : MAX_SCALARS / 2).flatMap(({ path, tensor }) => [["norm", "norms of the gradients"], ["cosine", "cosines between the gradients"]].map(([kind, title]) => {
      const some = known.filter((one) => one.kind === kind && one.series.path === path && one.tensor === tensor);
      const groups = some.map(({ series, names: name }, number) => {
        const { steps, lines } = this.linesOf(series, ...pictures, isEach);
        const isOne = lines.length === 1;
        return [steps, lines.map((line, at) => ({ ...line, at, label: isOne ? name : `${name}, ${line.label}`, style: { ...line.style, stroke: lineColor(number), dash: line.style.dash ?? DASHES[(Math.floor(number / ON_WHITE.length) + at) % DASHES.length] } }))];
      });
      const [steps, lines] = joinSteps(groups), { lanes, axes } = this.app.run;
      lines.sort((a, b) => a.at - b.at); // the legend names each objective once before it names further ranks
      const which = known.some((one) => one.series.path === path && one.tensor > 1) ? `, tensor ${tensor}` : "";
      const about = new Set([`of objectives in ${pathText(path)}${which}`, isEach && lanes.length > 1 && lanes[0].kind === "global" ? `all ranks together: the mean of the ranks' ${kind}s` : "", ...some.map(({ series }) => axes.scalar_notes[series.number])]);
      return { title, steps, lines, most: Math.max(MAX_TRACK_LINES, groups.length + 1), ...(kind === "cosine" ? { level: 0, ends: [-1.05, 1.05] } : {}), about: [...about].filter(Boolean) };
    }).filter((one) => one.lines.length));
  }
  /** Whether a rank has another value than the others at some step. */
  isUnlike(series, picture) {
    const { lines } = this.linesOf(series, picture, null, true), { run } = this.app, mean = run.lineName(run.mainLane);
    const [first, ...others] = lines.filter(({ label }) => label !== mean).map(({ values }) => values);
    return others.some((values) => values.some((value, at) => Number.isFinite(value) && Number.isFinite(first[at]) && value !== first[at]));
  }
  /** The learning rates and the scale of the gradients in flat pictures; those that never change in one line of text. */
  strips(pictures) {
    const strips = new Map(), constants = new Map();
    for (const series of this.rates) {
      const one = this.linesOf(series, ...pictures, this.isUnlike(series, pictures[0])), known = one.lines.map((line) => line.values.filter(Number.isFinite));
      if (!known.flat().length) continue;
      const isConstant = known.every((values) => values.every((value) => value === values[0])), alike = isConstant ? constants : strips;
      const nameOf = ({ label }) => (!this.app.other ? label : one.lines.some((other) => other.label !== label && other.label[0] === label[0]) ? label.replace(":", "") : label[0]);
      const text = known.map(([value], at) => `${known.length > 1 || this.app.other ? `${nameOf(one.lines[at])} ` : ""}${shortNumber(value)}`).join(", ");
      const key = isConstant ? text : JSON.stringify(one.lines.map(({ label, values }) => [label, values]));
      alike.set(key, { ...one, names: [...(alike.get(key)?.names ?? []), series.name] });
    }
    this.constants.replaceChildren(...[...constants].map(([text, { names }]) => el("span", {}, `${rateNames(names)}: ${text} at all steps. `)));
    this.constants.hidden = !constants.size;
    return [...strips.values()].map((one) => ({ ...one, title: rateNames(one.names), about: [], isStrip: true }));
  }
  /** The norm of all gradients, where no number of the step is one. */
  gradientNorms() {
    const own = this.gradientNorm(this.app.run, false), beside = own && this.app.other && this.gradientNorm(this.app.other, true);
    if (!beside) return own;
    const [steps, lines] = joinSteps([own, beside].map((one) => [one.steps, one.lines]));
    return { ...own, steps, lines };
  }
  whyNoNorm() {
    const { run } = this.app, grads = run.series.filter((one) => one.site === "grad" && one.mode === "train");
    const why = grads.map((one) => run.reasons.get(`${one.number} 1`) ?? run.reasons.get(`${one.number} 0`)).find(Boolean);
    return !grads.length ? "no gradient of a parameter was recorded (site=grad)" : !run.axes.statistics.includes("l2") ? "this page has no L2 norms (--statistics l2)" :
      !run.axes.has_global && run.axes.num_ranks > 1 ? "gradients of all ranks together are not made of a run with so many rows in a step" :
        `the ranks have gradients of their own${why ? ` (${why})` : ""}`;
  }
  /** The norm of all ranks together, and of each rank whose norm is another; a rank alone has that of what it holds. */
  gradientNorm(run, isBeside) {
    const all = Object.entries(run.axes.gradient_norms).map(([lane, norms]) => [Number(lane), norms]), isWhole = all.length > 0 && (run.lanes.length === 1 || run.lanes[all[0][0]].kind === "global");
    const shown = isWhole && this.app.state.get("each") === "0" ? all.slice(0, 1) : all, columns = run.steps.map((_, c) => c).filter((c) => shown.some(([, norms]) => norms[c] !== null));
    if (!columns.length) return null;
    const lines = shown.map(([lane, norms]) => {
      const values = columns.map((c) => (norms[c] < 0 ? null : norms[c])), bad = [...columns.keys()].filter((at) => norms[columns[at]] < 0);
      const isCut = run.lanes[lane].kind === "global" && bad.length > 0;
      return { label: run.lineName(lane) + (isCut ? " (no number where a rank is not finite)" : ""), values, digits: values.map(() => 5), bad, style: laneStyle(run.lanes[lane], shown.length, lineColor(lane), isBeside) };
    });
    const about = ["of the parameters that an optimizer has", run.axes.is_of_models && "of all models", !isWhole ? `of each rank: ${this.whyNoNorm()}` : shown.length > 1 && "a rank's is of what it holds"];
    return { title: "gradient norm", about: about.filter(Boolean), steps: columns.map((c) => run.steps[c]), lines };
  }
}
