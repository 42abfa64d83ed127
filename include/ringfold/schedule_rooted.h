// The collectives with a root, and the all-to-all.
//
// Included by ringfold/schedule.h, which explains the terms. Pure constexpr functions; any thread.
#pragma once

#include <bit>

#include "ringfold/schedule.h"

namespace ringfold::steps {

// Chain: along the ring from rank to right neighbour. N-1 steps a segment, but with many pieces and
// segments all links work at once, so a long message costs hardly more than one hop.
//
//   broadcast   root -> root+1 -> ... -> root-1         rank number d of the chain sends in step d
//   reduce      root+1 -> root+2 -> ... -> root         each adds its own to what passes
constexpr Step chain_broadcast(const Schedule& s, int r, int i, Range all) {
  const int d = wrap(r - s.root, s.size);
  Step step;
  if (d == i) {
    step.to = wrap(r + 1, s.size);
    step.send = all;
    step.send_from = d == 0 ? From::input : From::work;
  }
  if (d == i + 1) {
    step.from = wrap(r - 1, s.size);
    step.recv = all;
    step.then = Then::copy;
  }
  return step;
}

constexpr Step chain_reduce(const Schedule& s, int r, int i, Range all) {
  const int d = wrap(r - s.root - 1, s.size);
  Step step;
  if (d == i) {
    step.to = wrap(r + 1, s.size);
    step.send = all;
    step.send_from = d == 0 ? From::input : From::transit;
  }
  if (d == i + 1) {
    step.from = wrap(r - 1, s.size);
    step.recv = all;
    step.then = Then::reduce;
    step.operand = From::input;
    step.into = r == s.root ? From::work : From::transit;
    step.theirs = d;
  }
  return step;
}

// Binomial tree, with d = distance from the root: ceil(log2 N) steps, each of all the bytes.
//
//   broadcast of 8   step 0   0 -> 4                          far first, so that what follows
//                    step 1   0 -> 2, 4 -> 6                  stays among near ranks
//                    step 2   0 -> 1, 2 -> 3, 4 -> 5, 6 -> 7
//   reduce           the same backwards
constexpr int tree_depth(int size) {
  return static_cast<int>(std::bit_width(static_cast<unsigned>(size - 1)));
}

constexpr Step tree_broadcast(const Schedule& s, int r, int i, Range all) {
  const int d = wrap(r - s.root, s.size);
  const int reach = 1 << (tree_depth(s.size) - 1 - i), place = d % (2 * reach);
  Step step;
  if (place == 0 && d + reach < s.size) {
    step.to = wrap(r + reach, s.size);
    step.send = all;
    step.send_from = d == 0 ? From::input : From::work;
  }
  if (place == reach) {
    step.from = wrap(r - reach, s.size);
    step.recv = all;
    step.then = Then::copy;
  }
  return step;
}

constexpr Step tree_reduce(const Schedule& s, int r, int i, Range all) {
  const int d = wrap(r - s.root, s.size);
  const int reach = 1 << i, place = d % (2 * reach);
  const From sums = d == 0 ? From::work : From::transit;  // only the root keeps what it adds up
  Step step;
  if (place == reach) {
    const bool leaf = reach == 1 || d + 1 == s.size;
    step.to = wrap(r - reach, s.size);
    step.send = all;
    step.send_from = leaf ? From::input : sums;
  }
  if (place == 0 && d + reach < s.size) {
    step.from = wrap(r + reach, s.size);
    step.recv = all;
    step.then = Then::reduce;
    step.operand = i == 0 ? From::input : sums;
    step.into = sums;
    step.mine = reach;
    step.theirs = d + 2 * reach <= s.size ? reach : s.size - d - reach;
  }
  return step;
}

// Direct: every part goes straight from its owner to where it is wanted, one rank after another at
// the root, which is the bottleneck however it is done. The root's own part comes last, to keep the
// wire busy meanwhile.
constexpr Step direct_rooted(const Schedule& s, int r, int i, const Segment& segment) {
  const int partner = wrap(s.root + 1 + i, s.size);  // the root itself in the last step
  const Range chunk = segment.chunk(s.size, partner);
  if (partner == s.root) return r == s.root ? local_copy(chunk) : Step{};
  const int source = s.collective == Collective::gather ? partner : s.root;
  const int target = s.collective == Collective::gather ? s.root : partner;
  Step step;
  if (r == source) {
    step.to = target;
    step.send = chunk;
    step.send_from = From::input;
  }
  if (r == target) {
    step.from = source;
    step.recv = chunk;
    step.then = Then::copy;
  }
  return step;
}

// In step i everybody sends to the rank i+1 to the right and receives from the rank i+1 to the
// left, so every rank is sent to by exactly one.
constexpr Step all_to_all(const Schedule& s, int r, int i, const Segment& segment) {
  if (i == s.size - 1) return local_copy(segment.chunk(s.size, r));
  Step step;
  step.to = wrap(r + 1 + i, s.size);
  step.from = wrap(r - 1 - i, s.size);
  step.send = segment.chunk(s.size, step.to);
  step.recv = segment.chunk(s.size, step.from);
  step.send_from = From::input;
  step.then = Then::copy;
  return step;
}

constexpr int rooted_count(const Schedule& s) {
  switch (s.algorithm) {
    case Algorithm::direct:
      return s.size;
    case Algorithm::tree:
      return tree_depth(s.size);
    case Algorithm::chain:
    case Algorithm::ring:
    case Algorithm::halving_doubling:
    case Algorithm::recursive_doubling:
    case Algorithm::two_level:
    case Algorithm::region:
      break;
  }
  return s.size - 1;
}

constexpr Step rooted(const Schedule& s, int r, int i, const Segment& segment) {
  if (s.algorithm == Algorithm::direct) return direct_rooted(s, r, i, segment);
  const bool tree = s.algorithm == Algorithm::tree;
  if (s.collective == Collective::broadcast) {
    return tree ? tree_broadcast(s, r, i, segment.range) : chain_broadcast(s, r, i, segment.range);
  }
  return tree ? tree_reduce(s, r, i, segment.range) : chain_reduce(s, r, i, segment.range);
}

}  // namespace ringfold::steps
