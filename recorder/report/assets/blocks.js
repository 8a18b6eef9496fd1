// Blocks: named pieces of data, as a file of the page holds them, or as a server would send them.
"use strict";

const BLOCK_VERSION = 1;
const TYPED = {
  uint8: Uint8Array, uint16: Uint16Array, int16: Int16Array, uint32: Uint32Array, int32: Int32Array,
  float32: Float32Array, float64: Float64Array,
};

/** The bytes of a text of base64. */
function fromBase64(text) {
  return Uint8Array.fromBase64?.(text) ?? Uint8Array.from(atob(text), (one) => one.charCodeAt(0));
}

/** Unpack a block: its JSON and its typed arrays. */
async function unpack(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  const buffer = await new Response(stream).arrayBuffer();
  const length = new DataView(buffer).getUint32(0, true);
  const head = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  if (head.version !== BLOCK_VERSION) throw new Error(`block ${head.name}: version ${head.version} is not known here`);
  const start = Math.ceil((4 + length) / 8) * 8;
  const arrays = {};
  for (const one of head.arrays) {
    const count = one.shape.reduce((a, b) => a * b, 1);
    arrays[one.name] = new TYPED[one.type](buffer, start + one.offset, count);
  }
  return { name: head.name, data: head.data, arrays };
}

/** All blocks there are, each unpacked when it is first asked for. A newer one of the same name takes its place. */
class Blocks {
  constructor() {
    this.packed = new Map();
    this.unpacked = new Map();
  }
  readPage() {
    for (const element of document.querySelectorAll('script[type="application/x-recorder-block"]')) {
      this.packed.set(element.dataset.name, element);
    }
  }
  clear() {
    this.packed.clear();
    this.unpacked.clear();
  }
  set(name, bytes) {
    this.packed.set(name, bytes);
    this.unpacked.delete(name);
  }
  has(name) {
    return this.packed.has(name);
  }
  get(name) {
    if (!this.unpacked.has(name)) {
      const packed = this.packed.get(name);
      const bytes = packed instanceof Uint8Array ? packed : fromBase64(packed.textContent.trim());
      this.unpacked.set(name, unpack(bytes));
    }
    return this.unpacked.get(name);
  }
}
