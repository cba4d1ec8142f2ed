/* Streams: a thread each, which runs what was started on it in order. Groups: what starts together. Faults. */

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "standin.h"

/* The operations of one group on one communicator and stream. */
struct task {
    struct ncclComm *comm;
    struct operation *operations;
    uint64_t turn;
    struct task *next;
};

struct stream {
    pthread_mutex_t lock;
    pthread_cond_t news;
    struct task *first, *last;
    uint64_t started;
    _Atomic uint64_t over;
};

static _Thread_local int depth;
static _Thread_local struct operation *group, **group_end;

static void pause_for(double seconds) {
    struct timespec time = {(time_t)seconds, (long)((seconds - (time_t)seconds) * 1e9)};
    nanosleep(&time, NULL);
}

/* ---- faults ------------------------------------------------------------------------------------------------------ */

static _Atomic int fault;          /* 0 none, else the letter given */
static _Atomic long long countdown; /* operations until it happens */
static double fault_seconds;

/* Of this process: 'd' sleep up to `seconds` before every operation, drawn by the seed `nth`; at the nth operation from
   now on (0 is the next) 'h' never perform it, 'e' report a system error, 'k' kill the process. */
void standinFault(char what, long long nth, double seconds) {
    fault_seconds = seconds;
    atomic_store(&countdown, nth);
    if (what == 'd') srand48(nth);
    atomic_store(&fault, what);
}

static void suffer(struct ncclComm *comm) {
    int what = atomic_load(&fault);
    if (what == 'd') pause_for(drand48() * fault_seconds);
    if (what == 0 || what == 'd' || atomic_fetch_sub(&countdown, 1) != 0) return;
    if (what == 'k') kill(getpid(), SIGKILL);
    if (what == 'e') fail(comm, ncclSystemError, "injected: the network went away");
    while (what == 'h' && !failed(comm)) pause_for(0.001);
}

/* ---- streams ----------------------------------------------------------------------------------------------------- */

uint64_t take_turn(struct ncclComm *comm) { return atomic_fetch_add(&comm->issued, 1); }

void await_turn(struct ncclComm *comm, uint64_t turn) {
    while (atomic_load(&comm->ended) != turn) pause_for(0.0001);
}

static void perform(struct task *task) {
    await_turn(task->comm, task->turn);
    for (struct operation *operation = task->operations; operation; operation = operation->next) suffer(task->comm);
    run(task->comm, task->operations);
    atomic_fetch_add(&task->comm->ended, 1);
    for (struct operation *operation = task->operations, *next; operation; operation = next) {
        next = operation->next;
        free(operation);
    }
    free(task);
}

static void *serve(void *argument) {
    struct stream *stream = argument;
    for (;;) {
        pthread_mutex_lock(&stream->lock);
        while (!stream->first) pthread_cond_wait(&stream->news, &stream->lock);
        struct task *task = stream->first;
        stream->first = task->next;
        pthread_mutex_unlock(&stream->lock);
        perform(task);
        atomic_fetch_add(&stream->over, 1);
    }
    return NULL;
}

void *pipertStreamCreate(void) {
    struct stream *stream = calloc(1, sizeof *stream);
    pthread_t thread;
    pthread_mutex_init(&stream->lock, NULL);
    pthread_cond_init(&stream->news, NULL);
    if (pthread_create(&thread, NULL, serve, stream)) return NULL;
    pthread_detach(thread);
    return stream;
}

uint64_t pipertStreamMark(void *argument) {
    struct stream *stream = argument;
    pthread_mutex_lock(&stream->lock);
    uint64_t mark = stream->started;
    pthread_mutex_unlock(&stream->lock);
    return mark;
}

int pipertStreamReached(void *stream, uint64_t mark) { return atomic_load(&((struct stream *)stream)->over) >= mark; }

static void submit(struct stream *stream, struct task *task) {
    pthread_mutex_lock(&stream->lock);
    if (stream->first) stream->last->next = task;
    else stream->first = task;
    stream->last = task;
    stream->started++;
    pthread_cond_signal(&stream->news);
    pthread_mutex_unlock(&stream->lock);
}

/* ---- groups ------------------------------------------------------------------------------------------------------ */

/* Add to the group that is open; alone it is a group of its own. */
ncclResult_t enqueue(struct operation given) {
    if (!given.stream || (failed(given.comm) && atomic_load(&given.comm->state) != ncclInProgress))
        return given.stream ? ncclRemoteError : ncclInvalidArgument;
    struct operation *operation = malloc(sizeof *operation);
    ncclGroupStart();
    *operation = given;
    operation->next = NULL;
    *group_end = operation;
    group_end = &operation->next;
    return ncclGroupEnd();
}

ncclResult_t ncclGroupStart(void) {
    if (depth++ == 0) {
        group = NULL;
        group_end = &group;
    }
    return ncclSuccess;
}

/* Take from the group all that goes where its first operation goes. */
static struct operation *bundle(void) {
    struct operation *result = NULL, **end = &result, **place = &group;
    struct ncclComm *comm = group->comm;
    void *stream = group->stream;
    while (*place) {
        struct operation *operation = *place;
        if (operation->comm == comm && operation->stream == stream) {
            *place = operation->next;
            operation->next = NULL;
            *end = operation;
            end = &operation->next;
        } else {
            place = &operation->next;
        }
    }
    return result;
}

ncclResult_t ncclGroupEnd(void) {
    if (depth == 0) return ncclInvalidUsage;
    if (--depth) return ncclSuccess;
    while (group) {
        struct task *task = calloc(1, sizeof *task);
        task->operations = bundle();
        task->comm = task->operations->comm;
        task->turn = take_turn(task->comm);
        submit(task->operations->stream, task);
    }
    return ncclSuccess;
}
