// What the synchroniser says when it is used wrongly, when ranks differ, and when one is lost.
#include <unistd.h>

#include <algorithm>
#include <catch2/catch.hpp>

#include "ringfold/gradient_sync.h"
#include "test/gradient_ranks.h"

using namespace ringfold;
using namespace ringfold::test;
using namespace std::chrono_literals;

namespace {

Parameter floats(const std::string& name, size_t count) {
  return {name, count, DType::f32, nullptr};
}

SyncOptions tiny_buckets() {
  SyncOptions options;
  options.first_bytes = options.bucket_bytes = 16;
  return options;
}

const Way kThreads = {true, "region"};

}  // namespace

TEST_CASE("C23: ranks that register other gradients hear both sides, by name") {
  struct Case {
    std::vector<Parameter> rank0, rank2;
    std::vector<std::string> words;
  };
  const std::vector<Case> cases = {
      {{floats("w", 6), floats("b", 6)},
       {floats("b", 6), floats("w", 6)},
       {"rank 0 has parameter 0 'w'", "rank 2 has parameter 0 'b'"}},
      {{floats("w", 6), floats("b", 2)},
       {floats("w", 2), floats("b", 6)},
       {"rank 0 has parameter 0 'w', 6 elements", "rank 2 has parameter 0 'w', 2 elements"}},
      {{floats("w", 6)},
       {{"w", 6, DType::bf16, nullptr}},
       {"6 elements of f32; rank 2 has parameter 0 'w', 6 elements of bf16"}},
      {{floats("w", 6)},
       {floats("w", 6), floats("b", 6)},
       {"rank 0 has no further parameter; rank 2 has parameter 1 'b'"}},
      {{floats("w", 6), floats("b", 6)},
       {},
       {"rank 0 has parameter 0 'w', 6 elements of f32; rank 2 has no further parameter"}},
  };
  for (const Case& one : cases) {
    INFO("case " << &one - cases.data());
    CHECK(on_ranks(kThreads, 3, [&](Communicator& comm, Verdict& verdict) {
            const auto sync = GradientSync::create(comm, comm.rank() == 2 ? one.rank2 : one.rank0);
            verdict.is(sync.status(), Code::mismatch, one.words);
            // The communicator it was made from goes on.
            verdict.ok(comm.barrier().wait());
          }) == "");
  }
}

TEST_CASE("ranks with other options, or with parameters that cannot be, hear of it") {
  CHECK(on_ranks(kThreads, 2, [](Communicator& comm, Verdict& verdict) {
          SyncOptions options;
          if (comm.rank() == 1) options.bucket_bytes = 4096;
          verdict.is(GradientSync::create(comm, {floats("w", 1)}, options).status(), Code::mismatch,
                     {"then 26214400 bytes", "then 4096 bytes"});
          options = {};
          if (comm.rank() == 1) options.hook.name = "int8";
          verdict.is(GradientSync::create(comm, {floats("w", 1)}, options).status(), Code::mismatch,
                     {"hook none", "hook int8"});
          options = {};
          if (comm.rank() == 1) options.first_bytes = 0;
          verdict.is(GradientSync::create(comm, {floats("w", 1)}, options).status(),
                     Code::invalid_argument, {"rank 1: buckets of 0"});
          Parameter number = floats("steps", 1);
          if (comm.rank() == 0) number.type = DType::i64;
          verdict.is(GradientSync::create(comm, {floats("w", 1), number}).status(),
                     Code::invalid_argument, {"rank 0: parameter 1 'steps' is of type i64"});
        }) == "");
}

TEST_CASE("an empty communicator and an empty model") {
  Communicator none;
  CHECK(GradientSync::create(none, {}).status().code() == Code::invalid_argument);
  CHECK(on_ranks(kThreads, 2, [](Communicator& comm, Verdict& verdict) {
          auto sync = GradientSync::create(comm, {});
          if (!verdict.ok(sync.status())) return;
          verdict.ok(sync->begin());
          verdict.ok(sync->finish());
          verdict.ok(sync->begin(3));
          verdict.ok(sync->finish());
          verdict.expect(sync->report().divisor == 6, "divisor");
        }) == "");
}

TEST_CASE("wrong calls say what is wrong and harm nothing") {
  CHECK(on_ranks(kThreads, 2, [](Communicator& comm, Verdict& verdict) {
          auto made = GradientSync::create(comm, {floats("w", 4), floats("b", 4)}, tiny_buckets());
          if (!verdict.ok(made.status())) return;
          GradientSync sync = std::move(*made);
          verdict.is(sync.ready(0), Code::invalid_argument, {"'w'", "begin() comes first"});
          verdict.is(sync.finish(), Code::invalid_argument, {"begin() comes first"});
          verdict.ok(sync.begin());
          verdict.is(sync.begin(), Code::invalid_argument, {"finish() ends the one before"});
          verdict.is(sync.ready(2), Code::invalid_argument, {"ready(2)", "2 parameters"});
          std::fill_n(static_cast<float*>(sync.gradient(1)), 4, 3.0f);
          verdict.ok(sync.ready(1));
          verdict.is(sync.ready(1), Code::invalid_argument, {"parameter 1 'b'", "second time"});
          verdict.ok(sync.ready(0));
          verdict.ok(sync.finish());
          verdict.expect(static_cast<float*>(sync.gradient(1))[3] == 3, "the average");
          verdict.is(sync.finish(), Code::invalid_argument, {"begin() comes first"});
        }) == "");
}

