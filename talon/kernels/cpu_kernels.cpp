// Products of a few rows with a matrix, on a CPU: what a round at batch size 1 consists of.
//
// Libraries are tuned for many rows and lose most of a core's speed at 2 to 64 of them, which is
// where a draft tree lives. Here a weight is read from memory once, whatever the number of rows.
// Every sum is taken in one fixed order, so a row's result does not depend on the rows beside it: of
// these operators a tree gets the very numbers that plain decoding gets. The order is written out,
// and the compiler is told not to fuse or to reorder. cpu_kernels.py compiles and loads this.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <type_traits>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#endif
// The level of the integers: 1 AVX2, 2 VNNI of 256 bits (by other names where there is the third, for
// tests: TALON_NARROW), 3 VNNI of 512 bits, 4 AMX too.
#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && !defined(TALON_NARROW)
#define TALON_LEVEL 3
#if defined(__AMX_INT8__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define TALON_AMX
#endif
#elif defined(__AVX2__) && defined(__FMA__)
#if defined(__AVXVNNI__)
#define TALON_LEVEL 2
#define TALON_DOT _mm256_dpbusd_avx_epi32
#elif defined(__AVX512VNNI__) && defined(__AVX512VL__)
#define TALON_LEVEL 2
#define TALON_DOT _mm256_dpbusd_epi32
#else
#define TALON_LEVEL 1
#endif
#else
#define TALON_LEVEL 0
#endif

#define UNROLL _Pragma("GCC unroll 8")

namespace {

using torch::stable::Tensor;

// The operators take what is said above them, and nothing else.
void check(const Tensor& t, torch::headeronly::ScalarType type, std::initializer_list<long> sizes) {
  bool good = t.scalar_type() == type && t.is_contiguous() && t.dim() == static_cast<long>(sizes.size());
  long at = 0;
  for (long size : sizes) good = good && (size < 0 || t.size(at) == size), at++;
  STD_TORCH_CHECK(good, "talon: a tensor has another dtype, shape or layout than its operator takes");
}

constexpr auto FP32 = torch::headeronly::ScalarType::Float, BF16 = torch::headeronly::ScalarType::BFloat16;
// Scales and zeros of 4-bit groups: bf16, or fp32 where another program's rounding is kept.
template <class S>
constexpr auto PAIR = std::is_same_v<S, float> ? FP32 : BF16;
constexpr auto INT8 = torch::headeronly::ScalarType::Char, UINT8 = torch::headeronly::ScalarType::Byte;
constexpr auto BOOL = torch::headeronly::ScalarType::Bool;

inline float widened(float x) { return x; }

inline float widened(uint16_t bits) {  // of bf16
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float x;
  std::memcpy(&x, &word, sizeof x);
  return x;
}

// ---------------------------------------------------------------- floating point
// A task is OUTS rows of the weight, which stay in the first cache while the rows of x pass by in
// blocks: a block's sums fill the vector registers. Compilers vectorise this badly by themselves.

#if defined(__AVX512F__) && defined(__AVX512DQ__) && !defined(TALON_NARROW)
constexpr int LANES = 16, ROWS = 6;
typedef __m512 Vector;
inline Vector load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vector v) { _mm512_storeu_ps(p, v); }
inline Vector fma(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
inline void store_sums(float* p, Vector a, Vector b, Vector c, Vector d) {
  const Vector ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const Vector cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512d low = _mm512_castps_pd(ab), high = _mm512_castps_pd(cd);
  const Vector four = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(low, high)), _mm512_castpd_ps(_mm512_unpackhi_pd(low, high)));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(four), _mm512_extractf32x8_ps(four, 1));
  _mm_storeu_ps(p, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}
