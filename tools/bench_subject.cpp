#include "tools/bench_subject.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "test/exact.h"
#include "tools/bench_ranks.h"

namespace ringfold::tools {
namespace {

constexpr auto kRubbish = static_cast<unsigned char>(0xa5);
constexpr auto kGuardByte = static_cast<std::byte>(0x5a);

}  // namespace

void Guarded::resize(size_t bytes, size_t shift) {
  bytes_ = bytes, shift_ = shift;
  const size_t needed = (bytes + shift + 2 * kGuard + kGuard - 1) / kGuard * kGuard;
  if (needed <= capacity_) return;
  memory_.reset();
  memory_.reset(static_cast<std::byte*>(std::aligned_alloc(kGuard, needed)));
  if (!memory_) throw std::bad_alloc();
  capacity_ = needed;
  if (gpu_ == nullptr) return;
  gpu_->free(on_device_);
  on_device_ = nullptr;
  on_device_ = gpu_->allocate(needed);
}

Guarded::~Guarded() {
  if (gpu_ != nullptr) gpu_->free(on_device_);
}

std::byte* Guarded::for_call(std::byte* at) const {
  return gpu_ == nullptr || at == nullptr ? at : on_device_ + (at - memory_.get());
}

void Guarded::upload() const {
  if (gpu_ != nullptr) gpu_->upload(on_device_, memory_.get(), capacity_);
}

void Guarded::download() const {
  if (gpu_ != nullptr) gpu_->download(memory_.get(), on_device_, capacity_);
}

void Guarded::protect() {
  std::fill_n(memory_.get(), kGuard + shift_, kGuardByte);
  std::fill_n(data() + bytes_, kGuard, kGuardByte);
}

size_t Guarded::overwritten() const {
  const auto changed = [](std::byte b) { return b != kGuardByte; };
  return static_cast<size_t>(
      std::count_if(memory_.get(), memory_.get() + kGuard + shift_, changed) +
      std::count_if(data() + bytes_, data() + bytes_ + kGuard, changed));
}

void Subject::set(uint64_t bytes, DType type, Op op, int root) {
  type_ = type, op_ = op, root_ = root;
  const size_t elements = bytes / size_of(type);
  const bool parts = options_.kind && has_parts(*options_.kind);
  count_ = parts ? elements / static_cast<size_t>(comm_.size()) : elements;
  const size_t shift = static_cast<size_t>(options_.unalign) * size_of(type);
  send_.resize(size(), shift);
  recv_.resize(size(), shift);
}

size_t Subject::size() const {
  const bool parts = options_.kind && has_parts(*options_.kind);
  return count_ * size_of(type_) * (parts ? static_cast<size_t>(comm_.size()) : 1);
}

bool Subject::offers(bool in_place) const {
  if (!options_.kind || options_.kind == Collective::all_to_all) return !in_place;
  if (options_.kind == Collective::broadcast) return in_place;  // it has one buffer
  return true;
}

size_t Subject::input_count() const {
  const size_t all = count_ * static_cast<size_t>(comm_.size());
  if (!options_.kind) return count_;
  switch (*options_.kind) {
    case Collective::all_reduce:
    case Collective::all_gather:
    case Collective::reduce:
    case Collective::gather:
      return count_;
    case Collective::reduce_scatter:
    case Collective::all_to_all:
      return all;
    case Collective::broadcast:
      return comm_.rank() == root_ ? count_ : 0;
    case Collective::scatter:
      return comm_.rank() == root_ ? all : 0;
  }
  return 0;
}

size_t Subject::output_count() const {
  const size_t all = count_ * static_cast<size_t>(comm_.size());
  if (!options_.kind) return count_;
  switch (*options_.kind) {
    case Collective::all_reduce:
    case Collective::reduce_scatter:
    case Collective::broadcast:
    case Collective::scatter:
      return count_;
    case Collective::all_gather:
    case Collective::all_to_all:
      return all;
    case Collective::reduce:
      return comm_.rank() == root_ ? count_ : 0;
    case Collective::gather:
      return comm_.rank() == root_ ? all : 0;
  }
  return 0;
}

Subject::Pointers Subject::pointers(bool in_place) const {
  std::byte* const recv = recv_.data();
  Pointers at{in_place ? recv : send_.data(), recv};
  if (in_place && options_.kind) {
    std::byte* const mine = recv + static_cast<size_t>(comm_.rank()) * count_ * size_of(type_);
    const bool here = comm_.rank() == root_;
    switch (*options_.kind) {
      case Collective::reduce_scatter:
        at.recv = mine;
        break;
      case Collective::all_gather:
        at.send = mine;
        break;
      case Collective::gather:
        if (here) at.send = mine;
        break;
      case Collective::scatter:
        if (here) at.recv = mine;
        break;
      case Collective::all_reduce:
      case Collective::reduce:
      case Collective::broadcast:
      case Collective::all_to_all:
        break;
    }
  }
  if (options_.kind == Collective::broadcast) return at;
  if (input_count() == 0 && count_ > 0) at.send = nullptr;
  if (output_count() == 0 && count_ > 0) at.recv = nullptr;
  return at;
}

void Subject::fill_input(std::byte* at, uint64_t seed) const {
  const size_t count = input_count();
  if (count == 0) return;
  if (options_.reduces()) {
    test::Exact(seed, comm_.size(), type_, op_).fill(at, comm_.rank(), 0, count);
  } else {
    test::fill_bits(at, type_, seed, comm_.rank(), 0, count);
  }
}

void Subject::prepare(bool in_place, uint64_t seed) {
  std::memset(send_.data(), kRubbish, size());
  std::memset(recv_.data(), kRubbish, size());
  send_.protect();
  recv_.protect();
  fill_input(pointers(in_place).send, seed);
  send_.upload();
  recv_.upload();
}

uint64_t Subject::wrong_output(const std::byte* at, uint64_t seed) const {
  const size_t count = output_count();
  const auto me = static_cast<size_t>(comm_.rank());
  if (count == 0) return 0;
  const auto bits_of = [&](int rank, size_t first, size_t skip) {
    return test::wrong_bits(at + skip * size_of(type_), type_, seed, rank, first, count_);
  };
  if (!options_.kind) return bits_of((comm_.rank() + comm_.size() - 1) % comm_.size(), 0, 0);
  uint64_t wrong = 0;
  switch (*options_.kind) {
    case Collective::all_reduce:
    case Collective::reduce:
      return test::Exact(seed, comm_.size(), type_, op_).wrong(at, 0, count);
    case Collective::reduce_scatter:
      return test::Exact(seed, comm_.size(), type_, op_).wrong(at, me * count_, count);
    case Collective::broadcast:
      return bits_of(root_, 0, 0);
    case Collective::scatter:
      return bits_of(root_, me * count_, 0);
    case Collective::all_gather:
    case Collective::gather:
    case Collective::all_to_all:
      for (int r = 0; r < comm_.size(); ++r) {
        const size_t first = options_.kind == Collective::all_to_all ? me * count_ : 0;
        wrong += bits_of(r, first, static_cast<size_t>(r) * count_);
      }
      return wrong;
  }
  return wrong;
}

uint64_t Subject::wrong(bool in_place, uint64_t seed) const {
  send_.download();
  recv_.download();
  uint64_t wrong = wrong_output(pointers(in_place).recv, seed);
  wrong += send_.overwritten() + recv_.overwritten();
  if (in_place || input_count() == 0) return wrong;
  const std::byte* const input = pointers(false).send;
  std::vector<std::byte> intact(input_count() * size_of(type_));
  fill_input(intact.data(), seed);
  for (size_t i = 0; i < intact.size(); ++i) wrong += intact[i] != input[i];
  return wrong;
}

Work Subject::start(Pointers at) {
  const Reduction reduction(op_, op_ == Op::premul_sum ? test::premul_factor(comm_.rank()) : 1.0);
  switch (*options_.kind) {
    case Collective::all_reduce:
      return comm_.all_reduce(at.send, at.recv, count_, type_, reduction, stream());
    case Collective::reduce_scatter:
      return comm_.reduce_scatter(at.send, at.recv, count_, type_, reduction, stream());
    case Collective::all_gather:
      return comm_.all_gather(at.send, at.recv, count_, type_, stream());
    case Collective::broadcast:
      return comm_.broadcast(at.recv, count_, type_, root_, stream());
    case Collective::reduce:
      return comm_.reduce(at.send, at.recv, count_, type_, reduction, root_, stream());
    case Collective::all_to_all:
      return comm_.all_to_all(at.send, at.recv, count_, type_, stream());
    case Collective::gather:
      return comm_.gather(at.send, at.recv, count_, type_, root_, stream());
    case Collective::scatter:
      return comm_.scatter(at.send, at.recv, count_, type_, root_, stream());
  }
  return {};
}

void Subject::finish(Work work) {
  must(work.wait());
  done_.push_back(std::move(work));
}

Report Subject::report() const {
  Report sum;
  for (const Work& work : done_) {
    Report one = work.report();
    one.bytes_sent += sum.bytes_sent;
    one.bytes_model += sum.bytes_model;
    one.predicted_seconds += sum.predicted_seconds;
    sum = std::move(one);
  }
  return sum;
}

void Subject::call(bool in_place) {
  if (gpu_ != nullptr) {
    launch(in_place);
    return settle();
  }
  done_.clear();
  const Pointers at = pointers(in_place);
  if (options_.baseline != Baseline::none) {
    baseline(at);
  } else if (options_.kind) {
    finish(start(at));
  } else {
    send_recv(at);
  }
}

Report Subject::library_call() {
  Work work = start(pointers(true));
  must(work.wait());
  return work.report();
}

void Subject::send_recv(Pointers at) {
  const int n = comm_.size(), me = comm_.rank();
  Work receive = comm_.recv(at.recv, count_, type_, (me + n - 1) % n);
  finish(comm_.send(at.send, count_, type_, (me + 1) % n));
  must(receive.wait());
}

// ---- on a device ------------------------------------------------------------------------------

// The call is on the stream then: nothing has to be waited for before the next.
void Subject::launch(bool in_place) {
  const Pointers here = pointers(in_place);
  const Guarded& from = in_place ? recv_ : send_;
  const Pointers at{from.for_call(here.send), recv_.for_call(here.recv)};
  if (options_.kind) {
    launched_.push_back(start(at));
    return;
  }
  const int n = comm_.size(), me = comm_.rank();
  Group both;  // on one stream neither may wait for the other
  launched_.push_back(comm_.recv(at.recv, count_, type_, (me + n - 1) % n, stream()));
  launched_.push_back(comm_.send(at.send, count_, type_, (me + 1) % n, stream()));
  (void)both.submit();
}

// All that was launched is over; the report is that of the last call.
void Subject::settle() {
  for (Work& work : launched_) must(work.wait());
  done_.clear();
  finish(std::move(launched_.back()));
  launched_.clear();
  gpu_->wait();
}

double Subject::time(bool in_place, int calls, const std::function<double()>& after) {
  double untimed = 0;
  const double start = seconds_now();
  if (gpu_ != nullptr) gpu_->begin();
  for (int i = 0; i < calls; ++i) {
    if (gpu_ != nullptr && !after)
      launch(in_place);
    else
      call(in_place);
    if (after) untimed += after();
  }
  const double seconds = gpu_ != nullptr ? gpu_->end() : seconds_now() - start;
  if (!launched_.empty()) settle();
  return (seconds - untimed) / calls;
}

}  // namespace ringfold::tools
