#include "lib/record/trace.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <map>

#include "lib/record/picture.h"

namespace ringfold::record {
namespace {

constexpr std::string_view kClosing = "\n]\n";

std::string file_of(const std::string& pattern, int rank) {
  const size_t at = pattern.find("%r");
  if (at == std::string::npos) return fmt::format("{}.rank{}", pattern, rank);
  return fmt::format("{}{}{}", pattern.substr(0, at), rank, pattern.substr(at + 2));
}

double microseconds(Nanoseconds time) {
  return std::chrono::duration<double, std::micro>(time).count();
}

// One file may serve several worlds of this process, one after the other.
struct Files {
  std::mutex lock;
  std::map<std::string, std::shared_ptr<Trace>> by_name;
};
Files& files() {
  static auto& all = *new Files;  // never destroyed: other threads may still run at exit
  return all;
}

}  // namespace

Result<std::shared_ptr<Trace>> Trace::open(const std::string& pattern, int rank) {
  const std::string name = file_of(pattern, rank);
  const std::lock_guard guard(files().lock);
  auto& known = files().by_name[name];
  if (known && known->generation_ == fork_generation()) return known;
  Descriptor file(::open(name.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  if (!file)
    return Status(Code::system, fmt::format("RINGFOLD_TRACE: {}: {}", name, reason(errno)));
  std::shared_ptr<Trace> made(new Trace(std::move(file), rank));
  if (Status status = made->begin(); !status.ok())
    return Status(status.code(), fmt::format("RINGFOLD_TRACE: {}: {}", name, status.message()));
  known = made;
  return made;
}

Status Trace::begin() {
  const std::string text = fmt::format(
      "[\n{{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":{},\"args\":{{\"name\":\"rank {} "
      "(process {})\"}}}}",
      rank_, rank_, getpid());
  end_ = text.size();
  const std::string all = text + std::string(kClosing);
  if (pwrite(file_.get(), all.data(), all.size(), 0) != static_cast<ssize_t>(all.size()))
    return {Code::system, reason(errno)};
  return {};
}

// Nestable asynchronous events, because operations of one communicator overlap.
void Trace::write(const Operation& o) {
  if (generation_ != fork_generation()) return;
  std::string text;
  const std::lock_guard guard(lock_);
  const uint64_t id = written_++;
  const auto event = [&](char phase, std::string_view name, Nanoseconds at,
                         std::string_view arguments) {
    text += fmt::format(
        ",\n{{\"name\":{},\"cat\":\"ringfold\",\"ph\":\"{}\",\"id\":\"{}.{}\",\"ts\":{:.3f},"
        "\"pid\":{},\"tid\":{}{}{}{}}}",
        quoted(name), phase, rank_, id, microseconds(at), rank_, o.communicator,
        arguments.empty() ? "" : ",\"args\":{", arguments, arguments.empty() ? "" : "}");
  };
  event('b', o.name, o.began,
        fmt::format("\"seq\":{},\"transport\":{},\"outcome\":{},\"bytes_sent\":{}", o.seq,
                    quoted(o.transport), quoted(o.outcome), o.bytes_sent));
  Nanoseconds from = o.began;
  int through = 0;
  for (const Mark& mark : o.marks) {
    if (mark.step <= through) continue;
    const std::string name = mark.step == through + 1
                                 ? fmt::format("step {}", mark.step)
                                 : fmt::format("steps {} to {}", through + 1, mark.step);
    event('b', name, from, {});
    event('e', name, mark.at, {});
    from = mark.at;
    through = mark.step;
  }
  event('e', o.name, o.ended, {});
  append(text);
}

// A full disk loses the trace, not the operation.
void Trace::append(const std::string& events) {
  const std::string text = events + std::string(kClosing);
  if (pwrite(file_.get(), text.data(), text.size(), static_cast<off_t>(end_)) ==
      static_cast<ssize_t>(text.size()))
    end_ += events.size();
}

}  // namespace ringfold::record
