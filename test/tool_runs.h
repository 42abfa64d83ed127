// Runs of the built executable, as a user starts it.
#pragma once

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace ringfold::test {

using Words = std::vector<std::string>;

inline std::string contents(std::FILE* file) {
  std::string text;
  std::rewind(file);
  for (int c = std::fgetc(file); c != EOF; c = std::fgetc(file)) text += static_cast<char>(c);
  std::fclose(file);
  return text;
}

struct Outcome {
  int status = -1;  // exit status, 128 + signal
  std::string out, err;
  double seconds = 0;
};

// A run of the executable that is under way.
class Running {
 public:
  explicit Running(const Words& arguments, const std::map<std::string, std::string>& extra = {}) {
    // What the surroundings set for their own ranks must not reach the tests.
    std::vector<std::string> words = {RINGFOLD_TOOL};
    words.insert(words.end(), arguments.begin(), arguments.end());
    std::vector<char*> pointers;
    for (std::string& word : words) pointers.push_back(word.data());
    pointers.push_back(nullptr);
    pid_ = fork();
    if (pid_ != 0) return;
    for (const char* name : {"RINGFOLD_RANK", "RINGFOLD_SIZE", "RINGFOLD_COORDINATOR", "RANK",
                             "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS"}) {
      unsetenv(name);
    }
    for (const auto& [name, value] : extra) setenv(name.c_str(), value.c_str(), 1);
    dup2(open("/dev/null", O_RDONLY), STDIN_FILENO);
    dup2(fileno(out_), STDOUT_FILENO);
    dup2(fileno(err_), STDERR_FILENO);
    execv(RINGFOLD_TOOL, pointers.data());
    _exit(126);
  }
  [[nodiscard]] pid_t pid() const { return pid_; }
  void signal(int number) const { kill(pid_, number); }
  [[nodiscard]] Outcome wait() {
    int status = 0;
    waitpid(pid_, &status, 0);
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start_;
    return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), contents(out_),
            contents(err_), spent.count()};
  }

 private:
  std::FILE* out_ = std::tmpfile();
  std::FILE* err_ = std::tmpfile();
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  pid_t pid_ = -1;
};

inline Outcome tool(const Words& arguments, const std::map<std::string, std::string>& extra = {}) {
  return Running(arguments, extra).wait();
}

// A folder of its own that goes away again.
struct Folder {
  std::string path = std::filesystem::temp_directory_path() / "ringfold-test-XXXXXX";
  Folder() { REQUIRE(mkdtemp(path.data()) != nullptr); }
  ~Folder() { std::filesystem::remove_all(path); }
  [[nodiscard]] std::string file(const std::string& name) const { return path + "/" + name; }
};

inline nlohmann::json read_json(const std::string& file) {
  return nlohmann::json::parse(std::ifstream(file));
}

}  // namespace ringfold::test
