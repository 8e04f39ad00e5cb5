// The forward pass of a Llama-family decoder for x86 processors with AVX2, FMA and F16C.
//
// Every output of a product is one chain of additions over k, in the same order for any number of rows, and everything
// else works on one row at a time: so a token's logits have the same bits whatever else is in the pass.
//
// Weights (N, K) are kept in panels of 16 outputs: for k, the 16 numbers of one panel lie side by side (for int8 those of
// two consecutive k), so that a decode step reads memory from front to back. One panel is read once for up to 6 rows.

#include <float.h>
#include <immintrin.h>
#include <math.h>
#include <omp.h>
#include <stdint.h>

namespace {

constexpr int64_t kPanel = 16;    // outputs a panel
constexpr int64_t kGroup = 128;   // inputs that share an int8 scale; 128 * 127 * 16383 fits in 31 bits
constexpr int64_t kBlock = 1024;  // inputs a block where many rows are multiplied, so that their part stays in L1
constexpr int64_t kTile = 6;      // rows that are multiplied at once: 12 of 16 registers hold sums
constexpr int64_t kTogether = 8;  // panels there, so that their part stays in L2
constexpr int64_t kAhead = 2048;  // bytes of weights that are asked for ahead
constexpr float kSteps = 16383;   // an int8 product's activations are rounded to so many steps each way

// Loops over a tile are unrolled before anything else, so that its sums stay in registers.
#define UNROLL _Pragma("GCC unroll 16")

enum Kind : int64_t { kFloat = 0, kHalf = 1, kByte = 2 };

}  // namespace

extern "C" {

struct Linear {
  int64_t kind, outputs, inputs;
  const void* weight;   // panels; inputs are padded to an even number for int8
  const float* scale;   // int8: (panels, groups, 16)
  const float* bias;    // (outputs padded to panels) or null
};

struct Layer {
  Linear qkv, out, gate_up, down;
  const float *attention_norm, *mlp_norm, *query_norm, *key_norm;
  int64_t window;  // 0: none
};

struct Model {
  int64_t layers, width, heads, kv_heads, head_dim, ffn;
  double eps;
  const Layer* layer;
  const float* norm;
  const float* turns;  // (positions, 2, head_dim): cosines, and sines with the sign that swapping halves needs
  Linear head;
};

// Where a row's keys and values are: (layers, 2, kv_heads, capacity, head_dim) floats.
struct Row {
  float* cache;
  int64_t capacity, position;
};

}  // extern "C"

namespace {

int64_t padded(int64_t n) { return (n + kPanel - 1) / kPanel * kPanel; }
int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }

// ------------------------------------------------------------------------------------------------- one row at a time

float sum8(__m256 v) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}

float max8(__m256 v) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_shuffle_ps(s, s, 1)));
}

// e^x within two units in the last place, between the smallest and the largest normal number; NaN stays NaN.
__m256 exp8(__m256 x) {
  const __m256 low = _mm256_set1_ps(-87.33654f), high = _mm256_set1_ps(88.72283f);
  __m256 c = _mm256_min_ps(high, _mm256_max_ps(low, x));  // of NaN and c, these two return their second operand
  __m256 n = _mm256_round_ps(_mm256_mul_ps(c, _mm256_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  n = _mm256_min_ps(n, _mm256_set1_ps(127.0f));
  __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), c);
  r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
  __m256 p = _mm256_set1_ps(1.9875691500e-4f);
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.3981999507e-3f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(8.3334519073e-3f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(4.1665795894e-2f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.6666665459e-1f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(5.0000001201e-1f));
  p = _mm256_add_ps(_mm256_fmadd_ps(p, _mm256_mul_ps(r, r), r), _mm256_set1_ps(1.0f));
  __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(p, _mm256_castsi256_ps(power));
}

void rms_norm(const float* x, const float* weight, float* y, int64_t n, float eps) {
  __m256 squares = _mm256_setzero_ps();
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    __m256 v = _mm256_loadu_ps(x + i);
    squares = _mm256_fmadd_ps(v, v, squares);
  }
  float total = sum8(squares);
  for (; i < n; i++) total += x[i] * x[i];
  const float factor = 1.0f / sqrtf(total / n + eps);
  for (i = 0; i < n; i++) y[i] = x[i] * factor * weight[i];
}

