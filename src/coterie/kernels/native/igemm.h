// Products of int8 activations with packed integer codes. Included by kernels.cpp inside the level's namespace.
//
// Within a scale group a product is an exact int32 sum: any order, any instruction, tile or row block gives the same
// integer. Groups are then added in order: F = fma(float(dot - z * sum(x)) * s, a, F), with z = 128 for the symmetric
// kinds; affine kinds subtract float(sum(x)) * m before the factor a. So a row's bits depend on the row alone.
// The running F of a panel lives in a small buffer; inputs are taken kBlock columns at a time so that codes stay in L1,
// and nibbles are spread to bytes once per block when many rows share them.

constexpr std::int64_t kBlock = 512;

#if defined(__AVX512F__)
constexpr int kIntRows = 8;
constexpr int kIntVectors = 2;
#elif defined(__AVX2__)
constexpr int kIntRows = 4;
constexpr int kIntVectors = 2;
#else
constexpr int kIntRows = 2;
constexpr int kIntVectors = 2;
#endif

// Four codes of kLanes outputs and four activations, as the level multiplies them.
#if defined(__AVX512F__)
typedef VecU Codes;
typedef VecI Inputs;
COTERIE_INLINE Codes as_codes(VecU bytes) { return bytes; }
COTERIE_INLINE Inputs as_inputs(std::int32_t x) { return (VecI)_mm512_set1_epi32(x); }
COTERIE_INLINE VecI dot(VecI acc, Codes w, Inputs x) {
  return (VecI)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, (__m512i)x);
}
#else
// 16-bit halves: codes 0 and 2 of each output in `even`, 1 and 3 in `odd`; their products are added in 32 bits.
struct Codes {
  VecU even, odd;
};
struct Inputs {
  VecI even, odd;
};
COTERIE_INLINE Codes as_codes(VecU bytes) { return {bytes & 0x00ff00ffu, (bytes >> 8) & 0x00ff00ffu}; }
COTERIE_INLINE Inputs as_inputs(std::int32_t x) {
  const std::int32_t even = ((x << 24) >> 24 & 0xffff) | (x << 8 >> 24 << 16);
  const std::int32_t odd = ((x << 16) >> 24 & 0xffff) | (x >> 24 << 16);
  return {even - VecI{}, odd - VecI{}};
}
COTERIE_INLINE VecI pair_sum(VecU w, VecI x) {
#if defined(__AVX2__)
  return (VecI)_mm256_madd_epi16((__m256i)w, (__m256i)x);
#elif defined(__SSE2__)
  return (VecI)_mm_madd_epi16((__m128i)w, (__m128i)x);
#else
  return (VecI)(w & 0xffffu) * (x << 16 >> 16) + (VecI)(w >> 16) * (x >> 16);
#endif
}
COTERIE_INLINE VecI dot(VecI acc, const Codes& w, const Inputs& x) {
  return acc + pair_sum(w.even, x.even) + pair_sum(w.odd, x.odd);
}
#endif

// table[u] + 128 for each nibble-valued byte.
COTERIE_INLINE VecU look_up(VecU nibbles, const unsigned char* table) {
#if defined(__AVX512F__)
  const __m512i entries = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  return (VecU)_mm512_shuffle_epi8(entries, (__m512i)nibbles);
#elif defined(__AVX2__)
  const __m256i entries = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  return (VecU)_mm256_shuffle_epi8(entries, (__m256i)nibbles);
#else
  unsigned char bytes[sizeof(VecU)];
  std::memcpy(bytes, &nibbles, sizeof bytes);
  for (unsigned char& byte : bytes) byte = table[byte];
  std::memcpy(&nibbles, bytes, sizeof bytes);
  return nibbles;
#endif
}

// How the codes of outputs [lane, lane + kLanes) of a quad are stored.
enum class Store { bytes, nibbles, table };

template <Store S>
COTERIE_INLINE VecU load_codes(const unsigned char* quad, int lane, const unsigned char* table) {
  if constexpr (S == Store::bytes) return load_step(quad + lane * 4);
  const VecU both = load_step(quad + lane % 16 * 4);
  const VecU nibbles = (lane < 16 ? both : both >> 4) & 0x0f0f0f0fu;
  if constexpr (S == Store::table) return look_up(nibbles, table);
  return nibbles;
}

// A panel's codes from a column block on, and what a group's sum is turned into.
struct IntPanel {
  const unsigned char* codes;
  const unsigned char* scales;
  const unsigned char* mins;
  const unsigned char* table;
  std::int64_t group_begin, group_end;
};

