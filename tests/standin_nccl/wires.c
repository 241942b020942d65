/* Sockets between the ranks of a communicator, and bytes through them. Whoever waits here waits for ever, like a kernel
 * that spins on a flag in memory: only the communicator's flag ends it, also when the death of a peer is reported. */
#define _GNU_SOURCE
#include "standin.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define CHUNK_BYTES ((size_t)64 << 10)

Flag *flag_new(void) {
    Flag *flag = calloc(1, sizeof *flag);
    flag->bell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    flag->owners = 1;
    return flag;
}

void flag_raise(Flag *flag) {
    atomic_store(&flag->raised, 1);
    eventfd_write(flag->bell, 1);
}

void flag_release(Flag *flag) {
    if (atomic_fetch_sub(&flag->owners, 1) == 1) {
        close(flag->bell);
        free(flag);
    }
}

/* Whether work that is under way looks at the flag at all. */
static int is_raised(const Flag *flag) {
    return atomic_load(&flag->raised) && !standin_switch("ORPHANS");
}

static socklen_t address_of(const Comm *comm, int rank, struct sockaddr_un *address) {
    memset(address, 0, sizeof *address);
    address->sun_family = AF_UNIX;
    char text[sizeof address->sun_path];
    int length = snprintf(text, sizeof text, "standin-nccl/%s/%d", comm->name, rank);
    if (length >= (int)sizeof address->sun_path - 1) abort();
    memcpy(address->sun_path + 1, text, (size_t)length);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length);
}

/* Return when fd is ready for events, 0 if the flag was raised instead. */
static int await(int fd, short events, Flag *flag) {
    struct pollfd fds[2] = {{fd, events, 0}, {flag->bell, POLLIN, 0}};
    while (!is_raised(flag)) {
        if (poll(fds, standin_switch("ORPHANS") ? 1 : 2, -1) > 0 && fds[0].revents) return 1;
    }
    return 0;
}

static void stay_stuck(Comm *comm) {
    if (standin_switch("REMOTE_ERRORS")) atomic_store(&comm->state, ncclRemoteError);
    await(-1, 0, comm->flag);
}

/* Move size bytes; 0 if the flag ended it. A peer that has gone is waited for all the same. */
static int move(Comm *comm, int fd, void *data, size_t size, int is_send) {
    char *at = data;
    while (size > 0) {
        if (!await(fd, is_send ? POLLOUT : POLLIN, comm->flag)) return 0;
        ssize_t moved = is_send ? send(fd, at, size, MSG_DONTWAIT | MSG_NOSIGNAL) : recv(fd, at, size, MSG_DONTWAIT);
        if (moved > 0) {
            at += moved;
            size -= (size_t)moved;
        } else if (moved == 0 || (errno != EAGAIN && errno != EINTR)) {
            stay_stuck(comm);
            return 0;
        }
    }
    return 1;
}

static int dial(Comm *comm, int peer) {
    struct sockaddr_un address;
    socklen_t length = address_of(comm, peer, &address);
    while (!atomic_load(&comm->flag->raised)) {
        int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        if (connect(fd, (struct sockaddr *)&address, length) == 0) return fd;
        close(fd);
        usleep(500); /* it does not listen yet */
    }
    return -1;
}

/* Every rank listens, dials those below it and answers those above it. */
ncclResult_t wires_connect(Comm *comm) {
    comm->peers = malloc(sizeof(int) * (size_t)comm->size);
    for (int peer = 0; peer < comm->size; peer++) comm->peers[peer] = -1;
    struct sockaddr_un address;
    socklen_t length = address_of(comm, comm->rank, &address);
    int door = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    ncclResult_t result = ncclSystemError;
    if (door < 0 || bind(door, (struct sockaddr *)&address, length) || listen(door, comm->size)) goto out;
    result = ncclInternalError; /* what an init that was aborted ends with */
    for (int peer = 0; peer < comm->rank; peer++) {
        comm->peers[peer] = dial(comm, peer);
        if (comm->peers[peer] < 0 || !move(comm, comm->peers[peer], &comm->rank, sizeof(int), 1)) goto out;
    }
    for (int missing = comm->size - 1 - comm->rank; missing > 0; missing--) {
        int fd = -1, peer = -1;
        if (!await(door, POLLIN, comm->flag)) goto out;
        fd = accept4(door, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0 || !move(comm, fd, &peer, sizeof peer, 0)) {
            if (fd >= 0) close(fd);
            goto out;
        }
        comm->peers[peer] = fd;
    }
    result = ncclSuccess;
out:
    if (door >= 0) close(door);
    return result;
}

