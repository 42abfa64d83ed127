// Device memory by a CUDA-aware UCX. No such UCX can work without a GPU: here the installed one is
// given a front that says it takes device memory, and shows it the emulated device's by the address
// at which the host may read it. So what the library gives UCX is proven; what UCX does on a GPU is
// not.
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <catch2/catch.hpp>

#include "test/cuda_collectives.h"
#include "test/emulated_driver/state.h"
#include "test/skip.h"
#include "transports/ucx_library.h"

using namespace ringfold;
using namespace ringfold::test;
using namespace std::chrono_literals;

namespace {

UcxLibrary real;
std::atomic<uint64_t> sent{0}, received{0};  // bytes of device memory
std::atomic<int> wrong{0};

// The memory as the host reaches it, and parameters that say so; the type must be what it is.
const void* shown(const void* buffer, size_t bytes, const ucp_request_param_t* given,
                  ucp_request_param_t* host, std::atomic<uint64_t>& count) {
  *host = *given;
  const bool device = given->memory_type == UCS_MEMORY_TYPE_CUDA;
  const auto kind = emulated::find(reinterpret_cast<CUdeviceptr>(buffer)).kind;
  if ((given->op_attr_mask & UCP_OP_ATTR_FIELD_MEMORY_TYPE) == 0) ++wrong;
  if (bytes != 0 && device != (kind == emulated::Kind::device)) ++wrong;
  if (!device) return buffer;
  count += bytes;
  host->memory_type = UCS_MEMORY_TYPE_HOST;
  return emulated::reach(buffer);
}

ucs_status_t query(ucp_context_h context, ucp_context_attr_t* attributes) {
  const ucs_status_t status = real.ucp_context_query(context, attributes);
  attributes->memory_types |= UCS_BIT(UCS_MEMORY_TYPE_CUDA);
  return status;
}

ucs_status_ptr_t send(ucp_ep_h endpoint, unsigned id, const void* header, size_t header_bytes,
                      const void* buffer, size_t bytes, const ucp_request_param_t* given) {
  ucp_request_param_t host;
  const void* const memory = shown(buffer, bytes, given, &host, sent);
  return real.ucp_am_send_nbx(endpoint, id, header, header_bytes, memory, bytes, &host);
}

ucs_status_ptr_t receive(ucp_worker_h worker, void* data, void* buffer, size_t bytes,
                         const ucp_request_param_t* given) {
  ucp_request_param_t host;
  void* const memory = const_cast<void*>(shown(buffer, bytes, given, &host, received));
  return real.ucp_am_recv_data_nbx(worker, data, memory, bytes, &host);
}

bool put_front_before_ucx() {
  const auto library = ucx_library();
  if (!library.ok()) return false;
  auto& table = const_cast<UcxLibrary&>(**library);  // it is not const itself
  real = table;
  table.ucp_context_query = query;
  table.ucp_am_send_nbx = send;
  table.ucp_am_recv_data_nbx = receive;
  return true;
}

bool no_ucx() {
  Processes probe(1, [](const Rendezvous&) { return ucx_library().ok() ? 0 : 1; });
  return !probe.wait(10s)[0].ok();
}

// Ranks as processes, each with a UCX that takes device memory, or one of them without.
std::string run_with_ucx(int ranks, std::string_view way, std::string_view transports, bool aware,
                         const std::function<void(const CudaRank&)>& body) {
  return run_ranks(ranks, 60s, [&](const Rendezvous& where) {
    if (aware || where.rank != 1) RANK_CHECK(put_front_before_ucx());
    const int log = memfd_create("log of UCX", 0);
    dup2(log, STDOUT_FILENO);
    const CudaWorld world(roomy(static_cast<uint64_t>(where.rank) + 1));
    Options options;
    options.transports = transports;
    options.cuda_path = way;
    options.timeout = 20s;
    options.piece_bytes = 4096;
    Problems problems;
    {
      auto comm = Communicator::create(where, options);
      if (!rank_ok(comm.status())) return 1;
      const CudaStream stream(world);
      body({world, *comm, stream, problems});
    }
    RANK_CHECK(problems.text() == "");
    RANK_CHECK(wrong == 0);
    // It complains of what it was not given back.
    fflush(stdout);
    std::string said(static_cast<size_t>(lseek(log, 0, SEEK_END)), ' ');
    RANK_CHECK(pread(log, said.data(), said.size(), 0) == static_cast<ssize_t>(said.size()));
    RANK_CHECK(said == "");
    return 0;
  });
}

Work sum(const CudaRank& me, const Memory& memory, size_t count) {
  return me.comm.all_reduce(memory.get(), memory.get(), count, DType::i32, Op::sum, me.handle());
}

}  // namespace

TEST_CASE("a UCX that takes device memory is given it, as what it is") {
  if (real_driver()) return skip("of the emulated driver");
  if (no_ucx()) return skip("UCX is not installed");
  const auto problems = run_with_ucx(3, "ucx", "loopback,shm,ucx", true, [](const CudaRank& me) {
    const Memory memory(me.world, 4000);
    Work work = sum(me, memory, 1000);
    me.problems.ok(work.wait(), "sum");
    me.problems.check(work.report().transport == "ucx", work.report().transport);
    for (const Kind& kind : kKinds) {
      check_like_host(me, kind, {DType::f32, Op::sum, 0, 0});
      check_like_host(me, kind, {DType::bf16, Op::avg, 777, me.comm.size() - 1}, 2);
      check_like_host(me, kind, {DType::i64, Op::max, 10'000, 0}, 8);
    }
    const auto traffic = EmulatedDriver::traffic();
    me.problems.check(traffic.read_pinned == 0, "nothing was staged");
    me.problems.check(traffic.read_others == 0, "nothing was read from others");
    me.problems.check(sent > 0, "device memory was sent");
    me.problems.check(received > 0, "device memory was received");
  });
  CHECK(problems == "");
}

// As between hosts: no way of this host is allowed.
TEST_CASE("where memory cannot be shared, auto takes a UCX that takes device memory") {
  if (real_driver()) return skip("of the emulated driver");
  if (no_ucx()) return skip("UCX is not installed");
  const auto problems = run_with_ucx(2, "auto", "ucx", true, [](const CudaRank& me) {
    const Memory memory(me.world, 400'000);
    memory.set(me.stream, std::vector<int32_t>(100'000, 1));
    Work work = sum(me, memory, 100'000);
    me.problems.ok(work.wait(), "sum");
    me.problems.check(work.report().transport == "ucx", work.report().transport);
    me.problems.check(memory.get<int32_t>(me.stream, 100'000) == std::vector<int32_t>(100'000, 2),
                      "result");
    me.problems.check(sent >= 400'000, "device memory was sent");
  });
  CHECK(problems == "");
}

TEST_CASE("if one rank's UCX does not take device memory, all ranks stage") {
  if (real_driver()) return skip("of the emulated driver");
  if (no_ucx()) return skip("UCX is not installed");
  const auto problems = run_with_ucx(3, "auto", "ucx", false, [](const CudaRank& me) {
    const Memory memory(me.world, 4000);
    memory.set(me.stream, std::vector<int32_t>(1000, 1));
    me.problems.ok(sum(me, memory, 1000).wait(), "sum");
    me.problems.check(memory.get<int32_t>(me.stream, 1000) == std::vector<int32_t>(1000, 3),
                      "result");
    me.problems.check(EmulatedDriver::traffic().read_pinned != 0, "it was staged");
    me.problems.check(sent == 0, "no device memory was sent");
  });
  CHECK(problems == "");
}
