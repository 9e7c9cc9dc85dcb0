// Kernels that treat one row at a time: norms, rope, gates, router selection, combine. Included by kernels.cpp inside
// the level's namespace.

// Calls body(offset, n) for whole vectors, then once for the rest (n < kLanes).
template <class F>
COTERIE_INLINE void for_vectors(std::int64_t size, F body) {
  std::int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) body(i, static_cast<std::int64_t>(kLanes));
  if (i < size) body(i, size - i);
}

template <class T>
COTERIE_INLINE Vec load_n(const T* p, std::int64_t n) {
  return n == kLanes ? load(p) : load_part(p, n);
}

COTERIE_INLINE void store_n(float* p, Vec v, std::int64_t n) {
  if (n == kLanes) {
    store(p, v);
  } else {
    store_part(p, v, n);
  }
}

// Eight double chains and a fixed tree.
static double sum_of_squares(const float* x, std::int64_t size) {
  double chain[8] = {};
  std::int64_t i = 0;
  for (; i + 8 <= size; i += 8) {
    for (int j = 0; j < 8; ++j) chain[j] += static_cast<double>(x[i + j]) * static_cast<double>(x[i + j]);
  }
  for (int j = 0; i + j < size; ++j) chain[j] += static_cast<double>(x[i + j]) * static_cast<double>(x[i + j]);
  return ((chain[0] + chain[4]) + (chain[2] + chain[6])) + ((chain[1] + chain[5]) + (chain[3] + chain[7]));
}

static void norm_row(const float* x, const float* weight, float* out, std::int64_t width, float eps) {
  const double mean = sum_of_squares(x, width) / static_cast<double>(width);
  const Vec scale = splat(static_cast<float>(1.0 / __builtin_sqrt(mean + static_cast<double>(eps))));
  for_vectors(width, [&](std::int64_t i, std::int64_t n) {
    store_n(out + i, load_n(x + i, n) * scale * load_n(weight + i, n), n);
  });
}

static void norm(const NormArgs& args, std::int64_t begin, std::int64_t end) {
  for (std::int64_t row = begin; row < end; ++row) {
    const float* x = args.x + row * args.width;
    if (args.residual) {
      const float* residual = args.residual + row * args.width;
      float* total = args.total + row * args.width;
      for_vectors(args.width, [&](std::int64_t i, std::int64_t n) {
        store_n(total + i, load_n(residual + i, n) + load_n(x + i, n), n);
      });
      x = total;
    }
    norm_row(x, args.weight, args.out + row * args.width, args.width, args.eps);
  }
}

// Rotates rope.dim channels; `out` may be `x`.
static void rotate(const Rope& rope, std::int64_t row, const float* x, float* out) {
  const std::int64_t half = rope.dim / 2;
  const float* cosine = rope.table + static_cast<std::int64_t>(rope.positions[row]) * rope.dim;
  const float* sine = cosine + half;
  const std::int64_t step = rope.interleaved ? 2 : 1;
  const std::int64_t gap = rope.interleaved ? 1 : half;
  for (std::int64_t i = 0; i < half; ++i) {
    const float a = x[i * step], b = x[i * step + gap];
    out[i * step] = a * cosine[i] - b * sine[i];
    out[i * step + gap] = b * cosine[i] + a * sine[i];
  }
}

static void mla_rows(const MlaArgs& args, std::int64_t begin, std::int64_t end) {
  const std::int64_t rope = args.rope.dim, in = args.nope + rope, out = args.rank + rope;
  for (std::int64_t row = begin; row < end; ++row) {
    for (std::int64_t head = 0; head < args.heads; ++head) {
      const std::int64_t at = row * args.heads + head;
      rotate(args.rope, row, args.query + at * in + args.nope, args.query_out + at * out + args.rank);
    }
    const float* kv = args.kv + row * out;
    float* target = args.rows_out + row * out;
    norm_row(kv, args.weight, target, args.rank, args.eps);
    rotate(args.rope, row, kv + args.rank, target + args.rank);
  }
}

static void head_rows(const HeadArgs& args, std::int64_t begin, std::int64_t end) {
  for (std::int64_t row = begin; row < end; ++row) {
    for (std::int64_t head = 0; head < args.heads; ++head) {
      const float* x = args.x + (row * args.heads + head) * args.dim;
      float* out = args.out + (row * args.heads + head) * args.dim;
      if (args.weight) {
        norm_row(x, args.weight, out, args.dim, args.eps);
      } else {
        std::memcpy(out, x, sizeof(float) * static_cast<std::size_t>(args.dim));
      }
      rotate(args.rope, row, out, out);
    }
  }
}

static void silu_mul(float* x, std::int64_t inner, std::int64_t first, std::int64_t last, std::int64_t begin,
                     std::int64_t end) {
  for (std::int64_t row = begin; row < end; ++row) {
    float* gate = x + row * 2 * inner + first;
    for_vectors(last - first, [&](std::int64_t i, std::int64_t n) {
      const Vec value = load_n(gate + i, n);
      store_n(gate + i, value * sigmoid(value) * load_n(gate + inner + i, n), n);
    });
  }
}

static void sigmoid_scale(const float* x, const float* gate, float* out, std::int64_t width, std::int64_t begin,
                          std::int64_t end) {
  for (std::int64_t row = begin; row < end; ++row) {
    const Vec scale = sigmoid(splat(gate[row]));
    for_vectors(width, [&](std::int64_t i, std::int64_t n) {
      store_n(out + row * width + i, load_n(x + row * width + i, n) * scale, n);
    });
  }
}

