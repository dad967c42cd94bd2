// Kernels for CPUs with AVX-512, compiled for the processor that runs them (see library.py).
//
// The bits of a row of a result depend only on the data of that row: not on the other rows, their number, the tiles
// that they are computed in, or the number of threads. So each row goes through the same instructions in the same
// order, in vectors of 16 numbers, and no sum is divided among threads. Sums are in float32.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif
#include <omp.h>

namespace {

constexpr int LANES = 16;
constexpr int BLOCK = 64;        // keys of a block, whose softmax weights are computed together
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

Vector all(float x) { return Vector{} + x; }

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
    Vector shifted = x * 1.44269504f + round, n = shifted - round;
    Vector r = x - n * 0.693359375f + n * 2.12194440e-4f;
    Vector y = all(1.9875691500e-4f) * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * (r * r) + r + 1.f;
    Words power = ((Words)shifted - (Words)round + 127) << 23;
    return x < -87.f ? Vector{} : y * (Vector)power;
}

constexpr int TOGETHER = 4;  // rows whose products are computed together

// Call a function for groups of at most TOGETHER rows, with the first row and their number.
template <class Function>
void in_groups(int rows, Function call) {
    int row = 0;
    for (; row + TOGETHER <= rows; row += TOGETHER) call(row, std::integral_constant<int, TOGETHER>());
    if (row + 2 <= rows) call(row, std::integral_constant<int, 2>()), row += 2;
    if (row < rows) call(row, std::integral_constant<int, 1>());
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
        squares += each * each;
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
#pragma omp parallel for if (rows * size > MANY)
    for (int row = 0; row < rows; row++) {
        int64_t at = int64_t(row) * size;
        norm_row(x + at, delta ? delta + at : nullptr, weight, eps, centered, size, out + at);
    }
}

// ---- rope ----

template <class Number, class Stored>
void copy(const Number *x, int size, Stored *out) {
    for (int i = 0; i < size; i += LANES) store(out + i, load(x + i));
}

// Turn the first 2 * half numbers of a head, rounded to Number, and copy the others. cos, sin: [half].
template <class Number, class Stored>
void turn(const Number *x, const float *cos, const float *sin, int half, int size, Stored *out) {
    Number turned[2 * LANES];
    for (int i = 0; i < half; i += LANES) {
        Vector a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
        store(turned, a * c - b * s);
        store(turned + LANES, b * c + a * s);
        copy(turned, LANES, out + i);
        copy(turned + LANES, LANES, out + half + i);
    }
    copy(x + 2 * half, size - 2 * half, out + 2 * half);
}

struct Rope {
    int tokens, real, heads, kv_heads, size, half, page_size, centered;
    float eps;
};

