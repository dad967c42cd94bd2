// Kernels for CPUs with AVX-512, compiled for the processor that runs them (see library.py).
//
// The bits of a row of a result depend only on the data of that row: not on the other rows, their number, the tiles
// that they are computed in, or the number of threads. So each row goes through the same instructions in the same
// order, in vectors of 16 numbers, and no sum is divided among threads. Sums are in float32.
//
// All threads of a team call a function together, and each computes a share. At its end they wait for each other; only
// after `multiply` they do not.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <type_traits>
#include <utility>

#include <immintrin.h>
#include <omp.h>

namespace {

constexpr int LANES = 16;
constexpr int BLOCK = 64;        // keys of a block, whose softmax weights are computed together
constexpr int QUERY_ROWS = 4;    // query rows that go through a block together
constexpr int MOST_HEAD = 1024;  // the largest head that can be normed, as in calls.py
constexpr int MANY = 1 << 15;    // numbers that pay for a second thread

typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

struct bfloat16 {
    uint16_t bits;
};

Vector load(const float *from) {
    Vector x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

Vector load(const bfloat16 *from) {
    Halves bits;
    std::memcpy(&bits, from, sizeof bits);
    return (Vector)(__builtin_convertvector(bits, Words) << 16);
}

void store(float *to, Vector x) { std::memcpy(to, &x, sizeof x); }

void store(bfloat16 *to, Vector x) {  // rounds to the nearest, and to even numbers between two
    Words bits = (Words)x;
    bits = x == x ? (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 : (Words)(Ints{} + 0x7FC0);
    Halves halves = __builtin_convertvector(bits, Halves);
    std::memcpy(to, &halves, sizeof halves);
}

Vector all(float x) { return (Vector)_mm512_set1_ps(x); }

// Products are summed in words of 32 bits: a float, or a pair of bfloat16.
template <class Number>
constexpr int PACK = 4 / sizeof(Number);

Vector words(const void *from) {
    Vector x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

Vector word(const void *from) {  // the same in all lanes
    int32_t bits;
    std::memcpy(&bits, from, sizeof bits);
    return (Vector)_mm512_set1_epi32(bits);
}

// Return x from a register. Left to itself, the compiler may load it from memory in each instruction that reads it.
Vector in_register(Vector x) {
    asm("" : "+v"(x));
    return x;
}

// a * b + c, rounded once. Written so, it would be rounded twice, or without -ffp-contract=off as the compiler chooses:
// GCC from 13 on rounds sums of one row in another way than those of four ("avoid FMA chains"), and the schedule shows.
Vector fma(Vector a, Vector b, Vector c) { return (Vector)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }

template <class Number>
Vector multiply_add(Vector sum, Vector a, Vector b) {
    return fma(a, b, sum);
}

#ifdef __AVX512BF16__
template <>
Vector multiply_add<bfloat16>(Vector sum, Vector a, Vector b) {  // the products of both numbers of a pair
    return (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}
#endif

using Lanes = std::make_integer_sequence<int, LANES>;

// Return x with its lanes moved by APART places.
template <int APART, int... LANE>
Vector moved(Vector x, std::integer_sequence<int, LANE...>) {
    return __builtin_shuffle(x, Ints{(LANE + APART) % LANES...});
}

float sum(Vector x) {
    x += moved<8>(x, Lanes());
    x += moved<4>(x, Lanes());
    x += moved<2>(x, Lanes());
    x += moved<1>(x, Lanes());
    return x[0];
}

Vector larger(Vector a, Vector b) { return a > b ? a : b; }

float largest(Vector x) {
    x = larger(x, moved<8>(x, Lanes()));
    x = larger(x, moved<4>(x, Lanes()));
    x = larger(x, moved<2>(x, Lanes()));
    x = larger(x, moved<1>(x, Lanes()));
    return x[0];
}

// Swap the quarters off the diagonal of each square of 2 * APART rows of a matrix.
template <int APART, int... LANE>
void swap_quarters(Vector (&rows)[LANES], std::integer_sequence<int, LANE...>) {
    for (int row = 0; row < LANES; row++)
        if (!(row & APART)) {  // a source below LANES is a lane of a, the others are of b
            Vector a = rows[row], b = rows[row + APART];
            rows[row] = __builtin_shuffle(a, b, Ints{(LANE & APART ? LANE - APART + LANES : LANE)...});
            rows[row + APART] = __builtin_shuffle(a, b, Ints{(LANE & APART ? LANE + LANES : LANE + APART)...});
        }
}

void transpose(Vector (&rows)[LANES]) {
    swap_quarters<8>(rows, Lanes());
    swap_quarters<4>(rows, Lanes());
    swap_quarters<2>(rows, Lanes());
    swap_quarters<1>(rows, Lanes());
}

// e to the power of x <= 0, with an error of about one unit in the last place; 0 below -87. The polynomial is that of
// Cephes (https://www.netlib.org/cephes/), single/expf.c.
Vector exponential(Vector x) {
    const Vector round = all(12582912.f);  // 1.5 * 2**23: the sum's lowest bits are the rounded number
    Vector shifted = fma(x, all(1.44269504f), round), n = shifted - round;
    Vector r = fma(n, all(2.12194440e-4f), fma(n, all(-0.693359375f), x));
    Vector y = all(1.9875691500e-4f);
    for (float each : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        y = fma(y, r, all(each));
    y = fma(y, r * r, r) + 1.f;
    Words power = ((Words)shifted - (Words)round + 127) << 23;
    return x < -87.f ? Vector{} : y * (Vector)power;
}

// 2 to the power of x <= 1, with an error of about one unit in the last place; 0 below -150. The polynomial is that of
// Cephes, single/exp2f.c.
Vector power_of_2(Vector x) {
    x = (Vector)_mm512_max_ps(_mm512_set1_ps(-200.f), (__m512)x);  // a NaN stays
    __m512 whole = _mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    Vector r = x - (Vector)whole;
    Vector y = all(1.535336188319500e-4f);
    for (float each : {1.339887440266574e-3f, 9.618437357674640e-3f, 5.550332471162809e-2f, 2.402264791363012e-1f,
                       6.931472028550421e-1f, 1.f})
        y = fma(y, r, all(each));
    return (Vector)_mm512_scalef_ps((__m512)y, whole);
}

// Call a function for groups of at most N rows, with the first row and their number.
template <int N, class Function>
void in_groups(int rows, Function call, int row = 0) {
    for (; row + N <= rows; row += N) call(row, std::integral_constant<int, N>());
    if constexpr (N > 1) in_groups<N - 1>(rows, call, row);
}

// ---- norm ----

// centered: the factor is 1 + weight, and only the product with it is rounded.
template <class Number>
void norm_row(Number *x, const Number *delta, const Number *weight, float eps, bool centered, int size, Number *out) {
    Vector squares{};
    for (int i = 0; i < size; i += LANES) {
        Vector each = load(x + i);
        if (delta) {
            store(x + i, each + load(delta + i));
            each = load(x + i);
        }
        squares = fma(each, each, squares);
    }
    float scale = 1 / std::sqrt(sum(squares) / size + eps);
    for (int i = 0; i < size; i += LANES) {
        if (centered) {
            store(out + i, load(x + i) * scale * (load(weight + i) + 1));
        } else {
            store(out + i, load(x + i) * scale);
            store(out + i, load(out + i) * load(weight + i));
        }
    }
}

template <class Number>
void norm(Number *x, const Number *delta, const Number *weight, float eps, bool centered, int rows, int size,
          Number *out) {
#pragma omp for
    for (int row = 0; row < rows; row++) {
        int64_t at = int64_t(row) * size;
        norm_row(x + at, delta ? delta + at : nullptr, weight, eps, centered, size, out + at);
    }
}

// ---- rope ----

template <class Number>
void copy(const Number *x, int size, Number *out) {
    for (int i = 0; i < size; i += LANES) store(out + i, load(x + i));
}

// Turn the first 2 * half numbers of a head, and copy the others. cos, sin: [half].
template <class Number>
void turn(const Number *x, const float *cos, const float *sin, int half, int size, Number *out) {
    for (int i = 0; i < half; i += LANES) {
        Vector a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
        store(out + i, a * c - b * s);
        store(out + half + i, b * c + a * s);
    }
    copy(x + 2 * half, size - 2 * half, out + 2 * half);
}

struct Rope {
    int tokens, real, heads, kv_heads, size, half, page_size, centered;
    float eps;
};

template <class Number>
void rope_write(const Rope &of, const Number *qkv, const int64_t *positions, const int64_t *slots, const float *cos,
                const float *sin, const Number *q_norm, const Number *k_norm, Number *keys, Number *values,
                Number *queries) {
    int all_heads = of.heads + 2 * of.kv_heads;
#pragma omp for
    for (int token = 0; token < of.tokens; token++) {
        const Number *row = qkv + int64_t(token) * all_heads * of.size;
        const float *c = cos + positions[token] * of.half, *s = sin + positions[token] * of.half;
        for (int head = 0; head < of.heads + (token < of.real ? 2 * of.kv_heads : 0); head++) {
            const Number *x = row + head * of.size;
            int kv = head - of.heads;
            if (kv >= of.kv_heads) kv -= of.kv_heads;
            int64_t at = 0;
            if (head >= of.heads) {
                if (slots[token] < 0) break;
                int64_t page = slots[token] / of.page_size, offset = slots[token] % of.page_size;
                at = ((page * of.kv_heads + kv) * of.page_size + offset) * of.size;
            }
            if (head >= of.heads + of.kv_heads) {
                copy(x, of.size, values + at);
                continue;
            }
            Number normed[MOST_HEAD];
            if (q_norm) {
                std::memcpy(normed, x, sizeof(Number) * of.size);
                norm_row<Number>(normed, nullptr, head < of.heads ? q_norm : k_norm, of.eps, of.centered, of.size,
                                 normed);
                x = normed;
            }
            if (head < of.heads)
                turn(x, c, s, of.half, of.size, queries + (int64_t(token) * of.heads + head) * of.size);
            else
                turn(x, c, s, of.half, of.size, keys + at);
        }
    }
}

// ---- products ----
//
// A weight [outputs, inputs] is kept in blocks of 64 outputs, each as [inputs, 64], or in bfloat16 as
// [inputs / 2, 64, 2] (native_linear.py). The products of SUMMED inputs are added in their order, then these sums, for
// any number of rows. A long sum loses digits; results in bfloat16 have fewer than it keeps.

constexpr int CHUNK = 1024;  // inputs of which a block's weights are in the cache
template <class Number>
constexpr int SUMMED = CHUNK;
template <>
constexpr int SUMMED<float> = 128;
constexpr int WIDE = 4;           // vectors of a block of outputs
constexpr int PRODUCT_ROWS = 6;  // rows that are computed together: the more, the less often a weight is loaded
constexpr int MOST_ROWS = 128;   // rows for which a block of a weight is read from memory once

template <int N, int W, class Number>
void add_products(const Number *x, const Number *weight, int inputs, int begin, int end, Vector (&sums)[N][W]) {
    for (int i = begin; i < end; i += PACK<Number>) {
        Vector each[W];
        for (int j = 0; j < W; j++) each[j] = in_register(words(weight + (i * WIDE + j * PACK<Number>) * LANES));
        for (int row = 0; row < N; row++) {
            Vector number = word(x + row * inputs + i);
            for (int j = 0; j < W; j++) sums[row][j] = multiply_add<Number>(sums[row][j], number, each[j]);
        }
    }
}

// The products of rows x [rows, inputs], at most MOST_ROWS, and W vectors of a block of outputs, the first `count` of
// which are real. A chunk of the block stays in the cache for all rows. bias: may be null.
template <int W, class Number>
void multiply_block(const Number *x, int rows, const Number *block, const Number *bias, int inputs, int count,
                    int outputs, Number *y) {
    Vector totals[MOST_ROWS][W];
    for (int begin = 0; begin < inputs; begin += CHUNK)
        in_groups<PRODUCT_ROWS>(rows, [&](int row, auto n) {
            for (int from = begin, end = std::min(begin + CHUNK, inputs); from < end; from += SUMMED<Number>) {
                Vector sums[n.value][W] = {};
                add_products<n.value, W>(x + int64_t(row) * inputs, block, inputs, from,
                                         std::min(from + SUMMED<Number>, end), sums);
                for (int r = 0; r < n.value; r++)
                    for (int j = 0; j < W; j++)
                        totals[row + r][j] = from ? totals[row + r][j] + sums[r][j] : sums[r][j];
            }
        });
    Number added[W * LANES] = {}, found[W * LANES];
    if (bias) std::copy_n(bias, count, added);
    bool whole = count == W * LANES;
    for (int row = 0; row < rows; row++) {
        Number *to = y + int64_t(row) * outputs, *first = whole ? to : found;
        for (int j = 0; j < W; j++)
            store(first + j * LANES, bias ? totals[row][j] + load(added + j * LANES) : totals[row][j]);
        if (!whole) std::copy_n(found, count, to);
    }
}

// Each thread computes as many halves of blocks as another, in whole blocks where it can. If there are few of them for
// so many threads, the rows are divided into bands as well.
template <class Number>
void multiply(const Number *x, const Number *weight, const Number *bias, int rows, int inputs, int outputs, Number *y) {
    constexpr int HALF = WIDE / 2 * LANES;
    int64_t halves = (outputs + HALF - 1) / HALF, threads = omp_get_num_threads(), thread = omp_get_thread_num();
    int64_t bands = std::clamp<int64_t>(4 * threads / halves, 1, (rows + MOST_ROWS - 1) / MOST_ROWS);
    auto compute = [&](int64_t band, int half, auto wide) {
        int first = half * HALF, count = std::min(outputs - first, wide.value * LANES);
        const Number *block = weight + int64_t(half / 2) * 2 * HALF * inputs + half % 2 * HALF * PACK<Number>;
        int64_t last = rows * (band + 1) / bands;
        for (int64_t row = rows * band / bands; row < last; row += MOST_ROWS)
            multiply_block<wide.value>(x + row * inputs, std::min<int>(last - row, MOST_ROWS), block,
                                       bias ? bias + first : nullptr, inputs, count, outputs,
                                       y + row * outputs + first);
    };
    std::integral_constant<int, WIDE / 2> narrow;
    std::integral_constant<int, WIDE> whole;
    int64_t unit = bands * halves * thread / threads, end = bands * halves * (thread + 1) / threads;
    while (unit < end) {
        int64_t band = unit / halves, half = unit % halves, stop = std::min(end - band * halves, halves);
        if (half % 2) compute(band, half++, narrow);
        for (; half + 2 <= stop; half += 2) compute(band, half, whole);
        if (half < stop) compute(band, half, narrow);
        unit = band * halves + stop;
    }
}

// silu(gate) * up, rounded after each step as transformers does.
template <class Number>
void swiglu(const Number *gate, const Number *up, int64_t size, Number *out) {
#pragma omp for
    for (int64_t i = 0; i < size; i += LANES) {
        Vector x = load(gate + i);
        Vector e = exponential(x < 0 ? x : -x);  // of -|x|
        store(out + i, x * (x < 0 ? e : all(1)) / (1 + e));
        store(out + i, load(out + i) * load(up + i));
    }
}

// ---- attention ----

// Query tokens of one sequence: `tokens` of them, from row `first` of the step, at positions from `position` on. lane:
// the sequence's row of the page table.
struct Tile {
    int64_t first, tokens, position, lane;
};

struct Attention {
    int tiles, heads, kv_heads, size, page_size, columns, window, most_rows;
    float scale;
};

void store_weights(float *to, Vector x) { store(to, x); }

#ifdef __AVX512BF16__
void store_weights(bfloat16 *to, Vector x) {  // faster than `store`; numbers below 1e-38 become 0
    __m256bh halves = _mm512_cvtneps_pbh((__m512)x);
    std::memcpy(to, &halves, sizeof halves);
}
#endif

// The memory of one thread. Keys of a block are kept as [size / PACK, BLOCK] words, and values as [BLOCK / PACK, size]
// words, of which the pool has rows already if a word is one number.
template <class Number>
struct Work {
    static constexpr int PACKED = PACK<Number>;
    int size;
    std::unique_ptr<Vector[]> memory;
    float *results, *scores, *totals, *most, *keys, *pairs;
    Number *queries;
    const void *values[BLOCK / PACKED];  // the rows of values

    Work(int rows, int size) : size(size) {
        int64_t wide = int64_t(rows) * size, block = int64_t(BLOCK) * size;
        memory.reset(new Vector[(2 * wide + 2 * block + int64_t(rows) * (BLOCK + LANES + 1)) / LANES + 1]);
        results = (float *)memory.get();
        queries = (Number *)(results + wide);
        keys = results + 2 * wide;
        pairs = keys + block;
        scores = pairs + block;
        totals = scores + int64_t(rows) * BLOCK;
        most = totals + int64_t(rows) * LANES;
    }

    // The softmax weights of a row, in the place of its scores.
    Number *weights(int row) { return (Number *)(scores + row * BLOCK); }

    // Set the keys of a block: `count` rows of memory at `rows`.
    void read_keys(const Number *const *rows, int count) {
        for (int key = 0; key < count; key += LANES)
            for (int i = 0; i < size / PACKED; i += LANES) {
                Vector tile[LANES];
                for (int row = 0; row < LANES; row++)
                    tile[row] = key + row < count ? words(rows[key + row] + i * PACKED) : Vector{};
                transpose(tile);
                for (int row = 0; row < LANES; row++) store(keys + (i + row) * BLOCK + key, tile[row]);
            }
    }

    // Set the values of a block: rows of memory at `rows`, of which those from `begin` to `end` may be read.
    void read_values(const Number *const *rows, int begin, int end) {
        if constexpr (PACKED == 1) {
            std::copy(rows + begin, rows + end, values + begin);
        } else {
            for (int key = begin & ~1; key < end; key += 2) {
                float *pair = pairs + key / 2 * size;
                for (int i = 0; i < size; i += LANES) {
                    Words first = key < begin ? Words{} : (Words)load(rows[key] + i) >> 16;
                    Words second = key + 1 < end ? (Words)load(rows[key + 1] + i) : Words{};
                    store(pair + i, (Vector)(first | second));
                }
                values[key / 2] = pair;
            }
        }
    }

    // The scores of N rows: the products of their queries and the first W * LANES keys of the block.
    template <int N, int W>
    void score(int row) {
        Vector sums[N][W] = {};
        for (int i = 0; i < size / PACKED; i++) {
            Vector key[W];
            for (int j = 0; j < W; j++) key[j] = in_register(load(keys + i * BLOCK + j * LANES));
            for (int r = 0; r < N; r++) {
                Vector query = word(queries + (row + r) * size + i * PACKED);
                for (int j = 0; j < W; j++) sums[r][j] = multiply_add<Number>(sums[r][j], query, key[j]);
            }
        }
        for (int r = 0; r < N; r++)
            for (int j = 0; j < W; j++) store(scores + (row + r) * BLOCK + j * LANES, sums[r][j]);
    }

    // The scores of N rows, none of which sees the block's keys from `end` on.
    template <int N>
    void score_all(int row, int end) {
        if (end > 3 * LANES) return score<N, 4>(row);
        if (end > 2 * LANES) return score<N, 3>(row);
        if (end > LANES) return score<N, 2>(row);
        if (end > 0) score<N, 1>(row);
    }

    // Replace the scores of a row by softmax weights, relative to the largest score so far, rounded to Number. Keys
    // before `begin` and from `end` on are hidden.
    void weigh(int row, int begin, int end, float scale) {
        float *score = scores + row * BLOCK;
        if (begin > 0) std::fill_n(score, begin, -std::numeric_limits<float>::infinity());
        if (end < BLOCK) std::fill_n(score + end, BLOCK - end, -std::numeric_limits<float>::infinity());
        Vector peak = load(score);
        for (int j = LANES; j < BLOCK; j += LANES) peak = larger(peak, load(score + j));
        peak *= scale;
        if (_mm512_cmp_ps_mask((__m512)peak, _mm512_set1_ps(most[row]), _CMP_NLE_UQ)) rescale(row, largest(peak));
        Vector total = load(totals + row * LANES);
        for (int j = 0; j < BLOCK; j += LANES) {  // a weight takes no more memory than the score
            Vector weight = power_of_2(fma(load(score + j), all(scale), all(-most[row])));
            store_weights(weights(row) + j, weight);
            total += weight;
        }
        store(totals + row * LANES, total);
    }

    // Make the weights of a row so far relative to a larger score.
    void rescale(int row, float score) {
        float factor = std::exp2(most[row] - score);
        most[row] = score;
        store(totals + row * LANES, load(totals + row * LANES) * factor);
        for (int i = 0; i < size; i += LANES) store(results + row * size + i, load(results + row * size + i) * factor);
    }

    // Add the values of the block's keys from `begin` to `end`, times their weights, to the results of N rows. Hidden
    // keys are not read, since a weight of 0 times infinity is NaN.
    template <int N, int WIDE>
    void add(int row, int column, int begin, int end) {
        Vector sums[N][WIDE];
        for (int r = 0; r < N; r++)
            for (int j = 0; j < WIDE; j++) sums[r][j] = load(results + (row + r) * size + column + j * LANES);
        for (int key = begin / PACKED; key * PACKED < end; key++) {
            Vector value[WIDE];
            for (int j = 0; j < WIDE; j++) value[j] = words((const float *)values[key] + column + j * LANES);
            if (key * PACKED + PACKED > end)  // the second number of a pair is hidden
                for (int j = 0; j < WIDE; j++) value[j] = (Vector)((Words)value[j] & 0xFFFF);
            for (int r = 0; r < N; r++) {
                Vector weight = word(weights(row + r) + key * PACKED);
                for (int j = 0; j < WIDE; j++) sums[r][j] = multiply_add<Number>(sums[r][j], weight, value[j]);
            }
        }
        for (int r = 0; r < N; r++)
            for (int j = 0; j < WIDE; j++) store(results + (row + r) * size + column + j * LANES, sums[r][j]);
    }

    template <int N>
    void add_all(int row, int begin, int end) {
        int column = 0;
        for (; column + 4 * LANES <= size; column += 4 * LANES) add<N, 4>(row, column, begin, end);
        for (; column < size; column += LANES) add<N, 1>(row, column, begin, end);
    }
};

template <class Number>
void attend_tile(const Attention &of, const Tile &tile, int kv_head, const int32_t *pages, const Number *q,
                 const Number *keys, const Number *values, Number *out, Work<Number> &work) {
    int group = of.heads / of.kv_heads, rows = tile.tokens * group, size = of.size;
    float scale = of.scale * 1.44269504f;  // weights are powers of 2
    auto of_row = [&](int row) {  // the place of a row's query and of its result
        return ((tile.first + row / group) * of.heads + kv_head * group + row % group) * size;
    };
    for (int row = 0; row < rows; row++) {
        std::copy_n(q + of_row(row), size, work.queries + row * size);
        std::fill_n(work.results + row * size, size, 0.f);
        store(work.totals + row * LANES, Vector{});
        work.most[row] = -std::numeric_limits<float>::infinity();
    }
    int64_t end = tile.position + tile.tokens, first = 0;
    if (of.window) first = std::max<int64_t>(tile.position - of.window + 1, 0) / BLOCK * BLOCK;
    for (int64_t block = first; block < end; block += BLOCK) {
        int count = std::min<int64_t>(end - block, BLOCK);
        // Keys before `begin` are hidden from all rows, and their pages may belong to another sequence by now.
        int begin = of.window ? std::max<int64_t>(tile.position - of.window + 1 - block, 0) : 0;
        const Number *keys_at[BLOCK], *values_at[BLOCK];
        int64_t column = block / of.page_size, offset = block % of.page_size;
        for (int key = 0; key < count; key++, offset++) {
            if (offset == of.page_size) column++, offset = 0;
            int64_t page = pages[tile.lane * of.columns + column];
            int64_t at = ((page * of.kv_heads + kv_head) * of.page_size + offset) * size;
            keys_at[key] = keys + at;
            values_at[key] = values + at;
        }
        work.read_keys(keys_at, count);
        work.read_values(values_at, begin, count);
        auto end_of = [&](int row) {  // of the keys that a row sees
            return std::clamp<int64_t>(tile.position + row / group + 1 - block, 0, count);
        };
        in_groups<QUERY_ROWS>(rows, [&](int row, auto n) {
            work.template score_all<n.value>(row, end_of(row + n.value - 1));
        });
        for (int row = 0; row < rows; row++) {
            int64_t oldest = of.window ? tile.position + row / group - of.window + 1 - block : 0;
            int start = std::clamp<int64_t>(oldest, 0, BLOCK), last = end_of(row);
            if (start < last)
                work.weigh(row, start, last, scale);
            else
                std::fill_n(work.scores + row * BLOCK, BLOCK, 0.f);
        }
        in_groups<QUERY_ROWS>(rows, [&](int row, auto n) {
            int least = end_of(row) / work.PACKED * work.PACKED;  // of the keys that all of them see
            work.template add_all<n.value>(row, begin, least);
            for (int each = row; each < row + n.value; each++)
                if (int end = end_of(each); end > least) work.template add_all<1>(each, std::max(begin, least), end);
        });
    }
    for (int row = 0; row < rows; row++) {
        float total = sum(load(work.totals + row * LANES));
        for (int i = 0; i < size; i += LANES) store(out + of_row(row) + i, load(work.results + row * size + i) / total);
    }
}

template <class Number>
void attend(const Attention &of, const Tile *tiles, const int32_t *pages, const Number *q, const Number *keys,
            const Number *values, Number *out) {
    Work<Number> work(of.most_rows, of.size);
#pragma omp for schedule(dynamic)
    for (int pair = 0; pair < of.tiles * of.kv_heads; pair++)
        attend_tile(of, tiles[pair / of.kv_heads], pair % of.kv_heads, pages, q, keys, values, out, work);
}

// ---- layers ----

// A linear layer with a packed weight.
struct Product {
    const void *weight, *bias;
    int inputs, outputs;
};

struct Layer {
    const void *input_norm, *post_norm, *q_norm, *k_norm;  // the latter two: null without norms of heads
    void *keys, *values;
    Product qkv, o, gate, up, down;
    int window;
};

template <class Number>
void apply(const Product &of, const Number *x, int rows, Number *y) {
    multiply(x, (const Number *)of.weight, (const Number *)of.bias, rows, of.inputs, of.outputs, y);
}

// The number of Numbers that `run_layers` needs as memory.
int64_t layer_memory(const Layer &of, const Rope &rope) {
    return int64_t(rope.tokens) *
           (2 * of.qkv.inputs + of.qkv.outputs + 2 * rope.heads * rope.size + 2 * of.gate.outputs);
}

// Run `count` layers over a residual stream x [rope.tokens, hidden], with the operations and roundings of the functions
// above, in the order of transformer.py.
template <class Number>
void run_layers(const Layer *layers, int count, const Rope &rope, Attention attention, const Tile *tiles,
                const int32_t *pages, const int64_t *positions, const int64_t *slots, const float *cos,
                const float *sin, Number *x, Number *memory) {
    const Layer &first = layers[0];
    int64_t rows = rope.tokens, hidden = first.qkv.inputs, inner = first.gate.outputs, heads = rope.heads * rope.size;
    Number *normed = memory, *sum = normed + rows * hidden, *qkv = sum + rows * hidden;
    Number *queries = qkv + rows * first.qkv.outputs, *attended = queries + rows * heads;
    Number *gate = attended + rows * heads, *up = gate + rows * inner;
    auto norm_of = [&](const void *weight, const Number *delta) {
        norm(x, delta, (const Number *)weight, rope.eps, rope.centered, rows, hidden, normed);
    };
    for (int number = 0; number < count; number++) {
        const Layer &of = layers[number];
        Number *keys = (Number *)of.keys, *values = (Number *)of.values;
        norm_of(of.input_norm, number ? sum : nullptr);
        apply(of.qkv, normed, rows, qkv);
#pragma omp barrier
        rope_write(rope, qkv, positions, slots, cos, sin, (const Number *)of.q_norm, (const Number *)of.k_norm, keys,
                   values, queries);
        attention.window = of.window;
        attend(attention, tiles, pages, queries, keys, values, attended);
        apply(of.o, attended, rows, sum);
#pragma omp barrier
        norm_of(of.post_norm, sum);
        apply(of.gate, normed, rows, gate);
        apply(of.up, normed, rows, up);
#pragma omp barrier
        swiglu(gate, up, rows * inner, gate);
        apply(of.down, gate, rows, sum);
#pragma omp barrier
    }
#pragma omp for
    for (int64_t i = 0; i < rows * hidden; i += LANES) store(x + i, load(x + i) + load(sum + i));
}

}  // namespace

extern "C" {

int threads() { return omp_get_max_threads(); }

#define TEAM(CONDITION) _Pragma(STRING(omp parallel if (CONDITION)))
#define STRING(...) #__VA_ARGS__

#define FUNCTIONS(NAME, NUMBER)                                                                                       \
    void norm_##NAME(NUMBER *x, const NUMBER *delta, const NUMBER *weight, float eps, bool centered, int rows,        \
                     int size, NUMBER *out) {                                                                         \
        TEAM(rows * size > MANY) norm(x, delta, weight, eps, centered, rows, size, out);                              \
    }                                                                                                                 \
    void rope_write_##NAME(const Rope *of, const NUMBER *qkv, const int64_t *positions, const int64_t *slots,         \
                           const float *cos, const float *sin, const NUMBER *q_norm, const NUMBER *k_norm,            \
                           NUMBER *keys, NUMBER *values, NUMBER *queries) {                                           \
        TEAM(of->tokens * (of->heads + of->kv_heads) * of->size > MANY)                                               \
        rope_write(*of, qkv, positions, slots, cos, sin, q_norm, k_norm, keys, values, queries);                      \
    }                                                                                                                 \
    void attend_##NAME(const Attention *of, const Tile *tiles, const int32_t *pages, const NUMBER *q,                 \
                       const NUMBER *keys, const NUMBER *values, NUMBER *out) {                                       \
        TEAM(of->tiles * of->kv_heads > 1) attend(*of, tiles, pages, q, keys, values, out);                           \
    }                                                                                                                 \
    void multiply_##NAME(const NUMBER *x, const NUMBER *weight, const NUMBER *bias, int rows, int inputs,             \
                         int outputs, NUMBER *y) {                                                                    \
        TEAM(true) multiply(x, weight, bias, rows, inputs, outputs, y);                                               \
    }                                                                                                                 \
    void swiglu_##NAME(const NUMBER *gate, const NUMBER *up, int64_t size, NUMBER *out) {                             \
        TEAM(size > MANY) swiglu(gate, up, size, out);                                                                \
    }                                                                                                                 \
    void run_layers_##NAME(const Layer *layers, int count, const Rope *rope, const Attention *attention,              \
                           const Tile *tiles, const int32_t *pages, const int64_t *positions, const int64_t *slots,   \
                           const float *cos, const float *sin, NUMBER *x) {                                           \
        std::unique_ptr<NUMBER[]> memory(new NUMBER[layer_memory(layers[0], *rope)]);                                 \
        TEAM(true)                                                                                                    \
        run_layers(layers, count, *rope, *attention, tiles, pages, positions, slots, cos, sin, x, memory.get());      \
    }

FUNCTIONS(float32, float)
#ifdef __AVX512BF16__
FUNCTIONS(bfloat16, bfloat16)
#endif
}
