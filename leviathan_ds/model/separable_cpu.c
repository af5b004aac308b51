/* The separable product of one head on a CPU, forward and backward, in float32.
 *
 * The same map as separable.py. Modes are taken in tiles that fit the vector registers, ids in small blocks that
 * share the splines of a dimension while these are in the first-level cache; only the three knots that are not
 * zero are read. A head is one sequential loop, so the result does not depend on the number of threads. Called
 * through ctypes by separable_native.py, which owns the compilation.
 *
 * n ids, d seed size, K knots, r rank, a multiple of LANES (the caller pads). Splines are 1 + delta with one padding
 * row of zeros at either end of the knots: [d][K + 2][r].
 */
#include <math.h>
#include <stdlib.h>

#define LANES 16
#define WIDE 4   /* vectors of a tile: 64 modes */
#define BLOCK 16 /* ids of a block */

typedef float Vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

typedef struct {
    float value[3]; /* of the basis at the three knots */
    float slope[3]; /* its derivative by t */
    int row;        /* of the first of the three padded spline rows */
} Knots;

static inline Knots three_knots(float t, int K, int normalize) {
    Knots k;
    float x = t * (float)(K - 1), middle = rintf(x);
    /* so ordered that a NaN becomes row 0: its values stay NaN, its address must not */
    middle = middle > 0.0f ? (middle < (float)(K - 1) ? middle : (float)(K - 1)) : 0.0f;
    float f = x - middle;
    float low = middle > 0.0f ? 1.0f : 0.0f, high = middle < (float)(K - 1) ? 1.0f : 0.0f;
    float v0 = 0.5f * (0.5f - f) * (0.5f - f) * low, v1 = 0.75f - f * f, v2 = 0.5f * (0.5f + f) * (0.5f + f) * high;
    float s0 = (f - 0.5f) * low, s1 = -2.0f * f, s2 = (f + 0.5f) * high;
    float inverse = normalize ? 1.0f / (v0 + v1 + v2) : 1.0f, change = normalize ? s0 + s1 + s2 : 0.0f;
    v0 *= inverse, v1 *= inverse, v2 *= inverse;
    k.value[0] = v0, k.value[1] = v1, k.value[2] = v2;
    float scale = inverse * (float)(K - 1);
    k.slope[0] = (s0 - v0 * change) * scale;
    k.slope[1] = (s1 - v1 * change) * scale;
    k.slope[2] = (s2 - v2 * change) * scale;
    k.row = (int)middle;
    return k;
}

/* One tile of `width` vectors of modes for one block of ids, forward. Always inlined with a constant width, so that
 * the inner loops become straight vector code. */
static inline __attribute__((always_inline)) void tile_forward(
    const Knots *restrict knots, const float *restrict splines, float *restrict modes, int ids, long d, long K, long r,
    int width) {
    for (int i = 0; i < ids; i++) {
        Vector product[WIDE];
        for (int w = 0; w < width; w++) product[w] = (Vector){0} + 1.0f;
        for (long c = 0; c < d; c++) {
            const Knots k = knots[i * d + c];
            const float *s = splines + (c * (K + 2) + k.row) * r;
            for (int w = 0; w < width; w++) {
                const Vector *v = (const Vector *)(s + w * LANES);
                const Vector *v1 = (const Vector *)(s + r + w * LANES), *v2 = (const Vector *)(s + 2 * r + w * LANES);
                product[w] *= k.value[0] * *v + k.value[1] * *v1 + k.value[2] * *v2;
            }
        }
        for (int w = 0; w < width; w++) *(Vector *)(modes + i * r + w * LANES) = product[w];
    }
}

