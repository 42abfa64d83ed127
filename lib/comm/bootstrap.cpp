// Start-up from end to end: checks the rendezvous, meets the others, compares what must agree.
#include <fmt/format.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <mutex>

#include "lib/base/auth.h"
#include "lib/base/base.h"
#include "lib/base/cores.h"
#include "lib/base/net.h"
#include "lib/base/wire.h"
#include "lib/comm/control.h"
#include "lib/comm/rendezvous.h"
#include "ringfold_config.h"

namespace ringfold {
namespace {

using std::chrono::minutes;
using std::chrono::seconds;

constexpr Nanoseconds kDefaultTimeout = minutes(10);
// A rank with an impossible number tells the others so, if rank 0 is there; but not for long.
constexpr Nanoseconds kTellWrongRank = seconds(2);

void write_member(Writer& out, const Member& member) {
  out.u32(static_cast<uint32_t>(member.rank));
  out.text(member.host);
  out.text(member.host_name);
  out.u64(static_cast<uint64_t>(member.pid));
  out.u32(static_cast<uint32_t>(member.cores));
  out.u32(static_cast<uint32_t>(member.addresses.size()));
  for (const auto& [name, address] : member.addresses) {
    out.text(name);
    out.text(address);
  }
}

Member read_member(Reader& in) {
  Member member;
  member.rank = static_cast<int>(in.u32());
  member.host = in.text();
  member.host_name = in.text();
  member.pid = static_cast<int64_t>(in.u64());
  member.cores = static_cast<int>(in.u32());
  const uint32_t count = in.u32();
  for (uint32_t i = 0; i < count && in.good(); ++i) {
    std::string name(in.text()), address(in.text());
    member.addresses.emplace_back(std::move(name), std::move(address));
  }
  return member;
}

Result<std::vector<HostPort>> parse_coordinator(const Rendezvous& where) {
  std::vector<HostPort> parsed;
  std::string_view rest = where.coordinator;
  while (true) {
    const size_t comma = rest.find(',');
    auto one = parse_host_port(rest.substr(0, comma));
    if (!one.ok()) {
      return Status(Code::invalid_argument,
                    fmt::format("coordinator ({}): {}",
                                where.source.empty() ? "given by the caller" : where.source,
                                one.status().message()));
    }
    parsed.push_back(std::move(*one));
    if (comma == std::string_view::npos) return parsed;
    rest.remove_prefix(comma + 1);
  }
}

bool loopback_only(const std::vector<HostPort>& where) {
  return std::all_of(where.begin(), where.end(), [](const HostPort& one) {
    const auto address = Address::numeric(one.host, one.port);
    return one.host == "localhost" || (address.ok() && address->loopback());
  });
}

// A number binds to that address alone. A name does not: a host's own name often means 127.0.0.1 to
// itself and something else to the others. Nor does an address of another host in front of this one
// (a service address).
Result<Descriptor> listen_at(const std::vector<HostPort>& where) {
  const HostPort& first = where.front();
  if (where.size() > 1) return listen_everywhere(first.port);
  const auto address =
      Address::numeric(first.host == "localhost" ? "127.0.0.1" : first.host, first.port);
  if (!address.ok()) return listen_everywhere(first.port);
  auto listener = listen_on(*address);
  if (listener.ok() || address->loopback()) return listener;
  const auto mine = local_interfaces("");
  const bool ours = mine.ok() && std::any_of(mine->begin(), mine->end(), [&](const Interface& one) {
                      return one.address.host() == address->host();
                    });
  return ours ? std::move(listener) : listen_everywhere(first.port);
}

Result<Descriptor> open_listener(const Rendezvous& where, const std::vector<HostPort>& hosts) {
  if (where.source != kIdSource) {
    auto listener = listen_at(hosts);
    if (listener.ok()) return listener;
    return Status(Code::system,
                  fmt::format("rank 0 cannot be the coordinator at {} ({}): {}", where.coordinator,
                              where.source.empty() ? "given by the caller" : where.source,
                              listener.status().message()));
  }
  Descriptor listener = take_id_listener(where.secret);
  if (listener) return listener;
  return Status(Code::invalid_argument,
                "rank 0 must be in the process that made the unique id, and use the id once");
}

void warn_once(const Rendezvous& where, const std::vector<HostPort>& hosts) {
  static std::once_flag unknown_reported, secret_reported;
  std::call_once(unknown_reported, [] {
    for (const UnknownSetting& unknown : unknown_settings()) {
      log_line(
          LogLevel::warn,
          fmt::format(
              "unknown variable {}{}", unknown.name,
              unknown.nearest.empty() ? "" : fmt::format("; did you mean {}?", unknown.nearest)));
    }
  });
  if (!where.secret.empty() || loopback_only(hosts)) return;
  std::call_once(secret_reported, [] {
    log_line(LogLevel::warn,
             "start-up is not authenticated: whoever reaches the coordinator may join; set "
             "RINGFOLD_SECRET or RINGFOLD_SECRET_FILE");
  });
}

// With hundreds of ranks on a host each needs as many descriptors, and rank 0 twice as many;
// smaller worlds leave the limit as it is.
void allow_descriptors(int size) {
  rlimit limit{};
  const rlim_t needed = 2 * static_cast<rlim_t>(size) + 1024;
  if (size < 256 || getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= needed) return;
  limit.rlim_cur = std::min(needed, limit.rlim_max);
  setrlimit(RLIMIT_NOFILE, &limit);
}

Result<Meeting> prepare(const Rendezvous& where) {
  Meeting meeting;
  meeting.rank = where.rank;
  meeting.size = where.size;
  meeting.coordinator = where.coordinator;
  meeting.begun = steady_clock().now();
  const auto timeout = setting_duration("RINGFOLD_TIMEOUT");
  if (!timeout.ok()) return timeout.status();
  const Nanoseconds limit = where.timeout.value_or(timeout->value_or(kDefaultTimeout));
  // Far enough away to be for ever, and near enough not to overflow.
  meeting.deadline = meeting.begun + std::min<Nanoseconds>(limit, std::chrono::hours(24 * 365));
  meeting.key = key_of(where.secret);
  return meeting;
}

Result<Met> meet(const Rendezvous& where, Joined mine, const SecondRound& second) {
  const auto hosts = parse_coordinator(where);
  if (!hosts.ok()) return hosts.status();
  auto meeting = prepare(where);
  if (!meeting.ok()) return meeting.status();
  meeting->second = second;
  warn_once(where, *hosts);
  allow_descriptors(where.size);
  if (where.rank >= where.size) {
    meeting->deadline = std::min(meeting->deadline, meeting->begun + kTellWrongRank);
    [[maybe_unused]] const auto refused = join(*meeting, *hosts, std::move(mine));
    return Status(Code::invalid_argument, fmt::format("rank {} of {}; ranks are 0 to {}",
                                                      where.rank, where.size, where.size - 1));
  }
  if (where.rank > 0) return join(*meeting, *hosts, std::move(mine));
  auto listener = open_listener(where, *hosts);
  if (!listener.ok()) return listener.status();
  return coordinate(*meeting, std::move(*listener), std::move(mine));
}

std::string first_line(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

}  // namespace

std::string host_identity() {
  struct stat shared_memory {
  }, network{};
  stat("/dev/shm", &shared_memory);
  stat("/proc/self/ns/net", &network);
  const std::string all = fmt::format("{} {} {}:{}", first_line("/proc/sys/kernel/random/boot_id"),
                                      shared_memory.st_dev, network.st_dev, network.st_ino);
  std::array<unsigned char, 16> hash;
  crypto_generichash(hash.data(), hash.size(), reinterpret_cast<const unsigned char*>(all.data()),
                     all.size(), nullptr, 0);
  std::string text;
  for (const unsigned char byte : hash) text += fmt::format("{:02x}", byte);
  return text;
}

Member this_process() {
  Member member;
  member.host = host_identity();
  std::array<char, 256> name{};
  if (gethostname(name.data(), name.size() - 1) == 0) member.host_name = name.data();
  member.pid = getpid();
  member.cores = static_cast<int>(allowed_cores().size());
  return member;
}

std::string encode(const Member& member) {
  Writer out;
  out.u8(static_cast<uint8_t>(Frame::member));
  write_member(out, member);
  return std::move(out).take();
}

Result<Member> decode_member(std::string_view frame) {
  Reader in(frame);
  const bool right = in.u8() == static_cast<uint8_t>(Frame::member);
  Member member = read_member(in);
  if (right && in.complete()) return member;
  return Status(Code::peer_lost, "malformed member");
}

std::string encode(const Joined& joined) {
  Writer out;
  out.u8(static_cast<uint8_t>(Frame::joined));
  write_member(out, joined.member);
  out.u64(static_cast<uint64_t>(joined.patience.count()));
  out.u32(static_cast<uint32_t>(joined.agreement.size()));
  for (const auto& [what, value] : joined.agreement) {
    out.text(what);
    out.text(value);
  }
  return std::move(out).take();
}

Result<Joined> decode_joined(std::string_view frame) {
  Reader in(frame);
  const bool right = in.u8() == static_cast<uint8_t>(Frame::joined);
  Joined joined;
  joined.member = read_member(in);
  // Half of the range is plenty, and can be added to a point in time.
  joined.patience = Nanoseconds(std::min<uint64_t>(in.u64(), INT64_MAX / 2));
  const uint32_t count = in.u32();
  for (uint32_t i = 0; i < count && in.good(); ++i) {
    std::string what(in.text()), value(in.text());
    joined.agreement.emplace_back(std::move(what), std::move(value));
  }
  if (right && in.complete()) return joined;
  return Status(Code::peer_lost, "malformed introduction");
}

std::string rank_list(const std::vector<int>& sorted) {
  std::string text;
  for (size_t i = 0; i < sorted.size();) {
    size_t end = i + 1;
    while (end < sorted.size() && sorted[end] == sorted[end - 1] + 1) ++end;
    text += fmt::format("{}{}", text.empty() ? "" : ", ", sorted[i]);
    if (end - i > 1) text += fmt::format("{}{}", end - i > 2 ? "-" : ", ", sorted[end - 1]);
    i = end;
  }
  return text;
}

std::string seconds_text(Nanoseconds time) {
  const double seconds = std::chrono::duration<double>(time).count();
  return fmt::format("{:.3g} s", seconds);
}

Agreement own_agreement() {
  Agreement agreement = {{"the version of ringfold", RINGFOLD_VERSION}};
  for (const Setting& known : settings()) {
    if (!known.must_agree) continue;
    std::string value = setting(known.name).value_or(std::string(known.fallback));
    const auto bytes = known.kind == "size" ? parse_bytes(value) : std::nullopt;
    if (bytes) value = fmt::format("{}", *bytes);
    agreement.emplace_back(known.name, std::move(value));
  }
  return agreement;
}

Status compare(const std::vector<Agreement>& by_rank) {
  std::map<std::string, std::map<std::string, std::vector<int>>> ranks_by_value;
  for (size_t r = 0; r < by_rank.size(); ++r) {
    for (const auto& [what, value] : by_rank[r]) {
      ranks_by_value[what][fmt::format("\"{}\"", value)].push_back(static_cast<int>(r));
    }
  }
  for (auto& [what, values] : ranks_by_value) {
    std::vector<bool> said(by_rank.size());
    for (const auto& [value, ranks] : values) {
      for (const int r : ranks) said[static_cast<size_t>(r)] = true;
    }
    for (size_t r = 0; r < said.size(); ++r) {
      if (!said[r]) values["nothing"].push_back(static_cast<int>(r));
    }
    if (values.size() == 1) continue;
    std::string text = fmt::format("the ranks differ in {}:", what);
    const char* separator = " ";
    for (const auto& [value, ranks] : values) {
      text += fmt::format("{}{} on rank {}", separator, value, rank_list(ranks));
      separator = "; ";
    }
    return {Code::mismatch, text};
  }
  return {};
}

void note_reached(const Descriptor& socket, Member* mine) {
  const std::pair<std::string, std::string> reached(kReached, local_host(socket));
  if (std::ranges::find(mine->addresses, reached) == mine->addresses.end())
    mine->addresses.push_back(reached);
}

Result<Bootstrapped> bootstrap(const Rendezvous& where, Member mine, Agreement must_agree,
                               const SecondRound& second) {
  if (where.size < 1 || where.rank < 0 || (where.size == 1 && where.rank != 0)) {
    return Status(Code::invalid_argument,
                  fmt::format("rank {} of {}: the size is at least 1, ranks are 0 to size - 1",
                              where.rank, where.size));
  }
  if (Status usable = check_settings(); !usable.ok()) return usable;
  set_log_rank(where.rank);
  mine.rank = where.rank;
  if (where.size == 1) return Bootstrapped{{std::move(mine)}, nullptr};

  const Agreement own = own_agreement();
  must_agree.insert(must_agree.end(), own.begin(), own.end());
  Joined joined{std::move(mine), std::move(must_agree), {}};
  if (encode(joined).size() > kMaxFrame) {
    return Status(
        Code::invalid_argument,
        fmt::format("the addresses of rank {} take more than {} bytes", where.rank, kMaxFrame));
  }
  auto met = meet(where, std::move(joined), second);
  if (!met.ok()) {
    log_line(LogLevel::error, met.status().to_string());
    return met.status();
  }
  auto control = make_control(where.rank, where.size, std::move(met->links));
  if (!control.ok()) return control.status();
  return Bootstrapped{std::move(met->members), std::move(*control)};
}

}  // namespace ringfold
