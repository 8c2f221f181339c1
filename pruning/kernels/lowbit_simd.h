/*
 * The vector paths, written once: lowbit.c includes this for each instruction set after it defined
 *
 *   NAME(name)          the name with the instruction set's suffix
 *   TARGET              the attribute that lets a function use the instructions
 *   VECTOR, LANES       float lanes of a register
 *   WIDE                rows that are multiplied by four tokens at once: WIDE * 4 sums must fit in the registers
 *   ZERO, SPREAD(a), LOAD(p), FMA(a, b, c), SUM(v)
 *   UNPACK8(p)          LANES int8 codes as float
 *   RAW, READ4(p)       a CHUNK of 4-bit codes, its 16 bytes repeated in every 128 bits of a register
 *   UNPACK4(raw, k)     vector k of the chunk as float: lane 4 q + d is the half-byte k + q * CHUNK / LANES of the
 *                       32-bit word d, as reordered() in lowbit.c puts the inputs
 *
 * Sums are in float, LANES of them a row and token. An int8 code is exact in float, and so is a 4-bit one.
 */

/* Rows are short, and the memory's own guesses end with each: what comes AHEAD bytes later is asked for now. */
#define PREFETCH(p) _mm_prefetch((const char *)(p) + AHEAD, _MM_HINT_T0)

#define INLINE TARGET static inline __attribute__((always_inline))

/* R rows from `row` on times T tokens from `token` on; R and T are constants where this is called. */
INLINE void NAME(tile8)(const Job *job, int64_t row, int64_t token, const int R, const int T) {
    const int64_t columns = job->columns;
    const int8_t *codes = (const int8_t *)job->codes + row * columns;
    const float *x = job->x + token * columns;
    VECTOR sums[4][4];
    int64_t c = 0;
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int t = 0; t < T; t++) sums[r][t] = ZERO;
    for (; c + LANES <= columns; c += LANES) {
        VECTOR weights[4];
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            PREFETCH(codes + r * columns + c);
            weights[r] = UNPACK8(codes + r * columns + c);
        }
#pragma GCC unroll 4
        for (int t = 0; t < T; t++) {
            VECTOR inputs = LOAD(x + t * columns + c);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) sums[r][t] = FMA(weights[r], inputs, sums[r][t]);
        }
    }
    for (int r = 0; r < R; r++) {
        float scale;
        to_floats(&scale, job->scale, job->dtype, row + r, 1);
#pragma GCC unroll 4
        for (int t = 0; t < T; t++)
            put(job, token + t, row + r, (SUM(sums[r][t]) + dot8(job, row + r, token + t, c)) * scale);
    }
}

INLINE void NAME(tile4)(const Job *job, int64_t row, int64_t token, const float *scales, const int R, const int T) {
    const int64_t columns = job->columns, group = job->group, groups = columns / group, whole = group - group % CHUNK;
    const uint8_t *codes = job->codes + row * columns / 2;
    const float *x = job->x + token * columns;
    VECTOR totals[4][4];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int t = 0; t < T; t++) totals[r][t] = ZERO;
    for (int64_t g = 0; g < groups; g++) {
        VECTOR sums[4][4];
#pragma GCC unroll 4
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int t = 0; t < T; t++) sums[r][t] = ZERO;
        for (int64_t c = g * group; c < g * group + whole; c += CHUNK) {
            RAW raw[4];
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                PREFETCH(codes + (r * columns + c) / 2);
                raw[r] = READ4(codes + (r * columns + c) / 2);
            }
#pragma GCC unroll 4
            for (int k = 0; k < CHUNK / LANES; k++) {
                VECTOR weights[4];
#pragma GCC unroll 4
                for (int r = 0; r < R; r++) weights[r] = UNPACK4(raw[r], k);
#pragma GCC unroll 4
                for (int t = 0; t < T; t++) {
                    VECTOR inputs = LOAD(x + t * columns + c + k * LANES);
#pragma GCC unroll 4
                    for (int r = 0; r < R; r++) sums[r][t] = FMA(weights[r], inputs, sums[r][t]);
                }
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            VECTOR scale = SPREAD(scales[r * groups + g]);
#pragma GCC unroll 4
            for (int t = 0; t < T; t++) totals[r][t] = FMA(sums[r][t], scale, totals[r][t]);
        }
    }
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int t = 0; t < T; t++) {
            float value = SUM(totals[r][t]);
            if (whole < group) value += dot4(job, row + r, token + t, whole, scales + r * groups);
            put(job, token + t, row + r, value);
        }
}

/* All tokens times the rows from `first` to `last`, T tokens and R rows at a time. */
#define TILES8(R, T)                                                                  \
    for (; token + T <= job->tokens; token += T) {                                    \
        int64_t row = first;                                                          \
        for (; row + R <= last; row += R) NAME(tile8)(job, row, token, R, T);         \
        for (; row < last; row++) NAME(tile8)(job, row, token, 1, T);                 \
    }
#define TILES4(R, T)                                                                                      \
    for (; token + T <= job->tokens; token += T) {                                                        \
        int64_t row = first;                                                                              \
        for (; row + R <= last; row += R)                                                                 \
            NAME(tile4)(job, row, token, scales + (row - first) * groups, R, T);                          \
        for (; row < last; row++) NAME(tile4)(job, row, token, scales + (row - first) * groups, 1, T);    \
    }

TARGET static void NAME(rows8)(const Job *job, int64_t begin, int64_t end, float *scratch) {
    (void)scratch;
    for (int64_t first = begin; first < end; first += BLOCK) {
        int64_t last = first + BLOCK < end ? first + BLOCK : end, token = 0;
        TILES8(WIDE, 4)
        TILES8(WIDE, 2)
        TILES8(4, 1)
    }
}

TARGET static void NAME(rows4)(const Job *job, int64_t begin, int64_t end, float *scratch) {
    const int64_t groups = job->columns / job->group;
    for (int64_t first = begin; first < end; first += BLOCK) {
        int64_t last = first + BLOCK < end ? first + BLOCK : end, token = 0;
        const float *scales = scales_of(job, first, last - first, scratch);
        TILES4(WIDE, 4)
        TILES4(WIDE, 2)
        TILES4(4, 1)
    }
}

#undef INLINE
#undef PREFETCH
#undef TILES8
#undef TILES4
#undef NAME
#undef TARGET
#undef VECTOR
#undef LANES
#undef WIDE
#undef ZERO
#undef SPREAD
#undef LOAD
#undef FMA
#undef SUM
#undef UNPACK8
#undef RAW
#undef READ4
#undef UNPACK4
