/* The hot loops of the writer thread: statistics, fingerprint and byte planes of one tensor's bytes.
 *
 * Every function gives the very bits that the Python beside it gives, on every processor: sums are taken in the order
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

#define ABI 1
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

/* Where in the runs and blocks the words that come next lie. */
struct place {
  int64_t run, in_run, in_block;
  uint64_t weight;
};

/* Of a chunk: what one look at its values gives. */
struct range {
  double sum, low, high;
  int64_t num_zeros;
};

struct kernels {
  void (*measure)(const void *, int64_t, enum kind, const float *, const struct weights *, void *, struct moments *);
  void (*planes)(const uint8_t *, int64_t, int64_t, int64_t, int64_t, uint8_t *, int64_t);
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
#include <immintrin.h>

#define LEVEL AVX2
#define NAME(x) x##_avx2
#define TARGET __attribute__((target("avx2")))
#include "kernels.inc"

#define LEVEL AVX512
#define NAME(x) x##_avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
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
  if (__builtin_cpu_supports("avx2")) best = AVX2;
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    best = AVX512;
#endif
  if (level < 0 || level > best) level = best;
  selected = LEVELS[level];
  return level;
}

/* Statistics (where `kind` is not negative) and fingerprint (where there are weights) of `items` elements.
 * `scratch`: 3 * CHUNK_ITEMS * 4 bytes, aligned to 8. `table`: the value of each pattern of a small float. */
EXPORT void recorder_native_measure(const void *data, int64_t items, int kind, const float *table,
                                    const struct weights *weights, void *scratch, struct moments *out) {
  selected->measure(data, items, (enum kind)kind, table, weights, scratch, out);
}

/* Byte planes `first` to `last` (0 is the most significant) of little-endian elements, each `stride` after the other. */
EXPORT void recorder_native_planes(const uint8_t *data, int64_t items, int64_t item_bytes, int64_t first, int64_t last,
                                   uint8_t *out, int64_t stride) {
  selected->planes(data, items, item_bytes, first, last, out, stride);
}
