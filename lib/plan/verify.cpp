#include "lib/plan/verify.h"

#include <fmt/core.h>

#include <bit>
#include <string>
#include <vector>

namespace ringfold {
namespace {

// What stands in place of a number: which element of which ranks' inputs was added up, and in which
// order.
struct Value {
  size_t element = 0;
  uint64_t contributors = 0;  // a bit for each rank; none: undefined
  uint64_t order = 0;         // a hash of the tree of additions, the same for (a, b) and (b, a)
};

uint64_t mix(uint64_t x) {  // the finaliser of splitmix64
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

uint64_t bit(int rank) {
  return uint64_t{1} << rank;
}

struct Transit {
  bool pending = false;  // made, not yet used
  Range range;
  std::vector<Value> values;
};

struct Rank {
  Frame frame;
  bool shared = false;  // input and work are the same memory
  std::vector<Value> input, work;
  Transit transit;
  Step step;                // the current one
  std::vector<Value> sent;  // its message
};

class Verifier {
 public:
  Verifier(const Schedule& schedule, bool in_place, const StepFunction& step_of)
      : schedule_(schedule), step_of_(step_of), ranks_(static_cast<size_t>(schedule.size)) {
    for (int r = 0; r < schedule.size; ++r) {
      Rank& rank = at(r);
      rank.frame = frame(schedule, r);
      rank.shared =
          in_place || (schedule.collective == Collective::broadcast && r == schedule.root);
      rank.input.resize(schedule.count);
      if (!rank.shared) rank.work.resize(schedule.count);
      for (size_t e = rank.frame.input.begin; e < rank.frame.input.end(); ++e) {
        rank.input[e] = {e, bit(r), mix(static_cast<uint64_t>(r) + 1)};
      }
    }
  }

  Status run() {
    const int steps = step_count(schedule_);
    for (i_ = 0; i_ < steps; ++i_) {
      for (int r = 0; r < schedule_.size; ++r) at(r).step = step_of_(schedule_, r, i_);
      // All messages are taken before any is received: no send depends on its own step's receive.
      for (const auto action :
           {&Verifier::check_shape, &Verifier::check_match, &Verifier::send, &Verifier::receive}) {
        for (position_ = 0; position_ < schedule_.size; ++position_) {
          if (Status status = (this->*action)(); !status.ok()) return status;
        }
      }
    }
    for (position_ = 0; position_ < schedule_.size; ++position_) {
      if (Status status = check_result(); !status.ok()) return status;
    }
    return {};
  }

 private:
  Rank& at(int r) { return ranks_[static_cast<size_t>(r)]; }

  Status violation(const std::string& what) const {
    return Status(Code::internal,
                  fmt::format("{} {} of {} elements on {} ranks, step {}, position {}: {}",
                              name(schedule_.collective), name(schedule_.algorithm),
                              schedule_.count, schedule_.size, i_, position_, what));
  }

  Status check_shape() {
    const Step& step = at(position_).step;
    for (const int peer : {step.to, step.from}) {
      if (peer < -1 || peer >= schedule_.size || peer == position_) {
        return violation(fmt::format("there is no peer {}", peer));
      }
    }
    if (step.from >= 0 && step.then == Then::none) return violation("drops what it receives");
    const bool local = step.to < 0 && step.from < 0 && step.then == Then::copy;
    if (step.from < 0 && step.then != Then::none && !local) {
      return violation("uses a message that it does not receive");
    }
    if (step.then != Then::none && step.into == From::input) return violation("writes the input");
    if (step.then == Then::copy && step.into != From::work) return violation("copies into transit");
    return {};
  }

  Status check_match() {
    const Step& step = at(position_).step;
    if (step.from >= 0 && at(step.from).step.to != position_) {
      return violation(fmt::format("waits for position {}, which does not send to it", step.from));
    }
    if (step.to < 0) return {};
    const Step& other = at(step.to).step;
    if (other.from != position_) {
      return violation(fmt::format("sends to position {}, which does not receive it", step.to));
    }
    if (other.recv.count != step.send.count) {
      return violation(fmt::format("sends {} elements, position {} expects {}", step.send.count,
                                   step.to, other.recv.count));
    }
    return {};
  }

  // Copies the values of `range` to *out. Using up transit ends it.
  Status read(From side, Range range, std::vector<Value>* out) {
    Rank& rank = at(position_);
    if (side == From::transit) {
      Transit& transit = rank.transit;
      if (!transit.pending) return violation("uses transit that is not there");
      if (transit.range != range)
        return violation("uses transit in another range than it was made");
      transit.pending = false;
      *out = transit.values;
      return {};
    }
    if (Status status = check_frame(side, range); !status.ok()) return status;
    const std::vector<Value>& memory = side == From::input || rank.shared ? rank.input : rank.work;
    out->assign(memory.begin() + static_cast<std::ptrdiff_t>(range.begin),
                memory.begin() + static_cast<std::ptrdiff_t>(range.end()));
    for (size_t k = 0; k < range.count; ++k) {
      if ((*out)[k].contributors == 0) {
        return violation(fmt::format("reads element {}, which is undefined", range.begin + k));
      }
    }
    return {};
  }

  Status check_frame(From side, Range range) {
    const Frame& frame = at(position_).frame;
    const Range held = side == From::input ? frame.input : frame.work;
    if (range.empty() || (range.begin >= held.begin && range.end() <= held.end())) return {};
    return violation(fmt::format("touches [{}, {}) of its {}, which holds [{}, {})", range.begin,
                                 range.end(), side == From::input ? "input" : "work", held.begin,
                                 held.end()));
  }

  Status send() {
    Rank& rank = at(position_);
    if (rank.step.to < 0) return {};
    return read(rank.step.send_from, rank.step.send, &rank.sent);
  }

  Status receive() {
    Rank& rank = at(position_);
    const Step& step = rank.step;
    if (step.then == Then::none) return {};
    if (step.from < 0) {  // local
      if (Status status = read(From::input, step.recv, &result_); !status.ok()) return status;
    } else {
      result_ = at(step.from).sent;
    }
    if (step.then == Then::reduce) {
      if (Status status = read(step.operand, step.recv, &operand_); !status.ok()) return status;
      for (size_t k = 0; k < step.recv.count; ++k) {
        if (Status status = add(operand_[k], &result_[k]); !status.ok()) return status;
      }
    }
    return write();
  }

  Status add(const Value& mine, Value* sum) const {
    const Step& step = ranks_[static_cast<size_t>(position_)].step;
    if (mine.element != sum->element) {
      return violation(fmt::format("adds element {} to element {}", sum->element, mine.element));
    }
    if ((mine.contributors & sum->contributors) != 0) {
      return violation(fmt::format("adds a contribution to element {} twice", mine.element));
    }
    if (std::popcount(mine.contributors) != step.mine ||
        std::popcount(sum->contributors) != step.theirs) {
      return violation(fmt::format("{} and {} ranks have contributed, the step says {} and {}",
                                   std::popcount(mine.contributors),
                                   std::popcount(sum->contributors), step.mine, step.theirs));
    }
    sum->contributors |= mine.contributors;
    sum->order = mix(mix(mine.order) + mix(sum->order));
    return {};
  }

  Status write() {
    Rank& rank = at(position_);
    const Range range = rank.step.recv;
    if (rank.step.into == From::transit) {
      if (rank.transit.pending) return violation("overwrites transit that was never used");
      rank.transit = {true, range, result_};
      return {};
    }
    if (Status status = check_frame(From::work, range); !status.ok()) return status;
    std::vector<Value>& memory = rank.shared ? rank.input : rank.work;
    std::copy(result_.begin(), result_.end(),
              memory.begin() + static_cast<std::ptrdiff_t>(range.begin));
    return {};
  }

  // What element e of the result at `position_` must be (its order apart).
  [[nodiscard]] Value expected(size_t e) const {
    const auto size = static_cast<size_t>(schedule_.size);
    const size_t each = schedule_.count / size;
    switch (schedule_.collective) {
      case Collective::all_reduce:
      case Collective::reduce_scatter:
      case Collective::reduce:
        return {e, ~uint64_t{0} >> (kMaxVerifiedSize - schedule_.size), 0};
      case Collective::all_gather:
      case Collective::gather:
        return {e, bit(static_cast<int>(e / each)), 0};
      case Collective::broadcast:
      case Collective::scatter:
        return {e, bit(schedule_.root), 0};
      case Collective::all_to_all:
        return {static_cast<size_t>(position_) * each + e % each, bit(static_cast<int>(e / each)),
                0};
    }
    return {};
  }

  Status check_result() {
    Rank& rank = at(position_);
    if (rank.transit.pending) return violation("leaves transit unused");
    const std::vector<Value>& memory = rank.shared ? rank.input : rank.work;
    const Rank& first = at(0);
    for (size_t e = rank.frame.work.begin; e < rank.frame.work.end(); ++e) {
      const Value wanted = expected(e);
      if (memory[e].element != wanted.element || memory[e].contributors != wanted.contributors) {
        return violation(fmt::format("element {} is incomplete at the end", e));
      }
      if (schedule_.collective == Collective::all_reduce &&
          memory[e].order != (first.shared ? first.input : first.work)[e].order) {
        return violation(fmt::format("element {} was added up in another order than at 0", e));
      }
    }
    return {};
  }

  const Schedule schedule_;
  const StepFunction& step_of_;
  std::vector<Rank> ranks_;
  std::vector<Value> result_, operand_;
  int i_ = 0, position_ = 0;
};

}  // namespace

Status verify(const Schedule& schedule, bool in_place, const StepFunction& step_of) {
  if (!legal(schedule)) return Status(Code::invalid_argument, "the schedule is not legal");
  if (schedule.size > kMaxVerifiedSize) {
    return Status(Code::invalid_argument,
                  fmt::format("at most {} ranks can be verified", kMaxVerifiedSize));
  }
  if (in_place && schedule.collective == Collective::all_to_all) {
    return Status(Code::invalid_argument, "an all_to_all is not done in place");
  }
  return Verifier(schedule, in_place, step_of).run();
}

}  // namespace ringfold
