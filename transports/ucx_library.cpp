#include "transports/ucx_library.h"

#include <dlfcn.h>
#include <fmt/core.h>
#include <signal.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <string_view>

namespace ringfold {
namespace {

constexpr const char* kLibrary = "libucp.so.0";

// UCX's constructors take over SIGHUP and, in builds as Debian's, SIGSEGV, SIGBUS, SIGILL and
// SIGFPE with a stack of their own to run on. This gives back what they took. (Setting
// UCX_HANDLE_ERRORS around the load would do for the four, but not for SIGHUP, and setenv() may
// crash another thread that reads the environment.)
class KeepSignals {
 public:
  KeepSignals() {
    for (int i = 1; i < NSIG; ++i) known_[i] = sigaction(i, nullptr, &before_[i]) == 0;
    sigaltstack(nullptr, &stack_);
  }

  void restore(void* library) {
    // UCX remembers what it replaced and would bring it back when the process exits, over whatever
    // the user has installed by then: let it do so now.
    using Disable = void (*)();
    if (auto* disable = reinterpret_cast<Disable>(dlsym(library, "ucs_debug_disable_signals")))
      disable();
    for (int i = 1; i < NSIG; ++i) {
      struct sigaction now;
      if (known_[i] && sigaction(i, nullptr, &now) == 0 && is_ucx(now))
        sigaction(i, &before_[i], nullptr);
    }
    sigaltstack(&stack_, nullptr);
  }

 private:
  // Only what is UCX's is replaced: another thread may have installed a handler meanwhile.
  static bool is_ucx(const struct sigaction& action) {
    if (action.sa_handler == SIG_DFL || action.sa_handler == SIG_IGN) return false;
    Dl_info where;
    if (dladdr(reinterpret_cast<void*>(action.sa_handler), &where) == 0) return false;
    const char* slash = std::strrchr(where.dli_fname, '/');
    return std::string_view(slash ? slash + 1 : where.dli_fname).starts_with("libuc");
  }

  std::array<struct sigaction, NSIG> before_{};
  std::array<bool, NSIG> known_{};
  stack_t stack_{};
};

// Whoever asks UCX for its handlers in so many words gets them.
bool user_wants_ucx_handlers() {
  const char* wish = std::getenv("UCX_HANDLE_ERRORS");
  return wish && *wish && std::string_view(wish) != "none";
}

void* open_library() {
  if (void* loaded = dlopen(kLibrary, RTLD_LOCAL | RTLD_NOW | RTLD_NOLOAD)) return loaded;
  if (user_wants_ucx_handlers()) return dlopen(kLibrary, RTLD_LOCAL | RTLD_NOW);
  KeepSignals signals;
  void* library = dlopen(kLibrary, RTLD_LOCAL | RTLD_NOW);
  if (library) signals.restore(library);
  return library;
}

template <class Function>
void find(void* library, const char* name, Function*& function, std::string& missing) {
  function = reinterpret_cast<Function*>(dlsym(library, name));
  if (!function) missing += fmt::format("{}{}", missing.empty() ? "" : ", ", name);
}

Result<UcxLibrary> load() {
  void* library = open_library();
  if (!library) {
    const char* why = dlerror();
    return Status(Code::unsupported,
                  fmt::format("UCX cannot be opened: {}. Install UCX 1.13 or newer (libucx0), or "
                              "name its folder in LD_LIBRARY_PATH",
                              why ? why : kLibrary));
  }
  UcxLibrary ucx{};
  std::string missing;
  find(library, "ucp_get_version_string", ucx.ucp_get_version_string, missing);
  find(library, "ucp_config_read", ucx.ucp_config_read, missing);
  find(library, "ucp_config_modify", ucx.ucp_config_modify, missing);
  find(library, "ucp_config_release", ucx.ucp_config_release, missing);
  find(library, "ucp_init_version", ucx.ucp_init_version, missing);
  find(library, "ucp_cleanup", ucx.ucp_cleanup, missing);
  find(library, "ucp_context_query", ucx.ucp_context_query, missing);
  find(library, "ucp_context_print_info", ucx.ucp_context_print_info, missing);
  find(library, "ucp_worker_create", ucx.ucp_worker_create, missing);
  find(library, "ucp_worker_destroy", ucx.ucp_worker_destroy, missing);
  find(library, "ucp_worker_get_address", ucx.ucp_worker_get_address, missing);
  find(library, "ucp_worker_release_address", ucx.ucp_worker_release_address, missing);
  find(library, "ucp_worker_get_efd", ucx.ucp_worker_get_efd, missing);
  find(library, "ucp_worker_arm", ucx.ucp_worker_arm, missing);
  find(library, "ucp_worker_progress", ucx.ucp_worker_progress, missing);
  find(library, "ucp_worker_set_am_recv_handler", ucx.ucp_worker_set_am_recv_handler, missing);
  find(library, "ucp_ep_create", ucx.ucp_ep_create, missing);
  find(library, "ucp_ep_close_nbx", ucx.ucp_ep_close_nbx, missing);
  find(library, "ucp_am_send_nbx", ucx.ucp_am_send_nbx, missing);
  find(library, "ucp_am_recv_data_nbx", ucx.ucp_am_recv_data_nbx, missing);
  find(library, "ucp_am_data_release", ucx.ucp_am_data_release, missing);
  find(library, "ucp_request_free", ucx.ucp_request_free, missing);
  find(library, "ucs_status_string", ucx.ucs_status_string, missing);
  if (missing.empty()) return ucx;
  return Status(
      Code::unsupported,
      fmt::format("this UCX is too old (ringfold needs 1.13 or newer): it has no {}", missing));
}

}  // namespace

Result<const UcxLibrary*> ucx_library() {
  static Result<UcxLibrary> library = load();  // not const: tests stand in for parts of it
  if (!library.ok()) return library.status();
  return &*library;
}

}  // namespace ringfold
