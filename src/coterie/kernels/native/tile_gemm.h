// Products in tiles: blocks of up to 32 rows and a panel's 32 outputs, two tiles each way. Included by tile_kernels.cpp
// inside the level's namespace.
//
// int8: exact sums leave the tiles at the end of each scale group and are scaled as in igemm.h, so the bits are those
// of the vector kernels. bf16: weights times activations rounded to bf16, in the one order of the instruction (32
// columns at a time: even and odd columns in two chains, then sum + (even + odd)); few rows run through chain_block,
// vector code of exactly that order. The row tiles of a task are of one height; the last may go past its rows, so inputs
// have kTileSlack rows of room behind.

constexpr std::int64_t kTileBlock = 2 * kTileRows;  // rows, at most
constexpr std::int64_t kFewIntRows = 8;             // up to so many the vector kernel is as fast: memory is the limit
constexpr std::int64_t kFewFloatRows = 4;

// Rows of a tile where `rows`, at most kMaxIntRows, are cut into as few as possible.
COTERIE_INLINE std::int64_t tile_height(std::int64_t rows) {
  const std::int64_t tiles = (rows + kTileRows - 1) / kTileRows;
  return (rows + tiles - 1) / tiles;
}

// Two row tiles of `height` and two output tiles, or one row tile if `Both` is false.
template <bool Both>
COTERIE_INLINE void load_sums(Tiles& tiles, const void* sums, std::int64_t height) {
  const char* at = static_cast<const char*>(sums);
  constexpr std::int64_t kStride = kPanel * 4;
  tiles.load<0>(at, kStride);
  tiles.load<1>(at + 64, kStride);
  if constexpr (Both) {
    tiles.load<2>(at + height * kStride, kStride);
    tiles.load<3>(at + height * kStride + 64, kStride);
  }
}

template <bool Both>
COTERIE_INLINE void store_sums(const Tiles& tiles, void* sums, std::int64_t height) {
  char* at = static_cast<char*>(sums);
  constexpr std::int64_t kStride = kPanel * 4;
  tiles.store<0>(at, kStride);
  tiles.store<1>(at + 64, kStride);
  if constexpr (Both) {
    tiles.store<2>(at + height * kStride, kStride);
    tiles.store<3>(at + height * kStride + 64, kStride);
  }
}

template <bool Both>
COTERIE_INLINE void load_factors(Tiles& tiles, const std::int8_t* x, std::int64_t x_stride, std::int64_t height,
                                 const unsigned char* w) {
  tiles.load<6>(w, 128);
  tiles.load<7>(w + 64, 128);
  tiles.load<4>(x, x_stride);
  if constexpr (Both) tiles.load<5>(x + height * x_stride, x_stride);
}

template <bool Both, bool Signed>
COTERIE_INLINE void multiply_bytes(Tiles& tiles) {
  tiles.dot_bytes<0, 0, Signed>();
  tiles.dot_bytes<0, 1, Signed>();
  if constexpr (Both) {
    tiles.dot_bytes<1, 0, Signed>();
    tiles.dot_bytes<1, 1, Signed>();
  }
}

// Brings what is needed next into the second cache, a few lines at a time, so that products hide the waiting.
class Fetcher {
 public:
  // `steps` calls of some() fetch `bytes`, kAheadOfTiles behind `from`.
  void begin(const unsigned char* from, std::int64_t bytes, std::int64_t steps) {
    next_ = from + kAheadOfTiles;
    share_ = (bytes / 64 + steps - 1) / steps * 64;
    end_ = next_ + bytes;
  }
  __attribute__((always_inline)) void some() {
    const unsigned char* last = next_ + share_ < end_ ? next_ + share_ : end_;
    for (; next_ < last; next_ += 64) __builtin_prefetch(next_, 0, 2);
  }

 private:
  static constexpr std::int64_t kAheadOfTiles = 16 << 10;
  const unsigned char* next_ = nullptr;
  const unsigned char* end_ = nullptr;
  std::int64_t share_ = 0;
};

// Rows [row, row + rows) of a task, at most two tiles of them.
struct TileRows {
  std::int64_t row, rows;
};

// Calls body(rows, both) for each block of rows.
template <class F>
COTERIE_INLINE void over_row_tiles(std::int64_t rows, std::int64_t height, F body) {
  for (std::int64_t row = 0; row < rows; row += 2 * height) {
    const std::int64_t n = rows - row < 2 * height ? rows - row : 2 * height;
    body(TileRows{row, n}, n > height);
  }
}

