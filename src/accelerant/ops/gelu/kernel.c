/* y = gelu(x), elementwise, float32.
 *
 *   gelu_none  y = 0.5 x (1 + erf(x / sqrt(2)))
 *   gelu_tanh  y = 0.5 x (1 + tanh u) = x / (1 + exp(-2u)), u = sqrt(2/pi) (x + 0.044715 x^3)
 *
 * Source: Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2.
 * Layout: contiguous; one thread an element, so that neighbours read neighbouring words.
 * x^2 is cut at 1e4, far beyond where the exponential is 0 or infinite, so that it never overflows itself.
 * Bound by memory: 8 bytes an element, about 10 (tanh) and 35 (none) operations. */
#define SQRT_HALF 0.707106781f
#define TWO_SQRT_2_OVER_PI 1.59576912f
#define CUBIC 0.044715f
#define LARGEST_SQUARE 1e4f

ACL_KERNEL void gelu_none(ACL_GLOBAL const float *x, ACL_GLOBAL float *y, i64 n) {
    i64 i = acl_global_id();
    if (i < n) {
        y[i] = 0.5f * x[i] * (1.0f + acl_erf_f32(x[i] * SQRT_HALF));
    }
}

ACL_KERNEL void gelu_tanh(ACL_GLOBAL const float *x, ACL_GLOBAL float *y, i64 n) {
    i64 i = acl_global_id();
    if (i < n) {
        float square = x[i] * x[i];
        square = square > LARGEST_SQUARE ? LARGEST_SQUARE : square;
        y[i] = x[i] / (1.0f + acl_exp_f32(x[i] * (square * CUBIC + 1.0f) * -TWO_SQRT_2_OVER_PI));
    }
}
