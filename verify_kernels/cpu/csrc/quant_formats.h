// The layouts of repacked weights in blocks: units of inputs x 16 channels, and how a unit is unpacked.
//
// A group is 32 inputs. `level` returns the j-th four inputs of group G of LANES4 channels from `slice` on, and
// w = scale * level - low. Levels of odd groups may be HIGH times too large, which saves a shift; their scale is as much
// smaller then, which changes no bit. verify_kernels/quant_formats.py writes these layouts.
#pragma once
#include "quant_simd.h"

namespace sd {

constexpr int HALF = 16;    // channels of a unit
constexpr int GROUP = 32;   // inputs of a group, which share a scale of the activations
constexpr int NIBBLES = 2 * GROUP * HALF / 2;  // bytes of the low four bits of two groups

// A pair of groups lies in the low and the high halves of the same bytes. SHIFT: the high ones are shifted down.
template <int G, bool SHIFT = HIGH == 1>
inline wordv nibbles(const uint8_t* pair, int64_t slice, int j) {
  return (load_bytes(pair + 64 * j + 4 * slice) >> (G & 1 && SHIFT ? 4 : 0)) & all_bytes(G & 1 && !SHIFT ? 0xf0 : 0x0f);
}

template <int G>
constexpr float place = G & 1 ? 1.0f / HIGH : 1.0f;  // factor of the scale of levels from `nibbles`

// OFFSET of levels in even and in odd groups; levels without one have a low end.
template <int EVEN, int ODD = EVEN>
struct Levels {
  static constexpr bool LOW = EVEN == 0;
  static constexpr int OFFSET = EVEN, ODD_OFFSET = ODD;
};

struct Q4_0 : Levels<8, 8 * HIGH> {
  static constexpr int BITS = 4, GROUPS = 2, SCALES = 1, BYTES = NIBBLES + 2 * 32;
  template <int G>
  static wordv level(const uint8_t* u, int64_t slice, int j) { return nibbles<G>(u, slice, j); }
  template <int G>
  static floatv scale(const uint8_t* u, int64_t slice, int) {
    return halfs(u + NIBBLES + 32 * G + 2 * slice) * all_floats(place<G>);
  }
};

struct Q4_1 : Q4_0 {
  static constexpr int BYTES = NIBBLES + 4 * 32;
  static constexpr bool LOW = true;
  static constexpr int OFFSET = 0, ODD_OFFSET = 0;
  template <int G>
  static floatv low(const uint8_t* u, int64_t slice) { return halfs(u + NIBBLES + 64 + 32 * G + 2 * slice); }
};

// The fifth bits: bit j of group g's plane belongs to its j-th register.
inline wordv fifth_bits(const uint8_t* plane, int64_t slice, int j) {
  const wordv bits = load_bytes(plane + 4 * slice);
  return (j < 4 ? bits << (4 - j) : bits >> (j - 4)) & all_bytes(0x10);
}

struct Q5_0 : Levels<16> {
  static constexpr int BITS = 5, GROUPS = 2, SCALES = 1, BYTES = NIBBLES + 2 * 64 + 2 * 32;
  template <int G>
  static wordv level(const uint8_t* u, int64_t slice, int j) {
    return nibbles<G, true>(u, slice, j) | fifth_bits(u + NIBBLES + 64 * G, slice, j);
  }
  template <int G>
  static floatv scale(const uint8_t* u, int64_t slice, int) { return halfs(u + NIBBLES + 128 + 32 * G + 2 * slice); }
};

struct Q5_1 : Q5_0 {
  static constexpr int BYTES = NIBBLES + 2 * 64 + 4 * 32;
  static constexpr bool LOW = true;
  static constexpr int OFFSET = 0, ODD_OFFSET = 0;
  template <int G>
  static floatv low(const uint8_t* u, int64_t slice) { return halfs(u + NIBBLES + 192 + 32 * G + 2 * slice); }
};

struct Q8_0 : Levels<128> {
  static constexpr int BITS = 8, GROUPS = 2, SCALES = 1, BYTES = 2 * GROUP * HALF + 2 * 32;
  template <int G>
  static wordv level(const uint8_t* u, int64_t slice, int j) {
    return load_bytes(u + GROUP * HALF * G + 64 * j + 4 * slice);
  }
  template <int G>
  static floatv scale(const uint8_t* u, int64_t slice, int) { return halfs(u + 1024 + 32 * G + 2 * slice); }
};

struct Q4_K : Levels<0> {
  static constexpr int SMALL = 4 * NIBBLES, BITS = 4, GROUPS = 8, SCALES = 1, BYTES = SMALL + 2 * 128 + 2 * 32;
  template <int G>
  static wordv level(const uint8_t* u, int64_t slice, int j) { return nibbles<G>(u + NIBBLES * (G / 2), slice, j); }
  template <int G>
  static floatv scale(const uint8_t* u, int64_t slice, int) {
    return from_u8(u + SMALL + 16 * G + slice) * (halfs(u + SMALL + 256 + 2 * slice) * all_floats(place<G>));
  }
  template <int G>
  static floatv low(const uint8_t* u, int64_t slice) {
    return from_u8(u + SMALL + 128 + 16 * G + slice) * halfs(u + SMALL + 288 + 2 * slice);
  }
};

struct Q5_K : Levels<0> {
  static constexpr int PLANE = 4 * NIBBLES, SMALL = PLANE + 512, BITS = 5, GROUPS = 8, SCALES = 1;
  static constexpr int BYTES = SMALL + 2 * 128 + 2 * 32;
  template <int G>
  static wordv level(const uint8_t* u, int64_t slice, int j) {  // bit g of the plane's j-th register
    const wordv bits = load_bytes(u + PLANE + 64 * j + 4 * slice);
    const wordv fifth = (G < 4 ? bits << (4 - G) : bits >> (G - 4)) & all_bytes(0x10);
    return nibbles<G, true>(u + NIBBLES * (G / 2), slice, j) | fifth;
  }
  template <int G>
  static floatv scale(const uint8_t* u, int64_t slice, int) {
    return from_u8(u + SMALL + 16 * G + slice) * halfs(u + SMALL + 256 + 2 * slice);
  }
  template <int G>
  static floatv low(const uint8_t* u, int64_t slice) {
    return from_u8(u + SMALL + 128 + 16 * G + slice) * halfs(u + SMALL + 288 + 2 * slice);
  }
};

// As in the file four groups share 1,024 bytes: the low halves hold groups 0 and 1, the high ones 2 and 3; two bits of
// each of the four lie in one byte of the plane. A scale serves 16 inputs.
struct Q6_K : Levels<32> {
  static constexpr int PLANE = 4 * NIBBLES, SMALL = PLANE + 1024, BITS = 6, GROUPS = 8, SCALES = 2;
  static constexpr int BYTES = SMALL + 256 + 64;
  template <int G>
  static wordv level(const uint8_t* u, int64_t slice, int j) {
    constexpr int UP = 4 - 2 * (G % 4);  // to where the two bits belong
    const wordv raw = load_bytes(u + 1024 * (G / 4) + 512 * (G & 1) + 64 * j + 4 * slice);
    const wordv bits = load_bytes(u + PLANE + 512 * (G / 4) + 64 * j + 4 * slice);
    return ((G & 2 ? raw >> 4 : raw) & all_bytes(0x0f)) | ((UP >= 0 ? bits << UP : bits >> -UP) & all_bytes(0x30));
  }
  template <int G>
  static floatv scale(const uint8_t* u, int64_t slice, int part) {
    const floatv largest = load_floats((const float*)(u + SMALL + 256) + slice);
    return from_s8(u + SMALL + 32 * G + 16 * part + slice) * largest;
  }
};

// A scale and a zero point, the level that stands for 0, per SIZE inputs: GPTQ, AWQ and the like.
template <int SIZE>
struct U4 : Levels<0> {
  static constexpr int ENDS = 128 / SIZE, SMALL = 2 * NIBBLES, BITS = 4, GROUPS = 4, SCALES = 1;
  static constexpr int BYTES = (SMALL + 48 * ENDS + 63) / 64 * 64;
  template <int G>
  static wordv level(const uint8_t* u, int64_t slice, int j) { return nibbles<G>(u + NIBBLES * (G / 2), slice, j); }
  template <int G>
  static floatv scale(const uint8_t* u, int64_t slice, int) {
    return halfs(u + SMALL + 32 * (G * GROUP / SIZE) + 2 * slice) * all_floats(place<G>);
  }
  template <int G>
  static floatv low(const uint8_t* u, int64_t slice) {
    constexpr int END = G * GROUP / SIZE;
    return from_u8(u + SMALL + 32 * ENDS + 16 * END + slice) * halfs(u + SMALL + 32 * END + 2 * slice);
  }
};

// A draft model's rounded levels of three bits, of four groups in twelve registers. Of every byte the low three bits are
// one level, the next three another, left eight times too large where that is allowed, and the top two part of a third.
constexpr int TIMES = HIGH == 1 ? 1 : 8;
struct Q3_0 : Levels<4, 4 * TIMES> {
  static constexpr int DOWN = HIGH == 1 ? 3 : 0;
  static constexpr int LEVELS = 12 * 64, BITS = 3, GROUPS = 4, SCALES = 1, BYTES = LEVELS + 4 * 32;
  template <int G>
  static wordv level(const uint8_t* u, int64_t slice, int j) {
    const auto at = [&](int i) { return load_bytes(u + 64 * i + 4 * slice); };
    if constexpr (G == 0) return at(j) & all_bytes(7);
    if constexpr (G == 1) return (at(j) >> DOWN) & all_bytes(7 * TIMES);
    if constexpr (G == 2) return (j < 4 ? at(8 + j) : at(4 + j) >> 3) & all_bytes(7);
    return ((at(j) >> (2 + DOWN)) & all_bytes(6 * TIMES)) | ((at(8 + j / 2) >> (3 + DOWN + j % 2)) & all_bytes(TIMES));
  }
  template <int G>
  static floatv scale(const uint8_t* u, int64_t slice, int) {
    return halfs(u + LEVELS + 32 * G + 2 * slice) * all_floats(G & 1 ? 1.0f / TIMES : 1.0f);
  }
};

}  // namespace sd
