/* What the parts of the stand-in share. The public names and layouts are those of nccl.h. */
#ifndef STANDIN_H
#define STANDIN_H

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

typedef enum {
    ncclSuccess = 0,
    ncclSystemError = 2,
    ncclInternalError = 3,
    ncclInvalidArgument = 4,
    ncclInvalidUsage = 5,
    ncclRemoteError = 6,
    ncclInProgress = 7,
} ncclResult_t;

#define NCCL_SPLIT_NOCOLOR (-1)

typedef struct {
    char internal[128];
} ncclUniqueId;

/* The beginning of ncclConfig_t, as far as it is read here. */
typedef struct {
    size_t size;
    unsigned int magic;
    unsigned int version;
    int blocking;
    int cgaClusterSize;
    int minCTAs;
    int maxCTAs;
    const char *netName;
    int splitShare;
} ncclConfig_t;

/* What ends the waits of a communicator: its own, or its parent's where they share. */
typedef struct {
    atomic_int raised;
    atomic_int owners;
    int bell; /* an eventfd that is readable once raised */
} Flag;

typedef struct Comm Comm;
typedef Comm *ncclComm_t;

typedef struct Job {
    ncclResult_t (*run)(struct Job *);
    Comm *comm;
    pthread_t thread;
    void *what;
} Job;

struct Comm {
    uint32_t magic;
    int rank;
    int size;
    int shares_flag; /* children use this one's flag */
    int splits;
    char name[200]; /* where its ranks find each other */
    int *peers;     /* one connected socket per rank; -1 for this one */
    Flag *flag;
    Flag *child_flag; /* of the child that is being made */
    _Atomic ncclResult_t state;
    Job *job;
    int is_finalized;
    pthread_mutex_t lock;
    pthread_cond_t idle;
    int operations; /* in a stream, or on their way into one */
};

typedef enum { SEND, RECV, BROADCAST } Kind;

typedef struct {
    Kind kind;
    const char *from;
    char *into;
    size_t size;
    int peer; /* or the root */
} Part;

/* Ranks connected to each other, and what they move: wires.c */
Flag *flag_new(void);
void flag_raise(Flag *flag);
void flag_release(Flag *flag);
ncclResult_t wires_connect(Comm *comm);
void wires_move(Comm *comm, Part *parts, int count);
void wires_await_departures(Comm *comm, Flag *flag);
void wires_close(Comm *comm);

/* Streams: streams.c */
typedef struct Stream Stream;
void stream_enqueue(Stream *stream, Comm *comm, Part *parts, int count);

/* Switches: how this process behaves. */
const char *standin_switch(const char *name);
void standin_note(const char *format, ...);

#endif
