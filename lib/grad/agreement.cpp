#include "lib/grad/agreement.h"

#include <fmt/format.h>
#include <sodium.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

namespace ringfold::grad {
namespace {

// What is wrong with this rank's own arguments; empty: nothing.
std::string wrong(std::span<const Parameter> parameters, const SyncOptions& options) {
  if (options.first_bytes == 0 || options.bucket_bytes == 0)
    return fmt::format("buckets of {}, then {} bytes: expected at least 1 each",
                       options.first_bytes, options.bucket_bytes);
  for (size_t i = 0; i < parameters.size(); ++i) {
    const DType type = parameters[i].type;
    if (static_cast<size_t>(type) >= kDTypes)
      return fmt::format("parameter {} '{}' is of type number {}: expected 0 to {}", i,
                         parameters[i].name, static_cast<int>(type), kDTypes - 1);
    if (!is_float(type))
      return fmt::format("parameter {} '{}' is of type {}: expected a float type", i,
                         parameters[i].name, name(type));
  }
  return {};
}

// Everything that must be alike, as people read it: the options, then a line for each parameter.
std::vector<std::string> describe(std::span<const Parameter> parameters,
                                  const SyncOptions& options) {
  std::vector<std::string> lines = {
      fmt::format("{} parameters, buckets of {}, then {} bytes, hook {}, {}", parameters.size(),
                  options.first_bytes, options.bucket_bytes,
                  options.hook.name.empty() ? "none" : options.hook.name,
                  options.require_all ? "all required" : "unused ones allowed")};
  for (size_t i = 0; i < parameters.size(); ++i)
    lines.push_back(fmt::format("parameter {} '{}', {} elements of {}", i, parameters[i].name,
                                parameters[i].count, name(parameters[i].type)));
  return lines;
}

// What each rank tells of itself, so that a thousand of them compare a few bytes only.
struct Digest {
  std::array<unsigned char, 16> hash{};
  uint64_t bytes = 0;  // of the text
  uint64_t usable = 0;
  bool operator==(const Digest&) const = default;
};
static_assert(sizeof(Digest) == 32 && crypto_generichash_BYTES_MIN == 16);

std::string join(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) text.append(line).push_back('\0');
  return text;
}

std::string_view line_of(std::string_view text, size_t line) {
  for (; line > 0 && !text.empty(); --line) text.remove_prefix(text.find('\0') + 1);
  return text.empty() ? "no further parameter" : text.substr(0, text.find('\0'));
}

// Which rank is at odds with rank 0, and over what. REQUIRES that two texts differ.
Status difference(const std::vector<std::string_view>& texts) {
  const auto other = static_cast<size_t>(
      std::ranges::find_if(texts, [&](std::string_view text) { return text != texts[0]; }) -
      texts.begin());
  // The parameters say more than their number.
  size_t line = 1;
  const auto ends = [&](std::string_view text) {
    return line > static_cast<size_t>(std::ranges::count(text, '\0'));
  };
  while (line_of(texts[0], line) == line_of(texts[other], line) &&
         !(ends(texts[0]) && ends(texts[other])))
    ++line;
  if (ends(texts[0]) && ends(texts[other])) line = 0;
  return {Code::mismatch,
          fmt::format("the gradients differ between ranks: rank 0 has {}; rank {} has {}",
                      line_of(texts[0], line), other, line_of(texts[other], line))};
}

}  // namespace

Status agree(Communicator& comm, std::span<const Parameter> parameters,
             const SyncOptions& options) {
  const auto size = static_cast<size_t>(comm.size());
  const std::string mistake = wrong(parameters, options);
  const std::string text = mistake.empty() ? join(describe(parameters, options)) : mistake;
  Digest mine{{}, text.size(), mistake.empty() ? uint64_t{1} : 0};
  crypto_generichash(mine.hash.data(), mine.hash.size(),
                     reinterpret_cast<const unsigned char*>(text.data()), text.size(), nullptr, 0);
  std::vector<Digest> all(size);
  if (Status status = comm.all_gather(&mine, all.data(), sizeof mine, DType::u8).wait();
      !status.ok())
    return status;
  const bool usable = std::ranges::all_of(all, [](const Digest& d) { return d.usable != 0; });
  if (usable && std::ranges::all_of(all, [&](const Digest& d) { return d == all[0]; })) return {};

  uint64_t longest = 0;
  for (const Digest& digest : all) longest = std::max(longest, digest.bytes);
  std::vector<char> padded(longest), gathered(longest * size);
  std::ranges::copy(text, padded.begin());
  if (Status status = comm.all_gather(padded.data(), gathered.data(), longest, DType::u8).wait();
      !status.ok())
    return status;
  std::vector<std::string_view> texts;
  for (size_t r = 0; r < size; ++r) {
    texts.emplace_back(gathered.data() + r * longest, all[r].bytes);
    if (all[r].usable == 0)
      return {Code::invalid_argument, fmt::format("rank {}: {}", r, texts.back())};
  }
  return difference(texts);
}

}  // namespace ringfold::grad
