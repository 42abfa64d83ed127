// Mutual proof of a shared secret, and the sealed stream of frames that follows it. Passive: makes
// and checks bytes, and leaves it to others to carry them.
//
//   joiner                                       coordinator
//     hello    version, rank, size, nonce   -->
//                                           <--  challenge  version, nonce
//     proof    of all of the above          -->
//                                           <--  verdict    accepted or why not, proof of all
//
// The secret never travels, nor anything that helps to answer another challenge: every proof is a
// keyed hash over both nonces, the prover's role and what both sides claim. The layout of these
// four messages stays the same for all versions, so that versions can tell each other apart.
//
// Thread-safety: one object, one thread.
#pragma once

#include <sodium.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "ringfold/status.h"

namespace ringfold {

inline constexpr uint32_t kWireVersion = 1;
inline constexpr std::string_view kAuthenticationFailed = "authentication failed";

using Key = std::array<unsigned char, 32>;
// The key that stands for a secret. An empty one yields a key that everybody knows: the handshake
// then still tells ringfold from anything else, but proves nothing.
[[nodiscard]] Key key_of(std::string_view secret);
[[nodiscard]] Key random_key();

// What a rank says of itself before anything else.
struct Claim {
  uint32_t version = kWireVersion;
  uint32_t rank = 0;
  uint32_t size = 0;
};

inline constexpr size_t kHelloBytes = 8 + 4 + 4 + 4 + 32;
inline constexpr size_t kChallengeBytes = 8 + 4 + 32;
inline constexpr size_t kProofBytes = 32;
inline constexpr size_t kVerdictText = 468;  // longer texts are cut
inline constexpr size_t kVerdictBytes = 1 + 2 + kVerdictText + kProofBytes;

// Encrypts and numbers frames in one direction: a changed, repeated, dropped or reordered frame
// does not open.
class Seal {
 public:
  static constexpr size_t kHeaderBytes = crypto_secretstream_xchacha20poly1305_HEADERBYTES;
  static constexpr size_t kOverhead = crypto_secretstream_xchacha20poly1305_ABYTES;

  // The sending side begins with a header that the receiving side needs first.
  [[nodiscard]] std::string begin_sending(const Key& key);
  void begin_receiving(const Key& key, std::string_view header);
  [[nodiscard]] std::string seal(std::string_view frame);
  [[nodiscard]] std::optional<std::string> open(std::string_view sealed);

 private:
  crypto_secretstream_xchacha20poly1305_state state_{};
};

struct SessionKeys {
  Key to_coordinator{}, to_joiner{};
};

class JoinerHandshake {
 public:
  JoinerHandshake(const Key& key, const Claim& mine);
  [[nodiscard]] std::string hello() const { return hello_; }
  // The proof. peer_lost: what answers is not ringfold.
  [[nodiscard]] Result<std::string> answer(std::string_view challenge);
  // ok: accepted by somebody who knows the secret. peer_lost with kAuthenticationFailed: the
  // secrets differ. Else refused by a coordinator that knows the secret: its own code and words.
  [[nodiscard]] Status conclude(std::string_view verdict) const;
  [[nodiscard]] SessionKeys keys() const;

 private:
  Key key_;
  std::string hello_, challenge_;
};

class CoordinatorHandshake {
 public:
  explicit CoordinatorHandshake(const Key& key, uint32_t version = kWireVersion);
  // The challenge; peer_lost if the bytes are no hello.
  [[nodiscard]] Result<std::string> challenge(std::string_view hello);
  // Does the joiner know the secret? Then, and only then, its claim() is worth reading.
  [[nodiscard]] bool proves(std::string_view proof) const;
  [[nodiscard]] const Claim& claim() const { return claim_; }
  // Accepts if ok, else refuses. Tells a stranger nothing: kAuthenticationFailed.
  [[nodiscard]] std::string verdict(const Status& refusal) const;
  [[nodiscard]] static std::string verdict_for_stranger();
  [[nodiscard]] SessionKeys keys() const;

 private:
  Key key_;
  uint32_t version_;
  Claim claim_;
  std::string hello_, challenge_;
};

}  // namespace ringfold
