#include "test/fuzz/targets.h"

#include <sodium.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "lib/base/auth.h"
#include "lib/base/base.h"
#include "lib/base/cores.h"
#include "lib/base/net.h"
#include "lib/comm/launcher.h"
#include "lib/comm/link.h"
#include "lib/comm/rendezvous.h"
#include "ringfold/bootstrap.h"
#include "transports/shm_host.h"

namespace ringfold::test::fuzz {
namespace {

// Another value while it lives.
template <class T>
class Swapped {
 public:
  Swapped(T& where, T value) : where_(where), before_(std::exchange(where, value)) {}
  ~Swapped() { where_ = before_; }
  Swapped(const Swapped&) = delete;
  Swapped& operator=(const Swapped&) = delete;

 private:
  T& where_;
  const T before_;
};

}  // namespace

// What opens is the same when it was packed again: no field is lost or misread.
void frames(Input input) {
  if (auto joined = decode_joined(text(input)); joined.ok()) {
    const auto again = decode_joined(encode(*joined));
    auto twice = again;
    require(twice.ok() && encode(*twice) == encode(*joined));
  }
  if (auto member = decode_member(text(input)); member.ok()) {
    auto again = decode_member(encode(*member));
    require(again.ok() && encode(*again) == encode(*member));
  }
}

void notices(Input input) {
  if (input.empty()) return;
  const int size = 1 + input[0];
  const auto notice = decode_notice(text(input.subspan(1)), size);
  if (!notice) return;
  require(notice->origin >= 0 && notice->origin < size);
  for (const int member : notice->members) require(member >= 0 && member < size);
}

// Nobody gets in without the secret, whatever it says.
void handshake(Input input) {
  static const Key key = key_of("a secret");
  CoordinatorHandshake coordinator(key);
  const std::string_view hello = text(input).substr(0, kHelloBytes);
  const std::string_view rest = text(input).substr(hello.size());
  if (coordinator.challenge(hello).ok()) {
    require(!coordinator.proves(rest.substr(0, kProofBytes)));
    require(!coordinator.verdict(Status(Code::mismatch, "no")).empty());
  }
  JoinerHandshake joiner(key, Claim{kWireVersion, 1, 2});
  const std::string_view challenge = text(input).substr(0, kChallengeBytes);
  if (joiner.answer(challenge).ok())
    require(!joiner.conclude(text(input).substr(challenge.size())).ok());
}

void link(Input input) {
  int ends[2];
  require(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0);
  const Key key{};
  const Descriptor peer(ends[1]);
  Link link(Descriptor(ends[0]), key, key);
  const auto sent = send_some(peer, text(input));
  require(sent.ok());
  while (link.read() && link.ended().ok()) continue;
  while (link.next()) continue;
}

void addresses(Input input) {
  const std::string_view all = text(input);
  (void)Address::numeric(all, 1);
  if (auto where = parse_host_port(all); where.ok()) require(where->port != 0);
  if (auto cores = Cores::decode(all)) {
    const auto again = Cores::decode(cores->encode());
    require(again && again->allowed == cores->allowed && again->granted == cores->granted);
    (void)crowded({*cores, *cores});
  }
  if (const auto shm = shm::Address::decode(all)) {
    require(shm->pid > 0);
    const auto again = shm::Address::decode(shm->encode());
    require(again && again->token == shm->token && again->socket == shm->socket);
  }
  const std::vector<Interface> interfaces = {{"eth0", *Address::numeric("10.1.2.3", 0)},
                                             {"eth1", *Address::numeric("fd00::7", 0)},
                                             {"lo", *Address::numeric("127.0.0.1", 0)}};
  if (auto chosen = choose_interfaces(interfaces, all); chosen.ok())
    require(!chosen->empty() && chosen->size() <= interfaces.size());
}

// A wrong checksum ends it too early to be of interest.
void unique_id(Input input) {
  constexpr size_t kChecksum = 16;
  UniqueId id{};
  const size_t body = id.bytes.size() - kChecksum;
  std::memcpy(id.bytes.data(), input.data(), std::min(body, input.size()));
  crypto_generichash(reinterpret_cast<unsigned char*>(id.bytes.data()) + body, kChecksum,
                     reinterpret_cast<const unsigned char*>(id.bytes.data()), body, nullptr, 0);
  if (auto where = Rendezvous::from_id(id, 1, 2); where.ok()) {
    std::string_view rest = where->coordinator;
    for (size_t comma = 0; comma != std::string_view::npos; rest.remove_prefix(comma + 1)) {
      comma = rest.find(',');
      require(parse_host_port(rest.substr(0, comma)).ok());
      if (comma == std::string_view::npos) break;
    }
  }
}

// The peer writes what it likes, also while it is read: nothing leaves the segment.
void shm_ring(Input input) {
  static const auto segment = std::make_unique<shm::Segment>();
  uint64_t tail = 0;
  if (input.size() < sizeof(tail)) return;
  std::memcpy(&tail, input.data(), sizeof(tail));
  input = input.subspan(sizeof(tail), std::min<size_t>(input.size() - sizeof(tail), 8192));
  std::memset(segment->ring, 0, sizeof(segment->ring));
  std::memcpy(segment->ring, input.data(), input.size());
  segment->tail = tail;
  segment->head = 0;
  shm::RingReader reader;
  reader.attach(segment.get());
  const auto* const begin = reinterpret_cast<const uint8_t*>(segment.get());
  for (int i = 0; i < 3000; ++i) {
    shm::Record record;
    const uint8_t* bytes = nullptr;
    if (reader.look(&record, &bytes) != shm::RingReader::Look::record) break;
    require(bytes >= begin && bytes + record.here <= begin + sizeof(shm::Segment));
    if (record.slot != shm::kNoSlot) (void)reader.return_slot(record.slot);
    reader.advance();
    (void)reader.release();
  }
  shm::RingWriter writer;
  writer.attach(segment.get());
  (void)writer.room(shm::kInlineBytes);
  if (const uint16_t slot = writer.take_slot(); slot != shm::kNoSlot) require(slot < shm::kSlots);
}

// "NAME=value" lines, of the variables that start-up looks at.
void environment(Input input) {
  const std::string_view all = text(input);
  (void)parse_bytes(all);
  (void)parse_duration(all);
  (void)parse_integer(all);
  (void)first_slurm_host(all);
  (void)orte_hosts(all, 1234);
  require(port_of_job(all) != 0);
  static constexpr const char* kNames[] = {
      "RINGFOLD_RANK",
      "RINGFOLD_SIZE",
      "RINGFOLD_COORDINATOR",
      "RINGFOLD_TIMEOUT",
      "RINGFOLD_PIECE",
      "RINGFOLD_SPIN",
      "RANK",
      "WORLD_SIZE",
      "MASTER_ADDR",
      "MASTER_PORT",
      "OMPI_COMM_WORLD_RANK",
      "OMPI_COMM_WORLD_SIZE",
      "PMIX_SERVER_URI",
      "SLURM_PROCID",
      "SLURM_NTASKS",
      "SLURM_STEP_NODELIST",
      "SLURM_JOB_ID",
      "PMI_RANK",
      "PMI_SIZE",
      "OMPI_MCA_orte_hnp_uri",
  };
  std::string_view rest = all;
  std::array<std::string, std::size(kNames)> lines;
  while (!rest.empty()) {
    const std::string_view line = rest.substr(0, rest.find('\n'));
    rest.remove_prefix(std::min(rest.size(), line.size() + 1));
    if (line.empty()) continue;
    const auto which = static_cast<unsigned char>(line[0]) % std::size(kNames);
    const std::string_view value = line.substr(1, line.substr(1).find('\0'));
    lines[which] = std::string(kNames[which]).append("=").append(value);
  }
  // setenv() would keep every value that there ever was.
  std::array<char*, std::size(kNames) + 1> variables{};
  size_t count = 0;
  for (std::string& line : lines)
    if (!line.empty()) variables[count++] = line.data();
  const Swapped<char**> instead(environ, variables.data());
  if (auto where = Rendezvous::from_environment(); where.ok()) require(where->size >= 1);
  (void)check_settings();
}

}  // namespace ringfold::test::fuzz
