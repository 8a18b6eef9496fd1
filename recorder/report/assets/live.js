// The page of a server: it begins empty, is told everything once, and then what is new. Also the list of runs.

/** Where a live page gets its blocks from, and where it saves its panes. */
class LiveSource {
  constructor(app) {
    this.app = app;
    this.queue = Promise.resolve();
    this.known = "";
    this.connect();
    document.addEventListener("visibilitychange", () => {
      if (!document.hidden && this.events.readyState === EventSource.CLOSED) this.connect();
    });
  }
  connect() {
    this.events = new EventSource(`events?known=${encodeURIComponent(this.known)}`);
    const take = (isAll) => (event) => {
      this.known = event.lastEventId;
      const packed = Object.entries(JSON.parse(event.data)).map(([name, text]) => [name, fromBase64(text)]);
      this.queue = this.queue.then(() => (isAll ? this.app.takeAll(packed) : this.app.takeMore(packed))).catch((error) => {
        console.error(error);
        this.tell(`this page could not draw what came: ${error.message}`);
      });
    };
    this.events.addEventListener("all", take(true));
    this.events.addEventListener("more", take(false));
    this.events.addEventListener("problem", (event) => this.tell(JSON.parse(event.data)));
    this.events.onopen = () => this.tell("");
    this.events.onerror = () => {
      if (this.events.readyState !== EventSource.CLOSED) return this.tell("the server does not answer; trying again");
      this.tell("the server refuses this page: it has ended or was started anew; open the address that it printed");
      setTimeout(() => document.hidden || this.connect(), 5000);
    };
  }
  tell(problem) {
    this.problem = problem;
    this.app.sayLive();
  }
  async save(panes) {
    try {
      const answer = await fetch("panes", { method: "PUT", body: JSON.stringify(panes) });
      if (!answer.ok) return `the server answered ${answer.status}`;
      return (await answer.json()).why_not_saved;
    } catch {
      return "the server does not answer";
    }
  }
}

/** The columns of the list: title, what it is sorted by, and what is shown. */
const RUN_COLUMNS = [
  ["run", (run) => run.name, (run) => [el("a", { href: `run/${encodeURIComponent(run.directory)}/` }, run.name),
    run.isAlike ? el("span", { class: "dim" }, ` ${visible(run.directory)}`) : ""]],
  ["loss", (run) => run.loss?.findLast((one) => one !== null) ?? Infinity, (run) => sparkline(run.loss ?? [])],
  ["findings", (run) => -(run.found?.length ?? -1), (run) => run.is_reading && !run.found ? el("span", { class: "dim", title: "the rows of this run are being read, for its loss and for the rules of recorder check" }, "reading …") :
    run.found && el("span", { class: run.found.length ? "flag wrong" : run.notes?.length ? "flag" : "flag right",
      title: [...run.found, ...(run.notes ?? [])].map(visible).join("\n") }, run.found.length ? String(run.found.length) : run.notes?.length ? plural(run.notes.length, "note") : "✓")],
  ["state", (run) => statesOf(run), (run) => [statesOf(run), " ",
    run.problems?.length ? el("span", { class: "flag wrong", title: run.problems.map(visible).join("\n") }, "damaged") : ""]],
  ["step", (run) => -(run.step ?? -1), (run) => (run.step === null ? "" : run.step.toLocaleString("en"))],
  ["ranks", (run) => -run.ranks, (run) => el("a", { href: `ranks?${new URLSearchParams({ run: run.directory })}` }, String(run.ranks))],
  ["size", (run) => -run.bytes, (run) => (run.bytes ? sizeText(run.bytes) : "")],
  ["started", (run) => -run.created_s, (run) => el("span", { title: run.created_s > 0 ? new Date(run.created_s * 1000).toLocaleString("sv") : "" }, ageText(run.created_s))],
];
const NUMERIC = new Set(["step", "ranks", "size"]);

