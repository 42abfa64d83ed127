#include "ringfold/communicator.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <thread>

#include "kernels/floats.h"
#include "lib/comm/communicator_impl.h"
#include "lib/comm/two_level.h"
#include "lib/comm/unique_id.h"
#include "lib/engine/matcher.h"

namespace ringfold {
namespace {

// x as the type holds it.
double rounded(DType type, double x) {
  const auto narrow = static_cast<float>(x);
  switch (type) {
    case DType::f16:
      return to_f32(from_f32<F16>(narrow));
    case DType::bf16:
      return to_f32(from_f32<BF16>(narrow));
    case DType::f8e4m3:
      return to_f32(from_f32<F8E4M3>(narrow));
    case DType::f8e5m2:
      return to_f32(from_f32<F8E5M2>(narrow));
    case DType::f32:
      return narrow;
    case DType::f64:
    case DType::i8:
    case DType::u8:
    case DType::i32:
    case DType::u32:
    case DType::i64:
    case DType::u64:
      break;
  }
  return x;
}

Status no_communicator() {
  return {Code::invalid_argument, "this Communicator is empty: create() or split() makes one"};
}

using Impl = Communicator::Impl;

}  // namespace

// ---- making and ending ------------------------------------------------------------------------

Result<Communicator> Communicator::create(const Rendezvous& where, const Options& options) {
  auto settled = settle(options);
  if (!settled.ok()) return settled.status();
  if (where.size < 1 || where.rank < 0 || where.rank >= where.size)
    return Status(Code::invalid_argument,
                  fmt::format("rank {} of {}: expected 0 <= rank < size", where.rank, where.size));
  set_log_rank(where.rank);
  if (const auto file = setting("RINGFOLD_TRACE")) {
    auto trace = record::Trace::open(*file, where.rank);
    if (!trace.ok()) return trace.status();
    settled->trace = std::move(*trace);
  }
  for (const UnknownSetting& unknown : unknown_settings())
    log_line(LogLevel::warn,
             fmt::format("{} is not a setting of ringfold{}", unknown.name,
                         unknown.nearest.empty() ? "" : "; did you mean " + unknown.nearest + "?"));
  if (where.size == 1) {
    if (where.source == kIdSource) (void)take_id_listener(where.secret);  // nobody will call
    return Communicator(std::make_shared<Impl>(*settled));
  }
  auto world = World::create(where, *settled);
  if (!world.ok()) return world.status();
  std::vector<Peer> everybody(static_cast<size_t>(where.size));
  for (int r = 0; r < where.size; ++r) everybody[static_cast<size_t>(r)] = r;
  auto impl = std::make_shared<Impl>(*settled, *world, 0, 0, std::move(everybody), where.rank);
  impl->open_region();
  impl->open_two_level();
  impl->open_device_routes();
  return Communicator(std::move(impl));
}

Work Communicator::create(const Rendezvous& where, const Options& options, Communicator* out) {
  auto state = std::make_shared<Work::State>();
  std::thread([where, options, out, state, context = cuda::Carried()] {
    context.enter();
    auto made = create(where, options);
    if (made.ok()) *out = *made;
    state->complete(made.status());
  }).detach();
  return Work(state);
}

Communicator::Impl::Impl(const Settled& settled)
    : settled_(settled), record_(record::Record::open({})) {
  record_->name_transport(transport());
}

Communicator::Impl::Impl(const Settled& settled, std::shared_ptr<World> world, uint32_t id,
                         uint32_t family, std::vector<Peer> peers, int rank)
    : settled_(settled),
      world_(std::move(world)),
      rank_(rank),
      size_(static_cast<int>(peers.size())),
      record_(record::Record::open({world_->nonce(), id, rank, size_,
                                    family != id ? std::optional(family) : std::nullopt})) {
  channel_ = std::make_shared<Channel>();
  channel_->record = record_;
  channel_->trace = settled_.trace;
  channel_->verify = settled_.verify;
  channel_->id = id;
  channel_->family = family;
  channel_->rank = rank;
  for (const Peer peer : peers) channel_->transports.push_back(world_->route(peer));
  channel_->peers = std::move(peers);
  machine_.local = transport() == "loopback" ? kLoopbackLink : kShmLink;
  machine_.remote = kTcpLink;
  if (settled_.machine) {
    if (transport() != "loopback") machine_.local = settled_.machine->local;
    machine_.remote = settled_.machine->remote;
    machine_.gamma = settled_.machine->gamma;
  }
  layout_ = lay_out(hosts(), rank);
  machine_.per_host = machine_.sharers = layout_.per_host;
  record_->name_transport(transport());
  cuda::prepare();
  world_->engine().open(channel_);
}

// Of every rank; where ranks of one host may not share memory, each passes for a host of its own.
std::vector<std::string> Communicator::Impl::hosts() const {
  const bool share = settled_.transports.find("shm") != std::string::npos ||
                     settled_.transports.find("loopback") != std::string::npos;
  std::vector<std::string> hosts;
  for (const Peer peer : channel_->peers)
    hosts.push_back(share ? world_->host(peer) : std::to_string(peer));
  return hosts;
}

// Waits for its own last operation, so that no buffer is touched afterwards; not for those of other
// communicators, which may well wait for what their owner does next.
Communicator::Impl::~Impl() {
  fail_self_messages(Status(Code::aborted, "the communicator was destroyed"));
  if (!world_ || !world_->usable()) return;
  world_->engine().close(channel_);
  auto last = [world = std::move(world_), pending = pending_, region = std::move(region_),
               routes = std::move(device_routes_)]() mutable {
    const std::atomic<bool> never{false};
    Clock& clock = steady_clock();
    while (pending->count.load() != 0)
      if (!world->thread().help(never, clock.now() + std::chrono::milliseconds(1)))
        std::this_thread::sleep_for(std::chrono::microseconds(50));
    if (region) world->close_region(*region);
    region.reset();
    routes.reset();
    world.reset();
  };
  if (in_callback())
    std::thread(std::move(last)).detach();  // the engine is below us on this very stack
  else
    last();
}

// ---- from a call to an operation --------------------------------------------------------------

std::string Communicator::Impl::transport() const {
  return region_ ? "region" : message_transport();
}

std::string Communicator::Impl::message_transport() const {
  if (!world_) return "self";
  std::string names;
  for (const Transport* transport : channel_->transports) {
    if (transport == nullptr || names.find(transport->name()) != std::string::npos) continue;
    names += (names.empty() ? "" : "+") + std::string(transport->name());
  }
  return names;
}

Result<Choice> Communicator::Impl::choice(Collective collective, int size, size_t count,
                                          size_t element_bytes, int root) {
  const std::lock_guard lock(choices_lock_);
  for (const Known& known : choices_)
    if (known.choice.schedule.collective == collective && known.choice.schedule.count == count &&
        known.choice.schedule.size == size && known.choice.schedule.root == root &&
        known.element_bytes == element_bytes)
      return known.choice;
  Constraints constraints;
  constraints.root = root;
  constraints.piece_bytes = settled_.piece_bytes;
  if (collective == Collective::all_reduce)
    constraints.grain = std::max<size_t>(1, 64 / element_bytes);
  constraints.nccl_chunks = settled_.numerics == Numerics::nccl;
  const bool forced = settled_.algorithm.has_value() && size > 1;
  if (forced)
    constraints.algorithm = settled_.algorithm;
  else if (constraints.nccl_chunks && collective == Collective::reduce)
    constraints.algorithm = Algorithm::chain;  // NCCL's only way
  auto chosen = choose(collective, size, count, element_bytes, machine_, constraints);
  // Several rails share out whole messages, the finer the better.
  const size_t rails = world_ ? world_->rails() : 1;
  if (chosen && rails > 1 && constraints.piece_bytes == 0 &&
      chosen->piece_bytes > kMaxRemotePieceBytes / rails) {
    constraints.piece_bytes = kMaxRemotePieceBytes / rails;
    chosen = choose(collective, size, count, element_bytes, machine_, constraints);
  }
  if (!chosen && forced) {  // the setting names an algorithm of another collective
    constraints.algorithm.reset();
    chosen = choose(collective, size, count, element_bytes, machine_, constraints);
  }
  if (!chosen)
    return Status(
        Code::unsupported,
        fmt::format("{} of {} elements on {} ranks with pieces of {} bytes: too many messages",
                    name(collective), count, size, settled_.piece_bytes));
  choices_[next_choice_++ % choices_.size()] = {*chosen, element_bytes};
  return *chosen;
}

Work Communicator::Impl::collective(const Call& call) {
  using Quick = region::Region::Quick;
  if (call.collective == Collective::all_reduce && call.stands_for == 0) {
    const bool waits = take_waits_at_once();
    std::shared_ptr<Work::State> started;
    const Quick how = quick({call.send, call.recv, call.reduction}, call.count, call.type,
                            call.stream, waits, &started);
    if (how != Quick::none) return after(how, call, Nanoseconds::min(), std::move(started));
    if (waits) will_wait_at_once();
  }
  const bool on_host = !cuda::is_ordered(call.send, call.recv, call.stream);
  const bool in_region_memory = region_ && on_host;
  if (Status status = usable(); !status.ok()) return Work(status);
  if (Status status = check(call); !status.ok()) return Work(status);
  if (in_region_memory) return in_region(call);
  if (two_level_ && TwoLevel::suits(call) && on_host) return in_two_levels(call);
  auto chosen = choice(call.collective, size_, call.count, size_of(call.type), call.root);
  if (!chosen.ok()) return Work(chosen.status());
  auto state = std::make_shared<Work::State>(world_);
  state->record = record_;
  state->schedule = chosen->schedule;
  state->position = rank_;
  state->element_bytes = size_of(call.type);
  state->report.transport = message_transport();
  state->report.piece_bytes = chosen->piece_bytes;
  state->report.predicted_seconds = chosen->seconds;
  state->started = steady_clock().now();
  if (!world_) {
    run_or_group(shared_from_this(), state, [this, state, call] { run_alone(*state, call); });
    return Work(std::move(state));
  }
  auto operation = std::make_unique<UserOperation>(state, pending_);
  operation->channel = channel_;
  operation->called = state->started;
  operation->what = {chosen->schedule,
                     call.type,
                     call.reduction.op,
                     chosen->piece_bytes / size_of(call.type),
                     false,
                     call.stands_for,
                     false,
                     call.part};
  operation->position = rank_;
  if (call.collective == Collective::all_reduce) order_by_host(*operation);
  state->position = operation->position;
  if (Status status = place(*operation, call.send, call.recv, arithmetic(call), call.stream);
      !status.ok())
    return Work(status);
  if (!operation->compute) {
    operation.reset();
    run_or_group(shared_from_this(), state, [state] { state->complete(Status()); });
    return Work(std::move(state));
  }
  start_or_group(shared_from_this(), std::move(operation));
  return Work(std::move(state));
}

// Any order of the ranks gives the same sum, but for its rounding, in which NCCL's is to be kept.
void Communicator::Impl::order_by_host(UserOperation& operation) const {
  if (layout_.in_order() || settled_.numerics == Numerics::nccl) return;
  operation.position = layout_.position;
  for (const int rank : layout_.ranks) {
    operation.transports.push_back(channel_->transports[static_cast<size_t>(rank)]);
    operation.peers.push_back(channel_->peers[static_cast<size_t>(rank)]);
  }
}

// What is computed for a call: NCCL's average of floats is a sum of inputs times 1/N.
Reduction Communicator::Impl::arithmetic(const Call& call) const {
  if (settled_.numerics == Numerics::exact || call.reduction.op != Op::avg || !is_float(call.type))
    return call.reduction;
  return {Op::premul_sum, rounded(call.type, 1.0 / size_)};
}

// Gives the operation its compute, for the memory its buffers are in, and its deadline. None if it
// was captured in a graph instead.
Status Communicator::Impl::place(UserOperation& operation, const void* input, void* work,
                                 Reduction reduction, Stream stream) {
  const Description& what = operation.what;
  if (!cuda::is_ordered(input, work, stream)) {
    operation.compute =
        std::make_unique<HostCompute>(what.schedule, operation.position, input, work, what.type,
                                      reduction, what.piece, world_->slots());
    operation.deadline = deadline();
    return {};
  }
  if (!no_device_routes_.ok()) return no_device_routes_;
  if (cuda::is_captured(stream)) return capture(operation, input, work, reduction, stream);
  // Messages come in any order and number, which a pool has no room for.
  const bool direct = device_routes_ && !what.point_to_point && what.schedule.count != 0;
  const std::lock_guard lock(path_lock_);
  auto compute = cuda::make_compute({&what.schedule, operation.position, input, work, what.type,
                                     reduction, what.piece, what.point_to_point, stream},
                                    direct ? device_routes_->path() : path_);
  if (!compute.ok()) return compute.status();
  if (direct) {
    operation.what.on_device = true;
    if (operation.peers.empty()) operation.peers = channel_->peers;
    operation.transports = device_routes_->to(operation.peers);
    operation.state()->report.transport = device_routes_->names();
  }
  operation.compute = std::move(*compute);
  operation.deadline = Nanoseconds::max();  // until the stream comes to it
  operation.patience = settled_.timeout;
  return {};
}

Nanoseconds Communicator::Impl::deadline() const {
  const Nanoseconds now = steady_clock().now();
  return settled_.timeout >= Nanoseconds::max() - now ? Nanoseconds::max() : now + settled_.timeout;
}

Work Communicator::Impl::message(bool sends, void* buffer, size_t count, DType type, int partner,
                                 Stream stream) {
  if (Status status = usable(); !status.ok()) return Work(status);
  if (partner < 0 || partner >= size_)
    return Work(Status(Code::invalid_argument,
                       fmt::format("{} rank {}: expected 0 to {}",
                                   sends ? "send to" : "receive from", partner, size_ - 1)));
  if (Status status = check_buffer("buffer", buffer, count, type); !status.ok())
    return Work(status);
  if (partner == rank_) return self_message(sends, buffer, count, type, stream);
  auto chosen = choice(Collective::broadcast, 2, count, size_of(type), 0);
  if (!chosen.ok()) return Work(chosen.status());
  auto state = std::make_shared<Work::State>(world_);
  state->record = record_;
  state->report.transport = message_transport();
  state->started = steady_clock().now();
  auto operation = std::make_unique<UserOperation>(state, pending_);
  operation->channel = channel_;
  operation->called = state->started;
  operation->what = {chosen->schedule, type, Op::sum, chosen->piece_bytes / size_of(type), true};
  operation->position = sends ? 0 : 1;
  operation->partner = partner;
  const auto there = static_cast<size_t>(partner);
  operation->transports.assign(2, channel_->transports[there]);
  operation->peers.assign(2, channel_->peers[there]);
  if (Status status = place(*operation, sends ? buffer : nullptr, sends ? nullptr : buffer,
                            Reduction(), stream);
      !status.ok())
    return Work(status);
  start_or_group(shared_from_this(), std::move(operation));
  return Work(std::move(state));
}

// ---- the calls --------------------------------------------------------------------------------

int Communicator::rank() const {
  return impl_ ? impl_->rank() : -1;
}
int Communicator::size() const {
  return impl_ ? impl_->size() : 0;
}

Work Communicator::all_reduce(const void* send, void* recv, size_t count, DType type,
                              Reduction reduction, Stream stream) {
  if (!impl_) return Work(no_communicator());
  return impl_->collective({Collective::all_reduce, send, recv, count, type, reduction, 0, stream});
}

Work Communicator::reduce_scatter(const void* send, void* recv, size_t count_each, DType type,
                                  Reduction reduction, Stream stream) {
  if (!impl_) return Work(no_communicator());
  return impl_->part_wise(
      {Collective::reduce_scatter, send, recv, count_each, type, reduction, 0, stream});
}

Work Communicator::all_gather(const void* send, void* recv, size_t count_each, DType type,
                              Stream stream) {
  if (!impl_) return Work(no_communicator());
  return impl_->part_wise({Collective::all_gather, send, recv, count_each, type, {}, 0, stream});
}

Work Communicator::broadcast(void* buffer, size_t count, DType type, int root, Stream stream) {
  if (!impl_) return Work(no_communicator());
  return impl_->collective({Collective::broadcast, buffer, buffer, count, type, {}, root, stream});
}

Work Communicator::reduce(const void* send, void* recv, size_t count, DType type,
                          Reduction reduction, int root, Stream stream) {
  if (!impl_) return Work(no_communicator());
  return impl_->collective({Collective::reduce, send, recv, count, type, reduction, root, stream});
}

Work Communicator::all_to_all(const void* send, void* recv, size_t count_each, DType type,
                              Stream stream) {
  if (!impl_) return Work(no_communicator());
  return impl_->part_wise({Collective::all_to_all, send, recv, count_each, type, {}, 0, stream});
}

Work Communicator::gather(const void* send, void* recv, size_t count_each, DType type, int root,
                          Stream stream) {
  if (!impl_) return Work(no_communicator());
  return impl_->part_wise({Collective::gather, send, recv, count_each, type, {}, root, stream});
}

Work Communicator::scatter(const void* send, void* recv, size_t count_each, DType type, int root,
                           Stream stream) {
  if (!impl_) return Work(no_communicator());
  return impl_->part_wise({Collective::scatter, send, recv, count_each, type, {}, root, stream});
}

Work Communicator::send(const void* buffer, size_t count, DType type, int to, Stream stream) {
  if (!impl_) return Work(no_communicator());
  return impl_->message(true, const_cast<void*>(buffer), count, type, to, stream);  // only read
}

Work Communicator::recv(void* buffer, size_t count, DType type, int from, Stream stream) {
  if (!impl_) return Work(no_communicator());
  return impl_->message(false, buffer, count, type, from, stream);
}

// Nothing to reduce: but every rank hears, directly or not, from every other.
Work Communicator::barrier() {
  if (!impl_) return Work(no_communicator());
  return impl_->collective({Collective::all_reduce, nullptr, nullptr, 0, DType::u8, {}, 0, {}});
}

Result<Communicator> Communicator::split(int color, int key) {
  if (!impl_) return no_communicator();
  if (Status status = impl_->usable(); !status.ok()) return status;
  if (in_callback())
    return Status(Code::invalid_argument, "split() waits, so it cannot be called from a callback");
  World* const world = impl_->world();
  const bool gives_id = world != nullptr && rank() == 0;
  const std::array<int64_t, 3> mine = {color, key, gives_id ? world->new_id() : 0};
  std::vector<std::array<int64_t, 3>> all(static_cast<size_t>(size()));
  if (Status status = all_gather(mine.data(), all.data(), mine.size(), DType::i64).wait();
      !status.ok())
    return status;
  // The same id for all new communicators: they share no member.
  const int64_t id = all[0][2];
  if (world != nullptr && id == 0)
    return Status(Code::unsupported, "more splits than there are numbers for communicators");
  if (color < 0) return Communicator();
  std::vector<int> members;
  for (int r = 0; r < size(); ++r)
    if (all[static_cast<size_t>(r)][0] == color) members.push_back(r);
  std::ranges::stable_sort(members, {}, [&](int r) { return all[static_cast<size_t>(r)][1]; });
  auto made = impl_->sub(static_cast<uint32_t>(id), members);
  made->open_region();
  made->open_two_level();
  made->open_device_routes();
  return Communicator(std::move(made));
}

std::shared_ptr<Impl> Communicator::Impl::sub(uint32_t id, const std::vector<int>& members) const {
  if (members.size() == 1) return std::make_shared<Impl>(settled_);
  return part(id, id, members);
}

std::shared_ptr<Impl> Communicator::Impl::part(uint32_t id, uint32_t family,
                                               const std::vector<int>& members) const {
  std::vector<Peer> peers;
  peers.reserve(members.size());
  for (const int r : members) peers.push_back(channel_->peers[static_cast<size_t>(r)]);
  const auto mine = std::ranges::find(members, rank_) - members.begin();
  auto made = std::make_shared<Impl>(settled_, world_, id, family, std::move(peers),
                                     static_cast<int>(mine));
  if (family != id) made->channel_->names = members;
  return made;
}

Status Communicator::register_memory(const void* memory, size_t bytes) {
  return impl_ ? impl_->register_memory(memory, bytes) : no_communicator();
}

void Communicator::abort(const std::string& why) {
  if (impl_) impl_->abort(why);
}

Status Communicator::health() const {
  return impl_ ? impl_->health() : no_communicator();
}

uint64_t Communicator::bytes_sent() const {
  return impl_ && impl_->world() != nullptr ? impl_->world()->bytes_sent() : 0;
}

std::string Communicator::transport() const {
  return impl_ ? impl_->transport() : "";
}

}  // namespace ringfold
