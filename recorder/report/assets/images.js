// Pictures out of recorded tensors: filters, inputs, feature maps, attention.

const NOT_FINITE_PIXEL = 255, SPECTRUM_PIXELS = 320;

class ImagesPanel extends Panel {
  constructor(app, block) {
    super(app, { id: "images", block, isShown: block.data.images.length > 0 });
    const spectra = block.data.images.filter((one) => one.kind === "spectrum").length;
    this.title = spectra === 0 ? "Images" : spectra === block.data.images.length ? "Spectra" : "Images and spectra";
  }
  build(section) {
    this.body = el("div", {});
    section.append(this.body);
  }
  update() {
    if (this.wasDark === isDark()) return;
    this.wasDark = isDark();
    const rgb = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
    this.palette = Array.from({ length: 256 }, (_, i) => rgb(mixed(VIRIDIS, i / (NOT_FINITE_PIXEL - 1))));
    this.palette[NOT_FINITE_PIXEL] = rgb(BAD_COLOR);
    const spectra = "Of a weight the singular values, from the largest on; the stable rank is the sum of their squares over the largest square.";
    this.body.replaceChildren(el("p", { class: "note" }, [this.title !== "Spectra" && "From recorded tensors of one rank, made small. Bright is large; the first and the last record of a value have one scale.", this.title !== "Images" && spectra].filter(Boolean).join(" ")),
      el("div", { class: "images" }, this.block.data.images.map((one) => this.image(one))));
  }
  image(one) {
    const tiles = this.block.arrays[one.array];
    const [count, height, width, colors] = one.tiles;
    const alike = this.block.data.images.filter((other) => other.low !== null && ["kind", "module", "site", "name", "mode"].every((name) => other[name] === one[name]));
    const low = Math.min(...alike.map((other) => other.low)), high = Math.max(...alike.map((other) => other.high)), span = high - low || 1;
    const shared = (code) => Math.round((NOT_FINITE_PIXEL - 1) * ((one.low - low) / span + (code / (NOT_FINITE_PIXEL - 1)) * ((one.high - one.low) / span)));
    if (one.kind === "spectrum") return this.spectrum(one, tiles, high);
    const scale = Math.max(Math.floor(96 / Math.max(height, width)), 1);
    const canvases = Array.from({ length: count }, (_, number) => {
      const canvas = el("canvas", { class: "tile", width, height, role: "img", "aria-label": `${one.kind} ${number}` });
      Object.assign(canvas.style, { width: `${width * scale}px`, height: `${height * scale}px` });
      const context = canvas.getContext("2d"), image = context.createImageData(width, height);
      for (let at = 0; at < width * height; at++) {
        const first = (number * width * height + at) * colors;
        const values = tiles.subarray(first, first + colors);
        const isBad = values.includes(NOT_FINITE_PIXEL);
        image.data.set(isBad ? this.palette[NOT_FINITE_PIXEL] : colors === 3 ? values.map(shared) : this.palette[shared(values[0])], at * 4);
        image.data[at * 4 + 3] = 255;
      }
      context.putImageData(image, 0, 0);
      return canvas;
    });
    const more = one.total > count ? `${count} of ${one.total}` : "";
    const facts = [one.kind, `step ${one.step}`, one.rank === null ? "" : `rank ${one.rank}`, `[${one.shape.join(", ")}]`,
      one.low === null ? "" : `${shortNumber(one.low, 3)} to ${shortNumber(one.high, 3)}`,
      one.nan ? `${one.nan.toLocaleString("en")} NaN` : "", one.inf ? `${one.inf.toLocaleString("en")} infinite` : "", more, one.mode === "train" ? "" : one.mode].filter(Boolean);
    return el("figure", { class: "image" }, el("figcaption", {},
      el("strong", {}, valueText(one.module, one.site, one.name)), el("span", { class: "dim" }, facts.join(" · "))),
    el("div", { class: "tiles" }, canvases));
  }
  /** A row for each picture; of a weight whose singular values are all known these come last. */
  table() {
    const { images } = this.block.data, head = ["module", "value", "name", "kind", "step", "rank", "shape", "smallest", "largest", "NaN", "infinite", "singular values"];
    return [head, ...images.map((one) => [one.module, one.site, one.name, one.kind, one.step, one.rank, one.shape.join(" x "), one.low, one.high, one.nan, one.inf, ...(one.kind === "spectrum" ? this.singular(one) : [])])];
  }
  singular(one) {
    const codes = this.block.arrays[one.array];
    return one.low === null ? [] : Array.from(codes, (code) => one.low + (code / (NOT_FINITE_PIXEL - 1)) * (one.high - one.low));
  }
  /** The singular values of a weight as bars; `high` is the largest of the weight's records. Of a large weight the largest alone is known. */
  spectrum(one, codes, high) {
    const isKnown = one.low !== null, isWhole = isKnown && codes.length === one.total;
    const values = isKnown ? this.singular(one) : Array.from(codes, () => 0);
    const rank = values.reduce((sum, value) => sum + (value / (one.high || 1)) ** 2, 0);
    const facts = [one.kind, `step ${one.step}`, `[${one.shape.join(", ")}]`, isKnown ? `largest ${shortNumber(one.high, 3)}` : "not finite", isWhole && `least ${shortNumber(one.low, 2)}`,
      isWhole && `stable rank ${shortNumber(rank, 2)} of ${one.total}`].filter(Boolean).join(" · ");
    const canvas = el("canvas", { class: "tile", role: "img", "aria-label": facts }), context = sizedCanvas(canvas, SPECTRUM_PIXELS, SPECTRUM_PIXELS / 4);
    context.fillStyle = isKnown ? lineColor(0) : BAD_COLOR;
    const wide = SPECTRUM_PIXELS / values.length, tall = (value) => (isKnown ? (value / (high || 1)) * (SPECTRUM_PIXELS / 4) : SPECTRUM_PIXELS / 4);
    values.forEach((value, index) => context.fillRect(index * wide, SPECTRUM_PIXELS / 4 - tall(value), Math.max(wide - (wide > 4 ? 1 : 0), 1), tall(value)));
    return el("figure", { class: "image" }, el("figcaption", {}, el("strong", {}, valueText(one.module, one.site, one.name)), el("span", { class: "dim" }, facts)), isWhole || !isKnown ? canvas : "");
  }
}
