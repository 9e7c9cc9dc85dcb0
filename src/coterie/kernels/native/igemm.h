// Products of int8 activations with packed integer codes. Included by kernels.cpp inside the level's namespace.
//
// Within a scale group a product is an exact int32 sum: any order, any instruction, tile or row block gives the same
// integer. Groups are then added in order: F = fma(float(dot) * s, a, F), where dot is that of the signed codes: the
// products of the stored unsigned ones, started at the group's offset. Affine kinds subtract float(sum(x)) * m before
// the factor a. So a row's bits depend on the row alone. F stays in registers over a block of columns and in a small
// buffer between blocks; inputs are taken kBlock columns at a time so that codes stay in L1.

constexpr std::int64_t kBlock = 512;
constexpr std::int64_t kAhead = 4096;  // bytes that codes are fetched before they are needed

// Rows that share a load of codes, and the vectors of outputs and of independent sums that so many rows leave room for.
#if defined(__AVX512F__)
constexpr int kIntRows = 6;
constexpr int int_vectors(int) { return 2; }
constexpr int int_chains(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }
#elif defined(__AVX2__)
constexpr int kIntRows = 4;
constexpr int int_vectors(int rows) { return rows == 1 ? 4 : 2; }
constexpr int int_chains(int) { return 1; }
#else
constexpr int kIntRows = 2;
constexpr int int_vectors(int) { return 2; }
constexpr int int_chains(int) { return 1; }
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
typedef std::int16_t VecW __attribute__((vector_size(kLanes * 4)));
struct Codes {
  VecU even, odd;
};
struct Inputs {
  VecI even, odd;
};
COTERIE_INLINE Codes as_codes(VecU bytes) { return {bytes & 0x00ff00ffu, (bytes >> 8) & 0x00ff00ffu}; }
COTERIE_INLINE Inputs as_inputs(std::int32_t x) {
  const VecI four = x - VecI{};
  return {(VecI)((VecW)four << 8 >> 8), (VecI)((VecW)four >> 8)};
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
  const __m512i entries = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
  return (VecU)_mm512_shuffle_epi8(entries, (__m512i)nibbles);
#elif defined(__AVX2__)
  const __m256i entries = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
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
constexpr std::int64_t kQuadBytes = S == Store::bytes ? 128 : 64;

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

// Fetches a quad that R rows need later, as measured to be best: nibbles to the first level; bytes to the second only,
// as two lines a quad would take all the outstanding misses of the first, and a block ahead where more rows take longer.
template <Store S, int R>
COTERIE_INLINE void fetch_codes(const unsigned char* quad) {
  if constexpr (S != Store::bytes) {
    __builtin_prefetch(quad + kAhead);
  } else {
    constexpr std::int64_t kBytesAhead = R <= 2 ? kAhead : kBlock * kPanel;
    __builtin_prefetch(quad + kBytesAhead, 0, 2);
    __builtin_prefetch(quad + kBytesAhead + 64, 0, 2);
  }
}

// Fetches the scales of a later group, of the next panel after the last one.
COTERIE_INLINE void fetch_scales(const Matrix& m, const unsigned char* scales, std::int64_t group) {
  constexpr std::int64_t kLater = 6;
  const std::int64_t bytes = kPanel * scale_bytes(m.format.scale), later = group + kLater;
  const unsigned char* line = scales + later * bytes + (later < m.groups ? 0 : m.panel_bytes - m.groups * bytes);
  __builtin_prefetch(line);
  if (bytes > 64) __builtin_prefetch(line + 64);
}

// Quads of a scale group: the last one may be short.
COTERIE_INLINE std::int64_t quads_of(const GemmTask& task, std::int64_t group) {
  const std::int64_t left = padded_cols(task.weight.format.kind, task.weight.cols) - group * task.weight.group;
  return (left < task.weight.group ? left : task.weight.group) / 4;
}

// The sums of one group for R rows.
template <Store S, int R>
COTERIE_INLINE void int_sums(const std::int8_t* const* x, const unsigned char* w, const unsigned char* table, int lane,
                             std::int64_t quads, VecI (*sums)[int_vectors(R)]) {
  constexpr int V = int_vectors(R), C = int_chains(R);
  VecI acc[C][R][V] = {};
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) acc[0][r][v] = sums[r][v];
  }
  for (std::int64_t i = 0; i < quads; i += C) {
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c, w += kQuadBytes<S>) {
      Codes codes[V];
      for (int v = 0; v < V; ++v) codes[v] = as_codes(load_codes<S>(w, lane + v * kLanes, table));
      fetch_codes<S, R>(w);
      for (int r = 0; r < R; ++r) {
        std::int32_t four;
        std::memcpy(&four, x[r] + (i + c) * 4, 4);
        const Inputs inputs = as_inputs(four);
        for (int v = 0; v < V; ++v) acc[c][r][v] = dot(acc[c][r][v], codes[v], inputs);
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) {
      sums[r][v] = acc[0][r][v];
      for (int c = 1; c < C; ++c) sums[r][v] += acc[c][r][v];
    }
  }
}

