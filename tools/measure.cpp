#include "tools/measure.h"

#include <fmt/format.h>

#include <array>

#include "kernels/reduce.h"
#include "tools/bench_ranks.h"
#include "tools/command.h"
#include "tools/contest.h"

namespace ringfold::tools {
namespace {

constexpr int kRounds = 5;
constexpr std::array<size_t, 7> kSizes = {8,       1 << 10, 16 << 10, 64 << 10,
                                          1 << 18, 1 << 20, 4 << 20};

// Seconds a byte: what has just arrived, and so is in the caches, onto data out of more memory than
// these have. The least, for the ranks of a host measure at the same time.
double measure_gamma() {
  constexpr size_t kBytes = size_t{32} << 20;
  const size_t piece = kMaxRemotePieceBytes / sizeof(float);
  std::vector<float> here(kBytes / sizeof(float), 1), arrived(piece, 1);
  double least = 1;
  for (size_t at = 0; at < here.size(); at += piece) {
    ReduceCall call;
    call.a = call.out = &here[at];
    call.b = arrived.data();
    call.count = piece;
    const double start = seconds_now();
    reduce_host(call);
    least = std::min(least, seconds_now() - start);
  }
  return least / static_cast<double>(kMaxRemotePieceBytes);
}

// Links of one class: which of the ranks take part, each group for itself.
class LinkClass {
 public:
  // `color`: negative for a rank that takes no part; `ranks`: in each group.
  LinkClass(Communicator& base, std::vector<Contestant>& all, int color, int ranks)
      : base_(base), ranks_(ranks) {
    for (Contestant& one : all) {
      auto part = one.comm.split(color, base.rank());
      must(part.status());
      contestants_.push_back({one.algorithm, std::move(*part), {}, {}});
    }
  }

  LinkCost measure(double gamma) {
    for (const size_t bytes : kSizes) {
      hold(base_, contestants_, bytes, kRounds);
      for (const Contestant& one : contestants_) {
        // Who takes no part does not know the pieces.
        const double piece = largest(base_, static_cast<double>(one.report.piece_bytes));
        points_.push_back(
            {*one.algorithm, ranks_, bytes, static_cast<size_t>(piece), undisturbed(one.seconds)});
      }
    }
    return fit(points_, gamma);
  }

  // Measured beside predicted.
  [[nodiscard]] Json table(const Machine& machine) const {
    Json rows = Json::array();
    for (const Point& p : points_) {
      const double says = predicted(p.algorithm, p.ranks, p.bytes, p.piece_bytes, machine);
      rows.push_back({{"algorithm", name(p.algorithm)},
                      {"ranks", p.ranks},
                      {"bytes", p.bytes},
                      {"measured", p.seconds},
                      {"predicted", says}});
    }
    return rows;
  }

 private:
  Communicator& base_;
  const int ranks_;
  std::vector<Contestant> contestants_;
  std::vector<Point> points_;
};

Json in_json(const Machine& machine, bool local, bool remote) {
  const auto link = [](const LinkCost& cost) -> Json {
    return {{"alpha", cost.alpha}, {"beta", cost.beta}};
  };
  Json json;
  if (local) json["local"] = link(machine.local);
  if (remote) json["remote"] = link(machine.remote);
  json["gamma"] = machine.gamma;
  json["per_host"] = machine.per_host;
  return json;
}

void measure(Communicator& base, Json* out) {
  const Layout layout = layout_of(base);
  std::vector<Contestant> all;
  for (const Algorithm algorithm : ways(false)) {
    auto comm = told(base, algorithm);
    must(comm.status());
    all.push_back({algorithm, std::move(*comm), {}, {}});
  }
  const auto at_home = [&](const std::vector<int>& ranks) {
    return std::ranges::find(ranks, base.rank()) != ranks.end();
  };
  const auto here = std::ranges::find_if(layout.hosts, at_home);
  const auto place = std::ranges::find(*here, base.rank()) - here->begin();
  const auto several = [](const std::vector<int>& ranks) { return ranks.size() > 1; };
  const bool local = std::ranges::any_of(layout.hosts, several), remote = layout.hosts.size() > 1;
  Machine machine;
  machine.per_host = layout.per_host;
  machine.gamma = total(base, measure_gamma()) / base.size();
  Json tables = Json::object();
  if (local) {  // pairs, on all hosts at once
    const bool takes_part = here->size() > 1 && place < 2;
    LinkClass links(base, all, takes_part ? static_cast<int>(here - layout.hosts.begin()) : -1, 2);
    machine.local = links.measure(machine.gamma);
    tables["local"] = links.table({machine.local, machine.local, machine.gamma});
  }
  if (remote) {  // a rank of each host
    LinkClass links(base, all, place == 0 ? 0 : -1, static_cast<int>(layout.hosts.size()));
    machine.remote = links.measure(machine.gamma);
    tables["remote"] = links.table({machine.remote, machine.remote, machine.gamma});
  }
  if (base.rank() == 0)
    *out = {{"machine", in_json(machine, local, remote)}, {"fit", std::move(tables)}};
}

}  // namespace

int measure_machine(const Rendezvous& where, Json* out) {
  const auto complain = [&](const Status& status) {
    return fail(kFailed, fmt::format("doctor: rank {}: {}", where.rank, status.to_string()));
  };
  auto base = Communicator::create(where);
  if (!base.ok()) return complain(base.status());
  try {
    measure(*base, out);
    must(base->barrier().wait());
  } catch (const OperationFailed& failed) {
    return complain(failed.status);
  }
  return kSuccess;
}

}  // namespace ringfold::tools
