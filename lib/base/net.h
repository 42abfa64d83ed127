// TCP for start-up: owning descriptors, addresses, and blocking calls that end at a deadline.
// Everything is IPv4 and IPv6, non-blocking underneath, close-on-exec, and never raises SIGPIPE.
//
// Thread-safety: free functions and plain values; a Descriptor belongs to one thread at a time.
// Deadlines are absolute, on steady_clock().
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ringfold/status.h"
#include "ringfold/types.h"

namespace ringfold {

// Owns a file descriptor; -1: none.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    if (this != &other) reset(std::exchange(other.fd_, -1));
    return *this;
  }
  ~Descriptor() { reset(); }

  [[nodiscard]] int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void reset(int fd = -1);

 private:
  int fd_ = -1;
};

// An IPv4 or IPv6 address with a port.
class Address {
 public:
  Address() = default;
  Address(const sockaddr* from, socklen_t length);
  // "10.0.0.1" or "fd00::1", without brackets and complete; invalid_argument for anything else.
  [[nodiscard]] static Result<Address> numeric(std::string_view host, uint16_t port);
  [[nodiscard]] static Address any_v4(uint16_t port);
  [[nodiscard]] static Address any_v6(uint16_t port);

  [[nodiscard]] const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage_); }
  [[nodiscard]] socklen_t length() const { return length_; }
  [[nodiscard]] int family() const { return storage_.ss_family; }
  [[nodiscard]] uint16_t port() const;
  void set_port(uint16_t port);
  [[nodiscard]] bool loopback() const;
  // The 4 or 16 bytes in network order.
  [[nodiscard]] std::span<const unsigned char> bytes() const;
  [[nodiscard]] std::string host() const;       // "10.0.0.1", "fe80::1"
  [[nodiscard]] std::string to_string() const;  // "10.0.0.1:80", "[fe80::1]:80"

 private:
  sockaddr_storage storage_{};
  socklen_t length_ = 0;
};

struct HostPort {
  std::string host;
  uint16_t port = 0;
};
// "host:port" or "[v6]:port"; the port is 1 to 65535.
[[nodiscard]] Result<HostPort> parse_host_port(std::string_view text);
// All addresses of a host. Names go to the system's resolver, whose own time limits hold.
[[nodiscard]] Result<std::vector<Address>> resolve(const HostPort& where);

// Listens on the address (port 0: any free one). system: names the address and the reason.
[[nodiscard]] Result<Descriptor> listen_on(const Address& address);
// Listens on every address of this host, IPv6 included where there is any.
[[nodiscard]] Result<Descriptor> listen_everywhere(uint16_t port);
[[nodiscard]] uint16_t local_port(const Descriptor& socket);
// "10.0.0.1", "fd00::1": the address of this host that the connection uses.
[[nodiscard]] std::string local_host(const Descriptor& socket);
// Takes one waiting connection; an empty Descriptor if none waits. system: out of descriptors.
[[nodiscard]] Result<Descriptor> accept_from(const Descriptor& listener);
[[nodiscard]] Result<Descriptor> connect_to(const Address& address, Nanoseconds deadline);

// Waits for `events` (POLLIN, POLLOUT); timeout when the deadline passes first.
[[nodiscard]] Status wait_for(const Descriptor& socket, short events, Nanoseconds deadline);
// All bytes or an error: peer_lost if the connection ended, timeout at the deadline.
[[nodiscard]] Status send_all(const Descriptor& socket, std::string_view bytes,
                              Nanoseconds deadline);
[[nodiscard]] Status recv_all(const Descriptor& socket, std::span<char> bytes,
                              Nanoseconds deadline);

// What is possible now, without waiting. moved == 0: would block.
struct Transfer {
  size_t moved = 0;
  bool ended = false;  // orderly end of the stream (receive only)
};
[[nodiscard]] Result<Transfer> send_some(const Descriptor& socket, std::string_view bytes);
[[nodiscard]] Result<Transfer> recv_some(const Descriptor& socket, std::span<char> bytes);

// The reason of a failed system call: "Connection refused".
[[nodiscard]] std::string reason(int error);
// Milliseconds until the deadline for poll(), rounded up, at least 0.
[[nodiscard]] int milliseconds_until(Nanoseconds deadline);

struct Interface {
  std::string name;
  Address address;  // port 0
};
// Addresses of this host's interfaces that are up, loopback last; link-local IPv6 left out.
// `filter` is RINGFOLD_INTERFACES: comma-separated names or prefixes of names ("eth"), addresses,
// networks ("10.0.0.0/8"); a list that begins with ^ names those to leave out. Empty: all.
// invalid_argument: a malformed entry, or nothing is left; lists the interfaces that exist.
[[nodiscard]] Result<std::vector<Interface>> local_interfaces(std::string_view filter);
// The same choice among given ones.
[[nodiscard]] Result<std::vector<Interface>> choose_interfaces(std::vector<Interface> all,
                                                               std::string_view filter);

}  // namespace ringfold