// ---- integers -------------------------------------------------------------------------------------------------------

// How sums become those of the weights: tiles multiplied signed codes, so they are; or unsigned ones, whose offset is
// to be added, which gives an integer or the bits of a float (kFloatBits of layout.h); or those of an affine kind, which
// has a min.
enum class Zero { none, offset, started, affine };

constexpr std::int64_t kTileColumns = 256;  // columns that all rows are multiplied by at once: with inputs and sums they
                                            // stay in the first cache; half of them in short groups, which have more sums
constexpr int kDrained = 4;                 // groups that are drained together, at most

// Sums of `groups` groups of a block of rows, [groups][kTileBlock][kPanel], that are still to be scaled and added.
struct Pending {
  int groups = 0;
  std::int64_t rows;
  const std::int32_t* sums;
  const float* scales;  // [groups][kPanel]
  const float* mins;
  const float* factors[kDrained];  // a row's factor for each group
  const std::int32_t* offsets;     // [groups] of a row
  float* running;
};

// Adds pending sums to the running results.
template <Zero Z, int G>
static void drain(const Pending& p, std::int64_t factor_stride, std::int64_t offset_stride, std::int32_t start) {
  constexpr int V = kPanel / kLanes;
  Vec scale[G][V], other[G][V];
  const float* factors[G];
  for (int g = 0; g < G; ++g) {
    factors[g] = p.factors[g];
    for (int v = 0; v < V; ++v) {
      scale[g][v] = load(p.scales + g * kPanel + v * kLanes);
      if constexpr (Z == Zero::started) other[g][v] = scale[g][v] * splat(-kFloatStart);
      if constexpr (Z == Zero::affine) other[g][v] = -load(p.mins + g * kPanel + v * kLanes);
    }
  }
  const std::int32_t* sums = p.sums;
  const std::int32_t* offsets = p.offsets;
  float* running = p.running;
#pragma GCC unroll 2
  for (std::int64_t r = 0; r < p.rows; ++r) {
    Vec total[V];
    for (int v = 0; v < V; ++v) total[v] = load(running + v * kLanes);
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
      const Vec factor = splat(*factors[g]);
      for (int v = 0; v < V; ++v) {
        VecI sum;
        std::memcpy(&sum, sums + g * kTileBlock * kPanel + v * kLanes, sizeof sum);
        Vec value;
        if constexpr (Z == Zero::started) {
          value = scale_started(sum + (offsets[g] - VecI{}), scale[g][v], other[g][v]);
        } else {
          if constexpr (Z == Zero::offset) sum += offsets[g] - start - VecI{};
          value = __builtin_convertvector(sum, Vec) * scale[g][v];
          if constexpr (Z == Zero::affine) value = fma(splat(static_cast<float>(offsets[g])), other[g][v], value);
        }
        total[v] = fma(value, factor, total[v]);
      }
      factors[g] += factor_stride;
    }
    for (int v = 0; v < V; ++v) store(running + v * kLanes, total[v]);
    sums += kPanel, running += kPanel, offsets += offset_stride;
  }
}

// A task's products with integer codes. Groups form one stream over all rows and columns of a panel: the sums of a group
// leave the tiles while those of the next one begin, and are drained a few groups at once. (Draining a few rows between
// products, to keep the multipliers of both kinds busy, was measured to be slower: stores of tiles hold up its loads.)
template <Store S, Zero Z>
class IntTiles {
 public:
  explicit IntTiles(const GemmTask& task)
      : task_(task),
        m_(task.weight),
        depth_(m_.group < 64 ? static_cast<int>(m_.group) : 64),
        height_(tile_height(task.rows)),
        tiles_(depth_, static_cast<int>(height_)) {
    for (int i = 0; i < 16; ++i) table_[i] = static_cast<unsigned char>(m_.format.table[i]);
  }

  void panel(std::int64_t p) {
    base_ = m_.data + p * m_.panel_bytes;
    const bool whole = m_.groups == 1 && depth_ == 64;
    std::memset(running_, 0, sizeof(float) * static_cast<std::size_t>(task_.rows * kPanel));
    if (whole) std::memset(sums_, 0, sizeof(float) * static_cast<std::size_t>(round_up(task_.rows, kTileRows) * kPanel));
    const std::int64_t width = padded_cols(m_.format.kind, m_.cols);
    const std::int64_t step = m_.group > 32 ? kTileColumns : kTileColumns / 2;
    for (std::int64_t first = 0; first < width; first += step) {
      columns(first, first + step < width ? first + step : width, whole);
    }
    whole ? drain_whole() : finish();
    store_panel(task_, p, running_);
  }

