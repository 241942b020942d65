/* The calls of libnccl that nccl4py makes, with the behaviour that a fault-tolerant caller has to live with:
 *
 * - a nonblocking call returns ncclInProgress and is carried out by a thread of ours; whoever calls again before the
 *   state is ncclSuccess is refused, and an event recorded before then does not cover the operation;
 * - an operation that is aborted ends like any other, with whatever is in its buffer by then;
 * - an abort raises the flag at once and gives the memory back later, in ncclGroupEnd if it is inside a group; a
 *   communicator that is used after that ends the process, as the use-after-free could;
 * - a child has a flag of its own unless its parent was configured with splitShare;
 * - ncclCommFinalize waits for every rank.
 *
 * Switches, read from the environment as STANDIN_NCCL_<name>:
 *   VERSION        what ncclGetVersion says
 *   STALL          "init" or "split": this process never finishes that call
 *   RECLAIM_WAITS  an abort returns only when every peer has left too, or is gone
 *   ORPHANS        operations under way do not look at the flag
 *   REMOTE_ERRORS  the loss of a peer shows in the state of the communicator
 *   REFUSE         ncclBroadcast is refused
 *   LOG            a file to which calls are noted
 */
#define _GNU_SOURCE
#include "standin.h"

#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#define ALIVE 0x5eedc0deu
#define FREED 0xdeadc0deu
#define PARTS_MAX 256
#define COMMS_MAX 64

static _Thread_local struct {
    int depth;
    Comm *comm;
    Stream *stream;
    Part parts[PARTS_MAX];
    int count;
    Comm *aborted[COMMS_MAX];
    int aborts;
} group;

const char *standin_switch(const char *name) {
    char full[64];
    snprintf(full, sizeof full, "STANDIN_NCCL_%s", name);
    return getenv(full);
}

void standin_note(const char *format, ...) {
    const char *path = standin_switch("LOG");
    if (path == NULL) return;
    char line[200];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(line, sizeof line - 1, format, arguments);
    va_end(arguments);
    line[length++] = '\n';
    int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (fd < 0 || write(fd, line, (size_t)length) != length) abort();
    close(fd);
}

/* Communicators are never freed, so that this can be told for certain. */
static void check_alive(const Comm *comm, const char *call) {
    if (comm->magic == ALIVE) return;
    standin_note("use after free in %s", call);
    fprintf(stderr, "stand-in libnccl: %s on a communicator that was freed\n", call);
    abort();
}

/* Jobs: what a nonblocking call leaves to a thread */

static void *run_job(void *argument) {
    Job *job = argument;
    Comm *comm = job->comm;
    ncclResult_t result = job->run(job);
    atomic_store(&comm->state, result);
    return NULL;
}

static void join_job(Comm *comm) {
    if (comm->job == NULL) return;
    pthread_join(comm->job->thread, NULL);
    free(comm->job->what);
    free(comm->job);
    comm->job = NULL;
}

static ncclResult_t start_job(Comm *comm, ncclResult_t (*run)(Job *), void *what) {
    join_job(comm);
    Job *job = calloc(1, sizeof *job);
    *job = (Job){.run = run, .comm = comm, .what = what};
    comm->job = job;
    atomic_store(&comm->state, ncclInProgress);
    if (pthread_create(&job->thread, NULL, run_job, job)) abort();
    return ncclInProgress;
}

static int is_ready(Comm *comm, const char *call) {
    check_alive(comm, call);
    return atomic_load(&comm->state) == ncclSuccess;
}

static void stall(const char *where, Flag *flag) {
    const char *wanted = standin_switch("STALL");
    while (wanted && strcmp(wanted, where) == 0 && !atomic_load(&flag->raised)) usleep(500);
}

/* Life */

static Comm *comm_new(int rank, int size, const ncclConfig_t *config) {
    Comm *comm = calloc(1, sizeof *comm);
    comm->magic = ALIVE;
    comm->rank = rank;
    comm->size = size;
    comm->shares_flag = config->splitShare == 1;
    pthread_mutex_init(&comm->lock, NULL);
    pthread_cond_init(&comm->idle, NULL);
    return comm;
}

ncclResult_t ncclGetVersion(int *version) {
    const char *configured = standin_switch("VERSION");
    *version = configured ? atoi(configured) : 23007;
    return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    standin_note("mint");
    memset(id, 0, sizeof *id);
    return getrandom(id->internal, 16, 0) == 16 ? ncclSuccess : ncclSystemError;
}

