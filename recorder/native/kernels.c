/* The hot loops of the writer: statistics, fingerprint, byte planes and their Huffman code.
 *
 * Every function but that code and `moved` gives the very bits that the Python beside it gives, on every processor: sums are taken in the order
 * of numpy's pairwise sum (8 partial sums over at most 128 values, halves above), nothing is contracted, and nothing is
 * reassociated. Plain C without Python.h; called through ctypes, which lets go of the GIL. Nothing here allocates, keeps
 * state between calls (but for the level that was selected once) or needs an aligned address.
 */
#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if !defined(__GNUC__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__ || __SIZEOF_POINTER__ != 8
#error "gcc or clang, 64 bits, little-endian"
#endif

#define ABI 14
#define CHUNK_ITEMS 32768
#define LEAF_ITEMS 128
#define EXPORT __attribute__((visibility("default")))

/* Values as they lie in memory, at any address. */
typedef float f32 __attribute__((aligned(1), may_alias));
typedef double f64 __attribute__((aligned(1), may_alias));
typedef int8_t i8 __attribute__((aligned(1), may_alias));
typedef uint8_t u8 __attribute__((aligned(1), may_alias));
typedef int16_t i16 __attribute__((aligned(1), may_alias));
typedef uint16_t u16 __attribute__((aligned(1), may_alias));
typedef int32_t i32 __attribute__((aligned(1), may_alias));
typedef uint32_t u32 __attribute__((aligned(1), may_alias));
typedef int64_t i64 __attribute__((aligned(1), may_alias));
typedef uint64_t u64 __attribute__((aligned(1), may_alias));

enum kind { F32, F64, BF16, I8, U8, I16, U16, I32, U32, I64, U64, TABLE8, TABLE16 };

/* Statistics in the making. */
struct moments {
  double mean, deviations, sum, sum_sq, sum_abs, sum_fourth, min, max;
  int64_t count, nan_count, inf_count, zero_count;
  uint64_t fingerprint;
};

/* The statistics of a tensor; `recorder.records.Measured` begins with the same fields, but for `count`. */
struct statistics {
  double mean, std, min, max, absmax, l2, sum, sum_sq, sum_abs, sum_fourth;
  int64_t nan_count, inf_count, zero_count;
  uint64_t fingerprint;
  int64_t count; /* how many values are finite: where there are none, only the counts above mean something */
};

/* How the words of a tensor are weighed: runs of blocks; `recorder.native.Weights` has the same fields. */
struct weights {
  const uint64_t *block; /* of the words of a block */
  const uint64_t *runs;  /* of each run */
  int64_t block_words, run_words;
  uint64_t block_step; /* factor from one block of a run to the next */
  int64_t word_bytes;
};

/* What is measured: statistics where `kind` is not negative, the fingerprint where there are weights. */
struct measuring {
  const uint8_t *data;
  int64_t items;
  int kind;
  const float *table; /* the value of each pattern of a small float */
  const struct weights *weights;
  uint64_t *bins; /* where values are counted by sign and power of two; or nothing */
  const struct units *units; /* where the values of each unit are summed; or nothing */
};

/* Sums over the values of each unit of a dim; `recorder.native.UnitAddresses` has the same fields. */
struct units {
  double *sums, *squares, *peaks; /* of x, of x^2, and the largest |x|, over finite x */
  int64_t *zeros;
  int64_t num, inner; /* units, and how many elements of one lie side by side */
};

/* Of a chunk: what one look at its values gives. */
struct range {
  double low, high;
  int64_t num_zeros;
};

/* Two sums that one look at the values takes: of x and |x|, or of (x - mean)^2 and x^4. */
struct sums {
  double first, second;
};

/* Values of a chunk that are being counted for the histogram, two at once; kernels.inc says what their codes are. */
struct counting {
  const uint16_t *next; /* of the codes that are not counted yet; 0 where there are none at all */
  int64_t left, base;
  int is_wide; /* a chunk before this one of the tensor was not counted so: nor are those that follow */
  uint16_t table[2][64 * 64], codes[CHUNK_ITEMS / 2];
};
#define MOST_BINS 4096
#define FEWEST_COUNTED 2048 /* values: below that the tables cost more than they save */

static inline struct counting *counting_in(void *scratch) { return (struct counting *)((float *)scratch + 3 * CHUNK_ITEMS); }

/* What a look at a chunk's deviations from its mean needs, and what is counted beside it. */
struct deviating {
  double mean;
  struct counting *counting;
};

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include "huffman.h"