// Rotary embedding of one head; `turn` holds d cosines and d sines with the sign that swapping halves needs.
void rotate(float* head, const float* turn, int64_t d) {
  const float *cosine = turn, *sine = turn + d;
  for (int64_t i = 0; i < d / 2; i++) {
    const float a = head[i], b = head[i + d / 2];
    head[i] = a * cosine[i] + b * sine[i];
    head[i + d / 2] = b * cosine[i + d / 2] + a * sine[i + d / 2];
  }
}

void silu_times(const float* gate, const float* up, float* y, int64_t n) {
  int64_t i = 0;
  const __m256 one = _mm256_set1_ps(1.0f), zero = _mm256_setzero_ps();
  for (; i + 8 <= n; i += 8) {
    __m256 g = _mm256_loadu_ps(gate + i);
    __m256 s = _mm256_div_ps(g, _mm256_add_ps(one, exp8(_mm256_sub_ps(zero, g))));
    _mm256_storeu_ps(y + i, _mm256_mul_ps(s, _mm256_loadu_ps(up + i)));
  }
  for (; i < n; i++) y[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
}

// Rounds a row to steps of its largest magnitude / 16383, padded with zeros to a multiple of 16. Returns the step; NaN,
// with zeros, if the row is not finite.
float round_row(const float* x, int16_t* y, int64_t n) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  __m256 peak = _mm256_setzero_ps(), unusual = _mm256_setzero_ps();
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256 v = _mm256_loadu_ps(x + i);
    peak = _mm256_max_ps(peak, _mm256_andnot_ps(sign, v));
    unusual = _mm256_or_ps(unusual, _mm256_cmp_ps(_mm256_sub_ps(v, v), _mm256_setzero_ps(), _CMP_NEQ_UQ));
  }
  bool finite = _mm256_testz_ps(unusual, unusual);
  float largest = max8(peak);
  for (; i < n; i++) {
    finite = finite && isfinite(x[i]);
    largest = fmaxf(largest, fabsf(x[i]));
  }
  const float factor = finite && largest > FLT_MIN * kSteps ? kSteps / largest : 0.0f;
  const __m256 scale = _mm256_set1_ps(factor);
  for (i = 0; i + 16 <= n && factor > 0; i += 16) {
    const __m256i a = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i), scale));
    const __m256i b = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i + 8), scale));
    _mm256_storeu_si256((__m256i*)(y + i), _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xD8));
  }
  for (; i < n; i++) y[i] = factor > 0 ? (int16_t)lrintf(x[i] * factor) : 0;
  for (; i < padded(n); i++) y[i] = 0;
  return finite ? largest / kSteps : NAN;
}

// ---------------------------------------------------------------------------------------------------------- products

struct Floats {
  typedef float Weight;
  static __m256 load(const float* w) { return _mm256_loadu_ps(w); }
};

struct Halves {
  typedef uint16_t Weight;
  static __m256 load(const uint16_t* w) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)w)); }
};

// What a product reads: rows of floats, or rows of steps with each row's step.
struct Input {
  const float* x;
  const int16_t* steps;
  const float* step;
  int64_t stride;
};

