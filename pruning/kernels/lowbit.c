/*
 * Few tokens times int8 or 4-bit weights, with the weights unpacked in registers and sums in float.
 *
 * One build serves every CPU of its architecture: best_path() asks the CPU which instructions it has. The caller has
 * checked shapes, formats and pointers; nothing here is read or written beyond them.
 */

#include <stdlib.h>

#include "lowbit.h"

#ifdef _OPENMP
#include <omp.h>
#endif

enum { PORTABLE = 0, AVX2 = 1, AVX512 = 2 };

/* Products a thread must have to be worth waking: below, the wait for it costs more than it saves. */
#define PRODUCTS_PER_THREAD 32768

static void rows8_portable(const Job *job, int64_t first, int64_t last, float *scratch) {
    (void)scratch;
    for (int64_t row = first; row < last; row++) {
        float scale;
        to_floats(&scale, job->scale, job->dtype, row, 1);
        for (int64_t token = 0; token < job->tokens; token++) put(job, token, row, dot8(job, row, token, 0) * scale);
    }
}

static void rows4_portable(const Job *job, int64_t first, int64_t last, float *scratch) {
    for (int64_t row = first; row < last; row++) {
        const float *scales = scales_of(job, row, 1, scratch);
        for (int64_t token = 0; token < job->tokens; token++) put(job, token, row, dot4(job, row, token, 0, scales));
    }
}

#ifdef __x86_64__
#include <immintrin.h>

#define NAME(name) name##_avx2
#define TARGET __attribute__((target("avx2,fma")))
#define VECTOR __m256
#define LANES 8
#define WIDE 2
#define ZERO _mm256_setzero_ps()
#define SPREAD(a) _mm256_set1_ps(a)
#define LOAD(p) _mm256_loadu_ps(p)
#define FMA(a, b, c) _mm256_fmadd_ps(a, b, c)
#define SUM(v) sum_avx2(v)
#define UNPACK8(p) _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(p))))
#define RAW __m256i
#define READ4(p) _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(p)))
#define UNPACK4(raw, k) unpack4_avx2(raw, k)

TARGET static inline float sum_avx2(__m256 v) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

/* Half-byte k of the four words in the low lanes, k + 4 in the high ones: to the top of the word, then down with the
 * sign. */
TARGET static inline __attribute__((always_inline)) __m256 unpack4_avx2(__m256i raw, int k) {
    const int low = 28 - 4 * k, high = 12 - 4 * k;
    __m256i left = _mm256_sllv_epi32(raw, _mm256_setr_epi32(low, low, low, low, high, high, high, high));
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(left, 28));
}

#include "lowbit_simd.h"

#define NAME(name) name##_avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq")))
#define VECTOR __m512
#define LANES 16
#define WIDE 4
#define ZERO _mm512_setzero_ps()
#define SPREAD(a) _mm512_set1_ps(a)
#define LOAD(p) _mm512_loadu_ps(p)
#define FMA(a, b, c) _mm512_fmadd_ps(a, b, c)
#define SUM(v) _mm512_reduce_add_ps(v)
#define UNPACK8(p) _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(p))))
#define RAW __m512i
#define READ4(p) _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(p)))
#define UNPACK4(raw, k) unpack4_avx512(raw, k)

/* Half-bytes k, k + 2, k + 4 and k + 6 of the four words: the low four bits of a lane choose from the sixteen codes. */
TARGET static inline __attribute__((always_inline)) __m512 unpack4_avx512(__m512i raw, int k) {
    const __m512 codes = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
    const int a = 4 * k, b = a + 8, c = a + 16, d = a + 24;
    __m512i right = _mm512_srlv_epi32(raw, _mm512_setr_epi32(a, a, a, a, b, b, b, b, c, c, c, c, d, d, d, d));
    return _mm512_permutexvar_ps(right, codes);
}

#include "lowbit_simd.h"

#endif

/* The best path of this CPU; a smaller one works as well. */
int poda_best_path(void) {
#ifdef __x86_64__
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq"))
        return AVX512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return AVX2;
#endif
    return PORTABLE;
}

/* Whether rows are shared out over threads. */
int poda_has_threads(void) {
#ifdef _OPENMP
    return 1;
#else
    return 0;
#endif
}

static void share_out(const Job *job, Rows *rows, int threads, float *scratch, int64_t scratch_each) {
#ifdef _OPENMP
    int64_t worth = job->tokens * job->rows * job->columns / PRODUCTS_PER_THREAD;
    if (threads > worth) threads = (int)worth;
    if (threads > 1) {
#pragma omp parallel num_threads(threads)
        {
            int64_t parts = omp_get_num_threads(), part = omp_get_thread_num();
            int64_t blocks = (job->rows + BLOCK - 1) / BLOCK;
            int64_t first = blocks * part / parts * BLOCK, last = blocks * (part + 1) / parts * BLOCK;
            rows(job, first, last < job->rows ? last : job->rows, scratch + part * scratch_each);
        }
        return;
    }
#else
    (void)threads, (void)scratch_each;
#endif
    rows(job, 0, job->rows, scratch);
}

/* Every whole CHUNK of each group as vectors of `lanes` that hold the inputs in the order of UNPACK4. */
static void reordered(float *x, int64_t count, int64_t group, int lanes) {
    int vectors = CHUNK / lanes;
    float chunk[CHUNK];
    for (int64_t start = 0; start < count; start += group)
        for (int64_t at = start; at + CHUNK <= start + group; at += CHUNK) {
            memcpy(chunk, x + at, sizeof chunk);
            for (int k = 0; k < vectors; k++)
                for (int lane = 0; lane < lanes; lane++)
                    x[at + k * lanes + lane] = chunk[lane % 4 * 8 + k + lane / 4 * vectors];
        }
}

/*
 * y = x (tokens, columns) times (codes * scale) transposed; see Job. `group` is 0 for int8 codes, else even and a
 * divisor of columns. x, scale and y are of the format `dtype`. Nothing is shared between calls, so several threads may
 * call at once. Returns 0, or 1 when there is no memory for the inputs as float.
 */
int poda_multiply(const void *x, const void *codes, const void *scale, void *y, int64_t tokens, int64_t rows,
                  int64_t columns, int64_t group, int dtype, int threads, int path) {
    Job job = {x, codes, scale, y, tokens, rows, columns, group, dtype};
    Rows *multiply = group ? rows4_portable : rows8_portable;
    int lanes = 0;
#ifdef __x86_64__
    if (path == AVX2) {
        multiply = group ? rows4_avx2 : rows8_avx2;
        lanes = 8;
    }
    if (path == AVX512) {
        multiply = group ? rows4_avx512 : rows8_avx512;
        lanes = 16;
    }
#endif
    if (threads < 1) threads = 1;
    /* The inputs as float and in order, then the scales of a block of rows for each thread. */
    int64_t inputs = dtype != FLOAT32 || (group && lanes) ? tokens * columns : 0;
    int64_t each = group && dtype != FLOAT32 ? BLOCK * (columns / group) : 0;
    float *scratch = NULL;
    if (inputs + each) {
        scratch = malloc((size_t)(inputs + threads * each) * sizeof *scratch);
        if (!scratch) return 1;
    }
    if (inputs) {
        to_floats(scratch, x, dtype, 0, inputs);
        if (group && lanes) reordered(scratch, inputs, group, lanes);
        job.x = scratch;
    }
    share_out(&job, multiply, threads, scratch ? scratch + inputs : NULL, each);
    free(scratch);
    return 0;
}
