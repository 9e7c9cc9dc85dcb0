// Products in tiles: blocks of 32 rows and a panel's 32 outputs, two tiles each way. Included by tile_kernels.cpp
// inside the level's namespace.
//
// int8: exact sums leave the tiles at the end of each scale group and are scaled as in igemm.h, so the bits are those
// of the vector kernels. bf16: weights times activations rounded to bf16, in the one order of the instruction (32
// columns at a time: even and odd columns in two chains, then sum + (even + odd)); few rows run through chain_block,
// vector code of exactly that order. Tiles read whole blocks of 16 rows: inputs have kTileSlack rows of room behind.

constexpr std::int64_t kTileBlock = 2 * kTileRows;  // rows
constexpr std::int64_t kFewIntRows = 8;             // up to so many the vector kernel is as fast: memory is the limit
constexpr std::int64_t kFewFloatRows = 4;

// Two row tiles and two output tiles, or one row tile if `Both` is false.
template <bool Both>
COTERIE_INLINE void zero_sums(Tiles& tiles) {
  tiles.zero<0>();
  tiles.zero<1>();
  if constexpr (Both) {
    tiles.zero<2>();
    tiles.zero<3>();
  }
}

template <bool Both>
COTERIE_INLINE void load_sums(Tiles& tiles, const void* sums) {
  const char* at = static_cast<const char*>(sums);
  constexpr std::int64_t kStride = kPanel * 4;
  tiles.load<0>(at, kStride);
  tiles.load<1>(at + 64, kStride);
  if constexpr (Both) {
    tiles.load<2>(at + kTileRows * kStride, kStride);
    tiles.load<3>(at + kTileRows * kStride + 64, kStride);
  }
}

template <bool Both>
COTERIE_INLINE void store_sums(const Tiles& tiles, void* sums) {
  char* at = static_cast<char*>(sums);
  constexpr std::int64_t kStride = kPanel * 4;
  tiles.store<0>(at, kStride);
  tiles.store<1>(at + 64, kStride);
  if constexpr (Both) {
    tiles.store<2>(at + kTileRows * kStride, kStride);
    tiles.store<3>(at + kTileRows * kStride + 64, kStride);
  }
}

template <bool Both>
COTERIE_INLINE void load_factors(Tiles& tiles, const std::int8_t* x, std::int64_t x_stride, const unsigned char* w) {
  tiles.load<6>(w, 128);
  tiles.load<7>(w + 64, 128);
  tiles.load<4>(x, x_stride);
  if constexpr (Both) tiles.load<5>(x + kTileRows * x_stride, x_stride);
}

template <bool Both>
COTERIE_INLINE void multiply_bytes(Tiles& tiles) {
  tiles.dot_bytes<0, 0>();
  tiles.dot_bytes<0, 1>();
  if constexpr (Both) {
    tiles.dot_bytes<1, 0>();
    tiles.dot_bytes<1, 1>();
  }
}

// Brings codes that the next block of columns needs into the second level.
COTERIE_INLINE void fetch_range(const unsigned char* from, std::int64_t bytes) {
  for (std::int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i, 0, 2);
}

// ---- integers -------------------------------------------------------------------------------------------------------

// Rows [row, row + rows) of a task, at most kTileBlock of them, and their sums of a group.
struct TileRows {
  std::int64_t row, rows;
};

// Adds a group's sums to the running results.
template <bool Affine>
static void drain(const GemmTask& task, const IntPanel& panel, const TileRows& at, std::int64_t group,
                  const std::int32_t* sums, float* running) {
  const Matrix& m = task.weight;
  const Activations& q = task.quantized;
  const std::int32_t* offsets = q.sums + at.row * m.groups + group;
  const float* factors = q.scales + at.row * q.groups + group * m.group / q.group;
  for (int lane = 0; lane < kPanel; lane += kLanes) {
    const Vec scale = load_scales(panel.scales, group * kPanel + lane, m.format.scale);
    Vec min = {};
    if constexpr (Affine) min = -load_scales(panel.mins, group * kPanel + lane, m.format.scale);
    for (std::int64_t r = 0; r < at.rows; ++r) {
      VecI sum;
      std::memcpy(&sum, sums + r * kPanel + lane, sizeof sum);
      const std::int32_t offset = offsets[r * m.groups];
      if constexpr (!Affine) sum += offset - VecI{};
      Vec value = __builtin_convertvector(sum, Vec) * scale;
      if constexpr (Affine) value = fma(splat(static_cast<float>(offset)), min, value);
      float* target = running + (at.row + r) * kPanel + lane;
      store(target, fma(value, splat(factors[r * q.groups]), load(target)));
    }
  }
}

