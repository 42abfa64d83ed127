// A clean set of launcher variables for one test, restored afterwards.
#pragma once

#include <cstdlib>
#include <map>
#include <string>
#include <string_view>
#include <vector>

extern char** environ;

namespace ringfold::test {

class Environment {
 public:
  // Takes away everything that start-up looks at.
  Environment() {
    std::vector<std::string> names;
    for (char** entry = environ; *entry != nullptr; ++entry) {
      const std::string_view text = *entry;
      names.emplace_back(text.substr(0, text.find('=')));
    }
    for (const std::string& name : names) {
      if (is_ours(name)) unset(name);
    }
  }
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;
  ~Environment() {
    for (const auto& [name, value] : before_) {
      if (value.empty()) {
        unsetenv(name.c_str());
      } else {
        setenv(name.c_str(), value.c_str(), 1);
      }
    }
  }

  void set(const std::string& name, const std::string& value) {
    remember(name);
    setenv(name.c_str(), value.c_str(), 1);
  }
  void unset(const std::string& name) {
    remember(name);
    unsetenv(name.c_str());
  }

 private:
  static bool is_ours(std::string_view name) {
    for (const std::string_view prefix :
         {"RINGFOLD_", "OMPI_", "PMIX_", "PMI_", "MPI_LOCAL", "SLURM_", "MASTER_", "TORCH"}) {
      if (name.starts_with(prefix)) return true;
    }
    return name == "RANK" || name == "WORLD_SIZE" || name == "LOCAL_RANK";
  }
  void remember(const std::string& name) {
    const char* const value = std::getenv(name.c_str());
    before_.emplace(name, value == nullptr ? "" : value);
  }

  std::map<std::string, std::string> before_;
};

}  // namespace ringfold::test