// acc += M rows times P panels, over `count` inputs from `from`.
template <class W, int M, int P>
inline void multiply(const typename W::Weight* panel, int64_t panel_size, const float* x, int64_t stride, int64_t count,
                     __m256 (&acc)[M][2 * P]) {
  for (int64_t k = 0; k < count; k++) {
    __m256 w[2 * P];
    UNROLL for (int p = 0; p < P; p++) {
      const typename W::Weight* at = panel + p * panel_size + k * kPanel;
      _mm_prefetch((const char*)at + kAhead, _MM_HINT_T0);
      w[2 * p] = W::load(at);
      w[2 * p + 1] = W::load(at + 8);
    }
    UNROLL for (int m = 0; m < M; m++) {
      const __m256 a = _mm256_broadcast_ss(x + m * stride + k);
      UNROLL for (int p = 0; p < 2 * P; p++) acc[m][p] = _mm256_fmadd_ps(a, w[p], acc[m][p]);
    }
  }
}

// Rows [row, row + M) times panels [p, p + P), inputs [from, to), into y (rows of `ldy` floats).
template <class W, int M, int P>
void float_tile(const Linear& l, const Input& in, int64_t row, int64_t p, int64_t from, int64_t to, float* y,
                int64_t ldy) {
  const int64_t size = l.inputs * kPanel;
  const typename W::Weight* panel = (const typename W::Weight*)l.weight + p * size + from * kPanel;
  __m256 acc[M][2 * P];
  UNROLL for (int m = 0; m < M; m++)
    UNROLL for (int q = 0; q < 2 * P; q++)
      acc[m][q] = from ? _mm256_loadu_ps(y + (row + m) * ldy + p * kPanel + q * 8) : _mm256_setzero_ps();
  multiply<W, M, P>(panel, size, in.x + row * in.stride + from, in.stride, to - from, acc);
  UNROLL for (int m = 0; m < M; m++)
    UNROLL for (int q = 0; q < 2 * P; q++) {
      __m256 v = acc[m][q];
      if (to == l.inputs && l.bias) v = _mm256_add_ps(v, _mm256_loadu_ps(l.bias + p * kPanel + q * 8));
      _mm256_storeu_ps(y + (row + m) * ldy + p * kPanel + q * 8, v);
    }
}

// Sums of whole numbers of M rows times P panels over `pairs` pairs of inputs, as floats. Kept out of line: its sums have
// the registers for themselves.
template <int M, int P>
__attribute__((noinline)) void byte_sums(const int8_t* panel, int64_t panel_size, const int16_t* x, int64_t stride,
                                         int64_t pairs, __m256 (&sums)[M][2 * P]) {
  __m256i acc[M][2 * P];
  UNROLL for (int m = 0; m < M; m++)
    UNROLL for (int q = 0; q < 2 * P; q++) acc[m][q] = _mm256_setzero_si256();
  for (int64_t k = 0; k < pairs; k++) {
    __m256i w[2 * P];
    UNROLL for (int p = 0; p < P; p++) {
      const int8_t* at = panel + p * panel_size + k * 2 * kPanel;
      _mm_prefetch((const char*)at + kAhead, _MM_HINT_T0);
      w[2 * p] = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)at));
      w[2 * p + 1] = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(at + kPanel)));
    }
    UNROLL for (int m = 0; m < M; m++) {
      const __m256i a = _mm256_castps_si256(_mm256_broadcast_ss((const float*)(x + m * stride + 2 * k)));
      UNROLL for (int q = 0; q < 2 * P; q++) {
        acc[m][q] = _mm256_add_epi32(acc[m][q], _mm256_madd_epi16(w[q], a));
        asm volatile("" : "+x"(acc[m][q]));  // or compilers multiply all first, and keep sums in memory
      }
    }
  }
  UNROLL for (int m = 0; m < M; m++)
    UNROLL for (int q = 0; q < 2 * P; q++) sums[m][q] = _mm256_cvtepi32_ps(acc[m][q]);
}