 private:
  // Codes [first, last) of a panel against all rows.
  void columns(std::int64_t first, std::int64_t last, bool whole) {
    const unsigned char* stored = base_ + first / 4 * kQuadBytes<S>;
    codes_ = stored;
    if constexpr (S != Store::bytes) {
      spread_codes<S>(stored, (last - first) / 4, table_, spread_);
      codes_ = spread_;
    }
    const std::int64_t blocks = (task_.rows + 2 * height_ - 1) / (2 * height_);
    fetcher_.begin(stored, (last - first) / 4 * kQuadBytes<S>, blocks * (last - first) / depth_);
    if (whole) {
      over_row_tiles(task_.rows, height_, [&](const TileRows& at, bool both) {
        both ? whole_row<true>(at, first, last) : whole_row<false>(at, first, last);
      });
      return;
    }
    const std::int64_t end = (last + m_.group - 1) / m_.group;
    begin_ = first / m_.group, end_ = end < m_.groups ? end : m_.groups;
    widen_scales();
    over_row_tiles(task_.rows, height_, [&](const TileRows& at, bool both) { both ? groups<true>(at) : groups<false>(at); });
  }

  // Scales (and mins) of groups [begin_, end_) as floats. Those of the block of columns before are still in use.
  void widen_scales() {
    turn_ ^= 1;
    scales_ = scale_buffers_[turn_];
    mins_ = scales_ + kMostGroups * kPanel;
    for (std::int64_t group = begin_; group < end_; ++group) {
      for (int lane = 0; lane < kPanel; lane += kLanes) {
        const std::int64_t from = group * kPanel + lane, to = (group - begin_) * kPanel + lane;
        const Vec scale = load_scales(base_ + m_.scales_at, from, m_.format.scale);
        store(scales_ + to, start_of(m_.format) ? fma(scale, Vec{}, scale) : scale);  // infinite: NaN, as of started sums
        if constexpr (Z == Zero::affine) store(mins_ + to, load_scales(base_ + m_.mins_at, from, m_.format.scale));
      }
    }
  }

  template <bool Both>
  __attribute__((always_inline)) void multiply(const std::int8_t* x, const unsigned char* codes) {
    load_factors<Both>(tiles_, x, task_.quantized.stride, height_, codes);
    multiply_bytes<Both, Z == Zero::none>(tiles_);
    fetcher_.some();
  }

  // Stores the sums that a register holds of the group before.
  template <int R, int V>
  __attribute__((always_inline)) void release() {
    if (held_ && (R == 0 || held_both_)) tiles_.store<2 * R + V>(held_ + R * height_ * kPanel + V * 16, kPanel * 4);
  }

  template <int R, int V>
  __attribute__((always_inline)) void begin() {
    tiles_.zero<2 * R + V>();
    tiles_.dot_bytes<R, V, Z == Zero::none>();
  }

  // The first columns of a group, whose sums go to `sums`. Registers are released one by one, so that products with
  // the others go on meanwhile.
  template <bool Both>
  __attribute__((always_inline)) void multiply_first(const std::int8_t* x, const unsigned char* codes,
                                                     std::int32_t* sums) {
    load_factors<Both>(tiles_, x, task_.quantized.stride, height_, codes);
    release<0, 0>();
    begin<0, 0>();
    release<0, 1>();
    begin<0, 1>();
    release<1, 0>();
    if constexpr (Both) begin<1, 0>();
    release<1, 1>();
    if constexpr (Both) begin<1, 1>();
    held_ = sums, held_both_ = Both;
    fetcher_.some();
  }

  template <bool Both>
  void groups(const TileRows& at) {
    const std::int8_t* x = task_.quantized.codes + at.row * task_.quantized.stride + begin_ * m_.group;
    const unsigned char* w = codes_;
    const std::int64_t end = end_, depth = depth_;
    for (std::int64_t group = begin_; group < end;) {
      const int count = end - group >= kDrained ? kDrained : end - group >= 2 ? 2 : 1;
      for (int g = 0; g < count; ++g) {
        multiply_first<Both>(x, w, sums_ + g * kTileBlock * kPanel);
        if (g == 0) drain_pending();
        x += depth, w += depth * kPanel;
        for (std::int64_t left = quads_of(task_, group + g) * 4 - depth; left > 0; left -= depth) {
          multiply<Both>(x, w);
          x += depth, w += depth * kPanel;
        }
      }
      announce(at, group, count, sums_);
      group += count;
    }
  }

