// How integer weights are packed, and what a block of rows asks memory for while it reads them.
#pragma once
#include <cstdint>

namespace sd {

constexpr int TILE = 32;  // output channels per tile; 128 bytes hold a group of four values of each

// From `from` on, `step` bytes for each 128 of the block's own.
struct Fetch {
  const char* from;
  int step;
};

}  // namespace sd