struct kernels {
  void (*measure)(const struct measuring *, int64_t, void *, struct moments *);
  void (*merge)(const struct moments *, struct moments *);
  double (*squares)(const struct measuring *, int64_t);
  void (*planes)(const uint8_t *, int64_t, int64_t, int64_t, int64_t, uint8_t *, int64_t);
  int64_t (*huffman)(const uint8_t *, int64_t, int64_t, int64_t, uint8_t *, struct huffman *);
  int64_t (*sample)(const uint8_t *, int64_t, int64_t, int64_t, int64_t, uint8_t *, struct huffman *);
};

static inline float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

/* The exponent of a finite value as a float with this bias has it: 0 where it is subnormal there, or zero. */
static inline int64_t exponent_of(double value, int64_t bias) {
  uint64_t bits;
  memcpy(&bits, &value, 8);
  int64_t exponent = (int64_t)(bits >> 52 & 2047) - 1023 + bias;
  return exponent > 0 ? exponent : 0;
}

#define GENERIC 0
#define AVX2 1
#define AVX512 2

#define LEVEL GENERIC
#define NAME(x) x##_generic
#define TARGET
#include "kernels.inc"

#if defined(__x86_64__)
#define LEVEL AVX2
#define NAME(x) x##_avx2
#define TARGET __attribute__((target("avx2,bmi,bmi2,fma")))
#include "kernels.inc"

#define LEVEL AVX512
#define NAME(x) x##_avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,bmi,bmi2,fma")))
#include "kernels.inc"
#endif

static const struct kernels *const LEVELS[] = {
    &kernels_generic,
#if defined(__x86_64__)
    &kernels_avx2,
    &kernels_avx512,
#endif
};
static const struct kernels *selected = &kernels_generic;

EXPORT int recorder_native_abi(void) { return ABI; }

/* Select the code for the widest vectors of this processor, at most `level`; returns what is in force. */
EXPORT int recorder_native_select(int level) {
  int best = GENERIC;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
      __builtin_cpu_supports("fma"))
    best = AVX2;
  if (best == AVX2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    best = AVX512;
#endif
  if (level < 0 || level > best) level = best;
  selected = LEVELS[level];
  return level;
}

/* Byte planes `first` to `last` (0 is the most significant) of little-endian elements, each `stride` after the other. */
EXPORT void recorder_native_planes(const uint8_t *data, int64_t items, int64_t item_bytes, int64_t first, int64_t last,
                                   uint8_t *out, int64_t stride) {
  selected->planes(data, items, item_bytes, first, last, out, stride);
}

static int64_t frames_room(int64_t items) {
  return items + (items / FRAME_BYTES + 1) * (FRAME_HEADER_BYTES + CHECKSUM_BYTES) + 3 * (items / BLOCK_BYTES + 1);
}

/* Byte plane `plane` (0 is the most significant) as Zstandard frames of FRAME_BYTES of content each, Huffman coded.
 * Returns their bytes, or -1 where `out_bytes` might not do. `scratch`: recorder_native_scratch() bytes,
 * aligned to 8; nothing in it is kept. */
EXPORT int64_t recorder_native_huffman(const uint8_t *data, int64_t items, int64_t item_bytes, int64_t plane,
                                       uint8_t *out, int64_t out_bytes, void *scratch) {
  if (out_bytes < frames_room(items)) return -1;
  return selected->huffman(data, items, item_bytes, plane, out, scratch);
}

/* All planes of `slices` of `slice_items` elements each, or of all where there are no more, to `out`, end to end. Returns
 * about how many bytes recorder_native_huffman makes of the first plane there; `scratch` as there. */
EXPORT int64_t recorder_native_sample(const uint8_t *data, int64_t items, int64_t item_bytes, int64_t slices,
                                      int64_t slice_items, uint8_t *out, void *scratch) {
  return selected->sample(data, items, item_bytes, slices, slice_items, out, scratch);
}

static double no_nan(double value) { return value == value ? value : INFINITY; }

/* As `measured` in recorder/numerics/moments.py, which says why. */
static void finish(const struct moments *of, struct statistics *out) {
  double low = of->min + 0.0, high = of->max + 0.0, count = (double)of->count;
  *out = (struct statistics){.min = low, .max = high, .sum = no_nan(of->sum), .sum_sq = no_nan(of->sum_sq)};
  out->mean = low == high ? low : no_nan(of->sum / count);
  out->std = low == high ? 0.0 : no_nan(sqrt(of->deviations / count));
  out->absmax = 0.0 - low >= high ? 0.0 - low : high;
  out->l2 = no_nan(sqrt(of->sum_sq));
  out->sum_abs = of->sum_abs;
  out->sum_fourth = of->sum_fourth;
  out->nan_count = of->nan_count;
  out->inf_count = of->inf_count;
  out->zero_count = of->zero_count;
  out->fingerprint = of->fingerprint;
  out->count = of->count;
}