  // Pending from now on, though the last of the `count` groups from `group` on is still in the tiles.
  void announce(const TileRows& at, std::int64_t group, int count, const std::int32_t* sums) {
    const Activations& q = task_.quantized;
    const std::int64_t scales = (group - begin_) * kPanel;
    pending_ = {count, at.rows, sums, scales_ + scales, mins_ + scales, {}, q.sums + at.row * m_.groups + group,
              running_ + at.row * kPanel};
    for (int g = 0; g < count; ++g) pending_.factors[g] = q.scales + at.row * q.groups + (group + g) * m_.group / q.group;
  }

  void drain_pending() {
    const std::int64_t factors = task_.quantized.groups, offsets = m_.groups;
    const std::int32_t start = start_of(m_.format);
    if (pending_.groups == kDrained) drain<Z, kDrained>(pending_, factors, offsets, start);
    if (pending_.groups == 2) drain<Z, 2>(pending_, factors, offsets, start);
    if (pending_.groups == 1) drain<Z, 1>(pending_, factors, offsets, start);
    pending_.groups = 0;
  }

  void finish() {
    release<0, 0>();
    release<0, 1>();
    release<1, 0>();
    release<1, 1>();
    held_ = nullptr;
    drain_pending();
  }

  // Columns [first, last) of a group that is the whole row: sums [rows][kPanel] go on.
  template <bool Both>
  void whole_row(const TileRows& at, std::int64_t first, std::int64_t last) {
    const std::int8_t* x = task_.quantized.codes + at.row * task_.quantized.stride;
    const unsigned char* w = codes_;
    load_sums<Both>(tiles_, sums_ + at.row * kPanel, height_);
    for (std::int64_t k = first; k < last; k += 64, w += 64 * kPanel) multiply<Both>(x + k, w);
    store_sums<Both>(tiles_, sums_ + at.row * kPanel, height_);
  }

  void drain_whole() {
    begin_ = 0, end_ = 1;
    widen_scales();
    over_row_tiles(task_.rows, height_, [&](const TileRows& at, bool) {
      announce(at, 0, 1, sums_ + at.row * kPanel);
      drain_pending();
    });
  }

  static constexpr std::int64_t kMostGroups = kTileColumns / 16;

  const GemmTask& task_;
  const Matrix& m_;
  const int depth_;
  const std::int64_t height_;  // of a row tile
  Tiles tiles_;
  Fetcher fetcher_;
  Pending pending_{};
  const unsigned char* base_ = nullptr;
  const unsigned char* codes_ = nullptr;
  float* scales_ = nullptr;
  float* mins_ = nullptr;
  std::int64_t begin_ = 0, end_ = 0;
  std::int32_t* held_ = nullptr;  // where the sums go that the registers hold
  bool held_both_ = false;
  int turn_ = 0;
  alignas(64) float running_[kMaxIntRows * kPanel];
  alignas(64) std::int32_t sums_[kMaxIntRows * kPanel];  // of whole rows, or of kDrained groups
  alignas(64) float scale_buffers_[2][2 * kMostGroups * kPanel];
  alignas(64) unsigned char spread_[kTileColumns * kPanel];
  alignas(16) unsigned char table_[16];
};

template <Store S, Zero Z>
static void tile_int_gemm(const GemmTask& task) {
  IntTiles<S, Z> tiles(task);
  for (std::int64_t p = task.panel_begin; p < task.panel_end; ++p) tiles.panel(p);
}

// ---- bf16 -----------------------------------------------------------------------------------------------------------

// Columns [first, last) of a panel for a block of rows; results go on in `running`.
template <bool Both>
static void tile_floats(Tiles& tiles, Fetcher& fetcher, const GemmTask& task, const unsigned char* w, const TileRows& at,
                        std::int64_t first, std::int64_t last, float* running) {
  const Activations& q = task.quantized;
  const std::int64_t height = tile_height(task.rows);
  const std::int8_t* x = q.codes + at.row * q.stride;
  load_sums<Both>(tiles, running + at.row * kPanel, height);
  for (std::int64_t at_byte = first; at_byte < last; at_byte += 64, w += 16 * 128) {
    load_factors<Both>(tiles, x + at_byte, q.stride, height, w);
    tiles.dot_bf16<0, 0>();
    tiles.dot_bf16<0, 1>();
    if constexpr (Both) {
      tiles.dot_bf16<1, 0>();
      tiles.dot_bf16<1, 1>();
    }
    fetcher.some();
  }
  store_sums<Both>(tiles, running + at.row * kPanel, height);
}

