/* ringfold for C, and for everything that can call C: a thin layer over communicator.h, average.h
 * and gradient_sync.h, which describe the operations themselves.
 *
 *   ringfold_comm_t comm;
 *   if (ringfold_init(&comm, NULL) != RINGFOLD_OK) die(ringfold_last_error());
 *   ringfold_all_reduce(comm, grad, grad, n, RINGFOLD_F32, RINGFOLD_AVG, 1, NULL);
 *   ringfold_destroy(comm);
 *
 * Results: every function returns a status unless it says otherwise; on failure
 *   ringfold_last_error() has the sentence, and outputs are left alone unless stated.
 * Handles: a communicator or work handle is a number in the guise of a pointer and is never used
 *   twice. NULL, or one that was destroyed or freed already, is answered with
 *   RINGFOLD_INVALID_ARGUMENT. Handles belong to the process that made them.
 * Thread-safety: any thread may call any function; calls on one communicator are serialised, and
 *   all ranks must make them in the same order.
 * Buffers belong to the library until the operation is done. Which overlaps of send and recv are
 *   "in place" is told with each collective in communicator.h. A count of 0 is legal, also with
 * NULL buffers. Counts are elements, never bytes. `stream` is a cudaStream_t; NULL for host memory.
 * Groups: a blocking call would wait for itself while a group is open on its thread, and is
 *   answered with RINGFOLD_INVALID_ARGUMENT: use the _async form there. */
#ifndef RINGFOLD_C_H
#define RINGFOLD_C_H

#include <stddef.h>
#include <stdint.h>

/* Marks what the shared library exports for C. */
#define RINGFOLD_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Values ---- */

/* Numbered as ringfold::Code in status.h, which says what each means. */
typedef enum ringfold_status {
  RINGFOLD_OK = 0,
  RINGFOLD_INVALID_ARGUMENT = 1,
  RINGFOLD_UNSUPPORTED = 2,
  RINGFOLD_MISMATCH = 3,
  RINGFOLD_TIMEOUT = 4,
  RINGFOLD_PEER_LOST = 5,
  RINGFOLD_ABORTED = 6,
  RINGFOLD_SYSTEM = 7,
  RINGFOLD_INTERNAL = 8
} ringfold_status;

/* Numbers given by the caller are int, so that a wrong one can be answered. */

/* Element types, numbered as ringfold::DType. */
typedef int ringfold_dtype;
enum {
  RINGFOLD_I8 = 0,
  RINGFOLD_U8 = 1,
  RINGFOLD_I32 = 2,
  RINGFOLD_U32 = 3,
  RINGFOLD_I64 = 4,
  RINGFOLD_U64 = 5,
  RINGFOLD_F16 = 6,
  RINGFOLD_F32 = 7,
  RINGFOLD_F64 = 8,
  RINGFOLD_BF16 = 9,
  RINGFOLD_F8E4M3 = 10,
  RINGFOLD_F8E5M2 = 11
};

/* Reductions, numbered as ringfold::Op. RINGFOLD_PREMUL_SUM multiplies this rank's input by the
 * `factor` of the call first; the others ignore `factor`. */
typedef int ringfold_op;
enum {
  RINGFOLD_SUM = 0,
  RINGFOLD_PROD = 1,
  RINGFOLD_MAX = 2,
  RINGFOLD_MIN = 3,
  RINGFOLD_AVG = 4,
  RINGFOLD_PREMUL_SUM = 5
};

/* One more than ringfold::Algorithm, so that 0 can mean "the library chooses". */
typedef int ringfold_algorithm;
enum {
  RINGFOLD_ALGORITHM_AUTO = 0,
  RINGFOLD_ALGORITHM_RING = 1,
  RINGFOLD_ALGORITHM_HALVING_DOUBLING = 2,
  RINGFOLD_ALGORITHM_RECURSIVE_DOUBLING = 3,
  RINGFOLD_ALGORITHM_TWO_LEVEL = 4,
  RINGFOLD_ALGORITHM_CHAIN = 5,
  RINGFOLD_ALGORITHM_TREE = 6,
  RINGFOLD_ALGORITHM_DIRECT = 7,
  RINGFOLD_ALGORITHM_REGION = 8 /* in reports only: the shared memory of one host */
};

