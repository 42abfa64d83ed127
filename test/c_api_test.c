/* The C interface as a C program uses it: one rank alone, then two processes. Exit status 0 if all
 * is well; otherwise each failed check is printed. */
#define _POSIX_C_SOURCE 200809L
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ringfold/c.h"

static int failures = 0;
static int my_rank = 0;

static void fail(int line, const char* what) {
  ++failures;
  fprintf(stderr, "c_api_test.c:%d: rank %d: %s (last error: %s)\n", line, my_rank, what,
          ringfold_last_error());
}

#define CHECK(condition)                          \
  do {                                            \
    if (!(condition)) fail(__LINE__, #condition); \
  } while (0)
#define OK(call) CHECK((call) == RINGFOLD_OK)
/* The call is refused, and the text says `words`. */
#define INVALID(call, words)                               \
  do {                                                     \
    CHECK((call) == RINGFOLD_INVALID_ARGUMENT);            \
    CHECK(strstr(ringfold_last_error(), (words)) != NULL); \
  } while (0)

/* ---- One rank ---- */

static ringfold_comm_t alone(void) {
  ringfold_comm_t comm = NULL;
  OK(ringfold_init_coordinator(&comm, "127.0.0.1:1", NULL, 0, 1, NULL));
  CHECK(comm != NULL);
  return comm;
}

static void starts_in_every_way(void) {
  ringfold_comm_t comm = NULL;
  ringfold_unique_id id;
  int value = -1;

  setenv("RINGFOLD_RANK", "0", 1);
  setenv("RINGFOLD_SIZE", "1", 1);
  setenv("RINGFOLD_COORDINATOR", "127.0.0.1:1", 1);
  OK(ringfold_init(&comm, NULL));
  OK(ringfold_size(comm, &value));
  CHECK(value == 1);
  OK(ringfold_destroy(comm));

  setenv("RINGFOLD_RANK", "many", 1);
  comm = NULL;
  INVALID(ringfold_init(&comm, NULL), "RINGFOLD_RANK");
  CHECK(comm == NULL);
  unsetenv("RINGFOLD_RANK");
  unsetenv("RINGFOLD_SIZE");
  unsetenv("RINGFOLD_COORDINATOR");

  OK(ringfold_get_unique_id(&id));
  OK(ringfold_init_id(&comm, id, 0, 1, NULL));
  OK(ringfold_rank(comm, &value));
  CHECK(value == 0);
  OK(ringfold_destroy(comm));
  CHECK(ringfold_init_id(&comm, id, 1, 1, NULL) == RINGFOLD_INVALID_ARGUMENT);
}

static void refuses_wrong_starts(void) {
  ringfold_comm_t comm = NULL;
  ringfold_unique_id id;
  ringfold_options options;
  memset(&id, 0, sizeof id);
  memset(&options, 0, sizeof options);
  INVALID(ringfold_init(NULL, NULL), "comm is null");
  INVALID(ringfold_get_unique_id(NULL), "id is null");
  INVALID(ringfold_init_id(NULL, id, 0, 1, NULL), "comm is null");
  INVALID(ringfold_init_coordinator(NULL, "127.0.0.1:1", NULL, 0, 1, NULL), "comm is null");
  INVALID(ringfold_init_coordinator(&comm, NULL, NULL, 0, 1, NULL), "coordinator is null");
  CHECK(ringfold_init_coordinator(&comm, "127.0.0.1:1", NULL, 1, 1, NULL) ==
        RINGFOLD_INVALID_ARGUMENT);
  CHECK(ringfold_init_coordinator(&comm, "127.0.0.1:1", NULL, -1, 1, NULL) ==
        RINGFOLD_INVALID_ARGUMENT);
  CHECK(ringfold_init_coordinator(&comm, "127.0.0.1:1", NULL, 0, 0, NULL) ==
        RINGFOLD_INVALID_ARGUMENT);
  options.timeout = -1;
  INVALID(ringfold_init_coordinator(&comm, "127.0.0.1:1", NULL, 0, 1, &options), "options.timeout");
  options.timeout = 5;
  options.start_timeout = NAN;
  INVALID(ringfold_init_coordinator(&comm, "127.0.0.1:1", NULL, 0, 1, &options),
          "options.start_timeout");
  options.start_timeout = 5;
  options.algorithm = 8;
  INVALID(ringfold_init_coordinator(&comm, "127.0.0.1:1", NULL, 0, 1, &options),
          "options.algorithm is 8");
  options.algorithm = RINGFOLD_ALGORITHM_RING;
  CHECK(comm == NULL);
  OK(ringfold_init_coordinator(&comm, "127.0.0.1:1", "secret", 0, 1, &options));
  OK(ringfold_destroy(comm));
}

/* Null handles and handles that were given up are refused by everything. */
static void refuses_dead_handles(void) {
  ringfold_comm_t dead = alone(), later;
  ringfold_comm_t part;
  ringfold_work_t work = NULL;
  ringfold_report report;
  uint64_t bytes;
  int i, value;
  float x = 1;
  char name[32];

  OK(ringfold_destroy(dead));
  INVALID(ringfold_destroy(dead), "not live");
  later = alone(); /* must not bring the dead handle back to life */
  CHECK(later != dead);
  INVALID(ringfold_destroy(dead), "not live");
  for (i = 0; i < 2; ++i) {
    const ringfold_comm_t comm = i == 0 ? dead : NULL;
    const char* words = i == 0 ? "not live" : "is null";
    INVALID(ringfold_destroy(comm), words);
    INVALID(ringfold_rank(comm, &value), words);
    INVALID(ringfold_size(comm, &value), words);
    INVALID(ringfold_health(comm), words);
    INVALID(ringfold_abort(comm, NULL), words);
    INVALID(ringfold_split(comm, 0, 0, &part), words);
    INVALID(ringfold_bytes_sent(comm, &bytes), words);
    INVALID(ringfold_transport(comm, name, sizeof name), words);
    INVALID(ringfold_barrier(comm), words);
    INVALID(ringfold_all_reduce(comm, &x, &x, 1, RINGFOLD_F32, RINGFOLD_SUM, 1, NULL), words);
    INVALID(ringfold_broadcast(comm, &x, 1, RINGFOLD_F32, 0, NULL), words);
    INVALID(ringfold_send_async(comm, &x, 1, RINGFOLD_F32, 0, NULL, &work), words);
    CHECK(work == NULL);
    INVALID(ringfold_average_gradients(comm, NULL, 0), words);
  }
  OK(ringfold_barrier_async(later, &work));
  OK(ringfold_work_wait(work, -1));
  OK(ringfold_work_free(work));
  for (i = 0; i < 2; ++i, work = NULL) {
    const char* words = i == 0 ? "not live" : "is null";
    INVALID(ringfold_work_free(work), words);
    INVALID(ringfold_work_wait(work, 0), words);
    INVALID(ringfold_work_done(work, &value), words);
    INVALID(ringfold_work_report(work, &report), words);
  }
  OK(ringfold_destroy(later));
}

static void refuses_wrong_arguments(void) {
  const ringfold_comm_t comm = alone();
  ringfold_work_t work;
  ringfold_gradient gradient;
  float x = 1, y = 0;
  char name[4];

  INVALID(ringfold_rank(comm, NULL), "rank is null");
  INVALID(ringfold_size(comm, NULL), "size is null");
  INVALID(ringfold_split(comm, 0, 0, NULL), "out is null");
  INVALID(ringfold_bytes_sent(comm, NULL), "bytes is null");
  INVALID(ringfold_transport(comm, NULL, 32), "name is null");
  INVALID(ringfold_transport(comm, name, sizeof name), "given are 4");
  INVALID(ringfold_all_reduce(comm, &x, &y, 1, 12, RINGFOLD_SUM, 1, NULL),
          "type is 12, accepted are 0 (i8) to 11 (f8e5m2)");
  INVALID(ringfold_all_gather(comm, &x, &y, 1, -1, NULL), "type is -1");
  INVALID(ringfold_all_reduce(comm, &x, &y, 1, RINGFOLD_F32, 6, 1, NULL),
          "op is 6, accepted are 0 (sum) to 5 (premul_sum)");
  INVALID(ringfold_reduce(comm, &x, &y, 1, RINGFOLD_F32, -7, 1, 0, NULL), "op is -7");
  INVALID(ringfold_broadcast(comm, &x, 1, RINGFOLD_F32, 1, NULL), "1");
  INVALID(ringfold_reduce(comm, &x, &y, 1, RINGFOLD_F32, RINGFOLD_SUM, 1, -1, NULL), "-1");
  CHECK(ringfold_gather(comm, &x, &y, 1, RINGFOLD_F32, 2, NULL) == RINGFOLD_INVALID_ARGUMENT);
  CHECK(ringfold_scatter(comm, &x, &y, 1, RINGFOLD_F32, 2, NULL) == RINGFOLD_INVALID_ARGUMENT);
  CHECK(ringfold_send(comm, &x, 1, RINGFOLD_F32, 1, NULL) == RINGFOLD_INVALID_ARGUMENT);
  CHECK(ringfold_recv(comm, &x, 1, RINGFOLD_F32, 1, NULL) == RINGFOLD_INVALID_ARGUMENT);
  CHECK(ringfold_all_reduce(comm, NULL, &y, 1, RINGFOLD_F32, RINGFOLD_SUM, 1, NULL) ==
        RINGFOLD_INVALID_ARGUMENT);
  CHECK(ringfold_all_reduce(comm, &x, NULL, 1, RINGFOLD_F32, RINGFOLD_SUM, 1, NULL) ==
        RINGFOLD_INVALID_ARGUMENT);
  OK(ringfold_all_reduce(comm, NULL, NULL, 0, RINGFOLD_F32, RINGFOLD_SUM, 1, NULL));
  INVALID(ringfold_barrier_async(comm, NULL), "work is null");
  work = (ringfold_work_t)&x;
  CHECK(ringfold_broadcast_async(comm, &x, 1, RINGFOLD_F32, 9, NULL, &work) ==
        RINGFOLD_INVALID_ARGUMENT);
  CHECK(work == NULL);

  INVALID(ringfold_average_gradients(comm, NULL, 1), "gradients is null");
  gradient.data = &x;
  gradient.count = 1;
  gradient.type = 99;
  INVALID(ringfold_average_gradients(comm, &gradient, 1), "gradients[0]: type is 99");
  gradient.type = RINGFOLD_I32;
  CHECK(ringfold_average_gradients(comm, &gradient, 1) == RINGFOLD_INVALID_ARGUMENT);
  gradient.type = RINGFOLD_F32;
  CHECK(ringfold_average_gradients_weighted(comm, &gradient, 1, -1) == RINGFOLD_INVALID_ARGUMENT);
  CHECK(ringfold_average_gradients_weighted(comm, &gradient, 1, NAN) == RINGFOLD_INVALID_ARGUMENT);
  CHECK(ringfold_average_gradients_weighted(comm, &gradient, 1, 0) == RINGFOLD_INVALID_ARGUMENT);
  OK(ringfold_health(comm)); /* wrong arguments do not harm it */
  OK(ringfold_destroy(comm));
}

static void tells_what_was_done(void) {
  static char text[1 << 20];
  ringfold_comm_t comm = alone(), grown = NULL;
  ringfold_unique_id id;
  ringfold_counters one, all;
  float x = 1;
  size_t needed = 0;
  memset(&id, 0, sizeof id);
  OK(ringfold_all_reduce(comm, &x, &x, 1, RINGFOLD_F32, RINGFOLD_SUM, 1, NULL));
  OK(ringfold_get_counters(comm, &one));
  CHECK(one.operations == 1 && one.finished == 1 && one.failures == 0);
  OK(ringfold_get_counters(NULL, &all));
  CHECK(all.operations >= one.operations);
  INVALID(ringfold_get_counters(comm, NULL), "counters is null");
  INVALID(ringfold_record(comm, text, 4, &needed), "bytes");
  OK(ringfold_record(comm, text, needed, NULL));
  CHECK(strlen(text) + 1 == needed);
  CHECK(strstr(text, "\"collective\": \"all_reduce\"") != NULL);
  OK(ringfold_record(NULL, text, sizeof text, NULL));
  CHECK(text[0] == '[');
  OK(ringfold_prometheus(text, sizeof text, &needed));
  CHECK(strstr(text, "# TYPE ringfold_operations_total counter\n") != NULL);
  INVALID(ringfold_prometheus(NULL, 0, &needed), "bytes");
  INVALID(ringfold_grow(comm, id, 0, &grown), "at least 1");
  CHECK(grown == NULL);
  OK(ringfold_destroy(comm));
}

static void works_alone(void) {
  const ringfold_comm_t comm = alone();
  ringfold_work_t work = NULL;
  ringfold_report report;
  ringfold_comm_t part;
  int done = 0;
  float x[2] = {3, 4}, y[2] = {0, 0};
  char name[32];

  OK(ringfold_all_reduce(comm, x, y, 2, RINGFOLD_F32, RINGFOLD_PREMUL_SUM, 0.5, NULL));
  CHECK(y[0] == 1.5f && y[1] == 2);
  OK(ringfold_all_reduce_async(comm, x, y, 2, RINGFOLD_F32, RINGFOLD_SUM, 1, NULL, &work));
  INVALID(ringfold_work_done(work, NULL), "done is null");
  INVALID(ringfold_work_report(work, NULL), "report is null");
  INVALID(ringfold_work_wait(work, NAN), "timeout");
  OK(ringfold_work_wait(work, 10));
  OK(ringfold_work_done(work, &done));
  CHECK(done == 1);
  CHECK(y[0] == 3 && y[1] == 4);
  OK(ringfold_work_report(work, &report));
  CHECK(report.bytes_sent == 0);
  CHECK(strcmp(report.transport, "self") == 0);
  OK(ringfold_work_free(work));
  OK(ringfold_transport(comm, name, sizeof name));
  CHECK(strcmp(name, "self") == 0);

  OK(ringfold_split(comm, 0, 0, &part));
  OK(ringfold_destroy(part));
  part = comm;
  OK(ringfold_split(comm, -1, 0, &part));
  CHECK(part == NULL);

  OK(ringfold_abort(comm, "enough"));
  CHECK(ringfold_health(comm) == RINGFOLD_ABORTED);
  CHECK(strstr(ringfold_last_error(), "enough") != NULL);
  CHECK(ringfold_barrier_async(comm, &work) == RINGFOLD_ABORTED);
  CHECK(work == NULL);
  OK(ringfold_destroy(comm));
}

static void groups(void) {
  const ringfold_comm_t comm = alone();
  ringfold_comm_t other = NULL;
  ringfold_work_t sent = NULL, received = NULL, all = NULL;
  int done = 1;
  int32_t from = 17, to = 0;

  INVALID(ringfold_group_end(), "no group");
  INVALID(ringfold_group_end_async(&all), "no group");
  INVALID(ringfold_group_discard(), "no group");

  OK(ringfold_group_begin());
  INVALID(ringfold_barrier(comm), "inside a group");
  INVALID(ringfold_average_gradients(comm, NULL, 0), "inside a group");
  INVALID(ringfold_split(comm, 0, 0, &other), "inside a group");
  INVALID(ringfold_init_coordinator(&other, "127.0.0.1:1", NULL, 0, 1, NULL), "inside a group");
  OK(ringfold_send_async(comm, &from, 1, RINGFOLD_I32, 0, NULL, &sent));
  OK(ringfold_group_begin());
  OK(ringfold_recv_async(comm, &to, 1, RINGFOLD_I32, 0, NULL, &received));
  OK(ringfold_group_end()); /* the inner one starts nothing */
  OK(ringfold_work_done(received, &done));
  CHECK(done == 0 && to == 0);
  INVALID(ringfold_work_wait(received, -1), "inside a group");
  OK(ringfold_group_end());
  CHECK(to == 17);
  OK(ringfold_work_wait(sent, 0));
  OK(ringfold_work_free(sent));
  OK(ringfold_work_free(received));

  from = 18;
  OK(ringfold_group_begin());
  OK(ringfold_send_async(comm, &from, 1, RINGFOLD_I32, 0, NULL, &sent));
  OK(ringfold_recv_async(comm, &to, 1, RINGFOLD_I32, 0, NULL, &received));
  INVALID(ringfold_group_end_async(NULL), "work is null");
  OK(ringfold_group_end_async(&all));
  OK(ringfold_work_wait(all, 10));
  CHECK(to == 18);
  OK(ringfold_work_free(all));
  OK(ringfold_work_free(sent));
  OK(ringfold_work_free(received));

  OK(ringfold_group_begin());
  OK(ringfold_send_async(comm, &from, 1, RINGFOLD_I32, 0, NULL, &sent));
  OK(ringfold_group_discard());
  CHECK(ringfold_work_wait(sent, 10) == RINGFOLD_ABORTED);
  OK(ringfold_work_free(sent));
  OK(ringfold_health(comm));
  OK(ringfold_destroy(comm));
}

/* ---- Two ranks ---- */

static void collectives(ringfold_comm_t comm, int rank) {
  const double mine[2] = {1 + rank, 10 * (1 + rank)}; /* {1, 10} and {2, 20} */
  double all[4] = {0}, two[2] = {0}, one = 0;

  OK(ringfold_all_reduce(comm, mine, two, 2, RINGFOLD_F64, RINGFOLD_SUM, 1, NULL));
  CHECK(two[0] == 3 && two[1] == 30);
  OK(ringfold_all_reduce(comm, mine, two, 2, RINGFOLD_F64, RINGFOLD_PREMUL_SUM, 1 + rank, NULL));
  CHECK(two[0] == 5 && two[1] == 50);
  OK(ringfold_reduce_scatter(comm, mine, &one, 1, RINGFOLD_F64, RINGFOLD_MAX, 1, NULL));
  CHECK(one == (rank == 0 ? 2 : 20));
  OK(ringfold_all_gather(comm, mine, all, 2, RINGFOLD_F64, NULL));
  CHECK(all[0] == 1 && all[1] == 10 && all[2] == 2 && all[3] == 20);
  two[0] = mine[0];
  OK(ringfold_broadcast(comm, two, 1, RINGFOLD_F64, 1, NULL));
  CHECK(two[0] == 2);
  OK(ringfold_reduce(comm, mine, rank == 1 ? two : NULL, 2, RINGFOLD_F64, RINGFOLD_MIN, 1, 1,
                     NULL));
  if (rank == 1) CHECK(two[0] == 1 && two[1] == 10);
  OK(ringfold_all_to_all(comm, mine, two, 1, RINGFOLD_F64, NULL));
  CHECK(rank == 0 ? two[0] == 1 && two[1] == 2 : two[0] == 10 && two[1] == 20);
  memset(all, 0, sizeof all);
  OK(ringfold_gather(comm, mine, rank == 0 ? all : NULL, 2, RINGFOLD_F64, 0, NULL));
  if (rank == 0) CHECK(all[0] == 1 && all[1] == 10 && all[2] == 2 && all[3] == 20);
  OK(ringfold_scatter(comm, rank == 1 ? mine : NULL, &one, 1, RINGFOLD_F64, 1, NULL));
  CHECK(one == (rank == 0 ? 2 : 20));
  if (rank == 0) OK(ringfold_send(comm, mine, 2, RINGFOLD_F64, 1, NULL));
  if (rank == 1) OK(ringfold_recv(comm, two, 2, RINGFOLD_F64, 0, NULL));
  if (rank == 1) CHECK(two[0] == 1 && two[1] == 10);
  OK(ringfold_barrier(comm));
}

static void reports(ringfold_comm_t comm) {
  enum { kCount = 1000 };
  static float values[kCount];
  ringfold_work_t work = NULL;
  ringfold_report report;
  uint64_t before = 0, after = 0;
  int i, done = 0;
  for (i = 0; i < kCount; ++i) values[i] = 1;
  OK(ringfold_bytes_sent(comm, &before));
  OK(ringfold_all_reduce_async(comm, values, values, kCount, RINGFOLD_F32, RINGFOLD_SUM, 1, NULL,
                               &work));
  OK(ringfold_work_wait(work, 30));
  OK(ringfold_work_done(work, &done));
  CHECK(done == 1);
  for (i = 0; i < kCount && values[i] == 2; ++i) continue;
  CHECK(i == kCount);
  OK(ringfold_work_report(work, &report));
  OK(ringfold_bytes_sent(comm, &after));
  CHECK(report.bytes_sent > 0 && report.bytes_sent == report.bytes_model);
  CHECK(after - before >= report.bytes_sent);
  CHECK(report.bus_factor == 1); /* 2(N-1)/N */
  CHECK(report.steps > 0);
  CHECK(report.algorithm >= RINGFOLD_ALGORITHM_RING &&
        report.algorithm <= RINGFOLD_ALGORITHM_REGION);
  /* What is over before the call returns is not timed. */
  CHECK(report.measured_seconds > 0 || strcmp(report.transport, "region") == 0);
  CHECK(strlen(report.transport) > 0);
  OK(ringfold_work_free(work));
}

static void gradients(ringfold_comm_t comm, int rank) {
  float weights[2] = {0, 0}, biases[1] = {0};
  ringfold_gradient tensors[2] = {{0, 0, 0}};
  tensors[0].data = weights;
  tensors[0].count = 2;
  tensors[0].type = RINGFOLD_F32;
  tensors[1].data = biases;
  tensors[1].count = 1;
  tensors[1].type = RINGFOLD_F32;

  weights[0] = (float)rank * 4, weights[1] = 8, biases[0] = (float)rank;
  OK(ringfold_average_gradients(comm, tensors, 2));
  CHECK(weights[0] == 2 && weights[1] == 8 && biases[0] == 0.5f);
  weights[0] = (float)rank * 4, weights[1] = 8, biases[0] = (float)rank;
  OK(ringfold_average_gradients_weighted(comm, tensors, 2, rank == 0 ? 1 : 3));
  CHECK(weights[0] == 3 && weights[1] == 8 && biases[0] == 0.75f);
}

static void splits(ringfold_comm_t comm, int rank) {
  ringfold_comm_t part = NULL;
  int value = -1;
  OK(ringfold_split(comm, 0, -rank, &part)); /* in reverse order */
  OK(ringfold_rank(part, &value));
  CHECK(value == 1 - rank);
  OK(ringfold_barrier(part));
  OK(ringfold_destroy(part));
  OK(ringfold_split(comm, rank == 0 ? 0 : -1, 0, &part));
  CHECK((part == NULL) == (rank == 1));
  if (part != NULL) {
    OK(ringfold_size(part, &value));
    CHECK(value == 1);
    OK(ringfold_destroy(part));
  }
}

static void keep_status(void* context, ringfold_status status, const char* why) {
  ringfold_status* const kept = context;
  *kept = why[0] == '\0' ? status : RINGFOLD_INTERNAL;
}

static void calls_back(ringfold_comm_t comm) {
  ringfold_work_t work = NULL;
  ringfold_status ended = RINGFOLD_INTERNAL;
  INVALID(ringfold_work_then(NULL, keep_status, &ended), "null");
  OK(ringfold_barrier_async(comm, &work));
  INVALID(ringfold_work_then(work, NULL, &ended), "call is null");
  OK(ringfold_work_wait(work, 30));
  OK(ringfold_work_then(work, keep_status, &ended)); /* has ended: here and now */
  CHECK(ended == RINGFOLD_OK);
  OK(ringfold_work_free(work));
}

static void shrinks(ringfold_comm_t comm, int rank) {
  ringfold_comm_t smaller = NULL;
  int value = -1;
  const int other = 1 - rank;
  INVALID(ringfold_shrink(comm, NULL, 1, &smaller), "exclude is null");
  INVALID(ringfold_shrink(comm, &other, 1, NULL), "out is null");
  INVALID(ringfold_shrink(comm, &rank, 1, &smaller), "excludes itself");
  OK(ringfold_shrink(comm, &other, 1, &smaller));
  OK(ringfold_size(smaller, &value));
  CHECK(value == 1);
  OK(ringfold_destroy(smaller));
}

/* Rank 1 waits for a message that never comes; rank 0 aborts. */
static void aborts(ringfold_comm_t comm, int rank) {
  ringfold_work_t work = NULL;
  int x = 0, done = 1;
  if (rank == 0) {
    OK(ringfold_abort(comm, "rank 0 has had enough"));
  } else {
    const ringfold_status at_once = ringfold_recv_async(comm, &x, 1, RINGFOLD_I32, 0, NULL, &work);
    if (at_once == RINGFOLD_OK) { /* else the abort was here first */
      CHECK(ringfold_work_wait(work, 30) == RINGFOLD_ABORTED);
      OK(ringfold_work_done(work, &done));
      CHECK(done == 1);
      OK(ringfold_work_free(work));
    } else {
      CHECK(at_once == RINGFOLD_ABORTED);
    }
  }
  CHECK(ringfold_health(comm) == RINGFOLD_ABORTED);
  CHECK(strstr(ringfold_last_error(), "rank 0 has had enough") != NULL);
}

static void two_ranks(ringfold_unique_id id, int rank) {
  ringfold_comm_t comm = NULL;
  ringfold_options options;
  int value = -1;
  my_rank = rank;
  memset(&options, 0, sizeof options);
  options.start_timeout = options.timeout = 30;
  OK(ringfold_init_id(&comm, id, rank, 2, &options));
  if (comm == NULL) return;
  OK(ringfold_rank(comm, &value));
  CHECK(value == rank);
  OK(ringfold_size(comm, &value));
  CHECK(value == 2);
  collectives(comm, rank);
  reports(comm);
  gradients(comm, rank);
  splits(comm, rank);
  calls_back(comm);
  shrinks(comm, rank);
  aborts(comm, rank);
  OK(ringfold_destroy(comm));
}

/* Rank 1 is a child that gets the id through a pipe; it is forked while there are no threads. */
static pid_t fork_rank_1(int* id_pipe) {
  int ends[2];
  pid_t child;
  if (pipe(ends) != 0) return -1;
  fflush(NULL);
  child = fork();
  if (child == 0) {
    ringfold_unique_id id;
    alarm(100);
    close(ends[1]);
    if (read(ends[0], &id, sizeof id) != (ssize_t)sizeof id) _exit(1); /* the parent gave up */
    two_ranks(id, 1);
    _exit(failures == 0 ? 0 : 1);
  }
  close(ends[0]);
  *id_pipe = ends[1];
  return child;
}

int main(void) {
  ringfold_unique_id id;
  int id_pipe = -1, status = -1;
  const pid_t child = fork_rank_1(&id_pipe);
  alarm(100); /* ends this program, and so the child's connection, if anything hangs */
  CHECK(child > 0);

  CHECK(strcmp(ringfold_version(), RINGFOLD_EXPECTED_VERSION) == 0);
  CHECK(strcmp(ringfold_last_error(), "") == 0);
  starts_in_every_way();
  refuses_wrong_starts();
  refuses_dead_handles();
  refuses_wrong_arguments();
  works_alone();
  tells_what_was_done();
  groups();

  OK(ringfold_get_unique_id(&id));
  CHECK(write(id_pipe, &id, sizeof id) == (ssize_t)sizeof id);
  two_ranks(id, 0);
  close(id_pipe);
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  return failures == 0 ? 0 : 1;
}
