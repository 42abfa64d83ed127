// How people write and read amounts: sizes, rates, durations. Pure functions, any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace ringfold::tools {

// Bytes in either notation: "4GB", "4.0GB" (decimal, 10^9), "4GiB", "4G" (binary, as everywhere in
// ringfold), "512" or "512B". Nothing else.
std::optional<double> parse_amount(std::string_view text);
// Bytes a second: "200GB/s" (decimal), "2GiB/s", "100Gbit/s", "100Gb/s".
std::optional<double> parse_rate(std::string_view text);
// Seconds: "5us", "1.5ms", "200ns", "2s"; a unit is required unless the number is 0.
std::optional<double> parse_seconds(std::string_view text);
// A share: "10%" or "0.1".
std::optional<double> parse_share(std::string_view text);

std::string show_amount(double bytes);     // "7.875 GB", decimal as bandwidths are
std::string show_size(uint64_t bytes);     // "64 MiB", or "1000 B" when no binary unit divides it
std::string show_seconds(double seconds);  // "35 ms", "1.25 us"

std::string listed(std::span<const std::string_view> words);  // "a, b, c"

}  // namespace ringfold::tools