template <Store S, bool Affine, int R>
static __attribute__((noinline)) void int_block(const GemmTask& task, const IntPanel& panel, std::int64_t row, int lane,
                                                float* running) {
  constexpr int V = int_vectors(R);
  const Matrix& m = task.weight;
  const Activations& q = task.quantized;
  const std::int32_t* offsets = q.sums + row * m.groups;
  const float* factors = q.scales + row * q.groups;
  const unsigned char* w = panel.codes;
  float* target = running + row * kPanel + lane;
  Vec total[R][V];
  const std::int8_t* x[R];
  for (int r = 0; r < R; ++r) {
    x[r] = q.codes + (row + r) * q.stride + panel.group_begin * m.group;
    for (int v = 0; v < V; ++v) total[r][v] = load(target + r * kPanel + v * kLanes);
  }
  for (std::int64_t group = panel.group_begin; group < panel.group_end; ++group) {
    const std::int64_t quads = quads_of(task, group), factor = group * m.group / q.group;
    VecI sums[R][V];
    for (int r = 0; r < R; ++r) {
      for (int v = 0; v < V; ++v) sums[r][v] = Affine ? VecI{} : offsets[r * m.groups + group] - VecI{};
    }
    fetch_scales(m, panel.scales, group);
    if constexpr (Affine) fetch_scales(m, panel.mins, group);
    int_sums<S, R>(x, w, panel.table, lane, quads, sums);
    w += quads * kQuadBytes<S>;
    for (int r = 0; r < R; ++r) x[r] += quads * 4;
    for (int v = 0; v < V; ++v) {
      const std::int64_t at = group * kPanel + lane + v * kLanes;
      const Vec scale = load_scales(panel.scales, at, m.format.scale);
      Vec min = {};
      if constexpr (Affine) min = -load_scales(panel.mins, at, m.format.scale);
      for (int r = 0; r < R; ++r) {
        Vec value = __builtin_convertvector(sums[r][v], Vec) * scale;
        if constexpr (Affine) value = fma(splat(static_cast<float>(offsets[r * m.groups + group])), min, value);
        total[r][v] = fma(value, splat(factors[r * q.groups + factor]), total[r][v]);
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) store(target + r * kPanel + v * kLanes, total[r][v]);
  }
}

// `rows` rows from `row` on, at most R.
template <Store S, bool Affine, int R>
COTERIE_INLINE void int_block_of(const GemmTask& task, const IntPanel& panel, std::int64_t row, std::int64_t rows,
                                 float* running) {
  if constexpr (R > 1) {
    if (rows < R) return int_block_of<S, Affine, R - 1>(task, panel, row, rows, running);
  }
  for (int lane = 0; lane < kPanel; lane += int_vectors(R) * kLanes) {
    int_block<S, Affine, R>(task, panel, row, lane, running);
  }
}

// All rows, in blocks of nearly the same size.
template <Store S, bool Affine>
static void int_rows(const GemmTask& task, const IntPanel& panel, float* running) {
  std::int64_t blocks = (task.rows + kIntRows - 1) / kIntRows;
  for (std::int64_t row = 0; blocks > 0; --blocks) {
    const std::int64_t rows = (task.rows - row + blocks - 1) / blocks;
    int_block_of<S, Affine, kIntRows>(task, panel, row, rows, running);
    row += rows;
  }
}

// A panel's results to the output.
static void store_panel(const GemmTask& task, std::int64_t panel, const float* running) {
  const PanelOutputs outputs = outputs_of(task.weight, panel);
  float* out = task.out + outputs.first;
  for (int lane = 0; lane < outputs.count; lane += kLanes) {
    const std::int64_t left = outputs.count - lane, n = left < kLanes ? left : kLanes;
    const Vec bias = task.bias ? load_n(task.bias + outputs.first + lane, n) : Vec{};
    for (std::int64_t r = 0; r < task.rows; ++r) {
      const Vec value = load(running + r * kPanel + lane);
      store_n(out + r * task.out_stride + lane, task.bias ? value + bias : value, n);
    }
  }
}

template <Store S, bool Affine>
static void int_gemm(const GemmTask& task) {
  alignas(64) float running[kMaxIntRows * kPanel];
  alignas(16) unsigned char table[16];
  const Matrix& m = task.weight;
  for (int i = 0; i < 16; ++i) table[i] = static_cast<unsigned char>(m.format.table[i] + 128);
  const bool blocked = task.rows > kIntRows && m.group <= kBlock;
  const std::int64_t step = blocked ? kBlock / m.group : m.groups;
  for (std::int64_t p = task.panel_begin; p < task.panel_end; ++p) {
    const unsigned char* base = m.data + p * m.panel_bytes;
    std::memset(running, 0, sizeof(float) * static_cast<std::size_t>(task.rows * kPanel));
    for (std::int64_t group = 0; group < m.groups; group += step) {
      const std::int64_t end = group + step < m.groups ? group + step : m.groups;
      const unsigned char* codes = base + group * m.group / 4 * kQuadBytes<S>;
      int_rows<S, Affine>(task, {codes, base + m.scales_at, base + m.mins_at, table, group, end}, running);
    }
    store_panel(task, p, running);
  }
}

static void gemm(const GemmTask& task) {
  const Format& format = task.weight.format;
  switch (format.kind) {
    case Kind::f32: return gemm_typed<Kind::f32>(task);
    case Kind::bf16: return gemm_typed<Kind::bf16>(task);
    case Kind::fp8: return gemm_typed<Kind::fp8>(task);
    case Kind::int8: return int_gemm<Store::bytes, false>(task);
    case Kind::affine8: return int_gemm<Store::bytes, true>(task);
    case Kind::affine4: return int_gemm<Store::nibbles, true>(task);
    case Kind::code4:
      return is_even(format) ? int_gemm<Store::nibbles, false>(task) : int_gemm<Store::table, false>(task);
  }
}

// ---- activations ----------------------------------------------------------------------------------------------------

// int8 codes of `size` values that share one factor.
struct Span {
  float factor;      // NaN if a value is NaN or infinite
  std::int32_t sum;  // of the codes
};

static Span quantize_span(const float* x, std::int64_t size, std::int8_t* codes) {
  Vec top = {}, poison = {};
  for_vectors(size, [&](std::int64_t i, std::int64_t n) {
    const Vec v = load_n(x + i, n);
    top = max(top, (Vec)((VecU)v & 0x7fffffffu));
    poison = poison + v * splat(0.0f);
  });
  const bool wrong = has_nan(poison);
  const float most = largest(top), factor = most / 127.0f;
  const float inverse = factor > 0.0f && !wrong ? 127.0f / most : 0.0f;
  const Vec magic = splat(12582912.0f);
  VecU total = {};  // what a NaN becomes may overflow; it is not used then
  for_vectors(size, [&](std::int64_t i, std::int64_t n) {
    const VecI q = __builtin_convertvector(fma(load_n(x + i, n), splat(inverse), magic) - magic, VecI);
    const VecB narrow = low_bytes(q);
    std::memcpy(codes + i, &narrow, static_cast<std::size_t>(n));
    total += (VecU)q;
  });
  return {wrong ? __builtin_nanf("") : factor, wrong ? 0 : sum((VecI)total)};
}

// Zeros behind the last column, where [first, last) reaches it.
static void pad_codes(const QuantizeInputs& args, std::int64_t row) {
  if (args.last != args.cols) return;
  const std::int64_t used = args.scales ? args.cols : 2 * args.cols;
  std::memset(args.codes + row * args.stride + used, 0, static_cast<std::size_t>(args.stride - used));
}

static void sum_codes(const QuantizeInputs& args, std::int64_t row) {
  const std::int8_t* codes = args.codes + row * args.stride;
  for (std::int64_t at = args.first; at < args.last; at += args.weight_group) {
    const std::int64_t size = args.last - at < args.weight_group ? args.last - at : args.weight_group;
    std::int32_t sum = 0;
    for (std::int64_t i = 0; i < size; ++i) sum += codes[at + i];
    args.sums[row * args.weight_groups + at / args.weight_group] = args.zero * sum;
  }
}

static void finish_inputs(const QuantizeInputs& args, std::int64_t begin, std::int64_t end) {
  for (std::int64_t row = begin; row < end; ++row) {
    pad_codes(args, row);
    if (args.scales) sum_codes(args, row);
  }
}

// Nearest-even bf16 values; a NaN stays a NaN.
static void round_inputs(const QuantizeInputs& args, std::int64_t begin, std::int64_t end) {
  for (std::int64_t row = begin; row < end; ++row) {
    const float* x = args.x + row * args.x_stride;
    auto* out = reinterpret_cast<std::uint16_t*>(args.codes + row * args.stride);
    round_row(x + args.first, args.last - args.first, out + args.first);
    pad_codes(args, row);
  }
}

// Rows [begin, end), columns [first, last) of x, where `first` starts an activation group and a weight group.
static void quantize_inputs(const QuantizeInputs& args, std::int64_t begin, std::int64_t end) {
  if (!args.scales) return round_inputs(args, begin, end);
  for (std::int64_t row = begin; row < end; ++row) {
    const float* x = args.x + row * args.x_stride;
    std::int8_t* codes = args.codes + row * args.stride;
    for (std::int64_t at = args.first; at < args.last; at += args.group) {
      const std::int64_t size = args.last - at < args.group ? args.last - at : args.group;
      const Span span = quantize_span(x + at, size, codes + at);
      args.scales[row * args.groups + at / args.group] = span.factor;
      if (args.weight_group == args.group) args.sums[row * args.groups + at / args.group] = args.zero * span.sum;
    }
    pad_codes(args, row);
    if (args.weight_group != args.group) sum_codes(args, row);
  }
}