function statesOf(run) {
  return Object.entries(run.states).map(([state, count]) => `${count} ${state}`).join(", ");
}
/** Whether a run is found by NaN: its loss was not finite, or a rule says so of any value. */
function isNonfinite(run) {
  return run.loss?.includes(null) || run.found?.some((text) => text.includes("nonfinite"));
}
function sizeText(bytes) {
  const power = Math.min(Math.floor(Math.log10(bytes) / 3), 4);
  return `${Number((bytes / 1000 ** power).toPrecision(3))} ${["B", "kB", "MB", "GB", "TB"][power]}`;
}
function ageText(created) {
  if (!(created > 0)) return "";
  const passed = Math.max(Date.now() / 1000 - created, 0), [size, unit] = [[86400, "day"], [3600, "hour"], [60, "minute"], [1, "second"]].find(([size]) => passed >= size) ?? [1, "second"];
  return `${plural(Math.floor(passed / size), unit)} ago`;
}
/** A line without axes; a step whose loss is not finite is a mark. */
function sparkline(values) {
  const canvas = el("canvas", { class: "sparkline", role: "img", "aria-label": `loss: ${values.map((one) => one ?? "not finite").slice(-1)}` });
  const context = sizedCanvas(canvas, 120, 22), known = values.filter((one) => one !== null);
  const low = Math.min(...known), span = Math.max(...known) - low || 1, x = (at) => 2 + (116 * at) / Math.max(values.length - 1, 1);
  context.strokeStyle = lineColor(0);
  context.lineWidth = 1.5;
  context.beginPath();
  values.forEach((one, at) => one !== null && context[at && values[at - 1] !== null ? "lineTo" : "moveTo"](x(at), 20 - (18 * (one - low)) / span));
  context.stroke();
  context.fillStyle = BAD_COLOR;
  values.forEach((one, at) => one === null && context.fillRect(x(at) - 1, 0, 2, 22));
  return canvas;
}

/** Draw a table anew; the button or box that had the focus has it again. */
function redrawTable(table, heads, rows) {
  const active = document.activeElement?.dataset?.key;
  table.replaceChildren(el("thead", {}, el("tr", {}, heads)), el("tbody", {}, rows));
  if (active) [...table.querySelectorAll("[data-key]")].find((one) => one.dataset.key === active)?.focus();
}
/** A field that tells a page what to find in its table. */
function finder(page, placeholder) {
  page.wanted = "";
  return el("input", { type: "search", id: "find", placeholder, "aria-label": "what to find", oninput: (event) => {
    page.wanted = event.target.value.toLowerCase();
    page.draw();
  } });
}

