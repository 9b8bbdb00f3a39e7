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
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define TALON_VNNI
#if defined(__AMX_INT8__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define TALON_AMX
#endif
#endif

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

// ---------------------------------------------------------------- floating point
// A task is OUTS rows of the weight, which stay in the first cache while the rows of x pass by in
// blocks: a block's sums fill the vector registers. Compilers vectorise this badly by themselves.

#if defined(__AVX512F__) && defined(__AVX512DQ__)
constexpr int LANES = 16, ROWS = 6;
typedef __m512 Vector;
inline Vector zero() { return _mm512_setzero_ps(); }
inline Vector all(float x) { return _mm512_set1_ps(x); }
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
inline Vector add(Vector a, Vector b) { return _mm512_add_ps(a, b); }
inline Vector divide(Vector a, Vector b) { return _mm512_div_ps(a, b); }
inline float largest(Vector v) { return _mm512_reduce_max_ps(v); }
inline Vector nearest(Vector x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vector times_power(Vector x, Vector n) { return _mm512_scalef_ps(x, n); }
inline __m128i bytes(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline Vector widen(const int8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes(p))); }
struct Group {  // its 16 values fill one vector, in which the halves of the bytes are looked up
  Vector values;
  Group(float scale, float zero)
      : values(fma(_mm512_set_ps(7, 6, 5, 4, 3, 2, 1, 0, -1, -2, -3, -4, -5, -6, -7, -8), all(scale), all(zero))) {}
  void decode(const uint8_t* p, float* low, float* high) const {
    const __m512i both = _mm512_cvtepu8_epi32(bytes(p));
    store(low, _mm512_permutexvar_ps(both, values));  // looks at the low 4 bits only
    store(high, _mm512_permutexvar_ps(_mm512_srli_epi32(both, 4), values));
  }
};
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int LANES = 8, ROWS = 3;
typedef __m256 Vector;
inline Vector zero() { return _mm256_setzero_ps(); }
inline Vector all(float x) { return _mm256_set1_ps(x); }
inline Vector load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Vector v) { _mm256_storeu_ps(p, v); }
inline Vector fma(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
inline void store_sums(float* p, Vector a, Vector b, Vector c, Vector d) {
  const Vector four = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  _mm_storeu_ps(p, _mm_add_ps(_mm256_castps256_ps128(four), _mm256_extractf128_ps(four, 1)));
}
inline Vector larger(Vector a, Vector b) { return _mm256_max_ps(a, b); }
inline Vector add(Vector a, Vector b) { return _mm256_add_ps(a, b); }
inline Vector divide(Vector a, Vector b) { return _mm256_div_ps(a, b); }
inline float largest(Vector v) {
  float lane[LANES];
  store(lane, v);
  return *std::max_element(lane, lane + LANES);
}
inline Vector nearest(Vector x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vector times_power(Vector x, Vector n) {
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23)));
}
inline __m128i bytes(const void* p) { return _mm_loadl_epi64(static_cast<const __m128i*>(p)); }
inline Vector widen(const int8_t* p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes(p))); }
struct Group {
  Vector scale, base;
  Group(float scale, float zero) : scale(all(scale)), base(all(zero - 8 * scale)) {}
  void decode(const uint8_t* p, float* low, float* high) const {
    const __m256i both = _mm256_cvtepu8_epi32(bytes(p));
    store(low, fma(_mm256_cvtepi32_ps(_mm256_and_si256(both, _mm256_set1_epi32(15))), scale, base));
    store(high, fma(_mm256_cvtepi32_ps(_mm256_srli_epi32(both, 4)), scale, base));
  }
};
#else
constexpr int LANES = 4, ROWS = 3;
struct Vector { float lane[LANES]; };
template <typename Lane>
inline Vector each(Lane lane) { return {{lane(0), lane(1), lane(2), lane(3)}}; }
inline Vector zero() { return {}; }
inline Vector all(float x) { return {{x, x, x, x}}; }
inline Vector load(const float* p) { return each([=](int i) { return p[i]; }); }
inline void store(float* p, Vector v) { std::memcpy(p, v.lane, sizeof v.lane); }
inline float fma(float a, float b, float c) {
#ifdef __FP_FAST_FMAF
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}
inline Vector fma(Vector a, Vector b, Vector c) {
  return each([&](int i) { return fma(a.lane[i], b.lane[i], c.lane[i]); });
}
inline float sum(Vector v) { return (v.lane[0] + v.lane[2]) + (v.lane[1] + v.lane[3]); }
inline void store_sums(float* p, Vector a, Vector b, Vector c, Vector d) { p[0] = sum(a), p[1] = sum(b), p[2] = sum(c), p[3] = sum(d); }
inline Vector add(Vector a, Vector b) { return each([&](int i) { return a.lane[i] + b.lane[i]; }); }
inline Vector divide(Vector a, Vector b) { return each([&](int i) { return a.lane[i] / b.lane[i]; }); }
inline Vector larger(Vector a, Vector b) { return each([&](int i) { return std::max(a.lane[i], b.lane[i]); }); }
inline float largest(Vector v) { return *std::max_element(v.lane, v.lane + LANES); }
inline Vector nearest(Vector x) { return each([&](int i) { return std::nearbyint(x.lane[i]); }); }
inline Vector times_power(Vector x, Vector n) { return each([&](int i) { return std::ldexp(x.lane[i], static_cast<int>(n.lane[i])); }); }
inline Vector widen(const int8_t* p) { return each([=](int i) { return static_cast<float>(p[i]); }); }
struct Group {
  float scale, base;
  Group(float scale, float zero) : scale(scale), base(zero - 8 * scale) {}
  void decode(const uint8_t* p, float* low, float* high) const {
    for (int i = 0; i < LANES; i++) low[i] = fma(p[i] & 15, scale, base), high[i] = fma(p[i] >> 4, scale, base);
  }
};
#endif
constexpr int OUTS = 4;

