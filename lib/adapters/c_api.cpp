// The C interface but for the collectives: numbers and handles in, calls of the C++ interface,
// codes and texts out.
#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lib/adapters/c_common.h"
#include "ringfold/average.h"
#include "ringfold/c.h"
#include "ringfold/communicator.h"
#include "ringfold_config.h"

namespace ringfold::c {
namespace {

static_assert(RINGFOLD_INTERNAL == static_cast<int>(Code::internal));
static_assert(RINGFOLD_F8E5M2 == static_cast<int>(DType::f8e5m2) && kDTypes == 12);
static_assert(RINGFOLD_ALGORITHM_RING == static_cast<int>(Algorithm::ring) + 1);
static_assert(RINGFOLD_ALGORITHM_DIRECT == static_cast<int>(Algorithm::direct) + 1);
static_assert(kAlgorithms == RINGFOLD_ALGORITHM_DIRECT);
static_assert(sizeof(ringfold_unique_id) == sizeof(UniqueId));

Nanoseconds to_nanoseconds(double seconds) {
  // Centuries from now and beyond are never.
  if (seconds > 9e9) return Nanoseconds::max();
  return Nanoseconds(static_cast<int64_t>(seconds * 1e9));
}

Result<std::optional<Nanoseconds>> to_timeout(const char* name, double seconds) {
  if (!(seconds >= 0)) {
    return invalid(
        fmt::format("{} is {}, accepted are seconds > 0, or 0 for the default", name, seconds));
  }
  if (seconds == 0) return std::optional<Nanoseconds>();
  return std::optional(to_nanoseconds(seconds));
}

Result<Options> to_options(const ringfold_options& given) {
  Options options;
  const auto timeout = to_timeout("options.timeout", given.timeout);
  if (!timeout.ok()) return timeout.status();
  options.timeout = *timeout;
  options.piece_bytes = given.piece_bytes;
  if (given.algorithm < 0 || given.algorithm > kAlgorithms) {
    return invalid(fmt::format("options.algorithm is {}, accepted are 0 (automatic) to {}",
                               given.algorithm, kAlgorithms));
  }
  if (given.algorithm != RINGFOLD_ALGORITHM_AUTO) {
    options.algorithm = static_cast<Algorithm>(given.algorithm - 1);
  }
  if (given.transports != nullptr) options.transports = given.transports;
  return options;
}

// Meets the other ranks at `where` and hands the communicator out.
Status create(ringfold_comm_t* comm, Result<Rendezvous> where, const ringfold_options* given) {
  if (!where.ok()) return where.status();
  const ringfold_options chosen = given != nullptr ? *given : ringfold_options{};
  const auto start_timeout = to_timeout("options.start_timeout", chosen.start_timeout);
  if (!start_timeout.ok()) return start_timeout.status();
  if (start_timeout->has_value()) where->timeout = *start_timeout;
  const Result<Options> options = to_options(chosen);
  if (!options.ok()) return options.status();
  Result<Communicator> made = Communicator::create(*where, *options);
  if (made.ok()) *comm = communicators().add(*made);
  return made.status();
}

Result<std::vector<Gradient>> to_gradients(const ringfold_gradient* given, size_t tensors) {
  if (given == nullptr && tensors > 0) return null_pointer("gradients");
  std::vector<Gradient> gradients;
  gradients.reserve(tensors);
  for (size_t i = 0; i < tensors; ++i) {
    const Result<DType> type = to_dtype(given[i].type);
    if (!type.ok()) {
      return invalid(fmt::format("gradients[{}]: {}", i, type.status().message()));
    }
    gradients.push_back({given[i].data, given[i].count, *type});
  }
  return gradients;
}

template <class Average>
ringfold_status average(ringfold_comm_t comm, const ringfold_gradient* given, size_t tensors,
                        Average call) {
  const Status may = may_block();
  if (!may.ok()) return answer(may);
  return answer(with(comm, [&](Communicator& found) {
    const Result<std::vector<Gradient>> gradients = to_gradients(given, tensors);
    return gradients.ok() ? call(found, *gradients) : gradients.status();
  }));
}

// The groups of this thread, the innermost last. Those that the thread leaves open are discarded
// with it. REQUIRES that a Group has been made before: what the library keeps for groups on this
// thread must outlive the list.
std::vector<std::unique_ptr<Group>>& groups() {
  thread_local std::vector<std::unique_ptr<Group>> open;
  return open;
}

// Takes the innermost group off the list; null if none is open.
std::unique_ptr<Group> take_group() {
  if (open_groups == 0) return nullptr;
  --open_groups;
  auto group = std::move(groups().back());
  groups().pop_back();
  return group;
}

Status no_group() {
  return invalid("no group is open on this thread: ringfold_group_begin comes first");
}

Status copy_text(const std::string& text, char* out, size_t bytes) {
  if (text.size() + 1 > bytes) {
    return invalid(fmt::format("the text needs {} bytes, given are {}", text.size() + 1, bytes));
  }
  out[text.copy(out, text.size())] = '\0';
  return {};
}

}  // namespace
}  // namespace ringfold::c

