// The other ways to all-reduce: two rings in one another, and two that double.
//
// Included by ringfold/schedule.h, which explains the terms. Pure constexpr functions; any thread.
#pragma once

#include <bit>

#include "ringfold/schedule.h"

namespace ringfold::steps {

// Two levels, for hosts with L ranks each, positions numbered host by host: reduce-scatter among
// the ranks of the host, so that local rank l holds the host's sum of shard l; ring all-reduce of
// that shard among the local ranks l of all hosts; all-gather on the host. Between hosts a rank
// sends only 2(H-1)/H of its shard, 1/L of the data.
constexpr int two_level_count(const Schedule& s) {
  return 2 * (s.per_host - 1) + 2 * (s.size / s.per_host - 1);
}

constexpr Step two_level(const Schedule& s, int r, int i, const Segment& segment) {
  const int locals = s.per_host, hosts = s.size / locals;
  const int local = r % locals, host = r / locals;
  const int inside = locals - 1, between = hosts - 1;
  Step step;
  if (i < inside || i >= inside + 2 * between) {  // on the host
    step = i < inside ? half_ring(Then::reduce, locals, local, i, segment)
                      : half_ring(Then::copy, locals, local, i - inside - 2 * between, segment);
    step.send_from = i == 0 && inside > 0 ? From::input : From::work;
    step.operand = From::input;
    step.to += host * locals;
    step.from += host * locals;
    return step;
  }
  const Segment shard{segment.chunk(locals, local), false, 0, s.grain};
  const int j = i - inside;
  step = j < between ? half_ring(Then::reduce, hosts, host, j, shard)
                     : half_ring(Then::copy, hosts, host, j - between, shard);
  if (j < between && inside == 0) {  // one rank on each host: nothing was added up before
    step.operand = From::input;
    if (j == 0) step.send_from = From::input;
  }
  step.mine = locals;
  step.theirs = locals * (j + 1);
  step.to = step.to * locals + local;
  step.from = step.from * locals + local;
  return step;
}

// Doubling works among a power of two P <= N of members. The first 2(N-P) ranks pair up: the odd
// one gives all it has to the even one before, and gets the result from it afterwards; the even
// ones and all later ranks are the members.
struct Members {
  int count, extras;  // P and N - P

  constexpr explicit Members(int size)
      : count(static_cast<int>(std::bit_floor(static_cast<unsigned>(size)))),
        extras(size - count) {}
  [[nodiscard]] constexpr int doublings() const {
    return std::countr_zero(static_cast<unsigned>(count));
  }
  [[nodiscard]] constexpr bool gives(int r) const { return r < 2 * extras && r % 2 == 1; }
  [[nodiscard]] constexpr bool takes(int r) const { return r < 2 * extras && r % 2 == 0; }
  [[nodiscard]] constexpr int member(int r) const { return r < 2 * extras ? r / 2 : r - extras; }
  [[nodiscard]] constexpr int rank(int m) const { return m < extras ? 2 * m : m + extras; }
  // Ranks that members [first, first + n) stand for.
  [[nodiscard]] constexpr int contributions(int first, int n) const {
    const int pairs = extras <= first ? 0 : extras - first < n ? extras - first : n;
    return n + pairs;
  }
};

constexpr int doubling_count(const Schedule& s) {
  const Members members(s.size);
  const int rounds = (s.algorithm == Algorithm::halving_doubling ? 2 : 1) * members.doublings();
  return rounds + (members.extras > 0 ? 2 : 0);
}

// Recursive doubling: in round i everybody exchanges all it has with the member 2^i away.
//
//   members   0     1     2     3
//   round 0   01 <-> 01   23 <-> 23
//   round 1   0123 <------> 0123, and 1 with 3: done after log2 P steps, each of all the bytes.
constexpr Step recursive_doubling(const Members& members, int m, int i, Range all) {
  const int width = 1 << i, peer = m ^ width;
  Step step;
  step.to = step.from = members.rank(peer);
  step.send = step.recv = all;
  step.then = Then::reduce;
  step.mine = members.contributions(m & -width, width);
  step.theirs = members.contributions(peer & -width, width);
  return step;
}

// Halving and doubling: the same exchanges, but in round i each sends the half of its block that
// the other goes on with, so the blocks halve while the sums double (near members first, for they
// share a host, and the first exchange is the largest). Then the rounds run backwards and copy. The
// bytes are the ring's, 2(P-1)/P of the data, in 2 log2 P steps instead of 2(P-1).
constexpr Step halving_doubling(const Members& members, int m, int i, const Segment& segment) {
  const int doublings = members.doublings();
  const bool halving = i < doublings;
  const int round = halving ? i : 2 * doublings - 1 - i;
  const int width = 1 << round, peer = m ^ width;
  int first = 0, parts = members.count;  // my block in parts, before the round
  for (int k = 0; k < round; ++k) {
    parts /= 2;
    if (m & (1 << k)) first += parts;
  }
  parts /= 2;
  const auto half = [&](bool upper) {
    const int begin = first + (upper ? parts : 0);
    const Range a = segment.chunk(members.count, begin);
    const Range z = segment.chunk(members.count, begin + parts - 1);
    return Range{a.begin, z.end() - a.begin};
  };
  const Range keep = half((m & width) != 0), give = half((m & width) == 0);
  Step step;
  step.to = step.from = members.rank(peer);
  step.send = halving ? give : keep;
  step.recv = halving ? keep : give;
  step.then = halving ? Then::reduce : Then::copy;
  step.mine = members.contributions(m & -width, width);
  step.theirs = members.contributions(peer & -width, width);
  return step;
}

constexpr Step doubling(const Schedule& s, int r, int i, const Segment& segment) {
  const Members members(s.size);
  const Range all = segment.range;
  Step step;
  if (members.extras > 0) {
    const bool first = i == 0, last = i == doubling_count(s) - 1;
    if (members.gives(r)) {
      if (first) step.to = r - 1, step.send = all, step.send_from = From::input;
      if (last) step.from = r - 1, step.recv = all, step.then = Then::copy;
      return step;
    }
    if (first || last) {
      if (!members.takes(r)) return step;
      if (last) step.to = r + 1, step.send = all;
      if (first) step.from = r + 1, step.recv = all, step.then = Then::reduce;
      if (first) step.operand = From::input;
      return step;
    }
    --i;
  }
  const int m = members.member(r);
  step = s.algorithm == Algorithm::recursive_doubling ? recursive_doubling(members, m, i, all)
                                                      : halving_doubling(members, m, i, segment);
  if (i == 0 && !members.takes(r)) step.send_from = step.operand = From::input;
  return step;
}

}  // namespace ringfold::steps
