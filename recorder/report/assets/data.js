// What the blocks of a run hold, as the panels ask for it: series, lanes, steps, cells, the tree of modules.

const NO_ROW = 0, NO_NUMBER = 1, FIRST_CODE = 2;
const ANY_RANK = -1;
const MAX_DIGITS = 7;
const HOLE = 0, NULL_CELL = 1, NUMBER = 2, NONFINITE = 3;
const LARGEST = 3e38; // what a number of four bytes can hold

/**
 * The numbers of one statistic: values[(series * lanes + lane) * stride + column], NaN where there is none. A number is
 * known to so many digits as its code tells apart: it may be off by one in the last of them.
 */
class Cube {
  constructor(block) {
    const [numSeries, numLanes, numColumns] = block.data.shape;
    Object.assign(this, { numSeries, numLanes, numColumns, stride: numColumns });
    const size = numSeries * numLanes * numColumns;
    const bytes = block.arrays.codes;
    const isFine = bytes.length === 2 * size && size > 0;
    const mask = isFine ? 0xffff : 0xff;
    this.values = new Float32Array(size).fill(NaN);
    this.rows = new Uint8Array(size);
    this.digits = new Uint8Array(size);
    const { low, high, unit } = block.arrays;
    const before = new Uint16Array(numColumns);
    for (let s = 0, at = 0; s < numSeries; s++) {
      before.fill(0);
      const scale = (high[s] - low[s]) / (block.data.levels - 1);
      for (let l = 0; l < numLanes; l++) {
        let sum = 0;
        for (let c = 0; c < numColumns; c++, at++) {
          sum = (sum + bytes[at] + (isFine ? bytes[size + at] << 8 : 0)) & mask;
          const code = (before[c] = (before[c] + sum) & mask);
          if (code === NO_ROW) continue;
          this.rows[at] = 1;
          if (code === NO_NUMBER) continue;
          const scaled = low[s] + (code - FIRST_CODE) * scale;
          const value = (this.values[at] = unit[s] > 0 ? unit[s] * Math.sinh(scaled) : scaled);
          this.digits[at] = knownDigits(value, scale * (unit[s] > 0 ? Math.hypot(value, unit[s]) : 1));
        }
      }
    }
  }
  at(series, lane, column) {
    return (series * this.numLanes + lane) * this.stride + column;
  }
  /** Take over the columns of a block that holds some of them: new ones, and such as have changed. */
  merge(block) {
    const some = new Cube(block), { columns } = block.data;
    const count = Math.max(this.numColumns, columns[columns.length - 1] + 1);
    if (count > this.stride) this.widen(2 * count);
    this.numColumns = count;
    for (let s = 0; s < this.numSeries; s++) {
      for (let l = 0; l < this.numLanes; l++) {
        for (let c = 0; c < columns.length; c++) {
          const from = some.at(s, l, c), to = this.at(s, l, columns[c]);
          for (const name of ["values", "rows", "digits"]) this[name][to] = some[name][from];
        }
      }
    }
  }
  widen(stride) {
    const lines = this.numSeries * this.numLanes, size = lines * stride;
    const wide = { values: new Float32Array(size).fill(NaN), rows: new Uint8Array(size), digits: new Uint8Array(size) };
    for (let line = 0; line < lines; line++) {
      const from = line * this.stride, to = from + this.numColumns;
      for (const [name, array] of Object.entries(wide)) array.set(this[name].subarray(from, to), line * stride);
    }
    Object.assign(this, wide, { stride });
  }
}

