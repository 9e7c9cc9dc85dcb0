// Products of float activations with packed panels: f32, bf16 and fp8 weights. Included by kernels.cpp inside the
// level's namespace.
//
// Each output is one chain over k ascending (per scale group, groups then added in order), whatever the number of rows
// that share the panel: row blocks only decide how many chains run side by side.

constexpr std::int64_t kFloatAhead = 4096;  // bytes that weights are fetched before they are needed

// The `kColumns` columns that one 128-byte step of a panel holds, for kLanes outputs.
template <Kind K>
constexpr int kColumns = K == Kind::f32 ? 1 : K == Kind::bf16 ? 2 : 4;

COTERIE_INLINE VecU load_step(const unsigned char* p) {
  VecU v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// e4m3 in the low byte of each lane, exactly.
COTERIE_INLINE Vec e4m3(VecU byte) {
  const VecU sign = (byte & 128u) << 24, magnitude = byte & 127u;
  const Vec normal = (Vec)((magnitude << 20) + (120u << 23));
  const Vec small = __builtin_convertvector((VecI)magnitude, Vec) * splat(0.001953125f);
  Vec value = magnitude < 8u ? small : normal;
  value = magnitude == 127u ? splat(__builtin_nanf("")) : value;
  return (Vec)((VecU)value | sign);
}

template <Kind K>
COTERIE_INLINE void columns_of(VecU step, Vec* out) {
  if constexpr (K == Kind::f32) {
    out[0] = (Vec)step;
  } else if constexpr (K == Kind::bf16) {
    out[0] = (Vec)(step << 16);
    out[1] = (Vec)(step & 0xffff0000u);
  } else {
    for (int j = 0; j < 4; ++j) out[j] = e4m3((step >> (8 * j)) & 255u);
  }
}

// The first output of a panel and how many it has.
struct PanelOutputs {
  std::int64_t first, count;
};

COTERIE_INLINE PanelOutputs outputs_of(const Matrix& m, std::int64_t panel) {
  const std::int64_t segment = panel / m.segment_panels, within = panel % m.segment_panels * kPanel;
  const std::int64_t room = m.segment_rows - within;
  return {segment * m.segment_rows + within, room < kPanel ? room : kPanel};
}

COTERIE_INLINE Vec load_scales(const unsigned char* table, std::int64_t index, ScaleType type) {
  if (type == ScaleType::f32) return load(reinterpret_cast<const float*>(table) + index);
  if (type == ScaleType::bf16) return load(reinterpret_cast<const std::uint16_t*>(table) + index);
  if (type == ScaleType::f16) return load_f16(reinterpret_cast<const std::uint16_t*>(table) + index);
  return (Vec)(load_bytes(table + index) << 23);
}

template <Kind K, int R>
COTERIE_INLINE void gemm_block(const GemmTask& task, const float* x, float* out, std::int64_t panel, int lane) {
  constexpr int kStep = kColumns<K>;
  const Matrix& m = task.weight;
  const unsigned char* base = m.data + panel * m.panel_bytes;
  const unsigned char* w = base + lane * 4;
  Vec total[R][kVectors] = {};
  for (std::int64_t group = 0, k = 0; group < m.groups; ++group) {
    const std::int64_t end = group + 1 == m.groups ? m.cols : (group + 1) * m.group;
    Vec acc[R][kVectors] = {};
    for (; k < end; k += kStep, w += kPanel * 4) {
      // One or two rows run at the pace of memory, where the processor's own fetching is better left alone.
      if constexpr (R > 2) {
        for (int v = 0; v < kVectors * kLanes * 4; v += 64) __builtin_prefetch(w + kFloatAhead + v, 0, 2);
      }
      Vec column[kVectors][kStep];
      for (int v = 0; v < kVectors; ++v) columns_of<K>(load_step(w + v * kLanes * 4), column[v]);
      for (int j = 0; j < kStep && (kStep == 1 || k + j < end); ++j) {
        for (int r = 0; r < R; ++r) {
          const Vec value = splat(x[r * task.x_stride + k + j]);
          for (int v = 0; v < kVectors; ++v) acc[r][v] = fma(value, column[v][j], acc[r][v]);
        }
      }
    }
    for (int v = 0; v < kVectors; ++v) {
      if constexpr (K == Kind::fp8) {
        const Vec scale = load_scales(base + m.scales_at, group * kPanel + lane + v * kLanes, m.format.scale);
        for (int r = 0; r < R; ++r) total[r][v] = fma(acc[r][v], scale, total[r][v]);
      } else {
        for (int r = 0; r < R; ++r) total[r][v] = acc[r][v];
      }
    }
  }
  const PanelOutputs outputs = outputs_of(m, panel);
  for (int v = 0; v < kVectors; ++v) {
    const std::int64_t from = lane + v * kLanes, n = outputs.count - from;
    if (n <= 0) return;
    const std::int64_t at = outputs.first + from;
    const bool whole = n >= kLanes;
    Vec bias = {};
    if (task.bias) bias = whole ? load(task.bias + at) : load_part(task.bias + at, n);
    for (int r = 0; r < R; ++r) {
      const Vec value = task.bias ? total[r][v] + bias : total[r][v];
      float* target = out + r * task.out_stride + at;
      if (whole) {
        store(target, value);
      } else {
        store_part(target, value, n);
      }
    }
  }
}

template <Kind K, int R>
COTERIE_INLINE std::int64_t gemm_rows(const GemmTask& task, std::int64_t row, std::int64_t panel, int lane) {
  for (; task.rows - row >= R; row += R) {
    gemm_block<K, R>(task, task.x + row * task.x_stride, task.out + row * task.out_stride, panel, lane);
  }
  return row;
}

template <Kind K>
static void gemm_typed(const GemmTask& task) {
  for (std::int64_t panel = task.panel_begin; panel < task.panel_end; ++panel) {
    for (int lane = 0; lane < kPanel; lane += kVectors * kLanes) {
      std::int64_t row = gemm_rows<K, kRowBlock>(task, 0, panel, lane);
      if constexpr (kRowBlock > 4) row = gemm_rows<K, 4>(task, row, panel, lane);
      if constexpr (kRowBlock > 2) row = gemm_rows<K, 2>(task, row, panel, lane);
      gemm_rows<K, 1>(task, row, panel, lane);
    }
  }
}