inline Vector larger(Vector a, Vector b) { return _mm512_max_ps(a, b); }
inline float largest(Vector v) { return _mm512_reduce_max_ps(v); }
inline Vector nearest(Vector x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vector times_power(Vector x, Vector n) { return _mm512_scalef_ps(x, n); }
inline Vector load(const uint16_t* p) {  // bf16
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
}
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int LANES = 8, ROWS = 3;
typedef __m256 Vector;
inline Vector load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Vector v) { _mm256_storeu_ps(p, v); }
inline Vector fma(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
inline void store_sums(float* p, Vector a, Vector b, Vector c, Vector d) {
  const Vector four = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  _mm_storeu_ps(p, _mm_add_ps(_mm256_castps256_ps128(four), _mm256_extractf128_ps(four, 1)));
}
inline Vector larger(Vector a, Vector b) { return _mm256_max_ps(a, b); }
inline float largest(Vector v) {
  float lane[LANES];
  store(lane, v);
  return *std::max_element(lane, lane + LANES);
}
inline Vector nearest(Vector x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vector times_power(Vector x, Vector n) {
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23)));
}
inline Vector load(const uint16_t* p) {  // bf16
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16));
}
#else
constexpr int LANES = 4, ROWS = 3;
typedef float Vector __attribute__((vector_size(16)));
inline Vector load(const float* p) { return Vector{p[0], p[1], p[2], p[3]}; }
inline Vector load(const uint16_t* p) { return Vector{widened(p[0]), widened(p[1]), widened(p[2]), widened(p[3])}; }
inline void store(float* p, Vector v) { std::memcpy(p, &v, sizeof v); }
inline Vector fma(Vector a, Vector b, Vector c) {
#ifdef __FP_FAST_FMAF
  for (int i = 0; i < LANES; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#else
  return a * b + c;
#endif
}
inline float sum(Vector v) { return (v[0] + v[2]) + (v[1] + v[3]); }
inline void store_sums(float* p, Vector a, Vector b, Vector c, Vector d) { p[0] = sum(a), p[1] = sum(b), p[2] = sum(c), p[3] = sum(d); }
inline Vector larger(Vector a, Vector b) { return a > b ? a : b; }
inline float largest(Vector v) { return std::max(std::max(v[0], v[1]), std::max(v[2], v[3])); }
inline Vector nearest(Vector x) { return Vector{std::nearbyint(x[0]), std::nearbyint(x[1]), std::nearbyint(x[2]), std::nearbyint(x[3])}; }
inline Vector times_power(Vector x, Vector n) {
  for (int i = 0; i < LANES; i++) x[i] = std::ldexp(x[i], static_cast<int>(n[i]));
  return x;
}
#endif
inline Vector all(float x) { return x - Vector{}; }
constexpr int OUTS = 4;

// Weights come from memory once and in order, but in pieces too short for the processor to see
// that. Asking for the task after the next while this one is computed hides the wait.
inline void ask_ahead(const void* here, long task_bytes) {
  __builtin_prefetch(static_cast<const char*>(here) + 2 * task_bytes);
}

// y[r][o] = x[r] . w[o] * scale[o] for R rows of x [*, K] and OUTS rows of w [*, K], of which `outs`
// are kept; without a scale if it is null
template <int R, bool STREAM, typename W>
void dot(const float* x, const W* w, long K, const float* scale, float* y, long width, int outs) {
  Vector sums[R][OUTS];
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int o = 0; o < OUTS; o++) sums[r][o] = Vector{};
  long k = 0;
  for (; k + LANES <= K; k += LANES) {
    Vector part[OUTS];
    UNROLL for (int o = 0; o < OUTS; o++) {
      part[o] = load(w + o * K + k);
      if (STREAM) ask_ahead(w + o * K + k, OUTS * K * sizeof(W));
    }
    UNROLL for (int r = 0; r < R; r++) {
      const Vector row = load(x + r * K + k);
      UNROLL for (int o = 0; o < OUTS; o++) sums[r][o] = fma(row, part[o], sums[r][o]);
    }
  }
  UNROLL for (int r = 0; r < R; r++) {
    float total[OUTS];
    store_sums(total, sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
    for (int o = 0; o < outs; o++) {
      for (long i = k; i < K; i++) total[o] += x[r * K + i] * widened(w[o * K + i]);
      y[r * width + o] = scale ? total[o] * scale[o] : total[o];
    }
  }
}

template <int R, bool STREAM, typename W>
void dot_block(int rows, const float* x, const W* w, long K, const float* scale, float* y, long width, int outs) {
  if (rows == R) return dot<R, STREAM>(x, w, K, scale, y, width, outs);
  if constexpr (R > 1) dot_block<R - 1, STREAM>(rows, x, w, K, scale, y, width, outs);
}

// x fp32 [T, K] times the transpose of a weight [O, K]. `rows(o, outs, buffer)` gives its rows o to
// o + outs - 1: where they lie (STREAM), or decoded into the buffer.
template <bool STREAM, typename RowsOf>
Tensor multiply(const Tensor& x, long O, const float* scale, RowsOf rows) {
  const long T = x.size(0), K = x.size(1);
  Tensor y = torch::stable::new_empty(x, {T, O});
  const float* from = static_cast<const float*>(x.const_data_ptr());
  float* to = static_cast<float*>(y.mutable_data_ptr());
  const long blocks = (T + ROWS - 1) / ROWS, block = T ? (T + blocks - 1) / blocks : 1;
  const long grain = std::max(1L, 65536 / std::max(1L, OUTS * K * T));  // less is not worth a core
  torch::stable::parallel_for(0, (O + OUTS - 1) / OUTS, grain, [&](int64_t begin, int64_t end) {
    static thread_local std::vector<float> buffer;
    buffer.resize(std::max<size_t>(buffer.size(), OUTS * K));
    for (long task = begin; task < end; task++) {
      const long o = task * OUTS;
      const int outs = static_cast<int>(std::min<long>(OUTS, O - o));
      const float* factor = scale ? scale + o : nullptr;
      auto w = rows(o, outs, buffer.data());
      if (STREAM && outs < OUTS) {  // a task reads OUTS rows, of which the last one's must exist
        std::memcpy(buffer.data(), w, outs * K * sizeof *w);
        w = reinterpret_cast<decltype(w)>(buffer.data());
      }
      for (long t = 0; t < T; t += block) {
        const int count = static_cast<int>(std::min(block, T - t));
        if (STREAM && !t)
          dot_block<ROWS, true>(count, from, w, K, factor, to + o, O, outs);
        else
          dot_block<ROWS, false>(count, from + t * K, w, K, factor, to + t * O + o, O, outs);
      }
    }
  });
  return y;
}

// x fp32 [T, K], weight fp32 or bf16 [O, K] -> fp32 [T, O]
Tensor float_rows(Tensor x, Tensor weight) {
  const bool half = weight.scalar_type() == BF16;
  check(x, FP32, {-1, weight.size(1)}), check(weight, half ? BF16 : FP32, {-1, -1});
  const void* w = weight.const_data_ptr();
  const long K = x.size(1), O = weight.size(0);
  if (half) return multiply<true>(x, O, nullptr, [=](long o, int, float*) { return static_cast<const uint16_t*>(w) + o * K; });
  return multiply<true>(x, O, nullptr, [=](long o, int, float*) { return static_cast<const float*>(w) + o * K; });
}

// x fp32 [T, K], weight int8 [O, K], scales fp32 [O] -> fp32 [T, O]. Plain loops, as the next one:
// for CPUs that do not multiply integers quickly.
Tensor int8_rows(Tensor x, Tensor weight, Tensor scales) {
  check(x, FP32, {-1, weight.size(1)}), check(weight, INT8, {-1, -1}), check(scales, FP32, {weight.size(0)});
  const int8_t* w = static_cast<const int8_t*>(weight.const_data_ptr());
  const float* scale = static_cast<const float*>(scales.const_data_ptr());
  const long K = x.size(1);
  return multiply<false>(x, weight.size(0), scale, [=](long first, int outs, float* buffer) {
    for (long k = 0; k < outs * K; k++) buffer[k] = w[first * K + k];  // the rows follow without a gap
    return static_cast<const float*>(buffer);
  });
}

// x fp32 [T, K], weight uint8 [O, K/2], scales and zeros S [O, K/groupsize] -> fp32 [T, O]
// Byte j of a group holds step j in its low half and step j + groupsize/2 in its high half.
template <class S>
Tensor int4_rows_of(Tensor x, Tensor weight, Tensor scales, Tensor zeros, int64_t groupsize) {
  check(x, FP32, {-1, 2 * weight.size(1)}), check(weight, UINT8, {-1, -1});
  for (const Tensor& t : {scales, zeros}) check(t, PAIR<S>, {weight.size(0), x.size(1) / groupsize});
  const uint8_t* w = static_cast<const uint8_t*>(weight.const_data_ptr());
  const S* scale = static_cast<const S*>(scales.const_data_ptr());
  const S* zero_of = static_cast<const S*>(zeros.const_data_ptr());
  const long K = x.size(1), groups = K / groupsize, half = groupsize / 2;
  return multiply<false>(x, weight.size(0), nullptr, [=](long first, int outs, float* buffer) {
    for (int o = 0; o < outs; o++)
      for (long g = 0; g < groups; g++) {
        const long at = (first + o) * groups + g;
        const float unit = widened(scale[at]), base = widened(zero_of[at]) - 8 * unit;
        float* row = buffer + o * K + g * groupsize;
        for (long k = 0; k < half; k++) {
          const uint8_t both = w[at * half + k];
          row[k] = (both & 15) * unit + base, row[half + k] = (both >> 4) * unit + base;
        }
      }
    return static_cast<const float*>(buffer);
  });
}

Tensor int4_rows(Tensor x, Tensor weight, Tensor scales, Tensor zeros, int64_t groupsize) {
  const bool whole = scales.scalar_type() == FP32;
  return (whole ? int4_rows_of<float> : int4_rows_of<uint16_t>)(x, weight, scales, zeros, groupsize);
}

// ---------------------------------------------------------------- attention
// Queries that share keys and values are rows; a few tokens' rows pass through three steps, each
// over parts: scores by blocks of keys, weights by rows, sums by rows and 4 * LANES or 32 columns.

constexpr int WEIGHED = LANES == 16 ? 6 : 2, COLUMNS = LANES == 16 ? 2 : 4;  // sums that fit the registers
constexpr long KEYS = 128, VALUES = 64, BAND = 48, SUMMED = 12;  // of a block: keys, values, rows scored, rows summed
constexpr long BANDS = 512;  // rows of all groups together

// Add p [R, *] v [S, D] to y [R, D], and the sum of each row of p to `total`; rows of p `width` apart.
// Sums go from slot to slot, one after another: slots with weight 0 between them change nothing, so
// a node of a tree gets the numbers that it would get at its place in the text.
template <int R, typename W>
void weigh(const float* p, long width, const W* v, long S, long D, float* y, float* total) {
  Vector sums[R][COLUMNS], whole[R];
  UNROLL for (int r = 0; r < R; r++) {
    whole[r] = all(total[r]);
    UNROLL for (int i = 0; i < COLUMNS; i++) sums[r][i] = load(y + r * D + i * LANES);
  }
  for (long s = 0; s < S; s++) {
    Vector part[COLUMNS];
    UNROLL for (int i = 0; i < COLUMNS; i++) part[i] = load(v + s * D + i * LANES);
    UNROLL for (int r = 0; r < R; r++) {
      const Vector weight = all(p[r * width + s]);
      whole[r] = whole[r] + weight;
      UNROLL for (int i = 0; i < COLUMNS; i++) sums[r][i] = fma(weight, part[i], sums[r][i]);
    }
  }
  UNROLL for (int r = 0; r < R; r++) {
    float lanes[LANES];
    store(lanes, whole[r]);
    total[r] = lanes[0];
    UNROLL for (int i = 0; i < COLUMNS; i++) store(y + r * D + i * LANES, sums[r][i]);
  }
}

template <int R, typename W>
void weigh_block(int rows, const float* p, long width, const W* v, long S, long D, float* y, float* total) {
  if (rows == R) return weigh<R>(p, width, v, S, D, y, total);
  if constexpr (R > 1) weigh_block<R - 1>(rows, p, width, v, S, D, y, total);
}

// y [rows, from:to] = p [rows, S] v [S, from:to] / (sum of each row of p)
template <typename W>
void weigh_columns(int rows, const float* p, long width, const W* v, long S, long D, float* y, long from, long to) {
  float total[SUMMED] = {};
  for (int r = 0; r < rows; r++) std::fill(y + r * D + from, y + r * D + to, 0.0f);
  if (to - from == COLUMNS * LANES) {
    for (long s = 0; s < S; s += VALUES)
      for (int r = 0; r < rows; r += WEIGHED)
        weigh_block<WEIGHED>(std::min(WEIGHED, rows - r), p + r * width + s, width, v + s * D + from, std::min(VALUES, S - s), D, y + r * D + from, total + r);
  } else {
    for (int r = 0; r < rows; r++)
      for (long s = 0; s < S; s++) {
        total[r] += p[r * width + s];
        for (long d = from; d < to; d++) y[r * D + d] += p[r * width + s] * widened(v[s * D + d]);
      }
  }
  for (int r = 0; r < rows; r++)
    for (long d = from; d < to; d++) y[r * D + d] /= total[r];
}

// e^x for x from -87 to 0, to 2e-7 relative: 2^n e^r, e^r by Taylor's terms to the seventh
inline Vector exp(Vector x) {
  const Vector n = nearest(fma(x, all(1.44269504f), Vector{}));
  const Vector r = fma(n, all(1.42860677e-6f), fma(n, all(-0.693148612976f), x));  // x - n ln 2
  Vector p = all(1 / 5040.f);
  for (float term : {1 / 720.f, 1 / 120.f, 1 / 24.f, 1 / 6.f, 0.5f, 1.f, 1.f}) p = fma(p, r, all(term));
  return times_power(p, n);
}

// e^(score - largest score) of the slots seen, exactly 0 elsewhere; `width` is a multiple of LANES.
void weights_of(float* scores, const bool* seen, long S, long width) {
  const void* hole = std::memchr(seen, 0, S);  // before it all slots are seen, as in a text
  const long first = hole ? static_cast<const bool*>(hole) - seen : S;
  auto hide = [=](float value) {
    for (long s = first; s < width; s++)
      if (s >= S || !seen[s]) scores[s] = value;
  };
  hide(-3e38f);
  Vector top = all(-3e38f);
  for (long s = 0; s < width; s += LANES) top = larger(top, load(scores + s));
  const Vector most = all(-largest(top));
  for (long s = 0; s < width; s += LANES) store(scores + s, exp(larger(load(scores + s) + most, all(-87))));
  hide(0);
}

template <typename W>
void attend_as(const float* q, const W* kv, const bool* seen, float* y, long T, long H, long D, long G, long depth, long S) {
  const long share = H / G, most = std::max(1L, std::min(BAND / share, BANDS / H));  // tokens of a band
  const long parts = std::max(1L, D / (COLUMNS * LANES)) + (D > COLUMNS * LANES && D % (COLUMNS * LANES) != 0);
  static thread_local std::vector<float> own;
  for (long t = 0, tokens; t < T; t += tokens) {
    tokens = std::min(most, T - t);
    long end = 0;  // what lies past it is hidden from every row
    for (long u = t; u < t + tokens; u++)
      for (long s = S; s > end; s--)
        if (seen[u * S + s - 1]) end = s;
    const long rows = tokens * share, width = (end + LANES - 1) / LANES * LANES;
    own.resize(std::max<size_t>(own.size(), G * rows * (width + 2 * D)));
    float *scores = own.data(), *x = scores + G * rows * width, *out = x + G * rows * D;
    auto place = [=](long r) { return ((t + r % rows / share) * H + r / rows * share + r % share) * D; };
    const float scale = 1 / std::sqrt(static_cast<float>(D));
    for (long r = 0; r < G * rows; r++)
      for (long d = 0; d < D; d++) x[r * D + d] = q[place(r) + d] * scale;
    const long blocks = (width + KEYS - 1) / KEYS, sets = (rows + SUMMED - 1) / SUMMED;
    auto grain = [](long work) { return std::max(1L, 32768 / std::max(1L, work)); };  // worth a core
    torch::stable::parallel_for(0, G * blocks, grain(rows * KEYS * D), [&](int64_t begin, int64_t finish) {
      std::vector<W> last;
      for (long task = begin; task < finish; task++) {
        const long g = task / blocks, first = task % blocks * KEYS;
        for (long r = 0; r < rows; r += ROWS)
          for (long s = first; s < std::min(first + KEYS, width); s += OUTS) {
            const W* part = kv + (g * depth + s) * D;
            if (s + OUTS > depth) {  // the cache ends here
              last.assign(OUTS * D, W());
              if (s < depth) std::memcpy(last.data(), part, (depth - s) * D * sizeof(W));
              part = last.data();
            }
            const long at = g * rows + r;
            dot_block<ROWS, false>(std::min<long>(ROWS, rows - r), x + at * D, part, D, nullptr, scores + at * width + s, width, OUTS);
          }
      }
    });
    torch::stable::parallel_for(0, G * rows, grain(8 * width), [&](int64_t begin, int64_t finish) {
      for (long r = begin; r < finish; r++) weights_of(scores + r * width, seen + (t + r % rows / share) * S, S, width);
    });
    torch::stable::parallel_for(0, G * sets * parts, grain(std::min(rows, SUMMED) * end * 32), [&](int64_t begin, int64_t finish) {
      for (long task = begin; task < finish; task++) {
        const long g = task / parts / sets, r = task / parts % sets * SUMMED, from = task % parts * COLUMNS * LANES;
        const long at = g * rows + r, to = parts == 1 ? D : std::min(D, from + COLUMNS * LANES);
        weigh_columns(std::min(SUMMED, rows - r), scores + at * width, width, kv + (G + g) * depth * D, end, D, out + at * D, from, to);
      }
    });
    for (long r = 0; r < G * rows; r++) std::memcpy(y + place(r), out + r * D, D * sizeof(float));
  }
}

// q fp32 [T, H, D], kv fp32 or bf16 [2, G, R, D], mask bool [T, S] -> fp32 [T, H * D]
Tensor attend(Tensor q, Tensor kv, Tensor mask) {
  const bool half = kv.scalar_type() == BF16;
  check(q, FP32, {-1, -1, -1}), check(kv, half ? BF16 : FP32, {2, -1, -1, q.size(2)}), check(mask, BOOL, {q.size(0), -1});
  const long T = q.size(0), H = q.size(1), D = q.size(2);
  Tensor y = torch::stable::new_empty(q, {T, H * D});
  auto run = [&](auto* keys) {
    attend_as(static_cast<const float*>(q.const_data_ptr()), keys, static_cast<const bool*>(mask.const_data_ptr()), static_cast<float*>(y.mutable_data_ptr()), T, H, D, kv.size(1), kv.size(2), mask.size(1));
  };
  half ? run(static_cast<const uint16_t*>(kv.const_data_ptr())) : run(static_cast<const float*>(kv.const_data_ptr()));
  return y;
}

// ---------------------------------------------------------------- integers
// int8 activations times int8 weights. A task is UNIT outputs. The instructions want one side
// unsigned: weights are stored + 128 as uint8 [O/16][K/4][16][4], and 128 times the sum of a row of
// x is taken off again; AVX2, whose sums of pairs end at 16 bits, moves the sign of x to the weight
// instead: 2 * 128 * 127 fits. All sums are exact, so every level gives the same bits.

#if TALON_LEVEL

constexpr long BLOCK = 16, UNIT = 4 * BLOCK, MOST_GROUPSIZE = 256, SHARE_TILE = 8;
constexpr float TINY = 1e-30f;  // as in linear.py

#if TALON_LEVEL >= 3
typedef __m512i Ints;
typedef __m512 Floats;
constexpr long WIDTH = 16;
#define TALON_DO(name) _mm512_##name
inline Ints ints(const void* p) { return _mm512_loadu_si512(p); }
inline void keep(void* p, Ints v) { _mm512_storeu_si512(p, v); }
inline void keep_bytes(int8_t* p, Ints v) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(v)); }
inline Ints low_halves(Ints w) { return _mm512_and_si512(w, _mm512_set1_epi8(15)); }
#else
typedef __m256i Ints;
typedef __m256 Floats;
constexpr long WIDTH = 8;
#define TALON_DO(name) _mm256_##name
inline Ints ints(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline void keep(void* p, Ints v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }
inline void keep_bytes(int8_t* p, Ints v) {
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
}
inline Ints low_halves(Ints w) { return _mm256_and_si256(w, _mm256_set1_epi8(15)); }
#endif

// Sums of four products each: `dot` with the stored weights, `dot_halves` with steps of 4 bits, of
// which `opened` begins and `closed` ends at most 8 in a row.
#if TALON_LEVEL == 1
constexpr int OFFSET = 0;
inline Ints weights(const uint8_t* p) { return _mm256_xor_si256(ints(p), _mm256_set1_epi8(-128)); }
inline Ints pairs(Ints words) { return _mm256_madd_epi16(words, _mm256_set1_epi16(1)); }
inline Ints dot(Ints sum, Ints w, Ints x) {
  return _mm256_add_epi32(sum, pairs(_mm256_maddubs_epi16(_mm256_abs_epi8(x), _mm256_sign_epi8(w, x))));
}
inline Ints dot_halves(Ints sum, Ints w, Ints x) { return _mm256_add_epi16(sum, _mm256_maddubs_epi16(w, x)); }
inline Ints opened(Ints) { return _mm256_setzero_si256(); }
inline Ints closed(Ints sum, Ints part) { return _mm256_add_epi32(sum, pairs(part)); }
#else
#if TALON_LEVEL >= 3
#define TALON_DOT _mm512_dpbusd_epi32
#endif
constexpr int OFFSET = 128;
inline Ints weights(const uint8_t* p) { return ints(p); }
inline Ints dot(Ints sum, Ints w, Ints x) { return TALON_DOT(sum, w, x); }
inline Ints dot_halves(Ints sum, Ints w, Ints x) { return TALON_DOT(sum, w, x); }
inline Ints opened(Ints sum) { return sum; }
inline Ints closed(Ints, Ints part) { return part; }
#endif
constexpr long PARTS = BLOCK / WIDTH, BESIDE = TALON_LEVEL >= 3 ? 4 : 2;  // vectors of a block; of a row, whose sums fit the registers

struct Steps {  // rows of activations as int8, each with 128 times its sum; the scales of x's rows
  std::vector<int8_t> steps;
  std::vector<int32_t> shifts;
  std::vector<float> scales;
  std::vector<float> sums;  // for groups: [T, groups], of the steps of a group of a row of x

  void reserve(size_t rows, size_t K, size_t groups) {  // only grows: a round allocates nothing
    steps.resize(std::max(steps.size(), rows * K));
    shifts.resize(std::max(shifts.size(), rows));
    scales.resize(std::max(scales.size(), rows));
    sums.resize(std::max(sums.size(), rows * groups));
  }
};

inline int32_t sum_of(Ints v) {
  int32_t lanes[WIDTH], sum = 0;
  keep(lanes, v);
  for (int32_t lane : lanes) sum += lane;
  return sum;
}

// Round row t of T to 8 bits, or to 16 bits as two rows: 256 * row t + row T + t.
void round_row(Steps& to, const float* x, long t, long T, long K, long padded, int planes) {
  const Floats sign = TALON_DO(set1_ps)(-0.0f);
  auto part = [&](long k) {
    if (k + WIDTH <= K) return TALON_DO(loadu_ps)(x + t * K + k);
    float tail[WIDTH] = {};
    if (k < K) std::memcpy(tail, x + t * K + k, (K - k) * sizeof(float));
    return TALON_DO(loadu_ps)(tail);
  };
  float tops[WIDTH];
  Floats top = TALON_DO(setzero_ps)();
  for (long k = 0; k < K; k += WIDTH) top = TALON_DO(max_ps)(top, TALON_DO(andnot_ps)(sign, part(k)));
  TALON_DO(storeu_ps)(tops, top);
  const float scale = std::max(*std::max_element(tops, tops + WIDTH), TINY) / (planes == 2 ? 127 * 256 : 127);
  Ints total = TALON_DO(set1_epi32)(0), low_total = total;
  for (long k = 0; k < padded; k += WIDTH) {
    Ints step = TALON_DO(cvtps_epi32)(TALON_DO(div_ps)(part(k), TALON_DO(set1_ps)(scale)));
    if (planes == 2) {
      const Ints high = TALON_DO(srai_epi32)(TALON_DO(add_epi32)(step, TALON_DO(set1_epi32)(128)), 8);
      const Ints low = TALON_DO(sub_epi32)(step, TALON_DO(slli_epi32)(high, 8));
      low_total = TALON_DO(add_epi32)(low_total, low);
      keep_bytes(&to.steps[(T + t) * padded + k], low);
      step = high;
    }
    total = TALON_DO(add_epi32)(total, step);
    keep_bytes(&to.steps[t * padded + k], step);
  }
  to.scales[t] = scale;
  to.shifts[t] = OFFSET * sum_of(total);
  if (planes == 2) to.shifts[T + t] = OFFSET * sum_of(low_total);
}

inline Ints four_steps(const int8_t* at) {
  int32_t four;
  std::memcpy(&four, at, 4);
  return TALON_DO(set1_epi32)(four);
}

// sums [R, UNIT] of R rows with a unit of outputs
template <int R>
void dot_rows(const int8_t* steps, long K, const uint8_t* w, int32_t* sums) {
  for (long b = 0; b < UNIT / WIDTH; b += BESIDE) {
    Ints total[R][BESIDE];
    const uint8_t* from[BESIDE];
    UNROLL for (int i = 0; i < BESIDE; i++) {
      from[i] = w + (b + i) / PARTS * K * BLOCK + (b + i) % PARTS * 4 * WIDTH;
      UNROLL for (int r = 0; r < R; r++) total[r][i] = TALON_DO(set1_epi32)(0);
    }
    for (long k = 0; k < K; k += 4) {
      Ints part[BESIDE];
      UNROLL for (int i = 0; i < BESIDE; i++) part[i] = weights(from[i] + k * BLOCK);
      UNROLL for (int r = 0; r < R; r++) {
        const Ints x = four_steps(steps + r * K + k);
        UNROLL for (int i = 0; i < BESIDE; i++) total[r][i] = dot(total[r][i], part[i], x);
      }
    }
    UNROLL for (int r = 0; r < R; r++)
      UNROLL for (int i = 0; i < BESIDE; i++) keep(sums + r * UNIT + (b + i) * WIDTH, total[r][i]);
  }
}

#ifdef TALON_AMX

// The kernel lets a process use the tiles once it has asked.
bool amx_granted() {
  constexpr long request = 0x1023, tile_data = 18;
  static const bool granted = syscall(SYS_arch_prctl, request, tile_data) == 0;
  return granted;
}

// What is written before is in memory: compilers do not know that the tile instructions read it.
inline void written(const void* at) { __asm__ volatile("" : : "r"(at) : "memory"); }

// Tiles 3 and 4 have `rows` rows of `depth` bytes and are multiplied with tile 2 into 0 and 1; the
// others are whole.
void configure_tiles(long rows = 16, long depth = 64) {
  struct alignas(64) { uint8_t palette = 1, start = 0, unused[14] = {}; uint16_t bytes[16] = {}; uint8_t rows[16] = {}; } c;
  for (int tile = 0; tile < 8; tile++) c.bytes[tile] = 64, c.rows[tile] = 16;
  for (int tile : {0, 1, 3, 4}) c.rows[tile] = rows;
  c.rows[2] = depth / 4, c.bytes[3] = c.bytes[4] = depth;
  written(&c);
  _tile_loadconfig(&c);
  written(&c);
}

// sums [16, UNIT] of 16 rows
void dot_amx16(const int8_t* x, long K, const uint8_t* w, int32_t* sums) {
  _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
  for (long k = 0; k < K; k += 64, w += 64 * BLOCK) {
    _tile_loadd(4, x + k, K);
    _tile_loadd(5, w, 64); _tile_dpbsud(0, 4, 5);
    _tile_loadd(6, w + K * BLOCK, 64); _tile_dpbsud(1, 4, 6);
    _tile_loadd(7, w + 2 * K * BLOCK, 64); _tile_dpbsud(2, 4, 7);
    _tile_loadd(5, w + 3 * K * BLOCK, 64); _tile_dpbsud(3, 4, 5);
  }
  _tile_stored(0, sums, UNIT * 4); _tile_stored(1, sums + BLOCK, UNIT * 4);
  _tile_stored(2, sums + 2 * BLOCK, UNIT * 4); _tile_stored(3, sums + 3 * BLOCK, UNIT * 4);
}

// sums [32, UNIT / 2] of 32 rows, into the columns of a table that is UNIT wide
void dot_amx32(const int8_t* x, long K, const uint8_t* w, int32_t* sums) {
  _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
  for (long k = 0; k < K; k += 64, w += 64 * BLOCK) {
    _tile_loadd(4, x + k, K); _tile_loadd(5, x + 16 * K + k, K);
    _tile_loadd(6, w, 64); _tile_dpbsud(0, 4, 6); _tile_dpbsud(1, 5, 6);
    _tile_loadd(7, w + K * BLOCK, 64); _tile_dpbsud(2, 4, 7); _tile_dpbsud(3, 5, 7);
  }
  _tile_stored(0, sums, UNIT * 4); _tile_stored(1, sums + 16 * UNIT, UNIT * 4);
  _tile_stored(2, sums + BLOCK, UNIT * 4); _tile_stored(3, sums + 16 * UNIT + BLOCK, UNIT * 4);
}

#endif

// sums [T, UNIT]; x has rows up to the next multiple of 32
void dot_unit(bool amx, const int8_t* x, long T, long K, const uint8_t* w, int32_t* sums) {
#ifdef TALON_AMX
  if (amx) {
    if (T <= 16) return dot_amx16(x, K, w, sums);
    for (long t = 0; t < T; t += 32) {
      dot_amx32(x + t * K, K, w, sums + t * UNIT);
      dot_amx32(x + t * K, K, w + 2 * K * BLOCK, sums + t * UNIT + 2 * BLOCK);
    }
    return;
  }
#endif
  constexpr decltype(&dot_rows<1>) few[] = {dot_rows<1>, dot_rows<2>, dot_rows<3>, dot_rows<4>};
  for (long t = 0; t < T; t += 4) few[std::min(T - t, 4L) - 1](x + t * K, K, w, sums + t * UNIT);
}

// x fp32 [T, K], weight uint8 [Op/16, Kp/4, 16, 4], scales fp32 [O] -> fp32 [T, O]. x is rounded row
// by row, to 8 bits (1 plane) or 16 (2 planes). `amx` chooses instructions; the result is the same.
Tensor integer_rows(Tensor x, Tensor weight, Tensor scales, int64_t planes, bool amx) {
  check(x, FP32, {-1, -1}), check(weight, UINT8, {-1, -1, 16, 4}), check(scales, FP32, {-1});
  const long T = x.size(0), K = x.size(1), O = scales.size(0), padded = 4 * weight.size(1), R = planes * T;
  Tensor y = torch::stable::new_empty(x, {T, O});
  const float* from = static_cast<const float*>(x.const_data_ptr());
  const uint8_t* w = static_cast<const uint8_t*>(weight.const_data_ptr());
  const float* scale = static_cast<const float*>(scales.const_data_ptr());
  float* to = static_cast<float*>(y.mutable_data_ptr());
  if (!T) return y;
  static thread_local Steps own;
  Steps& rows = own;  // this thread's, for all of them
  const long table = (R + 31) / 32 * 32;
  rows.reserve(table, padded, 0);
  torch::stable::parallel_for(0, T, std::max(1L, 16384 / (K + 1)), [&](int64_t begin, int64_t end) {
    for (long t = begin; t < end; t++) round_row(rows, from, t, T, K, padded, planes);
  });
  const long grain = std::max(1L, 131072 / (UNIT * padded));  // less is not worth a second core
  torch::stable::parallel_for(0, (O + UNIT - 1) / UNIT, grain, [&](int64_t begin, int64_t end) {
    static thread_local std::vector<int32_t> sums;
    sums.resize(std::max<size_t>(sums.size(), table * UNIT));
#ifdef TALON_AMX
    if (amx) configure_tiles();
#endif
    for (long unit = begin; unit < end; unit++) {
      dot_unit(amx, rows.steps.data(), R, padded, w + unit * UNIT * padded, sums.data());
      const long first = unit * UNIT, outs = std::min(UNIT, O - first);
      for (long t = 0; t < T; t++) {
        const int32_t *high = &sums[t * UNIT], *low = &sums[(T + t) * UNIT];
        float* y_row = to + t * O + first;
        if (planes == 2)
          for (long o = 0; o < outs; o++)
            y_row[o] = (256.0f * (high[o] - rows.shifts[t]) + (low[o] - rows.shifts[T + t])) * scale[first + o] * rows.scales[t];
        else
          for (long o = 0; o < outs; o++) y_row[o] = (high[o] - rows.shifts[t]) * scale[first + o] * rows.scales[t];
      }
    }
#ifdef TALON_AMX
    if (amx) _tile_release();
#endif
  });
  return y;
}

// Sums of each group of groupsize steps of 16 bits of row t.
void sum_groups(Steps& of, long t, long T, long padded, long groups, long groupsize) {
  const int8_t *high = &of.steps[t * padded], *low = &of.steps[(T + t) * padded];
  for (long g = 0; g < groups; g++) {
    int32_t sum = 0;
    for (long k = g * groupsize; k < (g + 1) * groupsize; k++) sum += 256 * high[k] + low[k];
    of.sums[t * groups + g] = static_cast<float>(sum);
  }
}

inline Floats block_of(const float* at) { return TALON_DO(loadu_ps)(at); }
inline Floats block_of(const uint16_t* at) {
#if TALON_LEVEL >= 3
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at))), 16));
#else
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))), 16));
#endif
}