// Weights come from memory once and in order, but in pieces too short for the processor to see
// that. Asking for the task after the next while this one is computed hides the wait.
inline void ask_ahead(const void* here, long task_bytes) {
  __builtin_prefetch(static_cast<const char*>(here) + 2 * task_bytes);
}

// y[r][o] = x[r] . w[o] * scale[o] for R rows of x [*, K] and OUTS rows of w [*, K], of which `outs`
// are kept; without a scale if it is null
template <int R, bool STREAM>
void dot(const float* x, const float* w, long K, const float* scale, float* y, long width, int outs) {
  Vector sums[R][OUTS];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int o = 0; o < OUTS; o++) sums[r][o] = zero();
  long k = 0;
  for (; k + LANES <= K; k += LANES) {
    Vector part[OUTS];
#pragma GCC unroll 8
    for (int o = 0; o < OUTS; o++) {
      part[o] = load(w + o * K + k);
      if (STREAM) ask_ahead(w + o * K + k, OUTS * K * sizeof(float));
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const Vector row = load(x + r * K + k);
#pragma GCC unroll 8
      for (int o = 0; o < OUTS; o++) sums[r][o] = fma(row, part[o], sums[r][o]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
    float total[OUTS];
    store_sums(total, sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
    for (int o = 0; o < outs; o++) {
      for (long i = k; i < K; i++) total[o] += x[r * K + i] * w[o * K + i];
      y[r * width + o] = scale ? total[o] * scale[o] : total[o];
    }
  }
}

template <int R, bool STREAM>
void dot_block(int rows, const float* x, const float* w, long K, const float* scale, float* y, long width, int outs) {
  if (rows == R) return dot<R, STREAM>(x, w, K, scale, y, width, outs);
  if constexpr (R > 1) dot_block<R - 1, STREAM>(rows, x, w, K, scale, y, width, outs);
}

// x fp32 [T, K] times the transpose of a weight [O, K]. `rows(o, outs, buffer)` gives its rows o to
// o + outs - 1 in fp32: where they lie (STREAM), or decoded into the buffer.
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
      const float* w = rows(o, outs, buffer.data());
      if (STREAM && outs < OUTS) {  // a task reads OUTS rows, of which the last one's must exist
        std::memcpy(buffer.data(), w, outs * K * sizeof(float));
        w = buffer.data();
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

// x fp32 [T, K], weight fp32 [O, K] -> fp32 [T, O]
Tensor fp32_rows(Tensor x, Tensor weight) {
  check(x, FP32, {-1, weight.size(1)}), check(weight, FP32, {-1, -1});
  const float* w = static_cast<const float*>(weight.const_data_ptr());
  const long K = x.size(1);
  return multiply<true>(x, weight.size(0), nullptr, [=](long o, int, float*) { return w + o * K; });
}

// x fp32 [T, K], weight int8 [O, K], scales fp32 [O] -> fp32 [T, O]
Tensor int8_rows(Tensor x, Tensor weight, Tensor scales) {
  check(x, FP32, {-1, weight.size(1)}), check(weight, INT8, {-1, -1}), check(scales, FP32, {weight.size(0)});
  const int8_t* w = static_cast<const int8_t*>(weight.const_data_ptr());
  const float* scale = static_cast<const float*>(scales.const_data_ptr());
  const long K = x.size(1);
  return multiply<false>(x, weight.size(0), scale, [=](long first, int outs, float* buffer) {
    const int8_t* steps = w + first * K;  // the rows follow each other without a gap
    long k = 0;
    for (; k + LANES <= outs * K; k += LANES) {
      if (k % 64 == 0) ask_ahead(steps + k, OUTS * K);
      store(buffer + k, widen(steps + k));
    }
    for (; k < outs * K; k++) buffer[k] = steps[k];
    return static_cast<const float*>(buffer);
  });
}

inline float widened(float x) { return x; }

inline float widened(uint16_t bits) {  // of bf16
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float x;
  std::memcpy(&x, &word, sizeof x);
  return x;
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
        const Group group(widened(scale[at]), widened(zero_of[at]));
        float* row = buffer + o * K + g * groupsize;
        ask_ahead(w + at * half, OUTS * K / 2);
        for (long k = 0; k < half; k += LANES) group.decode(w + at * half + k, row + k, row + half + k);
      }
    return static_cast<const float*>(buffer);
  });
}