static void broadcast(Comm *comm, Part *part) {
    int position = (comm->rank - part->peer + comm->size) % comm->size;
    int source = comm->peers[(comm->rank - 1 + comm->size) % comm->size];
    int sink = comm->peers[(comm->rank + 1) % comm->size];
    for (size_t done = 0; done < part->size; done += CHUNK_BYTES) {
        size_t size = part->size - done < CHUNK_BYTES ? part->size - done : CHUNK_BYTES;
        if (position > 0 && !move(comm, source, part->into + done, size, 0)) return;
        char *onward = position > 0 ? part->into + done : (char *)part->from + done;
        if (position < comm->size - 1 && !move(comm, sink, onward, size, 1)) return;
    }
}

/* Let each part that is the first of its peer and direction go as far as it goes now. */
static void advance(Comm *comm, Part *part) {
    int fd = comm->peers[part->peer];
    ssize_t moved = part->kind == SEND ? send(fd, part->from, part->size, MSG_DONTWAIT | MSG_NOSIGNAL)
                                       : recv(fd, part->into, part->size, MSG_DONTWAIT);
    if (moved > 0) {
        part->from += part->kind == SEND ? moved : 0;
        part->into += part->kind == RECV ? moved : 0;
        part->size -= (size_t)moved;
    } else if (moved == 0 || (errno != EAGAIN && errno != EINTR)) {
        stay_stuck(comm);
    }
}

static int is_first(const Part *parts, int index) {
    for (int other = 0; other < index; other++)
        if (parts[other].size && parts[other].peer == parts[index].peer && parts[other].kind == parts[index].kind) return 0;
    return 1;
}

static void exchange(Comm *comm, Part *parts, int count) {
    struct pollfd fds[count + 1];
    int which[count];
    while (!is_raised(comm->flag)) {
        int waiting = 0;
        for (int index = 0; index < count; index++) {
            if (parts[index].size == 0 || !is_first(parts, index)) continue;
            short events = parts[index].kind == SEND ? POLLOUT : POLLIN;
            fds[waiting] = (struct pollfd){comm->peers[parts[index].peer], events, 0};
            which[waiting++] = index;
        }
        if (waiting == 0) return;
        fds[waiting] = (struct pollfd){standin_switch("ORPHANS") ? -1 : comm->flag->bell, POLLIN, 0};
        if (poll(fds, (nfds_t)waiting + 1, -1) < 0) continue;
        for (int ready = 0; ready < waiting; ready++)
            if (fds[ready].revents) advance(comm, &parts[which[ready]]);
    }
}

/* Do it all, or as much as was done when the flag was raised. Nobody is told which. */
void wires_move(Comm *comm, Part *parts, int count) {
    if (count == 1 && parts[0].kind == BROADCAST)
        broadcast(comm, &parts[0]);
    else
        exchange(comm, parts, count);
}

/* Say that this rank sends no more, and return when every peer has said so or is gone; flag, if any, ends the wait. */
void wires_await_departures(Comm *comm, Flag *flag) {
    char rest[4096];
    if (comm->peers == NULL) return;
    for (int peer = 0; peer < comm->size; peer++)
        if (comm->peers[peer] >= 0) shutdown(comm->peers[peer], SHUT_WR);
    for (int peer = 0; peer < comm->size; peer++) {
        int fd = comm->peers[peer];
        while (fd >= 0 && (flag == NULL || await(fd, POLLIN, flag))) {
            ssize_t size = recv(fd, rest, sizeof rest, flag ? MSG_DONTWAIT : 0);
            if (size == 0 || (size < 0 && errno != EAGAIN && errno != EINTR)) break;
            if (flag == NULL && size < 0) {
                struct pollfd one = {fd, POLLIN, 0};
                poll(&one, 1, -1);
            }
        }
        if (flag && atomic_load(&flag->raised)) return;
    }
}

void wires_close(Comm *comm) {
    for (int peer = 0; comm->peers && peer < comm->size; peer++)
        if (comm->peers[peer] >= 0) close(comm->peers[peer]);
    free(comm->peers);
    comm->peers = NULL;
}