// y [R, 16] of rows t to t + R - 1 with a block of 4-bit outputs: of a group, the sum of
// (step - 8) * scale + zero times x is scale * (sum of step * x) + (zero - 8 * scale) * (sum of x).
template <int R, class S>
void dot_groups(const Steps& of, long t, long, long T, long K, long groupsize, const uint8_t* w, const S* scales, const S* zeros, float* y) {
  const long groups = K / groupsize, half = groupsize / 2;
  Floats total[R][PARTS];
  for (int r = 0; r < R; r++)
    for (int p = 0; p < PARTS; p++) total[r][p] = TALON_DO(setzero_ps)();
  for (long g = 0; g < groups; g++, w += half * BLOCK)
    UNROLL for (int p = 0; p < PARTS; p++) {
      Ints high[R], low[R];
      UNROLL for (int r = 0; r < R; r++) high[r] = low[r] = TALON_DO(set1_epi32)(0);
      for (long k = 0; k < half; k += 16) {
        Ints more[R], less[R];
        UNROLL for (int r = 0; r < R; r++) more[r] = opened(high[r]), less[r] = opened(low[r]);
        UNROLL for (long i = k; i < k + 16; i += 4) {
          const uint8_t* at = w + i * BLOCK + p * 4 * WIDTH;
          const Ints both = ints(at), first = low_halves(both), second = low_halves(TALON_DO(srli_epi16)(both, 4));
          ask_ahead(at, 16 * half);
          UNROLL for (int r = 0; r < R; r++) {
            const int8_t* x = &of.steps[(t + r) * K + g * groupsize + i];
            more[r] = dot_halves(more[r], first, four_steps(x));
            more[r] = dot_halves(more[r], second, four_steps(x + half));
            less[r] = dot_halves(less[r], first, four_steps(x + T * K));
            less[r] = dot_halves(less[r], second, four_steps(x + T * K + half));
          }
        }
        UNROLL for (int r = 0; r < R; r++) high[r] = closed(high[r], more[r]), low[r] = closed(low[r], less[r]);
      }
      const Floats scale = block_of(scales + g * BLOCK + p * WIDTH);
      const Floats base = TALON_DO(fmadd_ps)(TALON_DO(set1_ps)(-8), scale, block_of(zeros + g * BLOCK + p * WIDTH));
      UNROLL for (int r = 0; r < R; r++) {
        const Ints sum = TALON_DO(add_epi32)(TALON_DO(slli_epi32)(high[r], 8), low[r]);
        total[r][p] = TALON_DO(fmadd_ps)(TALON_DO(cvtepi32_ps)(sum), scale, total[r][p]);
        total[r][p] = TALON_DO(fmadd_ps)(TALON_DO(set1_ps)(of.sums[(t + r) * groups + g]), base, total[r][p]);
      }
    }
  for (int r = 0; r < R; r++)
    for (int p = 0; p < PARTS; p++) TALON_DO(storeu_ps)(y + r * BLOCK + p * WIDTH, TALON_DO(mul_ps)(total[r][p], TALON_DO(set1_ps)(of.scales[t + r])));
}