/** The page of several runs: a list, which is asked for anew while it is open. */
class RunsPage {
  constructor(blocks) {
    this.blocks = blocks;
    this.chosen = new Set();
    this.sorted = { title: "started", sign: 1 };
  }
  async start() {
    const { data } = await this.blocks.get("runs");
    this.table = el("table", { class: "grid runs list" });
    this.side = el("button", { type: "button", class: "primary", id: "side", onclick: () => {
      const words = new URLSearchParams([...this.chosen].map((name) => ["run", name]));
      location.assign(`side?${words}`);
    } }, "show side by side");
    const field = finder(this, "name, state, finding");
    this.note = el("p", { class: "note", id: "list-note" });
    document.getElementById("page").append(el("header", {}, el("h1", {}, `Runs in ${data.folder}`)),
      el("main", {}, el("section", {}, this.note, el("div", { class: "bar" }, field, this.side), el("div", { class: "scroll" }, this.table))));
    this.draw(data.runs);
    document.documentElement.dataset.drawn = "1";
    setInterval(() => document.hidden || this.ask(), 2000);
  }
  async ask() {
    try {
      const answer = await fetch("runs");
      if (!answer.ok) throw new Error();
      this.draw(await answer.json());
    } catch {
      this.note.textContent = "The server does not answer.";
    }
  }
  draw(runs = this.runs) {
    this.runs = runs;
    const names = runs.map((run) => run.name);
    for (const run of runs) run.isAlike = names.indexOf(run.name) !== names.lastIndexOf(run.name);
    this.side.disabled = this.chosen.size < 2;
    const { title, sign } = this.sorted, [, keyOf] = RUN_COLUMNS.find(([name]) => name === title);
    const text = (run) => [run.name, run.directory, statesOf(run), ...(run.problems?.length ? ["damaged"] : []), ...(run.found ?? []), isNonfinite(run) ? "nonfinite NaN infinite" : ""].join(" ").toLowerCase();
    const shown = runs.filter((run) => text(run).includes(this.wanted)).sort((a, b) => {
      const [one, other] = [keyOf(a), keyOf(b)];
      return sign * (one < other ? -1 : one > other ? 1 : 0);
    });
    this.note.textContent = !runs.length ? "There is no run here yet." : !shown.length ? `No run has "${visible(this.wanted)}" in its name, its state or its findings.` : "";
    const heads = RUN_COLUMNS.map(([name]) => el("th", { scope: "col", "aria-sort": name !== title ? null : sign > 0 ? "ascending" : "descending" },
      el("button", { type: "button", class: "sort", "data-key": `sort ${name}`, onclick: () => {
        this.sorted = { title: name, sign: name === title ? -sign : 1 };
        this.draw();
      } }, name + (name !== title ? "" : sign > 0 ? " ↓" : " ↑"))));
    const body = shown.map((run) => {
      const box = el("input", { type: "checkbox", "data-key": `box ${visible(run.directory)}`, "aria-label": `show ${visible(run.name)} beside others`, onchange: (event) => {
        if (event.target.checked) this.chosen.add(run.directory);
        else this.chosen.delete(run.directory);
        this.side.disabled = this.chosen.size < 2;
      } });
      box.checked = this.chosen.has(run.directory);
      return el("tr", {}, el("td", {}, box), RUN_COLUMNS.map(([name, , show]) => el("td", { class: NUMERIC.has(name) ? "number" : "", "data-name": name }, show(run))));
    });
    redrawTable(this.table, [el("th", {}), ...heads], body);
  }
}

/** The columns of ranks: title, what it is sorted by, the worst first, and what is shown. */
const RANK_COLUMNS = [
  ["rank", (rank) => rank.rank, (rank) => String(rank.rank)],
  ["node", (rank) => rank.host, (rank) => rank.host],
  ["state", (rank) => (BAD_STATES.has(rank.state) ? 0 : 1), (rank) => el("span", { class: BAD_STATES.has(rank.state) ? "flag wrong" : "" },
    rank.state === "silent" ? `silent for ${plural(Math.round(rank.silent_s), "second")}` : rank.state)],
  ["step", (rank) => rank.step ?? -1, (rank) => (rank.step === null ? "" : rank.step.toLocaleString("en"))],
  ["steps/s", (rank) => (rank.is_ended ? Infinity : rank.steps_per_s), (rank) => (rank.is_ended ? "" : rank.steps_per_s.toFixed(2))],
  ["findings", (rank) => -rank.findings.length, (rank) => rank.findings.length ? el("span", { class: "flag wrong",
    title: visible(rank.findings.map(foundText).join("\n")) }, [...new Set(rank.findings.map((one) => one.rule))].join(", ")) : ""],
  ["dropped", (rank) => -droppedOf(rank), (rank) => Object.entries(rank.dropped).map(([why, count]) => `${why}=${count}`).join(" ")],
  ["waited", (rank) => -rank.waited_s, (rank) => `${rank.waited_s.toFixed(1)} s`],
  ["disk left", (rank) => rank.free_bytes ?? Infinity, (rank) => (rank.free_bytes ? sizeText(rank.free_bytes) : "")],
];
const RANKS_NUMERIC = new Set(["rank", "step", "steps/s", "waited", "disk left"]), BAD_STATES = new Set(["killed", "failed", "silent"]), MAX_SHOWN = 200;