// The same for int8: whole numbers over a group of inputs, floats from group to group.
template <int M, int P>
void byte_tile(const Linear& l, const Input& in, int64_t row, int64_t p, int64_t from, int64_t to, float* y,
               int64_t ldy) {
  const int64_t inputs = (l.inputs + 1) / 2 * 2, groups = (l.inputs + kGroup - 1) / kGroup;
  const int64_t end = to == l.inputs ? inputs : to;
  for (int64_t start = from; start < end; start += kGroup) {
    __m256 sums[M][2 * P];
    byte_sums<M, P>((const int8_t*)l.weight + (p * inputs + start) * kPanel, inputs * kPanel,
                    in.steps + row * in.stride + start, in.stride, (min(end, start + kGroup) - start) / 2, sums);
    for (int m = 0; m < M; m++)
      for (int q = 0; q < 2 * P; q++) {
        const float* scale = l.scale + ((p + q / 2) * groups + start / kGroup) * kPanel + q % 2 * 8;
        float* to_y = y + (row + m) * ldy + p * kPanel + q * 8;
        __m256 sum = start ? _mm256_loadu_ps(to_y) : _mm256_setzero_ps();
        sum = _mm256_fmadd_ps(sums[m][q], _mm256_loadu_ps(scale), sum);
        if (start + kGroup >= inputs) {
          sum = _mm256_mul_ps(sum, _mm256_set1_ps(in.step[row + m]));
          if (l.bias) sum = _mm256_add_ps(sum, _mm256_loadu_ps(l.bias + p * kPanel + q * 8));
        }
        _mm256_storeu_ps(to_y, sum);
      }
  }
}

template <int M, int P>
inline void tile(const Linear& l, const Input& in, int64_t row, int64_t p, int64_t from, int64_t to, float* y,
                 int64_t ldy) {
  if (l.kind == kByte) byte_tile<M, P>(l, in, row, p, from, to, y, ldy);
  else if (l.kind == kHalf) float_tile<Halves, M, P>(l, in, row, p, from, to, y, ldy);
  else float_tile<Floats, M, P>(l, in, row, p, from, to, y, ldy);
}

// M rows times all of this thread's panels, P at a time: several chains of sums at once where there are few rows.
template <int M, int P>
void strip(const Linear& l, const Input& in, int64_t row, int64_t first, int64_t last, int64_t from, int64_t to,
           float* y, int64_t ldy) {
  int64_t p = first;
  for (; p + P <= last; p += P) tile<M, P>(l, in, row, p, from, to, y, ldy);
  for (; p < last; p++) tile<M, 1>(l, in, row, p, from, to, y, ldy);
}

void strip_of(int64_t rows, const Linear& l, const Input& in, int64_t row, int64_t first, int64_t last, int64_t from,
              int64_t to, float* y, int64_t ldy) {
  switch (rows) {
    case 1: return strip<1, 4>(l, in, row, first, last, from, to, y, ldy);
    case 2: return strip<2, 2>(l, in, row, first, last, from, to, y, ldy);
    case 3: return strip<3, 2>(l, in, row, first, last, from, to, y, ldy);
    case 4: return strip<4, 1>(l, in, row, first, last, from, to, y, ldy);
    case 5: return strip<5, 1>(l, in, row, first, last, from, to, y, ldy);
    default: return strip<6, 1>(l, in, row, first, last, from, to, y, ldy);
  }
}

// y (n, ldy) = x W^T + b, this thread's share of the outputs. The caller has a barrier after it.
void product(const Linear& l, const Input& in, int64_t n, float* y, int64_t ldy) {
  const int64_t panels = padded(l.outputs) / kPanel, threads = omp_get_num_threads(), me = omp_get_thread_num();
  const int64_t first = panels * me / threads, last = panels * (me + 1) / threads;
  if (n <= kTile) return strip_of(n, l, in, 0, first, last, 0, l.inputs, y, ldy);
  for (int64_t p = first; p < last; p += kTogether)
    for (int64_t from = 0; from < l.inputs; from += kBlock)
      for (int64_t row = 0; row < n; row += kTile)
        strip_of(min(kTile, n - row), l, in, row, p, min(last, p + kTogether), from, min(l.inputs, from + kBlock), y, ldy);
}

