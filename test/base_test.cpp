// lib/base: settings, durations and sizes, log lines, addresses, interfaces, the handshake.
#include "lib/base/base.h"

#include <fmt/format.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <catch2/catch.hpp>
#include <thread>

#include "lib/base/auth.h"
#include "lib/base/cores.h"
#include "lib/base/net.h"
#include "lib/base/wire.h"
#include "test/environment.h"

using namespace ringfold;
using test::Environment;
using namespace std::chrono_literals;

TEST_CASE("sizes and durations parse exactly what is documented") {
  CHECK(parse_bytes("0") == 0u);
  CHECK(parse_bytes("64K") == 65536u);
  CHECK(parse_bytes("1.5G") == 1610612736u);
  CHECK(parse_bytes("8B") == 8u);
  CHECK(parse_bytes("18446744073709551615") == UINT64_MAX);
  for (const char* bad : {"", "K", "-1", "1.5", "64k", "64KiB", " 1", "1 ", "nan", "inf", "0x10",
                          "18446744073709551616", "17000000T", "1e3", "1..5K"}) {
    INFO(bad);
    CHECK_FALSE(parse_bytes(bad).has_value());
  }
  CHECK(parse_duration("30") == 30s);
  CHECK(parse_duration("1.5") == 1500ms);
  CHECK(parse_duration("500ms") == 500ms);
  CHECK(parse_duration("20us") == 20us);
  CHECK(parse_duration("2m") == 2min);
  CHECK(parse_duration("1h") == 1h);
  for (const char* bad : {"", "s", "-1", "1 s", "1d", "nan", "inf", "1e3", "9999999999999"}) {
    INFO(bad);
    CHECK_FALSE(parse_duration(bad).has_value());
  }
  CHECK(parse_integer("-3") == -3);
  CHECK_FALSE(parse_integer("3x").has_value());
  CHECK_FALSE(parse_integer("").has_value());
}

TEST_CASE("an unusable setting names the variable, the value and what is accepted") {
  Environment environment;
  CHECK(check_settings().ok());
  environment.set("RINGFOLD_TIMEOUT", "soon");
  const Status timeout = setting_duration("RINGFOLD_TIMEOUT").status();
  CHECK(timeout.code() == Code::invalid_argument);
  CHECK_THAT(timeout.message(),
             Catch::Contains("RINGFOLD_TIMEOUT=\"soon\"") && Catch::Contains("500ms"));
  CHECK(check_settings().message() == timeout.message());
  environment.set("RINGFOLD_TIMEOUT", "2m");
  CHECK(**setting_duration("RINGFOLD_TIMEOUT") == 2min);
  environment.set("RINGFOLD_PIECE", "64k");
  CHECK_THAT(check_settings().message(), Catch::Contains("RINGFOLD_PIECE=\"64k\""));
  environment.set("RINGFOLD_PIECE", "");  // as good as unset
  CHECK(check_settings().ok());
  environment.set("RINGFOLD_LOG", "loud");
  CHECK_THAT(check_settings().message(), Catch::Contains("off|error|warn|info|debug"));
}

TEST_CASE("unknown variables come with the nearest known name") {
  Environment environment;
  environment.set("RINGFOLD_TIMOUT", "1");
  environment.set("RINGFOLD_ENTIRELY_DIFFERENT", "1");
  environment.set("RINGFOLD_RANK", "0");
  const auto unknown = unknown_settings();
  REQUIRE(unknown.size() == 2);
  for (const UnknownSetting& one : unknown) {
    CHECK(one.nearest == (one.name == "RINGFOLD_TIMOUT" ? "RINGFOLD_TIMEOUT" : ""));
  }
}

