// Causal attention of a few query rows against one key head. Included by kernels.cpp inside the level's namespace.
//
// Keys are cut at fixed absolute positions: splits of kSplit, tiles of kTile within them. Within a split the tiles are
// folded in ascending order into a running maximum, sum and output per pair (row, head); then the splits are folded in
// ascending order. A pair sees the same arithmetic whichever rows, heads, pages or chunks share the call and however
// splits are spread over tasks: a score is kLanes chains over the key's channels and a fixed tree, the value sum one
// chain per channel over positions. Keys that a pair may not see never enter its arithmetic, not even times zero.

constexpr int kSums = kLanes;                          // scores that one reduction gives
constexpr int kPairs = kLanes == 4 ? 2 : kLanes / 2;   // pairs that share loaded keys
constexpr int kValueSums = kLanes == 16 ? 16 : 8;      // accumulators of the value product

// A value that is loaded once: compilers would rather read it again with every multiply-add, and run out of load ports.
COTERIE_INLINE Vec in_register(Vec v) {
#if defined(__AVX512F__)
  asm("" : "+v"(v));
#elif defined(__AVX2__)
  asm("" : "+x"(v));
#endif
  return v;
}

// Lanes without bit H: a[l] + a[l ^ H]; with it: the same of b.
template <int H>
COTERIE_INLINE Vec fold_lanes(Vec a, Vec b) {
#if defined(__AVX512F__)
  constexpr __mmask16 upper = H == 8 ? 0xff00 : H == 4 ? 0xf0f0 : H == 2 ? 0xcccc : 0xaaaa;
  VecI other;
  for (int l = 0; l < kLanes; ++l) other[l] = (l & H) ? 16 + (l ^ H) : (l ^ H);
  return (Vec)_mm512_mask_blend_ps(upper, (__m512)a, (__m512)b) +
         (Vec)_mm512_permutex2var_ps((__m512)a, (__m512i)other, (__m512)b);
#elif defined(__AVX2__)
  constexpr int upper = H == 4 ? 0xf0 : H == 2 ? 0xcc : 0xaa;
  const Vec kept = (Vec)_mm256_blend_ps((__m256)a, (__m256)b, upper);
  if constexpr (H == 4) return kept + (Vec)_mm256_permute2f128_ps((__m256)a, (__m256)b, 0x21);
  if constexpr (H == 2) return kept + (Vec)_mm256_shuffle_ps((__m256)a, (__m256)b, 0x4e);
  return kept + (Vec)_mm256_permute_ps(_mm256_blend_ps((__m256)b, (__m256)a, upper), 0xb1);
#else
  Vec out;
  for (int l = 0; l < kLanes; ++l) out[l] = (l & H) ? b[l] + b[l ^ H] : a[l] + a[l ^ H];
  return out;
#endif
}

// Lane i of the result is sum(v[i]): the same tree, kLanes at a time.
template <int H = kLanes / 2>
COTERIE_INLINE Vec sum_each(Vec* v) {
  for (int i = 0; i < H; ++i) v[i] = fold_lanes<H>(v[i], v[i + H]);
  if constexpr (H == 1) {
    return v[0];
  } else {
    return sum_each<H / 2>(v);
  }
}

// scores[r][0, count rounded up) of R pairs; `dim` is whole vectors.
template <int R, class Rows>
COTERIE_INLINE void score_tile(const float* query, std::int64_t dim, const Rows& tile, int count, float scale,
                               float (*scores)[kTile], const Ahead* ahead) {
  constexpr int C = kSums / R;
  for (int j = 0; j < count; j += C) {
    for (int c = 0; ahead && c < C; ++c) ask_for(*ahead, j + c);
    decltype(tile.row(0)) rows[C];
    for (int c = 0; c < C; ++c) rows[c] = tile.row(j + c);
    Vec acc[kSums] = {};
    for (std::int64_t d = 0; d < dim; d += kLanes) {
      Vec keys[C];
      for (int c = 0; c < C; ++c) keys[c] = in_register(load(rows[c] + d));
      for (int r = 0; r < R; ++r) {
        const Vec q = in_register(load(query + r * dim + d));
        for (int c = 0; c < C; ++c) acc[r * C + c] = fma(q, keys[c], acc[r * C + c]);
      }
    }
    float sums[kSums];
    store(sums, sum_each(acc) * splat(scale));
    for (int r = 0; r < R; ++r) std::memcpy(scores[r] + j, sums + r * C, sizeof(float) * C);
  }
}

