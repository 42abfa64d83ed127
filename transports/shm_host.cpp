#include "transports/shm_host.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <cstddef>
#include <fstream>
#include <vector>

namespace ringfold::shm {
namespace {

Status system_error(std::string_view what) {
  return {Code::system, fmt::format("{}: {}", what, std::strerror(errno))};
}

constexpr uint32_t kLetterMagic = 0x72666c32;

struct Letter {
  uint32_t magic = kLetterMagic;
  Post::News::What what = Post::News::What::segment;
  uint8_t unused[3] = {};
  uint32_t id = 0;
  Token to{}, from{};
};
static_assert(sizeof(Letter) == 44 && std::is_trivially_copyable_v<Letter>);

// What epoll says of the descriptor of a process; of the others it says 0.
constexpr uint64_t kDeath = 1;

sockaddr_un name_of(const Address& to) {
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  std::memcpy(name.sun_path + 1, to.socket.data(), to.socket.size());
  return name;
}

socklen_t name_bytes(const Address& to) {
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + to.socket.size());
}

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

}  // namespace

Fd::~Fd() {
  if (fd_ >= 0) close(fd_);
}

Mapping::~Mapping() {
  if (segment_ != nullptr) munmap(segment_, sizeof(Segment));
}

Result<Mapping> Mapping::map(int fd) {
  void* memory = mmap(nullptr, sizeof(Segment), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) return system_error("mapping a shared segment");
  madvise(memory, sizeof(Segment), MADV_DONTFORK);
  // What every message needs is there at once; the slots, thirty times as much, when large messages
  // come. Kernels before 5.14 refuse, and let it come when it is touched.
  madvise(memory, offsetof(Segment, slot), MADV_POPULATE_WRITE);
  return Mapping(static_cast<Segment*>(memory));
}

Result<Mapping> Mapping::create(Fd* fd) {
  *fd = Fd(memfd_create("ringfold", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!*fd) return system_error("creating a shared segment");
  errno = posix_fallocate(fd->get(), 0, sizeof(Segment));
  if (errno != 0)
    return system_error(fmt::format("allocating {} bytes for a shared segment", sizeof(Segment)));
  const Geometry geometry;
  if (pwrite(fd->get(), &geometry, sizeof(geometry), 0) != sizeof(geometry) ||
      fcntl(fd->get(), F_ADD_SEALS, kSeals) != 0)
    return system_error("preparing a shared segment");
  return map(fd->get());
}

Result<Mapping> Mapping::adopt(const Fd& fd) {
  const auto refuse = [](std::string_view why) {
    return Status(Code::invalid_argument, fmt::format("shared segment refused: {}", why));
  };
  struct stat info {};
  if (!fd || fstat(fd.get(), &info) != 0 || !S_ISREG(info.st_mode)) return refuse("not a file");
  if (info.st_size != static_cast<off_t>(sizeof(Segment)))
    return refuse(fmt::format("{} bytes, expected {}", info.st_size, sizeof(Segment)));
  if (static_cast<size_t>(info.st_blocks) * 512 < sizeof(Segment)) return refuse("not allocated");
  const int seals = fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals) return refuse("not sealed against shrinking");
  Geometry geometry{};
  if (pread(fd.get(), &geometry, sizeof(geometry), 0) != sizeof(geometry) || geometry != Geometry{})
    return refuse(fmt::format("version {}, ring {}, {} slots of {}; expected {}, {}, {} of {}",
                              geometry.version, geometry.ring_bytes, geometry.slots,
                              geometry.slot_bytes, kVersion, kRingBytes, kSlots, kSlotBytes));
  return map(fd.get());
}