Tensor int4_rows(Tensor x, Tensor weight, Tensor scales, Tensor zeros, int64_t groupsize) {
  const bool whole = scales.scalar_type() == FP32;
  return (whole ? int4_rows_of<float> : int4_rows_of<uint16_t>)(x, weight, scales, zeros, groupsize);
}

// ---------------------------------------------------------------- attention
// A task is a block of the queries of one group of keys and values.

constexpr int WEIGHED = LANES == 16 ? 4 : 2;  // queries whose sums fit the registers

// y [R, D] = p [R, *] v [S, D] / (sum of each row of p), rows of p `width` apart. Sums go from slot to
// slot, one after another: slots with weight 0 between them change nothing, so a node of a tree gets
// the numbers that it would get at its place in the text.
template <int R>
void weigh(const float* p, long width, const float* v, long S, long D, float* y) {
  long d = 0;
  for (; d + 4 * LANES <= D; d += 4 * LANES) {
    Vector sums[R][4], total[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      total[r] = zero();
#pragma GCC unroll 8
      for (int i = 0; i < 4; i++) sums[r][i] = zero();
    }
    for (long s = 0; s < S; s++) {
      Vector part[4];
#pragma GCC unroll 8
      for (int i = 0; i < 4; i++) part[i] = load(v + s * D + d + i * LANES);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const Vector weight = all(p[r * width + s]);
        total[r] = add(total[r], weight);
#pragma GCC unroll 8
        for (int i = 0; i < 4; i++) sums[r][i] = fma(weight, part[i], sums[r][i]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int i = 0; i < 4; i++) store(y + r * D + d + i * LANES, divide(sums[r][i], total[r]));
  }
  for (int r = 0; r < R; r++)
    for (long i = d; i < D; i++) {
      float sum = 0, total = 0;
      for (long s = 0; s < S; s++) total += p[r * width + s], sum += p[r * width + s] * v[s * D + i];
      y[r * D + i] = sum / total;
    }
}

template <int R>
void weigh_block(int rows, const float* p, long width, const float* v, long S, long D, float* y) {
  if (rows == R) return weigh<R>(p, width, v, S, D, y);
  if constexpr (R > 1) weigh_block<R - 1>(rows, p, width, v, S, D, y);
}

// e^x for x from -87 to 0, to 2e-7 relative: 2^n e^r, e^r by Taylor's terms to the seventh
inline Vector exp(Vector x) {
  const Vector n = nearest(fma(x, all(1.44269504f), zero()));
  const Vector r = fma(n, all(1.42860677e-6f), fma(n, all(-0.693148612976f), x));  // x - n ln 2
  Vector p = all(1 / 5040.f);
  for (float term : {1 / 720.f, 1 / 120.f, 1 / 24.f, 1 / 6.f, 0.5f, 1.f, 1.f}) p = fma(p, r, all(term));
  return times_power(p, n);
}

// e^(score - largest score) of the slots seen, exactly 0 elsewhere; `width` is a multiple of LANES.
void weights_of(float* scores, const bool* seen, long S, long width) {
  const float lowest = -3e38f;
  for (long s = 0; s < width; s++)
    if (s >= S || !seen[s]) scores[s] = lowest;
  Vector top = all(lowest);
  for (long s = 0; s < width; s += LANES) top = larger(top, load(scores + s));
  const Vector most = all(-largest(top));
  for (long s = 0; s < width; s += LANES) store(scores + s, exp(larger(add(load(scores + s), most), all(-87))));
  for (long s = 0; s < width; s++)
    if (s >= S || !seen[s]) scores[s] = 0;
}

// q fp32 [T, H, D], kv fp32 [2, G, R, D], mask bool [T, S] -> fp32 [T, H * D]
Tensor attend(Tensor q, Tensor kv, Tensor mask) {
  check(q, FP32, {-1, -1, -1}), check(kv, FP32, {2, -1, -1, q.size(2)}), check(mask, BOOL, {q.size(0), -1});
  const long T = q.size(0), H = q.size(1), D = q.size(2), G = kv.size(1), depth = kv.size(2), S = mask.size(1);
  Tensor y = torch::stable::new_empty(q, {T, H * D});
  const float* queries = static_cast<const float*>(q.const_data_ptr());
  const float* keys = static_cast<const float*>(kv.const_data_ptr());
  const bool* seen = static_cast<const bool*>(mask.const_data_ptr());
  float* to = static_cast<float*>(y.mutable_data_ptr());
  long end_of_seen = 0;  // what lies past it is hidden from every row
  for (long t = 0; t < T; t++)
    for (long s = S; s > end_of_seen; s--)
      if (seen[t * S + s - 1]) end_of_seen = s;
  const long width = (end_of_seen + LANES - 1) / LANES * LANES, share = H / G;
  const float scale = 1 / std::sqrt(static_cast<float>(D));
  const long blocks = (share * T + ROWS - 1) / ROWS;
  const long grain = std::max(1L, 32768 / std::max(1L, ROWS * width * D));
  torch::stable::parallel_for(0, G * blocks, grain, [&](int64_t begin, int64_t end) {
    static thread_local std::vector<float> own;
    own.resize(std::max<size_t>(own.size(), ROWS * (width + 2 * D) + OUTS * D + LANES));
    float *scores = own.data(), *x = scores + ROWS * width, *out = x + ROWS * D, *last = out + ROWS * D;
    for (long task = begin; task < end; task++) {
      const long g = task / blocks, first = task % blocks * ROWS;
      const int rows = static_cast<int>(std::min<long>(ROWS, share * T - first));
      const float *k = keys + g * depth * D, *v = keys + (G + g) * depth * D;
      auto place = [&](int r) { return ((first + r) / share * H + g * share + (first + r) % share) * D; };
      for (int r = 0; r < rows; r++)
        for (long d = 0; d < D; d++) x[r * D + d] = queries[place(r) + d] * scale;
      for (long s = 0; s < width; s += OUTS) {
        const float* part = k + s * D;
        if (s + OUTS > depth) {  // the cache ends here
          std::memset(last, 0, OUTS * D * sizeof(float));
          std::memcpy(last, part, std::max(0L, depth - s) * D * sizeof(float));
          part = last;
        }
        dot_block<ROWS, false>(rows, x, part, D, nullptr, scores + s, width, OUTS);
      }
      for (int r = 0; r < rows; r++) weights_of(scores + r * width, seen + (first + r) / share * S, S, width);
      for (int r = 0; r < rows; r += WEIGHED)
        weigh_block<WEIGHED>(std::min(WEIGHED, rows - r), scores + r * width, width, v, end_of_seen, D, out + r * D);
      for (int r = 0; r < rows; r++) std::memcpy(to + place(r), out + r * D, D * sizeof(float));
    }
  });
  return y;
}

// ---------------------------------------------------------------- integers
// int8 activations times int8 weights, for CPUs with AVX-512 VNNI. A task is UNIT outputs. Both
// instructions want one side unsigned: weights are stored + 128 as uint8 [O/16][K/4][16][4], and
// 128 times the sum of a row of x is taken off again.

#ifdef TALON_VNNI

constexpr long BLOCK = 16, UNIT = 4 * BLOCK, MOST_GROUPSIZE = 256, SHARE_TILE = 8;
constexpr float TINY = 1e-30f;  // as in quantized_linear.py

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

// Round row t of T to 8 bits, or to 16 bits as two rows: 256 * row t + row T + t.
void round_row(Steps& to, const float* x, long t, long T, long K, long padded, int planes) {
  auto part = [&](long k) {
    return _mm512_maskz_loadu_ps(k >= K ? 0 : K - k >= 16 ? 0xffff : (1u << (K - k)) - 1, x + t * K + k);
  };
  auto keep = [](int8_t* at, __m512i step) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(at), _mm512_cvtepi32_epi8(step));
  };
  __m512 top = _mm512_setzero_ps();
  for (long k = 0; k < K; k += 16) top = _mm512_max_ps(top, _mm512_abs_ps(part(k)));
  const float scale = std::max(_mm512_reduce_max_ps(top), TINY) / (planes == 2 ? 127 * 256 : 127);
  __m512i total = _mm512_setzero_si512(), low_total = total;
  for (long k = 0; k < padded; k += 16) {
    __m512i step = _mm512_cvtps_epi32(_mm512_div_ps(part(k), _mm512_set1_ps(scale)));
    if (planes == 2) {
      const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(step, _mm512_set1_epi32(128)), 8);
      const __m512i low = _mm512_sub_epi32(step, _mm512_slli_epi32(high, 8));
      low_total = _mm512_add_epi32(low_total, low);
      keep(&to.steps[(T + t) * padded + k], low);
      step = high;
    }
    total = _mm512_add_epi32(total, step);
    keep(&to.steps[t * padded + k], step);
  }
  to.scales[t] = scale;
  to.shifts[t] = 128 * _mm512_reduce_add_epi32(total);
  if (planes == 2) to.shifts[T + t] = 128 * _mm512_reduce_add_epi32(low_total);
}

