// Products of int8 activations with packed integer codes. Included by kernels.cpp inside the level's namespace.
//
// Within a scale group a product is an exact int32 sum: any order, any instruction, tile or row block gives the same
// integer. Groups are then added in order: F = fma(float(dot) * s, a, F), where dot is that of the signed codes: the
// products of the stored unsigned ones, started at the group's offset. Affine kinds subtract float(sum(x)) * m before
// the factor a. So a row's bits depend on the row alone. F stays in registers over a block of columns and in a small
// buffer between blocks; inputs are taken kBlock columns at a time so that codes stay in L1. In groups of 32 the two
// vector units are busy for 8 products and 3 other instructions; started sums (layout.h) make that 8 and 2.

constexpr std::int64_t kBlock = 512;
constexpr std::int64_t kAhead = 4096;  // bytes that codes are fetched before they are needed
constexpr std::int64_t kSpreadRows = 13;  // rows from which on it pays to spread nibbles to bytes first

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

// What a block of rows fetches of the codes that come next: of every `step` bytes, those of kQuadStep quads, the first
// `bytes` from `at` on. The blocks of rows share a block of columns' worth evenly, so that memory is never idle.
struct Fetch {
  const unsigned char* at;
  std::int64_t step, bytes;
};

// A panel's codes from a column block on, and what a group's sum is turned into.
struct IntPanel {
  const unsigned char* codes;
  const unsigned char* scales;
  const unsigned char* mins;
  const unsigned char* table;
  std::int64_t group_begin, group_end;
  Fetch fetch;
};

constexpr int kQuadStep = 4;  // a group is whole steps

// Fetches a quad that one or two rows need later, as measured to be best: nibbles to the first level; bytes to the
// second only, as two lines a quad would take all the outstanding misses of the first.
template <Store S>
COTERIE_INLINE void fetch_codes(const unsigned char* quad) {
  if constexpr (S != Store::bytes) {
    __builtin_prefetch(quad + kAhead);
  } else {
    __builtin_prefetch(quad + kAhead, 0, 2);
    __builtin_prefetch(quad + kAhead + 64, 0, 2);
  }
}

// The same of more rows.
COTERIE_INLINE void fetch_share(Fetch& fetch) {
  for (std::int64_t i = 0; i < fetch.bytes; i += 64) __builtin_prefetch(fetch.at + i, 0, 2);
  fetch.at += fetch.step;
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

// A sum that began at kFloatBits, times its scale, where `less` is what that start makes of it, negated: exactly that, so
// the result is rounded once, as is that of a conversion and a product.
COTERIE_INLINE Vec scale_started(VecI sum, Vec scale, [[maybe_unused]] Vec less) {
#if defined(__AVX2__)
  return fma((Vec)sum, scale, less);
#else  // nothing fuses
  return __builtin_convertvector(sum - kFloatBits, Vec) * scale;
#endif
}

// Rows that lie `step` elements apart. Three registers give the addresses of six of them; compilers are kept from
// making a pointer of each, which would not fit.
template <class T>
struct Strided {
  const T* first;
  const T* fourth;
  std::int64_t step;

  Strided(const T* base, std::int64_t step) : first(base), fourth(base + 3 * step), step(step) {}
  __attribute__((always_inline)) void advance(std::int64_t by) {
    first += by, fourth += by;
    asm("" : "+r"(step));
  }
  __attribute__((always_inline)) const T* row(int r) const {
    return r < 3 ? first + r * step : fourth + (r - 3) * step;
  }
};

// Where a block of rows stands in its columns.
struct IntPlace {
  Strided<std::int8_t> x;
  const unsigned char* w;
  Fetch fetch;
};

// The sums of one group for R rows; goes on to the next group.
template <Store S, int R>
COTERIE_INLINE void int_sums(IntPlace& at, const unsigned char* table, int lane, std::int64_t quads,
                             VecI (*sums)[int_vectors(R)]) {
  constexpr int V = int_vectors(R), C = int_chains(R), U = R <= 2 ? C : kQuadStep;
  VecI acc[C][R][V] = {};
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) acc[0][r][v] = sums[r][v];
  }
  const unsigned char* end = at.w + quads * kQuadBytes<S>;
  do {
    if constexpr (R > 2) fetch_share(at.fetch);
#pragma GCC unroll 4
    for (int u = 0; u < U; ++u, at.w += kQuadBytes<S>) {
      Codes codes[V];
      for (int v = 0; v < V; ++v) codes[v] = as_codes(load_codes<S>(at.w, lane + v * kLanes, table));
      if constexpr (R <= 2) fetch_codes<S>(at.w);
      for (int r = 0; r < R; ++r) {
        std::int32_t four;
        std::memcpy(&four, at.x.row(r) + u * 4, 4);
        const Inputs inputs = as_inputs(four);
        for (int v = 0; v < V; ++v) acc[u % C][r][v] = dot(acc[u % C][r][v], codes[v], inputs);
      }
    }
    at.x.advance(U * 4);
  } while (at.w != end);
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) {
      sums[r][v] = acc[0][r][v];
      for (int c = 1; c < C; ++c) sums[r][v] += acc[c][r][v];
    }
  }
}

