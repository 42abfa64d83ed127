/* Part of nccl_api_test: communicators. */
#include <pthread.h>
#include <stdio.h>

#include "test/nccl_program.h"

#define COUNT 1000

static float in[3][COUNT], out[3][COUNT];

static void fill(void) {
  for (int r = 0; r < 3; ++r)
    for (int i = 0; i < COUNT; ++i) in[r][i] = (float)((r + 1) * (i % 100)), out[r][i] = -1;
}

/* Polls a non-blocking communicator; what it ends with. */
static ncclResult_t settled(ncclComm_t comm) {
  ncclResult_t state = ncclInProgress;
  for (int i = 0; i < 20000 && state == ncclInProgress; ++i) {
    if (ncclCommGetAsyncError(comm, &state) != ncclSuccess) return ncclInternalError;
    if (state == ncclInProgress) nap(1);
  }
  return state;
}

/* ---- Creation ---- */

void grouped_creation(void) {
  ncclUniqueId id, ids[2];
  ncclComm_t made[3];
  OK(ncclGetUniqueId(&id));
  OK(ncclGroupStart());
  for (int r = 0; r < 3; ++r) OK(ncclCommInitRank(&made[r], 3, id, r));
  OK(ncclGroupEnd());
  fill();
  OK(ncclGroupStart());
  for (int r = 0; r < 3; ++r)
    OK(ncclAllReduce(in[r], out[r], COUNT, ncclFloat32, ncclSum, made[r], NULL));
  OK(ncclGroupEnd());
  CHECK(out[2][9] == 54);
  for (int r = 0; r < 3; ++r) OK(ncclCommDestroy(made[r]));

  OK(ncclGetUniqueId(&ids[0]));
  OK(ncclGetUniqueId(&ids[1]));
  OK(ncclGroupStart());
  for (int r = 0; r < 2; ++r) OK(ncclCommInitRankScalable(&made[r], 2, r, 2, ids, NULL));
  OK(ncclGroupEnd());
  for (int r = 0; r < 2; ++r) OK(ncclCommAbort(made[r]));

  OK(ncclGetUniqueId(&id));
  REFUSED(ncclCommInitRank(&made[0], 2, id, 2), ncclInvalidArgument, "rank 2 of 2");
  CHECK(made[0] == NULL);
  OK(ncclGroupStart());
  OK(ncclCommInitRank(&made[0], 2, id, 0));
  CHECK(ncclCommInitRank(&made[1], 2, id, 5) == ncclInvalidArgument);
  REFUSED(ncclGroupEnd(), ncclInvalidArgument, "rank 5 of 2");
  CHECK(made[0] == NULL && made[1] == NULL);
  memset(&id, 7, sizeof id);
  REFUSED(ncclCommInitRank(&made[0], 2, id, 1), ncclInvalidArgument, "unique id");

  OK(ncclGetUniqueId(&id)); /* one rank */
  OK(ncclCommInitRank(&made[0], 1, id, 0));
  OK(ncclAllReduce(in[0], out[0], COUNT, ncclFloat32, ncclAvg, made[0], NULL));
  CHECK(memcmp(in[0], out[0], COUNT * sizeof(float)) == 0);
  OK(ncclCommDestroy(made[0]));
}

/* C68: the configuration as every version lays it out, its padding and its unknown tail full of
 * rubbish. */
void configurations(void) {
  static const struct {
    size_t size;
    unsigned version;
  } known[] = {{24, 21403}, {40, 21701}, {48, 21806}, {48, 22606},  {72, 22707}, {80, 22809},
               {88, 22907}, {96, 23003}, {96, 23007}, {120, 23203}, {400, 29901}};
  for (size_t i = 0; i < sizeof known / sizeof *known; ++i) {
    union {
      ncclConfig_t config;
      unsigned char bytes[400];
    } u;
    ncclComm_t comm = NULL;
    ncclUniqueId id;
    memset(u.bytes, 0xd5, sizeof u.bytes);
    u.config.size = known[i].size;
    u.config.magic = 0xcafebeef;
    u.config.version = known[i].version;
    u.config.blocking = 0;
    OK(ncclGetUniqueId(&id));
    CHECK(ncclCommInitRankConfig(&comm, 1, id, 0, &u.config) == ncclInProgress);
    CHECK(comm != NULL && settled(comm) == ncclSuccess);
    OK(ncclCommDestroy(comm));
    u.config.blocking = NCCL_CONFIG_UNDEF_INT;
    OK(ncclGetUniqueId(&id));
    OK(ncclCommInitRankConfig(&comm, 1, id, 0, &u.config));
    OK(ncclCommDestroy(comm));
    u.config.blocking = 2;
    REFUSED(ncclCommInitRankConfig(&comm, 1, id, 0, &u.config), ncclInvalidArgument,
            "blocking is 2");
    u.config.magic = 0;
    REFUSED(ncclCommInitRankConfig(&comm, 1, id, 0, &u.config), ncclInvalidArgument,
            "NCCL_CONFIG_INITIALIZER");
    CHECK(comm == NULL);
  }
}

/* ---- Non-blocking, and two threads ---- */