function droppedOf(rank) {
  return Object.values(rank.dropped).reduce((sum, one) => sum + one, 0);
}
function foundText(one) {
  return `${one.rule}: ${one.text}`;
}
/** One line for the ranks of a node: of each column the worst of them. */
function nodeOf(host, ranks) {
  const least = (read) => Math.min(...ranks.map(read)), states = new Map(), dropped = {};
  for (const { state } of ranks) states.set(state, (states.get(state) ?? 0) + 1);
  for (const rank of ranks) for (const [why, count] of Object.entries(rank.dropped)) dropped[why] = (dropped[why] ?? 0) + count;
  const worst = [...states.keys()].sort((one, other) => BAD_STATES.has(other) - BAD_STATES.has(one))[0];
  const free = least((rank) => rank.free_bytes ?? Infinity), step = least((rank) => rank.step ?? -1);
  return { rank: ranks.length, host, state: worst, silent_s: Math.max(...ranks.map((rank) => rank.silent_s)), step: step < 0 ? null : step,
    steps_per_s: least((rank) => (rank.is_ended ? Infinity : rank.steps_per_s)), is_ended: ranks.every((rank) => rank.is_ended), dropped,
    findings: ranks.flatMap((rank) => rank.findings), waited_s: Math.max(...ranks.map((rank) => rank.waited_s)), free_bytes: free === Infinity ? null : free };
}

/** A table of ranks or nodes that is sorted by a click on a title; the worst are on top, and of many only those. */
class RanksTable {
  constructor(first, title) {
    this.first = first;
    this.sorted = title;
    this.table = el("table", { class: "grid runs" });
    this.more = el("p", { class: "note" });
  }
  draw(rows) {
    this.rows = rows;
    const columns = [[this.first, RANK_COLUMNS[0][1], RANK_COLUMNS[0][2]], ...RANK_COLUMNS.slice(1)];
    const [, keyOf] = columns.find(([title]) => title === this.sorted);
    const shown = [...rows].sort((a, b) => { const [one, other] = [keyOf(a), keyOf(b)]; return one < other ? -1 : one > other ? 1 : a.rank - b.rank; });
    const heads = columns.map(([title]) => el("th", { scope: "col", "aria-sort": title === this.sorted ? "ascending" : null },
      el("button", { type: "button", class: "sort", "data-key": `sort ${this.first} ${title}`, onclick: () => { this.sorted = title; this.draw(this.rows); } }, title)));
    const body = shown.slice(0, MAX_SHOWN).map((row) => el("tr", {}, columns.map(([title, , show]) =>
      el("td", { class: title === this.first || RANKS_NUMERIC.has(title) ? "number" : "" }, show(row)))));
    redrawTable(this.table, heads, body);
    this.more.textContent = shown.length > MAX_SHOWN ? `The first ${MAX_SHOWN} of ${shown.length.toLocaleString("en")}; a title sorts all of them, the worst first.` : "";
  }
}