// --------------------------------------------------------------------------------------------------------- attention

// scores[j] = q . key_j * scale for `count` keys; returns the largest.
float score(const float* q, const float* keys, int64_t count, int64_t d, float scale, float* scores) {
  float largest = -INFINITY;
  for (int64_t j = 0; j < count; j++) {
    const float* key = keys + j * d;
    float s;
    if (d % 8 == 0) {
      __m256 a = _mm256_setzero_ps(), b = _mm256_setzero_ps();
      int64_t i = 0;
      for (; i + 16 <= d; i += 16) {
        a = _mm256_fmadd_ps(_mm256_loadu_ps(q + i), _mm256_loadu_ps(key + i), a);
        b = _mm256_fmadd_ps(_mm256_loadu_ps(q + i + 8), _mm256_loadu_ps(key + i + 8), b);
      }
      if (i < d) a = _mm256_fmadd_ps(_mm256_loadu_ps(q + i), _mm256_loadu_ps(key + i), a);
      s = sum8(_mm256_add_ps(a, b));
    } else {
      s = 0;
      for (int64_t i = 0; i < d; i++) s += q[i] * key[i];
    }
    scores[j] = s * scale;
    largest = scores[j] > largest || isnan(scores[j]) ? scores[j] : largest;
  }
  return largest;
}

// scores -> e^(score - largest); returns their sum.
float exponentials(float* scores, int64_t count, float largest) {
  const __m256 top = _mm256_set1_ps(largest);
  __m256 sums = _mm256_setzero_ps();
  int64_t j = 0;
  for (; j + 8 <= count; j += 8) {
    __m256 e = exp8(_mm256_sub_ps(_mm256_loadu_ps(scores + j), top));
    _mm256_storeu_ps(scores + j, e);
    sums = _mm256_add_ps(sums, e);
  }
  float total = sum8(sums);
  for (; j < count; j++) {
    scores[j] = expf(scores[j] - largest);
    total += scores[j];
  }
  return total;
}

