// UCX, opened at run time, so that one binary serves machines with and without it: only the headers
// are needed to build.
#pragma once

#include <ucp/api/ucp.h>

#include "ringfold/status.h"

namespace ringfold {

// The functions used, by their names in ucp.h and status.h.
struct UcxLibrary {
  decltype(&::ucp_get_version_string) ucp_get_version_string;
  decltype(&::ucp_config_read) ucp_config_read;
  decltype(&::ucp_config_modify) ucp_config_modify;
  decltype(&::ucp_config_release) ucp_config_release;
  decltype(&::ucp_init_version) ucp_init_version;
  decltype(&::ucp_cleanup) ucp_cleanup;
  decltype(&::ucp_context_query) ucp_context_query;
  decltype(&::ucp_context_print_info) ucp_context_print_info;
  decltype(&::ucp_worker_create) ucp_worker_create;
  decltype(&::ucp_worker_destroy) ucp_worker_destroy;
  decltype(&::ucp_worker_get_address) ucp_worker_get_address;
  decltype(&::ucp_worker_release_address) ucp_worker_release_address;
  decltype(&::ucp_worker_get_efd) ucp_worker_get_efd;
  decltype(&::ucp_worker_arm) ucp_worker_arm;
  decltype(&::ucp_worker_progress) ucp_worker_progress;
  decltype(&::ucp_worker_set_am_recv_handler) ucp_worker_set_am_recv_handler;
  decltype(&::ucp_ep_create) ucp_ep_create;
  decltype(&::ucp_ep_close_nbx) ucp_ep_close_nbx;
  decltype(&::ucp_am_send_nbx) ucp_am_send_nbx;
  decltype(&::ucp_am_recv_data_nbx) ucp_am_recv_data_nbx;
  decltype(&::ucp_am_data_release) ucp_am_data_release;
  decltype(&::ucp_request_free) ucp_request_free;
  decltype(&::ucs_status_string) ucs_status_string;
};

// Opens UCX at the first call and keeps it for the life of the process; a copy that the process has
// already loaded is used rather than a second one. The signal handlers and the environment are
// afterwards as they were before. Any thread.
Result<const UcxLibrary*> ucx_library();

}  // namespace ringfold
