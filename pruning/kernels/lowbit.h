/* What every instruction set shares: the job, the number formats, and the plain-C products of single rows. */

#ifndef PODA_LOWBIT_H
#define PODA_LOWBIT_H

#include <stdint.h>
#include <string.h>

enum { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

/* Weights that the vector paths read of a row at once from 4-bit codes: 16 bytes. */
enum { CHUNK = 32 };

/* Rows that are multiplied by all tokens before the next ones are read, so that their codes stay in the first cache. */
enum { BLOCK = 8 };
enum { AHEAD = 4096 };




/*
 * y (tokens, rows) = x (tokens, columns) times (codes * scale) transposed.
 *
 * x is float; 4-bit vector paths find each whole CHUNK of a group in the order in which they unpack it. Codes are int8
 * (rows, columns) with scale (rows,), or two to a byte (rows, columns / 2), the even column in the low half, with scale
 * (rows, columns / group). scale and y are of the format `dtype`. All are contiguous.
 */
typedef struct {
    const float *x;
    const uint8_t *codes;
    const void *scale;
    void *y;
    int64_t tokens, rows, columns, group;
    int dtype;
} Job;

/* Multiplies the rows from `first` up to, without, `last`; `scratch` holds BLOCK * columns / group floats. */
typedef void Rows(const Job *job, int64_t first, int64_t last, float *scratch);

static inline float float_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t bits_of_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float float_of_half(uint16_t half) {
    uint32_t bits = (uint32_t)(half & 0x7fff) << 13;
    /* Moves the exponent's bias from 15 to 127, and makes normal numbers of subnormal ones. */
    uint32_t magnitude = bits_of_float(float_of_bits(bits) * 0x1p112f);
    if (bits >= 0x0f800000) magnitude = bits | 0x7f800000; /* infinity or not a number */
    return float_of_bits(magnitude | (uint32_t)(half & 0x8000) << 16);
}

/* To the nearest, ties to even. */
static inline uint16_t half_of_float(float value) {
    uint32_t bits = bits_of_float(value), sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    if (bits >= 0x47800000) /* 2^16: infinity, or not a number */
        return (uint16_t)(sign | (bits > 0x7f800000 ? 0x7e00 : 0x7c00));
    if (bits < 0x38800000) /* 2^-14: the sum with 0.5 has the unit of the subnormal numbers, 2^-24, as its last place */
        return (uint16_t)(sign | (bits_of_float(float_of_bits(bits) + 0.5f) - 0x3f000000));
    bits += 0xc8000fff + (bits >> 13 & 1); /* the bias from 127 to 15, and half a unit */
    return (uint16_t)(sign | bits >> 13);
}

/* To the nearest, ties to even. */
static inline uint16_t bfloat_of_float(float value) {
    uint32_t bits = bits_of_float(value);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40); /* stays not a number */
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* `count` numbers of the format `dtype` from number `start` on, as float. */
static inline void to_floats(float *restrict to, const void *restrict from, int dtype, int64_t start, int64_t count) {
    const uint16_t *halves = (const uint16_t *)from + start;
    if (dtype == FLOAT32)
        memcpy(to, (const float *)from + start, (size_t)count * sizeof *to);
    else if (dtype == BFLOAT16)
        for (int64_t i = 0; i < count; i++) to[i] = float_of_bits((uint32_t)halves[i] << 16);
    else
        for (int64_t i = 0; i < count; i++) to[i] = float_of_half(halves[i]);
}

static inline void put(const Job *job, int64_t token, int64_t row, float value) {
    int64_t at = token * job->rows + row;
    if (job->dtype == FLOAT32)
        ((float *)job->y)[at] = value;
    else
        ((uint16_t *)job->y)[at] = job->dtype == BFLOAT16 ? bfloat_of_float(value) : half_of_float(value);
}

/* The scales (count, columns / group) of the rows from `row` on, as float: where they lie, or in `scratch`. */
static inline const float *scales_of(const Job *job, int64_t row, int64_t count, float *scratch) {
    int64_t groups = job->columns / job->group;
    if (job->dtype == FLOAT32) return (const float *)job->scale + row * groups;
    to_floats(scratch, job->scale, job->dtype, row * groups, count * groups);
    return scratch;
}

/* The product of one row with one token, of the columns from `from` on, without the scale. */
static inline float dot8(const Job *job, int64_t row, int64_t token, int64_t from) {
    const int8_t *codes = (const int8_t *)job->codes + row * job->columns;
    const float *x = job->x + token * job->columns;
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t c = from; c < job->columns; c++) sum += (float)codes[c] * x[c];
    return sum;
}

/* The product of one row with one token, of the columns from `from` on in every group; `from` is even. */
static inline float dot4(const Job *job, int64_t row, int64_t token, int64_t from, const float *scales) {
    float total = 0;
    for (int64_t start = 0; start < job->columns; start += job->group) {
        const uint8_t *codes = job->codes + (row * job->columns + start) / 2;
        const float *x = job->x + token * job->columns + start;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = from / 2; i < job->group / 2; i++) {
            int low = ((codes[i] & 15) ^ 8) - 8, high = (codes[i] >> 4 ^ 8) - 8;
            sum += (float)low * x[2 * i] + (float)high * x[2 * i + 1];
        }
        total += sum * scales[start / job->group];
    }
    return total;
}

#endif