// The groups of a column block. A group's drain stands behind the next group's products, to run beside them.
template <bool Affine, bool Both>
static void tile_groups(Tiles& tiles, const GemmTask& task, const IntPanel& panel, const TileRows& at, int depth,
                        float* running) {
  alignas(64) std::int32_t sums[2][kTileBlock * kPanel];
  const Activations& q = task.quantized;
  const std::int8_t* x = q.codes + at.row * q.stride + panel.group_begin * task.weight.group;
  const unsigned char* w = panel.codes;
  for (std::int64_t group = panel.group_begin; group < panel.group_end; ++group) {
    zero_sums<Both>(tiles);
    for (std::int64_t left = quads_of(task, group) * 4; left > 0; left -= depth, x += depth, w += depth * kPanel) {
      load_factors<Both>(tiles, x, q.stride, w);
      multiply_bytes<Both>(tiles);
    }
    if (group > panel.group_begin) drain<Affine>(task, panel, at, group - 1, sums[(group - 1) & 1], running);
    store_sums<Both>(tiles, sums[group & 1]);
  }
  drain<Affine>(task, panel, at, panel.group_end - 1, sums[(panel.group_end - 1) & 1], running);
}

// Columns [first, last) of a group that is the whole row: sums go on in `sums` [rows][32].
template <bool Both>
static void tile_columns(Tiles& tiles, const GemmTask& task, const unsigned char* codes, const TileRows& at,
                         std::int64_t first, std::int64_t last, std::int32_t* sums) {
  const Activations& q = task.quantized;
  const std::int8_t* x = q.codes + at.row * q.stride;
  load_sums<Both>(tiles, sums + at.row * kPanel);
  for (std::int64_t k = first; k < last; k += 64, codes += 64 * kPanel) {
    load_factors<Both>(tiles, x + k, q.stride, codes);
    multiply_bytes<Both>(tiles);
  }
  store_sums<Both>(tiles, sums + at.row * kPanel);
}

// One byte a code, as the tiles multiply them, for `count` quads.
template <Store S>
static const unsigned char* spread_codes(const unsigned char* quads, std::int64_t count, const unsigned char* table,
                                         unsigned char* out) {
  if constexpr (S == Store::bytes) return quads;
  for (std::int64_t i = 0; i < count; ++i) {
    __builtin_prefetch(quads + i * 64 + kAhead * 2);
    for (int lane = 0; lane < kPanel; lane += kLanes) {
      const VecU codes = load_codes<S>(quads + i * 64, lane, table);
      std::memcpy(out + i * 128 + lane * 4, &codes, sizeof codes);
    }
  }
  return out;
}

// Working memory of one task.
struct TileBuffers {
  alignas(64) float running[kMaxIntRows * kPanel];
  alignas(64) std::int32_t sums[kMaxIntRows * kPanel];
  alignas(64) unsigned char codes[kBlock * kPanel];
  alignas(16) unsigned char table[16];
};

// Calls body(rows, both) for each block of rows.
template <class F>
COTERIE_INLINE void over_row_tiles(std::int64_t rows, F body) {
  for (std::int64_t row = 0; row < rows; row += kTileBlock) {
    const std::int64_t n = rows - row < kTileBlock ? rows - row : kTileBlock;
    body(TileRows{row, n}, n > kTileRows);
  }
}

