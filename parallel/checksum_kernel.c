/* The sums of checksum.py on a CPU, taken while rows are copied: what is read once is stored, added
   to the sum of its row and to that of its column. A copy waits for memory, and the sums fit into
   that. Words are those of a little-endian machine. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "checksums are of little-endian words"
#endif

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__)
#define FOR_EVERY_PROCESSOR __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EVERY_PROCESSOR
#endif

enum {
    WORD_BYTES = 8,
    /* The sums of columns stay in the second cache, half a megabyte and more today. In the first,
       32 KB, rows would be cut so short that the processor reads less of them ahead. */
    TILE_WORDS = 8192,
};

/* At any address: rows begin where they begin. */
typedef uint64_t word __attribute__((aligned(1), may_alias));

/* Rows of bytes: those of a box, or of a few of its columns. */
struct rows {
    const char *source;
    char *target; /* NULL: nothing is copied */
    size_t num_rows;
    ptrdiff_t source_stride, target_stride; /* bytes */
    const uint64_t *factors;
};

/* Adds the words of one row to the sums of their columns, copies them unless `to` is NULL, and
   returns their sum. */
static inline __attribute__((always_inline)) uint64_t
row(const word *restrict from, word *restrict to, size_t num_words, uint64_t *restrict column_sums)
{
    uint64_t sum = 0;
    for (size_t c = 0; c < num_words; c++) {
        uint64_t value = from[c];
        if (to)
            to[c] = value;
        sum += value;
        column_sums[c] += value;
    }
    return sum;
}

#ifdef __SSE2__
/* The same, stored past the caches: what is overwritten is not read first, which is a third of what
   a copy moves. `to` is a multiple of 8. */
static inline __attribute__((always_inline)) uint64_t
streamed_row(const word *restrict from, word *restrict to, size_t num_words,
             uint64_t *restrict column_sums)
{
    enum { VECTORS = 4, STEP = 2 * VECTORS };
    size_t c = num_words && (uintptr_t)to % sizeof(__m128i) ? 1 : 0;
    uint64_t sum = row(from, to, c, column_sums);
    __m128i sums[VECTORS] = {0};
    for (; c + STEP <= num_words; c += STEP)
        for (int i = 0; i < VECTORS; i++) {
            __m128i *column = (__m128i *)(column_sums + c) + i;
            __m128i value = _mm_loadu_si128((const __m128i *)(from + c) + i);
            _mm_stream_si128((__m128i *)(to + c) + i, value);
            sums[i] = _mm_add_epi64(sums[i], value);
            _mm_storeu_si128(column, _mm_add_epi64(_mm_loadu_si128(column), value));
        }
    for (int i = 0; i < VECTORS; i++)
        sum += (uint64_t)sums[i][0] + (uint64_t)sums[i][1];
    return sum + row(from + c, to + c, num_words - c, column_sums + c);
}
#endif

/* Up to TILE_WORDS columns of whole words, `start` bytes into the rows. */
static inline __attribute__((always_inline)) uint64_t
tile(const struct rows *rows, size_t start, size_t num_words, const uint64_t *column_factors)
{
    uint64_t column_sums[TILE_WORDS];
    uint64_t total = 0;
    memset(column_sums, 0, num_words * WORD_BYTES);
    for (size_t r = 0; r < rows->num_rows; r++) {
        const word *from =
            (const word *)(rows->source + (ptrdiff_t)r * rows->source_stride + start);
        word *to = NULL;
        uint64_t sum;
        if (rows->target)
            to = (word *)(rows->target + (ptrdiff_t)r * rows->target_stride + start);
#ifdef __SSE2__
        if (to && (uintptr_t)to % WORD_BYTES == 0)
            sum = streamed_row(from, to, num_words, column_sums);
        else
#endif
            sum = row(from, to, num_words, column_sums);
        total += rows->factors[r] * sum;
    }
    for (size_t c = 0; c < num_words; c++)
        total += column_factors[c] * column_sums[c];
    return total;
}

/* One column of words of which the box has `num_bytes`, `start` bytes into its rows, that lie
   `offset` bytes into the word; the rest of it counts as zeros. */
static uint64_t
part_of_words(const struct rows *rows, size_t start, size_t num_bytes, size_t offset,
              uint64_t column_factor)
{
    uint64_t total = 0;
    for (size_t r = 0; r < rows->num_rows; r++) {
        const char *from = rows->source + (ptrdiff_t)r * rows->source_stride + start;
        uint64_t value = 0;
        memcpy((char *)&value + offset, from, num_bytes);
        if (rows->target)
            memcpy(rows->target + (ptrdiff_t)r * rows->target_stride + start, from, num_bytes);
        total += (rows->factors[r] + column_factor) * value;
    }
    return total;
}

/* Adds the checksum of rows of a box to `total`, and copies them unless `target` is NULL. The first
   byte of each is `offset` bytes into a word of its tensor. `row_factors` are those of the rows,
   `column_factors` those of the words that the box has a part of. */
FOR_EVERY_PROCESSOR void
add_rows(const char *source, char *target, size_t num_rows, size_t row_bytes,
         ptrdiff_t source_stride, ptrdiff_t target_stride, size_t offset,
         const uint64_t *row_factors, const uint64_t *column_factors, uint64_t *total)
{
    const struct rows rows = {source, target, num_rows, source_stride, target_stride, row_factors};
    uint64_t sum = 0;
    size_t start = 0;
    if (offset) {
        size_t left = WORD_BYTES - offset;
        start = row_bytes < left ? row_bytes : left;
        sum += part_of_words(&rows, 0, start, offset, *column_factors++);
    }
    while (row_bytes - start >= WORD_BYTES) {
        size_t num_words = (row_bytes - start) / WORD_BYTES;
        if (num_words > TILE_WORDS)
            num_words = TILE_WORDS;
        sum += tile(&rows, start, num_words, column_factors);
        start += num_words * WORD_BYTES;
        column_factors += num_words;
    }
    if (start < row_bytes)
        sum += part_of_words(&rows, start, row_bytes - start, 0, *column_factors);
#ifdef __SSE2__
    _mm_sfence(); /* whoever is told that the copy is there must find all of it */
#endif
    *total += sum;
}