/* The memory of one thread: for `measure`, behind it what the thread counts for a histogram. */
#define MEASURING_BYTES (3 * CHUNK_ITEMS * 4 + (int64_t)sizeof(struct counting))
#define THREAD_BYTES (MEASURING_BYTES + MOST_BINS * 8)

static int64_t num_chunks_of(int64_t items) { return (items + CHUNK_ITEMS - 1) / CHUNK_ITEMS; }

/* Bytes of `scratch` for the functions here, where tensors have at most `items` elements and are measured by `threads`. */
EXPORT int64_t recorder_native_scratch(int64_t items, int64_t threads) {
  int64_t measuring = threads * THREAD_BYTES + (threads > 1 ? num_chunks_of(items) * (int64_t)sizeof(struct moments) : 0);
  return measuring > (int64_t)sizeof(struct huffman) ? measuring : (int64_t)sizeof(struct huffman);
}

/* Statistics and fingerprint of `num` tensors, chunk by chunk. `scratch`: recorder_native_scratch() bytes, aligned to 8. */
EXPORT void recorder_native_measure(const struct measuring *measuring, int64_t num, void *scratch, struct statistics *out) {
  for (; num; num--, measuring++, out++) {
    struct moments moments = {.min = INFINITY, .max = -INFINITY};
    for (int64_t number = 0; number < num_chunks_of(measuring->items); number++) {
      struct moments chunk;
      selected->measure(measuring, number, scratch, &chunk);
      selected->merge(&chunk, &moments);
    }
    finish(&moments, out);
  }
}

/* What the threads that measure one tensor share. */
struct shared {
  const struct measuring *measuring;
  struct moments *chunks;
  uint8_t *memory; /* THREAD_BYTES of each thread */
  int64_t num_threads, next_chunk, next_thread;
};

/* What each of the threads does: measure the next chunk that nobody has taken yet. */
static void measure_chunks(void *argument) {
  struct shared *shared = argument;
  int64_t thread = __atomic_fetch_add(&shared->next_thread, 1, __ATOMIC_RELAXED), number;
  if (thread >= shared->num_threads) return;
  struct measuring measuring = *shared->measuring;
  uint8_t *scratch = shared->memory + thread * THREAD_BYTES;
  if (measuring.bins) {
    measuring.bins = (uint64_t *)(scratch + MEASURING_BYTES);
    memset(measuring.bins, 0, MOST_BINS * 8);
    counting_in(scratch)->is_wide = 0;
  }
  while ((number = __atomic_fetch_add(&shared->next_chunk, 1, __ATOMIC_RELAXED)) < num_chunks_of(measuring.items))
    selected->measure(&measuring, number, scratch, shared->chunks + number);
}

/* As recorder_native_measure, of one tensor, by several threads: `run` is GOMP_parallel of the OpenMP runtime that is
 * loaded. Chunks are merged in their order, so that the bits do not depend on the threads. Units are summed by one. */
EXPORT void recorder_native_measure_parallel(const struct measuring *measuring, int64_t num_bins, int64_t num_threads,
                                             void (*run)(void (*)(void *), void *, unsigned, unsigned), void *scratch,
                                             struct statistics *out) {
  int64_t num_chunks = num_chunks_of(measuring->items);
  struct shared shared = {measuring, scratch, (uint8_t *)scratch + num_chunks * (int64_t)sizeof(struct moments), num_threads, 0, 0};
  run(measure_chunks, &shared, (unsigned)num_threads, 0);
  struct moments moments = {.min = INFINITY, .max = -INFINITY};
  for (int64_t number = 0; number < num_chunks; number++) selected->merge(shared.chunks + number, &moments);
  int64_t num_began = shared.next_thread < num_threads ? shared.next_thread : num_threads;
  for (int64_t thread = 0; measuring->bins && thread < num_began; thread++)
    for (int64_t bin = 0; bin < num_bins; bin++)
      measuring->bins[bin] += ((const uint64_t *)(shared.memory + thread * THREAD_BYTES + MEASURING_BYTES))[bin];
  finish(&moments, out);
}

/* What the threads that sum the squares of one tensor share. */
struct squared {
  const struct measuring *measuring;
  double *chunks;
  int64_t next_chunk;
};

static void square_chunks(void *argument) {
  struct squared *shared = argument;
  int64_t number, num_chunks = num_chunks_of(shared->measuring->items);
  while ((number = __atomic_fetch_add(&shared->next_chunk, 1, __ATOMIC_RELAXED)) < num_chunks)
    shared->chunks[number] = selected->squares(shared->measuring, number);
}

