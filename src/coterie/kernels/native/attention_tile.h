// Tiles of attention: 64 consecutive positions of keys and values as float32 rows in scratch, whatever the cache holds.
// Included by kernels.cpp inside the level's namespace.
//
// A tile is widened once per task and read by all its rows and heads. Rows are padded with zeros to whole vectors and
// start an odd number of cache lines apart, so that a column of rows does not fall into a few cache sets.

constexpr int kTile = 64;

// A stream as a task reads it: the channels [offset, offset + dim) of each slot.
struct TileSource {
  const char* data;
  Kind kind;
  std::int64_t stride, offset, dim;  // in elements
};

COTERIE_INLINE const char* tile_row(const TileSource& source, std::int64_t slot) {
  const std::int64_t bytes = source.kind == Kind::f32 ? 4 : 2;
  return source.data + (slot * source.stride + source.offset) * bytes;
}

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

static void load_tile(const TileSource& source, const std::int64_t* slots, int count, float* tile) {
  const std::int64_t stride = tile_stride(source.dim);
  for (int j = 0; j < count; ++j) {
    const char* row = tile_row(source, slots[j]);
    if (source.kind == Kind::f32) {
      widen_row(reinterpret_cast<const float*>(row), source.dim, tile + j * stride);
    } else {
      widen_row(reinterpret_cast<const std::uint16_t*>(row), source.dim, tile + j * stride);
    }
  }
}

// Asks for the rows of a later tile, so that memory answers while this one is computed.
static void prefetch_tile(const TileSource& source, const std::int64_t* slots, int count) {
  const std::int64_t bytes = source.dim * (source.kind == Kind::f32 ? 4 : 2);
  for (int j = 0; j < count; ++j) {
    const char* row = tile_row(source, slots[j]);
    for (std::int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i, 0, 2);
  }
}
