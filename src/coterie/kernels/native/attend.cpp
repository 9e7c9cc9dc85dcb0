// Attention of a step: how it is cut into tasks for the pool, and the writing of cache rows. How work is cut depends on
// sizes and the number of threads and never changes a row's bits.
#include <algorithm>
#include <cstring>

#include "ops.h"

namespace coterie {

namespace {

constexpr std::int64_t kChunk = 1 << 15;  // multiply-adds below which another thread is not worth it

// A task is up to kMaxTaskRows rows of a sequence and up to `head_step` heads of one key head; they share a tile.
void split_sequence(const AttentionArgs& args, const Sequences& s, std::int64_t index, std::int64_t head_step,
                    std::vector<AttentionTask>& tasks) {
  const std::int64_t begin = s.query_start[index], end = s.query_start[index + 1];
  const std::int64_t per_group = args.heads / args.groups;
  for (std::int64_t row = begin; row < end; row += kMaxTaskRows) {
    const std::int64_t position = s.blocks ? s.positions[row] : row - begin;
    const std::int64_t rows = std::min(kMaxTaskRows, end - row);
    for (std::int64_t group = 0; group < args.groups; ++group) {
      for (std::int64_t head = 0; head < per_group; head += head_step) {
        tasks.push_back({row, rows, position, group * per_group + head, std::min(head_step, per_group - head),
                         s.blocks ? s.blocks + index * s.stride : nullptr, begin});
      }
    }
  }
}

}  // namespace

void Device::attend(const AttentionArgs& args, const Sequences& sequences) {
  // Few tasks (one stream of MLA) are cut finer, so that every thread has heads to work on.
  std::vector<AttentionTask> tasks;
  for (const std::int64_t head_step : {kMaxTaskHeads, kMaxTaskHeads / 4}) {
    tasks.clear();
    for (std::int64_t i = 0; i < sequences.count; ++i) split_sequence(args, sequences, i, head_step, tasks);
    if (static_cast<std::int64_t>(tasks.size()) >= 2 * threads()) break;
  }
  std::int64_t cost = 0;
  for (const AttentionTask& task : tasks) {
    cost += task.rows * task.heads * (task.first_position + task.rows) * (args.key_dim + args.value_dim);
  }
  const auto count = static_cast<std::int64_t>(tasks.size());
  const std::int64_t chunks = std::min(count, std::max<std::int64_t>(1, cost / kChunk));
  parallel_for(pool_, chunks, [&](std::int64_t i) {
    for (std::int64_t t = i * count / chunks; t < (i + 1) * count / chunks; ++t) {
      table_.attention(args, tasks[static_cast<std::size_t>(t)]);
    }
  });
}

void Device::cache_write(void* cache, Kind kind, const float* rows, const std::int64_t* slots, std::int64_t n,
                         std::int64_t width) {
  const std::int64_t step = std::max<std::int64_t>(1, kChunk / std::max<std::int64_t>(1, width));
  parallel_for(pool_, (n + step - 1) / step, [&](std::int64_t chunk) {
    for (std::int64_t r = chunk * step; r < std::min(n, (chunk + 1) * step); ++r) {
      const float* source = rows + r * width;
      if (kind == Kind::f32) {
        std::memcpy(static_cast<float*>(cache) + slots[r] * width, source,
                    sizeof(float) * static_cast<std::size_t>(width));
      } else {
        std::uint16_t* target = static_cast<std::uint16_t*>(cache) + slots[r] * width;
        for (std::int64_t i = 0; i < width; ++i) target[i] = to_bf16(source[i]);
      }
    }
  });
}

}  // namespace coterie