static ncclResult_t run_init(Job *job) {
    stall("init", job->comm->flag);
    return wires_connect(job->comm);
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *out, int size, ncclUniqueId id, int rank, ncclConfig_t *config) {
    if (config == NULL || config->blocking != 0 || rank < 0 || rank >= size) return ncclInvalidArgument;
    standin_note("init");
    Comm *comm = comm_new(rank, size, config);
    for (int index = 0; index < 16; index++)
        snprintf(comm->name + 2 * index, 3, "%02x", (unsigned char)id.internal[index]);
    comm->flag = flag_new();
    *out = comm;
    return start_job(comm, run_init, NULL);
}

static void reclaim(Comm *comm) {
    pthread_mutex_lock(&comm->lock);
    while (comm->operations > 0) pthread_cond_wait(&comm->idle, &comm->lock);
    pthread_mutex_unlock(&comm->lock);
    if (standin_switch("RECLAIM_WAITS")) wires_await_departures(comm, NULL);
    wires_close(comm);
    flag_release(comm->flag);
    comm->magic = FREED;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
    if (comm == NULL) return ncclSuccess;
    check_alive(comm, "ncclCommAbort");
    flag_raise(comm->flag);
    pthread_mutex_lock(&comm->lock);
    if (comm->child_flag) flag_raise(comm->child_flag);
    pthread_mutex_unlock(&comm->lock);
    join_job(comm);
    if (group.depth == 0) {
        standin_note("abort 1");
        reclaim(comm);
    } else {
        if (group.aborts == COMMS_MAX) return ncclInternalError;
        group.aborted[group.aborts++] = comm;
    }
    return ncclSuccess;
}

static ncclResult_t run_finalize(Job *job) {
    wires_await_departures(job->comm, job->comm->flag);
    return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
    if (!is_ready(comm, "ncclCommFinalize") || comm->is_finalized) return ncclInvalidArgument;
    comm->is_finalized = 1;
    standin_note("finalize");
    return start_job(comm, run_finalize, NULL);
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    if (comm == NULL) return ncclSuccess;
    if (!is_ready(comm, "ncclCommDestroy")) return ncclInvalidArgument;
    join_job(comm);
    if (!comm->is_finalized) wires_await_departures(comm, comm->flag);
    standin_note("destroy");
    reclaim(comm);
    return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *state) {
    check_alive(comm, "ncclCommGetAsyncError");
    *state = atomic_load(&comm->state);
    if (*state == ncclSuccess) join_job(comm);
    return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t result) {
    switch (result) {
    case ncclSuccess: return "no error";
    case ncclSystemError: return "unhandled system error";
    case ncclInvalidArgument: return "invalid argument";
    case ncclInvalidUsage: return "invalid usage";
    case ncclRemoteError: return "remote process exited or there was a network error";
    case ncclInProgress: return "NCCL operation in progress";
    default: return "internal error";
    }
}

const char *ncclGetLastError(ncclComm_t comm) {
    (void)comm;
    return "";
}

/* Children */

typedef struct {
    int color;
    int key;
} Choice;

typedef struct {
    Comm *child; /* NULL without a color */
    ncclComm_t *out;
    Choice choice;
} Split;

static void gather_choices(Comm *comm, Choice *choices) {
    Part parts[2 * comm->size];
    int count = 0;
    for (int peer = 0; peer < comm->size; peer++) {
        if (peer == comm->rank) continue;
        parts[count++] = (Part){SEND, (char *)&choices[comm->rank], NULL, sizeof(Choice), peer};
        parts[count++] = (Part){RECV, NULL, (char *)&choices[peer], sizeof(Choice), peer};
    }
    if (count > 0) wires_move(comm, parts, count);
}