template <Store S, bool Affine, int R>
COTERIE_INLINE void int_block(const GemmTask& task, const IntPanel& panel, std::int64_t row, int lane, float* running) {
  constexpr std::int64_t kQuad = S == Store::bytes ? 128 : 64;
  const Matrix& m = task.weight;
  const Activations& q = task.quantized;
  const std::int64_t quads = m.group / 4;
  const std::int8_t* x = q.codes + row * q.stride + panel.group_begin * m.group;
  const std::int32_t* sums = q.sums + row * m.groups;
  const float* factors = q.scales + row * q.groups;
  const unsigned char* w = panel.codes;
  for (std::int64_t group = panel.group_begin; group < panel.group_end; ++group) {
    VecI acc[R][kIntVectors];
    for (int r = 0; r < R; ++r) {
      const std::int32_t start = Affine ? 0 : -128 * sums[r * m.groups + group];
      for (int v = 0; v < kIntVectors; ++v) acc[r][v] = start - VecI{};
    }
    const std::int64_t left = (q.stride - group * m.group) / 4;
    const std::int64_t count = left < quads ? left : quads;
    for (std::int64_t i = 0; i < count; ++i, w += kQuad, x += 4) {
      Codes codes[kIntVectors];
      for (int v = 0; v < kIntVectors; ++v) codes[v] = as_codes(load_codes<S>(w, lane + v * kLanes, panel.table));
      if constexpr (R == 1) __builtin_prefetch(w + 4096);
      if constexpr (R == 1 && S == Store::bytes) __builtin_prefetch(w + 4096 + 64);
      for (int r = 0; r < R; ++r) {
        std::int32_t four;
        std::memcpy(&four, x + r * q.stride, 4);
        const Inputs inputs = as_inputs(four);
        for (int v = 0; v < kIntVectors; ++v) acc[r][v] = dot(acc[r][v], codes[v], inputs);
      }
    }
    const std::int64_t factor = group * m.group / q.group;
    for (int v = 0; v < kIntVectors; ++v) {
      const std::int64_t at = group * kPanel + lane + v * kLanes;
      const Vec scale = load_scales(panel.scales, at, m.format.scale);
      Vec min = {};
      if constexpr (Affine) min = load_scales(panel.mins, at, m.format.scale);
      for (int r = 0; r < R; ++r) {
        Vec value = __builtin_convertvector(acc[r][v], Vec) * scale;
        if constexpr (Affine) value = fma(splat(-static_cast<float>(sums[r * m.groups + group])), min, value);
        float* target = running + (row + r) * kPanel + lane + v * kLanes;
        store(target, fma(value, splat(factors[r * q.groups + factor]), load(target)));
      }
    }
  }
}

template <Store S, bool Affine>
static void int_rows(const GemmTask& task, const IntPanel& panel, float* running) {
  std::int64_t row = 0;
  for (; task.rows - row >= kIntRows; row += kIntRows) {
    for (int lane = 0; lane < kPanel; lane += kIntVectors * kLanes) {
      int_block<S, Affine, kIntRows>(task, panel, row, lane, running);
    }
  }
  if constexpr (kIntRows > 4) {
    for (; task.rows - row >= 4; row += 4) int_block<S, Affine, 4>(task, panel, row, 0, running);
  }
  if constexpr (kIntRows > 2) {
    for (; task.rows - row >= 2; row += 2) {
      for (int lane = 0; lane < kPanel; lane += kIntVectors * kLanes) {
        int_block<S, Affine, 2>(task, panel, row, lane, running);
      }
    }
  }
  for (; row < task.rows; ++row) {
    for (int lane = 0; lane < kPanel; lane += kIntVectors * kLanes) {
      int_block<S, Affine, 1>(task, panel, row, lane, running);
    }
  }
}

template <Store S>
static void spread_codes(const unsigned char* quads, std::int64_t count, const unsigned char* table,
                         unsigned char* out) {
  for (std::int64_t i = 0; i < count; ++i) {
    for (int lane = 0; lane < kPanel; lane += kLanes) {
      const VecU codes = load_codes<S>(quads + i * 64, lane, table);
      std::memcpy(out + i * 128 + lane * 4, &codes, sizeof codes);
    }
  }
}

static void int_epilogue(const GemmTask& task, std::int64_t panel, const float* running) {
  const PanelOutputs outputs = outputs_of(task.weight, panel);
  for (std::int64_t r = 0; r < task.rows; ++r) {
    float* out = task.out + r * task.out_stride + outputs.first;
    const float* from = running + r * kPanel;
    for (std::int64_t i = 0; i < outputs.count; ++i) out[i] = task.bias ? from[i] + task.bias[outputs.first + i] : from[i];
  }
}

