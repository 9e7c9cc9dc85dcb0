// Causal attention of a few query rows against one key head. Included by kernels.cpp inside the level's namespace.
//
// Keys are taken in tiles at fixed absolute positions (multiples of kTile) and folded in ascending order into a running
// maximum, sum and output per (row, head). A (row, head) sees the same arithmetic whichever rows, heads, pages or
// chunks share the call: a score is kLanes chains over the key's channels and a fixed tree, the value sum is one chain
// per channel over positions.

constexpr int kTile = 64;

template <class T>
struct Tile {
  const T* keys[kTile];
  const T* values[kTile];
};

template <class T>
static void find_tile(const AttentionArgs& args, const AttentionTask& task, std::int64_t first, int count,
                      Tile<T>* tile) {
  const std::int64_t group = task.head / (args.heads / args.groups);
  const T* keys = static_cast<const T*>(args.keys) + group * args.key_dim;
  const T* values = static_cast<const T*>(args.values) + group * args.value_dim;
  for (int j = 0; j < count; ++j) {
    std::int64_t slot = task.base_row + first + j;
    if (task.blocks) {
      const std::int64_t position = first + j;
      slot = task.blocks[position / args.page_size] * args.page_size + position % args.page_size;
    }
    tile->keys[j] = keys + slot * args.key_stride;
    tile->values[j] = values + slot * args.value_stride;
  }
}

// scores[h][j] of R heads x C keys.
template <class T, int R, int C>
COTERIE_INLINE void score_block(const float* query, std::int64_t dim, const T* const* keys, float scale,
                                float (*scores)[kTile], int j) {
  Vec acc[R][C] = {};
  std::int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) {
    Vec key[C];
    for (int c = 0; c < C; ++c) key[c] = load(keys[j + c] + d);
    for (int r = 0; r < R; ++r) {
      const Vec q = load(query + r * dim + d);
      for (int c = 0; c < C; ++c) acc[r][c] = fma(q, key[c], acc[r][c]);
    }
  }
  if (d < dim) {
    Vec key[C];
    for (int c = 0; c < C; ++c) key[c] = load_part(keys[j + c] + d, dim - d);
    for (int r = 0; r < R; ++r) {
      const Vec q = load_part(query + r * dim + d, dim - d);
      for (int c = 0; c < C; ++c) acc[r][c] = fma(q, key[c], acc[r][c]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) scores[r][j + c] = sum(acc[r][c]) * scale;
  }
}

template <class T, int R>
COTERIE_INLINE void score_tile(const float* query, std::int64_t dim, const T* const* keys, int count, float scale,
                               float (*scores)[kTile]) {
  int j = 0;
  for (; j + kKeyBlock <= count; j += kKeyBlock) score_block<T, R, kKeyBlock>(query, dim, keys, scale, scores, j);
  for (; j < count; ++j) score_block<T, R, 1>(query, dim, keys, scale, scores, j);
}

// Turns `count` scores into weights against the new maximum; returns the factor for what was accumulated before.
COTERIE_INLINE float fold_softmax(float* scores, int count, float* top, float* total) {
  float now = *top;
  for (int j = 0; j < count; ++j) now = scores[j] > now ? scores[j] : now;
  for (int j = count; j < kTile; ++j) scores[j] = now;
  Vec sums = {};
  for (int j = 0; j < kTile; j += kLanes) {
    Vec weight = exp(load(scores + j) - splat(now));
    if (j + kLanes > count) {
      for (int i = 0; i < kLanes; ++i) weight[i] = j + i < count ? weight[i] : 0.0f;
    }
    store(scores + j, weight);
    sums = sums + weight;
  }
  const float factor = exp(splat(*top - now))[0];
  *top = now;
  *total = *total * factor + sum(sums);
  return factor;
}

// out[r][i .. i + C vectors) = out * factor + sum_j weights[r][j] * values[j].
template <class T, int R, int C>
COTERIE_INLINE void value_block(const T* const* values, int count, const float (*weights)[kTile], const float* factor,
                                float* out, std::int64_t dim, std::int64_t i) {
  Vec acc[R][C];
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) acc[r][c] = load(out + r * dim + i + c * kLanes) * splat(factor[r]);
  }
  for (int j = 0; j < count; ++j) {
    Vec value[C];
    for (int c = 0; c < C; ++c) value[c] = load(values[j] + i + c * kLanes);
    for (int r = 0; r < R; ++r) {
      const Vec weight = splat(weights[r][j]);
      for (int c = 0; c < C; ++c) acc[r][c] = fma(weight, value[c], acc[r][c]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) store(out + r * dim + i + c * kLanes, acc[r][c]);
  }
}