TEST_CASE("where all parameters are required, finish() names those that are missing") {
  CHECK(on_ranks(kThreads, 2, [](Communicator& comm, Verdict& verdict) {
          SyncOptions options = tiny_buckets();
          options.require_all = true;
          auto sync = GradientSync::create(
              comm, {floats("w", 4), floats("unlucky", 4), floats("b", 4)}, options);
          if (!verdict.ok(sync.status())) return;
          verdict.ok(sync->begin(comm.rank()));  // rank 0 has no data: it need not be ready
          if (comm.rank() == 1)
            for (size_t i = 0; i < 3; ++i) verdict.ok(sync->ready(i));
          verdict.ok(sync->finish());
          verdict.ok(sync->begin());
          verdict.ok(sync->ready(0));
          verdict.ok(sync->ready(2));
          if (comm.rank() == 0) verdict.ok(sync->ready(1));
          verdict.is(sync->finish(), comm.rank() == 1 ? Code::invalid_argument : Code::aborted,
                     {"rank 1: not ready at finish(): parameter 1 'unlucky'"});
        }) == "");
}

TEST_CASE("a bucket that fails is named on every rank, and the synchroniser stays failed") {
  CHECK(on_ranks(kThreads, 2, [](Communicator& comm, Verdict& verdict) {
          SyncOptions options = tiny_buckets();
          options.hook = {"picky", [&](Communicator& c, const Bucket& bucket) {
                            if (bucket.index == 1 && c.rank() == 1)
                              return Status(Code::unsupported, "this one I do not like");
                            return average_bucket(c, bucket);
                          }};
          auto sync = GradientSync::create(
              comm, {floats("w", 4), floats("middle", 4), floats("b", 4)}, options);
          if (!verdict.ok(sync.status())) return;
          verdict.ok(sync->begin());
          for (const size_t i : {2, 1, 0}) (void)sync->ready(i);  // may fail already
          const Code code = comm.rank() == 1 ? Code::unsupported : Code::aborted;
          const std::vector<std::string> words = {"bucket 1 of 3", "'middle'", "hook picky",
                                                  "this one I do not like"};
          verdict.is(sync->finish(), code, words);
          verdict.is(sync->begin(), code, words);
          verdict.is(sync->ready(0), code, words);
          verdict.is(sync->finish(), code, words);
          verdict.ok(comm.barrier().wait());  // the caller's communicator goes on
        }) == "");
}

TEST_CASE("a rank that dies in the middle of a step is an error with its name and the bucket's") {
  for (const char* transport : {"region", "shm"}) {
    INFO(transport);
    const std::string failed =
        on_ranks({false, transport}, 3, [](Communicator& comm, Verdict& verdict) {
          auto sync = GradientSync::create(
              comm, {floats("w", 4), floats("middle", 4), floats("b", 4)}, tiny_buckets());
          if (!verdict.ok(sync.status())) return;
          verdict.ok(sync->begin());
          verdict.ok(sync->ready(2));
          if (comm.rank() == 1) _exit(0);
          (void)sync->ready(1);
          (void)sync->ready(0);
          const auto start = std::chrono::steady_clock::now();
          verdict.is(sync->finish(), Code::peer_lost, {"bucket ", "rank 1"});
          verdict.expect(std::chrono::steady_clock::now() - start < 20s, "late");
          verdict.is(sync->begin(), Code::peer_lost);
        });
    CHECK(failed == "");
  }
}

TEST_CASE("abort from another thread, and an end in the middle of a step, wake the others") {
  for (const bool aborts : {true, false}) {
    INFO(aborts);
    CHECK(
        on_ranks(kThreads, 2, [&](Communicator& comm, Verdict& verdict) {
          auto made = GradientSync::create(comm, {floats("w", 4), floats("b", 4)}, tiny_buckets());
          if (!verdict.ok(made.status())) return;
          if (comm.rank() == 1) {  // begins, and never sends
            verdict.ok(made->begin());
            verdict.ok(made->ready(0));
            if (!aborts) return;
            std::thread other([&] { made->abort("enough"); });
            other.join();
            verdict.is(made->finish(), Code::aborted, {"enough"});
            return;
          }
          verdict.ok(made->begin());
          verdict.is(made->finish(), Code::aborted,
                     {"bucket ", aborts ? "enough" : "destroyed in the middle of a step"});
        }) == "");
  }
}
