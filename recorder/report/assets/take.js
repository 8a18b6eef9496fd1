// Taking a picture along: any panel as a PNG, and its numbers as CSV.

const MARGIN = 14, TABLE_NAMES = { facts: "facts", grid: "what stands out" };

/** Draw what is seen of an element: its canvases, grounds and words where they stand. */
function pictureOf(element) {
  const box = element.getBoundingClientRect(), canvas = el("canvas"), context = sizedCanvas(canvas, box.width + 2 * MARGIN, box.height);
  context.fillStyle = cssColor("--back");
  context.fillRect(0, 0, box.width + 2 * MARGIN, box.height);
  context.translate(MARGIN - box.left, -box.top);
  const draw = (one) => {
    if (one.nodeType === Node.TEXT_NODE) return drawWords(context, one);
    if (one.nodeType !== Node.ELEMENT_NODE || one.matches(".take, .bar, .keep, .band, .heat-cursor, .heat-line, option")) return;
    const style = getComputedStyle(one), at = one.getBoundingClientRect();
    if (!one.checkVisibility() || !at.width) return; // what is folded has a place, too
    context.save();
    context.globalAlpha *= Number(style.opacity);
    if (style.overflowX !== "visible") {
      context.beginPath();
      context.rect(at.left, at.top, at.width, at.height);
      context.clip();
    }
    if (one !== element && style.backgroundColor !== "rgba(0, 0, 0, 0)") {
      context.fillStyle = style.backgroundColor;
      context.fillRect(at.left, at.top, at.width, at.height);
    }
    if (one instanceof HTMLCanvasElement) context.drawImage(one, at.left, at.top, at.width, at.height);
    one.childNodes.forEach(draw);
    context.restore();
  };
  draw(element);
  return canvas;
}

function drawWords(context, text) {
  const style = getComputedStyle(text.parentElement), range = document.createRange();
  context.font = `${style.fontWeight} ${style.fontSize} ${style.fontFamily}`;
  context.fillStyle = style.color;
  context.textBaseline = "middle";
  context.textAlign = "left";
  const draw = (word, index) => { // a line may break between any two words, and within one
    range.setStart(text, index);
    range.setEnd(text, index + word.length);
    const [at, ...more] = range.getClientRects();
    if (more.length && word.length > 1) [...word].forEach((char, number) => draw(char, index + number));
    else if (at?.width) context.fillText(word, at.left, at.top + at.height / 2);
  };
  for (const { index, 0: word } of text.data.matchAll(/\S+/g)) draw(word, index);
}

/** A cell's number for a table: "nan" where the value is not finite. */
function plainNumber(cell) {
  return cell?.kind === NONFINITE ? "nan" : cell?.value;
}

/** Lists of lists as CSV; a text that a spreadsheet would take for a formula begins with an apostrophe. */
function csvOf(tables) {
  const cell = (value) => {
    if (value === null || value === undefined || Number.isNaN(value)) return "";
    const text = typeof value === "number" ? String(value) : String(value).replace(/^[=+@\-\t\r]/, "'$&");
    return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return tables.map((rows) => rows.map((row) => row.map(cell).join(",")).join("\n")).join("\n\n") + "\n";
}

function save(name, blob) {
  const url = URL.createObjectURL(blob);
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

/** Buttons that take a panel along. What has numbers of its own says them by `table`; tables of the page say them themselves. */
function takers(panel, run) {
  const name = `${run}-${panel.id}`.replace(/[^\w.-]+/g, "-");
  const tables = () => {
    const drawn = [...panel.section.querySelectorAll(".chart, .heat")].filter((one) => one.table).map((one) => [one.named?.() ?? panel.title, one.table()]);
    const written = [...panel.section.querySelectorAll("table")].map((one) => [TABLE_NAMES[one.classList[0]] ?? panel.title, [...one.rows].map((row) => [...row.cells].map((text) => text.innerText))]);
    const named = [...(panel.table ? [[panel.title, panel.table()]] : []), ...drawn, ...written.filter(([, rows]) => rows.length)];
    return named.map(([title, rows]) => (named.length > 1 ? [[title], ...rows] : rows)); // one table is its panel's
  };
  return el("span", { class: "take" },
    el("button", { type: "button", "aria-label": `${panel.title} as PNG`, onclick: () => {
      panel.section.classList.add("taken"); // all rows, and the ruler below them
      pictureOf(panel.section).toBlob((blob) => save(`${name}.png`, blob));
      panel.section.classList.remove("taken");
    } }, "PNG"),
    el("button", { type: "button", "aria-label": `${panel.title} as CSV`, onclick: () => save(`${name}.csv`, new Blob([csvOf(tables())], { type: "text/csv" })) }, "CSV"));
}
