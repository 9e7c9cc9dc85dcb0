// Attention in bf16 tiles, for caches that hold less than float32. Included by tile_kernels.cpp inside the level's
// namespace; splits, their merging and what a task is are those of attention.h, which also serves float32 rows.
//
// Queries, keys, softmax weights and values are bf16, sums float32. Within a split (256 positions) the scores of 16
// pairs (row, head) are [key][pair], so a softmax runs down the lanes; its weights are rounded to bf16 before they are
// summed, so that they add up to one. Every pair has the same arithmetic whatever shares its tiles: keys it may not see
// have weight zero, which adds nothing to a sum. A value row that holds a NaN or an infinity is read as zeros and makes
// the pairs that see it NaN, so that it never meets such a zero.

constexpr int kPairTile = 16;                 // pairs of a tile
constexpr int kStepKeys = 32;                 // positions, and channels, of one product of tiles
constexpr int kKeyTiles = kSplit / kTileRows;
constexpr int kValueSteps = kSplit / kStepKeys;
constexpr std::int64_t kTileHalves = 512;     // bf16 values of a whole tile

typedef std::uint16_t Half;

// Rounds to bf16 in the upper half of each lane, to even; a NaN stays one.
COTERIE_INLINE VecU round_halves(Vec v) {
  const VecU bits = (VecU)v;
  const VecU rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return (v == v ? rounded : bits | 0x400000u) & 0xffff0000u;
}

// Lane pairs (even position, odd position) as bf16 pairs.
COTERIE_INLINE __m512i pack_halves(VecU even, VecU odd) { return (__m512i)((even >> 16) | odd); }

