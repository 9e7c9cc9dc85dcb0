// From float rows to the codes and scales of a packed format. Included by kernels.cpp inside the level's namespace.
//
// Plain loops over 16 lanes without fused operations: every level gives the same codes, so that a packed checkpoint
// does not depend on the machine that wrote it. A scale is rounded to its stored type before codes are chosen.

constexpr int kWide = 16;

struct GroupValues {
  const float* x;
  std::int64_t size;
};

// Adds the lanes of sixteen chains in a fixed tree.
COTERIE_INLINE float tree_sum(const float* lanes) {
  float half[8];
  for (int i = 0; i < 8; ++i) half[i] = lanes[i] + lanes[i + 8];
  return ((half[0] + half[4]) + (half[2] + half[6])) + ((half[1] + half[5]) + (half[3] + half[7]));
}

// The value of largest magnitude, with its sign; NaN or infinity if one is in the group.
static float extreme(const GroupValues& g) {
  float best = 0.0f, poison = 0.0f;
  for (std::int64_t i = 0; i < g.size; ++i) {
    best = __builtin_fabsf(g.x[i]) > __builtin_fabsf(best) ? g.x[i] : best;
    poison += g.x[i] * 0.0f;
  }
  return best + poison;
}

COTERIE_INLINE float nearest(float x) {
  constexpr float magic = 12582912.0f;  // 1.5 * 2^23
  return (x + magic) - magic;
}

// Sorted copy of a code table: values, midpoints between neighbours, and the code of each value.
struct SortedTable {
  float values[16], middles[15];
  std::uint8_t codes[16];
  float extreme;
};

static SortedTable sort_table(const std::int8_t* table) {
  SortedTable out{};
  for (int i = 0; i < 16; ++i) {
    int at = i;
    for (; at > 0 && out.values[at - 1] > static_cast<float>(table[i]); --at) {
      out.values[at] = out.values[at - 1];
      out.codes[at] = out.codes[at - 1];
    }
    out.values[at] = static_cast<float>(table[i]);
    out.codes[at] = static_cast<std::uint8_t>(i);
  }
  for (int i = 0; i < 15; ++i) out.middles[i] = 0.5f * (out.values[i] + out.values[i + 1]);
  out.extreme = -out.values[0] >= out.values[15] ? out.values[0] : out.values[15];
  return out;
}

COTERIE_INLINE int table_index(const SortedTable& table, float x) {
  int index = 0;
  for (int j = 0; j < 15; ++j) index += x > table.middles[j] ? 1 : 0;
  return index;
}

// sum(w q)^2 / sum(q^2) of the codes that `inverse` chooses (larger is better), and the scale that fits them best.
static float fit(const SortedTable& table, const GroupValues& g, float inverse, float* scale) {
  float wq[kWide] = {}, qq[kWide] = {};
  for (std::int64_t i = 0; i < g.size; i += kWide) {
    float chosen[kWide], x[kWide];
    for (int l = 0; l < kWide; ++l) {
      x[l] = i + l < g.size ? g.x[i + l] : 0.0f;
      chosen[l] = table.values[0];
    }
    for (int j = 0; j < 15; ++j) {
      for (int l = 0; l < kWide; ++l) chosen[l] = x[l] * inverse > table.middles[j] ? table.values[j + 1] : chosen[l];
    }
    for (int l = 0; l < kWide; ++l) {
      const float q = i + l < g.size ? chosen[l] : 0.0f;
      wq[l] += x[l] * q;
      qq[l] += q * q;
    }
  }
  const float num = tree_sum(wq), den = tree_sum(qq);
  *scale = den > 0.0f ? num / den : 0.0f;
  return den > 0.0f ? num * num / den : 0.0f;
}

static float stored_scale(float scale, ScaleType type) {
  if (type == ScaleType::bf16) return from_bf16(to_bf16(scale));
  if (type == ScaleType::f16) return from_f16(to_f16(scale));
  return scale;
}

COTERIE_INLINE float power_of_two(int exponent) {
  return from_bits(static_cast<std::uint32_t>((exponent < -126 ? -126 : exponent > 127 ? 127 : exponent) + 127) << 23);
}