#ifdef TALON_AMX
// The same for R <= 16 rows: the 4-bit steps of a group become a tile of bytes. Of up to SHARE_TILE
// rows the high and the low bytes of x share a tile; of more, each tile reads 16 rows.
template <class S>
void dot_groups_amx(const Steps& of, long t, long R, long T, long K, long groupsize, const uint8_t* w, const S* scales, const S* zeros, float* y) {
  const long groups = K / groupsize, half = groupsize / 2, depth = std::min(64L, groupsize);
  alignas(64) uint8_t steps[MOST_GROUPSIZE * BLOCK];
  alignas(64) int32_t sums[32 * BLOCK];
  const bool shared = T <= SHARE_TILE;
  const int32_t *high = sums, *low = sums + (shared ? T : 16) * BLOCK;
  for (long r = 0; r < R; r++) store(y + r * BLOCK, Vector{});
  for (long g = 0; g < groups; g++) {
    for (long k = 0; k < half; k += 4, w += 64) {
      const __m512i both = _mm512_loadu_si512(w), mask = _mm512_set1_epi8(15);
      _mm512_store_si512(steps + k * BLOCK, _mm512_and_si512(both, mask));
      _mm512_store_si512(steps + (half + k) * BLOCK, _mm512_and_si512(_mm512_srli_epi16(both, 4), mask));
      ask_ahead(w, 16 * half);
    }
    written(steps);
    _tile_zero(0); _tile_zero(1);
    for (long k = 0; k < groupsize; k += depth) {
      const int8_t* x = &of.steps[t * K + g * groupsize + k];
      _tile_loadd(2, steps + k * BLOCK, 64);
      _tile_loadd(3, x, K); _tile_dpbsud(0, 3, 2);
      if (!shared) { _tile_loadd(4, x + T * K, K); _tile_dpbsud(1, 4, 2); }
    }
    _tile_stored(0, sums, 64);
    if (!shared) _tile_stored(1, sums + 16 * BLOCK, 64);
    const __m512 scale = block_of(scales + g * BLOCK);
    const __m512 base = fma(all(-8), scale, block_of(zeros + g * BLOCK));
    for (long r = 0; r < R; r++) {
      const __m512i high_sum = _mm512_load_si512(high + r * BLOCK), low_sum = _mm512_load_si512(low + r * BLOCK);
      const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(high_sum, 8), low_sum);
      const __m512 total = fma(_mm512_cvtepi32_ps(sum), scale, load(y + r * BLOCK));
      store(y + r * BLOCK, fma(all(of.sums[(t + r) * groups + g]), base, total));
    }
  }
  for (long r = 0; r < R; r++) store(y + r * BLOCK, _mm512_mul_ps(load(y + r * BLOCK), all(of.scales[t + r])));
}
#endif

