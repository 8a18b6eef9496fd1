/* The hot loops of hooks and writer: statistics, fingerprint, byte planes and their Huffman code, copies and checksums.
 *
 * Every function but that code gives the very bits that the Python beside it gives, on every processor: sums are taken in the order
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

#define ABI 5
#define CHUNK_ITEMS 32768
#define LEAF_ITEMS 128
#define MAX_CHUNKS 256
#define COPY_BYTES (1 << 18)  /* that one thread copies at a time */
#define SPLIT_ITEMS (1 << 15) /* and splits */
#define MIN_PART_ITEMS (1 << 15)
#define MAX_PART_ITEMS (1 << 19) /* and compresses */
#define MAX_PIECES 4096 /* parts of all planes */
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

/* Statistics in the making; `recorder.native.Moments` has the same fields. */
struct moments {
  double mean, deviations, sum, sum_sq, min, max;
  int64_t count, nan_count, inf_count, zero_count;
  uint64_t fingerprint;
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
};

/* Of a chunk: what one look at its values gives. */
struct range {
  double sum, low, high;
  int64_t num_zeros;
};

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include "crc.h"
#include "huffman.h"

struct kernels {
  void (*measure)(const struct measuring *, int64_t, void *, struct moments *);
  void (*merge)(const struct moments *, struct moments *);
  void (*planes)(const uint8_t *, int64_t, int64_t, int64_t, int64_t, uint8_t *, int64_t);
  int64_t (*huffman)(const uint8_t *, int64_t, int64_t, int64_t, uint8_t *, struct huffman *);
  int64_t (*sample)(const uint8_t *, int64_t, int64_t, int64_t, int64_t, uint8_t *, struct huffman *);
  void (*stream)(const uint8_t *, int64_t, uint8_t *);
};

static inline float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
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
#define TARGET __attribute__((target("avx2,bmi,bmi2")))
#include "kernels.inc"

#define LEVEL AVX512
#define NAME(x) x##_avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,bmi,bmi2")))
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
typedef uint32_t crc_function(const uint8_t *, int64_t, uint8_t *);
static crc_function *selected_crc; /* NULL where there is none */

EXPORT int recorder_native_abi(void) { return ABI; }