/* Handles; never dereferenced. */
typedef struct ringfold_comm* ringfold_comm_t;
typedef struct ringfold_work* ringfold_work_t;
typedef struct ringfold_gradient_sync* ringfold_gradient_sync_t;

/* Passed to every rank of one communicator by any means; opaque, copied as bytes. */
typedef struct ringfold_unique_id {
  unsigned char bytes[128];
} ringfold_unique_id;

/* How a communicator behaves. All zero: the defaults, as with NULL instead of options. */
typedef struct ringfold_options {
  double start_timeout; /* seconds to wait for the other ranks; 0: RINGFOLD_TIMEOUT or 600 */
  double timeout;       /* seconds, deadline of every operation; 0: RINGFOLD_TIMEOUT or 600 */
  size_t piece_bytes;   /* bytes of one message; 0: RINGFOLD_PIECE or the model */
  ringfold_algorithm algorithm; /* RINGFOLD_ALGORITHM_AUTO: RINGFOLD_ALGORITHM or the model */
  const char* transports;       /* "shm,ucx": allowed ones; NULL: RINGFOLD_TRANSPORTS or all */
} ringfold_options;

/* What an operation did, and what the bandwidth model says of it; see ringfold::Report. */
typedef struct ringfold_report {
  ringfold_algorithm algorithm;
  char transport[32]; /* "region", "direct", "shm", "ucx", ... as ringfold::Report; ends with 0 */
  int steps;
  uint64_t bytes_sent;  /* payload bytes this rank sent */
  uint64_t bytes_model; /* what the model says it must send */
  double bus_factor;    /* 2(N-1)/N for all_reduce */
  size_t chunk_bytes;
  size_t piece_bytes;
  double predicted_seconds;
  double measured_seconds; /* from the call to completion */
} ringfold_report;

/* What was done so far; see ringfold::Counters in record.h. */
typedef struct ringfold_counters {
  uint64_t operations;     /* called */
  uint64_t finished;       /* of these, over and well */
  uint64_t bytes_sent;     /* payload */
  uint64_t bytes_received; /* payload */
  uint64_t waits;          /* times that a thread waited for an operation */
  double wait_seconds;     /* spent so */
  uint64_t failures;       /* communicators that failed */
} ringfold_counters;

/* One tensor of ringfold_average_gradients: `count` elements of a float type, averaged in place. */
typedef struct ringfold_gradient {
  void* data;
  size_t count;
  ringfold_dtype type;
} ringfold_gradient;

/* ---- Library ---- */

/* "0.1.0". Static memory. */
RINGFOLD_API const char* ringfold_version(void);

/* What went wrong in the latest call of this thread that failed: what was given and what is
 * accepted, or rank, peer, collective and sequence number. "" if none failed yet. Belongs to the
 * library; valid until the next failure on this thread or the end of the thread. */
RINGFOLD_API const char* ringfold_last_error(void);

/* ---- Memory ----
 *
 * For buffers that the other ranks of the host can reach: large collectives read and write them
 * where they lie, without copies into and out of the library. Only a hint: every call takes
 * any memory. Plain memory in every other respect, for numpy for instance:
 *
 *   memory = ctypes.c_void_p()
 *   lib.ringfold_mem_alloc(ctypes.byref(memory), ctypes.c_size_t(bytes))
 *   x = numpy.frombuffer((ctypes.c_char * bytes).from_address(memory.value), numpy.float32)
 *
 * memory.h says more. */

/* Sets *memory to `bytes` zeroed bytes, all reserved at once, beginning at a page. Ended by
 * ringfold_mem_free. RINGFOLD_SYSTEM: they could not be had. */
RINGFOLD_API ringfold_status ringfold_mem_alloc(void** memory, size_t bytes);

/* NULL is ignored. RINGFOLD_INVALID_ARGUMENT, and nothing happens: it is not what
 * ringfold_mem_alloc gave, or a buffer of an operation that is not done. Before or after
 * ringfold_destroy. */
