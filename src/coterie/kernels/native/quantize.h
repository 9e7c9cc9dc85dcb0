// From float rows to the codes and scales of a packed format. Included by kernels.cpp inside the level's namespace.
//
// Plain loops over 16 lanes without fused operations: every level gives the same codes, so that a packed checkpoint
// does not depend on the machine that wrote it. A scale is rounded to its stored type before codes are chosen.

constexpr int kWide = 16;
constexpr int kParts = kWide / kLanes;

// Sixteen lanes, whatever the width of the level.
struct Wide {
  Vec part[kParts];
};

template <class F>
COTERIE_INLINE Wide lanewise(F body) {
  Wide out;
#pragma GCC unroll 4
  for (int p = 0; p < kParts; ++p) out.part[p] = body(p);
  return out;
}

struct GroupValues {
  const float* x;
  std::int64_t size;
};

// Values [at, at + 16) of a group; zeros past its end.
COTERIE_INLINE Wide load_wide(const GroupValues& g, std::int64_t at) {
  if (g.size - at >= kWide) return lanewise([&](int p) { return load(g.x + at + p * kLanes); });
  float x[kWide] = {};
  std::memcpy(x, g.x + at, sizeof(float) * static_cast<std::size_t>(g.size - at));
  return lanewise([&](int p) { return load(x + p * kLanes); });
}

// Ones for the first n of the sixteen lanes, the p-th part of them.
COTERIE_INLINE Vec tail_mask(std::int64_t n, int p) {
  Vec out = {};
  for (int l = 0; l < kLanes; ++l) out[l] = p * kLanes + l < n ? 1.0f : 0.0f;
  return out;
}

// Combines the lanes in a fixed tree.
template <class F>
COTERIE_INLINE float fold(const Wide& w, F both) {
  typedef float Four __attribute__((vector_size(16)));
  float lanes[kWide];
  std::memcpy(lanes, &w, sizeof lanes);
  Four quarter[4];
  std::memcpy(quarter, lanes, sizeof quarter);
  const Four four = both(both(quarter[0], quarter[2]), both(quarter[1], quarter[3]));
  float f[4];
  std::memcpy(f, &four, sizeof f);
  return both(both(f[0], f[2]), both(f[1], f[3]));
}

struct Plus {
  template <class T>
  T operator()(T a, T b) const { return a + b; }
};
struct Larger {
  template <class T>
  T operator()(T a, T b) const { return a > b ? a : b; }
};

COTERIE_INLINE float tree_sum(const Wide& w) { return fold(w, Plus{}); }

// The least and the largest value, and NaN in both if a value is NaN or infinite. Zero counts as a value.
struct Range {
  float low, high;
};

static Range range_of(const GroupValues& g) {
  Wide low = {}, high = {}, poison = {};
  for (std::int64_t i = 0; i < g.size; i += kWide) {
    const Wide x = load_wide(g, i);
    for (int p = 0; p < kParts; ++p) {
      low.part[p] = max(low.part[p], -x.part[p]);
      high.part[p] = max(high.part[p], x.part[p]);
      poison.part[p] += x.part[p] * splat(0.0f);
    }
  }
  const float bad = tree_sum(poison);
  return {bad - fold(low, Larger{}), bad + fold(high, Larger{})};
}

// The value of largest magnitude, the first of them, with its sign.
static float extreme(const GroupValues& g, const Range& range) {
  if (range.high != -range.low) return range.high > -range.low ? range.high : range.low;
  for (std::int64_t i = 0; i < g.size; ++i) {
    if (__builtin_fabsf(g.x[i]) == range.high) return g.x[i];
  }
  return range.high;
}

COTERIE_INLINE float nearest(float x) {
  constexpr float magic = 12582912.0f;  // 1.5 * 2^23
  return (x + magic) - magic;
}

// Sorted copy of a code table: values, midpoints between neighbours, and the code of each value. `even`: the values
// are consecutive integers in the order of their codes, as in int4.
struct SortedTable {
  float values[16], middles[15];
  std::uint8_t codes[16];
  float extreme;
  bool even;
};

static SortedTable sort_table(const std::int8_t* table) {
  SortedTable out{};
  out.even = true;
  for (int i = 0; i < 16; ++i) {
    int at = i;
    for (; at > 0 && out.values[at - 1] > static_cast<float>(table[i]); --at) {
      out.values[at] = out.values[at - 1];
      out.codes[at] = out.codes[at - 1];
    }
    out.values[at] = static_cast<float>(table[i]);
    out.codes[at] = static_cast<std::uint8_t>(i);
    out.even = out.even && table[i] == table[0] + i;
  }
  for (int i = 0; i < 15; ++i) out.middles[i] = 0.5f * (out.values[i] + out.values[i + 1]);
  out.extreme = -out.values[0] >= out.values[15] ? out.values[0] : out.values[15];
  return out;
}

COTERIE_INLINE Vec clamp(Vec x, float low, float high) {
  x = x < splat(low) ? splat(low) : x;
  return x > splat(high) ? splat(high) : x;
}

// The integers n with n - 1/2 < x <= n + 1/2: halves go down, as with midpoints.
COTERIE_INLINE Vec round_half_down(Vec x) {
  const Vec magic = splat(12582912.0f);
  const Vec low = x - splat(0.5f), near = (low + magic) - magic;
  return near + (near < low ? splat(1.0f) : splat(0.0f));
}