/* The same, backward: grad_t is added to, since an id's tiles share it. `before` holds d * BLOCK * width vectors. */
static inline __attribute__((always_inline)) void tile_backward(
    const Knots *restrict knots, const float *restrict splines, const float *restrict grad_modes,
    float *restrict grad_t, float *restrict grad_splines, Vector *restrict before, int ids, long d, long K, long r,
    int width) {
    Vector running[BLOCK * WIDE]; /* product of the factors before c, then upstream gradient times those after */
    for (int i = 0; i < ids * width; i++) running[i] = (Vector){0} + 1.0f;
    for (long c = 0; c < d; c++) {
        for (int i = 0; i < ids; i++) {
            const Knots *k = knots + i * d + c;
            const float *s = splines + (c * (K + 2) + k->row) * r;
            for (int w = 0; w < width; w++) {
                const Vector *v0 = (const Vector *)(s + w * LANES);
                const Vector *v1 = (const Vector *)(s + r + w * LANES), *v2 = (const Vector *)(s + 2 * r + w * LANES);
                before[(c * BLOCK + i) * width + w] = running[i * width + w];
                running[i * width + w] *= k->value[0] * *v0 + k->value[1] * *v1 + k->value[2] * *v2;
            }
        }
    }
    for (int i = 0; i < ids; i++)
        for (int w = 0; w < width; w++) running[i * width + w] = *(const Vector *)(grad_modes + i * r + w * LANES);
    for (long c = d - 1; c >= 0; c--) {
        for (int i = 0; i < ids; i++) {
            const Knots *k = knots + i * d + c;
            const long row = (c * (K + 2) + k->row) * r;
            const float *s = splines + row;
            float *g = grad_splines + row;
            Vector slope_sum = {0};
            for (int w = 0; w < width; w++) {
                const Vector v0 = *(const Vector *)(s + w * LANES), v1 = *(const Vector *)(s + r + w * LANES),
                             v2 = *(const Vector *)(s + 2 * r + w * LANES);
                Vector after = running[i * width + w];
                Vector grad_phi = after * before[(c * BLOCK + i) * width + w];
                running[i * width + w] = after * (k->value[0] * v0 + k->value[1] * v1 + k->value[2] * v2);
                slope_sum += grad_phi * (k->slope[0] * v0 + k->slope[1] * v1 + k->slope[2] * v2);
                *(Vector *)(g + w * LANES) += k->value[0] * grad_phi;
                *(Vector *)(g + r + w * LANES) += k->value[1] * grad_phi;
                *(Vector *)(g + 2 * r + w * LANES) += k->value[2] * grad_phi;
            }
            float sum = 0.0f;
            for (int lane = 0; lane < LANES; lane++) sum += slope_sum[lane];
            grad_t[i * d + c] += sum;
        }
    }
}

static void block_knots(const float *restrict t, Knots *restrict knots, int count, int K, int normalize) {
    for (int i = 0; i < count; i++) knots[i] = three_knots(t[i], K, normalize);
}

static int block_ids(long n, long start) { return n - start < BLOCK ? (int)(n - start) : BLOCK; }

/* modes[n][r] = prod_c sum_g B_g(t[n][c]) splines[c][g][r]. Returns 0, or 1 where memory is short. */
int separable_forward(const float *restrict t, const float *restrict splines, float *restrict modes, long n, long d,
                      long K, long r, int normalize) {
    Knots *knots = malloc(sizeof(Knots) * BLOCK * d);
    if (!knots) return 1;
    for (long start = 0; start < n; start += BLOCK) {
        int ids = block_ids(n, start);
        block_knots(t + start * d, knots, ids * d, K, normalize);
        float *out = modes + start * r;
        long p = 0;
        for (; p + WIDE * LANES <= r; p += WIDE * LANES)
            tile_forward(knots, splines + p, out + p, ids, d, K, r, WIDE);
        for (; p < r; p += LANES) tile_forward(knots, splines + p, out + p, ids, d, K, r, 1);
    }
    free(knots);
    return 0;
}

/* Gradients of t [n][d] and of the splines, both added to. Returns 0, or 1 where memory is short. */
int separable_backward(const float *restrict t, const float *restrict splines, const float *restrict grad_modes,
                       float *restrict grad_t, float *restrict grad_splines, long n, long d, long K, long r,
                       int normalize) {
    Knots *knots = malloc(sizeof(Knots) * BLOCK * d);
    Vector *before = aligned_alloc(sizeof(Vector), sizeof(Vector) * BLOCK * WIDE * d);
    if (!knots || !before) return free(knots), free(before), 1;
    for (long start = 0; start < n; start += BLOCK) {
        int ids = block_ids(n, start);
        block_knots(t + start * d, knots, ids * d, K, normalize);
        const float *grad_out = grad_modes + start * r;
        float *grad_in = grad_t + start * d;
        long p = 0;
        for (; p + WIDE * LANES <= r; p += WIDE * LANES)
            tile_backward(knots, splines + p, grad_out + p, grad_in, grad_splines + p, before, ids, d, K, r, WIDE);
        for (; p < r; p += LANES)
            tile_backward(knots, splines + p, grad_out + p, grad_in, grad_splines + p, before, ids, d, K, r, 1);
    }
    free(knots), free(before);
    return 0;
}
