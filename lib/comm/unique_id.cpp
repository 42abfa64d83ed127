// Ids that are passed out of band: where the coordinator listens, and the secret.
#include "lib/comm/unique_id.h"

#include <fmt/format.h>

#include <cstring>
#include <map>
#include <mutex>

#include "lib/base/auth.h"
#include "lib/base/base.h"
#include "lib/base/net.h"
#include "lib/base/wire.h"
#include "ringfold/bootstrap.h"

namespace ringfold {
namespace {

// Layout: version, number of addresses, port, secret, addresses (family and bytes), zeros; the last
// bytes are a checksum of all that.
constexpr uint8_t kIdVersion = 1;
constexpr size_t kIdBytes = sizeof(UniqueId::bytes);
constexpr size_t kChecksumBytes = 16;
constexpr size_t kSecretBytes = 32;

struct Listeners {
  std::mutex mutex;
  std::map<std::string, Descriptor> by_secret;
};

// Ids whose rank 0 has not come yet; closed when the process ends.
Listeners& listeners() {
  static Listeners all;
  return all;
}

std::string checksum(std::string_view body) {
  std::string hash(kChecksumBytes, '\0');
  crypto_generichash(reinterpret_cast<unsigned char*>(hash.data()), hash.size(),
                     reinterpret_cast<const unsigned char*>(body.data()), body.size(), nullptr, 0);
  return hash;
}

// As many addresses as there is room for, the most useful first.
std::string addresses_that_fit(const std::vector<Interface>& interfaces, size_t room,
                               uint8_t& count) {
  Writer out;
  for (const Interface& interface : interfaces) {
    const auto bytes = interface.address.bytes();
    if (bytes.size() + 1 > room) continue;
    room -= bytes.size() + 1;
    out.u8(static_cast<uint8_t>(bytes.size()));
    out.raw({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
    ++count;
  }
  return std::move(out).take();
}

std::optional<Address> read_address(Reader& in, uint16_t port) {
  const std::string_view bytes = in.raw(in.u8());
  if (bytes.size() != 4 && bytes.size() != 16) return std::nullopt;
  sockaddr_in v4{};
  sockaddr_in6 v6{};
  v4.sin_family = AF_INET;
  v6.sin6_family = AF_INET6;
  const bool short_one = bytes.size() == 4;
  std::memcpy(short_one ? static_cast<void*>(&v4.sin_addr) : &v6.sin6_addr, bytes.data(),
              bytes.size());
  Address address = short_one ? Address(reinterpret_cast<const sockaddr*>(&v4), sizeof v4)
                              : Address(reinterpret_cast<const sockaddr*>(&v6), sizeof v6);
  address.set_port(port);
  return address;
}

}  // namespace

Descriptor take_id_listener(const std::string& secret) {
  Listeners& all = listeners();
  const std::lock_guard lock(all.mutex);
  auto found = all.by_secret.extract(secret);
  return found.empty() ? Descriptor() : std::move(found.mapped());
}

Result<UniqueId> Rendezvous::unique_id() {
  auto interfaces = local_interfaces(setting("RINGFOLD_INTERFACES").value_or(""));
  if (!interfaces.ok()) return interfaces.status();
  // Loopback comes last, so this means that there is nothing else: stay unreachable from outside.
  if (!interfaces->empty() && interfaces->front().address.loopback()) interfaces->resize(1);
  auto listener =
      interfaces->size() == 1 ? listen_on(interfaces->front().address) : listen_everywhere(0);
  if (!listener.ok()) return listener.status();

  const Key secret = random_key();
  const std::string secret_text(reinterpret_cast<const char*>(secret.data()), secret.size());
  uint8_t count = 0;
  const size_t room = kIdBytes - kChecksumBytes - kSecretBytes - 4;
  const std::string addresses = addresses_that_fit(*interfaces, room, count);
  Writer out;
  out.u8(kIdVersion);
  out.u8(count);
  out.u16(local_port(*listener));
  out.raw(secret_text);
  out.raw(addresses);
  out.raw(std::string(room - addresses.size(), '\0'));
  std::string bytes = std::move(out).take();
  bytes += checksum(bytes);

  Listeners& all = listeners();
  const std::lock_guard lock(all.mutex);
  all.by_secret[secret_text] = std::move(*listener);
  UniqueId id;
  std::memcpy(id.bytes.data(), bytes.data(), id.bytes.size());
  return id;
}

Result<Rendezvous> Rendezvous::from_id(const UniqueId& id, int rank, int size) {
  const Status malformed(Code::invalid_argument,
                         "the unique id is damaged, or made by another version of ringfold");
  if (size < 1 || rank < 0 || rank >= size) {
    return Status(Code::invalid_argument, fmt::format("rank {} of {}", rank, size));
  }
  const std::string_view bytes(reinterpret_cast<const char*>(id.bytes.data()), id.bytes.size());
  const std::string_view body = bytes.substr(0, kIdBytes - kChecksumBytes);
  if (checksum(body) != bytes.substr(body.size())) return malformed;
  Reader in(body);
  const uint8_t version = in.u8(), count = in.u8();
  const uint16_t port = in.u16();
  Rendezvous where;
  where.rank = rank;
  where.size = size;
  where.source = std::string(kIdSource);
  where.secret = std::string(in.raw(kSecretBytes));
  for (uint8_t i = 0; i < count; ++i) {
    const auto address = read_address(in, port);
    if (!address) return malformed;
    if (i > 0) where.coordinator += ',';
    where.coordinator += address->to_string();
  }
  if (version != kIdVersion || port == 0 || count == 0 || !in.good()) return malformed;
  return where;
}

}  // namespace ringfold
