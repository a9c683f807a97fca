/* One step of Madam on coded tensors: torchmadam.update.madam_coded_, in one pass over memory, to the last bit.

Built by compiled.py like step.c, but without fused multiply-adds, since codes are to be those of every other device.
A block of a row is taken out of its planes into integers, stepped and put back; every loop is written to be
vectorised. */

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "moment8.h"

#define BLOCK 256 /* of a row; whole bytes of every plane */
#define MOST_PLANES 4

/* What the tensors of a step share. compiled_codes.py has the same list, in the same order. */
typedef struct {
    int32_t planes, widths[MOST_PLANES];
    int32_t top;        /* the largest k; of a signed ladder, the code of zero */
    int32_t is_signed;  /* which ladder */
    int32_t signs;      /* of the paper's: 0 all positive, 1 in a plane, 2 from a seed */
    int32_t stochastic; /* rounding */
    int32_t narrow;     /* gradients are bfloat16 */
    int32_t maximize;
    float momentum, recent; /* recent = 1 - momentum */
    float returned;     /* of a rung that rounding dropped, in means */
    float beta, fresh;
    float most;         /* of u, which has the pace in it where there are means */
    float pace;         /* lr, which means have in them */
    float rate;         /* rungs for each of u */
    float pull;         /* rungs by which a weight far from zero decays */
    const float *tanhs; /* of a signed ladder: tanh of every k spacing; NULL: no decay */
} Rule;

/* One tensor, of which the same is true. */
typedef struct {
    uint8_t *planes[MOST_PLANES];
    const uint8_t *sign_plane;
    const void *grads;
    uint16_t *means; /* first moments, bfloat16; NULL: none */
    void *moments;   /* float, or codes of moment8.h; NULL: u = sign g */
    uint8_t *exponents; /* of those codes; NULL: moments are floats */
    int64_t rows, columns;
    int64_t first;     /* where in the whole parameter these begin, which may be a shard; below 2^31, as is the end */
    int64_t nonfinite; /* out: gradients that could not be used */
    float mean_correction, correction; /* 1 - momentum^t and 1 - beta^t, or 1 */
    uint32_t phase; /* of the dithers of means and moments */
    uint32_t low, high, sign_low, sign_high; /* keys of random bits */
} Codes;

static inline int64_t row_bytes(int64_t columns, int width) { return (columns * width + 7) / 8; }

/* noise._mixed */
static inline uint32_t mixed(uint32_t position, uint32_t low, uint32_t high) {
    uint32_t bits = position ^ low;
    bits = (bits ^ bits >> 16) * 0x21F0AAADu;
    return bits ^ bits >> 15 ^ high;
}

/* Adds a plane's bits below those that the codes have, and perhaps its padding's beyond the last. */
static inline __attribute__((always_inline)) void unpack_width(
    const uint8_t *restrict from, int32_t *restrict codes, int count, const int width
) {
    const int each = 8 / width;
    for (int b = 0; b < (count + each - 1) / each; b++)
        for (int i = 0; i < each; i++)
            codes[each * b + i] = codes[each * b + i] << width | (from[b] >> width * i & ((1 << width) - 1));
}

/* Codes beyond the last are zeros. */
static inline __attribute__((always_inline)) void pack_width(
    uint8_t *restrict to, const int32_t *restrict codes, int count, int shift, const int width
) {
    const int each = 8 / width;
    for (int b = 0; b < (count + each - 1) / each; b++) {
        int byte = 0;
        for (int i = 0; i < each; i++)
            byte |= (codes[each * b + i] >> shift & ((1 << width) - 1)) << width * i;
        to[b] = (uint8_t)byte;
    }
}

static inline void unpack(const uint8_t *from, int32_t *codes, int count, int width) {
    switch (width) {
    case 8: unpack_width(from, codes, count, 8); break;
    case 4: unpack_width(from, codes, count, 4); break;
    case 2: unpack_width(from, codes, count, 2); break;
    default: unpack_width(from, codes, count, 1);
    }
}

static inline void pack(uint8_t *to, const int32_t *codes, int count, int width, int shift) {
    switch (width) {
    case 8: pack_width(to, codes, count, shift, 8); break;
    case 4: pack_width(to, codes, count, shift, 4); break;
    case 2: pack_width(to, codes, count, shift, 2); break;
    default: pack_width(to, codes, count, shift, 1);
    }
}