using namespace ringfold;
using namespace ringfold::c;

extern "C" {

const char* ringfold_version(void) {
  return RINGFOLD_VERSION;
}

const char* ringfold_last_error(void) {
  return last_error.c_str();
}

// ---- Memory ----

ringfold_status ringfold_mem_alloc(void** memory, size_t bytes) {
  if (memory == nullptr) return answer(null_pointer("memory"));
  const Result<void*> made = allocate_memory(bytes);
  *memory = made.ok() ? *made : nullptr;
  return answer(made.status());
}

ringfold_status ringfold_mem_free(void* memory) {
  return answer(free_memory(memory));
}

ringfold_status ringfold_register(ringfold_comm_t comm, const void* memory, size_t bytes) {
  return answer(
      with(comm, [&](Communicator& found) { return found.register_memory(memory, bytes); }));
}

// ---- Communicators ----

ringfold_status ringfold_init(ringfold_comm_t* comm, const ringfold_options* options) {
  if (comm == nullptr) return answer(null_pointer("comm"));
  const Status may = may_block();
  return answer(may.ok() ? create(comm, Rendezvous::from_environment(), options) : may);
}

ringfold_status ringfold_get_unique_id(ringfold_unique_id* id) {
  if (id == nullptr) return answer(null_pointer("id"));
  const Result<UniqueId> made = Rendezvous::unique_id();
  if (made.ok()) std::copy(made->bytes.begin(), made->bytes.end(), id->bytes);
  return answer(made.status());
}

ringfold_status ringfold_init_id(ringfold_comm_t* comm, ringfold_unique_id id, int rank, int size,
                                 const ringfold_options* options) {
  if (comm == nullptr) return answer(null_pointer("comm"));
  const Status may = may_block();
  if (!may.ok()) return answer(may);
  UniqueId opaque;
  std::copy(std::begin(id.bytes), std::end(id.bytes), opaque.bytes.begin());
  return answer(create(comm, Rendezvous::from_id(opaque, rank, size), options));
}

ringfold_status ringfold_init_coordinator(ringfold_comm_t* comm, const char* coordinator,
                                          const char* secret, int rank, int size,
                                          const ringfold_options* options) {
  if (comm == nullptr) return answer(null_pointer("comm"));
  if (coordinator == nullptr) return answer(null_pointer("coordinator"));
  const Status may = may_block();
  if (!may.ok()) return answer(may);
  Rendezvous where;
  where.rank = rank;
  where.size = size;
  where.coordinator = coordinator;
  if (secret != nullptr) where.secret = secret;
  where.source = "ringfold_init_coordinator";
  return answer(create(comm, where, options));
}

ringfold_status ringfold_destroy(ringfold_comm_t comm) {
  return answer(communicators().remove(comm));
}

ringfold_status ringfold_rank(ringfold_comm_t comm, int* rank) {
  if (rank == nullptr) return answer(null_pointer("rank"));
  return answer(with(comm, [&](Communicator& found) {
    *rank = found.rank();
    return Status();
  }));
}

ringfold_status ringfold_size(ringfold_comm_t comm, int* size) {
  if (size == nullptr) return answer(null_pointer("size"));
  return answer(with(comm, [&](Communicator& found) {
    *size = found.size();
    return Status();
  }));
}

ringfold_status ringfold_split(ringfold_comm_t comm, int color, int key, ringfold_comm_t* out) {
  if (out == nullptr) return answer(null_pointer("out"));
  const Status may = may_block();
  if (!may.ok()) return answer(may);
  return answer(with(comm, [&](Communicator& found) {
    Result<Communicator> part = found.split(color, key);
    if (part.ok()) *out = part->valid() ? communicators().add(*part) : nullptr;
    return part.status();
  }));
}

ringfold_status ringfold_grow(ringfold_comm_t comm, ringfold_unique_id id, int newcomers,
                              ringfold_comm_t* out) {
  if (out == nullptr) return answer(null_pointer("out"));
  const Status may = may_block();
  if (!may.ok()) return answer(may);
  UniqueId opaque;
  std::copy(std::begin(id.bytes), std::end(id.bytes), opaque.bytes.begin());
  return answer(with(comm, [&](Communicator& found) {
    Result<Communicator> grown = found.grow(opaque, newcomers);
    if (grown.ok()) *out = communicators().add(*grown);
    return grown.status();
  }));
}

ringfold_status ringfold_shrink(ringfold_comm_t comm, const int* exclude, size_t count,
                                ringfold_comm_t* out) {
  if (out == nullptr) return answer(null_pointer("out"));
  if (exclude == nullptr && count > 0) return answer(null_pointer("exclude"));
  const Status may = may_block();
  if (!may.ok()) return answer(may);
  return answer(with(comm, [&](Communicator& found) {
    Result<Communicator> smaller = found.shrink({exclude, count});
    if (smaller.ok()) *out = communicators().add(*smaller);
    return smaller.status();
  }));
}

ringfold_status ringfold_abort(ringfold_comm_t comm, const char* why) {
  return answer(with(comm, [&](Communicator& found) {
    if (why != nullptr) {
      found.abort(why);
    } else {
      found.abort();
    }
    return Status();
  }));
}

ringfold_status ringfold_health(ringfold_comm_t comm) {
  return answer(with(comm, [](Communicator& found) { return found.health(); }));
}

ringfold_status ringfold_bytes_sent(ringfold_comm_t comm, uint64_t* bytes) {
  if (bytes == nullptr) return answer(null_pointer("bytes"));
  return answer(with(comm, [&](Communicator& found) {
    *bytes = found.bytes_sent();
    return Status();
  }));
}

ringfold_status ringfold_transport(ringfold_comm_t comm, char* name, size_t bytes) {
  if (name == nullptr) return answer(null_pointer("name"));
  return answer(
      with(comm, [&](Communicator& found) { return copy_text(found.transport(), name, bytes); }));
}

// ---- Work ----

ringfold_status ringfold_work_wait(ringfold_work_t work, double timeout) {
  const Works::Use found(works(), work);
  if (!found.ok()) return answer(found.status());
  if (std::isnan(timeout)) {
    return answer(invalid("timeout is not a number, accepted are seconds, or negative for none"));
  }
  if (!found->done()) {
    const Status may = may_block();
    if (!may.ok()) return answer(may);
  }
  return answer(found->wait(timeout < 0 ? Nanoseconds::max() : to_nanoseconds(timeout)));
}

ringfold_status ringfold_work_done(ringfold_work_t work, int* done) {
  if (done == nullptr) return answer(null_pointer("done"));
  const Works::Use found(works(), work);
  if (found.ok()) *done = found->done() ? 1 : 0;
  return answer(found.status());
}

ringfold_status ringfold_work_then(ringfold_work_t work,
                                   void (*call)(void* context, ringfold_status status,
                                                const char* why),
                                   void* context) {
  if (call == nullptr) return answer(null_pointer("call"));
  Result<Work> found = works().find(work);
  if (!found.ok()) return answer(found.status());
  found->then([call, context](const Status& status) {
    call(context, static_cast<ringfold_status>(status.code()), status.message().c_str());
  });
  return RINGFOLD_OK;
}

ringfold_status ringfold_work_report(ringfold_work_t work, ringfold_report* report) {
  if (report == nullptr) return answer(null_pointer("report"));
  const Works::Use found(works(), work);
  if (!found.ok()) return answer(found.status());
  const Report from = found->report();
  ringfold_report to{};
  to.algorithm = static_cast<int>(from.algorithm) + 1;
  from.transport.copy(to.transport, sizeof to.transport - 1);
  to.steps = from.steps;
  to.bytes_sent = from.bytes_sent;
  to.bytes_model = from.bytes_model;
  to.bus_factor = from.bus_factor;
  to.chunk_bytes = from.chunk_bytes;
  to.piece_bytes = from.piece_bytes;
  to.predicted_seconds = from.predicted_seconds;
  to.measured_seconds = from.measured_seconds;
  *report = to;
  return RINGFOLD_OK;
}

ringfold_status ringfold_work_free(ringfold_work_t work) {
  return answer(works().remove(work));
}

// ---- Groups ----

ringfold_status ringfold_group_begin(void) {
  auto group = std::make_unique<Group>();
  groups().push_back(std::move(group));
  ++open_groups;
  return RINGFOLD_OK;
}

ringfold_status ringfold_group_end(void) {
  const std::unique_ptr<Group> group = take_group();
  if (!group) return answer(no_group());
  Work all = group->submit();
  return open_groups == 0 ? answer(all.wait()) : RINGFOLD_OK;
}

ringfold_status ringfold_group_end_async(ringfold_work_t* work) {
  if (work == nullptr) return answer(null_pointer("work"));
  *work = nullptr;
  const std::unique_ptr<Group> group = take_group();
  return group ? async(work, [&] { return group->submit(); }) : answer(no_group());
}

ringfold_status ringfold_group_discard(void) {
  return take_group() ? RINGFOLD_OK : answer(no_group());
}

// ---- Gradients ----

ringfold_status ringfold_average_gradients(ringfold_comm_t comm, const ringfold_gradient* gradients,
                                           size_t tensors) {
  return average(comm, gradients, tensors, [](Communicator& found, const auto& all) {
    return average_gradients(found, all);
  });
}

ringfold_status ringfold_average_gradients_weighted(ringfold_comm_t comm,
                                                    const ringfold_gradient* gradients,
                                                    size_t tensors, double weight) {
  return average(comm, gradients, tensors, [&](Communicator& found, const auto& all) {
    return average_gradients(found, all, weight);
  });
}

}  // extern "C"
