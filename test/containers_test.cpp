// Reported bugs of other libraries as tests of ours: what containers refuse or hide. The numbers
// C41 ... are those of the list of cases.
#include <dirent.h>
#include <fmt/core.h>
#include <sys/syscall.h>

#include <atomic>
#include <catch2/catch.hpp>
#include <cstdlib>
#include <thread>
#include <vector>

#include "ringfold/communicator.h"
#include "test/cases.h"
#include "test/confined.h"
#include "test/processes.h"
#include "test/skip.h"

using namespace ringfold;
using namespace ringfold::test;
using namespace std::chrono_literals;

namespace {

constexpr const char* kNoNamespaces = "needs the right to make namespaces";

// A sum of f32 whose every element is right: of whole numbers, which none of the ranks rounds.
void exact_sum(Communicator& comm, size_t count) {
  const int ranks = comm.size();
  std::vector<float> x(count);
  for (size_t i = 0; i < count; ++i)
    x[i] = static_cast<float>(i % 61) + static_cast<float>(comm.rank());
  if (!rank_ok(comm.all_reduce(x.data(), x.data(), count, DType::f32, Op::sum).wait())) return;
  size_t wrong = 0;
  for (size_t i = 0; i < count; ++i)
    wrong += x[i] == static_cast<float>(ranks * static_cast<int>(i % 61) + ranks * (ranks - 1) / 2)
                 ? 0
                 : 1;
  RANK_CHECK(wrong == 0);
}

// What this process says on stderr while `body` runs, with RINGFOLD_LOG=warn.
std::string logged(const std::function<void()>& body) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0) return "no pipe";
  const int before = dup(STDERR_FILENO);
  dup2(ends[1], STDERR_FILENO);
  body();
  dup2(before, STDERR_FILENO);
  std::string text;
  char bytes[4096];
  for (ssize_t n; (n = read(ends[0], bytes, sizeof bytes)) > 0;)
    text.append(bytes, static_cast<size_t>(n));
  for (const int fd : {ends[0], ends[1], before}) close(fd);
  return text;
}

// Ranks that are confined, each by `confine`, and by nothing else. `body` gets the transport and
// what the rank has logged.
std::string on_confined(int ranks, const std::function<void(int rank)>& confine,
                        const std::function<void(Communicator&, const std::string& log)>& body,
                        const std::string& transports = "") {
  setenv("RINGFOLD_LOG", "warn", 1);
  const std::string failed = run_ranks(ranks, 40s, [&](const Rendezvous& where) {
    confine(where.rank);
    Options options;
    options.transports = transports;
    Communicator comm;
    const std::string log = logged([&] {
      auto made = Communicator::create(where, options);
      if (rank_ok(made.status())) comm = *made;
    });
    if (!comm.valid()) return 1;
    body(comm, log);
    return 0;
  });
  unsetenv("RINGFOLD_LOG");
  return failed;
}

size_t lines(const std::string& text) {
  return static_cast<size_t>(std::count(text.begin(), text.end(), '\n'));
}

size_t files_in_dev_shm() {
  size_t count = 0;
  if (DIR* const open = opendir("/dev/shm")) {
    while (readdir(open) != nullptr) ++count;
    closedir(open);
  }
  return count - 2;  // . and ..
}

}  // namespace

TEST_CASE("C41: a small or read-only /dev/shm") {
  const char* const options = GENERATE("size=64m", "size=1m", "size=64k", "ro");
  bool allowed = true;
  CHECK(confined([&] { return own_dev_shm(options); },
                 [] {
                   return run_ranks(4, 30s, [](const Rendezvous& where) {
                     auto comm = Communicator::create(where);
                     if (!rank_ok(comm.status())) return 1;
                     exact_sum(*comm, size_t{16} << 20);
                     return 0;
                   });
                 },
                 &allowed) == "");
  if (!allowed) skip(kNoNamespaces);
}