namespace {

// What a child with RINGFOLD_LOG=`level` writes to its two streams.
std::string log_output(const char* level) {
  int both[2];
  REQUIRE(pipe(both) == 0);
  const pid_t child = fork();
  if (child == 0) {
    dup2(both[1], STDOUT_FILENO);
    dup2(both[1], STDERR_FILENO);
    close(both[0]), close(both[1]);
    if (level == nullptr) unsetenv("RINGFOLD_LOG");
    if (level != nullptr) setenv("RINGFOLD_LOG", level, 1);
    set_log_rank(3);
    log_line(LogLevel::error, "an error");
    log_line(LogLevel::warn, "a warning");
    log_line(LogLevel::info, "a fact");
    _exit(0);
  }
  close(both[1]);
  std::string output;
  char chunk[512];
  for (ssize_t n = 0; (n = read(both[0], chunk, sizeof chunk)) > 0;) {
    output.append(chunk, static_cast<size_t>(n));
  }
  close(both[0]);
  waitpid(child, nullptr, 0);
  return output;
}

}  // namespace

TEST_CASE("nothing is printed by default, and what is asked for carries time and rank (C66)") {
  CHECK(log_output(nullptr).empty());
  CHECK(log_output("off").empty());
  const std::string warn = log_output("warn");
  CHECK_THAT(warn, Catch::Matches("ringfold [0-9]+\\.[0-9]{6} rank 3 error: an error\n"
                                  "ringfold [0-9]+\\.[0-9]{6} rank 3 warn: a warning\n"));
}

TEST_CASE("host and port") {
  CHECK(parse_host_port("node1:80")->host == "node1");
  CHECK(parse_host_port("[::1]:65535")->host == "::1");
  CHECK(parse_host_port("[::1]:65535")->port == 65535);
  for (const char* bad : {"", "node1", ":80", "node1:", "node1:0", "node1:65536", "::1:80",
                          "node1:80x", "[::1]80", "[]:80", "a b:80", "http://a:80"}) {
    INFO(bad);
    const auto parsed = parse_host_port(bad);
    CHECK(parsed.status().code() == Code::invalid_argument);
    CHECK_THAT(parsed.status().message(), Catch::Contains(fmt::format("\"{}\"", bad)));
  }
  CHECK(Address::numeric("::1", 5)->to_string() == "[::1]:5");
  CHECK(Address::numeric("127.0.0.1", 5)->to_string() == "127.0.0.1:5");
  CHECK_FALSE(Address::numeric("localhost", 5).ok());
}

TEST_CASE("interfaces are chosen by name, prefix, exclusion, address and network (C40)") {
  const std::vector<Interface> all = {{"eth0", *Address::numeric("10.0.0.5", 0)},
                                      {"eth1", *Address::numeric("10.1.0.5", 0)},
                                      {"eth10", *Address::numeric("192.168.7.1", 0)},
                                      {"docker0", *Address::numeric("172.17.0.1", 0)},
                                      {"eth0", *Address::numeric("fd00::5", 0)},
                                      {"lo", *Address::numeric("127.0.0.1", 0)}};
  const auto chosen = [&](std::string_view filter) {
    const auto some = choose_interfaces(all, filter);
    if (!some.ok()) return some.status().message();
    std::string hosts;
    for (const Interface& one : *some) hosts += one.address.host() + " ";
    return hosts;
  };
  CHECK(chosen("eth") == "10.0.0.5 10.1.0.5 192.168.7.1 fd00::5 ");
  CHECK(chosen("eth1") == "10.1.0.5 ");  // a name, although also a prefix of eth10
  CHECK(chosen("^lo,docker") == "10.0.0.5 10.1.0.5 192.168.7.1 fd00::5 ");
  CHECK(chosen("^lo,^eth") == "172.17.0.1 ");
  CHECK(chosen("10.1.0.5") == "10.1.0.5 ");
  CHECK(chosen("10.0.0.0/8,lo") == "10.0.0.5 10.1.0.5 127.0.0.1 ");
  CHECK(chosen("10.0.0.0/15") == "10.0.0.5 10.1.0.5 ");
  CHECK(chosen("10.0.0.0/16") == "10.0.0.5 ");
  CHECK(chosen("fd00::/64") == "fd00::5 ");
  CHECK(chosen("0.0.0.0/0") == "10.0.0.5 10.1.0.5 192.168.7.1 172.17.0.1 127.0.0.1 ");
  CHECK(chosen("").find("127.0.0.1") != std::string::npos);
  for (const char* bad : {"nosuch0", "eth,", "eth,^lo", "10.0.0.0/33", "10.0.0.0/x", "10.0.0/8",
                          "^eth,docker,lo", "^"}) {
    INFO(bad);
    const auto refused = choose_interfaces(all, bad);
    REQUIRE(refused.status().code() == Code::invalid_argument);
    CHECK_THAT(refused.status().message(), Catch::Contains(bad) &&
                                               Catch::Contains("docker0 (172.17.0.1)") &&
                                               Catch::Contains("eth10"));
  }
}