template <class T, bool Rounded>
static void combine_rows(const CombineArgs& args, std::int64_t begin, std::int64_t end) {
  const T* rows = static_cast<const T*>(args.rows);
  for (std::int64_t row = begin; row < end; ++row) {
    const std::int64_t* position = args.position + row * args.top_k;
    const float* weights = args.weights + row * args.top_k;
    for_vectors(args.width, [&](std::int64_t i, std::int64_t n) {
      Vec total = {};
      for (std::int64_t k = 0; k < args.top_k; ++k) {
        Vec value = load_n(rows + position[k] * args.width + i, n);
        if constexpr (Rounded) value = (Vec)round_to_bf16(value);
        total = fma(splat(weights[k]), value, total);
      }
      if (args.shared) total = total + load_n(args.shared + row * args.width + i, n);
      store_n(args.out + row * args.out_stride + i, total, n);
    });
  }
}

static void combine(const CombineArgs& args, std::int64_t begin, std::int64_t end) {
  switch (args.type) {
    case RowType::f32: return combine_rows<float, false>(args, begin, end);
    case RowType::rounded: return combine_rows<float, true>(args, begin, end);
    case RowType::bf16: return combine_rows<std::uint16_t, false>(args, begin, end);
  }
}

static void round_row(const float* x, std::int64_t size, std::uint16_t* out) {
  for_vectors(size, [&](std::int64_t i, std::int64_t n) {
    const VecH halves = high_halves(round_to_bf16(load_n(x + i, n)));
    std::memcpy(out + i, &halves, 2 * static_cast<std::size_t>(n));
  });
}

static void narrow(const NarrowArgs& args, std::int64_t begin, std::int64_t end) {
  for (std::int64_t row = begin; row < end; ++row) {
    round_row(args.x + args.take[row] * args.width, args.width, args.out + row * args.width);
  }
}

// ---- router ---------------------------------------------------------------------------------------------------------

static void score_row(float* scores, std::int64_t size, bool is_sigmoid) {
  if (is_sigmoid) {
    for_vectors(size, [&](std::int64_t i, std::int64_t n) { store_n(scores + i, sigmoid(load_n(scores + i, n)), n); });
    return;
  }
  float top = scores[0];
  for (std::int64_t i = 1; i < size; ++i) top = scores[i] > top ? scores[i] : top;
  for_vectors(size,
              [&](std::int64_t i, std::int64_t n) { store_n(scores + i, exp(load_n(scores + i, n) - splat(top)), n); });
  float total = 0.0f;
  for (std::int64_t i = 0; i < size; ++i) total += scores[i];
  for (std::int64_t i = 0; i < size; ++i) scores[i] /= total;
}

// Indices of the k largest values, best first, lower index first among equals: each value that beats the last of the k
// best so far is moved up to its place.
static void select_top(const float* values, std::int64_t size, std::int64_t k, std::int32_t* ids) {
  std::int64_t count = 0;
  for (std::int64_t i = 0; i < size; ++i) {
    const float value = values[i];
    if (count == k && !(value > values[ids[k - 1]])) continue;
    std::int64_t at = count < k ? count++ : k - 1;
    for (; at > 0 && value > values[ids[at - 1]]; --at) ids[at] = ids[at - 1];
    ids[at] = static_cast<std::int32_t>(i);
  }
}

static void mask_groups(const RouteArgs& args, float* biased, float* group_scores) {
  const std::int64_t size = args.experts / args.groups;
  for (std::int64_t g = 0; g < args.groups; ++g) {
    float first = -__builtin_inff(), second = -__builtin_inff();
    for (std::int64_t i = 0; i < size; ++i) {
      const float value = biased[g * size + i];
      if (value > first) {
        second = first;
        first = value;
      } else if (value > second) {
        second = value;
      }
    }
    group_scores[g] = args.top2_sum && size > 1 ? first + second : first;
  }
  for (std::int64_t g = 0; g < args.groups; ++g) {
    std::int64_t better = 0;
    for (std::int64_t other = 0; other < args.groups; ++other) {
      better += group_scores[other] > group_scores[g] || (group_scores[other] == group_scores[g] && other < g);
    }
    if (better < args.topk_groups) continue;
    for (std::int64_t i = 0; i < size; ++i) biased[g * size + i] = -__builtin_inff();
  }
}

static void route(const RouteArgs& args, std::int64_t begin, std::int64_t end) {
  for (std::int64_t row = begin; row < end; ++row) {
    float* scores = args.scores + row * args.experts;
    float* biased = args.biased + row * args.experts;
    std::int32_t* ids = args.ids + row * args.top_k;
    float* weights = args.weights + row * args.top_k;
    score_row(scores, args.experts, args.sigmoid);
    for (std::int64_t i = 0; i < args.experts; ++i) {
      const float value = args.bias ? scores[i] + args.bias[i] : scores[i];
      biased[i] = value == value ? value : -__builtin_inff();  // a NaN row still picks K distinct experts
    }
    if (args.groups > 1) mask_groups(args, biased, args.group_scores + row * args.groups);
    select_top(biased, args.experts, args.top_k, ids);
    float total = 0.0f;
    for (std::int64_t k = 0; k < args.top_k; ++k) total += weights[k] = scores[ids[k]];
    const float divisor = total + args.norm_epsilon;
    for (std::int64_t k = 0; k < args.top_k; ++k) {
      if (args.normalize) weights[k] /= divisor;
      if (args.scale) weights[k] *= args.scaling;
    }
  }
}
