/* Zstandard frames (RFC 8878) of Huffman coded literals alone: tables, their description and the checksum.
 *
 * A plane of bytes has no matches worth looking for, so a block is a literals section of four streams and no sequences,
 * or one byte repeated, or the bytes as they are. kernels.inc has the loops that see every byte.
 */

#define FRAME_BYTES (1 << 20)
#define BLOCK_BYTES (1 << 17)
#define STREAM_BYTES (BLOCK_BYTES / 4 * MAX_BITS / 8 + 64)
#define MAX_BITS 11
#define FRAME_HEADER_BYTES 9
#define CHECKSUM_BYTES 4
#define SECTION_HEADER_BYTES (3 + 5) /* of block and of literals */
#define SLICES 128 /* of a block, of which the sample is made */
#define SLICE_BYTES 64
#define SEEN_WEIGHT 8 /* of one occurrence in a sample, against a value that may occur */

#define MAX_PAIRED 100 /* values of which a table of pairs is made: it stays in the cache, if the block is worth it */

/* What `recorder_native_huffman` works in. A code lies in the high bits of its 64, its length in the low 8. */
struct huffman {
  uint64_t pairs[1 << 16]; /* of two bytes that follow one another, as they lie in memory */
  uint64_t codes[256];
  uint32_t counts[4][256];
  int has_pairs;
  int64_t total; /* of all counts */
  double excess; /* bits of the code beyond the entropy, for one byte of what it was made for */
  uint8_t lengths[256];
  uint8_t description[160];
  int64_t description_bytes; /* 0 where there is no code */
  uint8_t plane[BLOCK_BYTES];
  uint8_t streams[4][STREAM_BYTES];
};

struct checksum {
  uint64_t lanes[4], num_bytes;
};

static inline uint64_t turn(uint64_t x, int by) { return x << by | x >> (64 - by); }

#define PRIME1 0x9E3779B185EBCA87u
#define PRIME2 0xC2B2AE3D27D4EB4Fu
#define PRIME3 0x165667B19E3779F9u
#define PRIME4 0x85EBCA77C2B2AE63u
#define PRIME5 0x27D4EB2F165667C5u

static inline uint64_t checksum_round(uint64_t lane, uint64_t word) { return turn(lane + word * PRIME2, 31) * PRIME1; }

static void checksum_begin(struct checksum *sum) {
  *sum = (struct checksum){{PRIME1 + PRIME2, PRIME2, 0, 0 - PRIME1}, 0};
}

/* XXH64 of what comes next: all calls but the last give a multiple of 32 bytes. Returns the checksum so far. */
static uint64_t checksum_add(struct checksum *sum, const uint8_t *p, int64_t n) {
  uint64_t a = sum->lanes[0], b = sum->lanes[1], c = sum->lanes[2], d = sum->lanes[3];
  sum->num_bytes += (uint64_t)n;
  for (; n >= 32; n -= 32, p += 32) {
    a = checksum_round(a, ((const u64 *)p)[0]);
    b = checksum_round(b, ((const u64 *)p)[1]);
    c = checksum_round(c, ((const u64 *)p)[2]);
    d = checksum_round(d, ((const u64 *)p)[3]);
  }
  sum->lanes[0] = a, sum->lanes[1] = b, sum->lanes[2] = c, sum->lanes[3] = d;
  uint64_t hash = PRIME5;
  if (sum->num_bytes >= 32) {
    hash = turn(a, 1) + turn(b, 7) + turn(c, 12) + turn(d, 18);
    for (int k = 0; k < 4; k++) hash = (hash ^ checksum_round(0, sum->lanes[k])) * PRIME1 + PRIME4;
  }
  hash += sum->num_bytes;
  for (; n >= 8; n -= 8, p += 8) hash = turn(hash ^ checksum_round(0, *(const u64 *)p), 27) * PRIME1 + PRIME4;
  for (; n >= 4; n -= 4, p += 4) hash = turn(hash ^ *(const u32 *)p * PRIME1, 23) * PRIME2 + PRIME3;
  for (; n > 0; n--, p++) hash = turn(hash ^ *p * PRIME5, 11) * PRIME1;
  hash = (hash ^ hash >> 33) * PRIME2;
  hash = (hash ^ hash >> 29) * PRIME3;
  return hash ^ hash >> 32;
}

static inline void put_little(uint8_t *out, uint64_t value, int num_bytes) {
  for (int i = 0; i < num_bytes; i++) out[i] = (uint8_t)(value >> 8 * i);
}

/* Bits to a buffer of few bytes, the first the lowest. */
struct bits {
  uint8_t *out;
  uint64_t held;
  int num_held;
};

static void put_bits(struct bits *to, uint64_t value, int num_bits) {
  to->held |= (value & ((1ull << num_bits) - 1)) << to->num_held;
  for (to->num_held += num_bits; to->num_held >= 8; to->num_held -= 8, to->held >>= 8) *to->out++ = (uint8_t)to->held;
}

