// What the way over UCX costs by construction, which holds for RDMA as well: endpoints only to the
// ranks that messages go to, and no copy where UCX fetches a message. Counted at UCX's own
// functions.
#include <catch2/catch.hpp>
#include <cstring>
#include <memory>
#include <vector>

#include "lib/base/base.h"
#include "test/skip.h"
#include "transports/ucx.h"
#include "transports/ucx_library.h"
#include "transports/ucx_transports.h"

using namespace ringfold;
using namespace std::chrono_literals;

namespace {

int endpoints = 0;
std::vector<const void*> sent_from, fetched_to;

// In place of UCX's functions, which they call.
struct Counting {
  explicit Counting(UcxLibrary& library) : ucx(library), real(library) {
    self = this;
    endpoints = 0;
    sent_from.clear();
    fetched_to.clear();
    ucx.ucp_ep_create = [](ucp_worker_h worker, const ucp_ep_params_t* params, ucp_ep_h* out) {
      ++endpoints;
      return self->real.ucp_ep_create(worker, params, out);
    };
    ucx.ucp_am_send_nbx = [](ucp_ep_h to, unsigned id, const void* header, size_t header_bytes,
                             const void* buffer, size_t count, const ucp_request_param_t* param) {
      sent_from.push_back(buffer);
      return self->real.ucp_am_send_nbx(to, id, header, header_bytes, buffer, count, param);
    };
    ucx.ucp_am_recv_data_nbx = [](ucp_worker_h worker, void* data, void* buffer, size_t count,
                                  const ucp_request_param_t* param) {
      fetched_to.push_back(buffer);
      return self->real.ucp_am_recv_data_nbx(worker, data, buffer, count, param);
    };
  }
  ~Counting() { ucx = real; }

  inline static Counting* self = nullptr;
  UcxLibrary& ucx;
  const UcxLibrary real;
};

// For tests the table may be written to; see ucx_library.cpp.
UcxLibrary* table() {
  const auto library = ucx_library();
  if (library.ok()) return const_cast<UcxLibrary*>(*library);
  test::skip(library.status().to_string());
  return nullptr;
}

struct World {
  explicit World(int size) {
    for (Peer rank = 0; rank < size; ++rank) {
      auto made = make_ucx(rank, steady_clock());
      REQUIRE(made.status().to_string() == "ok");
      ends.push_back(std::move(*made));
    }
    for (Peer a = 0; a < size; ++a)
      for (Peer b = 0; b < size; ++b)
        if (a != b)
          REQUIRE(ends[static_cast<size_t>(a)]
                      ->connect(b, ends[static_cast<size_t>(b)]->address())
                      .ok());
  }
  template <class Until>
  [[nodiscard]] bool drive(Until until) {
    const auto limit = steady_clock().now() + 30s;
    while (!until() && steady_clock().now() < limit)
      for (auto& end : ends) end->progress();
    return until();
  }
  // What was sent is confirmed while all can still answer.
  ~World() {
    (void)drive([&] {
      return std::all_of(ends.begin(), ends.end(), [](auto& end) { return end->flushed(); });
    });
  }
  std::vector<std::unique_ptr<Transport>> ends;
};

struct Done : Completion {
  Done() {
    done = [](Completion* self, const Status& status) noexcept {
      static_cast<Done*>(self)->code = status.code();
      static_cast<Done*>(self)->over = true;
    };
  }
  bool over = false;
  Code code = Code::ok;
};

}  // namespace

TEST_CASE("a ring makes endpoints to the right neighbour and from the left one only") {
  UcxLibrary* const library = table();
  if (library == nullptr) return;
  Counting counting(*library);
  constexpr int kSize = 8, kSteps = 2 * (kSize - 1);
  World world(kSize);
  CHECK(endpoints == 0);
  for (uint32_t step = 0; step < kSteps; ++step) {
    std::vector<uint64_t> out(kSize, step), in(kSize);
    std::vector<Done> sends(kSize), receives(kSize);
    for (Peer rank = 0; rank < kSize; ++rank) {
      const auto r = static_cast<size_t>(rank);
      world.ends[r]->open(1, step, 7);
      world.ends[r]->recv((rank + kSize - 1) % kSize, {1, step, 0, 7}, {&in[r], sizeof in[r]},
                          false, &receives[r]);
      world.ends[r]->send((rank + 1) % kSize, {1, step, 0, 7}, {&out[r], sizeof out[r]}, &sends[r]);
    }
    const auto all = [](const std::vector<Done>& some) {
      return std::all_of(some.begin(), some.end(), [](const Done& one) { return one.over; });
    };
    REQUIRE(world.drive([&] { return all(sends) && all(receives); }));
    CHECK(in == out);
    for (auto& end : world.ends) end->finish(1, step);
  }
  CHECK(endpoints == 2 * kSize);  // not 7 a rank
}

TEST_CASE("UCX fetches a long message from the user's buffer into the user's buffer") {
  UcxLibrary* const library = table();
  if (library == nullptr) return;
  setenv("UCX_RNDV_THRESH", "64k", 1);
  Counting counting(*library);
  {
    World world(2);
    std::vector<uint8_t> out(4 << 20), in(out.size());
    for (uint32_t turn = 0; turn < 3; ++turn) {
      std::memset(out.data(), static_cast<int>(turn + 1), out.size());
      Done sent, received;
      sent_from.clear();
      fetched_to.clear();
      for (auto& end : world.ends) end->open(1, turn, 7);
      world.ends[1]->recv(0, {1, turn, 0, 7}, {in.data(), in.size()}, true, &received);
      world.ends[0]->send(1, {1, turn, 0, 7}, {out.data(), out.size()}, &sent);
      REQUIRE(world.drive([&] { return sent.over && received.over; }));
      CHECK(in == out);
      CHECK(received.view == in.data());  // nothing is lent that would have to be copied
      CHECK(std::count(sent_from.begin(), sent_from.end(), out.data()) == 1);
      CHECK(fetched_to == std::vector<const void*>{in.data()});
      for (auto& end : world.ends) end->finish(1, turn);
    }
  }
  unsetenv("UCX_RNDV_THRESH");
}

TEST_CASE("transports that are not there are named, with those that are") {
  if (table() == nullptr) return;
  const auto there = ucx_transports("all");
  REQUIRE(there.status().to_string() == "ok");
  CHECK(std::count(there->begin(), there->end(), "tcp") == 1);
  CHECK(is_rdma("rc_mlx5"));
  CHECK(is_rdma("dc_mlx5"));
  CHECK_FALSE(is_rdma("tcp"));
  if (std::any_of(there->begin(), there->end(), [](const auto& name) { return is_rdma(name); }))
    return test::skip("this machine has RDMA");
  setenv("UCX_TLS", "rc", 1);
  const auto made = make_ucx(0, steady_clock());
  unsetenv("UCX_TLS");
  CHECK(made.status().code() == Code::system);
  CHECK_THAT(made.status().message(),
             Catch::StartsWith("UCX_TLS=rc asks for transports that this machine does not have; "
                               "there are ") &&
                 Catch::Contains("tcp"));
}
