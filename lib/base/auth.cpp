#include "lib/base/auth.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "lib/base/wire.h"

namespace ringfold {
namespace {

constexpr std::string_view kMagic = "RINGFOLD";
constexpr size_t kNonceBytes = 32;

// libsodium needs this once; without working randomness nothing here would hold.
void prepare_sodium() {
  static const bool kReady = sodium_init() >= 0;
  if (!kReady) std::abort();
}

const unsigned char* bytes_of(std::string_view text) {
  return reinterpret_cast<const unsigned char*>(text.data());
}

Key keyed_hash(const Key& key, std::initializer_list<std::string_view> parts) {
  crypto_generichash_state state;
  crypto_generichash_init(&state, key.data(), key.size(), sizeof(Key));
  for (const std::string_view part : parts) {
    // Lengths go in as well, so that no two lists of parts hash alike.
    Writer length;
    length.u64(part.size());
    const std::string prefix = std::move(length).take();
    crypto_generichash_update(&state, bytes_of(prefix), prefix.size());
    crypto_generichash_update(&state, bytes_of(part), part.size());
  }
  Key hash;
  crypto_generichash_final(&state, hash.data(), hash.size());
  return hash;
}

std::string_view text_of(const Key& key) {
  return {reinterpret_cast<const char*>(key.data()), key.size()};
}

std::string nonce() {
  prepare_sodium();
  std::string bytes(kNonceBytes, '\0');
  randombytes_buf(bytes.data(), bytes.size());
  return bytes;
}

bool equal(const Key& expected, std::string_view given) {
  return given.size() == expected.size() &&
         sodium_memcmp(expected.data(), given.data(), expected.size()) == 0;
}

SessionKeys session_keys(const Key& key, std::string_view hello, std::string_view challenge) {
  return {keyed_hash(key, {"to coordinator", hello, challenge}),
          keyed_hash(key, {"to joiner", hello, challenge})};
}

// The first byte of a verdict. What refused without a code meant a mismatch.
constexpr uint8_t kAccepted = 1, kWithCode = 0x40;

uint8_t byte_of(Code code) {
  if (code == Code::ok) return kAccepted;
  return code == Code::mismatch ? uint8_t{0}
                                : static_cast<uint8_t>(kWithCode | static_cast<uint8_t>(code));
}

Code code_of(uint8_t byte) {
  const int code = byte & ~kWithCode;
  const bool known =
      (byte & kWithCode) != 0 && code > 0 && code <= static_cast<int>(Code::internal);
  return known ? static_cast<Code>(code) : Code::mismatch;
}

std::string verdict_bytes(uint8_t accepted, std::string_view text) {
  text = text.substr(0, kVerdictText);
  Writer out;
  out.u8(accepted);
  out.u16(static_cast<uint16_t>(text.size()));
  out.raw(text);
  out.raw(std::string(kVerdictText - text.size(), '\0'));
  return std::move(out).take();
}

}  // namespace

Key key_of(std::string_view secret) {
  prepare_sodium();
  Key key{};
  // The domain of an empty secret differs, so that no secret equals having none.
  return keyed_hash(key,
                    {secret.empty() ? "ringfold without a secret" : "ringfold secret", secret});
}

Key random_key() {
  prepare_sodium();
  Key key;
  randombytes_buf(key.data(), key.size());
  return key;
}

std::string Seal::begin_sending(const Key& key) {
  std::string header(kHeaderBytes, '\0');
  crypto_secretstream_xchacha20poly1305_init_push(
      &state_, reinterpret_cast<unsigned char*>(header.data()), key.data());
  return header;
}

void Seal::begin_receiving(const Key& key, std::string_view header) {
  crypto_secretstream_xchacha20poly1305_init_pull(&state_, bytes_of(header), key.data());
}

std::string Seal::seal(std::string_view frame) {
  std::string sealed(frame.size() + kOverhead, '\0');
  crypto_secretstream_xchacha20poly1305_push(
      &state_, reinterpret_cast<unsigned char*>(sealed.data()), nullptr, bytes_of(frame),
      frame.size(), nullptr, 0, crypto_secretstream_xchacha20poly1305_TAG_MESSAGE);
  return sealed;
}

std::optional<std::string> Seal::open(std::string_view sealed) {
  if (sealed.size() < kOverhead) return std::nullopt;
  std::string frame(sealed.size() - kOverhead, '\0');
  if (crypto_secretstream_xchacha20poly1305_pull(
          &state_, reinterpret_cast<unsigned char*>(frame.data()), nullptr, nullptr,
          bytes_of(sealed), sealed.size(), nullptr, 0) != 0) {
    return std::nullopt;
  }
  return frame;
}

JoinerHandshake::JoinerHandshake(const Key& key, const Claim& mine) : key_(key) {
  Writer out;
  out.raw(kMagic);
  out.u32(mine.version);
  out.u32(mine.rank);
  out.u32(mine.size);
  out.raw(nonce());
  hello_ = std::move(out).take();
}

Result<std::string> JoinerHandshake::answer(std::string_view challenge) {
  if (challenge.size() != kChallengeBytes || !challenge.starts_with(kMagic)) {
    return Status(Code::peer_lost, "what answers there is not ringfold");
  }
  challenge_ = challenge;
  return std::string(text_of(keyed_hash(key_, {"joiner", hello_, challenge_})));
}

Status JoinerHandshake::conclude(std::string_view verdict) const {
  Status failed(Code::peer_lost, std::string(kAuthenticationFailed));
  if (verdict.size() != kVerdictBytes) return failed;
  const std::string_view said = verdict.substr(0, kVerdictBytes - kProofBytes);
  const Key expected = keyed_hash(key_, {"coordinator", hello_, challenge_, said});
  if (!equal(expected, verdict.substr(said.size()))) return failed;
  Reader in(said);
  const uint8_t verdict_byte = in.u8();
  const uint16_t length = in.u16();
  if (verdict_byte == kAccepted) return {};
  return {code_of(verdict_byte), std::string(in.raw(std::min<size_t>(length, kVerdictText)))};
}

SessionKeys JoinerHandshake::keys() const {
  return session_keys(key_, hello_, challenge_);
}

CoordinatorHandshake::CoordinatorHandshake(const Key& key, uint32_t version)
    : key_(key), version_(version) {}

Result<std::string> CoordinatorHandshake::challenge(std::string_view hello) {
  if (hello.size() != kHelloBytes || !hello.starts_with(kMagic)) {
    return Status(Code::peer_lost, "no hello of ringfold");
  }
  hello_ = hello;
  Reader in(hello.substr(kMagic.size()));
  claim_.version = in.u32();
  claim_.rank = in.u32();
  claim_.size = in.u32();
  Writer out;
  out.raw(kMagic);
  out.u32(version_);
  out.raw(nonce());
  challenge_ = std::move(out).take();
  return challenge_;
}

bool CoordinatorHandshake::proves(std::string_view proof) const {
  return equal(keyed_hash(key_, {"joiner", hello_, challenge_}), proof);
}

std::string CoordinatorHandshake::verdict(const Status& refusal) const {
  const std::string said = verdict_bytes(byte_of(refusal.code()), refusal.message());
  return said + std::string(text_of(keyed_hash(key_, {"coordinator", hello_, challenge_, said})));
}

std::string CoordinatorHandshake::verdict_for_stranger() {
  return verdict_bytes(byte_of(Code::mismatch), kAuthenticationFailed) +
         std::string(kProofBytes, '\0');
}

SessionKeys CoordinatorHandshake::keys() const {
  return session_keys(key_, hello_, challenge_);
}

}  // namespace ringfold