// The table value next to each x.
template <bool Even>
COTERIE_INLINE Wide next_value(const SortedTable& table, const Wide& x) {
  if constexpr (Even) {
    return lanewise([&](int p) {
      return clamp(round_half_down(clamp(x.part[p], -256.0f, 256.0f)), table.values[0], table.values[15]);
    });
  }
  Wide out = lanewise([&](int) { return splat(table.values[0]); });
#pragma GCC unroll 15
  for (int j = 0; j < 15; ++j) {
    const Vec middle = splat(table.middles[j]), value = splat(table.values[j + 1]);
    for (int p = 0; p < kParts; ++p) out.part[p] = x.part[p] > middle ? value : out.part[p];
  }
  return out;
}

// Its code: an index into the sorted table, turned into the code of the table as it was given.
template <bool Even>
COTERIE_INLINE void table_codes(const SortedTable& table, const GroupValues& g, float inverse, std::uint8_t* codes) {
  for (std::int64_t i = 0; i < g.size; i += kWide) {
    const Wide x = load_wide(g, i);
    const Wide scaled = lanewise([&](int p) { return x.part[p] * splat(inverse); });
    std::uint8_t out[kWide];
    if constexpr (Even) {
      const Wide value = next_value<true>(table, scaled);
      for (int p = 0; p < kParts; ++p) {
        const Vec index = value.part[p] - splat(table.values[0]);
        const VecB narrow = low_bytes(__builtin_convertvector(index, VecI));
        std::memcpy(out + p * kLanes, &narrow, sizeof narrow);
      }
    } else {
      VecI index[kParts] = {};
      for (int j = 0; j < 15; ++j) {
        for (int p = 0; p < kParts; ++p) index[p] -= scaled.part[p] > splat(table.middles[j]);
      }
      for (int p = 0; p < kParts; ++p) {
        for (int l = 0; l < kLanes; ++l) out[p * kLanes + l] = table.codes[index[p][l]];
      }
    }
    std::memcpy(codes + i, out, static_cast<std::size_t>(g.size - i < kWide ? g.size - i : kWide));
  }
}

// Scales that are tried: those that map the extreme value to 0.86, 0.90 .. 1.10 of the table's.
constexpr int kSteps = 7;

// The scale that fits best, by least squares, the codes of the best of the steps: of largest sum(w q)^2 / sum(q^2).
template <bool Even>
static float best_fit(const SortedTable& table, const GroupValues& g, float top) {
  float inverse[kSteps];
  Wide wq[kSteps] = {}, qq[kSteps] = {};
  for (int s = 0; s < kSteps; ++s) inverse[s] = table.extreme * (0.86f + 0.04f * static_cast<float>(s)) / top;
  for (std::int64_t i = 0; i < g.size; i += kWide) {
    const Wide x = load_wide(g, i);
    const bool whole = g.size - i >= kWide;
    const Wide inside = lanewise([&](int p) { return whole ? splat(1.0f) : tail_mask(g.size - i, p); });
#pragma GCC unroll 7
    for (int s = 0; s < kSteps; ++s) {
      const Wide q = next_value<Even>(table, lanewise([&](int p) { return x.part[p] * splat(inverse[s]); }));
      for (int p = 0; p < kParts; ++p) {
        const Vec own = q.part[p] * inside.part[p];
        wq[s].part[p] += x.part[p] * own;
        qq[s].part[p] += own * own;
      }
    }
  }
  float best = -1.0f, scale = 0.0f;
  for (int s = 0; s < kSteps; ++s) {
    const float num = tree_sum(wq[s]), den = tree_sum(qq[s]);
    const float gain = den > 0.0f ? num * num / den : 0.0f;
    if (gain > best) best = gain, scale = den > 0.0f ? num / den : 0.0f;
  }
  return scale;
}

static float stored_scale(float scale, ScaleType type) {
  if (type == ScaleType::bf16) return from_bf16(to_bf16(scale));
  if (type == ScaleType::f16) return from_f16(to_f16(scale));
  return scale;
}

COTERIE_INLINE float power_of_two(int exponent) {
  return from_bits(static_cast<std::uint32_t>((exponent < -126 ? -126 : exponent > 127 ? 127 : exponent) + 127) << 23);
}

// The power of two, of the two around top / extreme, with the smaller error.
static float best_power(const SortedTable& table, const GroupValues& g, float top) {
  std::uint32_t bits;
  const float ratio = __builtin_fabsf(top / table.extreme);
  std::memcpy(&bits, &ratio, 4);
  const int exponent = static_cast<int>(bits >> 23) - 127;
  float scale = 0.0f, least = __builtin_inff();
  for (int step = 0; step < 2; ++step) {
    const float s = power_of_two(exponent + step), inverse = 1.0f / s;
    Wide error = {};
    for (std::int64_t i = 0; i < g.size; i += kWide) {
      const Wide x = load_wide(g, i);
      const Wide q = next_value<false>(table, lanewise([&](int p) { return x.part[p] * splat(inverse); }));
      for (int p = 0; p < kParts; ++p) {
        const Vec d = x.part[p] - splat(s) * q.part[p];
        error.part[p] += g.size - i < kWide ? d * d * tail_mask(g.size - i, p) : d * d;
      }
    }
    const float sum = tree_sum(error);
    if (sum < least) least = sum, scale = s;
  }
  return scale;
}

static float table_scale(const SortedTable& table, const GroupValues& g, float top, ScaleType type) {
  if (top == 0.0f) return type == ScaleType::e8m0 ? 1.0f : 0.0f;
  if (type == ScaleType::e8m0) return best_power(table, g, top);
  return stored_scale(table.even ? best_fit<true>(table, g, top) : best_fit<false>(table, g, top), type);
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
    const Range range = range_of(g);
    const float top = extreme(g, range);
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
      if (table.even) table_codes<true>(table, g, inverse, out);
      else table_codes<false>(table, g, inverse, out);
    } else {
      affine_codes(g, format.kind == Kind::affine4 ? 15 : 255, format.scale, out, scales + group, mins + group);
    }
  }
}
