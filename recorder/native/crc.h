/* CRC32C (Castagnoli, reflected) of parts, and of what they make together. */

#define CRC_POLYNOMIAL 0x82F63B78u
#define CRC_PART_BYTES (3 << 16) /* that one thread takes at a time */
#define MAX_CRC_PARTS 512

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
  return crc_product(crc_shift(num_bytes), first) ^ second;
}

#if defined(__x86_64__)
/* Of three runs at once: the instruction takes three cycles, and one may begin in each. `shift` is that of a run. */
static __attribute__((target("sse4.2"))) uint32_t crc_of(const uint8_t *p, int64_t n, uint32_t shift) {
  int64_t run = n / 24 * 8;
  uint64_t a = 0xFFFFFFFF, b = 0xFFFFFFFF, c = 0xFFFFFFFF;
  for (int64_t i = 0; i < run; i += 8) {
    a = __builtin_ia32_crc32di(a, *(const u64 *)(p + i));
    b = __builtin_ia32_crc32di(b, *(const u64 *)(p + run + i));
    c = __builtin_ia32_crc32di(c, *(const u64 *)(p + 2 * run + i));
  }
  uint32_t front = crc_product(shift, ~(uint32_t)a) ^ ~(uint32_t)b, rest = ~(uint32_t)c;
  rest = crc_product(shift, front) ^ rest;
  for (int64_t i = 3 * run; i < n; i++) rest = ~__builtin_ia32_crc32qi(~rest, p[i]);
  return rest;
}
#endif
