/* The sums of checksum.py on a CPU, taken while rows are copied: what is read once is stored, added
   to the sum of its row and to that of its column. A copy waits for memory, and the sums fit into
   that. Words are those of a little-endian machine. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "checksums are of little-endian words"
#endif

#if defined(__x86_64__) && defined(__GNUC__)
#define X86_64 1
#include <immintrin.h>
#endif
#define INLINE static inline __attribute__((always_inline))

enum {
    WORD_BYTES = 8,
    /* The sums of columns stay in the second cache, half a megabyte and more today. In the first,
       32 KB, rows would be cut so short that the processor reads less of them ahead. */
    TILE_WORDS = 8192,
    /* So far ahead memory is asked for what will be read: busy with sums, the processor by itself
       would ask later than in a copy without them. */
    AHEAD_WORDS = 128,
};

/* At any address: rows begin where they begin. */
typedef uint64_t word __attribute__((aligned(1), may_alias));

/* Rows of a box. The first byte of each is `offset` bytes into a word of its tensor. `row_factors`
   are those of the rows, `column_factors` those of the words that the box has a part of. */
struct piece {
    const char *source;
    char *target; /* NULL: nothing is copied */
    size_t num_rows, row_bytes;
    ptrdiff_t source_stride, target_stride; /* bytes */
    size_t offset;
    const uint64_t *row_factors, *column_factors;
    uint64_t *total; /* what the piece adds to */
};

/* Adds the words of one row to the sums of their columns, copies them unless `to` is NULL, and
   returns their sum. `next` is the row after it, of the last row that row itself. */
typedef uint64_t row_function(const word *from, const word *next, word *to, size_t num_words,
                              uint64_t *column_sums);