RINGFOLD_API ringfold_status ringfold_mem_free(void* memory);

/* ---- Communicators ----
 *
 * The init functions block until all ranks are there, or fail with RINGFOLD_TIMEOUT naming the
 * missing ones. The caller owns *comm and ends it with ringfold_destroy. `options` may be NULL. */

/* Rank, size and coordinator from the environment: RINGFOLD_*, torchrun, mpirun or srun.
 * RINGFOLD_INVALID_ARGUMENT: a variable is malformed or missing; RINGFOLD_UNSUPPORTED: none is
 * set. */
RINGFOLD_API ringfold_status ringfold_init(ringfold_comm_t* comm, const ringfold_options* options);

/* Makes an id, whose coordinator is this process: rank 0 must be initialised in it. */
RINGFOLD_API ringfold_status ringfold_get_unique_id(ringfold_unique_id* id);
RINGFOLD_API ringfold_status ringfold_init_id(ringfold_comm_t* comm, ringfold_unique_id id,
                                              int rank, int size, const ringfold_options* options);

/* `coordinator` is "host:port" ("[v6]:port"), where rank 0 listens. `secret` proves membership;
 * NULL or "": start-up is not authenticated. Both are copied. */
RINGFOLD_API ringfold_status ringfold_init_coordinator(ringfold_comm_t* comm,
                                                       const char* coordinator, const char* secret,
                                                       int rank, int size,
                                                       const ringfold_options* options);

/* Gives the handle up; it is invalid at once, also for other threads. Pending operations are not
 * waited for: wait for them, or abort, before. A second call with the same handle is
 * RINGFOLD_INVALID_ARGUMENT. */
RINGFOLD_API ringfold_status ringfold_destroy(ringfold_comm_t comm);

RINGFOLD_API ringfold_status ringfold_rank(ringfold_comm_t comm, int* rank);
RINGFOLD_API ringfold_status ringfold_size(ringfold_comm_t comm, int* size);

/* Ranks of equal colour form a new communicator, ordered by (key, rank). Every rank calls it.
 * Blocks. A negative colour sets *out to NULL. The caller owns *out. */
RINGFOLD_API ringfold_status ringfold_split(ringfold_comm_t comm, int color, int key,
                                            ringfold_comm_t* out);

/* The ranks that are not among the `count` numbers at `exclude` form a new communicator, in the
 * same order. Only they call it, with the same numbers; `comm` may have failed. Blocks. The caller
 * owns *out. RINGFOLD_MISMATCH: the ranks exclude different ones. */
RINGFOLD_API ringfold_status ringfold_shrink(ringfold_comm_t comm, const int* exclude, size_t count,
                                             ringfold_comm_t* out);

/* Ends every pending and future operation of this communicator, on every rank, with
 * RINGFOLD_ABORTED and the text `why` (NULL: a default). Returns at once, and may be called at any
 * time. */
RINGFOLD_API ringfold_status ringfold_abort(ringfold_comm_t comm, const char* why);

/* Lets the other ranks of `comm` know memory of ringfold_mem_alloc before its first use, so that
 * already that may go without copies. A hint: waits for nobody; other memory stays as it is. */
RINGFOLD_API ringfold_status ringfold_register(ringfold_comm_t comm, const void* memory,
                                               size_t bytes);

/* RINGFOLD_OK until the first failure, then that failure for ever. */
RINGFOLD_API ringfold_status ringfold_health(ringfold_comm_t comm);

/* Payload bytes this rank has sent on all transports of its world. */
RINGFOLD_API ringfold_status ringfold_bytes_sent(ringfold_comm_t comm, uint64_t* bytes);

/* Writes "shm", "ucx", "shm+ucx", "loopback" or "self" with a final 0 into the `bytes` bytes at
 * `name`. RINGFOLD_INVALID_ARGUMENT if they are too few; 32 are enough. */
RINGFOLD_API ringfold_status ringfold_transport(ringfold_comm_t comm, char* name, size_t bytes);