static inline float widened(uint16_t upper) {
    uint32_t bits = (uint32_t)upper << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

/* mean.Mean */
static inline uint16_t narrowed(float x, uint32_t position, uint32_t phase) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (uint16_t)((bits + ((position * 0xC2B2AE35u + phase) >> 16)) >> 16);
}

/* u in rungs, and 1 where a gradient can be used. Returns how many cannot. Means, of steps, are not stored yet;
usual is what a gradient's size usually is. */
static inline int directions(
    const Rule *r, const Codes *t, float *restrict moments, int64_t at, int count, float *restrict u,
    int32_t *restrict usable, float *restrict new_means, float *restrict usual
) {
    float g[BLOCK], square[BLOCK];
    int bad = 0;
    if (r->narrow) {
        const uint16_t *from = (const uint16_t *)t->grads + at;
        for (int j = 0; j < count; j++)
            g[j] = widened(from[j]);
    } else
        memcpy(g, (const float *)t->grads + at, (size_t)count * 4);
    float sign = r->maximize ? -1.0f : 1.0f;
    for (int j = 0; j < count; j++) {
        g[j] *= sign;
        square[j] = g[j] * g[j];
        usable[j] = square[j] <= 0x1p126f; /* moment.LARGEST */
        bad += !usable[j];
    }
    float most = r->most;
    if (t->means) { /* from here on g is the mean, and has the pace in it */
        const uint16_t *restrict means = t->means + at;
        float share = r->pace * r->recent;
        for (int j = 0; j < count; j++) {
            float mean = widened(means[j]);
            float folded = mean * r->momentum + g[j] * share;
            new_means[j] = usable[j] ? folded : mean;
            g[j] = new_means[j] / t->mean_correction;
        }
    }
    if (!moments) {
        for (int j = 0; j < count; j++)
            u[j] = (g[j] > 0.0f ? 1.0f : g[j] < 0.0f ? -1.0f : 0.0f) * r->pace * r->rate;
        return bad;
    }
    for (int j = 0; j < count; j++) {
        float v = moments[j];
        float folded = v * r->beta + square[j] * r->fresh;
        v = usable[j] ? folded : v;
        moments[j] = v;
        usual[j] = sqrtf(v / t->correction);
        float x = g[j] / usual[j];
        x = fabsf(x) <= 0x1.fffffep127f ? x : 0.0f; /* neither infinite nor not a number */
        x = x > most ? most : x;
        u[j] = (x < -most ? -most : x) * r->rate;
    }
    return bad;
}

/* noise.shared_bits as numbers from 0 to 1 in 24 bits. */
static inline void dither(const Codes *t, int64_t at, int count, float *restrict between) {
    uint32_t place = (uint32_t)(t->first + at), eighth = place >> 3, begin = place & 7;
    for (int j = 0; j < count; j++) {
        uint32_t next = begin + (uint32_t)j;
        uint32_t bits = mixed(eighth + (next >> 3), t->low, t->high) * ((next & 7) * 0xF6FD7916u + 0xA7E4D12Du);
        between[j] = (float)(int32_t)(bits >> 8) * 0x1p-24f;
    }
}