template <class T, int R>
COTERIE_INLINE void value_tile(const T* const* values, int count, const float (*weights)[kTile], const float* factor,
                               float* out, std::int64_t dim) {
  std::int64_t i = 0;
  for (; i + kVectors * kLanes <= dim; i += kVectors * kLanes) {
    value_block<T, R, kVectors>(values, count, weights, factor, out, dim, i);
  }
  for (; i + kLanes <= dim; i += kLanes) value_block<T, R, 1>(values, count, weights, factor, out, dim, i);
  if (i == dim) return;
  const std::int64_t n = dim - i;
  for (int r = 0; r < R; ++r) {
    Vec acc = load_part(out + r * dim + i, n) * splat(factor[r]);
    for (int j = 0; j < count; ++j) acc = fma(splat(weights[r][j]), load_part(values[j] + i, n), acc);
    store_part(out + r * dim + i, acc, n);
  }
}

struct Running {
  float top[kMaxTaskRows][kMaxTaskHeads];
  float total[kMaxTaskRows][kMaxTaskHeads];
};

// Folds one tile into R heads of one row, from head `h` of the task on.
template <class T, int R>
static void fold_heads(const AttentionArgs& args, const AttentionTask& task, const Tile<T>& tile, int count,
                       std::int64_t row, std::int64_t h, Running* running) {
  float scores[R][kTile];
  float factor[R];
  const std::int64_t at = (task.row + row) * args.heads + task.head + h;
  score_tile<T, R>(args.query + at * args.key_dim, args.key_dim, tile.keys, count, args.scale, scores);
  for (int r = 0; r < R; ++r) {
    factor[r] = fold_softmax(scores[r], count, &running->top[row][h + r], &running->total[row][h + r]);
  }
  value_tile<T, R>(tile.values, count, scores, factor, args.out + at * args.value_dim, args.value_dim);
}

template <class T>
static void attention_typed(const AttentionArgs& args, const AttentionTask& task) {
  Running running;
  for (std::int64_t row = 0; row < task.rows; ++row) {
    for (std::int64_t h = 0; h < task.heads; ++h) {
      running.top[row][h] = -__builtin_inff();
      running.total[row][h] = 0.0f;
    }
    float* out = args.out + ((task.row + row) * args.heads + task.head) * args.value_dim;
    std::memset(out, 0, sizeof(float) * static_cast<std::size_t>(task.heads * args.value_dim));
  }
  Tile<T> tile;
  const std::int64_t context = task.first_position + task.rows;
  for (std::int64_t first = 0; first < context; first += kTile) {
    const std::int64_t left = context - first;
    find_tile(args, task, first, static_cast<int>(left < kTile ? left : kTile), &tile);
    for (std::int64_t row = 0; row < task.rows; ++row) {
      const std::int64_t seen = task.first_position + row + 1 - first;
      if (seen <= 0) continue;
      const int count = static_cast<int>(seen < kTile ? seen : kTile);
      std::int64_t h = 0;
      for (; h + 4 <= task.heads; h += 4) fold_heads<T, 4>(args, task, tile, count, row, h, &running);
      for (; h < task.heads; ++h) fold_heads<T, 1>(args, task, tile, count, row, h, &running);
    }
  }
  for (std::int64_t row = 0; row < task.rows; ++row) {
    for (std::int64_t h = 0; h < task.heads; ++h) {
      float* out = args.out + ((task.row + row) * args.heads + task.head + h) * args.value_dim;
      const float total = running.total[row][h];
      for (std::int64_t i = 0; i < args.value_dim; ++i) out[i] /= total;
    }
  }
}

static void attention(const AttentionArgs& args, const AttentionTask& task) {
  if (args.kind == Kind::f32) {
    attention_typed<float>(args, task);
  } else {
    attention_typed<std::uint16_t>(args, task);
  }
}
