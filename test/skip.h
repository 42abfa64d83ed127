// How a test says that it cannot run here.
#pragma once

#include <fmt/core.h>

#include <catch2/catch.hpp>
#include <string_view>

namespace ringfold::test {

// Prints the line that tools/test counts: "SKIPPED <test>: <reason>". The test then returns.
inline void skip(std::string_view reason) {
  fmt::print("SKIPPED {}: {}\n", Catch::getResultCapture().getCurrentTestName(), reason);
  std::fflush(stdout);
}

}  // namespace ringfold::test
