// Values to bytes and back for frames between processes: little-endian, bounds-checked.
//
// Thread-safety: one object, one thread.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

namespace ringfold {

class Writer {
 public:
  void u8(uint8_t value) { integer(value, 1); }
  void u16(uint16_t value) { integer(value, 2); }
  void u32(uint32_t value) { integer(value, 4); }
  void u64(uint64_t value) { integer(value, 8); }
  void raw(std::string_view bytes) { bytes_ += bytes; }
  void text(std::string_view bytes) {
    u32(static_cast<uint32_t>(bytes.size()));
    raw(bytes);
  }
  [[nodiscard]] std::string take() && { return std::move(bytes_); }

 private:
  void integer(uint64_t value, int bytes) {
    for (int i = 0; i < bytes; ++i) bytes_ += static_cast<char>(value >> (8 * i));
  }
  std::string bytes_;
};

// Reading past the end yields zeros and empty texts, and good() tells; so a frame is read in one go
// and judged once.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : rest_(bytes) {}
  uint8_t u8() { return static_cast<uint8_t>(integer(1)); }
  uint16_t u16() { return static_cast<uint16_t>(integer(2)); }
  uint32_t u32() { return static_cast<uint32_t>(integer(4)); }
  uint64_t u64() { return integer(8); }
  std::string_view raw(size_t bytes) {
    if (bytes > rest_.size()) {
      good_ = false;
      rest_ = {};
      return {};
    }
    const std::string_view taken = rest_.substr(0, bytes);
    rest_.remove_prefix(bytes);
    return taken;
  }
  std::string_view text() { return raw(u32()); }
  // Everything read was there.
  [[nodiscard]] bool good() const { return good_; }
  // ... and nothing is left over.
  [[nodiscard]] bool complete() const { return good_ && rest_.empty(); }

 private:
  uint64_t integer(size_t bytes) {
    uint64_t value = 0;
    const std::string_view taken = raw(bytes);
    for (size_t i = 0; i < taken.size(); ++i) {
      value |= uint64_t{static_cast<unsigned char>(taken[i])} << (8 * i);
    }
    return value;
  }
  std::string_view rest_;
  bool good_ = true;
};

}  // namespace ringfold
