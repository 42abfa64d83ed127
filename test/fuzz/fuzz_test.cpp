// The corpus of the fuzzers, and noise made of it, without a fuzzer.
#include <fmt/core.h>

#include <catch2/catch.hpp>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <set>
#include <vector>

#include "test/fuzz/targets.h"

using namespace ringfold::test::fuzz;
using Bytes = std::vector<uint8_t>;

namespace {

std::vector<Bytes> corpus_of(const char* target) {
  const std::filesystem::path folder = std::filesystem::path(RINGFOLD_TEST_DATA) / "fuzz" / target;
  std::set<std::filesystem::path> paths;  // sorted: directories have no order
  for (const auto& entry : std::filesystem::directory_iterator(folder)) paths.insert(entry.path());
  std::vector<Bytes> corpus;
  for (const auto& path : paths) {
    std::ifstream file(path, std::ios::binary);
    corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  return corpus;
}

// A bit, a byte, a length or a piece of another input is different.
void change(Bytes& input, const std::vector<Bytes>& corpus, std::mt19937_64& random) {
  const auto somewhere = [&] { return random() % (input.size() + 1); };
  switch (random() % 5) {
    case 0:
      if (!input.empty()) input[random() % input.size()] ^= static_cast<uint8_t>(1 << random() % 8);
      return;
    case 1:
      if (!input.empty()) input[random() % input.size()] = static_cast<uint8_t>(random());
      return;
    case 2:
      input.resize(somewhere());
      return;
    case 3:
      input.insert(input.begin() + static_cast<ptrdiff_t>(somewhere()), 1 + random() % 8,
                   static_cast<uint8_t>(random() % 2 == 0 ? 0xff : random()));
      return;
    case 4: {
      const Bytes& other = corpus[random() % corpus.size()];
      const size_t from = random() % (other.size() + 1);
      input.resize(somewhere());
      input.insert(input.end(), other.begin() + static_cast<ptrdiff_t>(from), other.end());
      return;
    }
  }
}

}  // namespace

// A target that finds something wrong ends the process.
TEST_CASE("no parser of outside bytes takes harm") {
  constexpr int kNoise = 4000;
  for (const Target& target : kTargets) {
    const std::vector<Bytes> corpus = corpus_of(target.name);
    INFO(target.name);
    REQUIRE(corpus.size() >= 3);
    std::mt19937_64 random(7);
    for (const Bytes& input : corpus) target.run(input);
    for (int i = 0; i < kNoise; ++i) {
      Bytes input = corpus[random() % corpus.size()];
      for (uint64_t changes = 1 + random() % 4; changes > 0; --changes)
        change(input, corpus, random);
      target.run(input);
    }
    fmt::print("fuzz: {}: {} inputs of the corpus, {} made of them\n", target.name, corpus.size(),
               kNoise);
    std::fflush(stdout);
  }
}
