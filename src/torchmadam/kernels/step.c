/* One step of Madam on dense float tensors: torchmadam.update.madam_, in one pass over memory.

Built by compiled.py with the compiler of the machine that it runs on, and written to be vectorised by it: no branch
and no call in a loop over weights. Where update.py rounds after every operation, this does not, so the last place of a
weight may differ. Infinities and NaNs are told apart from numbers: never build it with -ffast-math. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "moment8.h"
#ifdef _OPENMP
#include <omp.h>
#endif

/* One tensor. compiled.py has the same list, in the same order. */
typedef struct {
    void *weights;
    const void *grads;
    uint16_t *means; /* first moments, bfloat16; NULL: none */
    void *moments;   /* float, or codes of moment8.h; NULL: u = sign g */
    uint8_t *exponents; /* of those codes; NULL: moments are floats */
    int64_t count;
    int64_t first;     /* where in the whole parameter these begin, which may be a shard */
    int64_t nonfinite; /* out: gradients that could not be used */
    float momentum, recent; /* recent = 1 - momentum, with the sign of maximize */
    float beta, fresh;      /* fresh = 1 - beta */
    float rate;        /* lr sqrt(1 - beta^t) / (1 - momentum^t), with the sign of maximize unless the mean has it */
    float top;         /* the longest step in log space */
    float factor;      /* exp(-lr weight_decay) */
    float width;       /* beta_w, the zone around zero where steps are additive; 0: signs are frozen */
    float least, most; /* sizes of weights */
    uint32_t phase;    /* of the dithers of means and moments */
    uint32_t low, high; /* the key of the random bits */
} Tensor;

enum { FLOAT32, BFLOAT16_NEAREST, BFLOAT16_STOCHASTIC };

static inline float as_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static inline uint32_t as_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

/* noise.random_bits */
static inline uint32_t random_bits(uint64_t position, uint32_t low, uint32_t high) {
    uint32_t bits = (uint32_t)position ^ low;
    bits = (bits ^ bits >> 16) * 0x21F0AAADu;
    bits = (bits ^ bits >> 15 ^ high ^ (uint32_t)(position >> 32)) * 0xD35A2D97u;
    return bits ^ bits >> 15;
}

/* For |x| <= 80, to a unit in the last place: 2^n times a polynomial (S. Moshier's, of the Cephes library). */
static inline float exponential(float x) {
    const float shift = 12582912.0f; /* 1.5 x 2^23 leaves no room for a fraction */
    float n = (x * 1.44269504088896341f + shift) - shift;
    float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    return (p * r * r + r + 1.0f) * as_float((uint32_t)((int32_t)n + 127) << 23);
}

static inline float load(const void *from, int64_t i, int kind) {
    return kind == FLOAT32 ? ((const float *)from)[i] : as_float((uint32_t)((const uint16_t *)from)[i] << 16);
}

static inline void store(void *to, int64_t i, float x, int kind, int64_t first, uint32_t low, uint32_t high) {
    if (kind == FLOAT32) {
        ((float *)to)[i] = x;
        return;
    }
    uint32_t bits = as_bits(x);
    uint32_t more = kind == BFLOAT16_STOCHASTIC ? random_bits((uint64_t)(first + i), low, high) & 0xFFFFu
                                                : 0x7FFFu + (bits >> 16 & 1u);
    ((uint16_t *)to)[i] = (uint16_t)((x == x ? bits + more : bits) >> 16);
}

/* The elements from first to last, with their moments. kind, means, folds, crosses and gentle are constants wherever this
is inlined. */
static inline __attribute__((always_inline)) void step_range(
    Tensor *all, float *restrict moments, int64_t first, int64_t last, int kind, int means, int folds, int crosses,
    int gentle
) {
    const Tensor t = *all;
    int32_t bad = 0;
    for (int64_t i = first; i < last; i++) {
        float w = load(t.weights, i, kind);
        float g = load(t.grads, i, kind);
        float square = g * g;
        int usable = square <= 0x1p126f; /* moment.LARGEST */
        if (means) {
            float mean = load(t.means, i, BFLOAT16_NEAREST);
            g = usable ? mean * t.momentum + g * t.recent : mean;
            /* mean.Mean */
            t.means[i] = (uint16_t)((as_bits(g) + (((uint32_t)(t.first + i) * 0xC2B2AE35u + t.phase) >> 16)) >> 16);
        }

        float a;
        if (folds) {
            float v = moments[i - first];
            v = usable ? v * t.beta + square * t.fresh : v;
            moments[i - first] = v;
            a = g * t.rate / sqrtf(v);
            a = v > 0.0f ? a : 0.0f;
            a = a > t.top ? t.top : a;
            a = a < -t.top ? -t.top : a;
        } else {
            float up = t.rate < 0.0f ? -t.top : t.top;
            a = g > 0.0f ? up : g < 0.0f ? -up : 0.0f;
        }
        a = usable ? a : 0.0f;

        float moved;
        float s = a * a;
        float x = fabsf(w) / t.width; /* not used, and not computed, where signs are frozen */
        if (gentle) {
            /* w cosh a - sqrt(w^2 + width^2) sinh a, the same rule; no digits are lost at these a. */
            float ca = 1.0f + s * (1 / 2.0f + s * (1 / 24.0f + s * (1 / 720.0f + s * (1 / 40320.0f))));
            float sa = a * (1.0f + s * (1 / 6.0f + s * (1 / 120.0f + s * (1 / 5040.0f))));
            moved = w * ca - (crosses && x < 1e9f ? t.width * sqrtf(1.0f + x * x) : fabsf(w)) * sa;
        } else {
            float sign = copysignf(1.0f, w);
            float grown = exponential(-a * sign);
            moved = w * grown;
            if (crosses) {
                float near = a * (1.0f + s / 6.0f * (1.0f + s / 20.0f * (1.0f + s / 42.0f)));
                float far = 0.5f * sign * (1.0f / grown - grown);
                moved -= t.width / (sqrtf(1.0f + x * x) + x) * (fabsf(a) < 0.7f ? near : far);
            }
        }
        moved *= t.factor;

        float size = fabsf(moved);
        size = size > t.most ? t.most : size;
        if (!crosses)
            size = size < t.least ? t.least : size;
        float within = copysignf(size, crosses ? moved : w);
        store(t.weights, i, usable & (moved != w) ? within : w, kind, t.first, t.low, t.high);
        bad += !usable;
    }
    if (bad) {
#ifdef _OPENMP
#pragma omp atomic
#endif
        all->nonfinite += bad;
    }
}

