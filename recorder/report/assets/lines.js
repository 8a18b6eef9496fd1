// Lines over steps: the chosen values on every rank and on all together.

const MAX_PINS = 8, CHART_PIXELS = 210, MAX_TRACK_LINES = 4, MAX_TRACK_NAME = 24, LABEL_PIXELS = 16, TICKS_PIXELS = 56, MARK_GAP = 22, LEAST_GAP = 13, DOT_ROOM = 4, DIGIT_PIXELS = 6.2;
const DASHES = [undefined, [6, 3], [2, 2], [8, 2, 2, 2]];

/** Round numbers from low to high, few at first and then more: of a logarithmic axis decades, and digits within them. */
function* roundNumbers(low, high, isLog, least) {
  isLog &&= !(low > 0 && high < 10 * low);
  const power = (exponent) => Number(`1e${exponent}`), top = Math.ceil(Math.log10(high - low));
  for (let exponent = top; !isLog && exponent > top - 3; exponent--) {
    for (const each of [5, 2, 1].map((digit) => digit * power(exponent))) {
      const start = Math.ceil(low / each);
      yield Array.from({ length: Math.max(Math.floor(high / each) - start + 1, 0) }, (_, at) => Number(((start + at) * each).toPrecision(12)));
    }
  }
  const first = Math.floor(Math.log10(low > 0 ? low : high < 0 ? -high : least)), last = Math.floor(Math.log10(Math.max(-low, high)));
  for (const [each, digits] of isLog ? [[16, [1]], [8, [1]], [4, [1]], [2, [1]], [1, [1]], [1, [1, 3]], [1, [1, 2, 5]], [1, [1, 2, 3, 4, 5, 6, 7, 8, 9]]] : []) {
    const exponents = Array.from({ length: last - first + 1 }, (_, at) => first + at).filter((exponent) => exponent % each === 0);
    const sizes = exponents.flatMap((exponent) => digits.map((digit) => Number(`${digit}e${exponent}`)));
    yield [...sizes.map((size) => -size).reverse(), 0, ...sizes].filter((mark) => low <= mark && mark <= high);
  }
}

/** The marks of an axis of numbers: as many round ones as have room, and two at least. */
function marksOf(plot, low, high, isLog) {
  const apart = (one, other) => Math.abs(plot.valToPos(one, "y") - plot.valToPos(other, "y"));
  const sets = [...roundNumbers(low, high, isLog, plot.scales.y.asinh)].map((marks) => (isLog && low <= 0 && high >= 0 ? marks.filter((mark) => !mark || apart(mark, 0) >= MARK_GAP) : marks)).filter((marks) => marks.length > 1);
  const isRoomy = (gap) => (marks) => marks.every((mark, at) => !at || apart(mark, marks[at - 1]) >= gap);
  return sets.findLast(isRoomy(MARK_GAP)) ?? sets.find(isRoomy(LEAST_GAP)) ?? (sets.length ? [sets[0][0], sets[0].at(-1)] : [low, high]);
}

/** The axis of numbers of a picture; its marks have as many digits as tell them apart. */
function numberAxis(ruled, isLog, label, gutter) {
  return { ...ruled, ...labelled(label, gutter), gap: 4, splits: (plot, _, low, high) => marksOf(plot, low, high, isLog), filter: (_, splits) => splits, values: (_, splits) => {
    const texts = [3, 5, 7].map((digits) => splits.map((split) => shortNumber(split, digits)));
    return texts.find((some) => new Set(some).size === some.length) ?? texts[0];
  } };
}

/** What an axis of a statistic counts, in few words: it stands upright. */
function unitOf(statistic) {
  return statistic === "update" ? "step / weight" : STATISTIC_TEXTS[statistic].split(" (")[0];
}

/** The title of an axis of numbers, beside them: what both leave of the space for names is to their left. */
function labelled(label, gutter) {
  return label ? { label, labelSize: LABEL_PIXELS, labelFont: "11px system-ui, sans-serif", labelGap: 0, size: TICKS_PIXELS } : { size: gutter };
}
function roomBeside(label, gutter) {
  return label ? gutter - TICKS_PIXELS - LABEL_PIXELS : 0;
}

/** How a lane is drawn. */
function laneStyle(lane, count, color, isBeside) {
  const { kind } = lane;
  const dash = isBeside ? [6, 4] : kind === "low" || kind === "high" ? [2, 3] : kind === "odd" ? [8, 3, 2, 3] : undefined;
  return { stroke: color, width: kind === "global" || kind === "median" || count === 1 ? 2.2 : 1.2, dash };
}

