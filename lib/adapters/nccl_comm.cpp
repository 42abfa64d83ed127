// libnccl.so.2: communicators, from their making to their end, and groups.
#include <cstring>
#include <span>
#include <string>
#include <utility>

#include "lib/adapters/nccl_state.h"
#include "lib/base/base.h"

namespace ringfold::nccl {
namespace {

// An id of this process's environment begins so, instead of as Rendezvous::unique_id makes it.
constexpr std::string_view kFixedId = "NCCL_COMM_ID=";

// What every communicator of this library is made with: NCCL's numbers and its patience, unless the
// environment says otherwise.
Options options() {
  Options options;
  if (!setting("RINGFOLD_NUMERICS")) options.numerics = Numerics::nccl;
  if (!setting("RINGFOLD_TIMEOUT")) options.timeout = Nanoseconds::max();
  return options;
}

Status make_id(ncclUniqueId* out) {
  if (out == nullptr) return null_argument("uniqueId");
  if (const char* address = std::getenv("NCCL_COMM_ID"); address != nullptr && *address != '\0') {
    const std::string text = std::string(kFixedId) + address;
    const size_t colon = std::string_view(address).find_last_of(':');
    if (text.size() >= sizeof out->internal || colon == std::string_view::npos || colon == 0)
      return invalid(fmt::format("NCCL_COMM_ID=\"{}\": expected host:port or [v6]:port", address));
    *out = {};
    text.copy(out->internal, text.size());
    return {};
  }
  const auto id = Rendezvous::unique_id();
  if (id.ok()) std::memcpy(out->internal, id->bytes.data(), sizeof out->internal);
  return id.status();
}

Result<Rendezvous> rendezvous(const ncclUniqueId& id, int rank, int size) {
  const std::string_view bytes(id.internal, sizeof id.internal);
  if (!bytes.starts_with(kFixedId)) {
    UniqueId opaque;
    std::memcpy(opaque.bytes.data(), id.internal, opaque.bytes.size());
    return Rendezvous::from_id(opaque, rank, size);
  }
  Rendezvous where;
  where.rank = rank;
  where.size = size;
  where.coordinator = std::string(id.internal + kFixedId.size());
  where.secret = setting("RINGFOLD_SECRET").value_or("");
  where.source = "NCCL_COMM_ID";
  return where;
}

// Whether the communicator shall block; `inherited` where the configuration does not say.
Result<bool> blocks(const ncclConfig_t* config, bool inherited) {
  if (config == nullptr) return inherited;
  if (config->size < kLeastConfig || config->magic != kMagic)
    return invalid(
        fmt::format("the configuration (size {}, magic {:#x}) was not initialised with "
                    "NCCL_CONFIG_INITIALIZER",
                    config->size, config->magic));
  // Everything behind `blocking` tunes what NCCL does on the device: nothing here depends on it.
  if (config->blocking == kUndefined) return inherited;
  if (config->blocking == 0 || config->blocking == 1) return config->blocking == 1;
  return invalid(fmt::format("config.blocking is {}: expected 0 or 1", config->blocking));
}

// What making a communicator is to be called with.
struct Making {
  ncclComm_t* out;
  int size, rank;
  const ncclUniqueId* id;
  const ncclConfig_t* config;
  Place place;
};

Result<Job> job_to_make(const Making& making) {
  if (making.out == nullptr) return null_argument("comm");
  *making.out = nullptr;
  if (making.id == nullptr) return null_argument("commId");
  if (making.size < 1 || making.rank < 0 || making.rank >= making.size)
    return invalid(
        fmt::format("rank {} of {}: expected 0 <= rank < nranks", making.rank, making.size));
  const auto blocking = blocks(making.config, true);
  if (!blocking.ok()) return blocking.status();
  const auto where = rendezvous(*making.id, making.rank, making.size);
  if (!where.ok()) return where.status();
  auto comm = std::make_shared<Comm>(*blocking, making.place);
  *making.out = comms().add(comm);
  Job job;
  job.order = job.target = comm;
  job.out = making.out;
  job.run = [comm, where = *where] {
    const InPlace in(comm->place);  // so that its device is got ready now
    auto made = Communicator::create(where, options());
    comm->finish(made);
    return made.status();
  };
  return job;
}

ncclResult_t make(const Making& making) {
  auto job = job_to_make(making);
  return job.ok() ? submit(std::move(*job)) : refuse(job.status());
}

// A communicator made from another one. `derive` blocks; it runs on a thread of its own in a group.
ncclResult_t derive(const CommPointer& parent, ncclComm_t* out, const ncclConfig_t* config,
                    bool member, std::function<Result<Communicator>()> derive) {
  const auto blocking = blocks(config, parent->blocking);
  if (!blocking.ok()) return refuse(blocking.status(), parent.get());
  auto child = std::make_shared<Comm>(*blocking, parent->place);
  *out = member ? comms().add(child) : nullptr;
  Job job;
  job.order = parent;
  job.target = child;
  job.out = out;
  job.run = [child, derive = std::move(derive)] {
    const InPlace in(child->place);
    auto made = derive();
    child->finish(made);
    return made.status();
  };
  return submit(std::move(job));
}

ncclResult_t init_all(ncclComm_t* out, int ranks, const int* devices) {
  if (out == nullptr) return refuse(null_argument("comm"));
  if (ranks < 1) return refuse(invalid(fmt::format("{} devices: expected 1 or more", ranks)));
  std::vector<Place> places;
  for (int r = 0; r < ranks; ++r) {
    const auto place = place_of(devices != nullptr ? devices[r] : r);
    if (!place.ok()) return refuse(place.status());
    places.push_back(*place);
  }
  ncclUniqueId id;
  if (const Status made = make_id(&id); !made.ok()) return refuse(made);
  (void)group_start();
  for (int r = 0; r < ranks; ++r)
    (void)make({out + r, ranks, r, &id, nullptr, places[static_cast<size_t>(r)]});
  return group_end();
}

ncclResult_t split(ncclComm_t comm, int color, int key, ncclComm_t* out,
                   const ncclConfig_t* config) {
  const auto parent = comms().find(comm);
  if (!parent.ok()) return refuse(parent.status());
  if (out == nullptr) return refuse(null_argument("newcomm"), parent->get());
  *out = nullptr;
  if (color < kNoColor)
    return refuse(
        invalid(fmt::format("color {}: expected 0 or more, or NCCL_SPLIT_NOCOLOR", color)),
        parent->get());
  auto communicator = (*parent)->ready();
  if (!communicator.ok()) return refuse(communicator.status(), parent->get());
  return derive(*parent, out, config, color != kNoColor,
                [whole = *communicator, color, key]() mutable { return whole.split(color, key); });
}

ncclResult_t shrink(ncclComm_t comm, std::span<const int> exclude, ncclComm_t* out,
                    const ncclConfig_t* config, int flags) {
  const auto parent = comms().find(comm);
  if (!parent.ok()) return refuse(parent.status());
  if (out == nullptr) return refuse(null_argument("newcomm"), parent->get());
  *out = nullptr;
  if (exclude.empty())
    return refuse(invalid("ncclCommShrink: no rank to exclude was given"), parent->get());
  if ((flags & ~kShrinkAbort) != 0)
    return refuse(invalid(fmt::format("shrinkFlags {:#x}: expected NCCL_SHRINK_DEFAULT or "
                                      "NCCL_SHRINK_ABORT",
                                      flags)),
                  parent->get());
  const bool abort = (flags & kShrinkAbort) != 0;
  auto communicator = abort ? (*parent)->whatever_failed() : (*parent)->ready();
  if (!communicator.ok()) return refuse(communicator.status(), parent->get());
  return derive(*parent, out, config, true,
                [whole = *communicator, abort,
                 gone = std::vector<int>(exclude.begin(), exclude.end())]() mutable {
                  if (abort) whole.abort("aborted to be shrunk");
                  return whole.shrink(gone);
                });
}

// Calls `call` with the communicator behind a handle; a null `out` is refused.
template <class Out, class Call>
ncclResult_t ask(ncclComm_t comm, Out* out, const char* name, Call call) {
  const auto found = comms().find(comm);
  if (!found.ok()) return answer(found.status());
  if (out == nullptr) return answer(null_argument(name), found->get());
  return answer(call(**found), found->get());
}

ncclResult_t give_up(ncclComm_t comm, bool abort) {
  if (comm == nullptr) return ncclSuccess;  // as NCCL does
  const auto found = comms().find(comm);
  if (!found.ok()) return answer(found.status());
  (void)comms().remove(comm);
  if (abort) (*found)->abort("ncclCommAbort was called");
  (*found)->release();
  return ncclSuccess;
}

}  // namespace

RINGFOLD_NCCL_EXPORT(ncclResult_t, GetUniqueId, (ncclUniqueId * uniqueId)) {
  return answer(make_id(uniqueId));
}

RINGFOLD_NCCL_EXPORT(ncclResult_t, CommInitRank,
                     (ncclComm_t * comm, int nranks, ncclUniqueId commId, int rank)) {
  return make({comm, nranks, rank, &commId, nullptr, current_place()});
}

RINGFOLD_NCCL_EXPORT(ncclResult_t, CommInitRankConfig,
                     (ncclComm_t * comm, int nranks, ncclUniqueId commId, int rank,
                      ncclConfig_t* config)) {
  return make({comm, nranks, rank, &commId, config, current_place()});
}

// One coordinator serves all: the first id is enough.
RINGFOLD_NCCL_EXPORT(ncclResult_t, CommInitRankScalable,
                     (ncclComm_t * newcomm, int nranks, int myrank, int nId, ncclUniqueId* commIds,
                      ncclConfig_t* config)) {
  if (nId < 1 || nId > nranks)
    return refuse(invalid(fmt::format("{} unique ids for {} ranks", nId, nranks)));
  return make({newcomm, nranks, myrank, commIds, config, current_place()});
}

RINGFOLD_NCCL_EXPORT(ncclResult_t, CommInitAll, (ncclComm_t * comm, int ndev, const int* devlist)) {
  return init_all(comm, ndev, devlist);
}

RINGFOLD_NCCL_EXPORT(ncclResult_t, CommSplit,
                     (ncclComm_t comm, int color, int key, ncclComm_t* newcomm,
                      ncclConfig_t* config)) {
  return split(comm, color, key, newcomm, config);
}

RINGFOLD_NCCL_EXPORT(ncclResult_t, CommShrink,
                     (ncclComm_t comm, int* excludeRanksList, int excludeRanksCount,
                      ncclComm_t* newcomm, ncclConfig_t* config, int shrinkFlags)) {
  if (excludeRanksCount < 0 || (excludeRanksCount > 0 && excludeRanksList == nullptr))
    return refuse(invalid(fmt::format("{} ranks to exclude at {}", excludeRanksCount,
                                      static_cast<const void*>(excludeRanksList))));
  return shrink(comm, {excludeRanksList, static_cast<size_t>(excludeRanksCount)}, newcomm, config,
                shrinkFlags);
}

RINGFOLD_NCCL_EXPORT(ncclResult_t, CommFinalize, (ncclComm_t comm)) {
  const auto found = comms().find(comm);
  if (!found.ok()) return refuse(found.status());
  if (const auto ready = (*found)->ready(); !ready.ok())
    return refuse(ready.status(), found->get());
  Job job;
  job.order = job.target = *found;
  job.run = [on = *found] { return on->finalize(); };
  return submit(std::move(job));
}

RINGFOLD_NCCL_EXPORT(ncclResult_t, CommDestroy, (ncclComm_t comm)) {
  return give_up(comm, false);
}

RINGFOLD_NCCL_EXPORT(ncclResult_t, CommAbort, (ncclComm_t comm)) {
  return give_up(comm, true);
}

RINGFOLD_NCCL_EXPORT(ncclResult_t, CommRevoke, (ncclComm_t comm, int revokeFlags)) {
  const auto found = comms().find(comm);
  if (!found.ok()) return answer(found.status());
  if (revokeFlags != 0)
    return answer(invalid(fmt::format("revokeFlags {}: expected 0", revokeFlags)), found->get());
  (*found)->revoke();
  return ncclSuccess;
}

RINGFOLD_NCCL_EXPORT(ncclResult_t, CommGetAsyncError, (ncclComm_t comm, ncclResult_t* asyncError)) {
  return ask(comm, asyncError, "asyncError", [&](Comm& found) {
    const auto status = found.progress();
    *asyncError = status ? answer(*status, &found) : ncclInProgress;
    return Status();
  });
}

RINGFOLD_NCCL_EXPORT(ncclResult_t, CommCount, (const ncclComm_t comm, int* count)) {
  return ask(comm, count, "count", [&](Comm& found) {
    const auto communicator = found.whatever_failed();
    if (communicator.ok()) *count = communicator->size();
    return communicator.status();
  });
}

RINGFOLD_NCCL_EXPORT(ncclResult_t, CommUserRank, (const ncclComm_t comm, int* rank)) {
  return ask(comm, rank, "rank", [&](Comm& found) {
    const auto communicator = found.whatever_failed();
    if (communicator.ok()) *rank = communicator->rank();
    return communicator.status();
  });
}

RINGFOLD_NCCL_EXPORT(ncclResult_t, CommCuDevice, (const ncclComm_t comm, int* device)) {
  return ask(comm, device, "device", [&](Comm& found) {
    *device = found.place.device;
    return Status();
  });
}

RINGFOLD_NCCL_EXPORT(const char*, GetLastError, (ncclComm_t comm)) {
  thread_local std::string text;  // what was returned last stays valid until the next call
  const auto found = comm != nullptr ? comms().find(comm) : Result<CommPointer>(Status());
  text = comm != nullptr && found.ok() ? (*found)->last_error() : "";
  if (text.empty()) text = latest_error();
  return text.c_str();
}

RINGFOLD_NCCL_EXPORT(ncclResult_t, GroupStart, ()) {
  return group_start();
}

RINGFOLD_NCCL_EXPORT(ncclResult_t, GroupEnd, ()) {
  return group_end();
}

RINGFOLD_NCCL_EXPORT(ncclResult_t, GroupSimulateEnd, (ncclSimInfo_t * simInfo)) {
  if (simInfo != nullptr && simInfo->magic != kSimInfoMagic)
    return group_discard(invalid("simInfo was not initialised with NCCL_SIM_INFO_INITIALIZER"));
  return group_discard(
      usage("ncclGroupSimulateEnd is not offered by ringfold; the group is discarded"));
}

}  // namespace ringfold::nccl
