/* The second moment in a byte a weight, torchmadam.moment8, a group at a time. Integers only, so to the last bit. */

#include <stdint.h>
#include <string.h>

#define GROUP 128

/* What codes of one group stand for. */
static inline void decode_moments(const uint8_t *restrict codes, uint8_t exponent, int count, float *restrict values) {
    for (int j = 0; j < count; j++) {
        uint32_t bits = ((uint32_t)exponent << 23) + (uint32_t)((uint64_t)codes[j] * 429496730u >> 8);
        memcpy(&values[j], &bits, 4);
    }
}

/* That of a group with these moments. */
static inline uint8_t exponent_of(const float *restrict values, int count) {
    int32_t most = 0;
    for (int j = 0; j < count; j++) {
        int32_t bits;
        memcpy(&bits, &values[j], 4);
        most = bits > most ? bits : most;
    }
    return (uint8_t)((most >> 23) > 50 ? (most >> 23) - 50 : 0);
}

/* Some of a group's moments, of which the first lies at ``place`` in its parameter. */
static inline void encode_moments(
    const float *restrict values, uint8_t exponent, int count, uint32_t place, uint32_t phase, uint8_t *restrict codes
) {
    int32_t below = ((int32_t)exponent << 23) - 52;
    for (int j = 0; j < count; j++) {
        int32_t bits;
        memcpy(&bits, &values[j], 4);
        uint32_t above = (uint32_t)(bits > below ? bits - below : 0);
        uint32_t turned = (place + (uint32_t)j) * 0x85EBCA6Bu + phase;
        uint32_t dither = (uint32_t)((uint64_t)turned * ((1u << 24) - (1u << 10)) >> 32);
        codes[j] = (uint8_t)((above * 10u + dither) >> 24); /* the sum is below 2^32: 51 octaves of 5 rungs are 255 */
    }
}