/* A new communicator of all ranks of `comm` and `newcomers` more behind them, which call
 * ringfold_init_id with the same id, the new size and ranks from the old size on. `id` counts on
 * rank 0 only, which got it from ringfold_get_unique_id and handed it to the newcomers. */
RINGFOLD_API ringfold_status ringfold_grow(ringfold_comm_t comm, ringfold_unique_id id,
                                           int newcomers, ringfold_comm_t* out);

/* ---- Record ---- */

/* The counters of a communicator; NULL: of this process, communicators that are gone included. */
RINGFOLD_API ringfold_status ringfold_get_counters(ringfold_comm_t comm,
                                                   ringfold_counters* counters);
/* The latest operations of a communicator as JSON, with 0 at the end; NULL: of all communicators of
 * several ranks of this process. *needed (may be NULL) is set to the bytes that the whole takes; if
 * that is more than `bytes`, nothing is written: RINGFOLD_INVALID_ARGUMENT. */
RINGFOLD_API ringfold_status ringfold_record(ringfold_comm_t comm, char* text, size_t bytes,
                                             size_t* needed);
/* The counters of this process as the text that Prometheus scrapes; otherwise as above. */
RINGFOLD_API ringfold_status ringfold_prometheus(char* text, size_t bytes, size_t* needed);

/* ---- Work ----
 *
 * An _async function starts an operation and sets *work to a handle that the caller owns and frees.
 * If it fails at once (a wrong argument, a communicator that has failed) it returns why, and there
 * is no handle: *work is NULL. */

/* Waits for the end of the operation, helping it along, and returns how it ended.
 * `timeout` is in seconds; negative: no limit but the operation's own deadline. RINGFOLD_TIMEOUT
 * with ringfold_work_done still 0: the operation is still running. */
RINGFOLD_API ringfold_status ringfold_work_wait(ringfold_work_t work, double timeout);

/* *done = 1 if the operation has ended, well or not, else 0. Does not block. */
RINGFOLD_API ringfold_status ringfold_work_done(ringfold_work_t work, int* done);

/* Calls `call` with `context`, how the operation ended and the text of that ("" if well), once: on
 * the library's thread when the operation ends, or here and now if it has ended. `call` may start
 * operations but must not wait; `why` is valid until it returns. Also called if the handle is freed
 * before. */
RINGFOLD_API ringfold_status ringfold_work_then(ringfold_work_t work,
                                                void (*call)(void* context, ringfold_status status,
                                                             const char* why),
                                                void* context);

/* Complete once the operation is done. */
RINGFOLD_API ringfold_status ringfold_work_report(ringfold_work_t work, ringfold_report* report);

/* Gives the handle up; the operation goes on. */
RINGFOLD_API ringfold_status ringfold_work_free(ringfold_work_t work);

/* ---- Collectives ----
 *
 * Each in two forms: blocking, and _async, which is described under Work. What they do, where the
 * parts lie and what "in place" means: communicator.h.
 * Errors at once: RINGFOLD_INVALID_ARGUMENT (handle, buffer, type, op, root, overlap),
 * RINGFOLD_UNSUPPORTED (an op that the type does not have). Later: RINGFOLD_TIMEOUT,
 * RINGFOLD_PEER_LOST, RINGFOLD_MISMATCH, RINGFOLD_ABORTED; the communicator then stays failed. */

/* recv[i] = reduction over ranks of send[i], `count` elements each. */
RINGFOLD_API ringfold_status ringfold_all_reduce(ringfold_comm_t comm, const void* send, void* recv,
                                                 size_t count, ringfold_dtype type, ringfold_op op,
                                                 double factor, void* stream);
RINGFOLD_API ringfold_status ringfold_all_reduce_async(ringfold_comm_t comm, const void* send,
                                                       void* recv, size_t count,
                                                       ringfold_dtype type, ringfold_op op,
                                                       double factor, void* stream,
                                                       ringfold_work_t* work);

