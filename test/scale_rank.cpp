// One of very many ranks: reduces 4 bytes, and prints as JSON what it holds of the machine
// meanwhile.
#include <fmt/format.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include "ringfold/communicator.h"

using namespace ringfold;

namespace {

int descriptors() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return static_cast<int>(std::distance(begin(all), end(all))) - 1;  // without the iterator's own
}

// A line of the form "Name:   123 kB".
long amount(const char* file, const std::string& name) {
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);)
    if (line.starts_with(name + ":")) return std::stol(line.substr(name.size() + 1));
  return -1;
}

struct Shared {
  int rings = 0;
  long ring_kib = 0, region_kib = 0;
};

// The library's shared memory that this process has mapped.
Shared shared_memory() {
  Shared found;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    std::istringstream fields(line);
    std::string range, skipped, file;
    fields >> range >> skipped >> skipped >> skipped >> skipped >> file;
    const size_t dash = range.find('-');
    const long kib = static_cast<long>((std::stoull(range.substr(dash + 1), nullptr, 16) -
                                        std::stoull(range.substr(0, dash), nullptr, 16)) /
                                       1024);
    if (file == "/memfd:ringfold-region") found.region_kib += kib;
    if (file == "/memfd:ringfold") ++found.rings, found.ring_kib = kib;
  }
  return found;
}

int failed(const std::string& why) {
  fmt::print(stderr, "{}\n", why);
  return 1;
}

}  // namespace

int main() {
  const auto where = Rendezvous::from_environment();
  if (!where.ok()) return failed(where.status().to_string());
  const int before = descriptors();
  auto comm = Communicator::create(*where);
  if (!comm.ok()) return failed(comm.status().to_string());
  const int n = comm->size();
  int32_t x = comm->rank();
  Status status = comm->all_reduce(&x, &x, 1, DType::i32, Op::sum).wait();
  if (status.ok() && x != n * (n - 1) / 2) return failed(fmt::format("wrong sum {}", x));
  const int held = descriptors() - before;
  const Shared shared = shared_memory();
  const long own = amount("/proc/self/smaps_rollup", "Private_Dirty");
  const long threads = amount("/proc/self/status", "Threads");
  // Until all have counted: whoever leaves takes descriptors with him.
  if (status.ok()) status = comm->barrier().wait();
  if (!status.ok()) return failed(status.to_string());
  fmt::print(R"({{"rank":{},"descriptors":{},"threads":{},"own_kib":{},"rings":{},"ring_kib":{},)"
             R"("region_kib":{}}})"
             "\n",
             comm->rank(), held, threads, own, shared.rings, shared.ring_kib, shared.region_kib);
  return 0;
}