inline __m512i four_steps(const int8_t* at) {
  int32_t four;
  std::memcpy(&four, at, 4);
  return _mm512_set1_epi32(four);
}

// sums [R, UNIT] of R rows with a unit of outputs
template <int R>
void dot_vnni(const int8_t* steps, long K, const uint8_t* w, int32_t* sums) {
  __m512i total[R][4] = {};
  for (long k = 0; k < K; k += 4) {
    for (int r = 0; r < R; r++) {
      const __m512i x = four_steps(steps + r * K + k);
      for (int b = 0; b < 4; b++)
        total[r][b] = _mm512_dpbusd_epi32(total[r][b], _mm512_loadu_si512(w + (b * K + k) * BLOCK), x);
    }
  }
  for (int r = 0; r < R; r++)
    for (int b = 0; b < 4; b++) _mm512_storeu_si512(sums + r * UNIT + b * BLOCK, total[r][b]);
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

#else
bool amx_granted() { return false; }
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
  constexpr decltype(&dot_vnni<1>) few[] = {dot_vnni<1>, dot_vnni<2>, dot_vnni<3>, dot_vnni<4>};
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

inline __m512 block_of(const float* at) { return _mm512_loadu_ps(at); }

inline __m512 block_of(const uint16_t* at) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at))), 16));
}

