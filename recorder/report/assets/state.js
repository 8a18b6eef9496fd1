// What the page shows, in its address: whoever opens the link sees the same.

const LISTS = new Set(["pins", "open", "shut"]);
const NUMBERS = new Set(["step", "from", "to", "rank"]);

/** The state of the page. Panels listen; whoever changes it names what changes. */
class State {
  constructor() {
    this.values = {};
    this.listeners = [];
    this.read();
    if (location.protocol === "about:") document.addEventListener("click", (event) => this.follow(event));
    window.addEventListener("hashchange", () => { // a link, or the browser's Back and Forward
      this.read();
      this.tell(null);
    });
  }
  /** A link in a frame without an address of its own: it would lead to what is around the frame. */
  follow(event) {
    const link = event.target.closest?.("a[href^='#']");
    if (!link || event.defaultPrevented) return;
    event.preventDefault();
    this.read(link.getAttribute("href"));
    this.tell(null);
  }
  read(hash = location.hash || "#" + (document.documentElement.dataset.address ?? "")) {
    this.values = {};
    for (const [name, text] of new URLSearchParams(hash.slice(1))) {
      if (LISTS.has(name)) {
        try {
          const list = JSON.parse(text);
          if (Array.isArray(list)) this.values[name] = list;
        } catch { /* a link that somebody cut */ }
      } else if (NUMBERS.has(name)) {
        if (text !== "" && Number.isFinite(Number(text))) this.values[name] = Number(text);
      } else {
        this.values[name] = text;
      }
    }
    this.written = this.address(this.values);
  }
  get(name, otherwise = null) {
    return this.values[name] ?? otherwise;
  }
  /** The address of a state, for links. */
  address(values) {
    const words = new URLSearchParams();
    for (const [name, value] of Object.entries(values)) {
      if (value === null || value === undefined || (Array.isArray(value) && !value.length && name !== "shut")) continue;
      words.set(name, LISTS.has(name) ? JSON.stringify(value) : String(value));
    }
    return "#" + words.toString();
  }
  /** Change what is shown. All that a click changes is one entry of the browser's history, which Back undoes; what another frame says is none, nor a letter of a search. */
  set(changes, isOwn = true) {
    Object.assign(this.values, changes);
    const address = this.address(this.values);
    try {
      if (address !== this.written) history[isOwn && !this.isPushed ? "pushState" : "replaceState"](null, "", address);
    } catch { /* a frame without an address of its own */ }
    this.written = address;
    this.isPushed = true;
    setTimeout(() => { this.isPushed = false; });
    this.tell(Object.keys(changes));
  }
  onChange(listener) {
    this.listeners.push(listener);
  }
  tell(names) {
    for (const listener of this.listeners) listener(names);
  }
}