// The largest of `top` and `count` >= 1 scores.
COTERIE_INLINE float largest_score(const float* scores, int count, float top) {
  const Vec rest = splat(scores[0]);
  Vec tops = splat(top);
  for (int j = 0; j < count; j += kLanes) {
    const Vec score = first_lanes(load(scores + j), count - j, rest);
    tops = score > tops ? score : tops;  // a NaN is passed over here and makes the weights NaN
  }
  return largest(tops);
}

// Turns `count` scores into weights against the maximum; returns their sum.
COTERIE_INLINE float weigh_scores(float* scores, int count, float top) {
  Vec sums = {};
  for (int j = 0; j < count; j += kLanes) {
    const Vec weight = first_lanes(exp(load(scores + j) - splat(top)), count - j, Vec{});
    store(scores + j, weight);
    sums = sums + weight;
  }
  return sum(sums);
}

// out[r] = out[r] * factor[r] + sum of weights[r][j] * values[j] over [begin, end), of V vectors.
template <int R, int V, class Rows>
COTERIE_INLINE void value_block(const Rows& tile, std::int64_t at, const float (*weights)[kTile], int begin, int end,
                                const float* factor, float* out, std::int64_t dim) {
  Vec acc[R][V];
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) acc[r][v] = load(out + r * dim + v * kLanes) * splat(factor[r]);
  }
  for (int j = begin; j < end; ++j) {
    const auto* row = tile.row(j) + at;
    Vec value[V];
    for (int v = 0; v < V; ++v) value[v] = in_register(load(row + v * kLanes));
    for (int r = 0; r < R; ++r) {
      const Vec weight = splat(weights[r][j]);
      for (int v = 0; v < V; ++v) acc[r][v] = fma(weight, value[v], acc[r][v]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) store(out + r * dim + v * kLanes, acc[r][v]);
  }
}

template <int R, class Rows>
COTERIE_INLINE void value_tile(const Rows& tile, const float (*weights)[kTile], int begin, int end,
                               const float* factor, float* out, std::int64_t dim) {
  constexpr int V = kValueSums / R;
  std::int64_t i = 0;
  for (; i + V * kLanes <= dim; i += V * kLanes) {
    value_block<R, V>(tile, i, weights, begin, end, factor, out + i, dim);
  }
  for (; i < dim; i += kLanes) value_block<R, 1>(tile, i, weights, begin, end, factor, out + i, dim);
}

// A task's scratch, and its pairs' state within the split at hand.
struct Work {
  float* query;  // [pairs, key_dim padded]
  float* keys;   // the tile
  float* values;
  std::int64_t key_dim, value_dim, key_stride, value_stride;  // padded
  Partial now;
};

static Partial partial_at(float* base, std::int64_t pairs, std::int64_t value_dim) {
  return {base, base + pairs * value_dim, base + pairs * (value_dim + 1)};
}

static Work make_work(const AttentionArgs& args, const AttentionTask& task) {
  const std::int64_t pairs = task.rows * task.heads;
  Work work;
  work.key_dim = pad_channels(args.key_dim);
  work.value_dim = pad_channels(args.value_dim);
  work.key_stride = tile_stride(args.key_dim);
  const bool shared = args.keys.data == args.values.data;
  work.value_stride = shared ? work.key_stride : tile_stride(args.value_dim);
  work.keys = task.scratch;
  work.values = shared ? work.keys : work.keys + kTile * work.key_stride;
  work.query = work.values + kTile * work.value_stride;
  work.now = partial_at(task.partial ? task.partial : work.query + pairs * work.key_dim, pairs, work.value_dim);
  for (std::int64_t p = 0; p < pairs; ++p) {
    const std::int64_t at = (task.row + p / task.heads) * args.heads + task.head + p % task.heads;
    widen_row(args.query + at * args.key_dim, args.key_dim, work.query + p * work.key_dim);
  }
  return work;
}

// Keys and values of up to kTile positions from `first` on, and what comes after them.
template <class Rows>
struct Tile {
  Rows keys, values;
  Ahead ahead;
  std::int64_t first;
};