// y [R, 16] of rows t to t + R - 1 with a block of 4-bit outputs: of a group, the sum of
// (step - 8) * scale + zero times x is scale * (sum of step * x) + (zero - 8 * scale) * (sum of x).
template <int R, class S>
void dot_groups(const Steps& of, long t, long, long T, long K, long groupsize, const uint8_t* w, const S* scales, const S* zeros, float* y) {
  const long groups = K / groupsize, half = groupsize / 2;
  __m512 total[R];
  for (int r = 0; r < R; r++) total[r] = _mm512_setzero_ps();
  for (long g = 0; g < groups; g++) {
    __m512i high[R], low[R];
    for (int r = 0; r < R; r++) high[r] = low[r] = _mm512_setzero_si512();
    for (long k = 0; k < half; k += 4, w += 64) {
      const __m512i both = _mm512_loadu_si512(w), mask = _mm512_set1_epi8(15);
      const __m512i first = _mm512_and_si512(both, mask), second = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
      ask_ahead(w, 16 * half);
      for (int r = 0; r < R; r++) {
        const int8_t* x = &of.steps[(t + r) * K + g * groupsize + k];
        high[r] = _mm512_dpbusd_epi32(high[r], first, four_steps(x));
        high[r] = _mm512_dpbusd_epi32(high[r], second, four_steps(x + half));
        low[r] = _mm512_dpbusd_epi32(low[r], first, four_steps(x + T * K));
        low[r] = _mm512_dpbusd_epi32(low[r], second, four_steps(x + T * K + half));
      }
    }
    const __m512 scale = block_of(scales + g * BLOCK);
    const __m512 base = fma(all(-8), scale, block_of(zeros + g * BLOCK));
    for (int r = 0; r < R; r++) {
      const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(high[r], 8), low[r]);
      total[r] = fma(_mm512_cvtepi32_ps(sum), scale, total[r]);
      total[r] = fma(all(of.sums[(t + r) * groups + g]), base, total[r]);
    }
  }
  for (int r = 0; r < R; r++) store(y + r * BLOCK, _mm512_mul_ps(total[r], all(of.scales[t + r])));
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
  for (long r = 0; r < R; r++) store(y + r * BLOCK, zero());
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

