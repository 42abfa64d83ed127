/* libnccl.so.2 as a C program written for NCCL uses it, on host memory: many ranks in one thread,
 * then several processes. Exit status 0 if all is well; otherwise each failed check is printed. */
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "test/nccl_minimal.h"

#define RANKS 4
#define COUNT 1000

const char* ringfold_nccl_identity(void);

static int failures = 0;

static void fail(int line, const char* what) {
  ++failures;
  fprintf(stderr, "nccl_api_test.c:%d: process %d: %s (last error: %s)\n", line, (int)getpid(),
          what, ncclGetLastError(NULL));
}

#define CHECK(condition)                          \
  do {                                            \
    if (!(condition)) fail(__LINE__, #condition); \
  } while (0)
#define OK(call) CHECK((call) == ncclSuccess)
/* The call is refused, and the text says `words`. */
#define REFUSED(call, code, words)                          \
  do {                                                      \
    CHECK((call) == (code));                                \
    CHECK(strstr(ncclGetLastError(NULL), (words)) != NULL); \
  } while (0)

static void nap(long milliseconds) {
  struct timespec time = {milliseconds / 1000, milliseconds % 1000 * 1000000};
  nanosleep(&time, NULL);
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

/* ---- Many ranks in one thread ---- */

static ncclComm_t comms[RANKS];
static float in[RANKS][RANKS * COUNT], out[RANKS][RANKS * COUNT];

static void fill(void) {
  for (int r = 0; r < RANKS; ++r)
    for (int i = 0; i < RANKS * COUNT; ++i) in[r][i] = (float)((r + 1) * (i % 100)), out[r][i] = -1;
}

static void reductions(void) {
  fill();
  OK(ncclGroupStart());
  for (int r = 0; r < RANKS; ++r)
    OK(ncclAllReduce(in[r], out[r], COUNT, ncclFloat32, ncclSum, comms[r], NULL));
  CHECK(out[0][1] == -1); /* nothing has begun */
  OK(ncclGroupEnd());
  for (int r = 0; r < RANKS; ++r)
    for (int i = 0; i < COUNT; ++i) CHECK(out[r][i] == (float)(10 * (i % 100)));

  OK(ncclGroupStart()); /* nested; in place; the strong name */
  for (int r = 0; r < RANKS; ++r) {
    OK(ncclGroupStart());
    OK(pncclAllReduce(in[r], in[r], COUNT, ncclFloat32, ncclAvg, comms[r], NULL));
    OK(ncclGroupEnd());
  }
  CHECK(in[1][3] == 6);
  OK(ncclGroupEnd());
  for (int r = 0; r < RANKS; ++r)
    for (int i = 0; i < COUNT; ++i) CHECK(in[r][i] == 2.5F * (float)(i % 100));

  fill();
  OK(ncclGroupStart());
  for (int r = 0; r < RANKS; ++r) {
    OK(ncclReduceScatter(in[r], out[r], COUNT, ncclFloat32, ncclMax, comms[r], NULL));
    OK(ncclReduce(in[r], r == 2 ? out[r] + COUNT : NULL, COUNT, ncclFloat32, ncclMin, 2, comms[r],
                  NULL));
  }
  OK(ncclGroupEnd());
  for (int r = 0; r < RANKS; ++r)
    for (int i = 0; i < COUNT; ++i) CHECK(out[r][i] == (float)(4 * ((r * COUNT + i) % 100)));
  for (int i = 0; i < COUNT; ++i) CHECK(out[2][COUNT + i] == (float)(i % 100));
}

static void copies(void) {
  fill();
  OK(ncclGroupStart());
  for (int r = 0; r < RANKS; ++r)
    OK(ncclBroadcast(in[r], out[r], COUNT, ncclFloat32, 3, comms[r], NULL));
  in[3][7] = 99; /* the root's data counts when the group ends */
  OK(ncclGroupEnd());
  for (int r = 0; r < RANKS; ++r)
    for (int i = 0; i < COUNT; ++i) CHECK(out[r][i] == (i == 7 ? 99 : (float)(4 * (i % 100))));

  fill();
  OK(ncclGroupStart());
  for (int r = 0; r < RANKS; ++r) OK(ncclBcast(in[r], COUNT, ncclFloat32, 1, comms[r], NULL));
  for (int r = 0; r < RANKS; ++r)
    OK(ncclAllGather(in[r] + COUNT, out[r], COUNT / 4, ncclFloat32, comms[r], NULL));
  OK(ncclGroupEnd());
  for (int r = 0; r < RANKS; ++r) {
    CHECK(in[r][5] == 10 && in[r][COUNT + 5] == (float)(5 * (r + 1)));
    for (int i = 0; i < COUNT; ++i)
      CHECK(out[r][i] == (float)((i / 250 + 1) * ((COUNT + i % 250) % 100)));
  }

  fill();
  OK(ncclGroupStart());
  for (int r = 0; r < RANKS; ++r) {
    OK(ncclAlltoAll(in[r], out[r], COUNT / 4, ncclFloat32, comms[r], NULL));
    OK(ncclGather(in[r], r == 0 ? out[r] + COUNT : NULL, COUNT / 4, ncclFloat32, 0, comms[r],
                  NULL));
    OK(ncclScatter(r == 0 ? in[r] : NULL, out[r] + 2 * COUNT, COUNT / 4, ncclFloat32, 0, comms[r],
                   NULL));
  }
  OK(ncclGroupEnd());
  for (int r = 0; r < RANKS; ++r)
    for (int i = 0; i < COUNT; ++i) {
      CHECK(out[r][i] == (float)((i / 250 + 1) * ((r * 250 + i % 250) % 100)));
      if (i < 250) CHECK(out[r][2 * COUNT + i] == (float)((r * 250 + i) % 100));
    }
  for (int i = 0; i < COUNT; ++i)
    CHECK(out[0][COUNT + i] == (float)((i / 250 + 1) * (i % 250 % 100)));
}

static void messages(void) {
  fill();
  OK(ncclGroupStart());
  for (int r = 0; r < RANKS; ++r) {
    OK(ncclSend(in[r], COUNT, ncclFloat32, (r + 1) % RANKS, comms[r], NULL));
    OK(ncclRecv(out[r], COUNT, ncclFloat32, (r + RANKS - 1) % RANKS, comms[r], NULL));
    OK(ncclSend(NULL, 0, ncclInt8, (r + 1) % RANKS, comms[r], NULL));
    OK(ncclRecv(NULL, 0, ncclInt8, (r + RANKS - 1) % RANKS, comms[r], NULL));
  }
  OK(ncclGroupEnd());
  for (int r = 0; r < RANKS; ++r)
    for (int i = 0; i < COUNT; ++i)
      CHECK(out[r][i] == (float)(((r + RANKS - 1) % RANKS + 1) * (i % 100)));
}

static void own_operations(void) {
  ncclRedOp_t ops[RANKS], second;
  fill();
  float factors[RANKS] = {0.5F, 2, 1, -1};
  for (int r = 0; r < RANKS; ++r)
    OK(ncclRedOpCreatePreMulSum(&ops[r], &factors[r], ncclFloat32,
                                r % 2 ? ncclScalarDevice : ncclScalarHostImmediate, comms[r]));
  factors[0] = 100; /* was read before */
  factors[1] = 3;   /* is read when the collective is called */
  OK(ncclGroupStart());
  for (int r = 0; r < RANKS; ++r)
    OK(ncclAllReduce(in[r], out[r], COUNT, ncclFloat32, ops[r], comms[r], NULL));
  OK(ncclGroupEnd());
  for (int i = 0; i < COUNT; ++i) CHECK(out[0][i] == (0.5F + 6 + 3 - 4) * (float)(i % 100));
  REFUSED(ncclAllReduce(in[0], out[0], 1, ncclFloat64, ops[0], comms[0], NULL), ncclInvalidArgument,
          "made for f32");
  OK(ncclRedOpCreatePreMulSum(&second, &factors[0], ncclFloat32, ncclScalarHostImmediate,
                              comms[0]));
  CHECK(second != ops[0]);
  for (int r = 0; r < RANKS; ++r) OK(ncclRedOpDestroy(ops[r], comms[r]));
  REFUSED(ncclAllReduce(in[0], out[0], 1, ncclFloat32, ops[0], comms[0], NULL), ncclInvalidArgument,
          "op 5");
  REFUSED(ncclRedOpDestroy(ops[0], comms[0]), ncclInvalidArgument, "destroyed already");
  REFUSED(ncclRedOpDestroy(ncclSum, comms[0]), ncclInvalidArgument, "not made");
}

static void wrong_arguments(void) {
  float x = 1, y = 0;
  REFUSED(ncclAllReduce(NULL, &y, 1, ncclFloat32, ncclSum, comms[0], NULL), ncclInvalidArgument,
          "null");
  REFUSED(ncclAllReduce(&x, NULL, 1, ncclFloat32, ncclSum, comms[0], NULL), ncclInvalidArgument,
          "null");
  REFUSED(ncclAllReduce(&x, &y, 1, (ncclDataType_t)12, ncclSum, comms[0], NULL),
          ncclInvalidArgument, "datatype 12");
  REFUSED(ncclAllReduce(&x, &y, 1, ncclFloat32, (ncclRedOp_t)77, comms[0], NULL),
          ncclInvalidArgument, "op 77");
  REFUSED(ncclBroadcast(&x, &y, 1, ncclFloat32, RANKS, comms[0], NULL), ncclInvalidArgument,
          "root 4");
  REFUSED(ncclBroadcast(NULL, &y, 1, ncclFloat32, 0, comms[0], NULL), ncclInvalidArgument, "null");
  REFUSED(ncclReduce(&x, &y, 1, ncclFloat32, ncclSum, -1, comms[0], NULL), ncclInvalidArgument,
          "root -1");
  REFUSED(ncclSend(&x, 1, ncclFloat32, RANKS, comms[0], NULL), ncclInvalidArgument, "rank 4");
  REFUSED(ncclAllReduce(&x, &y, 1, ncclFloat32, ncclSum, NULL, NULL), ncclInvalidArgument,
          "handle is null");
  REFUSED(ncclAllReduce(&x, &y, 1, ncclFloat32, ncclSum, (ncclComm_t)0x123456, NULL),
          ncclInvalidArgument, "not live");
  REFUSED(ncclGroupEnd(), ncclInvalidUsage, "no group is open");
  REFUSED(ncclGetUniqueId(NULL), ncclInvalidArgument, "null");
  CHECK(strstr(ncclGetLastError(comms[0]), "rank 4") != NULL); /* the communicator's own last one */

  /* One wrong call in a group: none of it happens, and the communicators stay usable. */
  fill();
  OK(ncclGroupStart());
  for (int r = 0; r < RANKS; ++r) {
    if (r == 2)
      CHECK(ncclAllReduce(in[r], out[r], COUNT, ncclFloat32, (ncclRedOp_t)9, comms[r], NULL) ==
            ncclInvalidArgument);
    else
      OK(ncclAllReduce(in[r], out[r], COUNT, ncclFloat32, ncclSum, comms[r], NULL));
  }
  REFUSED(ncclGroupEnd(), ncclInvalidArgument, "op 9");
  CHECK(out[0][1] == -1);
  reductions();
}

static void memory(void) {
  void* block = NULL;
  void* handles[2] = {NULL, NULL};
  ncclWindow_t window = (ncclWindow_t)1;
  OK(ncclMemAlloc(&block, 10000));
  CHECK(block != NULL && (uintptr_t)block % 4096 == 0);
  memset(block, 1, 10000);
  OK(ncclCommRegister(comms[0], block, 10000, &handles[0]));
  OK(ncclCommRegister(comms[0], (char*)block + 100, 5000, &handles[1])); /* overlaps */
  CHECK(handles[0] != NULL && handles[1] != NULL && handles[0] != handles[1]);
  OK(ncclCommDeregister(comms[0], handles[0]));
  REFUSED(ncclCommDeregister(comms[0], handles[0]), ncclInvalidArgument, "not registered");
  OK(ncclCommDeregister(comms[0], handles[1]));
  REFUSED(ncclCommWindowRegister(comms[0], block, 10000, &window, 0), ncclInvalidUsage,
          "ncclCommWindowRegister is not offered");
  OK(ncclMemFree(block));
  REFUSED(ncclMemFree(block), ncclInvalidArgument, "free already");
  OK(ncclMemFree(NULL));
}

static void splits(void) {
  ncclComm_t parts[RANKS], smaller[RANKS] = {NULL};
  int value = -1, gone[1] = {1};
  OK(ncclGroupStart());
  for (int r = 0; r < RANKS; ++r)
    OK(ncclCommSplit(comms[r], r == 3 ? NCCL_SPLIT_NOCOLOR : 0, -r, &parts[r], NULL));
  OK(ncclGroupEnd());
  CHECK(parts[3] == NULL);
  for (int r = 0; r < 3; ++r) {
    OK(ncclCommUserRank(parts[r], &value));
    CHECK(value == 2 - r);
    OK(ncclCommCount(parts[r], &value));
    CHECK(value == 3);
  }
  fill();
  OK(ncclGroupStart()); /* two communicators of each rank in one group */
  for (int r = 0; r < RANKS; ++r) {
    OK(ncclAllReduce(in[r], out[r], COUNT, ncclFloat32, ncclSum, comms[r], NULL));
    if (r < 3)
      OK(ncclAllReduce(in[r], out[r] + COUNT, COUNT, ncclFloat32, ncclSum, parts[r], NULL));
  }
  OK(ncclGroupEnd());
  CHECK(out[3][9] == 90 && out[0][COUNT + 9] == 54);
  REFUSED(ncclCommSplit(comms[0], -2, 0, &parts[3], NULL), ncclInvalidArgument, "color -2");

  OK(ncclGroupStart());
  for (int r = 0; r < 3; ++r)
    if (r != 1) OK(ncclCommShrink(parts[r], gone, 1, &smaller[r], NULL, NCCL_SHRINK_DEFAULT));
  OK(ncclGroupEnd());
  OK(ncclCommUserRank(smaller[0], &value));
  CHECK(value == 1);
  OK(ncclGroupStart());
  OK(ncclAllReduce(in[0], out[0], COUNT, ncclFloat32, ncclSum, smaller[0], NULL));
  OK(ncclAllReduce(in[2], out[2], COUNT, ncclFloat32, ncclSum, smaller[2], NULL));
  OK(ncclGroupEnd());
  CHECK(out[0][9] == 36 && out[2][9] == 36);
  REFUSED(ncclCommShrink(parts[1], gone, 1, &smaller[1], NULL, NCCL_SHRINK_DEFAULT),
          ncclInvalidArgument, "excludes itself");
  CHECK(smaller[1] == NULL);
  for (int r = 0; r < 3; ++r) OK(ncclCommDestroy(parts[r]));
  OK(ncclCommDestroy(smaller[0]));
  OK(ncclCommDestroy(smaller[2]));
}

static void in_one_thread(void) {
  int devices[RANKS] = {0, 0, 1, 1}, value = -1;
  OK(ncclCommInitAll(comms, RANKS, devices));
  for (int r = 0; r < RANKS; ++r) {
    OK(ncclCommUserRank(comms[r], &value));
    CHECK(value == r);
    OK(ncclCommCount(comms[r], &value));
    CHECK(value == RANKS);
    OK(ncclCommCuDevice(comms[r], &value));
    CHECK(value == devices[r]);
  }
  reductions();
  copies();
  messages();
  own_operations();
  wrong_arguments();
  memory();
  splits();
  for (int r = 0; r < RANKS; ++r) {
    OK(ncclCommFinalize(comms[r]));
    REFUSED(ncclCommFinalize(comms[r]), ncclInvalidUsage, "finalized");
    OK(ncclCommDestroy(comms[r]));
    REFUSED(ncclCommDestroy(comms[r]), ncclInvalidArgument, "given up already");
  }
}

/* ---- Creation ---- */

static void grouped_creation(void) {
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
static void configurations(void) {
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

static void non_blocking(void) {
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

static void abort_from_another_thread(void) {
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