TEST_CASE("this host's interfaces end with loopback") {
  const auto all = local_interfaces("");
  REQUIRE(all.ok());
  REQUIRE_FALSE(all->empty());
  CHECK(all->back().address.loopback());
  CHECK(local_interfaces("127.0.0.0/8")->front().name == "lo");
}

TEST_CASE("connect, send and receive end at their deadline") {
  auto listener = listen_on(*Address::numeric("127.0.0.1", 0));
  REQUIRE(listener.ok());
  const Address there = *Address::numeric("127.0.0.1", local_port(*listener));
  const auto in = [](Nanoseconds time) { return steady_clock().now() + time; };

  auto client = connect_to(there, in(2s));
  REQUIRE(client.ok());
  REQUIRE(wait_for(*listener, 1 /* POLLIN */, in(2s)).ok());
  auto server = accept_from(*listener);
  REQUIRE((server.ok() && *server));
  CHECK_FALSE(*accept_from(*listener));  // none waits, and that is no error

  char buffer[4];
  const Nanoseconds begin = steady_clock().now();
  CHECK(recv_all(*server, buffer, in(100ms)).code() == Code::timeout);
  const Nanoseconds took = steady_clock().now() - begin;
  CHECK((took >= 100ms && took < 2s));
  // Nobody reads: the kernel's buffers fill up, then the deadline ends it.
  CHECK(send_all(*client, std::string(64 << 20, 'x'), in(200ms)).code() == Code::timeout);

  client->reset();
  std::string rest(32 << 20, '\0');
  CHECK(recv_all(*server, rest, in(5s)).code() == Code::peer_lost);
  Status sent;
  for (int i = 0; i < 3 && sent.ok(); ++i) {  // SIGPIPE would end this process
    sent = send_all(*server, "hello", in(1s));
    std::this_thread::sleep_for(10ms);
  }
  CHECK(sent.code() == Code::peer_lost);

  listener->reset();
  const auto refused = connect_to(there, in(2s));
  CHECK(refused.status().code() == Code::system);
  CHECK_THAT(refused.status().message(),
             Catch::Contains(there.to_string()) && Catch::Contains("refused"));
}

TEST_CASE("a listener on a taken port says so") {
  auto first = listen_on(*Address::numeric("127.0.0.1", 0));
  REQUIRE(first.ok());
  const auto second = listen_on(*Address::numeric("127.0.0.1", local_port(*first)));
  CHECK(second.status().code() == Code::system);
  CHECK_THAT(second.status().message(),
             Catch::Contains(fmt::format("127.0.0.1:{}", local_port(*first))) &&
                 Catch::Contains("in use"));
}

TEST_CASE("frames are read within their bounds") {
  Writer out;
  out.u8(7);
  out.u32(0x01020304);
  out.text("abc");
  const std::string bytes = std::move(out).take();
  CHECK(bytes.substr(1, 4) == "\x04\x03\x02\x01");
  Reader in(bytes);
  CHECK(in.u8() == 7);
  CHECK(in.u32() == 0x01020304);
  CHECK(in.text() == "abc");
  CHECK(in.complete());
  CHECK(in.u64() == 0);
  CHECK_FALSE(in.good());
  Reader lies(
      std::string_view("\xff\xff\xff\xff"
                       "ab",
                       6));
  CHECK(lies.text().empty());
  CHECK_FALSE(lies.good());
}

