// Tiles: the tile registers as tile kernels use them. Included by tile_kernels.cpp inside the level's namespace: by the
// instructions of AMX, or (COTERIE_TILES_EMULATED) as plain C++ after their documented meaning, which runs everywhere
// and serves the tests. Not here: products.
//
// Registers 0 to 3 hold sums [rows][16 outputs]; 4 and 5 hold rows of activations, `depth` bytes each; 6 and 7 hold
// depth / 4 quads (int8) or pairs (bf16) of 16 outputs. Sum 2 r + v belongs to rows 4 + r and outputs 6 + v. Fewer than
// 16 rows take less time in proportion.

constexpr int kTileRows = 16;

#if defined(COTERIE_TILES_EMULATED)

class Tiles {
 public:
  explicit Tiles(int depth, int rows = kTileRows) {
    for (int t = 0; t < 4; ++t) shape_[t] = {rows, 64};
    for (int t = 4; t < 6; ++t) shape_[t] = {rows, depth};
    for (int t = 6; t < 8; ++t) shape_[t] = {depth / 4, 64};
  }

  template <int T>
  void zero() {
    std::memset(data_[T], 0, sizeof data_[T]);
  }
  template <int T>
  void load(const void* from, std::int64_t stride) {
    zero<T>();
    for (int r = 0; r < shape_[T].rows; ++r) {
      std::memcpy(data_[T][r], static_cast<const char*>(from) + r * stride, static_cast<std::size_t>(shape_[T].bytes));
    }
  }
  template <int T>
  void store(void* to, std::int64_t stride) const {
    for (int r = 0; r < shape_[T].rows; ++r) {
      std::memcpy(static_cast<char*>(to) + r * stride, data_[T][r], static_cast<std::size_t>(shape_[T].bytes));
    }
  }

  // sums += rows (signed bytes) x codes (bytes, signed or not)
  template <int R, int V, bool Signed>
  void dot_bytes() {
    constexpr int C = 2 * R + V, A = 4 + R, B = 6 + V;
    check<C, A, B>();
    for (int m = 0; m < shape_[C].rows; ++m) {
      std::int32_t sums[16];
      std::memcpy(sums, data_[C][m], sizeof sums);
      for (int k = 0; k < shape_[A].bytes / 4; ++k) {
        for (int n = 0; n < shape_[C].bytes / 4; ++n) {
          for (int j = 0; j < 4; ++j) {
            const int code = Signed ? static_cast<std::int8_t>(data_[B][k][4 * n + j]) : data_[B][k][4 * n + j];
            sums[n] += static_cast<std::int8_t>(data_[A][m][4 * k + j]) * code;
          }
        }
      }
      std::memcpy(data_[C][m], sums, sizeof sums);
    }
  }

  // sums += (chain over the even columns) + (chain over the odd ones), each fused and in order, from zero.
  template <int R, int V>
  void dot_bf16() {
    constexpr int C = 2 * R + V, A = 4 + R, B = 6 + V;
    check<C, A, B>();
    for (int m = 0; m < shape_[C].rows; ++m) {
      for (int n = 0; n < shape_[C].bytes / 4; ++n) {
        float chain[2] = {}, sum;
        for (int k = 0; k < shape_[A].bytes / 4; ++k) {
          for (int odd = 0; odd < 2; ++odd) {
            std::uint16_t a, b;
            std::memcpy(&a, data_[A][m] + k * 4 + odd * 2, 2);
            std::memcpy(&b, data_[B][k] + n * 4 + odd * 2, 2);
            chain[odd] = __builtin_fmaf(from_bf16(a), from_bf16(b), chain[odd]);
          }
        }
        std::memcpy(&sum, data_[C][m] + n * 4, 4);
        sum = sum + (chain[0] + chain[1]);
        std::memcpy(data_[C][m] + n * 4, &sum, 4);
      }
    }
  }

 private:
  struct Shape {
    int rows, bytes;
  };

