/* What stands in for CUDA streams: a thread that does one operation after the other. */
#define _GNU_SOURCE
#include "standin.h"

#include <stdlib.h>
#include <string.h>

typedef struct Operation {
    struct Operation *next;
    Comm *comm;
    int count;
    Part parts[];
} Operation;

struct Stream {
    pthread_mutex_t lock;
    pthread_cond_t more;
    Operation *first, **end;
    uint64_t enqueued, done;
    int is_ending;
};

static void leave(Comm *comm) {
    pthread_mutex_lock(&comm->lock);
    comm->operations--;
    pthread_cond_broadcast(&comm->idle);
    pthread_mutex_unlock(&comm->lock);
}

static void *serve(void *argument) {
    Stream *stream = argument;
    pthread_mutex_lock(&stream->lock);
    for (;;) {
        while (stream->first == NULL && !stream->is_ending) pthread_cond_wait(&stream->more, &stream->lock);
        Operation *operation = stream->first;
        if (operation == NULL) break;
        stream->first = operation->next;
        if (stream->first == NULL) stream->end = &stream->first;
        pthread_mutex_unlock(&stream->lock);
        standin_note("work");
        wires_move(operation->comm, operation->parts, operation->count);
        pthread_mutex_lock(&stream->lock);
        stream->done++;
        leave(operation->comm);
        free(operation);
    }
    pthread_mutex_unlock(&stream->lock);
    pthread_mutex_destroy(&stream->lock);
    pthread_cond_destroy(&stream->more);
    free(stream);
    return NULL;
}

Stream *standinStreamCreate(void) {
    Stream *stream = calloc(1, sizeof *stream);
    pthread_t thread;
    pthread_mutex_init(&stream->lock, NULL);
    pthread_cond_init(&stream->more, NULL);
    stream->end = &stream->first;
    if (pthread_create(&thread, NULL, serve, stream)) abort();
    pthread_detach(thread);
    return stream;
}

/* Like cudaStreamDestroy: returns at once; what was enqueued is still done. */
void standinStreamDestroy(Stream *stream) {
    pthread_mutex_lock(&stream->lock);
    stream->is_ending = 1;
    pthread_cond_signal(&stream->more);
    pthread_mutex_unlock(&stream->lock);
}

/* What an event would hold: how much had been enqueued when it was recorded. */
uint64_t standinStreamRecord(Stream *stream) {
    pthread_mutex_lock(&stream->lock);
    uint64_t mark = stream->enqueued;
    pthread_mutex_unlock(&stream->lock);
    return mark;
}

int standinStreamQuery(Stream *stream, uint64_t mark) {
    pthread_mutex_lock(&stream->lock);
    int is_done = stream->done >= mark;
    pthread_mutex_unlock(&stream->lock);
    return is_done;
}

void stream_enqueue(Stream *stream, Comm *comm, Part *parts, int count) {
    Operation *operation = malloc(sizeof *operation + sizeof(Part) * (size_t)count);
    operation->next = NULL;
    operation->comm = comm;
    operation->count = count;
    memcpy(operation->parts, parts, sizeof(Part) * (size_t)count);
    pthread_mutex_lock(&stream->lock);
    *stream->end = operation;
    stream->end = &operation->next;
    stream->enqueued++;
    pthread_cond_signal(&stream->more);
    pthread_mutex_unlock(&stream->lock);
}
