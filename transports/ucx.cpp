// Making, connecting and leaving; lost peers and what is cancelled. Messages: ucx_messages.cpp.
#include "transports/ucx.h"

#include <fmt/core.h>
#include <poll.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "transports/ucx_transport.h"

namespace ringfold {

Result<std::unique_ptr<Transport>> make_ucx(Peer me, Clock& clock,
                                            const std::vector<std::string>& rails) {
  std::vector<std::unique_ptr<UcxWorker>> workers;
  for (const std::string& devices : rails) {
    if (workers.size() == ucx::kMostRails) break;
    Result<std::unique_ptr<UcxWorker>> worker = UcxWorker::create(devices);
    if (!worker.ok()) return worker.status();
    workers.push_back(std::move(*worker));
  }
  auto transport = std::make_unique<ucx::UcxTransport>(std::move(workers), me, clock);
  if (Status status = transport->listen(); !status.ok()) return status;
  return std::unique_ptr<Transport>(std::move(transport));
}

namespace ucx {
namespace {

// Leads every address; the number changes with the messages' headers.
constexpr std::string_view kAddressMark = "ringfold-ucx-2\n";

std::string host_name() {
  std::array<char, 256> name{};
  return gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "?";
}

}  // namespace

UcxTransport::UcxTransport(std::vector<std::unique_ptr<UcxWorker>> workers, Peer me, Clock& clock)
    : ucx_(workers.front()->ucx()), me_(me), clock_(clock) {
  rails_.reserve(workers.size());  // UCX is given their addresses
  for (auto& worker : workers) rails_.push_back({this, rails_.size(), std::move(worker)});
}

UcxTransport::~UcxTransport() {
  if (first().forked()) return;
  // Nothing more is written into buffers whose receives will never be told to end.
  for (auto& [peer, link] : links_)
    matcher_.lose(peer, [](Peer, const MessageId&, const Matcher::Posted&) {});
  wait_until(clock_.now() + kFarewell, &UcxTransport::everything_arrived);
  // By force, for what matters has been confirmed, and a flushing close that a peer delays for ever
  // can be neither waited for nor taken back.
  for (auto& [peer, link] : links_) close_by_force(link);
  wait_until(clock_.now() + kFarewell, &UcxTransport::nothing_under_way);
  matcher_.drop_early(
      [&](const Matcher::Early& early) { release(static_cast<Kept*>(early.message)); });
}

Status UcxTransport::listen() {
  if (rails_.size() > 1) {
    news_.epoll = epoll_create1(EPOLL_CLOEXEC);
    epoll_event wanted{};
    wanted.events = EPOLLIN;
    for (const Rail& rail : rails_)
      if (news_.epoll < 0 ||
          epoll_ctl(news_.epoll, EPOLL_CTL_ADD, rail.worker->descriptor(), &wanted) != 0)
        return {Code::system,
                fmt::format("epoll for {} UCX workers: {}", rails_.size(), std::strerror(errno))};
  }
  for (Rail& rail : rails_)
    if (Status status = listen(rail); !status.ok()) return status;
  return {};
}

Status UcxTransport::listen(Rail& rail) {
  ucp_am_handler_param_t handler{};
  handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB |
                       UCP_AM_HANDLER_PARAM_FIELD_ARG;
  handler.arg = &rail;
  if (first().reaches_cuda()) {  // eager bytes must outlive the callback to reach device memory
    handler.field_mask |= UCP_AM_HANDLER_PARAM_FIELD_FLAGS;
    handler.flags = UCP_AM_FLAG_PERSISTENT_DATA;
  }
  handler.id = kData;
  handler.cb = &UcxTransport::on_data;
  ucs_status_t status = ucx_.ucp_worker_set_am_recv_handler(rail.worker->handle(), &handler);
  if (status == UCS_OK) {
    handler.id = kControl;
    handler.cb = &UcxTransport::on_control;
    status = ucx_.ucp_worker_set_am_recv_handler(rail.worker->handle(), &handler);
  }
  if (status == UCS_OK) return {};
  return {Code::system, fmt::format("UCX {} does not take active messages: {}",
                                    ucx_.ucp_get_version_string(), ucx_.ucs_status_string(status))};
}

std::string UcxTransport::address() const {
  std::string address = fmt::format("{}{}\n", kAddressMark, host_name());
  for (const Rail& rail : rails_) {
    const std::string& way = rail.worker->address();
    address += fmt::format("{}\n{}", way.size(), way);
  }
  return address;
}

Status UcxTransport::connect(Peer peer, std::string_view address) {
  if (first().forked()) return forked_child();
  const size_t host_end = address.find('\n', kAddressMark.size());
  if (peer < 0 || !address.starts_with(kAddressMark) || host_end == std::string_view::npos)
    return {Code::invalid_argument,
            fmt::format("rank {}: {} bytes that are no ucx address of this version", peer,
                        address.size())};
  Link& link = link_to(peer);
  link.host = address.substr(kAddressMark.size(), host_end - kAddressMark.size());
  std::string_view rest = address.substr(host_end + 1);
  for (link.rails = 0; link.rails < rails_.size() && !rest.empty(); ++link.rails) {
    const size_t end = rest.find('\n');
    const auto length = parse_integer(rest.substr(0, end));
    if (end == std::string_view::npos || !length || *length < 1 ||
        static_cast<uint64_t>(*length) > rest.size() - end - 1)
      return {Code::invalid_argument, fmt::format("rank {}: a ucx address that is cut off", peer)};
    link.ways[link.rails].address = rest.substr(end + 1, static_cast<size_t>(*length));
    rest.remove_prefix(end + 1 + static_cast<size_t>(*length));
  }
  return {};
}

// Also of a peer that has sent before connect() was called here.
Link& UcxTransport::link_to(Peer peer) {
  const auto [found, made] = links_.try_emplace(peer);
  if (made) {
    found->second.owner = this;
    found->second.peer = peer;
  }
  return found->second;
}

Status UcxTransport::forked_child() {
  return {Code::invalid_argument,
          "forked child: a ucx transport works only in the process that made it"};
}

std::string UcxTransport::describe(const Link& link) {
  return link.host.empty() ? fmt::format("rank {}", link.peer)
                           : fmt::format("rank {} on {}", link.peer, link.host);
}

// Ok when there is an endpoint to the peer.
Status UcxTransport::usable(Link& link) {
  if (first().forked()) return forked_child();
  if (!link.lost.ok()) return link.lost;
  if (link.ways[0].endpoint) return {};
  if (link.rails == 0)
    return {Code::invalid_argument, fmt::format("rank {} was never connected", link.peer)};
  ucs_status_t status = UCS_OK;
  for (size_t rail = 0; rail < link.rails && status == UCS_OK; ++rail)
    status = open_way(link, rail);
  if (status == UCS_OK) return {};
  Status why(Code::peer_lost, fmt::format("UCX cannot reach {}: {}. Compare `ucx_info -d` and the "
                                          "UCX_NET_DEVICES and UCX_TLS variables of both hosts",
                                          describe(link), ucx_.ucs_status_string(status)));
  failed_.emplace_back(&link, why);
  return why;
}

ucs_status_t UcxTransport::open_way(Link& link, size_t rail) {
  Way& way = link.ways[rail];
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t*>(way.address.data());
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler.cb = [](void* arg, ucp_ep_h, ucs_status_t why) {
    Link* failed = static_cast<Link*>(arg);
    failed->owner->fail(*failed, why);
  };
  params.err_handler.arg = &link;
  const ucs_status_t status = ucx_.ucp_ep_create(worker(rail), &params, &way.endpoint);
  if (status != UCS_OK) way.endpoint = nullptr;
  return status;
}

// What send() and recv() answer instead of beginning; ok if they may.
Status UcxTransport::refusal(Link& link, uint32_t comm) {
  if (!cancelled_comms_.empty()) {
    const auto cancelled = cancelled_comms_.find(comm);
    if (cancelled != cancelled_comms_.end()) return cancelled->second;
  }
  return usable(link);
}

// ---- Moving

bool UcxTransport::progress() {
  bool moved = deferred_.run();
  if (first().forked()) return moved;
  if (turn()) moved = true;
  if (deferred_.run()) moved = true;
  return tell_owner() || moved;
}

// Everything but calling the owner.
bool UcxTransport::turn() {
  bool moved = false;
  for (const Rail& rail : rails_)
    if (ucx_.ucp_worker_progress(rail.worker->handle()) != 0) moved = true;
  while (!failed_.empty()) {
    const auto [link, why] = std::move(failed_.back());
    failed_.pop_back();
    lose(*link, why);
    moved = true;
  }
  if (cancelled_ != 0) give_up_cancelled();
  if (confirmation_wanted_) ask_for_confirmation();
  return moved;
}

bool UcxTransport::tell_owner() {
  const auto contradictions = std::exchange(contradictions_, {});
  for (const Contradiction& seen : contradictions)
    if (on_mismatch) on_mismatch(seen.peer, seen.theirs, seen.expected);
  const auto lost = std::exchange(lost_, {});
  for (const Link* link : lost)
    if (on_lost) on_lost(link->peer, link->lost);
  return !contradictions.empty() || !lost.empty();
}

// While cancelled requests have their grace there is a clock to look at: poll.
int UcxTransport::arm() {
  if (!deferred_.empty() || !failed_.empty() || !contradictions_.empty() || cancelled_ != 0)
    return -1;
  if (!first().forked() && confirmation_wanted_) ask_for_confirmation();
  return sleep_on();
}

// A descriptor that becomes readable on news of any rail; -1: there are news already.
int UcxTransport::sleep_on() {
  int descriptor = -1;
  for (const Rail& rail : rails_)
    if (descriptor = rail.worker->arm(); descriptor < 0) return -1;
  return news_.epoll >= 0 ? news_.epoll : descriptor;
}

// Asking here is what makes progress() and arm() ask the peers.
bool UcxTransport::flushed() const {
  if (first().forked()) return true;
  confirmation_wanted_ = false;
  bool all = flights_.empty() && credits_.waiting() == 0;
  for (const auto& [peer, link] : links_) {
    if (!link.lost.ok() || link.confirmed == link.sent) continue;
    confirmation_wanted_ = true;
    all = false;
  }
  return all;
}

void UcxTransport::ask_for_confirmation() {
  for (auto& [peer, link] : links_) {
    if (!link.ways[0].endpoint || link.asked == link.sent) continue;
    link.asked = link.sent;
    send_control(link, {me_, Control::ask, 0, 0, link.sent});
  }
}

void UcxTransport::wait_until(Nanoseconds deadline, bool (UcxTransport::*done)()) {
  while (!(this->*done)() && clock_.now() < deadline) {
    if (turn()) continue;
    pollfd news{sleep_on(), POLLIN, 0};
    if (news.fd >= 0) poll(&news, 1, 10);  // milliseconds; short, for the deadline's sake
  }
}

// ---- Failing

// From inside UCX: only takes note.
void UcxTransport::fail(Link& link, ucs_status_t why) {
  failed_.emplace_back(&link, Status(Code::peer_lost, fmt::format("UCX lost {}: {}", describe(link),
                                                                  ucx_.ucs_status_string(why))));
}

void UcxTransport::lose(Link& link, const Status& why) {
  if (!link.lost.ok()) return;
  link.lost = why;
  lost_.push_back(&link);
  close_by_force(link);
  matcher_.lose(link.peer, [&](Peer, const MessageId& id, const Matcher::Posted& posted) {
    deferred_.add(id.comm, posted.completion, why);
  });
  credits_.lose(link.peer, [&](const Waiting& message) {
    deferred_.add(message.id.comm, message.completion, why);
  });
  returns_.lose(link.peer);
}

// Ends the requests under way; UCX then no longer touches their buffers.
void UcxTransport::close_by_force(Link& link) {
  ucp_request_param_t force{};
  force.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  force.flags = UCP_EP_CLOSE_FLAG_FORCE;
  for (Way& way : link.ways) {
    if (!way.endpoint) continue;
    void* request = ucx_.ucp_ep_close_nbx(std::exchange(way.endpoint, nullptr), &force);
    if (UCS_PTR_IS_PTR(request)) ucx_.ucp_request_free(request);
  }
}

void UcxTransport::cancel(uint32_t comm, const Status& why) {
  cancelled_comms_.emplace(comm, why);
  std::vector<Completion*> ended;
  matcher_.cancel(
      comm,
      [&](Peer, const MessageId&, const Matcher::Posted& posted) {
        ended.push_back(posted.completion);
      },
      [&](Peer peer, const MessageId& id, const Matcher::Early& early) { drop(peer, id, early); });
  credits_.cancel(comm, [&](const Waiting& message) { ended.push_back(message.completion); });
  returns_.cancel(comm);
  for (const auto& flight : flights_) {
    if (flight->comm != comm || !flight->completion || flight->cancelled) continue;
    flight->cancelled = true;
    flight->why = why;
    flight->deadline = clock_.now() + kGrace;
    ++cancelled_;
  }
  for (Completion* completion : ended) completion->done(completion, why);
  deferred_.run(comm);
}

void UcxTransport::give_up_cancelled() {
  const Nanoseconds now = clock_.now();
  std::vector<Link*> stuck;  // losing one ends its flights
  for (const auto& flight : flights_)
    if (flight->cancelled && flight->deadline <= now) stuck.push_back(flight->link);
  for (Link* link : stuck) {
    send_control(*link, {me_, Control::leave, 0, 0, 0});
    lose(*link, {Code::peer_lost,
                 fmt::format("gave up {}: a cancelled transfer would not end", describe(*link))});
  }
}

}  // namespace ucx
}  // namespace ringfold