/** What a scalar of objectives tells: "norm" or "cosine", of which objectives, at which tensor of its module; null for others. */
function objectiveOf(name) {
  const [, kind, names, tensor = "1"] = name.match(/^objective\.(norm|cosine)\.(.+?)(?:#(\d+))?$/s) ?? [];
  return kind ? { kind, names: names.replace(":", " and "), tensor: Number(tensor) } : null;
}

/** How many digits of a number are known where the next code stands for one that is `step` away. */
function knownDigits(value, step) {
  const error = step + Math.abs(value) * 2 ** -22; // the ends of the codes are numbers of 32 bits
  if (value === 0) return step === 0 ? MAX_DIGITS : 0;
  return Math.min(Math.max(Math.floor(Math.log10(Math.abs(value))) - Math.ceil(Math.log10(error)) + 1, 0), MAX_DIGITS);
}

/** One run. */
class RunData {
  /** `side` stands before the names of lines where there are two runs. */
  constructor(blocks, axes, modules, prefix = "", side = "") {
    Object.assign(this, { blocks, prefix, axes, modules, side });
    const described = (one, number) => {
      const [module, site, name, mode, root, shape, dtype, numel] = one;
      return { number, module, site, name, mode, root, shape, dtype, numel, path: modules.paths[module] };
    };
    this.series = axes.series.map(described);
    this.scalars = axes.scalars.map(described);
    this.lanes = axes.lanes;
    this.steps = axes.steps;
    this.cubes = new Map();
    this.byModule = new Map();
    for (const one of this.series) {
      if (!this.byModule.has(one.module)) this.byModule.set(one.module, []);
      this.byModule.get(one.module).push(one);
    }
    this.ownLanes = this.lanes.map((_, lane) => lane).filter((lane) => this.lanes[lane].kind !== "global");
    this.reasons = new Map(axes.reasons.map(([number, whole, why]) => [`${number} ${whole}`, why]));
  }
  /** The cube of a statistic; kind is values, scalars, by-rank or rank-steps. */
  async cube(statistic, kind = "values") {
    const name = `${this.prefix}${kind}/${statistic}`;
    if (!this.blocks.has(name)) return null;
    if (!this.cubes.has(name)) this.cubes.set(name, this.blocks.get(name).then((block) => new Cube(block)));
    return this.cubes.get(name);
  }
  /** The cubes that grow as a run does: statistic and kind of each. */
  get cubeNames() {
    const kinds = [...this.blocks.packed.keys()].map((name) => name.split("/")).filter(([kind]) => kind === "values" || kind === "scalars");
    return kinds.map(([kind, statistic]) => [statistic, kind]);
  }
  /** The columns are others, or more. */
  takeSteps(data) {
    Object.assign(this.axes, data);
    this.steps = data.steps;
  }
  /** The series of the updates of each parameter that has some, by the number of the parameter's series. */
  get updatesOf() {
    if (this.knownUpdates) return this.knownUpdates;
    const keyOf = (one) => [one.root, one.path, one.name].join("\0"), updates = new Map(this.series.filter((one) => one.site === "update").map((one) => [keyOf(one), one]));
    this.knownUpdates = new Map(this.series.filter((one) => one.site === "param" && updates.has(keyOf(one))).map((one) => [one.number, updates.get(keyOf(one))]));
    return this.knownUpdates;
  }
  get hasUpdates() {
    return this.updatesOf.size > 0;
  }
  /** How large each step of the optimizer is, relative to the weight that it moves. */
  async updates() {
    const norms = await this.cube("l2");
    const cube = Object.assign(Object.create(Cube.prototype), norms, { values: new Float64Array(norms.values.length).fill(NaN), digits: new Uint8Array(norms.values.length).fill(2) });
    for (const one of this.series.filter((other) => this.updatesOf.has(other.number) && other.shape.includes(","))) { // what begins at zero, such as a bias, has no size yet
      for (let lane = 0; lane < this.lanes.length; lane++) {
        for (let c = 0; c < this.steps.length; c++) {
          const at = cube.at(one.number, lane, c), update = norms.values[norms.at(this.updatesOf.get(one.number).number, lane, c)] / norms.values[at];
          if (update >= 0 && update < LARGEST) cube.values[at] = Number(update.toPrecision(3)); // the update is of a sample
        }
      }
    }
    return cube;
  }
  /** What a picture of a statistic needs: its cube, and those of what is not finite. */
  async picture(statistic, kind = "values") {
    const [cube, nan, inf] = await Promise.all([
      statistic === "update" ? this.updates() : this.cube(statistic, kind), this.cube("nan_count", kind), this.cube("inf_count", kind),
    ]);
    return cube === null ? null : new Picture(cube, nan, inf, this.ownLanes);
  }
  laneName(lane) {
    if (lane === ANY_RANK) return "what stands out of the ranks";
    const { kind, rank } = this.lanes[lane];
    if (kind === "global") return "all ranks together";
    if (kind === "rank") return `rank ${rank}`;
    if (kind === "odd") return `rank ${rank} (odd)`;
    return { low: "lowest rank", median: "median rank", high: "highest rank" }[kind];
  }
  lineName(lane, name = "") {
    return `${this.side}${name ? `${name}, ` : ""}${this.laneName(lane)}`;
  }
  /** The lane that stands for all: that of all ranks together, unless a large run has it for some steps alone. */
  get mainLane() {
    const isWhole = this.lanes[0].kind === "global" && this.axes.global_steps === null;
    return isWhole || this.lanes.length === 1 ? 0 : ANY_RANK;
  }
  /** The lanes that are drawn where every rank is. */
  get drawnLanes() {
    return this.axes.global_steps === null ? this.lanes.map((_, lane) => lane) : this.ownLanes;
  }
  lane(number) {
    return number === ANY_RANK ? { kind: "any", rank: null } : this.lanes[number];
  }
  /** The last step that a column stands for. */
  lastStep(column) {
    if (!this.isBinned) return this.steps[column];
    return column + 1 < this.steps.length ? this.steps[column + 1] - 1 : this.axes.last_step;
  }
  get isBinned() {
    return this.axes.num_steps > this.steps.length;
  }
}

/** One statistic with what is not finite. */
class Picture {
  constructor(cube, nan, inf, ownLanes) {
    Object.assign(this, { cube, nan, inf, ownLanes });
  }
  /** The columns in which a value of some series is known on any lane; all columns where none is. */
  columnsWith(some) {
    const { numLanes, numColumns } = this.cube, isKnown = new Uint8Array(numColumns);
    for (const series of some) {
      for (let lane = 0; lane < numLanes; lane++) {
        for (let c = 0, at = this.cube.at(series.number, lane, 0); c < numColumns; c++, at++) {
          if (!Number.isNaN(this.cube.values[at]) || this.nan?.values[at] > 0 || this.inf?.values[at] > 0) isKnown[c] = 1;
        }
      }
    }
    const all = [...isKnown.keys()], known = all.filter((c) => isKnown[c]);
    return known.length ? known : all;
  }
  cell(series, lane, column) {
    if (lane === ANY_RANK) {
      let outlier = null;
      for (const own of this.ownLanes) outlier = outstanding(outlier, this.cell(series, own, column));
      return outlier;
    }
    const at = this.cube.at(series, lane, column);
    const nan = this.nan ? this.nan.values[at] || 0 : 0;
    const inf = this.inf ? this.inf.values[at] || 0 : 0;
    const value = this.cube.values[at], digits = this.cube.digits[at];
    if (nan > 0 || inf > 0) return { kind: NONFINITE, value, digits, nan: Math.round(nan), inf: Math.round(inf) };
    if (!Number.isNaN(value)) return { kind: NUMBER, value, digits };
    const bad = this.ownLanes.includes(lane) ? undefined : this.ownLanes.map((own) => this.cell(series, own, column)).find((cell) => cell.kind === NONFINITE);
    return bad ?? { kind: this.cube.rows[at] ? NULL_CELL : HOLE, value: NaN }; // what is not finite on one rank alone makes no value of all
  }
}

/** Of several cells the one that a picture shows: what is not finite, else the largest magnitude. */
function outstanding(a, b) {
  if (a === null || b.kind > a.kind) return b;
  if (b.kind < a.kind) return a;
  if (a.kind === NONFINITE) return { ...a, nan: a.nan + b.nan, inf: a.inf + b.inf };
  return a.kind === NUMBER && Math.abs(b.value) > Math.abs(a.value) ? b : a;
}

/** The containers that are opened at first: level by level while no more than `most` nodes are seen, and until more than `least` are. */
function openLevels(root, childrenOf, least, most) {
  const open = new Set();
  let level = [root], num = 1;
  while (level.length) {
    const next = level.flatMap(childrenOf);
    if (num + next.length > most && num > least) break;
    num += next.length;
    level.forEach((node) => open.add(node));
    level = next;
  }
  return open;
}

/** The modules as a tree; children in the order of execution. */
class Modules {
  constructor(block) {
    this.rows = block.data.modules;
    this.paths = this.rows.map((row) => row[0]);
    this.numberOf = new Map(this.paths.map((path, number) => [path, number]));
    this.nodes = new Map();
    this.root = this.node("");
    this.paths.forEach((path, number) => { this.node(path).order = number < block.data.num_executed ? number : Infinity; });
    this.sort(this.root);
  }
  node(path) {
    if (this.nodes.has(path)) return this.nodes.get(path);
    const cut = path.lastIndexOf(".");
    const node = { path, label: path.slice(cut + 1), children: [], depth: 0, order: Infinity, number: this.numberOf.get(path) ?? null };
    this.nodes.set(path, node);
    if (path !== "") {
      const parent = this.node(cut < 0 ? "" : path.slice(0, cut));
      node.depth = parent.depth + 1;
      parent.children.push(node);
    }
    return node;
  }
  /** Sort children by when the first of what is below them ran; returns that. */
  sort(top) {
    const stack = [[top, false]];
    while (stack.length) {
      const [node, isDone] = stack.pop();
      if (!isDone) {
        stack.push([node, true], ...node.children.map((child) => [child, false]));
      } else {
        node.children.sort((a, b) => a.first - b.first || (a.number ?? 0) - (b.number ?? 0));
        node.first = Math.min(node.order, ...node.children.map((child) => child.first));
      }
    }
  }
  className(number) {
    return number === null ? "" : this.rows[number][1];
  }
  source(number) {
    return number === null ? "" : this.rows[number][2];
  }
  /** Why there are no rows of a module's parameters, "frozen" or "in no optimizer"; empty for other modules. */
  whyNone(number, site) {
    return site === "param" && number !== null ? this.rows[number][3] : "";
  }
  /** All nodes of a module and below it. */
  below(node) {
    const nodes = [], stack = [node];
    while (stack.length) {
      const one = stack.pop();
      nodes.push(one);
      stack.push(...one.children.toReversed());
    }
    return nodes;
  }
}