/* A part of a row that begins with a byte of every plane, and its moments; NULL: none. */
static inline void step_block(const Rule *r, Codes *t, float *moments, int64_t row, int64_t column, int count) {
    int64_t at = row * t->columns + column;
    float u[BLOCK], move[BLOCK], new_means[BLOCK], usual[BLOCK];
    int32_t old[BLOCK] = {0}, codes[BLOCK] = {0}, negative[BLOCK] = {0}, usable[BLOCK];
    int bad = directions(r, t, moments, at, count, u, usable, new_means, usual);

    uint8_t *places[MOST_PLANES];
    for (int p = 0; p < r->planes; p++) {
        places[p] = t->planes[p] + row * row_bytes(t->columns, r->widths[p]) + column * r->widths[p] / 8;
        unpack(places[p], old, count, r->widths[p]);
    }
    if (r->is_signed) {
        for (int j = 0; j < count; j++)
            move[j] = -u[j];
        if (r->tanhs)
            for (int j = 0; j < count; j++)
                move[j] -= r->tanhs[old[j]] * r->pull;
    } else {
        if (r->signs == 1)
            unpack(t->sign_plane + row * row_bytes(t->columns, 1) + column / 8, negative, count, 1);
        else if (r->signs == 2)
            for (int j = 0; j < count; j++) {
                uint32_t bits = mixed((uint32_t)(t->first + at) + (uint32_t)j, t->sign_low, t->sign_high) * 0xD35A2D97u;
                negative[j] = (int32_t)(bits >> 31);
            }
        for (int j = 0; j < count; j++)
            move[j] = u[j] * (float)(1 - 2 * negative[j]) + r->pull;
    }
    if (r->stochastic) {
        float between[BLOCK];
        dither(t, at, count, between);
        if (t->means && moments) { /* what rounding drops comes with the steps to come */
            float returned = t->mean_correction * r->returned;
            for (int j = 0; j < count; j++) {
                float dropped = move[j] - floorf(move[j] + between[j]);
                dropped = r->is_signed || negative[j] ? -dropped : dropped;
                float back = dropped * (usual[j] * returned);
                float sum = new_means[j] + (fabsf(back) <= FLT_MAX ? back : 0.0f);
                new_means[j] = usable[j] ? sum : new_means[j];
            }
        }
        for (int j = 0; j < count; j++)
            move[j] = floorf(move[j] + between[j]);
    } else
        for (int j = 0; j < count; j++)
            move[j] = rintf(move[j]);
    float low = 0.0f, high = (float)(r->is_signed ? 2 * r->top : r->top);
    for (int j = 0; j < count; j++) {
        float k = (float)old[j] + move[j];
        k = k < low ? low : k;
        k = k > high ? high : k;
        codes[j] = usable[j] ? (int32_t)k : old[j];
    }

    if (t->means) {
        uint16_t *restrict means = t->means + at;
        for (int j = 0; j < count; j++)
            means[j] = narrowed(new_means[j], (uint32_t)(t->first + at) + (uint32_t)j, t->phase);
    }
    int shift = 0;
    for (int p = r->planes - 1; p >= 0; shift += r->widths[p--])
        pack(places[p], codes, count, r->widths[p], shift);
    if (bad) {
#ifdef _OPENMP
#pragma omp atomic
#endif
        t->nonfinite += bad;
    }
}

static inline int least(int64_t a, int64_t b) { return (int)(a < b ? a : b); }

/* Moments in a byte go by groups, in rows that are filled up to multiples of 8: parts of several rows, perhaps. */
static void step_group(const Rule *r, Codes *t, int64_t group) {
    int64_t wide = (t->columns + 7) / 8 * 8, begin = group * GROUP, size = least(GROUP, t->rows * wide - begin);
    uint8_t *codes = t->moments, exponent = t->exponents[group];
    float values[GROUP] = {0};
    for (int64_t n = 0, row, column; n < size; n += wide - column) {
        row = (begin + n) / wide, column = (begin + n) % wide;
        int count = least(t->columns - column, size - n);
        decode_moments(codes + row * t->columns + column, exponent, count, values + n);
        step_block(r, t, values + n, row, column, count);
    }
    t->exponents[group] = exponent = exponent_of(values, (int)size);
    for (int64_t n = 0, row, column; n < size; n += wide - column) {
        row = (begin + n) / wide, column = (begin + n) % wide;
        int64_t at = row * t->columns + column;
        int count = least(t->columns - column, size - n);
        encode_moments(values + n, exponent, count, (uint32_t)(t->first + at), t->phase, codes + at);
    }
}

static void step_floats(const Rule *r, Codes *t, int64_t row, int64_t column) {
    float *moments = t->moments ? (float *)t->moments + row * t->columns + column : 0;
    step_block(r, t, moments, row, column, least(t->columns - column, BLOCK));
}

void madam_coded_step(const Rule *rule, Codes *tensors, int64_t count, int threads) {
#ifdef _OPENMP
#pragma omp parallel num_threads(threads)
#endif
    for (int64_t i = 0; i < count; i++) {
        Codes *t = &tensors[i];
        int64_t blocks = (t->columns + BLOCK - 1) / BLOCK, wide = (t->columns + 7) / 8 * 8;
        int64_t parts = t->exponents ? (t->rows * wide + GROUP - 1) / GROUP : t->rows * blocks;
#ifdef _OPENMP
#pragma omp for schedule(static) nowait
#endif
        for (int64_t n = 0; n < parts; n++)
            if (t->exponents)
                step_group(rule, t, n);
            else
                step_floats(rule, t, n / blocks, n % blocks * BLOCK);
    }
}