COTERIE_INLINE __m512i load_halves32(const float* p) {
  const __m256i low = _mm512_cvtepi32_epi16((__m512i)(round_halves(load(p)) >> 16));
  const __m256i high = _mm512_cvtepi32_epi16((__m512i)(round_halves(load(p + 16)) >> 16));
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

// rows[i] lane j <-> rows[j] lane i, 32 bits each.
COTERIE_INLINE void transpose16(__m512i* rows) {
  __m512i t[16];
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i) {
    rows[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    rows[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    rows[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    rows[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(rows[i], rows[4 + i], 0x88);
    t[4 + i] = _mm512_shuffle_i32x4(rows[i], rows[4 + i], 0xdd);
    t[8 + i] = _mm512_shuffle_i32x4(rows[8 + i], rows[12 + i], 0x88);
    t[12 + i] = _mm512_shuffle_i32x4(rows[8 + i], rows[12 + i], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    rows[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
    rows[4 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88);
    rows[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
    rows[12 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd);
  }
}

static std::int64_t pair_tiles(std::int64_t pairs) { return (pairs + kPairTile - 1) / kPairTile; }
static std::int64_t pad_step(std::int64_t channels) { return round_up(channels, kStepKeys); }

// A task's scratch.
struct TileWork {
  std::int64_t pairs, tiles, key_steps, value_pad, value_dim;
  Half* query;    // [pair tiles][key steps][16 channel pairs][16 pairs][2]
  Half* keys;     // [kSplit][key steps * 32]: rows that cannot be read in place
  Half* rows;     // [kSplit][value_pad]: the same of values that are no part of the keys
  Half* values;   // [value_pad / 16][kSplit / 2][16 channels][2]
  float* scores;  // [2][kSplit][16 pairs]
  Half* weights;  // [pair tiles][kValueSteps][16 pairs][32 keys]
  Partial now;
};

// Hands out scratch, or only counts it (base null). Sizes are whole cache lines.
struct TileParts {
  float* base;
  std::int64_t floats = 0;
  template <class T>
  T* take(std::int64_t count) {
    T* part = base ? reinterpret_cast<T*>(base + floats) : nullptr;
    floats += pad_channels((count * static_cast<std::int64_t>(sizeof(T)) + 3) / 4);
    return part;
  }
};

static TileWork tile_parts(const AttentionArgs& args, std::int64_t pairs, TileParts& parts) {
  TileWork work{};
  work.pairs = pairs;
  work.tiles = pair_tiles(pairs);
  work.key_steps = pad_step(args.key_dim) / kStepKeys;
  work.value_pad = pad_step(args.value_dim);
  work.value_dim = pad_channels(args.value_dim);
  work.query = parts.take<Half>(work.tiles * work.key_steps * kTileHalves);
  work.keys = parts.take<Half>(kSplit * work.key_steps * kStepKeys);
  work.rows = parts.take<Half>(kSplit * work.value_pad);
  work.values = parts.take<Half>(kSplit * work.value_pad);
  work.scores = parts.take<float>(2 * kSplit * kPairTile);
  work.weights = parts.take<Half>(work.tiles * kValueSteps * kTileHalves);
  float* now = parts.take<float>(pairs * (work.value_dim + 4));  // with the maxima and sums of all splits
  if (now) work.now = partial_at(now, pairs, work.value_dim);
  return work;
}

// Floats of scratch that a task of `pairs` needs.
static std::int64_t tile_attention_floats(const AttentionArgs& args, std::int64_t pairs) {
  TileParts parts{nullptr};
  tile_parts(args, pairs, parts);
  return parts.floats;
}

static void load_queries(const AttentionArgs& args, const AttentionTask& task, const TileWork& work) {
  const std::int64_t width = work.key_steps * kStepKeys;
  for (std::int64_t tile = 0; tile < work.tiles; ++tile) {
    for (std::int64_t step = 0; step < work.key_steps; ++step) {
      const std::int64_t channel = step * kStepKeys;
      __m512i rows[kPairTile];
      for (int i = 0; i < kPairTile; ++i) {
        const std::int64_t pair = tile * kPairTile + i;
        rows[i] = _mm512_setzero_si512();
        if (pair >= work.pairs) continue;
        const std::int64_t at = (task.row + pair / task.heads) * args.heads + task.head + pair % task.heads;
        const float* query = args.query + at * args.key_dim + channel;
        if (channel + kStepKeys <= args.key_dim) {
          rows[i] = load_halves32(query);
        } else {
          float part[kStepKeys] = {};
          std::memcpy(part, query, sizeof(float) * static_cast<std::size_t>(args.key_dim - channel));
          rows[i] = load_halves32(part);
        }
      }
      transpose16(rows);
      Half* out = work.query + (tile * (width / kStepKeys) + step) * kTileHalves;
      for (int i = 0; i < kPairTile; ++i) _mm512_store_si512(out + i * kStepKeys, rows[i]);
    }
  }
}

// ---- keys and values of a split -------------------------------------------------------------------------------------

// bf16 rows of a split: where each begins, for `count` positions.
struct HalfRows {
  const Half* row[kSplit];
  int count;
};

// Rows of one head as bf16, in place if they are whole steps of it, else through `scratch` [kSplit][pad].
static void find_rows(const CacheRows& rows, const std::int64_t* slots, std::int64_t head, std::int64_t pad,
                      Half* scratch, HalfRows* out) {
  const std::int64_t width = rows.dim + rows.exact;
  if (rows.kind == CacheKind::bf16 && width == pad) {
    for (int j = 0; j < out->count; ++j) {
      out->row[j] = reinterpret_cast<const Half*>(rows.data + slots[j] * rows.stride) + head * rows.dim;
    }
    return;
  }
  alignas(64) float wide[kMaxTileChannels];
  for (int j = 0; j < out->count; ++j) {
    Half* to = scratch + j * pad;
    out->row[j] = to;
    if (rows.kind == CacheKind::bf16) {
      std::memset(to, 0, static_cast<std::size_t>(pad) * 2);
      std::memcpy(to, rows.data + slots[j] * rows.stride + head * rows.dim * 2, static_cast<std::size_t>(width) * 2);
      continue;
    }
    std::memset(wide, 0, static_cast<std::size_t>(pad) * 4);
    load_row(rows, slots[j], head, wide);
    for (std::int64_t i = 0; i < pad; i += kStepKeys) _mm512_storeu_si512(to + i, load_halves32(wide + i));
  }
}

// Sixteen rows as a tile reads them.
struct KeyTile {
  const Half* base;
  std::int64_t stride;  // bytes
};

// In place where sixteen rows lie evenly, else copied; rows past the last are zeros.
static void find_key_tiles(const HalfRows& rows, std::int64_t pad, Half* scratch, KeyTile* tiles) {
  const int end = static_cast<int>(round_up(rows.count, kStepKeys));
  for (int first = 0; first < end; first += kTileRows) {
    const int n = rows.count - first < kTileRows ? rows.count - first : kTileRows;
    const Half* const* row = rows.row + first;
    bool even = n == kTileRows;
    for (int i = 2; even && i < n; ++i) even = row[i] - row[i - 1] == row[1] - row[0];
    if (even) {
      tiles[first / kTileRows] = {row[0], (row[1] - row[0]) * 2};
      continue;
    }
    Half* to = scratch + first * pad;
    for (int i = 0; i < kTileRows; ++i) {
      if (i < n && row[i] == to + i * pad) continue;
      if (i < n) std::memcpy(to + i * pad, row[i], static_cast<std::size_t>(pad) * 2);
      if (i >= n) std::memset(to + i * pad, 0, static_cast<std::size_t>(pad) * 2);
    }
    tiles[first / kTileRows] = {to, pad * 2};
  }
}

// Whether `channels` values of a row (whole steps) are all finite.
COTERIE_INLINE bool all_finite(const Half* row, std::int64_t channels) {
  const __m512i infinity = _mm512_set1_epi16(0x7f80);
  __mmask32 bad = 0;
  for (std::int64_t i = 0; i < channels; i += kStepKeys) {
    bad |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(_mm512_loadu_si512(row + i), infinity), infinity);
  }
  return bad == 0;
}

// Interleaves pairs of positions. Returns the first position whose row is not finite, or the count.
static int load_values(const HalfRows& rows, const TileWork& work) {
  constexpr int kAheadRows = 12;
  const int end = static_cast<int>(round_up(rows.count, kStepKeys));
  int first_bad = rows.count;
  for (int j = 0; j < end; j += 2) {
    const Half* pair[2] = {};
    for (int i = 0; i < 2 && j + i < rows.count; ++i) {
      pair[i] = rows.row[j + i];
      if (j + i + kAheadRows < rows.count) {
        const char* ahead = reinterpret_cast<const char*>(rows.row[j + i + kAheadRows]);
        for (std::int64_t b = 0; b < work.value_pad * 2; b += 64) __builtin_prefetch(ahead + b);
      }
      if (all_finite(pair[i], work.value_pad)) continue;
      pair[i] = nullptr;
      if (first_bad > j + i) first_bad = j + i;
    }
    Half* out = work.values + j * kPairTile;
    for (std::int64_t c = 0; c < work.value_pad; c += 16, out += kSplit * 16) {
      __m512i both = _mm512_setzero_si512();
      if (pair[0]) both = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(pair[0] + c)));
      if (pair[1]) {
        const __m512i odd = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(pair[1] + c)));
        both = _mm512_or_si512(both, _mm512_slli_epi32(odd, 16));
      }
      _mm512_store_si512(out, both);
    }
  }
  return first_bad;
}

// ---- one split ------------------------------------------------------------------------------------------------------

// Scores of one or two tiles of pairs from `tile` on against `keys` positions (whole steps).
template <bool Two>
static void tile_scores(Tiles& tiles, const TileWork& work, const KeyTile* keys, std::int64_t tile, int count) {
  const Half* query = work.query + tile * work.key_steps * kTileHalves;
  for (int key = 0; key < count; key += kStepKeys) {
    const KeyTile a = keys[key / kTileRows], b = keys[key / kTileRows + 1];
    tiles.zero<0>();
    tiles.zero<2>();
    if constexpr (Two) tiles.zero<1>();
    if constexpr (Two) tiles.zero<3>();
    for (std::int64_t step = 0; step < work.key_steps; ++step) {
      tiles.load<6>(query + step * kTileHalves, 64);
      tiles.load<4>(a.base + step * kStepKeys, a.stride);
      tiles.load<5>(b.base + step * kStepKeys, b.stride);
      tiles.dot_bf16<0, 0>();
      tiles.dot_bf16<1, 0>();
      if constexpr (Two) {
        tiles.load<7>(query + (work.key_steps + step) * kTileHalves, 64);
        tiles.dot_bf16<0, 1>();
        tiles.dot_bf16<1, 1>();
      }
    }
    float* out = work.scores + key * kPairTile;
    tiles.store<0>(out, 64);
    tiles.store<2>(out + kTileRows * kPairTile, 64);
    if constexpr (Two) {
      tiles.store<1>(out + kSplit * kPairTile, 64);
      tiles.store<3>(out + (kSplit + kTileRows) * kPairTile, 64);
    }
  }
}

// Scores [count][16] of a tile to weights [count / 32][16][32], maxima and sums; lane l sees the first seen[l] keys.
static void tile_softmax(const float* scores, VecI seen, int count, float scale, Half* weights, Vec* top, Vec* total) {
  Vec tops = splat(-__builtin_inff());
  for (int j = 0; j < count; ++j) {
    const Vec score = j < seen ? load(scores + j * kPairTile) * splat(scale) : splat(-__builtin_inff());
    tops = score > tops ? score : tops;  // a NaN is passed over here and makes the weights NaN
  }
  Vec sums[4] = {};
  for (int first = 0; first < count; first += kStepKeys) {
    __m512i packed[kPairTile];
    for (int j = 0; j < kStepKeys; j += 2) {
      VecU halves[2];
      for (int i = 0; i < 2; ++i) {
        const int key = first + j + i;
        const Vec weight = exp(load(scores + key * kPairTile) * splat(scale) - tops);
        halves[i] = key < seen ? round_halves(weight) : VecU{};
        sums[(j + i) & 3] += (Vec)halves[i];
      }
      packed[j / 2] = pack_halves(halves[0], halves[1]);
    }
    transpose16(packed);
    Half* out = weights + first * kPairTile;
    for (int i = 0; i < kPairTile; ++i) _mm512_store_si512(out + i * kStepKeys, packed[i]);
  }
  *top = tops;
  *total = (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

// A tile of results [16 pairs][16 channels] into the rows and channels that exist.
template <int T>
COTERIE_INLINE void store_values(const Tiles& tiles, const TileWork& work, std::int64_t pair, std::int64_t channel) {
  if (channel >= work.value_dim || pair >= work.pairs) return;
  float* out = work.now.out + pair * work.value_dim + channel;
  if (pair + kPairTile <= work.pairs) return tiles.store<T>(out, work.value_dim * 4);
  alignas(64) float part[kPairTile * kPairTile];
  tiles.store<T>(part, 64);
  for (std::int64_t i = 0; pair + i < work.pairs; ++i) store(out + i * work.value_dim, load(part + i * kPairTile));
}

template <bool Two>
static void tile_values(Tiles& tiles, const TileWork& work, std::int64_t tile, std::int64_t channel, int count) {
  const Half* weights = work.weights + tile * kValueSteps * kTileHalves;
  const Half* values = work.values + channel * kSplit;
  tiles.zero<0>();
  tiles.zero<1>();
  if constexpr (Two) tiles.zero<2>();
  if constexpr (Two) tiles.zero<3>();
  for (int step = 0; step < count / kStepKeys; ++step) {
    tiles.load<4>(weights + step * kTileHalves, 64);
    tiles.load<6>(values + step * kTileHalves, 64);
    tiles.load<7>(values + kSplit * kPairTile + step * kTileHalves, 64);
    tiles.dot_bf16<0, 0>();
    tiles.dot_bf16<0, 1>();
    if constexpr (Two) {
      tiles.load<5>(weights + (kValueSteps + step) * kTileHalves, 64);
      tiles.dot_bf16<1, 0>();
      tiles.dot_bf16<1, 1>();
    }
  }
  const std::int64_t pair = tile * kPairTile;
  store_values<0>(tiles, work, pair, channel);
  store_values<1>(tiles, work, pair, channel + 16);
  if constexpr (Two) {
    store_values<2>(tiles, work, pair + kPairTile, channel);
    store_values<3>(tiles, work, pair + kPairTile, channel + 16);
  }
}

// Positions of the split [begin, end) that pair `pair` may see.
static int seen_by(const AttentionTask& task, std::int64_t pair, std::int64_t begin, std::int64_t end) {
  const std::int64_t last = task.first_position + pair / task.heads + 1, seen = (last < end ? last : end) - begin;
  return static_cast<int>(seen < 0 ? 0 : seen);
}

// Weights, maxima and sums of one tile of pairs whose scores are in `scores`.
static void weigh_tile(const AttentionArgs& args, const AttentionTask& task, const TileWork& work, std::int64_t tile,
                       const float* scores, std::int64_t begin, std::int64_t end, int count, int first_bad) {
  VecI seen;
  for (int i = 0; i < kPairTile; ++i) {
    const std::int64_t pair = tile * kPairTile + i;
    seen[i] = seen_by(task, pair < work.pairs ? pair : work.pairs - 1, begin, end);
  }
  Vec top, total;
  tile_softmax(scores, seen, count, args.scale, work.weights + tile * kValueSteps * kTileHalves, &top, &total);
  for (int i = 0; i < kPairTile && tile * kPairTile + i < work.pairs; ++i) {
    const std::int64_t pair = tile * kPairTile + i;
    work.now.top[pair] = top[i];
    work.now.total[pair] = seen[i] > first_bad ? __builtin_nanf("") : total[i];
  }
}

static void run_tile_split(Tiles& tiles, const AttentionArgs& args, const AttentionTask& task, const TileWork& work,
                           std::int64_t begin, std::int64_t end) {
  const std::int64_t head = task.head / (args.heads / args.groups);
  std::int64_t slots[kSplit];
  HalfRows rows;
  rows.count = static_cast<int>(end - begin);
  find_slots(args, task, begin, rows.count, slots);
  find_rows(args.keys, slots, head, work.key_steps * kStepKeys, work.keys, &rows);
  KeyTile keys[kKeyTiles];
  find_key_tiles(rows, work.key_steps * kStepKeys, work.keys, keys);
  if (args.values.data != args.keys.data) find_rows(args.values, slots, head, work.value_pad, work.rows, &rows);
  const int first_bad = load_values(rows, work);
  const auto keys_of = [&](std::int64_t tile) {  // whole steps that the pairs of two tiles may see
    const std::int64_t next = (tile + 2) * kPairTile;
    return static_cast<int>(
        round_up(seen_by(task, (next < work.pairs ? next : work.pairs) - 1, begin, end), kStepKeys));
  };
  for (std::int64_t tile = 0; tile < work.tiles; tile += 2) {
    const int count = keys_of(tile);
    const bool two = tile + 1 < work.tiles;
    two ? tile_scores<true>(tiles, work, keys, tile, count) : tile_scores<false>(tiles, work, keys, tile, count);
    weigh_tile(args, task, work, tile, work.scores, begin, end, count, first_bad);
    if (two) weigh_tile(args, task, work, tile + 1, work.scores + kSplit * kPairTile, begin, end, count, first_bad);
  }
  for (std::int64_t channel = 0; channel < work.value_pad; channel += 2 * kPairTile) {
    for (std::int64_t tile = 0; tile < work.tiles; tile += 2) {
      const int count = keys_of(tile);
      tile + 1 < work.tiles ? tile_values<true>(tiles, work, tile, channel, count)
                            : tile_values<false>(tiles, work, tile, channel, count);
    }
  }
}

// As `attention` of attention.h.
static void tile_attention(const AttentionArgs& args, const AttentionTask& task) {
  const std::int64_t pairs = task.rows * task.heads, context = task.first_position + task.rows;
  TileParts parts{task.scratch};
  TileWork work = tile_parts(args, pairs, parts);
  load_queries(args, task, work);
  Tiles tiles(64);
  if (task.partial) {
    work.now = partial_at(task.partial, pairs, work.value_dim);
    const std::int64_t begin = task.split * kSplit, left = context - begin;
    return run_tile_split(tiles, args, task, work, begin, begin + (left < kSplit ? left : kSplit));
  }
  fold_all_splits(args, task, work.now, [&](std::int64_t begin, std::int64_t end) {
    run_tile_split(tiles, args, task, work, begin, end);
  });
}