/* send: size * count_each elements; recv: the reduced part of this rank. */
RINGFOLD_API ringfold_status ringfold_reduce_scatter(ringfold_comm_t comm, const void* send,
                                                     void* recv, size_t count_each,
                                                     ringfold_dtype type, ringfold_op op,
                                                     double factor, void* stream);
RINGFOLD_API ringfold_status ringfold_reduce_scatter_async(ringfold_comm_t comm, const void* send,
                                                           void* recv, size_t count_each,
                                                           ringfold_dtype type, ringfold_op op,
                                                           double factor, void* stream,
                                                           ringfold_work_t* work);

/* recv: size * count_each elements, part r from rank r. */
RINGFOLD_API ringfold_status ringfold_all_gather(ringfold_comm_t comm, const void* send, void* recv,
                                                 size_t count_each, ringfold_dtype type,
                                                 void* stream);
RINGFOLD_API ringfold_status ringfold_all_gather_async(ringfold_comm_t comm, const void* send,
                                                       void* recv, size_t count_each,
                                                       ringfold_dtype type, void* stream,
                                                       ringfold_work_t* work);

/* buffer on every rank = buffer on root. */
RINGFOLD_API ringfold_status ringfold_broadcast(ringfold_comm_t comm, void* buffer, size_t count,
                                                ringfold_dtype type, int root, void* stream);
RINGFOLD_API ringfold_status ringfold_broadcast_async(ringfold_comm_t comm, void* buffer,
                                                      size_t count, ringfold_dtype type, int root,
                                                      void* stream, ringfold_work_t* work);

/* As all_reduce, with the result on root only; recv may be NULL elsewhere. */
RINGFOLD_API ringfold_status ringfold_reduce(ringfold_comm_t comm, const void* send, void* recv,
                                             size_t count, ringfold_dtype type, ringfold_op op,
                                             double factor, int root, void* stream);
RINGFOLD_API ringfold_status ringfold_reduce_async(ringfold_comm_t comm, const void* send,
                                                   void* recv, size_t count, ringfold_dtype type,
                                                   ringfold_op op, double factor, int root,
                                                   void* stream, ringfold_work_t* work);

/* Part r of send goes to rank r, part r of recv comes from rank r; count_each elements a part. */
RINGFOLD_API ringfold_status ringfold_all_to_all(ringfold_comm_t comm, const void* send, void* recv,
                                                 size_t count_each, ringfold_dtype type,
                                                 void* stream);
RINGFOLD_API ringfold_status ringfold_all_to_all_async(ringfold_comm_t comm, const void* send,
                                                       void* recv, size_t count_each,
                                                       ringfold_dtype type, void* stream,
                                                       ringfold_work_t* work);

/* recv on root: part r from rank r; elsewhere it may be NULL. */
RINGFOLD_API ringfold_status ringfold_gather(ringfold_comm_t comm, const void* send, void* recv,
                                             size_t count_each, ringfold_dtype type, int root,
                                             void* stream);
RINGFOLD_API ringfold_status ringfold_gather_async(ringfold_comm_t comm, const void* send,
                                                   void* recv, size_t count_each,
                                                   ringfold_dtype type, int root, void* stream,
                                                   ringfold_work_t* work);

/* send on root: part r goes to rank r; elsewhere it may be NULL. */
RINGFOLD_API ringfold_status ringfold_scatter(ringfold_comm_t comm, const void* send, void* recv,
                                              size_t count_each, ringfold_dtype type, int root,
                                              void* stream);
RINGFOLD_API ringfold_status ringfold_scatter_async(ringfold_comm_t comm, const void* send,
                                                    void* recv, size_t count_each,
                                                    ringfold_dtype type, int root, void* stream,
                                                    ringfold_work_t* work);

/* Point to point, matched in order per pair. */
RINGFOLD_API ringfold_status ringfold_send(ringfold_comm_t comm, const void* buffer, size_t count,
                                           ringfold_dtype type, int to, void* stream);
RINGFOLD_API ringfold_status ringfold_send_async(ringfold_comm_t comm, const void* buffer,
                                                 size_t count, ringfold_dtype type, int to,
                                                 void* stream, ringfold_work_t* work);
