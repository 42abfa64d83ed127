// What a communicator must take from a careless caller: handles given up at awkward moments, calls
// that cannot be, ranks that do not fit together.
#include <fmt/core.h>

#include <catch2/catch.hpp>
#include <thread>
#include <vector>

#include "ringfold/average.h"
#include "ringfold/communicator.h"
#include "test/processes.h"

using namespace ringfold;
using namespace ringfold::test;
using namespace std::chrono_literals;

TEST_CASE("the last handle of a communicator may live in a callback") {
  CHECK(run_ranks(2, 10s, [](const Rendezvous& where) {
          auto comm = Communicator::create(where);
          if (!rank_ok(comm.status())) return 1;
          std::vector<float> x(1000, 1);
          Work work = comm->all_reduce(x.data(), x.data(), x.size(), DType::f32, Op::sum);
          work.then([last = *comm](const Status& status) { rank_ok(status); });
          *comm = Communicator();
          rank_ok(work.wait(5s));
          return 0;
        }) == "");
}
