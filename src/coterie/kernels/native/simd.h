// The vector wrapper: one float vector type of the level's width, on the compiler's vector extensions.
//
// Included inside the level's own namespace by kernels.cpp only. The one place with intrinsics is fma: contraction is
// off, so a multiply-add fuses exactly where it is written (levels without FMA round twice, everywhere alike).

#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kRowBlock = 8;  // rows x vectors of accumulators in a product: 8 x 2 of 32 registers
constexpr int kVectors = 2;
constexpr int kKeyBlock = 4;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
constexpr int kRowBlock = 4;
constexpr int kVectors = 2;
constexpr int kKeyBlock = 2;
#else
constexpr int kLanes = 4;
constexpr int kRowBlock = 2;
constexpr int kVectors = 4;
constexpr int kKeyBlock = 2;
#endif

#define COTERIE_INLINE static inline __attribute__((always_inline))

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef std::int32_t VecI __attribute__((vector_size(kLanes * 4)));
typedef std::uint32_t VecU __attribute__((vector_size(kLanes * 4)));
typedef std::uint16_t VecH __attribute__((vector_size(kLanes * 2)));
typedef std::uint8_t VecB __attribute__((vector_size(kLanes)));

COTERIE_INLINE Vec splat(float value) {
  return value - Vec{};
}

COTERIE_INLINE Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

COTERIE_INLINE Vec widen(VecH h) {
#if defined(__AVX512F__)
  return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)h), 16);
#elif defined(__AVX2__)
  return (Vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)h), 16);
#else
  return (Vec)(__builtin_convertvector(h, VecU) << 16);
#endif
}

COTERIE_INLINE Vec load(const std::uint16_t* p) {
  VecH h;
  std::memcpy(&h, p, sizeof h);
  return widen(h);
}

// The nearest bf16 of each lane, ties to even; a NaN stays a NaN: the bits of to_bf16, in the upper halves.
COTERIE_INLINE VecU round_to_bf16(Vec v) {
  const VecU bits = (VecU)v, rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return ((bits & 0x7fffffffu) > 0x7f800000u ? bits | 0x400000u : rounded) & 0xffff0000u;
}

COTERIE_INLINE VecH high_halves(VecU v) {
#if defined(__AVX512F__)
  return (VecH)_mm512_cvtepi32_epi16(_mm512_srli_epi32((__m512i)v, 16));
#elif defined(__AVX2__)
  const __m256i halves = _mm256_srli_epi32((__m256i)v, 16);
  return (VecH)_mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32(halves, halves), 0x08));
#else
  return __builtin_convertvector(v >> 16, VecH);
#endif
}

COTERIE_INLINE Vec load_f16(const std::uint16_t* p) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
  return (Vec)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  Vec v;
  for (int i = 0; i < kLanes; ++i) v[i] = from_f16(p[i]);
  return v;
#endif
}

// Bytes to and from 32 bits. (The compiler's own conversion goes through single lanes here.)
COTERIE_INLINE VecU load_bytes(const unsigned char* p) {
#if defined(__AVX512F__)
  return (VecU)_mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__AVX2__)
  return (VecU)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
  VecB bytes;
  std::memcpy(&bytes, p, sizeof bytes);
  return __builtin_convertvector(bytes, VecU);
#endif
}

COTERIE_INLINE VecB low_bytes(VecI v) {
#if defined(__AVX512F__)
  return (VecB)_mm512_maskz_cvtepi32_epi8(0xffff, (__m512i)v);
#elif defined(__AVX2__)
  const __m256i v2 = _mm256_shuffle_epi8(
      (__m256i)v, _mm256_broadcastsi128_si256(_mm_set_epi32(-1, -1, -1, 0x0c080400)));
  const __m128i both = _mm_unpacklo_epi32(_mm256_castsi256_si128(v2), _mm256_extracti128_si256(v2, 1));
  VecB out;
  std::memcpy(&out, &both, sizeof out);
  return out;
#else
  return __builtin_convertvector(v, VecB);
#endif
}

// The first n < kLanes elements, zeros after.
COTERIE_INLINE Vec load_part(const float* p, std::int64_t n) {
  Vec v = {};
  for (std::int64_t i = 0; i < n; ++i) v[i] = p[i];
  return v;
}

COTERIE_INLINE Vec load_part(const std::uint16_t* p, std::int64_t n) {
  VecH h = {};
  for (std::int64_t i = 0; i < n; ++i) h[i] = p[i];
  return widen(h);
}

COTERIE_INLINE void store(float* p, Vec v) {
  std::memcpy(p, &v, sizeof v);
}

COTERIE_INLINE void store_part(float* p, Vec v, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) p[i] = v[i];
}

COTERIE_INLINE Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

COTERIE_INLINE Vec max(Vec a, Vec b) {
  return a < b ? b : a;
}

// The first n lanes of v, those of `rest` after.
COTERIE_INLINE Vec first_lanes(Vec v, int n, Vec rest) {
  VecI lane = {};
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  return lane < n ? v : rest;
}

// Sum of the lanes by halves: a fixed tree.
COTERIE_INLINE float sum(Vec v) {
#if defined(__AVX512F__)
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
  float lanes[kLanes];
  store(lanes, v);
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
#endif
}

// The largest lane; of numbers only.
COTERIE_INLINE float largest(Vec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float lanes[kLanes], most;
  store(lanes, v);
  most = lanes[0];
  for (int i = 1; i < kLanes; ++i) most = lanes[i] > most ? lanes[i] : most;
  return most;
#endif
}

COTERIE_INLINE bool has_nan(Vec v) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)v, (__m512)v, _CMP_UNORD_Q) != 0;
#else
  bool found = false;
  for (int i = 0; i < kLanes; ++i) found = found || v[i] != v[i];
  return found;
#endif
}

COTERIE_INLINE std::int32_t sum(VecI v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)v);
#else
  std::int32_t total = 0;
  for (int i = 0; i < kLanes; ++i) total += v[i];
  return total;
#endif
}

// e^x within about 1 ulp; arguments are clamped to the range of normal floats, a NaN stays a NaN. Cephes' polynomial.
COTERIE_INLINE Vec exp(Vec x) {
  x = x < splat(-87.3f) ? splat(-87.3f) : x;
  x = x > splat(88.3f) ? splat(88.3f) : x;
  const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to the nearest integer
  const Vec n = fma(x, splat(1.44269504088896341f), magic) - magic;
  Vec r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  Vec p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r) + splat(1.0f);
  const VecI power = (__builtin_convertvector(n, VecI) + 127) << 23;
  return p * (Vec)power;
}

COTERIE_INLINE Vec sigmoid(Vec x) {
  return splat(1.0f) / (splat(1.0f) + exp(splat(0.0f) - x));
}