TEST_CASE("C42: killed ranks leave nothing in a small /dev/shm, thirty times") {
  bool allowed = true;
  CHECK(confined(
            [] { return own_dev_shm("size=8m"); },
            []() -> std::string {
              for (int life = 0; life < 30; ++life) {
                const Shared<std::atomic<int>> busy;
                Processes ranks(4, [&](const Rendezvous& where) {
                  auto comm = Communicator::create(where);
                  if (!rank_ok(comm.status())) return 1;
                  auto memory = allocate_memory(1 << 20);
                  if (!rank_ok(memory.status())) return 1;
                  for (int i = 0;; ++i) {
                    (void)comm->all_reduce(*memory, *memory, 1 << 18, DType::f32, Op::max).wait();
                    if (i == 3) ++*busy;
                  }
                });
                for (int i = 0; i < 10'000 && *busy < 4; ++i) std::this_thread::sleep_for(1ms);
                if (*busy < 4) return fmt::format("life {} did not start", life);
                for (int rank = 0; rank < 4; ++rank) ranks.kill(rank);
                (void)ranks.wait(10s);
                if (const size_t files = files_in_dev_shm(); files != 0)
                  return fmt::format("{} files are left after life {}", files, life);
              }
              return run_ranks(4, 30s, [](const Rendezvous& where) {
                auto comm = Communicator::create(where);
                if (!rank_ok(comm.status())) return 1;
                exact_sum(*comm, 1 << 20);
                return 0;
              });
            },
            &allowed) == "");
  if (!allowed) skip(kNoNamespaces);
}

TEST_CASE("C43: cross-memory attach is refused, to all ranks or to one") {
  const bool all = GENERATE(true, false);
  const std::string transport = GENERATE(from_range(transports()));
  CHECK(on_confined(
            3,
            [&](int rank) {
              if (!all && rank != 1) return;
              refuse_call(SYS_process_vm_readv);
              refuse_call(SYS_process_vm_writev);
            },
            [&](Communicator& comm, const std::string& log) {
              RANK_CHECK(comm.transport() == transport);
              RANK_CHECK(lines(log) <= 1);
              exact_sum(comm, 400'003);
            },
            transport) == "");
}

TEST_CASE("C43: every rank in a user namespace of its own") {
  bool allowed = true;
  (void)confined([] { return unshare(CLONE_NEWUSER) == 0; }, [] { return std::string(); },
                 &allowed);
  if (!allowed) return skip(kNoNamespaces);
  CHECK(on_confined(
            3, [](int) { RANK_CHECK(unshare(CLONE_NEWUSER) == 0); },
            [](Communicator& comm, const std::string& log) {
              RANK_CHECK(comm.transport() == "region");
              RANK_CHECK(log == "");
              exact_sum(comm, 400'003);
            }) == "");
}

TEST_CASE("C45: threads with communicators of their own, where cross-memory attach is refused") {
  CHECK(on_confined(
            2, [](int) { refuse_call(SYS_process_vm_readv); },
            [](Communicator& comm, const std::string&) {
              auto second = comm.split(0, 0);
              if (!rank_ok(second.status())) return;
              std::thread other([&] { exact_sum(*second, 409'600); });
              exact_sum(comm, 409'600);
              other.join();
            }) == "");
}

TEST_CASE("one rank alone is refused shared memory: all use UCX, and say so once") {
#ifdef RINGFOLD_TEST_UCX
  const std::string what = GENERATE("memfd_create", "mmap", "fallocate");
  CHECK(on_confined(
            3,
            [&](int rank) {
              if (rank != 1) return;
              if (what == "memfd_create") refuse_call(SYS_memfd_create);
              if (what == "fallocate") refuse_call(SYS_fallocate);
              if (what == "mmap") refuse_shared_mappings(1);
            },
            [&](Communicator& comm, const std::string& log) {
              const std::string transport = comm.rank() == 1 ? "ucx" : "shm+ucx";
              const std::string reversed = "ucx+shm";
              RANK_CHECK((comm.transport() == transport || comm.transport() == reversed));
              RANK_CHECK(lines(log) == 1);
              RANK_CHECK(log.find("memory") != std::string::npos);
              exact_sum(comm, 400'003);
              std::vector<int32_t> each(3);
              const int32_t mine = comm.rank();
              rank_ok(comm.all_gather(&mine, each.data(), 1, DType::i32).wait());
              RANK_CHECK(each == std::vector<int32_t>{0, 1, 2});
            }) == "");
#else
  skip("ucx: built without it");
#endif
}

TEST_CASE("one rank alone is refused as much memory as a region takes: messages, for all") {
  CHECK(on_confined(
            3,
            [](int rank) {
              if (rank == 2) refuse_shared_mappings(4 << 20);
            },
            [](Communicator& comm, const std::string& log) {
              RANK_CHECK(comm.transport() == "shm");
              RANK_CHECK(lines(log) == 1);
              RANK_CHECK(log.find("no shared region, messages instead") != std::string::npos);
              exact_sum(comm, 400'003);
            }) == "");
}

TEST_CASE("one rank alone cannot map another's memory: it is used as any other") {
  CHECK(on_confined(
            2,
            [](int rank) {
              if (rank == 1) refuse_shared_mappings(20 << 20);
            },
            [](Communicator& comm, const std::string&) {
              constexpr size_t kBytes = 24 << 20;
              RANK_CHECK(comm.transport() == "region");
              const auto memory = allocate_memory(kBytes);
              if (comm.rank() == 1) {  // nor have any
                RANK_CHECK(memory.status().code() == Code::system);
              } else if (!rank_ok(memory.status())) {
                return;
              }
              std::vector<float> heap(kBytes / 4);
              auto* const x = memory.ok() ? static_cast<float*>(*memory) : heap.data();
              for (int i = 0; i < 10; ++i) {
                std::fill_n(x, kBytes / 4, 1.0F);
                Work work = comm.all_reduce(x, x, kBytes / 4, DType::f32, Op::sum);
                rank_ok(work.wait());
                RANK_CHECK(work.report().transport == "region");
                RANK_CHECK(std::all_of(x, x + kBytes / 4, [](float y) { return y == 2; }));
              }
              if (memory.ok()) rank_ok(free_memory(*memory));
            }) == "");
}

// ---- who shares a host ------------------------------------------------------------------------

namespace {

// A process that keeps a mount namespace with a /dev/shm of its own alive.
class Namespace {
 public:
  Namespace() {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) return;
    fflush(nullptr);
    pid_ = fork();
    if (pid_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (!own_dev_shm("size=1m")) _exit(1);
      detail::write_all(ends[1], "x");
      for (;;) pause();
    }
    close(ends[1]);
    char byte;
    works_ = read(ends[0], &byte, 1) == 1;
    close(ends[0]);
  }
  Namespace(const Namespace&) = delete;
  Namespace& operator=(const Namespace&) = delete;
  ~Namespace() {
    if (pid_ > 0) kill(pid_, SIGKILL);
    if (pid_ > 0) waitpid(pid_, nullptr, 0);
  }
  [[nodiscard]] bool works() const { return works_; }
  void enter() const {
    const int fd = open(fmt::format("/proc/{}/ns/mnt", pid_).c_str(), O_RDONLY | O_CLOEXEC);
    RANK_CHECK(setns(fd, CLONE_NEWNS) == 0);
    close(fd);
  }

 private:
  pid_t pid_ = -1;
  bool works_ = false;
};

}  // namespace

TEST_CASE("C44: the same host by name, but two file systems at /dev/shm") {
#ifdef RINGFOLD_TEST_UCX
  const Namespace first, second;
  if (!first.works() || !second.works()) return skip(kNoNamespaces);
  const std::string allowed = GENERATE("", "shm,ucx");
  CHECK(on_confined(
            4, [&](int rank) { (rank < 2 ? first : second).enter(); },
            [&](Communicator& comm, const std::string& log) {
              // Memory without a name is shared across them, so the region does not mind.
              if (allowed.empty())
                RANK_CHECK(comm.transport() == "region");
              else
                RANK_CHECK(comm.transport().find("ucx") != std::string::npos);
              RANK_CHECK(lines(log) == 1);
              // Several parts each, which are under way together and end in any order.
              for (int i = 0; i < 10; ++i) exact_sum(comm, 400'003);
              const int partner = (comm.rank() + 2) % 4;
              int32_t theirs = -1;
              const int32_t mine = comm.rank();
              Group group;
              (void)comm.send(&mine, 1, DType::i32, partner);
              (void)comm.recv(&theirs, 1, DType::i32, partner);
              rank_ok(group.submit().wait());
              RANK_CHECK(theirs == partner);
            },
            allowed) == "");
#else
  skip("ucx: built without it");
#endif
}

TEST_CASE("C46: other names for one host change nothing") {
  bool allowed = true;
  (void)confined([] { return unshare(CLONE_NEWUTS) == 0; }, [] { return std::string(); }, &allowed);
  if (!allowed) return skip(kNoNamespaces);
  CHECK(on_confined(
            2,
            [](int rank) {
              const std::string name = rank == 0 ? "a.x" : "a.y";
              RANK_CHECK(unshare(CLONE_NEWUTS) == 0);
              RANK_CHECK(sethostname(name.c_str(), name.size()) == 0);
            },
            [](Communicator& comm, const std::string& log) {
              RANK_CHECK(comm.transport() == "region");
              RANK_CHECK(log == "");
              exact_sum(comm, 400'003);
            }) == "");
}

TEST_CASE("C46: one name for two that share neither memory nor processes") {
#ifdef RINGFOLD_TEST_UCX
  bool allowed = true;
  (void)confined([] { return unshare(CLONE_NEWIPC | CLONE_NEWPID) == 0; },
                 [] { return std::string(); }, &allowed);
  if (!allowed) return skip(kNoNamespaces);
  // Each rank is the first process of a pid namespace: the other's death could not be seen there.
  CHECK(run_ranks(2, 40s, [](const Rendezvous& where) {
          if (!RANK_CHECK(unshare(CLONE_NEWPID) == 0)) return 1;
          const pid_t inner = fork();
          if (inner != 0) {
            int status = 1;
            waitpid(inner, &status, 0);
            return status == 0 ? 0 : 1;
          }
          prctl(PR_SET_PDEATHSIG, SIGKILL);
          auto comm = Communicator::create(where);
          if (!rank_ok(comm.status())) _exit(1);
          RANK_CHECK(comm->transport() == "ucx");
          exact_sum(*comm, 400'003);
          comm = Communicator();
          _exit(ringfold::test::detail::failures > 0 ? 1 : 0);
        }) == "");
#else
  skip("ucx: built without it");
#endif
}