template <Store S, bool Affine>
static void tile_panel(Tiles& tiles, const GemmTask& task, std::int64_t p, int depth, TileBuffers& buffers) {
  const Matrix& m = task.weight;
  const unsigned char* base = m.data + p * m.panel_bytes;
  const bool whole = m.groups == 1 && depth == 64;
  std::memset(buffers.running, 0, sizeof(float) * static_cast<std::size_t>(task.rows * kPanel));
  if (whole) std::memset(buffers.sums, 0, sizeof buffers.sums);
  for (std::int64_t first = 0; first < task.quantized.stride; first += kBlock) {
    const std::int64_t end = first + kBlock, last = end < task.quantized.stride ? end : task.quantized.stride;
    const unsigned char* stored = base + first / 4 * kQuadBytes<S>;
    const unsigned char* codes = spread_codes<S>(stored, (last - first) / 4, buffers.table, buffers.codes);
    if constexpr (S == Store::bytes) fetch_range(stored + kBlock * kPanel, kBlock * kPanel);
    const std::int64_t groups = (last + m.group - 1) / m.group;
    const IntPanel panel{codes, base + m.scales_at, base + m.mins_at, buffers.table, first / m.group,
                         groups < m.groups ? groups : m.groups};
    over_row_tiles(task.rows, [&](const TileRows& at, bool both) {
      if (whole && both) return tile_columns<true>(tiles, task, codes, at, first, last, buffers.sums);
      if (whole) return tile_columns<false>(tiles, task, codes, at, first, last, buffers.sums);
      if (both) return tile_groups<Affine, true>(tiles, task, panel, at, depth, buffers.running);
      tile_groups<Affine, false>(tiles, task, panel, at, depth, buffers.running);
    });
  }
  if (whole) {
    const IntPanel panel{nullptr, base + m.scales_at, base + m.mins_at, nullptr, 0, 1};
    drain<Affine>(task, panel, {0, task.rows}, 0, buffers.sums, buffers.running);
  }
  store_panel(task, p, buffers.running);
}

template <Store S, bool Affine>
static void tile_int_gemm(const GemmTask& task) {
  TileBuffers buffers;
  const Matrix& m = task.weight;
  for (int i = 0; i < 16; ++i) buffers.table[i] = static_cast<unsigned char>(m.format.table[i] + 128);
  const int depth = m.group < 64 ? static_cast<int>(m.group) : 64;
  Tiles tiles(depth);
  for (std::int64_t p = task.panel_begin; p < task.panel_end; ++p) {
    tile_panel<S, Affine>(tiles, task, p, depth, buffers);
  }
}

// ---- bf16 -----------------------------------------------------------------------------------------------------------

// Columns [first, last) of a panel for a block of rows; results go on in `running`.
template <bool Both>
static void tile_floats(Tiles& tiles, const GemmTask& task, const unsigned char* w, const TileRows& at,
                        std::int64_t first, std::int64_t last, float* running) {
  const Activations& q = task.quantized;
  const std::int8_t* x = q.codes + at.row * q.stride;
  load_sums<Both>(tiles, running + at.row * kPanel);
  for (std::int64_t at_byte = first; at_byte < last; at_byte += 64, w += 16 * 128) {
    load_factors<Both>(tiles, x + at_byte, q.stride, w);
    tiles.dot_bf16<0, 0>();
    tiles.dot_bf16<0, 1>();
    if constexpr (Both) {
      tiles.dot_bf16<1, 0>();
      tiles.dot_bf16<1, 1>();
    }
  }
  store_sums<Both>(tiles, running + at.row * kPanel);
}

static void tile_bf16_gemm(const GemmTask& task) {
  alignas(64) float running[kMaxIntRows * kPanel];
  const Matrix& m = task.weight;
  Tiles tiles(64);
  constexpr std::int64_t kBlockBytes = kBlock * 2;  // of one row of activations
  const std::int64_t row_bytes = padded_cols(Kind::bf16, m.cols) * 2;
  for (std::int64_t p = task.panel_begin; p < task.panel_end; ++p) {
    std::memset(running, 0, sizeof(float) * static_cast<std::size_t>(round_up(task.rows, kTileRows) * kPanel));
    for (std::int64_t first = 0; first < row_bytes; first += kBlockBytes) {
      const std::int64_t last = first + kBlockBytes < row_bytes ? first + kBlockBytes : row_bytes;
      const unsigned char* w = m.data + p * m.panel_bytes + first * kPanel;
      fetch_range(w + kBlockBytes * kPanel, kBlockBytes * kPanel);
      over_row_tiles(task.rows, [&](const TileRows& at, bool both) {
        if (both) return tile_floats<true>(tiles, task, w, at, first, last, running);
        tile_floats<false>(tiles, task, w, at, first, last, running);
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
    case Kind::int8: return tile_int_gemm<Store::bytes, false>(task);
    case Kind::affine8: return tile_int_gemm<Store::bytes, true>(task);
    case Kind::affine4: return tile_int_gemm<Store::nibbles, true>(task);
    default:
      return is_even(format) ? tile_int_gemm<Store::nibbles, false>(task) : tile_int_gemm<Store::table, false>(task);
  }
}