static uint8_t *end_bits(struct bits *to) {
  if (to->num_held) *to->out++ = (uint8_t)to->held;
  return to->out;
}

/* Lengths of at most MAX_BITS for all values that occur, which are two at least: Huffman's tree, by the two queues of
 * van Leeuwen, and where it is too deep some of the rarer values a bit more until the codes fit. Returns the longest. */
static int find_lengths(const uint32_t counts[256], uint8_t lengths[256]) {
  uint64_t keys[256], weights[512];
  uint16_t parents[512];
  int num = 0, num_of[64] = {0}, depths[512];
  for (int value = 0; value < 256; value++)
    if (counts[value]) keys[num++] = (uint64_t)counts[value] << 8 | (uint64_t)value;
  for (int gap = 121; gap; gap /= 3) /* Shell's sort */
    for (int i = gap; i < num; i++) {
      uint64_t key = keys[i];
      int at = i;
      for (; at >= gap && keys[at - gap] > key; at -= gap) keys[at] = keys[at - gap];
      keys[at] = key;
    }
  uint64_t all = 0;
  for (int i = 0; i < num; i++) all += keys[i] >> 8;
  for (int i = 0; i < num; i++) { /* the rarest as often as the longest code says: then little is left to make fit */
    weights[i] = keys[i] >> 8;
    if (weights[i] < all >> MAX_BITS) weights[i] = all >> MAX_BITS;
  }
  int leaf = 0, inner = num, next = num;
  for (; next < 2 * num - 1; next++) {
    weights[next] = 0;
    for (int child = 0; child < 2; child++) {
      int lighter = leaf < num && (inner == next || weights[leaf] <= weights[inner]) ? leaf++ : inner++;
      weights[next] += weights[lighter];
      parents[lighter] = (uint16_t)next;
    }
  }
  depths[2 * num - 2] = 0;
  int room = 1 << MAX_BITS;
  for (int node = 2 * num - 3; node >= 0; node--) {
    depths[node] = depths[parents[node]] + 1;
    if (node >= num) continue;
    int bits = depths[node] < MAX_BITS ? depths[node] : MAX_BITS;
    num_of[bits]++;
    room -= 1 << (MAX_BITS - bits);
  }
  while (room < 0) { /* a bit more for the value that gives most room for what it costs */
    int best = 0, at = num_of[MAX_BITS];
    uint64_t best_price = 0;
    for (int bits = MAX_BITS - 1; bits > 0; at += num_of[bits--]) {
      uint64_t price = num_of[bits] ? (keys[at] >> 8) << bits : 0;
      if (!num_of[bits] || (best && price >= best_price)) continue;
      best = bits;
      best_price = price;
    }
    num_of[best]--;
    num_of[best + 1]++;
    room += 1 << (MAX_BITS - best - 1);
  }
  while (room > 0) { /* and it is whole multiples of what the longest takes */
    int bits = 2;
    while (!num_of[bits] || 1 << (MAX_BITS - bits) > room) bits++;
    num_of[bits]--;
    num_of[bits - 1]++;
    room -= 1 << (MAX_BITS - bits);
  }
  int bits = MAX_BITS, longest = 0;
  memset(lengths, 0, 256);
  for (int i = 0; i < num; i++) {
    while (!num_of[bits]) bits--;
    if (!longest) longest = bits;
    num_of[bits]--;
    lengths[keys[i] & 255] = (uint8_t)bits;
  }
  return longest;
}

/* Weights as a description (RFC 8878, 4.2.1.2) by finite state entropy, whose two states take turns. Returns its bytes,
 * or 0 where that cannot be. */
