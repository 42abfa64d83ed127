/* What the parts of nccl_api_test share: checks that print and count what failed. */
#ifndef RINGFOLD_TEST_NCCL_PROGRAM_H
#define RINGFOLD_TEST_NCCL_PROGRAM_H

#include <string.h>

#include "test/nccl_minimal.h"

extern int failures;
void fail(const char* file, int line, const char* what);

#define CHECK(condition)                                    \
  do {                                                      \
    if (!(condition)) fail(__FILE__, __LINE__, #condition); \
  } while (0)
#define OK(call) CHECK((call) == ncclSuccess)
/* The call is refused, and the text says `words`. */
#define REFUSED(call, code, words)                          \
  do {                                                      \
    CHECK((call) == (code));                                \
    CHECK(strstr(ncclGetLastError(NULL), (words)) != NULL); \
  } while (0)

void nap(long milliseconds);

/* Many ranks in one thread. */
void in_one_thread(void);
/* Communicators: how they are made, with which configurations, and how they end. */
void grouped_creation(void);
void configurations(void);
void non_blocking(void);
void abort_from_another_thread(void);

#endif
