#include "lib/base/net.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <climits>
#include <cstring>
#include <system_error>

#include "lib/base/base.h"

namespace ringfold {
namespace {

constexpr int kBacklog = 4096;  // the kernel lowers it to net.core.somaxconn

Status system_error(std::string_view what, const Address& address) {
  return {Code::system, fmt::format("{} {}: {}", what, address.to_string(), reason(errno))};
}

Result<Descriptor> tcp_socket(const Address& address) {
  Descriptor made(socket(address.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!made) return system_error("cannot make a socket for", address);
  return made;
}

void set_flag(const Descriptor& socket, int level, int name, int value) {
  setsockopt(socket.get(), level, name, &value, sizeof value);
}

// Small frames leave at once; a host that vanished is noticed by the kernel's own heartbeat.
void tune(const Descriptor& socket) {
  set_flag(socket, IPPROTO_TCP, TCP_NODELAY, 1);
  set_flag(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_flag(socket, IPPROTO_TCP, TCP_KEEPIDLE, 5);
  set_flag(socket, IPPROTO_TCP, TCP_KEEPINTVL, 3);
  set_flag(socket, IPPROTO_TCP, TCP_KEEPCNT, 5);
  set_flag(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, 20000);
}

Result<Descriptor> bind_and_listen(Descriptor socket, const Address& address) {
  set_flag(socket, SOL_SOCKET, SO_REUSEADDR, 1);
  if (bind(socket.get(), address.get(), address.length()) != 0 ||
      listen(socket.get(), kBacklog) != 0) {
    return system_error("cannot listen on", address);
  }
  return socket;
}

bool would_block(int error) {
  return error == EAGAIN || error == EWOULDBLOCK;
}

Status connection_error() {
  const bool peer = errno == EPIPE || errno == ECONNRESET || errno == ETIMEDOUT;
  return {peer ? Code::peer_lost : Code::system, reason(errno)};
}

}  // namespace

void Descriptor::reset(int fd) {
  // EINTR from close() leaves the descriptor closed on Linux; closing again could hit another one.
  if (fd_ >= 0) close(fd_);
  fd_ = fd;
}

Address::Address(const sockaddr* from, socklen_t length) : length_(length) {
  std::memcpy(&storage_, from, length);
}

Result<Address> Address::numeric(std::string_view host, uint16_t port) {
  const std::string text(host);
  sockaddr_in v4{};
  sockaddr_in6 v6{};
  v4.sin_family = AF_INET;
  v6.sin6_family = AF_INET6;
  Address address;
  if (inet_pton(AF_INET, text.c_str(), &v4.sin_addr) == 1) {
    address = Address(reinterpret_cast<const sockaddr*>(&v4), sizeof v4);
  } else if (inet_pton(AF_INET6, text.c_str(), &v6.sin6_addr) == 1) {
    address = Address(reinterpret_cast<const sockaddr*>(&v6), sizeof v6);
  } else {
    return Status(Code::invalid_argument, fmt::format("\"{}\" is not an IP address", host));
  }
  address.set_port(port);
  return address;
}

Address Address::any_v4(uint16_t port) {
  sockaddr_in any{};
  any.sin_family = AF_INET;
  any.sin_port = htons(port);
  return {reinterpret_cast<const sockaddr*>(&any), sizeof any};
}

Address Address::any_v6(uint16_t port) {
  sockaddr_in6 any{};
  any.sin6_family = AF_INET6;
  any.sin6_port = htons(port);
  return {reinterpret_cast<const sockaddr*>(&any), sizeof any};
}

uint16_t Address::port() const {
  return ntohs(family() == AF_INET6 ? reinterpret_cast<const sockaddr_in6*>(&storage_)->sin6_port
                                    : reinterpret_cast<const sockaddr_in*>(&storage_)->sin_port);
}

void Address::set_port(uint16_t port) {
  if (family() == AF_INET6) {
    reinterpret_cast<sockaddr_in6*>(&storage_)->sin6_port = htons(port);
  } else {
    reinterpret_cast<sockaddr_in*>(&storage_)->sin_port = htons(port);
  }
}

bool Address::loopback() const {
  if (family() == AF_INET) return bytes()[0] == 127;
  return std::memcmp(bytes().data(), &in6addr_loopback, 16) == 0;
}

std::span<const unsigned char> Address::bytes() const {
  if (family() == AF_INET6) {
    return reinterpret_cast<const sockaddr_in6*>(&storage_)->sin6_addr.s6_addr;
  }
  const auto* v4 = reinterpret_cast<const sockaddr_in*>(&storage_);
  return {reinterpret_cast<const unsigned char*>(&v4->sin_addr), 4};
}

std::string Address::host() const {
  char text[INET6_ADDRSTRLEN] = "";
  inet_ntop(family(), bytes().data(), text, sizeof text);
  return text;
}

std::string Address::to_string() const {
  return fmt::format(fmt::runtime(family() == AF_INET6 ? "[{}]:{}" : "{}:{}"), host(), port());
}

Result<HostPort> parse_host_port(std::string_view text) {
  const Status malformed(
      Code::invalid_argument,
      fmt::format("\"{}\": expected host:port or [IPv6]:port, port 1 to 65535", text));
  const size_t colon = text.rfind(':');
  if (colon == std::string_view::npos) return malformed;
  std::string_view host = text.substr(0, colon);
  const auto port = parse_integer(text.substr(colon + 1));
  if (!port || *port < 1 || *port > 65535) return malformed;
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  } else if (host.find(':') != std::string_view::npos) {
    return malformed;  // an IPv6 address without brackets is ambiguous
  }
  if (host.empty() || host.find_first_of("[] \t/") != std::string_view::npos) return malformed;
  return HostPort{std::string(host), static_cast<uint16_t>(*port)};
}

Result<std::vector<Address>> resolve(const HostPort& where) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(where.host.c_str(), nullptr, &hints, &found);
  if (error != 0) {
    return Status(Code::system,
                  fmt::format("cannot resolve \"{}\": {}", where.host, gai_strerror(error)));
  }
  std::vector<Address> addresses;
  for (const addrinfo* at = found; at != nullptr; at = at->ai_next) {
    if (at->ai_family != AF_INET && at->ai_family != AF_INET6) continue;
    addresses.emplace_back(at->ai_addr, at->ai_addrlen).set_port(where.port);
  }
  freeaddrinfo(found);
  return addresses;
}

Result<Descriptor> listen_on(const Address& address) {
  auto socket = tcp_socket(address);
  if (!socket.ok()) return socket;
  if (address.family() == AF_INET6) set_flag(*socket, IPPROTO_IPV6, IPV6_V6ONLY, 1);
  return bind_and_listen(std::move(*socket), address);
}

Result<Descriptor> listen_everywhere(uint16_t port) {
  const Address v6 = Address::any_v6(port);
  if (auto socket = tcp_socket(v6); socket.ok()) {
    set_flag(*socket, IPPROTO_IPV6, IPV6_V6ONLY, 0);
    auto listener = bind_and_listen(std::move(*socket), v6);
    if (listener.ok()) return listener;
  }
  return listen_on(Address::any_v4(port));  // a host without IPv6
}

std::string local_host(const Descriptor& socket) {
  constexpr std::string_view kMapped = "::ffff:";  // IPv4 at a listener for both
  sockaddr_storage storage{};
  socklen_t length = sizeof storage;
  if (getsockname(socket.get(), reinterpret_cast<sockaddr*>(&storage), &length) != 0) return {};
  std::string host = Address(reinterpret_cast<const sockaddr*>(&storage), length).host();
  const bool mapped = host.starts_with(kMapped) && host.find('.') != std::string::npos;
  return mapped ? host.substr(kMapped.size()) : host;
}

uint16_t local_port(const Descriptor& socket) {
  sockaddr_storage storage{};
  socklen_t length = sizeof storage;
  if (getsockname(socket.get(), reinterpret_cast<sockaddr*>(&storage), &length) != 0) return 0;
  return Address(reinterpret_cast<const sockaddr*>(&storage), length).port();
}

Result<Descriptor> accept_from(const Descriptor& listener) {
  while (true) {
    Descriptor taken(accept4(listener.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (taken) {
      tune(taken);
      return taken;
    }
    if (would_block(errno)) return Descriptor();
    // These concern the one connection that waited (it is gone by now), not the listener.
    if (errno == EINTR || errno == ECONNABORTED || errno == EPROTO || errno == EPERM) continue;
    return Status(Code::system, fmt::format("cannot accept a connection: {}", reason(errno)));
  }
}

Result<Descriptor> connect_to(const Address& address, Nanoseconds deadline) {
  auto socket = tcp_socket(address);
  if (!socket.ok()) return socket;
  tune(*socket);
  // An interrupted non-blocking connect goes on by itself, like one in progress.
  if (connect(socket->get(), address.get(), address.length()) != 0 && errno != EINPROGRESS &&
      errno != EINTR) {
    return system_error("cannot connect to", address);
  }
  if (const Status waited = wait_for(*socket, POLLOUT, deadline); !waited.ok()) {
    return Status(waited.code(),
                  fmt::format("cannot connect to {}: {}", address.to_string(), waited.message()));
  }
  int error = 0;
  socklen_t length = sizeof error;
  getsockopt(socket->get(), SOL_SOCKET, SO_ERROR, &error, &length);
  errno = error;
  if (error != 0) return system_error("cannot connect to", address);
  return socket;
}

Status wait_for(const Descriptor& socket, short events, Nanoseconds deadline) {
  while (true) {
    pollfd one{socket.get(), events, 0};
    const int ready = poll(&one, 1, milliseconds_until(deadline));
    if (ready > 0) return {};
    if (ready < 0 && errno != EINTR) return {Code::system, reason(errno)};
    if (steady_clock().now() >= deadline) return {Code::timeout, "no answer in time"};
  }
}

Status send_all(const Descriptor& socket, std::string_view bytes, Nanoseconds deadline) {
  while (!bytes.empty()) {
    const auto sent = send_some(socket, bytes);
    if (!sent.ok()) return sent.status();
    bytes.remove_prefix(sent->moved);
    if (sent->moved > 0) continue;
    if (Status waited = wait_for(socket, POLLOUT, deadline); !waited.ok()) return waited;
  }
  return {};
}

Status recv_all(const Descriptor& socket, std::span<char> bytes, Nanoseconds deadline) {
  while (!bytes.empty()) {
    const auto received = recv_some(socket, bytes);
    if (!received.ok()) return received.status();
    if (received->ended) return {Code::peer_lost, "the connection was closed"};
    bytes = bytes.subspan(received->moved);
    if (received->moved > 0) continue;
    if (Status waited = wait_for(socket, POLLIN, deadline); !waited.ok()) return waited;
  }
  return {};
}

Result<Transfer> send_some(const Descriptor& socket, std::string_view bytes) {
  while (true) {
    const ssize_t sent = send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent >= 0) return Transfer{static_cast<size_t>(sent), false};
    if (would_block(errno)) return Transfer{};
    if (errno != EINTR) return connection_error();
  }
}

Result<Transfer> recv_some(const Descriptor& socket, std::span<char> bytes) {
  while (true) {
    const ssize_t received = recv(socket.get(), bytes.data(), bytes.size(), 0);
    if (received >= 0) return Transfer{static_cast<size_t>(received), received == 0};
    if (would_block(errno)) return Transfer{};
    if (errno != EINTR) return connection_error();
  }
}

std::string reason(int error) {
  return std::generic_category().message(error);
}

int milliseconds_until(Nanoseconds deadline) {
  const Nanoseconds left = deadline - steady_clock().now();
  if (left <= Nanoseconds::zero()) return 0;
  const auto rounded = std::chrono::ceil<std::chrono::milliseconds>(left).count();
  return static_cast<int>(std::min<int64_t>(rounded, INT_MAX));
}

}  // namespace ringfold