template <Store S, bool Affine>
static void int_gemm(const GemmTask& task) {
  alignas(64) float running[kMaxIntRows * kPanel];
  alignas(64) unsigned char bytes[S == Store::bytes ? 64 : kBlock * kPanel];
  alignas(16) unsigned char table[16];
  const Matrix& m = task.weight;
  for (int i = 0; i < 16; ++i) table[i] = static_cast<unsigned char>(m.format.table[i] + 128);
  constexpr std::int64_t kColumnBytes = S == Store::bytes ? kPanel : kPanel / 2;
  const bool blocked = task.rows > kIntRows && m.group <= kBlock;
  const std::int64_t step = blocked ? kBlock / m.group : m.groups;
  for (std::int64_t p = task.panel_begin; p < task.panel_end; ++p) {
    const unsigned char* base = m.data + p * m.panel_bytes;
    std::memset(running, 0, sizeof(float) * static_cast<std::size_t>(task.rows * kPanel));
    for (std::int64_t group = 0; group < m.groups; group += step) {
      const std::int64_t end = group + step < m.groups ? group + step : m.groups;
      const unsigned char* codes = base + group * m.group * kColumnBytes;
      IntPanel panel{codes, base + m.scales_at, base + m.mins_at, table, group, end};
      if (S != Store::bytes && blocked) {
        const std::int64_t last = end * m.group < task.quantized.stride ? end * m.group : task.quantized.stride;
        spread_codes<S>(codes, (last - group * m.group) / 4, table, bytes);
        panel.codes = bytes;
        int_rows<Store::bytes, Affine>(task, panel, running);
      } else {
        int_rows<S, Affine>(task, panel, running);
      }
    }
    int_epilogue(task, p, running);
  }
}

static void gemm(const GemmTask& task) {
  switch (task.weight.format.kind) {
    case Kind::f32: return gemm_typed<Kind::f32>(task);
    case Kind::bf16: return gemm_typed<Kind::bf16>(task);
    case Kind::fp8: return gemm_typed<Kind::fp8>(task);
    case Kind::int8: return int_gemm<Store::bytes, false>(task);
    case Kind::affine8: return int_gemm<Store::bytes, true>(task);
    case Kind::code4: return int_gemm<Store::table, false>(task);
    case Kind::affine4: return int_gemm<Store::nibbles, true>(task);
  }
}

// ---- activations ----------------------------------------------------------------------------------------------------

// int8 codes of `size` values that share one factor; returns the factor (NaN if a value is NaN or infinite).
static float quantize_span(const float* x, std::int64_t size, std::int8_t* codes) {
  Vec top = {}, poison = {};
  for_vectors(size, [&](std::int64_t i, std::int64_t n) {
    const Vec v = load_n(x + i, n);
    top = max(top, (Vec)((VecU)v & 0x7fffffffu));
    poison = poison + v * splat(0.0f);
  });
  float lanes[kLanes], bad[kLanes], most = 0.0f, wrong = 0.0f;
  store(lanes, top);
  store(bad, poison);
  for (int i = 0; i < kLanes; ++i) {
    most = lanes[i] > most ? lanes[i] : most;
    wrong += bad[i];
  }
  const float factor = most / 127.0f;
  const float inverse = factor > 0.0f && wrong == 0.0f ? 127.0f / most : 0.0f;
  const Vec magic = splat(12582912.0f);
  for_vectors(size, [&](std::int64_t i, std::int64_t n) {
    const VecI q = __builtin_convertvector(fma(load_n(x + i, n), splat(inverse), magic) - magic, VecI);
    const VecS narrow = __builtin_convertvector(q, VecS);
    std::memcpy(codes + i, &narrow, static_cast<std::size_t>(n));
  });
  return wrong == 0.0f ? factor : __builtin_nanf("");
}

// Rows [begin, end), columns [first, last) of x, where `first` starts an activation group and a weight group.
static void quantize_inputs(const QuantizeInputs& args, std::int64_t begin, std::int64_t end) {
  for (std::int64_t row = begin; row < end; ++row) {
    const float* x = args.x + row * args.x_stride;
    std::int8_t* codes = args.codes + row * args.stride;
    for (std::int64_t at = args.first; at < args.last; at += args.group) {
      const std::int64_t size = args.last - at < args.group ? args.last - at : args.group;
      args.scales[row * args.groups + at / args.group] = quantize_span(x + at, size, codes + at);
    }
    if (args.last == args.cols) std::memset(codes + args.cols, 0, static_cast<std::size_t>(args.stride - args.cols));
    for (std::int64_t at = args.first; at < args.last; at += args.weight_group) {
      const std::int64_t size = args.last - at < args.weight_group ? args.last - at : args.weight_group;
      std::int32_t sum = 0;
      for (std::int64_t i = 0; i < size; ++i) sum += codes[at + i];
      args.sums[row * args.weight_groups + at / args.weight_group] = sum;
    }
  }
}