static void tile_bf16_gemm(const GemmTask& task) {
  alignas(64) float running[kMaxIntRows * kPanel];
  const Matrix& m = task.weight;
  const std::int64_t height = tile_height(task.rows);
  Tiles tiles(64, static_cast<int>(height));
  Fetcher fetcher;
  constexpr std::int64_t kBlockBytes = kTileColumns * 2;  // of one row of activations
  const std::int64_t row_bytes = padded_cols(Kind::bf16, m.cols) * 2;
  for (std::int64_t p = task.panel_begin; p < task.panel_end; ++p) {
    std::memset(running, 0, sizeof(float) * static_cast<std::size_t>(round_up(task.rows, kTileRows) * kPanel));
    for (std::int64_t first = 0; first < row_bytes; first += kBlockBytes) {
      const std::int64_t last = first + kBlockBytes < row_bytes ? first + kBlockBytes : row_bytes;
      const unsigned char* w = m.data + p * m.panel_bytes + first * kPanel;
      fetcher.begin(w, (last - first) * kPanel, (task.rows + 2 * height - 1) / (2 * height) * (last - first) / 64);
      over_row_tiles(task.rows, height, [&](const TileRows& at, bool both) {
        if (both) return tile_floats<true>(tiles, fetcher, task, w, at, first, last, running);
        tile_floats<false>(tiles, fetcher, task, w, at, first, last, running);
      });
    }
    store_panel(task, p, running);
  }
}

// R rows by vectors, in the order of the tile instruction.
template <int R>
static __attribute__((noinline)) void chain_block(const GemmTask& task, std::int64_t p, float* running) {
  constexpr int V = kPanel / kLanes;
  const Matrix& m = task.weight;
  const Activations& q = task.quantized;
  const unsigned char* w = m.data + p * m.panel_bytes;
  const std::int64_t row_bytes = padded_cols(Kind::bf16, m.cols) * 2;
  Vec total[R][V] = {};
  for (std::int64_t block = 0; block < row_bytes; block += 64) {
    Vec even[R][V] = {}, odd[R][V] = {};
    for (int k = 0; k < 16; ++k, w += 128) {
      Vec columns[V][2];
      for (int v = 0; v < V; ++v) columns_of<Kind::bf16>(load_step(w + v * kLanes * 4), columns[v]);
      for (int r = 0; r < R; ++r) {
        std::uint32_t pair;
        std::memcpy(&pair, q.codes + r * q.stride + block + k * 4, 4);
        Vec x[2];
        columns_of<Kind::bf16>(pair - VecU{}, x);
        for (int v = 0; v < V; ++v) {
          even[r][v] = fma(x[0], columns[v][0], even[r][v]);
          odd[r][v] = fma(x[1], columns[v][1], odd[r][v]);
        }
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int v = 0; v < V; ++v) total[r][v] += even[r][v] + odd[r][v];
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) store(running + r * kPanel + v * kLanes, total[r][v]);
  }
}

static void chain_bf16_gemm(const GemmTask& task) {
  alignas(64) float running[kFewFloatRows * kPanel];
  for (std::int64_t p = task.panel_begin; p < task.panel_end; ++p) {
    switch (task.rows) {
      case 1: chain_block<1>(task, p, running); break;
      case 2: chain_block<2>(task, p, running); break;
      case 3: chain_block<3>(task, p, running); break;
      default: chain_block<4>(task, p, running); break;
    }
    store_panel(task, p, running);
  }
}

// ---- all kinds ------------------------------------------------------------------------------------------------------

static void tile_gemm(const GemmTask& task) {
  const Format& format = task.weight.format;
  if (format.kind == Kind::bf16) return task.rows > kFewFloatRows ? tile_bf16_gemm(task) : chain_bf16_gemm(task);
  if (!is_integer(format.kind) || task.rows <= kFewIntRows) return avx512::table.gemm(task);
  switch (format.kind) {
    case Kind::int8: return start_of(format) ? tile_int_gemm<Store::bytes, Zero::started>(task)
                                             : tile_int_gemm<Store::bytes, Zero::offset>(task);
    case Kind::affine8: return tile_int_gemm<Store::bytes, Zero::affine>(task);
    case Kind::affine4: return tile_int_gemm<Store::nibbles, Zero::affine>(task);
    default: return tile_int_gemm<Store::table, Zero::none>(task);
  }
}