void non_blocking(void) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  ncclUniqueId id;
  ncclComm_t made[2] = {NULL, NULL}, parts[2] = {NULL, NULL}, other;
  float x[2] = {1, 2}, y[2] = {0, 0};
  config.blocking = 0;
  OK(ncclGetUniqueId(&id));
  CHECK(ncclCommInitRankConfig(&made[0], 2, id, 0, &config) == ncclInProgress);
  CHECK(made[0] != NULL);
  ncclResult_t state = ncclSuccess;
  OK(ncclCommGetAsyncError(made[0], &state));
  CHECK(state == ncclInProgress); /* the other rank is not there */
  REFUSED(ncclAllReduce(&x[0], &y[0], 1, ncclFloat32, ncclSum, made[0], NULL), ncclInvalidArgument,
          "in progress");
  CHECK(ncclCommInitRankConfig(&made[1], 2, id, 1, &config) == ncclInProgress);
  for (int r = 0; r < 2; ++r) CHECK(settled(made[r]) == ncclSuccess);

  ncclResult_t result = ncclAllReduce(&x[0], &y[0], 1, ncclFloat32, ncclSum, made[0], NULL);
  CHECK(result == ncclInProgress);
  result = ncclAllReduce(&x[1], &y[1], 1, ncclFloat32, ncclSum, made[1], NULL);
  CHECK(result == ncclInProgress || result == ncclSuccess);
  for (int r = 0; r < 2; ++r) CHECK(settled(made[r]) == ncclSuccess && y[r] == 3);

  OK(ncclGroupStart());
  for (int r = 0; r < 2; ++r) OK(ncclCommSplit(made[r], 0, -r, &parts[r], NULL));
  CHECK(ncclGroupEnd() == ncclInProgress);
  for (int r = 0; r < 2; ++r) CHECK(settled(made[r]) == ncclSuccess);
  for (int r = 0; r < 2; ++r) CHECK(parts[r] != NULL && settled(parts[r]) == ncclSuccess);

  OK(ncclGetUniqueId(&id));
  OK(ncclCommInitRank(&other, 1, id, 0));
  OK(ncclGroupStart()); /* both kinds in one group */
  OK(ncclAllReduce(&x[0], &y[0], 1, ncclFloat32, ncclSum, made[0], NULL));
  OK(ncclAllReduce(&x[1], &y[1], 1, ncclFloat32, ncclSum, other, NULL));
  REFUSED(ncclGroupEnd(), ncclInvalidArgument, "non-blocking");
  OK(ncclCommDestroy(other));

  for (int r = 0; r < 2; ++r) CHECK(ncclCommFinalize(parts[r]) == ncclInProgress);
  for (int r = 0; r < 2; ++r) CHECK(settled(parts[r]) == ncclSuccess);
  for (int r = 0; r < 2; ++r) OK(ncclCommDestroy(parts[r]));

  /* An error that comes later. */
  CHECK(ncclAllReduce(x, y, 2, ncclFloat32, ncclSum, made[0], NULL) == ncclInProgress);
  result = ncclAllReduce(x, y, 1, ncclFloat32, ncclSum, made[1], NULL);
  CHECK(result == ncclInProgress || result == ncclInvalidUsage);
  for (int r = 0; r < 2; ++r) {
    CHECK(settled(made[r]) == ncclInvalidUsage);
    CHECK(strstr(ncclGetLastError(made[r]), "1 elements") != NULL);
    CHECK(strstr(ncclGetLastError(made[r]), "2 elements") != NULL);
    OK(ncclCommAbort(made[r]));
  }
}

struct Stuck {
  ncclComm_t comm;
  ncclResult_t result;
  char text[200];
};

static void* wait_for_nobody(void* argument) {
  struct Stuck* stuck = argument;
  float x = 1;
  stuck->result = ncclAllReduce(&x, &x, 1, ncclFloat32, ncclSum, stuck->comm, NULL);
  snprintf(stuck->text, sizeof stuck->text, "%s", ncclGetLastError(NULL));
  return NULL;
}

void abort_from_another_thread(void) {
  ncclComm_t made[2], smaller = NULL;
  pthread_t thread;
  struct Stuck stuck;
  int gone[1] = {1}, value = -1;
  float x = 3, y = 0;
  OK(ncclCommInitAll(made, 2, NULL));
  memset(&stuck, 0, sizeof stuck);
  stuck.comm = made[0];
  CHECK(pthread_create(&thread, NULL, wait_for_nobody, &stuck) == 0);
  nap(50);
  ncclResult_t state = ncclInProgress;
  OK(ncclCommGetAsyncError(made[0], &state)); /* a watchdog */
  CHECK(state == ncclSuccess);
  OK(ncclCommRevoke(made[0], 0));
  CHECK(pthread_join(thread, NULL) == 0);
  CHECK(stuck.result == ncclRemoteError && strstr(stuck.text, "revoked") != NULL);
  OK(ncclCommGetAsyncError(made[0], &state));
  CHECK(state == ncclSuccess);
  REFUSED(ncclAllReduce(&x, &y, 1, ncclFloat32, ncclSum, made[0], NULL), ncclInvalidUsage,
          "revoked");
  OK(ncclCommShrink(made[0], gone, 1, &smaller, NULL, NCCL_SHRINK_ABORT));
  OK(ncclCommCount(smaller, &value));
  CHECK(value == 1);
  OK(ncclAllReduce(&x, &y, 1, ncclFloat32, ncclSum, smaller, NULL));
  CHECK(y == 3);
  OK(ncclCommDestroy(smaller));
  OK(ncclCommDestroy(made[0]));

  stuck.comm = made[1]; /* the other rank has heard of it */
  wait_for_nobody(&stuck);
  CHECK(stuck.result == ncclRemoteError);
  OK(ncclCommAbort(made[1]));

  OK(ncclCommInitAll(made, 2, NULL));
  stuck.comm = made[1];
  CHECK(pthread_create(&thread, NULL, wait_for_nobody, &stuck) == 0);
  nap(50);
  OK(ncclCommAbort(made[1]));
  CHECK(pthread_join(thread, NULL) == 0);
  CHECK(stuck.result == ncclRemoteError && strstr(stuck.text, "ncclCommAbort") != NULL);
  OK(ncclCommAbort(made[0]));
}