/** One picture of lines with its own legend, on the axis of steps; `isTrack` has its title beside it, and no ruler. */
class Chart {
  constructor(app, height, isTrack = false) {
    Object.assign(this, { app, height, isTrack, plotted: null, hidden: new Set() });
    this.head = el("div", { class: "chart-head" });
    this.at = el("span", { class: "at" });
    this.body = el("div", { class: "chart-body", tabindex: "0", role: "application", onkeydown: (event) => this.key(event) });
    this.flags = el("div", { class: "flags" });
    this.legend = el("div", { class: "chart-legend" });
    this.heard = el("span", { class: "heard", role: "status", "aria-live": "polite" });
    this.element = el("figure", { class: isTrack ? "chart track" : "chart" }, this.head, this.flags, this.body, this.legend, this.heard);
    this.element.table = () => [["step", ...this.given.lines.map((line) => line.label)], ...this.given.steps.map((step, at) => [step, ...this.given.lines.map((line) => line.values[at] ?? (line.bad.includes(at) ? "nan" : null))])];
    this.element.named = () => this.given.title;
  }
  /** What the first line does, for whoever does not see it. */
  summary({ steps, lines: [line] }) {
    const known = [...(line?.values ?? []).keys()].filter((at) => Number.isFinite(line.values[at]));
    if (!known.length) return "";
    const text = (at) => `${shortNumber(line.values[at], 3)} at step ${steps[at]}`, by = known.toSorted((a, b) => line.values[a] - line.values[b]);
    return `: from ${text(known[0])} to ${text(known[known.length - 1])}, smallest ${text(by[0])}, largest ${text(by[by.length - 1])}${line.bad.length ? `, not finite at ${plural(line.bad.length, "step")}` : ""}`;
  }
  /** `lines` are {label, values, bad, style}; `values` has null for a hole, `bad` says where a value is not finite. */
  draw({ title, steps, lines, isLog, about = [], flags = [], hasRuler = true, level = null, unit = "", ends = null, most = MAX_TRACK_LINES }) {
    this.given = { title, steps, lines, isLog, about, flags, hasRuler, level, unit, ends, most };
    this.plotted?.destroy();
    const { axis } = this.app;
    this.head.replaceChildren(el("strong", {}, title), ...about.map((text) => el("span", { class: "dim" }, text)), this.at);
    this.body.setAttribute("aria-label", `${visible(title)} over steps${this.summary(this.given)}; left and right move, plus, minus and 0 zoom`);
    const width = Math.max(this.body.clientWidth || this.element.clientWidth || 600, 200), gutter = axis.gutter(width);
    this.element.style.setProperty("--gutter", `${gutter}px`);
    const shown = lines.filter((line) => !this.hidden.has(line.label));
    const numbers = shown.flatMap((line) => line.values.filter((value) => value !== null && value !== undefined));
    const smallest = numbers.reduce((low, value) => (value !== 0 ? Math.min(low, Math.abs(value)) : low), Infinity);
    const isAllPositive = numbers.length > 0 && numbers.every((value) => value > 0);
    const lineStyle = { stroke: cssColor("--grid"), width: 1 };
    const ruled = { stroke: cssColor("--dim"), font: "11px system-ui, sans-serif", grid: lineStyle, ticks: { ...lineStyle, size: 4 } };
    const options = {
      width: width + DOT_ROOM, height: this.height, legend: { show: false }, class: "plot", padding: [flags.length ? 20 : 8, DOT_ROOM, hasRuler ? 0 : 8, roomBeside(unit, gutter)],
      cursor: { y: false, drag: { x: false, y: false }, points: { size: 6 } },
      scales: {
        x: { time: false, range: () => axis.domain },
        y: isLog && numbers.length ? isAllPositive ? { distr: 3, range: (_, low, high) => this.range(Math.log(Math.min(low, level || low)), Math.log(high)).map(Math.exp) } : { distr: 4, asinh: Number.isFinite(smallest) ? smallest : 1 } : {
          range: (_, low, high) => ends ?? this.range(low, high) },
      },
      axes: [
        { ...ruled, size: hasRuler ? 26 : 0, gap: 2, splits: () => axis.ticks(width - gutter),
          values: (plot, splits) => splits.map((split, index) => (hasRuler && axis.pixelOf(split, width - gutter) < width - gutter + DOT_ROOM - (String(split).length * DIGIT_PIXELS) / 2 ? (index ? String(split) : `step ${split}`) : "")) },
        numberAxis(ruled, isLog && numbers.length > 0, unit, gutter),
      ],
      series: [{}, ...shown.map((line) => ({
        ...line.style, label: "", spanGaps: false, points: { show: steps.length <= 60 || undefined, size: 5, fill: line.style.stroke },
      }))],
      hooks: {
        ready: [() => {
          if (this.zoomedAt !== undefined) this.pointAt(this.zoomedAt); // a zoom by key leaves the cursor at its step
          this.zoomedAt = undefined;
        }],
        drawAxes: [(plot) => this.drawDumps(plot)],
        draw: [(plot) => this.drawMarks(plot, shown)],
        setCursor: [(plot) => {
          if (plot.status) axis.point(plot.cursor.left < 0 ? null : axis.stepAt(plot.cursor.left, width - gutter), this); // a new picture has no cursor yet
          this.follow(plot, shown);
        }],
      },
    };
    this.body.replaceChildren();
    this.plotted = new uPlot(options, [steps, ...shown.map((line) => line.values)], this.body);
    axis.zoomable(this.plotted.over);
    axis.pictures.add(this);
    this.placeFlags(flags, width - gutter);
    this.makeLegend(lines);
  }
  /** Flags over the picture; those at one place are one, which says all. */
  placeFlags(flags, width) {
    const places = new Map();
    for (const flag of flags) {
      const x = Math.round(this.app.axis.pixelOf(flag.step, width));
      if (x < 0 || x > width) continue;
      const near = [...places.keys()].find((other) => Math.abs(other - x) < 16) ?? x;
      places.set(near, [...(places.get(near) ?? []), flag]);
    }
    this.flags.replaceChildren(...[...places].map(([x, some]) => el("a", {
      class: `flag ${some[0].mark}`, href: some[0].href, style: { left: `${x}px` }, title: some.map((one) => visible(one.text)).join("\n"),
      onclick: some[0].onclick, "aria-label": `finding at step ${some[0].step}: ${visible(some[0].text)}`,
    }, some[0].label)));
  }
  /** The cursor of another picture. */
  pointAt(step) {
    this.plotted?.setCursor(step === null ? { left: -10, top: -10 } : { left: this.plotted.valToPos(step, "x"), top: 0 });
  }
  key(event) {
    const { axis } = this.app, { steps } = this.given, { idx } = this.plotted.cursor;
    if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
      const [low, high] = axis.domain, inside = [...steps.keys()].filter((at) => low <= steps[at] && steps[at] <= high);
      const next = event.key === "ArrowLeft" ? inside.findLast((at) => at < (idx ?? Infinity)) : inside.find((at) => at > (idx ?? -1));
      if (next !== undefined) this.pointAt(steps[next]);
      axis.point(steps[next ?? idx], this);
      this.heard.textContent = `${this.at.textContent}: ${[...this.readings].map(([label, { textContent }]) => label + textContent).join(", ")}`;
      event.preventDefault();
    } else if (event.key === "Escape") this.pointAt(null);
    else {
      this.zoomedAt = steps[idx];
      if (!axis.key(event, steps[idx] ?? (axis.domain[0] + axis.domain[1]) / 2)) this.zoomedAt = undefined;
    }
  }
  range(low, high) {
    if (low === null || high === null) return [0, 1];
    if (low === high) return low === 0 ? [-1, 1] : [low - Math.abs(low) * 0.1, high + Math.abs(high) * 0.1];
    const pad = (high - low) * 0.06;
    return [low - pad, high + pad];
  }
  /** The steps of dumps, below the lines. */
  drawDumps(plot) {
    const context = plot.ctx, { left, top, width, height } = plot.bbox;
    const ratio = devicePixelRatio || 1;
    const bands = this.app.dumps.all.map(({ first, last }) => [
      Math.max(plot.valToPos(first, "x", true) - 2 * ratio, left), Math.min(plot.valToPos(last, "x", true) + 2 * ratio, left + width),
    ]).filter(([from, to]) => from < to);
    context.save();
    context.fillStyle = cssColor("--dump");
    context.globalAlpha = 0.07;
    context.beginPath();
    for (const [from, to] of bands) context.rect(from, top, to - from, height);
    context.fill();
    context.globalAlpha = 1;
    bands.forEach(([from, to], number) => { // those of the same steps above each other
      context.fillRect(from, top + height - (3 + 4 * (number % 3)) * ratio, to - from, 3 * ratio);
    });
    context.restore();
  }
  /** Where something was not finite, and the step that the address names. */
  drawMarks(plot, shown) {
    const context = plot.ctx, { left, top, width, height } = plot.bbox;
    const ratio = devicePixelRatio || 1;
    const inside = (x) => x >= left - 1 && x <= left + width + 1;
    context.save();
    for (const step of new Set([this.app.state.get("step"), ...this.given.flags.map((flag) => flag.step)])) {
      const x = plot.valToPos(step ?? NaN, "x", true);
      if (inside(x)) {
        context.strokeStyle = cssColor("--dim");
        context.setLineDash([3 * ratio, 3 * ratio]);
        pathThrough(context, [[x, top], [x, top + height]]);
        context.stroke();
        context.setLineDash([]);
      }
    }
    if (!this.given.flags.length) this.app.axis.drawFlags(context, top + height, ratio, (step) => plot.valToPos(step, "x", true));
    const { level } = this.given, y = level === null ? NaN : plot.valToPos(level, "y", true);
    if (y > top && y < top + height) {
      context.strokeStyle = cssColor("--accent");
      context.setLineDash([6 * ratio, 4 * ratio]);
      context.strokeRect(left, y, width, 0);
      context.setLineDash([]);
      Object.assign(context, { font: `${11 * ratio}px system-ui, sans-serif`, fillStyle: cssColor("--accent"), textAlign: "left", textBaseline: "alphabetic" });
      if (level) context.fillText(level.toExponential(), left + 4 * ratio, y - 4 * ratio);
    }
    const bad = [...new Set(shown.flatMap((line) => line.bad))].sort((a, b) => a - b), { steps } = this.given, first = this.app.top.first?.step;
    const pixelOf = (index) => plot.valToPos(steps[index] < first && !(steps[index + 1] <= first) ? first : steps[index], "x", true); // a column of many steps begins before its NaN
    context.fillStyle = BAD_COLOR;
    for (let at = 0; at < bad.length; at++) {
      const x = pixelOf(bad[at]);
      while (bad[at + 1] === bad[at] + 1) at++; // steps one after the other are one area
      const from = Math.max(x, left), to = Math.min(Math.max(pixelOf(bad[at]), x + 3 * ratio), left + width);
      if (from >= to) continue;
      context.globalAlpha = 0.18;
      context.fillRect(from, top, to - from, height);
      context.globalAlpha = 1;
      if (!inside(x)) continue;
      pathThrough(context, [[x - 5 * ratio, top], [x + 5 * ratio, top], [x, top + 9 * ratio]]);
      context.fill();
    }
    context.restore();
  }
  makeLegend(lines) {
    this.readings = new Map();
    const hasBad = lines.some((line) => line.bad.length);
    const { steps, most } = this.given;
    const hasDumps = steps.length > 0 && this.app.dumps.of(steps[0], steps[steps.length - 1]).length > 0;
    this.dumpNote = el("span", { class: "dump-note" }, `${DUMP_MARK} dump`);
    const numMore = this.isTrack && !this.isWhole && lines.length > most ? lines.length - most + 1 : 0;
    const unfold = () => { this.isWhole = true; this.makeLegend(lines); };
    this.legend.classList.toggle("whole", Boolean(this.isWhole) || lines.some(({ label }) => label.length > MAX_TRACK_NAME));
    this.legend.replaceChildren(...(hasBad ? [el("span", { class: "bad-note" }, "▼ NaN or infinite")] : []), ...lines.slice(0, lines.length - numMore).map((line) => {
      const reading = el("span", { class: "reading" });
      this.readings.set(line.label, reading);
      const mark = el("canvas", { class: "swatch", "aria-hidden": "true" });
      const context = sizedCanvas(mark, 22, 10);
      context.strokeStyle = line.style.stroke;
      context.lineWidth = line.style.width;
      context.setLineDash(line.style.dash ?? []);
      pathThrough(context, [[0, 5], [22, 5]]);
      context.stroke();
      return el("button", {
        type: "button", class: "line-name", "aria-pressed": this.hidden.has(line.label) ? "false" : "true",
        onclick: () => {
          if (!this.hidden.delete(line.label)) this.hidden.add(line.label);
          this.draw(this.given);
        },
      }, mark, el("span", { title: visible(line.label) }, line.label), reading);
    }), ...(numMore ? [el("button", { type: "button", class: "line-name unfold", onclick: unfold }, `and ${numMore} more`)] : []), ...(hasDumps ? [this.dumpNote] : []));
  }
  follow(plot, shown) {
    const index = plot.cursor.idx;
    const dumps = index === null || index === undefined ? [] : this.app.dumps.of(this.given.steps[index]);
    if (this.dumpNote) this.dumpNote.textContent = dumps.length ? dumps.join("; ") : `${DUMP_MARK} dump`;
    this.at.textContent = index === null || index === undefined ? "" : `step ${this.given.steps[index]}`;
    for (const line of shown) {
      const reading = this.readings?.get(line.label);
      if (!reading) continue;
      const value = index === null || index === undefined ? null : line.values[index];
      reading.textContent = index === null || index === undefined ? "" :
        ` ${line.bad.includes(index) ? "not finite; " : ""}${shortNumber(value, 4, line.digits[index])}`;
    }
  }
}

