#include "ringfold/status.h"

#include <array>

namespace ringfold {

struct Status::Detail {
  Code code;
  std::string message;
};

std::string_view to_string(Code code) {
  static constexpr std::array<std::string_view, 9> kNames = {
      "ok",        "invalid_argument", "unsupported", "mismatch", "timeout",
      "peer_lost", "aborted",          "system",      "internal"};
  return kNames[static_cast<size_t>(code)];
}

Status::Status(Code code, std::string message)
    : detail_(code == Code::ok ? nullptr
                               : std::make_shared<const Detail>(Detail{code, std::move(message)})) {
}

Code Status::code() const {
  return detail_ ? detail_->code : Code::ok;
}

const std::string& Status::message() const {
  static const std::string kNothing;
  return detail_ ? detail_->message : kNothing;
}

std::string Status::to_string() const {
  if (ok()) return "ok";
  return std::string(ringfold::to_string(code())) + ": " + message();
}

}  // namespace ringfold
