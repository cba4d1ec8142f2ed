/* A stand-in for librccl on machines without a GPU: the nccl* functions over POSIX shared memory, for tests.

   What it keeps of the real thing: operations on a stream run in order, each alone, in the background; those of a
   group run together, once the group has ended; a message completes only with its other half (never buffered) and goes
   to the next receive of its pair, whatever that is for; operations of one communicator follow one another. So wrong
   orders hang or swap here as they do there. What it adds: two halves that do not fit are an error instead of a hang.

   Files: segment.c what the processes of a communicator share; progress.c how operations run; reduce.c arithmetic;
   streams.c streams, groups and faults; nccl.c the functions; stress/ a program that tests them. */

#pragma once

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "rccl.h"

#define RING ((size_t)1 << 17)
#define SLOT ((size_t)1 << 17)
#define NAME 120

enum kind { SEND, RECEIVE, ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST };

/* What an operation says of itself; its other half or its other ranks must say the same. */
struct header {
    enum kind kind;
    ncclDataType_t type;
    ncclRedOp_t op;
    int root;
    uint64_t count;
};

/* Messages from one rank to another. Each counter has one writer. */
struct channel {
    _Atomic uint64_t sends, receives, received; /* begun, begun, ended */
    _Atomic uint64_t head, tail;                /* bytes written and read, ever */
    struct header header;                       /* of the send that has begun last */
    unsigned char ring[RING];
};

/* One rank's part of a segment. */
struct member {
    _Atomic uint32_t bell, asleep;
    _Atomic uint64_t wrote, took; /* pieces of collectives, ever */
    struct header header;
    unsigned char slot[SLOT];
};

struct segment {
    _Atomic int size, joined, aborted; /* aborted: 1 + the rank that did */
};

struct ncclComm {
    struct segment *_Atomic segment; /* NULL until members and channels are there */
    struct member *members;   /* [size] */
    struct channel *channels; /* [from][to] */
    size_t bytes;
    char name[NAME];
    int rank, size, splits;
    _Atomic(ncclComm_t) *place;      /* of a part: the caller's, for the handle; written late, as in the real library */
    _Atomic int state;               /* an ncclResult_t; ncclInProgress until it is ready */
    _Atomic uint64_t issued, ended;  /* tasks: they run in the order in which they were issued, on whatever streams */
    uint64_t pieces;                 /* of collectives, so far */
    uint64_t *sends, *receives;      /* to and from each peer, so far */
};

struct operation {
    struct header header;
    const void *from;
    void *to;
    int peer, stage, over;
    size_t moved;
    int part; /* reduce-scatter and all-gather: whose part is being moved */
    struct ncclComm *comm;
    void *stream;
    struct operation *next;
};

/* segment.c */
void join(struct ncclComm *comm);
void leave(struct ncclComm *comm);
void ring(struct ncclComm *comm, int rank);
void ring_all(struct ncclComm *comm);
void doze(struct ncclComm *comm, uint32_t bell);
void fail(struct ncclComm *comm, ncclResult_t result, const char *format, ...);
int failed(struct ncclComm *comm);
const char *last_error(void);

/* progress.c */
void run(struct ncclComm *comm, struct operation *operations);

/* reduce.c */
size_t size_of(ncclDataType_t type);
void reduce(void *to, const void *const *rows, int count_rows, size_t count, ncclDataType_t type, ncclRedOp_t op);

/* streams.c */
ncclResult_t enqueue(struct operation operation);
uint64_t take_turn(struct ncclComm *comm);
void await_turn(struct ncclComm *comm, uint64_t turn);