// y (d) = sum_j weights[j] values_j * factor
void mix(const float* weights, const float* values, int64_t count, int64_t d, float factor, float* y) {
  int64_t i = 0;
  for (; i + 32 <= d; i += 32) {
    __m256 acc[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
    for (int64_t j = 0; j < count; j++) {
      const __m256 w = _mm256_broadcast_ss(weights + j);
      for (int c = 0; c < 4; c++) acc[c] = _mm256_fmadd_ps(w, _mm256_loadu_ps(values + j * d + i + 8 * c), acc[c]);
    }
    for (int c = 0; c < 4; c++) _mm256_storeu_ps(y + i + 8 * c, _mm256_mul_ps(acc[c], _mm256_set1_ps(factor)));
  }
  for (; i < d; i++) {
    float s = 0;
    for (int64_t j = 0; j < count; j++) s += weights[j] * values[j * d + i];
    y[i] = s * factor;
  }
}

// The query heads of one row that share key/value head g, over that row's cache up to and with its own position.
void attend(const Model& m, int64_t layer, const Row& row, const float* q, int64_t g, float* scores, float* y) {
  const int64_t d = m.head_dim, each = m.heads / m.kv_heads, window = m.layer[layer].window;
  const int64_t seen = row.position + 1, first = window ? max(0, seen - window) : 0;
  const float* keys = row.cache + ((layer * 2) * m.kv_heads + g) * row.capacity * d + first * d;
  const float* values = keys + m.kv_heads * row.capacity * d;
  const float scale = 1.0f / sqrtf((float)d);
  for (int64_t h = g * each; h < (g + 1) * each; h++) {
    const float largest = score(q + h * d, keys, seen - first, d, scale, scores);
    const float total = exponentials(scores, seen - first, largest);
    mix(scores, values, seen - first, d, 1.0f / total, y + h * d);
  }
}

// --------------------------------------------------------------------------------------------------- the whole decoder

// Buffers of one pass; rows begin at multiples of 16 numbers.
struct Work {
  float *x, *normed, *wide, *mixed, *step;
  int16_t* steps;
  float* scores;  // `longest` floats a thread
  int64_t longest;
};

// Rows of this thread, in blocks.
int64_t share(int64_t n, int64_t part) { return n * part / omp_get_num_threads(); }

// Gives `product` rows in the form that its weights need; ends with a barrier.
Input ready(const Linear& l, const float* x, int64_t stride, int64_t n, const Work& w) {
  const int64_t me = omp_get_thread_num();
  if (l.kind == kByte)
    for (int64_t i = share(n, me); i < share(n, me + 1); i++) w.step[i] = round_row(x + i * stride, w.steps + i * stride, l.inputs);
#pragma omp barrier
  return Input{x, w.steps, w.step, stride};
}

void add(float* x, const float* y, int64_t n) {
  for (int64_t i = 0; i < n; i++) x[i] += y[i];
}

// Norm and rotation of a row's query and key heads; the keys and values go to its cache.
void place(const Model& m, int64_t layer, const Row& row, float* qkv) {
  const Layer& l = m.layer[layer];
  const int64_t d = m.head_dim;
  for (int64_t h = 0; h < m.heads + m.kv_heads; h++) {
    const float* weight = h < m.heads ? l.query_norm : l.key_norm;
    if (weight) rms_norm(qkv + h * d, weight, qkv + h * d, d, m.eps);
    rotate(qkv + h * d, m.turns + row.position * 2 * d, d);
  }
  for (int64_t part = 0; part < 2; part++)
    for (int64_t g = 0; g < m.kv_heads; g++) {
      const float* from = qkv + (m.heads + part * m.kv_heads + g) * d;
      float* to = row.cache + (((layer * 2 + part) * m.kv_heads + g) * row.capacity + row.position) * d;
      for (int64_t i = 0; i < d; i++) to[i] = from[i];
    }
}

// The keys and values of all rows; what comes of it for the last `wanted` of them, in `normed`.
void attention(const Model& m, int64_t layer, const Row* rows, int64_t n, int64_t wanted, const Work& w) {
  const Layer& l = m.layer[layer];
  const int64_t me = omp_get_thread_num(), threads = omp_get_num_threads();
  const int64_t width = padded(m.width), wide = padded(l.qkv.outputs), mixed = padded(l.out.inputs);
  product(l.qkv, ready(l.qkv, w.normed, width, n, w), n, w.wide, wide);
#pragma omp barrier
  for (int64_t i = share(n, me); i < share(n, me + 1); i++)
    place(m, layer, rows[i], w.wide + i * wide);
#pragma omp barrier
  for (int64_t t = me; t < wanted * m.kv_heads; t += threads) {
    const int64_t i = t / m.kv_heads, from = n - wanted + i;
    attend(m, layer, rows[from], w.wide + from * wide, t % m.kv_heads, w.scores + me * w.longest, w.mixed + i * mixed);
  }
#pragma omp barrier
  product(l.out, ready(l.out, w.mixed, mixed, wanted, w), wanted, w.normed, width);
#pragma omp barrier
}

void feed_forward(const Model& m, const Layer& l, int64_t n, const Work& w) {
  const int64_t me = omp_get_thread_num(), threads = omp_get_num_threads();
  const int64_t width = padded(m.width), wide = padded(2 * m.ffn), ffn = padded(m.ffn);
  product(l.gate_up, ready(l.gate_up, w.normed, width, n, w), n, w.wide, wide);
#pragma omp barrier
  const int64_t first = m.ffn / 8 * me / threads * 8, last = me + 1 == threads ? m.ffn : m.ffn / 8 * (me + 1) / threads * 8;
  for (int64_t i = 0; i < n; i++)
    silu_times(w.wide + i * wide + first, w.wide + i * wide + m.ffn + first, w.mixed + i * ffn + first, last - first);
#pragma omp barrier
  product(l.down, ready(l.down, w.mixed, ffn, n, w), n, w.normed, width);
#pragma omp barrier
}

// x += what the last product left in `normed`; normed = norm(x). For this thread's rows.
void add_and_norm(const Model& m, const float* weight, bool pending, int64_t n, const Work& w) {
  const int64_t me = omp_get_thread_num(), width = padded(m.width);
  for (int64_t i = share(n, me); i < share(n, me + 1); i++) {
    float *x = w.x + i * width, *y = w.normed + i * width;
    if (pending) add(x, y, m.width);
    if (weight) rms_norm(x, weight, y, m.width, m.eps);
  }
#pragma omp barrier
}

}  // namespace