/** The lines of a series at some columns. */
function linesOf(run, picture, series, { columns, lanes, colorOf, named, isBeside = false }) {
  return lanes.map((lane) => {
    const values = [], digits = [], bad = [];
    columns.forEach((c, at) => {
      const cell = picture.cell(series.number, lane, c);
      values.push(Number.isNaN(cell.value) || (cell.kind === NONFINITE && cell.value === 0) ? null : cell.value); // nothing of it is finite
      digits.push(cell.digits);
      if (cell.kind === NONFINITE) bad.push(at);
    });
    const isCut = run.lane(lane).kind === "global" && bad.length > 0; // what is not finite on a rank is in no number of all
    const label = named(lane) + (isCut ? ` (${bad.every((at) => values[at] === null) ? "no number" : "finite elements alone"} where a rank is not finite)` : "");
    return { label, values, digits, bad, style: laneStyle(run.lane(lane), lanes.length, colorOf(lane), isBeside) };
  });
}

class LinesPanel extends Panel {
  constructor(app) {
    super(app, { id: "lines", title: "Lines", isShown: app.run.series.length > 0 });
    this.listens = ["pins", "module", "site", "root", "mode", "name", "stat", "lane", "from", "to", "step", "log", "each"];
    this.chart = new Chart(app, CHART_PIXELS);
  }
  build(section) {
    this.section = section;
    this.options = el("div", { class: "bar" });
    put(section, this.options, this.chart.element);
  }
  /** The series that are drawn: those that were chosen; else those of a link; else the first that there is. */
  get pinned() {
    const { run, state, choices, modules } = this.app;
    const pins = state.get("pins", []).map(([path, site, name, mode, root]) =>
      run.series.find((one) => one.path === path && one.site === site && one.name === name &&
        (mode === undefined || one.mode === mode) && (root === undefined || one.root === root))).filter(Boolean);
    if (pins.length) return pins.slice(-MAX_PINS);
    const module = state.get("module"), number = module === null ? undefined : modules.numberOf.get(module);
    if (number !== undefined) {
      const own = choices.seriesOf(number);
      if (own.length) return own.slice(0, MAX_PINS);
      const any = run.byModule.get(number) ?? [];
      if (any.length) return any.slice(0, 1);
    }
    const first = modules.rows.map((_, one) => one).find((one) => choices.seriesOf(one).some((series) => !hasNoUpdate(choices, series)));
    return first === undefined ? [] : choices.seriesOf(first).filter((series) => !hasNoUpdate(choices, series)).slice(0, 1);
  }
  async update() {
    const { app } = this, { state, run, choices, other } = app;
    const pinned = this.pinned, { statistic } = choices;
    const isUpdate = statistic === "update", isLog = state.get("log") === "1" || isUpdate, isEach = state.get("each") !== "0", isDocked = state.get("pins", []).length > 0;
    this.section.classList.toggle("docked", isDocked); // it stays in sight beside the map
    this.options.replaceChildren(
      toggle("logarithmic", isLog, (isOn) => state.set({ log: isOn ? "1" : null }), { id: "log" }),
      ...(run.lanes.length > 1 ? [toggle("every rank", isEach, (isOn) => state.set({ each: isOn ? null : "0" }), { id: "each" })] : []),
      this.adder(),
      ...(isDocked ? [el("button", { type: "button", class: "quiet", id: "unpin", onclick: () => state.set({ pins: null, module: null, step: null }) }, "close")] : []));
    const picture = await run.picture(statistic), alike = run.series.filter((one) => pinned.some(({ site, mode }) => one.site === site && one.mode === mode));
    const columns = picture.columnsWith(alike), lines = [], others = [], pairs = pinned.map((series) => app.against?.otherOf(series) ?? null);
    const otherPicture = pairs.some(Boolean) ? await other.picture(statistic) : null, otherColumns = otherPicture ? otherPicture.columnsWith(pairs.filter(Boolean)) : [];
    for (const [number, series] of pinned.entries()) {
      const lanes = isEach ? run.drawnLanes : [choices.lane];
      const name = valueText(series.path, series.site, series.name);
      const colorOf = (lane) => lineColor(pinned.length > 1 ? number : Math.max(lane, 0));
      const named = (lane) => run.lineName(lane, pinned.length > 1 ? name : "");
      lines.push(...linesOf(run, picture, series, { columns, lanes, colorOf, named }));
      if (otherPicture && pairs[number]) {
        others.push(...linesOf(other, otherPicture, pairs[number], {
          columns: otherColumns, lanes: isEach ? other.drawnLanes : [other.mainLane], colorOf, isBeside: true,
          named: (lane) => other.lineName(lane, pinned.length > 1 ? name : ""),
        }));
      }
    }
    const [steps, all] = joinSteps([[columns.map((c) => run.steps[c]), lines], [otherColumns.map((c) => other.steps[c]), others]]);
    const title = pinned.length === 1 ?
      valueText(pinned[0].path, pinned[0].site, pinned[0].name) : plural(pinned.length, "value");
    this.chart.element.hidden = !pinned.length;
    if (pinned.length) {
      const about = [STATISTIC_TEXTS[statistic], pinned.length === 1 ? `${pinned[0].dtype} ${pinned[0].shape}` : "", isUpdate ? SAMPLE_TEXT : ""];
      this.chart.draw({ title, steps, lines: all.filter((line) => !isUpdate || line.values.some(Number.isFinite)), isLog, about, level: isUpdate ? USUAL_UPDATE : null, unit: unitOf(statistic) });
    }
  }
  /** A field to add a value by the path of its module. */
  adder() {
    const { state, run, choices } = this.app;
    const list = el("datalist", { id: "paths" });
    const paths = [...new Set(run.series.map((one) => one.path))];
    for (const path of paths.slice(0, 2000)) list.append(el("option", { value: path }));
    const field = el("input", {
      type: "text", list: "paths", id: "add-path", placeholder: "add a module", "aria-label": "module to add",
      value: this.unknown ?? null,
      onchange: (event) => {
        const path = event.target.value, number = this.app.modules.numberOf.get(path);
        const ofModule = number === undefined ? [] : choices.seriesOf(number);
        const series = ofModule.length ? ofModule : (run.byModule.get(number) ?? []).slice(0, 1);
        this.unknown = series.length || !path ? null : path;
        problem.textContent = this.unknownText(number, paths);
        if (!series.length) return;
        const pins = this.pinned.map(keyOf);
        state.set({ pins: [...pins, ...series.map(keyOf)].slice(-MAX_PINS) });
      },
    });
    const problem = el("span", { class: "wrong", role: "status" }, this.unknownText(this.app.modules.numberOf.get(this.unknown), paths));
    return el("span", { class: "choice" }, field, list, problem);
  }
  /** Why the module whose name was typed is not added; empty where it was. */
  unknownText(number, paths) {
    if (!this.unknown) return "";
    const name = visible(this.unknown);
    if (number !== undefined) return `No value of the module ${name} was recorded.`;
    const near = nearest(this.unknown, paths.filter(Boolean));
    return `There is no module ${name}${near.length ? `; the nearest names are ${near.map(visible).join(", ")}` : ""}.`;
  }
}

/** Lines over steps of their own, over the steps of all. */
function joinSteps(groups) {
  const steps = [...new Set(groups.flatMap(([own]) => own))].sort((a, b) => a - b);
  const indexOf = new Map(steps.map((step, number) => [step, number]));
  const lines = groups.flatMap(([own, some]) => some.map((line) => {
    const values = new Array(steps.length).fill(undefined); // unlike null, no gap: the other run has these steps
    const digits = [];
    line.values.forEach((value, number) => {
      values[indexOf.get(own[number])] = value;
      digits[indexOf.get(own[number])] = line.digits[number];
    });
    return { ...line, values, digits, bad: line.bad.map((number) => indexOf.get(own[number])) };
  }));
  return [steps, lines];
}
