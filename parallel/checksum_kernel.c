/* Computes the sums of checksum.py on a CPU while rows are copied: each word is read once, stored,
   and added to the sums of its row and its column. The copy is bound by memory, so the additions
   cost no extra time. Words are little-endian. */

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
    /* Column sums of a tile fit into the L2 cache (half a megabyte or more today). Sized for the
       32 KB of L1, rows would be cut too short for the hardware prefetcher. */
    TILE_WORDS = 8192,
    /* Prefetch distance: busy with sums, the processor by itself would request memory later than
       in a plain copy. */
    AHEAD_WORDS = 128,
};

/* May be unaligned: rows can start at any address. */
typedef uint64_t word __attribute__((aligned(1), may_alias));

/* Rows of a box. The first byte of each row is `offset` bytes into a word of its tensor.
   `row_factors` has one factor per row, `column_factors` one per word that overlaps the box. */
struct piece {
    const char *source;
    char *target; /* NULL: nothing is copied */
    size_t num_rows, row_bytes;
    ptrdiff_t source_stride, target_stride; /* bytes */
    size_t offset;
    const uint64_t *row_factors, *column_factors;
    uint64_t *total; /* the piece's checksum is added to this */
};

/* Adds the words of one row to the sums of their columns, copies them unless `to` is NULL, and
   returns their sum. `next` is the next row, or for the last row that row itself. */
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
/* Prefetches the word AHEAD_WORDS, or one row if that is shorter, after column `c` of a row. */
INLINE void
read_ahead(const word *from, const word *next, size_t c, size_t num_words)
{
    size_t ahead = c + (num_words < AHEAD_WORDS ? num_words : AHEAD_WORDS);
    _mm_prefetch((const char *)(ahead < num_words ? from + ahead : next + ahead - num_words),
                 _MM_HINT_T0);
}

/* Like `row`, but with stores that bypass the caches: the target is not read before it is
   overwritten, which saves a third of a copy's memory traffic. Needs `to` to be a multiple of 8,
   else falls back to `row`. */
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

/* Like `row_sse2`, with half the instructions, so that more reads are in flight at once. */
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

/* The checksum of up to TILE_WORDS columns of whole words, `start` bytes into the rows; copies
   them. */
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

/* The checksum of one column of words that lie only partly in the box: `num_bytes` of each, `start`
   bytes into the box's rows and `offset` bytes into the word. The other bytes count as zeros. */
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

/* The checksum of a piece, which is copied if it has a target. */
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
    _mm_sfence(); /* make the non-temporal stores visible before anyone is told of the copies */
#else
    add_anywhere(pieces, num_pieces);
#endif
}
