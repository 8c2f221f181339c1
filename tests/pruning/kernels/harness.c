/* Runs poda_multiply over many shapes in buffers of the exact size; prints how many. Built with sanitizers. */

#include <stdio.h>

#include "lowbit.c"

static void *filled(size_t size, unsigned seed) {
    unsigned char *memory = malloc(size);
    if (!memory) exit(2);
    for (size_t i = 0; i < size; i++) memory[i] = (unsigned char)((seed = seed * 1103515245u + 12345u) >> 16 & 0x3f);
    return memory;
}

int main(int count, char **words) {
    const int64_t rows[] = {1, 3, 8, 9, 37}, tokens[] = {1, 2, 3, 7, 16}, groups[] = {0, 2, 30, 32, 34, 64, 130};
    const int64_t repeats[] = {1, 3};
    int done = 0, threads = count > 1 ? atoi(words[1]) : 1;
    for (int path = 0; path <= poda_best_path(); path++)
        for (int dtype = 0; dtype < 3; dtype++)
            for (size_t r = 0; r < 5; r++)
                for (size_t t = 0; t < 5; t++)
                    for (size_t g = 0; g < 7; g++)
                        for (size_t n = 0; n < 2; n++) {
                            int64_t group = groups[g], columns = group ? group * repeats[n] : 1 + 77 * repeats[n];
                            size_t each = dtype ? 2 : 4;
                            size_t codes = (size_t)(rows[r] * columns / (group ? 2 : 1));
                            size_t scales = (size_t)(rows[r] * (group ? columns / group : 1)) * each;
                            void *x = filled((size_t)(tokens[t] * columns) * each, 1), *c = filled(codes, 2);
                            void *s = filled(scales, 3), *y = malloc((size_t)(tokens[t] * rows[r]) * each);
                            if (poda_multiply(x, c, s, y, tokens[t], rows[r], columns, group, dtype, threads, path))
                                return 3;
                            free(x), free(c), free(s), free(y);
                            done++;
                        }
    printf("%d\n", done);
    return 0;
}