RINGFOLD_API ringfold_status ringfold_recv(ringfold_comm_t comm, void* buffer, size_t count,
                                           ringfold_dtype type, int from, void* stream);
RINGFOLD_API ringfold_status ringfold_recv_async(ringfold_comm_t comm, void* buffer, size_t count,
                                                 ringfold_dtype type, int from, void* stream,
                                                 ringfold_work_t* work);

/* Done when every rank has called it. */
RINGFOLD_API ringfold_status ringfold_barrier(ringfold_comm_t comm);
RINGFOLD_API ringfold_status ringfold_barrier_async(ringfold_comm_t comm, ringfold_work_t* work);

/* ---- Groups ----
 *
 * _async calls of this thread between begin and end start together, whatever their communicators:
 * the only safe way to drive both ends of a pair from one thread. Groups nest; the outermost end
 * starts everything. end and discard without begin: RINGFOLD_INVALID_ARGUMENT. */

RINGFOLD_API ringfold_status ringfold_group_begin(void);

/* Ends the innermost open group. The outermost end starts the calls, waits for all of them and
 * returns the first error of them; an inner end returns at once. */
RINGFOLD_API ringfold_status ringfold_group_end(void);

/* The same without waiting: *work is done when all calls of the group are. */
RINGFOLD_API ringfold_status ringfold_group_end_async(ringfold_work_t* work);

/* Ends the innermost open group without starting its calls; their work ends RINGFOLD_ABORTED. */
RINGFOLD_API ringfold_status ringfold_group_discard(void);

/* ---- Gradients ---- */

/* Replaces `tensors` gradients by their mean over the ranks. Blocks. All ranks give the same
 * tensors in the same order, and either all call the weighted form or none does.
 * RINGFOLD_INVALID_ARGUMENT for a type that is not a float. */
RINGFOLD_API ringfold_status ringfold_average_gradients(ringfold_comm_t comm,
                                                        const ringfold_gradient* gradients,
                                                        size_t tensors);

/* By sum_r(weight_r * gradient_r) / sum_r(weight_r): with the number of samples as weight this is
 * the gradient of the union batch. A rank without data joins with weight 0.
 * RINGFOLD_INVALID_ARGUMENT also for a negative or non-finite weight, or if all are 0. */
RINGFOLD_API ringfold_status ringfold_average_gradients_weighted(ringfold_comm_t comm,
                                                                 const ringfold_gradient* gradients,
                                                                 size_t tensors, double weight);

/* ---- Gradient synchroniser ----
 *
 * Averages gradients in buckets while the rest of backward computes: gradient_sync.h describes what
 * happens, compression.h the hooks that come along.
 * ringfold_gradient_sync_ready and _abort may be called from any thread at the same time;
 * everything else about one synchroniser from one thread at a time. Gradients must outlive it. */

typedef struct ringfold_parameter {
  const char* name; /* compared between ranks and used in errors; NULL: none. Copied. */
  size_t count;     /* elements */
  ringfold_dtype type;
  void* gradient; /* NULL: it shall live in bucket storage */
} ringfold_parameter;

/* What a hook sees of a bucket; see ringfold::Bucket. */
typedef struct ringfold_bucket {
  size_t index;
  ringfold_dtype type;
  void* data; /* this rank's gradients; the average when the hook returns */
  size_t count;
  double share; /* the average is the sum over the ranks of share * data */
  int equal;    /* 1: no weights were given */
  int layout;   /* counts up when buckets are laid out anew */
} ringfold_bucket;

/* Makes a bucket its average by any blocking collectives on `comm`, which lives as long as the
 * synchroniser. Called from threads of the library and from ringfold_gradient_sync_finish, never
 * twice at once. What it returns fails the step, with the text of the latest ringfold function that
 * failed in it. */
typedef ringfold_status (*ringfold_bucket_hook)(ringfold_comm_t comm, const ringfold_bucket* bucket,
                                                void* context);