// What integer_rows may use: 0 it does not exist, 1 VNNI, 2 AMX too
int64_t integer_level() {
#ifdef TALON_VNNI
  return amx_granted() ? 2 : 1;
#else
  return 0;
#endif
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(talon, m) {
  m.def("fp32_rows(Tensor x, Tensor weight) -> Tensor");
  m.def("attend(Tensor q, Tensor kv, Tensor mask) -> Tensor");
  m.def("int8_rows(Tensor x, Tensor weight, Tensor scales) -> Tensor");
  m.def("int4_rows(Tensor x, Tensor weight, Tensor scales, Tensor zeros, int groupsize) -> Tensor");
  m.def("integer_rows(Tensor x, Tensor weight, Tensor scales, int planes, bool amx) -> Tensor");
  m.def("grouped_rows(Tensor x, Tensor weight, Tensor scales, Tensor zeros, bool amx) -> Tensor");
  m.def("integer_level() -> int");
}

STABLE_TORCH_LIBRARY_IMPL(talon, CPU, m) {
  m.impl("fp32_rows", TORCH_BOX(fp32_rows));
  m.impl("attend", TORCH_BOX(attend));
  m.impl("int8_rows", TORCH_BOX(int8_rows));
  m.impl("int4_rows", TORCH_BOX(int4_rows));
#ifdef TALON_VNNI
  m.impl("integer_rows", TORCH_BOX(integer_rows));
  m.impl("grouped_rows", TORCH_BOX(grouped_rows));
#endif
}

STABLE_TORCH_LIBRARY_IMPL(talon, CompositeExplicitAutograd, m) {
  m.impl("integer_level", TORCH_BOX(integer_level));
}