static ncclResult_t run_split(Job *job) {
    Comm *comm = job->comm;
    Split *split = job->what;
    Comm *child = split->child;
    Choice choices[comm->size];
    choices[comm->rank] = split->choice;
    ncclResult_t result = ncclInternalError;
    stall("split", comm->flag);
    gather_choices(comm, choices);
    if (!atomic_load(&comm->flag->raised)) result = ncclSuccess;
    if (child && result == ncclSuccess) {
        for (int rank = 0; rank < comm->size; rank++) {
            if (choices[rank].color != split->choice.color) continue;
            child->size++;
            int order = choices[rank].key - split->choice.key;
            child->rank += order < 0 || (order == 0 && rank < comm->rank);
        }
        int length = snprintf(child->name, sizeof child->name, "%s.%d-%d", comm->name, comm->splits, split->choice.color);
        if (length >= (int)sizeof child->name) abort();
        result = wires_connect(child);
    }
    pthread_mutex_lock(&comm->lock);
    comm->child_flag = NULL;
    pthread_mutex_unlock(&comm->lock);
    if (child && result == ncclSuccess) {
        __atomic_store_n(split->out, child, __ATOMIC_RELEASE);
    } else if (child) {
        wires_close(child);
        flag_release(child->flag);
        child->magic = FREED;
    }
    return result;
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *out, ncclConfig_t *config) {
    *out = NULL;
    if (!is_ready(comm, "ncclCommSplit") || color < NCCL_SPLIT_NOCOLOR) return ncclInvalidArgument;
    if (config && config->blocking != 0) return ncclInvalidArgument;
    standin_note("split");
    Split *split = calloc(1, sizeof *split);
    *split = (Split){.out = out, .choice = {color, key}};
    comm->splits++;
    if (color != NCCL_SPLIT_NOCOLOR) {
        ncclConfig_t inherited = {.splitShare = comm->shares_flag};
        split->child = comm_new(0, 0, config ? config : &inherited);
        if (comm->shares_flag) {
            atomic_fetch_add(&comm->flag->owners, 1);
            split->child->flag = comm->flag;
        } else {
            comm->child_flag = split->child->flag = flag_new();
        }
    }
    return start_job(comm, run_split, split);
}

/* Operations */

typedef struct {
    Stream *stream;
    int count;
    Part parts[];
} Launch;

static ncclResult_t run_launch(Job *job) {
    Launch *launch = job->what;
    stream_enqueue(launch->stream, job->comm, launch->parts, launch->count);
    return ncclSuccess;
}

static ncclResult_t launch(void) {
    Comm *comm = group.comm;
    Launch *launch = malloc(sizeof *launch + sizeof(Part) * (size_t)group.count);
    launch->stream = group.stream;
    launch->count = group.count;
    memcpy(launch->parts, group.parts, sizeof(Part) * (size_t)group.count);
    pthread_mutex_lock(&comm->lock);
    comm->operations++;
    pthread_mutex_unlock(&comm->lock);
    group.count = 0;
    group.comm = NULL;
    return start_job(comm, run_launch, launch);
}

ncclResult_t ncclGroupStart(void) {
    group.depth++;
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void) {
    if (group.depth == 0) return ncclInvalidUsage;
    if (--group.depth > 0) return ncclSuccess;
    if (group.aborts > 0) standin_note("abort %d", group.aborts);
    for (int index = 0; index < group.aborts; index++) reclaim(group.aborted[index]);
    group.aborts = 0;
    return group.count > 0 ? launch() : ncclSuccess;
}

static ncclResult_t add(Comm *comm, Stream *stream, const char *call, Part part) {
    if (!is_ready(comm, call) || part.peer < 0 || part.peer >= comm->size) return ncclInvalidArgument;
    if (group.count == PARTS_MAX || (group.count > 0 && (group.comm != comm || group.stream != stream)))
        return ncclInvalidUsage;
    group.comm = comm;
    group.stream = stream;
    group.parts[group.count++] = part;
    return group.depth > 0 ? ncclSuccess : launch();
}

ncclResult_t ncclBroadcast(const void *from, void *into, size_t count, int type, int root, ncclComm_t comm, Stream *stream) {
    if (type > 1 || group.depth > 0) return ncclInvalidUsage;
    if (standin_switch("REFUSE")) return ncclSystemError;
    return add(comm, stream, "ncclBroadcast", (Part){BROADCAST, from, into, count, root});
}

ncclResult_t ncclSend(const void *from, size_t count, int type, int peer, ncclComm_t comm, Stream *stream) {
    if (type > 1) return ncclInvalidUsage;
    return add(comm, stream, "ncclSend", (Part){SEND, from, NULL, count, peer});
}

ncclResult_t ncclRecv(void *into, size_t count, int type, int peer, ncclComm_t comm, Stream *stream) {
    if (type > 1) return ncclInvalidUsage;
    return add(comm, stream, "ncclRecv", (Part){RECV, NULL, into, count, peer});
}
