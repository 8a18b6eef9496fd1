// What the page shows, in its address: whoever opens the link sees the same.

const LISTS = new Set(["pins", "open", "shut"]);
const NUMBERS = new Set(["step", "from", "to", "rank"]);

/** The state of the page. Panels listen; whoever changes it names what changes. */
class State {
  constructor() {
    this.values = {};
    this.listeners = [];
    this.read(location.hash || "#" + (document.documentElement.dataset.address ?? ""));
    if (location.protocol === "about:") document.addEventListener("click", (event) => this.follow(event));
    window.addEventListener("hashchange", () => {
      if (location.hash === this.written) return;
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
  read(hash = location.hash) {
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
  set(changes) {
    Object.assign(this.values, changes);
    this.written = this.address(this.values);
    try {
      history.replaceState(null, "", this.written);
      this.written = location.hash;
    } catch { /* a frame without an address of its own */ }
    this.tell(Object.keys(changes));
  }
  onChange(listener) {
    this.listeners.push(listener);
  }
  tell(names) {
    for (const listener of this.listeners) listener(names);
  }
}
