/* The gradient synchroniser as a C program uses it, on two processes. Exit status 0 if all is well;
 * otherwise each failed check is printed. */
#define _POSIX_C_SOURCE 200809L
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
  fprintf(stderr, "c_gradients_test.c:%d: rank %d: %s (last error: %s)\n", line, my_rank, what,
          ringfold_last_error());
}

#define CHECK(condition)                          \
  do {                                            \
    if (!(condition)) fail(__LINE__, #condition); \
  } while (0)
#define OK(call) CHECK((call) == RINGFOLD_OK)
/* The call fails with that status, and the text says `words`. */
#define FAILS(call, status, words)                         \
  do {                                                     \
    CHECK((call) == (status));                             \
    CHECK(strstr(ringfold_last_error(), (words)) != NULL); \
  } while (0)
#define INVALID(call, words) FAILS(call, RINGFOLD_INVALID_ARGUMENT, words)

enum { kCount = 300 };

static void fill(float* values, float value) {
  int i;
  for (i = 0; i < kCount; ++i) values[i] = value;
}

static int all_are(const float* values, float low, float high) {
  int i;
  for (i = 0; i < kCount; ++i)
    if (values[i] < low || values[i] > high) return 0;
  return 1;
}

static void averages(ringfold_comm_t comm) {
  float mine[kCount];
  float* in_bucket = NULL;
  size_t unused[2] = {9, 9};
  ringfold_sync_report report;
  ringfold_gradient_sync_t sync = NULL;
  ringfold_sync_options options;
  const ringfold_parameter parameters[] = {{"mine", kCount, RINGFOLD_F32, mine},
                                           {NULL, kCount, RINGFOLD_F32, NULL}};
  memset(&options, 0, sizeof options);
  options.first_bytes = options.bucket_bytes = sizeof mine;
  OK(ringfold_gradient_sync_create(&sync, comm, parameters, 2, &options));
  OK(ringfold_gradient_sync_gradient(sync, 1, (void**)&in_bucket));
  CHECK(in_bucket != NULL && in_bucket[kCount - 1] == 0);
  INVALID(ringfold_gradient_sync_gradient(sync, 2, (void**)&in_bucket), "2 parameters");

  fill(mine, (float)my_rank);
  fill(in_bucket, (float)(my_rank + 10));
  OK(ringfold_gradient_sync_begin(sync));
  INVALID(ringfold_gradient_sync_begin(sync), "finish()");
  OK(ringfold_gradient_sync_ready(sync, 1));
  INVALID(ringfold_gradient_sync_ready(sync, 1), "second time");
  OK(ringfold_gradient_sync_ready(sync, 0));
  OK(ringfold_gradient_sync_finish(sync));
  CHECK(all_are(mine, 0.5f, 0.5f));
  CHECK(all_are(in_bucket, 10.5f, 10.5f));

  /* 3/4 of 8 and 1/4 of 4; what is not ready is zeros on both ranks. */
  fill(mine, my_rank == 0 ? 8.0f : 4.0f);
  OK(ringfold_gradient_sync_begin_weighted(sync, my_rank == 0 ? 3 : 1));
  OK(ringfold_gradient_sync_ready(sync, 0));
  OK(ringfold_gradient_sync_finish(sync));
  CHECK(all_are(mine, 7, 7));
  CHECK(all_are(in_bucket, 0, 0));
  OK(ringfold_gradient_sync_report(sync, &report));
  CHECK(report.divisor == 4 && report.buckets == 2 && report.unused == 1);
  CHECK(report.gradient_bytes == 2 * sizeof mine && report.bytes_sent > 0);
  CHECK(report.copied_bytes == 0 && report.busy_seconds > 0);
  OK(ringfold_gradient_sync_unused(sync, unused, 2));
  CHECK(unused[0] == 1 && unused[1] == 9);

  OK(ringfold_gradient_sync_accumulate(sync, 1));
  fill(mine, (float)my_rank);
  OK(ringfold_gradient_sync_begin(sync));
  OK(ringfold_gradient_sync_ready(sync, 0));
  OK(ringfold_gradient_sync_finish(sync));
  CHECK(all_are(mine, (float)my_rank, (float)my_rank));
  OK(ringfold_gradient_sync_accumulate(sync, 0));
  OK(ringfold_gradient_sync_begin(sync));
  OK(ringfold_gradient_sync_finish(sync));
  CHECK(all_are(mine, 0.5f, 0.5f));
  OK(ringfold_gradient_sync_destroy(sync));
  INVALID(ringfold_gradient_sync_begin(sync), "not live");
}

static void compressed(ringfold_comm_t comm) {
  float mine[kCount];
  ringfold_sync_report report;
  ringfold_gradient_sync_t sync = NULL;
  ringfold_sync_options options;
  const ringfold_parameter parameter = {"mine", kCount, RINGFOLD_F32, mine};
  uint64_t plain = 0;
  int compression;
  for (compression = 0; compression <= RINGFOLD_COMPRESSION_SPARSE; ++compression) {
    memset(&options, 0, sizeof options);
    options.compression = compression;
    options.sparse_share = 0.1;
    OK(ringfold_gradient_sync_create(&sync, comm, &parameter, 1, &options));
    fill(mine, (float)(my_rank + 1));
    OK(ringfold_gradient_sync_begin(sync));
    OK(ringfold_gradient_sync_ready(sync, 0));
    OK(ringfold_gradient_sync_finish(sync));
    CHECK(all_are(mine, compression == RINGFOLD_COMPRESSION_SPARSE ? 0 : 1.45f, 1.55f));
    OK(ringfold_gradient_sync_report(sync, &report));
    if (compression == RINGFOLD_COMPRESSION_NONE) plain = report.bytes_sent;
    CHECK(plain > 0 && (compression == 0 || report.bytes_sent < plain));
    OK(ringfold_gradient_sync_destroy(sync));
  }
}

/* Averages by itself, or fails, as `context` says. */
static ringfold_status hook(ringfold_comm_t comm, const ringfold_bucket* bucket, void* context) {
  int* const calls = context;
  if (++*calls == 3) return RINGFOLD_UNSUPPORTED;
  if (*calls == 2)
    return ringfold_all_reduce(comm, bucket->data, bucket->data, bucket->count, 99, RINGFOLD_AVG, 1,
                               NULL);
  CHECK(bucket->index == 0 && bucket->count == kCount && bucket->type == RINGFOLD_F32);
  CHECK(bucket->share == 0.5 && bucket->equal == 1 && bucket->layout >= 1);
  return ringfold_all_reduce(comm, bucket->data, bucket->data, bucket->count, bucket->type,
                             RINGFOLD_AVG, 1, NULL);
}

static void hooks(ringfold_comm_t comm) {
  float mine[kCount];
  int calls = 0;
  ringfold_gradient_sync_t sync = NULL;
  ringfold_sync_options options;
  const ringfold_parameter parameter = {"mine", kCount, RINGFOLD_F32, mine};
  memset(&options, 0, sizeof options);
  options.hook = hook;
  options.hook_context = &calls;
  options.hook_name = "own";
  OK(ringfold_gradient_sync_create(&sync, comm, &parameter, 1, &options));
  fill(mine, (float)my_rank);
  OK(ringfold_gradient_sync_begin(sync));
  OK(ringfold_gradient_sync_ready(sync, 0));
  OK(ringfold_gradient_sync_finish(sync));
  CHECK(all_are(mine, 0.5f, 0.5f) && calls == 1);
  /* Both ranks fail; which of them aborts the other is a matter of time. */
  OK(ringfold_gradient_sync_begin(sync));
  CHECK(ringfold_gradient_sync_finish(sync) != RINGFOLD_OK);
  CHECK(strstr(ringfold_last_error(), "hook own") != NULL);
  CHECK(strstr(ringfold_last_error(), "type is 99") != NULL);
  OK(ringfold_gradient_sync_destroy(sync));

  calls = 2;
  OK(ringfold_gradient_sync_create(&sync, comm, &parameter, 1, &options));
  OK(ringfold_gradient_sync_begin(sync));
  CHECK(ringfold_gradient_sync_finish(sync) != RINGFOLD_OK);
  CHECK(strstr(ringfold_last_error(), "the hook returned 2") != NULL);
  OK(ringfold_gradient_sync_destroy(sync));
}

static void wrong_calls(ringfold_comm_t comm) {
  float mine[kCount];
  ringfold_gradient_sync_t sync = NULL;
  ringfold_sync_options options;
  ringfold_parameter parameter = {"mine", kCount, RINGFOLD_F32, mine};
  memset(&options, 0, sizeof options);
  INVALID(ringfold_gradient_sync_create(NULL, comm, &parameter, 1, NULL), "sync is null");
  INVALID(ringfold_gradient_sync_create(&sync, comm, NULL, 1, NULL), "parameters is null");
  INVALID(ringfold_gradient_sync_create(&sync, NULL, &parameter, 1, NULL), "handle is null");
  options.compression = 6;
  INVALID(ringfold_gradient_sync_create(&sync, comm, &parameter, 1, &options), "compression is 6");
  options.compression = RINGFOLD_COMPRESSION_SPARSE;
  INVALID(ringfold_gradient_sync_create(&sync, comm, &parameter, 1, &options), "share 0");
  parameter.type = 77;
  INVALID(ringfold_gradient_sync_create(&sync, comm, &parameter, 1, NULL), "parameters[0]");
  parameter.type = RINGFOLD_F32;
  OK(ringfold_group_begin());
  INVALID(ringfold_gradient_sync_create(&sync, comm, &parameter, 1, NULL), "inside a group");
  OK(ringfold_group_discard());
  CHECK(sync == NULL);
  INVALID(ringfold_gradient_sync_finish(NULL), "null");
  INVALID(ringfold_gradient_sync_ready(NULL, 0), "null");
  INVALID(ringfold_gradient_sync_destroy(NULL), "null");

  parameter.name = my_rank == 0 ? "weight" : "bias";
  FAILS(ringfold_gradient_sync_create(&sync, comm, &parameter, 1, NULL), RINGFOLD_MISMATCH,
        "rank 0 has parameter 0 'weight', 300 elements of f32; rank 1 has parameter 0 'bias'");
  parameter.name = "mine";
  OK(ringfold_gradient_sync_create(&sync, comm, &parameter, 1, NULL));
  OK(ringfold_gradient_sync_begin(sync));
  if (my_rank == 0) OK(ringfold_gradient_sync_abort(sync, "enough"));
  FAILS(ringfold_gradient_sync_finish(sync), RINGFOLD_ABORTED, "enough");
  OK(ringfold_gradient_sync_destroy(sync));
}

static void run(ringfold_unique_id id, int rank) {
  ringfold_comm_t comm = NULL;
  ringfold_options options;
  my_rank = rank;
  memset(&options, 0, sizeof options);
  options.start_timeout = options.timeout = 30;
  OK(ringfold_init_id(&comm, id, rank, 2, &options));
  if (comm == NULL) return;
  averages(comm);
  compressed(comm);
  hooks(comm);
  wrong_calls(comm);
  OK(ringfold_destroy(comm));
}

int main(void) {
  ringfold_unique_id id;
  int ends[2], status = -1;
  pid_t child;
  alarm(100); /* ends this program if anything hangs */
  if (pipe(ends) != 0) return 1;
  child = fork(); /* while there are no threads */
  if (child == 0) {
    alarm(100);
    close(ends[1]);
    if (read(ends[0], &id, sizeof id) != (ssize_t)sizeof id) _exit(1); /* the parent gave up */
    run(id, 1);
    _exit(failures == 0 ? 0 : 1);
  }
  close(ends[0]);
  OK(ringfold_get_unique_id(&id));
  CHECK(write(ends[1], &id, sizeof id) == (ssize_t)sizeof id);
  run(id, 0);
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  return failures == 0 ? 0 : 1;
}