Status probe_memory() {
  constexpr size_t kBytes = 4096;
  const Fd fd(memfd_create("ringfold-probe", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) return system_error("creating shared memory");
  errno = posix_fallocate(fd.get(), 0, kBytes);
  if (errno != 0) return system_error("reserving shared memory");
  if (fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0) return system_error("sealing shared memory");
  char byte = 0;
  if (pread(fd.get(), &byte, 1, 0) != 1) return system_error("reading shared memory");
  void* const memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (memory == MAP_FAILED) return system_error("mapping shared memory");
  munmap(memory, kBytes);
  return {};
}

// "ringfold-shm1 HOST SOCKET TOKEN PID STARTED"
std::string Address::encode() const {
  std::string hex;
  for (const uint8_t byte : token) hex += fmt::format("{:02x}", byte);
  return fmt::format("ringfold-shm{} {} {} {} {} {}", kVersion, host, socket, hex, pid, started);
}

std::optional<Address> Address::decode(std::string_view text) {
  std::vector<std::string_view> words;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(' ', begin), text.size());
    words.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  if (words.size() != 6 || words[0] != fmt::format("ringfold-shm{}", kVersion)) return {};
  const auto number = [](std::string_view word, auto* out, int base = 10) {
    const char* end = word.data() + word.size();
    const auto [stop, error] = std::from_chars(word.data(), end, *out, base);
    return error == std::errc() && stop == end;
  };
  Address address;
  address.host = words[1];
  address.socket = words[2];
  constexpr size_t kNameMax = sizeof(sockaddr_un::sun_path) - 1;
  if (address.socket.empty() || address.socket.size() > kNameMax) return {};
  if (words[3].size() != 2 * address.token.size()) return {};
  for (size_t i = 0; i < address.token.size(); ++i)
    if (!number(words[3].substr(2 * i, 2), &address.token[i], 16)) return {};
  if (!number(words[4], &address.pid) || !number(words[5], &address.started) || address.pid <= 0)
    return {};
  return address;
}

Result<std::string> host_identity() {
  std::string boot;
  if (!(std::ifstream("/proc/sys/kernel/random/boot_id") >> boot))
    return Status(Code::unsupported, "/proc/sys/kernel/random/boot_id cannot be read");
  struct stat network {
  }, processes{};
  if (stat("/proc/self/ns/net", &network) != 0 || stat("/proc/self/ns/pid", &processes) != 0)
    return Status(Code::unsupported, "/proc/self/ns cannot be read");
  return fmt::format("{}:{}:{}", boot, network.st_ino, processes.st_ino);
}

uint64_t process_started(int pid) {
  std::string line;
  if (!std::getline(std::ifstream(fmt::format("/proc/{}/stat", pid)), line)) return 0;
  // The second field is a name in parentheses, which may contain anything.
  const size_t name_end = line.rfind(')');
  if (name_end == std::string::npos || name_end + 2 >= line.size()) return 0;
  const char state = line[name_end + 2];
  if (state == 'Z' || state == 'X') return 0;
  size_t at = name_end + 2;
  for (int field = 3; field < 22 && at != std::string::npos; ++field) at = line.find(' ', at + 1);
  return at == std::string::npos ? 0 : std::strtoull(line.c_str() + at, nullptr, 10);
}

Result<Post> Post::make() {
  Post post;
  if (Status status = probe_memory(); !status.ok()) return status;
  auto host = host_identity();
  if (!host.ok()) return host.status();
  post.address_.host = *host;
  post.address_.pid = getpid();
  post.address_.started = process_started(post.address_.pid);
  Token& token = post.address_.token;
  if (getrandom(token.data(), token.size(), 0) != static_cast<ssize_t>(token.size()))
    return system_error("getrandom");
  post.socket_ = Fd(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  // An address without a name asks the kernel for a free abstract one.
  if (!post.socket_ ||
      bind(post.socket_.get(), reinterpret_cast<sockaddr*>(&name), sizeof(sa_family_t)) != 0)
    return system_error("binding an abstract socket");
  socklen_t size = sizeof(name);
  if (getsockname(post.socket_.get(), reinterpret_cast<sockaddr*>(&name), &size) != 0)
    return system_error("getsockname");
  post.address_.socket.assign(name.sun_path + 1, size - offsetof(sockaddr_un, sun_path) - 1);
  post.epoll_ = Fd(epoll_create1(EPOLL_CLOEXEC));
  epoll_event event{};
  event.events = EPOLLIN;
  post.timer_ = Fd(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK));
  for (const Fd* fd : {&post.socket_, &post.timer_})
    if (!post.epoll_ || !*fd || epoll_ctl(post.epoll_.get(), EPOLL_CTL_ADD, fd->get(), &event) != 0)
      return system_error("epoll");
  return post;
}

bool Post::ours() const {
  return getpid() == address_.pid;
}

