// Handles: what was given up stays given up, whoever is using it at that moment.
#include "lib/adapters/registry.h"

#include <atomic>
#include <catch2/catch.hpp>
#include <memory>
#include <set>
#include <thread>
#include <vector>

using namespace ringfold;

namespace {

struct Opaque;

struct Counted {
  explicit Counted(std::atomic<int>& alive) : alive_(&alive) { ++alive; }
  Counted(const Counted&) = delete;
  Counted& operator=(const Counted&) = delete;
  ~Counted() {
    intact = 0;
    --*alive_;
  }
  std::atomic<int>* alive_;
  int intact = 4711;
};
using Object = std::shared_ptr<Counted>;
using Handles = Registry<Opaque*, Object>;

// As many objects as asked for, and their handles.
struct Filled {
  std::atomic<int> alive{0};
  Handles handles{"test"};
  std::vector<Opaque*> all;
  explicit Filled(int count) {
    for (int i = 0; i < count; ++i) all.push_back(handles.add(std::make_shared<Counted>(alive)));
  }
};

}  // namespace

TEST_CASE("registry: handles differ, are not null, and lead to their objects until given up") {
  Filled filled(1000);
  CHECK(std::set<Opaque*>(filled.all.begin(), filled.all.end()).size() == 1000);
  CHECK(filled.alive == 1000);
  for (Opaque* handle : filled.all) {
    REQUIRE(handle != nullptr);
    REQUIRE((*Handles::Use(filled.handles, handle))->intact == 4711);
    REQUIRE(filled.handles.remove(handle).ok());
    REQUIRE_FALSE(Handles::Use(filled.handles, handle).ok());
    REQUIRE(filled.handles.remove(handle).code() == Code::invalid_argument);
  }
  CHECK(filled.alive == 0);
}

TEST_CASE("registry: a slot that is used again does not bring the old handle back") {
  Filled filled(1);
  Opaque* const old = filled.all[0];
  REQUIRE(filled.handles.remove(old).ok());
  for (int i = 0; i < 500; ++i) {
    Opaque* const handle = filled.handles.add(std::make_shared<Counted>(filled.alive));
    REQUIRE(handle != old);
    REQUIRE_FALSE(filled.handles.find(old).ok());
    REQUIRE(filled.handles.remove(handle).ok());
  }
}

TEST_CASE("registry: null and invented handles are refused") {
  Filled filled(3);
  CHECK(filled.handles.find(nullptr).status().message() == "the test handle is null");
  for (const uintptr_t number : {uintptr_t{1}, uintptr_t{12345}, ~uintptr_t{0}, uintptr_t{1} << 40})
    CHECK_FALSE(filled.handles.find(reinterpret_cast<Opaque*>(number)).ok());
}

TEST_CASE("registry: what is in use ends when its last user leaves, not before") {
  Filled filled(1);
  {
    const Handles::Use one(filled.handles, filled.all[0]), two(filled.handles, filled.all[0]);
    REQUIRE(one.ok());
    CHECK(filled.handles.remove(filled.all[0]).ok());
    CHECK_FALSE(filled.handles.find(filled.all[0]).ok());
    CHECK((*two)->intact == 4711);
    CHECK(filled.alive == 1);
  }
  CHECK(filled.alive == 0);
}

TEST_CASE("registry: threads that use, give up and make handles at once") {
  Filled filled(64);
  std::vector<std::atomic<Opaque*>> live(filled.all.size());
  for (size_t i = 0; i < live.size(); ++i) live[i] = filled.all[i];
  std::atomic<int> wrong{0}, removed{0};
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      for (unsigned i = 0; i < 50'000; ++i) {
        std::atomic<Opaque*>& place = live[(i * 7 + t * 13) % live.size()];
        Opaque* const handle = place.load();
        if (const Handles::Use use(filled.handles, handle); use.ok() && (*use)->intact != 4711)
          ++wrong;
        if (i % 5 != t) continue;
        if (!filled.handles.remove(handle).ok()) continue;  // another thread was quicker
        ++removed;
        place = filled.handles.add(std::make_shared<Counted>(filled.alive));
      }
    });
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0);
  CHECK(removed > 1000);
  CHECK(filled.alive == 64);
}
