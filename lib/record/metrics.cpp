// The counters and records of this process, and the text that Prometheus scrapes.
#include <fmt/format.h>

#include <array>

#include "lib/record/picture.h"
#include "ringfold/record.h"

namespace ringfold {
namespace {

using record::CommunicatorView;

void add(Counters& sum, const Counters& one) {
  sum.operations += one.operations;
  sum.finished += one.finished;
  sum.bytes_sent += one.bytes_sent;
  sum.bytes_received += one.bytes_received;
  sum.waits += one.waits;
  sum.wait_seconds += one.wait_seconds;
  sum.failures += one.failures;
}

// Of communicators that are gone.
Counters counters_of(const record::Totals& gone) {
  using record::get;
  return {get(gone.operations), get(gone.finished), get(gone.sent),
          get(gone.received),   get(gone.waits),    static_cast<double>(get(gone.waited)) * 1e-9,
          get(gone.failures)};
}

// `gone`: what communicators that are no more have counted.
std::vector<CommunicatorView> all_views(Counters* gone) {
  std::vector<CommunicatorView> views;
  const record::Page* const page =
      record::visit([&](const record::Slot& slot) { views.push_back(record::decode(slot)); });
  if (page != nullptr) *gone = counters_of(page->gone);
  return views;
}

// Parts count for the communicators that they belong to.
std::vector<CommunicatorView> whole_views(Counters* gone) {
  std::vector<CommunicatorView> all = all_views(gone), whole;
  for (const CommunicatorView& view : all)
    if (!view.part_of) whole.push_back(view);
  for (const CommunicatorView& part : all) {
    if (!part.part_of) continue;
    for (CommunicatorView& view : whole)
      if (view.world == part.world && view.id == *part.part_of)
        record::add_part(&view.counters, part.counters);
  }
  return whole;
}

struct Metric {
  const char* name;
  const char* help;
  double (*value)(const Counters&);
};

constexpr std::array kMetrics = {
    Metric{"operations_total", "Operations called.",
           [](const Counters& c) { return static_cast<double>(c.operations); }},
    Metric{"operations_finished_total", "Operations that are over and went well.",
           [](const Counters& c) { return static_cast<double>(c.finished); }},
    Metric{"sent_bytes_total", "Payload bytes sent.",
           [](const Counters& c) { return static_cast<double>(c.bytes_sent); }},
    Metric{"received_bytes_total", "Payload bytes received.",
           [](const Counters& c) { return static_cast<double>(c.bytes_received); }},
    Metric{"waits_total", "Times that a thread waited for an operation.",
           [](const Counters& c) { return static_cast<double>(c.waits); }},
    Metric{"wait_seconds_total", "Seconds that threads waited for operations.",
           [](const Counters& c) { return c.wait_seconds; }},
    Metric{"failures_total", "Communicators that failed.",
           [](const Counters& c) { return static_cast<double>(c.failures); }},
};

}  // namespace

Counters process_counters() {
  Counters sum;
  for (const CommunicatorView& view : whole_views(&sum)) add(sum, view.counters);
  return sum;
}

std::string process_record() {
  Counters gone;
  std::string text = "[";
  const char* separator = "\n";
  for (const CommunicatorView& view : all_views(&gone)) {
    if (view.world == 0) continue;
    text += separator + record::to_json(view, steady_clock().now());
    separator = ",\n";
  }
  return text + "]\n";
}

std::string prometheus_text() {
  Counters gone;
  const auto views = whole_views(&gone);
  // One rank's communicators come and go by the hundred: together they are "alone".
  Counters alone;
  for (const CommunicatorView& view : views)
    if (view.world == 0) add(alone, view.counters);
  std::string text;
  for (const Metric& metric : kMetrics) {
    text += fmt::format("# HELP ringfold_{} {}\n# TYPE ringfold_{} counter\n", metric.name,
                        metric.help, metric.name);
    for (const CommunicatorView& view : views) {
      if (view.world == 0) continue;
      text += fmt::format(
          "ringfold_{}{{communicator=\"{}\",world=\"{:016x}\",rank=\"{}\",size=\"{}\","
          "transport=\"{}\"}} {:.17g}\n",
          metric.name, view.id, view.world, view.rank, view.size, view.transport,
          metric.value(view.counters));
    }
    text += fmt::format("ringfold_{}{{communicator=\"alone\"}} {:.17g}\n", metric.name,
                        metric.value(alone));
    text += fmt::format("ringfold_{}{{communicator=\"gone\"}} {:.17g}\n", metric.name,
                        metric.value(gone));
  }
  return text;
}

}  // namespace ringfold
