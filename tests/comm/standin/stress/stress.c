/* Four processes that exchange groups of messages and run collectives of random kinds and sizes over the stand-in, on two
   communicators at once, and check every number: to be built with sanitizers. Usage: stress ROUNDS SEED */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../standin.h"

#define RANKS 4
#define MOST 90000
#define CHECK(call)                                                                                                   \
    do {                                                                                                              \
        ncclResult_t called = (call);                                                                                 \
        if (called != ncclSuccess && called != ncclInProgress) fault(#call ": ", ncclGetLastError(NULL));                 \
    } while (0)

void *pipertStreamCreate(void);
uint64_t pipertStreamMark(void *stream);
int pipertStreamReached(void *stream, uint64_t mark);

static int rank;

static void fault(const char *what, const char *more) {
    fprintf(stderr, "rank %d: %s%s\n", rank, what, more);
    exit(1);
}

/* The same numbers on every rank. */
static uint64_t state;
static int draw(int below) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (int)((state >> 33) % (uint64_t)below);
}

static void settle(ncclComm_t comm) {
    ncclResult_t code = ncclInProgress;
    while (code == ncclInProgress) {
        CHECK(ncclCommGetAsyncError(comm, &code));
        usleep(50);
    }
    if (code != ncclSuccess) fault("a communicator failed: ", ncclGetLastError(comm));
}

static void finish(ncclComm_t comm, void *stream) {
    uint64_t mark = pipertStreamMark(stream);
    while (!pipertStreamReached(stream, mark)) usleep(50);
    settle(comm);
}

/* One rank's buffers. A value says who has written it, where and in which round. */
static float from[RANKS * MOST], to[RANKS * MOST];

static float value(int writer, int place, int round) { return (float)(writer * 1000 + place % 97 + round % 13); }

static void fill(int count, int round) {
    for (int i = 0; i < count; i++) from[i] = value(rank, i, round);
}

static void expect(float found, float wanted, const char *where) {
    if (found != wanted) {
        char text[80];
        snprintf(text, sizeof text, "%g, not %g", found, wanted);
        fault(where, text);
    }
}

/* In one group: to the right, to the left, and from both; a second message each way where the round is odd. */
static void exchange(ncclComm_t comm, int me, int ranks, void *stream, int count, int round) {
    int right = (me + 1) % ranks, left = (me + ranks - 1) % ranks, twice = 1 + round % 2;
    CHECK(ncclGroupStart());
    for (int turn = 0; turn < twice; turn++) {
        CHECK(ncclSend(from, count, ncclFloat32, right, comm, stream));
        CHECK(ncclRecv(to + (2 * turn) * MOST / 2, count / 2 + count % 2, ncclFloat32, right, comm, stream));
        CHECK(ncclSend(from, count / 2 + count % 2, ncclFloat32, left, comm, stream));
        CHECK(ncclRecv(to + (2 * turn + 1) * MOST / 2 + MOST, count, ncclFloat32, left, comm, stream));
    }
    CHECK(ncclGroupEnd());
}

static void collective(ncclComm_t comm, int ranks, void *stream, int kind, int count) {
    if (kind == 0) CHECK(ncclAllReduce(from, to, count, ncclFloat32, ncclSum, comm, stream));
    if (kind == 1) CHECK(ncclAllGather(from, to, count, ncclFloat32, comm, stream));
    if (kind == 2) CHECK(ncclReduceScatter(from, to, count, ncclFloat32, ncclSum, comm, stream));
    if (kind == 3) CHECK(ncclBroadcast(from, to, count, ncclFloat32, ranks - 1, comm, stream));
}

static void check(int first, int me, int ranks, int kind, int count, int round) {
    for (int i = 0; i < count; i += 1 + count / 50) {
        float sum = 0, part = 0;
        for (int other = 0; other < ranks; other++) {
            sum += value(first + other, i, round);
            part += value(first + other, me * count + i, round);
        }
        if (kind == 0) expect(to[i], sum, "all-reduce: ");
        if (kind == 1) expect(to[(ranks - 1) * count + i], value(first + ranks - 1, i, round), "all-gather: ");
        if (kind == 2) expect(to[i], part, "reduce-scatter: ");
        if (kind == 3) expect(to[i], value(first + ranks - 1, i, round), "broadcast: ");
    }
}

static void run_rank(ncclUniqueId id, int rounds) {
    ncclComm_t world, half = NULL;
    ncclConfig_t config = {sizeof config, NCCL_CONFIG_MAGIC, NCCL_CONFIG_VERSION, 0};
    CHECK(ncclCommInitRankConfig(&world, RANKS, id, rank, &config));
    settle(world);
    CHECK(ncclCommSplit(world, rank / 2, rank, &half, NULL));
    settle(world);
    settle(half);
    void *streams[2] = {pipertStreamCreate(), pipertStreamCreate()};
    for (int round = 0; round < rounds; round++) {
        int small = draw(2), count = 1 + draw(draw(3) ? 500 : MOST), kind = draw(6);
        ncclComm_t comm = small ? half : world;
        int me = small ? rank % 2 : rank, ranks = small ? 2 : RANKS;
        fill(kind == 2 ? ranks * count : count, round);
        if (kind < 4) {
            collective(comm, ranks, streams[small], kind, count);
            finish(comm, streams[small]);
            check(rank - me, me, ranks, kind, count, round);
        } else {
            count = count / 2 + 1;
            if (ranks > 2) exchange(comm, me, ranks, streams[small], count, round);
            finish(comm, streams[small]);
            if (ranks > 2) expect(to[MOST / 2 + MOST + count - 1], value((me + 3) % 4, count - 1, round), "message: ");
        }
    }
    CHECK(ncclCommFinalize(half));
    settle(half);
    CHECK(ncclCommFinalize(world));
    settle(world);
    CHECK(ncclCommDestroy(half));
    CHECK(ncclCommDestroy(world));
}

int main(int count, char **arguments) {
    ncclUniqueId id;
    if (count != 3 || ncclGetUniqueId(&id) != ncclSuccess) return 2;
    state = strtoull(arguments[2], NULL, 10);
    for (rank = 0; rank < RANKS; rank++)
        if (fork() == 0) {
            run_rank(id, atoi(arguments[1]));
            _exit(0);
        }
    int failures = 0, status;
    while (wait(&status) > 0) failures += status != 0;
    return failures != 0;
}
