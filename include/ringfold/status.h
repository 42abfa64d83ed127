// How every fallible call of ringfold answers: a Status, or a value with a Status beside it.
//
// Thread-safety: a Status is an immutable value; copies may be read from any thread.
// The library throws nothing: an error is always one of these values.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace ringfold {

enum class Code : uint8_t {
  ok,
  invalid_argument,  // the call itself is wrong; nothing was started
  unsupported,       // right, but not offered here (a type without this operation, no such device)
  mismatch,          // the ranks called different things
  timeout,           // the deadline passed; the message says who was waited for
  peer_lost,         // a rank died, left or cannot be reached
  aborted,           // somebody called abort()
  system,            // the operating system refused; the message carries its reason
  internal,          // a broken promise inside the library: please report it
};

// "invalid_argument", "timeout", ...: the name of the enumerator.
[[nodiscard]] std::string_view to_string(Code code);

// A code and a sentence. Success is a null pointer: it costs one word and never allocates.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message);

  [[nodiscard]] bool ok() const { return !detail_; }
  [[nodiscard]] Code code() const;
  // What was given and what was expected; for failures of an operation also the rank, the peer,
  // the collective and the sequence number. Empty when ok().
  [[nodiscard]] const std::string& message() const;
  // "timeout: rank 2 ..." for logs and exceptions; "ok" when ok().
  [[nodiscard]] std::string to_string() const;

 private:
  struct Detail;
  std::shared_ptr<const Detail> detail_;
};

// A value, or the Status that says why there is none. REQUIRES ok() before * and ->.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}
  Result(Status why) : status_(std::move(why)) {}

  [[nodiscard]] bool ok() const { return value_.has_value(); }
  [[nodiscard]] const Status& status() const { return status_; }
  T& operator*() { return *value_; }
  const T& operator*() const { return *value_; }
  T* operator->() { return &*value_; }
  const T* operator->() const { return &*value_; }

 private:
  std::optional<T> value_;
  Status status_;
};

}  // namespace ringfold