extern "C" {

// Floats of scratch memory that a pass over n rows needs, the longest of which sees `longest` positions.
int64_t slipstream_work(const Model* m, int64_t n, int64_t longest, int64_t threads) {
  const int64_t width = padded(m->width), qkv = padded((m->heads + 2 * m->kv_heads) * m->head_dim);
  const int64_t mixed = max(padded(m->heads * m->head_dim), padded(m->ffn)), wide = max(qkv, padded(2 * m->ffn));
  return n * (width + wide + mixed + max(width, mixed) / 2 + 1) + threads * padded(longest) + 64;
}

// Layers [first, last) over n rows, then, if num_logits, the output layer over the last num_logits rows.
//   rows    (n), x (n, width padded to 16): embeddings in, hidden states out; not those of rows without logits, if the
//           output layer is run, since the last layer then works on the others only
//   logits  (num_logits, vocabulary padded to 16)
//   work    `slipstream_work` floats
void slipstream_forward(const Model* model, int64_t first, int64_t last, int64_t n, const Row* rows, float* x, int64_t num_logits, float* logits, float* work, int64_t longest, int64_t threads) {
  const Model& m = *model;
  const int64_t width = padded(m.width), qkv = padded((m.heads + 2 * m.kv_heads) * m.head_dim);
  const int64_t mixed = max(padded(m.heads * m.head_dim), padded(m.ffn)), wide = max(qkv, padded(2 * m.ffn));
  Work w;
  w.x = x;
  w.normed = work;
  w.wide = w.normed + n * width;
  w.mixed = w.wide + n * wide;
  w.steps = (int16_t*)(w.mixed + n * mixed);
  w.step = (float*)(w.steps + n * max(width, mixed));
  w.scores = w.step + n;
  w.longest = padded(longest);
#pragma omp parallel num_threads(threads)
  {
    Work mine = w;
    bool pending = false;
    int64_t wanted = n;
    for (int64_t i = first; i < last; i++) {
      add_and_norm(m, m.layer[i].attention_norm, pending, wanted, mine);
      if (num_logits && i + 1 == last) wanted = num_logits;
      attention(m, i, rows, n, wanted, mine);
      mine.x = x + (n - wanted) * width;
      add_and_norm(m, m.layer[i].mlp_norm, true, wanted, mine);
      feed_forward(m, m.layer[i], wanted, mine);
      pending = true;
    }
    add_and_norm(m, num_logits ? m.norm : nullptr, pending, wanted, mine);
    if (num_logits) {
      const float* from = mine.normed + (wanted - num_logits) * width;
      product(m.head, ready(m.head, from, width, num_logits, w), num_logits, logits, padded(m.head.outputs));
    }
  }
}

// y (n, outputs padded to 16) = x (n, inputs padded to 16) W^T + b; scratch: steps (n, inputs padded to 16), step (n).
void slipstream_linear(const Linear* l, int64_t n, const float* x, float* y, int16_t* steps, float* step,
                       int64_t threads) {
  Work w = {};
  w.steps = steps;
  w.step = step;
#pragma omp parallel num_threads(threads)
  product(*l, ready(*l, x, padded(l->inputs), n, w), n, y, padded(l->outputs));
}

}  // extern "C"