namespace {

// Carries the four messages; each may be changed on the way.
struct Exchange {
  JoinerHandshake joiner;
  CoordinatorHandshake coordinator;
  bool proved = false;
  Status concluded;

  void run(const std::string& refusal = "", Code code = Code::mismatch) {
    const auto challenge = coordinator.challenge(joiner.hello());
    REQUIRE(challenge.ok());
    const auto proof = joiner.answer(*challenge);
    REQUIRE(proof.ok());
    proved = coordinator.proves(*proof);
    concluded = joiner.conclude(
        proved ? coordinator.verdict(refusal.empty() ? Status() : Status(code, refusal))
               : CoordinatorHandshake::verdict_for_stranger());
  }
};

Exchange between(std::string_view joiner_secret, std::string_view coordinator_secret) {
  return {JoinerHandshake(key_of(joiner_secret), Claim{kWireVersion, 3, 4}),
          CoordinatorHandshake(key_of(coordinator_secret)), false, Status()};
}

}  // namespace

TEST_CASE("both sides prove the secret, and then seal what they say") {
  Exchange same = between("secret", "secret");
  same.run();
  CHECK(same.proved);
  CHECK(same.concluded.ok());
  CHECK(same.coordinator.claim().rank == 3);
  CHECK(same.coordinator.claim().size == 4);
  CHECK(same.joiner.keys().to_coordinator == same.coordinator.keys().to_coordinator);
  CHECK(same.joiner.keys().to_joiner == same.coordinator.keys().to_joiner);
  CHECK(same.joiner.keys().to_joiner != same.joiner.keys().to_coordinator);

  Seal sender, receiver;
  const std::string header = sender.begin_sending(same.joiner.keys().to_coordinator);
  receiver.begin_receiving(same.coordinator.keys().to_coordinator, header);
  const std::string first = sender.seal("one"), second = sender.seal("two");
  CHECK(first.find("one") == std::string::npos);
  CHECK(receiver.open(first) == "one");
  CHECK_FALSE(receiver.open(first).has_value());  // repeated
  std::string changed = second;
  changed[0] = static_cast<char>(changed[0] ^ 1);
  CHECK_FALSE(receiver.open(changed).has_value());
  CHECK(receiver.open(second) == "two");
}

TEST_CASE("a wrong secret fails on both sides, whoever has it") {
  using Secrets = std::pair<std::string, std::string>;
  for (const auto& [joiner, coordinator] :
       std::vector<Secrets>{{"secret", "Secret"}, {"", "secret"}, {"secret", ""}}) {
    Exchange different = between(joiner, coordinator);
    different.run();
    CHECK_FALSE(different.proved);
    CHECK(different.concluded.code() == Code::peer_lost);
    CHECK(different.concluded.message() == kAuthenticationFailed);
  }
  // A coordinator that accepts everybody without knowing the secret is not believed.
  Exchange impostor = between("secret", "guess");
  impostor.run();
  CHECK(impostor.joiner.conclude(impostor.coordinator.verdict(Status())).code() == Code::peer_lost);
}

TEST_CASE("a refusal is believed only from somebody who knows the secret") {
  Exchange refused = between("secret", "secret");
  refused.run("rank 3 was started twice");
  CHECK(refused.proved);
  CHECK(refused.concluded.code() == Code::mismatch);
  CHECK(refused.concluded.message() == "rank 3 was started twice");
  std::string changed =
      refused.coordinator.verdict(Status(Code::mismatch, "rank 3 was started twice"));
  changed[0] = 1;  // turned into an acceptance on the way
  CHECK(refused.joiner.conclude(changed).message() == kAuthenticationFailed);
  refused.run("rank 2 went away", Code::peer_lost);
  CHECK(refused.concluded.to_string() == "peer_lost: rank 2 went away");
}

