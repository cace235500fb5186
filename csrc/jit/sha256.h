// SHA-256 (FIPS 180-4), for cache keys and for the check of cached binaries.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace deepinfer::jit {

class Sha256 {
 public:
  Sha256& add(std::string_view data);
  // Adds the length first, so that pieces cannot run into each other.
  Sha256& add_piece(std::string_view piece);
  // 64 hexadecimal digits; ends the computation.
  std::string hex();

 private:
  void block(const uint8_t* data);

  uint32_t state_[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                        0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  uint8_t pending_[64];
  uint64_t total_ = 0;
};

inline std::string sha256(std::string_view data) { return Sha256().add(data).hex(); }

}  // namespace deepinfer::jit
