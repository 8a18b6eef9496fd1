// The one axis of steps: where a step stands in every picture, the cursor of all pictures, drags and keys that zoom.

const STEP_INCREMENTS = Array.from({ length: 16 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** power)).flat();

class StepAxis {
  /** `state` has the zoom; `pictures` are those that have the cursor in common. */
  constructor(app, state = app.state, pictures = new Set()) {
    Object.assign(this, { app, state, pictures });
  }
  /** The first and the last step of all runs of the page. */
  get ends() {
    const all = [this.app.run, this.app.other].flatMap((one) => one?.axes.ends ?? []);
    return all.length ? [Math.min(...all), Math.max(...all)] : [0, 0];
  }
  /** The steps that are seen, from the left edge of a picture to its right one; a step is one wide. */
  get domain() {
    const [first, last] = this.ends;
    const from = this.state.get("from", first), to = this.state.get("to", last);
    return from > last || to < first || from > to ? [first - 0.5, last + 0.5] : [Math.max(from, first) - 0.5, Math.min(to, last) + 0.5];
  }
  get isZoomed() {
    return this.state.get("from") !== null || this.state.get("to") !== null;
  }
  /** The space for names to the left of each picture of a width. */
  gutter(width) {
    return width > 900 ? 240 : width > 560 ? 160 : 108;
  }
  pixelOf(step, width) {
    const [low, high] = this.domain;
    return ((step - low) / (high - low)) * width;
  }
  stepAt(pixel, width) {
    const [low, high] = this.domain;
    return Math.min(Math.max(Math.round(low + (pixel / width) * (high - low)), Math.ceil(low)), Math.floor(high));
  }
  /**
   * The columns that are seen, as {c, first, last, low, high}: a column reaches half way to those beside it, as nothing
   * is known between. `lastOf` gives the last step that a column stands for.
   */
  columns(steps, indices = steps.map((_, c) => c), lastOf = (c) => steps[c]) {
    const [low, high] = this.domain;
    const gaps = indices.map((c, n) => (n ? Math.max(steps[c] - lastOf(indices[n - 1]), 1) : null));
    return indices.map((c, n) => {
      const before = gaps[n] ?? gaps[n + 1] ?? 1, after = gaps[n + 1] ?? gaps[n] ?? 1;
      return { c, first: steps[c], last: lastOf(c), low: steps[c] - before / 2, high: lastOf(c) + after / 2 };
    }).filter((one) => one.high > low && one.low < high);
  }
  /** The steps of marks that are far enough apart to be read, for a picture of a width. */
  ticks(width) {
    const [low, high] = this.domain, least = (70 * (high - low)) / Math.max(width, 1);
    const each = STEP_INCREMENTS.find((one) => one >= least) ?? 1;
    const ticks = [];
    for (let step = Math.ceil(low / each) * each; step <= high; step += each) ticks.push(step);
    return ticks;
  }
  /** A small mark below a picture at each step at which a finding begins; `pixelAt` says where a step stands. */
  drawFlags(context, top, ratio, pixelAt) {
    const [low, high] = this.domain;
    context.fillStyle = cssColor("--bad");
    for (const x of this.app.flags().map(({ step }) => step).filter((step) => low < step && step < high).map(pixelAt)) {
      pathThrough(context, [[x, top], [x - 4 * ratio, top + 5 * ratio], [x + 4 * ratio, top + 5 * ratio]]);
      context.fill();
    }
  }
  zoom(from, to) {
    this.state.set({ from, to });
  }
  /** Show the cursor at a step in all pictures but the one that it is in; null hides it. */
  point(step, origin) {
    if (this.isPointing) return;
    this.isPointing = true;
    for (const picture of this.pictures) {
      if (!picture.element.isConnected) this.pictures.delete(picture);
      else if (picture !== origin) picture.pointAt(step);
    }
    this.isPointing = false;
  }
  /** A drag with a mouse over a picture of steps zooms all of them, and a double click shows all steps; a finger scrolls. */
  zoomable(plot) {
    const band = el("div", { class: "band", hidden: true });
    const at = (event) => this.stepAt(event.clientX - plot.getBoundingClientRect().left, plot.clientWidth);
    let start = null, from = 0, to = 0;
    plot.append(band);
    plot.addEventListener("pointerdown", (event) => {
      this.wasDragged = false;
      if (event.button !== 0 || event.pointerType === "touch") return;
      start = event.clientX;
      plot.setPointerCapture(event.pointerId);
    });
    plot.addEventListener("pointermove", (event) => {
      if (start === null || (!this.wasDragged && Math.abs(event.clientX - start) < 5)) return;
      this.wasDragged = true;
      const ends = [at({ clientX: start }), at(event)].sort((a, b) => a - b), width = plot.clientWidth;
      [from, to] = ends;
      const left = Math.max(this.pixelOf(from - 0.5, width), 0), right = Math.min(this.pixelOf(to + 0.5, width), width);
      band.hidden = false;
      Object.assign(band.style, { left: `${left}px`, width: `${right - left}px` });
    });
    for (const name of ["pointerup", "pointercancel"]) {
      plot.addEventListener(name, () => {
        const isZoomed = start !== null && this.wasDragged && name === "pointerup";
        start = null;
        band.hidden = true;
        if (isZoomed) this.zoom(from, to);
      });
    }
    plot.addEventListener("dblclick", () => this.zoom(null, null));
    return band;
  }
  /** The keys that zoom: plus and minus around a step, 0 for all steps. Whether it was one of them. */
  key(event, step) {
    const [low, high] = this.domain, half = (high - low) * (event.key === "-" ? 1 : 0.25), [first, last] = this.ends;
    const from = Math.max(Math.round(step - half), first), to = Math.min(Math.round(step + half), last);
    if (event.key === "0" || (event.key === "-" && from === first && to === last)) this.zoom(null, null);
    else if (event.key === "+" || event.key === "-") this.zoom(from, to);
    else return false;
    event.preventDefault();
    return true;
  }
}