// Folds a tile into R pairs from `pair` on.
template <int R, class Rows>
static void fold_pairs(const AttentionArgs& args, const AttentionTask& task, const Work& work, const Tile<Rows>& tile,
                       std::int64_t pair) {
  const std::int64_t first = tile.first;
  int count[R];
  for (int r = 0; r < R; ++r) {
    const std::int64_t seen = task.first_position + (pair + r) / task.heads + 1 - first;
    count[r] = static_cast<int>(seen < 0 ? 0 : seen < kTile ? seen : kTile);
  }
  if (count[R - 1] == 0) return;
  float scores[R][kTile];
  score_tile<R>(work.query + pair * work.key_dim, work.key_dim, tile.keys, count[R - 1], args.scale, scores,
                pair + R == task.rows * task.heads ? &tile.ahead : nullptr);
  float *top = work.now.top + pair, *total = work.now.total + pair;
  float factor[kLanes] = {};  // for what was summed before; first the maximum's step
  for (int r = 0; r < R; ++r) {
    const float now = count[r] ? largest_score(scores[r], count[r], top[r]) : top[r];
    factor[r] = top[r] - now, top[r] = now;
  }
  store(factor, exp(load(factor)));
  for (int r = 0; r < R; ++r) {
    if (count[r]) total[r] = total[r] * factor[r] + weigh_scores(scores[r], count[r], top[r]);
  }
  float* out = work.now.out + pair * work.value_dim;
  if (count[0] > 0) {
    value_tile<R>(tile.values, scores, 0, count[0], factor, out, work.value_dim);
  }
  if constexpr (R > 1) {  // rows further down see a few keys more
    const float one = 1.0f;
    for (int r = 1; r < R; ++r) {
      if (count[r] == count[0]) continue;
      value_tile<1>(tile.values, scores + r, count[0], count[r], count[0] ? &one : factor + r,
                    out + r * work.value_dim, work.value_dim);
    }
  }
}

template <class Rows>
static void fold_tile(const AttentionArgs& args, const AttentionTask& task, const Work& work, const Tile<Rows>& tile) {
  const std::int64_t pairs = task.rows * task.heads;
  std::int64_t p = 0;
  for (; p + kPairs <= pairs; p += kPairs) fold_pairs<kPairs>(args, task, work, tile, p);
  if constexpr (kPairs > 4) {
    for (; p + 4 <= pairs; p += 4) fold_pairs<4>(args, task, work, tile, p);
  }
  if constexpr (kPairs > 2) {
    for (; p + 2 <= pairs; p += 2) fold_pairs<2>(args, task, work, tile, p);
  }
  for (; p < pairs; ++p) fold_pairs<1>(args, task, work, tile, p);
}

struct TileSlots {
  const std::int64_t* slots;
  Ahead ahead;
  std::int64_t first;
  int count;
};

template <class T>
static void fold_in_place(const AttentionArgs& args, const AttentionTask& task, const Work& work, const TileSlots& at) {
  Tile<InPlace<T>> tile;
  point_at(args.keys, at.slots, at.count, at.ahead.head, &tile.keys);
  point_at(args.values, at.slots, at.count, at.ahead.head, &tile.values);
  tile.ahead = at.ahead;
  tile.first = at.first;
  fold_tile(args, task, work, tile);
}

// Few pairs read the cache where it lies: writing a widened tile would cost as much as they do.
static void read_tile(const AttentionArgs& args, const AttentionTask& task, const Work& work, const TileSlots& at) {
  if (task.rows * task.heads <= kPairs && in_place(args.keys) && in_place(args.values)) {
    if (args.keys.kind == CacheKind::f32) {
      fold_in_place<float>(args, task, work, at);
    } else {
      fold_in_place<std::uint16_t>(args, task, work, at);
    }
    return;
  }
  load_tile(args.keys, at.slots, at.count, at.ahead.head, work.keys);
  if (work.values != work.keys) load_tile(args.values, at.slots, at.count, at.ahead.head, work.values);
  const Tile<Widened> tile{{work.keys, work.key_stride}, {work.values, work.value_stride}, at.ahead, at.first};
  fold_tile(args, task, work, tile);
}

static void run_split(const AttentionArgs& args, const AttentionTask& task, const Work& work, std::int64_t begin,
                      std::int64_t end) {
  const std::int64_t group = task.head / (args.heads / args.groups), pairs = task.rows * task.heads;
  for (std::int64_t p = 0; p < pairs; ++p) {
    work.now.top[p] = -__builtin_inff();
    work.now.total[p] = 0.0f;
  }
  std::memset(work.now.out, 0, sizeof(float) * static_cast<std::size_t>(pairs * work.value_dim));
  std::int64_t slots[2][kTile];
  find_slots(args, task, begin, static_cast<int>(end - begin < kTile ? end - begin : kTile), slots[0]);
  for (std::int64_t first = begin; first < end; first += kTile) {
    const int turn = static_cast<int>((first - begin) / kTile % 2);
    const int count = static_cast<int>(end - first < kTile ? end - first : kTile);
    Ahead ahead{{&args.keys, work.values == work.keys ? nullptr : &args.values}, slots[1 - turn], group, 0};
    if (first + kTile < end) {
      const std::int64_t left = end - first - kTile;
      ahead.count = static_cast<int>(left < kTile ? left : kTile);
      find_slots(args, task, first + kTile, ahead.count, slots[1 - turn]);
    }
    read_tile(args, task, work, {slots[turn], ahead, first, count});
  }
}

