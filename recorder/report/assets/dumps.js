// Dumps: the steps that a trigger had the ranks write of their ring, marked where steps are drawn.

const DUMP_MARK = "▬";

class Dumps {
  constructor(app) {
    this.app = app;
  }
  get all() {
    return (this.app.top.dumps ?? []).map(([first, last, text]) => ({ first, last, text: visible(text) }));
  }
  /** What a step, or any from one to another, was written for, as texts. */
  of(from, to = from) {
    return this.all.filter(({ first, last }) => from <= last && first <= to).map(({ text }) => `${DUMP_MARK} ${text}`);
  }
  /** The columns of each dump, as [first, last]; `columns` have their first and last step. */
  over(columns) {
    return this.all.map(({ first, last }) => {
      const inside = columns.map(({ first: from, last: to }, c) => (from <= last && first <= to ? c : -1)).filter((c) => c >= 0);
      return inside.length ? [inside[0], inside[inside.length - 1]] : null;
    }).filter(Boolean);
  }
}
