/* The separable product of one head on a CPU, forward and backward, in float32.
 *
 * The same map as separable.py, id by id: only the three knots that are not zero are read, the d factors of an
 * id live in the cache, and each head is one sequential loop, so the result does not depend on the number of
 * threads. Called through ctypes by separable_native.py, which owns the compilation.
 *
 * n ids, d seed size, K knots, r rank. Splines are 1 + delta with one padding row of zeros at either end of the
 * knots: [d][K + 2][r].
 */
#include <math.h>
#include <string.h>

typedef struct {
    long row;       /* of the first of the three padded spline rows */
    float value[3]; /* of the basis */
    float slope[3]; /* its derivative by t */
} Knots;

static Knots three_knots(float t, long K, int normalize) {
    Knots k;
    float x = t * (float)(K - 1), middle = rintf(x);
    /* so ordered that a NaN becomes row 0: its values stay NaN, its address must not */
    middle = middle > 0.0f ? (middle < (float)(K - 1) ? middle : (float)(K - 1)) : 0.0f;
    float f = x - middle;
    float low = middle > 0.0f ? 1.0f : 0.0f, high = middle < (float)(K - 1) ? 1.0f : 0.0f;
    k.row = (long)middle;
    k.value[0] = 0.5f * (0.5f - f) * (0.5f - f) * low;
    k.value[1] = 0.75f - f * f;
    k.value[2] = 0.5f * (0.5f + f) * (0.5f + f) * high;
    k.slope[0] = (f - 0.5f) * low;
    k.slope[1] = -2.0f * f;
    k.slope[2] = (f + 0.5f) * high;
    float total = k.value[0] + k.value[1] + k.value[2];
    float change = k.slope[0] + k.slope[1] + k.slope[2];
    for (int j = 0; j < 3; j++) {
        if (normalize) {
            k.value[j] /= total;
            k.slope[j] = (k.slope[j] - k.value[j] * change) / total;
        }
        k.slope[j] *= (float)(K - 1);
    }
    return k;
}

/* modes[n][r] = prod_c sum_g B_g(t[n][c]) splines[c][g][r] */
void separable_forward(const float *restrict t, const float *restrict splines, float *restrict modes, long n,
                       long d, long K, long r, int normalize) {
    for (long i = 0; i < n; i++) {
        float *restrict product = modes + i * r;
        for (long p = 0; p < r; p++) product[p] = 1.0f;
        for (long c = 0; c < d; c++) {
            Knots k = three_knots(t[i * d + c], K, normalize);
            const float *restrict s = splines + (c * (K + 2) + k.row) * r;
            for (long p = 0; p < r; p++)
                product[p] *= k.value[0] * s[p] + k.value[1] * s[r + p] + k.value[2] * s[2 * r + p];
        }
    }
}

/* Gradients of t [n][d] (written) and of the splines (added to). work: 2 * d * r floats. */
void separable_backward(const float *restrict t, const float *restrict splines, const float *restrict grad_modes,
                        float *restrict grad_t, float *restrict grad_splines, float *restrict work, long n, long d,
                        long K, long r, int normalize) {
    float *restrict phi = work, *restrict before = work + d * r; /* factor; product of those before it */
    for (long i = 0; i < n; i++) {
        for (long c = 0; c < d; c++) {
            Knots k = three_knots(t[i * d + c], K, normalize);
            const float *restrict s = splines + (c * (K + 2) + k.row) * r;
            for (long p = 0; p < r; p++) {
                phi[c * r + p] = k.value[0] * s[p] + k.value[1] * s[r + p] + k.value[2] * s[2 * r + p];
                before[c * r + p] = c ? before[(c - 1) * r + p] * phi[(c - 1) * r + p] : 1.0f;
            }
        }
        float after[r]; /* upstream gradient times the factors after c */
        memcpy(after, grad_modes + i * r, sizeof(float) * r);
        for (long c = d - 1; c >= 0; c--) {
            Knots k = three_knots(t[i * d + c], K, normalize);
            const float *restrict s = splines + (c * (K + 2) + k.row) * r;
            float *restrict gs = grad_splines + (c * (K + 2) + k.row) * r;
            float low = 0.0f, middle = 0.0f, high = 0.0f;
#pragma omp simd reduction(+ : low, middle, high)
            for (long p = 0; p < r; p++) {
                float grad_phi = after[p] * before[c * r + p];
                low += grad_phi * s[p];
                middle += grad_phi * s[r + p];
                high += grad_phi * s[2 * r + p];
                gs[p] += k.value[0] * grad_phi;
                gs[r + p] += k.value[1] * grad_phi;
                gs[2 * r + p] += k.value[2] * grad_phi;
                after[p] *= phi[c * r + p];
            }
            grad_t[i * d + c] = low * k.slope[0] + middle * k.slope[1] + high * k.slope[2];
        }
    }
}
