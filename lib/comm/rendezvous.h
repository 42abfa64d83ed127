// The two sides of start-up: rank 0 gathers everybody, the others join. Used by bootstrap().
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lib/base/net.h"
#include "lib/comm/control.h"
#include "lib/comm/link.h"
#include "lib/comm/unique_id.h"
#include "ringfold/bootstrap.h"

namespace ringfold {

using Agreement = std::vector<std::pair<std::string, std::string>>;  // (what, value)

// Frames of start-up begin with one of these.
enum class Frame : uint8_t { joined = 1, member = 2, refused = 3, notice = 4 };

// What a rank sends as soon as it is admitted.
struct Joined {
  Member member;
  Agreement agreement;
  Nanoseconds patience{};  // what is left until its own deadline
};
[[nodiscard]] std::string encode(const Joined& joined);
[[nodiscard]] Result<Joined> decode_joined(std::string_view frame);
[[nodiscard]] std::string encode(const Member& member);
[[nodiscard]] Result<Member> decode_member(std::string_view frame);

// How start-up ended: everybody's Member, and the links that stay. By rank; rank 0 has a link to
// each other rank, the others have one to rank 0.
struct Met {
  std::vector<Member> members;
  std::vector<std::unique_ptr<Link>> links;
};

// A frame of the control star among `size` ranks.
[[nodiscard]] std::optional<Notice> decode_notice(std::string_view frame, int size);

struct Meeting {
  int rank = 0, size = 1;
  std::string coordinator;  // for messages
  Key key{};
  uint32_t version = kWireVersion;  // tests pretend another
  Nanoseconds begun{}, deadline{};
  SecondRound second;
};
// Adds the local end of this connection, once, as kReached.
void note_reached(const Descriptor& socket, Member* mine);
[[nodiscard]] Result<Met> coordinate(const Meeting& meeting, Descriptor listener, Joined mine);
// `where`: one "host:port" or several, comma-separated.
[[nodiscard]] Result<Met> join(const Meeting& meeting, const std::vector<HostPort>& where,
                               Joined mine);

// What the library itself wants alike everywhere, in a form in which equal means equal.
[[nodiscard]] Agreement own_agreement();
// "ok", or what differs, who gave which value: 'RINGFOLD_PIECE differs: "64K" on ranks 0, 2-3...'.
[[nodiscard]] Status compare(const std::vector<Agreement>& by_rank);
[[nodiscard]] std::string seconds_text(Nanoseconds time);  // "2 s", "0.3 s"

// The star that stays, from the links of Met.
[[nodiscard]] Result<std::unique_ptr<Control>> make_control(
    int rank, int size, std::vector<std::unique_ptr<Link>> links);

}  // namespace ringfold
