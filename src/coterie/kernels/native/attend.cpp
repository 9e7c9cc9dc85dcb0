// Attention of a step: how it is cut into tasks for the pool, and the writing of cache rows. How work is cut depends on
// sizes and the number of threads and never changes a row's bits: splits lie at fixed positions and are merged in order
// (attention.h).
#include <algorithm>
#include <cstring>
#include <limits>

#include "ops.h"

namespace coterie {

namespace {

constexpr std::int64_t kChunk = 1 << 15;       // elements below which another thread is not worth it
constexpr std::int64_t kFewHeads = 8;          // pairs that a merging task takes
constexpr std::int64_t kTaskWork = 1 << 17;    // multiply-adds below which it is not worth it

constexpr float kSmallest = 1e-30f;            // a group below is stored as zeros: its scale would be no normal float

std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

std::int64_t context_of(const AttentionTask& task) {
  return task.first_position + task.rows;
}

std::int64_t pairs_of(const AttentionTask& task) {
  return task.rows * task.heads;
}

std::int64_t cost_of(const AttentionArgs& args, const AttentionTask& task) {
  return pairs_of(task) * context_of(task) * (args.key_dim + args.value_dim);
}

// Floats of one split's partial result, and of a task's scratch.
std::int64_t partial_floats(const AttentionArgs& args, std::int64_t pairs) {
  return pad_channels(pairs * (pad_channels(args.value_dim) + 2));
}

// How a kernel wants its tasks: (row, head) pairs that share widened keys, and heads that a task is not cut below.
struct Grain {
  std::int64_t pairs, heads;
};
constexpr Grain kVectorGrain{128, 8};
constexpr Grain kTileGrain{256, 16};

bool in_tiles(const KernelTable& table, const AttentionArgs& args) {
  return table.tile_attention && args.keys.kind != CacheKind::f32 && args.values.kind != CacheKind::f32 &&
         std::max(args.key_dim, args.value_dim) <= kMaxTileChannels;
}

std::int64_t vector_floats(const AttentionArgs& args, std::int64_t pairs) {
  const std::int64_t tiles = 64 * (tile_stride(args.key_dim) + tile_stride(args.value_dim));
  return tiles + pairs * (pad_channels(args.key_dim) + 2) + partial_floats(args, pairs);
}

// A task is some rows of a sequence and up to `head_step` heads of one key head, so many pairs in all; they share tiles.
// The last rows, which see most, come first.
void cut_sequence(const AttentionArgs& args, const Sequences& s, std::int64_t index, const Grain& grain,
                  std::int64_t head_step, std::vector<AttentionTask>& tasks) {
  const std::int64_t base = s.query_start[index];
  const std::int64_t begin = std::max(base, s.first), end = std::min<std::int64_t>(s.query_start[index + 1], s.last);
  if (begin >= end) return;
  const std::int64_t per_group = args.heads / args.groups;
  const std::int64_t row_step = std::max<std::int64_t>(1, grain.pairs / std::min(head_step, per_group));
  for (std::int64_t block = (end - begin - 1) / row_step; block >= 0; --block) {
    const std::int64_t row = begin + block * row_step;
    const std::int64_t position = s.blocks ? s.positions[row] : row - base;
    for (std::int64_t group = 0; group < args.groups; ++group) {
      for (std::int64_t head = 0; head < per_group; head += head_step) {
        AttentionTask task{};
        task.row = row - s.first;
        task.rows = std::min(row_step, end - row);
        task.first_position = position;
        task.head = group * per_group + head;
        task.heads = std::min(head_step, per_group - head);
        task.blocks = s.blocks ? s.blocks + index * s.stride : nullptr;
        task.base_row = base;
        tasks.push_back(task);
      }
    }
  }
}

// A task that is computed split by split: `splits` tasks from `first` on, whose results lie `stride` floats apart.
struct Cut {
  AttentionTask whole;
  std::size_t first;
  std::int64_t splits, stride;
};

struct Plan {
  std::vector<AttentionTask> tasks;
  std::vector<Cut> cuts;
  std::int64_t cost = 0;
  std::int64_t scratch = 0;   // floats of the largest task
  std::int64_t partials = 0;  // floats of all cuts
};

std::vector<AttentionTask> cut_rows_and_heads(const AttentionArgs& args, const Sequences& sequences,
                                              const Grain& grain, int threads) {
  std::vector<AttentionTask> tasks;
  for (std::int64_t head_step = grain.pairs;; head_step /= 2) {
    tasks.clear();
    std::int64_t splits = 0;
    for (std::int64_t i = 0; i < sequences.count; ++i) cut_sequence(args, sequences, i, grain, head_step, tasks);
    for (const AttentionTask& task : tasks) splits += ceil_div(context_of(task), kSplit);
    if (threads == 1 || splits >= 2 * threads || head_step == grain.heads) return tasks;
  }
}

// Tasks that would keep one thread busy while others have nothing left are cut at the splits.
Plan make_plan(const KernelTable& table, const AttentionArgs& args, const Sequences& sequences, int threads) {
  Plan plan;
  const bool tiles = in_tiles(table, args);
  const std::vector<AttentionTask> tasks =
      cut_rows_and_heads(args, sequences, tiles ? kTileGrain : kVectorGrain, threads);
  const auto floats = tiles ? table.tile_attention_floats : vector_floats;
  for (const AttentionTask& task : tasks) {
    plan.cost += cost_of(args, task);
    plan.scratch = std::max(plan.scratch, floats(args, pairs_of(task)));
  }
  const std::int64_t limit = plan.cost / (4 * threads);
  for (const AttentionTask& task : tasks) {
    const std::int64_t splits = ceil_div(context_of(task), kSplit);
    if (threads > 1 && splits > 1 && cost_of(args, task) > limit) {
      const std::int64_t stride = partial_floats(args, pairs_of(task));
      plan.cuts.push_back({task, plan.tasks.size(), splits, stride});
      plan.partials += splits * stride;
      plan.tasks.insert(plan.tasks.end(), static_cast<std::size_t>(splits), task);
    } else {
      plan.tasks.push_back(task);
    }
  }
  return plan;
}

void place_partials(Plan& plan, float* buffer) {
  for (Cut& cut : plan.cuts) {
    cut.whole.partial = buffer;
    for (std::int64_t split = 0; split < cut.splits; ++split) {
      AttentionTask& task = plan.tasks[cut.first + static_cast<std::size_t>(split)];
      task.split = split;
      task.partial = buffer + split * cut.stride;
    }
    buffer += cut.splits * cut.stride;
  }
}

void write_bf16(const float* source, std::int64_t n, char* target) {
  for (std::int64_t i = 0; i < n; ++i) {
    const std::uint16_t half = to_bf16(source[i]);
    std::memcpy(target + 2 * i, &half, 2);
  }
}

// One group of channels as codes of the largest magnitude's 127th part, halves to even; returns that scale. What holds
// a NaN or an infinity reads as NaN.
float write_group(const float* source, std::int64_t n, std::int8_t* codes) {
  std::uint32_t largest = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    std::uint32_t bits;
    std::memcpy(&bits, source + i, 4);
    largest = std::max(largest, bits & 0x7fffffffu);
  }
  float top;
  std::memcpy(&top, &largest, 4);
  const bool finite = largest < 0x7f800000u;
  if (!finite || top < kSmallest) {
    std::memset(codes, 0, static_cast<std::size_t>(n));
    return finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
  }
  const float scale = top / 127.0f;
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to the nearest integer
  for (std::int64_t i = 0; i < n; ++i) {
    codes[i] = static_cast<std::int8_t>(static_cast<std::int32_t>((source[i] / scale + kMagic) - kMagic));
  }
  return scale;
}

void write_codes(const CacheRows& rows, const float* source, char* target) {
  char* scales = target + rows.heads * rows.dim;
  for (std::int64_t head = 0; head < rows.heads; ++head) {
    for (std::int64_t begin = 0; begin < rows.dim; begin += kScaleGroup, scales += 4) {
      const std::int64_t at = head * rows.dim + begin, n = std::min(kScaleGroup, rows.dim - begin);
      const float scale = write_group(source + at, n, reinterpret_cast<std::int8_t*>(target) + at);
      std::memcpy(scales, &scale, 4);
    }
  }
  write_bf16(source + rows.heads * rows.dim, rows.exact, scales);
}

}  // namespace