// The scale of a table format: the best of a few that map the extreme value near the table's extreme; for e8m0 the
// better of the two powers of two around it.
static float table_scale(const SortedTable& table, const GroupValues& g, float top, ScaleType type) {
  if (top == 0.0f) return type == ScaleType::e8m0 ? 1.0f : 0.0f;
  float best = -1.0f, scale = 0.0f, fitted;
  if (type == ScaleType::e8m0) {
    std::uint32_t bits;
    const float ratio = __builtin_fabsf(top / table.extreme);
    std::memcpy(&bits, &ratio, 4);
    const int exponent = static_cast<int>(bits >> 23) - 127;
    float least = __builtin_inff();
    for (int step = 0; step < 2; ++step) {
      const float s = power_of_two(exponent + step);
      float error[kWide] = {};
      for (std::int64_t i = 0; i < g.size; ++i) {
        const float d = g.x[i] - s * table.values[table_index(table, g.x[i] / s)];
        error[i % kWide] += d * d;
      }
      const float sum = tree_sum(error);
      if (sum < least) least = sum, scale = s;
    }
    return scale;
  }
  for (int step = 0; step < 7; ++step) {
    const float inverse = table.extreme * (0.86f + 0.04f * static_cast<float>(step)) / top;
    const float gain = fit(table, g, inverse, &fitted);
    if (gain > best) best = gain, scale = fitted;
  }
  return stored_scale(scale, type);
}

COTERIE_INLINE std::uint8_t to_e4m3(float x) {
  const float magnitude = __builtin_fabsf(x);
  const std::uint8_t sign = x < 0.0f ? 128 : 0;
  if (!(magnitude < 464.0f)) return static_cast<std::uint8_t>(sign | (magnitude == magnitude ? 126 : 127));
  if (magnitude < 0.015625f) return static_cast<std::uint8_t>(sign | static_cast<int>(nearest(magnitude * 512.0f)));
  std::uint32_t bits;
  std::memcpy(&bits, &magnitude, 4);
  bits += 0x7ffffu + ((bits >> 20) & 1u);
  return static_cast<std::uint8_t>(sign | ((bits >> 20) - (120u << 3)));
}

static void symmetric_codes(const GroupValues& g, float scale, std::uint8_t* codes) {
  const float inverse = scale != 0.0f ? 1.0f / scale : 0.0f;
  for (std::int64_t i = 0; i < g.size; ++i) {
    float q = nearest(g.x[i] * inverse);
    q = q < -127.0f ? -127.0f : q > 127.0f ? 127.0f : q;
    codes[i] = static_cast<std::uint8_t>(static_cast<int>(q) + 128);
  }
}

static void affine_codes(const GroupValues& g, int top, ScaleType type, std::uint8_t* codes, float* scale, float* min) {
  float low = g.x[0], high = g.x[0];
  for (std::int64_t i = 1; i < g.size; ++i) {
    low = g.x[i] < low ? g.x[i] : low;
    high = g.x[i] > high ? g.x[i] : high;
  }
  *min = stored_scale(-low, type);
  *scale = stored_scale((high + *min) / static_cast<float>(top), type);
  const float inverse = *scale > 0.0f ? 1.0f / *scale : 0.0f;
  for (std::int64_t i = 0; i < g.size; ++i) {
    float q = nearest((g.x[i] + *min) * inverse);
    q = q < 0.0f ? 0.0f : q > static_cast<float>(top) ? static_cast<float>(top) : q;
    codes[i] = static_cast<std::uint8_t>(q);
  }
}

// One row: codes [cols], scales and mins [groups]. A group with NaN or infinity gets the scale NaN.
static void quantize_row(const QuantizeArgs& args, const float* x, std::uint8_t* codes, float* scales, float* mins) {
  const Format& format = args.format;
  const SortedTable table = sort_table(format.table);
  for (std::int64_t group = 0, at = 0; at < args.cols; ++group, at += args.group) {
    const GroupValues g{x + at, args.cols - at < args.group ? args.cols - at : args.group};
    const float top = extreme(g);
    std::uint8_t* out = codes + at;
    mins[group] = 0.0f;
    if (top - top != 0.0f) {
      scales[group] = __builtin_nanf("");
      for (std::int64_t i = 0; i < g.size; ++i) out[i] = 1;
    } else if (format.kind == Kind::int8) {
      scales[group] = stored_scale(__builtin_fabsf(top) / 127.0f, format.scale);
      symmetric_codes(g, scales[group], out);
    } else if (format.kind == Kind::fp8) {
      scales[group] = stored_scale(__builtin_fabsf(top) / 448.0f, format.scale);
      const float inverse = scales[group] > 0.0f ? 1.0f / scales[group] : 0.0f;
      for (std::int64_t i = 0; i < g.size; ++i) out[i] = to_e4m3(g.x[i] * inverse);
    } else if (format.kind == Kind::code4) {
      scales[group] = table_scale(table, g, top, format.scale);
      const float inverse = scales[group] != 0.0f ? 1.0f / scales[group] : 0.0f;
      for (std::int64_t i = 0; i < g.size; ++i) out[i] = table.codes[table_index(table, g.x[i] * inverse)];
    } else {
      affine_codes(g, format.kind == Kind::affine4 ? 15 : 255, format.scale, out, scales + group, mins + group);
    }
  }
}