TEST_CASE("a recorded handshake proves nothing the second time") {
  JoinerHandshake joiner(key_of("secret"), Claim{kWireVersion, 1, 2});
  CoordinatorHandshake first(key_of("secret"));
  const std::string proof = *joiner.answer(*first.challenge(joiner.hello()));
  CHECK(first.proves(proof));
  CoordinatorHandshake second(key_of("secret"));
  REQUIRE(second.challenge(joiner.hello()).ok());
  CHECK_FALSE(second.proves(proof));
}

TEST_CASE("the proof covers what the joiner claims") {
  JoinerHandshake joiner(key_of("secret"), Claim{kWireVersion, 1, 2});
  std::string hello = joiner.hello();
  hello[12] = 0;  // another rank, changed on the way
  CoordinatorHandshake coordinator(key_of("secret"));
  const auto challenge = coordinator.challenge(hello);
  REQUIRE(challenge.ok());
  CHECK(coordinator.claim().rank == 0);
  CHECK_FALSE(coordinator.proves(*joiner.answer(*challenge)));
  CHECK_FALSE(coordinator.challenge("GET / HTTP/1.1").ok());
  CHECK_FALSE(joiner.answer("HTTP/1.1 400").ok());
}

TEST_CASE("cores travel as text, and nothing else is taken for them") {
  for (const Cores& cores : {Cores{{0, 1, 17}, std::nullopt}, Cores{{5}, 2.5}, Cores{}}) {
    const auto back = Cores::decode(cores.encode());
    REQUIRE(back.has_value());
    CHECK(back->allowed == cores.allowed);
    CHECK(back->granted == cores.granted);
  }
  for (const char* text : {"", "all", "x:0", "-1:0", "all:-3", "all:0;1", "all:a", "nan:0"})
    CHECK(!Cores::decode(text).has_value());
  CHECK(!allowed_cores().empty());
}

TEST_CASE("ranks are crowded when they find no core each, by mask or by quota") {
  const Cores both{{0, 1}, std::nullopt}, first{{0}, std::nullopt}, second{{1}, std::nullopt};
  CHECK(!crowded({both, both}));
  CHECK(!crowded({first, second}));  // bound to one core each
  CHECK(crowded({first, first}));
  CHECK(crowded({both, both, both}));
  CHECK(crowded({Cores{{0, 1}, 1.5}, both}));
  CHECK(!crowded({Cores{{0, 1}, 2.0}, both}));
}

TEST_CASE("nobody offers the core for long to somebody who computes on it") {
  std::atomic<bool> over{false};
  std::atomic<bool> refused{false};
  std::thread both[2];
  const int core = allowed_cores().front();
  const auto on_one_core = [core](const auto& body) {
    return std::thread([core, body] {
      cpu_set_t only;
      CPU_ZERO(&only);
      CPU_SET(core, &only);
      if (sched_setaffinity(0, sizeof only, &only) == 0) body();
    });
  };
  both[0] = on_one_core([&] {
    while (!over.load()) relax();
  });
  both[1] = on_one_core([&] {
    Courtesy courtesy;
    const auto limit = std::chrono::steady_clock::now() + 60s;
    while (!refused.load() && std::chrono::steady_clock::now() < limit) refused = !courtesy.offer();
    over = true;
  });
  for (std::thread& thread : both) thread.join();
  CHECK(refused.load());
}

TEST_CASE("an offer ends when what is waited for has come") {
  Courtesy courtesy;
  int asked = 0;
  const bool done = courtesy.offer(10, [&] { return ++asked == 3; });
  CHECK(done);
  CHECK(asked == 3);
}

TEST_CASE("to run soon when woken a thread keeps its policy and its priority") {
  int policy = -1, priority = -1;
  std::thread([&] {
    run_soon_when_woken();
    policy = sched_getscheduler(0);
    priority = getpriority(PRIO_PROCESS, 0);
  }).join();
  CHECK(policy == sched_getscheduler(0));
  CHECK(priority == getpriority(PRIO_PROCESS, 0));
}