/* The hooks of compression.h. */
typedef int ringfold_compression;
enum {
  RINGFOLD_COMPRESSION_NONE = 0,
  RINGFOLD_COMPRESSION_F16 = 1,
  RINGFOLD_COMPRESSION_BF16 = 2,
  RINGFOLD_COMPRESSION_I8 = 3,
  RINGFOLD_COMPRESSION_F8E4M3 = 4,
  RINGFOLD_COMPRESSION_SPARSE = 5 /* the share of the elements that is largest */
};

/* All zero: the defaults, as with NULL instead of options. Alike on all ranks. */
typedef struct ringfold_sync_options {
  size_t first_bytes;  /* of the first bucket; 0: 1 MiB */
  size_t bucket_bytes; /* of the others; 0: 25 MiB */
  int require_all;     /* 1: finish fails if parameters were not ready; 0: they count as zeros */
  ringfold_compression compression;
  double sparse_share;       /* for RINGFOLD_COMPRESSION_SPARSE: 0 < share <= 1 */
  ringfold_bucket_hook hook; /* instead of compression; NULL: none */
  void* hook_context;        /* passed to the hook */
  const char* hook_name;     /* compared between ranks and used in errors; NULL: none. Copied. */
} ringfold_sync_options;

/* The latest synchronised step; see ringfold::SyncReport. */
typedef struct ringfold_sync_report {
  double divisor; /* the number of ranks, or the sum of the weights */
  size_t buckets;
  size_t unused; /* parameters that were not ready */
  size_t copied_bytes;
  uint64_t gradient_bytes;
  uint64_t bytes_sent;
  double busy_seconds;
  double exposed_seconds;
} ringfold_sync_report;

/* All ranks call it alike; blocks until they have. The caller owns *sync and ends it with
 * ringfold_gradient_sync_destroy. RINGFOLD_MISMATCH: the ranks' parameters or options differ; the
 * text has both sides. */
RINGFOLD_API ringfold_status ringfold_gradient_sync_create(ringfold_gradient_sync_t* sync,
                                                           ringfold_comm_t comm,
                                                           const ringfold_parameter* parameters,
                                                           size_t number,
                                                           const ringfold_sync_options* options);
RINGFOLD_API ringfold_status ringfold_gradient_sync_destroy(ringfold_gradient_sync_t sync);

/* Begins a step that averages by the number of ranks, or by weight: all ranks the same. */
RINGFOLD_API ringfold_status ringfold_gradient_sync_begin(ringfold_gradient_sync_t sync);
RINGFOLD_API ringfold_status ringfold_gradient_sync_begin_weighted(ringfold_gradient_sync_t sync,
                                                                   double weight);
/* The gradient of that parameter is final. Does not block. */
RINGFOLD_API ringfold_status ringfold_gradient_sync_ready(ringfold_gradient_sync_t sync,
                                                          size_t parameter);
/* Waits for all averages. */
RINGFOLD_API ringfold_status ringfold_gradient_sync_finish(ringfold_gradient_sync_t sync);

/* 1: steps that begin from now on send nothing; 0: the next one sends what has piled up. */
RINGFOLD_API ringfold_status ringfold_gradient_sync_accumulate(ringfold_gradient_sync_t sync,
                                                               int on);
/* Where the gradient of a parameter lies, for as long as the synchroniser lives. */
RINGFOLD_API ringfold_status ringfold_gradient_sync_gradient(ringfold_gradient_sync_t sync,
                                                             size_t parameter, void** gradient);
RINGFOLD_API ringfold_status ringfold_gradient_sync_report(ringfold_gradient_sync_t sync,
                                                           ringfold_sync_report* report);
/* Writes the parameters that were not ready, at most `room` of them, to `parameters`; their number
 * is in the report. */
RINGFOLD_API ringfold_status ringfold_gradient_sync_unused(ringfold_gradient_sync_t sync,
                                                           size_t* parameters, size_t room);
/* Ends the step that is under way, and all further ones, on every rank. `why` may be NULL. */
RINGFOLD_API ringfold_status ringfold_gradient_sync_abort(ringfold_gradient_sync_t sync,
                                                          const char* why);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* RINGFOLD_C_H */