// Folds one split of a pair into its running state; the first is taken as it is.
static void fold_split(float* out, float* top, float* total, const float* part, float part_top, float part_total,
                       std::int64_t dim, bool is_first) {
  if (is_first) {
    std::memcpy(out, part, sizeof(float) * static_cast<std::size_t>(dim));
    *top = part_top;
    *total = part_total;
    return;
  }
  const float now = part_top > *top ? part_top : *top;
  const Vec before = exp(splat(*top - now)), factor = exp(splat(part_top - now));
  for_vectors(dim, [&](std::int64_t i, std::int64_t n) {
    store_n(out + i, fma(load_n(part + i, n), factor, load_n(out + i, n) * before), n);
  });
  *total = *total * before[0] + part_total * factor[0];
  *top = now;
}

static void divide(float* out, float total, std::int64_t dim) {
  for_vectors(dim, [&](std::int64_t i, std::int64_t n) { store_n(out + i, load_n(out + i, n) / splat(total), n); });
}

static float* pair_out(const AttentionArgs& args, const AttentionTask& task, std::int64_t pair) {
  const std::int64_t at = (task.row + pair / task.heads) * args.heads + task.head + pair % task.heads;
  return args.out + at * args.value_dim;
}

// Calls run_split(begin, end) for each split of the task's context, which leaves its result in `now`, and merges them
// into the output. Behind `now` is room for the maxima and sums of all splits.
template <class F>
COTERIE_INLINE void fold_all_splits(const AttentionArgs& args, const AttentionTask& task, const Partial& now, F run_split) {
  const std::int64_t pairs = task.rows * task.heads, context = task.first_position + task.rows;
  const std::int64_t value_dim = pad_channels(args.value_dim);
  float* tops = now.total + pairs;
  float* totals = tops + pairs;
  for (std::int64_t begin = 0; begin < context; begin += kSplit) {
    run_split(begin, context - begin < kSplit ? context : begin + kSplit);
    for (std::int64_t p = 0; p < pairs; ++p) {
      if (begin > task.first_position + p / task.heads) continue;
      fold_split(pair_out(args, task, p), tops + p, totals + p, now.out + p * value_dim, now.top[p], now.total[p],
                 args.value_dim, begin == 0);
    }
  }
  for (std::int64_t p = 0; p < pairs; ++p) divide(pair_out(args, task, p), totals[p], args.value_dim);
}

// All splits of the task's rows, or (with `partial`) the one split `task.split` alone, left for attention_merge.
static void attention(const AttentionArgs& args, const AttentionTask& task) {
  const Work work = make_work(args, task);
  if (task.partial) {
    const std::int64_t begin = task.split * kSplit, left = task.first_position + task.rows - begin;
    run_split(args, task, work, begin, begin + (left < kSplit ? left : kSplit));
    return;
  }
  fold_all_splits(args, task, work.now,
                  [&](std::int64_t begin, std::int64_t end) { run_split(args, task, work, begin, end); });
}

// Folds the partials of the task's splits, `stride` floats apart from task.partial on, for pairs [begin, end).
static void attention_merge(const AttentionArgs& args, const AttentionTask& task, std::int64_t stride,
                            std::int64_t begin, std::int64_t end) {
  const std::int64_t pairs = task.rows * task.heads, value_dim = pad_channels(args.value_dim);
  for (std::int64_t p = begin; p < end; ++p) {
    float* out = pair_out(args, task, p);
    float top = 0.0f, total = 0.0f;
    const std::int64_t splits = (task.first_position + p / task.heads) / kSplit + 1;
    for (std::int64_t s = 0; s < splits; ++s) {
      const Partial part = partial_at(task.partial + s * stride, pairs, value_dim);
      fold_split(out, &top, &total, part.out + p * value_dim, part.top[p], part.total[p], args.value_dim, s == 0);
    }
    divide(out, total, args.value_dim);
  }
}
