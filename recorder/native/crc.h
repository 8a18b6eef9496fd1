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
  if (kept) {
    _mm256_storeu_si256(kept, low);
    _mm256_storeu_si256((__m256i_u *)kept + 1, high);
  }
  _mm256_stream_si256((__m256i *)to, low);
  _mm256_stream_si256((__m256i *)to + 1, high);
}

#define CRC_WORD(crc, word) crc = __builtin_ia32_crc32di(crc, word)

/* Of three runs at once: the instruction takes three cycles, and one may begin in each. Copies what it reads to `to`, if
 * that is an address, a multiple of a line, past the cache: what that holds stays there, and memory that is written whole
 * need not be read first. Each line is read once, so the CRC is that of the copy whatever other threads write meanwhile. */
static inline __attribute__((always_inline, target("avx2"))) uint32_t crc_runs(const uint8_t *p, int64_t n, uint8_t *to) {
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
  uint32_t front = crc_product(shift, ~(uint32_t)a) ^ ~(uint32_t)b, rest = ~(uint32_t)c;
  rest = crc_product(shift, front) ^ rest;
  for (i = 3 * run; i < n; i++) {
    uint8_t byte = p[i];
    rest = ~__builtin_ia32_crc32qi(~rest, byte);
    if (to) to[i] = byte;
  }
  if (to) __builtin_ia32_sfence(); /* whoever is told of the copy sees it */
  return rest;
}

static __attribute__((target("avx2"))) uint32_t crc_of(const uint8_t *p, int64_t n) { return crc_runs(p, n, NULL); }

static __attribute__((target("avx2"))) uint32_t crc_copied(const uint8_t *p, int64_t n, uint8_t *to) {
  return crc_runs(p, n, to);
}
#endif
