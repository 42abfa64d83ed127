// The naive all-reduces that a ring is compared with. Both bring every rank's whole buffer to one
// hub, whose single link carries (N-1)*D bytes in and (N-1)*D bytes out.
//   gather_to_root     the root takes one rank after another, then sends one after another.
//   parameter_server   synchronous: the hub listens to all at once and answers all at once.
#include <cstring>

#include "kernels/reduce.h"
#include "tools/bench_subject.h"

namespace ringfold::tools {
namespace {

constexpr int kHub = 0;

}  // namespace

void Subject::baseline(Pointers at) {
  if (comm_.rank() == kHub) {
    receive_and_fold(at);
    hand_back(at);
    return;
  }
  finish(comm_.send(at.send, count_, type_, kHub));
  must(comm_.recv(at.recv, count_, type_, kHub).wait());
}

void Subject::receive_and_fold(Pointers at) {
  const size_t bytes = size();
  const bool at_once = options_.baseline == Baseline::parameter_server;
  const auto others = static_cast<size_t>(comm_.size() - 1);
  incoming_.resize(bytes * (at_once ? others : 1));
  std::vector<Work> open;
  for (size_t i = 0; at_once && i < others; ++i) {
    open.push_back(
        comm_.recv(incoming_.data() + i * bytes, count_, type_, static_cast<int>(i) + 1));
  }
  if (at.recv != at.send && bytes > 0) std::memcpy(at.recv, at.send, bytes);
  for (size_t i = 0; i < others; ++i) {
    const int rank = static_cast<int>(i) + 1;
    if (!at_once) open.push_back(comm_.recv(incoming_.data(), count_, type_, rank));
    must(open[i].wait());
    fold(at, rank, incoming_.data() + (at_once ? i * bytes : 0));
  }
}

void Subject::fold(Pointers at, int rank, const std::byte* received) const {
  ReduceCall call;
  call.dtype = type_, call.op = op_;
  call.a = at.recv, call.b = received, call.out = at.recv;
  call.count = count_;
  call.count_a = rank, call.count_b = 1, call.total = comm_.size();
  reduce_host(call);
}

void Subject::hand_back(Pointers at) {
  std::vector<Work> open;
  for (int rank = 1; rank < comm_.size(); ++rank) {
    Work work = comm_.send(at.recv, count_, type_, rank);
    if (options_.baseline == Baseline::gather_to_root) {
      finish(std::move(work));
    } else {
      open.push_back(std::move(work));
    }
  }
  for (Work& work : open) finish(std::move(work));
}

}  // namespace ringfold::tools
