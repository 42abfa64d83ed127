#include "ringfold/status.h"

#include <catch2/catch.hpp>

using namespace ringfold;

TEST_CASE("a default status is ok and says nothing") {
  const Status status;
  CHECK(status.ok());
  CHECK(status.code() == Code::ok);
  CHECK(status.message().empty());
  CHECK(status.to_string() == "ok");
}

TEST_CASE("a failure carries its code and sentence, also in copies") {
  const Status status(Code::timeout, "rank 2 did not answer");
  const Status copy = status;  // NOLINT(performance-unnecessary-copy-initialization)
  CHECK_FALSE(copy.ok());
  CHECK(copy.code() == Code::timeout);
  CHECK(copy.to_string() == "timeout: rank 2 did not answer");
}

TEST_CASE("a result holds the value or the reason") {
  const Result<int> value(7);
  REQUIRE(value.ok());
  CHECK(*value == 7);
  CHECK(value.status().ok());
  const Result<int> none(Status(Code::system, "no"));
  CHECK_FALSE(none.ok());
  CHECK(none.status().code() == Code::system);
}