bool Post::reaches(const Address& to) const {
  const Fd probe(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  sockaddr_un name = name_of(to);
  if (!probe) return true;  // to be found out by the first letter
  return connect(probe.get(), reinterpret_cast<sockaddr*>(&name), name_bytes(to)) == 0;
}

Post::Sent Post::send(const Address& to, const void* bytes, size_t size, int fd) {
  sockaddr_un name = name_of(to);
  iovec part{const_cast<void*>(bytes), size};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_name = &name;
  message.msg_namelen = name_bytes(to);
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (fd >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &fd, sizeof(fd));
  }
  ssize_t sent;
  do sent = sendmsg(socket_.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  while (sent < 0 && errno == EINTR);
  if (sent >= 0) return Sent::yes;
  // Too many descriptors in flight, no memory: as a full queue, these pass.
  return errno == ECONNREFUSED || errno == ENOENT || errno == EPERM ? Sent::gone : Sent::later;
}

Post::Sent Post::ring(const Address& to) {
  const char bell = 0;
  return send(to, &bell, sizeof(bell), -1);
}

Post::Sent Post::hand_over(const Address& to, int segment, uint32_t id, News::What what) {
  Letter letter;
  letter.what = what;
  letter.id = id;
  letter.to = to.token;
  letter.from = address_.token;
  return send(to, &letter, sizeof(letter), segment);
}

Post::Sent Post::tell(const Address& to, News::What what, uint32_t id) {
  return hand_over(to, -1, id, what);
}

void Post::say_goodbye(const Address& to) {
  tell(to, News::What::goodbye);  // if it is lost, our process's end will be noticed
}

std::optional<Post::News> Post::next() {
  for (;;) {
    Letter letter;
    iovec part{&letter, sizeof(letter)};
    alignas(cmsghdr) char control[CMSG_SPACE(4 * sizeof(int))];
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    const ssize_t size = recvmsg(socket_.get(), &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (size < 0 && errno == EINTR) continue;
    if (size < 0) return std::nullopt;
    News news;
    for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
         header = CMSG_NXTHDR(&message, header)) {
      if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
      for (size_t at = 0; CMSG_LEN(at + sizeof(int)) <= header->cmsg_len; at += sizeof(int)) {
        int fd;
        std::memcpy(&fd, CMSG_DATA(header) + at, sizeof(fd));
        news.segment = Fd(fd);  // closes one that was there: only one is expected
      }
    }
    if (size != sizeof(letter) || (message.msg_flags & MSG_TRUNC) != 0) continue;
    if (letter.magic != kLetterMagic || letter.to != address_.token) continue;
    if (letter.what > News::What::gone) continue;
    news.what = letter.what;
    news.from = letter.from;
    news.id = letter.id;
    return news;
  }
}

Post::Stir Post::stirred() {
  std::array<epoll_event, 4> events;  // more than there are beside deaths
  const int ready = epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), 0);
  Stir stir;
  for (int i = 0; i < ready; ++i) {
    stir.any = true;
    stir.death |= events[static_cast<size_t>(i)].data.u64 == kDeath;
  }
  uint64_t ticks;
  if (stir.any) [[maybe_unused]]
    const ssize_t was_set = read(timer_.get(), &ticks, sizeof(ticks));
  return stir;
}

void Post::wake_within(Nanoseconds time) {
  const itimerspec once{{0, 0}, {time.count() / 1'000'000'000, time.count() % 1'000'000'000}};
  timerfd_settime(timer_.get(), 0, &once, nullptr);
}

Result<Post::Watch> Post::watch(const Address& peer) {
  const Status gone(Code::peer_lost, fmt::format("process {} is gone", peer.pid));
  Watch watch;
  watch.pid_ = peer.pid;
  watch.started_ = peer.started;
  watch.pidfd_ = Fd(static_cast<int>(syscall(SYS_pidfd_open, peer.pid, 0)));
  if (!watch.pidfd_ && errno == ESRCH) return gone;
  // After pidfd_open, so that it is this process that the descriptor stands for.
  if (process_started(peer.pid) != peer.started) return gone;
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = kDeath;
  if (watch.pidfd_ && epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, watch.pidfd_.get(), &event) != 0)
    return system_error("epoll");
  return watch;
}

bool Post::Watch::dead() {
  if (!pidfd_) return process_started(pid_) != started_;
  pollfd look{pidfd_.get(), POLLIN, 0};
  return poll(&look, 1, 0) == 1;
}

void Post::Watch::end(Post& post) {
  // Closing alone would not do if a forked child still has the descriptor.
  if (pidfd_) epoll_ctl(post.epoll_.get(), EPOLL_CTL_DEL, pidfd_.get(), nullptr);
  pidfd_ = Fd();
}

}  // namespace ringfold::shm