static void step_floats(Tensor *t, float *moments, int64_t first, int64_t last, int kind) {
    int which = (t->means != 0) * 8 + (moments != 0) * 4 + (t->width > 0.0f) * 2 + (t->top <= 0.5f);
#define CASE(KIND, WHICH)                                                             \
    if (kind == KIND && which == (WHICH))                                             \
        step_range(t, moments, first, last, KIND, (WHICH) / 8, (WHICH) / 4 % 2, (WHICH) / 2 % 2, (WHICH) % 2);
#define EIGHT(KIND, FROM)                                                                    \
    CASE(KIND, FROM) CASE(KIND, FROM + 1) CASE(KIND, FROM + 2) CASE(KIND, FROM + 3)          \
    CASE(KIND, FROM + 4) CASE(KIND, FROM + 5) CASE(KIND, FROM + 6) CASE(KIND, FROM + 7)
#define CASES(KIND) EIGHT(KIND, 0) EIGHT(KIND, 8)
    CASES(FLOAT32)
    CASES(BFLOAT16_NEAREST)
    CASES(BFLOAT16_STOCHASTIC)
}

/* With moments in a byte: groups, of which the last 1 to 3 weights are one of their own. */
static void step_groups(Tensor *t, int64_t first, int64_t last, int kind) {
    int64_t whole = t->count / 4 * 4;
    for (int64_t at = first, end; at < last; at = end) {
        end = at < whole ? at + GROUP < whole ? at + GROUP : whole : t->count;
        uint8_t *codes = (uint8_t *)t->moments + at, *exponent = t->exponents + (at + GROUP - 1) / GROUP;
        float values[GROUP];
        int count = (int)(end - at);
        decode_moments(codes, *exponent, count, values);
        step_floats(t, values, at, end, kind);
        *exponent = exponent_of(values, count);
        encode_moments(values, *exponent, count, (uint32_t)(t->first + at), t->phase, codes);
    }
}

static void step_part(Tensor *t, int64_t first, int64_t last, int kind) {
    if (t->exponents)
        step_groups(t, first, last, kind);
    else
        step_floats(t, t->moments ? (float *)t->moments + first : 0, first, last, kind);
}

/* Where in a tensor a share of all weights ends and the next begins: at the end of a group, or at the tensor's. So no
two threads write to one line of a cache, and vectors are the same ones whatever else is stepped with a tensor. */
static int64_t cut(int64_t place, int64_t count) {
    return place <= 0 ? 0 : place < count ? place / GROUP * GROUP : count;
}

/* Every thread takes an equal share of all weights, and so perhaps of several tensors. */
static void step_share(Tensor *tensors, int64_t count, int64_t begin, int64_t end, int kind) {
    for (int64_t i = 0, at = 0; i < count; at += tensors[i++].count) {
        int64_t first = cut(begin - at, tensors[i].count), last = cut(end - at, tensors[i].count);
        if (first < last)
            step_part(&tensors[i], first, last, kind);
    }
}

void madam_step(Tensor *tensors, int64_t count, int kind, int threads) {
    int64_t total = 0;
    for (int64_t i = 0; i < count; i++)
        total += tensors[i].count;
#ifdef _OPENMP
#pragma omp parallel num_threads(threads)
    {
        int64_t all = omp_get_num_threads(), own = omp_get_thread_num();
        int64_t share = total / all + 1;
        step_share(tensors, count, own * share, (own + 1) * share < total ? (own + 1) * share : total, kind);
    }
#else
    step_share(tensors, count, 0, total, kind);
#endif
}