/** The nodes and ranks of one run, by what the ranks show of themselves. */
class RanksPage {
  start() {
    this.run = new URLSearchParams(location.search).get("run");
    this.note = el("p", { class: "note", id: "ranks-note" });
    this.nodes = new RanksTable("ranks", "state");
    this.ranks = new RanksTable("rank", "state");
    const field = finder(this, "rank, node, state, finding");
    const part = (title, { table, more }) => el("section", {}, el("h2", {}, title), el("div", { class: "scroll" }, table), more);
    document.getElementById("page").append(
      el("header", {}, this.title = el("h1", {}, `Ranks of ${this.run}`), el("a", { href: `run/${encodeURIComponent(this.run)}/` }, "values of the run"), " ", el("a", { href: "./" }, "all runs")),
      el("main", {}, el("section", {}, this.note, el("div", { class: "bar" }, field)), part("Nodes", this.nodes), part("Ranks", this.ranks)));
    setInterval(() => document.hidden || this.ask(), 5000);
    return this.ask();
  }
  async ask() {
    if (this.isAsking) return;
    this.isAsking = true;
    try {
      const answer = await fetch(`run/${encodeURIComponent(this.run)}/ranks`);
      if (!answer.ok) throw new Error(await answer.text());
      const { name, found, is_judging: isJudging, ranks } = await answer.json();
      Object.assign(this, { all: ranks, found, isJudging });
      this.title.textContent = `Ranks of ${visible(name)}`;
      document.title = `ranks of ${visible(name)} - recorder`;
      this.draw();
      document.documentElement.dataset.drawn = "1";
    } catch (error) {
      this.note.textContent = visible(error instanceof TypeError ? "The server does not answer." : error.message);
    } finally {
      this.isAsking = false;
    }
  }
  draw() {
    const text = (rank) => [`rank ${rank.rank}`, rank.host, rank.state, ...rank.findings.map(foundText), ...Object.keys(rank.dropped)].join(" ").toLowerCase();
    const ranks = (this.all ?? []).filter((rank) => text(rank).includes(this.wanted)), nodes = new Map(), states = {};
    for (const rank of ranks) {
      states[rank.state] = (states[rank.state] ?? 0) + 1;
      nodes.set(rank.host, [...(nodes.get(rank.host) ?? []), rank]);
    }
    const known = ranks.map((rank) => rank.step).filter((step) => step !== null), number = (is) => plural(ranks.filter(is).length, "rank");
    this.note.textContent = ranks.length ? [`${plural(ranks.length, "rank")} on ${plural(nodes.size, "node")}: ${statesOf({ states })}`,
      known.length ? `step ${Math.min(...known)} to ${Math.max(...known)}` : "no step yet", `${number((rank) => rank.findings.length)} with findings in training`,
      `${number(droppedOf)} that dropped rows`].join("; ") : this.all?.length ? `No rank has "${visible(this.wanted)}" in its node, state or findings.` : "No rank is shown yet.";
    const found = this.found?.length && el("a", { href: `run/${encodeURIComponent(this.run)}/`, title: this.found.map(visible).join("\n") }, `recorder check has ${plural(this.found.length, "finding")} in the whole run`);
    if (found) put(this.note, "; ", found, ".");
    else if (this.isJudging) put(this.note, "; the findings of recorder check are being worked out.");
    this.nodes.draw([...nodes].map(([host, some]) => nodeOf(host, some)));
    this.ranks.draw(ranks);
  }
}

/** Several runs side by side, each in a frame; what is chosen in one is chosen in all. */
class SidePage {
  start() {
    const names = new URLSearchParams(location.search).getAll("run").slice(0, 4);
    document.getElementById("page").append(el("div", { class: "side" }, names.map((name) =>
      el("iframe", { src: `run/${encodeURIComponent(name)}/`, title: visible(name) }))));
    document.documentElement.dataset.drawn = "1";
  }
}

/** Frames beside each other tell each other what is chosen. */
class Beside {
  constructor(state) {
    if (window.parent === window) return;
    this.names = ["site", "root", "mode", "name", "stat", "axes", "from", "to", "step", "module", "pins", "log", "each", "view"];
    const others = () => [...Array(window.parent.length).keys()].map((index) => window.parent.frames[index]).filter((frame) => frame !== window);
    state.onChange((names) => {
      if (this.isTold) return;
      const some = names === null ? this.names : names.filter((name) => this.names.includes(name));
      if (some.length) for (const frame of others()) frame.postMessage(Object.fromEntries(some.map((name) => [name, state.get(name)])), location.origin);
    });
    window.addEventListener("message", (event) => {
      if (event.origin !== location.origin || !others().includes(event.source)) return;
      this.isTold = true;
      state.set(Object.fromEntries(Object.entries(event.data).filter(([name]) => this.names.includes(name))), false);
      this.isTold = false;
    });
  }
}
