// Numbers and names as texts, and how elements are made. Text from a run becomes textContent, never markup.

/** A number in few characters; of digits that may be wrong, because a code stands for many numbers, none is shown. */
function shortNumber(value, digits = 4, known = Infinity) {
  if (value === null || value === undefined || Number.isNaN(value)) return "-";
  if (value === 0) return "0";
  if (known < 1) return "\u2248 0";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e6 && size < 10 ** known) return String(value);
  digits = Math.min(digits, known);
  if (size >= Math.min(1e5, 10 ** known) || size < 1e-4) return Number(value.toPrecision(digits)).toExponential().replace("e+", "e");
  return String(Number(value.toPrecision(digits)));
}

/** A power of two as people write it. */
function powerOfTwo(exponent) {
  return "2" + String(exponent).replace("-", "⁻").replace(/[0-9]/g, (digit) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit]);
}

/** Names that say nothing, shown. */
function pathText(path) {
  return path === "" ? "(the model)" : visible(path);
}

/** A long name without its middle. */
function withoutMiddle(name, most) {
  return name.length > most ? `${name.slice(0, Math.ceil(most / 2) - 1)}…${name.slice(-Math.floor(most / 2))}` : name;
}

/** What a value is called: the path of its module, its site, and its name there. */
function valueText(path, site, name) {
  return [pathText(path), site, name === site ? "" : name].filter(Boolean).join(" ");
}

/** A text of a stranger without characters that hide or turn others around. */
function visible(text) {
  return String(text).replace(/[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g,
    (char) => "\\u" + char.charCodeAt(0).toString(16).padStart(4, "0"));
}

/** An element with attributes and children; children that are no elements are texts. */
function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (name === "style") for (const [key, text] of Object.entries(value)) element.style.setProperty(key, text);
    else element.setAttribute(name, value === true ? "" : value);
  }
  put(element, ...children);
  return element;
}

/** Append children; texts become text, and what is null or false is left out. */
function put(element, ...children) {
  for (const child of children.flat()) {
    if (child !== null && child !== undefined && child !== false) {
      element.append(child instanceof Node ? child : document.createTextNode(visible(child)));
    }
  }
}

/** Of some names up to three that are most alike a text: by the pairs of letters that both have. */
function nearest(text, names) {
  const pairsOf = (name) => new Set(Array.from({ length: name.length + 1 }, (_, at) => ` ${name.toLowerCase()} `.slice(at, at + 2)));
  const wanted = pairsOf(text);
  const alike = names.map((name) => {
    const pairs = pairsOf(name);
    return [name, [...pairs].filter((pair) => wanted.has(pair)).length / (pairs.size + wanted.size)];
  });
  return alike.filter(([, share]) => share > 0).sort((a, b) => b[1] - a[1]).slice(0, 3).map(([name]) => name);
}

function plural(count, noun) {
  return `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
}

/** Whether a number is in ranges that are given by their ends: first, last, first, last... */
function inRanges(ranges, number) {
  for (let i = 0; i < ranges.length; i += 2) if (ranges[i] <= number && number <= ranges[i + 1]) return true;
  return false;
}