  // What the processor refuses with an invalid-opcode fault.
  template <int C, int A, int B>
  void check() const {
    const Shape c = shape_[C], a = shape_[A], b = shape_[B];
    if (c.rows != a.rows || c.bytes != b.bytes || a.bytes != b.rows * 4) __builtin_trap();
  }

  unsigned char data_[8][16][64] = {};
  Shape shape_[8];
};

#else

class Tiles {
 public:
  explicit Tiles(int depth, int rows = kTileRows) {
    struct Config {
      std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
      std::uint16_t row_bytes[16] = {};
      std::uint8_t rows[16] = {};
    };
    alignas(64) Config config;
    for (int t = 0; t < 8; ++t) {
      config.row_bytes[t] = static_cast<std::uint16_t>(t == 4 || t == 5 ? depth : 64);
      config.rows[t] = static_cast<std::uint8_t>(t >= 6 ? depth / 4 : rows);
    }
    // gcc 12 tells the optimiser of 8 of the 64 bytes only; without the clobber it may drop the other stores.
    asm volatile("" ::"r"(&config) : "memory");
    _tile_loadconfig(&config);
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

  // The intrinsics paste the register's number into the instruction: it must be a literal.
  template <int T>
  void zero() {
    if constexpr (T == 0) _tile_zero(0);
    if constexpr (T == 1) _tile_zero(1);
    if constexpr (T == 2) _tile_zero(2);
    if constexpr (T == 3) _tile_zero(3);
  }
  template <int T>
  void load(const void* from, std::int64_t stride) {
    asm volatile("" ::: "memory");  // gcc 12 does not know that a load reads memory
    if constexpr (T == 0) _tile_loadd(0, from, stride);
    if constexpr (T == 1) _tile_loadd(1, from, stride);
    if constexpr (T == 2) _tile_loadd(2, from, stride);
    if constexpr (T == 3) _tile_loadd(3, from, stride);
    if constexpr (T == 4) _tile_loadd(4, from, stride);
    if constexpr (T == 5) _tile_loadd(5, from, stride);
    if constexpr (T == 6) _tile_loadd(6, from, stride);
    if constexpr (T == 7) _tile_loadd(7, from, stride);
  }
  template <int T>
  void store(void* to, std::int64_t stride) const {
    if constexpr (T == 0) _tile_stored(0, to, stride);
    if constexpr (T == 1) _tile_stored(1, to, stride);
    if constexpr (T == 2) _tile_stored(2, to, stride);
    if constexpr (T == 3) _tile_stored(3, to, stride);
    asm volatile("" ::: "memory");
  }
  template <int R, int V, bool Signed>
  void dot_bytes() {
    if constexpr (R == 0 && V == 0 && Signed) _tile_dpbssd(0, 4, 6);
    if constexpr (R == 0 && V == 1 && Signed) _tile_dpbssd(1, 4, 7);
    if constexpr (R == 1 && V == 0 && Signed) _tile_dpbssd(2, 5, 6);
    if constexpr (R == 1 && V == 1 && Signed) _tile_dpbssd(3, 5, 7);
    if constexpr (R == 0 && V == 0 && !Signed) _tile_dpbsud(0, 4, 6);
    if constexpr (R == 0 && V == 1 && !Signed) _tile_dpbsud(1, 4, 7);
    if constexpr (R == 1 && V == 0 && !Signed) _tile_dpbsud(2, 5, 6);
    if constexpr (R == 1 && V == 1 && !Signed) _tile_dpbsud(3, 5, 7);
  }
  template <int R, int V>
  void dot_bf16() {
    if constexpr (R == 0 && V == 0) _tile_dpbf16ps(0, 4, 6);
    if constexpr (R == 0 && V == 1) _tile_dpbf16ps(1, 4, 7);
    if constexpr (R == 1 && V == 0) _tile_dpbf16ps(2, 5, 6);
    if constexpr (R == 1 && V == 1) _tile_dpbf16ps(3, 5, 7);
  }
};

#endif