// How a group's sum becomes a float: started sums need no conversion, affine kinds have a min.
enum class Scaling { started, converted, affine };

template <Store S, Scaling K, int R>
static __attribute__((noinline)) void int_block(const GemmTask& task, const IntPanel& panel, std::int64_t row, int lane,
                                                float* running) {
  constexpr int V = int_vectors(R);
  const Matrix& m = task.weight;
  const Activations& q = task.quantized;
  const std::int64_t whole = m.group / 4, last = quads_of(task, m.groups - 1);
  const std::int64_t begin = panel.group_begin * m.group / q.group;
  std::int64_t end = (begin + 1) * q.group;  // of the columns that share a factor
  IntPlace place{{q.codes + row * q.stride + panel.group_begin * m.group, q.stride}, panel.codes, panel.fetch};
  Strided<std::int32_t> offsets(q.sums + row * m.groups + panel.group_begin, m.groups);
  Strided<float> factors(q.scales + row * q.groups + begin, q.groups);
  float* target = running + row * kPanel + lane;
  Vec total[R][V];
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) total[r][v] = load(target + r * kPanel + v * kLanes);
  }
  std::int64_t group = panel.group_begin;
  do {
    VecI sums[R][V];
    for (int r = 0; r < R; ++r) {
      for (int v = 0; v < V; ++v) sums[r][v] = K == Scaling::affine ? VecI{} : *offsets.row(r) - VecI{};
    }
    fetch_scales(m, panel.scales, group);
    if constexpr (K == Scaling::affine) fetch_scales(m, panel.mins, group);
    int_sums<S, R>(place, panel.table, lane, group + 1 < m.groups ? whole : last, sums);
    for (int v = 0; v < V; ++v) {
      const std::int64_t at = group * kPanel + lane + v * kLanes;
      if constexpr (K == Scaling::started) {
        const Vec scale = load_f16(reinterpret_cast<const std::uint16_t*>(panel.scales) + at);
        const Vec less = scale * splat(-kFloatStart);
        for (int r = 0; r < R; ++r) {
          total[r][v] = fma(scale_started(sums[r][v], scale, less), splat(*factors.row(r)), total[r][v]);
        }
      } else {
        const Vec scale = load_scales(panel.scales, at, m.format.scale);
        Vec min = {};
        if constexpr (K == Scaling::affine) min = -load_scales(panel.mins, at, m.format.scale);
        for (int r = 0; r < R; ++r) {
          Vec value = __builtin_convertvector(sums[r][v], Vec) * scale;
          if constexpr (K == Scaling::affine) value = fma(splat(static_cast<float>(*offsets.row(r))), min, value);
          total[r][v] = fma(value, splat(*factors.row(r)), total[r][v]);
        }
      }
    }
    const bool next = (group + 1) * m.group == end;
    end += next ? q.group : 0;
    factors.advance(next);
    offsets.advance(1);
  } while (++group < panel.group_end);
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) store(target + r * kPanel + v * kLanes, total[r][v]);
  }
}

// `rows` rows from `row` on, at most R.
template <Store S, Scaling K, int R>
COTERIE_INLINE void int_block_of(const GemmTask& task, const IntPanel& panel, std::int64_t row, std::int64_t rows,
                                 float* running) {
  if constexpr (R > 1) {
    if (rows < R) return int_block_of<S, K, R - 1>(task, panel, row, rows, running);
  }
  for (int lane = 0; lane < kPanel; lane += int_vectors(R) * kLanes) {
    int_block<S, K, R>(task, panel, row, lane, running);
  }
}