// x fp32 [T, K], weight uint8 [O/16, K/groupsize, groupsize/8, 16, 4], scales and zeros S [O/16,
// K/groupsize, 16] -> fp32 [T, O]. x is rounded row by row to 16 bits. `amx` as above.
template <class S>
Tensor grouped_rows_of(Tensor x, Tensor weight, Tensor scales, Tensor zeros, bool amx) {
  check(x, FP32, {-1, 8 * weight.size(1) * weight.size(2)}), check(weight, UINT8, {-1, -1, -1, 16, 4});
  for (const Tensor& t : {scales, zeros}) check(t, PAIR<S>, {weight.size(0), weight.size(1), 16});
  const long T = x.size(0), K = x.size(1), blocks = weight.size(0), groups = weight.size(1);
  const long groupsize = K / groups, O = blocks * BLOCK;
  Tensor y = torch::stable::new_empty(x, {T, O});
  const float* from = static_cast<const float*>(x.const_data_ptr());
  const uint8_t* w = static_cast<const uint8_t*>(weight.const_data_ptr());
  const S* scale = static_cast<const S*>(scales.const_data_ptr());
  const S* zero_of = static_cast<const S*>(zeros.const_data_ptr());
  float* to = static_cast<float*>(y.mutable_data_ptr());
  if (!T) return y;
  static thread_local Steps own;
  Steps& rows = own;  // this thread's, for all of them
  STD_TORCH_CHECK(groupsize <= MOST_GROUPSIZE && groupsize % std::min(64L, groupsize) == 0, "talon: a group has 32 or 64 inputs, 128 or 256");
  rows.reserve(2 * T + 15, K, groups);  // a tile reads 16 rows, from the last one too
#ifndef TALON_AMX
  amx = false;
#endif
  torch::stable::parallel_for(0, T, std::max(1L, 16384 / (K + 1)), [&](int64_t begin, int64_t end) {
    for (long t = begin; t < end; t++) {
      round_row(rows, from, t, T, K, K, 2);
      sum_groups(rows, t, T, K, groups, groupsize);
    }
  });
  const long grain = std::max(1L, 131072 / (BLOCK * K));  // less is not worth a second core
  torch::stable::parallel_for(0, blocks, grain, [&](int64_t begin, int64_t end) {
    constexpr decltype(&dot_groups<1, S>) few[] = {dot_groups<1, S>, dot_groups<2, S>, dot_groups<3, S>, dot_groups<4, S>};
    alignas(64) float table[16 * BLOCK];
#ifdef TALON_AMX
    if (amx) configure_tiles(T <= SHARE_TILE ? 2 * T : 16, std::min(64L, groupsize));
#endif
    for (long b = begin; b < end; b++)
      for (long t = 0, R; t < T; t += R) {
        const uint8_t* block = w + b * BLOCK * K / 2;
        const long at = b * groups * BLOCK;
        R = std::min(amx ? 16L : 4L, T - t);
        auto some = few[std::min(R, 4L) - 1];
#ifdef TALON_AMX
        if (amx) some = dot_groups_amx<S>;
#endif
        some(rows, t, R, T, K, groupsize, block, scale + at, zero_of + at, table);
        for (long r = 0; r < R; r++) std::memcpy(to + (t + r) * O + b * BLOCK, table + r * BLOCK, BLOCK * sizeof(float));
      }
#ifdef TALON_AMX
    if (amx) _tile_release();
#endif
  });
  return y;
}

