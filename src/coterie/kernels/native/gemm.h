// Products with packed panels, written once for f32 and bf16 weights. Included by kernels.cpp inside the level's
// namespace.
//
// Each output is one chain over k ascending, whatever the number of rows that share the panel: row blocks only decide
// how many chains run side by side.

template <class T, int R>
COTERIE_INLINE void gemm_block(const GemmTask& task, const float* x, float* out, std::int64_t panel, int lane) {
  const std::int64_t depth = task.weight.cols;
  const T* w = static_cast<const T*>(task.weight.data) + panel * kPanel * depth + lane;
  Vec acc[R][kVectors] = {};
  for (std::int64_t k = 0; k < depth; ++k, w += kPanel) {
    Vec column[kVectors];
    for (int v = 0; v < kVectors; ++v) column[v] = load(w + v * kLanes);
    for (int r = 0; r < R; ++r) {
      const Vec value = splat(x[r * task.x_stride + k]);
      for (int v = 0; v < kVectors; ++v) acc[r][v] = fma(value, column[v], acc[r][v]);
    }
  }
  const std::int64_t first = panel * kPanel + lane;
  const std::int64_t room = task.weight.rows - first;
  for (int v = 0; v < kVectors; ++v) {
    const std::int64_t n = room - v * kLanes;
    if (n <= 0) return;
    const std::int64_t at = first + v * kLanes;
    const bool whole = n >= kLanes;
    Vec bias = {};
    if (task.bias) bias = whole ? load(task.bias + at) : load_part(task.bias + at, n);
    for (int r = 0; r < R; ++r) {
      const Vec value = task.bias ? acc[r][v] + bias : acc[r][v];
      float* target = out + r * task.out_stride + at;
      if (whole) {
        store(target, value);
      } else {
        store_part(target, value, n);
      }
    }
  }
}

template <class T, int R>
COTERIE_INLINE std::int64_t gemm_rows(const GemmTask& task, std::int64_t row, std::int64_t panel, int lane) {
  for (; task.rows - row >= R; row += R) {
    gemm_block<T, R>(task, task.x + row * task.x_stride, task.out + row * task.out_stride, panel, lane);
  }
  return row;
}

template <class T>
static void gemm_typed(const GemmTask& task) {
  for (std::int64_t panel = task.panel_begin; panel < task.panel_end; ++panel) {
    for (int lane = 0; lane < kPanel; lane += kVectors * kLanes) {
      std::int64_t row = gemm_rows<T, kRowBlock>(task, 0, panel, lane);
      if constexpr (kRowBlock > 4) row = gemm_rows<T, 4>(task, row, panel, lane);
      if constexpr (kRowBlock > 2) row = gemm_rows<T, 2>(task, row, panel, lane);
      gemm_rows<T, 1>(task, row, panel, lane);
    }
  }
}

static void gemm(const GemmTask& task) {
  if (task.weight.kind == Kind::f32) {
    gemm_typed<float>(task);
  } else {
    gemm_typed<std::uint16_t>(task);
  }
}