/* Select the code for the widest vectors of this processor, at most `level`; returns what is in force. */
EXPORT int recorder_native_select(int level) {
  int best = GENERIC;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2")) best = AVX2;
  if (best == AVX2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    best = AVX512;
#endif
  if (level < 0 || level > best) level = best;
  selected = LEVELS[level];
#if defined(__x86_64__)
  selected_crc = level == GENERIC ? NULL : level == AVX512 && __builtin_cpu_supports("vpclmulqdq") ? crc_folds : crc_runs;
#endif
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

/* `GOMP_parallel` of the OpenMP library whose threads training uses. */
typedef void (*parallel)(void (*)(void *), void *, unsigned, unsigned);

/* Threads that share work: those of OpenMP, or, where `run` is NULL, the caller alone. */
struct team {
  parallel run;
  int64_t num_threads;
  uint8_t *scratch; /* `scratch_bytes` for each */
  int64_t scratch_bytes;
};

/* Pieces of some work, each taken by whichever thread of the team comes first. */
struct job {
  void (*piece)(struct job *, int64_t number, void *scratch);
  const struct team *team;
  const uint8_t *data;
  uint8_t *out;
  int64_t items, item_bytes;
  int64_t piece_items, num_pieces, num_taken, num_threads;
  int64_t num_items, num_framed;       /* of a payload: its elements, and the planes that become frames, */
  int64_t part_items, num_parts;       /* each of them in parts, */
  int64_t room, plane_room;            /* for the frames of a part and of a plane in `out`, */
  int64_t *piece_bytes;                /* and how many those of each part took in the end */
  const struct measuring *measuring;
  int64_t first_chunk;
  struct moments *chunks;
  uint32_t *crcs;
  crc_function *crc;
};

static void take_pieces(void *of) {
  struct job *job = of;
  int64_t thread = __atomic_fetch_add(&job->num_threads, 1, __ATOMIC_RELAXED), number;
  void *scratch = job->team->scratch + thread * job->team->scratch_bytes;
  while ((number = __atomic_fetch_add(&job->num_taken, 1, __ATOMIC_RELAXED)) < job->num_pieces)
    job->piece(job, number, scratch);
}

static void share(struct job *job, void (*piece)(struct job *, int64_t, void *), int64_t items, int64_t piece_items) {
  job->piece = piece;
  job->items = items;
  job->piece_items = piece_items;
  job->num_pieces = (items + piece_items - 1) / piece_items;
  job->num_taken = job->num_threads = 0;
  if (job->team->run && job->num_pieces > 1)
    job->team->run(take_pieces, job, (unsigned)job->team->num_threads, 0);
  else
    take_pieces(job);
}

static int64_t items_of(const struct job *job, int64_t number) {
  int64_t left = job->items - number * job->piece_items;
  return left < job->piece_items ? left : job->piece_items;
}

static void measure_piece(struct job *job, int64_t number, void *scratch) {
  selected->measure(job->measuring, job->first_chunk + number, scratch, job->chunks + number);
}

static void copy_piece(struct job *job, int64_t number, void *scratch) {
  (void)scratch;
  int64_t from = number * job->piece_items;
  memcpy(job->out + from, job->data + from, (size_t)items_of(job, number));
}

static void stream_piece(struct job *job, int64_t number, void *scratch) {
  (void)scratch;
  int64_t from = number * job->piece_items;
  selected->stream(job->data + from, items_of(job, number), job->out + from);
}

static void frame_piece(struct job *job, int64_t number, void *scratch) {
  int64_t plane = number / job->num_parts, part = number % job->num_parts, first = part * job->part_items;
  int64_t left = job->num_items - first, n = left < job->part_items ? left : job->part_items;
  const uint8_t *from = job->data + first * job->item_bytes;
  uint8_t *to = job->out + plane * job->plane_room + part * job->room;
  job->piece_bytes[number] = selected->huffman(from, n, job->item_bytes, plane, to, scratch);
}

static void split_piece(struct job *job, int64_t number, void *scratch) {
  (void)scratch;
  int64_t from = number * job->piece_items;
  selected->planes(job->data + from * job->item_bytes, items_of(job, number), job->item_bytes, job->num_framed,
                   job->item_bytes - 1, job->out + from, job->items);
}

/* Statistics and fingerprint, by chunks. They are taken in in order, so the bits do not depend on the team. */
EXPORT void recorder_native_measure(const struct measuring *measuring, const struct team *team, struct moments *out) {
  struct moments chunks[MAX_CHUNKS];
  int64_t num_chunks = (measuring->items + CHUNK_ITEMS - 1) / CHUNK_ITEMS;
  struct job job = {.team = team, .measuring = measuring, .chunks = chunks};
  for (; job.first_chunk < num_chunks; job.first_chunk += MAX_CHUNKS) {
    int64_t left = num_chunks - job.first_chunk, n = left < MAX_CHUNKS ? left : MAX_CHUNKS;
    share(&job, measure_piece, n, 1);
    for (int64_t i = 0; i < n; i++) selected->merge(chunks + i, out);
  }
}

EXPORT void recorder_native_copy(const uint8_t *data, int64_t num_bytes, const struct team *team, uint8_t *out) {
  struct job job = {.team = team, .data = data, .out = out};
  share(&job, copy_piece, num_bytes, COPY_BYTES);
}

/* The same past the cache. */
EXPORT void recorder_native_stream(const uint8_t *data, int64_t num_bytes, const struct team *team, uint8_t *out) {
  struct job job = {.team = team, .data = data, .out = out};
  share(&job, stream_piece, num_bytes, COPY_BYTES);
}

/* The first `framed` planes as frames, then the others as they are; unless all are framed, 8 bytes with the length of the
 * frames come first. Parts of a plane become frames of their own, so that threads share the work; which they are depends
 * on the number of threads alone. Returns the bytes, or -1 where `out_bytes` might not do. */
EXPORT int64_t recorder_native_encode(const uint8_t *data, int64_t items, int64_t item_bytes, int64_t framed,
                                      const struct team *team, uint8_t *out, int64_t out_bytes) {
  int64_t parts = (items / (MAX_PART_ITEMS * team->num_threads) + 1) * team->num_threads;
  if (parts > items / MIN_PART_ITEMS) parts = items / MIN_PART_ITEMS + 1;
  if (parts > MAX_PIECES / framed) parts = MAX_PIECES / framed;
  int64_t part_items = team->num_threads > 1 ? items / parts + 1 : items + 1;
  int64_t num_parts = (items + part_items - 1) / part_items, num_pieces = framed * num_parts;
  int64_t piece_bytes[MAX_PIECES], head = framed < item_bytes ? 8 : 0, rest = (item_bytes - framed) * items;
  struct job job = {.team = team, .data = data, .out = out + head, .item_bytes = item_bytes};
  job.num_items = items, job.num_framed = framed, job.part_items = part_items, job.num_parts = num_parts;
  job.piece_bytes = piece_bytes, job.room = frames_room(part_items);
  job.plane_room = (num_parts - 1) * job.room + frames_room(items - (num_parts - 1) * part_items);
  if (head + framed * job.plane_room + rest > out_bytes) return -1;
  share(&job, frame_piece, num_pieces, 1);
  uint8_t *to = out + head;
  for (int64_t i = 0; i < num_pieces; to += piece_bytes[i++])
    if (i) memmove(to, job.out + i / num_parts * job.plane_room + i % num_parts * job.room, (size_t)piece_bytes[i]);
  if (head) put_little(out, (uint64_t)(to - out - head), 8);
  job.out = to;
  if (rest) share(&job, split_piece, items, SPLIT_ITEMS);
  return to - out + rest;
}

/* Of one thread of a team. */
EXPORT int64_t recorder_native_scratch(void) {
  int64_t measuring = 3 * CHUNK_ITEMS * 4, huffman = (int64_t)sizeof(struct huffman);
  return measuring > huffman ? measuring : huffman;
}

static void crc_piece(struct job *job, int64_t number, void *scratch) {
  (void)scratch;
  int64_t from = number * job->piece_items;
  job->crcs[number] = job->crc(job->data + from, items_of(job, number), job->out ? job->out + from : NULL);
}

/* CRC32C of `num_bytes`, at most MAX_CRC_PARTS * CRC_PART_BYTES, or -1 where the processor has no instruction for it.
 * Copied to `out`, if that is an address, in any case. */
EXPORT int64_t recorder_native_crc32c(const uint8_t *data, int64_t num_bytes, const struct team *team, uint8_t *out) {
  crc_function *crc_of = selected_crc;
  if (!crc_of || num_bytes > (int64_t)MAX_CRC_PARTS * CRC_PART_BYTES) {
    if (out) recorder_native_copy(data, num_bytes, team, out);
    return -1;
  }
  int64_t head = -(intptr_t)out & (LINE_BYTES - 1);
  if (head > num_bytes) head = num_bytes;
  uint32_t crcs[MAX_CRC_PARTS], crc = head ? crc_of(data, head, out) : 0;
  struct job job = {.team = team, .data = data + head, .out = out ? out + head : NULL, .crcs = crcs, .crc = crc_of};
  share(&job, crc_piece, num_bytes - head, CRC_PART_BYTES);
  uint32_t whole = job.num_pieces > 1 ? crc_product(crc_product(CRC_PART_SHIFT, CRC_PART_SHIFT), CRC_PART_SHIFT) : 0;
  int64_t last = job.num_pieces - 1;
  for (int64_t i = 0; i < last; i++) crc = crc_product(whole, crc) ^ crcs[i];
  return last < 0 ? crc : crc_join(crc, crcs[last], items_of(&job, last));
}

/* CRC32C of two runs of bytes from those of each, where the second has `num_bytes`. */
EXPORT int64_t recorder_native_join_crc32c(int64_t first, int64_t second, int64_t num_bytes) {
  return crc_join((uint32_t)first, (uint32_t)second, num_bytes);
}
