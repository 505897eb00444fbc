/* Simulates how long a pipeline takes for its microbatches; see pipeline_schedule.py. Schedules are
   not stored: the operation of a stage at each turn is computed from the number of the turn. */

#include <math.h>
#include <stddef.h>
#include <string.h>

static const double NOT_DONE = -1;

/* Number of rows of costs processed at once: the next operation is computed once for all. */
enum { LANES = 16 };
typedef double lanes[LANES];

struct pipeline {
    size_t stages, chunks; /* `chunks` per stage */
    size_t count;          /* microbatches */
};

struct operation {
    size_t part; /* index of the model chunk, in forward order */
    size_t microbatch;
    int is_backward;
};

/* The number of warm-up forwards of a stage. */
static size_t
num_ahead(const struct pipeline *pipeline, size_t stage)
{
    size_t ahead = pipeline->stages - 1 - stage;
    if (pipeline->chunks > 1)
        ahead = 2 * ahead + (pipeline->chunks - 1) * pipeline->stages;
    size_t forwards = pipeline->count * pipeline->chunks;
    return ahead < forwards ? ahead : forwards;
}

/* The operation of a stage at its `turn`, counted from 0. */
static struct operation
operation_of(const struct pipeline *pipeline, size_t stage, size_t turn)
{
    size_t ahead = num_ahead(pipeline, stage), forwards = pipeline->count * pipeline->chunks;
    size_t steady = 2 * (forwards - ahead);
    int is_backward;
    size_t number; /* among the forwards, or among the backwards, of the stage */
    if (turn < ahead) {
        is_backward = 0;
        number = turn;
    } else if (turn < ahead + steady) {
        is_backward = (turn - ahead) % 2 == 1;
        number = (turn - ahead) / 2 + (is_backward ? 0 : ahead);
    } else {
        is_backward = 1;
        number = turn - forwards;
    }
    /* Each group of microbatches goes through all chunks; with one chunk, all are one group. */
    size_t group = pipeline->chunks > 1 ? pipeline->stages : pipeline->count;
    size_t in_groups = number % (group * pipeline->chunks), chunk = in_groups / group;
    if (is_backward)
        chunk = pipeline->chunks - 1 - chunk;
    struct operation operation = {
        .part = chunk * pipeline->stages + stage,
        .microbatch = number / (group * pipeline->chunks) * group + in_groups % group,
        .is_backward = is_backward,
    };
    return operation;
}

/* When the input of an operation arrives; NOT_DONE in its first lane if that is not known yet.
   `ends` is [backward, part, microbatch]. The last part's backward needs only its own forward,
   which comes before it in the order of turns. */
static const double *
input_times(const struct pipeline *pipeline, struct operation operation, const lanes *ends)
{
    static const lanes at_once = {0};
    size_t parts = pipeline->stages * pipeline->chunks;
    if (operation.part == (operation.is_backward ? parts - 1 : 0))
        return at_once;
    size_t source = operation.is_backward ? parts + operation.part + 1 : operation.part - 1;
    return ends[source * pipeline->count + operation.microbatch];
}

/* Runs an operation once the stage is ready and `input` has arrived; absent microbatches cost -inf
   and take no time. */
static void
work(double *restrict clock, const double *restrict input, const double *restrict cost,
     double factor, double *restrict end)
{
    for (int lane = 0; lane < LANES; lane++) {
        double start = clock[lane] > input[lane] ? clock[lane] : input[lane];
        double done = start + factor * cost[lane];
        clock[lane] = clock[lane] > done ? clock[lane] : done;
        end[lane] = clock[lane];
    }
}

/* Every stage runs its operations in order, each once its input is known, until all are done. */
static void
simulate(const struct pipeline *pipeline, const lanes *costs, lanes *ends, lanes *clocks,
         size_t *turn)
{
    size_t parts = pipeline->stages * pipeline->chunks;
    size_t turns = 2 * pipeline->count * pipeline->chunks;
    for (size_t i = 0; i < 2 * parts * pipeline->count; i++)
        ends[i][0] = NOT_DONE;
    memset(clocks, 0, pipeline->stages * sizeof *clocks);
    memset(turn, 0, pipeline->stages * sizeof *turn);
    for (size_t left = turns * pipeline->stages; left;) {
        for (size_t stage = 0; stage < pipeline->stages; stage++) {
            for (; turn[stage] < turns; turn[stage]++, left--) {
                struct operation operation = operation_of(pipeline, stage, turn[stage]);
                const double *input = input_times(pipeline, operation, ends);
                if (input[0] == NOT_DONE)
                    break;
                size_t row = operation.is_backward * parts + operation.part;
                work(clocks[stage], input, costs[operation.microbatch],
                     (operation.is_backward ? 2.0 : 1.0) / pipeline->chunks,
                     ends[row * pipeline->count + operation.microbatch]);
            }
        }
    }
}

/* Writes the time of each of `rows` rows of `count` costs, where -inf marks absent microbatches.
   With several chunks, `count` must be a multiple of `stages`, or a stage waits forever.
   `lane_costs` has room for `count` lanes, `ends` for 2 x stages x chunks x count, `clocks` for
   `stages`. */
void
time_rows(const double *costs, size_t rows, size_t count, size_t stages, size_t chunks,
          lanes *lane_costs, lanes *ends, lanes *clocks, size_t *turn, double *times)
{
    struct pipeline pipeline = {.stages = stages, .chunks = chunks, .count = count};
    for (size_t first = 0; first < rows; first += LANES) {
        size_t used = rows - first < LANES ? rows - first : LANES;
        for (size_t i = 0; i < count; i++)
            for (size_t lane = 0; lane < LANES; lane++)
                lane_costs[i][lane] = lane < used ? costs[(first + lane) * count + i] : -INFINITY;
        simulate(&pipeline, lane_costs, ends, clocks, turn);
        for (size_t lane = 0; lane < used; lane++) {
            times[first + lane] = 0;
            for (size_t stage = 0; stage < stages; stage++)
                if (clocks[stage][lane] > times[first + lane])
                    times[first + lane] = clocks[stage][lane];
        }
    }
}
