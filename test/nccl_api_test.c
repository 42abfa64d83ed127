/* libnccl.so.2 as a C program written for NCCL uses it, on host memory: many ranks in one thread,
 * communicators of all kinds, then several processes. Exit status 0 if all is well; otherwise each
 * failed check is printed. */
#define _POSIX_C_SOURCE 200809L
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "test/nccl_program.h"

const char* ringfold_nccl_identity(void);

int failures = 0;

void fail(const char* file, int line, const char* what) {
  ++failures;
  fprintf(stderr, "%s:%d: process %d: %s (last error: %s)\n", file, line, (int)getpid(), what,
          ncclGetLastError(NULL));
}

void nap(long milliseconds) {
  struct timespec time = {milliseconds / 1000, milliseconds % 1000 * 1000000};
  nanosleep(&time, NULL);
}

/* ---- Processes ---- */

/* Two processes call different counts: both are told, with the words of both. */
static int mismatched_rank(int rank, const ncclUniqueId* id) {
  ncclComm_t comm = NULL;
  static double data[2000];
  failures = 0;
  OK(ncclCommInitRank(&comm, 2, *id, rank));
  for (int i = 0; i < 2000; ++i) data[i] = rank + i;
  OK(ncclAllReduce(data, data, 2000, ncclFloat64, ncclSum, comm, NULL));
  for (int i = 0; i < 2000; ++i) CHECK(data[i] == 1 + 2 * i);
  CHECK(ncclAllReduce(data, data, rank == 0 ? 1000 : 999, ncclFloat64, ncclSum, comm, NULL) ==
        ncclInvalidUsage);
  CHECK(strstr(ncclGetLastError(comm), "1000 elements") != NULL);
  CHECK(strstr(ncclGetLastError(comm), "999 elements") != NULL);
  ncclResult_t state = ncclSuccess;
  OK(ncclCommGetAsyncError(comm, &state));
  CHECK(state == ncclInvalidUsage);
  OK(ncclCommAbort(comm));
  return failures;
}

static void processes(const char* self) {
  ncclUniqueId id;
  char path[] = "/tmp/nccl_api_test_XXXXXX", command[4096];
  const int file = mkstemp(path);
  int status = -1;
  (void)id;
  CHECK(file >= 0);
  /* Each rank is a fresh process: this one has threads. */
  snprintf(command, sizeof command,
           "'%s' rank 0 '%s' & a=$!; '%s' rank 1 '%s'; b=$?; wait $a && exit $b", self, path, self,
           path);
  status = system(command);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  close(file);
  unlink(path);
}

static int as_rank(int rank, const char* path) {
  ncclUniqueId id;
  if (rank == 0) {
    FILE* file = fopen(path, "wb");
    OK(ncclGetUniqueId(&id));
    CHECK(file != NULL && fwrite(&id, sizeof id, 1, file) == 1);
    if (file != NULL) fclose(file);
  } else {
    size_t got = 0;
    for (int i = 0; i < 5000 && got != 1; ++i) {
      FILE* file = fopen(path, "rb");
      got = file != NULL ? fread(&id, sizeof id, 1, file) : 0;
      if (file != NULL) fclose(file);
      if (got != 1) nap(2);
    }
    CHECK(got == 1);
  }
  return mismatched_rank(rank, &id);
}

int main(int count, char** arguments) {
  int version = 0;
  if (count == 4) return as_rank(atoi(arguments[2]), arguments[3]) != 0;
  OK(ncclGetVersion(&version));
  CHECK(version >= 20000 && version <= 99999);
  CHECK(strncmp(ringfold_nccl_identity(), "ringfold ", 9) == 0);
  CHECK(strcmp(ncclGetErrorString(ncclSuccess), "no error") == 0);
  CHECK(strstr(ncclGetErrorString(ncclInvalidUsage), "invalid usage") != NULL);
  CHECK(strcmp(ncclGetErrorString((ncclResult_t)1000), "unknown result code") == 0);
  in_one_thread();
  grouped_creation();
  configurations();
  non_blocking();
  abort_from_another_thread();
  processes(arguments[0]);
  if (failures == 0) puts("all well");
  return failures != 0;
}