void Device::attend(const AttentionArgs& args, const Sequences& sequences) {
  Plan plan = make_plan(table_, args, sequences, threads());
  const auto kernel = in_tiles(table_, args) ? table_.tile_attention : table_.attention;
  Scratch space(scratch_);
  if (plan.partials) place_partials(plan, space.take<float>(plan.partials));
  const auto count = static_cast<std::int64_t>(plan.tasks.size());
  const std::int64_t chunks = std::min(count, std::max<std::int64_t>(1, plan.cost / kTaskWork));
  parallel_for(pool_, chunks, [&](std::int64_t i) {
    Scratch own(scratch_);
    float* scratch = own.take<float>(plan.scratch);
    for (std::int64_t t = i * count / chunks; t < (i + 1) * count / chunks; ++t) {
      AttentionTask task = plan.tasks[static_cast<std::size_t>(t)];
      task.scratch = scratch;
      kernel(args, task);
    }
  });
  std::int64_t groups = 0;
  for (const Cut& cut : plan.cuts) groups = std::max(groups, ceil_div(pairs_of(cut.whole), kFewHeads));
  parallel_for(pool_, static_cast<std::int64_t>(plan.cuts.size()) * groups, [&](std::int64_t i) {
    const Cut& cut = plan.cuts[static_cast<std::size_t>(i / groups)];
    const std::int64_t begin = i % groups * kFewHeads, end = std::min(pairs_of(cut.whole), begin + kFewHeads);
    if (begin < end) table_.attention_merge(args, cut.whole, cut.stride, begin, end);
  });
}

void Device::cache_write(const CacheRows& cache, const float* rows, const std::int64_t* slots, std::int64_t n) {
  const std::int64_t width = cache.heads * cache.dim + cache.exact;
  const std::int64_t step = std::max<std::int64_t>(1, kChunk / std::max<std::int64_t>(1, width));
  parallel_for(pool_, ceil_div(n, step), [&](std::int64_t chunk) {
    for (std::int64_t r = chunk * step; r < std::min(n, (chunk + 1) * step); ++r) {
      char* target = const_cast<char*>(cache.data) + slots[r] * cache.stride;
      const float* source = rows + r * width;
      if (cache.kind == CacheKind::f32) {
        std::memcpy(target, source, sizeof(float) * static_cast<std::size_t>(width));
      } else if (cache.kind == CacheKind::bf16) {
        write_bf16(source, width, target);
      } else {
        write_codes(cache, source, target);
      }
    }
  });
}

}  // namespace coterie
