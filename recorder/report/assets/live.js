// The page of a server: it begins empty, is told everything once, and then what is new. Also the list of runs.

/** Where a live page gets its blocks from, and where it saves its panes. */
class LiveSource {
  constructor(app) {
    this.app = app;
    this.queue = Promise.resolve();
    this.known = "";
    this.connection = "connecting";
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

/** The page of several runs: a list, which is asked for anew while it is open. */
class RunsPage {
  constructor(blocks) {
    this.blocks = blocks;
    this.chosen = new Set();
  }
  async start() {
    const { data } = await this.blocks.get("runs");
    this.body = el("tbody", {});
    this.side = el("button", { type: "button", id: "side", onclick: () => {
      const words = new URLSearchParams([...this.chosen].map((name) => ["run", name]));
      location.assign(`side?${words}`);
    } }, "show side by side");
    const heads = ["", "run", "started", "ranks", "step", "state"].map((title) => el("th", { scope: "col" }, title));
    document.getElementById("page").append(
      el("header", {}, el("h1", {}, `Runs in ${data.folder}`)),
      el("main", {}, el("section", {}, el("p", { class: "note", id: "list-note" }), el("div", { class: "bar" }, this.side),
        el("div", { class: "scroll" }, el("table", { class: "grid runs" }, el("thead", {}, el("tr", {}, heads)), this.body)))));
    this.note = document.getElementById("list-note");
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
  draw(runs) {
    this.note.textContent = runs.length ? "" : "There is no run here yet.";
    this.side.disabled = this.chosen.size < 2;
    this.body.replaceChildren(...runs.map((run) => {
      const box = el("input", { type: "checkbox", "aria-label": `show ${visible(run.name)} beside others`, onchange: (event) => {
        if (event.target.checked) this.chosen.add(run.directory);
        else this.chosen.delete(run.directory);
        this.side.disabled = this.chosen.size < 2;
      } });
      box.checked = this.chosen.has(run.directory);
      const states = Object.entries(run.states).map(([state, count]) => `${count} ${state}`).join(", ");
      const started = run.created_s > 0 ? new Date(run.created_s * 1000).toLocaleString("sv") : "";
      return el("tr", {}, el("td", {}, box), el("td", {}, el("a", { href: `run/${encodeURIComponent(run.directory)}/` }, run.name)),
        el("td", {}, started), el("td", { class: "number" }, String(run.ranks)), el("td", { class: "number" }, run.step === null ? "" : String(run.step)), el("td", {}, states));
    }));
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
    this.names = ["site", "mode", "name", "stat", "axes", "from", "to", "step", "module", "pins", "log", "each", "view"];
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
