/* The nccl* functions. */

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "standin.h"

ncclResult_t ncclGetVersion(int *version) {
    *version = 21800;
    return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t result) {
    static const char *const TEXTS[] = {"no error", "unhandled cuda error", "unhandled system error", "internal error",
                                        "invalid argument", "invalid usage", "remote process exited or there was a network error",
                                        "operation in progress"};
    return (unsigned)result < sizeof TEXTS / sizeof *TEXTS ? TEXTS[result] : "unknown result code";
}

const char *ncclGetLastError(ncclComm_t comm) {
    (void)comm;
    return last_error();
}

/* ---- communicators ----------------------------------------------------------------------------------------------- */

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    unsigned long long number;
    if (getrandom(&number, sizeof number, 0) != sizeof number) return ncclSystemError;
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "/pipert-standin-%d-%llx", (int)getpid(), number);
    return ncclSuccess;
}

static void *begin(void *comm) {
    join(comm);
    return NULL;
}

/* Run now, or in the background where the configuration says so. */
static ncclResult_t start(struct ncclComm *comm, int blocking, void *(*work)(void *), void *argument) {
    if (blocking) {
        work(argument);
        return comm ? atomic_load(&comm->state) : ncclSuccess;
    }
    pthread_t thread;
    if (pthread_create(&thread, NULL, work, argument)) return ncclSystemError;
    pthread_detach(thread);
    return ncclInProgress;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *result, int ranks, ncclUniqueId id, int rank, ncclConfig_t *config) {
    if (ranks < 1 || rank < 0 || rank >= ranks || id.internal[0] != '/') return ncclInvalidArgument;
    if (config && config->magic != NCCL_CONFIG_MAGIC) return ncclInvalidArgument;
    struct ncclComm *comm = *result = calloc(1, sizeof *comm);
    snprintf(comm->name, sizeof comm->name, "%.100s", id.internal);
    comm->rank = rank;
    comm->size = ranks;
    atomic_store(&comm->state, ncclInProgress);
    return start(comm, !config || config->blocking, begin, comm);
}

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank) {
    return ncclCommInitRankConfig(comm, ranks, id, rank, NULL);
}

struct split {
    struct ncclComm *parent, *child;
    uint64_t turn;
    int color, key;
};

static void *divide(void *argument) {
    struct split *split = argument;
    struct ncclComm *parent = split->parent, *child = split->child;
    int own[2] = {split->color, split->key}, all[parent->size][2];
    struct operation gather = {.header = {ALL_GATHER, ncclInt32, ncclSum, 0, 2}, .from = own, .to = all, .comm = parent};
    await_turn(parent, split->turn);
    run(parent, &gather);
    atomic_fetch_add(&parent->ended, 1);
    int state = ncclInProgress;
    if (failed(parent)) {
        if (child) atomic_store(&child->state, ncclRemoteError);
    } else {
        if (child) {
            for (int rank = 0; rank < parent->size; rank++) {
                int before = all[rank][1] < split->key || (all[rank][1] == split->key && rank < parent->rank);
                child->size += all[rank][0] == split->color;
                child->rank += all[rank][0] == split->color && before;
            }
            join(child);
        }
    }
    if (child) atomic_store(child->place, child);
    if (!failed(parent)) atomic_compare_exchange_strong(&parent->state, &state, ncclSuccess);
    free(split);
    return NULL;
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *result, ncclConfig_t *config) {
    if (failed(comm) || color < NCCL_SPLIT_NOCOLOR) return failed(comm) ? ncclRemoteError : ncclInvalidArgument;
    struct split *split = malloc(sizeof *split);
    *split = (struct split){comm, NULL, take_turn(comm), color, key};
    comm->splits++;
    *result = NULL;
    if (color != NCCL_SPLIT_NOCOLOR) {
        split->child = calloc(1, sizeof *split->child);
        split->child->place = (_Atomic(ncclComm_t) *)result;
        snprintf(split->child->name, NAME, "%.80s.%d.%d", comm->name, comm->splits, color);
        atomic_store(&split->child->state, ncclInProgress);
    }
    atomic_store(&comm->state, ncclInProgress);
    struct ncclComm *child = split->child;
    return start(child, config && config->blocking, divide, split);
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *result) {
    *result = failed(comm) ? failed(comm) : atomic_load(&comm->state);
    return ncclSuccess;
}

static void *drain(void *argument) {
    struct ncclComm *comm = argument;
    while (atomic_load(&comm->ended) != atomic_load(&comm->issued)) usleep(100);
    int state = ncclInProgress;
    atomic_compare_exchange_strong(&comm->state, &state, ncclSuccess);
    return NULL;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
    int state = ncclSuccess;
    if (!atomic_compare_exchange_strong(&comm->state, &state, ncclInProgress)) return failed(comm);
    return start(comm, 0, drain, comm);
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    drain(comm);
    leave(comm);
    return ncclSuccess;
}

/* Everybody's operations end. The memory stays: a thread may still be in it. */
ncclResult_t ncclCommAbort(ncclComm_t comm) {
    if (comm->segment) {
        int nobody = 0;
        atomic_compare_exchange_strong(&comm->segment->aborted, &nobody, 1 + comm->rank);
    }
    if (!failed(comm) || atomic_load(&comm->state) == ncclInProgress) fail(comm, ncclRemoteError, "aborted by rank %d", comm->rank);
    else ring_all(comm);
    return ncclSuccess;
}

/* ---- operations -------------------------------------------------------------------------------------------------- */

static ncclResult_t message(enum kind kind, const void *from, void *to, size_t count, ncclDataType_t type, int peer,
                            ncclComm_t comm, void *stream) {
    if (peer < 0 || peer >= comm->size || !size_of(type)) return ncclInvalidArgument;
    return enqueue((struct operation){
        .header = {kind, type, ncclSum, 0, count}, .from = from, .to = to, .peer = peer, .comm = comm, .stream = stream});
}

static ncclResult_t collective(struct header header, const void *from, void *to, ncclComm_t comm, void *stream) {
    if (!size_of(header.type) || header.root < 0 || header.root >= comm->size) return ncclInvalidArgument;
    return enqueue((struct operation){.header = header, .from = from, .to = to, .comm = comm, .stream = stream});
}

ncclResult_t ncclSend(const void *from, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, void *stream) {
    return message(SEND, from, NULL, count, type, peer, comm, stream);
}

ncclResult_t ncclRecv(void *to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, void *stream) {
    return message(RECEIVE, NULL, to, count, type, peer, comm, stream);
}

ncclResult_t ncclAllReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, void *stream) {
    return collective((struct header){ALL_REDUCE, type, op, 0, count}, from, to, comm, stream);
}

ncclResult_t ncclReduceScatter(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, void *stream) {
    return collective((struct header){REDUCE_SCATTER, type, op, 0, count}, from, to, comm, stream);
}

ncclResult_t ncclAllGather(const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t comm,
                           void *stream) {
    return collective((struct header){ALL_GATHER, type, ncclSum, 0, count}, from, to, comm, stream);
}

ncclResult_t ncclBroadcast(const void *from, void *to, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           void *stream) {
    return collective((struct header){BROADCAST, type, ncclSum, root, count}, from, to, comm, stream);
}
