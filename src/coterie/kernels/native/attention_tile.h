// Tiles of attention: 64 consecutive positions of keys and values as float32 rows in scratch, whatever the cache holds.
// Included by kernels.cpp inside the level's namespace.
//
// A tile is widened once per task and read by all its rows and heads. Rows are padded with zeros to whole vectors and
// start an odd number of cache lines apart, so that a column of rows does not fall into a few cache sets.

constexpr int kTile = 64;

// Slots of the positions [first, first + count).
static void find_slots(const AttentionArgs& args, const AttentionTask& task, std::int64_t first, int count,
                       std::int64_t* slots) {
  if (!task.blocks) {
    for (int j = 0; j < count; ++j) slots[j] = task.base_row + first + j;
    return;
  }
  std::int64_t page = first / args.page_size, offset = first % args.page_size;
  for (int j = 0; j < count; ++j) {
    slots[j] = task.blocks[page] * args.page_size + offset;
    if (++offset == args.page_size) {
      offset = 0;
      ++page;
    }
  }
}

template <class T>
COTERIE_INLINE void widen_row(const T* source, std::int64_t dim, float* out) {
  std::int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) store(out + i, load(source + i));
  if (i < dim) store(out + i, load_part(source + i, dim - i));
  i += i < dim ? kLanes : 0;
  for (; i < pad_channels(dim); i += kLanes) store(out + i, Vec{});
}

typedef std::int8_t VecCodes __attribute__((vector_size(kLanes)));

COTERIE_INLINE Vec load_codes(const std::int8_t* codes) {
  VecCodes group;
  std::memcpy(&group, codes, sizeof group);
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)group));
#elif defined(__AVX2__)
  return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128((long long)group)));
#else
  return __builtin_convertvector(__builtin_convertvector(group, VecI), Vec);
#endif
}

// bf16 at any address.
COTERIE_INLINE Vec load_halves(const char* p, std::int64_t n) {
  VecH halves = {};
  if (n >= kLanes) {
    std::memcpy(&halves, p, sizeof halves);
  } else {
    std::memcpy(&halves, p, 2 * static_cast<std::size_t>(n));
  }
  return widen(halves);
}

// Codes of one head: each group of channels times its scale.
COTERIE_INLINE void widen_codes(const std::int8_t* codes, const char* scales, std::int64_t dim, float* out) {
  for (std::int64_t begin = 0; begin < dim; begin += kScaleGroup) {
    float scale;
    std::memcpy(&scale, scales + begin / kScaleGroup * 4, 4);
    const std::int64_t end = dim - begin < kScaleGroup ? dim : begin + kScaleGroup;
    std::int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes) {
      store(out + i, load_codes(codes + i) * splat(scale));
    }
    for (; i < end; ++i) out[i] = static_cast<float>(codes[i]) * scale;
  }
}

// Head `head` of the row in `slot`: its channels, the exact ones after them, zeros up to whole vectors.
COTERIE_INLINE void load_row(const CacheRows& rows, std::int64_t slot, std::int64_t head, float* out) {
  const char* row = rows.data + slot * rows.stride;
  const std::int64_t width = rows.dim + rows.exact, first = head * rows.dim;
  if (rows.kind == CacheKind::f32) {
    widen_row(reinterpret_cast<const float*>(row) + first, width, out);
  } else if (rows.kind == CacheKind::bf16) {
    widen_row(reinterpret_cast<const std::uint16_t*>(row) + first, width, out);
  } else {
    const std::int64_t codes = rows.heads * rows.dim, groups = scale_groups(rows.dim);
    widen_codes(reinterpret_cast<const std::int8_t*>(row) + first, row + codes + head * groups * 4, rows.dim, out);
    const char* exact = row + codes + rows.heads * groups * 4;
    std::int64_t i = rows.dim;
    for (; i + kLanes <= width; i += kLanes, exact += 2 * kLanes) store(out + i, load_halves(exact, kLanes));
    if (i < width) store_part(out + i, load_halves(exact, width - i), width - i);
    for (i = width; i < pad_channels(width); ++i) out[i] = 0.0f;
  }
}

static void load_tile(const CacheRows& rows, const std::int64_t* slots, int count, std::int64_t head, float* tile) {
  const std::int64_t stride = tile_stride(rows.dim + rows.exact);
  for (int j = 0; j < count; ++j) load_row(rows, slots[j], head, tile + j * stride);
}

// Where the rows of a tile are read: widened in scratch, or where the cache has them.
struct Widened {
  const float* base;
  std::int64_t stride;
  const float* row(int j) const { return base + j * stride; }
};

template <class T>
struct InPlace {
  const T* rows[kTile];
  const T* row(int j) const { return rows[j]; }
};

// Whether rows can be read in place: whole vectors of floats or bf16.
COTERIE_INLINE bool in_place(const CacheRows& rows) {
  return rows.kind != CacheKind::int8 && (rows.dim + rows.exact) % 16 == 0 && rows.dim % 16 == 0;
}

// Rows past `count` are the last one again: they may be read, their scores are not used.
template <class T>
static void point_at(const CacheRows& rows, const std::int64_t* slots, int count, std::int64_t head,
                     InPlace<T>* place) {
  for (int j = 0; j < kTile; ++j) {
    const char* row = rows.data + slots[j < count ? j : count - 1] * rows.stride;
    place->rows[j] = reinterpret_cast<const T*>(row) + head * rows.dim;
  }
}

// Rows of the next tile that are asked for while this one is computed, a few at a time: all at once they would wait for
// each other. Of several heads only the channels of this one.
struct Ahead {
  const CacheRows* rows[2];  // keys and values; the second null if values are keys
  const std::int64_t* slots;
  std::int64_t head;
  int count;
};

COTERIE_INLINE void ask_for(const Ahead& ahead, int j) {
  if (j >= ahead.count) return;
  for (const CacheRows* rows : ahead.rows) {
    if (!rows) return;
    const std::int64_t size = rows->kind == CacheKind::f32 ? 4 : rows->kind == CacheKind::bf16 ? 2 : 1;
    const std::int64_t bytes = rows->heads == 1 ? rows->stride : rows->dim * size;
    const char* row = rows->data + ahead.slots[j] * rows->stride + ahead.head * rows->dim * size;
    for (std::int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i, 0, 2);
  }
}