/* The sum of the squares of all values of one tensor, chunk by chunk, whose sums are added in their order, so that the
 * bits do not depend on the threads. It is not finite where a value is not. `run`: as above, or nothing for one thread;
 * `chunks`: with `run`, room for a sum of each chunk. */
EXPORT double recorder_native_squares(const struct measuring *measuring, int64_t num_threads,
                                      void (*run)(void (*)(void *), void *, unsigned, unsigned), double *chunks) {
  int64_t num_chunks = num_chunks_of(measuring->items);
  if (run) {
    struct squared shared = {measuring, chunks, 0};
    run(square_chunks, &shared, (unsigned)num_threads, 0);
  }
  double sum = 0;
  for (int64_t number = 0; number < num_chunks; number++)
    sum += run ? chunks[number] : selected->squares(measuring, number);
  return sum;
}

/* As recorder_native_squares on one thread, of the values at `data`. `shape` gives their number and kind; it is only
 * read, so that threads may share it. */
EXPORT double recorder_native_squares_at(const struct measuring *shape, const uint8_t *data) {
  struct measuring measuring = *shape;
  measuring.data = data;
  return recorder_native_squares(&measuring, 1, 0, 0);
}

/* As recorder_native_squares, of `num` tensors; `chunks` has room for the largest of them. */
EXPORT void recorder_native_squares_of_many(const struct measuring *measuring, int64_t num, int64_t num_threads,
                                            void (*run)(void (*)(void *), void *, unsigned, unsigned), double *chunks,
                                            double *out) {
  for (int64_t i = 0; i < num; i++) {
    int is_large = num_threads > 1 && measuring[i].items >= 4 * CHUNK_ITEMS;
    out[i] = recorder_native_squares(measuring + i, num_threads, is_large ? run : 0, chunks);
  }
}

/* Of a tensor of more than SAMPLED elements, LINES runs that lie evenly apart are compared, of LINE elements each. */
#define LINES 256
#define LINE 4
#define SAMPLED (LINES * LINE)

#define MOVED(type, value)                                                                                            \
  for (int64_t i = 0; i < n; i++) {                                                                                   \
    const type raw = ((const type *)data)[i];                                                                         \
    double x = (value), moved = x - before[i];                                                                        \
    before[i] = x;                                                                                                    \
    sum += moved * moved;                                                                                             \
  }                                                                                                                   \
  break

static double moved_of(const struct measuring *of, const uint8_t *data, int64_t n, double *before) {
  double sum = 0;
  union {
    uint32_t bits;
    float value;
  } wide;
  switch (of->kind) {
    case F32: MOVED(f32, raw);
    case F64: MOVED(f64, raw);
    case BF16: MOVED(u16, (wide.bits = (uint32_t)raw << 16, wide.value));
    case TABLE16: MOVED(u16, of->table[raw]);
    default: break;
  }
  return sum;
}

/* How far each of `num` tensors has moved since the call before: the sum of the squares of the changes of its sampled
 * elements, which is not finite where a change is not. `before` has the elements of that call, and then those of this one. */
EXPORT void recorder_native_moved(const struct measuring *measuring, int64_t num, double *before, double *out) {
  for (int64_t i = 0; i < num; i++, measuring++) {
    int64_t items = measuring->items, bytes = measuring->kind == F32 ? 4 : measuring->kind == F64 ? 8 : 2;
    int64_t runs = items > SAMPLED ? LINES : 1, length = items > SAMPLED ? LINE : items;
    int64_t gap = items > SAMPLED ? (items - LINE) / (LINES - 1) : 0;
    out[i] = 0;
    for (int64_t run = 0; run < runs; run++, before += length)
      out[i] += moved_of(measuring, measuring->data + run * gap * bytes, length, before);
  }
}

/* The first `framed` planes as frames, then the others as they are; unless all are framed, 8 bytes with the length of the
 * frames come first. Returns the bytes, or -1 where `out_bytes` might not do; `scratch` as for recorder_native_huffman. */
EXPORT int64_t recorder_native_encode(const uint8_t *data, int64_t items, int64_t item_bytes, int64_t framed,
                                      uint8_t *out, int64_t out_bytes, void *scratch) {
  int64_t head = framed < item_bytes ? 8 : 0, rest = (item_bytes - framed) * items;
  if (head + framed * frames_room(items) + rest > out_bytes) return -1;
  uint8_t *to = out + head;
  for (int64_t plane = 0; plane < framed; plane++) to += selected->huffman(data, items, item_bytes, plane, to, scratch);
  if (head) put_little(out, (uint64_t)(to - out - head), 8);
  if (rest) selected->planes(data, items, item_bytes, framed, item_bytes - 1, to, items);
  return to - out + rest;
}