// All rows, in blocks of nearly the same size. Blocks of columns that stay in the first cache are fetched once by all
// of them together, longer ones by each.
template <Store S, Scaling K>
static void int_rows(const GemmTask& task, IntPanel panel, float* running) {
  std::int64_t blocks = (task.rows + kIntRows - 1) / kIntRows;
  const std::int64_t step = panel.fetch.step, parts = task.weight.group <= kBlock ? blocks : 1;
  const std::int64_t share = round_up((step + parts - 1) / parts, 64);
  for (std::int64_t row = 0, fetched = 0; blocks > 0; --blocks) {
    const std::int64_t rows = (task.rows - row + blocks - 1) / blocks, left = step - fetched;
    panel.fetch.bytes = left < share ? left : share;
    int_block_of<S, K, kIntRows>(task, panel, row, rows, running);
    if (parts > 1) panel.fetch.at += panel.fetch.bytes, fetched += panel.fetch.bytes;
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

// One byte a code, or what the table holds for it, for `count` quads.
template <Store S>
static void spread_codes(const unsigned char* quads, std::int64_t count, const unsigned char* table,
                         unsigned char* out) {
  for (std::int64_t i = 0; i < count; ++i) {
    for (int lane = 0; lane < kPanel; lane += kLanes) {
      const VecU codes = load_codes<S>(quads + i * kQuadBytes<S>, lane, table);
      std::memcpy(out + i * kQuadBytes<Store::bytes> + lane * 4, &codes, sizeof codes);
    }
  }
}

// A block of columns against all rows. Nibbles that many rows read are spread once.
template <Store S, Scaling K>
static void int_columns(const GemmTask& task, IntPanel panel, float* running) {
  if constexpr (S != Store::bytes) {
    if (task.rows >= kSpreadRows && task.weight.group <= kBlock) {
      alignas(64) unsigned char spread[kBlock * kPanel];
      const std::int64_t before = (panel.group_end - 1 - panel.group_begin) * task.weight.group / 4;
      spread_codes<S>(panel.codes, before + quads_of(task, panel.group_end - 1), panel.table, spread);
      panel.codes = spread;
      return int_rows<Store::bytes, K>(task, panel, running);
    }
  }
  int_rows<S, K>(task, panel, running);
}

template <Store S, Scaling K>
static void int_gemm(const GemmTask& task) {
  constexpr std::int64_t kStep = kQuadStep * kQuadBytes<S>;
  alignas(64) float running[kMaxIntRows * kPanel];
  alignas(16) unsigned char table[16];
  const Matrix& m = task.weight;
  for (int i = 0; i < 16; ++i) table[i] = static_cast<unsigned char>(m.format.table[i] + 128);
  const bool blocked = task.rows > kIntRows && m.group <= kBlock;
  const std::int64_t step = blocked ? kBlock / m.group : m.groups;
  const std::int64_t ahead = blocked || S == Store::bytes ? kBlock / 4 * kQuadBytes<S> : kAhead;
  for (std::int64_t p = task.panel_begin; p < task.panel_end; ++p) {
    const unsigned char* base = m.data + p * m.panel_bytes;
    std::memset(running, 0, sizeof(float) * static_cast<std::size_t>(task.rows * kPanel));
    for (std::int64_t group = 0; group < m.groups; group += step) {
      const std::int64_t end = group + step < m.groups ? group + step : m.groups;
      const unsigned char* codes = base + group * m.group / 4 * kQuadBytes<S>;
      const IntPanel panel{codes, base + m.scales_at, base + m.mins_at, table, group, end, {codes + ahead, kStep, 0}};
      int_columns<S, K>(task, panel, running);
    }
    store_panel(task, p, running);
  }
}

template <Store S>
static void int_gemm(const GemmTask& task) {
  return start_of(task.weight.format) ? int_gemm<S, Scaling::started>(task) : int_gemm<S, Scaling::converted>(task);
}

static void gemm(const GemmTask& task) {
  const Format& format = task.weight.format;
  switch (format.kind) {
    case Kind::f32: return gemm_typed<Kind::f32>(task);
    case Kind::bf16: return gemm_typed<Kind::bf16>(task);
    case Kind::fp8: return gemm_typed<Kind::fp8>(task);
    case Kind::int8: return int_gemm<Store::bytes>(task);
    case Kind::affine8: return int_gemm<Store::bytes, Scaling::affine>(task);
    case Kind::affine4: return int_gemm<Store::nibbles, Scaling::affine>(task);
    case Kind::code4: return is_even(format) ? int_gemm<Store::nibbles>(task) : int_gemm<Store::table>(task);
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
    args.sums[row * args.weight_groups + at / args.weight_group] = args.start + args.zero * sum;
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
      if (args.weight_group == args.group) {
        args.sums[row * args.groups + at / args.group] = args.start + args.zero * span.sum;
      }
    }
    pad_codes(args, row);
    if (args.weight_group != args.group) sum_codes(args, row);
  }
}