template <class Number>
void rope_write(const Rope &of, const Number *qkv, const int64_t *positions, const int64_t *slots, const float *cos,
                const float *sin, const Number *q_norm, const Number *k_norm, float *keys, float *values,
                Number *queries) {
    int all_heads = of.heads + 2 * of.kv_heads;
#pragma omp parallel for if (of.tokens * all_heads * of.size > MANY)
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

// ---- products of few rows ----
//
// oneDNN keeps a weight [outputs, inputs] in blocks of 64 outputs, each as [inputs, 64], or in bfloat16 as
// [inputs / 2, 64, 2]. It adds the products of `chunk` inputs in their order, then the sums of the chunks, and so do
// these functions.

constexpr int WIDE = 4;  // vectors of a block of outputs

template <int N>
void add_products(const float *x, const float *weight, int inputs, int begin, int end, Vector (&sums)[N][WIDE]) {
    for (int i = begin; i < end; i++) {
        Vector each[WIDE];
        for (int j = 0; j < WIDE; j++) each[j] = load(weight + (i * WIDE + j) * LANES);
        for (int row = 0; row < N; row++)
            for (int j = 0; j < WIDE; j++) sums[row][j] += x[row * inputs + i] * each[j];
    }
}

#ifdef __AVX512BF16__
template <int N>
void add_products(const bfloat16 *x, const bfloat16 *weight, int inputs, int begin, int end,
                  Vector (&sums)[N][WIDE]) {
    for (int i = begin; i < end; i += 2) {
        __m512bh each[WIDE];
        for (int j = 0; j < WIDE; j++) each[j] = (__m512bh)_mm512_loadu_si512(weight + (i * WIDE + 2 * j) * LANES);
        for (int row = 0; row < N; row++) {
            int32_t bits;
            std::memcpy(&bits, x + row * inputs + i, sizeof bits);
            __m512bh pair = (__m512bh)_mm512_set1_epi32(bits);
            for (int j = 0; j < WIDE; j++)
                sums[row][j] = (Vector)_mm512_dpbf16_ps((__m512)sums[row][j], pair, each[j]);
        }
    }
}
#endif

// The products of x [rows, inputs] and a block of outputs, of which the first `count` are real. bias: may be null.
template <int N, class Number>
void multiply_block(const Number *x, const Number *block, const Number *bias, int inputs, int chunk, int count,
                    int outputs, Number *y) {
    Vector totals[N][WIDE] = {};
    for (int begin = 0; begin < inputs; begin += chunk) {
        Vector sums[N][WIDE] = {};
        add_products<N>(x, block, inputs, begin, std::min(begin + chunk, inputs), sums);
        for (int row = 0; row < N; row++)
            for (int j = 0; j < WIDE; j++) totals[row][j] = begin ? totals[row][j] + sums[row][j] : sums[row][j];
    }
    Number added[WIDE * LANES] = {}, found[WIDE * LANES];
    if (bias) std::copy_n(bias, count, added);
    for (int row = 0; row < N; row++) {
        for (int j = 0; j < WIDE; j++)
            store(found + j * LANES, bias ? totals[row][j] + load(added + j * LANES) : totals[row][j]);
        std::copy_n(found, count, y + int64_t(row) * outputs);
    }
}

template <class Number>
void multiply(const Number *x, const Number *weight, const Number *bias, int rows, int inputs, int outputs, int chunk,
              Number *y) {
#pragma omp parallel for
    for (int first = 0; first < outputs; first += WIDE * LANES) {
        in_groups(rows, [&](int row, auto n) {
            multiply_block<n.value>(x + int64_t(row) * inputs, weight + int64_t(first) * inputs,
                                    bias ? bias + first : nullptr, inputs, chunk,
                                    std::min(outputs - first, WIDE * LANES), outputs,
                                    y + int64_t(row) * outputs + first);
        });
    }
}

// silu(gate) * up, rounded after each step as transformers does.
template <class Number>
void swiglu(const Number *gate, const Number *up, int64_t size, Number *out) {
#pragma omp parallel for if (size > MANY)
    for (int64_t i = 0; i < size; i += LANES) {
        Vector x = load(gate + i);
        Vector e = exponential(x < 0 ? x : -x);  // of -|x|
        store(out + i, x * (x < 0 ? e : Vector{} + 1) / (1 + e));
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

// The memory of one thread.
struct Work {
    int size;
    std::vector<Vector> memory;  // begins at a multiple of a vector's size
    float *queries, *results, *keys, *weights, *most, *total;
    const float *values[BLOCK];

    Work(int rows, int size) : size(size) {
        int64_t wide = int64_t(rows) * size, block = int64_t(BLOCK) * size;
        memory.resize((2 * wide + block + int64_t(rows) * BLOCK + 2 * rows) / LANES + 1);
        queries = (float *)memory.data();
        results = queries + wide;
        keys = results + wide;
        weights = keys + block;
        most = weights + int64_t(rows) * BLOCK;
        total = most + rows;
    }

    // Set the keys and values of a block: `count` rows of memory at keys_at and values_at.
    void read(const float *const *keys_at, int count) {
        for (int key = 0; key < count; key += LANES)
            for (int i = 0; i < size; i += LANES) {
                Vector tile[LANES];
                for (int row = 0; row < LANES; row++)
                    tile[row] = key + row < count ? load(keys_at[key + row] + i) : Vector{};
                transpose(tile);
                for (int row = 0; row < LANES; row++) store(keys + (i + row) * BLOCK + key, tile[row]);
            }
    }

    // The scores of N rows: the products of their queries and the block's keys, which are stored as [size, BLOCK].
    template <int N>
    void score(int row) {
        Vector sums[N][BLOCK / LANES] = {};
        for (int i = 0; i < size; i++) {
            Vector key[BLOCK / LANES];
            for (int j = 0; j < BLOCK / LANES; j++) key[j] = load(keys + i * BLOCK + j * LANES);
            for (int r = 0; r < N; r++)
                for (int j = 0; j < BLOCK / LANES; j++) sums[r][j] += queries[(row + r) * size + i] * key[j];
        }
        for (int r = 0; r < N; r++)
            for (int j = 0; j < BLOCK / LANES; j++) store(weights + (row + r) * BLOCK + j * LANES, sums[r][j]);
    }

    // Replace the scores of a row by softmax weights, relative to the largest score so far. Keys before `begin` and
    // from `end` on are hidden.
    void weigh(int row, int begin, int end) {
        float *scores = weights + row * BLOCK, before = most[row];
        std::fill_n(scores, begin, -std::numeric_limits<float>::infinity());
        std::fill_n(scores + end, BLOCK - end, -std::numeric_limits<float>::infinity());
        Vector peak = load(scores);
        for (int j = LANES; j < BLOCK; j += LANES) peak = larger(peak, load(scores + j));
        most[row] = std::max(before, largest(peak));
        Vector sums{};
        for (int j = 0; j < BLOCK; j += LANES) {
            Vector weight = exponential(load(scores + j) - most[row]);
            store(scores + j, weight);
            sums += weight;
        }
        float factor = before == most[row] ? 1 : std::exp(before - most[row]);
        total[row] = total[row] * factor + sum(sums);
        for (int i = 0; i < size; i += LANES) store(results + row * size + i, load(results + row * size + i) * factor);
    }

    // Add the values of the block's keys from `begin` to `end`, times their weights, to the results of N rows.
    template <int N, int WIDE>
    void add(int row, int column, int begin, int end) {
        Vector sums[N][WIDE];
        for (int r = 0; r < N; r++)
            for (int j = 0; j < WIDE; j++) sums[r][j] = load(results + (row + r) * size + column + j * LANES);
        for (int key = begin; key < end; key++) {
            Vector value[WIDE];
            for (int j = 0; j < WIDE; j++) value[j] = load(values[key] + column + j * LANES);
            for (int r = 0; r < N; r++)
                for (int j = 0; j < WIDE; j++) sums[r][j] += weights[(row + r) * BLOCK + key] * value[j];
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
                 const float *keys, const float *values, Number *out, Work &work) {
    int group = of.heads / of.kv_heads, rows = tile.tokens * group, size = of.size;
    auto of_row = [&](int row) {  // the place of a row's query and of its result
        return ((tile.first + row / group) * of.heads + kv_head * group + row % group) * size;
    };
    for (int row = 0; row < rows; row++) {
        for (int i = 0; i < size; i += LANES) {
            store(work.queries + row * size + i, load(q + of_row(row) + i) * of.scale);
            store(work.results + row * size + i, Vector{});
        }
        work.most[row] = -std::numeric_limits<float>::infinity();
        work.total[row] = 0;
    }
    int64_t end = tile.position + tile.tokens, first = 0;
    if (of.window) first = std::max<int64_t>(tile.position - of.window + 1, 0) / BLOCK * BLOCK;
    for (int64_t block = first; block < end; block += BLOCK) {
        int count = std::min<int64_t>(end - block, BLOCK);
        // Keys before `begin` are hidden from all rows, and their pages may belong to another sequence by now.
        int begin = of.window ? std::max<int64_t>(tile.position - of.window + 1 - block, 0) : 0;
        const float *keys_at[BLOCK];
        int64_t column = block / of.page_size, offset = block % of.page_size;
        for (int key = 0; key < count; key++, offset++) {
            if (offset == of.page_size) column++, offset = 0;
            int64_t page = pages[tile.lane * of.columns + column];
            int64_t at = ((page * of.kv_heads + kv_head) * of.page_size + offset) * size;
            keys_at[key] = keys + at;
            work.values[key] = values + at;
        }
        work.read(keys_at, count);
        in_groups(rows, [&](int row, auto n) { work.score<n.value>(row); });
        for (int row = 0; row < rows; row++) {
            int64_t position = tile.position + row / group;
            int64_t oldest = of.window ? position - of.window + 1 - block : 0;
            int start = std::clamp<int64_t>(oldest, 0, BLOCK);
            int last = std::clamp<int64_t>(position + 1 - block, 0, count);
            if (start < last)
                work.weigh(row, start, last);
            else
                std::fill_n(work.weights + row * BLOCK, BLOCK, 0.f);
        }
        in_groups(rows, [&](int row, auto n) { work.add_all<n.value>(row, begin, count); });
    }
    for (int row = 0; row < rows; row++)
        for (int i = 0; i < size; i += LANES)
            store(out + of_row(row) + i, load(work.results + row * size + i) / work.total[row]);
}

template <class Number>
void attend(const Attention &of, const Tile *tiles, const int32_t *pages, const Number *q, const float *keys,
            const float *values, Number *out) {
    int pairs = of.tiles * of.kv_heads;
#pragma omp parallel if (pairs > 1)
    {
        Work work(of.most_rows, of.size);
#pragma omp for schedule(dynamic)
        for (int pair = 0; pair < pairs; pair++)
            attend_tile(of, tiles[pair / of.kv_heads], pair % of.kv_heads, pages, q, keys, values, out, work);
    }
}

}  // namespace

extern "C" {

int threads() { return omp_get_max_threads(); }

#define FUNCTIONS(NAME, NUMBER)                                                                                       \
    void norm_##NAME(NUMBER *x, const NUMBER *delta, const NUMBER *weight, float eps, bool centered, int rows,        \
                     int size, NUMBER *out) {                                                                         \
        norm(x, delta, weight, eps, centered, rows, size, out);                                                       \
    }                                                                                                                 \
    void rope_write_##NAME(const Rope *of, const NUMBER *qkv, const int64_t *positions, const int64_t *slots,         \
                           const float *cos, const float *sin, const NUMBER *q_norm, const NUMBER *k_norm,            \
                           float *keys, float *values, NUMBER *queries) {                                             \
        rope_write(*of, qkv, positions, slots, cos, sin, q_norm, k_norm, keys, values, queries);                      \
    }                                                                                                                 \
    void attend_##NAME(const Attention *of, const Tile *tiles, const int32_t *pages, const NUMBER *q,                 \
                       const float *keys, const float *values, NUMBER *out) {                                         \
        attend(*of, tiles, pages, q, keys, values, out);                                                              \
    }

#define PRODUCTS(NAME, NUMBER)                                                                                        \
    void multiply_##NAME(const NUMBER *x, const NUMBER *weight, const NUMBER *bias, int rows, int inputs, int outputs, \
                         int chunk, NUMBER *y) {                                                                      \
        multiply(x, weight, bias, rows, inputs, outputs, chunk, y);                                                   \
    }                                                                                                                 \
    void swiglu_##NAME(const NUMBER *gate, const NUMBER *up, int64_t size, NUMBER *out) {                             \
        swiglu(gate, up, size, out);                                                                                  \
    }

PRODUCTS(float32, float)
#ifdef __AVX512BF16__
PRODUCTS(bfloat16, bfloat16)
#endif
FUNCTIONS(float32, float)
FUNCTIONS(bfloat16, bfloat16)
}
