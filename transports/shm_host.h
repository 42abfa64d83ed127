// What the shared-memory transport needs of the operating system: segments without a name, one
// datagram socket a process to hand them over and to ring, and the news that a process has died.
//
// Threads: one at a time.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "transports/shm_ring.h"

namespace ringfold::shm {

// A descriptor that is closed with its owner.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd();
  [[nodiscard]] int get() const { return fd_; }
  [[nodiscard]] int release() { return std::exchange(fd_, -1); }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

// A mapped segment. Not inherited by forked children.
class Mapping {
 public:
  Mapping() = default;
  Mapping(Mapping&& other) noexcept : segment_(std::exchange(other.segment_, nullptr)) {}
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(segment_, other.segment_);
    return *this;
  }
  ~Mapping();
  // A new segment, all its memory allocated: too little memory is an error here, not a SIGBUS
  // later. `fd` is what to hand over.
  static Result<Mapping> create(Fd* fd);
  // One that a peer made. Whatever is not exactly as create() makes it is refused.
  static Result<Mapping> adopt(const Fd& fd);
  [[nodiscard]] Segment* get() const { return segment_; }

 private:
  explicit Mapping(Segment* segment) : segment_(segment) {}
  static Result<Mapping> map(int fd);
  Segment* segment_ = nullptr;
};

using Token = std::array<uint8_t, 16>;

struct Address {
  // Where pid, socket and memory mean the same: boot of the kernel, network and pid namespaces.
  std::string host;
  std::string socket;  // abstract name, without the leading zero
  Token token{};       // proves that a datagram comes from somebody who was told the address
  int pid = 0;
  uint64_t started = 0;  // start time of the process: a pid alone may be another's by now

  [[nodiscard]] std::string encode() const;
  static std::optional<Address> decode(std::string_view text);
};

// Whether memory can be made, reserved, sealed, read and mapped here: a container may refuse any of
// it, and it is better known before others count on it.
Status probe_memory();
// The identity of this host as above, or why there is none.
Result<std::string> host_identity();
// In clock ticks since boot; 0 if there is no such process, or only its remains.
uint64_t process_started(int pid);

// Socket, and the descriptor that everything is waited on.
class Post {
 public:
  // Fails where memory cannot be shared at all.
  static Result<Post> make();

  [[nodiscard]] const Address& address() const { return address_; }

  enum class Sent : uint8_t { yes, later, gone };
  // Whether the peer's socket is there, without a word to it: a queue holds only ten letters, and
  // hundreds may be asking. errno says why not.
  [[nodiscard]] bool reaches(const Address& to) const;
  // Wakes the peer. Where its queue is full something is there for it to wake to.
  Sent ring(const Address& to);
  struct News {
    // memory: like a segment, but of the user; the answer is mapped or refused. gone: it is freed.
    enum class What : uint8_t {
      segment,
      goodbye,
      memory,
      mapped,
      refused,
      gone
    } what = What::segment;
    Token from{};
    uint32_t id = 0;
    Fd segment;
  };
  // `id`: what the two agree on to tell one segment from another.
  Sent hand_over(const Address& to, int segment, uint32_t id = 0,
                 News::What what = News::What::segment);
  Sent tell(const Address& to, News::What what, uint32_t id = 0);
  void say_goodbye(const Address& to);
  // The next message of a peer, if there is one; bells are swallowed.
  std::optional<News> next();

  // Readable on any message and any death that is watched.
  [[nodiscard]] int descriptor() const { return epoll_.get(); }
  // Is it readable, and is that a death that is watched? One system call, however many are.
  struct Stir {
    bool any = false, death = false;
  };
  [[nodiscard]] Stir stirred();
  // False in a forked child, which must not speak in its parent's name.
  [[nodiscard]] bool ours() const;

  // The descriptor also becomes readable once, after this time.
  void wake_within(Nanoseconds time);

  // Tells of the death of a process.
  class Watch {
   public:
    [[nodiscard]] bool dead();
    // Where the system refuses a pidfd, somebody must ask for dead() now and then.
    [[nodiscard]] bool silent() const { return !pidfd_; }
    void end(Post& post);

   private:
    friend class Post;
    Fd pidfd_;
    int pid_ = 0;
    uint64_t started_ = 0;
  };
  // Fails with peer_lost if the process is gone already.
  Result<Watch> watch(const Address& peer);

 private:
  Sent send(const Address& to, const void* bytes, size_t size, int fd);

  Address address_;
  Fd socket_, epoll_;
  Fd timer_;
};

}  // namespace ringfold::shm
