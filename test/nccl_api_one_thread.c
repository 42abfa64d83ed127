/* Part of nccl_api_test: many ranks in one thread, on host memory. */
#include <stdint.h>

#include "test/nccl_program.h"

#define RANKS 4
#define COUNT 1000

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

void in_one_thread(void) {
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
