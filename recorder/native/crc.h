/* CRC32C (Castagnoli, reflected) of parts, and of what they make together. */

#define CRC_POLYNOMIAL 0x82F63B78u
#define CRC_PART_BYTES (3 << 16) /* that one thread takes at a time */
#define CRC_PART_SHIFT 0xFE7740E6U /* crc_shift() of a third of it */
#define MAX_CRC_PARTS 512
#define LINE_BYTES 64 /* of the cache */

/* Product of two polynomials of 32 bits, the lowest power in the highest bit, modulo that of the CRC. */
static uint32_t crc_product(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = 1u << 31; bit; bit >>= 1) {
    if (a & bit) product ^= b;
    b = b & 1 ? b >> 1 ^ CRC_POLYNOMIAL : b >> 1;
  }
  return product;
}

/* x to the power of 8 times num_bytes. */
static uint32_t crc_shift(int64_t num_bytes) {
  uint32_t shift = 1u << 31, square = 1u << 23; /* 1 and x to the power of 8 */
  for (; num_bytes; num_bytes >>= 1, square = crc_product(square, square))
    if (num_bytes & 1) shift = crc_product(shift, square);
  return shift;
}

/* The CRC of two runs of bytes from those of each, where the second has num_bytes. */
static uint32_t crc_join(uint32_t first, uint32_t second, int64_t num_bytes) {
  return first ? crc_product(crc_shift(num_bytes), first) ^ second : second;
}

#if defined(__x86_64__)
/* A line to where a line begins, and to `kept`, if that is an address. */
static inline __attribute__((always_inline, target("avx2"))) void stream_line(const void *from, uint8_t *to, void *kept) {
  __m256i low = _mm256_loadu_si256(from), high = _mm256_loadu_si256((const __m256i_u *)from + 1);
  __asm__("" : "+x"(low), "+x"(high)); /* not read again */
  if (kept) {
    _mm256_storeu_si256(kept, low);
    _mm256_storeu_si256((__m256i_u *)kept + 1, high);
  }
  _mm256_stream_si256((__m256i *)to, low);
  _mm256_stream_si256((__m256i *)to + 1, high);
}

#define CRC_WORD(crc, word) crc = __builtin_ia32_crc32di(crc, word)

/* From the CRC before, as the instruction has it, to that after `n` more bytes, which are copied to `to`, if that is an address. */
static inline __attribute__((always_inline, target("avx2"))) uint32_t crc_rest(uint64_t crc, const uint8_t *p, int64_t n, uint8_t *to) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    uint64_t word = *(const volatile u64 *)(p + i);
    CRC_WORD(crc, word);
    if (to) *(u64 *)(to + i) = word;
  }
  for (; i < n; i++) {
    uint8_t byte = *(const volatile uint8_t *)(p + i);
    crc = __builtin_ia32_crc32qi((uint32_t)crc, byte);
    if (to) to[i] = byte;
  }
  if (to) __builtin_ia32_sfence(); /* whoever is told of the copy sees it */
  return ~(uint32_t)crc;
}

/* Of three runs at once: the instruction takes three cycles, and one may begin in each. Copies what it reads to `to`, if
 * that is an address, a multiple of a line, past the cache: what that holds stays there, and memory that is written whole
 * need not be read first. Each line is read once, so the CRC is that of the copy whatever other threads write meanwhile. */
static inline __attribute__((always_inline, target("avx2"))) uint32_t crc_by_runs(const uint8_t *p, int64_t n, uint8_t *to) {
  int64_t run = n / (3 * LINE_BYTES) * LINE_BYTES, i;
  uint32_t shift = n == CRC_PART_BYTES ? CRC_PART_SHIFT : crc_shift(run);
  uint64_t a = 0xFFFFFFFF, b = 0xFFFFFFFF, c = 0xFFFFFFFF, line[3][LINE_BYTES / 8];
  for (i = 0; i < run; i += LINE_BYTES) {
    const u64 *from[3] = {(const u64 *)(p + i), (const u64 *)(p + run + i), (const u64 *)(p + 2 * run + i)};
    if (to) {
      for (int k = 0; k < 3; k++) {
        stream_line(from[k], to + k * run + i, line[k]);
        from[k] = line[k];
      }
    }
    for (int k = 0; k < LINE_BYTES / 8; k++) {
      CRC_WORD(a, from[0][k]);
      CRC_WORD(b, from[1][k]);
      CRC_WORD(c, from[2][k]);
    }
  }
  uint32_t front = crc_product(shift, ~(uint32_t)a) ^ ~(uint32_t)b, rest = crc_product(shift, front) ^ ~(uint32_t)c;
  return crc_rest(~rest, p + 3 * run, n - 3 * run, to ? to + 3 * run : NULL);
}

/* The same by folding: FOLD_BYTES of a message, times x to the power of 8 * FOLD_BYTES, are added to those that follow, by
 * carry-less products of the halves of 16 bytes with that power modulo the polynomial (one less: a product of reflected
 * halves is a bit too low). What is left after the last has the CRC of all of them. */
#define FOLD_BYTES (4 * LINE_BYTES)
#define FOLD_LOW 0xE9A5D8BEULL  /* x to the power of 8 * FOLD_BYTES + 63: the half that comes first, */
#define FOLD_HIGH 0x1426A815ULL /* and of 8 * FOLD_BYTES - 1 */

static inline __attribute__((always_inline, target("avx512f,vpclmulqdq"))) uint32_t crc_by_folds(const uint8_t *p, int64_t n, uint8_t *to) {
  const __m512i by = _mm512_set4_epi64(FOLD_HIGH << 32, FOLD_LOW << 32, FOLD_HIGH << 32, FOLD_LOW << 32);
  __m512i folded[4], line;
  int64_t i = 0;
  for (; i + FOLD_BYTES <= n; i += FOLD_BYTES) {
    for (int k = 0; k < 4; k++) {
      line = _mm512_loadu_si512(p + i + k * LINE_BYTES);
      __asm__("" : "+v"(line)); /* not read again */
      if (to) _mm512_stream_si512((__m512i *)(to + i + k * LINE_BYTES), line);
      if (i) {
        __m512i low = _mm512_clmulepi64_epi128(folded[k], by, 0x00), high = _mm512_clmulepi64_epi128(folded[k], by, 0x11);
        folded[k] = _mm512_ternarylogic_epi64(low, high, line, 0x96);
      } else {
        folded[k] = k ? line : _mm512_xor_si512(line, _mm512_maskz_set1_epi32(1, -1));
      }
    }
  }
  uint64_t crc = 0xFFFFFFFF, words[FOLD_BYTES / 8];
  if (i) {
    crc = 0;
    memcpy(words, folded, sizeof words);
    for (int k = 0; k < FOLD_BYTES / 8; k++) CRC_WORD(crc, words[k]);
  }
  return crc_rest(crc, p + i, n - i, to ? to + i : NULL);
}

/* CRC32C of `n` bytes, and a copy of them to `to`, if that is an address. */
static __attribute__((target("avx2"))) uint32_t crc_runs(const uint8_t *p, int64_t n, uint8_t *to) {
  return to ? crc_by_runs(p, n, to) : crc_by_runs(p, n, NULL);
}

static __attribute__((target("avx512f,vpclmulqdq"))) uint32_t crc_folds(const uint8_t *p, int64_t n, uint8_t *to) {
  return to ? crc_by_folds(p, n, to) : crc_by_folds(p, n, NULL);
}
#endif