static int64_t describe_by_states(const uint8_t *weights, int num, uint8_t out[160]) {
  int counts[MAX_BITS + 1] = {0}, shares[MAX_BITS + 1], largest = 0, last = 0;
  int log = num > 63 ? 6 : 5, size = 1 << log, left = size;
  for (int i = 0; i < num; i++) counts[weights[i]]++;
  for (int weight = 0; weight <= MAX_BITS; weight++) {
    shares[weight] = (counts[weight] * size + num / 2) / num;
    if (counts[weight]) {
      if (!shares[weight]) shares[weight] = 1;
      last = weight;
    }
    left -= shares[weight];
    if (counts[weight] > counts[largest]) largest = weight;
  }
  if (counts[largest] == num) return 0;
  for (; left < 0; left++) {
    int most = 0;
    for (int weight = 1; weight <= last; weight++)
      if (shares[weight] > shares[most]) most = weight;
    shares[most]--;
  }
  shares[largest] += left;

  struct bits to = {out + 1, 0, 0};
  put_bits(&to, (uint64_t)(log - 5), 4);
  for (int weight = 0, rest = size + 1, threshold = size, width = log + 1; weight <= last;) {
    int share = shares[weight++], most = 2 * threshold - 1 - rest, code = share + 1;
    rest -= share;
    if (code >= threshold) code += most;
    put_bits(&to, (uint64_t)code, width - (code < most));
    for (; rest < threshold && threshold > 1; threshold >>= 1) width--;
    if (share) continue;
    int zeros = 0;
    for (; !shares[weight]; weight++) zeros++;
    for (; zeros >= 3; zeros -= 3) put_bits(&to, 3, 2);
    put_bits(&to, (uint64_t)zeros, 2);
  }
  to.out = end_bits(&to);

  uint8_t spread[64];
  int at = 0, first[MAX_BITS + 2] = {0}, filled[MAX_BITS + 1];
  for (int weight = 0; weight <= MAX_BITS; weight++) {
    first[weight + 1] = first[weight] + shares[weight];
    filled[weight] = first[weight];
    for (int i = 0; i < shares[weight]; i++, at = (at + size / 2 + size / 8 + 3) & (size - 1))
      spread[at] = (uint8_t)weight;
  }
  uint8_t states[64]; /* of each weight the positions where it lies, in order */
  for (int i = 0; i < size; i++) states[filled[spread[i]]++] = (uint8_t)i;
  int state[2] = {-1, -1};
  struct bits stream = {to.out, 0, 0};
  for (int i = num - 1; i >= 0; i--) {
    int weight = weights[i], share = shares[weight], *now = &state[i & 1], bits = 0;
    if (*now < 0) { /* the first of its states: a reader that lacks bits for the next has come to the end */
      *now = states[first[weight]];
      continue;
    }
    while ((size + *now) >> bits >= 2 * share) bits++;
    put_bits(&stream, (uint64_t)*now, bits);
    *now = states[first[weight] + ((size + *now) >> bits) - share];
    if (stream.out > out + 140) return 0;
  }
  put_bits(&stream, (uint64_t)state[1], log);
  put_bits(&stream, (uint64_t)state[0], log);
  put_bits(&stream, 1, 1);
  int64_t num_bytes = end_bits(&stream) - out;
  out[0] = (uint8_t)(num_bytes - 1);
  return num_bytes - 1 < 128 ? num_bytes : 0;
}

/* Make the code for `counts[0]`, of at least two values, for a block of n bytes, and its description; description_bytes is 0 where it has none. */
static void make_code(struct huffman *code, int64_t n) {
  const uint32_t *counts = code->counts[0];
  int longest = find_lengths(counts, code->lengths), last = 255;
  while (!counts[last]) last--;
  uint8_t weights[256], values[256];
  uint32_t next[MAX_BITS + 2] = {0};
  for (int value = 0; value < 256; value++) {
    int bits = code->lengths[value];
    weights[value] = (uint8_t)(bits ? longest + 1 - bits : 0);
    if (bits) next[bits]++;
  }
  uint32_t low = 0;
  for (int bits = longest; bits > 0; bits--) {
    uint32_t num = next[bits];
    next[bits] = low;
    low = (low + num) >> 1;
  }
  int num_values = 0;
  for (int value = 0; value < 256; value++) {
    int bits = code->lengths[value];
    if (!bits) continue;
    code->codes[value] = (uint64_t)next[bits]++ << (64 - bits) | (uint64_t)bits;
    values[num_values++] = (uint8_t)value;
  }
  code->has_pairs = num_values <= MAX_PAIRED && num_values * num_values <= n / 8;
  int num_paired = code->has_pairs ? num_values : 0;
  for (int i = 0; i < num_paired; i++) {
    uint64_t later = code->codes[values[i]], *row = code->pairs + 256 * values[i]; /* the later byte comes first */
    for (int j = 0; j < num_paired; j++) {
      uint64_t earlier = code->codes[values[j]];
      row[values[j]] = (((later & ~255ull) >> (earlier & 63)) | (earlier & ~255ull)) + (later & 255) + (earlier & 255);
    }
  }
  code->description_bytes = describe_by_states(weights, last, code->description);
  int64_t direct_bytes = 1 + (last + 1) / 2;
  if (last <= 128 && (!code->description_bytes || direct_bytes <= code->description_bytes)) {
    code->description_bytes = direct_bytes;
    code->description[0] = (uint8_t)(127 + last);
    weights[last] = 0;
    for (int i = 0; i < last; i += 2) code->description[1 + i / 2] = (uint8_t)(weights[i] << 4 | weights[i + 1]);
  }
}

/* Bits that the code takes for all counted, or -1 where it lacks a value. */
static int64_t cost(const struct huffman *code) {
  int64_t bits = 0;
  for (int value = 0; value < 256; value++) {
    if (code->counts[0][value] && !code->lengths[value]) return -1;
    bits += (int64_t)code->counts[0][value] * code->lengths[value];
  }
  return bits;
}

static double entropy_bits(const struct huffman *code) {
  double bits = 0;
  for (int value = 0; value < 256; value++)
    if (code->counts[0][value])
      bits += code->counts[0][value] * log2((double)code->total / (double)code->counts[0][value]);
  return bits;
}