INLINE uint64_t
row(const word *restrict from, const word *next, word *restrict to, size_t num_words,
    uint64_t *restrict column_sums)
{
    (void)next;
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

#ifdef X86_64
/* Asks for what is read AHEAD_WORDS after column `c` of a row, or a row after it if that is less. */
INLINE void
read_ahead(const word *from, const word *next, size_t c, size_t num_words)
{
    size_t ahead = c + (num_words < AHEAD_WORDS ? num_words : AHEAD_WORDS);
    _mm_prefetch((const char *)(ahead < num_words ? from + ahead : next + ahead - num_words),
                 _MM_HINT_T0);
}

/* The same, stored past the caches: what is overwritten is not read first, which is a third of what
   a copy moves. `to` is a multiple of 8. */
INLINE uint64_t
row_sse2(const word *restrict from, const word *next, word *restrict to, size_t num_words,
         uint64_t *restrict column_sums)
{
    enum { VECTORS = 4, STEP = 2 * VECTORS };
    if (!to || (uintptr_t)to % WORD_BYTES)
        return row(from, next, to, num_words, column_sums);
    size_t c = num_words && (uintptr_t)to % sizeof(__m128i) ? 1 : 0;
    uint64_t sum = row(from, next, to, c, column_sums);
    __m128i sums[VECTORS] = {0};
    for (; c + STEP <= num_words; c += STEP) {
        read_ahead(from, next, c, num_words);
        for (int i = 0; i < VECTORS; i++) {
            __m128i *column = (__m128i *)(column_sums + c) + i;
            __m128i value = _mm_loadu_si128((const __m128i *)(from + c) + i);
            _mm_stream_si128((__m128i *)(to + c) + i, value);
            sums[i] = _mm_add_epi64(sums[i], value);
            _mm_storeu_si128(column, _mm_add_epi64(_mm_loadu_si128(column), value));
        }
    }
    for (int i = 0; i < VECTORS; i++)
        sum += (uint64_t)sums[i][0] + (uint64_t)sums[i][1];
    return sum + row(from + c, next, to + c, num_words - c, column_sums + c);
}

/* With half the instructions: more of what is read is on its way at once. */
__attribute__((target("avx2"))) INLINE uint64_t
row_avx2(const word *restrict from, const word *next, word *restrict to, size_t num_words,
         uint64_t *restrict column_sums)
{
    enum { VECTORS = 2, STEP = 4 * VECTORS };
    if (!to || (uintptr_t)to % WORD_BYTES)
        return row(from, next, to, num_words, column_sums);
    size_t c = -((uintptr_t)to / WORD_BYTES) % 4;
    if (c > num_words)
        c = num_words;
    uint64_t sum = row(from, next, to, c, column_sums);
    __m256i sums[VECTORS] = {0};
    for (; c + STEP <= num_words; c += STEP) {
        read_ahead(from, next, c, num_words);
        for (int i = 0; i < VECTORS; i++) {
            __m256i *column = (__m256i *)(column_sums + c) + i;
            __m256i value = _mm256_loadu_si256((const __m256i *)(from + c) + i);
            _mm256_stream_si256((__m256i *)(to + c) + i, value);
            sums[i] = _mm256_add_epi64(sums[i], value);
            _mm256_storeu_si256(column, _mm256_add_epi64(_mm256_loadu_si256(column), value));
        }
    }
    for (int i = 0; i < VECTORS; i++)
        for (int lane = 0; lane < 4; lane++)
            sum += (uint64_t)sums[i][lane];
    return sum + row(from + c, next, to + c, num_words - c, column_sums + c);
}
#endif

/* Up to TILE_WORDS columns of whole words, `start` bytes into the rows. */
INLINE uint64_t
tile(const struct piece *piece, size_t start, size_t num_words, const uint64_t *column_factors,
     row_function add_row)
{
    uint64_t column_sums[TILE_WORDS];
    uint64_t total = 0;
    memset(column_sums, 0, num_words * WORD_BYTES);
    for (size_t r = 0; r < piece->num_rows; r++) {
        const char *from = piece->source + (ptrdiff_t)r * piece->source_stride + start;
        const char *next = r + 1 < piece->num_rows ? from + piece->source_stride : from;
        char *to = piece->target;
        if (to)
            to += (ptrdiff_t)r * piece->target_stride + start;
        total += piece->row_factors[r] * add_row((const word *)from, (const word *)next,
                                                 (word *)to, num_words, column_sums);
    }
    for (size_t c = 0; c < num_words; c++)
        total += column_factors[c] * column_sums[c];
    return total;
}

/* One column of words of which the box has `num_bytes`, `start` bytes into its rows, that lie
   `offset` bytes into the word; the rest of it counts as zeros. */
static uint64_t
part_of_words(const struct piece *piece, size_t start, size_t num_bytes, size_t offset,
              uint64_t column_factor)
{
    uint64_t total = 0;
    for (size_t r = 0; r < piece->num_rows; r++) {
        const char *from = piece->source + (ptrdiff_t)r * piece->source_stride + start;
        uint64_t value = 0;
        memcpy((char *)&value + offset, from, num_bytes);
        if (piece->target)
            memcpy(piece->target + (ptrdiff_t)r * piece->target_stride + start, from, num_bytes);
        total += (piece->row_factors[r] + column_factor) * value;
    }
    return total;
}

/* The checksum of a piece, which is copied unless it has no target. */
INLINE uint64_t
sum_of(const struct piece *piece, row_function add_row)
{
    const uint64_t *column_factors = piece->column_factors;
    uint64_t sum = 0;
    size_t start = 0;
    if (piece->offset) {
        size_t left = WORD_BYTES - piece->offset;
        start = piece->row_bytes < left ? piece->row_bytes : left;
        sum += part_of_words(piece, 0, start, piece->offset, *column_factors++);
    }
    while (piece->row_bytes - start >= WORD_BYTES) {
        size_t num_words = (piece->row_bytes - start) / WORD_BYTES;
        if (num_words > TILE_WORDS)
            num_words = TILE_WORDS;
        sum += tile(piece, start, num_words, column_factors, add_row);
        start += num_words * WORD_BYTES;
        column_factors += num_words;
    }
    if (start < piece->row_bytes)
        sum += part_of_words(piece, start, piece->row_bytes - start, 0, *column_factors);
    return sum;
}

#ifdef X86_64
__attribute__((target("avx2"))) static void
add_avx2(const struct piece *pieces, size_t num_pieces)
{
    for (size_t i = 0; i < num_pieces; i++)
        *pieces[i].total += sum_of(pieces + i, row_avx2);
}
#endif

static void
add_anywhere(const struct piece *pieces, size_t num_pieces)
{
    for (size_t i = 0; i < num_pieces; i++)
#ifdef X86_64
        *pieces[i].total += sum_of(pieces + i, row_sse2);
#else
        *pieces[i].total += sum_of(pieces + i, row);
#endif
}

/* Adds the checksum of every piece to its total, and copies it unless its target is NULL. */
void
add_pieces(const struct piece *pieces, size_t num_pieces)
{
#ifdef X86_64
    if (__builtin_cpu_supports("avx2"))
        add_avx2(pieces, num_pieces);
    else
        add_anywhere(pieces, num_pieces);
    _mm_sfence(); /* whoever is told that the copies are there must find all of them */
#else
    add_anywhere(pieces, num_pieces);
#endif
}