Tensor grouped_rows(Tensor x, Tensor weight, Tensor scales, Tensor zeros, bool amx) {
  const bool whole = scales.scalar_type() == FP32;
  return (whole ? grouped_rows_of<float> : grouped_rows_of<uint16_t>)(x, weight, scales, zeros, amx);
}

#endif

// What integer_rows may use, as said above; 0: it does not exist
int64_t integer_level() {
#ifdef TALON_AMX
  if (amx_granted()) return 4;
#endif
  return TALON_LEVEL;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(talon, m) {
  m.def("float_rows(Tensor x, Tensor weight) -> Tensor");
  m.def("attend(Tensor q, Tensor kv, Tensor mask) -> Tensor");
  m.def("int8_rows(Tensor x, Tensor weight, Tensor scales) -> Tensor");
  m.def("int4_rows(Tensor x, Tensor weight, Tensor scales, Tensor zeros, int groupsize) -> Tensor");
  m.def("integer_rows(Tensor x, Tensor weight, Tensor scales, int planes, bool amx) -> Tensor");
  m.def("grouped_rows(Tensor x, Tensor weight, Tensor scales, Tensor zeros, bool amx) -> Tensor");
  m.def("integer_level() -> int");
}

STABLE_TORCH_LIBRARY_IMPL(talon, CPU, m) {
  m.impl("float_rows", TORCH_BOX(float_rows));
  m.impl("attend", TORCH_BOX(attend));
  m.impl("int8_rows", TORCH_BOX(int8_rows));
  m.impl("int4_rows", TORCH_BOX(int4_rows));
#if TALON_LEVEL
  m.impl("integer_rows", TORCH_BOX(integer_rows));
  m.impl("grouped_rows", TORCH_BOX(grouped_rows));
#endif
}

STABLE_TORCH_LIBRARY_IMPL(talon, CompositeExplicitAutograd, m) {
  m.impl("integer_level", TORCH_BOX(integer_level));
}
