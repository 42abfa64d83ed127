// Where all ranks of a communicator stand, found out when one of them has waited too long: so that
// the error names who is missing, and not only who was next to it.
//
// Of ranks on this host it reads the records (lib/record/layout.h), which works whatever state they
// are in; the others are asked over the control star and get a moment to answer.
//
//   asks    "SEQ WAY FINGERPRINT BESIDE": the operation in question; WAY 1 is the region's
//           numbering. BESIDE collectives were called before it that went the other way
//   stands  "SEQ WAY CALLED FINGERPRINT <length> <what it called as SEQ> <where it stands>"
//
// Threads: the holder of the engine's turn.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "lib/comm/control.h"
#include "lib/engine/engine.h"
#include "lib/record/picture.h"

namespace ringfold {

class Standings {
 public:
  // How long others may take to answer.
  static constexpr Nanoseconds kAnswers = std::chrono::milliseconds(300);

  // All outlive it.
  Standings(Engine& engine, Control& control, const std::vector<Member>& members, int rank,
            uint64_t world)
      : engine_(engine), control_(control), members_(members), rank_(rank), world_(world) {}

  // For Engine::on_stalled and on_quiet.
  void stalled(const Channel& channel, const Engine::Stalled& what);
  void quiet(const Channel& channel, const Engine::Question& question, Peer peer);
  // Another rank asks, or answers.
  void asked(const Notice& notice);
  void answered(const Notice& notice);

  // Fails what has been waited for long enough; true if there was any.
  bool check();
  [[nodiscard]] Nanoseconds deadline() const;

 private:
  // Where one rank stands.
  struct Stand {
    bool known = false;
    bool called = false;       // the operation in question, or a later one
    uint32_t fingerprint = 0;  // of what it called by that number; 0: not known
    std::string what;          // the same in words: "barrier as operation 3"
    std::string text;
    char kernel_state = '?';
  };
  using Question = Engine::Question;
  struct Inquiry {
    Engine::Stalled stalled;
    int rank = 0;               // mine
    std::vector<Peer> peers;    // by rank
    std::vector<int> names;     // by rank: what the user calls it
    std::vector<Stand> stands;  // by rank
    Nanoseconds until{};
  };

  static Stand stand_of(const record::CommunicatorView& view, const Question& question);
  static void look_beside(const Channel& channel, const record::CommunicatorView& view,
                          const Question& question, Stand* stand);
  void ask(uint32_t comm, const Question& question, std::vector<int> members);
  void read_records(uint32_t comm, Inquiry& inquiry) const;
  void conclude(uint32_t comm, const Inquiry& inquiry);
  [[nodiscard]] std::string who(Peer peer) const;
  [[nodiscard]] std::string missing(const Inquiry& inquiry) const;
  [[nodiscard]] static std::string table(const Inquiry& inquiry);

  Engine& engine_;
  Control& control_;
  const std::vector<Member>& members_;
  const int rank_;
  const uint64_t world_;
  std::map<uint32_t, Inquiry> open_;  // by communicator
};

}  // namespace ringfold
